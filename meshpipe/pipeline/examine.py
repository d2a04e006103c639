"""How a running stage, and the way to it, are: without a lane of it, and without running anything.

A session is opened on a lane that no stage has, so that the answer is a refusal, sent as soon as what travelled
before it has arrived. Windows of a session that nobody opened are dropped where they arrive: between two such
refusals they measure the way's bandwidth.
"""

from __future__ import annotations

import math
import secrets
from contextlib import AsyncExitStack, suppress

import numpy as np
import trio
from attrs import frozen

from meshpipe.actors.scope import owned_nursery
from meshpipe.errors import MeshpipeError, StageLostError
from meshpipe.messages import Hello, OpenSession, SessionFailed, StageDescriptor, Window
from meshpipe.pipeline.route import UPWARD
from meshpipe.telemetry.clocks import Offset, estimate
from meshpipe.topology.layout import Topology
from meshpipe.wire.endpoints import WARM_UP, Address, connect_link
from meshpipe.wire.link import Link
from meshpipe.wire.security import OPEN, Security

NO_LANE = 2**31 - 1
PINGS = 8
FIRST_BYTES, MOST_BYTES = 1 << 20, 32 << 20
LONG_ENOUGH = 0.2  # seconds of a transfer from which a bandwidth is believed
PATIENCE = 30.0  # seconds without an answer


@frozen
class Health:
    """One stage as seen from here. Seconds, and bytes a second; `clock` is the stage's against ours.

    `error` says why there is nothing more, None if all went well.
    """

    stage: int
    address: str
    descriptor: StageDescriptor | None = None
    round_trip: float | None = None
    bandwidth: float | None = None
    clock: Offset | None = None
    error: str | None = None


async def examine(
    topology: Topology, stage: int, security: Security = OPEN, deadline: float = WARM_UP
) -> Health:
    """Calls one stage of a topology, with the route that follows it, and measures the way there."""
    place = topology.stages[stage]
    try:
        return await _examine(topology, stage, security, deadline)
    except MeshpipeError as error:
        return Health(stage, place.address, error=str(error))


async def _examine(topology: Topology, stage: int, security: Security, deadline: float) -> Health:
    place = topology.stages[stage]
    hello = Hello(
        f"doctor-{secrets.token_hex(8)}",
        stage=stage,
        route=tuple(later.address for later in topology.stages[stage + 1 :]),
        layers=(place.layers[0], None) if place.layers is not None else None,
    )
    async with AsyncExitStack() as connections, owned_nursery() as nursery:
        data, control, answer = await connect_link(Address.parse(place.address), hello, security, deadline)
        connections.push_async_callback(data.aclose)
        connections.push_async_callback(control.aclose)
        inbox = _Inbox()
        way = _Way(Link(f"examine {stage}", inbox, data, control, accepts=UPWARD), inbox)
        nursery.start_soon(way.carry)
        for _ in range(PINGS):
            await way.link.probe(PATIENCE)
        descriptor = answer.descriptors[0]
        bandwidth = await way.bandwidth(descriptor)
        return Health(
            stage,
            place.address,
            descriptor,
            way.link.round_trip,
            bandwidth,
            estimate(way.link.beats),
        )


class _Inbox:
    """What comes back: the refusals."""

    def __init__(self) -> None:
        self._send, self.refusals = trio.open_memory_channel[SessionFailed](math.inf)

    async def send(self, message: object) -> None:
        self.try_send(message)

    def try_send(self, message: object) -> bool:
        if isinstance(message, SessionFailed):
            self._send.send_nowait(message)
        return True


class _Way:
    """The link to a stage."""

    def __init__(self, link: Link, inbox: _Inbox) -> None:
        self.link = link
        self._inbox = inbox
        self._session = secrets.randbits(40) << 20

    async def carry(self) -> None:
        with suppress(MeshpipeError):  # whoever waits for an answer says what is missing
            await self.link.run()

    async def bandwidth(self, descriptor: StageDescriptor) -> float:
        """Bytes a second from here to the stage, the start of the connection included."""
        rng = np.random.default_rng(1)
        rows = rng.standard_normal((descriptor.most_rows, descriptor.n_embd), dtype=np.float32)
        empty = min([await self._transfer(rows, 0) for _ in range(3)])
        size = FIRST_BYTES
        while True:
            count = math.ceil(size / rows.nbytes)
            seconds = await self._transfer(rows, count) - empty
            if seconds >= LONG_ENOUGH or size >= MOST_BYTES:
                return count * rows.nbytes / max(seconds, 1e-6)
            size *= 4

    async def _transfer(self, rows: np.ndarray[tuple[int, int], np.dtype[np.float32]], count: int) -> float:
        """Seconds for so many windows of rows to get there, and for the word back."""
        self._session += 1
        began = trio.current_time()
        for number in range(count):
            await self.link.ref.send(
                Window(self._session, 0, number, 0, (0,) * len(rows), wanted=0, rows=rows)
            )
        await self.link.ref.send(OpenSession(self._session, NO_LANE))
        with trio.move_on_after(PATIENCE):
            while True:
                refusal = await self._inbox.refusals.receive()
                if refusal.session is None:
                    raise StageLostError(refusal.reason)
                if refusal.session == self._session:
                    return trio.current_time() - began
        raise StageLostError(f"{self.link.name}: no answer for {PATIENCE:g} s")
