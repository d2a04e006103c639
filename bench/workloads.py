"""What speculation gains on different work, two stages, greedy: n-grams, native MTP, and both.

Prompts of our own in the eleven categories of SPEED-Bench, five each, and three kinds of work that copies much:
editing a file, extracting JSON, and a coding agent's loop of several turns over a growing conversation
(`bench/data/workloads.jsonl`). `--speed-bench PATH` reads SPEED-Bench's own files instead: JSON lines, or Parquet if
pyarrow is installed, with `category` and `turns`. `entropy` says how much a prompt's answer may vary.

Contenders answer every prompt one after the other, serial decoding for fewer tokens (its speed does not depend on
them). Native MTP, at all delays, answers only the first prompt of a category; n-grams at 100 ms three (`--prompts`).
The model is SmolLM2 with a NextN block (docs/mtp_model.md), at the coordinator if nothing else is said. A row's speed
is the sum of its tokens over the sum of their times; `speedup` is against serial decoding of the same prompts,
`speedup_low` and `speedup_high` of single ones.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import trio
from attrs import frozen

from bench import measure, report
from bench.measure import AUTO, MTP, MTP_LAST, MTP_NGRAM, NGRAM, OFF, Cell, Row, Task
from bench.models.smollm2_mtp import assemble
from bench.rig import EVEN, Rig, open_rig
from meshpipe import Coordinator, Report

DELAY = 100
DATA = Path(__file__).parent / "data" / "workloads.jsonl"
CONTEXT = 4096
MODES = {
    "serial": OFF,
    "n-gram": NGRAM,
    "auto": AUTO,
    "mtp at the last stage": MTP_LAST,
    "mtp": MTP,
    "mtp+ngram": MTP_NGRAM,
}
COLUMNS = (
    "delay_ms", "workload", "entropy", "contender", "prompts", "decode_tps", "speedup", "speedup_low", "speedup_high",
    "latency_ms", "ngram_acceptance", "mtp_acceptance", "stale_tokens", "overlapped", "tokens", "exact",
)  # fmt: skip
ALL = "all"
"""The workload of the rows over all categories."""


@frozen
class Part:
    """Contenders at one delay, for the prompts of each category from one on."""

    delay: float
    contenders: Sequence[str]
    first: int
    count: int


FULL = (
    Part(DELAY, ("serial", "n-gram", "mtp at the last stage", "mtp", "mtp+ngram"), 0, 1),
    Part(50, ("serial", "mtp", "mtp+ngram"), 0, 1),
    Part(0, ("serial", "auto", "mtp", "mtp+ngram"), 0, 1),
)
QUICK = FULL[:1]
QUICK_CATEGORIES = ("qa", "edit-this-file")
SERIAL_TOKENS = 5


@frozen
class Prompt:
    """What the user says, turn by turn."""

    category: str
    turns: tuple[str, ...]
    entropy: str


def read(path: Path) -> list[Prompt]:
    """Prompts of a file. Ends the program if it is not in one of the two formats."""
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet

            rows = pyarrow.parquet.read_table(path).to_pylist()
        else:
            rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
        return [Prompt(row["category"], tuple(row["turns"]), _entropy(row)) for row in rows]
    except ImportError:
        sys.exit(f"{path} is a Parquet file: install pyarrow to read it, or convert it to JSON lines")
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.exit(f"{path} has no prompts, one JSON object a line with 'category' and 'turns': {error!r}")


def _entropy(row: dict[str, Any]) -> str:
    """SPEED-Bench's throughput files say it in the category."""
    category = row["category"].partition("_")[0]
    return row.get("entropy") or (category if category in ("low", "mixed", "high") else "")


@frozen
class Answer:
    """One turn of a prompt by one contender."""

    part: Part
    prompt: Prompt
    contender: str
    report: Report
    exact: bool


async def answer(
    rig: Rig, pipe: Coordinator, part: Part, prompt: Prompt, tokens: int, answers: list[Answer]
) -> Row:
    """All turns of one prompt, each by all contenders."""
    conversation: list[dict[str, str]] = []
    for turn in prompt.turns:
        conversation.append({"role": "user", "content": turn})
        rendered = rig.vocabulary.tokenize(rig.vocabulary.render_chat(conversation), start=False)
        task = Task(prompt.category, rendered, min(tokens, CONTEXT - len(rendered)))
        if task.count < 2:
            break
        text = ""
        for contender in part.contenders:
            mode = MODES[contender]
            count = min(SERIAL_TOKENS, task.count) if contender == "serial" else task.count
            done = await pipe.complete(**measure.request(task, mode, count, reuse=not mode.uses_mtp))
            exact = await task.is_exact(rig, done.tokens)
            answers.append(Answer(part, prompt, contender, done.report, exact))
            text = done.text
        conversation.append({"role": "assistant", "content": text})
    await rig.settle(part.delay)
    return {"exact": all(one.exact for one in answers)}


def rate(answers: Iterable[Answer]) -> float:
    """Tokens a second after the first one, of all together."""
    timed = [(one.report.completion_tokens - 1, one.report.tpot) for one in answers if one.report.tpot]
    return sum(tokens for tokens, _ in timed) / sum(tokens * tpot for tokens, tpot in timed)


def against(over: str, under: str, answers: Sequence[Answer]) -> tuple[float, float, float]:
    """Speed of one contender by another's on the prompts that both answered, all together; range over prompts."""

    def speedup(of: Sequence[Answer]) -> float:
        return rate(a for a in of if a.contender == over) / rate(a for a in of if a.contender == under)

    both = [one for one in answers if {over, under} <= set(one.part.contenders)]
    each = [speedup(list(of)) for _, of in groupby(both, lambda one: (id(one.part), id(one.prompt)))]
    return speedup(both), min(each), max(each)


def row_of(delay: float, workload: str, contender: str, answers: Sequence[Answer]) -> Row:
    """One contender's answers to some prompts, of all `answers` to these."""
    own = [one for one in answers if one.contender == contender]
    reports = [one.report for one in own]
    spans = [done.total - done.ttft for done in reports]
    row: Row = {
        "bench": "workloads",
        "contender": contender,
        "workload": workload,
        "entropy": ", ".join(dict.fromkeys(one.prompt.entropy for one in own if one.prompt.entropy)),
        "delay_ms": delay,
        "split": "15/15",
        "sessions": 1,
        "prompts": len({id(one.prompt) for one in own}),
        "tokens": sum(done.completion_tokens for done in reports),
        "decode_tps": rate(own),
        "tpot_ms": 1e3 / rate(own),
        "latency_ms": statistics.mean(done.total for done in reports) * 1e3,
        "stale_tokens": sum(done.stale_tokens for done in reports),
        "overlapped": sum(d.overlapped * s for d, s in zip(reports, spans, strict=True)) / sum(spans),
        "exact": all(one.exact for one in own),
    }
    for name in ("ngram", "mtp"):
        judged = sum(done.sources[name].judged for done in reports if name in done.sources)
        accepted = sum(done.sources[name].accepted for done in reports if name in done.sources)
        row[f"{name}_acceptance"] = accepted / judged if judged else None
    if contender != "serial":
        row["speedup"], row["speedup_low"], row["speedup_high"] = against(contender, "serial", answers)
    return row


def rows_of(answers: Sequence[Answer]) -> list[Row]:
    """For each delay, workload and contender."""
    rows = []
    for delay in dict.fromkeys(one.part.delay for one in answers):
        there = [one for one in answers if one.part.delay == delay]
        for workload in [ALL, *dict.fromkeys(one.prompt.category for one in there)]:
            of = [one for one in there if workload in (ALL, one.prompt.category)]
            rows += [
                row_of(delay, workload, name, of) for name in dict.fromkeys(one.contender for one in there)
            ]
    return rows


def figures_of(answers: Sequence[Answer], rows: Sequence[Row]) -> list[Row]:
    """The slowest category, and native MTP on all of them."""
    far = [one for one in answers if one.part.delay == DELAY]
    slowest = min(
        (
            row
            for row in rows
            if (row["delay_ms"], row["contender"]) == (DELAY, "n-gram") and row["workload"] != ALL
        ),
        key=lambda row: float(row["speedup"]),
    )
    mixed = [one for one in far if "mtp" in one.part.contenders]
    better = max("mtp", "n-gram", key=lambda name: rate(one for one in mixed if one.contender == name))
    return [
        measure.figure(
            f"slowest category ({slowest['workload']}), n-gram against serial",
            0.98,
            (slowest["speedup"], slowest["speedup_low"], slowest["speedup_high"]),
        ),
        measure.figure(
            "mixed workloads: mtp+ngram against serial", 1.3, against("mtp+ngram", "serial", mixed)
        ),
        measure.figure(
            f"mixed workloads: mtp+ngram against the better of mtp and n-gram ({better})",
            0.98,
            against("mtp+ngram", better, mixed),
        ),
    ]


async def run(prompts: Sequence[Prompt], parts: Sequence[Part], tokens: int) -> tuple[list[Row], list[Row]]:
    """Rows and figures."""
    answers: list[Answer] = []
    by_category: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_category.setdefault(prompt.category, []).append(prompt)
    async with open_rig(assemble()) as rig:
        stages = await rig.stages(EVEN, context=CONTEXT)
        pipes = {part.delay: await rig.pipeline(stages, part.delay) for part in parts}
        for part in parts:
            cells = [
                Cell(
                    {"delay_ms": part.delay, "workload": category},
                    partial(answer, rig, pipes[part.delay], part, prompt, tokens, answers),
                )
                for category, of in by_category.items()
                for prompt in of[part.first : part.first + part.count]
            ]
            await measure.take_turns(cells, 1)
    rows = rows_of(answers)
    return rows, figures_of(answers, rows)


def plot(rows: list[dict[str, Any]], folder: Path) -> None:
    """Speed against no speculation, by category."""
    figure, (axis,) = report.panels(1)
    figure.set_size_inches(7, 6)
    far = [row for row in rows if row["delay_ms"] == DELAY and row["contender"] != "serial"]
    names = list(dict.fromkeys(row["workload"] for row in far))
    for number, contender in enumerate(dict.fromkeys(row["contender"] for row in far)):
        of = {row["workload"]: row["speedup"] for row in far if row["contender"] == contender}
        places = [at + 0.27 * number for at, name in enumerate(names) if name in of]
        axis.barh(places, list(of.values()), height=0.27, label=contender)
    axis.set(xlabel=f"speed against no speculation, {DELAY} ms", yticks=range(len(names)), yticklabels=names)
    axis.axvline(1, color="grey", linestyle=":")
    axis.legend(fontsize=8)
    report.save(figure, folder, "workloads")


def main(arguments: list[str]) -> None:
    """The command line."""
    parser = report.parser("workloads", __doc__)
    parser.add_argument("--speed-bench", type=Path, metavar="PATH", help="a file of SPEED-Bench")
    parser.add_argument(
        "--prompts", type=int, default=3, help="of every category, at most, for n-grams at 100 ms"
    )
    parser.add_argument("--tokens", type=int, default=24, help="of every answer but the serial ones")
    options = parser.parse_args(arguments)
    prompts = read(options.speed_bench or DATA)
    if options.quick:
        prompts = [prompt for prompt in prompts if prompt.category in QUICK_CATEGORIES] or prompts
    parts = QUICK if options.quick else (*FULL, Part(DELAY, ("serial", "n-gram"), 1, options.prompts - 1))
    rows, figures = trio.run(run, prompts, parts, options.tokens)
    report.finish(options, rows, figures, COLUMNS, plot)
