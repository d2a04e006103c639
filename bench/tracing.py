"""What recording a trace costs: two stages at 0 ms, where spans come fastest, with tracing off and on, in turns.

`ratio` is tokens per second with a trace being recorded over those without, of runs that follow each other;
`ns_a_span` is one `Recorder.add` of a new `Span`, `ns_off` the check where nothing is recorded, both in a loop.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from timeit import timeit
from typing import Any

import trio

from bench import measure, prompts, report
from bench.measure import OFF, Cell, Row, Task
from bench.rig import Rig, open_rig
from meshpipe import Coordinator
from meshpipe.telemetry.spans import Kind, Recorder, Span

COLUMNS = (
    "contender",
    "decode_tps",
    "decode_tps_low",
    "decode_tps_high",
    "spans",
    "ns_a_span",
    "ns_off",
    "exact",
)
LOOPS = 100_000


async def untraced(rig: Rig, pipe: Coordinator, task: Task) -> Row:
    """A serial run with nothing recorded."""
    return await measure.with_pipeline(rig, pipe, task, OFF) | {"ns_off": off_cost()}


async def traced(rig: Rig, pipe: Coordinator, task: Task) -> Row:
    """The same, recorded in all processes."""
    async with pipe.tracing() as trace:
        row = await measure.with_pipeline(rig, pipe, task, OFF)
    return row | {"spans": len(trace.spans), "ns_a_span": span_cost()}


def off_cost() -> float:
    """Nanoseconds of asking a recorder that is off."""
    recorder = Recorder()
    return timeit("recorder.on", globals={"recorder": recorder}, number=LOOPS) / LOOPS * 1e9


def span_cost() -> float:
    """Nanoseconds of recording one span."""
    recorder = Recorder()

    def add() -> None:
        recorder.add(Span(Kind.COMPUTE, 1.0, 2.0, 0, 123, 4, 5, 6, 7))

    return timeit(add, number=LOOPS) / LOOPS * 1e9


async def run(tokens: int, repetitions: int) -> tuple[list[Row], list[Row]]:
    """Rows and figures."""
    async with open_rig() as rig:
        task = prompts.novel(rig.vocabulary, tokens)
        pipe = await rig.pipeline(await rig.stages("0,15,30"), None)
        name = {"bench": "tracing", "workload": task.name, "delay_ms": 0, "split": "0,15,30"}
        cells = [
            Cell(name | {"contender": "off"}, partial(untraced, rig, pipe, task)),
            Cell(name | {"contender": "on"}, partial(traced, rig, pipe, task)),
        ]
        found = await measure.take_turns(cells, repetitions)
        ratios = sorted(on["decode_tps"] / off["decode_tps"] for off, on in zip(*found, strict=True))
        figures = [
            measure.figure(
                "tokens/s while recording against not recording",
                0.98,
                (ratios[len(ratios) // 2], ratios[0], ratios[-1]),
            )
        ]
        return measure.summarize(cells, found), figures


def plot(rows: list[dict[str, Any]], folder: Path) -> None:
    """Speed, off and on."""
    figure, (axis,) = report.panels(1)
    axis.barh([row["contender"] for row in rows], [row["decode_tps"] for row in rows])
    axis.set(xlabel="tokens/s")
    report.save(figure, folder, "tracing")


def main(arguments: list[str]) -> None:
    """The command line."""
    options = report.parser("tracing", __doc__).parse_args(arguments)
    rows, figures = trio.run(run, *((96, 5) if options.quick else (192, 15)))
    report.finish(options, rows, figures, COLUMNS, plot)
