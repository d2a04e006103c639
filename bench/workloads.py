"""What speculation gains on different work, two stages 100 ms apart, greedy.

Prompts of our own in the eleven categories of SPEED-Bench, five each, and three kinds of work that copies much:
editing a file, extracting JSON, and a coding agent's loop of several turns over a growing conversation
(`bench/data/workloads.jsonl`). `--speed-bench PATH` reads SPEED-Bench's own files instead: JSON lines, or Parquet if
pyarrow is installed, with `category` and `turns`. `entropy` says how much a prompt's answer may vary.

Every prompt is answered with n-grams and, for fewer tokens (its speed does not depend on them), without speculation.
A category's speed is the sum of its tokens over the sum of their times; `speedup_low` and `speedup_high` are of its
prompts, which are its repetitions.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import trio
from attrs import frozen

from bench import measure, report
from bench.measure import NGRAM, OFF, Cell, Row, Task
from bench.rig import Rig, open_rig
from meshpipe import Coordinator

DELAY = 100
DATA = Path(__file__).parent / "data" / "workloads.jsonl"
CONTEXT = 4096
COLUMNS = (
    "workload", "entropy", "prompts", "serial_tps", "decode_tps", "speedup", "speedup_low", "speedup_high",
    "acceptance", "stale_tokens", "tokens", "exact",
)  # fmt: skip


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


async def answer(rig: Rig, pipe: Coordinator, prompt: Prompt, tokens: int, few: int) -> Row:
    """All turns of one prompt, each with n-grams and then without."""
    conversation: list[dict[str, str]] = []
    sums = {"tokens": 0, "stale_tokens": 0, "judged": 0, "accepted": 0}
    spans = {"n-gram": 0.0, "serial": 0.0}
    counted = {"n-gram": 0, "serial": 0}
    exact = True
    for turn in prompt.turns:
        conversation.append({"role": "user", "content": turn})
        rendered = rig.vocabulary.tokenize(rig.vocabulary.render_chat(conversation), start=False)
        task = Task(prompt.category, rendered, min(tokens, CONTEXT - len(rendered)))
        if task.count < 2:
            break
        for mode, speculation, count in (
            ("n-gram", NGRAM, task.count),
            ("serial", OFF, min(few, task.count)),
        ):
            done = await pipe.complete(**measure.request(task, speculation, count))
            exact &= await task.is_exact(rig, done.tokens)
            if done.report.decode_tps and done.report.tpot:
                later = len(done.tokens) - 1
                spans[mode] += done.report.tpot * later
                counted[mode] += later
            if mode == "n-gram":
                text = done.text
                sums["tokens"] += len(done.tokens)
                sums["stale_tokens"] += done.report.stale_tokens
                for source in done.report.sources.values():
                    sums["judged"] += source.judged
                    sums["accepted"] += source.accepted
        conversation.append({"role": "assistant", "content": text})
    rates = {mode: counted[mode] / spans[mode] for mode in spans}
    return {
        **sums,
        "decode_tps": rates["n-gram"],
        "serial_tps": rates["serial"],
        "speedup": rates["n-gram"] / rates["serial"],
        "tpot_ms": 1e3 / rates["n-gram"],
        "exact": exact,
        "load": measure.load(),
    }


def of_category(category: str, entropy: str, runs: Sequence[Row]) -> Row:
    """The prompts of one category as one row."""
    seconds = sum(run["tokens"] / run["decode_tps"] for run in runs)
    serial = statistics.harmonic_mean([run["serial_tps"] for run in runs])
    tokens = sum(run["tokens"] for run in runs)
    judged = sum(run["judged"] for run in runs)
    speedups = [run["speedup"] for run in runs]
    return {
        "bench": "workloads",
        "contender": "n-gram",
        "workload": category,
        "entropy": entropy,
        "delay_ms": DELAY,
        "split": "15/15",
        "sessions": 1,
        "prompts": len(runs),
        "tokens": tokens,
        "decode_tps": tokens / seconds,
        "tpot_ms": seconds / tokens * 1e3,
        "serial_tps": serial,
        "speedup": tokens / seconds / serial,
        "speedup_low": min(speedups),
        "speedup_high": max(speedups),
        "acceptance": sum(run["accepted"] for run in runs) / judged if judged else None,
        "stale_tokens": sum(run["stale_tokens"] for run in runs),
        "exact": all(run["exact"] for run in runs),
    }


async def run(prompts: Sequence[Prompt], tokens: int, few: int) -> tuple[list[Row], list[Row]]:
    """A row for each category, and the slowest one as a figure."""
    async with open_rig() as rig:
        pipe = await rig.pipeline(await rig.stages("0,15,30", context=CONTEXT), DELAY)
        cells = [
            Cell({"workload": prompt.category}, partial(answer, rig, pipe, prompt, tokens, few))
            for prompt in prompts
        ]
        found = [runs[0] for runs in await measure.take_turns(cells, 1)]
    rows = []
    for category in dict.fromkeys(prompt.category for prompt in prompts):
        of = [
            (prompt, row) for prompt, row in zip(prompts, found, strict=True) if prompt.category == category
        ]
        entropy = ", ".join(dict.fromkeys(prompt.entropy for prompt, _ in of if prompt.entropy))
        rows.append(of_category(category, entropy, [row for _, row in of]))
    slowest = min(rows, key=lambda row: row["speedup"])
    figure = measure.figure(
        f"slowest category ({slowest['workload']}), n-gram against serial",
        0.98,
        (slowest["speedup"], slowest["speedup_low"], slowest["speedup_high"]),
    )
    return rows, [figure]


def plot(rows: list[dict[str, Any]], folder: Path) -> None:
    """Speed against no speculation, by category."""
    figure, (axis,) = report.panels(1)
    figure.set_size_inches(7, 4.4)
    rows = sorted(rows, key=lambda row: float(row["speedup"]))
    names = [row["workload"] for row in rows]
    spread = [
        [row["speedup"] - row["speedup_low"] for row in rows],
        [row["speedup_high"] - row["speedup"] for row in rows],
    ]
    axis.barh(names, [row["speedup"] for row in rows], xerr=[[max(0.0, x) for x in side] for side in spread])
    axis.axvline(1, color="grey", linestyle=":")
    axis.set(xlabel=f"speed against no speculation, {DELAY} ms")
    report.save(figure, folder, "workloads")


def main(arguments: list[str]) -> None:
    """The command line."""
    parser = report.parser("workloads", __doc__)
    parser.add_argument("--speed-bench", type=Path, metavar="PATH", help="a file of SPEED-Bench")
    parser.add_argument("--tokens", type=int, help="of every answer with n-grams")
    parser.add_argument("--prompts", type=int, help="of every category, at most")
    options = parser.parse_args(arguments)
    prompts = read(options.speed_bench or DATA)
    most = options.prompts or (1 if options.quick else len(prompts))
    chosen: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        if len(of := chosen.setdefault(prompt.category, [])) < most:
            of.append(prompt)
    if options.quick:
        chosen = {name: of for name, of in chosen.items() if name in ("qa", "edit-this-file")} or chosen
    tokens, few = options.tokens or (24 if options.quick else 32), 8
    rows, figures = trio.run(run, [prompt for of in chosen.values() for prompt in of], tokens, few)
    report.finish(options, rows, figures, COLUMNS, plot)
