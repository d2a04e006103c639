"""Mutated frames against a live stage: a process that serves a tiny model while a pipeline uses it.

    python -m tests.chaos.fuzz --frames 1000000

Each connection is a link that shakes hands as it should, then says frames whose fields have been changed (the
stage has to take them for what they are: windows of nobody, lanes that do not exist, tokens beyond the vocabulary)
and at last one whose bytes have been changed, which ends it. Every 200 links, and at the end, the pipeline has to say
what it said before.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import trio
from attrs import evolve

sys.path.insert(0, str(Path(__file__).parent.parent))

import tiny

from meshpipe import Coordinator, MeshpipeError, Sampling, Topology
from meshpipe.actors.scope import owned_nursery
from meshpipe.messages import (
    CloseSession,
    Discard,
    Echo,
    Hello,
    OpenSession,
    Ping,
    Reply,
    SessionFailed,
    Window,
)
from meshpipe.pipeline.children import open_children, stage_command
from meshpipe.pipeline.remote import open_remote
from meshpipe.wire import Address, Frame, connect_link
from meshpipe.wire.frames import pack

from .harness import Tokens

FRAMES = 250
"""Frames with changed fields on each link, before the one with changed bytes."""


def strange(pick: random.Random) -> Any:
    """A message that decodes, and hardly makes sense."""
    number = pick.choice((0, 1, 2, 3, -1, 7, 2**31, 2**62, -(2**62)))
    session, epoch = pick.choice((0, 1, 2, 3)), pick.choice((0, 1, 2, 2**40, -1))
    tokens = tuple(pick.choice((0, 1, 95, 96, -1, 2**31)) for _ in range(pick.choice((0, 1, 2, 5, 70))))
    wanted = pick.choice((0, 1, len(tokens), -1, 1000))
    rows = (
        np.full((len(tokens), 128), pick.choice((0.0, np.nan, np.inf)), np.float32)
        if pick.random() < 0.1
        else None
    )
    return pick.choice(
        (
            lambda: OpenSession(session, pick.choice((0, 1, 2, 3, 4, -1, 2**40)), cached=number),
            lambda: OpenSession(session, 1, Sampling(temperature=pick.choice((0.0, 1.0, -1.0, np.nan)), top_k=number)),
            lambda: Window(session, epoch, number, pick.choice((0, 1, number)), tokens, wanted, rows),
            lambda: Window(session, 0, number, 0, (1, 2, 3), 1),
            lambda: CloseSession(session),
            lambda: Discard(session, epoch),
            lambda: Echo(session),
            lambda: Ping(number & 0xFFFF, 1.5),
        )
    )()  # fmt: skip


def broken(pick: random.Random) -> bytes:
    """A frame with some bytes changed, taken out, put in or repeated; or one that this side may not send."""
    message = strange(pick) if pick.random() < 0.8 else pick.choice(
        (Reply(1, 0, 0, 0, (1,)), SessionFailed(None, 0, "no"), Hello("x"))
    )  # fmt: skip
    head, payload = pack(Frame(message), "float32")
    data = bytearray(head + bytes(payload))
    for _ in range(pick.choice((1, 1, 2, 8))):
        at = pick.randrange(len(data))
        kind = pick.randrange(4)
        if kind == 0:
            data[at] = pick.randrange(256)
        elif kind == 1:
            del data[at : at + pick.randrange(1, 9)]
        elif kind == 2:
            data[at:at] = bytes(pick.randrange(256) for _ in range(pick.randrange(1, 9)))
        else:
            data[at : at + 4] = pick.choice((b"\xff\xff\xff\xff", b"\x00\x00\x00\x00", b"\x7f\xff\xff\xff"))
        if not data:
            break
    return bytes(data)


async def one_link(address: Address, number: int, pick: random.Random) -> int:
    """Says strange things on one link, the last of them broken; returns how many frames went out."""
    data, control, _ = await connect_link(address, Hello(f"fuzz{number}", lanes=1, context=1), deadline=10)
    sent = 0
    try:
        with trio.move_on_after(5):
            async with owned_nursery() as nursery:
                for connection in (data, control):
                    nursery.start_soon(_read_away, connection)
                for _ in range(FRAMES):
                    await data.send(Frame(strange(pick)))
                    sent += 1
                await trio.lowlevel.checkpoint()
                data._socket.setblocking(False)
                data._socket.send(broken(pick))
                sent += 1
                await trio.sleep(0.001)
                nursery.cancel_scope.cancel()
    except (MeshpipeError, OSError):
        pass  # it has ended the link already, as it should
    finally:
        await data.aclose()
        await control.aclose()
    return sent


async def _read_away(connection: Any) -> None:
    try:
        while True:
            await connection.receive()
    except MeshpipeError:
        return


async def prove(pipeline: Coordinator, expected: tuple[int, ...] | None) -> tuple[int, ...]:
    """The pipeline's answer, which is always the same."""
    with trio.fail_after(60):
        done = await pipeline.complete([5, 6, 7, 8], max_tokens=20)
    assert expected in (None, done.tokens), (expected, done.tokens)
    return done.tokens


async def fuzz(model: Path, frames: int, seconds: float, seed: int) -> dict[str, Any]:
    """Up to `frames` frames within `seconds`; what happened."""
    command = stage_command((0, 6), ["--model", str(model), "--lanes", "4", "--context", "512"])
    pick, sent, links, began = random.Random(seed), 0, 0, time.monotonic()
    async with open_children([(0, 6)], [command], 120.0) as children:
        pid = children.pids[0]
        topology = Topology((evolve(children.places[0]),))
        async with open_remote(topology, Tokens(), stall_deadline=60.0) as pipeline:  # type: ignore[arg-type]
            expected = await prove(pipeline, None)
            while sent < frames and time.monotonic() - began < seconds:
                sent += await one_link(Address.parse(topology.stages[0].address), links, pick)
                links += 1
                if links % 200 == 0:
                    await prove(pipeline, expected)
            await prove(pipeline, expected)
            assert children.pids == [pid], "the stage has died"
            assert pipeline.way.generation == 1, "the pipeline was lost meanwhile"
            status = Path(f"/proc/{pid}/status").read_text()
    memory = next(int(line.split()[1]) // 1024 for line in status.splitlines() if line.startswith("VmRSS"))
    return {
        "frames": sent,
        "links": links,
        "seconds": round(time.monotonic() - began, 1),
        "stage_mib": memory,
    }


def main() -> None:
    """The command line; see the top of this file."""
    parser = argparse.ArgumentParser(
        "python -m tests.chaos.fuzz", description="Mutated frames, a live stage."
    )
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after that long")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logging.basicConfig(level="ERROR", stream=sys.stderr)
    with tempfile.TemporaryDirectory() as directory:
        model = tiny.write(Path(directory) / "tiny.gguf", "llama")
        print(json.dumps(trio.run(fuzz, model, arguments.frames, arguments.seconds, arguments.seed)))


if __name__ == "__main__":
    main()
