"""Picks the token of a row: greedy, or llama.cpp's sampler chain with a random stream keyed by position.

A pick depends only on the row, the tokens before it and the seed. That is why speculation changes nothing at
any temperature: a window's token is accepted when it equals the pick that serial decoding would have made.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from meshpipe.errors import EngineError, UsageError
from meshpipe.llama.grammar import Grammar, candidates, check_bounds
from meshpipe.messages import Sampling, TokenLogprobs

_LEAST_LOGPROB = -9999.0  # OpenAI's word for "very unlikely"; -inf is no JSON

MAX_LOGPROBS = 21
"""The pick's and the 20 most likely tokens'."""
MAX_BIASES = 1024

BOUNDS: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_k": (-(2**31), 2**31 - 1),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repeat_penalty": (0.01, 100.0),
    "frequency_penalty": (-2.0, 2.0),
    "presence_penalty": (-2.0, 2.0),
    "seed": (0, 2**63 - 1),
    "penalty_last_n": (0, 2**20),
}
"""What the settings may be, both ends included; whole numbers for what has to be one."""


def check(sampling: Sampling) -> Sampling:
    """The settings as they are, or UsageError naming the one that is out of bounds."""
    for name, (low, high) in BOUNDS.items():
        value = getattr(sampling, name)
        kind = int if isinstance(low, int) else (int, float)
        if not isinstance(value, kind) or not low <= value <= high:
            whole = ", a whole number" if kind is int else ""
            raise UsageError(f"{name} must be from {low} to {high}{whole}, not {value!r}")
    if not isinstance(sampling.logprobs, int) or not 0 <= sampling.logprobs <= MAX_LOGPROBS:
        raise UsageError(
            f"logprobs must be from 0 to {MAX_LOGPROBS}, a whole number, not {sampling.logprobs!r}"
        )
    if len(sampling.logit_bias) > MAX_BIASES:
        raise UsageError(
            f"logit_bias names {len(sampling.logit_bias)} tokens; at most {MAX_BIASES} are allowed"
        )
    for token, bias in sampling.logit_bias:
        if not -100 <= bias <= 100:
            raise UsageError(f"logit_bias of token {token} must be from -100 to 100, not {bias!r}")
    check_bounds(sampling.grammar)
    return sampling


def position_seed(seed: int, position: int) -> int:
    """The 32-bit seed of one position's random stream (the finaliser of splitmix64, Steele et al. 2014)."""
    mask = 2**64 - 1
    z = (seed * 0x9E3779B97F4A7C15 + position + 1) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    # llama.cpp takes 0xFFFFFFFF for "choose a seed yourself".
    return (z ^ (z >> 31)) % 0xFFFFFFFF


class Sampler:
    """One session's picks. `close` it, or use it in a `with`.

    `vocab` is llama.cpp's vocabulary pointer, for a grammar; `prompt` the number of tokens that were given. `waits`
    is called while a grammar is slow. A grammar is parsed with the first pick, which raises what `Grammar` does.
    """

    def __init__(
        self,
        sampling: Sampling,
        n_vocab: int,
        *,
        vocab: Any = None,
        prompt: int = 0,
        waits: Callable[[], None] = lambda: None,
    ) -> None:
        check(sampling)
        bad = next((token for token, _ in sampling.logit_bias if not 0 <= token < n_vocab), None)
        if bad is not None:
            raise UsageError(f"logit_bias names token {bad}, outside the vocabulary of {n_vocab}")
        self._sampling = sampling
        self._biased = np.array([token for token, _ in sampling.logit_bias], np.intp)
        self._bias = np.array([bias for _, bias in sampling.logit_bias], np.float32)
        self._chain: int | None = None
        self._penalties: int | None = None
        self._parse = partial(Grammar, sampling.grammar, vocab, prompt, waits=waits)
        self._grammar: Grammar | None = None
        if sampling.temperature == 0 and not self._penalizes:
            return
        self._candidates, self._array = candidates(n_vocab)
        self._ids = np.arange(n_vocab, dtype=np.int32)
        self._chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
        if self._penalizes:
            self._penalties = self._add(
                llama_cpp.llama_sampler_init_penalties(
                    n_vocab,
                    sampling.penalty_last_n,
                    sampling.repeat_penalty,
                    sampling.frequency_penalty,
                    sampling.presence_penalty,
                )
            )
        if sampling.temperature > 0:
            self._add(llama_cpp.llama_sampler_init_top_k(sampling.top_k))
            self._add(llama_cpp.llama_sampler_init_top_p(sampling.top_p, 1))
            self._add(llama_cpp.llama_sampler_init_min_p(sampling.min_p, 1))
            self._add(llama_cpp.llama_sampler_init_temp(sampling.temperature))

    @property
    def says_logprobs(self) -> bool:
        """Whether the session wants them."""
        return self._sampling.logprobs > 0

    @property
    def remembers(self) -> bool:
        """Whether a pick depends on the tokens before it other than through the logits."""
        return self._penalties is not None

    @property
    def _penalizes(self) -> bool:
        s = self._sampling
        return s.penalty_last_n > 0 and (
            s.repeat_penalty != 1.0 or s.frequency_penalty != 0.0 or s.presence_penalty != 0.0
        )

    @property
    def _enough(self) -> int | None:
        """So many of the most likely tokens are all that a pick depends on, if that is known."""
        if self._penalizes or (self._sampling.temperature > 0 and self._sampling.top_k <= 0):
            return None
        return self._sampling.top_k if self._sampling.temperature > 0 else 1

    def _add(self, sampler: int) -> int:
        llama_cpp.llama_sampler_chain_add(self._chain, sampler)
        return sampler

    def pick(self, logits: npt.NDArray[np.float32], tokens: Sequence[int], position: int) -> int:
        """The token for `position`, from the row of logits (n_vocab,) of the position before.

        `tokens` are the session's tokens by position; those at `position` and above are not looked at. With a
        grammar a token is drawn as if there were none, and drawn again among the allowed ones if the grammar
        forbids it (as llama.cpp's server does: to mask the whole vocabulary each time would cost more).
        """
        if len(self._biased):
            logits = logits.copy()
            np.add.at(logits, self._biased, self._bias)
        token = self._draw(logits, tokens, position)
        if not self._sampling.grammar:
            return token
        if self._grammar is None:
            self._grammar = self._parse()
        # What comes after tokens that the grammar forbids follows a wrong draft: nobody will want it.
        if self._grammar.permits(tokens, position, token):
            return token
        allowed = self._grammar.mask(logits, self._enough)
        if allowed.max() == -np.inf:
            raise EngineError(f"the grammar allows no token of the vocabulary at position {position}")
        return self._draw(allowed, tokens, position)

    def logprobs(self, logits: npt.NDArray[np.float32], token: int) -> TokenLogprobs:
        """What `Reply.logprobs` says of a pick: by the model's own distribution, before any of the settings."""
        row = logits.astype(np.float64)
        row -= row.max()
        row -= np.log(np.exp(row).sum())
        best = min(self._sampling.logprobs - 1, len(row))
        top = np.argpartition(-row, best - 1)[:best] if 0 < best < len(row) else np.arange(best)
        ranked = sorted(top.tolist(), key=lambda other: (-row[other], other))
        return tuple((int(one), max(float(row[one]), _LEAST_LOGPROB)) for one in (token, *ranked))

    def _draw(self, logits: npt.NDArray[np.float32], tokens: Sequence[int], position: int) -> int:
        if self._chain is None:
            return int(logits.argmax())
        if self._penalties is not None:
            # Rebuilt for every pick, so that it cannot remember a draft that was rejected.
            llama_cpp.llama_sampler_reset(self._penalties)
            for token in tokens[max(0, position - self._sampling.penalty_last_n) : position]:
                llama_cpp.llama_sampler_accept(self._penalties, token)
        self._candidates["id"] = self._ids
        self._candidates["logit"] = logits
        self._candidates["p"] = 0.0
        array = self._array
        array.size, array.selected, array.sorted = len(self._candidates), -1, False
        llama_cpp.llama_sampler_apply(self._chain, ctypes.byref(array))
        if self._sampling.temperature == 0:
            kept = self._candidates[: array.size]
            return int(kept["id"][kept["logit"].argmax()])
        dist = llama_cpp.llama_sampler_init_dist(position_seed(self._sampling.seed, position))
        llama_cpp.llama_sampler_apply(dist, ctypes.byref(array))
        llama_cpp.llama_sampler_free(dist)
        return int(array.data[array.selected].id)

    def close(self) -> None:
        """Frees llama.cpp's chain; safe to call twice."""
        if self._chain is not None:
            llama_cpp.llama_sampler_free(self._chain)
            self._chain = None
        if self._grammar is not None:
            self._grammar.close()

    def __enter__(self) -> Sampler:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
