"""The coordinator's reach to stages in other processes: joining them, and children of its own."""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import trio
from attrs import define, field, frozen

from meshpipe.actors.scope import owned_nursery
from meshpipe.errors import HandshakeError, MeshpipeError, StageLostError, UsageError
from meshpipe.llama.nextn import has_nextn
from meshpipe.llama.slicing import slice_model
from meshpipe.llama.vocabulary import Vocabulary
from meshpipe.messages import Hello, StageDescriptor
from meshpipe.pipeline.children import READY_DEADLINE, open_children, stage_command
from meshpipe.pipeline.coordinator import QUEUE, QUEUE_DEADLINE, RESUME_DEADLINE, STALL_DEADLINE, Coordinator
from meshpipe.pipeline.failover import Attempt, Failover, Joined, round_trip
from meshpipe.pipeline.fallback import LocalFallback
from meshpipe.pipeline.planning import Split, plan
from meshpipe.pipeline.request import Reroute
from meshpipe.pipeline.returns import ReturnRoute
from meshpipe.pipeline.route import UPWARD
from meshpipe.pipeline.sink import ReturnSink
from meshpipe.pipeline.tracing import RemoteTracer
from meshpipe.pipeline.way import Way
from meshpipe.telemetry.spans import COORDINATOR, LinkSpans, Recorder
from meshpipe.topology.layout import StagePlace, Topology, read_topology
from meshpipe.topology.lock import Lock, check_descriptors, check_places
from meshpipe.wire.conditions import Conditions
from meshpipe.wire.endpoints import STEADY, WARM_UP, Address, connect_link
from meshpipe.wire.link import HEARTBEAT, Heartbeat, Link
from meshpipe.wire.security import OPEN, Security

log = logging.getLogger("meshpipe.remote")


@asynccontextmanager
async def open_remote(
    topology: Topology | str | Path,
    vocabulary: Vocabulary | str | Path | None = None,
    *,
    security: Security = OPEN,
    lanes: int = 1,
    context: int = 1,
    model_digest: str | None = None,
    listen_host: str | None = "127.0.0.1",
    stall_deadline: float = STALL_DEADLINE,
    resume_deadline: float = RESUME_DEADLINE,
    queue_deadline: float = QUEUE_DEADLINE,
    queue: int = QUEUE,
    max_round_trip: float | None = None,
    direct: bool = True,
    heartbeat: Heartbeat = HEARTBEAT,
    connect_deadline: float = WARM_UP,
    places: Callable[[], Sequence[StagePlace]] | None = None,
    on_hang: Callable[[int], None] = lambda stage: None,
    same_bits: bool = False,
    local_fallback: LocalFallback | None = None,
    lock: Lock | None = None,
    nextn: str | Path | None = None,
) -> AsyncIterator[Coordinator]:
    """Joins stages that are running already, and joins them again when one is lost (`meshpipe.pipeline.failover`).

    `topology` is read from a file if it is a path. `vocabulary` is a tokenizer, which stays open, or the file that
    has one (the model, or a slice from layer 0); without it the topology's `model` is that file. `lanes` and
    `context` are the least that every stage must have. `direct` False leaves the direct return stream out; a
    reverse one is awaited on `listen_host` (None: not at all). `connect_deadline`: seconds to reach the first
    stage, and to try each return route, the first time. `stall_deadline`, `resume_deadline`, `queue_deadline`,
    `queue`: see `Coordinator`. `same_bits`: a stage whose fingerprint is another one than that of the stage before it
    may not take over; otherwise the reports of the requests that go over say that they are not exact.
    `local_fallback`: what serves from this process while a stage is lost and none takes its place.
    `max_round_trip`: seconds that a round trip may take when the pipeline is formed. `places` gives the stages'
    places of the moment, where they move; `on_hang` is told of a stage that nobody can join. `lock`: nothing else is
    joined than what it says. `nextn`: the file with which this process can draft, the model's, its last slice or its
    NextN layers alone (`slice_nextn`); by default that of the vocabulary, if it has some.

    Raises StageLostError for a stage that cannot be reached or is too far, HandshakeError naming what does not
    agree, and UsageError when no file with the vocabulary is known.
    """
    if not isinstance(topology, Topology):
        topology = read_topology(topology)
    source = vocabulary or topology.model
    if source is None:
        raise UsageError("no vocabulary: name the model, in the topology file or beside it")
    opened: Vocabulary | None = None
    if nextn is None and isinstance(source, (str, Path)) and await trio.to_thread.run_sync(has_nextn, source):
        nextn = source
    if isinstance(source, (str, Path)):
        source = opened = await trio.to_thread.run_sync(Vocabulary, source)
    try:
        async with owned_nursery() as nursery:
            way, sink = Way(), ReturnSink()
            least = _Least(model_digest, lanes, context)
            joining = _Joining(
                topology.activation,
                security,
                listen_host,
                direct,
                heartbeat,
                connect_deadline,
                sink,
                least,
                lock,
            )
            failover = Failover(
                way,
                places or (lambda: topology.stages),
                joining.join,
                max_round_trip=max_round_trip,
                on_hang=on_hang,
                same_bits=same_bits,
                here=partial(local_fallback.joined, sink=sink) if local_fallback is not None else None,
            )
            joining.lost = sink.on_lost = failover.lost
            joined: Joined = await nursery.start(failover.run)
            if local_fallback is not None:
                await trio.to_thread.run_sync(local_fallback.check, joined.descriptors)
            _check_vocabulary(source, joined.descriptors[0])
            coordinator = Coordinator(
                nursery,
                way,
                sink,
                joined.descriptors,
                source,
                link=joined.round_trip,
                stall_deadline=stall_deadline,
                resume_deadline=resume_deadline,
                queue_deadline=queue_deadline,
                queue=queue,
                encoding_exact=topology.activation == "float32",
                tracer=RemoteTracer(joining.recorder, len(joined.descriptors), joining.first, sink),
            )
            joining.least = _Least(
                joined.descriptors[0].model_digest, coordinator.lanes.count, coordinator.context
            )
            failover.adopt = coordinator.adopt
            if nextn is not None:
                coordinator.hold_nextn(nextn)

            async def check() -> None:
                if not failover.serves_here:
                    await joining.check()

            coordinator.check_route = check
            coordinator.return_route = lambda: "memory" if failover.serves_here else joining.kind
            yield coordinator
    finally:
        if opened is not None:
            opened.close()


@frozen
class _Least:
    """What stages have to be and to have at least; the digest None: whatever it is."""

    model_digest: str | None
    lanes: int
    context: int


@define(eq=False)
class _Joining:
    """Joins the stages of one pipeline, any number of times. `lost` is told of a first link that ends."""

    activation: str
    security: Security
    listen_host: str | None
    direct: bool
    heartbeat: Heartbeat
    connect_deadline: float
    sink: ReturnSink
    least: _Least
    lock: Lock | None = None
    lost: Callable[[int, str], None] = lambda stage, reason: None
    name: str = field(factory=partial(secrets.token_hex, 8))
    recorder: Recorder = field(factory=Recorder)
    _first: Link | None = None
    _back: ReturnRoute | None = None

    def first(self) -> Link:
        """The link to the first stage, as it is now."""
        assert self._first is not None
        return self._first

    @property
    def kind(self) -> str:
        """How replies come back now."""
        return self._back.kind if self._back is not None else "none"

    async def check(self) -> None:
        """See `Link.check`, of the first link."""
        await self.first().check()

    @asynccontextmanager
    async def join(self, attempt: Attempt) -> AsyncIterator[Joined]:
        """See `Join`."""
        places, last = attempt.places, attempt.places[-1]
        patience = attempt.patience if attempt.incarnation else self.connect_deadline
        hello = Hello(
            pipeline=self.name,
            route=tuple(place.address for place in places[1:]),
            model_digest=self.least.model_digest,
            layers=(0, places[0].layers[1] if places[0].layers else None),
            lanes=self.least.lanes,
            context=self.least.context,
            activation=self.activation,
            incarnation=attempt.incarnation,
        )
        if self.lock is not None:
            check_places(self.lock, places, self.activation)
        async with AsyncExitStack() as connections, owned_nursery() as carriers:
            address = Address.parse(places[0].address)
            data, control, answer = await connect_link(address, hello, self.security, patience)
            connections.push_async_callback(data.aclose)
            connections.push_async_callback(control.aclose)
            attempt.answered()
            _check_route(places, answer.descriptors)
            if self.lock is not None:
                check_descriptors(self.lock, answer.descriptors)
            first = Link(
                f"{self.name} first",
                self.sink,
                data,
                control,
                accepts=UPWARD,
                heartbeat=self.heartbeat,
                watch=LinkSpans(self.recorder, COORDINATOR),
            )
            back = ReturnRoute(
                Hello(self.name, role="return", incarnation=attempt.incarnation),
                Address.parse(last.return_address or last.address),
                self.sink,
                first,
                self.security,
                self.listen_host,
                self.direct,
                self.heartbeat,
            )
            up = False

            async def carry() -> None:
                error = StageLostError("the first stage ended the link")
                try:
                    await first.run()
                except MeshpipeError as failure:
                    error = StageLostError(str(failure))
                self.lost(0, str(error))  # the first word counts, also while the way is being formed
                if not up:
                    raise error

            def return_lost() -> None:
                self.sink.tell_all(Reroute())
                carriers.start_soon(reopen)

            async def reopen() -> None:
                await back.open(carriers, return_lost, STEADY)
                self.sink.tell_all(Reroute())  # the last stage may have noticed the loss later than this side

            carriers.start_soon(carry)
            await back.open(carriers, return_lost, patience)
            trip = await round_trip(first.ref, self.sink, -1, patience)
            self._first, self._back, up = first, back, True
            yield Joined(first.ref, answer.descriptors, trip)


def _check_vocabulary(vocabulary: Vocabulary, first: StageDescriptor) -> None:
    """Whether text means the same to both. Another quantization's vocabulary will do, another model's will not."""
    if vocabulary.size != first.n_vocab:
        raise HandshakeError(
            f"the vocabulary has {vocabulary.size} tokens, the model of the stages "
            f"{first.n_vocab}: name the model that they serve"
        )
    if first.vocabulary and vocabulary.digest != first.vocabulary:
        raise HandshakeError(
            f"the vocabulary has as many tokens as that of the stages, but others, or makes them of text in another "
            f"way (digest {vocabulary.digest}, theirs {first.vocabulary}): name the model that they serve"
        )


def _check_route(places: Sequence[StagePlace], descriptors: Sequence[StageDescriptor]) -> None:
    if len(descriptors) != len(places):
        raise HandshakeError(f"{len(places)} stages were named, {len(descriptors)} answered")
    for number, (place, descriptor) in enumerate(zip(places, descriptors, strict=True)):
        if place.layers is not None and place.layers != descriptor.layers:
            named, has = (f"{a}:{b}" for a, b in (place.layers, descriptor.layers))
            error = HandshakeError(
                f"stage {number} at {place.address}: the topology says layers {named}, it has {has}"
            )
            error.stage = number
            raise error


@asynccontextmanager
async def open_spawned(
    model: str | Path,
    split: Split = 1,
    *,
    stage_arguments: Sequence[str] = (),
    conditions: Conditions | None = None,
    activation: str = "float32",
    lanes: int = 1,
    context: int = 4096,
    threads: int = 1,
    mtp: bool = True,
    ready_deadline: float = READY_DEADLINE,
    **remote: Any,
) -> AsyncIterator[Coordinator]:
    """Starts a child process for every stage, on loopback, and joins them; ends them whatever happens.

    One that ends before the pipeline does is started again. `conditions` are suffered on every link between
    neighbouring stages, both ways, and on the return. `mtp`: the last stage, or this process, drafts with the model's
    NextN layers, if it has some. `stage_arguments` are further arguments of `meshpipe stage`; settings in the
    environment are not the children's.
    """
    boundaries = await trio.to_thread.run_sync(plan, model, split, context, mtp)
    ranges = list(pairwise(boundaries))
    for start, stop in ranges:  # one after the other: they read the same disk
        await trio.to_thread.run_sync(partial(slice_model, model, start, stop, mtp=mtp))
    nextn = model if mtp and await trio.to_thread.run_sync(has_nextn, model) else None
    vocabulary_file = await trio.to_thread.run_sync(partial(slice_model, model, *ranges[0], mtp=mtp))
    arguments = [
        "--model", str(model), "--lanes", str(lanes), "--context", str(context), "--threads", str(threads),
        "--mtp" if mtp else "--no-mtp", *stage_arguments,
    ]  # fmt: skip
    commands = [
        stage_command(layers, [*arguments, *_conditions_arguments(conditions, upward=index > 0)])
        for index, layers in enumerate(ranges)
    ]
    async with (
        open_children(ranges, commands, ready_deadline) as children,
        open_remote(
            Topology(tuple(children.places), activation=activation),
            vocabulary_file,
            lanes=lanes,
            context=context,
            places=lambda: children.places,
            on_hang=children.kill,
            nextn=nextn,
            **remote,
        ) as coordinator,
    ):
        coordinator.processes = children.pids
        yield coordinator


def _conditions_arguments(conditions: Conditions | None, *, upward: bool) -> list[str]:
    if conditions is None:
        return []
    pairs = {"delay": conditions.delay, "jitter": conditions.jitter, "bandwidth": conditions.bandwidth}
    text = ",".join(f"{name}={value}" for name, value in pairs.items() if value)
    if not text:
        return []
    return ["--conditions", text, *(["--conditions-upward", text] if upward else [])]
