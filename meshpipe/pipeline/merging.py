"""Which queued windows share a decode."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def merged_count(rows: Sequence[int], cost: Callable[[int], float], most: int) -> int:
    """How many of the queued windows, oldest first, to run in one decode.

    `rows` are the windows' widths, `cost` the seconds of a decode by its rows, `most` the rows a decode may
    have. Minimises the mean time until a window is done, when the first k run now and the others, together,
    right after. That weighs both sides: one decode of all costs least in sum, but every window waits for the
    whole of it, and windows that leave together arrive together at every later stage. At least 1.
    """
    fitting, total = 0, 0
    while fitting < len(rows) and (fitting == 0 or total + rows[fitting] <= most):
        total += rows[fitting]
        fitting += 1
    best, best_sum = 1, float("inf")
    now = 0
    for k in range(1, fitting + 1):
        now += rows[k - 1]
        first = cost(now)
        rest = cost(total - now) if total > now else 0.0
        waiting = fitting * first + (fitting - k) * rest
        if waiting < best_sum:
            best, best_sum = k, waiting
    return best
