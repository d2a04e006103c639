"""Who is let in, in which order, and who is told to come back later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import trio
import trio.lowlevel
from attrs import evolve
from determinism import run
from simulated import COST, novel, periodic, serial, simulated
from test_breaking import Heard

from meshpipe.errors import ActorGoneError, CapacityError, OverloadedError, StageLostError
from meshpipe.messages import Discard, OpenSession, StageDescriptor, Window
from meshpipe.pipeline.host import StageHost
from meshpipe.pipeline.route import Arrival, Route, stage_mailbox
from meshpipe.pipeline.runner import SimulatedRunner
from meshpipe.serving.errors import of_failure
from meshpipe.speculation.ngram import NgramProposer


async def collect(generation: Any) -> list[int]:
    return [token async for piece in generation for token in piece.tokens]


def test_more_than_may_wait_are_refused_at_once_and_those_that_wait_come_in_their_order() -> None:
    async def main() -> None:
        async with simulated(periodic(), lanes=2, queue=3) as sim:
            ended: list[int] = []

            async def one(number: int, generation: Any, count: int) -> None:
                assert await collect(generation) == serial(periodic(), [number], count)
                ended.append(number)

            async with trio.open_nursery() as nursery:
                for number in range(5):  # those that come first take longest
                    count = 200 if number < 2 else 4
                    generation = sim.coordinator.generate([number], max_tokens=count)
                    nursery.start_soon(one, number, generation, count)
                with pytest.raises(
                    OverloadedError, match=r"5 requests run or wait.* 2 at a time and lets 3 wait"
                ):
                    sim.coordinator.generate([9])
            assert [number for number in ended if number > 1] == [2, 3, 4]
            waiting = [sim.coordinator.generate([number], max_tokens=4) for number in range(5)]
            waiting[3].cancel()  # whoever gives up makes room
            await trio.lowlevel.checkpoint()
            await trio.sleep(0.01)
            waiting.append(sim.coordinator.generate([5], max_tokens=4))
            for number, generation in enumerate(waiting):
                expected = [] if number == 3 else serial(periodic(), [number], 4)
                assert await collect(generation) == expected
            await trio.sleep(1)
            sim.assert_nothing_is_left()

    run(main)


def test_an_overload_is_too_many_requests() -> None:
    failure = of_failure(OverloadedError("ask again later"))
    assert (failure.status, failure.headers) == (429, {"Retry-After": "1"})


def test_what_waits_at_a_stage_is_bounded_in_bytes_and_a_discard_still_gets_in() -> None:
    async def main() -> None:
        mailbox, route = stage_mailbox(room=1 << 20), Route(None, Heard())
        wide = Window(1, 0, 0, 0, (1,) * 64, 0, np.zeros((64, 1024), np.float32))  # a quarter
        narrow = Window(1, 0, 0, 0, (1,), 1)
        for fits in (True, True, True, False):
            assert mailbox.ref.try_send(Arrival(route, wide, 0.0)) is fits
        while mailbox.ref.try_send(Arrival(route, narrow, 0.0)):
            pass
        assert 200 < len(list(mailbox.peek("windows"))) < 300
        assert mailbox.ref.try_send(Arrival(route, Discard(1, 1), 0.0))
        mailbox.take("windows")
        assert mailbox.ref.try_send(Arrival(route, wide, 0.0))

    run(main)


def test_a_stage_whose_windows_no_frame_carries_is_refused() -> None:
    described = StageDescriptor("sim", (0, 1), 2, 8192, 100, 1, 4096, COST, most_rows=2048)
    assert StageHost(SimulatedRunner(described, novel))
    with pytest.raises(
        CapacityError, match="take 128 MiB, and a frame carries at most 64 MiB: set batch to 2048"
    ):
        StageHost(SimulatedRunner(evolve(described, most_rows=4096), novel))


def test_a_long_prompt_is_indexed_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """128,000 tokens take seconds, in which all other sessions, and the links' heartbeats, would stand still."""
    indexed: list[int] = []
    extend = NgramProposer.extend

    def counted(self: NgramProposer, tokens: Sequence[int]) -> None:
        indexed.append(len(tokens))
        extend(self, tokens)

    monkeypatch.setattr(NgramProposer, "extend", counted)

    async def main() -> None:
        async with simulated(periodic(), lanes=2) as sim:
            prompt = [3] * 3000
            done = await sim.coordinator.complete(prompt, max_tokens=20)
            assert list(done.tokens) == serial(periodic(), prompt, 20)
            assert sum(indexed) == 3000 + 20
            assert max(indexed) <= 256
            assert done.report.sources["ngram"].accepted

    run(main)


def test_a_cancelled_request_that_waits_for_a_broken_way_frees_its_lane() -> None:
    async def main() -> None:
        async with simulated(periodic(), lanes=1) as sim:
            pipe = sim.coordinator
            pipe.way.give_up = lambda reason, stage: pipe.way.broke(reason)
            pipe.way.hopeful = lambda: True

            async def dead() -> None:
                raise StageLostError("it does not answer")

            pipe.check_route = dead
            with trio.move_on_after(1):
                await pipe.complete([1, 2, 3, 4], max_tokens=5)
            await trio.sleep(0.1)
            assert (pipe.active, pipe.lanes.free) == (0, 1)

    run(main)


class Stuck(Heard):
    """The way to a stage that takes nothing any more, until it is gone."""

    def __init__(self) -> None:
        super().__init__()
        self.gone = trio.Event()

    def try_send(self, message: object) -> bool:
        if self.gone.is_set():
            raise ActorGoneError("gone")
        return False

    async def send(self, message: object) -> None:
        self.messages.append(message)
        await self.gone.wait()
        raise ActorGoneError("gone")


def test_a_session_that_cannot_even_open_still_hears() -> None:
    """Of being cancelled, of a way that is found again, and of time."""

    async def main() -> None:
        async with simulated(novel, resume_deadline=5.0) as sim:
            way, whole, stuck = sim.coordinator.way, sim.coordinator.way._first, Stuck()
            assert whole is not None
            way.formed(stuck)
            began = trio.current_time()
            generation = sim.coordinator.generate([1], max_tokens=4)
            other = sim.coordinator.generate([2], max_tokens=4)
            await trio.sleep(1)
            assert stuck.all(OpenSession)
            generation.cancel()
            assert await collect(generation) == []
            assert trio.current_time() - began < 1.1
            way.broke("it takes nothing")
            await trio.sleep(2)
            stuck.gone.set()
            way.formed(whole)
            assert await collect(other) == serial(novel, [2], 4)
            way.formed(stuck := Stuck())
            late = sim.coordinator.generate([3], max_tokens=4)
            way.give_up = lambda reason, stage: way.broke(reason)
            began = trio.current_time()
            with pytest.raises(StageLostError, match="within 5 s"):
                await collect(late)
            assert 25 < trio.current_time() - began < 35  # two thirds of what a stall may take, and 5 s
            stuck.gone.set()
            way.formed(whole)
            assert await sim.coordinator.complete([4], max_tokens=4)
            await trio.sleep(1)
            sim.assert_nothing_is_left()

    run(main)
