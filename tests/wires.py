"""Links for tests, over memory, TCP and TLS alike."""

from __future__ import annotations

import functools
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import trio
import trustme

from meshpipe.actors import Mailbox
from meshpipe.messages import CONTROL, REPLIES, WINDOWS, Hello, StageDescriptor, Window, queue_of
from meshpipe.wire import (
    BOUNDS,
    Address,
    Call,
    Connection,
    Link,
    Security,
    connect_link,
    listen,
    local_address,
    memory_pair,
    send_room,
    serve,
)

KINDS = ("memory", "tcp", "tls")
COLUMNS = 16
DESCRIPTOR = StageDescriptor(
    model_digest="cafe", layers=(10, 20), layer_count=30, n_embd=COLUMNS, n_vocab=100, lanes=4, context=256
)
HERE = Address("127.0.0.1", 0)
Pair = tuple[Connection, Connection]


@functools.cache
def tls(mutual: bool = False) -> Security:
    """Certificates for 127.0.0.1 from a throw-away authority; with `mutual`, callers need one too."""
    authority = trustme.CA()
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    authority.issue_cert("127.0.0.1").configure_cert(server)
    authority.configure_trust(client)
    if mutual:
        authority.issue_cert("caller@example.org").configure_cert(client)
        authority.configure_trust(server)
        server.verify_mode = ssl.CERT_REQUIRED
    return Security(server=server, client=client)


@asynccontextmanager
async def connections(kind: str, columns: int = COLUMNS) -> AsyncIterator[tuple[Pair, Pair]]:
    """(data, control) of the calling end and of the answering end of a link that nobody runs yet."""
    if kind == "memory":
        near_data, far_data = memory_pair(("near", "far"))
        near_control, far_control = memory_pair(("near", "far"))
        yield (near_data, near_control), (far_data, far_control)
        return
    security = tls() if kind == "tls" else Security()
    (listener,) = await listen(HERE, security)
    answered: list[Pair] = []
    arrived = trio.Event()

    async def handler(call: Call) -> None:
        assert call.control is not None
        answered.append((call.data, call.control))
        await call.accept()
        arrived.set()
        await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        await nursery.start(serve, [listener], handler, security)
        data, control, _ = await connect_link(
            local_address(listener), Hello("test", n_embd=columns), security, deadline=10
        )
        await arrived.wait()
        for connection in (data, control, *answered[0]):
            shrink(connection)
        try:
            yield (data, control), answered[0]
        finally:
            with trio.CancelScope(shield=True):
                await data.aclose()
                await control.aclose()
            nursery.cancel_scope.cancel()


def shrink(connection: Any) -> None:
    """Small kernel buffers, so that a pipe is full after few frames."""
    connection._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
    connection._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)


def inbox(windows: int = 1000, replies: int = 1000, control: int = 1000) -> Mailbox[Any]:
    return Mailbox({CONTROL: control, REPLIES: replies, WINDOWS: windows}, queue_of)


class Ends:
    """Both ends of a link, each with its inbox: `near` is upstream, `far` downstream."""

    def __init__(
        self,
        near: Pair,
        far: Pair,
        near_inbox: Mailbox[Any],
        far_inbox: Mailbox[Any],
        **options: Any,
    ) -> None:
        self.near_inbox, self.far_inbox = near_inbox, far_inbox
        self.near = Link("near-far", near_inbox.ref, *near, **options)
        self.far = Link("far-near", far_inbox.ref, *far, **options)


@asynccontextmanager
async def linked(
    kind: str,
    near_inbox: Mailbox[Any] | None = None,
    far_inbox: Mailbox[Any] | None = None,
    columns: int = COLUMNS,
    **options: Any,
) -> AsyncIterator[Ends]:
    """A running link; ends it in order when the block ends."""
    async with connections(kind, columns) as (near, far):
        options.setdefault("bounds", {**BOUNDS, WINDOWS: send_room(16, 1, columns)})
        ends = Ends(near, far, near_inbox or inbox(), far_inbox or inbox(), **options)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ends.near.run)
            nursery.start_soon(ends.far.run)
            yield ends
            ends.near.close()


def window(number: int, session: int = 0, epoch: int = 0, width: int = 1, columns: int = COLUMNS) -> Window:
    rows = np.full((width, columns), number, dtype=np.float32)
    return Window(session, epoch, number, number * width, tuple(range(width)), width, rows)
