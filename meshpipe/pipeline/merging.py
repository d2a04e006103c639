"""How many queued windows share a decode.

Two sides have to be weighed. One decode of all costs least in sum; but every window waits for the whole of it, and
windows that leave together arrive together at every later stage, which idles until they come. On a stage that
was idle, the mean time to completion decides; on one that has not kept up, throughput does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

Cost = Callable[[int], float]
"""Seconds of a decode by its rows."""

ENOUGH = 0.95
"""Share of the best throughput with which a backlogged stage is content, to keep decodes short."""


def merged_count(rows: Sequence[int], cost: Cost, most: int, *, backlogged: bool) -> int:
    """How many of the queued windows, oldest first, to run in one decode; at least 1.

    `rows` are the windows' widths, `most` the rows a decode may have. `backlogged`: they were waiting already
    when the last decode ended. Then it is the fewest whose throughput is nearly the best; else the number k for
    which the mean time until a window is done is least, when k run now and the others, together, right after.
    """
    sums = [total for at, total in enumerate(accumulate(rows)) if at == 0 or total <= most]
    if backlogged:
        rates = [total / cost(total) for total in sums]
        return next(k for k, rate in enumerate(rates, 1) if rate >= ENOUGH * max(rates))

    def waiting(k: int) -> float:
        rest = sums[-1] - sums[k - 1]
        return len(sums) * cost(sums[k - 1]) + (len(sums) - k) * (cost(rest) if rest else 0.0)

    return min(range(1, len(sums) + 1), key=waiting)
