"""What once broke a pipeline: mad peers, losses at bad moments, and misuse."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from determinism import run
from simulated import COST, VOCABULARY, mixed, periodic, serial
from test_remote import descriptors, generate, joined, lanes_free, mesh

from meshpipe import StagePlace, Topology
from meshpipe.errors import CapacityError, EngineError, HandshakeError, MeshpipeError, StageLostError
from meshpipe.messages import Hello, OpenSession, Reply, SessionFailed, SessionOpened, StageDescriptor, Window
from meshpipe.pipeline import remote
from meshpipe.pipeline.runner import Job, Result, SimulatedRunner
from meshpipe.pipeline.stage import Arrival, Route, RouteLost, Stage, stage_mailbox
from meshpipe.wire import OPEN, Address
from meshpipe.wire.endpoints import connect, connect_link


class Heard:
    """A `Sender` that keeps what it is sent."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    async def send(self, message: object) -> None:
        self.messages.append(message)

    def try_send(self, message: object) -> bool:
        self.messages.append(message)
        return True

    def all(self, kind: type) -> list[Any]:
        return [message for message in self.messages if isinstance(message, kind)]


class Broken(SimulatedRunner):
    """Fails at windows of this token."""

    def __init__(self, descriptor: StageDescriptor, token: int, error: Exception) -> None:
        super().__init__(descriptor, periodic())
        self._token, self._error = token, error

    async def run(self, jobs: Sequence[Job]) -> list[Result]:
        results = await super().run(jobs)
        if any(self._token in job.window.tokens for job in jobs):
            raise self._error
        return results


class Lonely:
    """One last stage, and routes to it."""

    def __init__(self, error: Exception | None = None) -> None:
        descriptor = StageDescriptor("sim", (0, 1), 1, 8, VOCABULARY, 4, 4096, COST)
        self.mailbox = stage_mailbox()
        self.stage = Stage(self.mailbox, 0, Broken(descriptor, 666, error or EngineError("no")))

    def route(self) -> tuple[Route, Heard, Callable[[Any], None]]:
        heard = Heard()
        route = Route(None, heard)

        def say(message: Any) -> None:
            assert self.mailbox.ref.try_send(Arrival(route, message, trio.current_time()))

        return route, heard, say


@asynccontextmanager
async def lonely(error: Exception | None = None) -> AsyncIterator[Lonely]:
    one = Lonely(error)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(one.stage.run)
        yield one
        nursery.cancel_scope.cancel()


def verify(session: int, start: int, *tokens: int, number: int = 0) -> Window:
    return Window(session, 0, number, start, tokens, len(tokens))


def test_a_coordinator_that_goes_away_while_its_decode_fails() -> None:
    async def main() -> None:
        async with lonely() as one:
            route, _, say = one.route()
            say(OpenSession(1, 0))
            say(verify(1, 0, 666))
            await trio.sleep(0.005)
            await one.mailbox.ref.send(RouteLost(route))
            await trio.sleep(1)
            assert one.stage.lanes_busy == 0
            _, heard, say = one.route()
            say(OpenSession(2, 0))
            say(verify(2, 0, 5))
            await trio.sleep(1)
            assert [type(message) for message in heard.messages] == [SessionOpened, Reply]

    run(main)


def test_a_window_beyond_the_context_ends_its_session_only() -> None:
    async def main() -> None:
        async with lonely(CapacityError("lane 0 would reach position 5000 of 4096")) as one:
            _, heard, say = one.route()
            say(OpenSession(1, 0))
            say(OpenSession(2, 1))
            say(verify(1, 0, 666))
            say(verify(2, 0, 5))
            await trio.sleep(1)
            assert [failed.session for failed in heard.all(SessionFailed)] == [1]
            assert [reply.session for reply in heard.all(Reply)] == [2]

    run(main)


def test_a_session_that_is_opened_twice_holds_one_lane() -> None:
    async def main() -> None:
        async with lonely() as one:
            route, heard, say = one.route()
            say(OpenSession(1, 0))
            say(OpenSession(1, 1))
            await trio.sleep(1)
            assert "open already" in heard.all(SessionFailed)[0].reason
            await one.mailbox.ref.send(RouteLost(route))
            await trio.sleep(1)
            _, heard, say = one.route()
            for lane in range(4):
                say(OpenSession(lane, lane))
            await trio.sleep(1)
            assert len(heard.all(SessionOpened)) == 4

    run(main)


def test_a_window_without_tokens_hurts_nobody_else() -> None:
    async def main() -> None:
        async with lonely() as one:
            _, heard, say = one.route()
            say(OpenSession(1, 0))
            say(verify(1, 0, 5))
            say(OpenSession(2, 1))
            say(verify(1, 1, number=1))
            say(verify(2, 0, 5))
            await trio.sleep(1)
            assert [reply.session for reply in heard.all(Reply)] == [1, 2]

    run(main)


async def test_a_cached_prefix_that_another_coordinator_overwrote_is_not_used() -> None:
    async with mesh(2, lanes=1) as m, joined(m.topology) as one, joined(m.topology) as two:
        mine, theirs = [1, *range(100, 140)], [1, *range(300, 390)]
        await generate(one, mine, 20)
        await generate(two, theirs, 20)
        with pytest.raises(EngineError, match="another coordinator"):
            await generate(one, mine, 20)
        await generate(one, mine, 20)
        done = await one.complete(mine, max_tokens=20)
        assert done.report.cached_tokens == len(mine) - 1
        await lanes_free(m.hosts)


async def test_two_callers_with_one_name_leave_the_stage_serving() -> None:
    async with mesh(2) as m, mesh(2) as other:
        first, *lasts = (
            Address.parse(place.address) for place in (*m.topology.stages, other.topology.stages[1])
        )
        outcomes: list[str] = []

        async def call(last: Address) -> None:
            hello = Hello("same", route=(str(last),), layers=(0, None))
            try:
                data, control, _ = await connect_link(first, hello, OPEN)
            except HandshakeError as error:
                outcomes.append(str(error))
            else:
                outcomes.append("a route")
                with trio.move_on_after(0.3):
                    await trio.sleep_forever()
                await data.aclose()
                await control.aclose()

        async with trio.open_nursery() as nursery:
            for last in lasts:
                nursery.start_soon(call, last)
        refused, _ = sorted(outcomes, key="a route".__eq__)
        assert "has a route through this stage already" in refused
        async with joined(m.topology) as pipeline:
            await generate(pipeline, [1], 5)


async def test_a_route_that_is_not_what_was_named_closes_its_connections() -> None:
    async with mesh(2) as m:
        wrong = Topology(tuple(StagePlace(place.address, (0, 1)) for place in m.topology.stages))
        with pytest.raises(HandshakeError, match="the topology says"):
            async with joined(wrong):
                pass
        with trio.fail_after(2):
            while any(host.routes for host in m.hosts):  # noqa: ASYNC110
                await trio.sleep(0.01)


async def test_losing_everything_at_once_ends_requests_not_the_pipeline() -> None:
    async with mesh(1) as m, joined(m.topology, listen_host="127.0.0.1") as pipeline:
        generation = pipeline.generate([1], max_tokens=2000)
        await generation.__anext__()
        m.scopes[0].cancel()
        with pytest.raises(MeshpipeError):
            async for _ in generation:
                pass
        await trio.sleep(0.5)
        with pytest.raises(StageLostError):
            pipeline.generate([1])


async def test_replies_that_a_half_open_stream_swallows_are_sent_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The coordinator knows that its return stream is lost, the last stage does not yet."""

    async def slowly(*arguments: Any) -> Any:
        await trio.sleep(0.3)
        return await connect(*arguments)

    async with mesh(2) as m, joined(m.topology, stall_deadline=2.0) as pipeline:
        tokens: list[int] = []
        async with pipeline.generate([4, 5], max_tokens=100) as generation:
            async for piece in generation:
                tokens += piece.tokens
                (back,) = m.hosts[-1]._routes.values()
                if len(tokens) >= 20 and back.stream is not None and "hole" not in vars():
                    stream, hole = back.stream, Heard()
                    back.stream = hole
                    monkeypatch.setattr(remote, "connect", slowly)
                    stream._mailbox.close("cut by the test")  # type: ignore[attr-defined]
        assert tokens == serial(mixed, [4, 5], 100)
        assert hole.all(Reply)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts descriptors in /proc")
async def test_reverse_streams_that_are_lost_leave_no_listener() -> None:
    async with mesh(1) as m, joined(m.topology, direct=False) as pipeline:
        (back,) = m.hosts[-1]._routes.values()
        before = descriptors()
        for number in range(5):
            stream = back.stream
            stream._mailbox.close("cut by the test")  # type: ignore[union-attr]
            with trio.fail_after(5):
                while back.stream in (stream, None):  # noqa: ASYNC110
                    await trio.sleep(0.01)
            await generate(pipeline, [number], 5)
        assert pipeline.return_route() == "reverse"
        assert descriptors() == before
