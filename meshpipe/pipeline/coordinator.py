"""The coordinator: takes requests, gives each a lane and a session actor, and hands out what they say."""

from __future__ import annotations

import logging
import math
import os
import secrets
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import trio
from attrs import frozen

from meshpipe.actors import Ref, supervise
from meshpipe.errors import (
    ActorGoneError,
    EngineError,
    MeshpipeError,
    OverloadedError,
    StageLostError,
    UsageError,
)
from meshpipe.llama.sampling import check as check_sampling
from meshpipe.llama.vocabulary import TextStream, Vocabulary
from meshpipe.messages import CloseSession, OpenSession, Sampling, SessionFailed, StageDescriptor
from meshpipe.pipeline.credits import CreditScheduler
from meshpipe.pipeline.lanes import Lanes
from meshpipe.pipeline.proposer import Load, Proposers, Told, draft_model, nextn_block
from meshpipe.pipeline.report import Report
from meshpipe.pipeline.request import (
    Cancel,
    Output,
    Piece,
    Request,
    Reroute,
    Surroundings,
    WayChanged,
    session_mailbox,
)
from meshpipe.pipeline.route import Sender
from meshpipe.pipeline.session import Session
from meshpipe.pipeline.sink import ReturnSink
from meshpipe.pipeline.stops import StopStrings
from meshpipe.pipeline.tracing import Tracer
from meshpipe.pipeline.way import Way
from meshpipe.speculation.composite import MTP, Calibration
from meshpipe.speculation.ledger import Ledger, Limits
from meshpipe.speculation.ngram import SharedStore
from meshpipe.speculation.policy import CostCurve, Pipe
from meshpipe.speculation.settings import Speculation
from meshpipe.speculation.worth import Worth
from meshpipe.telemetry.spans import COORDINATOR, Kind, Recorder, Span
from meshpipe.telemetry.trace import Trace
from meshpipe.wire.endpoints import STEADY

log = logging.getLogger("meshpipe.coordinator")

STALL_DEADLINE = 30.0
"""Seconds without any progress after which a session gives up."""
RESUME_DEADLINE = 60.0
"""Seconds that a session waits for a lost stage to come back, or for another in its place."""
QUEUE_DEADLINE = 3.0
"""Seconds that a new request waits for a pipeline that is broken and for which no stage is found."""
QUEUE = 1024
"""Requests that may wait for a lane."""


@frozen
class Completion:
    """A whole answer."""

    text: str
    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    report: Report


class Generation:
    """One request's output: an async iterator of pieces, the last of which carries the report.

    Leaving the `async with` block, `cancel`, or dropping the object ends the request, which frees the lane.
    """

    def __init__(
        self,
        prompt_tokens: tuple[int, ...],
        pieces: trio.MemoryReceiveChannel[Piece],
        output: Output,
        end: Callable[[], None],
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self.report: Report | None = None
        self._pieces = pieces
        self._output = output
        self._end = end
        self._cancelled = False
        self._trio = trio.lowlevel.current_trio_token()

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> Piece:
        try:
            piece = await self._pieces.receive()
        except trio.EndOfChannel:
            if self._output.failure is not None:
                raise self._output.failure from None
            if self.report is None and not self._cancelled:
                raise StageLostError("the pipeline was closed before the answer was complete") from None
            raise StopAsyncIteration from None
        if piece.report is not None:
            self.report = piece.report
        return piece

    def cancel(self) -> None:
        """Ends the request; what was committed already can still be read."""
        self._cancelled = True
        self._end()

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()

    def __del__(self) -> None:
        with suppress(trio.RunFinishedError):  # called in any thread, by the collector of cycles
            self._trio.run_sync_soon(self._end)


class Coordinator:
    """Runs sessions over a route of stages.

    `descriptors` are the stages', in order; `first` leads to the first one (a `Way` if it may be lost and formed
    anew); what the stages say comes into `sink`; `link` is the seconds that links add to a round trip;
    `encoding_exact` says that activations travel unchanged. `check_route` makes sure of the way to the first stage
    before a request uses it; `return_route` tells how replies come back, `processes` the numbers of the stages'
    processes, in order, if they were spawned. `stall_deadline` and `resume_deadline`: see `Surroundings`;
    `queue_deadline`: seconds that a new request waits for a way that is broken, unless it is about to be formed
    (`Way.hopeful`), then `resume_deadline`; `queue`: requests that may wait for a
    lane, in their order. `tracer` records traces;
    `observers` are told of each reply, and of each request that is done.
    """

    def __init__(
        self,
        nursery: trio.Nursery,
        first: Sender,
        sink: ReturnSink,
        descriptors: Sequence[StageDescriptor],
        vocabulary: Vocabulary,
        *,
        link: float,
        stall_deadline: float = STALL_DEADLINE,
        resume_deadline: float = RESUME_DEADLINE,
        queue_deadline: float = QUEUE_DEADLINE,
        queue: int = QUEUE,
        shared: SharedStore | None = None,
        encoding_exact: bool = True,
        tracer: Tracer | None = None,
    ) -> None:
        self.descriptors = tuple(descriptors)
        self.vocabulary = vocabulary
        self.sink = sink
        self.lanes = Lanes(min(descriptor.lanes for descriptor in descriptors))
        self.context = min(descriptor.context for descriptor in descriptors)
        self.exact = encoding_exact and all(descriptor.exact for descriptor in descriptors)
        self.check_route: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint
        self.return_route: Callable[[], str] = lambda: "memory"
        self.processes: Sequence[int] = ()
        self.way = first if isinstance(first, Way) else Way(first)
        self.way.on_change = lambda: sink.tell_all(WayChanged())
        self._width = min(descriptor.most_rows for descriptor in descriptors)
        self.pipe = Pipe(_curves(descriptors), link)
        self.credits = CreditScheduler()
        self._tracer = tracer or Tracer(Recorder(), len(self.descriptors))
        last = self.descriptors[-1]
        self._around = Surroundings(
            self.way,
            self.pipe,
            self.credits,
            self.lanes,
            stall_deadline,
            resume_deadline,
            last.mtp,
            last.draft_cost,
            self._tracer.recorder,
        )
        self.observers = self._around.observers
        self.planning = trio.CapacityLimiter(1)  # threads that use the vocabulary
        self._queue_deadline = queue_deadline
        self._queue = queue
        self.nextn: Load | None = None
        """Loads the model's NextN block into this process, where the coordinator has its file."""
        self._proposers = Proposers(nursery, sink, self._tracer.recorder)
        self._calibrations: defaultdict[str | None, Calibration] = defaultdict(dict)  # by path of the draft
        self._worths = defaultdict[str | None, Worth](lambda: Worth(self.pipe))  # likewise
        self._nursery = nursery
        self._shared = shared
        self._numbers = count(secrets.randbits(40) << 20)
        self._live: set[int] = set()

    @property
    def active(self) -> int:
        """Requests that have not ended, those that wait for a lane included."""
        return len(self._live)

    def generate(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        max_tokens: int = 256,
        sampling: Sampling | None = None,
        speculation: Speculation | None = None,
        stop: Sequence[str] = (),
        ignore_end: bool = False,
        reuse: bool = True,
    ) -> Generation:
        """Starts a request and returns its output stream.

        `prompt`: text or token ids; or `messages` for the model's chat template. `stop`: strings before which
        the output ends. `ignore_end` goes on past the model's end tokens. `reuse` lets the lane's cached prefix
        stand. Raises UsageError or CapacityError for what cannot be asked of this pipeline, and OverloadedError if
        too many requests wait for a lane already. Where a stage is lost and none is found in its place in time, the
        output ends with a StageLostError. Text becomes tokens before this returns; where it is long, 100 kB say, and
        others share the event loop, let `tokenize` do that.
        """
        if self._nursery.cancel_scope.cancel_called:
            raise UsageError("the pipeline is closed: open it again")
        if self.active >= self.lanes.count + self._queue:
            raise OverloadedError(
                f"{self.active} requests run or wait; this pipeline runs {self.lanes.count} at a time and lets "
                f"{self._queue} wait: ask again later"
            )
        tokens = self._tokenize(prompt, messages)
        check_sampling(sampling or Sampling())
        StopStrings(stop)
        speculation = speculation or Speculation()
        mtp_at = self._mtp_place(speculation)
        draft = None if speculation.draft is None else os.path.abspath(speculation.draft)
        bad = next((token for token in tokens if not 0 <= token < self.vocabulary.size), None)
        if bad is not None:
            raise UsageError(f"token {bad} of the prompt is outside the vocabulary of {self.vocabulary.size}")
        limits = Limits(
            max_tokens=max_tokens,
            context=self.context,
            end_tokens=frozenset() if ignore_end else self.vocabulary.end_tokens,
            prefill_width=self._width,
        )
        number = next(self._numbers)
        Ledger(number, tokens, limits)  # refuses here what does not fit, before anything is started
        mailbox = session_mailbox()
        send, receive = trio.open_memory_channel[Piece](math.inf)
        output = Output(send)
        waiting = trio.CancelScope()  # for a lane and for the way

        async def run() -> None:
            proposer = await self._proposer(speculation, mtp_at, draft)
            with waiting:
                await self._wait_for_way()
                lease = await self.lanes.lease(tokens, reuse=reuse)
                try:
                    await self._prove_way()
                except BaseException:
                    self.lanes.release(lease.lane, ())  # if the way was lost, so may be what the cache held
                    raise
            if waiting.cancelled_caught:
                return
            ledger = Ledger(number, tokens, limits, cached=lease.cached)
            request = Request(
                ledger=ledger,
                lease=lease,
                sampling=sampling or Sampling(),
                speculation=speculation,
                stops=tuple(stop),
                text=TextStream(self.vocabulary),
                exact=self.exact,
                shared=self._shared,
                mtp_at=mtp_at,
                proposer=proposer,
                worth=self._worths[draft] if speculation.mode == "auto" else None,
                calibration=self._calibrations[draft],
            )
            self.sink.register(number, mailbox.ref)
            try:
                await supervise(mailbox, lambda box: Session(box, request, self._around, output))
            finally:
                self.sink.forget(number)
                # What a failure has left in the caches, nobody knows.
                held = ledger.committed[: ledger.confirmed] if output.failure is None else ()
                self.lanes.release(lease.lane, held)
                if self._shared is not None:
                    self._shared.add(ledger.committed)

        async def guarded() -> None:
            """What goes wrong with one request is that request's failure, whatever it is."""
            began = trio.current_time()
            try:
                await run()
            except MeshpipeError as error:
                output.failure = error
            except Exception as error:
                output.failure = MeshpipeError(f"internal error, please report it: {error!r}")
            finally:
                output.channel.close()
                self._live.discard(number)
                if (recorder := self._tracer.recorder).on:
                    recorder.add(Span(Kind.REQUEST, began, trio.current_time(), COORDINATOR, number))

        def end() -> None:
            waiting.cancel()
            with suppress(ActorGoneError):
                mailbox.ref.try_send(Cancel())

        self._live.add(number)
        self._nursery.start_soon(guarded)
        return Generation(tokens, receive, output, end)

    async def complete(self, prompt: str | Sequence[int] | None = None, **options: Any) -> Completion:
        """Runs a request to its end; options as of `generate`."""
        tokens = await self.tokenize(prompt, options.pop("messages", None))
        async with self.generate(tokens, **options) as generation:
            pieces = [piece async for piece in generation]
        report = generation.report
        assert report is not None
        return Completion(
            "".join(piece.text for piece in pieces),
            generation.prompt_tokens,
            tuple(token for piece in pieces for token in piece.tokens),
            report,
        )

    async def _prove_way(self) -> None:
        """Makes sure that the way is up and not dead without having been missed."""
        checked = self.way.generation
        try:
            await self.check_route()
        except MeshpipeError as error:
            if self.way.give_up is None:
                raise
            if self.way.up and self.way.generation == checked:  # else it has been noticed already
                self.way.give_up(str(error), 0)
        await self._wait_for_way()

    async def _wait_for_way(self) -> None:
        await self.way.wait_up(self._queue_deadline, self._around.resume_deadline)

    def reroute(self) -> None:
        """Replies may be lost for good: every session dispatches again what it has in flight."""
        self.sink.tell_all(Reroute())

    async def round_trip(self, deadline: float = 20.0) -> float:
        """Seconds that an empty session takes to reach every stage and be acknowledged.

        Raises StageLostError after `deadline` seconds, EngineError if a stage refuses.
        """
        lease = await self.lanes.lease((), reuse=False)
        number = next(self._numbers)
        mailbox = session_mailbox()
        self.sink.register(number, mailbox.ref)
        began = trio.current_time()
        try:
            with trio.fail_after(deadline):
                await self._around.first.send(OpenSession(number, lease.lane))
                answer = await mailbox.receive()
                elapsed = trio.current_time() - began
        except trio.TooSlowError:
            raise StageLostError(f"no answer from the pipeline within {deadline:g} s") from None
        finally:
            with suppress(ActorGoneError):
                self._around.first.try_send(CloseSession(number))
            self.sink.forget(number)
            self.lanes.release(lease.lane, ())
        if isinstance(answer, SessionFailed):
            raise EngineError(f"stage {answer.stage}: {answer.reason}")
        return elapsed

    @asynccontextmanager
    async def tracing(self, listener: Callable[[Span], None] | None = None) -> AsyncIterator[Trace]:
        """Records what happens meanwhile, here and at every stage; the trace is whole after the block.

        `listener` is told each span of this process as it comes.

        Spans of a stage that does not send them in time are missing, and the trace says so. Raises UsageError
        if a trace is being recorded already.
        """
        trace = Trace(stages=len(self.descriptors))
        await self._tracer.start()
        self._tracer.recorder.listen(listener)
        try:
            yield trace
            if not self._live:  # then whatever was on its way to a stage has come before this
                with suppress(MeshpipeError):
                    await self.round_trip(STEADY)
        finally:
            self._tracer.recorder.listen(None)
            await self._tracer.stop(trace)

    def adopt(self, descriptors: Sequence[StageDescriptor], link: float, same_caches: bool) -> None:
        """The way has been formed anew, over stages that do as much as those before."""
        self.descriptors = tuple(descriptors)
        self.pipe.replace(_curves(descriptors), link)
        if not same_caches:
            self.lanes.forget()
        self._tracer.rejoined()

    def hold_nextn(self, path: str | Path) -> None:
        """Lets this process draft with the NextN block of the model at `path`; it is loaded when it is first used."""
        digest = self.descriptors[-1].model_digest
        self.nextn = nextn_block(path, digest, self.lanes.count, self.context)

    def load_draft(self, path: str | Path, threads: int) -> Load:
        """Loads the draft model at `path`."""
        return draft_model(path, self.vocabulary, self.lanes.count, self.context, threads)

    def _mtp_place(self, speculation: Speculation) -> str | None:
        """Where native MTP drafts for a request, if it does. Raises UsageError if it must, and cannot."""
        if not speculation.uses_mtp:
            return None
        if self.nextn is not None and speculation.mtp_at != "last":
            return "coordinator"
        if self._around.mtp and speculation.mtp_at != "coordinator":
            return "last"
        if not speculation.needs_mtp:
            return None
        if speculation.mtp_at == "coordinator":
            raise UsageError(
                f"speculation mode {speculation.mode!r} at the coordinator needs a file there with the model's NextN "
                "layers, which llama.cpp can draft with: name the model, or draft at the last stage"
            )
        raise UsageError(
            f"speculation mode {speculation.mode!r} needs NextN layers at the last stage, which has none it can "
            "draft with: use a model that has them and a stage without --no-mtp, or let them draft at the coordinator "
            "if it has the model's file (mtp_at), or take the mode 'auto' or 'ngram'"
        )

    async def _proposer(
        self, speculation: Speculation, mtp_at: str | None, draft: str | None
    ) -> Ref[Told] | None:
        """The proposer that runs ahead, if one was asked for. Raises what loading it raises, if it must be had."""
        if mtp_at == "coordinator" and self.nextn is not None:
            try:
                return await self._proposers.get(MTP, MTP, self.nextn)
            except MeshpipeError as error:
                if speculation.needs_mtp:
                    raise
                log.warning("requests go on without NextN layers at the coordinator: %s", error)
                self.nextn = None
        if draft is None:
            return None
        threads = speculation.draft_threads
        return await self._proposers.get((draft, threads), "draft", self.load_draft(draft, threads))

    async def tokenize(
        self,
        prompt: str | Sequence[int] | None = None,
        messages: Sequence[Mapping[str, Any]] | None = None,
    ) -> tuple[int, ...]:
        """A prompt's tokens, for `generate`, made in a thread: those of long texts take a while.

        Raises UsageError as `generate` does. Not abandoned when cancelled: the vocabulary may be closed next.
        """
        if prompt is not None and not isinstance(prompt, str):
            return self._tokenize(prompt, messages)
        return await trio.to_thread.run_sync(self._tokenize, prompt, messages, limiter=self.planning)

    def _tokenize(
        self, prompt: str | Sequence[int] | None, messages: Sequence[Mapping[str, Any]] | None
    ) -> tuple[int, ...]:
        if (prompt is None) == (messages is None):
            raise UsageError("give either a prompt or messages")
        if messages is not None:
            return self.vocabulary.tokenize(self.vocabulary.render_chat(messages), start=False)
        if isinstance(prompt, str):
            tokens = self.vocabulary.tokenize(prompt)
            if not tokens:
                raise UsageError("the prompt is empty: the model needs at least one token to continue")
            return tokens
        assert prompt is not None
        return tuple(int(token) for token in prompt)


def _curves(descriptors: Sequence[StageDescriptor]) -> tuple[CostCurve, ...]:
    return tuple(CostCurve(descriptor.cost or ((1, 0.01), (2, 0.02))) for descriptor in descriptors)
