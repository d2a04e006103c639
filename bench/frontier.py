"""Depth and width: every fixed pair against `auto`, two stages, n-gram proposals 100 ms apart.

A slow pair generates fewer tokens than 1,024 of the draftable text, so that each takes about as long; `tokens`
says how many. The best fixed pair of each workload is measured again, in turn with `auto`, in the rows of the part
*final*: the best of many noisy cells looks better than it is. A prompt is computed once and then reused.

Native MTP is measured on SmolLM2 with a NextN block at the coordinator (`model`), on a coarser grid; at 0 and 50 ms
`auto` is one of its cells, and there is no final.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import trio
from attrs import evolve, frozen

from bench import measure, prompts, report
from bench.measure import Cell, Row, Task
from bench.models.smollm2_mtp import assemble
from bench.rig import EVEN, Rig, open_rig
from meshpipe import Coordinator, Speculation

DELAY = 100
NOVEL = 24  # tokens of novel text in a final
COLUMNS = (
    "model", "part", "workload", "contender", "delay_ms", "depth_asked", "width_asked", "decode_tps", "decode_tps_low",
    "decode_tps_high", "tokens", "depth", "width", "ngram_acceptance", "mtp_acceptance", "stale_tokens", "occupancy",
    "overlapped", "exact",
)  # fmt: skip


@frozen
class Part:
    """A grid; the fixed pair that wins is measured again if `final`. `seconds` is what a pair may take, about."""

    model: str
    workload: str
    mode: str
    delay: float
    depths: Sequence[int]
    widths: Sequence[int]
    final: bool
    seconds: float = 1.2
    repetitions: int = 3


FULL = (
    Part("SmolLM2", "draftable", "ngram", DELAY, (1, 2, 4, 8, 16), (1, 2, 4, 8), True),
    Part("SmolLM2", "novel", "ngram", DELAY, (1, 2, 4, 8, 16), (1, 2, 4, 8), True),
    Part("NextN", "draftable", "mtp+ngram", DELAY, (4, 16), (4, 8), True),
    Part("NextN", "novel", "mtp", DELAY, (1, 2, 4), (1, 2), True),
    *(
        Part("NextN", workload, mode, delay, (1, 4), (4,), False)
        for delay in (0, 50)
        for workload, mode in (("draftable", "mtp+ngram"), ("novel", "mtp"))
    ),
)
QUICK = (
    Part("SmolLM2", "draftable", "ngram", DELAY, (4, 16), (4, 8), True, 1.0, 1),
    Part("SmolLM2", "novel", "ngram", DELAY, (4,), (4,), True, 1.0, 1),
)


def cell(rig: Rig, pipe: Coordinator, part: Part, name: str, task: Task, speculation: Speculation) -> Cell:
    """One pair, or auto; a text that MTP drafts for is computed anew, so that it has its rows."""
    named = {
        "bench": "frontier",
        "model": part.model,
        "part": name,
        "workload": part.workload,
        "delay_ms": part.delay,
        "split": "15/15",
        "contender": part.mode,
        "depth_asked": speculation.depth,
        "width_asked": speculation.width,
    }
    way = partial(measure.with_pipeline, rig, pipe, task, speculation, reuse=not speculation.uses_mtp)
    return Cell(named, way)


def shortened(pipe: Coordinator, task: Task, seconds: float, speculation: Speculation) -> Task:
    """As many tokens as a pair can generate in that time at best, 6 at least; auto may do all that the pipe can."""
    depth = 16 if speculation.depth == "auto" else speculation.depth
    width = 8 if speculation.width == "auto" else speculation.width
    ahead = task.name == "draftable"
    rate = min((depth * width if ahead else 1) / pipe.pipe.latency(width), width / pipe.pipe.slowest(width))
    return evolve(task, count=min(task.count, max(6, int(rate * seconds))))


async def measured(rig: Rig, pipe: Coordinator, part: Part) -> tuple[list[Row], list[Row]]:
    """Rows of one grid, and of its final the figure."""
    task = (
        prompts.draftable(rig.vocabulary)
        if part.workload == "draftable"
        else prompts.novel(rig.vocabulary, NOVEL)
    )
    auto = Speculation(mode=part.mode)
    pairs = [evolve(auto, depth=depth, width=width) for depth in part.depths for width in part.widths]
    grid = [
        cell(rig, pipe, part, "grid", shortened(pipe, task, part.seconds, pair), pair)
        for pair in [*pairs, *([] if part.final else [auto])]
    ]
    found = await measure.take_turns(grid, part.repetitions)
    rows = measure.summarize(grid, found)
    if not part.final:
        return rows, []
    best = pairs[
        max(range(len(pairs)), key=lambda at: statistics.median(run["decode_tps"] for run in found[at]))
    ]
    final = [cell(rig, pipe, part, "final", task, one) for one in (best, auto)]
    found = await measure.take_turns(final, part.repetitions)
    what = f"{part.workload}, {part.mode}: auto against the best fixed depth × width ({best.depth} × {best.width})"
    return rows + measure.summarize(final, found), [
        measure.figure(what, 0.95, measure.ratio(found[1], found[0]))
    ]


async def run(parts: Sequence[Part]) -> tuple[list[Row], list[Row]]:
    """Rows and figures."""
    rows: list[Row] = []
    figures: list[Row] = []
    for model in dict.fromkeys(part.model for part in parts):
        async with open_rig(assemble() if model == "NextN" else None) as rig:
            stages = await rig.stages(EVEN)
            of = [part for part in parts if part.model == model]
            pipes = {part.delay: await rig.pipeline(stages, part.delay) for part in of}
            for part in of:
                made = await measured(rig, pipes[part.delay], part)
                await rig.settle(part.delay)
                rows, figures = rows + made[0], figures + made[1]
    return rows, figures


def plot(rows: list[dict[str, Any]], folder: Path) -> None:
    """Speed over depth, a line a width; auto as a level."""
    figure, axes = report.panels(2, shared=False)
    for axis, workload in zip(axes, ("draftable", "novel"), strict=True):
        rows_of = [row for row in rows if row["workload"] == workload and row["contender"] == "ngram"]
        grid = [row for row in rows_of if row["part"] == "grid"]
        for width in sorted({row["width_asked"] for row in grid}):
            line = [row for row in grid if row["width_asked"] == width]
            axis.plot(
                [row["depth_asked"] for row in line],
                [row["decode_tps"] for row in line],
                "o-",
                label=f"width {width}",
            )
        for row in rows_of:
            if (row["part"], row["depth_asked"]) == ("final", "auto"):
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
