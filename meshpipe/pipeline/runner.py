"""What a stage computes with: llama.cpp in a thread, or a simulated engine on a virtual clock.

A runner takes the windows of one decode as jobs. The same stage actor drives either kind.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeVar

import numpy as np
import outcome
import trio
from attrs import evolve, field, frozen

from meshpipe import __version__
from meshpipe.errors import EngineError
from meshpipe.llama.decodes import Span
from meshpipe.llama.engine import Aborted, StageEngine
from meshpipe.llama.sampling import Sampler
from meshpipe.messages import Rows, Sampling, StageDescriptor, TokenLogprobs, Window
from meshpipe.speculation.policy import CostCurve

__all__ = ["Aborted", "Job", "LlamaRunner", "Picks", "Runner", "SimulatedRunner", "matching_picks"]

T = TypeVar("T")

log = logging.getLogger("meshpipe.runner")

LEAST_DRAFT = 0.05
"""A chain of native MTP ends before the guess that makes it less probable than that: it would not be sent."""


@frozen
class Job:
    """One window to run on its lane. `tokens` are the session's tokens by position, the window's included.

    For the last stage: `mtp` and `hidden_from` as of OpenSession; `follows` is the token after the window if the
    window that has it is here already, so that a pick that equals it needs no drafts.
    """

    lane: int
    window: Window
    tokens: Sequence[int]
    mtp: bool = False
    hidden_from: int | None = None
    follows: int | None = None


@frozen
class Picks:
    """What the last stage says of a window; `logprobs`, `drafts` and `hidden` as in `Reply`, `drafting` in seconds."""

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    drafts: tuple[tuple[int, float], ...] = ()
    hidden: Rows | None = field(default=None, eq=False, repr=False)
    drafting: float = 0.0


Result = Rows | Picks
"""What leaves a stage for one window: activations (width, n_embd), or on the last stage the picks."""


class Runner(Protocol):
    """What a stage actor needs of an engine."""

    @property
    def descriptor(self) -> StageDescriptor:
        """What the stage is and admits."""

    def open(self, lane: int, sampling: Sampling, prompt: int = 0) -> None:
        """A session with these settings, and so many tokens given, begins on the lane.

        Raises UsageError for settings out of bounds.
        """

    def close(self, lane: int) -> None:
        """The session on the lane has ended; its cache stays until a window trims it."""

    def length(self, lane: int) -> int:
        """Positions in the lane's cache."""

    def steps(self) -> int:
        """A number that rises as a decode computes, or at least with every decode."""

    async def run(self, jobs: Sequence[Job]) -> list[Result]:
        """Trims and runs the jobs as one indivisible piece of work.

        Raises EngineError, and Aborted after `abort`; the jobs' lanes are then trimmed to where they began.
        """

    def abort(self) -> None:
        """Ends the running decode early if the backend can."""


def matching_picks(window: Window, pick: Callable[[int], int]) -> tuple[int, ...]:
    """The picks for a window's wanted rows, up to the first that differs from the window's own next token.

    `pick(i)` is the choice of the row at position `window.start + i`.
    """
    picks: list[int] = []
    for index in range(window.width - window.wanted, window.width):
        token = pick(index)
        picks.append(token)
        if index + 1 < window.width and token != window.tokens[index + 1]:
            break
    return tuple(picks)


def _goes_on(job: Job, picks: Picks) -> bool:
    """Whether the window after this one is here already, and right so far."""
    return len(picks.tokens) == job.window.wanted and picks.tokens[-1:] == (job.follows,)


async def _in_thread(work: Callable[[], T]) -> T:
    """What `work` returns or raises, run in one of trio's worker threads; it is not cancelled half-way.

    `trio.to_thread.run_sync` gives up a turn before it starts, and looks after limits and contexts: at one decode
    of a few milliseconds a token, that was 1% of all time. A stage runs one job at a time anyway.
    """
    await trio.lowlevel.checkpoint_if_cancelled()
    task, trio_token = trio.lowlevel.current_task(), trio.lowlevel.current_trio_token()

    def deliver(result: outcome.Outcome[T]) -> None:
        trio_token.run_sync_soon(trio.lowlevel.reschedule, task, result)

    trio.lowlevel.start_thread_soon(work, deliver)
    done: T = await trio.lowlevel.wait_task_rescheduled(lambda _: trio.lowlevel.Abort.FAILED)
    return done


class LlamaRunner:
    """A `StageEngine` in one worker thread at a time."""

    def __init__(self, engine: StageEngine) -> None:
        self._engine = engine
        self._samplers: dict[int, Sampler] = {}
        self._picked = 0
        slice_ = engine.slice
        self.path = slice_.path
        self.descriptor = StageDescriptor(
            model_digest=slice_.model_digest,
            layers=(slice_.start, slice_.stop),
            layer_count=slice_.layer_count,
            n_embd=engine.n_embd,
            n_vocab=engine.n_vocab,
            lanes=engine.lanes,
            context=engine.context,
            cost=engine.cost,
            exact=engine.decodes.exact,
            most_rows=engine.decodes.most,
            fingerprint=engine.fingerprint,
            instance=secrets.token_hex(8),
            version=__version__,
            mtp=engine.mtp.heads if engine.mtp is not None else 0,
            draft_cost=engine.draft_cost,
            vocabulary=slice_.vocabulary,
        )

    def open(self, lane: int, sampling: Sampling, prompt: int = 0) -> None:
        """See `Runner.open`."""
        if self._engine.slice.is_last:
            engine = self._engine
            self._samplers[lane] = Sampler(
                sampling, engine.n_vocab, vocab=engine.vocab, prompt=prompt, waits=self._moves
            )

    def close(self, lane: int) -> None:
        """See `Runner.close`."""
        sampler = self._samplers.pop(lane, None)
        if sampler is not None:
            sampler.close()

    def close_all(self) -> None:
        """Ends whatever sessions are open."""
        for lane in list(self._samplers):
            self.close(lane)

    def length(self, lane: int) -> int:
        """See `Runner.length`."""
        return self._engine.length(lane)

    def steps(self) -> int:
        """See `Runner.steps`: nodes computed, tokens picked, and looks at a grammar that is slow.

        Those have an end of their own (`Grammar`): no decode hangs while a grammar is waited for.
        """
        return self._engine.steps + self._picked

    def _moves(self) -> None:
        self._picked += 1

    async def run(self, jobs: Sequence[Job]) -> list[Result]:
        """See `Runner.run`."""
        self._engine.rearm()
        return await _in_thread(partial(self._run, jobs))

    def abort(self) -> None:
        """See `Runner.abort`."""
        self._engine.abort()

    def _run(self, jobs: Sequence[Job]) -> list[Result]:
        engine = self._engine
        is_last, drafts = engine.slice.is_last, engine.mtp is not None
        spans = [
            Span(
                job.lane,
                job.window.start,
                tokens=job.window.tokens if job.window.rows is None else (),
                rows=job.window.rows,
                wanted=job.window.wanted,
                hidden=is_last and ((job.mtp and drafts) or job.hidden_from is not None),
            )
            for job in jobs
        ]
        outputs = engine.run(spans, keep=False)
        if not is_last:
            return list(outputs)
        results: list[Result] = []
        wrong: set[int] = set()  # lanes on which what follows in this job is stale
        for job, logits, hidden in zip(jobs, outputs, engine.hidden_rows(), strict=True):
            picks = self._picks(job, logits)
            if job.lane not in wrong:
                picks = self._with_drafts(job, picks, hidden)
            if job.window.wanted and not _goes_on(job, picks):
                wrong.add(job.lane)
            results.append(picks)
        return results

    def _with_drafts(self, job: Job, picks: Picks, hidden: Rows | None) -> Picks:
        """Adds what native MTP expects after the picks, and the hidden rows that the session asked for."""
        window, mtp = job.window, self._engine.mtp
        if mtp is None and hidden is None:
            return picks
        if hidden is not None:
            hidden = hidden[: window.width - window.wanted + len(picks.tokens)]
        drafts: tuple[tuple[int, float], ...] = ()
        began = time.perf_counter()
        if mtp is not None:
            mtp.trim(job.lane, window.start)
        if mtp is not None and hidden is not None and job.mtp:
            mtp.keep(job.lane, window.start, hidden)
            line = (*job.tokens[: window.start + len(hidden)], *picks.tokens[-1:])
            try:
                if window.drafts and picks.tokens and not _goes_on(job, picks):
                    drafts = tuple(mtp.draft(job.lane, line, window.drafts, LEAST_DRAFT))
                elif window.drafts and not window.wanted:  # prefill, in bulk as it is
                    mtp.feed(job.lane, line)
            except EngineError as error:
                log.warning("lane %d: no drafts: %s", job.lane, error)
        spent = time.perf_counter() - began
        asked = None
        if job.hidden_from is not None and hidden is not None:
            asked = hidden[max(job.hidden_from - window.start, 0) :]
        return evolve(picks, drafts=drafts, hidden=asked, drafting=spent)

    def _picks(self, job: Job, logits: Rows) -> Picks:
        window, sampler = job.window, self._samplers[job.lane]
        first = window.width - window.wanted

        def pick(index: int) -> int:
            self._moves()
            return sampler.pick(logits[index - first], job.tokens, window.start + index + 1)

        tokens = matching_picks(window, pick)
        return Picks(tokens, tuple(map(sampler.logprobs, logits, tokens)) if sampler.says_logprobs else ())


Guesser = Callable[[Sequence[int], int], Sequence[tuple[int, float]]]
"""Gives at most so many (token, probability) that it expects to follow the tokens."""


class SimulatedRunner:
    """An engine without a model: takes the descriptor's cost in seconds of trio's clock, says what `target` says.

    `target(tokens)` gives the token that follows `tokens`, which are what the lane's cache holds, as in llama.cpp.
    `drafter` stands for native MTP, at the descriptor's `draft_cost`. A hidden row holds its position and token. Keeps
    the rule that no window runs above its cache.
    """

    def __init__(
        self,
        descriptor: StageDescriptor,
        target: Callable[[Sequence[int]], int],
        drafter: Guesser | None = None,
    ) -> None:
        self.descriptor = descriptor
        self._drafter = drafter
        self._cost = CostCurve(descriptor.cost)
        self._target = target
        self._caches: list[list[int]] = [[] for _ in range(descriptor.lanes)]
        self._decodes = 0
        self._is_last = descriptor.layers[1] == descriptor.layer_count

    def open(self, lane: int, sampling: Sampling, prompt: int = 0) -> None:
        """See `Runner.open`."""

    def close(self, lane: int) -> None:
        """See `Runner.close`."""

    def length(self, lane: int) -> int:
        """See `Runner.length`."""
        return len(self._caches[lane])

    def abort(self) -> None:
        """See `Runner.abort`: this one cannot."""

    def steps(self) -> int:
        """See `Runner.steps`: one a decode."""
        return self._decodes

    async def run(self, jobs: Sequence[Job]) -> list[Result]:
        """See `Runner.run`."""
        self._decodes += 1
        await trio.sleep(self._cost(sum(job.window.width for job in jobs)))
        results: list[Result] = []
        for job in jobs:
            window, cache = job.window, self._caches[job.lane]
            assert window.start <= len(cache)
            cache[window.start :] = window.tokens
            if self._is_last:
                picks = Picks(matching_picks(window, partial(self._pick, cache, window.start)))
                results.append(await self._with_drafts(job, picks))
            else:
                results.append(np.zeros((window.width, self.descriptor.n_embd), np.float32))
        return results

    async def _with_drafts(self, job: Job, picks: Picks) -> Picks:
        window = job.window
        if job.hidden_from is not None:
            confirmed = window.start + window.width - window.wanted + len(picks.tokens)
            picks = evolve(
                picks, hidden=self._hidden(job.tokens, max(job.hidden_from, window.start), confirmed)
            )
        if self._drafter is None or not (window.drafts and picks.tokens) or _goes_on(job, picks):
            return picks
        known = window.stop - window.wanted + len(picks.tokens)
        drafts = tuple(self._drafter((*job.tokens[:known], picks.tokens[-1]), window.drafts))
        spent = len(drafts) * self.descriptor.draft_cost
        await trio.sleep(spent)
        return evolve(picks, drafts=drafts, drafting=spent)

    def _hidden(self, tokens: Sequence[int], start: int, stop: int) -> Rows:
        rows = np.zeros((max(stop - start, 0), self.descriptor.n_embd), np.float32)
        rows[:, 0] = np.arange(start, start + len(rows))
        rows[:, 1] = tokens[start : start + len(rows)]
        return rows

    def _pick(self, cache: Sequence[int], start: int, index: int) -> int:
        return self._target(cache[: start + index + 1])
