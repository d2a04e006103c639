"""The rows that a stage has sent, kept so that it can send them again without computing them again.

When a stage is lost and another takes its place, that one has to run all positions anew. Those before and after it
still have theirs in their caches; only what comes out of them is needed once more, and it is here.
"""

from __future__ import annotations

import numpy as np

from meshpipe.llama.memory import kept_positions
from meshpipe.messages import Rows

KEEP_ROWS = 256
"""MiB of rows that a stage keeps, unless told otherwise."""


class KeptRows:
    """For each lane the rows of its first positions, without a gap, as many as its share of the budget holds.

    `lanes` of up to `context` positions, rows of `n_embd` float32, `budget` bytes of memory for all of them (which is
    taken as it fills). Not the last positions: what follows a gap could be sent again only after what is in it.
    """

    def __init__(self, lanes: int, context: int, n_embd: int, budget: int) -> None:
        positions = kept_positions(lanes, context, n_embd, budget)
        self._rows = np.zeros((lanes, positions, n_embd), np.float32)
        self._lengths = [0] * lanes

    def length(self, lane: int) -> int:
        """Positions of the lane whose rows are here: all below that."""
        return self._lengths[lane]

    def trim(self, lane: int, position: int) -> None:
        """Forgets the lane's rows from `position` on: the stage runs others there."""
        self._lengths[lane] = min(self._lengths[lane], max(position, 0))

    def put(self, lane: int, start: int, rows: Rows) -> None:
        """Takes rows of the positions from `start` on, in place of what was there; what would leave a gap, or does
        not fit, is left out."""
        self.trim(lane, start)
        if self._lengths[lane] == start:
            stop = min(start + len(rows), self._rows.shape[1])
            self._rows[lane, start:stop] = rows[: stop - start]
            self._lengths[lane] = max(start, stop)

    def get(self, lane: int, start: int, stop: int) -> Rows:
        """The rows of positions that are here, (stop - start, n_embd): a copy, which later ones do not change."""
        assert 0 <= start <= stop <= self._lengths[lane]
        found: Rows = self._rows[lane, start:stop].copy()
        return found
