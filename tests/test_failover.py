"""Stages that are lost: others take over, or they come back, and nobody who reads the output notices."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path

import pytest
import tiny
import trio
from attrs import evolve
from chaos.harness import Tokens
from simulated import SimulatedDrafter, SimulatedNextn, guesser, mixed, serial
from test_remote import Mesh, generate, joined, lanes_free, mesh
from trio.testing import MockClock

from meshpipe import Coordinator, LocalFallback, Speculation, StagePlace, Topology
from meshpipe.actors.scope import owned_nursery
from meshpipe.errors import HandshakeError, StageLostError, UsageError
from meshpipe.llama.slicing import read_slice, slice_model
from meshpipe.messages import StageDescriptor
from meshpipe.pipeline import failover
from meshpipe.pipeline.children import open_children, stage_command
from meshpipe.pipeline.failover import Attempt, Candidates, Failover, Joined, check_successors
from meshpipe.pipeline.local import join_stages
from meshpipe.pipeline.runner import SimulatedRunner
from meshpipe.pipeline.sink import ReturnSink
from meshpipe.pipeline.way import Way, WayState
from meshpipe.telemetry.overlap import analyse
from meshpipe.telemetry.spans import Kind


class Sink:
    """A `Sender` that keeps what it is sent."""

    def __init__(self) -> None:
        self.messages: list[object] = []

    async def send(self, message: object) -> None:
        self.messages.append(message)

    def try_send(self, message: object) -> bool:
        self.messages.append(message)
        return True


def with_standbys(first: Mesh, second: Mesh) -> Topology:
    """Each stage of the first mesh, with the second's as its standby."""
    pairs = zip(first.topology.stages, second.topology.stages, strict=True)
    return Topology(
        tuple(StagePlace(one.address, one.layers, standby=(other.address,)) for one, other in pairs)
    )


async def read(
    pipeline: Coordinator, prompt: list[int], count: int, *at: trio.Event, exact: bool = True
) -> int:
    """Generates, sets each event after another 20 tokens; returns how often the session was resumed."""
    tokens: list[int] = []
    events = list(at)
    async with pipeline.generate(prompt, max_tokens=count) as generation:
        async for piece in generation:
            tokens += piece.tokens
            if events and len(tokens) > 20 * (1 + len(at) - len(events)):
                events.pop(0).set()
    assert tokens == serial(mixed, prompt, count)
    assert generation.report is not None
    assert generation.report.exact is exact
    return generation.report.resumes


@pytest.mark.parametrize("lost", [0, 1, 2])
async def test_a_standby_takes_over_in_the_middle_of_requests(lost: int) -> None:
    async with mesh(3) as m, mesh(3) as spare, joined(with_standbys(m, spare)) as pipeline:
        begun = trio.Event()
        resumes: list[int] = []

        async def one(number: int) -> None:
            resumes.append(await read(pipeline, [number] * 30, 100, begun))

        async with trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(one, number)
            await begun.wait()
            m.scopes[lost].cancel()
            began = trio.current_time()
            await trio.sleep(0.01)
            with trio.fail_after(5):
                await pipeline.way.wait_up(5)
            assert trio.current_time() - began < 2
        assert max(resumes) == 1
        assert (pipeline.way.generation, pipeline.lanes.free) == (2, 4)
        survivors = [host for stage, host in enumerate(m.hosts) if stage != lost]
        await lanes_free([*survivors, spare.hosts[lost]])
        assert [host.routes for host in survivors] == [1, 1]
        await generate(pipeline, [9], 20)


async def test_a_pipeline_is_opened_over_standbys_too() -> None:
    """The first stage has only its standby, the second none of its two places, or one."""
    async with mesh(2) as m:
        deaf = trio.socket.socket()
        await deaf.bind(("127.0.0.1", 0))  # and does not listen
        nobody = f"127.0.0.1:{deaf.getsockname()[1]}"
        addresses = [place.address for place in m.topology.stages]
        first = StagePlace(nobody, standby=(addresses[0],))
        async with joined(Topology((first, StagePlace(nobody, standby=(addresses[1],))))) as pipeline:
            await generate(pipeline, [9], 20)
        for lost in (StagePlace(nobody), StagePlace(nobody, standby=(nobody,))):
            with pytest.raises(StageLostError, match=f"cannot reach {nobody}"):
                async with joined(Topology((first, lost))):
                    pass
        deaf.close()
        await lanes_free(m.hosts)


@pytest.mark.parametrize(
    ("source", "speculation"),
    [
        ("mtp", Speculation(mode="mtp", mtp_at="last")),
        ("mtp", Speculation(mode="mtp", mtp_at="coordinator", mtp_tail=10)),
        ("draft", Speculation(mode="draft", draft="small.gguf")),
    ],
)
async def test_who_proposes_goes_on_after_the_last_stage_was_lost(
    source: str, speculation: Speculation
) -> None:
    """The output is serial, and what follows is foreseen again: rows of all that was confirmed are still known."""
    native = {"drafter": guesser(mixed, 0.9), "mtp": 1, "draft_cost": 0.0001}
    async with (
        mesh(2, **native) as m,  # type: ignore[arg-type]
        mesh(2, **native) as spare,  # type: ignore[arg-type]
        joined(with_standbys(m, spare)) as pipeline,
    ):
        ahead = SimulatedNextn if source == "mtp" else SimulatedDrafter
        drafter = ahead(mixed, seconds=0.0001, lie=lambda position: position % 10 == 0)
        pipeline.nextn = lambda: drafter
        pipeline.load_draft = lambda *_: lambda: drafter  # type: ignore[method-assign]
        tokens: list[int] = []
        foreseen = {1: 0, 2: 0}  # by generation of the way
        async with pipeline.generate([7] * 30, max_tokens=120, speculation=speculation) as generation:
            async for piece in generation:
                tokens += piece.tokens
                foreseen[pipeline.way.generation] += piece.sources.count(source)
                if len(tokens) > 40:
                    m.scopes[1].cancel()
        assert tokens == serial(mixed, [7] * 30, 120)
        assert generation.report is not None
        assert generation.report.resumes == 1
        assert foreseen[1] > 10
        assert foreseen[2] > 10
        if isinstance(drafter, SimulatedNextn) and speculation.mtp_at == "coordinator":
            assert 100 < drafter.rows_kept < 130, "none was sent again"


async def test_a_link_that_is_reset_costs_no_prefill() -> None:
    """The processes live and hold their caches: only what was not confirmed is run again."""
    async with mesh(2) as m, joined(m.topology) as pipeline:
        begun = trio.Event()
        resumes: list[int] = []

        async def one() -> None:
            resumes.append(await read(pipeline, [7] * 500, 200, begun))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(one)
            await begun.wait()
            rows = m.hosts[0].stage.counters.rows_run
            (held,) = m.hosts[1]._routes.values()
            held.end.cancel()
        assert resumes == [1]
        assert m.hosts[0].stage.counters.rows_run < rows + 400
        await lanes_free(m.hosts)


async def test_a_standby_with_other_bits_is_reported() -> None:
    async with (
        mesh(2) as m,
        mesh(2, fingerprint="other") as spare,
        joined(with_standbys(m, spare)) as pipeline,
    ):
        begun = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(read, pipeline, [3], 100, begun, exact=False))
            await begun.wait()
            m.scopes[1].cancel()
        done = await pipeline.complete([1], max_tokens=4)
        assert done.report.exact  # one machine after the other computed it, but none in between


async def test_a_standby_with_other_bits_is_refused_where_bits_must_be_the_same() -> None:
    async with mesh(2) as m, mesh(2, fingerprint="other") as unlike, mesh(2) as like:
        choices = (unlike.topology.stages[1].address, like.topology.stages[1].address)
        first, last = m.topology.stages
        topology = Topology((first, StagePlace(last.address, last.layers, standby=choices)))
        async with joined(topology, same_bits=True, resume_deadline=2, queue_deadline=2) as pipeline:
            begun = trio.Event()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(read, pipeline, [3], 100, begun)
                await begun.wait()
                m.scopes[1].cancel()
            assert like.hosts[1].routes == 1
            like.scopes[1].cancel()  # now there is only the other one
            with pytest.raises(StageLostError) as error:
                with trio.fail_after(10):
                    await pipeline.complete([1])
            assert "may not take over: its fingerprint is 'other'" in str(error.value)
            for gone in (m, like):  # of every place it says what was wrong there
                assert f"cannot reach {gone.topology.stages[1].address}" in str(error.value)
            assert unlike.hosts[1].stage.counters.jobs == 0


class Here:
    """A `LocalFallback` whose stages are simulated; `fingerprint` is what they compute like."""

    def __init__(self, fingerprint: str = "", loaded: trio.Event | None = None) -> None:
        self.fingerprint = fingerprint
        self.loading = trio.Event()
        self.loaded = loaded  # whatever becomes of it, loading ends then
        self.closed = 0

    def check(self, descriptors: object) -> None:
        """Anything goes."""

    @asynccontextmanager
    async def joined(self, instead_of: Sequence[StageDescriptor], sink: ReturnSink) -> AsyncIterator[Joined]:
        runners = [
            SimulatedRunner(evolve(descriptor, fingerprint=self.fingerprint, instance="here"), mixed)
            for descriptor in instead_of
        ]
        self.loading.set()
        if self.loaded is not None:
            with trio.CancelScope(shield=True):
                await self.loaded.wait()
        async with owned_nursery() as nursery:
            first, _ = join_stages(nursery, runners, sink)
            try:
                yield Joined(first, tuple(runner.descriptor for runner in runners), 0.0)
            finally:
                self.closed += 1


@pytest.mark.parametrize("fingerprint", ["", "other"])
async def test_this_process_serves_until_the_stages_are_back(
    monkeypatch: pytest.MonkeyPatch, fingerprint: str
) -> None:
    monkeypatch.setattr(failover, "HERE_AFTER", 0.05)
    here = Here(fingerprint)
    async with mesh(2) as m, joined(m.topology, local_fallback=here) as pipeline:
        begun, later = trio.Event(), trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(read, pipeline, [3] * 20, 300, begun, later, exact=not fingerprint))
            await begun.wait()
            m.hosts[0].draining = True  # answers nobody
            (held,) = m.hosts[0]._routes.values()
            held.end.cancel()
            with trio.fail_after(5):
                await later.wait()
            assert pipeline.return_route() == "memory"
            assert pipeline.way.up
            done = await pipeline.complete([5], max_tokens=10)  # a new one
            assert (list(done.tokens), done.report.resumes) == (serial(mixed, [5], 10), 0)
            pipeline.sink.on_lost(0, "what is lost already")  # type: ignore[misc]
            assert pipeline.way.up
            m.hosts[0].draining = False
            with trio.fail_after(5):
                while pipeline.return_route() == "memory":  # noqa: ASYNC110
                    await trio.sleep(0.01)
            before = m.hosts[0].stage.counters.jobs
        await generate(pipeline, [9], 20)
        assert m.hosts[0].stage.counters.jobs > before
        assert here.closed == 1
        await lanes_free(m.hosts)


async def test_new_requests_wait_for_a_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failover, "HERE_AFTER", 0.3)
    here = Here(loaded=trio.Event())
    async with mesh(2) as m, joined(m.topology, local_fallback=here, queue_deadline=0.01) as pipeline:
        m.hosts[0].draining = True
        (held,) = m.hosts[0]._routes.values()
        held.end.cancel()
        while pipeline.way.up:  # noqa: ASYNC110
            await trio.sleep(0.01)
        with trio.fail_after(5):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(generate, pipeline, [9], 20)
                await here.loading.wait()
                nursery.start_soon(generate, pipeline, [8], 20)
                await trio.sleep(0.1)
                assert pipeline.active == 2
                assert here.loaded is not None
                here.loaded.set()
        assert pipeline.return_route() == "memory"


async def test_stages_that_are_back_do_not_wait_for_a_fallback_that_still_loads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor do those that are lost a second time meanwhile; and what is loaded too late never serves."""
    monkeypatch.setattr(failover, "HERE_AFTER", 0.02)
    loaded = trio.Event()
    here = Here(loaded=loaded)
    async with mesh(2) as m, joined(m.topology, local_fallback=here) as pipeline:
        try:
            for generation in (2, 3):
                m.hosts[0].draining = True
                (held,) = m.hosts[0]._routes.values()
                held.end.cancel()
                with trio.fail_after(5):
                    await here.loading.wait()
                    while pipeline.way.up:  # noqa: ASYNC110
                        await trio.sleep(0.01)
                    m.hosts[0].draining = False
                    await pipeline.way.wait_up(5)
                    await generate(pipeline, [9], 20)
                assert (pipeline.way.generation, pipeline.return_route()) == (generation, "direct")
        finally:
            loaded.set()
        with trio.fail_after(5):
            while not here.closed:  # noqa: ASYNC110
                await trio.sleep(0.01)
        await generate(pipeline, [9], 20)
        assert (pipeline.way.generation, pipeline.return_route()) == (3, "direct")
        await lanes_free(m.hosts)


async def test_a_fallback_with_other_bits_is_not_taken_where_bits_must_be_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(failover, "HERE_AFTER", 0.05)
    here = Here("other")
    options = {"local_fallback": here, "same_bits": True, "queue_deadline": 0.5}
    async with mesh(2) as m, joined(m.topology, **options) as pipeline:
        m.hosts[0].draining = True
        (held,) = m.hosts[0]._routes.values()
        held.end.cancel()
        with trio.fail_after(5):
            while not here.closed:  # noqa: ASYNC110
                await trio.sleep(0.01)
        with pytest.raises(StageLostError, match="no route"):
            await pipeline.complete([1])


def test_a_fallback_needs_the_whole_model_and_the_stages_own(tmp_path: Path) -> None:
    model = tiny.write(tmp_path / "tiny.gguf", "llama")
    own = StageDescriptor(read_slice(model).model_digest, (0, 6), 6, 8, 100, 1, 1)
    LocalFallback(model).check([own])
    with pytest.raises(HandshakeError, match="name their model"):
        LocalFallback(model).check([evolve(own, model_digest="another")])
    with pytest.raises(UsageError, match="holds layers 0:3 of 6"):
        LocalFallback(slice_model(model, 0, 3)).check([own])


@pytest.mark.slow
async def test_the_model_itself_serves_here_while_a_stage_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failover, "HERE_AFTER", 0.1)
    model = tiny.write(tmp_path / "tiny.gguf", "llama")
    command = stage_command((0, 6), ["--model", str(model), "--context", "256"])
    prompt = list(range(5, 25))
    async with open_children([(0, 6)], [command], 120.0) as children:
        first = list(children.places)
        now = [first]
        fallback = LocalFallback(model)
        async with joined(
            Topology(tuple(first)), vocabulary=Tokens(), places=lambda: now[0], local_fallback=fallback
        ) as pipeline:
            expected = await pipeline.complete(prompt, max_tokens=100)
            assert expected.report.exact
            tokens: list[int] = []
            async with pipeline.generate(prompt, max_tokens=100) as generation:
                async for piece in generation:
                    tokens += piece.tokens
                    if len(tokens) >= 10 and pipeline.way.generation == 1 and pipeline.way.up:
                        os.kill(children.pids[0], signal.SIGKILL)
                        while pipeline.way.up:  # noqa: ASYNC110
                            await trio.sleep(0.01)
                    if len(tokens) >= 20 and pipeline.way.generation == 2:
                        assert pipeline.return_route() == "memory"
                        with trio.fail_after(60):
                            while children.places[0] == first[0]:  # noqa: ASYNC110
                                await trio.sleep(0.01)
                            now[0] = children.places
                            while pipeline.way.generation == 2:  # noqa: ASYNC110
                                await trio.sleep(0.01)
                assert generation.report is not None
            assert tuple(tokens) == expected.tokens
            assert generation.report.resumes >= 1
            assert generation.report.exact
            assert pipeline.return_route() == "direct"
            again = await pipeline.complete(prompt, max_tokens=100)
            assert again.tokens == expected.tokens


async def test_a_stage_that_takes_over_is_in_the_trace() -> None:
    async with mesh(2) as m, mesh(2) as spare, joined(with_standbys(m, spare)) as pipeline:
        begun = trio.Event()
        async with pipeline.tracing() as trace, trio.open_nursery() as nursery:
            nursery.start_soon(read, pipeline, [3], 80, begun)
            await begun.wait()
            m.scopes[1].cancel()
        assert (trace.rejoined, trace.missing) == (1, ())
        assert {span.stage for span in trace.of(Kind.COMPUTE)} == {0, 1}
        found = analyse(trace)
        assert found is not None
        assert any("joined again once" in caveat for caveat in found.caveats)
        async with pipeline.tracing() as trace:
            await generate(pipeline, [9], 20)
        assert (trace.rejoined, trace.missing) == (0, ())


async def test_every_stage_is_lost_in_turn() -> None:
    async with mesh(2) as m, mesh(2) as spare, joined(with_standbys(m, spare)) as pipeline:
        first, second = trio.Event(), trio.Event()
        resumes: list[int] = []

        async def one() -> None:
            resumes.append(await read(pipeline, [3, 4], 400, first, second))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(one)
            await first.wait()
            m.scopes[1].cancel()
            await second.wait()
            m.scopes[0].cancel()
        assert resumes == [2]


async def test_stages_that_are_lost_together_both_give_way() -> None:
    """The second one's loss is told first; the first one still listens, to refuse. New requests wait meanwhile."""
    async with (
        mesh(2) as m,
        mesh(2) as spare,
        joined(with_standbys(m, spare), queue_deadline=0.01) as pipeline,
    ):
        m.hosts[0].draining = True
        m.scopes[1].cancel()
        while pipeline.way.up:  # noqa: ASYNC110
            await trio.sleep(0.001)
        assert pipeline.way.reason.startswith("stage 1")
        with trio.fail_after(5):
            await generate(pipeline, [3], 20)
        assert [host.routes for host in (*m.hosts, *spare.hosts)] == [0, 0, 1, 1]


async def test_blame_falls_on_whom_is_named_else_told_else_on_each_in_turn() -> None:
    places = [StagePlace(f"a:{stage}", standby=(f"b:{stage}",)) for stage in range(3)]
    way, tried = Way(), list[str]()
    joins = 0

    @asynccontextmanager
    async def join(attempt: Attempt) -> AsyncIterator[Joined]:
        nonlocal joins
        joins += 1
        if joins > 1:
            tried.append("".join(place.address[0] for place in attempt.places))
        if joins in (2, 3, 4, 5):
            error = StageLostError("time ran out")
            error.stage = 0 if joins == 2 else None
            if joins == 3:
                keeper.lost(2, "it ended")
                keeper.lost(0, "so did the link")
            raise error
        yield Joined(Sink(), (), 0.0)

    keeper = Failover(way, lambda: places, join)
    async with trio.open_nursery() as nursery:
        await nursery.start(keeper.run)
        keeper.lost(1, "it ended")
        keeper.lost(0, "a later word")
        await way.wait_up(5)
        nursery.cancel_scope.cancel()
    assert tried == ["aaa", "baa", "bab", "bbb", "bba"]


@pytest.mark.parametrize("made_up", [7, -1, 2**40])
async def test_a_stage_that_a_peer_makes_up_is_blamed_on_nobody(made_up: int) -> None:
    """Neither as what was lost, nor as what is told meanwhile, nor in an error."""
    places = [StagePlace(f"a:{stage}", standby=(f"b:{stage}",)) for stage in range(3)]
    way, joins = Way(), count()

    @asynccontextmanager
    async def join(attempt: Attempt) -> AsyncIterator[Joined]:
        if (number := next(joins)) in (1, 2, 3):
            error = StageLostError(f"attempt {number} failed")
            error.stage = made_up if number == 1 else None
            if number == 2:
                keeper.lost(made_up, "it ended")
            raise error
        yield Joined(Sink(), (), 0.0)

    keeper = Failover(way, lambda: places, join)
    async with trio.open_nursery() as nursery:
        await nursery.start(keeper.run)
        keeper.lost(made_up, "it ended")
        with trio.fail_after(5):
            await way.wait_up(5)
        assert next(joins) == 5
        nursery.cancel_scope.cancel()


async def test_a_loss_that_is_told_while_the_way_is_formed_is_not_forgotten() -> None:
    """All stages answer, and yet one has said that it hangs, which it says once. What sessions miss says nothing."""
    places = [StagePlace("a:0"), StagePlace("a:1", standby=("b:1", "c:1"))]
    way, tried = Way(), list[str]()

    @asynccontextmanager
    async def join(attempt: Attempt) -> AsyncIterator[Joined]:
        tried.append(attempt.places[1].address)
        if attempt.places[1].address in ("a:1", "b:1"):
            keeper.lost(1, "a decode hangs")
            keeper.lost(0, "a later word")
        assert way.give_up is not None
        way.give_up("no reply", 0)
        yield Joined(Sink(), (), 0.0)

    keeper = Failover(way, lambda: places, join)
    async with trio.open_nursery() as nursery:
        await nursery.start(keeper.run)
        assert tried == ["a:1", "b:1", "c:1"]
        places[1] = StagePlace("a:1", standby=("b:1", "d:1"))
        keeper.lost(1, "it ended")
        await way.wait_up(5)
        assert tried[3:] == ["d:1"]
        nursery.cancel_scope.cancel()


async def test_a_request_that_comes_while_a_stage_is_lost_waits_for_another() -> None:
    async with mesh(2) as m, joined(m.topology, queue_deadline=0.2) as pipeline:
        (held,) = m.hosts[0]._routes.values()
        m.hosts[0].draining = True  # answers nobody
        held.end.cancel()
        while pipeline.way.up:  # noqa: ASYNC110
            await trio.sleep(0.01)
        with pytest.raises(StageLostError, match="no route to the stages"), trio.fail_after(3):
            await pipeline.complete([1])
        m.hosts[0].draining = False
        await pipeline.way.wait_up(5)
        await generate(pipeline, [1], 20)


async def test_a_round_trip_that_is_too_long_is_refused_at_forming() -> None:
    async with mesh(1) as m:
        with pytest.raises(StageLostError, match="the limit is 0 ms"):
            async with joined(m.topology, max_round_trip=1e-9):
                pass


def test_candidates_take_turns() -> None:
    places = [StagePlace("a:1"), StagePlace("b:1", standby=("b:2", "b:3"))]
    candidates = Candidates(lambda: places)

    def chosen() -> list[str]:
        return [place.address for place in candidates.chosen()]

    assert chosen() == ["a:1", "b:1"]
    for stage, expected in [(1, "b:2"), (0, "b:2"), (7, "b:2"), (1, "b:3"), (1, "b:1")]:
        candidates.blame(stage)
        assert chosen() == ["a:1", expected]
    assert [candidates.count(stage) for stage in (-1, 0, 1, 2)] == [1, 1, 3, 1]


def test_successors_have_to_do_as_much() -> None:
    def described(most: int, stop: int = 1) -> StageDescriptor:
        return StageDescriptor("sim", (0, stop), 2, 8, 100, 1, 1, most_rows=most)

    check_successors([described(8)], [described(9)])
    for worse in (described(7), described(8, stop=2)):
        with pytest.raises(HandshakeError, match="cannot take over"):
            check_successors([described(8)], [worse])


async def test_a_way_that_is_about_to_be_formed_is_waited_for_longer(autojump_clock: MockClock) -> None:
    way, hope = Way(), True
    way.formed(Sink())
    way.broke("it fell")
    way.hopeful = lambda: hope

    async def after(seconds: float, then: Callable[[], None]) -> None:
        await trio.sleep(seconds)
        then()
        way.reconsider()

    def lose_hope() -> None:
        nonlocal hope
        hope = False

    async with trio.open_nursery() as nursery:
        for deadline, at_most, ends, up, then in (
            (3, 60, 10, True, lambda: way.formed(Sink())),
            (3, 60, 60, False, lambda: None),
            (3, 0, 3, False, lambda: None),
            (3, 60, 10, False, lose_hope),
            (3, 60, 3, False, lambda: None),  # there is none from the beginning
        ):
            began = trio.current_time()
            nursery.start_soon(after, 10, then)
            with suppress(StageLostError):
                await way.wait_up(deadline, at_most)
            assert trio.current_time() == began + ends
            assert way.up is up
            way.broke("it fell again")


async def test_the_way_is_a_state_machine() -> None:
    way, one, two = Way(), Sink(), Sink()
    changes: list[WayState] = []
    way.on_change = lambda: changes.append(way.state)
    await way.send("lost")
    assert way.try_send("lost")
    with pytest.raises(StageLostError, match="not been formed"):
        await way.wait_up(0.0)
    way.broke("never was")
    way.formed(one)
    await way.send("first")
    way.broke("it fell")
    way.broke("later word")
    assert way.reason == "it fell"
    assert way.try_send("lost")
    way.formed(two, same_caches=True)
    await way.wait_up(0.0)
    assert way.try_send("second")
    assert (one.messages, two.messages, way.generation) == (["first"], ["second"], 2)
    way.close()
    with pytest.raises(StageLostError, match="closed"):
        await way.wait_up(1.0)
    assert changes == [WayState.UP, WayState.BROKEN, WayState.UP, WayState.CLOSED]
