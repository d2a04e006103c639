"""Recording a trace of a pipeline: here, and at stages in other processes, which are asked for what they saw.

A stage records for a coordinator that asks, and only what it does for that one. It sends what it has at the end,
in pieces up the control way, so that neither a window nor a Discard waits for it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress

import trio

from meshpipe.actors import Ref
from meshpipe.errors import ActorGoneError, MeshpipeError, UsageError
from meshpipe.messages import Record, Spans
from meshpipe.pipeline.sink import ReturnSink
from meshpipe.telemetry.clocks import Offset, chain, estimate
from meshpipe.telemetry.spans import CAPACITY, SPAN_BYTES, Recorder, Span, pack_spans, unpack_spans
from meshpipe.telemetry.trace import Trace, Track
from meshpipe.wire.link import Link

log = logging.getLogger("meshpipe.tracing")

PIECE = 256
"""Spans in one message (some 11 KB): what a Discard may have to wait for on the control connection."""
PATIENCE = 5.0
"""Seconds without news from any stage after which their spans are done without."""


class Tracer:
    """Records a pipeline whose stages are in this process and share its recorder, and its clock."""

    def __init__(self, recorder: Recorder, stages: int) -> None:
        self.recorder = recorder
        self.stages = stages

    async def start(self) -> None:
        """Records from now on. Raises UsageError if it does already."""
        if self.recorder.on:
            raise UsageError("a trace is being recorded already: end that one first")
        self.recorder.start()

    def rejoined(self) -> None:
        """The stages have been joined anew."""

    async def stop(self, trace: Trace) -> None:
        """Ends the recording, and fills in the trace."""
        full = self.recorder.full
        trace.join([Track(self.recorder.stop(), full, Offset())], (), _unix())


class RemoteTracer(Tracer):
    """Records a pipeline whose stages are in other processes; `sink` hears them.

    `first` gives the link to the first of them, as it is now.
    """

    def __init__(self, recorder: Recorder, stages: int, first: Callable[[], Link], sink: ReturnSink) -> None:
        super().__init__(recorder, stages)
        self._first = first
        self._heard: dict[int, list[Spans]] = {}
        self._news = trio.Event()
        self._rejoined = 0
        sink.on_spans = self._arrived

    async def start(self) -> None:
        """Returns when every stage records, or has not said so for `PATIENCE` seconds."""
        await super().start()
        self._rejoined = 0
        missing = await self._ask(on=True)
        if missing:
            log.warning("stages that do not say whether they record: %s", ", ".join(map(str, missing)))

    def rejoined(self) -> None:
        """If a trace is being recorded, the stages that are there now record too; they have not before."""
        if self.recorder.on:
            self._rejoined += 1
            with suppress(ActorGoneError):  # it is already lost again, or this process serves
                self._first().ref.try_send(Record(on=True))

    async def stop(self, trace: Trace) -> None:
        """Asks every stage for its spans; those that do not come are named in the trace."""
        full = self.recorder.full
        tracks = [Track(self.recorder.stop(), full, Offset())]
        with trio.CancelScope(shield=True):  # bounded by PATIENCE
            missing = await self._ask(on=False)
        hops = [estimate(self._first().beats)]
        for stage in range(self.stages - 1):
            heard = self._heard.get(stage)
            ahead, give = (heard[-1].next_ahead, heard[-1].next_give_or_take) if heard else (None, None)
            hops.append(None if ahead is None or give is None else Offset(ahead, give))
        clocks = chain(hops)
        for stage, pieces in self._heard.items():
            try:
                spans = [span for piece in pieces for span in unpack_spans(piece.data)]
            except MeshpipeError as error:
                log.warning("stage %d sent no spans: %s", stage, error)
                missing.append(stage)
                continue
            tracks.append(Track(spans, pieces[-1].full, clocks[stage]))
            if clocks[stage] is None:
                missing.append(stage)
        trace.join(tracks, missing, _unix())
        trace.rejoined = self._rejoined

    async def _ask(self, on: bool) -> list[int]:
        """Tells all stages, and waits for what they answer; returns those that did not."""
        self._heard.clear()
        try:
            await self._first().ref.send(Record(on))
        except ActorGoneError:
            return list(range(self.stages))
        while missing := [stage for stage in range(self.stages) if not self._complete(stage)]:
            self._news = trio.Event()
            with trio.move_on_after(PATIENCE) as scope:
                await self._news.wait()
            if scope.cancelled_caught:
                break
        return missing

    def _complete(self, stage: int) -> bool:
        return bool(self._heard.get(stage)) and self._heard[stage][-1].last

    def _arrived(self, spans: Spans) -> None:
        """A stage has sent some; more than a recorder holds is not believed."""
        pieces = self._heard.setdefault(spans.stage, [])
        if spans.stage not in range(self.stages) or len(pieces) > CAPACITY // PIECE:
            del self._heard[spans.stage]
            log.warning("spans of stage %d are not expected", spans.stage)
        elif len(spans.data) <= PIECE * SPAN_BYTES:
            pieces.append(spans)
        self._news.set()


def _unix() -> float:
    """The Unix time at which trio's clock was 0."""
    return time.time() - trio.current_time()


async def send_spans(
    asked: Record, stage: int, recorder: Recorder, up: Ref[object], down: Link | None
) -> None:
    """At a stage: begins to record, or sends what was recorded, `PIECE` spans at a time, up the route."""
    spans: list[Span] = []
    full = recorder.full
    if asked.on:
        recorder.start()
    else:
        spans = recorder.stop()
    offset = estimate(down.beats) if down is not None else None
    ahead, give_or_take = (offset.ahead, offset.give_or_take) if offset is not None else (None, None)
    pieces = [spans[at : at + PIECE] for at in range(0, len(spans), PIECE)] or [[]]
    try:
        for number, piece in enumerate(pieces, 1):
            last = number == len(pieces)
            await up.send(Spans(stage, pack_spans(piece), last, full, ahead, give_or_take))
    except ActorGoneError:
        log.debug("nobody is left to send spans to")
