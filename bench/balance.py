"""The split at which all stages take as long: from what two running stages take for the windows of a short run.

Both compute meanwhile, as they do when it counts; what each one measures at load, alone, is off by more on a machine
whose speed drifts. The median of a row's time over all full windows counts, so that a disturbance of some does not.
"""

from __future__ import annotations

import statistics

from bench import measure, prompts
from bench.rig import Rig, Stages
from meshpipe import Speculation
from meshpipe.telemetry.spans import Kind
from meshpipe.topology.split import even_split

TOKENS = 512
WIDTH = 16


async def balanced(rig: Rig, stages: Stages, count: int = 2) -> str:
    """The split into `count` stages, by `stages`, which are two, with nothing between them."""
    pipe = await rig.pipeline(stages, None)
    task = prompts.draftable(rig.vocabulary, TOKENS)
    async with pipe.tracing() as trace:
        await pipe.complete(**measure.request(task, Speculation(mode="ngram", width=WIDTH), TOKENS))
    full = [span for span in trace.spans if span.kind == Kind.COMPUTE and span.detail == WIDTH]
    first, last = (
        statistics.median((span.ended - span.began) / span.value for span in full if span.stage == stage)
        for stage in range(2)
    )
    layers = stages.boundaries[-1]
    layer = first / stages.boundaries[1]
    head = max(0.0, last - layer * (layers - stages.boundaries[1]))
    return ",".join(map(str, even_split([layer] * layers, count, tail=head)))
