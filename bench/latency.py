"""Speed by link delay: llama.cpp's RPC backend, meshpipe without speculation, with n-grams, with native MTP.

Two stages, one thread each, split so that both take as long (`bench/balance.py`; in halves with `--quick`); the delay
is one way, on the link between the stages and on the return. llama.cpp's RPC backend has the same layers and the head
on its server, behind the same kind of proxy, the delay each way. What goes token by token is measured on fewer tokens
(`tokens`), and at most delays on novel text only: its speed does not depend on what the text says.

Native MTP, and what is measured beside it, runs on SmolLM2 with a NextN block (`model`; docs/mtp_model.md): at the
coordinator, if nothing else is said.
`overlapped` is the share of the decode time with two or more windows in flight, `latency_ms` a whole request's time.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import trio
from attrs import evolve, frozen

from bench import measure, prompts, report
from bench.balance import balanced
from bench.measure import AUTO, MTP, MTP_LAST, MTP_NGRAM, NGRAM, OFF, Cell, Row
from bench.models.smollm2_mtp import assemble
from bench.rig import EVEN, Peer, Rig, open_rig
from meshpipe import Coordinator, Speculation

RPC = "llama.cpp RPC"
COLUMNS = (
    "model", "workload", "delay_ms", "contender", "decode_tps", "decode_tps_low", "decode_tps_high", "tpot_ms",
    "ttft_ms", "latency_ms", "tokens", "depth", "width", "ngram_acceptance", "mtp_acceptance", "stale_tokens",
    "occupancy", "overlapped", "exact",
)  # fmt: skip
ROUND = 2
"""Tokens that native MTP alone commits in a round trip, about."""


@frozen
class Contender:
    """Someone to measure: llama.cpp's RPC backend if `speculation` is None.

    `pace`: tokens a round trip, about; 0 for one that does not wait for round trips on draftable text.
    """

    name: str
    speculation: Speculation | None
    pace: int = 1


PLAIN = (
    Contender(RPC, None),
    Contender("serial", OFF),
    Contender("n-gram", NGRAM, 0),
)
LAST = ("mtp at the last stage, depth 1", "mtp at the last stage")
NEXTN = (
    Contender("serial", OFF),
    Contender("auto", AUTO, 0),
    Contender(LAST[0], evolve(MTP_LAST, depth=1), ROUND),
    Contender(LAST[1], MTP_LAST, ROUND),
    Contender("mtp", MTP, ROUND),
    Contender("mtp+ngram", MTP_NGRAM, 0),
    Contender("n-gram", NGRAM, 0),
)


@frozen
class Part:
    """Contenders at some delays, in turns; `seconds` is what a request of serial decoding may take, about.

    `longest`: tokens of draftable text from one who does not wait for round trips.
    """

    model: str
    contenders: Sequence[Contender]
    workload: str
    delays: Sequence[float]
    repetitions: int
    seconds: float
    longest: int = prompts.LONGEST

    def tokens(self, contender: Contender, delay: float) -> int:
        """How many to generate."""
        if self.workload == "draftable" and not contender.pace:
            return self.longest
        count = int(self.seconds / (0.03 + 2 * delay / 1e3))
        return max(6, min(64, count)) * (contender.pace if self.workload == "draftable" else 1)


def only(contenders: Sequence[Contender], *names: str) -> list[Contender]:
    """Those of that name, in that order."""
    return [contender for name in names for contender in contenders if contender.name == name]


# Where a ratio is asked for, its two sides are in one part, and there are more repetitions.
FULL = (
    Part("SmolLM2", PLAIN, "draftable", (0, 100), 3, 2.2),
    Part("SmolLM2", PLAIN, "novel", (0, 100), 3, 3.3),
    Part("SmolLM2", only(PLAIN, "n-gram"), "draftable", (10, 25, 50, 150), 3, 1.0),
    Part("SmolLM2", PLAIN, "novel", (10, 25, 50, 150), 3, 1.5),
    Part("NextN", only(NEXTN, "serial", *LAST, "mtp", "mtp+ngram", "n-gram"), "draftable", (100,), 3, 2.2),
    Part("NextN", only(NEXTN, "serial", LAST[1], "mtp", "mtp+ngram"), "novel", (100,), 3, 3.3),
    Part("NextN", only(NEXTN, "serial", "auto", "mtp", "mtp+ngram"), "novel", (0,), 4, 1.6),
    Part("NextN", only(NEXTN, "serial", "mtp", "mtp+ngram"), "draftable", (0, 50), 3, 1.5),
    Part("NextN", only(NEXTN, "serial", "mtp", "mtp+ngram"), "novel", (50,), 3, 2.0),
)
QUICK = (
    Part("SmolLM2", PLAIN, "draftable", (0, 100), 1, 1.0, longest=256),
    Part("SmolLM2", PLAIN, "novel", (0, 100), 1, 1.0),
)


@frozen
class Setup:
    """What runs for one model."""

    rig: Rig
    split: str
    pipes: Mapping[float, Coordinator]
    peers: Mapping[float, Peer]


async def set_up(rig: Rig, parts: Sequence[Part], *, even: bool) -> Setup:
    """Stages, a pipeline for each delay, and llama.cpp's peers where they are wanted."""
    stages = await rig.stages(EVEN)
    split = EVEN if even else await balanced(rig, stages)
    if split != EVEN:
        stages = await rig.stages(split)
    pipes = {delay: await rig.pipeline(stages, delay) for part in parts for delay in part.delays}
    peers: dict[float, Peer] = {}

    async def open_peer(delay: float) -> None:
        peers[delay] = await rig.rpc(stages.boundaries[2] - stages.boundaries[1], delay)

    async with trio.open_nursery() as nursery:  # loading over a long link is mostly waiting
        for delay in {delay for part in parts if only(part.contenders, RPC) for delay in part.delays}:
            nursery.start_soon(open_peer, delay)
    return Setup(rig, stages.split, pipes, peers)


async def settled(rig: Rig, way: Callable[[], Awaitable[Row]], delay: float) -> Row:
    """Measures, then leaves the stages' lanes free for the next pipeline."""
    row = await way()
    await rig.settle(delay)
    return row


def cells(setup: Setup, part: Part) -> list[Cell]:
    """Contenders side by side, at every other delay in the opposite order: those at two delays are near too."""
    made: list[Cell] = []
    rig = setup.rig
    for number, delay in enumerate(part.delays):
        for contender in reversed(part.contenders) if number % 2 else part.contenders:
            count = part.tokens(contender, delay)
            task = (
                prompts.draftable(rig.vocabulary)
                if part.workload == "draftable"
                else prompts.novel(rig.vocabulary, 64)
            )
            way: Callable[[], Awaitable[Row]]
            if contender.speculation is None:
                way = partial(measure.with_peer, rig, setup.peers[delay], task, count)
            else:
                way = partial(
                    measure.with_pipeline, rig, setup.pipes[delay], task, contender.speculation, count
                )
            name = {
                "bench": "latency",
                "model": part.model,
                "workload": part.workload,
                "delay_ms": delay,
                "contender": contender.name,
                "split": setup.split,
            }
            made.append(Cell(name, partial(settled, rig, way, delay)))
    return made


Key = tuple[str, str, float, str]
"""Model, workload, delay, contender."""


def at_least(
    least: float, model: str, workload: str, delay: float, over: str, under: str
) -> tuple[float, Key, Key]:
    """Two contenders side by side."""
    return least, (model, workload, delay, over), (model, workload, delay, under)


RATIOS: tuple[tuple[float, Key, Key], ...] = (
    (0.90, ("SmolLM2", "draftable", 100, "n-gram"), ("SmolLM2", "draftable", 0, "n-gram")),
    at_least(25, "SmolLM2", "draftable", 100, "n-gram", RPC),
    at_least(0.98, "SmolLM2", "novel", 0, "n-gram", "serial"),
    at_least(1.1, "SmolLM2", "novel", 0, "serial", RPC),
    at_least(0.98, "SmolLM2", "novel", 100, "n-gram", "serial"),
    at_least(1.0, "SmolLM2", "novel", 100, "serial", RPC),
    at_least(8, "NextN", "draftable", 100, "mtp+ngram", LAST[0]),
    at_least(0.98, "NextN", "draftable", 100, "mtp+ngram", "n-gram"),
    at_least(1.4, "NextN", "novel", 100, "mtp", "serial"),
    at_least(0.97, "NextN", "novel", 0, "auto", "serial"),
)
"""How much the first runs should be at least, by the second."""


def figures(runs: Mapping[Key, Sequence[Row]]) -> list[Row]:
    """The ratios that matter, of what was measured."""
    made = []
    for least, over, under in RATIOS:
        if over in runs and under in runs:
            model, workload, delay, contender = over
            other = under[3] if over[2] == under[2] else f"{under[2]:g} ms"
            what = f"{model}, {workload}, {delay:g} ms: {contender} against {other}"
            made.append(measure.figure(what, least, measure.ratio(runs[over], runs[under])))
    return made


async def run(parts: Sequence[Part], *, even: bool = False) -> tuple[list[Row], list[Row]]:
    """Rows and figures; `even`: of halves, which takes less time to set up."""
    rows: list[Row] = []
    runs: dict[Key, list[Row]] = {}
    for model in dict.fromkeys(part.model for part in parts):
        of = [part for part in parts if part.model == model]
        async with open_rig(assemble() if model == "NextN" else None) as rig:
            setup = await set_up(rig, of, even=even)
            for part in of:
                measured = cells(setup, part)
                found = await measure.take_turns(measured, part.repetitions)
                rows += measure.summarize(measured, found)
                for cell, some in zip(measured, found, strict=True):
                    name = cell.name
                    runs[name["model"], name["workload"], name["delay_ms"], name["contender"]] = some
    rows.sort(key=lambda row: (row["model"] == "NextN", row["workload"], row["delay_ms"]))
    return rows, figures(runs)


def plot(rows: list[dict[str, Any]], folder: Path) -> None:
    """Speed over delay, one panel a workload."""
    figure, axes = report.panels(2)
    for axis, workload in zip(axes, ("draftable", "novel"), strict=True):
        for model, contender in dict.fromkeys((row["model"], row["contender"]) for row in rows):
            named = (model, workload, contender)
            line = [row for row in rows if (row["model"], row["workload"], row["contender"]) == named]
            if not line:
                continue
            delays = [row["delay_ms"] for row in line]
            rates = [row["decode_tps"] for row in line]
            axis.plot(delays, rates, "o-" if model == "SmolLM2" else "x:", label=f"{model}, {contender}")
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
    axes[0].legend(fontsize=6)
    report.save(figure, folder, "latency")


def main(arguments: list[str]) -> None:
    """The command line."""
    options = report.parser("latency", __doc__).parse_args(arguments)
    quick = options.quick
    rows, figures = trio.run(partial(run, QUICK if quick else FULL, even=quick))
    report.finish(options, rows, figures, COLUMNS, plot)
