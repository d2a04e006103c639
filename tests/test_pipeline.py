"""Whole pipelines on trio's autojump clock: real actors, links, ledger and policies; simulated engines."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
import trio
from determinism import run
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import FakeVocabulary, Simulated, mixed, novel, periodic, serial, simulated

from meshpipe import MeshpipeError, Sampling, Speculation
from meshpipe.errors import CapacityError, UsageError
from meshpipe.pipeline.coordinator import Generation

OFF, AUTO = Speculation(mode="off"), Speculation()


async def collect(generation: Generation) -> list[int]:
    return [token async for piece in generation for token in piece.tokens]


async def settle() -> None:
    """Lets everything that is under way arrive."""
    await trio.sleep(5)


@settings(max_examples=40, deadline=None)
@given(
    stages=st.integers(1, 5),
    depth=st.one_of(st.just("auto"), st.integers(1, 8)),
    width=st.one_of(st.just("auto"), st.integers(1, 9)),
    delay=st.sampled_from([None, 0.0, 0.01, 0.1]),
    target=st.sampled_from([periodic(), novel, mixed]),
    prompt=st.lists(st.integers(0, 900), min_size=1, max_size=150),
    count=st.integers(1, 120),
    seed=st.integers(0, 2**16),
)
def test_output_is_serial_output(stages, depth, width, delay, target, prompt, count, seed) -> None:  # type: ignore[no-untyped-def]
    async def main() -> list[int]:
        async with simulated(target, stages, delay=delay, jitter=0.02 if delay else 0.0) as sim:
            speculation = Speculation(depth=depth, width=width)
            tokens = await collect(
                sim.coordinator.generate(prompt, max_tokens=count, speculation=speculation)
            )
            await settle()
            sim.assert_nothing_is_left()
            return tokens

    assert run(main, seed=seed) == serial(target, prompt, count)


def test_foretold_text_fills_the_pipe() -> None:
    """Nearly as fast over 100 ms links as over none, and many times as fast as without speculation."""

    async def rate(delay: float, speculation: Speculation) -> float:
        async with simulated(periodic(), delay=delay) as sim:
            done = await sim.coordinator.complete(
                [i % 7 for i in range(40)], max_tokens=1024, speculation=speculation
            )
            assert done.report.decode_tps is not None
            return done.report.decode_tps

    far, near = run(rate, 0.1, AUTO), run(rate, 0.0, AUTO)
    assert far > 0.90 * near
    assert far > 25 * run(rate, 0.1, OFF)


@pytest.mark.parametrize("delay", [0.0, 0.1])
def test_speculation_does_not_slow_novel_text(delay: float) -> None:
    async def seconds(speculation: Speculation) -> float:
        async with simulated(novel, delay=delay) as sim:
            began = trio.current_time()
            await collect(sim.coordinator.generate([1], max_tokens=200, speculation=speculation))
            return trio.current_time() - began

    assert run(seconds, OFF) > 0.98 * run(seconds, AUTO)


def test_many_sessions_with_random_cancellations_leave_nothing_behind() -> None:
    async def main(sessions: int) -> tuple[float, list[int]]:
        finished: list[int] = []

        async def one(sim: Simulated, number: int) -> None:
            dice = random.Random(number)
            await trio.sleep(dice.uniform(0, 5))
            prompt = [dice.randrange(900) for _ in range(dice.randrange(1, 200))]
            count = dice.randrange(1, 100)
            with trio.move_on_after(dice.uniform(0.1, 90)):
                async with sim.coordinator.generate(prompt, max_tokens=count) as generation:
                    tokens = await collect(generation)
                    assert tokens == serial(both, prompt, len(tokens))
                    finished.append(number)

        def both(tokens: list[int]) -> int:
            return mixed(tokens) if tokens[0] % 2 else novel(tokens)

        async with simulated(both, 3, lanes=16, jitter=0.01) as sim:
            async with trio.open_nursery() as nursery:
                for number in range(sessions):
                    nursery.start_soon(one, sim, number)
            await settle()
            sim.assert_nothing_is_left()
            return trio.current_time(), finished

    _, finished = run(main, 64, seed=1)
    assert len(finished) > 10
    assert run(main, 8, seed=2) == run(main, 8, seed=2)  # the same seed, the same run


@pytest.mark.slow
def test_32_stages_64_sessions() -> None:
    async def main() -> int:
        windows = 0

        async def one(sim: Simulated, number: int) -> None:
            nonlocal windows
            prompt = [number, 5, 6]
            async with sim.coordinator.generate(prompt, max_tokens=24) as generation:
                assert await collect(generation) == serial(mixed, prompt, 24)
            assert generation.report is not None
            windows += generation.report.windows

        async with simulated(mixed, 32, lanes=64) as sim:
            async with trio.open_nursery() as nursery:
                for number in range(64):
                    nursery.start_soon(one, sim, number)
            await settle()
            sim.assert_nothing_is_left()
        return windows

    assert run(main, seed=3) > 1000


def test_a_slow_reader_delays_nobody() -> None:
    async def main() -> None:
        async with simulated(periodic()) as sim:
            lazy = sim.coordinator.generate([1], max_tokens=300)
            began = trio.current_time()
            await collect(sim.coordinator.generate([2], max_tokens=300))
            assert trio.current_time() - began < 20
            assert sim.coordinator.active <= 1
            assert await collect(lazy) == serial(periodic(), [1], 300)

    run(main)


@pytest.mark.parametrize(("delay", "slower"), [(0.0, 2.0), (0.1, 1.7)])
def test_foretold_text_leaves_others_their_turns(delay: float, slower: float) -> None:
    """One session of four is all guessed right; the others wait for a window of it on either stage at most."""

    def target(tokens: Sequence[int]) -> int:
        return periodic()(tokens) if tokens[0] == 1 else novel(tokens)

    async def crowd(speculation: Speculation) -> tuple[float, list[float]]:
        """Tokens a second of all, and the gaps between the others' commits, ascending."""
        async with simulated(target, delay=delay) as sim, trio.open_nursery() as nursery:
            commits: list[list[tuple[float, int]]] = [[] for _ in range(4)]

            async def session(number: int) -> None:
                generation = sim.coordinator.generate(
                    [number, *range(7)] * 4, max_tokens=4000, speculation=speculation
                )
                async for piece in generation:
                    commits[number - 1].append((trio.current_time(), len(piece.tokens)))

            for number in (1, 2, 3, 4):
                nursery.start_soon(session, number)
            await trio.sleep(10)
            nursery.cancel_scope.cancel()
        settled = [[(at, count) for at, count in each if at > 2] for each in commits]
        gaps = [b - a for each in settled[1:] for (a, _), (b, _) in pairwise(each)]
        return sum(count for each in settled for _, count in each) / 8, sorted(gaps)

    (alone, usual), (together, gaps) = run(crowd, OFF), run(crowd, AUTO)
    assert together >= alone
    assert gaps[len(gaps) * 99 // 100] <= slower * usual[len(usual) * 99 // 100] + 1e-9


@pytest.mark.parametrize(("speakers", "bombs"), [(1, 1), (6, 3)])
@pytest.mark.parametrize("delay", [0.0, 0.02])
def test_long_prompts_stall_others_by_one_chunk_at_most(speakers: int, bombs: int, delay: float) -> None:
    """However many prompts there are, and whether or not the others' windows can share a decode."""

    async def gaps() -> tuple[float, float]:
        """The longest of what the speakers say, and how long a short prompt takes that comes after the long ones."""
        commits: list[list[float]] = [[] for _ in range(speakers)]

        async def speak(number: int) -> None:
            async for _ in sim.coordinator.generate([number], max_tokens=800, speculation=OFF):
                commits[number].append(trio.current_time())

        async with (
            simulated(novel, delay=delay, context=9000, lanes=2 * speakers + bombs + 1) as sim,
            trio.open_nursery() as nursery,
        ):
            for number in range(speakers):
                nursery.start_soon(speak, number)
                await trio.sleep(0.1)
                # Only what is in neighbouring lanes may share a decode.
                await sim.coordinator.lanes.lease((), reuse=False)
            await trio.sleep(1)
            began = trio.current_time()
            long = [sim.coordinator.generate([7] * 8000, max_tokens=1) for _ in range(bombs)]
            await trio.sleep(1)
            short = await sim.coordinator.complete([8] * 40, max_tokens=1)
            await trio.sleep(3)
            assert all(generation.report is None for generation in long)  # they are still at their prompts
            nursery.cancel_scope.cancel()
        longest = max(b - a for times in commits for a, b in pairwise(times) if b >= began)
        return longest, short.report.ttft

    chunk = 0.25  # seconds that a stage takes for 63 rows
    usual = 2 * (speakers * 0.009 + delay)  # between two tokens
    stalled, short = run(gaps)
    assert stalled <= usual + 2 * chunk + 0.01  # one on either stage
    assert short <= 2 * (bombs + 1) * (chunk + usual)  # a turn of each prompt


def test_prefill_windows_do_not_wait_for_replies() -> None:
    """A prompt of 20 chunks takes 20 services and one round trip, not 20 round trips."""

    async def main() -> float:
        async with simulated(novel, delay=0.1) as sim:
            async with sim.coordinator.generate(list(range(800)) * 2, max_tokens=1) as generation:
                await collect(generation)
            assert generation.report is not None
            return generation.report.ttft

    chunks = -(-1600 // 63)
    assert run(main) < chunks * 0.25 + 0.25 + 0.2 + 0.1


def test_cached_prefix_is_reused_and_reported() -> None:
    async def main() -> None:
        async with simulated(novel, lanes=2) as sim:
            prompt = list(range(300))
            first = await sim.coordinator.complete(prompt, max_tokens=20)
            assert first.report.cached_tokens == 0
            longer = [*prompt, *first.tokens, 5, 6]
            second = await sim.coordinator.complete(longer, max_tokens=20)
            assert second.report.cached_tokens == len(prompt) + 19
            assert list(second.tokens) == serial(novel, longer, 20)
            again = await sim.coordinator.complete(prompt, max_tokens=20)
            assert again.tokens == first.tokens
            assert again.report.cached_tokens == len(prompt) - 1
            fresh = await sim.coordinator.complete(prompt, max_tokens=20, reuse=False)
            assert fresh.report.cached_tokens == 0
            assert fresh.tokens == first.tokens
            await settle()
            sim.assert_nothing_is_left()

    run(main)


def test_stale_windows_are_dropped_unrun() -> None:
    """After a divergence the windows behind it cost the stages next to nothing: the last stage drops them."""

    async def main() -> tuple[int, int]:
        async with simulated(mixed, delay=0.1) as sim:
            await collect(
                sim.coordinator.generate([0], max_tokens=400, speculation=Speculation(depth=8, width=4))
            )
            await settle()
            last = sim.stages[-1].counters
            return last.rows_dropped, last.rows_run_in_vain

    dropped, in_vain = run(main)
    assert dropped > 20
    assert in_vain < dropped / 2


def test_stop_strings_and_end_tokens() -> None:
    async def main() -> None:
        async with simulated(periodic(7)) as sim:
            done = await sim.coordinator.complete([0], max_tokens=100, stop=["4 5"])
            assert (done.text, done.report.finish_reason) == ("1 2 3 ", "stop")
            done = await sim.coordinator.complete([0], max_tokens=3, stop=["4 5"])
            assert (done.text, done.report.finish_reason) == ("1 2 3 ", "length")
        end = FakeVocabulary.size - 1
        async with simulated(lambda tokens: end if len(tokens) == 9 else len(tokens)) as sim:
            done = await sim.coordinator.complete([0, 1, 2], max_tokens=100)
            assert (done.tokens[-1], done.report.finish_reason) == (end, "end")
            done = await sim.coordinator.complete([0, 1, 2], max_tokens=20, ignore_end=True)
            assert done.report.completion_tokens == 20
            await settle()
            sim.assert_nothing_is_left()

    run(main)


def test_cancelling_ends_the_stream_and_frees_the_lane() -> None:
    async def main() -> None:
        async with simulated(periodic(), lanes=1) as sim:
            generation = sim.coordinator.generate([1], max_tokens=4000)
            await generation.__anext__()
            waiting = sim.coordinator.generate([2], max_tokens=5)
            never = sim.coordinator.generate([3], max_tokens=5)
            never.cancel()
            del generation  # dropped without a word
            assert await collect(waiting) == serial(periodic(), [2], 5)
            assert await collect(never) == []
            await settle()
            sim.assert_nothing_is_left()

    run(main)


def test_misuse_is_refused_at_once() -> None:
    async def main() -> None:
        async with simulated(novel, context=100) as sim:
            generate = sim.coordinator.generate
            for arguments, error, message in [
                ({"prompt": []}, UsageError, "empty"),
                ({"prompt": ""}, UsageError, "empty"),
                ({"prompt": [1], "messages": []}, UsageError, "either a prompt or messages"),
                ({"prompt": [1000]}, UsageError, "token 1000"),
                ({"prompt": [1] * 100}, CapacityError, "100 tokens and the context 100"),
                ({"prompt": [1], "max_tokens": 0}, UsageError, "max_tokens"),
                ({"prompt": [1], "stop": [""]}, UsageError, "stop string"),
                ({"prompt": [1], "sampling": Sampling(temperature=-1)}, UsageError, "temperature"),
            ]:
                with pytest.raises(error, match=message):
                    generate(**arguments)
            sim.assert_nothing_is_left()

    run(main)
    for wrong in ({"mode": "fast"}, {"depth": 0}, {"width": "wide"}, {"max_width": 1000}):
        with pytest.raises(UsageError):
            Speculation(**wrong)


def test_a_stage_that_refuses_ends_one_session_only() -> None:
    async def main() -> None:
        async with simulated(novel, lanes=2) as sim:
            sim.coordinator.lanes._free.move_to_end(0)
            sim.coordinator.lanes._free[7] = sim.coordinator.lanes._free.pop(1)  # a lane that no stage has
            bad = sim.coordinator.generate([1], max_tokens=5)
            good = sim.coordinator.generate([2], max_tokens=5)
            results = []
            for generation in (bad, good):
                try:
                    results.append(await collect(generation))
                except MeshpipeError as error:
                    results.append(str(error))
            assert serial(novel, [2], 5) in results or serial(novel, [1], 5) in results
            assert any("lane 7 was asked for" in str(result) for result in results)

    run(main)


def test_reroute_dispatches_again() -> None:
    async def main() -> None:
        async with simulated(mixed) as sim:
            generation = sim.coordinator.generate([1] * 200, max_tokens=150)
            tokens: list[int] = []
            async for piece in generation:
                tokens += piece.tokens
                if len(tokens) % 7 == 0:
                    sim.coordinator.reroute()
            assert tokens == serial(mixed, [1] * 200, 150)
            assert generation.report is not None
            assert generation.report.reroutes > 3
            await settle()
            sim.assert_nothing_is_left()

    run(main)
