"""Proposers that look the next tokens up in the text itself: no model, microseconds, free of false hope.

A text that repeats itself (code being edited, quoted documents, tables, lists) foretells its own tokens: find
an earlier place where the latest tokens also stood, and propose what followed it there. Only committed tokens
are indexed; a query gives the complete optimistic suffix, so that the context it looks up is everything that
stands before the proposal, sure or not. Two indexes:

- **suffix**: the longest match of any length, the most recent of equally long ones, by a suffix automaton.
  A token costs O(1) on natural text, a query O(length of the match).
- **cache**: contexts of `min_n` to `max_n` tokens, hashed, with counts of what followed (in the manner of
  prompt lookup decoding, Saxena 2023, and of the n-gram caches of llama.cpp). The longest context known wins;
  of its continuations the most frequent, and of those the most recent. A token costs O(max_n), a query
  O(max_n) for each token proposed.

Short matches are coincidences: on novel text they only make stale work. `min_match` is the agreeing context
below which nothing is proposed; docs/speculation.md has the measurement behind its default.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Literal, Protocol

from attrs import frozen

from meshpipe.errors import UsageError
from meshpipe.speculation.suffix_automaton import ROOT, SuffixAutomaton

KINDS = ("suffix", "cache")
LIMITS = {
    "min_n": (1, 16),
    "max_n": (1, 16),
    "min_match": (1, 1024),
    "max_tokens": (1, 4096),
    "max_indexed": (1, 2**24),
}
"""What the fields of NgramConfig may be, both ends included."""


@frozen
class NgramConfig:
    """How the n-gram proposer looks up.

    `min_n`, `max_n`: tokens of the contexts that the cache kind keeps (the suffix kind has no such bounds).
    `min_match`: agreeing tokens before a proposal may start. `max_tokens`: longest proposal. `max_indexed`:
    committed tokens that are indexed; later ones extend the context but are never found. Memory on natural
    text is about 120 bytes a token for the suffix kind, 230 for the cache kind with three orders; at worst
    310 and 610.
    Raises UsageError for what is out of LIMITS or contradicts itself.
    """

    kind: Literal["suffix", "cache"] = "suffix"
    min_n: int = 2
    max_n: int = 4
    min_match: int = 2
    max_tokens: int = 256
    max_indexed: int = 262_144

    def __attrs_post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(f"n-gram kind {self.kind!r}: choose 'suffix' or 'cache'")
        for name, (low, high) in LIMITS.items():
            value = getattr(self, name)
            if not isinstance(value, int) or not low <= value <= high:
                raise UsageError(f"n-gram {name} is {value!r}: it must be an integer from {low} to {high}")
        if self.min_n > self.max_n:
            raise UsageError(f"n-gram min_n {self.min_n} is above max_n {self.max_n}: swap or raise max_n")
        if self.kind == "cache" and not self.min_n <= self.min_match <= self.max_n:
            raise UsageError(
                f"n-gram min_match {self.min_match} is not among the contexts that the cache keeps, "
                f"{self.min_n} to {self.max_n} tokens: change min_match, or min_n and max_n"
            )


@frozen
class Draft:
    """Tokens expected next, and how many tokens before them agree with the place they were found at."""

    tokens: tuple[int, ...] = ()
    match: int = 0


class Index(Protocol):
    """What both kinds of index do."""

    def extend(self, tokens: Iterable[int]) -> None:
        """Add committed tokens."""

    def lookup(self, suffix: Sequence[int], limit: int) -> Draft:
        """The up to `limit` tokens that should follow the committed tokens and `suffix`."""


@frozen
class _Walk:
    """Where the automaton stands after committed tokens and a suffix."""

    suffix: tuple[int, ...]
    state: int
    length: int


class SuffixIndex:
    """The longest match of any length, the most recent of those, and the tokens that followed it.

    Where the match runs into the end of the text, the proposal goes on through itself: a period that was seen
    once is repeated up to the limit.
    """

    def __init__(self, config: NgramConfig) -> None:
        self._capacity = config.max_indexed
        self._automaton = SuffixAutomaton()
        self._beyond: list[int] = []  # committed, but above the capacity: context only
        self._walk = _Walk((), ROOT, 0)  # after the committed tokens
        self._ahead = self._walk  # after the last suffix that was asked for: the next one likely extends it

    def extend(self, tokens: Iterable[int]) -> None:
        tokens = iter(tokens)
        self._automaton.extend(islice(tokens, self._capacity - len(self._automaton)))
        if not self._beyond:
            self._walk = _Walk((), self._automaton.newest, len(self._automaton))
        beyond = list(tokens)
        self._beyond += beyond
        state, length = self._go_on(self._walk, beyond)
        self._walk = self._ahead = _Walk((), state, length)

    def lookup(self, suffix: Sequence[int], limit: int) -> Draft:
        suffix = tuple(suffix)
        ahead = self._ahead if suffix[: len(self._ahead.suffix)] == self._ahead.suffix else self._walk
        state, length = self._go_on(ahead, suffix[len(ahead.suffix) :])
        self._ahead = _Walk(suffix, state, length)
        if not suffix and not self._beyond:
            length, end = self._automaton.repeat  # the text itself is no earlier occurrence
        else:
            end = self._automaton.last_end(state) if state != ROOT else 0
        if not length or limit < 1:
            return Draft()
        return Draft(self._following(end, suffix, limit), length)

    def _go_on(self, walk: _Walk, tokens: Iterable[int]) -> tuple[int, int]:
        state, length = walk.state, walk.length
        for token in tokens:
            state, length = self._automaton.step(state, length, token)
        return state, length

    def _following(self, end: int, suffix: tuple[int, ...], limit: int) -> tuple[int, ...]:
        indexed = len(self._automaton)
        found = self._automaton.tokens[end : end + limit].tolist()
        if len(found) < limit:
            found += self._beyond[: limit - len(found)]
        if len(found) < limit:
            found += suffix[: limit - len(found)]
        if len(found) < limit:
            period = indexed + len(self._beyond) + len(suffix) - end
            found = (found * (limit // period + 1))[:limit]
        return tuple(found)


class CacheIndex:
    """Contexts of bounded length and the most frequent token after each."""

    def __init__(self, config: NgramConfig) -> None:
        self._orders = range(config.max_n, config.min_n - 1, -1)
        self._min_match = config.min_match
        self._capacity = config.max_indexed
        self._tail: tuple[int, ...] = ()
        self._counts: dict[tuple[int, ...], int] = {}
        self._best: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            if self._capacity:
                self._capacity -= 1
                self._count(token)
            self._tail = (*self._tail, token)[-self._orders.start :]

    def _count(self, token: int) -> None:
        counts, best = self._counts, self._best
        for order in self._orders:
            if order > len(self._tail):
                continue
            context = self._tail[-order:]
            followed = (*context, token)
            count = counts[followed] = counts.get(followed, 0) + 1
            # At a tie the newest wins, and this one is the newest.
            leader = (*context, best.get(context, token))
            if count >= counts[leader]:
                best[context] = token

    def lookup(self, suffix: Sequence[int], limit: int) -> Draft:
        longest = self._orders.start
        context = (*self._tail, *suffix[-longest:])[-longest:]
        tokens: list[int] = []
        match, least = 0, self._min_match
        while len(tokens) < limit:
            for order in self._orders:
                if least <= order <= len(context) and (token := self._best.get(context[-order:])) is not None:
                    break
            else:
                break
            # Once started, a proposal may go on with less context than it needed to start.
            match, least = match or order, self._orders[-1]
            tokens.append(token)
            context = (*context, token)[-longest:]
        return Draft(tuple(tokens), match)


class SharedStore:
    """Committed text of other requests, to be looked up by all: bounded, and safe to use from any thread.

    Texts go into a young automaton; when it holds half of `capacity` tokens it becomes the old one, and the
    old one is forgotten. A match counts at most `CONTEXT` tokens, and does not reach over the end of a text.
    """

    CONTEXT = 64
    _END = -1
    _CHUNK = 64  # tokens between two looks at who else waits for the lock

    def __init__(self, capacity: int = 262_144) -> None:
        if capacity < 2:
            raise UsageError(f"shared n-gram store of {capacity} tokens: it must hold at least 2")
        self._half = capacity // 2
        self._lock = threading.Lock()
        self._young = SuffixAutomaton()
        self._old = SuffixAutomaton()

    def __len__(self) -> int:
        """Tokens held now, the mark after each text included."""
        with self._lock:
            return len(self._young) + len(self._old)

    def add(self, tokens: Sequence[int]) -> None:
        """Add one request's text. About 10 microseconds a token, in the calling thread."""
        text = [*tokens[-(self._half - 1) :], self._END]
        with self._lock:
            if len(self._young) + len(text) > self._half:
                self._old, self._young = self._young, SuffixAutomaton()
            young = self._young
        for at in range(0, len(text), self._CHUNK):
            with self._lock:
                young.extend(text[at : at + self._CHUNK])

    def lookup(self, context: Sequence[int], limit: int) -> Draft:
        """What followed the last tokens of `context` in the store."""
        best = Draft()
        with self._lock:
            for automaton in (self._young, self._old):
                state, length = ROOT, 0
                for token in context[-self.CONTEXT :]:
                    state, length = automaton.step(state, length, token)
                if length > best.match:
                    end = automaton.last_end(state)
                    found = automaton.tokens[end : end + limit].tolist()
                    if self._END in found:
                        found = found[: found.index(self._END)]
                    if found:
                        best = Draft(tuple(found), length)
        return best


class NgramProposer:
    """Proposes from a session's own committed text, and from other requests' if it was given a store.

    The longer match wins, the session's own at a tie.
    """

    def __init__(self, config: NgramConfig | None = None, shared: SharedStore | None = None) -> None:
        self.config = config or NgramConfig()
        self.shared = shared
        self._index: Index = (SuffixIndex if self.config.kind == "suffix" else CacheIndex)(self.config)
        self._tail: tuple[int, ...] = ()  # the last committed tokens, what the shared store may match

    def extend(self, tokens: Sequence[int]) -> None:
        """Add committed tokens, in order: never a token that is not committed."""
        self._index.extend(tokens)
        if self.shared is not None:
            self._tail = (*self._tail, *tokens[-SharedStore.CONTEXT :])[-SharedStore.CONTEXT :]

    def propose(self, suffix: Sequence[int], limit: int) -> Draft:
        """Up to `limit` tokens to follow the committed tokens and the whole optimistic `suffix`.

        Empty where less context than `min_match` agrees.
        """
        limit = min(limit, self.config.max_tokens)
        draft = self._index.lookup(suffix, limit)
        if self.shared is not None:
            other = self.shared.lookup((*self._tail, *suffix[-SharedStore.CONTEXT :]), limit)
            draft = max(draft, other, key=lambda d: d.match if d.tokens else 0)
        return draft if draft.match >= self.config.min_match else Draft()
