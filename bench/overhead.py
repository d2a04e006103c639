"""What splitting costs when nothing is far: two stages at 0 ms against the unsplit engine on one thread.

*unsplit*: llama.cpp by raw calls. *one stage*: meshpipe with everything in one child. *two stages*: joined
directly on loopback, or *behind proxies* of 0 ms like every row of the other benchmarks. No speculation.
`decodes_ms` is the mean time of a token's decodes, summed over the stages as their traces tell; `tpot_over_decodes`
is what all the rest adds.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import trio

from bench import measure, prompts, report
from bench.measure import OFF, Cell, Row, Task
from bench.rig import Rig, open_rig
from meshpipe import Coordinator
from meshpipe.telemetry.overlap import analyse

COLUMNS = (
    "contender", "decode_tps", "decode_tps_low", "decode_tps_high", "tpot_ms", "decodes_ms", "tpot_over_decodes",
    "ttft_ms", "tokens", "exact",
)  # fmt: skip


async def traced(rig: Rig, pipe: Coordinator, task: Task) -> Row:
    """A serial run, and what its replies say of the stages."""
    async with pipe.tracing() as trace:
        row = await measure.with_pipeline(rig, pipe, task, OFF)
    found = analyse(trace)
    assert found is not None
    decodes = sum(stage.service for stage in found.work) * 1e3
    return row | {"decodes_ms": decodes, "tpot_over_decodes": row["tpot_ms"] / decodes}


async def run(tokens: int, repetitions: int) -> tuple[list[Row], list[Row]]:
    """Rows and figures."""
    async with open_rig() as rig:
        task = prompts.novel(rig.vocabulary, tokens)
        one, two = await rig.stages("0,30"), await rig.stages("0,15,30")
        ways = {
            ("unsplit", "30"): partial(measure.with_peer, rig, await rig.unsplit(), task),
            ("one stage", one.split): partial(traced, rig, await rig.pipeline(one, 0), task),
            ("two stages", two.split): partial(traced, rig, await rig.pipeline(two, None), task),
            ("two stages behind proxies", two.split): partial(traced, rig, await rig.pipeline(two, 0), task),
        }
        cells = [
            Cell({"bench": "overhead", "workload": task.name, "delay_ms": 0, "contender": name, "split": split}, way)
            for (name, split), way in ways.items()
        ]  # fmt: skip
        found = await measure.take_turns(cells, repetitions)
        reached = sorted(row["tpot_over_decodes"] for row in found[2])
        figures = [
            measure.figure(
                "two stages at 0 ms, time per token against the stages' own decodes",
                1.10,
                (reached[len(reached) // 2], reached[0], reached[-1]),
                most=True,
            )
        ]
        return measure.summarize(cells, found), figures


def plot(rows: list[dict[str, Any]], folder: Path) -> None:
    """Time per token, and of it what decoding takes."""
    figure, (axis,) = report.panels(1)
    names = [row["contender"] for row in rows]
    axis.barh(names, [row["tpot_ms"] for row in rows], color="C1", label="per token")
    axis.barh(names, [row.get("decodes_ms") or 0 for row in rows], color="C0", label="decodes")
    axis.set(xlabel="ms")
    axis.legend(fontsize=8)
    report.save(figure, folder, "overhead")


def main(arguments: list[str]) -> None:
    """The command line."""
    options = report.parser("overhead", __doc__).parse_args(arguments)
    rows, figures = trio.run(run, *((96, 1) if options.quick else (128, 5)))
    report.finish(options, rows, figures, COLUMNS, plot)
