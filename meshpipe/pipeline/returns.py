"""Return routes: how the last stage's replies come back to the coordinator."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any

import trio
from attrs import define, field

from meshpipe.errors import ActorGoneError, HandshakeError, MeshpipeError, UsageError
from meshpipe.messages import Hello, OpenReturn
from meshpipe.pipeline.route import UPWARD
from meshpipe.pipeline.sink import ReturnSink
from meshpipe.wire.endpoints import STEADY, WARM_UP, Address, Call, connect, listen, local_address, serve
from meshpipe.wire.link import HEARTBEAT, Heartbeat, Link
from meshpipe.wire.security import Security

log = logging.getLogger("meshpipe.returns")


@define(eq=False)
class ReturnRoute:
    """Keeps a way for replies open: direct, else reverse, else relay up the links; says which it is.

    A stream that is lost in the middle is replaced the same way; the replies that went down with it are sent
    for again by the sessions (`Coordinator.reroute`). `hello` is what a return stream begins with.
    """

    hello: Hello
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
            connection, _ = await connect(self.last, self.hello, self.security, deadline)
        except MeshpipeError as error:
            log.info("no direct return stream: %s", error)
            return False
        link = Link(
            f"{self.hello.pipeline} return", self.sink, connection, accepts=UPWARD, heartbeat=self.heartbeat
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
            theirs, ours = call.hello, self.hello
            same = (theirs.role, theirs.pipeline, theirs.incarnation) == (
                ours.role,
                ours.pipeline,
                ours.incarnation,
            )
            if not same or arrived:
                raise HandshakeError("only the last stage of this pipeline is expected here")
            await call.accept()
            arrived.append(
                Link(
                    f"{self.hello.pipeline} return",
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
