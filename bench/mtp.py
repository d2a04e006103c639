"""What the placement of native MTP, the length of its chains and the gating of n-gram tails each contribute.

SmolLM2 with a NextN block (`bench.models.smollm2_mtp`), two stages of 15 layers in processes of their own, one thread
each, the delay on the link and on the return. All ways answer the same prompts in turn; a ratio is of one round's runs.
Prints a Markdown table.

Columns: `at`: where it drafts; `chain`: drafts that a reply carries at most (at the coordinator, chains end where they
have become too unsure to be sent); `tail`: prompt tokens whose hidden rows the coordinator is sent; `gate`: tokens that
must agree before an n-gram continues; `over_off`: speed over that without speculation, with its range; `accepted`:
share of judged MTP drafts that were right; `made`: tokens that the coordinator drafted for each one of the output;
`overlapped`: share of the time with two windows or more in flight.
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from typing import Any

import trio
from attrs import evolve, field, frozen

from bench import prompts, report
from bench.measure import NGRAM, OFF, Row, Task
from bench.models.smollm2_mtp import assemble
from meshpipe import Conditions, Coordinator, Pipeline, Speculation
from meshpipe.speculation.ngram import NgramConfig

LAST = Speculation(mode="mtp", mtp_at="last")
FAR = Speculation(mode="mtp", mtp_at="coordinator")


def gated(speculation: Speculation, least: int) -> Speculation:
    """With n-grams behind a match of so many tokens."""
    return evolve(speculation, mode="mtp+ngram", ngram=NgramConfig(min_match=least))


@frozen
class Way:
    """A row of the table; `columns` say what is particular to it; `quick`: also with --quick."""

    name: str
    speculation: Speculation
    columns: dict[str, Any] = field(factory=dict)
    quick: bool = False


WAYS = (
    Way("off", OFF, quick=True),
    Way("mtp, depth 1", evolve(LAST, depth=1), {"at": "last", "chain": 4}),
    Way("mtp", evolve(LAST, mtp_max=1), {"at": "last", "chain": 1}),
    Way("mtp", LAST, {"at": "last", "chain": 4}, quick=True),
    Way("mtp", evolve(LAST, mtp_max=8), {"at": "last", "chain": 8}),
    Way("mtp", evolve(FAR, mtp_tail=1), {"at": "coordinator", "tail": 1}),
    Way("mtp", evolve(FAR, mtp_tail=32), {"at": "coordinator", "tail": 32}),
    Way("mtp", FAR, {"at": "coordinator", "tail": 256}, quick=True),
    Way("ngram", NGRAM, {"gate": 2}),
    Way("mtp+ngram", gated(LAST, 2), {"at": "last", "chain": 4, "gate": 2}),
    Way("mtp+ngram", gated(FAR, 1), {"at": "coordinator", "tail": 256, "gate": 1}),
    Way("mtp+ngram", gated(FAR, 2), {"at": "coordinator", "tail": 256, "gate": 2}),
    Way("mtp+ngram", gated(FAR, 4), {"at": "coordinator", "tail": 256, "gate": 4}),
    Way("auto", Speculation(), {"tail": 256, "gate": 2}, quick=True),
)
COLUMNS = (
    "workload", "delay_ms", "mode", "at", "chain", "tail", "gate", "tps", "over_off", "low", "high", "accepted", "made",
    "stale_per_token", "overlapped", "exact",
)  # fmt: skip


def tasks(pipe: Coordinator, tokens: int) -> list[Task]:
    """Open questions answered greedily and sampled, and a table that the model goes on copying."""
    question = prompts.novel(pipe.vocabulary, tokens)
    greedy = evolve(prompts.novel(pipe.vocabulary, tokens, 1), name="greedy", temperature=0.0)
    return [greedy, question, prompts.draftable(pipe.vocabulary, 4 * tokens)]


async def measured(pipe: Coordinator, task: Task, way: Way, unsplit: dict[str, tuple[int, ...]]) -> Row:
    """One answer; `unsplit` has what the first way said to each task."""
    count = max(16, task.count // 4) if way.name == "off" and task.name == "draftable" else task.count
    done = await pipe.complete(
        task.tokens,
        max_tokens=count,
        sampling=task.sampling(),
        speculation=way.speculation,
        ignore_end=True,
        reuse=False,
    )
    before = unsplit.setdefault(task.name, done.tokens)
    shared = min(len(before), len(done.tokens))
    if len(done.tokens) > len(before):
        unsplit[task.name] = done.tokens
    found = done.report.sources.get("mtp")
    return {
        "tps": done.report.decode_tps or 0.0,
        "accepted": found.acceptance if found is not None and found.judged else None,
        "made": found.made / len(done.tokens) if found is not None else None,
        "stale_per_token": done.report.stale_tokens / len(done.tokens),
        "overlapped": done.report.overlapped,
        "exact": before[:shared] == done.tokens[:shared],
    }


async def run(
    delays: list[float], workloads: list[str], tokens: int, rounds: int, ways: list[Way]
) -> list[Row]:
    """A row for every delay, task and way."""
    rows: list[Row] = []
    for delay in delays:
        conditions = Conditions(delay=delay / 1000) if delay else None
        async with Pipeline.spawn(assemble(), "0,15,30", context=2048, conditions=conditions) as pipe:
            for task in [task for task in tasks(pipe, tokens) if task.name in workloads]:
                found: defaultdict[int, list[Row]] = defaultdict(list)
                said: dict[str, tuple[int, ...]] = {}
                for _ in range(rounds):
                    for number, way in enumerate(ways):
                        found[number].append(await measured(pipe, task, way, said))
                        print(task.name, delay, way.name, way.columns, found[number][-1], file=sys.stderr)
                off = [row["tps"] for row in found[0]]
                for number, way in enumerate(ways):
                    made = found[number]
                    ratios = [row["tps"] / base for row, base in zip(made, off, strict=True)]
                    rows.append(
                        {"workload": task.name, "delay_ms": delay, "mode": way.name, **way.columns}
                        | {name: middle(made, name) for name in made[0] if name != "exact"}
                        | {"over_off": statistics.median(ratios), "low": min(ratios), "high": max(ratios)}
                        | {"exact": all(row["exact"] for row in made)}
                    )
    return rows


def middle(rows: list[Row], name: str) -> float | None:
    """The median of a column, if it has values."""
    values = [row[name] for row in rows if row[name] is not None]
    return statistics.median(values) if values else None


def main(arguments: list[str]) -> None:
    """The command line."""
    made = report.parser("mtp", __doc__)
    made.add_argument("--delays", help="one way, in milliseconds (default: 0,50,100; --quick: 100)")
    made.add_argument(
        "--tokens",
        type=int,
        help="of each answer, four times as many draftable ones (default: 64; --quick: 16)",
    )
    made.add_argument("--rounds", type=int, help="default: 3; --quick: 1")
    made.add_argument("--workloads", help="default: greedy,novel,draftable; --quick: greedy,draftable")
    options = made.parse_args(arguments)
    quick = options.quick
    ways = [way for way in WAYS if way.quick or not quick]
    delays = [float(delay) for delay in (options.delays or ("100" if quick else "0,50,100")).split(",")]
    workloads = options.workloads or ("greedy,draftable" if quick else "greedy,novel,draftable")
    tokens = options.tokens or (16 if quick else 64)
    rounds = options.rounds or (1 if quick else 3)
    rows = trio.run(run, delays, workloads.split(","), tokens, rounds, ways)
    report.finish(options, rows, [], COLUMNS)
