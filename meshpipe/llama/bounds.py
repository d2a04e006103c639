"""Numbers within bounds, as grammars: digit by digit, so that what is written lies between them exactly.

At most 15 digits are written, and no exponent: such decimals and the doubles that readers make of them are in the
same order, so that a bound that is left out stays left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal

from attrs import frozen

from meshpipe.errors import UsageError

DIGITS = 15
MOST = 10**DIGITS - 1
MAX_MODULUS = 100


@frozen
class Bound:
    """Where a range ends; `open`: the value itself is outside."""

    value: Decimal
    open: bool


LOWEST, HIGHEST = Bound(Decimal(-MOST), False), Bound(Decimal(MOST), False)


def integers(low: Bound, high: Bound) -> str:
    """A GBNF expression of the integers in a range. Raises UsageError if there is none."""
    first = int(low.value.to_integral_value("ROUND_CEILING"))
    last = int(high.value.to_integral_value("ROUND_FLOOR"))
    first += low.open and first == low.value
    last -= high.open and last == high.value
    found = []
    if first < 0:
        found += [f'"-" {digits}' for digits in _naturals(max(1, -last), -first)]
    if last >= 0:
        found += _naturals(max(0, first), last)
    if not found:
        raise UsageError("no integer lies between the bounds")
    return " | ".join(found)


def decimals(low: Bound, high: Bound) -> str:
    """A GBNF expression of the numbers in a range. Raises UsageError if there is none of so few digits."""
    zero = Decimal(0)
    found = []
    if low.value < 0:
        nearest = (
            Bound(-high.value, high.open) if high.value < 0 else Bound(zero, not high.value and high.open)
        )
        found += [f'"-" {digits}' for digits in _magnitudes(nearest, Bound(-low.value, low.open))]
    if high.value >= 0:
        found += _magnitudes(low if low.value >= 0 else Bound(zero, False), high)
    if not found:
        raise UsageError(f"no number of at most {DIGITS} digits lies between the bounds")
    return " | ".join(found)


def multiples(names: Sequence[str]) -> tuple[list[str], str]:
    """The integers that a modulus divides: rules with these names, one a remainder, and an expression that uses them.

    A rule says what may follow digits that leave its remainder.
    """

    def step(remainder: int, first: int) -> str:
        nexts: dict[str, str] = {}
        for digit in range(first, 10):
            target = names[(10 * remainder + digit) % len(names)]
            nexts[target] = nexts.get(target, "") + str(digit)
        return " | ".join(f"[{digits}] {target}" for target, digits in nexts.items())

    rules = [step(remainder, 0) for remainder in range(len(names))]
    return ["| " + rules[0], *rules[1:]], f'"0" | "-"? ({step(0, 1)})'


def _naturals(low: int, high: int) -> list[str]:
    """Alternatives, by the number of digits."""
    found = []
    for count in range(len(str(low)), len(str(high)) + 1):
        least, most = max(low, 10 ** (count - 1) if count > 1 else 0), min(high, 10**count - 1)
        if least <= most:
            found.append(_between(str(least), str(most)))
    return found


def _between(low: str, high: str) -> str:
    """Digits, as many as both have, from the one to the other."""
    rest = len(low) - 1
    if rest < 0:
        return ""
    if low[0] == high[0]:
        return f'"{low[0]}" {_between(low[1:], high[1:])}'
    first, last = int(low[0]), int(high[0])
    parts = []
    if low[1:].strip("0"):
        parts.append(f'"{first}" {_between(low[1:], "9" * rest)}')
        first += 1
    top = ""
    if high[1:].strip("9"):
        top = f'"{last}" {_between("0" * rest, high[1:])}'
        last -= 1
    if first <= last:
        parts.append(f"[{first}-{last}]{_any(rest, rest)}")
    return f"({' | '.join(filter(None, (*parts, top)))})"


def _magnitudes(low: Bound, high: Bound) -> list[str]:
    """Alternatives for decimals from 0 on, by what stands before the point."""
    (whole_low, part_low), (whole_high, part_high) = _split(low.value), _split(high.value)
    if low.value > high.value or whole_low > MOST:
        return []
    if whole_low == whole_high:
        return _with_part(whole_low, _Edge(part_low, low.open), _Edge(part_high, high.open))
    found = _with_part(whole_low, _Edge(part_low, low.open), None)
    for count in range(len(str(whole_low + 1)), len(str(whole_high - 1)) + 1):
        least = max(whole_low + 1, 10 ** (count - 1) if count > 1 else 0)
        most = min(whole_high - 1, 10**count - 1)
        if least <= most:
            room = DIGITS - count
            part = f' ("." {_any(1, room)})?' if room else ""
            found.append(_between(str(least), str(most)) + part)
    return found + _with_part(whole_high, None, _Edge(part_high, high.open))


def _split(value: Decimal) -> tuple[int, str]:
    """What stands before the point, and behind it without zeros at the end."""
    whole, _, part = format(value, "f").partition(".")
    return int(whole), part.rstrip("0")


@frozen
class _Edge:
    """A bound of the digits behind the point, or of what is left of them."""

    digits: str
    open: bool

    @property
    def digit(self) -> int:
        return int(self.digits[0]) if self.digits else 0

    def rest(self) -> _Edge:
        return _Edge(self.digits[1:], self.open)


def _with_part(whole: int, low: _Edge | None, high: _Edge | None) -> list[str]:
    """Decimals with this number before the point: none or one alternative."""
    digits = f'"{whole}"'
    parts = _further(low, high, DIGITS - len(str(whole)))
    if _may_end(low, high):
        return [f'{digits} ("." ({" | ".join(parts)}))?' if parts else digits]
    return [f'{digits} "." ({" | ".join(parts)})'] if parts else []


def _may_end(low: _Edge | None, high: _Edge | None) -> bool:
    """Whether zeros, that is no further digits, lie between the edges."""
    above = low is None or not (low.digits or low.open)
    return above and (high is None or bool(high.digits) or not high.open)


def _further(low: _Edge | None, high: _Edge | None, room: int) -> list[str]:
    """Alternatives for one digit or more between the edges, `room` at most."""
    if not room:
        return []
    first, last = low.digit if low is not None else 0, high.digit if high is not None else 9
    found = []
    inside: list[int] = []  # digits behind which anything may follow
    for digit in range(first, last + 1):
        below = low.rest() if low is not None and digit == first else None
        above = high.rest() if high is not None and digit == last else None
        if below is not None and not (below.digits or below.open):
            below = None
        if below is None and above is None:
            inside.append(digit)
            continue
        parts = _further(below, above, room - 1)
        if _may_end(below, above):
            found.append(f'"{digit}" ({" | ".join(parts)})?' if parts else f'"{digit}"')
        elif parts:
            found.append(f'"{digit}" ({" | ".join(parts)})')
    if inside:
        found.append(f"[{inside[0]}-{inside[-1]}]{_any(0, room - 1)}")
    return found


def _any(least: int, most: int) -> str:
    if most == 0:
        return ""
    return f" [0-9]{{{least}}}" if least == most else f" [0-9]{{{least},{most}}}"
