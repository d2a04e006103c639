"""Connections: frames over a socket, over TLS, or handed over in memory.

One task may send and another receive at the same time. A send or receive that fails or is cancelled midway
leaves the connection useless (half a frame may be out), and it says so from then on.
"""

from __future__ import annotations

import socket
import ssl
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import trio

from meshpipe.errors import StageLostError
from meshpipe.messages import Window

from .frames import HANDSHAKE_LIMITS, PREFIX_SIZE, Frame, Limits, pack, parse_prefix, unpack

THREAD_FROM = 256 << 10
"""Bytes of rows from which inexact encodings are computed in a thread, off the event loop."""

_TLS_PIECE = 256 << 10  # encrypted at once, so that the event loop gets its turn

View = bytes | bytearray | memoryview


class Connection(ABC):
    """A two-way stream of frames. `peer` names the other end in errors.

    `received_at` and `sent_at` are when bytes last came and went, in trio's time: signs of progress.
    """

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.received_at = self.sent_at = trio.current_time()

    @abstractmethod
    async def send(self, frame: Frame) -> int:
        """Sends a frame and returns its size in bytes. Raises `StageLostError` if the connection is lost."""

    @abstractmethod
    async def receive(self) -> Frame:
        """The next frame. Raises `StageLostError` if there is none to come, `ProtocolError` if it is none."""

    @abstractmethod
    def agree(self, encoding: str, limits: Limits) -> None:
        """Ends the handshake: how rows are sent from now on, and what is accepted."""

    @abstractmethod
    def alive(self) -> bool:
        """Whether an idle connection is still open, as far as this side can know without waiting."""

    @abstractmethod
    async def aclose(self) -> None:
        """Closes at once, flushing nothing. Closing twice is fine."""


# ---- memory -------------------------------------------------------------------------------------------


class MemoryConnection(Connection):
    """Frames handed over as they are: neither encoded nor copied, so that rows must not be changed once sent."""

    def __init__(
        self,
        peer: str,
        outgoing: trio.MemorySendChannel[Frame],
        incoming: trio.MemoryReceiveChannel[Frame],
    ) -> None:
        super().__init__(peer)
        self._outgoing = outgoing
        self._incoming = incoming

    async def send(self, frame: Frame) -> int:
        try:
            await self._outgoing.send(frame)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise StageLostError(f"{self.peer} has closed the connection") from None
        self.sent_at = trio.current_time()
        return frame.size

    async def receive(self) -> Frame:
        try:
            frame = await self._incoming.receive()
        except (trio.EndOfChannel, trio.ClosedResourceError):
            raise StageLostError(f"{self.peer} closed the connection without saying so") from None
        self.received_at = trio.current_time()
        return frame

    def agree(self, encoding: str, limits: Limits) -> None:
        """Nothing is encoded here, and nothing needs a limit."""

    def alive(self) -> bool:
        return self._incoming.statistics().open_send_channels > 0

    async def aclose(self) -> None:
        self._outgoing.close()
        self._incoming.close()


def memory_pair(
    names: tuple[str, str] = ("left", "right"), capacity: int = 4
) -> tuple[MemoryConnection, MemoryConnection]:
    """The two ends of a connection in memory; either direction holds `capacity` frames, as a socket would."""
    to_right, from_left = trio.open_memory_channel[Frame](capacity)
    to_left, from_right = trio.open_memory_channel[Frame](capacity)
    return MemoryConnection(names[1], to_right, from_right), MemoryConnection(names[0], to_left, from_left)


# ---- sockets ------------------------------------------------------------------------------------------


class StreamConnection(Connection):
    """Frames over bytes: small ones without payload, until the handshake has agreed on more."""

    def __init__(self, peer: str) -> None:
        super().__init__(peer)
        self.encoding = "float32"
        self.limits: Limits = HANDSHAKE_LIMITS
        self._sendable = True
        self._receivable = True

    def agree(self, encoding: str, limits: Limits) -> None:
        self.encoding = encoding
        self.limits = limits

    async def send(self, frame: Frame) -> int:
        if not self._sendable:
            raise StageLostError(f"{self.peer}: an earlier send was cut short, the connection is lost")
        self._sendable = False
        if self.encoding != "float32" and _is_large(frame):
            head, payload = await trio.to_thread.run_sync(pack, frame, self.encoding)
        else:
            head, payload = pack(frame, self.encoding)
        try:
            await self._send_buffers(head, payload)
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise StageLostError(f"{self.peer} is lost: {_reason(error)}") from None
        self._sendable = True
        return len(head) + len(payload)

    async def receive(self) -> Frame:
        if not self._receivable:
            raise StageLostError(f"{self.peer}: an earlier receive was cut short, the connection is lost")
        self._receivable = False
        try:
            start = bytearray(PREFIX_SIZE)
            came = await self._receive_into([memoryview(start)])
            if came == 0:
                raise StageLostError(f"{self.peer} closed the connection without saying so")
            if came == PREFIX_SIZE:
                prefix = parse_prefix(start, self.limits)
                header = bytearray(prefix.header)
                payload = np.empty(prefix.payload, dtype=np.uint8)  # untouched memory until bytes come
                parts = [memoryview(header), payload.data] if prefix.payload else [memoryview(header)]
                wanted = prefix.header + prefix.payload
                came = await self._receive_into(parts) if wanted else 0
                if came == wanted:
                    self._receivable = True
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise StageLostError(f"{self.peer} is lost: {_reason(error)}") from None
        if not self._receivable:
            raise StageLostError(f"{self.peer} closed the connection in the middle of a frame")
        if prefix.payload > THREAD_FROM and self.encoding != "float32":
            return await trio.to_thread.run_sync(unpack, prefix, bytes(header), payload, self.limits)
        return unpack(prefix, bytes(header), payload, self.limits)

    @abstractmethod
    async def _send_buffers(self, head: bytes, payload: memoryview) -> None:
        """Sends both, whole."""

    @abstractmethod
    async def _receive_into(self, views: list[memoryview]) -> int:
        """Fills the views; returns the bytes that came, fewer only at the end of the stream."""


class TcpConnection(StreamConnection):
    """Frames over TCP. The payload goes from the rows' own memory to the socket, and from it into a new array."""

    def __init__(self, stream: trio.SocketStream, peer: str) -> None:
        super().__init__(peer)
        self._stream = stream
        self._socket = stream.socket
        tune(stream)

    async def _send_buffers(self, head: bytes, payload: memoryview) -> None:
        buffers: list[View] = [head, payload] if payload else [head]
        while buffers:
            buffers = _after(buffers, await _gather(self._socket, buffers))
            self.sent_at = trio.current_time()

    async def _receive_into(self, views: list[memoryview]) -> int:
        came = 0
        left: Sequence[View] = views
        while left:
            count = await _scatter(self._socket, left)
            if count == 0:
                break
            self.received_at = trio.current_time()
            came += count
            left = _after(left, count)
        return came

    def alive(self) -> bool:
        return _is_open(self._socket)

    async def aclose(self) -> None:
        await trio.aclose_forcefully(self._stream)


class TlsConnection(StreamConnection):
    """Frames over TLS; the TLS layer's own buffers cost one copy of the payload each way."""

    def __init__(self, stream: trio.SSLStream[trio.SocketStream], peer: str) -> None:
        super().__init__(peer)
        self._stream = stream
        self._unread = memoryview(b"")
        tune(stream.transport_stream)

    async def _send_buffers(self, head: bytes, payload: memoryview) -> None:
        if len(payload) < _TLS_PIECE:
            await self._stream.send_all(head + payload)
            self.sent_at = trio.current_time()
            return
        await self._stream.send_all(head)
        for start in range(0, len(payload), _TLS_PIECE):
            await self._stream.send_all(payload[start : start + _TLS_PIECE])
            self.sent_at = trio.current_time()

    async def _receive_into(self, views: list[memoryview]) -> int:
        came = 0
        for view in views:
            done = 0
            while done < len(view):
                if not self._unread:
                    self._unread = memoryview(await self._stream.receive_some(1 << 16))
                    if not self._unread:
                        return came
                    self.received_at = trio.current_time()
                count = min(len(self._unread), len(view) - done)
                view[done : done + count] = self._unread[:count]
                self._unread = self._unread[count:]
                done += count
                came += count
        return came

    def alive(self) -> bool:
        return _is_open(self._stream.transport_stream.socket)

    async def aclose(self) -> None:
        await trio.aclose_forcefully(self._stream)


def tune(stream: trio.SocketStream) -> None:
    """No delay for small frames, and the kernel's keepalive: a silent peer is lost after some 30 s."""
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        for option, value in ((socket.TCP_KEEPIDLE, 15), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
            stream.setsockopt(socket.IPPROTO_TCP, option, value)


async def _gather(sock: trio.socket.SocketType, buffers: Sequence[View]) -> int:
    if sys.platform != "win32":
        return await sock.sendmsg(buffers)
    return await sock.send(buffers[0])


async def _scatter(sock: trio.socket.SocketType, views: Sequence[View]) -> int:
    if sys.platform != "win32":
        count, _, _, _ = await sock.recvmsg_into(views)
        return count
    return await sock.recv_into(views[0])


def _after(buffers: Sequence[View], count: int) -> list[View]:
    """What is left of the buffers once their first `count` bytes are done."""
    left: list[View] = []
    for buffer in buffers:
        if count >= len(buffer):
            count -= len(buffer)
        else:
            left.append(memoryview(buffer)[count:])
            count = 0
    return left


def _is_open(sock: trio.socket.SocketType) -> bool:
    if sock.fileno() < 0:
        return False
    view = socket.socket(fileno=sock.fileno())  # trio's socket has no call that does not wait
    try:
        return view.recv(1, socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        view.detach()


def _is_large(frame: Frame) -> bool:
    message = frame.message
    return isinstance(message, Window) and message.rows is not None and message.rows.nbytes > THREAD_FROM


def _reason(error: BaseException) -> str:
    cause = error.__cause__
    if isinstance(cause, (OSError, ssl.SSLError)):
        return str(cause)
    return str(error) or type(error).__name__
