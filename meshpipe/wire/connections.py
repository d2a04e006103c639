"""Connections: frames over a socket, over TLS, or handed over in memory.

One task may send and another receive at the same time. A send or receive that fails or is cancelled midway
leaves the connection useless (half a frame may be out), and it says so from then on.
"""

from __future__ import annotations

import socket
import ssl
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import trio

from meshpipe.errors import StageLostError

from .frames import HANDSHAKE_LIMITS, PREFIX_SIZE, Frame, Limits, Prefix, pack, parse_prefix, rows_of, unpack

THREAD_FROM = 256 << 10
"""Bytes of rows from which inexact encodings are computed in a thread, off the event loop."""

TURN = 256 << 10
"""Bytes that a connection moves before it lets other tasks run."""

AT_ONCE = 64 << 10
"""Bytes of rows up to which a frame is worth a try without waiting: what a socket has room for, mostly."""

READ_AHEAD = 64 << 10
"""Bytes that are read at once: a frame that is no larger comes in one call, prefix, header and rows."""

JOIN_UP_TO = 64 << 10
"""Bytes of payload up to which TLS sends it in one piece with its header."""

T = TypeVar("T")
View = bytes | bytearray | memoryview
Packed = Callable[[object, float, float, int], None]
"""Is told of a message made into a frame: began and ended at, in trio's time, and the frame's bytes."""


class Connection(ABC):
    """A two-way stream of frames. `peer` names the other end in errors.

    `received_at` and `sent_at` are when bytes last came and went, in trio's time: signs of progress.
    `frames_begun` have been sent so far, the last one in part perhaps, and `frames_taken` received. `clocks`, at the
    caller's end, are those of the handshake's last question: when it was asked (this side's clock), answered (the
    peer's), and its answer came (this side's).
    """

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.packed: Packed | None = None
        self.clocks: tuple[float, float, float] | None = None
        self.received_at = self.sent_at = trio.current_time()
        self.frames_begun = self.frames_taken = 0

    @property
    def names(self) -> frozenset[str]:
        """Whom the peer's certificate, if it had to show one, is for."""
        return frozenset()

    @abstractmethod
    async def send(self, frame: Frame) -> int:
        """Sends a frame and returns its size in bytes. Raises `StageLostError` if the connection is lost."""

    def send_at_once(self, frame: Frame) -> int | None:
        """Sends a frame without waiting if that is possible: its size in bytes, None if it was not sent.

        Part of it may be left to be sent by the next `send`, or by `finish`; see `unfinished`.
        """
        return None

    @property
    def unfinished(self) -> bool:
        """Whether part of a frame still has to be sent."""
        return False

    async def finish(self) -> None:
        """Sends what is unfinished. Raises `StageLostError` if the connection is lost."""
        await trio.lowlevel.checkpoint()

    @abstractmethod
    async def receive(self) -> Frame:
        """The next frame. Raises `StageLostError` if there is none to come, `ProtocolError` if it is none.

        A checkpoint always.
        """

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
        self.frames_begun += 1
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
        self.frames_taken += 1
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


class SocketConnection(Connection):
    """Frames over TCP or TLS: small ones without payload, until the handshake has agreed on more.

    A payload goes from the rows' own memory to the socket (over TLS a small one is joined to its header first, to
    be one record the less), and from the socket into a new array, by way of a buffer if the frame is small.
    `sock` is a connected socket that does not block, an `ssl.SSLSocket` for TLS, and is the connection's own.
    """

    def __init__(self, sock: socket.socket, peer: str) -> None:
        super().__init__(peer)
        self._socket = sock
        self._secure = isinstance(sock, ssl.SSLSocket)
        self._encoding = "float32"
        self._limits: Limits = HANDSHAKE_LIMITS
        self._sendable = True
        self._receivable = True
        self._left: list[View] = []
        self._ahead = memoryview(bytearray(READ_AHEAD))
        self._begin = self._end = 0  # of what was read ahead
        _tune(sock)

    @property
    def names(self) -> frozenset[str]:
        certificate = self._socket.getpeercert() if isinstance(self._socket, ssl.SSLSocket) else None
        if not certificate:
            return frozenset()
        alternative: Any = certificate.get("subjectAltName", ())
        subject: Any = certificate.get("subject", ())
        common = [value for part in subject for key, value in part if key == "commonName"]
        return frozenset([*common, *(value for _, value in alternative)])

    def agree(self, encoding: str, limits: Limits) -> None:
        self._encoding = encoding
        self._limits = limits

    async def send(self, frame: Frame) -> int:
        if not self._sendable:
            raise StageLostError(f"{self.peer}: an earlier send was cut short, the connection is lost")
        self._sendable = False
        self.frames_begun += 1
        began = trio.current_time() if self.packed is not None else 0.0
        if self._encoding != "float32" and _is_large(frame):
            head, payload = await trio.to_thread.run_sync(pack, frame, self._encoding)
        else:
            head, payload = pack(frame, self._encoding)
        if self.packed is not None:
            self.packed(frame.message, began, trio.current_time(), len(head) + len(payload))
        if self._secure and len(payload) <= JOIN_UP_TO:
            buffers: list[View] = [head + payload]
        else:
            buffers = [head, payload] if payload else [head]
        await self._send_all([*self._left, *buffers])
        self._left = []
        self._sendable = True
        return len(head) + len(payload)

    async def _send_all(self, buffers: list[View]) -> None:
        turn = 0
        try:
            while buffers:
                count = await self._retry(_gather, self._socket, buffers)
                self.sent_at = trio.current_time()
                buffers = _after(buffers, count)
                turn = await _share(turn + count)
        except OSError as error:
            raise StageLostError(f"{self.peer} is lost: {error}") from None

    def send_at_once(self, frame: Frame) -> int | None:
        rows = rows_of(frame.message)
        if not self._sendable or self._left or self._secure:
            return None
        if rows is not None and (self._encoding != "float32" or rows.nbytes > AT_ONCE):
            return None
        began = trio.current_time() if self.packed is not None else 0.0
        head, payload = pack(frame, self._encoding)
        try:
            count = _gather(self._socket, [head, payload] if payload else [head])
        except OSError:  # no room, or the connection is lost: `send` will find out
            return None
        self.sent_at = trio.current_time()
        self.frames_begun += 1
        if self.packed is not None:
            self.packed(frame.message, began, self.sent_at, len(head) + len(payload))
        self._left = _after([head, payload], count)
        return len(head) + len(payload)

    @property
    def unfinished(self) -> bool:
        return bool(self._left)

    async def finish(self) -> None:
        if self._sendable:
            self._sendable = False
            await self._send_all(self._left)
            self._left = []
            self._sendable = True

    async def receive(self) -> Frame:
        if not self._receivable:
            raise StageLostError(f"{self.peer}: an earlier receive was cut short, the connection is lost")
        self._receivable = False
        waited = await self._read_ahead(PREFIX_SIZE)
        prefix = parse_prefix(self._ahead[self._begin : self._begin + PREFIX_SIZE], self._limits)
        size = PREFIX_SIZE + prefix.header + prefix.payload
        if size <= READ_AHEAD:
            waited = await self._read_ahead(size) or waited
            rows = self._begin + PREFIX_SIZE + prefix.header
            header = bytes(self._ahead[self._begin + PREFIX_SIZE : rows])
            payload = np.frombuffer(bytearray(self._ahead[rows : self._begin + size]), np.uint8)
            self._begin += size
        else:
            header, payload = await self._receive_large(prefix)
        if prefix.payload > THREAD_FROM and self._encoding != "float32":
            frame = await trio.to_thread.run_sync(unpack, prefix, header, payload, self._limits)
        else:
            frame = unpack(prefix, header, payload, self._limits)
        if not waited:
            await trio.lowlevel.checkpoint()
        self._receivable = True
        self.frames_taken += 1
        return frame

    async def _read_ahead(self, count: int) -> bool:
        """Reads until `count` bytes, `READ_AHEAD` at most, lie in the buffer; says whether it gave up its turn.

        Raises `StageLostError` if they do not come.
        """
        waited = False
        while (have := self._end - self._begin) < count:
            self._ahead[:have] = self._ahead[self._begin : self._end]
            self._begin, self._end = 0, have
            if not self._secure:  # as a rule nothing is there, and to try would be a call in vain
                await self._wait(writing=False)
                waited = True
            try:
                came = await self._retry(self._socket.recv_into, self._ahead[have:])
            except OSError as error:
                raise StageLostError(f"{self.peer} is lost: {error}") from None
            if came == 0:
                where = "in the middle of a frame" if have else "without saying so"
                raise StageLostError(f"{self.peer} closed the connection {where}")
            self.received_at = trio.current_time()
            self._end += came
        return waited

    async def _receive_large(self, prefix: Prefix) -> tuple[bytes, np.ndarray[Any, Any]]:
        """Header and payload of a frame that the buffer cannot hold: the rows go where they stay."""
        header = bytearray(prefix.header)
        payload = np.empty(prefix.payload, dtype=np.uint8)  # untouched memory until the bytes come
        came = self._ahead[self._begin + PREFIX_SIZE : self._end]
        self._begin = self._end = 0
        header[: len(came)] = came[: len(header)]
        payload.data[: max(0, len(came) - len(header))] = came[len(header) :]
        left = _after([header, payload.data], len(came))
        missing = sum(map(len, left))
        if await self._fill(left, missing) < missing:
            raise StageLostError(f"{self.peer} closed the connection in the middle of a frame")
        return bytes(header), payload

    def alive(self) -> bool:
        if self._socket.fileno() < 0:
            return False
        bare = socket.socket(fileno=self._socket.fileno())  # peeks below TLS
        try:
            return bare.recv(1, socket.MSG_PEEK) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False
        finally:
            bare.detach()

    async def aclose(self) -> None:
        if self._socket.fileno() >= 0:
            trio.lowlevel.notify_closing(self._socket)
            self._socket.close()
        await trio.lowlevel.checkpoint()

    async def secure(self) -> None:
        """The TLS handshake. Raises `StageLostError`."""
        assert isinstance(self._socket, ssl.SSLSocket)
        try:
            await self._retry(self._socket.do_handshake)
        except OSError as error:
            raise StageLostError(f"{self.peer}: no TLS handshake: {error}") from None

    async def _fill(self, views: Sequence[View], at_least: int) -> int:
        """Fills the buffers with `at_least` bytes; returns how many came, fewer only at the end of the stream."""
        came = turn = 0
        left = list(views)
        try:
            while came < at_least:
                count = await self._retry(_scatter, self._socket, left)
                if count == 0:
                    break
                self.received_at = trio.current_time()
                came += count
                left = _after(left, count)
                turn = await _share(turn + count)
        except OSError as error:
            raise StageLostError(f"{self.peer} is lost: {error}") from None
        return came

    async def _retry(self, operation: Callable[..., T], *args: Any) -> T:
        """What `operation` returns, as soon as the socket lets it; a checkpoint only if it has to wait.

        trio's own sockets and TLS streams give up their turn at every call; at several calls a frame, that was
        half of a hop's latency.
        """
        while True:
            try:
                return operation(*args)
            except (BlockingIOError, ssl.SSLWantReadError):
                writing = operation is _gather and not self._secure
            except ssl.SSLWantWriteError:
                writing = True
            await self._wait(writing)

    async def _wait(self, writing: bool) -> None:
        """Returns when the socket can be written to, or read from. Raises `StageLostError`."""
        try:
            await (trio.lowlevel.wait_writable if writing else trio.lowlevel.wait_readable)(self._socket)
        except (OSError, trio.ClosedResourceError, trio.BusyResourceError) as error:
            raise StageLostError(f"{self.peer} is lost: {error}") from None


async def _share(turn: int) -> int:
    """Lets other tasks run when `turn` bytes are enough for one turn; returns what counts for the next."""
    if turn < TURN:
        return turn
    await trio.lowlevel.checkpoint()
    return 0


def _gather(sock: socket.socket, buffers: Sequence[View]) -> int:
    if isinstance(sock, ssl.SSLSocket) or sys.platform == "win32":
        return sock.send(buffers[0])
    return sock.sendmsg(buffers)


def _scatter(sock: socket.socket, views: Sequence[View]) -> int:
    if isinstance(sock, ssl.SSLSocket) or sys.platform == "win32":
        return sock.recv_into(views[0])
    return sock.recvmsg_into(views)[0]


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


def _tune(sock: socket.socket) -> None:
    """No delay for small frames, and the kernel's keepalive: a silent peer is lost after some 30 s."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        for option, value in ((socket.TCP_KEEPIDLE, 15), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


def _is_large(frame: Frame) -> bool:
    rows = rows_of(frame.message)
    return rows is not None and rows.nbytes > THREAD_FROM


def tcp(stream: trio.SocketStream, peer: str) -> SocketConnection:
    """Takes over the stream's socket."""
    return SocketConnection(_detach(stream), peer)


async def tls(
    stream: trio.SocketStream, peer: str, context: ssl.SSLContext, *, host: str | None = None
) -> SocketConnection:
    """Takes over the stream's socket and makes it TLS: as the caller of `host`, or as the answerer if None.

    Raises `StageLostError` if the handshake fails.
    """
    sock = context.wrap_socket(
        _detach(stream),
        server_side=host is None,
        server_hostname=host,
        do_handshake_on_connect=False,
        suppress_ragged_eofs=True,  # the END frame, not TLS, tells an orderly end
    )
    connection = SocketConnection(sock, peer)
    try:
        await connection.secure()
    except BaseException:
        with trio.CancelScope(shield=True):
            await connection.aclose()
        raise
    return connection


def _detach(stream: trio.SocketStream) -> socket.socket:
    sock = socket.socket(fileno=stream.socket.detach())
    sock.setblocking(False)
    return sock
