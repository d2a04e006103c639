"""What a setting may be. The same reader takes text (environment, flags) and typed values (TOML)."""

from __future__ import annotations

import math
from typing import Any, Protocol

from attrs import frozen


class Kind(Protocol):
    """One kind of value."""

    @property
    def allowed(self) -> str:
        """What may stand there, to follow "it must be"."""

    @property
    def metavar(self) -> str:
        """How help writes it."""

    def read(self, value: Any) -> Any:
        """The value, from text or as it is. Raises ValueError or TypeError if it is not allowed."""


@frozen
class Integer:
    """A whole number, both bounds included; with `auto` also the word."""

    low: int
    high: int
    auto: bool = False

    @property
    def allowed(self) -> str:
        return f"{'auto or ' if self.auto else ''}an integer from {self.low} to {self.high}"

    @property
    def metavar(self) -> str:
        return "N|auto" if self.auto else "N"

    def read(self, value: Any) -> Any:
        if self.auto and value == "auto":
            return value
        number = int(value) if isinstance(value, str) else value
        if isinstance(number, bool) or not isinstance(number, int) or not self.low <= number <= self.high:
            raise ValueError
        return number


@frozen
class Number:
    """A finite number, both bounds included."""

    low: float = -math.inf
    high: float = math.inf

    @property
    def allowed(self) -> str:
        if self.high < math.inf:
            return f"a number from {self.low:g} to {self.high:g}"
        return "a number" if self.low == -math.inf else f"a number of {self.low:g} or more"

    metavar = "X"

    def read(self, value: Any) -> float:
        if isinstance(value, bool):
            raise TypeError
        number = float(value)
        if not math.isfinite(number) or not self.low <= number <= self.high:
            raise ValueError
        return number


@frozen
class Choice:
    """One of some words."""

    options: tuple[str, ...]

    @property
    def allowed(self) -> str:
        return f"one of {', '.join(self.options)}"

    @property
    def metavar(self) -> str:
        return f"{{{','.join(self.options)}}}"

    def read(self, value: Any) -> str:
        if value not in self.options:
            raise ValueError
        return str(value)


_SWITCH = {
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}


@frozen
class Switch:
    """Yes or no."""

    allowed = "true or false"
    metavar = "true|false"

    def read(self, value: Any) -> bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in _SWITCH:
            return _SWITCH[value.lower()]
        raise ValueError


@frozen
class Text:
    """Any text but the empty one; `metavar` says of what sort, and `like` how it looks."""

    metavar: str = "TEXT"
    like: str = ""

    @property
    def allowed(self) -> str:
        return f"text like {self.like}" if self.like else "text that is not empty"

    def read(self, value: Any) -> str:
        if not isinstance(value, str) or not value:
            raise ValueError
        return value


@frozen
class File(Text):
    """A path. Said in a file, a relative one begins where that file is; else in the working directory."""

    metavar: str = "FILE"

    @property
    def allowed(self) -> str:
        return "a path"


@frozen
class Many:
    """Several of one kind: a list, or text with commas."""

    of: Kind

    @property
    def allowed(self) -> str:
        return f"a list of which each is {self.of.allowed}"

    @property
    def metavar(self) -> str:
        return f"{self.of.metavar},…"

    def read(self, value: Any) -> tuple[Any, ...]:
        parts = value.split(",") if isinstance(value, str) else value
        if not isinstance(parts, (list, tuple)) or not parts:
            raise ValueError
        return tuple(self.of.read(part) for part in parts)
