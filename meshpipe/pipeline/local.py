"""A whole pipeline in this process: stages as actors, joined by memory; for tests and small use."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import trio

from meshpipe.actors import supervise
from meshpipe.actors.scope import owned_nursery
from meshpipe.llama.engine import StageEngine
from meshpipe.llama.slicing import slice_model
from meshpipe.llama.vocabulary import Vocabulary
from meshpipe.pipeline.coordinator import STALL_DEADLINE, Coordinator
from meshpipe.pipeline.runner import LlamaRunner, Runner
from meshpipe.pipeline.sink import ReturnSink
from meshpipe.pipeline.stage import Inlet, Route, Sender, Stage, stage_mailbox


def join_stages(nursery: trio.Nursery, runners: Sequence[Runner], sink: Sender) -> tuple[Sender, list[Stage]]:
    """Starts a stage actor for each runner, joined in order by memory; returns the way to the first, and them."""
    downstream: Sender | None = None
    stages: list[Stage] = []
    for index, runner in reversed(list(enumerate(runners))):
        mailbox = stage_mailbox()
        stage = Stage(mailbox, index, runner)
        stages.insert(0, stage)
        nursery.start_soon(supervise, mailbox, lambda _, stage=stage: stage)
        downstream = Inlet(mailbox, Route(downstream, sink))
    assert downstream is not None
    return downstream, stages


@asynccontextmanager
async def open_local(
    model: str | Path,
    boundaries: Sequence[int],
    *,
    stall_deadline: float = STALL_DEADLINE,
    **engine: Any,
) -> AsyncIterator[Coordinator]:
    """Loads the stages of a split into this process; `engine` are `StageEngine`'s options.

    `boundaries` are layer numbers, `[0, …, all]`. Raises what slicing and loading raise.
    """
    with ExitStack() as opened:
        runners: list[LlamaRunner] = []
        slices: list[Path] = []
        for start, stop in pairwise(boundaries):
            path = await trio.to_thread.run_sync(slice_model, model, start, stop)
            slices.append(path)
            loaded = await trio.to_thread.run_sync(partial(StageEngine, path, probe=True, **engine))
            opened.callback(loaded.close)
            runners.append(LlamaRunner(loaded))
        vocabulary = await trio.to_thread.run_sync(Vocabulary, slices[0])
        opened.callback(vocabulary.close)
        async with owned_nursery() as nursery:
            sink = ReturnSink()
            first, _ = join_stages(nursery, runners, sink)
            yield Coordinator(
                nursery,
                first,
                sink,
                [runner.descriptor for runner in runners],
                vocabulary,
                link=0.0,
                stall_deadline=stall_deadline,
            )
