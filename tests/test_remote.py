"""Stage hosts over real sockets, with simulated engines: routes, return streams, TLS, leaks."""

from __future__ import annotations

import gc
import os
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from simulated import VOCABULARY, CheckedRunner, FakeVocabulary, mixed, serial
from wires import tls

from meshpipe import Coordinator, Speculation, StagePlace, Topology
from meshpipe.errors import HandshakeError, StageLostError, UsageError
from meshpipe.messages import StageDescriptor
from meshpipe.pipeline.host import StageHost
from meshpipe.pipeline.remote import open_remote
from meshpipe.pipeline.runner import Guesser
from meshpipe.topology.layout import read_topology
from meshpipe.wire import OPEN, Address, Security, listen, local_address

QUICK = ((1, 0.0005), (64, 0.002))
SECURITIES = {
    "open": lambda: OPEN,
    "key": lambda: Security(key=b"k" * 32),
    "mutual tls": lambda: tls(mutual=True),
}


class Mesh:
    """Stage hosts that run, and where."""

    def __init__(
        self, hosts: list[StageHost], places: list[StagePlace], scopes: list[trio.CancelScope]
    ) -> None:
        self.hosts = hosts
        self.topology = Topology(tuple(places))
        self.scopes = scopes


@asynccontextmanager
async def mesh(
    stages: int, security: Security = OPEN, lanes: int = 4, drafter: Guesser | None = None, **changes: Any
) -> AsyncIterator[Mesh]:
    hosts, places, scopes = [], [], []
    async with trio.open_nursery() as nursery:
        for index in range(stages):
            described = {
                "model_digest": "sim", "layers": (index, index + 1), "layer_count": stages, "n_embd": 8,
                "n_vocab": VOCABULARY, "lanes": lanes, "context": 2048, "cost": QUICK,
                "instance": secrets.token_hex(4),
            } | (changes if index == stages - 1 else {})  # fmt: skip
            host = StageHost(CheckedRunner(StageDescriptor(**described), mixed, drafter), security)
            listeners = await listen(Address("127.0.0.1", 0), security)
            scope = trio.CancelScope()

            async def run(host=host, listeners=listeners, scope=scope, *, task_status: Any) -> None:  # type: ignore[no-untyped-def]
                with scope:
                    await host.run(listeners, task_status=task_status)

            await nursery.start(run)
            hosts.append(host)
            scopes.append(scope)
            places.append(StagePlace(str(local_address(listeners[0])), (index, index + 1)))
        yield Mesh(hosts, places, scopes)
        nursery.cancel_scope.cancel()


def joined(topology: Topology, **options: Any):  # type: ignore[no-untyped-def]
    return open_remote(topology, options.pop("vocabulary", FakeVocabulary()), **options)


async def generate(pipeline: Coordinator, prompt: list[int], count: int = 60, **options: Any) -> None:
    done = await pipeline.complete(prompt, max_tokens=count, **options)
    assert list(done.tokens) == serial(mixed, prompt, count)


async def lanes_free(hosts: list[StageHost]) -> None:
    with trio.fail_after(5):
        for host in hosts:
            await host.stage.wait_idle()


@pytest.mark.parametrize(("stages", "security"), [(1, "key"), (2, "open"), (3, "mutual tls")])
async def test_generates_over_sockets(stages: int, security: str) -> None:
    async with mesh(stages, SECURITIES[security]()) as m:
        async with joined(m.topology, security=SECURITIES[security]()) as pipeline:
            assert pipeline.return_route() == "direct"
            async with trio.open_nursery() as nursery:
                for number in range(6):
                    nursery.start_soon(generate, pipeline, [number] * (5 + 40 * number))
            await lanes_free(m.hosts)
        with trio.fail_after(5):
            while any(host.routes for host in m.hosts):  # noqa: ASYNC110
                await trio.sleep(0.01)


@pytest.mark.parametrize(
    ("options", "kind"),
    [({}, "direct"), ({"direct": False}, "reverse"), ({"direct": False, "listen_host": None}, "relay")],
)
async def test_every_way_back(options: dict[str, Any], kind: str) -> None:
    async with mesh(3) as m, joined(m.topology, **options) as pipeline:
        assert pipeline.return_route() == kind
        await generate(pipeline, [1, 2, 3])
        await lanes_free(m.hosts)


async def test_a_lost_return_stream_is_replaced_in_the_middle_of_a_request() -> None:
    async with mesh(2) as m, joined(m.topology) as pipeline:
        tokens: list[int] = []
        async with pipeline.generate([4, 5], max_tokens=200, speculation=Speculation(depth=4)) as generation:
            async for piece in generation:
                tokens += piece.tokens
                if len(tokens) in range(20, 30):
                    (held,) = m.hosts[-1]._routes.values()
                    stream = held.back.stream
                    if stream is not None:
                        stream._mailbox.close("cut by the test")  # type: ignore[attr-defined]
        assert tokens == serial(mixed, [4, 5], 200)
        await lanes_free(m.hosts)


async def test_cancelling_frees_the_lane_on_every_stage() -> None:
    async with mesh(3, lanes=1) as m, joined(m.topology) as pipeline:
        async with pipeline.generate([1], max_tokens=2000) as generation:
            await generation.__anext__()
        await lanes_free(m.hosts)
        await generate(pipeline, [2], 10)


async def test_two_coordinators_share_stages() -> None:
    async with mesh(2, lanes=4) as m, joined(m.topology) as one:
        await generate(one, [1], 10)
        async with joined(m.topology) as two:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(generate, one, [3], 40)
            await generate(two, [4], 40)
        await generate(one, [5], 10)


async def test_two_coordinators_that_want_the_same_lanes_and_prefixes() -> None:
    """Both begin at lane 0: a lane that is taken, or whose prefix the other has overwritten, costs another try."""
    async with mesh(2, lanes=3) as m, joined(m.topology) as one, joined(m.topology) as two:
        async with trio.open_nursery() as nursery:
            for number in range(16):
                pipeline = (one, two)[number % 2]
                nursery.start_soon(generate, pipeline, [7] * 40 + [number // 4] * 4, 20)
        await lanes_free(m.hosts)
        assert (one.lanes.free, two.lanes.free) == (3, 3)


async def test_what_does_not_agree_is_refused_by_name() -> None:
    async with mesh(2) as m:
        first, last = m.topology.stages
        for topology, options, message in [
            (Topology((first,)), {}, "add the stage that starts there"),
            (Topology((last,)), {}, "layers: the caller has 0:2, stage 0 has 1:2|layers"),
            (Topology((first, last, last)), {}, "goes on after"),
            (Topology((first, first)), {}, "layers"),
            (m.topology, {"model_digest": "other"}, "model digest: the caller has other, stage 0 has sim"),
            (m.topology, {"lanes": 9}, r"lanes: the caller has 9, stage 0 has 4 \(start it with --lanes 9,"),
            (m.topology, {"context": 9999}, "context per lane: the caller has 9999"),
        ]:
            with pytest.raises(HandshakeError, match=message):
                async with joined(topology, **options):
                    pass
        async with joined(m.topology) as pipeline:  # nobody else was hurt
            await generate(pipeline, [1], 5)
    async with mesh(2, model_digest="another") as m:
        with pytest.raises(HandshakeError, match="model digest: the caller has sim, stage 1 has another"):
            async with joined(m.topology):
                pass


async def test_strangers_are_refused() -> None:
    async with mesh(1, Security(key=b"k" * 32)) as m:
        with pytest.raises(HandshakeError, match="asks for a shared key"):
            async with joined(m.topology):
                pass
        with pytest.raises(HandshakeError, match="does not know the shared key"):
            async with joined(m.topology, security=Security(key=b"x" * 32)):
                pass


@pytest.mark.parametrize("stage", [0, 1])
async def test_a_stage_that_ends_or_hangs_is_lost_and_nobodys_mistake(stage: int) -> None:
    async with mesh(2) as m:
        host = m.hosts[stage]
        host.draining = True
        for reason in ("is shutting down", "hangs: it stands still"):
            with pytest.raises(StageLostError, match=reason) as caught:
                async with joined(m.topology):
                    pass
            assert caught.value.stage == stage
            host.draining, host.stage.watchdog.hangs = False, "it stands still"


async def test_nobody_listens() -> None:
    with pytest.raises(StageLostError, match=r"cannot reach 127\.0\.0\.1:1"):
        async with joined(Topology((StagePlace("127.0.0.1:1"),))):
            pass


@pytest.mark.parametrize("lost", [0, 1, 2])
async def test_a_stage_that_goes_away_ends_requests_with_its_number(lost: int) -> None:
    async with mesh(3) as m, joined(m.topology, resume_deadline=0.5, queue_deadline=0.2) as pipeline:
        async with pipeline.generate([1], max_tokens=2000) as generation:
            await generation.__anext__()
            m.scopes[lost].cancel()
            with pytest.raises(StageLostError, match=f"stage {lost}: .*within 0.5 s"), trio.fail_after(5):
                async for _ in generation:
                    pass
        with pytest.raises(StageLostError, match=f"stage {lost}: .*try again later"), trio.fail_after(5):
            await pipeline.complete([1])


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts descriptors in /proc")
async def test_the_way_is_checked_before_a_request_uses_it() -> None:
    async with mesh(2) as m, joined(m.topology) as pipe:
        checked = pipe.check_route
        calls = 0

        async def silent() -> None:
            nonlocal calls
            calls += 1
            raise StageLostError("the peer did not answer within 3 s")

        pipe.check_route = silent
        await generate(pipe, [1, 2, 3])  # over a way that was formed anew
        assert (calls, pipe.way.generation) == (1, 2)

        async def late() -> None:
            """What was found dead has been missed meanwhile, and the way formed anew."""
            pipe.way.give_up("", None)  # type: ignore[misc]
            await pipe.way.wait_up(5)
            await silent()

        pipe.check_route = late
        await generate(pipe, [1, 2, 3])
        assert (calls, pipe.way.generation) == (2, 3)
        pipe.check_route = checked
        await generate(pipe, [1, 2, 3])


async def test_200_sessions_leave_nothing_behind() -> None:
    async with mesh(2, lanes=8) as m:
        async with joined(m.topology) as pipeline:  # warm up: threads, caches
            await generate(pipeline, [1], 3)
        await trio.testing.wait_all_tasks_blocked(0.05)
        gc.collect()
        fds, tasks = descriptors(), trio.lowlevel.current_statistics().tasks_living
        async with joined(m.topology) as pipeline:
            async with trio.open_nursery() as nursery:
                for number in range(200):
                    nursery.start_soon(generate, pipeline, [number], 4)
            await lanes_free(m.hosts)
            assert pipeline.active == 0
            assert pipeline.lanes.free == 8
        with trio.fail_after(5):
            while trio.lowlevel.current_statistics().tasks_living > tasks or descriptors() > fds:  # noqa: ASYNC110
                await trio.sleep(0.02)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("stages = []", "at least one stage"),
        ("model = 3\n[[stages]]\naddress='a:1'", "'model' must be text"),
        ("[[stages]]\nadress='a:1'", "unknown key 'adress'; known: address"),
        ("[[stages]]\naddress='a:1'\nlayers='15-30'", "must look like 15:30"),
        ("[[stages]]\naddress='a:1'\nlayers='¹:²'", "must look like 15:30"),
        ("speed = 1", "unknown key 'speed'"),
        ("activation = 'int4'\n[[stages]]\naddress='a:1'", "allowed: float32"),
        ("[[stages", "not valid TOML"),
    ],
)
def test_topology_files_that_are_wrong(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "mesh.toml"
    file.write_text(content)
    with pytest.raises(UsageError, match=message):
        read_topology(file)


def test_topology_file(tmp_path: Path) -> None:
    file = tmp_path / "mesh.toml"
    file.write_text(
        "model='m.gguf'\n[[stages]]\naddress='10.0.0.1:7'\nlayers='0:15'\n[[stages]]\naddress='b:8'\n"
    )
    topology = read_topology(file)
    assert topology.model == str(tmp_path / "m.gguf")
    assert [stage.layers for stage in topology.stages] == [(0, 15), None]
