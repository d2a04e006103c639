"""Frames from a peer that is broken or hostile: a `ProtocolError` or a clean close, never more memory or harm.

`python tests/test_wire_fuzz.py SECONDS [SEED]` runs the mutator for as long as you like and says how many
inputs it has tried.
"""

from __future__ import annotations

import random
import socket
import struct
import sys
import time
import tracemalloc
from collections import Counter

import cbor2
import hypothesis.strategies as st
import numpy as np
import pytest
import trio
from attrs import evolve
from hypothesis import given, settings
from wires import COLUMNS, DESCRIPTOR, HERE, inbox, window

from meshpipe.errors import MeshpipeError, ProtocolError
from meshpipe.messages import (
    Challenge,
    Discard,
    Hello,
    OpenSession,
    Ping,
    Progress,
    Reply,
    Sampling,
    Timing,
    Welcome,
    Window,
)
from meshpipe.wire import Call, Frame, Kind, Limits, Link, connect_link, listen, local_address, serve
from meshpipe.wire.codec import ENCODINGS
from meshpipe.wire.frames import PREFIX_SIZE, pack, parse_prefix, unpack

LIMITS = Limits(header=1 << 16, payload=1 << 20, columns=COLUMNS)


def seeds() -> list[bytes]:
    """Whole valid frames, the ground that mutations start from."""
    rows = np.linspace(-1, 1, 3 * COLUMNS, dtype=np.float32).reshape(3, COLUMNS)
    timings = (Timing(0, 0.5, 0.25, 3), Timing(1, 0.0, 1e-9, 1))
    messages = [
        Frame(Hello("pipeline", nonce=b"n" * 32, route=("a:1", "b:2"), model_digest="d", layers=(1, None))),
        Frame(Challenge(b"c" * 32)),
        Frame(Welcome(1, (evolve(DESCRIPTOR, cost=((1, 0.5), (2, 0.75))), DESCRIPTOR))),
        Frame(OpenSession(1, 2, cached=3, prefix=b"p" * 16, hidden_from=2)),
        Frame(
            OpenSession(1, 2, Sampling(logit_bias=((5, 1.5),), grammar='root ::= "a"', logprobs=2), prompt=9)
        ),
        Frame(window(1)),
        Frame(Reply(1, 2, 3, 4, (5, 6, 7), timings, ((8, 0.75), (9, 0.5)), rows)),
        Frame(Reply(1, 2, 3, 4, (5, 6), logprobs=(((5, -0.5), (5, -0.5)), ((6, -1.0), (7, -0.25))))),
        Frame(Progress(1, 2, 3, rows)),
        Frame(Discard(1, 2), Kind.ASK, 77),
        Frame(Ping(1, 2.5)),
        Frame(None, Kind.ANSWER, 5),
        Frame(None, Kind.END),
    ]
    frames = [b"".join(pack(frame)) for frame in messages]
    frames += [
        b"".join(pack(Frame(Window(1, 2, 3, 4, (5, 6, 7), 3, rows, timings)), name)) for name in ENCODINGS
    ]
    return frames


SEEDS = seeds()
WRONG = (
    None,
    True,
    -1,
    2**63,
    2**64 - 1,
    -(2**64),
    1.5,
    float("nan"),
    "",
    "x" * 300,
    b"\xff",
    [],
    {},
    [[]],
    [1, "a"],
)


# ---- mutations ----------------------------------------------------------------------------------------


def flip(dice: random.Random, data: bytearray) -> bytearray:
    for _ in range(dice.choice((1, 1, 2, 8))):
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    return data


def overwrite(dice: random.Random, data: bytearray) -> bytearray:
    start = dice.randrange(len(data))
    data[start : start + dice.randrange(1, 9)] = dice.randbytes(dice.randrange(1, 9))
    return data


def truncate(dice: random.Random, data: bytearray) -> bytearray:
    return data[: dice.randrange(len(data))]


def splice(dice: random.Random, data: bytearray) -> bytearray:
    other = dice.choice(SEEDS)
    return data[: dice.randrange(len(data))] + other[dice.randrange(len(other)) :]


def lie_about_lengths(dice: random.Random, data: bytearray) -> bytearray:
    sizes = (0, 1, len(data), 1 << 16, 1 << 20, 1 << 31, (1 << 32) - 1)
    struct.pack_into("<I", data, dice.choice((4, 8, 12)), dice.choice(sizes))
    return data


def reheaded(header: bytes, payload: bytes = b"") -> bytearray:
    return bytearray(b"mp\x01\x00" + struct.pack("<III", 0, len(header), len(payload)) + header + payload)


def nest(dice: random.Random, data: bytearray) -> bytearray:
    opening = dice.choice((b"\x81", b"\xa1\x61a", b"\x9f", b"\xbf\x61a", b"\xc1", b"\xd8\x1c\x81", b"\x5f"))
    return reheaded(opening * dice.choice((1, 5, 7, 50, 5000)) + dice.choice((b"", b"\x00", b"\xff")))


def announce(dice: random.Random, data: bytearray) -> bytearray:
    """A CBOR length of up to 2**64 with nothing behind it."""
    kind = dice.choice((0x40, 0x60, 0x80, 0xA0))
    return reheaded(bytes([kind | 27]) + dice.choice((2**32, 2**40, 2**63, 2**64 - 1)).to_bytes(8, "big"))


def retype(dice: random.Random, data: bytearray) -> bytearray:
    """A field of a valid message with a value of another type, or one field more or less."""
    data = bytearray(dice.choice(SEEDS))
    header_size = struct.unpack_from("<I", data, 8)[0]
    if not header_size:
        return flip(dice, data)
    tag, fields = cbor2.loads(bytes(data[PREFIX_SIZE : PREFIX_SIZE + header_size]))
    name = dice.choice([*fields, "extra", "rows", "timings"])
    if dice.random() < 0.2:
        fields.pop(name, None)
    else:
        fields[name] = dice.choice(WRONG)
    return reheaded(cbor2.dumps([tag, fields]), bytes(data[PREFIX_SIZE + header_size :]))


MUTATIONS = (flip, overwrite, truncate, splice, lie_about_lengths, nest, announce, retype)


def mutant(dice: random.Random) -> bytes:
    """A stream of one or two frames, of which at least one was mutated, once or more."""
    data = bytearray(dice.choice(SEEDS))
    for _ in range(dice.choice((1, 1, 1, 2, 4))):
        if len(data) < PREFIX_SIZE:
            data = bytearray(dice.choice(SEEDS))
        data = dice.choice(MUTATIONS)(dice, data)
    return bytes(data) if dice.random() < 0.7 else dice.choice(SEEDS) + bytes(data)


# ---- against the decoder ------------------------------------------------------------------------------


def consume(stream: bytes) -> str:
    """Reads frames as a connection does; says how it ended. Whatever is not a ProtocolError comes out."""
    at = 0
    try:
        while at < len(stream):
            if len(stream) - at < PREFIX_SIZE:
                return "cut"
            prefix = parse_prefix(stream[at : at + PREFIX_SIZE], LIMITS)
            at += PREFIX_SIZE
            if len(stream) - at < prefix.header + prefix.payload:
                return "cut"
            payload = np.frombuffer(bytearray(stream[at + prefix.header :][: prefix.payload]), np.uint8)
            unpack(prefix, stream[at : at + prefix.header], payload, LIMITS)
            at += prefix.header + prefix.payload
    except ProtocolError:
        return "refused"
    return "understood"


def test_the_seeds_are_understood() -> None:
    assert {consume(seed) for seed in SEEDS} == {"understood"}


def test_mutants_are_refused_or_understood_in_bounded_memory() -> None:
    dice = random.Random(1)
    ends: Counter[str] = Counter()
    tracemalloc.start()
    try:
        for _ in range(5000):
            ends[consume(mutant(dice))] += 1
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 20 << 20
    assert min(ends[end] for end in ("cut", "refused", "understood")) > 200, ends


@pytest.mark.slow
def test_half_a_million_mutants() -> None:
    dice = random.Random(2)
    ends = Counter(consume(mutant(dice)) for _ in range(500_000))
    assert set(ends) == {"cut", "refused", "understood"}


cbor = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
TAGS = [cbor2.loads(seed[PREFIX_SIZE:][: struct.unpack_from("<I", seed, 8)[0]])[0] for seed in SEEDS[:11]]


@settings(max_examples=300, deadline=None)
@given(cbor | st.tuples(st.sampled_from(TAGS), cbor), st.binary(max_size=40))
def test_any_cbor_is_refused_or_understood(value: object, payload: bytes) -> None:
    assert consume(bytes(reheaded(cbor2.dumps(value), payload))) in ("refused", "understood")


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_refused_or_understood(header: bytes) -> None:
    assert consume(bytes(reheaded(header))) in ("refused", "understood")


def test_a_header_costs_a_small_multiple_of_its_size() -> None:
    """The worst header that fits: a list of empty lists, a byte each."""
    header = b"\x9a" + (60_000).to_bytes(4, "big") + b"\x80" * 60_000
    tracemalloc.start()
    try:
        assert consume(bytes(reheaded(header))) == "refused"
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100 * len(header)


# ---- against a stage that serves others ---------------------------------------------------------------


async def attack(strangers: int, callers: int, seed: int) -> Counter[str]:
    """Mutants before and after the handshake, while a healthy link goes on."""
    dice = random.Random(seed)
    ends: Counter[str] = Counter()
    harmed: list[BaseException] = []

    async def stage(call: Call) -> None:
        await call.accept((DESCRIPTOR,))
        box = inbox(windows=10_000)
        link = Link("stage", box.ref, call.data, call.control)

        async def echo() -> None:
            async for message in box:
                if isinstance(message, Window):
                    await link.ref.send(Reply(0, 0, message.number, 0, (1,)))

        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(echo)
                await link.run()
                nursery.cancel_scope.cancel()
        except Exception as error:
            within = getattr(error, "exceptions", [error])
            harmed.extend(one for one in within if not isinstance(one, MeshpipeError))
            ends[type(within[0]).__name__] += 1
            raise

    async def healthy(link: Link, box: object, number: int) -> None:
        await link.ref.send(window(number))
        assert (await box.receive("replies")).number == number

    (listener,) = await listen(HERE)
    address = local_address(listener)
    async with trio.open_nursery() as nursery:
        await nursery.start(serve, [listener], stage)
        data, control, _ = await connect_link(address, Hello("healthy", n_embd=COLUMNS), deadline=5)
        box = inbox()
        link = Link("caller", box.ref, data, control)
        nursery.start_soon(link.run)

        async def stranger(data: bytes) -> None:
            async with limit:
                stream = await trio.open_tcp_stream(address.host, address.port)
                await send_and_wait(stream.socket, data)
                await stream.aclose()

        async def caller(data: bytes, on_control: bool) -> None:
            """With the handshake done; its END may be understood, and then the link lingers for a while."""
            async with limit:
                ways = (await connect_link(address, Hello("mad", n_embd=COLUMNS), deadline=5))[:2]
                with socket.socket(fileno=ways[on_control]._socket.detach()) as raw:
                    raw.setblocking(False)
                    await send_and_wait(trio.socket.from_stdlib_socket(raw), data)
                for connection in ways:
                    await connection.aclose()

        limit = trio.CapacityLimiter(16)
        with trio.fail_after(300):
            async with trio.open_nursery() as mob:
                for _ in range(strangers):
                    mob.start_soon(stranger, mutant(dice))
                for _ in range(callers):
                    mob.start_soon(caller, mutant(dice), dice.random() < 0.5)
                for n in range((strangers + callers) // 4):
                    await healthy(link, box, n)
        await healthy(link, box, -1)
        data, control, _ = await connect_link(address, Hello("late", n_embd=COLUMNS), deadline=5)
        await data.aclose()
        await control.aclose()
        nursery.cancel_scope.cancel()
    assert harmed == []
    return ends


async def send_and_wait(peer: trio.socket.SocketType, data: bytes) -> None:
    """Sends, ends, and reads until the other side has closed."""
    try:
        view = memoryview(data)
        while view:
            view = view[await peer.send(view) :]
        peer.shutdown(socket.SHUT_WR)
        while await peer.recv(1 << 16):
            pass
    except OSError:
        return  # reset: closed with our bytes unread


async def test_a_stage_goes_on_serving_others() -> None:
    ends = await attack(strangers=60, callers=60, seed=3)
    assert sum(ends.values()) > 0


@pytest.mark.slow
async def test_a_stage_survives_thousands_of_mad_callers() -> None:
    ends = await attack(strangers=1500, callers=1500, seed=4)
    assert {"ProtocolError", "StageLostError"} <= set(ends)


def main() -> None:
    """Mutants without end, for as long as asked."""
    seconds, dice = float(sys.argv[1]), random.Random(int(sys.argv[2]) if len(sys.argv) > 2 else None)
    ends: Counter[str] = Counter()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(1000):
            ends[consume(mutant(dice))] += 1
    print(f"{sum(ends.values())} inputs: {dict(ends)}")


if __name__ == "__main__":
    main()
