"""A server on loopback for tests: over a pipeline without a model, or over the demo model."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import trio
from attrs import define, frozen
from simulated import FakeVocabulary, Simulated, Target, simulated

from meshpipe.actors.scope import owned_nursery
from meshpipe.pipeline.coordinator import Coordinator
from meshpipe.serving.app import Service, application
from meshpipe.serving.server import open_listener, serve

MODEL = "test"


class Words(FakeVocabulary):
    """Tokens that are numbers, with a chat template."""

    pointer = None
    chat_template = None

    def tokenize(self, text: str, **_: Any) -> tuple[int, ...]:
        """Words that are no number count as their length."""
        return tuple(int(word) % 900 if word.isdecimal() else len(word) % 900 for word in text.split())

    def piece(self, token: int, *, special: bool = False) -> bytes:
        return f"{token} ".encode()

    def render_chat(self, messages: Sequence[Any], **_: Any) -> str:
        return " ".join(f"{message['role']} {message['content']}" for message in messages) + " assistant"


@frozen
class Served:
    """A running server."""

    service: Service
    url: str

    def client(self, **options: Any) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            base_url=self.url, timeout=60, verify=False, **options
        )  # no certificates to load


@asynccontextmanager
async def served(
    pipeline: Coordinator, *, listener: socket.socket | None = None, **options: Any
) -> AsyncIterator[Served]:
    """Serves on a port that the kernel chooses."""
    service = Service(pipeline, MODEL, **options)
    listener = listener or open_listener("127.0.0.1", 0)
    port = listener.getsockname()[1]
    async with owned_nursery() as nursery:
        await nursery.start(serve, application(service), listener)
        yield Served(service, f"http://127.0.0.1:{port}")


@define
class Both:
    """A server and the pipeline behind it."""

    served: Served
    sim: Simulated

    async def wait_free(self) -> None:
        """Until no lane is held anywhere."""
        for stage in self.sim.stages:
            await stage.wait_idle()


@asynccontextmanager
async def served_simulated(
    target: Target, *, queue: int = 64, keys: tuple[str, ...] = (), **options: Any
) -> AsyncIterator[Both]:
    """Real time: the stages' cost should be small."""
    async with (
        simulated(
            target, **({"vocabulary": Words(), "delay": None, "cost": ((1, 0.002), (63, 0.004))} | options)
        ) as sim,
        served(sim.coordinator, queue=queue, keys=keys) as server,
    ):
        yield Both(server, sim)


async def post(url: str, path: str, body: Any) -> tuple[int, str]:
    """The status and the text of an answer, by nothing but a socket: HTTP/1.0, read to the end."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.0\r\nHost: {host}\r\nContent-Length: {len(data)}\r\n\r\n"
    async with await trio.open_tcp_stream(host, int(port)) as stream:
        await stream.send_all(head.encode() + data)
        answer = b"".join([part async for part in stream]).decode()
    status, _, rest = answer.partition("\r\n")
    return int(status.split()[1]), rest.partition("\r\n\r\n")[2]


def events(text: str) -> list[Any]:
    """What a reader of server-sent events makes of a stream: data lines, joined until an empty one."""
    found: list[Any] = []
    data: list[str] = []
    for line in text.split("\n"):
        if line.startswith("data:"):
            data.append(line[5:].removeprefix(" "))
        elif not line and data:
            joined = "\n".join(data)
            found.append(joined if joined == "[DONE]" else json.loads(joined))
            data = []
    assert not data, "the stream ended inside an event"
    return found
