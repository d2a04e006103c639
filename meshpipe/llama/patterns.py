r"""Regular expressions of JSON schemas (`pattern`) as grammars of what stands between the quotes of a JSON string.

Schemas mean ECMA-262's expressions, Python's validators read them as Python's. Where the two differ (what \d, \w, \s
and the dot cover), only characters on which they agree are written, so that every validator takes the output.
Supported is what is regular: characters, classes, groups, alternatives, repeats, and anchors at the ends; an end
without an anchor lets any text stand there. Look-around, back-references and \b are refused.
"""

from __future__ import annotations

from attrs import evolve, frozen

from meshpipe.errors import UsageError

MAX_LENGTH = 10_000
MAX_REPEATS = 500
MAX_POSITIONS = 500
"""Characters of a pattern when its repeats are written out."""
MAX_GROUPS = 32
"""Groups within groups."""
LAST = 0x10FFFF
Ranges = tuple[tuple[int, int], ...]
"""Code points: sorted, apart from each other, both ends included."""


@frozen
class Chars:
    """One character out of `ranges`."""

    ranges: Ranges


@frozen
class Then:
    """One after the other."""

    parts: tuple[Node, ...]


@frozen
class Either:
    """One of them."""

    branches: tuple[Node, ...]


@frozen
class Times:
    """So many in a row; without `most` any number."""

    part: Node
    least: int
    most: int | None


Node = Chars | Then | Either | Times


def parse(pattern: str) -> Node:
    """The whole strings in which the pattern is found. Raises UsageError for what is not supported."""
    if len(pattern) > MAX_LENGTH:
        raise UsageError(f"the pattern is too large: it has more than {MAX_LENGTH} characters")
    node = _Parser(pattern).whole()
    if _positions(node) > MAX_POSITIONS:
        raise UsageError(f"the pattern is too large: written out it has more than {MAX_POSITIONS} characters")
    return node


def bounded(node: Node, least: int, most: int | None) -> Node:
    """The same with so many characters.

    Raises UsageError unless the pattern has these bounds already, or is one class repeated.
    """
    short, long = _lengths(node)
    if short >= least and (most is None or (long is not None and long <= most)):
        return node
    if isinstance(node, Then) and len(node.parts) == 1:
        return bounded(node.parts[0], least, most)
    if isinstance(node, Times) and isinstance(node.part, Chars):
        low = max(node.least, least)
        high = min((bound for bound in (node.most, most) if bound is not None), default=None)
        if high is None or low <= high:
            return evolve(node, least=low, most=high)
    raise UsageError("a length beside such a pattern is not supported: write it into the pattern, as {1,20}")


# ---- characters ---------------------------------------------------------------------------------------


def ranges(*found: tuple[int, int]) -> Ranges:
    """In order, and joined where they touch."""
    joined: list[tuple[int, int]] = []
    for low, high in sorted(found):
        if joined and low <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(joined[-1][1], high))
        else:
            joined.append((low, high))
    return tuple(joined)


def outside(found: Ranges) -> Ranges:
    """All other code points."""
    edges = [-1, *(edge for low, high in found for edge in (low - 1, high + 1)), LAST + 1]
    gaps = ((edges[at] + (at == 0), edges[at + 1] - (at + 2 == len(edges))) for at in range(0, len(edges), 2))
    return tuple((low, high) for low, high in gaps if low <= high)


def _both(one: Ranges, other: Ranges) -> Ranges:
    return outside(ranges(*outside(one), *outside(other)))


@frozen
class _Set:
    """A class: characters that are in it for every reader, and those that may be for some."""

    sure: Ranges
    possible: Ranges

    def negated(self) -> _Set:
        return _Set(outside(self.possible), outside(self.sure))


def _set(*found: tuple[int, int]) -> _Set:
    return _Set(ranges(*found), ranges(*found))


def _join(sets: list[_Set]) -> _Set:
    return _Set(
        ranges(*(one for part in sets for one in part.sure)),
        ranges(*(one for part in sets for one in part.possible)),
    )


_WORD = ((48, 57), (65, 90), (95, 95), (97, 122))
_SPACE = ((9, 13), (32, 32))
_ODD_SPACES = (
    (0x1C, 0x1F), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029),
    (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF),
)  # fmt: skip
_SHORT = {
    "d": _Set(ranges((48, 57)), ranges((48, 57), (0x660, LAST))),  # Python's: digits of every script
    "w": _Set(ranges(*_WORD), ranges(*_WORD, (0x80, LAST))),  # Python's: letters of every script
    "s": _Set(ranges(*_SPACE), ranges(*_SPACE, *_ODD_SPACES)),
}
_SHORT |= {name.upper(): one.negated() for name, one in _SHORT.items()}
_DOT = _Set(ranges((10, 10)), ranges((10, 10), (13, 13), (0x2028, 0x2029))).negated()
_NAMED = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "0": 0}
_SYNTAX = set("^$\\.*+?()[]{}|/-")
_RAW = outside(ranges((0, 31), (34, 34), (92, 92), (127, 127), (0xD800, 0xDFFF)))
"""What stands for itself in a JSON string here."""
_ESCAPED = {34: '\\"', 92: "\\\\", 8: "\\b", 12: "\\f", 10: "\\n", 13: "\\r", 9: "\\t"}
ANY = Chars(ranges(*_RAW, *((one, one) for one in _ESCAPED)))


def writable(found: Ranges) -> Ranges:
    """Those of the characters that are written here. Raises UsageError if none is."""
    rest = _both(found, ANY.ranges)
    if not rest:
        raise UsageError("a class of the pattern has only characters that are not written here")
    return rest


def written(found: Ranges) -> str:
    """The GBNF alternatives for one character, out of those that are written, as JSON."""
    inside = "".join(
        f"\\U{low:08X}" + (f"-\\U{high:08X}" if high > low else "") for low, high in _both(found, _RAW)
    )
    escaped = [
        '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
        for code, text in _ESCAPED.items()
        if any(low <= code <= high for low, high in found)
    ]
    return " | ".join(([f"[{inside}]"] if inside else []) + escaped)


# ---- sizes --------------------------------------------------------------------------------------------


def _lengths(node: Node) -> tuple[int, int | None]:
    """Characters of the shortest and of the longest text, None for any number."""
    if isinstance(node, Chars):
        return 1, 1
    if isinstance(node, Times):
        short, long = _lengths(node.part)
        if node.most is None or long is None:
            return short * node.least, 0 if long == 0 or node.most == 0 else None
        return short * node.least, long * node.most
    inner = [_lengths(part) for part in (node.parts if isinstance(node, Then) else node.branches)]
    shorts, longs = [short for short, _ in inner], [long for _, long in inner if long is not None]
    bounded = len(longs) == len(inner)
    if isinstance(node, Then):
        return sum(shorts), sum(longs) if bounded else None
    return min(shorts), max(longs) if bounded else None


def _positions(node: Node) -> int:
    if isinstance(node, Chars):
        return 1
    if isinstance(node, Times):
        return (1 + _positions(node.part)) * max(1, node.least, node.most or 0)
    return 1 + sum(map(_positions, node.parts if isinstance(node, Then) else node.branches))


# ---- parsing ------------------------------------------------------------------------------------------


class _Parser:
    """By recursive descent; `_at` is where it looks."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0

    def whole(self) -> Node:
        branches = [self._anchored()]
        while self._take("|"):
            branches.append(self._anchored())
        if self._at < len(self._text):
            raise self._error("there is no group to close")
        return branches[0] if len(branches) == 1 else Either(tuple(branches))

    def _anchored(self) -> Node:
        """An alternative of the whole pattern: any text stands where it has no anchor."""
        begins = self._take("^")
        inside = self._sequence()
        ends = self._take("$")
        rest = Times(ANY, 0, None)
        return Then((*([] if begins else [rest]), *inside, *([] if ends else [rest])))

    def _alternatives(self) -> Node:
        branches = [Then(self._sequence())]
        while self._take("|"):
            branches.append(Then(self._sequence()))
        return branches[0] if len(branches) == 1 else Either(tuple(branches))

    def _sequence(self) -> tuple[Node, ...]:
        parts: list[Node] = []
        while (next_ := self._peek()) and next_ not in "|)":
            if next_ == "$" and not self._depth and self._text[self._at + 1 : self._at + 2] in ("", "|"):
                break
            parts.append(self._repeated(self._atom()))
        return tuple(parts)

    def _repeated(self, node: Node) -> Node:
        begin = self._at
        most: int | None = None
        if self._take("*"):
            least = 0
        elif self._take("+"):
            least = 1
        elif self._take("?"):
            least, most = 0, 1
        elif self._take("{"):
            least = most = self._number()
            if self._take(","):
                most = None if self._peek() == "}" else self._number()
            if not self._take("}"):
                raise self._error("a repeat is {n}, {n,} or {n,m}")
        else:
            return node
        self._take("?")  # lazy: the same texts
        if self._peek() and self._peek() in "*+?{":
            raise self._error("a repeat of a repeat needs a group")
        if max(least, most or 0) > MAX_REPEATS or (most is not None and most < least):
            raise self._error(f"repeats go from 0 to {MAX_REPEATS}, the lower bound first", begin)
        if most is None and _lengths(node)[0] == 0:
            raise self._error("what may be empty is repeated without end", begin)
        return Times(node, least, most)

    def _number(self) -> int:
        begin = self._at
        while self._peek() and self._peek() in "0123456789":
            self._at += 1
        digits = self._text[begin : self._at]
        if not digits or len(digits) > 4:
            raise self._error("a repeat is {n}, {n,} or {n,m}, with small numbers", begin)
        return int(digits)

    def _atom(self) -> Node:
        begin = self._at
        if self._take("("):
            return self._group(begin)
        if self._take("["):
            return Chars(self._class().sure)
        if self._take("."):
            return Chars(_DOT.sure)
        if self._take("\\"):
            return Chars(self._escape(inside=False).sure)
        if (one := self._peek()) in "^$":
            raise self._error("anchors are supported at the ends only")
        if one in "*+?{}]":
            raise self._error(f"{one} has nothing to stand for; write \\{one} for itself")
        self._at += 1
        return Chars(((ord(one), ord(one)),))

    def _group(self, begin: int) -> Node:
        if self._take("?"):
            named = self._take("<") and self._peek() not in ("=", "!")
            if named:
                end = self._text.find(">", self._at)
                if end < 0:
                    raise self._error("the group's name does not end", begin)
                self._at = end + 1
            elif not self._take(":"):
                raise self._error("of the groups with (? only (?:…) and (?<name>…) are supported", begin)
        self._depth += 1
        if self._depth > MAX_GROUPS:
            raise self._error(f"groups nest deeper than {MAX_GROUPS}", begin)
        node = self._alternatives()
        self._depth -= 1
        if not self._take(")"):
            raise self._error("the group does not end", begin)
        return node

    def _class(self) -> _Set:
        begin = self._at
        negated = self._take("^")
        sets: list[_Set] = []
        while not self._take("]"):
            first = self._member(begin)
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                last = self._member(begin)
                (low, _), *more = first.sure or ((0, 0), (0, 0))
                (high, top), *others = last.sure or ((0, 0), (0, 0))
                if more or others or low != first.sure[0][1] or high != top or high < low:
                    raise self._error("a range goes from a character to a later one", begin)
                sets.append(_set((low, high)))
            else:
                sets.append(first)
        if not sets:
            raise self._error("the class is empty", begin)
        return _join(sets).negated() if negated else _join(sets)

    def _member(self, begin: int) -> _Set:
        if self._take("\\"):
            return self._escape(inside=True)
        one = self._peek()
        if not one:
            raise self._error("the class does not end", begin)
        if one == "[":
            raise self._error("write \\[ for a bracket in a class")
        self._at += 1
        return _set((ord(one), ord(one)))

    def _escape(self, *, inside: bool) -> _Set:
        """What follows a backslash; `inside` a class, \\b is a backspace."""
        begin = self._at - 1
        one = self._peek()
        self._at += 1
        if one in _SHORT and one:
            return _SHORT[one]
        if one == "0" and self._peek() and self._peek() in "0123456789":
            raise self._error("octal escapes are not supported", begin)
        if one in _NAMED:
            return _set((_NAMED[one],) * 2)
        if inside and one == "b":
            return _set((8, 8))
        if one in ("x", "u"):
            size = 2 if one == "x" else 4
            digits = self._text[self._at : self._at + size]
            if len(digits) < size or not set(digits) <= set("0123456789abcdefABCDEF"):
                raise self._error(f"\\{one} wants {size} hexadecimal digits", begin)
            self._at += size
            code = int(digits, 16)
            if 0xD800 <= code <= 0xDFFF:
                raise self._error("half a surrogate pair is no character", begin)
            return _set((code, code))
        if one in _SYNTAX:
            return _set((ord(one), ord(one)))
        raise self._error(f"\\{one} is not supported", begin)

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _take(self, wanted: str) -> bool:
        if self._peek() == wanted:
            self._at += 1
            return True
        return False

    def _error(self, words: str, at: int | None = None) -> UsageError:
        return UsageError(f"{words} (at character {self._at if at is None else at})")
