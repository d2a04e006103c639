"""What a caller may say about speculation."""

from __future__ import annotations

from typing import Literal

from attrs import field, frozen

from meshpipe.errors import UsageError
from meshpipe.speculation.ngram import NgramConfig
from meshpipe.speculation.policy import DEPTHS, WIDTHS

MODES = ("auto", "ngram", "off")


@frozen
class Speculation:
    """How far to run ahead of the model. Changes the speed of a generation, never its tokens.

    mode: "off" sends one window at a time with nothing proposed; "ngram" proposes from the text itself; "auto"
        picks what the model has and what pays.
    depth: windows in flight, and width: tokens of a window, both a
    fixed number or "auto", which follows the measured costs of the stages and the links and the acceptance so
    far. `max_width` bounds an automatic width. Raises UsageError for what is out of bounds.
    """

    mode: str = "auto"
    depth: int | Literal["auto"] = "auto"
    width: int | Literal["auto"] = "auto"
    max_width: int = 16
    ngram: NgramConfig = field(factory=NgramConfig)

    def __attrs_post_init__(self) -> None:
        if self.mode not in MODES:
            raise UsageError(f"speculation mode is {self.mode!r}: it must be one of {', '.join(MODES)}")
        for name, (low, high) in (("depth", DEPTHS), ("width", WIDTHS), ("max_width", WIDTHS)):
            value = getattr(self, name)
            if value == "auto" and name != "max_width":
                continue
            if not isinstance(value, int) or not low <= value <= high:
                raise UsageError(f"{name} is {value!r}: it must be 'auto' or an integer from {low} to {high}")
