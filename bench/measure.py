"""How a contender is measured: one run as a row, contenders taking turns, repetitions as median and range."""

from __future__ import annotations

import hashlib
import os
import statistics
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from attrs import frozen

from bench.rig import Peer, Rig
from meshpipe import Completion, Coordinator, Sampling, Speculation

Row = dict[str, Any]

OFF = Speculation(mode="off")
NGRAM = Speculation(mode="ngram")
AUTO = Speculation(mode="auto")
MTP = Speculation(mode="mtp")
MTP_LAST = Speculation(mode="mtp", mtp_at="last")
MTP_NGRAM = Speculation(mode="mtp+ngram")
SPREAD = ("decode_tps", "tpot_ms", "ttft_ms")
"""Columns that also get `_low` and `_high`: the range over the repetitions."""


@frozen
class Task:
    """What to generate: `tokens` of the prompt, `count` of the output; end tokens do not end it."""

    name: str
    tokens: tuple[int, ...]
    count: int
    temperature: float = 0.0
    seed: int = 1

    def sampling(self) -> Sampling:
        """The same for every contender."""
        return Sampling(temperature=self.temperature, seed=self.seed)

    async def is_exact(self, rig: Rig, output: Sequence[int]) -> bool:
        """Whether `output` is how the unsplit model goes on."""
        reference = await rig.reference(self.tokens, len(output), self.temperature, self.seed)
        return list(output) == reference[: len(output)]


def fingerprint(tokens: Sequence[int]) -> str:
    """A short hash of an output."""
    return hashlib.sha256(",".join(map(str, tokens)).encode()).hexdigest()[:12]


def load() -> float:
    """Processes that want a core, on average over the last minute: above the number of cores, times are off."""
    return os.getloadavg()[0]


def request(task: Task, speculation: Speculation, count: int, *, reuse: bool = False) -> dict[str, Any]:
    """A request, for `Coordinator.generate`; with `reuse`, what a lane has of its prompt is not computed again."""
    return {
        "prompt": task.tokens,
        "max_tokens": count,
        "sampling": task.sampling(),
        "speculation": speculation,
        "ignore_end": True,
        "reuse": reuse,
    }


async def with_pipeline(
    rig: Rig,
    pipe: Coordinator,
    task: Task,
    speculation: Speculation,
    count: int | None = None,
    *,
    reuse: bool = False,
) -> Row:
    """A row of one request alone on the pipeline."""
    done = await pipe.complete(**request(task, speculation, count or task.count, reuse=reuse))
    return of_completion(done) | {"exact": await task.is_exact(rig, done.tokens)}


def of_completion(done: Completion) -> Row:
    """The columns that a report fills."""
    report = done.report
    return {
        "sessions": 1,
        "tokens": len(done.tokens),
        "decode_tps": report.decode_tps,
        "tpot_ms": None if report.tpot is None else report.tpot * 1e3,
        "ttft_ms": report.ttft * 1e3,
        "depth": report.depth[0],
        "depth_most": report.depth[1],
        "width": report.width[0],
        "width_most": report.width[1],
        "windows": report.windows,
        "divergences": report.divergences,
        "acceptance": report.acceptance,
        "stale_windows": report.stale_windows,
        "stale_tokens": report.stale_tokens,
        "occupancy": report.occupancy,
        "overlapped": report.overlapped,
        "latency_ms": report.total * 1e3,
        "cached_tokens": report.cached_tokens,
        **{f"{name}_acceptance": source.acceptance for name, source in report.sources.items()},
        "hash": fingerprint(done.tokens),
        "load": load(),
    }


async def with_peer(rig: Rig, peer: Peer, task: Task, count: int | None = None) -> Row:
    """A row of a peer; its decode rate counts the tokens after the first, as meshpipe's does."""
    answer = await peer.generate(
        prompt=task.tokens, count=count or task.count, temperature=task.temperature, seed=task.seed
    )
    tokens, times = answer["tokens"], answer["times"]
    tpot = (times[-1] - times[0]) / (len(times) - 1)
    return {
        "sessions": 1,
        "tokens": len(tokens),
        "decode_tps": 1 / tpot,
        "tpot_ms": tpot * 1e3,
        "ttft_ms": times[0] * 1e3,
        "depth": 1,
        "width": 1,
        "stale_tokens": 0,
        "exact": await task.is_exact(rig, tokens),
        "hash": fingerprint(tokens),
        "load": load(),
    }


@frozen
class Cell:
    """What is measured again and again: the columns that name it, and how to measure it once."""

    name: Row
    once: Callable[[], Awaitable[Row]]


async def take_turns(cells: Sequence[Cell], repetitions: int) -> list[list[Row]]:
    """Measures every cell once, then every cell again, in turn; a list of rows for every cell.

    Every other round goes backwards, so that a drift of the machine falls on all alike.
    """
    found: list[list[Row]] = [[] for _ in cells]
    for repetition in range(repetitions):
        order = range(len(cells)) if repetition % 2 == 0 else reversed(range(len(cells)))
        for index in order:
            row = await cells[index].once()
            found[index].append(row)
            _say(cells[index].name, repetition, row)
    return found


def _say(name: Row, repetition: int, row: Row) -> None:
    words = " ".join(str(value) for value in name.values())
    rate = row.get("decode_tps")
    shown = "" if rate is None else f"{rate:.2f} tokens/s"
    print(f"  [{repetition + 1}] {words}: {shown}, exact {row.get('exact')}", file=sys.stderr, flush=True)


def summarize(cells: Sequence[Cell], found: Sequence[Sequence[Row]]) -> list[Row]:
    """One row for every cell: medians of numbers, `exact` only if all were, the range of `SPREAD`."""
    rows = []
    for cell, runs in zip(cells, found, strict=True):
        row = dict(cell.name)
        # A source that proposed nothing in a run has no column there.
        for column in dict.fromkeys(column for run in runs for column in run):
            values = [run[column] for run in runs if run.get(column) is not None]
            value = values[0] if values else None
            if column in row or not values:
                row.setdefault(column, value)
            elif isinstance(value, bool):
                row[column] = all(values)
            elif isinstance(value, str):
                row[column] = value if len(set(values)) == 1 else "differ"
            else:
                row[column] = statistics.median(values)
                if column in SPREAD:
                    row[f"{column}_low"], row[f"{column}_high"] = min(values), max(values)
        row["repetitions"] = len(runs)
        rows.append(row)
    return rows


def ratio(
    over: Sequence[Row], under: Sequence[Row], column: str = "decode_tps"
) -> tuple[float, float, float]:
    """Median and range of `over` by `under`, repetition by repetition: what was measured at about the same time."""
    values = [one[column] / two[column] for one, two in zip(over, under, strict=True)]
    return statistics.median(values), min(values), max(values)


def figure(what: str, least: float, reached: tuple[float, float, float], most: bool = False) -> Row:
    """One line of the table of figures to reach; `most` for one that must stay below."""
    median, low, high = reached
    return {
        "figure": what,
        "wanted": f"{'<' if most else '≥'} {least:g}",
        "reached": median,
        "low": low,
        "high": high,
        "met": median < least if most else median >= least,
    }
