"""Grammars bind the generated text, whatever was drafted; their state belongs to the position."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from meshpipe import Pipeline, Sampling, Speculation
from meshpipe.errors import EngineError, UsageError
from meshpipe.llama import context
from meshpipe.llama import grammar as limits
from meshpipe.llama.grammar import MAX_LENGTH, MAX_NESTING, Grammar, check_bounds
from meshpipe.llama.options import EngineOptions
from meshpipe.llama.sampling import Sampler
from meshpipe.llama.slicing import slice_model
from meshpipe.llama.vocabulary import Vocabulary

DIGITS = 'root ::= "[" ([0-9]+ ",")* "]"'


@pytest.fixture(scope="module")
def vocabulary(smollm2: Path) -> Iterator[Vocabulary]:
    vocabulary = Vocabulary(smollm2)
    yield vocabulary
    vocabulary.close()


def allowed(vocabulary: Vocabulary, grammar: Grammar) -> set[str]:
    kept = np.flatnonzero(grammar.mask(np.zeros(vocabulary.size, np.float32)) == 0)
    return {vocabulary.text([int(token)], special=True) for token in kept}


def test_the_state_is_that_of_the_position(vocabulary: Vocabulary) -> None:
    text = vocabulary.tokenize("[12,3,]", start=False)
    grammar = Grammar(DIGITS, vocabulary.pointer, 2)
    fresh = {}
    for position in range(len(text) + 1):
        alone = Grammar(DIGITS, vocabulary.pointer, 0)
        assert alone.advance(text, position)
        fresh[position] = allowed(vocabulary, alone)
        alone.close()
    tokens = [7, 7, *text]  # the first two were given
    for position in (0, 5, 3, len(text), 1, 2, 4):  # forwards and back
        assert grammar.advance(tokens, 2 + position)
        assert allowed(vocabulary, grammar) == fresh[position]
    grammar.close()
    assert fresh[0] == {"["}
    assert fresh[len(text)] == {vocabulary.text([token], special=True) for token in vocabulary.end_tokens}


@settings(max_examples=30)
@given(st.lists(st.tuples(st.lists(st.integers(0, 49151), max_size=6), st.booleans()), max_size=8))
def test_forbidden_drafts_are_never_fed(vocabulary: Vocabulary, drafts: list[tuple[list[int], bool]]) -> None:
    """llama.cpp would end the process."""
    head = list(vocabulary.tokenize("[12,", start=False))
    grammar = Grammar(DIGITS, vocabulary.pointer, 0)
    for draft, keep in drafts:
        tokens = [*head, *draft] if keep else draft
        grammar.advance(tokens, len(tokens))
        assert grammar.advance(head, len(head))
        assert grammar.allows(vocabulary.tokenize("]", start=False)[0])
        assert not grammar.allows(vocabulary.tokenize("[", start=False)[0])
    grammar.close()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_picks_are_allowed_and_only_a_function_of_the_past(
    vocabulary: Vocabulary, temperature: float
) -> None:
    rows = np.random.default_rng(1).normal(0, 3, (40, vocabulary.size)).astype(np.float32)
    end = max(vocabulary.end_tokens)
    rows[28:, end] += 100
    rows[20:, vocabulary.tokenize("]", start=False)[0]] += 50
    rows[20:, vocabulary.tokenize(",", start=False)[0]] += 49
    settings = Sampling(temperature=temperature, seed=3, grammar=DIGITS, top_k=5)
    with Sampler(settings, vocabulary.size, vocab=vocabulary.pointer, prompt=1) as sampler:
        tokens = [5]
        while tokens[-1] not in vocabulary.end_tokens:
            tokens.append(sampler.pick(rows[len(tokens)], tokens, len(tokens)))
        again = [sampler.pick(rows[at], tokens, at) for at in reversed(range(1, len(tokens)))]
        assert again == tokens[:0:-1]
        wrong = [*tokens[:3], end, *tokens[3:]]
        sampler.pick(rows[9], wrong, 9)  # a forbidden past: anything, but no crash
    numbers = vocabulary.text(tokens[1:])
    assert numbers.startswith("[")
    assert numbers.endswith("]")
    assert all(number.isdecimal() for number in numbers[1:-1].split(",")[:-1])


def test_a_dead_end_is_an_error(vocabulary: Vocabulary) -> None:
    row = np.zeros(vocabulary.size, np.float32)
    y = vocabulary.tokenize("y", start=False)[0]
    grammar = 'root ::= "y" <[999999]>'  # a token that there is not
    with Sampler(Sampling(grammar=grammar), vocabulary.size, vocab=vocabulary.pointer) as sampler:
        assert sampler.pick(row, [], 0) == y
        with pytest.raises(EngineError, match="allows no token of the vocabulary at position 1"):
            sampler.pick(row, [y], 1)


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ("root ::= (", "does not understand"),
        ("other ::= [a]", "does not understand"),
        ("root ::= root [a]", "does not understand"),
        ("root ::= " + "(" * (MAX_NESTING + 1), "nests more than"),
        ("root ::= " + "a" * MAX_LENGTH, "at most"),
        ("root ::= \0", "zero character"),
    ],
)
def test_bad_grammars_are_refused(vocabulary: Vocabulary, grammar: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Grammar(grammar, vocabulary.pointer, 0)


def test_the_deepest_grammar_allowed_is_understood(vocabulary: Vocabulary) -> None:
    grammar = "root ::= " + "(" * MAX_NESTING + "[a]" + ")" * MAX_NESTING
    check_bounds(grammar)
    Grammar(grammar, vocabulary.pointer, 0).close()


def test_a_file_without_vocabulary_refuses(smollm2: Path, cache: Path) -> None:
    model = EngineOptions().load(slice_model(smollm2, 14, 15))
    try:
        with pytest.raises(UsageError, match="has no vocabulary"):
            Grammar(DIGITS, llama_cpp.llama_model_get_vocab(model), 0)
    finally:
        llama_cpp.llama_model_free(model)


def test_bias_and_logprobs() -> None:
    row = np.log(np.array([0.5, 0.25, 0.125, 0.125], np.float32))
    with Sampler(Sampling(logit_bias=((2, 5.0), (0, -100.0)), logprobs=3), 4) as sampler:
        assert sampler.pick(row, [], 0) == 2
        assert row[2] == np.log(np.float32(0.125))  # the row itself is left alone
        (mine, *best) = sampler.logprobs(row, 2)
    assert mine == (2, pytest.approx(np.log(0.125), abs=1e-6))
    assert [token for token, _ in best] == [0, 1]
    assert best[0][1] == pytest.approx(np.log(0.5), abs=1e-6)
    with pytest.raises(UsageError, match="outside the vocabulary"):
        Sampler(Sampling(logit_bias=((4, 1.0),)), 4)
    for wrong in (Sampling(logprobs=99), Sampling(logit_bias=((1, 101.0),)), Sampling(logprobs=-1)):
        with pytest.raises(UsageError):
            Sampler(wrong, 4)


OBJECT = r"""
root ::= "{" ws "\"name\":" ws string "," ws "\"age\":" ws [0-9]{1,3} "," ws "\"tags\":" ws tags "}"
tags ::= "[" (string ("," ws string){0,3})? "]"
string ::= "\"" [a-zA-Z ]{1,12} "\""
ws ::= " "?
"""


@pytest.mark.slow
async def test_grammar_output_is_valid_and_speculation_changes_nothing(smollm2: Path) -> None:
    messages = [{"role": "user", "content": "Describe Anna, 34, as JSON. Tags: red red red red red red."}]
    async with Pipeline.local(smollm2, "0,15,30", context=1024) as pipeline:
        for temperature, seed in ((0.0, 0), (0.9, 1)):
            sampling = Sampling(temperature=temperature, seed=seed, grammar=OBJECT, logprobs=2)
            answers = []
            for speculation in (Speculation(mode="off"), Speculation(depth=4, width=4)):
                async with pipeline.generate(
                    messages=messages, max_tokens=120, sampling=sampling, speculation=speculation, reuse=False
                ) as generation:
                    pieces = [piece async for piece in generation]
                tokens = [token for piece in pieces for token in piece.tokens]
                logprobs = [entry for piece in pieces for entry in piece.logprobs]
                assert [entry[0][0] for entry in logprobs] == tokens
                answers.append((tokens, logprobs, "".join(piece.text for piece in pieces)))
            assert answers[0] == answers[1]
            assert set(json.loads(answers[0][2])) == {"name", "age", "tags"}
        with pytest.raises(UsageError, match=r"stage 1: llama\.cpp does not understand the grammar"):
            await pipeline.complete("a", sampling=Sampling(grammar="root ::= ("))
        assert (await pipeline.complete("a b a b a", max_tokens=3)).tokens  # and the lane is free


MANY_WAYS = "root ::= " + " | ".join(['"[" root "]"'] * 8)
"""Every bracket multiplies llama.cpp's stacks by eight."""


def test_a_grammar_that_is_too_slow_is_given_up(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "ALLOWANCE", 0.5)
    monkeypatch.setattr(limits, "EACH", 0.0)
    monkeypatch.setattr(limits, "_TICK", 0.02)
    waited: list[float] = []
    grammar = Grammar(MANY_WAYS, vocabulary.pointer, 0, waits=lambda: waited.append(time.perf_counter()))
    bracket = vocabulary.tokenize("[", start=False)[0]
    row = np.zeros(vocabulary.size, np.float32)
    row[bracket] = 1
    assert grammar.advance([bracket] * 2, 2)
    assert grammar.mask(row, 1)[bracket] == 1  # of the few that are looked at
    assert grammar.advance([bracket] * 3, 3)
    with pytest.raises(UsageError, match=r"the grammar takes too long: more than 0\.5 s"):  # noqa: PT012
        for _ in range(9):
            grammar.mask(row)  # 512 stacks: half a second, about
    assert len(waited) > 2
    grammar.close()
    grammar._thread.join()


def test_what_was_given_up_ends_with_its_call_and_keeps_its_model_until_then(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    vocabulary = Vocabulary(smollm2)
    model = vocabulary._model
    grammar = Grammar(DIGITS, vocabulary.pointer, 0)
    tokens = vocabulary.tokenize("[12,3,", start=False)
    apply, computed, calls = llama_cpp.llama_sampler_apply, threading.Event(), []

    def slow(*given: Any) -> None:
        calls.append(given)
        computed.wait()
        apply(*given)

    freed: list[Any] = []
    monkeypatch.setattr(llama_cpp, "llama_sampler_apply", slow)
    monkeypatch.setattr(llama_cpp, "llama_model_free", freed.append)
    monkeypatch.setattr(limits, "ALLOWANCE", 0.05)
    monkeypatch.setattr(context, "GRACE", 0.01)
    try:
        for _ in range(2):
            with pytest.raises(UsageError, match="takes too long"):
                grammar.permits(tokens, len(tokens), tokens[0])
        grammar.close()  # waits for nothing
        vocabulary.close()
        assert not freed
        assert "stays in memory" in caplog.text
    finally:
        computed.set()
        grammar._thread.join()
    assert len(calls) <= 1  # it was given up before the next
    context.free_model(model)
    assert freed == [model]
    monkeypatch.undo()
    llama_cpp.llama_model_free(model)


def test_a_mask_is_made_of_logits_that_nobody_changes(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits._Stacks, "mask", lambda _, logits, enough: logits)
    grammar = Grammar(DIGITS, vocabulary.pointer, 0)
    row = np.zeros(vocabulary.size, np.float32)
    assert not np.shares_memory(grammar.mask(row), row)
    grammar.close()


def test_time_that_was_not_taken_does_not_pile_up(vocabulary: Vocabulary) -> None:
    """One wait holds up whoever else computes at the stage."""
    grammar = Grammar(DIGITS, vocabulary.pointer, 0)
    text = vocabulary.tokenize("[" + "1," * 100, start=False)
    assert grammar.advance(text, len(text))
    assert grammar._allowance <= limits.ALLOWANCE
    grammar.close()


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 300), st.sampled_from(["", "[", "[1", "[12,"]))
def test_the_most_likely_allowed_tokens_are_what_a_whole_mask_leaves(
    vocabulary: Vocabulary, seed: int, enough: int, begun: str
) -> None:
    dice = np.random.default_rng(seed)
    row = (
        dice.normal(0, 3, vocabulary.size).round(int(dice.integers(0, 4))).astype(np.float32)
    )  # equal ones too
    grammar = Grammar(DIGITS, vocabulary.pointer, 0)
    tokens = vocabulary.tokenize(begun, start=False)
    grammar.advance(tokens, len(tokens))
    whole, some = grammar.mask(row), grammar.mask(row, enough)
    best = np.argsort(-whole, kind="stable")[:enough]
    assert (
        np.argsort(-some, kind="stable")[:enough][whole[best] > -np.inf] == best[whole[best] > -np.inf]
    ).all()
    assert ((some == whole) | (some == -np.inf)).all()
    grammar.close()


@pytest.mark.slow
async def test_a_slow_grammar_ends_its_own_request_and_no_other(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "ALLOWANCE", 0.4)
    monkeypatch.setattr(limits, "EACH", 0.0)
    slow = Sampling(temperature=1.0, top_k=0, grammar=MANY_WAYS)
    async with Pipeline.local(smollm2, "0,30", lanes=2, context=256) as pipeline:
        alone = (await pipeline.complete("Count: 1 2 3", max_tokens=24)).tokens
        done: list[Sequence[int]] = []

        async def beside() -> None:
            done.append((await pipeline.complete("Count: 1 2 3", max_tokens=24)).tokens)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(beside)
            with pytest.raises(UsageError, match=r"stage 0: the grammar takes too long"):
                await pipeline.complete("a", sampling=slow, max_tokens=24)
        assert done == [alone]
        for thread in list(limits._given_up):  # or it would still compute beside the next tests
            await trio.to_thread.run_sync(thread.join)
