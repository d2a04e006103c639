"""The engine on the real model: bit for bit what the unsplit model says, whatever the split and the grouping."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference import greedy, unsplit_logits

from meshpipe.errors import CapacityError, EngineError, MeshpipeError, UsageError
from meshpipe.llama import tap
from meshpipe.llama.decodes import EXACT_ROWS, Span
from meshpipe.llama.engine import StageEngine
from meshpipe.llama.options import EngineOptions
from meshpipe.llama.sampling import Sampler
from meshpipe.llama.slicing import slice_model
from meshpipe.llama.vocabulary import Vocabulary
from meshpipe.messages import Rows, Sampling

LENGTH = 640  # past 512, where ggml's CPU attention changes its ways


class Chain:
    """The stages of a split, called one after the other."""

    def __init__(self, model: Path, cuts: Sequence[int], **engine: object) -> None:
        bounds = [0, *cuts, 30]
        self.stages = [
            StageEngine(slice_model(model, a, b), **{"context": 1024, **engine}) for a, b in pairwise(bounds)
        ]

    def run(self, spans: Sequence[tuple[int, int, Sequence[int]]], wanted: int | None = None) -> list[Rows]:
        """Logits of (lane, start, tokens) spans, all in one job a stage; of the last `wanted` rows if given."""
        outputs: list[Rows] | None = None
        for stage in self.stages:
            jobs = [
                Span(lane, start, () if outputs else tokens, outputs[i] if outputs else None,
                     wanted=len(tokens) if wanted is None else wanted)
                for i, (lane, start, tokens) in enumerate(spans)
            ]  # fmt: skip
            outputs = stage.run(jobs)
        assert outputs is not None
        return outputs

    def close(self) -> None:
        for stage in self.stages:
            stage.close()

    def __enter__(self) -> Chain:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@pytest.fixture(scope="module")
def text() -> list[int]:
    """LENGTH tokens, none of them special."""
    return [int(t) for t in np.random.default_rng(7).integers(100, 49000, LENGTH)]


@pytest.fixture(scope="module")
def reference(smollm2: Path, text: list[int]) -> Rows:
    """The unsplit model's logits at every position of `text`; the last 64 decoded one row at a time."""
    return unsplit_logits(smollm2, text, [*[EXACT_ROWS] * 9, 9, 1])


@pytest.fixture(scope="module")
def halves(smollm2: Path) -> Iterator[Chain]:
    with Chain(smollm2, [15], lanes=8) as chain:
        yield chain


def pieces(total: int, widths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Cuts `total` rows into runs of these widths, over and over."""
    start, turn = 0, 0
    while start < total:
        stop = min(total, start + widths[turn % len(widths)])
        yield start, stop
        start, turn = stop, turn + 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cuts", "threads"),
    [([15], 1), ([15], 2), ([1], 1), ([29], 2), ([10, 20], 1), ([10, 20], 2), ([5, 10, 15, 20, 25], 1)],
)
def test_split_equals_unsplit(
    smollm2: Path, text: list[int], reference: Rows, cuts: list[int], threads: int
) -> None:
    with Chain(smollm2, cuts, threads=threads) as chain:
        for start, stop in pieces(LENGTH, [EXACT_ROWS, 1, 200, 2, 1, 1, 17, 40]):
            (logits,) = chain.run([(0, start, text[start:stop])])
            assert np.array_equal(logits, reference[start:stop]), (start, stop)


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
def test_every_width(smollm2: Path, text: list[int], reference: Rows, threads: int) -> None:
    """Widths 1 to 63 and longer prefills, at positions below and above 512; of the widths a ninth with two threads."""
    with Chain(smollm2, [15], lanes=2, threads=threads) as chain:
        chain.run([(0, 0, text[:3])])
        chain.run([(1, 0, text[:520])])
        for width in sorted({*range(1, EXACT_ROWS + 1, 8 * threads - 7), EXACT_ROWS, 64, 150}):
            for lane, start in ((0, 3), (1, 520)):
                if width % 2 == lane or width in (1, 2, EXACT_ROWS, 150):
                    stop = start + width
                    (logits,) = chain.run([(lane, start, text[start:stop])])
                    assert np.array_equal(logits, reference[start:stop]), (start, width)


@pytest.mark.slow
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    cuts=st.sets(st.integers(1, 29), min_size=1, max_size=3).map(sorted),
    widths=st.lists(st.integers(1, 90), min_size=1, max_size=4),
)
def test_any_cuts(
    smollm2: Path, text: list[int], reference: Rows, cuts: list[int], widths: list[int]
) -> None:
    with Chain(smollm2, cuts) as chain:
        for start, stop in pieces(min(150, 2 * sum(widths)), widths):
            (logits,) = chain.run([(0, start, text[start:stop])])
            assert np.array_equal(logits, reference[start:stop])


@pytest.mark.slow
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    start=st.integers(0, 540),
    steps=st.lists(
        st.tuples(st.integers(1, EXACT_ROWS), st.integers(0, 40), st.none() | st.integers(0, 49151)),
        min_size=1,
        max_size=4,
    ),
)
def test_trims_and_wrong_tokens_leave_no_trace(
    halves: Chain, text: list[int], reference: Rows, start: int, steps: list[tuple[int, int, int | None]]
) -> None:
    """Steps back and runs on from there, with rejected tokens run and trimmed in between."""
    lane = 7
    have = halves.stages[0].length(lane)
    if have < start:
        halves.run([(lane, have, text[have:start])])
    position = start
    for width, back, wrong in steps:
        if wrong is not None:
            halves.run([(lane, position, [wrong] * width)])
        position = max(0, position - back)
        stop = min(LENGTH, position + width)
        (logits,) = halves.run([(lane, position, text[position:stop])])
        assert np.array_equal(logits, reference[position:stop])
        position = stop


@pytest.mark.slow
@pytest.mark.parametrize(("lanes", "threads"), [(1, 1), (3, 1), (8, 1), (8, 2)])
def test_lanes_share_decodes_and_come_and_go(
    smollm2: Path, text: list[int], reference: Rows, lanes: int, threads: int
) -> None:
    """Lanes of different lengths, rejected tokens and cleared lanes in between: no lane notices the others.

    A cache that all lanes share fails this: freed cells are taken by other lanes, out of order.
    """
    rng = np.random.default_rng(lanes)
    with Chain(smollm2, [15], lanes=lanes, threads=threads, context=256) as chain:
        positions = [0] * lanes
        for _ in range(150 // lanes):
            spans, equal = [], int(rng.integers(1, 5))
            for lane in range(lanes):
                if rng.random() < 0.08:
                    positions[lane] = 0  # a new session
                start = positions[lane]
                count = equal if rng.random() < 0.7 else int(rng.integers(1, 64 // lanes + 1))
                wrong = rng.random() < 0.2
                tokens = [5] * count if wrong else text[start : start + count]
                if start + count <= 250 and rng.random() < 0.9:
                    spans.append((lane, start, tokens))
                    positions[lane] += 0 if wrong else count
            if not spans:
                continue
            for (_, start, tokens), logits in zip(spans, chain.run(spans), strict=True):
                if tokens == text[start : start + len(tokens)]:
                    assert np.array_equal(logits, reference[start : start + len(tokens)])


PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "<|im_start|>user\nWhat is the boiling point of water?<|im_end|>\n<|im_start|>assistant\n",
    "Once upon a time, in a land far away,",
    '{"name": "Ada", "age": 36, "skills": [',
    "El veloz murciélago hindú comía feliz cardillo y kiwi.",
    "1, 1, 2, 3, 5, 8, 13,",
    "Summary: The Treaty of Westphalia (1648) ended the Thirty Years' War.\nQuestion: When did it end?\nAnswer:",
    "日本語で話してください。",
    "<html>\n<head>\n<title>",
]


@pytest.mark.slow
def test_greedy_tokens_equal_the_reference(smollm2: Path, halves: Chain) -> None:
    vocabulary = Vocabulary(smollm2)
    for prompt in PROMPTS:
        tokens = list(vocabulary.tokenize(prompt))
        expected = greedy(smollm2, tokens, 80)
        (logits,) = halves.run([(0, 0, tokens)], wanted=1)
        produced = [int(logits[-1].argmax())]
        while len(produced) < 80:
            (logits,) = halves.run([(0, len(tokens) + len(produced) - 1, produced[-1:])])
            produced.append(int(logits[-1].argmax()))
        assert produced == expected, prompt
    vocabulary.close()


@pytest.mark.slow
def test_sampled_tokens_do_not_depend_on_the_split(smollm2: Path) -> None:
    vocabulary = Vocabulary(smollm2)
    settings_ = Sampling(temperature=0.8, seed=11, repeat_penalty=1.1)
    outputs = []
    for cuts in ([15], [7, 20], []):
        with Chain(smollm2, cuts) as chain, Sampler(settings_, 49152) as sampler:
            tokens = list(vocabulary.tokenize(PROMPTS[3]))
            (logits,) = chain.run([(0, 0, tokens)], wanted=1)
            for _ in range(48):
                tokens.append(sampler.pick(logits[-1], tokens, len(tokens)))
                (logits,) = chain.run([(0, len(tokens) - 1, tokens[-1:])])
            outputs.append(tokens)
    assert outputs[0] == outputs[1] == outputs[2]
    assert len(set(outputs[0])) > 20
    vocabulary.close()


@pytest.mark.slow
def test_the_tap_in_python_gives_the_same_rows(
    smollm2: Path, text: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tap.compiled() is not None, "this machine has a C compiler"
    first = slice_model(smollm2, 0, 15)
    with StageEngine(first, context=256) as engine:
        (expected,) = engine.run([Span(0, 0, text[:40])])
    monkeypatch.setattr(tap, "compiled", lambda: None)
    with StageEngine(first, context=256) as engine:
        (rows,) = engine.run([Span(0, 0, text[:40])])
    assert np.array_equal(rows, expected)


@pytest.mark.slow
def test_abort_trims_to_the_start(smollm2: Path, text: list[int]) -> None:
    with StageEngine(slice_model(smollm2, 0, 15), context=256) as engine:
        (expected,) = engine.run([Span(0, 0, text[:30])])
        engine.trim(0, 10)
        engine.abort()
        with pytest.raises(EngineError, match="aborted"):
            engine.run([Span(0, 10, text[10:30])])
        assert engine.length(0) == 10
        engine.rearm()
        (rows,) = engine.run([Span(0, 10, text[10:30])])
        assert np.array_equal(rows, expected[10:])


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
def test_probe_finds_the_exact_class(smollm2: Path, threads: int) -> None:
    with StageEngine(slice_model(smollm2, 15, 30), context=128, threads=threads, probe=True) as engine:
        assert engine.decodes.exact
        assert engine.decodes.most == EXACT_ROWS
        assert engine.decodes.least == (1 if threads == 1 else 2)
        rows, seconds = zip(*engine.cost, strict=True)
        assert rows == (1, 2, 4, 8, 16, 32, 63)[: len(rows)]
        assert len(rows) == 7 or seconds[-1] > 1  # it is measured until a decode takes over a second
        assert min(seconds) > 0
        assert engine.length(0) == 0


@pytest.fixture(scope="module")
def last(smollm2: Path) -> Iterator[StageEngine]:
    with StageEngine(slice_model(smollm2, 29, 30), lanes=2, context=64) as engine:
        yield engine


@pytest.fixture(scope="module")
def first(smollm2: Path) -> Iterator[StageEngine]:
    with StageEngine(slice_model(smollm2, 0, 1), lanes=2, context=64) as engine:
        yield engine


def test_misuse_is_refused_and_changes_nothing(first: StageEngine, last: StageEngine) -> None:
    first.run([Span(1, 0, [5, 6, 7])])
    rows = np.zeros((1, 576), np.float32)
    for engine, spans, message in [
        (first, [Span(0, 3, [1])], "position 3, above the 0"),
        (first, [Span(2, 0, [1])], "no lane 2"),
        (first, [Span(-1, 0, [1])], "no lane -1"),
        (first, [Span(0, 0, [])], "no rows"),
        (first, [Span(0, 0, [49152])], "token 49152"),
        (first, [Span(0, 0, [1]), Span(0, 2, [1])], "consecutive"),
        (first, [Span(0, 0, rows=rows)], "takes token ids"),
        (first, [Span(1, 3, [1] * 62)], "position 65 of a context of 64"),
        (last, [Span(0, 0, [1])], "takes activations"),
        (last, [Span(0, 0, rows=rows[:, :5])], "shape"),
        (last, [Span(0, 0, rows=rows, wanted=2)], "2 rows wanted"),
    ]:
        with pytest.raises(MeshpipeError, match=message):
            engine.run(spans)
    assert first.length(1) == 3
    with pytest.raises(EngineError, match="trim lane 1 to position 4"):
        first.trim(1, 4)
    first.clear(1)
    assert first.length(1) == 0


def test_several_spans_of_a_lane_are_one_run(first: StageEngine) -> None:
    (together,) = first.run([Span(0, 0, [1, 2, 3, 4])])
    one, two = first.run([Span(0, 0, [1, 2]), Span(0, 2, [3, 4])])
    assert np.array_equal(np.concatenate([one, two]), together)


def test_what_does_not_fit_is_refused(smollm2: Path) -> None:
    path = slice_model(smollm2, 0, 1)
    with pytest.raises(CapacityError, match="8192 tokens that the model was trained on"):
        StageEngine(path, context=10_000)
    with pytest.raises(UsageError, match="lanes must be from 1 to 255, not 0"):
        StageEngine(path, lanes=0)
    with pytest.raises(UsageError, match="threads"):
        StageEngine(path, threads=0)
    StageEngine(
        path, context=10_000, options=EngineOptions(rope_scaling="linear", rope_freq_scale=0.5)
    ).close()


@pytest.mark.slow
def test_repack_is_tried_in_a_child_process_first(smollm2: Path) -> None:
    """On a machine that survives it the engine loads; on one that does not, a clear error: never a crash."""
    refusal = "crashed a trial process"
    try:
        StageEngine(slice_model(smollm2, 29, 30), context=64, options=EngineOptions(repack=True)).close()
    except EngineError as error:
        refusal = str(error)
    assert "crashed a trial process" in refusal


@pytest.mark.slow
def test_cache_types_pass_through(smollm2: Path, text: list[int]) -> None:
    options = EngineOptions(cache_type_k="q8_0", cache_type_v="q8_0")
    with (
        StageEngine(slice_model(smollm2, 0, 15), context=128, options=options) as quantized,
        StageEngine(slice_model(smollm2, 0, 15), context=128) as plain,
    ):
        (a,) = quantized.run([Span(0, 0, text[:32])])
        (b,) = plain.run([Span(0, 0, text[:32])])
    assert not np.array_equal(a, b)
    assert np.allclose(a, b, atol=0.1 * np.abs(b).max())
