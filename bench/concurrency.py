"""Many sessions at once, two stages 100 ms apart, with and without speculation.

As many sessions as the stages have lanes, each with an answer that is too long to end. `decode_tps` is what all of
them commit a second in a fixed time that begins when each has begun to answer, so that no prompt is processed in it
(prompts cost the same with and without speculation, and an answer that goes faster would only bring the next prompt
sooner). The gaps between a session's commits, spread over the tokens of a commit, are `itl_p50_ms` and `itl_p99_ms`.
Prompts are mixed: a quarter draftable, a quarter greedy, half sampled; a lane that has one keeps it for the next run.
"""

from __future__ import annotations

import itertools
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import trio
from attrs import define, field

from bench import measure, prompts, report
from bench.measure import OFF, Cell, Row, Task
from bench.rig import Rig, Stages, open_rig
from meshpipe import Coordinator, Generation, Report, Speculation

DELAY = 100
ANSWER = 1024  # tokens, at most
CONTEXT = 2048
MODES = {"serial": OFF, "n-gram": Speculation()}
COLUMNS = (
    "sessions", "contender", "decode_tps", "decode_tps_low", "decode_tps_high", "itl_p50_ms", "itl_p99_ms", "tokens",
    "stale_tokens", "stale_windows", "acceptance", "occupancy", "exact",
)  # fmt: skip


@define
class Crowd:
    """What the sessions of one run did."""

    pipe: Coordinator
    speculation: Speculation
    silent: int  # sessions that have not committed anything yet
    all_begun: trio.Event = field(factory=trio.Event)
    over: trio.Event = field(factory=trio.Event)
    commits: list[list[tuple[float, int]]] = field(factory=list)  # of every session: when, how many tokens
    outputs: list[tuple[Task, list[int]]] = field(factory=list)
    reports: list[Report] = field(factory=list)

    async def session(self, task: Task) -> None:
        """Answers until the run is over."""
        commits: list[tuple[float, int]] = []
        tokens: list[int] = []
        self.commits.append(commits)
        self.outputs.append((task, tokens))
        async with (
            self.pipe.generate(
                **measure.request(task, self.speculation, task.count, reuse=True)
            ) as generation,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(self._cancel_when_over, generation)
            async for piece in generation:
                if piece.tokens:
                    if not commits:
                        self._has_begun()
                    commits.append((trio.current_time(), len(piece.tokens)))
                    tokens += piece.tokens
                if piece.report is not None:
                    self.reports.append(piece.report)
            nursery.cancel_scope.cancel()

    async def _cancel_when_over(self, generation: Generation) -> None:
        await self.over.wait()
        generation.cancel()

    def _has_begun(self) -> None:
        self.silent -= 1
        if not self.silent:
            self.all_begun.set()


async def once(rig: Rig, pipe: Coordinator, sessions: int, speculation: Speculation, seconds: float) -> Row:
    """One run."""
    crowd = Crowd(pipe, speculation, sessions)
    async with trio.open_nursery() as nursery:
        for number in range(sessions):
            nursery.start_soon(crowd.session, prompts.mixed(rig.vocabulary, number, ANSWER))
        await crowd.all_begun.wait()
        began = trio.current_time()
        await trio.sleep(seconds)
        ended = trio.current_time()
        crowd.over.set()
    counted = [[(at, count) for at, count in commits if began < at <= ended] for commits in crowd.commits]
    tokens = sum(count for commits in counted for _, count in commits)
    gaps = sorted(
        (at - before) / count * 1e3
        for commits in counted
        for (before, _), (at, count) in itertools.pairwise(commits)
        for _ in range(count)
    )
    judged = sum(source.judged for done in crowd.reports for source in done.sources.values())
    accepted = sum(source.accepted for done in crowd.reports for source in done.sources.values())
    exact = [await task.is_exact(rig, output) for task, output in crowd.outputs if output]
    return {
        "tokens": tokens,
        "decode_tps": tokens / (ended - began),
        "tpot_ms": (ended - began) * 1e3 * sessions / tokens,
        "ttft_ms": statistics.median(done.ttft for done in crowd.reports) * 1e3,
        "itl_p50_ms": gaps[len(gaps) // 2],
        "itl_p99_ms": gaps[len(gaps) * 99 // 100],
        "stale_tokens": sum(done.stale_tokens for done in crowd.reports),
        "stale_windows": sum(done.stale_windows for done in crowd.reports),
        "acceptance": accepted / judged if judged else None,
        "occupancy": statistics.mean(done.occupancy for done in crowd.reports),
        "depth": statistics.mean(done.depth[0] for done in crowd.reports),
        "width": statistics.mean(done.width[0] for done in crowd.reports),
        "exact": all(exact),
        "load": measure.load(),
    }


async def run(counts: tuple[int, ...], seconds: float, repetitions: int) -> tuple[list[Row], list[Row]]:
    """Rows and figures."""
    async with open_rig() as rig:
        opened: dict[int, tuple[Stages, Coordinator]] = {}
        for count in counts:
            stages = await rig.stages("0,15,30", lanes=count, context=CONTEXT)
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
            for number, count in enumerate(counts)
            for mode, speculation in (MODES.items() if number % 2 else reversed(MODES.items()))
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
    full = ((2, 4, 1, 8, 16, 32), 4.0, 3)  # 1 and 8, of which there is a ratio, one after the other
    rows, figures = trio.run(run, *(((1, 8), 4.0, 1) if options.quick else full))
    rows.sort(key=lambda row: row["sessions"])
    report.finish(options, rows, figures, COLUMNS, plot)
