"""A stage as a server: one engine, one stage actor, and a route for every coordinator that calls.

A caller (the coordinator, or the stage before) opens a link and names the stages that come after this one. This
stage calls the next one, waits for its Welcome, and answers with the descriptors of all: when the coordinator
has its Welcome, the whole route stands. What the last stage has to say goes back by the return stream that the
coordinator opened to it (direct), else by one that this stage opened to the coordinator (reverse), else up the
links (relay); it changes over by itself when a stream is lost.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress

import trio
from attrs import define, field, frozen

from meshpipe.actors import supervise
from meshpipe.actors.scope import Latest, owned_nursery
from meshpipe.errors import ActorGoneError, CapacityError, HandshakeError, MeshpipeError, StageLostError
from meshpipe.messages import (
    WINDOWS,
    CloseSession,
    Discard,
    Echo,
    Hello,
    OpenReturn,
    OpenSession,
    Record,
    SessionFailed,
    StageDescriptor,
    Welcome,
    Window,
)
from meshpipe.pipeline.kept import KEEP_ROWS
from meshpipe.pipeline.route import UPWARD, Inlet, Nothing, Route, RouteLost, Sender, stage_mailbox
from meshpipe.pipeline.runner import Runner
from meshpipe.pipeline.stage import Stage
from meshpipe.pipeline.tracing import send_spans
from meshpipe.telemetry.spans import LinkSpans, Recorder
from meshpipe.topology.lock import Lock, check_stage
from meshpipe.wire.conditions import Conditions
from meshpipe.wire.connections import Connection
from meshpipe.wire.endpoints import STEADY, WARM_UP, Address, Call, connect, connect_link, serve
from meshpipe.wire.frames import Limits
from meshpipe.wire.handshake import check_hello
from meshpipe.wire.link import BOUNDS, HEARTBEAT, Heartbeat, Link, send_room
from meshpipe.wire.security import OPEN, Security

log = logging.getLogger("meshpipe.host")


@define(eq=False)
class WayBack:
    """Where a stage's words to the coordinator go: the return stream if there is one, else up the link.

    There is one return stream at a time: whoever opens one takes the place of whoever did before (`streams`).
    """

    relay: Sender
    stream: Sender | None = None
    watch: LinkSpans | None = None
    streams: Latest = field(factory=Latest)

    async def send(self, message: object) -> None:
        """See `Sender.send`."""
        stream = self.stream
        if stream is not None:
            try:
                await stream.send(message)
                return
            except ActorGoneError:
                if self.stream is stream:
                    self.stream = None
        await self.relay.send(message)

    def try_send(self, message: object) -> bool:
        """See `Sender.try_send`."""
        stream = self.stream
        if stream is not None:
            try:
                return stream.try_send(message)
            except ActorGoneError:
                self.stream = None
        return self.relay.try_send(message)


@define(eq=False)
class _Held:
    """A coordinator's route through this stage. `end` ends it; `over` is set when all of it is gone."""

    incarnation: int
    stage: int
    back: WayBack
    end: trio.CancelScope
    over: trio.Event = field(factory=trio.Event)


@frozen(eq=False)
class _RouteInlet(Inlet):
    """What comes down a route: for the stage, unless it is about the way back."""

    open_return: Callable[[str], Awaitable[None]]
    record: Callable[[Record], Awaitable[None]]

    async def send(self, message: object) -> None:
        if isinstance(message, OpenReturn):
            await self.open_return(message.address)
        elif isinstance(message, Record):
            await self.record(message)
        else:
            await super().send(message)


class StageHost:
    """Serves one stage until cancelled.

    `conditions` are suffered by what this stage sends to other hosts (for experiments on one machine);
    `conditions_upward` by what it sends up its link. `connect_deadline`: seconds to reach the next stage.
    `lock`: what this stage and the next have to be. `keep`: bytes of rows that the stage may keep (`KeptRows`).
    Raises CapacityError for a stage whose windows no frame can carry.
    """

    def __init__(
        self,
        runner: Runner,
        security: Security = OPEN,
        *,
        conditions: Conditions | None = None,
        conditions_upward: Conditions | None = None,
        heartbeat: Heartbeat = HEARTBEAT,
        connect_deadline: float = WARM_UP,
        lock: Lock | None = None,
        keep: int = KEEP_ROWS << 20,
    ) -> None:
        _check_frames(runner.descriptor)
        self.runner = runner
        self.security = security
        self.conditions = conditions
        self.conditions_upward = conditions_upward
        self.heartbeat = heartbeat
        self.connect_deadline = connect_deadline
        self.lock = lock
        self.draining = False
        self._mailbox = stage_mailbox(_send_room(runner.descriptor))
        self.stage = Stage(self._mailbox, runner, keep)
        self._routes: dict[str, _Held] = {}

    @property
    def routes(self) -> int:
        """Coordinators that hold a route through this stage."""
        return len(self._routes)

    async def run(
        self,
        listeners: Sequence[trio.SocketListener],
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Answers callers; a caller's fault ends that caller's route and nothing else."""
        async with owned_nursery() as nursery:
            nursery.start_soon(supervise, self._mailbox, lambda _: self.stage)

            def tell_all(reason: str) -> None:
                log.error("this stage hangs: %s", reason)
                for held in self._routes.values():
                    nursery.start_soon(_tell, held, reason)

            nursery.start_soon(self.stage.watchdog.watch, tell_all)
            await nursery.start(serve, listeners, self._answer, self.security)
            task_status.started()
            await trio.sleep_forever()

    async def drain(self) -> None:
        """Admits no further route, and returns when the sessions that are open have ended."""
        self.draining = True
        await self.stage.wait_idle()

    async def _answer(self, call: Call) -> None:
        if self.draining:
            raise StageLostError("this stage is shutting down: call another one")
        if self.stage.watchdog.hangs is not None:
            raise StageLostError(f"this stage hangs: {self.stage.watchdog.hangs}; call another one")
        if call.hello.stage == 0:
            for connection in (call.data, call.control):
                if connection is not None:
                    self.security.check_coordinator(connection.names)
        if call.control is None:
            await self._return_stream(call)
        else:
            await self._route(call)

    # ---------------------------------------------------------------- routes

    async def _route(self, call: Call) -> None:
        descriptor, hello = self.runner.descriptor, call.hello
        check_hello(hello, descriptor)
        if (hello.stage == 0) != (descriptor.layers[0] == 0):
            raise HandshakeError(
                f"stage {hello.stage} was called; layers from {descriptor.layers[0]} are here"
            )
        if self.lock is not None:
            onward = hello.route[0] if hello.route else None
            check_stage(self.lock, descriptor, hello.stage, onward, hello.activation)
        is_last = descriptor.layers[1] == descriptor.layer_count
        if is_last and hello.route:
            raise HandshakeError(
                f"the route goes on after layers {descriptor.layers[0]}:{descriptor.layers[1]}, which end the model"
            )
        if not is_last and not hello.route:
            raise HandshakeError(
                f"the route ends at layer {descriptor.layers[1]} of {descriptor.layer_count}: add the stage that "
                f"starts there"
            )
        while (earlier := self._routes.get(hello.pipeline)) is not None:
            if earlier.incarnation >= hello.incarnation:
                raise HandshakeError(f"pipeline {hello.pipeline} has a route through this stage already")
            earlier.end.cancel()
            await earlier.over.wait()
        down: Link | None = None
        later: tuple[StageDescriptor, ...] = ()
        name = f"{hello.pipeline}/{hello.stage}"
        recorder = Recorder()
        watch = LinkSpans(recorder, hello.stage)
        async with AsyncExitStack() as stack, owned_nursery() as nursery:
            # The way up exists before anything can come down, and the name is taken before anything is awaited.
            up = Link(
                f"{name} up",
                Nothing(),
                call.data,
                call.control,
                accepts=(OpenSession, Window, CloseSession, Discard, OpenReturn, Record, Echo),
                conditions=self.conditions_upward,
                heartbeat=self.heartbeat,
                watch=watch,
            )
            back = WayBack(up.ref)
            held = self._routes[hello.pipeline] = _Held(
                hello.incarnation, hello.stage, back, nursery.cancel_scope
            )
            stack.callback(held.over.set)
            stack.callback(self._routes.pop, hello.pipeline)
            if not is_last:
                data, control, answer = await self._reach_next(hello)
                stack.push_async_callback(data.aclose)
                stack.push_async_callback(control.aclose)
                later = answer.descriptors
                down = Link(
                    f"{name} down",
                    up.ref,
                    data,
                    control,
                    bounds={**BOUNDS, WINDOWS: _send_room(descriptor)},
                    accepts=UPWARD,
                    conditions=self.conditions,
                    heartbeat=self.heartbeat,
                    watch=watch,
                )
            back.watch = watch
            route = Route(down.ref if down is not None else None, back, hello.stage, recorder=recorder)

            async def open_return(address: str) -> None:
                if down is not None:
                    await down.ref.send(OpenReturn(address))
                else:
                    nursery.start_soon(self._reverse, hello, back, address)

            told = Latest()

            async def tell(message: Record) -> None:
                with told.instead():
                    await send_spans(message, hello.stage, recorder, up.ref, down)

            async def record(message: Record) -> None:
                if down is not None:
                    await down.ref.send(message)
                nursery.start_soon(tell, message)

            up.inbox = _RouteInlet(self._mailbox, route, open_return, record)
            try:
                await call.accept((descriptor, *later))
                if down is not None:
                    nursery.start_soon(self._carry_down, down, up, hello.stage)
                await up.run()
            except MeshpipeError as error:
                log.info("route %s: %s", name, error)
            finally:
                route.lost = True
                with trio.CancelScope(shield=True), trio.move_on_after(1.0):
                    await self._mailbox.ref.send(RouteLost(route))
        if not call.answered:
            raise HandshakeError(f"a later incarnation of pipeline {hello.pipeline} has come")

    async def _reach_next(self, hello: Hello) -> tuple[Connection, Connection, Welcome]:
        """The link to the next stage, within what the caller's patience leaves for it."""
        try:
            return await connect_link(
                Address.parse(hello.route[0]),
                self._next_hello(hello),
                self.security,
                deadline=max(0.0, min(0.8 * hello.patience, self.connect_deadline)),
            )
        except MeshpipeError as error:
            error.stage = hello.stage + 1 if error.stage is None else error.stage
            raise

    def _next_hello(self, hello: Hello) -> Hello:
        descriptor = self.runner.descriptor
        return Hello(
            pipeline=hello.pipeline,
            stage=hello.stage + 1,
            route=hello.route[1:],
            model_digest=descriptor.model_digest,
            layers=(descriptor.layers[1], None),
            n_embd=descriptor.n_embd,
            lanes=hello.lanes,
            context=hello.context,
            activation=hello.activation,
            incarnation=hello.incarnation,
        )

    async def _carry_down(self, down: Link, up: Link, stage: int) -> None:
        """Runs the link to the next stage; if it is lost, the coordinator is told and the route ends."""
        reason = "the next stage ended the link"
        try:
            await down.run()
        except MeshpipeError as error:
            reason = str(error)
        with suppress(ActorGoneError):
            await up.ref.send(SessionFailed(None, stage + 1, reason))
        up.close()

    # ---------------------------------------------------------------- return streams

    async def _return_stream(self, call: Call) -> None:
        """Direct: the coordinator has opened a return stream to this, its last stage."""
        held = self._routes.get(call.hello.pipeline)
        if call.hello.stage != 0:
            raise HandshakeError("a return stream is the coordinator's")
        if held is None or held.incarnation != call.hello.incarnation:
            raise HandshakeError(f"pipeline {call.hello.pipeline} has no route through this stage")
        await call.accept()
        with held.back.streams.instead():
            await self._use(held.back, call.hello.pipeline, call.data)

    async def _reverse(self, hello: Hello, back: WayBack, address: str) -> None:
        """Reverse: this stage opens the return stream to the coordinator."""
        with back.streams.instead():
            try:
                connection, _ = await connect(
                    Address.parse(address),
                    Hello(hello.pipeline, role="return", incarnation=hello.incarnation),
                    self.security,
                    STEADY,
                )
            except MeshpipeError as error:
                log.warning("no reverse return stream to %s: %s", address, error)
                return
            try:
                await self._use(back, hello.pipeline, connection)
            finally:
                await connection.aclose()

    async def _use(self, back: WayBack, pipeline: str, connection: Connection) -> None:
        link = Link(
            f"{pipeline} return",
            Nothing(),
            connection,
            accepts=(),
            conditions=self.conditions,
            heartbeat=self.heartbeat,
            watch=back.watch,
        )
        back.stream = link.ref
        try:
            await link.run()
        except StageLostError as error:
            log.info("return stream lost: %s", error)
        finally:
            if back.stream is link.ref:
                back.stream = None


async def _tell(held: _Held, reason: str) -> None:
    """Tells a coordinator that this stage hangs: it looks for another one."""
    with suppress(ActorGoneError):
        await held.back.send(SessionFailed(None, held.stage, reason))


def _check_frames(descriptor: StageDescriptor) -> None:
    """Raises CapacityError if the widest window of activations exceeds what a peer takes."""
    row, most = 4 * descriptor.n_embd, Limits().payload
    if descriptor.most_rows * row > most:
        raise CapacityError(
            f"windows of {descriptor.most_rows} rows of {descriptor.n_embd} numbers take "
            f"{descriptor.most_rows * row / 2**20:.0f} MiB, and a frame carries at most {most >> 20} MiB: set batch to "
            f"{most // row} or less"
        )


def _send_room(descriptor: StageDescriptor) -> int:
    """Bytes for the widest windows of two epochs of every lane: a stage that waits for room runs nothing."""
    return send_room(max(16, 2 * descriptor.lanes), descriptor.most_rows, descriptor.n_embd)
