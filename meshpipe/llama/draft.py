"""A draft model: a small GGUF with the target's vocabulary that says what may come next, and how sure it is.

It guesses as the target picks: with the session's own sampling, and the random stream keyed by the same seed and
position. Where the two models agree on the distribution they then agree on the token, at any temperature.
Exactness does not concern it; a wrong guess costs time and nothing else.

Everything here blocks; `meshpipe.pipeline.proposer` runs it in a thread.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from attrs import define, evolve, field, frozen

from meshpipe.errors import ModelError
from meshpipe.llama.decodes import Span
from meshpipe.llama.engine import StageEngine
from meshpipe.llama.gguf import read_header
from meshpipe.llama.sampling import Sampler
from meshpipe.llama.slicing import read_slice
from meshpipe.llama.vocabulary import Vocabulary
from meshpipe.messages import Rows, Sampling
from meshpipe.speculation.run_ahead import DraftJob


@frozen
class Drafted:
    """What a job brought: tokens, and for each the probability that the draft model gave it.

    `waits`: it can bring nothing before something new is told.
    """

    tokens: tuple[int, ...] = ()
    probabilities: tuple[float, ...] = ()
    waits: bool = False


class DraftEngine:
    """What drafts ahead of a pipeline. Each kind overrides what it has a use for; but for `run`, all of it is quick.

    `context`: positions that a lane has room for. `catch_up`: tokens of one job that catches up with a line, so few
    that it does not hold drafting up for long.
    """

    context: int
    catch_up: int

    def open(self, lane: int, sampling: Sampling) -> None:
        """A session with these settings begins on the lane; what its cache holds stays."""

    def close_lane(self, lane: int) -> None:
        """The session on the lane has ended."""

    def trim(self, lane: int, position: int) -> None:
        """The lane's tokens from `position` on may be others from now on; the next job says where it starts."""

    def keep(self, lane: int, start: int, rows: Rows) -> None:
        """Takes the trunk's hidden rows, float32 (n, n_embd), of positions `[start, start + n)`."""

    def run(self, jobs: Sequence[DraftJob], seconds: float) -> list[Drafted]:
        """What each job brought, of different lanes each. Blocks for about `seconds`. Raises EngineError."""
        raise NotImplementedError

    def close(self) -> None:
        """Frees what it holds; safe to call twice."""


class DraftModel(DraftEngine):
    """A whole model with a lane for each of the pipeline's.

    `lanes` sequences of up to `context` tokens each, or what the model was trained on if that is less. Raises
    ModelError if the file cannot be loaded or has another vocabulary than `vocabulary`, CapacityError if it does not
    fit.
    """

    catch_up = 32

    def __init__(
        self, path: str | Path, vocabulary: Vocabulary, *, lanes: int, context: int, threads: int = 1
    ) -> None:
        given = read_slice(path)
        if not (given.is_first and given.is_last):
            raise ModelError(
                f"{path} holds layers {given.start}:{given.stop} of {given.layer_count}; a draft model has to be whole"
            )
        own = Vocabulary(path)
        try:
            check_same_vocabulary(own, vocabulary, path)
        finally:
            own.close()
        self.context = min(context, read_header(path).integer(".context_length", context))
        self._engine = StageEngine(path, lanes=lanes, context=self.context, threads=threads, exact=False)
        self._samplers: dict[int, Sampler] = {}

    def open(self, lane: int, sampling: Sampling) -> None:
        """Samples as the session does."""
        self.close_lane(lane)
        # What the grammar forbids, the target will not pick; that rare case is not worth a grammar of its own here.
        plain = evolve(sampling, grammar="", logprobs=0)
        self._samplers[lane] = Sampler(plain, self._engine.n_vocab)

    def close_lane(self, lane: int) -> None:
        """Frees its sampler."""
        sampler = self._samplers.pop(lane, None)
        if sampler is not None:
            sampler.close()

    def run(self, jobs: Sequence[DraftJob], seconds: float) -> list[Drafted]:
        """Runs the jobs' tokens, then drafts token after token for all that want some, for about `seconds`.

        At least one token for each of these. Raises EngineError if llama.cpp fails.
        """
        until = time.perf_counter() + seconds
        chains = [_Chain(job) for job in jobs]
        spans = [Span(job.lane, job.start, job.tokens, wanted=min(job.most, 1)) for job in jobs]
        running = chains
        while True:
            for chain, logits in zip(running, self._engine.run(spans), strict=True):
                if len(logits):
                    chain.take(logits[0], self._samplers[chain.job.lane])
            running = [chain for chain in chains if len(chain.tokens) < chain.job.most]
            if not running or time.perf_counter() >= until:
                return [Drafted(tuple(chain.tokens), tuple(chain.probabilities)) for chain in chains]
            spans = [
                Span(chain.job.lane, chain.position - 1, chain.tokens[-1:], wanted=1) for chain in running
            ]

    def close(self) -> None:
        """Frees the model; safe to call twice."""
        for lane in list(self._samplers):
            self.close_lane(lane)
        self._engine.close()


@define(eq=False)
class _Chain:
    """The tokens drafted after one job's."""

    job: DraftJob
    tokens: list[int] = field(factory=list)
    probabilities: list[float] = field(factory=list)

    @property
    def position(self) -> int:
        """That of the next token to be drafted."""
        return self.job.stop + len(self.tokens)

    def take(self, logits: Rows, sampler: Sampler) -> None:
        """Adds the token that the sampler picks, given the logits (n_vocab,) of the position before."""
        before = [*self.job.line[: self.job.stop], *self.tokens] if sampler.remembers else ()
        token = sampler.pick(logits, before, self.position)
        self.tokens.append(token)
        self.probabilities.append(probability(logits, token))


def probability(logits: Rows, token: int) -> float:
    """The softmax of logits (n_vocab,) at a token."""
    top = logits.max()
    return float(np.exp(logits[token] - top) / np.exp(logits - top).sum())


def check_same_vocabulary(draft: Vocabulary, target: Vocabulary, path: str | Path) -> None:
    """Raises ModelError, which shows the first difference, unless every token means the same in both.

    Either may have further tokens at the end that it never uses (padding).
    """
    shared = min(draft.size, target.size)
    for token in range(max(draft.size, target.size)):
        texts = [vocabulary.raw(token) if token < vocabulary.size else None for vocabulary in (draft, target)]
        if texts[0] == texts[1]:
            continue
        if token >= shared and (draft if target.size == shared else target).unused(token):
            continue
        said = [f"{text!r}" if text is not None else "no such token" for text in texts]
        raise ModelError(
            f"{path} cannot draft for this model: its vocabulary differs first at token {token}, which is "
            f"{said[0]} there and {said[1]} in the model; a draft model needs the same vocabulary"
        )
