"""A grammar that binds a session's generated text, with a state that belongs to a position.

llama.cpp's grammar sampler remembers what it was fed, cannot go back, and ends the process when it is fed a token
that the grammar forbids. A session's tokens, on the other hand, are drafts until they are committed. So the
state here is always that after `tokens[start:position]` of whoever asks: it advances over what is new, begins
again where the past has changed, and looks at a token before it takes it.

How long llama.cpp takes depends on the grammar, which a client may have had a hand in, and no call can be ended
early. So it works in a thread of the grammar's own, and who asks goes on without an answer when that takes too long.
The thread then ends with the call that it is in, and until it has, nobody may free the vocabulary (`unused`).
"""

from __future__ import annotations

import ctypes
import re
import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import llama_cpp
import numpy as np
import numpy.typing as npt
import outcome

from meshpipe.errors import UsageError

CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
"""llama_token_data."""

MAX_LENGTH = 1 << 16
"""Characters of a grammar."""
MAX_NESTING = 64
"""Parentheses within parentheses; llama.cpp parses them by recursion."""
ALLOWANCE, EACH = 3.0, 0.25
"""Seconds that a grammar may take at once, and with each token that it has let through in the long run."""
_TICK = 0.25
_SOME, _MORE = 256, 16  # tokens that are looked at first, and by how many times more then
_AT_ONCE = 4096  # tokens of one call, before which it is seen whether anybody waits still

T = TypeVar("T")

_given_up: dict[threading.Thread, Any] = {}
"""Threads that nobody waits for any more, and the vocabulary that each may still read."""


def unused(vocab: Any, within: float) -> bool:
    """Waits up to so many seconds for grammars that were given up; whether none of them reads the vocabulary now."""
    end = time.monotonic() + within
    threads = [thread for thread, read in _given_up.copy().items() if read == vocab]
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)


def check_bounds(grammar: str) -> None:
    """Raises UsageError for what is too long or too deep for llama.cpp's parser."""
    if len(grammar) > MAX_LENGTH:
        raise UsageError(f"the grammar has {len(grammar)} characters; at most {MAX_LENGTH} are allowed")
    if "\0" in grammar or any("\ud800" <= character <= "\udfff" for character in grammar):
        raise UsageError("the grammar holds a zero character or half a surrogate pair; write it as \\x00")
    depth = 0
    for character in re.findall("[()]", grammar):  # those in literals too: few, and this cannot be fooled
        depth += (character == "(") - (character == ")" and depth > 0)
        if depth > MAX_NESTING:
            raise UsageError(f"the grammar nests more than {MAX_NESTING} parentheses")


def check_grammar(vocab: Any, grammar: str) -> None:
    """Raises UsageError unless llama.cpp, with this vocabulary (its pointer), understands the grammar."""
    Grammar(grammar, vocab, 0).close()


def candidates(count: int) -> tuple[npt.NDArray[Any], Any]:
    """Room for so many candidates, and llama.cpp's array that points there."""
    room = np.zeros(count, CANDIDATE)
    array = llama_cpp.llama_token_data_array()
    array.data = room.ctypes.data_as(ctypes.POINTER(llama_cpp.llama_token_data))
    array.size, array.selected, array.sorted = count, -1, False
    return room, array


class Grammar:
    """What a GBNF grammar allows next; `start` is the position of the first token that it binds. `close` it.

    `waits` is called again and again while an answer is waited for. Raises UsageError if llama.cpp does not
    understand the grammar, or the vocabulary has no text of its tokens; and whatever is asked, once the grammar has
    taken too long (`ALLOWANCE`).
    """

    def __init__(
        self, grammar: str, vocab: Any, start: int, *, waits: Callable[[], None] = lambda: None
    ) -> None:
        check_bounds(grammar)
        if llama_cpp.llama_vocab_type(vocab) == 0:
            raise UsageError("a grammar needs the text of tokens: this model's file has no vocabulary")
        self._vocab = vocab
        self._start = start
        self._waits = waits
        self._allowance = ALLOWANCE  # seconds that are left
        self._passed = 0  # tokens
        self._open, self._slow = True, False
        self._asked: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self._answers: SimpleQueue[outcome.Outcome[Any]] = SimpleQueue()
        self._thread = threading.Thread(target=self._answer, name="meshpipe grammar", daemon=True)
        self._thread.start()
        self._stacks = _Stacks()
        if not self._ask(lambda: self._stacks.parse(grammar, vocab)):
            self.close()
            raise UsageError("llama.cpp does not understand the grammar (standard error says where)")

    def advance(self, tokens: Sequence[int], position: int) -> bool:
        """Brings the state to what follows `tokens[start:position]`; says False if the grammar forbids those."""
        past = self._past(tokens, position)
        return self._ask(lambda: self._stacks.advance(past))

    def allows(self, token: int) -> bool:
        """Whether the token may come next."""
        return self._ask(lambda: self._stacks.allows(token))

    def permits(self, tokens: Sequence[int], position: int, token: int) -> bool:
        """Whether the token may follow `tokens[start:position]`; True as well if those are forbidden themselves."""
        past = self._past(tokens, position)
        return self._ask(lambda: not self._stacks.advance(past) or self._stacks.allows(token))

    def mask(self, logits: npt.NDArray[np.float32], enough: int | None = None) -> npt.NDArray[np.float32]:
        """The logits (n_vocab,) with -inf for every token that may not come next.

        Where the `enough` largest that are left are all that counts, others may be -inf too.
        """
        own = logits.copy()  # the thread may look when they are llama.cpp's again
        return self._ask(lambda: self._stacks.mask(own, enough))

    def close(self) -> None:
        """Ends the thread and frees llama.cpp's sampler (when it is done, if it was too slow); safe to call twice."""
        if self._open:
            self._open = False
            self._asked.put(self._stacks.free)
            self._asked.put(None)
            if not self._slow:
                self._thread.join()

    def _past(self, tokens: Sequence[int], position: int) -> list[int]:
        past = list(tokens[self._start : position])
        earned = EACH * max(0, len(past) - self._passed)
        self._allowance = min(ALLOWANCE, self._allowance + earned)  # others wait for the stage meanwhile
        self._passed = max(self._passed, len(past))
        return past

    def _ask(self, work: Callable[[], T]) -> T:
        if not self._slow:
            began = time.perf_counter()
            self._asked.put(work)
            while (left := self._allowance - (time.perf_counter() - began)) > 0:
                try:
                    answer: outcome.Outcome[T] = self._answers.get(timeout=min(_TICK, left))
                except Empty:
                    self._waits()
                else:
                    self._allowance -= time.perf_counter() - began
                    return answer.unwrap()
            self._slow = self._stacks.given_up = True
            _given_up[self._thread] = self._vocab
            self.close()
        raise UsageError(
            f"the grammar takes too long: more than {ALLOWANCE:g} s at once, or {EACH:g} s with each token, to say "
            "what may come next; let fewer alternatives (of anyOf, of optional parts) begin alike, above all within "
            "each other"
        )

    def _answer(self) -> None:
        """In the thread: does what is asked."""
        while (work := self._asked.get()) is not None:
            self._answers.put(outcome.capture(work))
        _given_up.pop(threading.current_thread(), None)


class _GivenUp(Exception):
    """Nobody waits for the answer."""


class _Stacks:
    """llama.cpp's grammar sampler, after the tokens that it has `_taken`; once `given_up`, it is not called again."""

    def __init__(self) -> None:
        self.given_up = False
        self._open: Any = None
        self._taken: list[int] = []
        self._one, self._one_array = candidates(1)

    @property
    def _sampler(self) -> Any:
        """Asked for before every call. Raises _GivenUp."""
        if self.given_up:
            raise _GivenUp
        return self._open

    def parse(self, grammar: str, vocab: Any) -> bool:
        if self.given_up:
            raise _GivenUp
        self._open = llama_cpp.llama_sampler_init_grammar(vocab, grammar.encode(), b"root")
        return bool(self._open)

    def advance(self, past: list[int]) -> bool:
        if self._taken != past[: len(self._taken)]:
            llama_cpp.llama_sampler_reset(self._sampler)
            self._taken = []
        for token in past[len(self._taken) :]:
            if not self.allows(token):
                return False
            llama_cpp.llama_sampler_accept(self._sampler, token)
            self._taken.append(token)
        return True

    def allows(self, token: int) -> bool:
        self._one["id"], self._one["logit"] = token, 0.0
        self._one_array.size = 1
        llama_cpp.llama_sampler_apply(self._sampler, ctypes.byref(self._one_array))
        return bool(self._one["logit"][0] == 0.0)

    def mask(self, logits: npt.NDArray[np.float32], enough: int | None) -> npt.NDArray[np.float32]:
        """Looks at the most likely tokens first: each that is looked at costs time, with each of the stacks."""
        count = _SOME
        while enough is not None and count < len(logits):
            best = np.argpartition(logits, len(logits) - count)[-count:]
            kept = self._kept(best, logits[best])
            if np.count_nonzero(kept > logits[best].min()) >= enough:  # of equal ones all, or none counts
                masked = np.full(len(logits), -np.inf, np.float32)
                masked[best] = kept
                return masked
            count *= _MORE
        return self._kept(np.arange(len(logits)), logits)

    def _kept(self, ids: npt.NDArray[Any], logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        kept = np.empty(len(ids), np.float32)
        for start in range(0, len(ids), _AT_ONCE):
            part = slice(start, start + _AT_ONCE)
            room, array = candidates(len(ids[part]))
            room["id"], room["logit"] = ids[part], logits[part]
            llama_cpp.llama_sampler_apply(self._sampler, ctypes.byref(array))
            kept[part] = room["logit"]
        return kept

    def free(self) -> None:
        if self._open:
            llama_cpp.llama_sampler_free(self._open)
            self._open = None
