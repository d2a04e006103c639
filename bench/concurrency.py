"""Many sessions at once, two stages 100 ms apart, with and without speculation.

A closed loop: as many sessions as the stages have lanes, each of which takes the next prompt when its last answer
is done. `decode_tps` is what all of them commit a second, prompts included, in a fixed time that begins when each
has begun to answer; the gaps between an answer's commits, spread over the tokens of a commit, are its `itl_p50_ms`
and `itl_p99_ms`. Prompts are mixed: a quarter draftable, a quarter greedy, half sampled.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import trio
from attrs import define, field

from bench import measure, prompts, report
from bench.measure import OFF, Cell, Row, Task
from bench.rig import Rig, Stages, open_rig
from meshpipe import Coordinator, Report, Speculation

DELAY = 100
ANSWER = 64  # tokens
MODES = {"serial": OFF, "n-gram": Speculation()}
COLUMNS = (
    "sessions", "contender", "decode_tps", "decode_tps_low", "decode_tps_high", "itl_p50_ms", "itl_p99_ms", "tokens",
    "stale_tokens", "stale_windows", "acceptance", "occupancy", "exact",
)  # fmt: skip


@define
class Loop:
    """What the sessions of one run did."""

    pipe: Coordinator
    speculation: Speculation
    tasks: Iterator[Task]
    begun: int = 0  # sessions that have committed something
    all_begun: trio.Event = field(factory=trio.Event)
    over: trio.Event = field(factory=trio.Event)
    commits: list[list[tuple[float, int]]] = field(factory=list)  # of every answer: when, how many tokens
    outputs: list[tuple[Task, list[int]]] = field(factory=list)
    reports: list[Report] = field(factory=list)

    async def session(self, sessions: int) -> None:
        """Answers one prompt after the other until the run is over."""
        silent = True
        while not self.over.is_set():
            task = next(self.tasks)
            commits: list[tuple[float, int]] = []
            self.commits.append(commits)
            tokens: list[int] = []
            self.outputs.append((task, tokens))
            async with (
                self.pipe.generate(
                    task.tokens,
                    max_tokens=task.count,
                    sampling=task.sampling(),
                    speculation=self.speculation,
                    ignore_end=True,
                    reuse=False,
                ) as generation,
                trio.open_nursery() as nursery,
            ):
                nursery.start_soon(self._cancel_when_over, generation.cancel)
                async for piece in generation:
                    if piece.tokens:
                        if silent:
                            silent = False
                            self._begin(sessions)
                        commits.append((trio.current_time(), len(piece.tokens)))
                        tokens += piece.tokens
                    if piece.report is not None:
                        self.reports.append(piece.report)
                nursery.cancel_scope.cancel()

    async def _cancel_when_over(self, cancel: Any) -> None:
        await self.over.wait()
        cancel()

    def _begin(self, sessions: int) -> None:
        self.begun += 1
        if self.begun == sessions:
            self.all_begun.set()


async def once(rig: Rig, pipe: Coordinator, sessions: int, speculation: Speculation, seconds: float) -> Row:
    """One run of the closed loop."""
    tasks = (
        prompts.mixed(rig.vocabulary, number, ANSWER) for number in itertools.cycle(range(prompts.MIXED))
    )
    loop = Loop(pipe, speculation, tasks)
    async with trio.open_nursery() as nursery:
        for _ in range(sessions):
            nursery.start_soon(loop.session, sessions)
        await loop.all_begun.wait()
        began = trio.current_time()
        await trio.sleep(seconds)
        ended = trio.current_time()
        loop.over.set()
    counted = [[(at, count) for at, count in commits if began < at <= ended] for commits in loop.commits]
    tokens = sum(count for commits in counted for _, count in commits)
    gaps = sorted(
        (at - before) / count * 1e3
        for commits in counted
        for (before, _), (at, count) in itertools.pairwise(commits)
        for _ in range(count)
    )
    judged = sum(source.judged for done in loop.reports for source in done.sources.values())
    accepted = sum(source.accepted for done in loop.reports for source in done.sources.values())
    exact = [await task.is_exact(rig, output) for task, output in loop.outputs if output]
    return {
        "tokens": tokens,
        "decode_tps": tokens / (ended - began),
        "tpot_ms": (ended - began) * 1e3 * sessions / tokens,
        "ttft_ms": statistics.median(done.ttft for done in loop.reports) * 1e3,
        "itl_p50_ms": gaps[len(gaps) // 2],
        "itl_p99_ms": gaps[len(gaps) * 99 // 100],
        "stale_tokens": sum(done.stale_tokens for done in loop.reports),
        "stale_windows": sum(done.stale_windows for done in loop.reports),
        "acceptance": accepted / judged if judged else None,
        "occupancy": statistics.mean(done.occupancy for done in loop.reports),
        "depth": statistics.mean(done.depth[0] for done in loop.reports),
        "width": statistics.mean(done.width[0] for done in loop.reports),
        "exact": all(exact),
        "load": measure.load(),
    }


async def run(counts: tuple[int, ...], seconds: float, repetitions: int) -> tuple[list[Row], list[Row]]:
    """Rows and figures."""
    async with open_rig() as rig:
        for number in range(prompts.MIXED):  # references first: making them would take the cores from a run
            task = prompts.mixed(rig.vocabulary, number, ANSWER)
            await rig.reference(task.tokens, task.count, task.temperature, task.seed)
        opened: dict[int, tuple[Stages, Coordinator]] = {}
        for count in counts:
            stages = await rig.stages("0,15,30", lanes=count, context=1024)
            opened[count] = (stages, await rig.pipeline(stages, DELAY))
        cells = [
            Cell(
                {
                    "bench": "concurrency",
                    "workload": "mixed",
                    "delay_ms": DELAY,
                    "split": "15/15",
                    "sessions": count,
                    "contender": mode,
                },
                partial(once, rig, opened[count][1], count, speculation, seconds),
            )
            for count in counts
            for mode, speculation in MODES.items()
        ]
        found = await measure.take_turns(cells, repetitions)
        runs = {
            (cell.name["sessions"], cell.name["contender"]): rows
            for cell, rows in zip(cells, found, strict=True)
        }
        figures = [
            measure.figure(
                "8 sessions without speculation against one session",
                7,
                measure.ratio(runs[8, "serial"], runs[1, "serial"]),
            )
        ]
        figures += [
            measure.figure(
                f"{count} sessions on mixed prompts, n-gram against serial",
                0.98,
                measure.ratio(runs[count, "n-gram"], runs[count, "serial"]),
            )
            for count in counts
            if count >= 8
        ]
        return measure.summarize(cells, found), figures


def plot(rows: list[dict[str, Any]], folder: Path) -> None:
    """Tokens a second of all sessions, and the gaps of each."""
    figure, axes = report.panels(2, shared=False)
    for mode in MODES:
        line = [row for row in rows if row["contender"] == mode]
        sessions = [row["sessions"] for row in line]
        axes[0].plot(sessions, [row["decode_tps"] for row in line], "o-", label=mode)
        axes[1].plot(sessions, [row["itl_p50_ms"] for row in line], "o-", label=f"{mode}, median")
        axes[1].plot(sessions, [row["itl_p99_ms"] for row in line], "x:", label=f"{mode}, 99%")
    axes[0].set(xlabel="sessions", ylabel="tokens/s of all", xscale="log", yscale="log")
    axes[1].set(xlabel="sessions", ylabel="ms between tokens of one", xscale="log")
    for axis in axes:
        axis.legend(fontsize=8)
    report.save(figure, folder, "concurrency")


def main(arguments: list[str]) -> None:
    """The command line."""
    options = report.parser("concurrency", __doc__).parse_args(arguments)
    full = ((1, 2, 4, 8, 16, 32), 15.0, 3)
    rows, figures = trio.run(run, *(((1, 8), 6.0, 1) if options.quick else full))
    report.finish(options, rows, figures, COLUMNS, plot)
