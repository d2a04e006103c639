"""The coordinator's reach to stages in other processes: the route, the return stream, and children."""

from __future__ import annotations

import json
import logging
import os
import secrets
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import trio
from attrs import define, field

from meshpipe.actors.scope import owned_nursery, run_all
from meshpipe.errors import ActorGoneError, HandshakeError, MeshpipeError, StageLostError, UsageError
from meshpipe.llama.slicing import slice_model
from meshpipe.llama.vocabulary import Vocabulary
from meshpipe.messages import Hello, OpenReturn, StageDescriptor
from meshpipe.pipeline.coordinator import STALL_DEADLINE, Coordinator
from meshpipe.pipeline.planning import Split, plan
from meshpipe.pipeline.sink import ReturnSink
from meshpipe.pipeline.stage import UPWARD
from meshpipe.pipeline.tracing import RemoteTracer
from meshpipe.telemetry.spans import COORDINATOR, LinkSpans, Recorder
from meshpipe.topology.layout import StagePlace, Topology, read_topology
from meshpipe.wire.conditions import Conditions
from meshpipe.wire.endpoints import (
    STEADY,
    WARM_UP,
    Address,
    Call,
    connect,
    connect_link,
    listen,
    local_address,
    serve,
)
from meshpipe.wire.link import HEARTBEAT, Heartbeat, Link
from meshpipe.wire.security import OPEN, Security

log = logging.getLogger("meshpipe.remote")

READY_DEADLINE = 120.0
"""Seconds in which a child has to have loaded its stage."""


@define(eq=False)
class ReturnRoute:
    """Keeps a way for replies open: direct, else reverse, else relay up the links; says which it is.

    A stream that is lost in the middle is replaced the same way; the replies that went down with it are sent
    for again by the sessions (`Coordinator.reroute`).
    """

    pipeline: str
    last: Address
    sink: ReturnSink
    first: Link
    security: Security
    listen_host: str | None
    direct: bool = True
    heartbeat: Heartbeat = HEARTBEAT
    kind: str = "relay"
    _streams: set[Link] = field(factory=set)  # that were proven and not lost since

    async def open(self, nursery: trio.Nursery, lost: Any, deadline: float = WARM_UP) -> None:
        """Opens the best route there is within `deadline` seconds a try, and keeps watch over it."""
        if self.direct and await self._direct(nursery, lost, deadline):
            self.kind = "direct"
        elif self.listen_host is not None and await self._reverse(nursery, self.listen_host, lost):
            self.kind = "reverse"
        else:
            self.kind = "relay"
            log.warning("no return stream to or from %s: replies ride the links", self.last)

    async def _direct(self, nursery: trio.Nursery, lost: Any, deadline: float) -> bool:
        try:
            connection, _ = await connect(
                self.last, Hello(self.pipeline, role="return"), self.security, deadline
            )
        except MeshpipeError as error:
            log.info("no direct return stream: %s", error)
            return False
        link = Link(
            f"{self.pipeline} return", self.sink, connection, accepts=UPWARD, heartbeat=self.heartbeat
        )
        nursery.start_soon(self._carry, link, lost)
        return await self._proven(link)

    async def _reverse(self, nursery: trio.Nursery, host: str, lost: Any) -> bool:
        """Asks the last stage to call here."""
        try:
            listeners = await listen(Address(host, 0), self.security)
        except UsageError as error:
            log.info("no reverse return stream: %s", error)
            return False
        arrived: list[Link] = []
        came = trio.Event()

        async def answer(call: Call) -> None:
            if call.hello.role != "return" or call.hello.pipeline != self.pipeline or arrived:
                raise HandshakeError("only the last stage of this pipeline is expected here")
            await call.accept()
            arrived.append(
                Link(
                    f"{self.pipeline} return",
                    self.sink,
                    call.data,
                    accepts=UPWARD,
                    heartbeat=self.heartbeat,
                )
            )
            came.set()
            await self._carry(arrived[0], lost)
            serving.cancel()

        serving = trio.CancelScope()

        async def accept_one() -> None:
            with serving:
                await serve(listeners, answer, self.security)

        nursery.start_soon(accept_one)
        with trio.move_on_after(STEADY), suppress(ActorGoneError):  # there may be no route left at all
            await self.first.ref.send(OpenReturn(str(local_address(listeners[0]))))
            await came.wait()
        if arrived and await self._proven(arrived[0]):
            return True
        serving.cancel()
        return False

    async def _proven(self, link: Link) -> bool:
        try:
            await link.probe(STEADY)
        except MeshpipeError:
            link.close()
            return False
        self._streams.add(link)
        return True

    async def _carry(self, link: Link, lost: Any) -> None:
        try:
            await link.run()
        except MeshpipeError as error:
            log.warning("return stream lost: %s", error)
        if link in self._streams:
            self._streams.discard(link)
            lost()


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
    direct: bool = True,
    heartbeat: Heartbeat = HEARTBEAT,
    connect_deadline: float = WARM_UP,
) -> AsyncIterator[Coordinator]:
    """Joins stages that are running already; `topology` is read from a file if it is a path.

    `vocabulary` is a tokenizer, which stays open, or the file that has one (the model, or a slice from layer 0);
    without it the topology's `model` is that file. `lanes` and `context` are the least that every stage must
    have. `direct` False leaves the direct return stream out; a reverse one is awaited on `listen_host` (None:
    not at all). `connect_deadline`: seconds to reach the first stage, and to try each return route.

    Raises StageLostError for a stage that cannot be reached, HandshakeError naming what does not agree, and
    UsageError when no file with the vocabulary is known.
    """
    if not isinstance(topology, Topology):
        topology = read_topology(topology)
    source = vocabulary or topology.model
    if source is None:
        raise UsageError("no vocabulary: name the model, in the topology file or beside it")
    pipeline = secrets.token_hex(8)
    places = topology.stages
    hello = Hello(
        pipeline=pipeline,
        route=tuple(place.address for place in places[1:]),
        model_digest=model_digest,
        layers=(0, places[0].layers[1] if places[0].layers else None),
        lanes=lanes,
        context=context,
        activation=topology.activation,
    )
    opened: Vocabulary | None = None
    if isinstance(source, (str, Path)):
        source = opened = await trio.to_thread.run_sync(Vocabulary, source)
    try:
        async with AsyncExitStack() as connections, owned_nursery() as nursery:
            sink = ReturnSink()
            data, control, answer = await connect_link(
                Address.parse(places[0].address), hello, security, connect_deadline
            )
            connections.push_async_callback(data.aclose)
            connections.push_async_callback(control.aclose)
            descriptors = answer.descriptors
            _check_route(places, descriptors)
            if source.size != descriptors[0].n_vocab:
                raise HandshakeError(
                    f"the vocabulary has {source.size} tokens, the model of the stages {descriptors[0].n_vocab}: "
                    "name the model that they serve"
                )
            recorder = Recorder()
            watch = LinkSpans(recorder, COORDINATOR)
            first = Link(
                f"{pipeline} first", sink, data, control, accepts=UPWARD, heartbeat=heartbeat, watch=watch
            )
            back = ReturnRoute(
                pipeline,
                Address.parse(places[-1].return_address or places[-1].address),
                sink,
                first,
                security,
                listen_host,
                direct,
                heartbeat,
            )
            coordinator = Coordinator(
                nursery,
                first.ref,
                sink,
                descriptors,
                source,
                link=0.0,
                stall_deadline=stall_deadline,
                encoding_exact=topology.activation == "float32",
                tracer=RemoteTracer(recorder, len(descriptors), first, sink),
            )
            nursery.start_soon(_carry_first, first, coordinator)

            def return_lost() -> None:
                coordinator.reroute()
                nursery.start_soon(reopen)

            async def reopen() -> None:
                await back.open(nursery, return_lost, STEADY)
                coordinator.reroute()  # the last stage may have noticed the loss later than this side

            await back.open(nursery, return_lost, connect_deadline)
            coordinator.check_route = first.check
            coordinator.return_route = lambda: back.kind
            coordinator.pipe.link = await coordinator.round_trip()
            yield coordinator
            first.close()
    finally:
        if opened is not None:
            opened.close()


async def _carry_first(first: Link, coordinator: Coordinator) -> None:
    reason = "the first stage ended the link"
    try:
        await first.run()
    except MeshpipeError as error:
        reason = str(error)
    coordinator.fail_all(0, reason)


def _check_route(places: Sequence[StagePlace], descriptors: Sequence[StageDescriptor]) -> None:
    if len(descriptors) != len(places):
        raise HandshakeError(f"{len(places)} stages were named, {len(descriptors)} answered")
    for number, (place, descriptor) in enumerate(zip(places, descriptors, strict=True)):
        if place.layers is not None and place.layers != descriptor.layers:
            named, has = (f"{a}:{b}" for a, b in (place.layers, descriptor.layers))
            raise HandshakeError(
                f"stage {number} at {place.address}: the topology says layers {named}, it has {has}"
            )


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
    ready_deadline: float = READY_DEADLINE,
    **remote: Any,
) -> AsyncIterator[Coordinator]:
    """Starts a child process for every stage, on loopback, and joins them; ends them whatever happens.

    `conditions` are suffered on every link between neighbouring stages, both ways, and on the return.
    `stage_arguments` are further arguments of `meshpipe stage`; settings in the environment are not the
    children's.
    """
    boundaries = await trio.to_thread.run_sync(plan, model, split, context)
    ranges = list(pairwise(boundaries))
    for start, stop in ranges:  # one after the other: they read the same disk
        await trio.to_thread.run_sync(slice_model, model, start, stop)
    vocabulary_file = await trio.to_thread.run_sync(slice_model, model, *ranges[0])
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MESHPIPE_")}
    async with owned_nursery() as nursery:
        children: dict[int, trio.Process] = {}  # by stage
        places: list[StagePlace] = [StagePlace("")] * len(ranges)

        async def start_child(index: int) -> None:
            start, stop = ranges[index]
            command = [
                sys.executable, "-m", "meshpipe", "stage", "--model", str(model), "--layers", f"{start}:{stop}",
                "--listen", "127.0.0.1:0", "--lanes", str(lanes), "--context", str(context),
                "--threads", str(threads), "--json", "--exit-with-parent", *stage_arguments,
            ]  # fmt: skip
            if conditions is not None:
                command += ["--conditions", _conditions_text(conditions)]
                command += ["--conditions-upward", _conditions_text(conditions)] if index else []
            process: trio.Process = await nursery.start(
                partial(
                    trio.run_process,
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    check=False,
                    env=environment,
                    start_new_session=True,  # Ctrl-C is for the parent, whose end they notice
                )
            )
            children[index] = process
            with trio.move_on_after(ready_deadline) as scope:
                ready = await _ready_line(process)
            if scope.cancelled_caught:
                raise StageLostError(f"stage {start}:{stop} was not ready within {ready_deadline:g} s")
            places[index] = StagePlace(ready["address"], (start, stop))

        try:
            await run_all(partial(start_child, index) for index in range(len(ranges)))
            async with open_remote(
                Topology(tuple(places), activation=activation),
                vocabulary_file,
                lanes=lanes,
                context=context,
                **remote,
            ) as coordinator:
                coordinator.processes = tuple(children[index].pid for index in range(len(ranges)))
                yield coordinator
        finally:
            for child in children.values():
                if child.stdin is not None:
                    await trio.aclose_forcefully(child.stdin)  # the child ends by itself
            with trio.CancelScope(shield=True), trio.move_on_after(3.0):
                for child in children.values():
                    await child.wait()


def _conditions_text(conditions: Conditions) -> str:
    pairs = {"delay": conditions.delay, "jitter": conditions.jitter, "bandwidth": conditions.bandwidth}
    return ",".join(f"{name}={value}" for name, value in pairs.items() if value)


async def _ready_line(process: trio.Process) -> dict[str, Any]:
    """The one line of JSON by which a stage says that it serves."""
    assert process.stdout is not None
    line = b""
    while not line.endswith(b"\n"):
        chunk = await process.stdout.receive_some(4096)
        if not chunk:
            raise StageLostError(
                f"a stage ended before it was ready (exit status {process.returncode}); its messages say why"
            )
        line += chunk
    ready: dict[str, Any] = json.loads(line)
    return ready
