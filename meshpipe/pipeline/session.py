"""The session actor: one request's ledger, proposers and pace, from prompt to last token.

It sends a window whenever there is something to send and a credit for it: after the open, after every reply,
after every late proposal. It asks its proposers with the complete optimistic suffix, so that a run of
proposals does not drain before the next one is asked for. Prefill windows go out ahead of any reply, as many
as the pipe has room for; each one that the last stage has run makes room for the next.

It never waits for a stage alone. While something waits for room on the way, what comes for the session is looked
at: a cancellation, or news of the way. When the way to the stages has been formed anew (`meshpipe.pipeline.way`),
or the lane was refused, the session opens once more and runs its committed tokens again; nobody downstream notices
but by the pause.

Output goes into a channel in commit order, and as a rule after the window that follows the commit has gone: the
stages need not wait for text to be made. The channel's buffer holds the whole answer if need be, so that a consumer
that reads slowly, or not at all, delays nobody.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import count

import trio
from attrs import evolve

from meshpipe.actors import Actor, Ask, Mailbox, handles
from meshpipe.errors import CapacityError, EngineError, MeshpipeError, StageLostError, UsageError
from meshpipe.messages import (
    CloseSession,
    Discard,
    OpenSession,
    Progress,
    Proposal,
    Reply,
    SessionFailed,
    SessionOpened,
    TokenLogprobs,
    Window,
)
from meshpipe.pipeline.following import Following
from meshpipe.pipeline.lanes import alike_digest, prefix_digest
from meshpipe.pipeline.report import Stopwatch
from meshpipe.pipeline.request import (
    QUEUES,
    Cancel,
    Output,
    Piece,
    Request,
    Reroute,
    SessionMessage,
    Surroundings,
    WayChanged,
)
from meshpipe.pipeline.stops import StopStrings
from meshpipe.speculation.composite import MTP, Composite
from meshpipe.speculation.drafting import Drafting
from meshpipe.speculation.ledger import Commit
from meshpipe.speculation.ngram import NgramProposer
from meshpipe.speculation.policy import Pace
from meshpipe.telemetry.spans import COORDINATOR, Cause, Kind, Span

TURN = 256
"""Tokens of a prompt that are indexed in one turn, some milliseconds: others do not wait for a long one's end."""
MOST_RESUMES = 5
"""Times that a session begins again without any progress in between: what it asks for may be what hangs the stages."""


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
        ngram = NgramProposer(speculation.ngram, request.shared) if speculation.uses_ngram else None
        self._composite = Composite(self._ledger, ngram, calibration=request.calibration)
        self._pace = Pace(
            around.pipe,
            width=speculation.width,
            depth=speculation.depth if speculates else 1,
            max_width=speculation.max_width,
        )
        self._drafting = Drafting(
            around.pipe,
            around.draft_cost,
            speculation.mtp_max if request.mtp_at == "last" else 0,
            always=speculation.mode != "auto",
        )
        self._drafts: dict[int, Reply] = {}  # with drafts or rows, not retired yet, by window number
        self._following: Following | None = None
        if request.proposer is not None:
            tail = max(0, self._ledger.frontier - speculation.mtp_tail)
            self._following = Following(
                request.proposer,
                self._ledger,
                self._composite,
                self._pace,
                OpenSession(self._ledger.session, request.lease.lane, request.sampling),
                hidden_from=tail if request.mtp_at == "coordinator" else None,
                worth=request.worth,
                sessions=lambda: around.credits.sessions,
            )
        self._fixed_depth = speculation.depth != "auto"
        self._stops = StopStrings(request.stops)
        self._prefilling: set[int] = set()  # prefill windows on their way
        self._sent: dict[int, float] = {}  # dispatch times of windows that want a reply
        self._unsent: deque[OpenSession | CloseSession | Window] = deque()  # waiting for room on the way
        self._generation = 0  # of the way on which the session was opened last
        self._asked_for = 0  # positions that the stages' caches were asked to keep then
        self._kept = [0] * len(around.pipe.curves)  # by stage: tokens that it did not run again
        self._fingerprints = around.first.fingerprints
        self._exact = request.exact
        self._refused_since: float | None = None
        self._refusals = 0
        self._silences = 0
        self._resumed_in_vain = 0
        self._watch = Stopwatch(trio.current_time())
        self._logprobs: dict[int, TokenLogprobs] = {}  # of picks that are not committed yet, by position
        self._waits_for = Cause.REPLY
        self._unsaid: list[Commit] = []  # commits whose output still has to be made

    async def run(self) -> None:
        """Until the last token, a failure or a cancellation; frees the lane on every stage in any case."""
        try:
            await self._open(self._request.lease.cached)
            await self._refill()  # the prompt is on its way before time is spent on indexing it
            while self._composite.index(TURN):
                await trio.lowlevel.checkpoint()
            while self._ledger.finished is None:
                await self._refill()
                self._say_all()
                if self._following is not None:
                    self._following.tell()
                await self._handle_next()
            self._finish()
        except MeshpipeError as error:
            self._say_all()
            self._output.failure = error
        finally:
            self._credits.close()
            self._output.channel.close()
            prompt = self._ledger.frontier - self._ledger.generated
            self._record(Kind.SESSION, 0, self._ledger.generated, self._watch.began, prompt)
            await self._leave()
            if self._following is not None:
                await self._following.close()

    async def _handle_next(self) -> None:
        """Takes all that has come, so that the windows that follow know of every reply."""
        began = trio.current_time()
        with trio.move_on_at(self._deadline()) as scope:
            await self.mailbox.wait()
        self._record(Kind.WAIT, 0, len(self._sent), began, self._waits_for)
        if scope.cancelled_caught:
            await self._heard_nothing()
            return
        for message in [message for queue in QUEUES for message in self.mailbox.take(queue)]:
            await self.dispatch(message.message if isinstance(message, Ask) else message)
            if self._ledger.finished is not None:
                return
        if self._around.first.up and self._generation != self._around.first.generation:
            if self._resumed_in_vain == MOST_RESUMES:
                raise StageLostError(
                    f"session {self._ledger.session}: begun again {MOST_RESUMES} times, and each time a stage was lost "
                    "before there was any progress"
                )
            self._resumed_in_vain += 1
            await self._begin_again(reuse=self._around.first.same_caches)

    # ---------------------------------------------------------------- patience

    def _patience(self) -> float:
        """Seconds of silence that are a hang: beyond what the stages' own measured speed explains."""
        return self._around.stall_deadline + 10 * self._around.pipe.latency(self._ledger.limits.prefill_width)

    def _deadline(self) -> float:
        """Until when something has to come: a third of the patience, or a new way for the one that is broken."""
        way = self._around.first
        if way.up:
            return trio.current_time() + self._patience() / 3
        return way.since + self._around.resume_deadline

    async def _heard_nothing(self) -> None:
        """First sends again, in case replies were lost; then gives up the way; at last the request."""
        way = self._around.first
        if not way.up:
            if trio.current_time() < way.since + self._around.resume_deadline:
                return  # it has changed meanwhile
            raise StageLostError(
                f"session {self._ledger.session}: {way.reason}, and no way to the stages was found again within "
                f"{self._around.resume_deadline:g} s"
            )
        self._silences += 1
        if self._silences == 1:
            await self.rerouted(Reroute())
        elif self._silences == 2 and way.give_up is not None:
            way.give_up(f"no reply for {2 * self._patience() / 3:.0f} s: a stage hangs", None)
        elif self._silences > 2:
            raise StageLostError(
                f"session {self._ledger.session}: no reply for {self._patience():.0f} s with "
                f"{len(self._sent)} windows in flight; a stage or a link hangs"
            )

    # ---------------------------------------------------------------- opening, and opening again

    async def _open(self, cached: int) -> None:
        way, request = self._around.first, self._request
        self._generation, self._asked_for = way.generation, cached
        self._fingerprints, before = way.fingerprints, self._fingerprints
        self._exact = self._exact and before == way.fingerprints
        prefix = prefix_digest(self._ledger.committed[:cached])
        await self._push(
            OpenSession(
                self._ledger.session,
                request.lease.lane,
                request.sampling,
                cached,
                prefix,
                mtp=self._drafting.most > 0,
                hidden_from=self._following.hidden_from if self._following is not None else None,
                prompt=self._ledger.frontier - self._ledger.generated,
                alike=alike_digest(way.fingerprints),
            )
        )

    async def _begin_again(self, *, reuse: bool, close: bool = False) -> None:
        """Opens the session once more and dispatches from the confirmed positions, or without `reuse` from 0.

        `close`: some stages may hold it open.
        """
        if self._ledger.resume(self._ledger.confirmed if reuse else 0) is not None:
            self._restart()
            self._unsent.clear()
            if close:
                self._unsent.append(CloseSession(self._ledger.session))
            await self._open(self._ledger.confirmed)

    def _restart(self) -> None:
        """What was in flight is lost."""
        if self._following is not None:
            self._following.cut()
        self._pace.restart()
        self._credits.drop_all()
        self._sent.clear()
        self._prefilling.clear()
        self._unsent = deque(message for message in self._unsent if not isinstance(message, Window))
        self._drafts.clear()

    async def _leave(self) -> None:
        """Tells every stage that the lane is free; what is still in flight is dropped on the way.

        The lane is not free before that is said, so this waits for room as long as the link to the first stage
        lives; when it is cancelled (the pipeline is closing), not at all.
        """
        number = self._ledger.session
        self._around.first.try_send(Discard(number, self._ledger.epoch + 1))
        if not self._around.first.try_send(CloseSession(number)):
            await self._around.first.send(CloseSession(number))

    # ---------------------------------------------------------------- what comes

    @handles(Reply)
    async def replied(self, reply: Reply) -> None:
        """A window's picks: commits what they confirm."""
        now = trio.current_time()
        self._silences = self._resumed_in_vain = 0
        sent = self._sent.pop(reply.number, None)
        self._record(Kind.REPLY, reply.number, len(reply.tokens), epoch=reply.epoch)
        if sent is not None and reply.epoch == self._ledger.epoch:
            self._around.pipe.observe(now - sent, reply.timings)
            for observer in self._around.observers:
                observer.replied(now - sent, reply.timings)
        if (reply.drafts or reply.hidden is not None) and reply.epoch == self._ledger.epoch:
            self._drafts[reply.number] = reply
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
        self._silences = self._resumed_in_vain = 0
        self._prefilling.discard(progress.number)
        if self._following is not None and progress.hidden is not None:
            self._following.revealed(progress.hidden_start, progress.hidden)

    @handles(SessionOpened)
    async def opened(self, opened: SessionOpened) -> None:
        """Every stage has admitted the session; the windows are on their way already."""
        self._refused_since = None
        if self._ledger.counters.resumes and len(opened.held) == len(self._kept):
            again = range(self._asked_for, self._ledger.frontier - 1)
            self._kept = [
                kept + len(range(again.start, min(held, again.stop)))
                for kept, held in zip(self._kept, opened.held, strict=True)
            ]

    @handles(SessionFailed)
    async def failed(self, failed: SessionFailed) -> None:
        """A stage cannot go on, or has not begun: then another lane may do, or the same without its prefix."""
        if failed.wrong:
            raise UsageError(f"stage {failed.stage}: {failed.reason}")
        if not failed.refused:
            raise EngineError(f"stage {failed.stage}: {failed.reason}")
        now, lease, way = trio.current_time(), self._request.lease, self._around.first
        if self._refused_since is None:
            self._refused_since, self._refusals = now, 0
        if now - self._refused_since > self._around.stall_deadline:
            raise CapacityError(
                f"stage {failed.stage}: {failed.reason}; no other lane has become free either"
            )
        way.try_send(Discard(self._ledger.session, self._ledger.epoch + 1))
        if self._asked_for:
            lease.cached = 0
        else:
            self._refusals += 1
            self._around.lanes.swap(lease)
            if self._refusals >= self._around.lanes.count:
                await trio.sleep(min(1.0, 0.01 * 2 ** (self._refusals - self._around.lanes.count)))
        await self._begin_again(reuse=False, close=True)

    @handles(WayChanged)
    async def way_changed(self, changed: WayChanged) -> None:
        """What it means is seen when all that has come was handled."""

    @handles(Proposal)
    async def proposed(self, proposal: Proposal) -> None:
        """A proposer that computes has an answer."""
        if self._following is not None:
            self._following.offered(proposal)
        else:
            self._composite.offer(proposal)

    @handles(Reroute)
    async def rerouted(self, reroute: Reroute) -> None:
        """Begins again at the frontier, in a new epoch."""
        discard = self._ledger.reroute()
        if discard is not None:
            self._restart()
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
            self._prefilling.clear()
        if commit.discard is not None:
            self._around.first.try_send(commit.discard)
        verdict = self._composite.update()
        self._pace.retired(commit.number, verdict)
        if verdict.rejected and self._following is not None:
            self._following.cut()
        self._offer_drafts(commit)
        if commit.diverged:
            self._pace.restart()
        count = len(commit.tokens)
        if self._request.stops:
            count = self._say(commit)  # what follows is sent only if none of them has come
        else:
            self._unsaid.append(commit)
        self._watch.committed(now, count, commit.width)
        self._watch.flying(now, self._ledger.in_flight)

    def _say_all(self) -> None:
        """Puts out what has been committed."""
        for commit in self._unsaid:
            self._say(commit)
        self._unsaid.clear()

    def _say(self, commit: Commit) -> int:
        """Puts out a commit's text, up to a stop string; returns how many of its tokens that took."""
        text, tokens = "", []
        for token in commit.tokens:
            tokens.append(token)
            text += self._stops.feed(self._request.text.feed((token,)))
            if self._stops.stopped:  # what was committed behind the stop string is no output
                break
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
        return len(tokens)

    def _offer_drafts(self, commit: Commit) -> None:
        """What the reply that has retired brought for drafts: native MTP's own, or the rows for them."""
        self._drafting.committed(commit.start, commit.tokens)
        if self._following is not None:
            self._following.committed(commit.start, commit.tokens)
        reply = self._drafts.pop(commit.number, None)
        if commit.diverged:
            self._drafts.clear()
        if reply is not None and reply.hidden is not None and self._following is not None:
            self._following.revealed(reply.hidden_start, reply.hidden)
        if reply is not None and reply.drafts:
            tokens, probabilities = zip(*reply.drafts, strict=True)
            start = commit.start + len(commit.tokens)
            self._drafting.drafted(start, tokens, reply.timings[-1].drafting if reply.timings else 0.0)
            session, epoch = self._ledger.session, self._ledger.epoch
            self._composite.offer(Proposal(session, epoch, start, tokens, MTP, probabilities))

    def _finish(self) -> None:
        self._say_all()
        reason = "stop" if self._stops.stopped else self._ledger.finished or "unknown"
        now = trio.current_time()
        self._watch.flying(now, 0)
        rest = "" if self._stops.stopped else self._stops.feed(self._request.text.finish())
        rest += "" if self._stops.stopped else self._stops.finish()
        report = self._watch.report(
            now,
            self._ledger.counters,
            prompt=self._ledger.frontier - self._ledger.generated,
            cached=self._request.lease.cached,
            kept=tuple(self._kept),
            reason=reason,
            exact=self._exact,
            made=self._following.made if self._following is not None else {},
        )
        for observer in self._around.observers:
            observer.finished(report)
        self._output.channel.send_nowait(Piece(rest, (), report))

    # ---------------------------------------------------------------- what goes

    async def _refill(self) -> None:
        """Sends every window that there is something to send for, and a credit."""
        self._waits_for = Cause.REPLY
        if self._unsent and not await self._push():
            return
        while self._ledger.finished is None:
            if self._ledger.prefilling:
                if len(self._prefilling) >= self._prefill_depth():
                    return
                window = self._composite.dispatch(1)
                assert window is not None
                drafts = self._drafting.paying(self._around.credits.sessions)
                if not window.wanted:
                    self._prefilling.add(window.number)
                survival: Sequence[float] = [1.0]
            else:
                if not self._ledger.generated and self._sent:
                    return  # nothing is guessed before the model has spoken
                began = trio.current_time()
                survival = self._composite.survival()
                self._record(Kind.PROPOSE, 0, len(survival), began)
                width = self._fair(self._pace.next_width(survival))
                if not width:
                    self._credits.wants = False
                    self._waits_for = Cause.REPLY if self._pace.full else Cause.PROPOSAL
                    return
                borrows = self._pace.in_flight and not self._fixed_depth
                if borrows and not self._credits.may_borrow(self._around.pipe.room(width)):
                    self._waits_for = Cause.CREDIT
                    return
                window = self._composite.dispatch(width)
                if window is None:
                    return
                survival = survival[: window.width]
                drafts = self._drafting.wanted(self._around.credits.sessions)
            if not await self._send(evolve(window, drafts=drafts) if drafts else window, survival):
                return

    def _fair(self, width: int) -> int:
        """The width, or what of it is fair to other sessions; a fixed width is the caller's own choice."""
        if width > 1 and self._pace.width == "auto":
            pipe = self._around.pipe
            longest = self._credits.longest(pipe.slowest, pipe.room(1))
            while width > 1 and pipe.slowest(width) > longest:
                width -= 1
        return width

    async def _send(self, window: Window, survival: Sequence[float]) -> bool:
        """Says whether the window has gone; else it waits in `_unsent`, and news wait in the mailbox."""
        if window.wanted:
            now = trio.current_time()
            self._pace.sent(window.number, survival)
            self._credits.take(window.number, self._pace.pipe.slowest(len(survival)))
            self._sent[window.number] = now
            self._watch.sent(now, window.wanted, self._ledger.in_flight)
        kind = Kind.DISPATCH if window.wanted == window.width else Kind.PREFILL
        self._record(kind, window.number, window.width, None, window.start)
        return await self._push(window)

    async def _push(self, *messages: OpenSession | CloseSession | Window) -> bool:
        """Sends what waits, and these; says whether all has gone.

        Waits for room on the way until a control message comes; a window that is stale by now is forgotten.
        """
        self._unsent += messages
        way = self._around.first
        while self._unsent:
            message = self._unsent[0]
            stale = isinstance(message, Window) and message.epoch != self._ledger.epoch
            if not stale and not way.try_send(message):
                self._say_all()
                gone = False
                with trio.move_on_at(self._deadline()) as patience:
                    async with trio.open_nursery() as nursery:

                        async def interrupt(scope: trio.CancelScope = nursery.cancel_scope) -> None:
                            await self.mailbox.wait("urgent", "control")
                            scope.cancel()

                        nursery.start_soon(interrupt)
                        await way.send(message)
                        gone = True
                        nursery.cancel_scope.cancel()
                if not gone:
                    if patience.cancelled_caught:
                        await self._heard_nothing()
                    return False
            self._unsent.popleft()
        await trio.lowlevel.checkpoint()  # the stage may begin before the next window comes
        return True

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
