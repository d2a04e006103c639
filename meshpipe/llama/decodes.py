"""Decodes: which rows share one call of llama.cpp.

A job is given as spans, one or several of a lane. Their rows are cut into decodes of the engine's class; llama.cpp runs
rows of several lanes in one graph if the lanes are neighbours (numbers without a gap) and have equally many rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from attrs import field, frozen

from meshpipe.messages import Rows

EXACT_ROWS = 63
"""Most rows of a decode in the class whose bits do not depend on their company."""


@frozen
class Span:
    """Consecutive rows of one lane, at positions `[start, start + n)`.

    `tokens` (n ids) for a first stage, `rows` (float32, shape (n, n_embd)) for the others. `wanted`: the last
    stage computes logits for that many of the last rows; the other stages return all rows anyway. `hidden`: the
    last stage also keeps all rows as they are before the final norm, for `StageEngine.hidden_rows`.
    """

    lane: int
    start: int
    tokens: Sequence[int] = ()
    rows: Rows | None = field(default=None, eq=False, repr=False)
    wanted: int = 0
    hidden: bool = False

    @property
    def count(self) -> int:
        """Number of rows."""
        return len(self.tokens) if self.rows is None else len(self.rows)

    @property
    def stop(self) -> int:
        """The position after the last row."""
        return self.start + self.count


@frozen
class DecodeClass:
    """Which decodes an engine runs: at most `most` rows, at least `least` (1, or 2 with a spare row)."""

    most: int
    least: int
    exact: bool


@frozen
class Piece:
    """Rows [low, high) of a span."""

    index: int
    low: int
    high: int


def share_decode(lanes: Sequence[int], rows: Sequence[int]) -> bool:
    """Whether llama.cpp runs these in one graph: neighbouring lanes, in ascending order, with equally many rows."""
    return len(set(rows)) == 1 and all(b == a + 1 for a, b in pairwise(lanes))


def group_rows(spans: Sequence[Span], most: int) -> Iterator[list[Piece]]:
    """Groups the spans' rows into decodes of at most `most` rows, each of lanes that share one.

    Every lane's rows are cut into turns of at most `most`; the first turn of all lanes comes before the second.
    """
    turns: dict[int, list[list[Piece]]] = {}  # by lane: turns of pieces
    for index, span in enumerate(spans):
        mine = turns.setdefault(span.lane, [[]])
        low = 0
        while low < span.count:
            room = most - sum(piece.high - piece.low for piece in mine[-1])
            if room == 0:
                mine.append([])
                continue
            high = min(span.count, low + room)
            mine[-1].append(Piece(index, low, high))
            low = high
    while turns:
        group: list[tuple[int, int]] = []  # (lane, rows)
        decode: list[Piece] = []
        for lane in sorted(turns):
            pieces = turns[lane].pop(0)
            count = sum(piece.high - piece.low for piece in pieces)
            joined = [*group, (lane, count)]
            if len(joined) * count > most or not share_decode(*zip(*joined, strict=True)):
                yield decode
                decode, joined = [], [(lane, count)]
            group = joined
            decode += pieces
        yield decode
        turns = {lane: left for lane, left in turns.items() if left}
