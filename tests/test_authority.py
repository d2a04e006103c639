"""Who may open sessions, and what a topology is locked to."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
import trustme
from attrs import evolve
from simulated import FakeVocabulary
from test_remote import generate, joined, mesh

from meshpipe import StagePlace, Topology
from meshpipe.errors import HandshakeError, StageLostError, UsageError
from meshpipe.messages import Hello, Proof
from meshpipe.pipeline.remote import open_remote
from meshpipe.topology.lock import Lock, check_stage, make_lock, read_lock, write_lock
from meshpipe.wire import (
    Address,
    Frame,
    Security,
    client_context,
    connect,
    connect_link,
    memory_pair,
    server_context,
)
from meshpipe.wire.handshake import greet, receive_hello

KEY, SPECIAL = b"k" * 32, b"c" * 32


def identity(authority: trustme.CA, directory: Path, name: str) -> Security:
    """Accepts and connects with a certificate for 127.0.0.1 and the name."""
    issued = authority.issue_cert("127.0.0.1", name)
    cert, key, ca = (directory / f"{name}.{part}" for part in ("cert", "key", "ca"))
    issued.private_key_pem.write_to_path(key)
    for blob in issued.cert_chain_pems:
        blob.write_to_path(cert, append=True)
    authority.cert_pem.write_to_path(ca)
    return Security(server=server_context(cert, key, ca), client=client_context(ca, cert, key))


async def test_only_named_certificates_open_sessions(tmp_path: Path) -> None:
    authority = trustme.CA()
    stage = evolve(
        identity(authority, tmp_path, "stage.example"), coordinators=frozenset({"coordinator.example"})
    )
    coordinator = identity(authority, tmp_path, "coordinator.example")
    async with mesh(2, stage) as m:
        async with joined(m.topology, security=coordinator) as pipeline:
            await generate(pipeline, [1, 2], 20)
        for impostor in (stage, identity(authority, tmp_path, "other.example")):
            with pytest.raises(HandshakeError, match="which may not open sessions"):
                async with joined(m.topology, security=impostor):
                    pass
        # Nor by calling the first stage as if another one did, nor the last one for its replies.
        first, last = (Address.parse(place.address) for place in m.topology.stages)
        with pytest.raises(HandshakeError, match="stage 1 was called"):
            await connect_link(first, Hello("p", stage=1, route=(str(last),)), stage, 5)
        with pytest.raises(HandshakeError, match="the coordinator's"):
            await connect(last, Hello("p", role="return", stage=1), stage, 5)


async def test_only_the_coordinators_key_opens_sessions() -> None:
    everybody, stages = Security(key=KEY), Security(key=KEY, coordinator_key=SPECIAL)
    async with mesh(2, stages) as m:
        with pytest.raises(HandshakeError, match="does not know the shared key"):
            async with joined(m.topology, security=everybody):
                pass
        async with joined(m.topology, security=stages, direct=False) as pipeline:
            assert pipeline.return_route() == "reverse"
            await generate(pipeline, [1, 2], 20)


async def test_a_handshake_that_is_replayed_is_refused() -> None:
    """Every word of a caller who knew the key, said again to the same stage."""
    said: list[Frame] = []
    near, far = memory_pair()
    send = near.send

    async def overheard(frame: Frame) -> int:
        said.append(frame)
        return await send(frame)

    near.send = overheard  # type: ignore[method-assign]
    async with trio.open_nursery() as nursery:

        async def answer() -> None:
            await receive_hello(far, lambda _: KEY)
            await far.aclose()

        nursery.start_soon(answer)
        with pytest.raises(StageLostError):
            await greet(near, Hello("p"), KEY)
    assert [type(frame.message) for frame in said] == [Hello, Proof]
    near, far = memory_pair(capacity=8)
    for frame in said:
        await near.send(frame)
    with pytest.raises(HandshakeError, match="does not know the shared key"):
        await receive_hello(far, lambda _: KEY)


async def test_a_handshake_in_another_order_is_refused() -> None:
    near, far = memory_pair(capacity=8)
    await near.send(Frame(Proof(b"p" * 32)))
    await near.send(Frame(Hello("p")))
    with pytest.raises(HandshakeError, match="began with Proof"):
        await receive_hello(far, lambda _: KEY)


async def test_a_lock_lets_nothing_else_pass(tmp_path: Path) -> None:
    file = tmp_path / "mesh.lock"
    async with mesh(2) as m, joined(m.topology) as pipeline:
        write_lock(make_lock(m.topology.stages, pipeline.descriptors, "float32"), file)
        lock = read_lock(file)
        for host in m.hosts:
            host.lock = lock
        async with joined(m.topology, lock=lock) as locked:
            await generate(locked, [1, 2], 20)
        first, last = lock.stages
        for changed, message in [
            (evolve(first, model_digest="other"), "model digest of stage 0: the lock has other, found sim"),
            (evolve(first, version="9"), "version of stage 0: the lock has 9"),
            (evolve(first, layers=(0, 2)), "layers of stage 0"),
            (evolve(first, addresses=("a:1",)), "the lock has it at a:1"),
        ]:
            with pytest.raises(HandshakeError, match=message):
                async with joined(m.topology, lock=evolve(lock, stages=(changed, last))):
                    pass
        with pytest.raises(HandshakeError, match="activation type: the lock has int8"):
            async with joined(m.topology, lock=evolve(lock, activation="int8")):
                pass
        # The stages hold to it by themselves.
        m.hosts[0].lock = evolve(lock, stages=(first, evolve(last, addresses=("a:1",))))
        with pytest.raises(HandshakeError, match="the lock has it at a:1"):
            async with open_remote(m.topology, FakeVocabulary()):  # type: ignore[arg-type]
                pass
        for wrong in ((evolve(first, version="9"),), (evolve(first, model_digest="9"),), (last,)):
            with pytest.raises(HandshakeError, match="the lock has"):
                check_stage(Lock(wrong, "float32"), pipeline.descriptors[0], 0, None, "float32")


async def test_a_standby_that_a_lock_refuses_gives_way_to_the_next() -> None:
    """Whether the coordinator refuses it by its address or by what it is, or the stage before it does."""
    async with mesh(2) as m, mesh(2, version="old") as old, mesh(2) as spare:
        first, last = m.topology.stages
        others = tuple(at.topology.stages[1].address for at in (old, spare))
        async with joined(m.topology) as pipeline:
            places = (first, StagePlace(last.address, standby=others))
            recorded = make_lock(places, pipeline.descriptors, "float32")
        stages = recorded.stages
        partial = evolve(recorded, stages=(stages[0], evolve(stages[1], addresses=others[1:])))
        for by_coordinator, by_stage in ((recorded, None), (partial, None), (None, partial)):
            m.hosts[0].lock = by_stage
            refused = StagePlace(others[0], last.layers, standby=others[1:])
            async with joined(Topology((first, refused)), lock=by_coordinator) as pipeline:
                await generate(pipeline, [1], 5)
                assert [host.routes for host in (old.hosts[1], spare.hosts[1])] == [0, 1]


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"stages": [1], "activation": "a", "protocol": 1}'])
def test_lock_files_that_are_wrong(tmp_path: Path, content: str) -> None:
    file = tmp_path / "mesh.lock"
    with pytest.raises(UsageError, match="cannot read"):
        read_lock(file)
    file.write_text(content)
    with pytest.raises(UsageError, match="is no lock file"):
        read_lock(file)
