"""Where the boundaries are, on draftable text 100 ms away: how busy each stage is, and how much they overlap.

Splits of the demo model: 29/1, 15/15, one balanced by the service times of its stages in a short run
(`bench/balance.py`), and three stages balanced the same way. `busy` is each stage's share of the verify
interval (from the first verify window's decode to the last one's end); `all_computing` and `two_computing` are
the shares of it in which all, and at least two, stages compute at once, as a trace tells (`meshpipe trace`).
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import trio

from bench import measure, prompts, report
from bench.balance import balanced
from bench.measure import NGRAM, Cell, Row, Task
from bench.rig import EVEN, Rig, open_rig
from meshpipe import Coordinator
from meshpipe.telemetry.overlap import analyse

DELAY = 100
COLUMNS = (
    "contender", "split", "decode_tps", "decode_tps_low", "decode_tps_high", "busy", "all_computing", "two_computing",
    "service_ms", "depth", "width", "stale_tokens", "exact",
)  # fmt: skip


async def traced(rig: Rig, pipe: Coordinator, task: Task) -> Row:
    """One run, and when the stages computed."""
    async with pipe.tracing() as trace:
        row = await measure.with_pipeline(rig, pipe, task, NGRAM)
    found = analyse(trace)
    assert found is not None
    return row | {
        "all_computing": found.at_least(found.stages),
        "two_computing": found.at_least(2),
        "in_flight": found.in_flight[0],
        **{f"busy_{stage}": work.busy for stage, work in enumerate(found.work)},
        **{f"service_ms_{stage}": work.service * 1e3 for stage, work in enumerate(found.work)},
    }


def shown(row: Row, column: str) -> str:
    """One number a stage."""
    return " / ".join(f"{number:.3g}" for name, number in row.items() if name.startswith(f"{column}_"))


async def run(repetitions: int, tokens: int, full: bool) -> tuple[list[Row], list[Row]]:
    """Rows and figures; only of the even and the balanced split if not `full`."""
    async with open_rig() as rig:
        task = prompts.draftable(rig.vocabulary, tokens)
        even = await rig.stages(EVEN)
        splits = {"balanced": await balanced(rig, even)}
        if full:
            splits = {"29/1": "0,29,30", **splits}
            splits["three, balanced"] = await balanced(rig, even, 3)
        pipes = {("15/15", "15/15"): await rig.pipeline(even, DELAY)}
        for name, split in splits.items():
            stages = await rig.stages(split)
            pipes[name, stages.split] = await rig.pipeline(stages, DELAY)
        cells = [
            Cell(
                {
                    "bench": "topology",
                    "workload": task.name,
                    "delay_ms": DELAY,
                    "contender": name,
                    "split": split,
                },
                partial(traced, rig, pipe, task),
            )
            for (name, split), pipe in pipes.items()
        ]
        found = await measure.take_turns(cells, repetitions)
        at = next(index for index, cell in enumerate(cells) if cell.name["contender"] == "balanced")
        reached = sorted(row["all_computing"] for row in found[at])
        figures = [
            measure.figure(
                "balanced split, draftable: share of the interval with both stages computing",
                0.70,
                (reached[len(reached) // 2], reached[0], reached[-1]),
            )
        ]
        rows = measure.summarize(cells, found)
        for row in rows:
            row |= {column: shown(row, column) for column in ("busy", "service_ms")}
        return rows, figures


def plot(rows: list[dict[str, Any]], folder: Path) -> None:
    """Speed and overlap, side by side."""
    figure, axes = report.panels(2, shared=False)
    names = [f"{row['contender']}\n{row['split']}" for row in rows]
    axes[0].bar(names, [row["decode_tps"] for row in rows], color="C0")
    axes[0].set(ylabel="tokens/s", title=f"draftable, {DELAY} ms")
    for shift, (column, label) in enumerate((("all_computing", "all"), ("two_computing", "two or more"))):
        places = [at + 0.4 * shift - 0.2 for at in range(len(rows))]
        axes[1].bar(places, [row[column] for row in rows], 0.4, label=label)
    axes[1].set_xticks(range(len(rows)), names)
    axes[1].set(title="share of the time with stages computing", ylim=(0, 1))
    axes[1].legend(fontsize=8)
    report.save(figure, folder, "topology")


def main(arguments: list[str]) -> None:
    """The command line."""
    options = report.parser("topology", __doc__).parse_args(arguments)
    rows, figures = trio.run(run, *((1, 512, False) if options.quick else (3, prompts.LONGEST, True)))
    report.finish(options, rows, figures, COLUMNS, plot)
