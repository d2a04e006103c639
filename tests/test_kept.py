"""What stages that survive a loss do not compute again: the rows that they keep, and what becomes of a request."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import trio
import trio.testing
from chaos.harness import Tokens
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from reference import greedy
from simulated import mixed, serial
from test_failover import Sink, with_standbys
from test_remote import Mesh, joined, lanes_free, mesh

from meshpipe import Coordinator, StagePlace, Topology
from meshpipe.actors import supervise
from meshpipe.llama.engine import StageEngine
from meshpipe.llama.memory import kept_positions
from meshpipe.llama.slicing import slice_model
from meshpipe.messages import OpenSession, Progress, SessionOpened, StageDescriptor, Window
from meshpipe.pipeline.host import StageHost
from meshpipe.pipeline.kept import KeptRows
from meshpipe.pipeline.report import Report
from meshpipe.pipeline.route import Inlet, Route, stage_mailbox
from meshpipe.pipeline.runner import Aborted, Job, LlamaRunner, Result, SimulatedRunner
from meshpipe.pipeline.stage import Stage
from meshpipe.wire import Address, listen, local_address

LANES, CONTEXT, WIDTH = 2, 12, 3


class KeptMachine(RuleBasedStateMachine):
    """Against plain lists: each lane has all rows below its length, and never more than its share."""

    def __init__(self) -> None:
        super().__init__()
        self.share = 7
        self.kept = KeptRows(LANES, CONTEXT, WIDTH, self.share * LANES * WIDTH * 4 + 5)
        self.lanes: list[list[float]] = [[] for _ in range(LANES)]  # what each row is filled with
        self.given: list[tuple[np.ndarray[Any, Any], list[float]]] = []
        self.fresh = 0.0

    @rule(lane=st.integers(0, LANES - 1), start=st.integers(0, CONTEXT), count=st.integers(0, 5))
    def put(self, lane: int, start: int, count: int) -> None:
        values = [self.fresh + n for n in range(count)]
        self.fresh += count
        self.kept.put(lane, start, np.repeat(np.array(values, np.float32)[:, None], WIDTH, axis=1))
        mine = self.lanes[lane]
        del mine[start:]
        if len(mine) == start:
            mine += values
            del mine[max(self.share, 0) :]

    @rule(lane=st.integers(0, LANES - 1), position=st.integers(-1, CONTEXT))
    def trim(self, lane: int, position: int) -> None:
        self.kept.trim(lane, position)
        del self.lanes[lane][max(position, 0) :]

    @precondition(lambda self: any(self.lanes))
    @rule(data=st.data())
    def get(self, data: st.DataObject) -> None:
        lane = data.draw(st.sampled_from([lane for lane in range(LANES) if self.lanes[lane]]))
        stop = data.draw(st.integers(0, len(self.lanes[lane])))
        start = data.draw(st.integers(0, stop))
        rows = self.kept.get(lane, start, stop)
        assert rows.shape == (stop - start, WIDTH)
        self.given.append((rows, self.lanes[lane][start:stop]))

    @invariant()
    def agrees(self) -> None:
        for lane, values in enumerate(self.lanes):
            assert self.kept.length(lane) == len(values) <= self.share
            rows = self.kept.get(lane, 0, len(values))
            assert rows.tolist() == [[value] * WIDTH for value in values]
        for given, values in self.given:  # what was given once is on its way, whatever comes later
            assert given.tolist() == [[value] * WIDTH for value in values]


TestKeptRows = KeptMachine.TestCase
TestKeptRows.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)


def test_memory_is_shared_equally_and_no_more_than_the_context_needs() -> None:
    assert kept_positions(4, 1000, 10, 4 * 10 * 4 * 50) == 50
    assert kept_positions(4, 30, 10, 4 * 10 * 4 * 50) == 30
    assert kept_positions(4, 30, 10, 159) == 0
    nothing = KeptRows(4, 30, 10, 0)
    nothing.put(0, 0, np.ones((3, 10), np.float32))
    assert nothing.length(0) == 0


async def lose(
    pipeline: Coordinator, m: Mesh, lost: int, prompt: list[int], *, after: int, count: int = 60
) -> tuple[Report, list[int]]:
    """Ends a stage when so many tokens have come; the report, and the rows that each stage ran after that."""
    tokens: list[int] = []
    before = [0] * len(m.hosts)
    async with pipeline.generate(prompt, max_tokens=count) as generation:
        if not after:
            with trio.fail_after(5):
                while m.hosts[0].stage.counters.rows_run < 400:
                    await trio.lowlevel.checkpoint()
            m.scopes[lost].cancel()
        async for piece in generation:
            if len(tokens) < after <= len(tokens) + len(piece.tokens):
                before = [host.stage.counters.rows_run for host in m.hosts]
                m.scopes[lost].cancel()
            tokens += piece.tokens
    assert tokens == serial(mixed, prompt, count)
    assert generation.report is not None
    assert generation.report.resumes == 1
    ran = [host.stage.counters.rows_run - rows for host, rows in zip(m.hosts, before, strict=True)]
    return generation.report, ran


@pytest.mark.parametrize("lost", [0, 1, 2])
async def test_only_the_lost_range_runs_the_tokens_again(lost: int) -> None:
    """That rows sent again are the very rows of the first time is seen to by `CheckedRunner`."""
    async with mesh(3) as m, mesh(3) as spare, joined(with_standbys(m, spare)) as pipeline:
        prompt = [5] * 500
        report, ran = await lose(pipeline, m, lost, prompt, after=30)
        at_least = len(prompt) + 25
        for stage, kept in enumerate(report.kept_tokens):
            if stage == lost:
                assert kept == 0
                assert spare.hosts[lost].stage.counters.rows_run > at_least
                assert spare.hosts[lost].stage.counters.rows_known == 0
            else:
                assert kept > at_least
                assert m.hosts[stage].stage.counters.rows_known >= kept
                assert ran[stage] < 200  # what was to come, and guesses at it
        assert report.exact
        survivors = [host for stage, host in enumerate(m.hosts) if stage != lost]
        await lanes_free([*survivors, spare.hosts[lost]])
        # The lane's next session has nothing to do with what is kept.
        other = [6] * 100
        assert (await pipeline.complete(other, max_tokens=50)).tokens == tuple(serial(mixed, other, 50))


async def test_a_stage_that_is_lost_during_prefill() -> None:
    async with mesh(3) as m, mesh(3) as spare, joined(with_standbys(m, spare)) as pipeline:
        report, _ = await lose(pipeline, m, 1, [5] * 1500, after=0)
        assert report.kept_tokens[0] > 300
        assert m.hosts[0].stage.counters.rows_known == report.kept_tokens[0]


@pytest.mark.parametrize("share", [0, 100])
async def test_what_memory_does_not_allow_is_run_again(share: int) -> None:
    """The first stage has rows of the first positions only: it runs the others, and the last stage none."""
    async with mesh(3) as m, mesh(3) as spare, joined(with_standbys(m, spare)) as pipeline:
        m.hosts[0].stage._kept = KeptRows(4, 2048, 8, share * 4 * 8 * 4)
        report, ran = await lose(pipeline, m, 1, [5] * 500, after=30)
        assert report.kept_tokens[0] == share
        assert report.kept_tokens[2] > 500
        assert ran[0] > 420
        assert ran[2] < 200


async def test_nothing_is_kept_where_bits_may_differ() -> None:
    """What the others hold came from the stage that is lost, or goes with what it made."""
    async with (
        mesh(3) as m,
        mesh(3, fingerprint="other") as spare,
        joined(with_standbys(m, spare)) as pipeline,
    ):
        report, ran = await lose(pipeline, m, 2, [5] * 500, after=30)
        assert report.kept_tokens == (0, 0, 0)
        assert ran[0] > 500
        assert not report.exact


class Aborting(SimulatedRunner):
    """Ends its second decode half-way."""

    async def run(self, jobs: Sequence[Job]) -> list[Result]:
        if self._decodes == 1:
            self._decodes += 1
            raise Aborted("half-way")
        return await super().run(jobs)


@pytest.mark.parametrize("layer", [0, 1])
async def test_what_was_said_but_not_run_is_not_in_the_cache(
    layer: int, autojump_clock: trio.testing.MockClock
) -> None:
    """A decode that was aborted leaves the tokens of its window and not their rows; later windows may say the same."""
    described = StageDescriptor("sim", (layer, layer + 1), 2, 8, 100, 1, 64, ((1, 0.01), (2, 0.02)))
    mailbox, back, down = stage_mailbox(), Sink(), Sink()
    stage = Stage(mailbox, Aborting(described, mixed), keep=10**6)
    inlet = Inlet(mailbox, Route(None if layer else down, back, layer))
    said: list[tuple[int, int, int, int]] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(supervise, mailbox, lambda _: stage)
        await inlet.send(OpenSession(1, 0, alike=b"x"))
        for epoch, (start, stop) in enumerate([(0, 5), (5, 10), (3, 10), (0, 10)]):
            rows = np.zeros((stop - start, 8), np.float32) if layer else None
            await inlet.send(Window(1, epoch, epoch, start, (7,) * (stop - start), 0, rows))
            await trio.sleep(1)
            counters = stage.counters
            said.append((counters.aborted, counters.windows_run, counters.rows_run, counters.rows_known))
        nursery.cancel_scope.cancel()
    assert said == [(0, 1, 5, 0), (1, 1, 5, 0), (1, 2, 10, 2), (1, 2, 10, 12)]
    if layer:
        assert [type(message) for message in back.messages] == [SessionOpened, Progress, Progress, Progress]
    else:
        windows = [message for message in down.messages if isinstance(message, Window)]
        assert [len(window.rows) for window in windows if window.rows is not None] == [5, 7, 10]
        assert [len(window.timings) for window in windows] == [1, 1, 0]


async def test_the_models_own_rows_are_kept(tmp_path: Path) -> None:
    """Real engines, three stages, the middle one lost: the output is the unsplit model's."""
    model = tiny.write(tmp_path / "tiny.gguf", "llama")
    prompt, count = tiny.tokens(150), 40
    ranges = [(0, 2), (2, 4), (4, 6), (2, 4)]
    engines = [StageEngine(slice_model(model, *layers), context=256, probe=True) for layers in ranges]
    try:
        async with trio.open_nursery() as nursery:
            hosts, places, middle = [], [], trio.CancelScope()
            for index, engine in enumerate(engines):
                host = StageHost(LlamaRunner(engine))
                listeners = await listen(Address("127.0.0.1", 0))

                async def run(
                    host: StageHost, listeners: Any, scope: trio.CancelScope, *, task_status: Any
                ) -> None:
                    with scope:
                        await host.run(listeners, task_status=task_status)

                scope = middle if index == 1 else trio.CancelScope()
                await nursery.start(partial(run, host, listeners, scope))
                hosts.append(host)
                places.append(StagePlace(str(local_address(listeners[0])), ranges[index]))
            first, second, third, standby = places
            topology = Topology(
                (first, StagePlace(second.address, (2, 4), standby=(standby.address,)), third)
            )
            async with joined(topology, vocabulary=Tokens()) as pipeline:
                tokens: list[int] = []
                async with pipeline.generate(prompt, max_tokens=count, ignore_end=True) as generation:
                    async for piece in generation:
                        tokens += piece.tokens
                        if len(tokens) > 10:
                            middle.cancel()
            nursery.cancel_scope.cancel()
    finally:
        for engine in engines:
            engine.close()
    assert tokens == greedy(model, prompt, count, context=256)
    assert generation.report is not None
    assert (generation.report.resumes, generation.report.exact) == (1, True)
    assert min(generation.report.kept_tokens[0], generation.report.kept_tokens[2]) > 155
    run_by = [host.stage.counters.rows_run for host in hosts]
    assert run_by[3] > 155
    assert max(run_by[0], run_by[2]) < 260, "150 of the prompt once, and what followed"
