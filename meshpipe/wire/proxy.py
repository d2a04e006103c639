"""A TCP proxy that makes the way to any peer as long, narrow or shaky as a real one.

    python -m meshpipe.wire.proxy --listen 127.0.0.1:0 --to HOST:PORT --delay-ms 100 [--jitter-ms 5]
                                  [--bandwidth-mbit 200] [--loss 0.001] [--cut-after 30]

It prints the port on which it listens on one line. Whatever connects there is connected to the peer, and each
direction of each connection suffers the same conditions (see `meshpipe.wire.conditions`), delay one way.
Connecting itself is not delayed.

It is one plain loop over `select`, whose timeouts are microseconds where an event loop's are milliseconds:
bytes are handed on well within a millisecond of their time, and while nothing is due it sleeps.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import select
import socket
import struct
import sys
import time
from collections import deque

from meshpipe.errors import MeshpipeError

from .conditions import SEGMENT, Conditions, Schedule
from .endpoints import Address

CHUNK = 256 << 10
PR_SET_TIMERSLACK = 29


class _Way:
    """One direction of one connection: what has been read and is not yet due, or not yet taken."""

    def __init__(self, source: socket.socket, target: socket.socket, conditions: Conditions) -> None:
        self.source = source
        self.target = target
        self.reading = True
        self.blocked = False
        self.done = False
        self._schedule = Schedule(conditions)
        self._window = conditions.window
        self._chunk = CHUNK  # of a narrow wire, what it carries in 2 ms: it delivers as it receives
        if conditions.bandwidth is not None:
            self._chunk = min(CHUNK, max(SEGMENT, int(conditions.bandwidth * 0.002)))
        self._chunks: deque[tuple[float, memoryview | None]] = deque()  # None: the end of the stream
        self._held = 0

    @property
    def wants_to_read(self) -> bool:
        return self.reading and self._held < self._window

    def due_at(self) -> float | None:
        """When the next chunk is to be handed on; None if there is none, or the target takes no more."""
        return None if self.blocked or not self._chunks else self._chunks[0][0]

    def read(self) -> None:
        try:
            data = self.source.recv(self._chunk)
        except BlockingIOError:
            return
        arrival = self._schedule.arrival(time.monotonic(), len(data))
        self._chunks.append((arrival, memoryview(data) if data else None))
        self._held += len(data)
        self.reading = bool(data)

    def write(self) -> None:
        """Hands on what is due, as far as the target takes it."""
        self.blocked = False
        while self._chunks and self._chunks[0][0] <= time.monotonic():
            arrival, data = self._chunks[0]
            if data is None:
                self.target.shutdown(socket.SHUT_WR)
                self._chunks.popleft()
                self.done = True
                return
            try:
                count = self.target.send(data)
            except BlockingIOError:
                self.blocked = True
                return
            self._held -= count
            self._chunks.popleft()
            if count < len(data):
                self._chunks.appendleft((arrival, data[count:]))


class Proxy:
    """Accepts on `listener`, connects to `to`; `run` never returns."""

    def __init__(self, listener: socket.socket, to: Address, conditions: Conditions) -> None:
        self._listener = listener
        self._to = to
        self._conditions = conditions
        self._pairs: dict[tuple[_Way, _Way], float | None] = {}  # and when each is cut
        listener.setblocking(False)

    def run(self, until_eof: bool = False) -> None:
        """Carries bytes; with `until_eof`, until standard input ends."""
        while True:
            ways = [way for pair in self._pairs for way in pair]
            readers: list[socket.socket | int] = [way.source for way in ways if way.wants_to_read]
            readers.append(self._listener)
            if until_eof:
                readers.append(sys.stdin.fileno())
            writers = [way.target for way in ways if way.blocked]
            times = [at for way in ways if (at := way.due_at()) is not None]
            times += [at for at in self._pairs.values() if at is not None]
            pause = max(0.0, min(times) - time.monotonic()) if times else None
            readable, writable, _ = select.select(readers, writers, [], pause)
            if until_eof and sys.stdin.fileno() in readable and not os.read(sys.stdin.fileno(), 1024):
                return
            self._step(set(readable), set(writable))

    def _step(self, readable: set[socket.socket | int], writable: set[socket.socket]) -> None:
        if self._listener in readable:
            self._accept()
        now = time.monotonic()
        for pair, cut_at in list(self._pairs.items()):
            try:
                for way in pair:
                    if way.source in readable and way.wants_to_read:
                        way.read()
                    due_at = way.due_at()
                    if way.target in writable or (due_at is not None and due_at <= now):
                        way.write()
            except OSError:
                self._drop(pair)
            else:
                if cut_at is not None and cut_at <= now:
                    self._drop(pair)
                elif pair[0].done and pair[1].done:
                    self._drop(pair, reset=False)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the caller may have gone already
            caller, _ = self._listener.accept()
            family = socket.AF_INET6 if ":" in self._to.host else socket.AF_INET
            peer = socket.socket(family, socket.SOCK_STREAM)
            for sock in (caller, peer):
                sock.setblocking(False)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer.connect_ex((self._to.host, self._to.port))  # goes on by itself; a failure shows in a send
            cut_after = self._conditions.cut_after
            pair = (_Way(caller, peer, self._conditions), _Way(peer, caller, self._conditions))
            self._pairs[pair] = None if cut_after is None else time.monotonic() + cut_after

    def _drop(self, pair: tuple[_Way, _Way], reset: bool = True) -> None:
        del self._pairs[pair]
        for way in pair:
            if reset:  # the other side sees a lost connection, not an end
                with contextlib.suppress(OSError):
                    way.source.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            way.source.close()


def main(argv: list[str] | None = None) -> None:
    """The command line; see the top of this file."""
    parser = argparse.ArgumentParser(
        "python -m meshpipe.wire.proxy", description="Puts any TCP peer behind a bad wire."
    )
    parser.add_argument(
        "--listen", default="127.0.0.1:0", metavar="HOST:PORT", help="port 0: the kernel chooses"
    )
    parser.add_argument("--to", required=True, metavar="HOST:PORT")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="one way")
    parser.add_argument("--jitter-ms", type=float, default=0.0, help="up to that much more, uniformly")
    parser.add_argument("--bandwidth-mbit", type=float, help="megabits a second, each way of each connection")
    parser.add_argument("--loss", type=float, default=0.0, help="probability that a segment stalls the rest")
    parser.add_argument("--stall-ms", type=float, default=200.0, help="for how long")
    parser.add_argument("--cut-after", type=float, metavar="S", help="seconds until a connection is cut")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--until-eof", action="store_true", help="end when standard input does")
    arguments = parser.parse_args(argv)
    try:
        conditions = Conditions(
            delay=arguments.delay_ms / 1e3,
            jitter=arguments.jitter_ms / 1e3,
            bandwidth=None if arguments.bandwidth_mbit is None else arguments.bandwidth_mbit * 125e3,
            loss=arguments.loss,
            stall=arguments.stall_ms / 1e3,
            cut_after=arguments.cut_after,
            seed=arguments.seed,
        )
        listen, to = Address.parse(arguments.listen), Address.parse(arguments.to)
        family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
        with socket.create_server((listen.host, listen.port), family=family, backlog=128) as listener:
            if sys.platform == "linux":  # timers may be 50 µs late unless asked otherwise
                ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)
            print(listener.getsockname()[1], flush=True)
            Proxy(listener, to, conditions).run(arguments.until_eof)
    except (MeshpipeError, OSError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()
