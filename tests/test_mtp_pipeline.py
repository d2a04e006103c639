"""Native MTP in whole pipelines: the output stays what it is, and drafts are asked for as long as they pay."""

from __future__ import annotations

import functools
import importlib
import itertools
from contextlib import closing
from pathlib import Path

import pytest
import reference
import trio
from determinism import run
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import COST, Simulated, guesser, mixed, novel, periodic, serial, simulated

from meshpipe import Pipeline, Speculation
from meshpipe.errors import UsageError
from meshpipe.llama.vocabulary import Vocabulary
from meshpipe.pipeline import runner as runner_module
from meshpipe.pipeline.coordinator import Completion
from meshpipe.speculation.drafting import RESTS, TRIAL, Drafting
from meshpipe.speculation.policy import CostCurve, Pipe
from meshpipe.telemetry.spans import Kind

MODES = ("mtp", "mtp+ngram", "auto")


@settings(max_examples=30, deadline=None)
@given(
    stages=st.integers(1, 4),
    mode=st.sampled_from(MODES),
    depth=st.one_of(st.just("auto"), st.integers(1, 8)),
    width=st.one_of(st.just("auto"), st.integers(1, 9)),
    delay=st.sampled_from([None, 0.0, 0.1]),
    target=st.sampled_from([periodic(), novel, mixed]),
    right=st.sampled_from([0.0, 0.4, 0.9, 1.0]),
    mtp_max=st.integers(1, 6),
    count=st.integers(1, 100),
    requests=st.integers(1, 4),
    seed=st.integers(0, 2**16),
)
def test_output_is_serial_output(  # type: ignore[no-untyped-def]
    stages, mode, depth, width, delay, target, right, mtp_max, count, requests, seed
) -> None:
    prompts = [[seed % 900, n] * (3 + 30 * n) for n in range(requests)]
    answers: dict[int, tuple[int, ...]] = {}

    async def main() -> None:
        drafter = guesser(target, right)
        speculation = Speculation(mode=mode, depth=depth, width=width, mtp_max=mtp_max)
        async with simulated(target, stages, delay=delay, drafter=drafter, lanes=3) as sim:

            async def ask(n: int) -> None:
                done = await sim.coordinator.complete(prompts[n], max_tokens=count, speculation=speculation)
                answers[n] = done.tokens

            async with trio.open_nursery() as nursery:
                for n in range(requests):
                    nursery.start_soon(ask, n)
            await trio.sleep(5)
            sim.assert_nothing_is_left()

    run(main, seed=seed)
    for n in range(requests):
        assert list(answers[n]) == serial(target, prompts[n], count)


async def complete(sim: Simulated, mode: str, **options: object) -> Completion:
    speculation = Speculation(mode=mode, **options)  # type: ignore[arg-type]
    return await sim.coordinator.complete([1, 2, 3], max_tokens=300, speculation=speculation)


@functools.cache
def rate(mode: str, delay: float | None, right: float, draft_cost: float = 0.004) -> float:
    async def main() -> float:
        drafter = guesser(novel, right)
        async with simulated(novel, delay=delay, drafter=drafter, draft_cost=draft_cost) as sim:
            found = (await complete(sim, mode)).report.decode_tps
            assert found is not None
            return found

    return run(main)


def test_drafts_make_novel_text_faster_over_distance() -> None:
    off = rate("off", 0.1, 0.6)
    assert rate("mtp", 0.1, 0.6) > 1.9 * off  # 1 + 0.6 + 0.36 + … tokens a round trip
    assert rate("auto", 0.1, 0.6) > 1.9 * off
    assert rate("mtp", 0.1, 0.0) > 0.93 * off


def test_auto_asks_for_no_drafts_that_do_not_pay() -> None:
    """Without links a round trip is short: what drafts cost is more than what they bring, unless all are right."""
    off = rate("off", None, 0.3)
    assert rate("auto", None, 0.3) > 0.98 * off
    assert rate("auto", None, 0.3, draft_cost=0.02) == off
    assert rate("auto", None, 1.0, draft_cost=0.001) > 1.1 * off


def test_a_trace_shows_when_the_last_stage_drafted() -> None:
    async def main() -> None:
        drafter = guesser(novel, 0.5)
        async with simulated(novel, drafter=drafter) as sim, sim.coordinator.tracing() as trace:
            await complete(sim, "mtp", mtp_max=3)
        drafts = trace.of(Kind.DRAFT)
        assert {span.stage for span in drafts} == {1}
        assert {span.detail for span in drafts} <= {1, 2, 3}
        computed = {span.window: span.ended for span in trace.of(Kind.COMPUTE) if span.stage == 1}
        for span in drafts:
            assert span.began >= computed[span.window] - 1e-6, "behind the decode, and other windows' drafts"
            assert span.ended - span.began == pytest.approx(0.004 * span.value)

    run(main)


def test_a_model_without_nextn_layers_has_no_such_mode() -> None:
    async def main() -> None:
        async with simulated(novel) as sim:
            for mode in ("mtp", "mtp+ngram"):
                with pytest.raises(UsageError, match="needs NextN layers at the last stage"):
                    sim.coordinator.generate([1], speculation=Speculation(mode=mode))
            assert len((await complete(sim, "auto")).tokens) == 300

    run(main)


# ---- how many drafts ----------------------------------------------------------------------------------


def drafting(link: float, cost: float = 0.004, most: int = 4, *, always: bool = False) -> Drafting:
    return Drafting(Pipe((CostCurve(COST),) * 2, link), cost, most, always)


def feed(drafting: Drafting, start: int, right: int) -> int:
    """One round trip: `wanted` drafts of which `right` are; the next position."""
    count = drafting.wanted()
    if count:
        drafting.drafted(start, range(1, count + 1), count * 0.004)
    tokens = [*range(1, min(right, count) + 1), 0]
    drafting.committed(start, tokens)
    return start + len(tokens)


def test_more_drafts_are_asked_for_the_longer_the_pipe_and_the_better_they_are() -> None:
    assert [drafting(link).paying() for link in (0.0, 0.05, 0.4)] == sorted(
        drafting(link).paying() for link in (0.0, 0.05, 0.4)
    )
    good, bad = drafting(0.2), drafting(0.2)
    at = [0, 0]
    for _ in range(40):
        at = [feed(good, at[0], 4), feed(bad, at[1], 0)]
    assert good.wanted() == 4
    assert bad.wanted() <= 1
    assert drafting(0.2).paying(sessions=1) > drafting(0.2).paying(sessions=50) == 0, "a full pipe"


def test_after_a_rest_drafts_are_tried_again_and_less_often_each_time() -> None:
    near = drafting(0.0)
    asked = []
    for position in range(1500):
        asked.append(near.wanted() > 0)
        if asked[-1]:
            near.drafted(position, [1], 0.004)
        near.committed(position, [0])
    trials = [n for n in range(1, len(asked)) if asked[n] and not asked[n - 1]]
    assert sum(asked) == TRIAL * len(trials)
    assert trials[0] >= RESTS[0]
    gaps = [later - earlier for earlier, later in itertools.pairwise(trials)]
    assert gaps == sorted(gaps)
    assert gaps[0] >= RESTS[0]


def test_drafts_that_have_become_good_are_asked_for_after_a_trial() -> None:
    near = drafting(0.02)
    position = 0
    while near.wanted():
        position = feed(near, position, 0)
    for _ in range(2000):
        position = feed(near, position, 4)
    assert near.wanted() > 1


def test_a_mode_that_names_mtp_always_asks() -> None:
    near = drafting(0.0, always=True)
    position = 0
    for _ in range(50):
        assert near.wanted() >= 1
        position = feed(near, position, 0)
    assert drafting(0.0, most=0, always=True).wanted() == 0


# ---- a real model -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mtp_model(cache: Path) -> Path:
    """SmolLM2 with a NextN block, trained or not."""
    assemble = importlib.import_module("bench.models.smollm2_mtp.assemble")
    return Path(assemble.assemble(cache / "mtp.gguf"))


@pytest.fixture
def sends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Improbable drafts travel too, so that there are many to reject."""
    monkeypatch.setattr(runner_module, "LEAST_DRAFT", 0.0)


COUNT = 24
PROMPTS = (
    "The history of the railway in Britain begins with",
    "Repeat after me: one two three four one two three four one two",
)


@pytest.fixture(scope="module")
def unsplit(mtp_model: Path) -> list[list[int]]:
    """What the unsplit model says to `PROMPTS`, one token at a time."""
    with closing(Vocabulary(mtp_model)) as vocabulary:
        return [
            reference.greedy(mtp_model, vocabulary.tokenize(prompt), COUNT, context=256) for prompt in PROMPTS
        ]


@pytest.mark.slow
@pytest.mark.usefixtures("sends_all")
@pytest.mark.parametrize("split", ["1", "0,15,30", "0,9,20,30"])
async def test_a_real_model_says_what_the_unsplit_one_says(
    split: str, mtp_model: Path, unsplit: list[list[int]]
) -> None:
    async with Pipeline.local(mtp_model, split, lanes=2, context=256) as pipeline:
        assert pipeline.descriptors[-1].mtp == 1
        sources: set[str] = set()

        async def ask(which: int, speculation: Speculation) -> None:
            done = await pipeline.complete(
                PROMPTS[which], max_tokens=COUNT, speculation=speculation, ignore_end=True
            )
            assert list(done.tokens) == unsplit[which], speculation
            sources.update(name for name, found in done.report.sources.items() if found.judged)

        for speculation in (
            Speculation(mode="mtp"),
            Speculation(mode="mtp+ngram", depth=4, width=3),
            Speculation(mode="mtp", depth=1, width=4, mtp_max=6),
            Speculation(),
        ):
            async with trio.open_nursery() as nursery:  # two at once, on lanes with another past
                nursery.start_soon(ask, 0, speculation)
                nursery.start_soon(ask, 1, speculation)
        assert sources == {"mtp", "ngram"}
