"""The session actor: one request's ledger, proposers and pace, from prompt to last token.

It sends a window whenever there is something to send and a credit for it: after the open, after every reply,
after every late proposal. It asks its proposers with the complete optimistic suffix, so that a run of
proposals does not drain before the next one is asked for. Prefill windows go out ahead of any reply, as many
as the pipe has room for; each one that the last stage has run makes room for the next.

Output goes into a channel in commit order. Its buffer holds the whole answer if need be, so that a consumer
that reads slowly, or not at all, delays nobody.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from typing import Protocol

import trio
from attrs import define, field, frozen

from meshpipe.actors import Actor, Ask, Mailbox, handles
from meshpipe.errors import ActorGoneError, EngineError, MeshpipeError, StageLostError
from meshpipe.messages import (
    CloseSession,
    Discard,
    OpenSession,
    Progress,
    Proposal,
    Reply,
    Sampling,
    SessionFailed,
    SessionOpened,
    TokenLogprobs,
    Window,
)
from meshpipe.pipeline.credits import CreditScheduler
from meshpipe.pipeline.report import Report, Stopwatch
from meshpipe.pipeline.stage import Sender
from meshpipe.pipeline.stops import StopStrings
from meshpipe.speculation.composite import Composite
from meshpipe.speculation.ledger import Commit, Ledger
from meshpipe.speculation.ngram import NgramProposer, SharedStore
from meshpipe.speculation.policy import Pace, Pipe
from meshpipe.speculation.settings import Speculation
from meshpipe.telemetry.observers import Observer
from meshpipe.telemetry.spans import COORDINATOR, Cause, Kind, Recorder, Span


class Text(Protocol):
    """Turns tokens into text as they come (`meshpipe.llama.vocabulary.TextStream`)."""

    def feed(self, tokens: Sequence[int]) -> str:
        """The text that these tokens complete."""

    def finish(self) -> str:
        """What is left of an unfinished character."""


@frozen
class Piece:
    """Output of one commit: its tokens and the text they complete. The last piece carries the report.

    `logprobs`, if they were asked for, has an entry for each token. `sources` names for each token the proposer
    that foresaw it, or None; `diverged` says that the last token took the place of a wrong guess.
    """

    text: str
    tokens: tuple[int, ...]
    report: Report | None = None
    sources: tuple[str | None, ...] = ()
    diverged: bool = False
    logprobs: tuple[TokenLogprobs, ...] = ()


@define(eq=False)
class Output:
    """Where a session's pieces go; after `channel` is closed, `failure` says whether it ended badly."""

    channel: trio.MemorySendChannel[Piece]
    failure: Exception | None = None


@frozen
class Cancel:
    """Ends the session from outside."""

    reason: str = "cancelled"


@frozen
class Reroute:
    """Replies may be lost for good: what is in flight has to be dispatched again."""


SessionMessage = Reply | Progress | SessionOpened | SessionFailed | Proposal | Cancel | Reroute


def session_mailbox() -> Mailbox[SessionMessage]:
    """Replies are bounded by the windows in flight; the bound only keeps a mad peer from filling memory."""
    return Mailbox({"control": 64, "replies": 4096}, sort=_queue_of)


def _queue_of(message: SessionMessage) -> str:
    return "replies" if isinstance(message, (Reply, Progress, SessionOpened)) else "control"


@frozen
class Request:
    """What a session is asked to do, checked and tokenized."""

    ledger: Ledger
    lane: int
    cached: int
    sampling: Sampling
    speculation: Speculation
    stops: tuple[str, ...]
    text: Text
    exact: bool
    shared: SharedStore | None = None


@frozen
class Surroundings:
    """What sessions share: the pipe and its credits, the way to the first stage, how long silence may last.

    `recorder` and `observers` are told what happens.
    """

    first: Sender
    pipe: Pipe
    credits: CreditScheduler
    stall_deadline: float
    recorder: Recorder = field(factory=Recorder)
    observers: list[Observer] = field(factory=list)


class Session(Actor[SessionMessage]):
    """Runs one request; what it says goes to `output`, whose channel it closes."""

    def __init__(
        self,
        mailbox: Mailbox[SessionMessage],
        request: Request,
        around: Surroundings,
        output: Output,
    ) -> None:
        super().__init__(mailbox)
        self._request = request
        self._around = around
        self._output = output
        self._ledger = request.ledger
        self._credits = around.credits.open()
        speculation = request.speculation
        speculates = speculation.mode != "off"
        ngram = NgramProposer(speculation.ngram, request.shared) if speculates else None
        self._composite = Composite(self._ledger, ngram)
        self._pace = Pace(
            around.pipe,
            width=speculation.width,
            depth=speculation.depth if speculates else 1,
            max_width=speculation.max_width,
        )
        self._fixed_depth = speculation.depth != "auto"
        self._ledger.credits = 1_000_000  # the pace and the scheduler decide
        self._stops = StopStrings(request.stops)
        self._prefill_room = self._prefill_depth()
        self._sent: dict[int, float] = {}  # dispatch times of windows that want a reply
        self._watch = Stopwatch(trio.current_time())
        self._logprobs: dict[int, TokenLogprobs] = {}  # of picks that are not committed yet, by position
        self._waits_for = Cause.REPLY

    async def run(self) -> None:
        """Until the last token, a failure or a cancellation; frees the lane on every stage in any case."""
        try:
            first, request = self._around.first, self._request
            prefix = tuple(self._ledger.committed[: request.cached])
            prompt = self._ledger.frontier - self._ledger.generated
            opening = OpenSession(self._ledger.session, request.lane, request.sampling, prefix, prompt=prompt)
            await first.send(opening)
            await self._refill()
            while self._ledger.finished is None:
                await self._handle_next()
                await self._refill()
            self._finish()
        except MeshpipeError as error:
            self._output.failure = error
        finally:
            self._credits.close()
            self._output.channel.close()
            self._record(Kind.SESSION, 0, self._ledger.generated, self._watch.began)
            await self._leave()

    async def _handle_next(self) -> None:
        """Takes all that has come, so that the windows that follow know of every reply.

        Silence is a hang only beyond what the stages' own measured speed explains: `stall_deadline` and ten times
        the latency of the widest window.
        """
        patience = self._around.stall_deadline
        patience += 10 * self._around.pipe.latency(self._ledger.limits.prefill_width)
        began = trio.current_time()
        with trio.move_on_after(patience) as scope:
            await self.mailbox.wait()
        if scope.cancelled_caught:
            raise StageLostError(
                f"session {self._ledger.session}: no reply for {patience:.0f} s with "
                f"{len(self._sent)} windows in flight; a stage or a link hangs"
            )
        self._record(Kind.WAIT, 0, len(self._sent), began, self._waits_for)
        for message in (*self.mailbox.take("control"), *self.mailbox.take("replies")):
            await self.dispatch(message.message if isinstance(message, Ask) else message)
            if self._ledger.finished is not None:
                return

    async def _leave(self) -> None:
        """Tells every stage that the lane is free; what is still in flight is dropped on the way.

        The lane is not free before that is said, so this waits for room as long as the link to the first stage
        lives; when it is cancelled (the pipeline is closing), not at all.
        """
        number = self._ledger.session
        with suppress(ActorGoneError):  # no stage is left that could hold the lane
            self._around.first.try_send(Discard(number, self._ledger.epoch + 1))
            if not self._around.first.try_send(CloseSession(number)):
                await self._around.first.send(CloseSession(number))

    # ---------------------------------------------------------------- what comes

    @handles(Reply)
    async def replied(self, reply: Reply) -> None:
        """A window's picks: commits what they confirm."""
        now = trio.current_time()
        sent = self._sent.pop(reply.number, None)
        self._record(Kind.REPLY, reply.number, len(reply.tokens), epoch=reply.epoch)
        if sent is not None and reply.epoch == self._ledger.epoch:
            self._around.pipe.observe(now - sent, reply.timings)
            for observer in self._around.observers:
                observer.replied(now - sent, reply.timings)
        if reply.epoch == self._ledger.epoch:
            self._logprobs |= zip(count(reply.start + 1), reply.logprobs, strict=False)
        for commit in self._ledger.receive(reply):
            await self._committed(commit, now)
            if self._stops.stopped:
                self._ledger.finish("stop")
            if self._ledger.finished is not None:
                break

    @handles(Progress)
    async def progressed(self, progress: Progress) -> None:
        """A prefill window has been run everywhere: there is room for another."""
        self._prefill_room += 1

    @handles(SessionOpened)
    async def opened(self, opened: SessionOpened) -> None:
        """Every stage has admitted the session; the windows are on their way already."""

    @handles(SessionFailed)
    async def failed(self, failed: SessionFailed) -> None:
        """A stage cannot go on."""
        raise EngineError(f"stage {failed.stage}: {failed.reason}")

    @handles(Proposal)
    async def proposed(self, proposal: Proposal) -> None:
        """A proposer that computes has an answer."""
        self._composite.offer(proposal)

    @handles(Reroute)
    async def rerouted(self, reroute: Reroute) -> None:
        """Begins again at the frontier, in a new epoch."""
        discard = self._ledger.reroute()
        self._pace.restart()
        self._credits.drop_all()
        self._sent.clear()
        self._prefill_room = self._prefill_depth()
        if discard is not None:
            self._around.first.try_send(discard)

    @handles(Cancel)
    async def cancelled(self, cancel: Cancel) -> None:
        """The caller wants no more."""
        self._ledger.finish(cancel.reason)

    async def _committed(self, commit: Commit, now: float) -> None:
        self._credits.retire(commit.number)
        epoch = commit.epoch - commit.diverged
        self._record(Kind.COMMIT, commit.number, len(commit.tokens), None, commit.diverged, epoch)
        if commit.diverged:
            self._credits.drop_all()
            self._sent.clear()
        if commit.discard is not None:
            self._around.first.try_send(commit.discard)
        self._pace.retired(commit.number, self._composite.update())
        if commit.diverged:
            self._pace.restart()
        text, tokens = "", []
        for token in commit.tokens:
            tokens.append(token)
            text += self._stops.feed(self._request.text.feed((token,)))
            if self._stops.stopped:  # what was committed behind the stop string is no output
                break
        self._watch.committed(now, len(tokens))
        self._watch.flying(now, self._ledger.in_flight)
        picked = range(commit.start, commit.start + len(tokens))
        logprobs = tuple(self._logprobs.pop(at) for at in picked if at in self._logprobs)
        if commit.diverged:
            self._logprobs.clear()
        piece = Piece(
            text,
            tuple(tokens),
            sources=commit.sources[: len(tokens)],
            diverged=commit.diverged and len(tokens) == len(commit.tokens),
            logprobs=logprobs,
        )
        self._output.channel.send_nowait(piece)

    def _finish(self) -> None:
        reason = "stop" if self._stops.stopped else self._ledger.finished or "unknown"
        now = trio.current_time()
        self._watch.flying(now, 0)
        rest = "" if self._stops.stopped else self._stops.feed(self._request.text.finish())
        rest += "" if self._stops.stopped else self._stops.finish()
        report = self._watch.report(
            now,
            self._ledger.counters,
            prompt=self._ledger.frontier - self._ledger.generated,
            cached=self._request.cached,
            reason=reason,
            exact=self._request.exact,
        )
        for observer in self._around.observers:
            observer.finished(report)
        self._output.channel.send_nowait(Piece(rest, (), report))

    # ---------------------------------------------------------------- what goes

    async def _refill(self) -> None:
        """Sends every window that there is something to send for, and a credit."""
        self._waits_for = Cause.REPLY
        while self._ledger.finished is None:
            if self._ledger.prefilling:
                if self._prefill_room < 1:
                    return
                window = self._composite.dispatch(1)
                assert window is not None
                self._prefill_room -= not window.wanted
                survival: Sequence[float] = [1.0]
            else:
                began = trio.current_time()
                survival = self._composite.survival()
                self._record(Kind.PROPOSE, 0, len(survival), began)
                width = self._pace.next_width(survival)
                if not width:
                    self._credits.wants = False
                    self._waits_for = Cause.REPLY if self._pace.full else Cause.PROPOSAL
                    return
                borrows = self._pace.in_flight and not self._fixed_depth
                if borrows and not self._credits.may_borrow(self._around.pipe.latency(width)):
                    self._waits_for = Cause.CREDIT
                    return
                window = self._composite.dispatch(width)
                if window is None:
                    return
                survival = survival[: window.width]
            await self._send(window, survival)

    async def _send(self, window: Window, survival: Sequence[float]) -> None:
        if window.wanted:
            now = trio.current_time()
            self._pace.sent(window.number, survival)
            self._credits.take(window.number, self._pace.pipe.slowest(len(survival)))
            self._sent[window.number] = now
            self._watch.sent(now, window.wanted, self._ledger.in_flight)
        kind = Kind.DISPATCH if window.wanted == window.width else Kind.PREFILL
        self._record(kind, window.number, window.width, None, window.start)
        await self._around.first.send(window)

    def _record(
        self,
        kind: Kind,
        window: int,
        value: int,
        began: float | None = None,
        detail: int = 0,
        epoch: int | None = None,
    ) -> None:
        """Tells the recorder, if it is on: from `began` to now, or an instant."""
        if (recorder := self._around.recorder).on:
            now = trio.current_time()
            session, epoch = self._ledger.session, self._ledger.epoch if epoch is None else epoch
            began = now if began is None else began
            recorder.add(Span(kind, began, now, COORDINATOR, session, epoch, window, value, detail))

    def _prefill_depth(self) -> int:
        """Prefill windows that fill the pipe: by Little's law, and one more a stage to hide the hand-over."""
        pipe, width = self._around.pipe, self._ledger.limits.prefill_width
        return math.ceil(pipe.latency(width) / pipe.slowest(width)) + len(pipe.curves)
