"""Native MTP at the coordinator: it runs ahead on hidden rows that the replies bring, and changes no output."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import reference
import tiny
import trio
from determinism import run
from hypothesis import given, settings
from hypothesis import strategies as st
from ordeals import Ordeal, ordeals
from simulated import (
    COST,
    FakeVocabulary,
    SimulatedNextn,
    guesser,
    mixed,
    novel,
    periodic,
    serial,
    simulated,
)

from bench.models.smollm2_mtp import assemble
from meshpipe import Conditions, Coordinator, Pipeline, Sampling, Speculation
from meshpipe.actors.scope import owned_nursery
from meshpipe.errors import ModelError, UsageError
from meshpipe.llama.engine import StageEngine
from meshpipe.llama.nextn import NextnModel, has_nextn
from meshpipe.llama.slicing import slice_model, slice_nextn
from meshpipe.messages import CloseSession, Follow, OpenSession
from meshpipe.pipeline import runner as runner_module
from meshpipe.pipeline.following import CLOSE_DEADLINE, Following
from meshpipe.pipeline.local import join_stages
from meshpipe.pipeline.proposer import proposer_mailbox
from meshpipe.pipeline.runner import LlamaRunner
from meshpipe.pipeline.sink import ReturnSink
from meshpipe.pipeline.way import Way
from meshpipe.speculation.composite import Composite
from meshpipe.speculation.ledger import Ledger, Limits
from meshpipe.speculation.policy import CostCurve, Pace, Pipe

FAR = Speculation(mode="mtp", mtp_at="coordinator")
OFF = Speculation(mode="off")

COUNT = 16
PROMPTS = ([*range(1, 12)], [7, 7, 3, 7, 7, 3, 7, 7])


def write(directory: Path, nextn: int = 1) -> Path:
    """A tiny model with NextN layers, quantized, so that how rows are grouped into decodes changes no bits."""
    keys = tiny.metadata("mimo2", nextn=nextn)
    return tiny.write(directory / "m.gguf", "mimo2", keys, quantization=gguf.GGMLQuantizationType.Q8_0)


# ---------------------------------------------------------------- simulated


@settings(max_examples=8, deadline=None)
@given(ordeal=ordeals, mode=st.sampled_from(["mtp", "mtp+ngram", "auto"]), tail=st.sampled_from([1, 7, 1000]))
def test_whatever_it_drafts_and_when_the_output_is_serial(ordeal: Ordeal, mode: str, tail: int) -> None:
    """Several sessions at once, prefixes that are reused, requests that are given up, replies that are lost."""
    nextn = SimulatedNextn(mixed, seconds=ordeal.seconds, lie=ordeal.lies)
    speculation = Speculation(mode=mode, mtp_at="coordinator", mtp_tail=tail)
    prompts = ([1, 2, 3], [1, 2, 3], [*range(90)], [1, 2, 4], [*range(90), 5])
    ordeal.endure(nextn, "nextn", speculation, prompts)


@cache
def rate(speculation: Speculation, right: float = 1.0, delay: float | None = 0.1) -> float:
    """Tokens a second of novel text, where a draft is right with that probability at either place."""
    draft = guesser(novel, right)

    def told(tokens: Any) -> int:
        return draft(tokens, 1)[0][0]

    async def main() -> float:
        async with simulated(novel, delay=delay, drafter=draft, nextn=SimulatedNextn(told)) as sim:
            done = await sim.coordinator.complete([1, 2, 3], max_tokens=200, speculation=speculation)
            assert list(done.tokens) == serial(novel, [1, 2, 3], 200)
            assert done.report.decode_tps is not None
            return done.report.decode_tps

    return run(main)


def test_it_is_not_tied_to_the_round_trip() -> None:
    """What is always right keeps the pipe full; drafts that come with replies cannot."""
    last = rate(Speculation(mode="mtp", mtp_at="last"))
    assert rate(FAR) > 6 * last
    assert rate(Speculation(mode="mtp")) == rate(FAR), "where both are possible"


def test_drafts_that_are_right_now_and_then_are_at_least_as_good_there() -> None:
    assert rate(FAR, 0.5) > rate(Speculation(mode="mtp", mtp_at="last"), 0.5) > 1.5 * rate(OFF)


def test_auto_leaves_it_where_it_does_not_pay() -> None:
    off, auto = rate(OFF, 0.3, None), rate(Speculation(), 0.3, None)
    assert auto > 0.97 * off
    assert rate(Speculation(), 0.5) > 1.5 * rate(OFF)


def test_it_is_sent_the_rows_of_the_tail_and_of_what_is_confirmed() -> None:
    nextn = SimulatedNextn(novel)

    async def main() -> None:
        async with simulated(novel, nextn=nextn) as sim:
            speculation = Speculation(mode="mtp", mtp_tail=100)
            await sim.coordinator.complete([*range(300)], max_tokens=50, speculation=speculation)
            kept = nextn.rows_kept
            assert 100 + 25 < kept < 100 + 50, "those of the last windows are of no more use"
            await sim.coordinator.complete([*range(300)], max_tokens=50, speculation=OFF)
            assert nextn.rows_kept == kept

    run(main)


def test_where_ngrams_carry_the_text_it_computes_nothing() -> None:
    def drafted(mode: str) -> int:
        nextn = SimulatedNextn(periodic(9))

        async def main() -> None:
            async with simulated(periodic(9), delay=0.1, nextn=nextn) as sim:
                done = await sim.coordinator.complete(
                    [at % 9 for at in range(40)], max_tokens=300, speculation=Speculation(mode=mode)
                )
                assert done.report.divergences == 0

        run(main)
        return nextn.drafted

    assert drafted("mtp+ngram") == 0 < drafted("mtp")


def test_rows_for_a_proposer_that_is_gone_are_not_kept() -> None:
    mailbox = proposer_mailbox()
    ledger = Ledger(1, [1, 2, 3], Limits(max_tokens=9, context=64))
    pace = Pace(Pipe((CostCurve(COST),), 0.0))
    following = Following(
        mailbox.ref, ledger, Composite(ledger, None), pace, OpenSession(ledger.session, 0), hidden_from=0
    )
    following.revealed(0, np.zeros((2, 4), np.float32))
    following.tell()
    assert mailbox.waiting("told")
    mailbox.close("it has failed")
    for position in range(2, 50):
        following.revealed(position, np.zeros((1, 4), np.float32))
        following.tell()
    assert len(following._rows) <= 1


def test_a_proposer_without_room_is_told_when_it_has_some() -> None:
    """That a session begins, and goes on; and that it has ended, or it would keep its lane."""

    async def main() -> None:
        mailbox = proposer_mailbox()
        while mailbox.ref.try_send(CloseSession(7)):
            pass
        ledger = Ledger(1, [1, 2, 3], Limits(max_tokens=9, context=64))
        pace = Pace(Pipe((CostCurve(COST),), 0.0))
        following = Following(mailbox.ref, ledger, Composite(ledger, None), pace, OpenSession(1, 0))
        following.tell()
        assert set(mailbox.take("told")) == {CloseSession(7)}
        following.tell()
        assert [type(message) for message in mailbox.take("told")] == [OpenSession, Follow]
        while mailbox.ref.try_send(CloseSession(7)):
            pass
        async with trio.open_nursery() as nursery:
            nursery.start_soon(following.close)
            await trio.sleep(CLOSE_DEADLINE / 2)
            mailbox.take("told", limit=1)
        assert mailbox.take("told")[-1] == CloseSession(1)
        while mailbox.ref.try_send(CloseSession(7)):
            pass
        with trio.fail_after(CLOSE_DEADLINE + 1):
            await following.close()  # it hangs: nobody waits for it

    run(main)


def test_auto_goes_on_without_a_block_that_cannot_be_loaded() -> None:
    """As that of the file which has the vocabulary and is another quantization than the stages run."""

    def load() -> Any:
        raise ModelError("it is of another model")

    async def main() -> None:
        async with simulated(mixed, drafter=guesser(mixed, 1.0)) as sim:
            sim.coordinator.nextn = load
            with pytest.raises(ModelError, match="of another model"):
                await sim.coordinator.complete([1, 2, 3], max_tokens=20, speculation=FAR)

            async def one() -> None:
                done = await sim.coordinator.complete([1, 2, 3], max_tokens=20)
                assert list(done.tokens) == serial(mixed, [1, 2, 3], 20)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(one)
                nursery.start_soon(one)
            await one()  # the last stage drafts for this one
            await trio.sleep(5)
            sim.assert_nothing_is_left()

    run(main)


def test_the_place_that_was_asked_for_or_a_reason() -> None:
    async def main() -> None:
        async with simulated(novel, drafter=guesser(novel, 0.5)) as sim:
            with pytest.raises(UsageError, match="at the coordinator needs a file there"):
                sim.coordinator.generate([1], speculation=FAR)
            done = await sim.coordinator.complete([1, 2], max_tokens=20, speculation=Speculation(mode="mtp"))
            assert done.report.sources["mtp"].made == 0
        async with simulated(novel, nextn=SimulatedNextn(novel)) as sim:
            with pytest.raises(UsageError, match="needs NextN layers at the last stage"):
                sim.coordinator.generate([1], speculation=Speculation(mode="mtp", mtp_at="last"))

    run(main)
    with pytest.raises(UsageError, match="mtp_at is 'first'"):
        Speculation(mtp_at="first")


# ---------------------------------------------------------------- real engines


def test_a_block_of_another_model_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path)
    assert has_nextn(path)
    assert has_nextn(slice_nextn(path))
    assert not has_nextn(slice_model(path, 0, 3, mtp=True))
    with pytest.raises(ModelError, match="of another model than the stages run"):
        NextnModel(path, "0" * 64, lanes=1, context=100)
    assert not has_nextn(tiny.write(tmp_path / "plain.gguf", "llama"))


class Numbers(FakeVocabulary):
    """That of tiny models, which have no tokenizer."""

    size = tiny.VOCABULARY
    end_tokens: frozenset[int] = frozenset()


@asynccontextmanager
async def of_tiny_stages(path: Path, boundaries: tuple[int, ...]) -> AsyncIterator[Coordinator]:
    """Stages of a model without a tokenizer, none of them with its block, which the coordinator has."""
    with ExitStack() as opened:
        slices = [slice_model(path, start, stop) for start, stop in pairwise(boundaries)]
        engines = [opened.enter_context(StageEngine(part, lanes=2, context=256)) for part in slices]
        runners = [LlamaRunner(engine) for engine in engines]
        async with owned_nursery() as nursery:
            sink = ReturnSink()
            first, _ = join_stages(nursery, runners, sink)
            described = [runner.descriptor for runner in runners]
            pipe = Coordinator(nursery, first, sink, described, Numbers(), link=0.0)  # type: ignore[arg-type]
            pipe.hold_nextn(path)
            yield pipe
        for runner in runners:
            runner.close_all()


@pytest.mark.parametrize(("arch", "heads"), [("mimo2", 1), ("hy_v3", 2)])
async def test_split_pipelines_say_what_the_unsplit_model_says(arch: str, heads: int, tmp_path: Path) -> None:
    """Greedy and sampled, two sessions at once, prefixes that are reused; the last stage has no block."""
    keys = tiny.metadata(arch, nextn=heads)
    path = tiny.write(tmp_path / "m.gguf", arch, keys, quantization=gguf.GGMLQuantizationType.Q8_0)
    async with of_tiny_stages(path, (0, 2, 4, 6)) as pipe:
        drafted: set[str] = set()

        async def ask(prompt: list[int], speculation: Speculation, temperature: float) -> tuple[int, ...]:
            done = await pipe.complete(
                prompt,
                max_tokens=COUNT,
                sampling=Sampling(temperature=temperature, seed=3),
                speculation=speculation,
                ignore_end=True,
            )
            drafted.update(name for name, source in done.report.sources.items() if source.made)
            return done.tokens

        for temperature in (0.0, 0.9):
            serially = [await ask(prompt, OFF, temperature) for prompt in PROMPTS]
            if not temperature:
                for prompt, tokens in zip(PROMPTS, serially, strict=True):
                    assert list(tokens) == reference.greedy(path, prompt, COUNT, context=256)

            async def compare(which: int, temperature: float, expected: tuple[int, ...]) -> None:
                assert await ask(PROMPTS[which], FAR, temperature) == expected

            async with trio.open_nursery() as nursery:
                for which, expected in enumerate(serially):
                    nursery.start_soon(compare, which, temperature, expected)
            longer = [*PROMPTS[0], *serially[0][:5]]
            assert await ask(longer, FAR, temperature) == await ask(longer, OFF, temperature)
        assert drafted == {"mtp"}


async def test_a_last_stage_that_takes_over_is_primed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other engines, with empty caches, in the middle of an answer: the pairs of all positions are fed to them."""
    monkeypatch.setattr(runner_module, "LEAST_DRAFT", 0.0)
    path = write(tmp_path)
    with ExitStack() as opened:
        slices = [slice_model(path, start, stop, mtp=True) for start, stop in ((0, 3), (3, 6))]
        sets = [
            [opened.enter_context(StageEngine(part, context=256, mtp=True)) for part in slices]
            for _ in range(2)
        ]
        runners = [[LlamaRunner(engine) for engine in engines] for engines in sets]
        async with owned_nursery() as nursery:
            sink, way = ReturnSink(), Way()
            ways = [join_stages(nursery, chain, sink)[0] for chain in runners]
            way.formed(ways[0])
            described = [runner.descriptor for runner in runners[0]]
            pipe = Coordinator(nursery, way, sink, described, Numbers(), link=0.0)  # type: ignore[arg-type]
            tokens: list[int] = []
            fed = [engines[-1].mtp for engines in sets]
            speculation = Speculation(mode="mtp")
            async with pipe.generate(PROMPTS[0], max_tokens=80, speculation=speculation) as generation:
                async for piece in generation:
                    tokens += piece.tokens
                    if len(tokens) >= 20 and way.generation == 1:
                        way.broke("for a test")
                        way.formed(ways[1])
            assert tokens == reference.greedy(path, PROMPTS[0], 80, context=256)
            assert generation.report is not None
            assert generation.report.resumes == 1
            assert fed[0] is not None
            assert fed[1] is not None
            assert fed[0].length(0) < 80 < fed[1].length(0)
            assert fed[1]._lanes[0].base == 1, "from the first position on, without a gap"
        for runner in runners[0] + runners[1]:
            runner.close_all()


@pytest.mark.slow
async def test_a_real_block_drafts_there_as_at_the_last_stage(smollm2: Path) -> None:
    """As many of its drafts are right, but for the rows of the prompt that it is not sent."""
    path = assemble()
    prompt = "The history of the railway in Britain begins with"
    async with Pipeline.local(path, "0,15,30", context=256, conditions=Conditions(delay=0.03)) as pipe:
        accepted = {}
        unsplit = None
        for place in ("last", "coordinator"):
            speculation = Speculation(mode="mtp", mtp_at=place)
            done = await pipe.complete(prompt, max_tokens=32, speculation=speculation, ignore_end=True)
            unsplit = unsplit or reference.greedy(path, done.prompt_tokens, 32, context=256)
            assert list(done.tokens) == unsplit
            accepted[place] = done.report.sources["mtp"].accepted
        assert accepted["last"] > 4
        assert accepted["coordinator"] >= 0.7 * accepted["last"]
