"""Speed by link delay: llama.cpp's RPC backend, meshpipe without speculation, meshpipe with n-grams.

Two stages, one thread each, split so that both take as long (`bench/balance.py`); the delay is one way, on the link
between the stages and on the return. llama.cpp's RPC backend has the same layers and the head on its server, behind
the same kind of proxy, the delay each way. It and meshpipe without speculation are measured on fewer tokens of the
draftable text: their speed does not depend on what it says.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import trio
from attrs import frozen

from bench import measure, prompts, report
from bench.balance import balanced
from bench.measure import NGRAM, OFF, Cell, Row, Task
from bench.rig import EVEN, Peer, Rig, open_rig
from meshpipe import Coordinator

CONTENDERS = ("llama.cpp RPC", "serial", "n-gram")
COLUMNS = (
    "workload", "delay_ms", "contender", "decode_tps", "decode_tps_low", "decode_tps_high", "tpot_ms", "ttft_ms",
    "tokens", "depth", "width", "acceptance", "stale_tokens", "occupancy", "exact",
)  # fmt: skip


@frozen
class Size:
    """How much is measured."""

    delays: tuple[float, ...]
    repetitions: int
    serial: int  # tokens of contenders that go token by token, on draftable text
    novel: int  # tokens of novel text


FULL = Size((0, 10, 25, 50, 100, 150), 3, 24, 48)
QUICK = Size((0, 100), 1, 8, 16)


async def settled(rig: Rig, way: Callable[[], Awaitable[Row]], delay: float) -> Row:
    """Measures, then leaves the stages' lanes free for the next pipeline."""
    row = await way()
    await rig.settle(delay)
    return row


def cells(
    rig: Rig, size: Size, split: str, pipes: dict[float, Coordinator], peers: dict[float, Peer]
) -> list[Cell]:
    """Contenders side by side at each delay."""
    made: list[Cell] = []
    tasks: list[tuple[Task, int]] = [
        (prompts.draftable(rig.vocabulary), size.serial),
        (prompts.novel(rig.vocabulary, size.novel), size.novel),
    ]
    for task, few in tasks:
        for delay in size.delays:
            ways = (
                partial(measure.with_peer, rig, peers[delay], task, min(few, size.serial)),
                partial(measure.with_pipeline, rig, pipes[delay], task, OFF, few),
                partial(measure.with_pipeline, rig, pipes[delay], task, NGRAM),
            )
            for contender, way in zip(CONTENDERS, ways, strict=True):
                name = {
                    "bench": "latency",
                    "workload": task.name,
                    "delay_ms": delay,
                    "contender": contender,
                    "split": split,
                }
                made.append(Cell(name, partial(settled, rig, way, delay)))
    return made


def figures(cells: list[Cell], found: list[list[Row]]) -> list[Row]:
    """The ratios that matter."""
    runs = {
        (cell.name["workload"], cell.name["delay_ms"], cell.name["contender"]): rows
        for cell, rows in zip(cells, found, strict=True)
    }
    rpc, serial, ngram = CONTENDERS
    made = [
        measure.figure(
            "draftable, n-gram, 100 ms against 0 ms",
            0.90,
            measure.ratio(runs["draftable", 100, ngram], runs["draftable", 0, ngram]),
        ),
        measure.figure(
            "draftable, n-gram against llama.cpp RPC, 100 ms",
            25,
            measure.ratio(runs["draftable", 100, ngram], runs["draftable", 100, rpc]),
        ),
    ]
    for delay, least in ((0, 1.1), (100, 1.0)):
        made += [
            measure.figure(
                f"novel, n-gram against serial, {delay} ms",
                0.98,
                measure.ratio(runs["novel", delay, ngram], runs["novel", delay, serial]),
            ),
            measure.figure(
                f"novel, serial against llama.cpp RPC, {delay} ms",
                least,
                measure.ratio(runs["novel", delay, serial], runs["novel", delay, rpc]),
            ),
        ]
    return made


async def run(size: Size) -> tuple[list[Row], list[Row]]:
    """Rows and figures."""
    async with open_rig() as rig:
        stages = await rig.stages(EVEN)
        split = await balanced(rig, stages)
        if split != EVEN:
            stages = await rig.stages(split)
        pipes = {delay: await rig.pipeline(stages, delay) for delay in size.delays}
        peers: dict[float, Peer] = {}

        async def open_peer(delay: float) -> None:
            peers[delay] = await rig.rpc(stages.boundaries[2] - stages.boundaries[1], delay)

        async with trio.open_nursery() as nursery:  # loading over a long link is mostly waiting
            for delay in size.delays:
                nursery.start_soon(open_peer, delay)
        measured = cells(rig, size, stages.split, pipes, peers)
        found = await measure.take_turns(measured, size.repetitions)
        return measure.summarize(measured, found), figures(measured, found)


def plot(rows: list[dict[str, Any]], folder: Path) -> None:
    """Speed over delay, one panel a workload."""
    figure, axes = report.panels(2)
    for axis, workload in zip(axes, ("draftable", "novel"), strict=True):
        for contender in CONTENDERS:
            line = [row for row in rows if (row["workload"], row["contender"]) == (workload, contender)]
            delays = [row["delay_ms"] for row in line]
            rates = [row["decode_tps"] for row in line]
            axis.plot(delays, rates, "o-", label=contender)
            axis.fill_between(
                delays,
                [row["decode_tps_low"] for row in line],
                [row["decode_tps_high"] for row in line],
                alpha=0.2,
            )
        axis.set(title=workload, xlabel="one-way delay (ms)", yscale="log")
        top = max((row["decode_tps_high"] for row in rows), default=1)
        axis.set_ylim(1, 2 * 10 ** math.ceil(math.log10(top)) / 2)
    axes[0].set_ylabel("tokens/s")
    axes[0].legend(fontsize=8)
    report.save(figure, folder, "latency")


def main(arguments: list[str]) -> None:
    """The command line."""
    options = report.parser("latency", __doc__).parse_args(arguments)
    rows, figures = trio.run(run, QUICK if options.quick else FULL)
    report.finish(options, rows, figures, COLUMNS, plot)
