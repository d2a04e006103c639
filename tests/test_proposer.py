"""A proposer that runs ahead: on the autojump clock with a simulated one, as pure state, and with real draft models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import reference
import tiny
import trio
from determinism import run
from hypothesis import given, settings
from hypothesis import strategies as st
from ordeals import Ordeal, ordeals
from simulated import SimulatedDrafter, mixed, novel, serial, simulated

from bench.models.shallow import write_shallow
from meshpipe import Completion, Conditions, Pipeline, Sampling, Speculation
from meshpipe.errors import EngineError, ModelError, ProtocolError, UsageError
from meshpipe.llama.draft import Drafted
from meshpipe.messages import Follow
from meshpipe.speculation.run_ahead import DraftJob, RunAhead
from meshpipe.telemetry.spans import Kind

DRAFT = Speculation(mode="draft", draft="small.gguf")
BOTH = Speculation(mode="draft+ngram", draft="small.gguf")
OFF = Speculation(mode="off")
PROMPT = [1, 2, 3]


def complete(
    target: Any,
    drafter: SimulatedDrafter,
    speculation: Speculation = DRAFT,
    count: int = 200,
    **conditions: Any,
) -> Completion:
    """One request on a simulated pipeline, checked to be what serial decoding says and to leave nothing."""

    async def main() -> Completion:
        async with simulated(target, small=drafter, **conditions) as sim:
            done = await sim.coordinator.complete(PROMPT, max_tokens=count, speculation=speculation)
            await trio.sleep(5)
            sim.assert_nothing_is_left()
            assert not drafter.lanes or drafter.closed
        return done

    done = run(main)
    assert drafter.closed or speculation is OFF
    assert list(done.tokens) == serial(target, PROMPT, count)
    return done


# ---------------------------------------------------------------- simulated


@pytest.mark.parametrize(("seconds", "count"), [(0.002, 800), (0.02, 400)])
def test_a_right_draft_keeps_the_pipe_full_on_novel_text(seconds: float, count: int) -> None:
    """As fast as the draft, or as the slowest stage, whichever is slower, over links of 100 ms."""
    done = complete(novel, SimulatedDrafter(novel, seconds=seconds), count=count, delay=0.1)
    assert done.report.decode_tps is not None
    slowest_stage = 0.037 / 8
    draft = seconds * (1 + 1 / 16)
    assert done.report.decode_tps > 0.9 / max(draft, slowest_stage)
    source = done.report.sources["draft"]
    assert source.acceptance == 1
    assert source.made < count + 2 * 16
    assert 0 < source.seconds < count * 2 * seconds
    assert done.report.stale_tokens == 0


def test_a_trace_shows_when_a_draft_model_computed() -> None:
    async def main() -> None:
        drafter = SimulatedDrafter(novel, seconds=0.01)
        async with simulated(novel, small=drafter) as sim, sim.coordinator.tracing() as trace:
            await sim.coordinator.complete(PROMPT, max_tokens=50, speculation=DRAFT)
        computed = [span for span in trace.spans if span.kind == Kind.PROPOSE and span.detail]
        assert sum(span.value for span in computed) == drafter.drafted
        assert all(span.ended - span.began >= 0.01 for span in computed if span.value)
        assert len({span.session for span in computed}) == 1

    run(main)


def test_a_draft_begins_again_at_each_divergence() -> None:
    """Wrong at every tenth position, and right again after it: each error costs a round trip, and no more."""
    done = complete(novel, SimulatedDrafter(novel, lie=lambda position: position % 10 == 0), delay=0.1)
    assert done.report.divergences == 20
    assert done.report.sources["draft"].accepted == 200 - 20 - 2
    assert done.report.decode_tps is not None
    round_trip, drafting, queued = 0.218, 10 * 0.0053, 0.05
    assert done.report.decode_tps > 10 / (round_trip + drafting + queued)


def test_a_wrong_draft_does_not_slow_the_pipe() -> None:
    wrong = complete(novel, SimulatedDrafter(novel, lie=lambda position: True), delay=0.1).report
    off = complete(
        novel, SimulatedDrafter(novel), Speculation(draft="x", mode="draft", depth=1, width=1)
    ).report
    assert wrong.sources["draft"].accepted == 0
    assert wrong.sources["draft"].drafted < 100  # it soon shows that it is not worth sending
    assert wrong.decode_tps is not None
    assert off.decode_tps is not None
    assert wrong.decode_tps > 0.98 * off.decode_tps


def test_an_ngram_tail_relieves_a_slow_draft() -> None:
    draft = complete(mixed, SimulatedDrafter(mixed, seconds=0.02), delay=0.1)
    both = complete(mixed, SimulatedDrafter(mixed, seconds=0.02), BOTH, delay=0.1)
    assert draft.report.total > 1.2 * both.report.total
    assert both.report.sources["draft"].made < draft.report.sources["draft"].made


@settings(max_examples=8, deadline=None)
@given(
    ordeal=ordeals,
    mode=st.sampled_from(["draft", "draft+ngram"]),
    turn=st.integers(1, 5),
    context=st.sampled_from([20, 4096]),
)
def test_whatever_a_draft_says_and_when_the_output_is_serial(
    ordeal: Ordeal, mode: str, turn: int, context: int
) -> None:
    drafter = SimulatedDrafter(mixed, seconds=ordeal.seconds, lie=ordeal.lies, context=context, turn=turn)
    prompts = ([1, 2, 3], [1, 2, 3], [*range(50)], [1, 2, 4])
    ordeal.endure(drafter, "small", Speculation(mode=mode, draft="x"), prompts)
    assert drafter.closed


@pytest.mark.parametrize("again", ["x", "./x"])
def test_what_is_known_of_a_draft_does_not_hang_on_how_its_path_is_spelled(again: str) -> None:
    """One that is always wrong is given up by a second request, too, however it names it."""
    drafter = SimulatedDrafter(novel, lie=lambda position: True)

    async def main() -> list[bool]:
        async with simulated(novel, small=drafter, delay=0.1) as sim:
            done = [
                await sim.coordinator.complete(PROMPT, max_tokens=100, speculation=Speculation(draft=name))
                for name in ("x", again)
            ]
            return ["draft" in one.report.sources for one in done]

    assert run(main) == [True, False]


class Breaking(SimulatedDrafter):
    """Fails at its 20th job: as llama.cpp would, or in a way that nobody foresaw."""

    error: Exception = EngineError("no room in the cache")
    jobs = 0

    async def run(self, jobs: Sequence[DraftJob]) -> tuple[list[Drafted], float]:
        self.jobs += 1
        if self.jobs == 20:
            raise self.error
        return await super().run(jobs)


@pytest.mark.parametrize("error", [EngineError("no room in the cache"), ZeroDivisionError()])
def test_a_request_goes_on_without_a_draft_that_fails(error: Exception) -> None:
    drafter = Breaking(novel)
    drafter.error = error
    done = complete(novel, drafter, delay=0.01)  # which checks the output
    assert drafter.jobs >= 20
    assert done.report.sources["draft"].accepted < 40


def test_sessions_share_a_draft_and_a_prompt_does_not_stop_the_others() -> None:
    """A long prompt is caught up with between the tokens of another session."""
    drafter = SimulatedDrafter(novel)

    async def main() -> tuple[float, float]:
        async with simulated(novel, delay=0.1, small=drafter) as sim:

            async def timed(prompt: list[int]) -> float:
                done = await sim.coordinator.complete(prompt, max_tokens=100, speculation=DRAFT)
                assert list(done.tokens) == serial(novel, prompt, 100)
                assert done.report.decode_tps is not None
                return done.report.decode_tps

            alone = await timed(PROMPT)
            rates: list[float] = []

            async def beside() -> None:
                rates.append(await timed([7, 8, 9]))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(beside)
                await trio.sleep(0.3)
                nursery.start_soon(timed, list(range(900)))
            return alone, rates[0]

    alone, beside = run(main)
    assert beside > 0.3 * alone


# ---------------------------------------------------------------- pure state

tokens = st.lists(st.integers(0, 2), max_size=6)


@given(
    st.lists(
        st.tuples(tokens, st.integers(0, 6), st.booleans(), st.integers(0, 6), st.integers(1, 4), tokens),
        max_size=30,
    )
)
def test_the_cache_always_holds_the_lines_head(
    moves: list[tuple[list[int], int, bool, int, int, list[int]]],
) -> None:
    """A modelled engine: trims to a job's start, appends what it runs. Told lines come before and during jobs."""
    ahead, cache, line = RunAhead(1, 0, context=40), [], 0

    def tell(told: list[int], back: int, cut: bool, limit: int) -> None:
        nonlocal line
        line += cut
        start = max(0, len(ahead.tokens) - back)
        before = list(ahead.tokens)
        ahead.follow(Follow(1, 0, line, start, tuple(told), start + len(told) + limit))
        assert ahead.tokens[: start + len(told)] == before[:start] + told
        rest = ahead.tokens[start + len(told) :]
        assert not rest or (not cut and before == ahead.tokens)
        assert cache[: ahead.cached] == ahead.tokens[: ahead.cached]

    for told, back, cut, limit, rows, drafted in moves:
        tell(told, back, cut, limit)
        job = ahead.job(rows)
        if job is None:
            continue
        assert 0 < len(job.tokens) <= rows
        assert list(job.tokens) == ahead.tokens[job.start : job.stop]
        assert job.start <= len(cache)
        assert cache[: job.start] == ahead.tokens[: job.start]
        assert bool(job.most) == (job.stop == len(ahead.tokens))
        drafted = drafted[: job.most]
        cache[job.start :] = [*job.tokens, *drafted[:-1]]
        if back % 2:
            tell(drafted[:2], back // 2, cut=not cut, limit=limit)
        before = list(ahead.tokens)
        fresh = ahead.ran(job, drafted)
        assert ahead.tokens == before + drafted[len(drafted) - fresh :]
        assert cache[: ahead.cached] == ahead.tokens[: ahead.cached]
        if fresh:
            assert len(ahead.tokens) <= 40
            assert ahead.tokens[: job.stop] == before[: job.stop]


def test_a_line_with_a_gap_is_refused() -> None:
    ahead = RunAhead(1, 0, context=40)
    with pytest.raises(
        ProtocolError, match="tells its line from position 3 on; the proposer knows it up to 0"
    ):
        ahead.follow(Follow(1, 0, 0, 3, (1,), 9))


# ---------------------------------------------------------------- real models


async def test_a_draft_with_another_vocabulary_is_refused_and_the_pipeline_lives(
    smollm2: Path, tmp_path: Path
) -> None:
    model = write_shallow(smollm2, [0], tmp_path / "model.gguf")
    strange = tiny.write(tmp_path / "strange.gguf", "llama")
    async with Pipeline.local(model, context=256) as pipe:
        with pytest.raises(ModelError, match=r"has no vocabulary|differs first at token"):
            await pipe.complete("Hi", max_tokens=2, speculation=Speculation(mode="draft", draft=strange))
        other = tmp_path / "other.gguf"
        other.write_bytes(model.read_bytes().replace(b"\xc4\xa0Once", b"\xc4\xa0Onze", 1))
        with pytest.raises(
            ModelError, match=r"differs first at token \d+, which is 'ĠOnze' there and 'ĠOnce'"
        ):
            await pipe.complete("Hi", max_tokens=2, speculation=Speculation(mode="draft", draft=other))
        with pytest.raises(ModelError, match="no-such-file"):
            await pipe.complete("Hi", max_tokens=2, speculation=Speculation(draft="no-such-file.gguf"))
        assert (await pipe.complete("Hi", max_tokens=2)).report.completion_tokens == 2


@pytest.fixture(scope="session")
def shallow(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft model that is right about half of the time."""
    return write_shallow(
        smollm2, [*range(14), *range(20, 30)], tmp_path_factory.mktemp("draft") / "shallow.gguf"
    )


PROMPTS = (
    "Once upon a time there was",
    "The capital of France is Paris. The capital of France is Paris. The",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "split", "temperature"),
    [("draft", "0,15,30", 0.0), ("draft", "0,15,30", 0.9), ("draft+ngram", 3, 0.9)],
)
async def test_output_is_the_unsplit_models(
    smollm2: Path, shallow: Path, mode: str, split: Any, temperature: float
) -> None:
    """Two prompts at a time, and a draft that is always right or often not."""
    judged = 0
    async with Pipeline.local(
        smollm2, split, lanes=2, context=512, conditions=Conditions(delay=0.03)
    ) as pipe:

        async def one(prompt: str, speculation: Speculation) -> Completion:
            sampling = Sampling(temperature=temperature, seed=3)
            return await pipe.complete(
                prompt, max_tokens=20, sampling=sampling, speculation=speculation, ignore_end=True
            )

        serially = {prompt: await one(prompt, OFF) for prompt in PROMPTS}
        if temperature == 0:
            for done in serially.values():
                assert list(done.tokens) == reference.greedy(smollm2, done.prompt_tokens, 20)

        async def compare(prompt: str, draft: Path) -> None:
            done = await one(prompt, Speculation(mode=mode, draft=draft))
            assert done.tokens == serially[prompt].tokens
            source = done.report.sources.get("draft")
            if source is not None and draft == smollm2 and source.judged:
                nonlocal judged
                judged += source.judged
                assert source.acceptance == 1  # at any temperature: it draws with the same random stream

        for draft in (smollm2, shallow):
            async with trio.open_nursery() as nursery:
                for prompt in PROMPTS:
                    nursery.start_soon(compare, prompt, draft)
    assert judged > 5


def test_settings_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(UsageError, match="needs a draft model"):
        Speculation(mode="draft+ngram")
    with pytest.raises(UsageError, match="has no use for x"):
        Speculation(mode="ngram", draft="x")
    with pytest.raises(UsageError, match="draft_threads is 0"):
        Speculation(mode="draft", draft="x", draft_threads=0)
    assert Speculation(draft="x").uses_draft
