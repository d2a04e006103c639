"""What one hop costs: a 16-row frame through a link in memory, over TCP and over TLS, on loopback.

Latency is half of a round trip with one frame under way; over TCP and TLS the other end is a process of its
own. Rate is frames a second one way, with as many under way as the link takes. The row `socket` is the floor:
the same bytes between two processes over a bare blocking TCP socket, with nothing of meshpipe.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import trio
import trustme

from bench import report
from meshpipe.actors import Mailbox
from meshpipe.messages import WINDOWS, CloseSession, Hello, SessionOpened, Window, queue_of
from meshpipe.wire import (
    BOUNDS,
    OPEN,
    Address,
    Call,
    Link,
    Security,
    client_context,
    connect_link,
    listen,
    local_address,
    memory_pair,
    serve,
    server_context,
)

ROWS = 16
COLUMNS = (576, 8192)
HOST = "127.0.0.1"


def window(number: int, columns: int) -> Window:
    return Window(1, 0, number, number * ROWS, tuple(range(ROWS)), ROWS, np.ones((ROWS, columns), np.float32))


def mailbox() -> Mailbox[Any]:
    return Mailbox({**BOUNDS, WINDOWS: 16}, queue_of)


# ---- the other end ------------------------------------------------------------------------------------


async def echo(box: Mailbox[Any], link: Link) -> None:
    """Sends windows of even sessions' numbers straight back; says when a one-way run is over."""
    async for message in box:
        if isinstance(message, CloseSession):
            await link.ref.send(SessionOpened(message.session))
        elif message.epoch == 0:
            await link.ref.send(message)


async def echo_server(security: Security) -> None:
    """A process of its own: answers links until it is ended, and prints its port first."""

    async def handler(call: Call) -> None:
        box = mailbox()
        link = Link("echo", box.ref, call.data, call.control)
        await call.accept()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(echo, box, link)
            await link.run()
            box.close("the link has ended")

    listeners = await listen(Address(HOST, 0), security)
    print(local_address(listeners[0]).port, flush=True)
    await serve(listeners, handler, security)


def raw_server() -> None:
    """The floor: echoes as many bytes as the first four say, again and again, over a blocking socket."""
    with socket.create_server((HOST, 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        peer, _ = listener.accept()
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    data = bytearray(int.from_bytes(peer.recv(4, socket.MSG_WAITALL), "little"))
    while receive(peer, data):
        peer.sendall(data)


def receive(peer: socket.socket, data: bytearray) -> bool:
    return peer.recv_into(data, len(data), socket.MSG_WAITALL) == len(data)


@contextmanager
def other_process(*arguments: str) -> Iterator[int]:
    """Runs this module as the other end; gives its port."""
    command = [sys.executable, "-m", "bench.hop", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline())
        finally:
            process.kill()


# ---- measuring ----------------------------------------------------------------------------------------


@asynccontextmanager
async def memory_link() -> AsyncIterator[tuple[Link, Mailbox[Any]]]:
    box, other_box = mailbox(), mailbox()
    (data, other_data), (control, other_control) = memory_pair(), memory_pair()
    link = Link("near", box.ref, data, control)
    other = Link("far", other_box.ref, other_data, other_control)
    async with trio.open_nursery() as nursery:
        for work in (link.run, other.run):
            nursery.start_soon(work)
        nursery.start_soon(echo, other_box, other)
        yield link, box
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def stream_link(
    port: int, security: Security, columns: int
) -> AsyncIterator[tuple[Link, Mailbox[Any]]]:
    hello = Hello("bench", n_embd=columns)
    data, control, _ = await connect_link(Address(HOST, port), hello, security)
    box = mailbox()
    link = Link("near", box.ref, data, control)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(link.run)
        yield link, box
        link.close()


async def measure(link: Link, box: Mailbox[Any], columns: int, count: int) -> tuple[list[float], float]:
    """Seconds of each hop (half a round trip), and frames a second one way."""
    hops: list[float] = []
    for number in range(count + count // 10):
        frame = window(number, columns)
        began = time.perf_counter()
        await link.ref.send(frame)
        await box.receive(WINDOWS)
        hops.append((time.perf_counter() - began) / 2)
    one_way = Window(1, 1, 0, 0, tuple(range(ROWS)), ROWS, window(0, columns).rows)  # not sent back
    began = time.perf_counter()
    for _ in range(count):
        await link.ref.send(one_way)
    await link.ref.send(CloseSession(1))
    await box.receive()
    return hops[count // 10 :], count / (time.perf_counter() - began)


def row(wire: str, columns: int, hops: list[float], rate: float) -> dict[str, Any]:
    p50, p99 = (float(value) * 1e6 for value in np.percentile(hops, [50, 99]))
    megabytes = rate * ROWS * columns * 4 / 1e6
    return {
        "wire": wire,
        "columns": columns,
        "p50 µs": p50,
        "p99 µs": p99,
        "frames/s": rate,
        "MB/s": megabytes,
    }


def run_raw(columns: int, count: int) -> dict[str, Any]:
    size = ROWS * columns * 4 + 240
    data, back = bytes(size), bytearray(size)
    hops: list[float] = []
    with other_process("--raw") as port, socket.create_connection((HOST, port)) as peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer.sendall(size.to_bytes(4, "little"))
        for _ in range(count):
            began = time.perf_counter()
            peer.sendall(data)
            receive(peer, back)
            hops.append((time.perf_counter() - began) / 2)
    return row("socket", columns, hops, 0.5 / (sum(hops) / len(hops)))


async def run_link(wire: str, columns: int, count: int, certificates: Path) -> dict[str, Any]:
    if wire == "memory":
        async with memory_link() as (link, box):
            return row(wire, columns, *await measure(link, box, columns, count))
    security = tls(certificates) if wire == "tls" else OPEN
    with other_process("--echo", *([str(certificates)] if wire == "tls" else [])) as port:
        async with stream_link(port, security, columns) as (link, box):
            return row(wire, columns, *await measure(link, box, columns, count))


def make_certificates(directory: Path) -> None:
    authority = trustme.CA()
    certificate = authority.issue_cert(HOST)
    authority.cert_pem.write_to_path(directory / "authority.pem")
    certificate.private_key_pem.write_to_path(directory / "key.pem")
    certificate.cert_chain_pems[0].write_to_path(directory / "certificate.pem")


def tls(directory: Path) -> Security:
    return Security(
        server=server_context(directory / "certificate.pem", directory / "key.pem"),
        client=client_context(directory / "authority.pem"),
    )


def main(argv: list[str]) -> None:
    """Measures and prints the table."""
    parser = report.parser("hop", __doc__)
    parser.add_argument("--count", type=int, default=3000, help="frames per measurement")
    arguments = parser.parse_args(argv)
    count = 300 if arguments.quick else arguments.count
    rows = []
    with tempfile.TemporaryDirectory() as name:
        make_certificates(Path(name))
        for columns in COLUMNS:
            rows.append(run_raw(columns, count))
            rows.extend(
                trio.run(run_link, wire, columns, count, Path(name)) for wire in ("memory", "tcp", "tls")
            )
    print(report.table(rows))
    report.finish(arguments, rows)


if __name__ == "__main__":  # the other end
    if sys.argv[1] == "--raw":
        raw_server()
    else:
        trio.run(echo_server, tls(Path(sys.argv[2])) if len(sys.argv) > 2 else OPEN)
