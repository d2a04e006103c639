"""Connecting: the handshake, its refusals, shared keys, TLS, and where a stage may listen."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
import trustme
from attrs import evolve
from trio.testing import MockClock
from wires import COLUMNS, DESCRIPTOR, HERE, tls, window

from meshpipe.errors import HandshakeError, ProtocolError, StageLostError, UsageError
from meshpipe.messages import PROTOCOL_VERSION, Challenge, Hello, Proof, Refusal, Welcome
from meshpipe.wire import (
    OPEN,
    Address,
    Call,
    Frame,
    Security,
    check_hello,
    check_listen,
    client_context,
    connect,
    connect_link,
    encode,
    is_loopback,
    listen,
    local_address,
    memory_pair,
    serve,
    server_context,
    shared_key,
)
from meshpipe.wire.handshake import greet, receive_hello, refuse, welcome
from meshpipe.wire.security import proof

KEY = b"0123456789abcdef0123456789abcdef"
HELLO = Hello("test", n_embd=COLUMNS)
Handler = Callable[[Call], Awaitable[None]]


async def stage(call: Call) -> None:
    """What a stage does: checks, accepts, and stays until the caller goes."""
    check_hello(call.hello, DESCRIPTOR)
    await call.accept((DESCRIPTOR,))
    try:
        await call.data.receive()
    except StageLostError:
        return


@asynccontextmanager
async def serving(
    handler: Handler = stage, security: Security = OPEN, deadline: float = 5
) -> AsyncIterator[Address]:
    (listener,) = await listen(HERE, security)
    async with trio.open_nursery() as nursery:
        await nursery.start(
            lambda task_status: serve(
                [listener], handler, security, deadline=deadline, task_status=task_status
            )
        )
        yield local_address(listener)
        nursery.cancel_scope.cancel()


# ---- agreeing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("security", ["open", "key", "tls", "mutual", "tls and key"])
async def test_whoever_has_what_it_takes_gets_in(security: str) -> None:
    secured = {
        "open": OPEN,
        "key": Security(key=KEY),
        "tls": tls(),
        "mutual": tls(mutual=True),
        "tls and key": evolve(tls(), key=KEY),
    }[security]
    async with serving(security=secured) as address:
        hello = evolve(HELLO, model_digest="cafe", layers=(10, None), lanes=4, context=256)
        data, control, answer = await connect_link(address, hello, secured, deadline=5)
        assert answer.descriptors == (DESCRIPTOR,)
        assert data.alive()
        assert control.alive()
        await data.aclose()
        await control.aclose()


async def test_the_activation_type_is_what_rows_travel_as() -> None:
    sizes: dict[str, int] = {}

    async def count(call: Call) -> None:
        await call.accept((DESCRIPTOR,))
        message = (await call.data.receive()).message
        assert message.rows.tolist() == [[3.0] * COLUMNS]

    async with serving(count) as address:
        for encoding in ("float32", "float16", "bfloat16", "int8"):
            data, control, _ = await connect_link(address, evolve(HELLO, activation=encoding), deadline=5)
            sizes[encoding] = await data.send(Frame(window(3)))
            with pytest.raises(StageLostError):
                await data.receive()
            await data.aclose()
            await control.aclose()
    assert sizes["float32"] - sizes["float16"] == pytest.approx(2 * COLUMNS, abs=3)
    assert sizes["float16"] - sizes["bfloat16"] == pytest.approx(0, abs=3)
    assert sizes["float16"] - sizes["int8"] == pytest.approx(COLUMNS - 4, abs=3)


async def test_rows_of_another_width_are_refused_after_the_handshake() -> None:
    errors: list[str] = []

    async def refuse_rows(call: Call) -> None:
        await call.accept((DESCRIPTOR,))
        with pytest.raises(ProtocolError) as caught:
            await call.data.receive()
        errors.append(str(caught.value))

    async with serving(refuse_rows) as address:
        data, control, _ = await connect_link(address, HELLO, deadline=5)
        await data.send(Frame(window(3, columns=COLUMNS + 1)))
        with pytest.raises(StageLostError):
            await data.receive()
        await data.aclose()
        await control.aclose()
    assert errors == [f"the rows of a Window are {COLUMNS + 1} wide; this link carries rows of {COLUMNS}"]


async def test_return_streams_are_one_connection_either_way_round() -> None:
    """Direct: the coordinator calls the last stage. Reverse: the last stage calls the coordinator."""
    roles: list[tuple[str, bool]] = []

    async def note(call: Call) -> None:
        roles.append((call.hello.role, call.control is None))
        await call.accept()

    async with serving(note) as address:
        connection, answer = await connect(address, Hello("test", role="return"), deadline=5)
        assert answer.descriptors == ()
        await connection.aclose()
    assert roles == [("return", True)]


# ---- refusing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_digest": "f00d"}, "model digest: the caller has f00d, stage 3 has cafe"),
        ({"layers": (9, None)}, "layers: the caller has 9:, stage 3 has 10:20"),
        ({"layers": (10, 21)}, "layers: the caller has 10:21, stage 3 has 10:20"),
        ({"n_embd": 99}, "row width: the caller has 99, stage 3 has 16"),
        ({"lanes": 5}, "lanes: the caller has 5, stage 3 has 4"),
        ({"context": 257}, "context per lane: the caller has 257, stage 3 has 256"),
        (
            {"activation": "float8"},
            "activation type: the caller has 'float8', this side knows float32, float16",
        ),
        (
            {"lanes": 9, "context": 999},
            "lanes: the caller has 9, stage 3 has 4 (start it with --lanes 9, or ask for less); "
            "context per lane: the caller has 999",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(value),
)
async def test_a_mismatch_is_refused_with_both_sides_values(changes: dict[str, object], words: str) -> None:
    async with serving() as address:
        with pytest.raises(HandshakeError) as caught:
            await connect_link(address, evolve(HELLO, stage=3, **changes), deadline=5)
        assert str(caught.value).startswith(f"{address} refused: ")
        assert words in str(caught.value)
        data, control, _ = await connect_link(address, HELLO, deadline=5)  # it goes on serving others
        await data.aclose()
        await control.aclose()


async def converse(hello: Hello | None, key: bytes | None = None) -> str:
    """What an answerer says to a frame-by-frame caller."""
    near, far = memory_pair(("caller", "answerer"))
    said: list[str] = []
    async with trio.open_nursery() as nursery:

        async def answer() -> None:
            with pytest.raises(HandshakeError) as caught:
                await receive_hello(far, lambda _: key)
            said.append(str(caught.value))

        nursery.start_soon(answer)
        await near.send(Frame(hello if hello is not None else Refusal("why not")))
        if hello is not None:
            refusal = (await near.receive()).message
            assert isinstance(refusal, Refusal)
            said.append(refusal.reason)
    assert len(set(said)) == 1
    return said[0]


async def test_versions_roles_and_first_words_are_checked() -> None:
    assert (await converse(evolve(HELLO, protocol=7))).startswith(
        f"protocol version: the caller has 7, this side {PROTOCOL_VERSION}"
    )
    assert (await converse(evolve(HELLO, role="king"))).startswith(
        "role: the caller has 'king', this side knows data,"
    )
    assert "nonce: the caller has 3 bytes" in await converse(evolve(HELLO, nonce=b"abc"), KEY)
    assert "refused: why not" in await converse(None)


async def test_a_data_connection_needs_its_control_connection() -> None:
    async with serving() as address:
        with pytest.raises(HandshakeError, match="control connection must be opened first"):
            await connect(address, evolve(HELLO, role="data", link=b"lonely"), deadline=5)
        first, _ = await connect(address, evolve(HELLO, role="control", link=b"one"), deadline=5)
        with pytest.raises(HandshakeError, match="has a control connection already"):
            await connect(address, evolve(HELLO, role="control", link=b"one"), deadline=5)
        await first.aclose()


async def test_a_control_connection_without_data_is_given_up_and_forgotten() -> None:
    async with serving(deadline=0.2) as address:
        for _ in range(2):
            control, _ = await connect(address, evolve(HELLO, role="control", link=b"one"), deadline=5)
            with trio.fail_after(2), pytest.raises(StageLostError):
                await control.receive()
            await control.aclose()


async def test_what_comes_before_the_handshake_is_small() -> None:
    """No rows, no long headers: not even from a caller that says Hello properly later."""
    async with serving() as address:
        stream = await trio.open_tcp_stream(address.host, address.port)
        await stream.send_all(b"mp\x01\x00" + bytes(4) + (1 << 20).to_bytes(4, "little") + bytes(4))
        with trio.fail_after(2):
            assert await stream.receive_some() == b""
        await stream.aclose()


# ---- shared keys --------------------------------------------------------------------------------------


async def test_a_wrong_or_missing_key_is_refused_on_either_side() -> None:
    async with serving(security=Security(key=KEY)) as address:
        with pytest.raises(HandshakeError, match="the caller does not know the shared key"):
            await connect(address, HELLO, Security(key=b"another key of 32 bytes, or so.."), deadline=5)
        with pytest.raises(HandshakeError, match="asks for a shared key, this side has none"):
            await connect(address, HELLO, deadline=5)
    async with serving() as address:
        with pytest.raises(HandshakeError, match="has no shared key, this side has one"):
            await connect(address, evolve(HELLO, role="control"), Security(key=KEY), deadline=5)


async def test_an_answerer_that_does_not_know_the_key_is_not_trusted() -> None:
    near, far = memory_pair(("caller", "impostor"))

    async def impostor() -> None:
        await far.receive()
        await far.send(Frame(Challenge(b"n" * 32)))
        theirs = (await far.receive()).message
        await far.send(Frame(theirs))  # the caller's own proof, reflected

    async with trio.open_nursery() as nursery:
        nursery.start_soon(impostor)
        with pytest.raises(HandshakeError, match="does not know the shared key that this side has"):
            await greet(near, HELLO, KEY)


async def test_a_recorded_handshake_is_of_no_use() -> None:
    """Every challenge is new, so the proof of yesterday proves nothing today."""
    proofs = []
    for _ in range(2):
        near, far = memory_pair(("caller", "answerer"))

        async def answer(far: object = far) -> None:
            hello = await receive_hello(far, lambda _: KEY)
            await welcome(far, hello)

        hello = evolve(HELLO, nonce=b"c" * 32)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(answer)
            await near.send(Frame(hello))
            challenge = (await near.receive()).message
            proofs.append(proof(KEY, "caller", encode(hello)[0], challenge.nonce))
            await near.send(Frame(Proof(proofs[-1])))
            assert isinstance((await near.receive()).message, Proof)
            assert isinstance((await near.receive()).message, Welcome)
    assert proofs[0] != proofs[1]


def test_proofs_bind_key_side_hello_and_challenge() -> None:
    base = (KEY, "caller", b"hello", b"challenge")
    variants = [
        base,
        (KEY[:-1], *base[1:]),
        (KEY, "answerer", b"hello", b"challenge"),
        (KEY, "caller", b"hellochall", b"enge"),
        (KEY, "caller", b"hello", b"Challenge"),
    ]
    assert len({proof(*variant) for variant in variants}) == len(variants)


def test_keys_come_from_files_and_are_long_enough(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(b"  " + KEY + b"\n")
    assert shared_key(path) == KEY
    path.write_bytes(b"secret\n")
    with pytest.raises(UsageError, match="has 6 bytes; expected at least 16"):
        shared_key(path)
    with pytest.raises(UsageError, match="cannot read the key file"):
        shared_key(tmp_path / "none")


def test_a_security_does_not_show_its_key() -> None:
    assert "0123" not in repr(Security(key=KEY))


# ---- TLS ----------------------------------------------------------------------------------------------


async def test_tls_turns_strangers_away() -> None:
    async with serving(security=tls(mutual=True), deadline=2) as address:
        with pytest.raises((StageLostError, HandshakeError)):  # no certificate of its own
            data, control, _ = await connect_link(address, HELLO, Security(client=tls().client), deadline=5)
        stranger = Security(client=tls().client)
        with pytest.raises(StageLostError, match="certificate verify failed"):
            await connect(address, HELLO, stranger, deadline=5)  # of another authority
        with pytest.raises(StageLostError):
            await connect(address, HELLO, OPEN, deadline=5)  # not TLS at all
        data, control, _ = await connect_link(address, HELLO, tls(mutual=True), deadline=5)
        await data.aclose()
        await control.aclose()


async def test_the_certificate_must_name_the_host() -> None:
    async with serving(security=tls()) as address:
        with pytest.raises(StageLostError, match=r"Hostname mismatch|hostname"):
            await connect(Address("localhost", address.port), HELLO, tls(), deadline=5)


async def test_tls_from_files(tmp_path: Path) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    for name, blob in (
        ("authority.pem", authority.cert_pem),
        ("key.pem", issued.private_key_pem),
        ("certificate.pem", issued.cert_chain_pems[0]),
    ):
        blob.write_to_path(tmp_path / name)
    files = (tmp_path / "certificate.pem", tmp_path / "key.pem")
    security = Security(
        server=server_context(*files, authorities=tmp_path / "authority.pem"),
        client=client_context(tmp_path / "authority.pem", *files),
    )
    async with serving(security=security) as address:
        data, control, _ = await connect_link(address, HELLO, security, deadline=5)
        await data.aclose()
        await control.aclose()
        with pytest.raises((StageLostError, HandshakeError)):  # the server wants a certificate too
            await connect_link(
                address, HELLO, Security(client=client_context(tmp_path / "authority.pem")), deadline=5
            )
    with pytest.raises(UsageError, match="cannot load TLS files"):
        server_context(tmp_path / "key.pem", tmp_path / "certificate.pem")


# ---- where to listen, where to connect ----------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "localhost"])
def test_loopback_needs_nothing(host: str) -> None:
    assert is_loopback(host)
    check_listen(host, OPEN)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.0.2.7", "example.org"])
def test_elsewhere_needs_mutual_tls_or_a_key_or_insistence(host: str) -> None:
    with pytest.raises(UsageError, match="refusing to listen on"):
        check_listen(host, OPEN)
    with pytest.raises(UsageError, match="refusing to listen on"):
        check_listen(host, Security(client=tls().client))
    with pytest.raises(UsageError, match="refusing to listen on"):
        check_listen(host, tls())  # which hides what passes, from those who are let in: everybody
    check_listen(host, Security(key=KEY))
    check_listen(host, Security(key=KEY, server=tls().server))
    check_listen(host, tls(mutual=True))
    check_listen(host, OPEN, insecure=True)


async def test_listening_checks_first() -> None:
    with pytest.raises(UsageError, match=r"refusing to listen on 0.0.0.0"):
        await listen(Address("0.0.0.0", 0))
    (listener,) = await listen(HERE)
    with pytest.raises(UsageError, match=r"cannot listen on 127.0.0.1"):
        await listen(local_address(listener))
    await listener.aclose()


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:7000", Address("127.0.0.1", 7000)),
        ("[::1]:7000", Address("::1", 7000)),
        ("stage-2.example.org:1", Address("stage-2.example.org", 1)),
    ],
)
def test_addresses(text: str, address: Address) -> None:
    assert Address.parse(text) == address
    assert str(address) == text


@pytest.mark.parametrize(
    "text", ["", "7000", ":7000", "host:", "host:x", "host:70000", "host:-1", "host:²", "host:" + "1" * 5000]
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(UsageError, match="expected an address like"):
        Address.parse(text)


async def test_nobody_there_is_a_lost_stage() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(StageLostError, match=f"cannot reach 127.0.0.1:{port}: .*refused"):
        await connect(Address("127.0.0.1", port), HELLO, deadline=3)


async def test_a_caller_does_not_wait_for_ever() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = Address(*mute.getsockname())
        with pytest.raises(StageLostError, match=r"did not answer within 0.2 s"):
            await connect(address, HELLO, deadline=0.2)
        with pytest.raises(StageLostError, match=r"did not answer within 0.2 s"):
            await connect_link(address, HELLO, deadline=0.2)


async def test_an_answerer_does_not_wait_for_ever() -> None:
    async with serving(deadline=0.2) as address:
        stream = await trio.open_tcp_stream(address.host, address.port)
        with trio.fail_after(2):
            assert await stream.receive_some() == b""
        await stream.aclose()


async def test_a_handlers_refusal_reaches_the_caller_and_its_bug_the_supervisor() -> None:
    async def full(call: Call) -> None:
        async with trio.open_nursery():  # an error inside a nursery comes in a group
            raise HandshakeError("all lanes are taken; try later")

    async with serving(full) as address:
        with pytest.raises(HandshakeError, match="refused: all lanes are taken"):
            await connect_link(address, HELLO, deadline=5)

    async def silent(call: Call) -> None:
        return

    with pytest.RaisesGroup(
        pytest.RaisesExc(RuntimeError, match="without an answer"), flatten_subgroups=True
    ):
        async with serving(silent) as address:
            with pytest.raises(StageLostError):
                await connect_link(address, HELLO, deadline=5)
            await trio.sleep_forever()


async def test_cancelling_the_server_closes_everything() -> None:
    accepted = trio.Event()

    async def forever(call: Call) -> None:
        await call.accept()
        accepted.set()
        await trio.sleep_forever()

    async with serving(forever) as address:
        data, control, _ = await connect_link(address, HELLO, deadline=5)
        await accepted.wait()
    for connection in (data, control):
        with trio.fail_after(2), pytest.raises(StageLostError):
            await connection.receive()
        await connection.aclose()
    with pytest.raises(StageLostError, match="cannot reach"):
        await connect(address, HELLO, deadline=3)


async def test_refusing_needs_no_listener(autojump_clock: MockClock) -> None:
    near, far = memory_pair(("caller", "answerer"))
    await refuse(far, "busy")
    with pytest.raises(HandshakeError, match="answerer refused: busy"):
        await greet(near, HELLO)
