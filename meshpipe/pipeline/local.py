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
from meshpipe.llama.nextn import has_nextn
from meshpipe.llama.slicing import slice_model
from meshpipe.llama.vocabulary import Vocabulary
from meshpipe.pipeline.coordinator import QUEUE, STALL_DEADLINE, Coordinator
from meshpipe.pipeline.planning import Split, plan
from meshpipe.pipeline.route import Inlet, Nothing, Route, Sender, stage_mailbox
from meshpipe.pipeline.runner import LlamaRunner, Runner
from meshpipe.pipeline.sink import ReturnSink
from meshpipe.pipeline.stage import Stage
from meshpipe.pipeline.tracing import Tracer
from meshpipe.telemetry.spans import LinkSpans, Recorder
from meshpipe.wire.conditions import Conditions
from meshpipe.wire.connections import memory_pair
from meshpipe.wire.link import Link


def join_stages(
    nursery: trio.Nursery,
    runners: Sequence[Runner],
    sink: Sender,
    conditions: Conditions | None = None,
    recorder: Recorder | None = None,
) -> tuple[Sender, list[Stage]]:
    """Starts a stage actor for each runner, joined in order by memory; returns the way to the first, and them.

    With `conditions`, neighbours are joined by links that suffer them, and so is the return from the last stage.
    `recorder` is told what all of them do.
    """
    recorder = recorder or Recorder()
    mailboxes = [stage_mailbox() for _ in runners]
    stages = [Stage(mailbox, runner) for mailbox, runner in zip(mailboxes, runners, strict=True)]
    for mailbox, stage in zip(mailboxes, stages, strict=True):
        nursery.start_soon(supervise, mailbox, lambda _, stage=stage: stage)
    last = len(stages) - 1
    way_back = sink
    if conditions is not None:
        way_back = _linked(nursery, "return", sink, Nothing(), conditions, LinkSpans(recorder, last))
    downstream: Sender | None = None
    for index in reversed(range(len(stages))):
        route = Route(downstream, way_back if index == last else sink, index, recorder=recorder)
        inlet = Inlet(mailboxes[index], route)
        downstream = inlet
        if conditions is not None and index > 0:
            watch = LinkSpans(recorder, index - 1)
            downstream = _linked(nursery, f"{index - 1}-{index}", inlet, Nothing(), conditions, watch)
    assert downstream is not None
    return downstream, stages


def _linked(
    nursery: trio.Nursery, name: str, there: Sender, here: Sender, conditions: Conditions, watch: LinkSpans
) -> Sender:
    """A link in memory from here to `there`; returns the end to send to."""
    near_data, far_data = memory_pair()
    near_control, far_control = memory_pair()
    sending = Link(name, here, near_data, near_control, conditions=conditions, heartbeat=None, watch=watch)
    receiving = Link(name, there, far_data, far_control, conditions=conditions, heartbeat=None)
    nursery.start_soon(sending.run)
    nursery.start_soon(receiving.run)
    return sending.ref


async def load_stages(
    model: str | Path,
    ranges: Sequence[tuple[int, int]],
    opened: ExitStack,
    *,
    mtp: bool,
    **engine: Any,
) -> list[LlamaRunner]:
    """Loads the stages of layer ranges into this process; `opened` closes them.

    `engine` are `StageEngine`'s options.
    """
    runners: list[LlamaRunner] = []
    for start, stop in ranges:
        path = await trio.to_thread.run_sync(partial(slice_model, model, start, stop, mtp=mtp))
        loaded = await trio.to_thread.run_sync(partial(StageEngine, path, probe=True, mtp=mtp, **engine))
        opened.callback(loaded.close)
        runners.append(LlamaRunner(loaded))
        opened.callback(runners[-1].close_all)
    return runners


@asynccontextmanager
async def open_local(
    model: str | Path,
    split: Split = 1,
    *,
    conditions: Conditions | None = None,
    stall_deadline: float = STALL_DEADLINE,
    queue: int = QUEUE,
    mtp: bool = True,
    **engine: Any,
) -> AsyncIterator[Coordinator]:
    """Loads the stages of a split into this process; `engine` are `StageEngine`'s options.

    `mtp`: the last stage, or this process beside it, drafts with the model's NextN layers, if llama.cpp can.
    `conditions` are suffered on every link between neighbouring stages and on the return. `queue`: requests that may
    wait for a lane. Raises what planning, slicing and loading raise.
    """
    boundaries = await trio.to_thread.run_sync(plan, model, split, engine.get("context", 4096), mtp)
    with ExitStack() as opened:
        runners = await load_stages(model, list(pairwise(boundaries)), opened, mtp=mtp, **engine)
        vocabulary = await trio.to_thread.run_sync(Vocabulary, runners[0].path)
        opened.callback(vocabulary.close)
        async with owned_nursery() as nursery:
            sink = ReturnSink()
            recorder = Recorder()
            first, _ = join_stages(nursery, runners, sink, conditions, recorder)
            coordinator = Coordinator(
                nursery,
                first,
                sink,
                [runner.descriptor for runner in runners],
                vocabulary,
                link=(conditions.delay if conditions else 0.0) * len(runners),
                stall_deadline=stall_deadline,
                queue=queue,
                tracer=Tracer(recorder, len(runners)),
            )
            if mtp and await trio.to_thread.run_sync(has_nextn, model):
                coordinator.hold_nextn(model)
            yield coordinator
