"""The n-gram proposers against brute force, on random and on hostile streams."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshpipe.errors import UsageError
from meshpipe.speculation.ngram import (
    LIMITS,
    CacheIndex,
    Draft,
    NgramConfig,
    NgramProposer,
    SharedStore,
    SuffixIndex,
)
from meshpipe.speculation.suffix_automaton import ROOT, SuffixAutomaton

Tokens = Sequence[int]


def longest_match(text: Tokens, suffix: Tokens, indexed: int | None = None) -> tuple[int, int]:
    """Length and most recent end of the longest end of text + suffix that also stands earlier in the text."""
    line = [*text, *suffix]
    best = (0, 0)
    for end in range(1, min(len(text), len(line) - 1, indexed or len(text)) + 1):
        length = 0
        while length < end and line[end - 1 - length] == line[-1 - length]:
            length += 1
        if length and length >= best[0]:
            best = (length, end)
    return best


def suffix_reference(text: Tokens, suffix: Tokens, limit: int, indexed: int | None = None) -> Draft:
    length, end = longest_match(text, suffix, indexed)
    line = [*text, *suffix]
    size = len(line)
    if not length:
        return Draft()
    while len(line) < size + limit:
        line.append(line[end + len(line) - size])
    return Draft(tuple(line[size:]), length)


def cache_reference(text: Tokens, suffix: Tokens, limit: int, config: NgramConfig) -> Draft:
    line = [*text, *suffix]
    tokens: list[int] = []
    match = 0
    for _ in range(limit):
        least = config.min_n if tokens else config.min_match
        for order in range(min(config.max_n, len(line)), least - 1, -1):
            followers = [
                text[at + order]
                for at in range(len(text) - order)
                if [*text[at : at + order]] == line[-order:]
            ]
            if followers:
                break
        else:
            break
        # The most frequent one; of equally frequent ones, the one seen last.
        last_seen = {token: at for at, token in enumerate(followers)}
        token = max(last_seen, key=lambda t: (followers.count(t), last_seen[t]))
        match = match or order
        tokens.append(token)
        line.append(token)
    return Draft(tuple(tokens), match)


@st.composite
def streams(draw: st.DrawFn) -> list[int]:
    """Random, periodic, runs, and mixtures: few symbols make many coincidences."""
    pieces = draw(
        st.lists(
            st.tuples(
                st.lists(st.integers(0, draw(st.sampled_from([0, 1, 2, 5]))), min_size=1, max_size=8),
                st.integers(1, 6),
            ),
            min_size=1,
            max_size=5,
        )
    )
    return [token for piece, times in pieces for token in piece * times]


@given(streams(), st.lists(st.integers(0, 3), max_size=6), st.integers(1, 20), st.data())
def test_the_suffix_index_answers_as_brute_force_does(
    text: list[int], suffix: list[int], limit: int, data: st.DataObject
) -> None:
    index = SuffixIndex(NgramConfig())
    done = 0
    while done < len(text):
        step = data.draw(st.integers(1, 12))
        index.extend(text[done : done + step])
        done = min(done + step, len(text))
        # As a session asks: with a suffix that grows, then with another one.
        for length in range(len(suffix) + 1):
            assert index.lookup(suffix[:length], limit) == suffix_reference(
                text[:done], suffix[:length], limit
            )
        assert index.lookup(suffix[1:], limit) == suffix_reference(text[:done], suffix[1:], limit)


@given(streams(), st.lists(st.integers(0, 3), max_size=4), st.integers(1, 30))
def test_what_is_beyond_the_bound_is_context_but_is_never_found(
    text: list[int], suffix: list[int], bound: int
) -> None:
    index = SuffixIndex(NgramConfig(max_indexed=bound))
    for at in range(0, len(text), 3):
        index.extend(text[at : at + 3])
    assert index.lookup(suffix, 9) == suffix_reference(text, suffix, 9, indexed=bound)


@given(streams(), st.lists(st.integers(0, 3), max_size=6), st.integers(1, 12), st.data())
def test_the_cache_index_answers_as_counting_does(
    text: list[int], suffix: list[int], limit: int, data: st.DataObject
) -> None:
    low = data.draw(st.integers(1, 3))
    high = data.draw(st.integers(low, 5))
    config = NgramConfig("cache", min_n=low, max_n=high, min_match=data.draw(st.integers(low, high)))
    index = CacheIndex(config)
    index.extend(text[:7])
    index.extend(text[7:])
    assert index.lookup(suffix, limit) == cache_reference(text, suffix, limit, config)


def hostile_streams(length: int) -> dict[str, list[int]]:
    rng = random.Random(7)
    runs: list[int] = []
    while len(runs) < length:
        runs += [1] * rng.randrange(1, length // 20) + [rng.randrange(2, 5)]
    fibonacci, following = [1], [1, 2]
    while len(following) < length:
        fibonacci, following = following, following + fibonacci
    nested = list(range(40))
    return {
        "one token": [1] * length,
        "period 2": [at % 2 for at in range(length)],
        "period 37": [at % 37 for at in range(length)],
        "runs in a period": (([1] * 50 + [2]) * length)[:length],
        "random runs": runs[:length],
        "fibonacci": following[:length],
        "every suffix": ([t for at in range(40) for t in [*nested[at:], 99]] * length)[:length],
        "two symbols": [rng.randrange(2) for _ in range(length)],
        "many symbols": [rng.randrange(10**6) for _ in range(length)],
        "zipf": [int(rng.paretovariate(0.7)) % 50_000 for _ in range(length)],
    }


@pytest.mark.parametrize("name", hostile_streams(100))
def test_hostile_streams_token_by_token(name: str) -> None:
    text = hostile_streams(240)[name]
    automaton = SuffixAutomaton()
    for done, token in enumerate(text, 1):
        automaton.extend([token])
        assert automaton.repeat == longest_match(text[:done], ())
    assert automaton.states <= 2 * len(text) + 1


def check_long_stream(text: list[int], every: int) -> None:
    """Spot checks with C-speed searches instead of the quadratic reference."""
    index = SuffixIndex(NgramConfig())
    raw = b""
    for done in range(every, len(text) + 1, every):
        index.extend(text[done - every : done])
        raw += b"".join(token.to_bytes(4, "little") for token in text[done - every : done])
        draft = index.lookup((), 50)

        def found(length: int, raw: bytes = raw) -> int:
            """The last earlier end of the last `length` tokens, 0 if there is none."""
            at = len(raw) - 4
            while (at := raw.rfind(raw[len(raw) - 4 * length :], 0, at)) >= 0 and at % 4:
                at += 4 * length - 1
            return at // 4 + length if at >= 0 else 0

        if not draft.match:
            assert not found(1)
            continue
        end = found(draft.match)
        assert end, "the match is no match"
        assert draft.match + 1 > done - 1 or not found(draft.match + 1), "a longer one exists"
        following = text[end:done]
        assert list(draft.tokens) == (following * 50)[:50]


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", hostile_streams(100))
def test_long_hostile_streams(name: str) -> None:
    check_long_stream(hostile_streams(100_000)[name], 4_999)


@pytest.mark.timeout(10)
def test_a_long_run_of_one_token_is_quick_and_proposed_up_to_the_limit() -> None:
    proposer = NgramProposer(NgramConfig(max_tokens=200))
    for thousands in range(1, 101):
        proposer.extend([7] * 1_000)
        assert proposer.propose([7, 7], 1_000) == Draft((7,) * 200, 1_000 * thousands)


@pytest.mark.parametrize("period", range(1, 9))
@pytest.mark.parametrize("kind", ["suffix", "cache"])
def test_a_loop_is_proposed_up_to_the_limit(period: int, kind: str) -> None:
    proposer = NgramProposer(NgramConfig(kind, min_n=1, max_n=3, min_match=2, max_tokens=500))  # type: ignore[arg-type]
    loop = list(range(period))
    proposer.extend(loop * 2 + loop[:2])
    suffix = ((loop * 20)[2:])[:5]
    expected = ((loop * 200)[7:])[:100]
    assert list(proposer.propose(suffix, 100).tokens) == expected


def test_a_proposal_depends_on_committed_tokens_and_on_the_suffix_it_was_asked_with_alone() -> None:
    proposer = NgramProposer(NgramConfig(min_match=1))
    proposer.extend([1, 2, 3, 4])
    assert proposer.propose([9, 1], 2).tokens == (2, 3)
    # [9, 1] was not indexed by asking: 9 is as unknown as before.
    assert proposer.propose([9], 2) == Draft()
    assert proposer.propose([], 2) == Draft()


def test_longest_match_wins_and_the_most_recent_breaks_the_tie() -> None:
    proposer = NgramProposer(NgramConfig(min_match=1))
    proposer.extend([5, 1, 2, 70, 6, 1, 2, 80, 7, 1, 2, 90])
    assert proposer.propose([6, 1, 2], 1) == Draft((80,), 3)
    assert proposer.propose([4, 1, 2], 1) == Draft((90,), 2)


def test_the_gate_wants_min_match_agreeing_tokens() -> None:
    for kind in ("suffix", "cache"):
        proposer = NgramProposer(NgramConfig(kind, min_n=1, max_n=4, min_match=3))  # type: ignore[arg-type]
        proposer.extend([1, 2, 3, 4, 8, 2, 3])
        assert proposer.propose([], 4) == Draft()  # two agree
        proposer.extend([9, 1, 2, 3])
        assert proposer.propose([], 1) == Draft((4,), 3)


def test_the_cache_proposes_the_majority() -> None:
    proposer = NgramProposer(NgramConfig("cache", min_n=1, max_n=2, min_match=2))
    proposer.extend([1, 2, 3, 1, 2, 3, 1, 2, 4, 1, 2])
    assert proposer.propose([], 1).tokens == (3,)
    proposer.extend([4, 1, 2])  # now it is a tie, and 4 is the more recent
    assert proposer.propose([], 1).tokens == (4,)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kind": "tree"}, "'suffix' or 'cache'"),
        ({"min_n": 0}, "from 1 to 16"),
        ({"max_n": 17}, "from 1 to 16"),
        ({"min_match": 0}, "from 1 to 1024"),
        ({"max_tokens": 5_000}, "from 1 to 4096"),
        ({"max_tokens": 2.5}, "integer"),
        ({"max_indexed": 0}, "from 1 to 16777216"),
        ({"min_n": 4, "max_n": 3}, "above max_n"),
        ({"kind": "cache", "min_match": 5}, "2 to 4"),
    ],
)
def test_a_wrong_setting_is_refused_with_its_limits(changes: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        NgramConfig(**changes)  # type: ignore[arg-type]
    assert set(LIMITS) >= {"min_n", "max_n", "min_match", "max_tokens"}


def test_a_store_shares_what_others_wrote_and_no_match_reaches_over_the_end_of_a_text() -> None:
    store = SharedStore()
    store.add([1, 2, 3, 4, 5])
    store.add([6, 7, 8])
    proposer = NgramProposer(NgramConfig(min_match=2), store)
    proposer.extend([50, 2])
    assert proposer.propose([3], 9) == Draft((4, 5), 2)
    assert proposer.propose([3, 4, 5], 9) == Draft()
    # The session's own text wins at a tie, and a longer match in the store wins over it.
    proposer.extend([3, 40, 60, 2, 3])
    assert proposer.propose([], 1).tokens == (40,)
    proposer.extend([30, 1, 2, 3])
    assert proposer.propose([], 1).tokens == (4,)


def test_a_store_forgets_its_oldest_half() -> None:
    store = SharedStore(capacity=40)
    for first in range(0, 1_000, 10):
        store.add(range(first, first + 9))
        assert len(store) <= 40
        assert store.lookup([first, first + 1], 2).tokens == (first + 2, first + 3)
    assert store.lookup([900, 901], 1) == Draft()
    store.add(range(100))  # longer than it can hold: its end is kept
    assert len(store) <= 40
    assert store.lookup([97, 98], 1).tokens == (99,)
    with pytest.raises(UsageError, match="at least 2"):
        SharedStore(capacity=1)


def test_a_store_is_safe_to_use_from_many_threads() -> None:
    store = SharedStore(capacity=2_000)
    wrong: list[Draft] = []

    def work(number: int) -> None:
        own = random.Random(number)
        for _ in range(40):
            start = own.randrange(1_000) * 100
            store.add(range(start, start + 80))
            draft = store.lookup([start, start + 1, start + 2], 5)
            if draft.tokens and draft.tokens != tuple(range(start + 3, start + 8)):
                wrong.append(draft)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(store) <= 2_000


@settings(max_examples=30)
@given(streams())
def test_the_automaton_stays_within_its_bounds(text: list[int]) -> None:
    automaton = SuffixAutomaton(text)
    assert automaton.states <= 2 * len(text) + 1
    assert len(automaton._path_last) <= automaton.states
    assert automaton.step(ROOT, 0, 12_345) == (ROOT, 0)
