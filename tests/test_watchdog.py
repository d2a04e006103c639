"""Decodes that hang in a process that lives: what is found, when, and what is not taken for it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import tiny
import trio
from chaos.harness import Tokens
from determinism import run
from simulated import COST, mixed
from test_breaking import Lonely, verify
from test_failover import read, with_standbys
from test_remote import generate, joined, lanes_free, mesh

from meshpipe import Topology
from meshpipe.messages import OpenSession, Reply
from meshpipe.pipeline import watchdog
from meshpipe.pipeline.children import open_children, stage_command
from meshpipe.pipeline.runner import Job, Result, SimulatedRunner
from meshpipe.pipeline.watchdog import HOPELESS, LEAST, TICK, Watchdog
from meshpipe.speculation.policy import CostCurve


class Watched:
    """A decode that the test conducts, and what the watchdog says of it."""

    def __init__(self, cost: tuple[tuple[int, float], ...] = COST) -> None:
        self.steps = 0
        self.hangs: list[tuple[float, str]] = []
        self.dog = Watchdog(CostCurve(cost), lambda: self.steps)

    async def watch(self) -> None:
        await self.dog.watch(lambda reason: self.hangs.append((trio.current_time(), reason)))

    async def decode(self, seconds: float, steps: int = 1, rows: int = 1) -> None:
        self.dog.began(rows)
        for _ in range(steps):
            await trio.sleep(seconds / steps)
            self.steps += 1
        self.dog.ended()


def conducted(play: Callable[[Watched], object], cost: tuple[tuple[int, float], ...] = COST) -> Watched:
    watched = Watched(cost)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watched.watch)
            await play(watched)  # type: ignore[misc]
            nursery.cancel_scope.cancel()

    run(main)
    return watched


def test_a_decode_that_stands_still_is_found_within_three_seconds_and_told_once() -> None:
    async def play(watched: Watched) -> None:
        began = trio.current_time()
        await watched.decode(0.01)
        await watched.decode(30.0)
        ((at, reason),) = watched.hangs
        assert LEAST < at - began < LEAST + 3 * TICK < 3
        assert "a decode of 1 rows, which should take 0.009 s" in reason
        assert watched.dog.hangs is None  # it has come back after all
        assert watched.dog.hopeless.is_set()
        assert watched.dog.patience() == LEAST  # and it does not count as what decodes take
        await watched.decode(30.0)
        assert len(watched.hangs) == 2

    conducted(play)


@pytest.mark.parametrize(
    ("seconds", "steps", "rows"),
    [
        (1.9, 1, 1),  # two hundred times as slow as it was at load
        (60.0, 40, 1),  # slow, but it moves
        (4.9, 1, 63),  # twenty times as slow, and wide
    ],
)
def test_what_is_slow_does_not_hang(seconds: float, steps: int, rows: int) -> None:
    async def play(watched: Watched) -> None:
        await watched.decode(seconds, steps, rows)
        await watched.decode(seconds, steps, rows)
        assert watched.hangs == []

    conducted(play)


def test_patience_follows_what_is_measured() -> None:
    async def play(watched: Watched) -> None:
        await watched.decode(3.0, 40)  # of a machine on which they take 1 s at load
        watched.dog.began(1)
        assert watched.dog.patience() == pytest.approx(2 * 3.0)  # of one step
        watched.dog.ended()
        await watched.decode(3.0)
        watched.dog.began(1)
        assert watched.dog.patience() == pytest.approx(20.0)  # of a decode that is one step
        watched.dog.ended()
        for _ in range(60):
            await watched.decode(1.0, 40)
        watched.dog.began(1)
        assert watched.dog.patience() == pytest.approx(2.0)  # slowness is forgotten
        watched.dog.ended()
        assert watched.hangs == []

    conducted(play, ((1, 1.0), (63, 2.0)))


def test_a_process_that_was_stopped_does_not_blame_its_decode() -> None:
    async def main() -> None:
        watched = Watched()
        clock = trio.lowlevel.current_clock()
        assert isinstance(clock, trio.testing.MockClock)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watched.watch)
            nursery.start_soon(watched.decode, 9.0)
            for _ in range(4):
                await trio.sleep(1)
                clock.jump(1)
            assert watched.hangs == []
            nursery.cancel_scope.cancel()

    run(main)


class Hanging(SimulatedRunner):
    """Computes until it is told to hang, and again when it is told to go on."""

    def __init__(self, runner: SimulatedRunner) -> None:
        super().__init__(runner.descriptor, mixed)
        self.going = trio.Event()
        self.going.set()

    async def run(self, jobs: Sequence[Job]) -> list[Result]:
        await self.going.wait()
        return await super().run(jobs)


def test_a_stage_says_when_its_decodes_begin_and_end() -> None:
    async def main() -> None:
        one = Lonely()
        runner = Hanging(one.stage._runner)  # type: ignore[arg-type]
        one.stage._runner = runner
        found: list[str] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.stage.run)
            nursery.start_soon(one.stage.watchdog.watch, found.append)
            _, heard, say = one.route()
            say(OpenSession(1, 0))
            say(verify(1, 0, 5))
            await trio.sleep(60)  # an idle stage does not hang
            assert found == []
            runner.going = trio.Event()
            (reply,) = heard.all(Reply)
            say(verify(1, 1, *reply.tokens, 6, number=1))
            await trio.sleep(LEAST + 3 * TICK)
            assert len(found) == 1
            assert "2 rows" in found[0]
            await trio.sleep(LEAST * HOPELESS)
            assert one.stage.watchdog.hopeless.is_set()
            runner.going.set()
            await trio.sleep(1)
            assert one.stage.watchdog.hangs is None
            assert len(heard.all(Reply)) == 2
            nursery.cancel_scope.cancel()

    run(main)


async def test_a_standby_takes_over_from_a_stage_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over sockets: the process lives, and answers every heartbeat."""
    monkeypatch.setattr(watchdog, "LEAST", 0.3)
    monkeypatch.setattr(watchdog, "TICK", 0.05)
    async with mesh(2) as m, mesh(2) as spare, joined(with_standbys(m, spare)) as pipeline:
        stage = m.hosts[1].stage
        runner = stage._runner = Hanging(stage._runner)  # type: ignore[arg-type]
        begun = trio.Event()
        resumes: list[int] = []

        async def one() -> None:
            resumes.append(await read(pipeline, [4] * 20, 60, begun))

        with trio.fail_after(5):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(one)
                await begun.wait()
                runner.going = trio.Event()
                began = trio.current_time()
                while pipeline.way.up:  # noqa: ASYNC110
                    await trio.sleep(0.01)
                assert "a decode of" in pipeline.way.reason
                assert 0.3 < trio.current_time() - began < 1
            assert resumes == [1]
            await lanes_free([m.hosts[0], spare.hosts[1]])
            runner.going.set()
            await lanes_free(m.hosts)  # of what it held there is nothing left when it comes back
            await generate(pipeline, [9], 20)


@pytest.mark.slow
async def test_a_process_whose_decode_hangs_ends_itself_and_is_started_again(tmp_path: Path) -> None:
    model = tiny.write(tmp_path / "tiny.gguf", "llama")
    program = str(Path(__file__).with_name("hanging.py"))
    usual = stage_command((0, 6), ["--model", str(model), "--context", "256"])
    command = [sys.executable, program, *usual[usual.index("stage") :]]
    prompt = list(range(5, 25))
    async with open_children([(0, 6)], [command], 120.0) as children:
        topology = Topology(tuple(children.places))
        async with joined(topology, vocabulary=Tokens(), places=lambda: children.places) as pipeline:
            expected = await pipeline.complete(prompt, max_tokens=60)
            tokens: list[int] = []
            noticed = None
            async with pipeline.generate(prompt, max_tokens=60) as generation:
                async for piece in generation:
                    tokens += piece.tokens
                    if len(tokens) > 10 and noticed is None:
                        os.kill(children.pids[0], signal.SIGUSR1)
                        began = trio.current_time()
                        with trio.fail_after(5):
                            while pipeline.way.up:  # noqa: ASYNC110
                                await trio.sleep(0.01)
                        noticed = trio.current_time() - began
                        assert "has not moved" in pipeline.way.reason
            assert tuple(tokens) == expected.tokens
            assert generation.report is not None
            assert generation.report.resumes == 1
            assert noticed is not None
            assert noticed < 3
