"""A TCP relay whose connections can be reset, held up, swallowed or cut in the middle of a frame, from outside."""

from __future__ import annotations

import random
import socket
import struct
from collections.abc import Callable
from contextlib import suppress

import trio

CHUNK = 16 << 10


class Relay:
    """Listens on loopback; hands on to whatever address `target` names when somebody connects.

    `holes` swallow what is under way and what comes, `held` keeps it back: both as long as they are true.
    """

    def __init__(self, target: Callable[[], str]) -> None:
        self.address = ""
        self.hole = False
        self.held = False
        self._target = target
        self._pairs: dict[tuple[trio.SocketStream, trio.SocketStream], None] = {}  # in order of coming
        self._swallowed: trio.SocketStream | None = None  # the caller whose connection is swallowed alone
        self._changed = trio.lowlevel.ParkingLot()
        self._cut_next = False

    @property
    def used(self) -> bool:
        """Whether somebody is connected."""
        return bool(self._pairs)

    @property
    def tasks(self) -> int:
        """How many run for those who are connected."""
        return 3 * len(self._pairs)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serves until cancelled."""
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        host, port = listener.socket.getsockname()
        self.address = f"{host}:{port}"
        await trio.serve_listeners(self._serve, [listener], task_status=task_status)

    def reset(self) -> None:
        """All connections are lost."""
        for pair in self._pairs:
            for stream in pair:
                with suppress(OSError):
                    stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                stream.socket.close()

    def cut(self) -> None:
        """The next chunk of any connection is handed on by half, then that connection ends."""
        self._cut_next = True

    def set(self, *, hole: bool = False, held: bool = False) -> None:
        """Changes what becomes of bytes from now on."""
        self.hole, self.held = hole, held
        self._changed.unpark_all()

    def swallow_one(self, chance: random.Random) -> None:
        """Swallows what comes on one connection: the path of the others is another."""
        callers = [caller for caller, _ in self._pairs]
        self._swallowed = chance.choice(callers) if callers else None

    def spare_all(self) -> None:
        """Ends `swallow_one`; what comes later on that connection makes no sense all the same."""
        self._swallowed = None

    async def _serve(self, caller: trio.SocketStream) -> None:
        host, _, port = self._target().rpartition(":")
        try:
            callee = await trio.open_tcp_stream(host, int(port))
        except OSError:
            caller.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            caller.socket.close()
            return
        pair = (caller, callee)
        self._pairs[pair] = None
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._pump, caller, callee, nursery.cancel_scope)
                nursery.start_soon(self._pump, callee, caller, nursery.cancel_scope)
        finally:
            del self._pairs[pair]
            with trio.CancelScope(shield=True):  # or the second one would stay open
                for stream in pair:
                    await trio.aclose_forcefully(stream)

    async def _pump(
        self, source: trio.SocketStream, target: trio.SocketStream, scope: trio.CancelScope
    ) -> None:
        swallowed = False
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            async for data in source:
                while self.held:
                    await self._changed.park()
                if self.hole or swallowed or self._swallowed in (source, target):
                    swallowed = True  # what comes later makes no sense to the other side
                    continue
                if self._cut_next:
                    self._cut_next = False
                    await target.send_all(data[: len(data) // 2])
                    break
                await target.send_all(data)
            else:
                return None if swallowed else await target.send_eof()
        scope.cancel()
        return None
