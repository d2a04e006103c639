"""Serves the application over HTTP with Hypercorn, on the trio that the pipeline runs on."""

from __future__ import annotations

import logging
import socket
from collections.abc import Awaitable, Callable

import trio
from hypercorn.config import Config
from hypercorn.trio import serve as hypercorn_serve
from starlette.types import ASGIApp

from meshpipe.errors import UsageError

SEND_DEADLINE = 60.0
"""Seconds that a client may leave what was sent to it unread, if nothing else is said."""
GRACE = 10.0
"""Seconds for open requests when the server ends."""


def open_listener(host: str, port: int, send_deadline: float = SEND_DEADLINE) -> socket.socket:
    """A listening socket; port 0 takes any free one. Raises UsageError.

    A connection that leaves what was sent to it unread for `send_deadline` seconds is cut off, on Linux.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        raise UsageError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Hypercorn has no deadline of its own; connections inherit it
        milliseconds = max(1, int(send_deadline * 1000))
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
    return listener


async def serve(
    application: ASGIApp,
    listener: socket.socket,
    *,
    until: Callable[[], Awaitable[None]] = trio.sleep_forever,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serves until `until` returns, and then open requests to their end, for at most `GRACE` seconds."""
    config = Config()
    config.bind = [f"fd://{listener.detach()}"]
    config.accesslog = None
    config.errorlog = logging.getLogger("meshpipe.serving.http")
    config.loglevel = "WARNING"
    config.graceful_timeout = GRACE
    config.include_server_header = False
    async with trio.open_nursery() as nursery:

        async def run(*, task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED) -> None:
            await hypercorn_serve(
                application,  # type: ignore[arg-type]
                config,
                shutdown_trigger=until,
                task_status=task_status,
                mode="asgi",
            )

        await nursery.start(run)
        task_status.started()
