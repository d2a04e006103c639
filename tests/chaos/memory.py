"""What processes hold, sampled as long as a run lasts, and whether it grows."""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import trio
from attrs import frozen

WARM = 60.0
"""Seconds of a process's life that say nothing about growth: caches fill, allocators settle."""
BLOCK = 60.0
"""Seconds whose samples are averaged into one point of a line, so that points are nearly independent."""


@frozen
class Sample:
    """One look at a process. `private`: resident KiB that are no file's."""

    at: float
    process: int
    resident: int
    private: int
    descriptors: int
    threads: int


def look(process: int) -> Sample | None:
    """What the process holds now; None if it has ended."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
        descriptors = len(os.listdir(f"/proc/{process}/fd"))
    except OSError:
        return None
    values = dict(line.split(":", 1) for line in lines if ":" in line)
    if "VmRSS" not in values:
        return None  # it is ending

    def number(key: str) -> int:
        return int(values[key].split()[0])

    now = trio.current_time()
    return Sample(now, process, number("VmRSS"), number("RssAnon"), descriptors, number("Threads"))


def summary(samples: Mapping[str, Sequence[Sample]]) -> dict[str, Any]:
    """By name of a process, which may have been started again: how much it held, and how its memory grew."""
    found = {}
    for name, of_one in samples.items():
        lives: dict[int, list[Sample]] = {}
        for sample in of_one:
            lives.setdefault(sample.process, []).append(sample)
        warm = [[sample for sample in life if sample.at > life[0].at + WARM] for life in lives.values()]
        every = [sample for life in warm for sample in life] or list(of_one)
        found[name] = {
            "lives": len(lives),
            "resident_mib": [round(value / 1024, 1) for value in _spread([s.resident for s in every])],
            "private_mib": [round(value / 1024, 1) for value in _spread([s.private for s in every])],
            "descriptors": _spread([s.descriptors for s in every]),
            "threads": _spread([s.threads for s in every]),
            "private_growth_mib_per_hour": growth(warm),
        }
    return found


def growth(lives: Sequence[Sequence[Sample]]) -> list[float] | None:
    """MiB an hour that private memory grows by within lives, and its standard error; None for too few points.

    A straight line through the means of blocks, with one slope for all lives and a height of its own for each.
    """
    times, values = [], []
    for life in lives:
        blocks: dict[int, list[Sample]] = {}
        for sample in life:
            blocks.setdefault(int((sample.at - life[0].at) / BLOCK), []).append(sample)
        if len(blocks) > 1:
            at = np.array([statistics.mean(s.at for s in block) for block in blocks.values()])
            held = np.array([statistics.mean(s.private for s in block) for block in blocks.values()])
            times.append(at - at.mean())
            values.append(held - held.mean())
    freedom = sum(len(part) - 1 for part in times) - 1
    if freedom < 2:
        return None
    x, y = np.concatenate(times), np.concatenate(values)
    slope = float(x @ y / (x @ x))
    error = float(np.sqrt(((y - slope * x) ** 2).sum() / freedom / (x @ x)))
    return [round(number * 3600 / 1024, 2) for number in (slope, error)]


def _spread(values: Sequence[int]) -> list[float]:
    """Least, median and most."""
    return [min(values), statistics.median(values), max(values)] if values else []
