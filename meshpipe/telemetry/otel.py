"""OpenTelemetry: a trace as spans, and metrics while a pipeline runs. Needs opentelemetry-sdk (extra `telemetry`).

A request is a trace of its own: `meshpipe.request`, in it `meshpipe.session`, in that a `meshpipe.window` for each
window, in that its `meshpipe.wire`, `meshpipe.queue` and `meshpipe.compute` with the number of the stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from opentelemetry.metrics import Meter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import Span as OtelSpan
from opentelemetry.trace import Status, StatusCode, Tracer, set_span_in_context

from meshpipe.errors import UsageError
from meshpipe.messages import Timing

from .observers import Summary
from .spans import Kind
from .trace import Flight, Outcome, Trace, flights

BATCH = 512
"""Spans in one export."""

Attributes = dict[str, str | int | float | bool]


class _Keep(SpanProcessor):
    """Keeps what has ended: the SDK's own batches drop what does not fit into a queue."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        """See `SpanProcessor.on_end`."""
        self.spans.append(span)


def export(trace: Trace, exporter: SpanExporter) -> None:
    """Gives the trace's spans to an exporter; blocks. Raises UsageError if it does not take them."""
    kept = _Keep()
    provider = TracerProvider(
        resource=Resource.create({"service.name": "meshpipe", "meshpipe.run": trace.run})
    )
    provider.add_span_processor(kept)
    emit(trace, provider.get_tracer("meshpipe"))
    for at in range(0, len(kept.spans), BATCH):
        if exporter.export(kept.spans[at : at + BATCH]) is not SpanExportResult.SUCCESS:
            raise UsageError(f"{type(exporter).__name__} did not take spans; its own messages say why")


def export_otlp(trace: Trace, endpoint: str) -> None:
    """Sends the trace's spans to a collector's OTLP/HTTP endpoint, http://host:4318/v1/traces; blocks.

    Raises UsageError if it does not take them.
    """
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    exporter = OTLPSpanExporter(endpoint=endpoint, timeout=10)
    try:
        export(trace, exporter)
    finally:
        exporter.shutdown()  # type: ignore[no-untyped-call]


def emit(trace: Trace, tracer: Tracer) -> None:
    """Makes spans of the trace with a tracer."""
    of_session: dict[int, list[Flight]] = {}
    for flight in flights(trace):
        of_session.setdefault(flight.session, []).append(flight)
    sessions = {span.session: span for span in trace.of(Kind.SESSION)}
    for request in trace.of(Kind.REQUEST):
        about: Attributes = {"meshpipe.session": str(request.session)}
        with _span(trace, tracer, "meshpipe.request", request.began, request.ended, None, about) as root:
            session = sessions.get(request.session)
            if session is None:
                continue
            about |= {"meshpipe.tokens": session.value, "meshpipe.prompt_tokens": session.detail}
            with _span(
                trace, tracer, "meshpipe.session", session.began, session.ended, root, about
            ) as parent:
                for flight in of_session.get(request.session, ()):
                    _window(trace, tracer, parent, flight)


def _window(trace: Trace, tracer: Tracer, parent: OtelSpan, flight: Flight) -> None:
    legs = flight.legs(trace.stages)
    ended = max([flight.ended or flight.sent, flight.sent, *(until for _, _, until in legs)])
    about: Attributes = {
        "meshpipe.window": flight.number,
        "meshpipe.epoch": flight.epoch,
        "meshpipe.position": flight.start,
        "meshpipe.rows": flight.rows,
        "meshpipe.tokens": flight.tokens,
        "meshpipe.outcome": flight.outcome.value,
    }
    with _span(trace, tracer, "meshpipe.window", flight.sent, ended, parent, about) as window:
        if flight.outcome is Outcome.UNFINISHED:
            window.set_status(Status(StatusCode.ERROR, "in flight when the recording ended"))
        stage = -1
        for piece, began, until in legs:
            stage += piece == "wire"
            with _span(trace, tracer, f"meshpipe.{piece}", began, until, window, {"meshpipe.stage": stage}):
                pass


@contextmanager
def _span(
    trace: Trace,
    tracer: Tracer,
    name: str,
    began: float,
    ended: float,
    parent: OtelSpan | None,
    about: Attributes,
) -> Iterator[OtelSpan]:
    context = set_span_in_context(parent) if parent is not None else None
    span = tracer.start_span(name, context, attributes=about, start_time=_nanoseconds(trace, began))
    yield span
    span.end(_nanoseconds(trace, ended))


def _nanoseconds(trace: Trace, at: float) -> int:
    """Of Unix time."""
    return round(trace.unix * 1e9) + round(at * 1e9)


class OtelMetrics:
    """An `Observer` that feeds a meter: histograms in seconds, counters of windows and tokens."""

    def __init__(self, meter: Meter) -> None:
        self._window = meter.create_histogram("meshpipe.window.latency", "s", "from dispatch to reply")
        self._queue = meter.create_histogram("meshpipe.stage.queue", "s", "a window's wait at a stage")
        self._compute = meter.create_histogram("meshpipe.stage.compute", "s", "the decode that ran a window")
        self._ttft = meter.create_histogram("meshpipe.request.ttft", "s", "to the first token")
        self._tpot = meter.create_histogram("meshpipe.request.tpot", "s", "a token after the first")
        self._total = meter.create_histogram("meshpipe.request.duration", "s", "of a request")
        self._tokens = meter.create_counter("meshpipe.tokens", "{token}", "generated")
        self._windows = meter.create_counter("meshpipe.windows", "{window}", "dispatched")
        self._stale = meter.create_counter(
            "meshpipe.windows.stale", "{window}", "made useless by a divergence"
        )
        self._drafted = meter.create_counter("meshpipe.tokens.drafted", "{token}", "proposed and dispatched")
        self._accepted = meter.create_counter("meshpipe.tokens.accepted", "{token}", "proposed and confirmed")

    def replied(self, latency: float, timings: Sequence[Timing]) -> None:
        """See `Observer.replied`."""
        self._window.record(latency)
        for timing in timings:
            self._queue.record(timing.queued, {"meshpipe.stage": timing.stage})
            self._compute.record(timing.service, {"meshpipe.stage": timing.stage})

    def finished(self, report: Summary) -> None:
        """See `Observer.finished`."""
        self._ttft.record(report.ttft)
        self._total.record(report.total)
        if report.tpot is not None:
            self._tpot.record(report.tpot)
        self._tokens.add(report.completion_tokens)
        self._windows.add(report.windows)
        self._stale.add(report.stale_windows)
        for name, source in report.sources.items():
            self._drafted.add(source.drafted, {"meshpipe.source": name})
            self._accepted.add(source.accepted, {"meshpipe.source": name})
