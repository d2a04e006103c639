"""Depth and width: every fixed pair against `auto`, two stages 100 ms apart, n-gram proposals.

A slow pair generates fewer tokens than 1,024 of the draftable text, so that each takes about as long; `tokens`
says how many. The best fixed pair of each workload is measured again, in turn with `auto`, in the rows of the part
*final*: the best of many noisy cells looks better than it is.
"""

from __future__ import annotations

import statistics
from functools import partial
from pathlib import Path
from typing import Any

import trio
from attrs import evolve, frozen

from bench import measure, prompts, report
from bench.measure import NGRAM, Cell, Row, Task
from bench.rig import Rig, open_rig
from meshpipe import Coordinator, Speculation

DELAY = 100
COLUMNS = (
    "part", "workload", "depth_asked", "width_asked", "decode_tps", "decode_tps_low", "decode_tps_high", "tokens",
    "depth", "width", "acceptance", "stale_tokens", "occupancy", "exact",
)  # fmt: skip


@frozen
class Size:
    """How much is measured."""

    depths: tuple[int, ...]
    widths: tuple[int, ...]
    seconds: float  # that a fixed pair of the grid may take, about
    novel: int  # tokens of novel text
    repetitions: int


FULL = Size((1, 2, 4, 8, 16), (1, 2, 4, 8), 4.0, 16, 3)
QUICK = Size((4, 16), (4, 8), 2.0, 8, 1)


def cell(rig: Rig, pipe: Coordinator, task: Task, part: str, speculation: Speculation) -> Cell:
    """One pair, or auto."""
    name = {
        "bench": "frontier",
        "part": part,
        "workload": task.name,
        "delay_ms": DELAY,
        "split": "15/15",
        "contender": "n-gram",
        "depth_asked": speculation.depth,
        "width_asked": speculation.width,
    }
    return Cell(name, partial(measure.with_pipeline, rig, pipe, task, speculation))


def shortened(pipe: Coordinator, task: Task, seconds: float, depth: int, width: int) -> Task:
    """As many tokens as a fixed pair can generate in that time at best, 16 at least."""
    rate = min(depth * width / pipe.pipe.latency(width), width / pipe.pipe.slowest(width))
    return evolve(task, count=min(task.count, max(16, int(rate * seconds))))


async def run(size: Size) -> tuple[list[Row], list[Row]]:
    """Rows and figures."""
    rows: list[Row] = []
    figures: list[Row] = []
    async with open_rig() as rig:
        pipe = await rig.pipeline(await rig.stages("0,15,30"), DELAY)
        for task in (prompts.draftable(rig.vocabulary), prompts.novel(rig.vocabulary, size.novel)):
            grid = [
                cell(
                    rig,
                    pipe,
                    shortened(pipe, task, size.seconds, depth, width),
                    "grid",
                    Speculation(mode="ngram", depth=depth, width=width),
                )
                for depth in size.depths
                for width in size.widths
            ]
            found = await measure.take_turns(grid, size.repetitions)
            rows += measure.summarize(grid, found)
            best = max(
                range(len(grid)), key=lambda at: statistics.median(run["decode_tps"] for run in found[at])
            )
            name = grid[best].name
            winner = Speculation(mode="ngram", depth=name["depth_asked"], width=name["width_asked"])
            final = [
                cell(rig, pipe, task, "final", winner),
                cell(rig, pipe, task, "final", NGRAM),
            ]
            found = await measure.take_turns(final, size.repetitions)
            rows += measure.summarize(final, found)
            figures.append(
                measure.figure(
                    f"{task.name}: auto against the best fixed depth × width "
                    f"({winner.depth} × {winner.width})",
                    0.95,
                    measure.ratio(found[1], found[0]),
                )
            )
    return rows, figures


def plot(rows: list[dict[str, Any]], folder: Path) -> None:
    """Speed over depth, a line a width; auto as a level."""
    figure, axes = report.panels(2, shared=False)
    for axis, workload in zip(axes, ("draftable", "novel"), strict=True):
        grid = [row for row in rows if row["workload"] == workload and row["part"] == "grid"]
        for width in sorted({row["width_asked"] for row in grid}):
            line = [row for row in grid if row["width_asked"] == width]
            axis.plot(
                [row["depth_asked"] for row in line],
                [row["decode_tps"] for row in line],
                "o-",
                label=f"width {width}",
            )
        for row in rows:
            if (row["workload"], row["part"], row["depth_asked"]) == (workload, "final", "auto"):
                axis.axhline(row["decode_tps"], color="black", linestyle=":", label="auto")
        axis.set(title=f"{workload}, {DELAY} ms", xlabel="depth (windows)", xscale="log")
        axis.set_ylim(bottom=0)
    axes[0].set_ylabel("tokens/s")
    axes[0].legend(fontsize=8)
    report.save(figure, folder, "frontier")


def main(arguments: list[str]) -> None:
    """The command line."""
    options = report.parser("frontier", __doc__).parse_args(arguments)
    rows, figures = trio.run(run, QUICK if options.quick else FULL)
    report.finish(options, rows, figures, COLUMNS, plot)
