"""Arithmetic of time intervals: (began, ended), in seconds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise

Interval = tuple[float, float]


def union(spans: Iterable[Interval]) -> list[Interval]:
    """Disjoint and ascending."""
    joined: list[Interval] = []
    for began, ended in sorted(spans):
        if joined and began <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(ended, joined[-1][1]))
        else:
            joined.append((began, ended))
    return joined


def clipped(spans: Iterable[Interval], within: Interval) -> list[Interval]:
    """The parts within an interval."""
    cut = ((max(began, within[0]), min(ended, within[1])) for began, ended in spans)
    return [(began, ended) for began, ended in cut if began < ended]


def length(spans: Iterable[Interval]) -> float:
    """Seconds, of disjoint spans."""
    return sum(ended - began for began, ended in spans)


def levels(spans: Iterable[Interval]) -> Iterator[tuple[float, float, int]]:
    """(began, ended, how many of the spans cover it), where it is at least one."""
    changes: dict[float, int] = defaultdict(int)
    for began, ended in spans:
        changes[began] += 1
        changes[ended] -= 1
    times = sorted(changes)
    for (began, ended), count in zip(pairwise(times), accumulate(changes[at] for at in times), strict=False):
        if count:
            yield began, ended, count


def shares(stages: Sequence[Sequence[Interval]], within: Interval) -> list[float]:
    """Share of an interval in which exactly 0, 1, 2, … of the stages are busy; each stage's spans are disjoint."""
    total = within[1] - within[0]
    found = [0.0] * (len(stages) + 1)
    for began, ended, count in levels(span for spans in stages for span in clipped(spans, within)):
        found[count] += (ended - began) / total
    found[0] = 1.0 - sum(found[1:])
    return found
