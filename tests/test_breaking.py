"""What once broke a pipeline: mad peers, losses at bad moments, and misuse."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any

import pytest
import trio
from attrs import evolve
from determinism import run
from simulated import COST, VOCABULARY, mixed, periodic, serial, simulated
from test_remote import Mesh, descriptors, generate, joined, lanes_free, mesh

from meshpipe import Sampling, Speculation, StagePlace, Topology
from meshpipe.actors.scope import owned_nursery
from meshpipe.errors import (
    CapacityError,
    EngineError,
    HandshakeError,
    MeshpipeError,
    StageLostError,
    UsageError,
)
from meshpipe.llama import tap
from meshpipe.llama.options import EngineOptions
from meshpipe.llama.sampling import check
from meshpipe.llama.vocabulary import Vocabulary
from meshpipe.messages import (
    CloseSession,
    Hello,
    OpenReturn,
    OpenSession,
    Proposal,
    Record,
    Reply,
    SessionFailed,
    SessionOpened,
    StageDescriptor,
    Window,
)
from meshpipe.pipeline import returns
from meshpipe.pipeline.remote import open_remote
from meshpipe.pipeline.request import Cancel, session_mailbox
from meshpipe.pipeline.route import Arrival, Route, RouteLost, Sender, stage_mailbox
from meshpipe.pipeline.runner import Job, Result, SimulatedRunner
from meshpipe.pipeline.sink import ReturnSink
from meshpipe.pipeline.stage import Stage
from meshpipe.pipeline.way import Way
from meshpipe.wire import OPEN, Address, Connection, Frame
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
        self.stage = Stage(self.mailbox, Broken(descriptor, 666, error or EngineError("no")))

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


@pytest.mark.parametrize("start", [3, 8, -1])
def test_a_session_sees_nothing_of_the_one_before_in_its_lane(start: int) -> None:
    """The cache still holds eight positions; a window that begins within them would attend to these."""

    async def main() -> None:
        async with lonely() as one:
            _, _, say = one.route()
            say(OpenSession(1, 0))
            say(verify(1, 0, *range(8)))
            await trio.sleep(1)
            say(CloseSession(1))
            _, heard, say = one.route()
            say(OpenSession(2, 0))
            say(verify(2, start, 5))
            await trio.sleep(1)
            (failed,) = heard.all(SessionFailed)
            assert "not within the 0 positions" in failed.reason
            assert not heard.all(Reply)
            say(OpenSession(3, 0))
            say(verify(3, 0, 5))
            await trio.sleep(1)
            assert len(heard.all(Reply)) == 1

    run(main)


def test_a_session_that_begins_again_does_not_run_what_is_left_of_its_old_epoch() -> None:
    """The hint that the old epoch is stale was lost, and the prompt comes again behind windows of that epoch."""

    async def main() -> None:
        async with lonely() as one:
            _, heard, say = one.route()
            say(OpenSession(1, 0))
            for epoch in (0, 1):
                say(Window(1, epoch, 3 * epoch, 0, (0, 1, 2), 1))
                for number in (1, 2):
                    start = 16 * number - 13
                    tokens = tuple(position % 7 for position in range(start, start + 16))
                    say(Window(1, epoch, 3 * epoch + number, start, tokens, 16))
            await trio.sleep(5)
            assert not heard.all(SessionFailed)
            assert [reply.number for reply in heard.all(Reply) if reply.epoch == 1] == [3, 4, 5]

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


def test_windows_without_end_end_their_session() -> None:
    """What waits at a stage is bounded also where the peer keeps to no credits; a new epoch counts anew."""

    async def main() -> None:
        async with lonely() as one:
            _, heard, say = one.route()
            say(OpenSession(1, 0))
            say(OpenSession(2, 1))
            await trio.sleep(0.1)
            for epoch in range(2):
                for number in range(63):
                    say(Window(1, epoch, number, 0, (1,) * 64, 0))
                say(Window(2, epoch, 63, 0, (1,) * 63, 0))
            await trio.sleep(0.01)
            assert not heard.all(SessionFailed)
            assert len(one.stage._ready) < 130
            say(Window(1, 1, 64, 0, (1,) * 64, 0))
            say(Window(1, 1, 65, 0, (), 0))
            await trio.sleep(1)
            (failed,) = heard.all(SessionFailed)
            assert failed.session == 1
            assert "epoch 1 has more rows than the 4096 positions of its lane" in failed.reason
            assert one.stage.lanes_busy == 1

    run(main)


def test_tokens_of_any_size_end_a_session_and_no_stage() -> None:
    async def main() -> None:
        async with lonely() as one:
            _, heard, say = one.route()
            say(OpenSession(1, 0))
            say(Window(1, 0, 0, 0, (2**62, -(2**63)), 1))
            await trio.sleep(1)
            say(CloseSession(1))
            say(OpenSession(2, 0, cached=2, prefix=b"x" * 16))
            say(OpenSession(3, 0, cached=2**62, prefix=b"x" * 16))
            say(OpenSession(4, 0, cached=-1))
            say(verify(4, 0, 5))
            await trio.sleep(1)
            assert [(failed.session, failed.refused) for failed in heard.all(SessionFailed)] == [
                (2, True),
                (3, True),
            ]
            assert heard.all(Reply)[-1].session == 4

    run(main)


async def test_a_cached_prefix_that_another_coordinator_overwrote_is_run_again() -> None:
    async with mesh(2, lanes=1) as m, joined(m.topology) as one, joined(m.topology) as two:
        mine, theirs = [1, *range(100, 140)], [1, *range(300, 390)]
        await generate(one, mine, 20)
        await generate(two, theirs, 20)
        done = await one.complete(mine, max_tokens=20)
        assert list(done.tokens) == serial(mixed, mine, 20)
        assert done.report.cached_tokens == 0
        done = await one.complete(mine, max_tokens=20)
        assert done.report.cached_tokens == len(mine) - 1
        await lanes_free(m.hosts)


async def test_a_lane_that_another_coordinator_holds_is_left_to_it() -> None:
    async with mesh(2, lanes=2) as m, joined(m.topology) as one, joined(m.topology) as two:
        async with one.generate([1], max_tokens=2000) as generation:
            await generation.__anext__()
            await generate(two, [2], 20)
            async with two.generate([3], max_tokens=2000) as other:
                await other.__anext__()
                async with trio.open_nursery() as nursery:  # no lane is free: waits for one
                    nursery.start_soon(generate, two, [4], 20)
                    await trio.sleep(0.1)
                    generation.cancel()
        await lanes_free(m.hosts)
        await generate(two, [5], 20)


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


@asynccontextmanager
async def member(m: Mesh) -> AsyncIterator[tuple[Connection, Connection]]:
    """The data and the control connection of one who may call the only stage of `m`, and reads away what comes."""
    address = Address.parse(m.topology.stages[0].address)
    data, control, _ = await connect_link(address, Hello("member", layers=(0, None)), OPEN)

    async def read(connection: Connection) -> None:
        with suppress(MeshpipeError):
            while True:
                await connection.receive()

    async with owned_nursery() as nursery:
        for connection in (data, control):
            nursery.start_soon(read, connection)
        try:
            yield data, control
        finally:
            await data.aclose()
            await control.aclose()


@pytest.mark.parametrize("host", ["a..b", ".a", "a" * 64])
async def test_a_route_to_what_cannot_be_a_host_ends_no_stage(host: str) -> None:
    async with mesh(2) as m:
        first, last = m.topology.stages
        with pytest.raises(StageLostError, match="cannot reach") as caught:
            async with joined(Topology((first, StagePlace(f"{host}:7001")))):
                pass
        assert caught.value.stage == 1
        async with joined(Topology((first, evolve(last, standby=(f"{host}:7001",))))) as pipeline:
            await generate(pipeline, [1], 5)


async def test_a_trace_of_numbers_that_it_has_no_room_for_ends_no_stage() -> None:
    async with mesh(1) as m:
        async with member(m) as (_, control):
            await control.send(Frame(Record(on=True)))
            await control.send(Frame(Window(-(2**63), 2**40, 2**62, 0, (1,), 1)))
            await control.send(Frame(Record(on=False)))
            with trio.fail_after(5):
                while not m.hosts[0].stage.counters.windows_dropped:  # noqa: ASYNC110
                    await trio.sleep(0.01)
        async with joined(m.topology) as pipeline:
            await generate(pipeline, [1], 5)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts descriptors in /proc")
async def test_who_asks_for_return_streams_and_traces_without_end_gets_one_at_a_time() -> None:

    async def says_nothing(stream: trio.SocketStream) -> None:
        await trio.sleep_forever()

    async with mesh(1) as m, member(m) as (_, control), owned_nursery() as nursery:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, says_nothing, [listener])
        port = listener.socket.getsockname()[1]
        async with joined(m.topology) as pipeline:
            await generate(pipeline, [1], 5)
            tasks, held = trio.lowlevel.current_statistics().tasks_living, descriptors()
            for _ in range(100):
                await control.send(Frame(OpenReturn(f"127.0.0.1:{port}")))
                await control.send(Frame(Record(on=True)))
            await generate(pipeline, [1], 5)
            assert descriptors() < held + 120  # 100 of them are the listener's
            assert trio.lowlevel.current_statistics().tasks_living < tasks + 120  # likewise


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
    async with mesh(1) as m, joined(m.topology, resume_deadline=0.5, queue_deadline=0.2) as pipeline:
        generation = pipeline.generate([1], max_tokens=2000)
        await generation.__anext__()
        m.scopes[0].cancel()
        with pytest.raises(StageLostError):
            async for _ in generation:
                pass
        with pytest.raises(StageLostError):
            await pipeline.complete([1])


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
                back = next(iter(m.hosts[-1]._routes.values())).back
                if len(tokens) >= 20 and back.stream is not None and "hole" not in vars():
                    stream, hole = back.stream, Heard()
                    back.stream = hole
                    monkeypatch.setattr(returns, "connect", slowly)
                    stream._mailbox.close("cut by the test")  # type: ignore[attr-defined]
        assert tokens == serial(mixed, [4, 5], 100)
        assert hole.all(Reply)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts descriptors in /proc")
async def test_reverse_streams_that_are_lost_leave_no_listener() -> None:
    async with mesh(1) as m, joined(m.topology, direct=False) as pipeline:
        back = next(iter(m.hosts[-1]._routes.values())).back
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


def test_a_stop_string_gives_the_same_tokens_whatever_ran_ahead() -> None:
    async def main(speculation: Speculation) -> tuple[str, tuple[int, ...], int]:
        async with simulated(periodic(7)) as sim:
            done = await sim.coordinator.complete(
                [i % 7 for i in range(40)], max_tokens=100, stop=["2 3"], speculation=speculation
            )
            return done.text, done.tokens, done.report.completion_tokens

    plain = run(main, Speculation(mode="off"))
    assert plain == ("5 6 0 1 ", (5, 6, 0, 1, 2, 3), 6)
    assert run(main, Speculation(depth=4, width=5)) == plain


def test_a_stop_that_is_one_text_is_refused() -> None:
    async def main() -> None:
        async with simulated(periodic(7)) as sim:
            with pytest.raises(UsageError, match="list of texts"):
                sim.coordinator.generate([1], stop="4 5")

    run(main)


@pytest.mark.parametrize("name", ["top_k", "seed", "penalty_last_n"])
def test_a_setting_that_is_no_integer_is_refused(name: str) -> None:
    for value in (1.5, "1", None):
        with pytest.raises(UsageError, match=name):
            check(Sampling(**{name: value}))
    with pytest.raises(UsageError, match="temperature"):
        check(Sampling(temperature="hot"))  # type: ignore[arg-type]
    check(Sampling(temperature=1, top_k=-1))


def test_a_closed_pipeline_says_so() -> None:
    async def main() -> None:
        async with simulated(periodic()) as sim:
            generation = sim.coordinator.generate([1], max_tokens=5)
        with pytest.raises(MeshpipeError, match="closed"):
            sim.coordinator.generate([1])
        with pytest.raises(MeshpipeError, match="closed"):
            async for _ in generation:
                pass

    run(main)


def test_a_generation_may_be_collected_in_any_thread() -> None:
    """The collector of cycles runs wherever memory is asked for: in the thread of an engine, too."""

    async def main() -> None:
        async with simulated(periodic(), lanes=1) as sim:
            generation = sim.coordinator.generate([1], max_tokens=4000)
            await generation.__anext__()
            generation.itself = generation  # type: ignore[attr-defined]
            waiting = sim.coordinator.generate([1], max_tokens=4000)
            waiting.itself = waiting  # type: ignore[attr-defined]
            await trio.sleep(0.05)
            del generation, waiting
            thread = threading.Thread(target=gc.collect)
            thread.start()
            thread.join()
            await trio.sleep(5)
            sim.assert_nothing_is_left()

    gc.collect()
    run(main)


def test_a_lane_is_free_only_when_the_stages_have_heard_so() -> None:
    """The first link stands still for longer than a second while a session ends."""

    async def main() -> None:
        async with simulated(periodic(), lanes=1) as sim:
            link = Jammed(sim.coordinator._around.first)
            sim.coordinator._around = evolve(sim.coordinator._around, first=Way(link))
            async with sim.coordinator.generate([1], max_tokens=4000) as generation:
                await generation.__anext__()
                link.jammed = True
            await trio.sleep(3)
            link.jammed = False
            link.cleared.unpark_all()
            assert len((await sim.coordinator.complete([1], max_tokens=5)).tokens) == 5

    run(main)


class Jammed:
    """A `Sender` that has no room for a while."""

    def __init__(self, to: Sender) -> None:
        self.to, self.jammed, self.cleared = to, False, trio.lowlevel.ParkingLot()

    async def send(self, message: object) -> None:
        while self.jammed:
            await self.cleared.park()
        await self.to.send(message)

    def try_send(self, message: object) -> bool:
        return not self.jammed and self.to.try_send(message)


def test_options_of_the_engine_are_named_when_they_are_wrong() -> None:
    for name, value in [
        ("batch", 1),
        ("cache_type_k", "q3"),
        ("split_mode", "diagonal"),
        ("rope_scaling", ""),
    ]:
        with pytest.raises(UsageError, match=name):
            EngineOptions(**{name: value})  # type: ignore[arg-type]


def test_a_vocabulary_survives_misuse(smollm2: Path) -> None:
    vocabulary = Vocabulary(smollm2)
    with pytest.raises(UsageError, match="not valid Unicode"):
        vocabulary.tokenize("a\udcffb")
    vocabulary.close()
    vocabulary.close()
    for use in (
        lambda: vocabulary.tokenize("a"),
        lambda: vocabulary.piece(1),
        lambda: vocabulary.chat_template,
        lambda: vocabulary.render_chat([]),
    ):
        with pytest.raises(UsageError, match="closed"):
            use()


async def test_a_vocabulary_of_another_model_is_refused() -> None:
    async with mesh(1, n_vocab=VOCABULARY + 1) as m:
        with pytest.raises(HandshakeError, match="1000 tokens, the model of the stages 1001"):
            async with joined(m.topology):
                pass


async def test_a_vocabulary_of_another_model_with_as_many_tokens_is_refused(smollm2: Path) -> None:
    """Text would be garbage, and nobody would say why."""
    with closing(Vocabulary(smollm2)) as vocabulary:
        async with mesh(1, n_vocab=vocabulary.size, vocabulary="0123") as m:
            with pytest.raises(
                HandshakeError, match=f"in another way .digest {vocabulary.digest}, theirs 0123"
            ):
                async with open_remote(m.topology, vocabulary):
                    pass
        async with (
            mesh(1, n_vocab=vocabulary.size, vocabulary=vocabulary.digest) as m,
            open_remote(m.topology, vocabulary),
        ):
            pass


async def test_a_vocabulary_that_was_given_stays_open(smollm2: Path) -> None:
    with closing(Vocabulary(smollm2)) as vocabulary:
        async with mesh(1, n_vocab=vocabulary.size) as m:
            for _ in range(2):
                async with open_remote(m.topology, vocabulary) as pipeline:
                    assert pipeline.vocabulary.tokenize("a")


def test_a_tap_that_does_not_load_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if tap.compiled.__wrapped__() is None:
        pytest.skip("no C compiler here")
    (library,) = (tmp_path / "meshpipe" / "tap").glob("*.so")
    broken = tmp_path / "elsewhere" / "meshpipe" / "tap" / library.name
    broken.parent.mkdir(parents=True)
    broken.write_bytes(b"not a library")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    assert tap.compiled.__wrapped__() is None


async def test_a_cancellation_finds_room_however_many_proposals_there_are() -> None:
    mailbox = session_mailbox()
    while mailbox.ref.try_send(Proposal(1, 0, 0, ())):
        pass
    assert mailbox.ref.try_send(Cancel())


async def test_a_session_that_has_ended_keeps_no_news_from_the_others() -> None:
    sink, boxes = ReturnSink(), [session_mailbox(), session_mailbox()]
    for number, box in enumerate(boxes):
        sink.register(number, box.ref)
    boxes[0].close("ended")
    assert sink.try_send(SessionFailed(None, 0, "gone"))
    assert boxes[1].take("control") == [SessionFailed(None, 0, "gone")]
