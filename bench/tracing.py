"""What recording a trace costs: two stages at 0 ms, no speculation, where spans come fastest for what they tell.

A machine's speed drifts by more than recording costs. So it is switched on and off inside one running generation, in
blocks of 12 tokens, off, on, on, off, and every four blocks are compared among themselves; the figures are
medians over the fours, and `low` and `high` the 95% interval of that median (bootstrap). The first two tokens
after a switch, which carries the spans to the coordinator or starts the next recording, belong to no block.

`cpu_ms` is the processor time that the coordinator and both stages took for a token, all threads; `rest_ms` what is
left of a token's time without its two decodes, which is where recording happens. `ns_a_span` is one `Recorder.add` of a
new `Span`, `ns_off` the check where nothing is recorded, both in a loop.
"""

from __future__ import annotations

import ctypes
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from itertools import pairwise
from pathlib import Path
from timeit import timeit
from typing import Any

import trio
from attrs import astuple, define, field, frozen

from bench import measure, prompts, report
from bench.measure import OFF, Row
from bench.rig import open_rig
from meshpipe import Coordinator
from meshpipe.messages import Timing
from meshpipe.telemetry.spans import Kind, Recorder, Span

COLUMNS = (
    "contender",
    "decode_tps",
    "tpot_ms",
    "rest_ms",
    "cpu_ms",
    "spans",
    "ns_a_span",
    "ns_off",
    "blocks",
    "exact",
)
BLOCK = 12
SKIPPED = 2
PATTERN = (False, True, True, False)
ANSWER = 960  # tokens of one generation
LOOPS = 100_000
DRAWS = 2000


@frozen
class Block:
    """Milliseconds of a token: in all and besides the decodes, in the median of a block; of processors, in the mean."""

    tpot: float
    rest: float
    cpu: float


@frozen
class Four:
    """Four blocks: the two without recording and the two with it, in the mean; spans of one of these."""

    off: Block
    on: Block
    spans: int


@define
class Replies:
    """Hears of every reply (`meshpipe.telemetry.observers.Observer`), one a token."""

    heard: list[tuple[float, float]] = field(factory=list)  # when, and seconds of its decodes
    _news: trio.Event = field(factory=trio.Event)

    def replied(self, latency: float, timings: Sequence[Timing]) -> None:
        """A token."""
        self.heard.append((trio.current_time(), sum(timing.service for timing in timings)))
        self._news.set()
        self._news = trio.Event()

    def finished(self, report: object) -> None:
        """Nothing to note."""

    async def wait(self, count: int) -> int:
        """Returns when that many more have come; the number of all."""
        until = len(self.heard) + count
        while len(self.heard) < until:
            await self._news.wait()
        return len(self.heard)


async def one_block(replies: Replies, cpu: Callable[[], float]) -> Block:
    """Measures the tokens that come next."""
    first = await replies.wait(SKIPPED)
    before = cpu()
    last = await replies.wait(BLOCK)
    used = cpu() - before
    pairs = list(pairwise(replies.heard[first - 1 : last]))
    elapsed = [(at - before) * 1e3 for (before, _), (at, _) in pairs]
    rest = [gap - decodes * 1e3 for gap, (_, (_, decodes)) in zip(elapsed, pairs, strict=True)]
    return Block(statistics.median(elapsed), statistics.median(rest), used * 1e3 / len(pairs))


async def four_blocks(pipe: Coordinator, replies: Replies, cpu: Callable[[], float]) -> Four:
    """The next blocks of the generation that runs, in the pattern."""
    found: dict[bool, list[Block]] = {False: [], True: []}
    spans = 0
    for on in PATTERN:
        async with AsyncExitStack() as stack:
            trace = await stack.enter_async_context(pipe.tracing()) if on else None
            found[on].append(await one_block(replies, cpu))
        spans = spans if trace is None else len(trace.spans)
    return Four(mean(found[False]), mean(found[True]), spans)


def mean(blocks: Sequence[Block]) -> Block:
    """Of each number."""
    return Block(*map(statistics.mean, zip(*map(astuple, blocks), strict=True)))


def cpu_clock(processes: Sequence[int]) -> Callable[[], float]:
    """A clock of the seconds of processor time that these processes have taken."""
    clocks = []
    for process in processes:
        clock = ctypes.c_int()
        if ctypes.CDLL(None).clock_getcpuclockid(process, ctypes.byref(clock)) != 0:
            raise ProcessLookupError(process)
        clocks.append(clock.value)
    return lambda: sum(time.clock_gettime(clock) for clock in clocks)


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


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The median, and the 95% interval of it by drawing the values again, with repetition."""
    draw = random.Random(1)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(DRAWS))
    return statistics.median(values), medians[DRAWS // 40], medians[-DRAWS // 40 - 1]


def figures(fours: Sequence[Four]) -> list[Row]:
    """Recording against not recording, in time, in processor time, and where it happens against all the time."""
    return [
        measure.figure(
            "tokens/s while recording against not recording",
            0.98,
            interval([four.off.tpot / four.on.tpot for four in fours]),
        ),
        measure.figure(
            "processor time of a token, recording against not recording",
            1.02,
            interval([four.on.cpu / four.off.cpu for four in fours]),
            most=True,
        ),
        measure.figure(
            "what recording adds to a token besides its decodes, as a share of the token's time",
            0.02,
            interval([(four.on.rest - four.off.rest) / four.off.tpot for four in fours]),
            most=True,
        ),
    ]


async def run(generations: int, fours: int) -> tuple[list[Row], list[Row]]:
    """Rows and figures; of so many generations, and so many times four blocks of each."""
    found: list[Four] = []
    exact = True
    async with open_rig() as rig:
        task = prompts.novel(rig.vocabulary, ANSWER)
        stages = await rig.stages("0,15,30")
        pipe = await rig.pipeline(stages, None)
        cpu = cpu_clock([os.getpid(), *stages.processes])
        replies = Replies()
        pipe.observers.append(replies)
        for number in range(generations):
            async with pipe.generate(**measure.request(task, OFF, task.count)) as generation:
                for _ in range(fours):
                    found.append(await four_blocks(pipe, replies, cpu))
                generation.cancel()
                tokens = [token async for piece in generation for token in piece.tokens]
            exact &= await task.is_exact(rig, tokens)
            shown = " ".join(f"{figure['reached']:.4f}" for figure in figures(found))
            print(f"  [{number + 1}] {len(found)} times four blocks: {shown}", file=sys.stderr, flush=True)
    rows: list[Row] = []
    for contender, of in (("off", [four.off for four in found]), ("on", [four.on for four in found])):
        tpot, rest, cpu_ms = map(statistics.median, zip(*map(astuple, of), strict=True))
        name = {
            "bench": "tracing",
            "workload": task.name,
            "delay_ms": 0,
            "split": stages.split,
            "contender": contender,
        }
        rows.append(
            name
            | {
                "decode_tps": 1e3 / tpot,
                "tpot_ms": tpot,
                "rest_ms": rest,
                "cpu_ms": cpu_ms,
                "blocks": 2 * len(of),
            }
            | {"sessions": 1, "depth": 1, "width": 1, "exact": exact, "load": measure.load()}
        )
    rows[0]["ns_off"] = off_cost()
    rows[1] |= {"ns_a_span": span_cost(), "spans": statistics.median(four.spans for four in found)}
    return rows, figures(found)


def plot(rows: list[dict[str, Any]], folder: Path) -> None:
    """Time and processor time of a token, off and on."""
    figure, axes = report.panels(2, shared=False)
    for axis, column in zip(axes, ("tpot_ms", "cpu_ms"), strict=True):
        axis.barh([row["contender"] for row in rows], [row[column] for row in rows])
        axis.set(xlabel=column)
    report.save(figure, folder, "tracing")


def main(arguments: list[str]) -> None:
    """The command line."""
    options = report.parser("tracing", __doc__).parse_args(arguments)
    rows, figures = trio.run(run, *((1, 12) if options.quick else (4, 15)))
    report.finish(options, rows, figures, COLUMNS, plot)
