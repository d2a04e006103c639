"""Splits: the boundaries between stages, `0,15,30`, as given or as planned from what layers cost."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np

from meshpipe.errors import SplitError

Boundaries = tuple[int, ...]
"""Ascending layer numbers; the first is 0, the last the number of layers; stage i has `[b[i], b[i + 1])`."""


def parse_split(text: str) -> int | Boundaries:
    """`"0,15,30"` as boundaries, `"2"` as a number of stages. Raises SplitError."""
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise SplitError(f"a split is boundaries (0,15,30) or a number of stages (2), not {text!r}") from None
    if len(numbers) > 1:
        return numbers
    if numbers[0] < 1:
        raise SplitError(f"a split has at least 1 stage, not {numbers[0]}")
    return numbers[0]


def check_split(boundaries: Sequence[int], layers: int) -> Boundaries:
    """The boundaries, if they divide `layers` layers. Raises SplitError."""
    given = ",".join(map(str, boundaries))
    if len(boundaries) < 2 or boundaries[0] != 0 or boundaries[-1] != layers:
        raise SplitError(f"the split {given} should begin with 0 and end with {layers}, the number of layers")
    for start, stop in itertools.pairwise(boundaries):
        if start >= stop:
            raise SplitError(
                f"the split {given} has {start} before {stop}: boundaries must ascend, so that every stage has "
                "a layer"
            )
    return tuple(boundaries)


def even_split(
    costs: Sequence[float],
    stages: int,
    *,
    tail: float = 0.0,
    allowed: Callable[[int, int], bool] = lambda start, stop: True,
) -> Boundaries:
    """The split into `stages` whose dearest stage is cheapest; of several such, the one with the least spread.

    `costs` of each layer and `tail` of what follows the last one (head, NextN layers) are in any one unit.
    `allowed(start, stop)` says whether a stage may have these layers. Dynamic programming over boundaries.
    Raises SplitError if no split is allowed.
    """
    count = len(costs)
    if not 1 <= stages <= count:
        raise SplitError(f"{count} layers can be split into 1 to {count} stages, not {stages}")
    sums = np.concatenate(([0.0], np.cumsum(costs)))
    # cost[start, stop], infinite where no stage may be.
    cost = sums[None, :] - sums[:, None]
    cost[:, count] += tail
    for start in range(count + 1):
        for stop in range(count + 1):
            if start >= stop or not allowed(start, stop):
                cost[start, stop] = np.inf
    squares = cost**2
    dearest, spread = cost[0].copy(), squares[0].copy()
    choices = []
    for _ in range(stages - 1):
        worst = np.maximum(dearest[:, None], cost)
        best = worst.min(axis=0)
        total = np.where(worst <= best, spread[:, None] + squares, np.inf)
        choice = total.argmin(axis=0)
        choices.append(choice)
        dearest, spread = best, total[choice, np.arange(count + 1)]
    if not np.isfinite(dearest[count]):
        raise SplitError(f"this model cannot be split into {stages} stages: no boundaries are allowed there")
    boundaries = [count]
    for choice in reversed(choices):
        boundaries.append(int(choice[boundaries[-1]]))
    return (0, *reversed(boundaries)) if stages > 1 else (0, count)
