"""What a Discard saves: stale windows are dropped unrun at every stage, a wholly stale decode is ended."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing
from attrs import frozen
from simulated import COST, VOCABULARY, novel
from test_breaking import Heard

from meshpipe.actors import supervise
from meshpipe.actors.scope import owned_nursery
from meshpipe.messages import Discard, OpenSession, Reply, StageDescriptor, Window
from meshpipe.pipeline.local import join_stages
from meshpipe.pipeline.route import Inlet, Route, stage_mailbox
from meshpipe.pipeline.runner import Aborted, Job, Result, SimulatedRunner
from meshpipe.pipeline.stage import Stage
from meshpipe.wire import Conditions

NEVER_SAID = VOCABULARY - 1  # by `novel`
FLAT = ((1, 0.010), (8, 0.011))  # what shares a decode costs next to nothing


class Downstream(Heard):
    """What a stage sends on; `replied` is set by the first reply."""

    def __init__(self) -> None:
        super().__init__()
        self.replied = trio.Event()

    def try_send(self, message: object) -> bool:
        if isinstance(message, Reply):
            self.replied.set()
        return super().try_send(message)

    async def send(self, message: object) -> None:
        self.try_send(message)

    @property
    def windows(self) -> list[tuple[int, int]]:
        """(session, number) of the windows."""
        return [(window.session, window.number) for window in self.all(Window)]


def verify(session: int, number: int, start: int, *, epoch: int = 0, width: int = 4) -> Window:
    """A verify window whose guesses are all wrong."""
    return Window(session, epoch, number, start, (NEVER_SAID,) * width, width)


async def run_and_dropped(*, discard: bool) -> list[tuple[int, int]]:
    """Windows run and dropped by each of three stages, of 16 whose very first guess is wrong.

    A stage takes 66 ms for one, the middle one twice as long, and 100 ms lie between them.
    """
    slow = tuple((rows, 2 * seconds) for rows, seconds in COST)
    runners = [
        SimulatedRunner(
            StageDescriptor("sim", (i, i + 1), 3, 8, VOCABULARY, 1, 512, cost, most_rows=16), novel
        )
        for i, cost in enumerate((COST, slow, COST))
    ]
    heard = Downstream()
    async with owned_nursery() as nursery:
        first, stages = join_stages(nursery, runners, heard, Conditions(delay=0.1))
        await first.send(OpenSession(1, 0))
        for number in range(16):
            await first.send(verify(1, number, 16 * number, width=16))
        with trio.fail_after(5):
            await heard.replied.wait()
        if discard:
            first.try_send(Discard(1, 1))
        await trio.sleep(10)
    assert len(heard.all(Reply)) == 1
    return [(stage.counters.windows_run, stage.counters.windows_dropped) for stage in stages]


async def test_every_stage_drops_stale_windows_unrun(autojump_clock: trio.testing.MockClock) -> None:
    """By itself only the last stage finds out; a Discard saves the others what is queued or would come."""
    assert await run_and_dropped(discard=False) == [(16, 0), (16, 0), (1, 15)]
    # The reply comes at 564 ms, the Discard then, at 664 and at 764 ms to the stages. In the middle
    # the fourth runs, four are queued behind it; the ninth, which the first stage was running, stays there.
    assert await run_and_dropped(discard=True) == [(9, 7), (4, 4), (1, 2)]


class Waiting(SimulatedRunner):
    """A decode lasts until `finish`, or `abort`, which ends it as an engine does: trimmed to its start."""

    def __init__(self, descriptor: StageDescriptor) -> None:
        super().__init__(descriptor, novel)
        self.begun: list[list[tuple[int, int]]] = []  # (lane, number) of each decode's windows
        self.aborts = 0
        self._aborted = False
        self._end = trio.Event()

    async def run(self, jobs: Sequence[Job]) -> list[Result]:
        self.begun.append([(job.lane, job.window.number) for job in jobs])
        self._aborted, self._end = False, trio.Event()
        for job in jobs:
            del self._caches[job.lane][job.window.start :]
        await self._end.wait()
        if self._aborted:
            raise Aborted("the decode was aborted")
        return await super().run(jobs)

    def finish(self) -> None:
        self._end.set()

    def abort(self) -> None:
        self.aborts += 1
        self._aborted = True
        self._end.set()


@frozen
class First:
    """The first of two stages, what it runs on, and what it sends on."""

    inlet: Inlet
    stage: Stage
    runner: Waiting
    down: Downstream

    async def takes(self, *messages: object) -> None:
        """Delivers them together, and lets the stage do what it can."""
        for message in messages:
            assert self.inlet.try_send(message)
        await trio.sleep(1)

    async def finishes(self) -> None:
        """Lets the decode end."""
        self.runner.finish()
        await trio.sleep(1)


@asynccontextmanager
async def first_stage(most_rows: int) -> AsyncIterator[First]:
    """Runs one; a decode has so many rows at most."""
    described = StageDescriptor("sim", (0, 1), 2, 8, VOCABULARY, 2, 64, FLAT, most_rows=most_rows)
    mailbox, runner, down = stage_mailbox(), Waiting(described), Downstream()
    stage = Stage(mailbox, runner)
    async with owned_nursery() as nursery:
        nursery.start_soon(supervise, mailbox, lambda _: stage)
        yield First(Inlet(mailbox, Route(down, Heard())), stage, runner, down)


async def test_a_wholly_stale_decode_is_aborted(autojump_clock: trio.testing.MockClock) -> None:
    async with first_stage(most_rows=4) as first:
        await first.takes(OpenSession(1, 0), verify(1, 0, 0))
        await first.finishes()
        await first.takes(verify(1, 1, 4), verify(1, 2, 8))
        assert first.runner.begun == [[(0, 0)], [(0, 1)]]
        await first.takes(Discard(1, 1))
        assert first.runner.aborts == 1
        assert first.runner.length(0) == 4
        counters = first.stage.counters
        assert (counters.aborted, counters.windows_dropped, counters.windows_run) == (1, 1, 1)
        await first.takes(verify(1, 3, 4, epoch=1))
        await first.finishes()
        assert first.runner.begun == [[(0, 0)], [(0, 1)], [(0, 3)]]
        assert first.down.windows == [(1, 0), (1, 3)]
        assert (first.runner.aborts, first.runner.length(0)) == (1, 8)


@pytest.mark.parametrize("both", [False, True])
async def test_a_decode_that_another_session_shares_is_not_aborted(
    both: bool, autojump_clock: trio.testing.MockClock
) -> None:
    """Unless that one's window has become stale, too."""
    async with first_stage(most_rows=8) as first:
        await first.takes(OpenSession(1, 0), OpenSession(2, 1), verify(1, 0, 0), verify(2, 0, 0))
        assert first.runner.begun == [[(0, 0), (1, 0)]]
        await first.takes(Discard(1, 1))
        assert first.runner.aborts == 0
        if both:
            await first.takes(Discard(2, 1))
        await first.finishes()
        assert (first.runner.aborts, first.stage.counters.aborted) == (both, both)
        assert first.down.windows == ([] if both else [(2, 0)])
        assert first.stage.counters.rows_run_in_vain == (0 if both else 4)


async def test_a_decode_of_the_current_epoch_is_not_aborted(autojump_clock: trio.testing.MockClock) -> None:
    """A Discard may come after the first window of the epoch that it makes way for."""
    async with first_stage(most_rows=4) as first:
        await first.takes(OpenSession(1, 0), verify(1, 0, 0, epoch=1))
        await first.takes(Discard(1, 1))
        assert first.runner.aborts == 0
        await first.finishes()
        assert first.down.windows == [(1, 0)]
        assert first.stage.counters.rows_run_in_vain == 0
