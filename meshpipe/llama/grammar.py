"""A grammar that binds a session's generated text, with a state that belongs to a position.

llama.cpp's grammar sampler remembers what it was fed, cannot go back, and ends the process when it is fed a token
that the grammar forbids. A session's tokens, on the other hand, are drafts until they are committed. So the
state here is always that after `tokens[start:position]` of whoever asks: it advances over what is new, begins
again where the past has changed, and looks at a token before it takes it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from meshpipe.errors import UsageError

CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
"""llama_token_data."""

MAX_LENGTH = 1 << 16
"""Characters of a grammar."""
MAX_NESTING = 64
"""Parentheses within parentheses; llama.cpp parses them by recursion."""


def check_bounds(grammar: str) -> None:
    """Raises UsageError for what is too long or too deep for llama.cpp's parser."""
    if len(grammar) > MAX_LENGTH:
        raise UsageError(f"the grammar has {len(grammar)} characters; at most {MAX_LENGTH} are allowed")
    if "\0" in grammar or any("\ud800" <= character <= "\udfff" for character in grammar):
        raise UsageError("the grammar holds a zero character or half a surrogate pair; write it as \\x00")
    depth = 0
    for character in grammar:  # those in literals count too: they are few, and this cannot be fooled
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

    Raises UsageError if llama.cpp does not understand the grammar, or the vocabulary has no text of its tokens.
    """

    def __init__(self, grammar: str, vocab: Any, start: int) -> None:
        check_bounds(grammar)
        if llama_cpp.llama_vocab_type(vocab) == 0:
            raise UsageError("a grammar needs the text of tokens: this model's file has no vocabulary")
        self._sampler = llama_cpp.llama_sampler_init_grammar(vocab, grammar.encode(), b"root")
        if not self._sampler:
            raise UsageError("llama.cpp does not understand the grammar (standard error says where)")
        self._start = start
        self._taken: list[int] = []  # what the state has come by
        self._one, self._one_array = candidates(1)

    def advance(self, tokens: Sequence[int], position: int) -> bool:
        """Brings the state to what follows `tokens[start:position]`; says False if the grammar forbids those."""
        past = list(tokens[self._start : position])
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
        """Whether the token may come next."""
        self._one["id"], self._one["logit"] = token, 0.0
        self._one_array.size = 1
        llama_cpp.llama_sampler_apply(self._sampler, ctypes.byref(self._one_array))
        return bool(self._one["logit"][0] == 0.0)

    def mask(self, logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """The logits (n_vocab,) with -inf for every token that may not come next."""
        room, array = candidates(len(logits))
        room["id"] = np.arange(len(logits), dtype=np.int32)
        room["logit"] = logits
        llama_cpp.llama_sampler_apply(self._sampler, ctypes.byref(array))
        return np.ascontiguousarray(room["logit"])

    def close(self) -> None:
        """Frees llama.cpp's sampler; safe to call twice."""
        if self._sampler:
            llama_cpp.llama_sampler_free(self._sampler)
            self._sampler = None
