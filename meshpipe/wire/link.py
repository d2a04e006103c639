"""Links: a stage's way to its neighbour, and back.

A link joins two mailboxes over one or two connections. What is sent to `link.ref` at one end arrives in the
inbox given at the other end. Windows and replies ride the data connection, control messages the control
connection, so that a prefill frame of megabytes delays no Discard. Both directions work alike: downstream the
data connection carries windows, upstream it carries relayed replies.

Why nothing can block what would relieve it: each connection has one writer and one reader per direction; a
full inbox queue stops only the reader of its connection, which stops (through TCP) only the writer of that
connection at the other end, which leaves only that writer's queues in the outbox full. The only messages that
share a reader are windows and replies, and they travel in opposite directions.

A Discard that passes through also takes the session's stale windows out of the outbox, and those that come
later: the link drops a tail of each epoch, never a middle.

The life of a link: `run` until the peer ends it or `close` was called (both let what is queued go out, then
an END frame on each connection), or until it fails: a lost connection, a peer that breaks the protocol, or one
that was silent for too long.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

import attrs
import trio
from attrs import frozen

from meshpipe import messages
from meshpipe.actors import Ask, Mailbox, Ref
from meshpipe.errors import ActorGoneError, MeshpipeError, ProtocolError, StageLostError
from meshpipe.messages import (
    CONTROL,
    REPLIES,
    WINDOWS,
    CloseSession,
    Discard,
    Ping,
    Pong,
    Refusal,
    Reply,
    Window,
    queue_of,
)

from .conditions import Conditions, Wire
from .connections import Connection
from .frames import WINDOW_HEADER, WINDOW_TOKEN, Frame, Kind

BOUNDS: Mapping[str, int] = {CONTROL: 64, REPLIES: 64, WINDOWS: 1 << 20}
"""What waits in a link's outbox, by queue, unless told otherwise: messages, and bytes of windows."""

HANDSHAKE_ONLY = (messages.Hello, messages.Challenge, messages.Proof, messages.Welcome)
GRACE = 3.0
REMEMBERED = 1024
"""Sessions whose Discard, and questions whose answer, a link keeps in mind."""


@frozen
class Heartbeat:
    """A Ping every `every` seconds; a peer from which nothing came for `deadline` seconds is lost.

    Or for four round trips, each with its jitter (`Link.silence`), where that is longer: on a long way a packet that is
    lost twice is no silence, nor is a busy machine. Seconds for which this process itself stood still do not count.
    """

    every: float = 0.5
    deadline: float = 2.5


HEARTBEAT = Heartbeat()


@attrs.define
class Traffic:
    """What a link has carried. `blocked` is the seconds spent inside sends, writes that failed not counted."""

    frames_sent: int = 0
    bytes_sent: int = 0
    frames_received: int = 0
    blocked: float = 0.0
    stale_dropped: int = 0


@frozen
class _Answer:
    """On its way back to the peer that asked."""

    number: int
    value: object
    failure: str | None


def send_room(depth: int, rows: int, columns: int) -> int:
    """Bytes of the outbox that holds `depth` windows of `rows` rows of float32, `columns` wide each."""
    return depth * (WINDOW_HEADER + rows * (WINDOW_TOKEN + 4 * columns))


@frozen
class _Rest:
    """In the outbox, in front of whatever follows: part of a message's frame of `size` bytes still has to be sent."""

    message: Any
    began: float
    size: int


def _outbox_queue(message: object) -> str:
    if isinstance(message, _Rest):
        return REPLIES
    return CONTROL if isinstance(message, _Answer) else queue_of(message)


def _outbox_weight(message: object) -> int:
    """Windows, and what travels in order with them, by their bytes; the rest, which are small, by their number."""
    return Frame(message).size if _outbox_queue(message) == WINDOWS else 1


class _Outbox(Mailbox[Any]):
    """What waits to be sent. `at_once` may send a message instead, and says whether it did."""

    def __init__(self, bounds: Mapping[str, int], at_once: Callable[[Any], bool]) -> None:
        super().__init__(bounds, _outbox_queue, _outbox_weight)
        self._at_once = at_once

    def put_nowait(self, message: Any) -> bool:
        return (self._closed is None and self._at_once(message)) or super().put_nowait(message)


class Inbox(Protocol):
    """Where a link delivers: a `Ref`, or what looks like one."""

    async def send(self, message: Any) -> None:
        """Waits for room if need be. Raises `ActorGoneError`."""

    def try_send(self, message: Any) -> bool:
        """Says False if there is no room. Raises `ActorGoneError`."""


class Watch(Protocol):
    """Is told what becomes of the messages that a link sends. Times are trio's; must not raise."""

    def packed(self, message: object, began: float, ended: float, size: int) -> None:
        """A frame of so many bytes was made of it."""

    def written(self, message: object, began: float, ended: float, size: int) -> None:
        """Its frame was handed to the network; not called for one that failed."""

    def dropped(self, window: Window, at: float) -> None:
        """It was stale, and is not sent."""


class Link:
    """One end of a link. Send to `ref`; what comes goes into `inbox`, and `run` does the work.

    `inbox` may be replaced before `run` begins. `control` None puts everything on the one connection `data`, control
    first (a return stream: its frames are small). `bounds` are those of the outbox. `conditions` are suffered by what
    this end sends, on each connection. A message that is none of `accepts`, or a question where `inbox` is no `Ref`, is
    a `ProtocolError`. `heartbeat` None sends none and never finds the peer silent. `watch` is told what is sent.
    """

    def __init__(
        self,
        name: str,
        inbox: Inbox,
        data: Connection,
        control: Connection | None = None,
        *,
        bounds: Mapping[str, int] = BOUNDS,
        accepts: tuple[type, ...] = (object,),
        heartbeat: Heartbeat | None = HEARTBEAT,
        conditions: Conditions | None = None,
        watch: Watch | None = None,
    ) -> None:
        self.name = name
        self.traffic = Traffic()
        self.inbox = inbox
        self._accepts = accepts
        self._outbox = _Outbox(bounds, self._send_at_once)
        self.ref: Ref[Any] = self._outbox.ref
        self._heartbeat = heartbeat
        self._ways: list[tuple[Connection, tuple[str, ...]]]
        if control is None:
            self._ways = [(data, (CONTROL, REPLIES, WINDOWS))]
        else:
            self._ways = [(control, (CONTROL,)), (data, (REPLIES, WINDOWS))]
        self._conditions = conditions
        self._onlooker = watch
        for connection, _ in self._ways:
            connection.packed = watch.packed if watch is not None else None
        self.beats: deque[tuple[float, float, float]] = deque(maxlen=64)
        """The handshake's and the last heartbeats': sent (this clock), answered (the peer's), received (this clock)."""
        self.beats += [connection.clocks for connection, _ in self._ways if connection.clocks is not None]
        self._numbers = itertools.count(1)
        self._asks: dict[int, Ask[Any]] = {}
        self._probes: dict[int, trio.Event] = {}
        self._round_trips: deque[float] = deque(maxlen=8)
        self._discarded: dict[int, int] = {}
        self._closing = trio.Event()
        self._closed_here = False
        self._running = False
        self._taken = 0  # frames of the data connection that the peer is known to have
        self._awaited: tuple[int, float] | None = None  # so many it should have, of those begun before then
        self._reading_since: dict[Connection, float | None] = {}
        self._failure: MeshpipeError | None = None
        self._over: str | None = None
        self._scope = trio.CancelScope()

    # ---- for the owner --------------------------------------------------------------------------------

    async def run(self) -> None:
        """Carries messages until the link has ended in an orderly way on both sides.

        Raises `StageLostError`, `ProtocolError` or (the inbox is closed) `ActorGoneError`. However it ends,
        both connections are closed and senders get `ActorGoneError`. Cancelling it closes without a word.
        """
        reason = f"link {self.name} was cancelled"
        self._running = True
        try:
            with self._scope:
                async with trio.open_nursery() as watchers:
                    watchers.start_soon(self._guarded, self._linger)
                    if self._heartbeat is not None:
                        watchers.start_soon(self._guarded, self._watch, self._heartbeat)
                    async with trio.open_nursery() as carriers:
                        for connection, queues in self._ways:
                            carriers.start_soon(self._guarded, self._read, connection)
                            carriers.start_soon(self._guarded, self._write, connection, queues)
                    watchers.cancel_scope.cancel()
            reason = f"link {self.name} has ended" if self._failure is None else str(self._failure)
        finally:
            self._over = reason
            self._outbox.close(reason)
            for answered in self._probes.values():
                answered.set()
            for ask in self._asks.values():
                ask.fail(reason)
            with trio.CancelScope(shield=True):
                for connection, _ in self._ways:
                    await connection.aclose()
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Ends the link in order: no more sends, what is queued still goes out; `run` returns when all is done."""
        self._closed_here = True
        self._end(f"link {self.name} is closing")

    @property
    def round_trip(self) -> float | None:
        """The shortest of the last round trips in seconds, None before the first."""
        return min(self._round_trips, default=None)

    def silence(self, heartbeat: Heartbeat) -> float:
        """Seconds without a sign of life that are more than latency and jitter: see `Heartbeat`.

        Of the last eight round trips, the mean and the mean deviation count: one pause does not blunt it.
        """
        trips = self._round_trips
        mean = sum(trips) / max(1, len(trips))
        jitter = sum(abs(trip - mean) for trip in trips) / max(1, len(trips))
        return max(heartbeat.deadline, 4 * (mean + jitter))

    @property
    def waited_for_room(self) -> float:
        """Seconds that senders of windows have waited for room in the outbox."""
        return self._outbox.waited(WINDOWS)

    async def check(self, deadline: float = 3.0) -> None:
        """Makes sure of the peer before an idle link is used again; costs nothing if it gave a sign of life lately.

        Lately is within two heartbeats. Raises `StageLostError` if a connection has been closed or the peer does
        not answer within `deadline` seconds, `ActorGoneError` if the link has ended.
        """
        if not self._outbox.closed:
            for connection, _ in self._ways:
                if not connection.alive():
                    raise StageLostError(f"link {self.name}: {connection.peer} has closed the connection")
            fresh = 0.0 if self._heartbeat is None else 2 * self._heartbeat.every
            received_at = max(connection.received_at for connection, _ in self._ways)
            if trio.current_time() - received_at < fresh:
                return
        await self.probe(deadline)

    async def probe(self, deadline: float = 3.0) -> float:
        """Proves that the peer lives; returns the round trip in seconds.

        Raises `StageLostError` if it does not answer within `deadline` seconds, `ActorGoneError` as soon as the link
        has ended.
        """
        nonce = next(self._numbers)
        answered = self._probes[nonce] = trio.Event()
        began = trio.current_time()
        try:
            with trio.move_on_after(deadline):
                await self.ref.send(Ping(nonce, began))
                await answered.wait()
                if self._over is not None:
                    raise ActorGoneError(self._over)
                return trio.current_time() - began
        finally:
            del self._probes[nonce]
        raise StageLostError(f"link {self.name}: the peer did not answer within {deadline:g} s")

    # ---- tasks ----------------------------------------------------------------------------------------

    async def _guarded(self, work: Callable[..., Awaitable[None]], *args: Any) -> None:
        """Runs one task; the first error ends the link and is what `run` raises."""
        try:
            await work(*args)
        except MeshpipeError as error:
            if self._failure is None:
                self._failure = type(error)(f"link {self.name}: {error}")
            self._scope.cancel()

    async def _write(self, connection: Connection, queues: tuple[str, ...]) -> None:
        if self._conditions is None:
            await self._write_to(connection.send, queues)
            return
        wire = Wire(connection, self._conditions)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._guarded, wire.run)
            await self._write_to(wire.send, queues)

    async def _write_to(self, send: Callable[[Frame], Awaitable[int]], queues: tuple[str, ...]) -> None:
        while True:
            try:
                message = await self._outbox.receive(*queues)
            except trio.EndOfChannel:
                await send(Frame(None, Kind.END))
                return
            if isinstance(message, _Rest):
                await self._ways[-1][0].finish()
                self._sent(message.message, message.began, message.size)
            elif self._may_go(message):
                frame = self._frame(message)
                began = trio.current_time()
                self._sent(message, began, await send(frame))

    def _send_at_once(self, message: Any) -> bool:
        """From the sender's own task, when nothing waits that would have to go first.

        It spares the turn that waking the writer takes, on every hop of every token. Only what a stage or a
        session sends for each token; the rest, and what the socket has no room for, goes through the outbox.
        """
        data, queues = self._ways[-1]
        usual = isinstance(message, (Window, Reply))
        if not usual or not self._running or self._conditions is not None or self._outbox.waiting(*queues):
            return False
        if not self._may_go(message):
            return True
        began = trio.current_time()
        size = data.send_at_once(Frame(message))
        if size is None:
            return False
        if data.unfinished:
            self._outbox.put_nowait(_Rest(message, began, size))
        else:
            self._sent(message, began, size)
        return True

    def _may_go(self, message: Any) -> bool:
        """What a message means for the windows of its session; False for a stale window, which is dropped."""
        if isinstance(message, Discard):
            self._drop_stale(message)
        elif isinstance(message, CloseSession):
            self._discarded.pop(message.session, None)
        elif self._is_stale(message):
            self._dropped([message])
            return False
        return True

    def _sent(self, message: Any, began: float, size: int) -> None:
        ended = trio.current_time()
        self.traffic.blocked += ended - began
        self.traffic.frames_sent += 1
        self.traffic.bytes_sent += size
        if self._onlooker is not None:
            self._onlooker.written(message, began, ended, size)

    async def _read(self, connection: Connection) -> None:
        while True:
            self._reading_since[connection] = trio.current_time()
            frame = await connection.receive()
            self._reading_since[connection] = None
            if frame.kind is Kind.END:
                del self._reading_since[connection]
                self._end(f"{connection.peer} has ended link {self.name}")
                return
            self.traffic.frames_received += 1
            await self._deliver(frame)

    async def _deliver(self, frame: Frame) -> None:
        message = frame.message
        if frame.kind is Kind.ANSWER or frame.kind is Kind.FAILURE:
            ask = self._asks.pop(frame.number, None)
            if ask is not None and isinstance(message, Refusal) and frame.kind is Kind.FAILURE:
                ask.fail(message.reason)
            elif ask is not None:
                ask.answer(message)
        elif isinstance(message, Ping):
            self._answer(self._pong(message))
        elif isinstance(message, Pong):
            now = trio.current_time()
            self._round_trips.append(now - message.sent)
            self.beats.append((message.sent, message.clock, now))
            if message.nonce in self._probes:
                self._probes[message.nonce].set()
            self._check_data(message)
        elif isinstance(message, HANDSHAKE_ONLY):
            raise ProtocolError(f"{type(message).__name__} belongs to the handshake, which is over")
        elif not isinstance(message, self._accepts):
            raise ProtocolError(f"{type(message).__name__} is not accepted from this side")
        elif frame.kind is Kind.ASK and not isinstance(self.inbox, Ref):
            raise ProtocolError(f"{type(message).__name__} wants an answer, which is not given here")
        elif frame.kind is Kind.ASK:
            number = frame.number
            await self.inbox.send(
                Ask(message, lambda value, failure: self._answer(_Answer(number, value, failure)))
            )
        elif not isinstance(message, (Window, Reply)) or not self.inbox.try_send(message):
            await self.inbox.send(message)  # gives up the turn, which receiving the frame has done already

    async def _watch(self, heartbeat: Heartbeat) -> None:
        ping_at = trio.current_time()
        heard, stood_still = self._heard_at(), 0.0
        while True:
            if (now := trio.current_time()) >= ping_at:
                self._answer(Ping(next(self._numbers), now))
                ping_at = now + heartbeat.every
                if self._awaited is None and (begun := self._ways[-1][0].frames_begun) > self._taken:
                    self._awaited = (begun, now)
            wake_at = min(ping_at, heard + stood_still + self.silence(heartbeat))
            await trio.sleep_until(wake_at)
            overslept = trio.current_time() - wake_at
            await trio.lowlevel.checkpoint()  # what has come meanwhile is read first
            if self._heard_at() > heard:
                heard, stood_still = self._heard_at(), 0.0
            elif overslept > heartbeat.every:
                stood_still += overslept  # it was this side
            if trio.current_time() >= heard + stood_still + self.silence(heartbeat):
                silence = trio.current_time() - heard
                raise StageLostError(f"nothing came from {self._ways[0][0].peer} for {silence:.1f} s")

    async def _linger(self) -> None:
        """Once the link is closing, all is over when its data stood still for `GRACE` seconds."""
        await self._closing.wait()
        began = trio.current_time()
        data, _ = self._ways[-1]
        while trio.current_time() < (end := max(began, data.sent_at, data.received_at) + GRACE):  # noqa: ASYNC110
            await trio.sleep_until(end)
        if not self._closed_here and None in self._reading_since.values():
            raise StageLostError("the peer ended it, and the inbox had no room for what it had sent")
        self._scope.cancel()

    # ---- details --------------------------------------------------------------------------------------

    def _end(self, reason: str) -> None:
        self._outbox.close(reason)
        self._closing.set()

    def _heard_at(self) -> float:
        """When the peer last gave a sign of life; now, while it is this side that does not read."""
        if any(since is None for since in self._reading_since.values()):
            return trio.current_time()
        received_at = max(connection.received_at for connection, _ in self._ways)
        return max([received_at, *(since for since in self._reading_since.values() if since is not None)])

    def _pong(self, ping: Ping) -> Pong:
        now, (data, _) = trio.current_time(), self._ways[-1]
        since = self._reading_since.get(data)
        idle = 0.0 if since is None else now - max(since, data.received_at)
        return Pong(ping.nonce, ping.sent, now, data.frames_taken, idle)

    def _check_data(self, pong: Pong) -> None:
        """The data connection may be dead, on a path of its own, while control lives. Raises StageLostError.

        So it is if the peer waits at it and gets nothing, though what was sent before is not there yet.
        """
        self._taken = max(self._taken, pong.taken)
        if self._awaited is None or self._heartbeat is None:
            return
        frames, since = self._awaited
        stands = min(trio.current_time() - since, pong.idle)
        if self._taken >= frames:
            self._awaited = None
        elif stands > self.silence(self._heartbeat) + self._heartbeat.every:
            peer = self._ways[-1][0].peer
            raise StageLostError(f"nothing of what was sent to {peer} has come there for {stands:.1f} s")

    def _answer(self, message: object) -> None:
        """Sends what may be lost if there is no room for it: the other side asks again, or has a deadline."""
        with contextlib.suppress(ActorGoneError):
            self._outbox.put_nowait(message)

    def _frame(self, message: Any) -> Frame:
        if isinstance(message, Ask):
            while len(self._asks) >= REMEMBERED:
                self._asks.pop(next(iter(self._asks))).fail("too many questions without an answer")
            number = next(self._numbers) & 0xFFFFFFFF
            self._asks[number] = message
            return Frame(message.message, Kind.ASK, number)
        if isinstance(message, _Answer) and message.failure is not None:
            return Frame(Refusal(message.failure), Kind.FAILURE, message.number)
        if isinstance(message, _Answer):
            return Frame(message.value, Kind.ANSWER, message.number)
        return Frame(message)

    def _is_stale(self, message: object) -> bool:
        return isinstance(message, Window) and message.epoch < self._discarded.get(message.session, 0)

    def _drop_stale(self, discard: Discard) -> None:
        known = self._discarded.pop(discard.session, 0)
        while len(self._discarded) >= REMEMBERED:
            self._discarded.pop(next(iter(self._discarded)))
        self._discarded[discard.session] = max(known, discard.epoch)
        self._dropped(self._outbox.take(WINDOWS, self._is_stale))

    def _dropped(self, windows: Sequence[Any]) -> None:
        self.traffic.stale_dropped += len(windows)
        if self._onlooker is not None:
            for window in windows:
                self._onlooker.dropped(window, trio.current_time())
