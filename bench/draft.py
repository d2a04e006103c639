"""A draft model at the coordinator: the target as its own draft, and a shallow one, two stages 100 ms apart.

`made_tps` is what the draft generated in a second of its own computing, catching up with the prompt included, while it
shared the cores with the stages: of a short answer it says little.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

import trio

from bench import measure, prompts, report
from bench.measure import OFF, Cell, Row, Task
from bench.models.shallow import write_shallow
from bench.rig import Rig, open_rig
from meshpipe import Coordinator, Speculation

DELAY = 100
SHALLOW = (*range(12), *range(16, 30))
COLUMNS = (
    "contender", "delay_ms", "decode_tps", "decode_tps_low", "decode_tps_high", "made_tps", "acceptance", "tokens",
    "depth", "width", "stale_tokens", "occupancy", "exact",
)  # fmt: skip


async def once(rig: Rig, pipe: Coordinator, task: Task, speculation: Speculation, count: int) -> Row:
    """A row of one request, with the draft's own rate."""
    done = await pipe.complete(**measure.request(task, speculation, count))
    source = done.report.sources.get("draft")
    made = source.made / source.seconds if source is not None and source.seconds else None
    return measure.of_completion(done) | {"made_tps": made, "exact": await task.is_exact(rig, done.tokens)}


async def run(count: int, repetitions: int) -> tuple[list[Row], list[Row]]:
    """Rows, and the rate of the pipeline over that of the draft."""
    with tempfile.TemporaryDirectory() as folder:
        async with open_rig() as rig:
            shallow = write_shallow(rig.model, SHALLOW, Path(folder) / "shallow.gguf")
            pipe = await rig.pipeline(await rig.stages("0,15,30"), DELAY)
            task = prompts.novel(rig.vocabulary, count)
            ways = {
                "serial": (OFF, max(8, count // 8)),
                "itself": (Speculation(mode="draft", draft=rig.model), count),
                "shallow": (Speculation(mode="draft", draft=shallow), count),
                "shallow + n-gram": (Speculation(mode="draft+ngram", draft=shallow), count),
            }
            cells = [
                Cell(
                    {"bench": "draft", "contender": name, "delay_ms": DELAY},
                    partial(once, rig, pipe, task, *way),
                )
                for name, way in ways.items()
            ]
            found = await measure.take_turns(cells, repetitions)
    itself = found[list(ways).index("itself")]
    under = [{"decode_tps": row["made_tps"]} for row in itself]
    figure = measure.figure(
        "novel, target as its own draft against the draft", 0.8, measure.ratio(itself, under)
    )
    return measure.summarize(cells, found), [figure]


def main(arguments: list[str]) -> None:
    """The command line."""
    options = report.parser("draft", __doc__).parse_args(arguments)
    rows, figures = trio.run(run, 24 if options.quick else 128, 1 if options.quick else 3)
    report.finish(options, rows, figures, COLUMNS)
