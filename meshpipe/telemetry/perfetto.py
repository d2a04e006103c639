"""Traces as files: Chrome's trace event format, which ui.perfetto.dev opens as it is, and which reads back exactly.

Of the format ("Trace Event Format", by the Chromium project; times in microseconds): complete events (X) for what a
stage or link does one at a time, asynchronous pairs (b, e) for what overlaps itself, instants (i); flows (s, t, f)
tie a window's decodes together, and a counter (C) shows the windows in flight. Events of category `meshpipe` are
the spans themselves; those of `derived` are for the eye only, and are not read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshpipe.errors import UsageError
from meshpipe.files import write_whole

from .spans import COORDINATOR, NAMES, Kind, Span
from .trace import Flight, Trace, flights

INSTANTS = (Kind.PREFILL, Kind.DISPATCH, Kind.REPLY, Kind.COMMIT)
ALONE = (Kind.COMPUTE, Kind.ABORT, Kind.SERIALIZE, Kind.WRITE)
_NAME = {name.kind: name.name for name in NAMES}
_KIND = {name.name: name.kind for name in NAMES}
_PLACES = 4  # decimals of a microsecond: well below what a clock resolves


def write_trace(trace: Trace, path: str | Path) -> None:
    """Writes the file; raises UsageError if that is not possible."""
    about = {
        "meshpipe": 1,
        "run": trace.run,
        "stages": trace.stages,
        "give_or_take": trace.give_or_take,
        "missing": list(trace.missing),
        "full": trace.full,
        "rejoined": trace.rejoined,
        "unix": trace.unix,
    }
    document = {"displayTimeUnit": "ms", "otherData": about, "traceEvents": list(events(trace))}
    try:
        write_whole(path, json.dumps(document, separators=(",", ":")))
    except OSError as error:
        raise UsageError(f"cannot write the trace to {path}: {error}") from None


def read_trace(path: str | Path) -> Trace:
    """What `write_trace` has written. Raises UsageError that says what is wrong with the file."""
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"cannot read a trace from {path}: {error}") from None
    try:
        about = document["otherData"]
        if about["meshpipe"] != 1:
            raise UsageError(
                f"{path} is of version {about['meshpipe']} of the trace format; this one reads 1"
            )
        spans = [_span(event) for event in document["traceEvents"] if event.get("cat") == "meshpipe"]
        return Trace(
            stages=int(about["stages"]),
            run=str(about["run"]),
            spans=sorted(spans, key=lambda span: span.began),
            give_or_take=float(about["give_or_take"]),
            missing=tuple(map(int, about["missing"])),
            full=bool(about["full"]),
            rejoined=int(about.get("rejoined", 0)),
            unix=float(about["unix"]),
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UsageError(
            f"{path} is no trace that meshpipe has written ({error!r}): make one with --trace"
        ) from None


def events(trace: Trace) -> Iterator[dict[str, Any]]:
    """The trace's events, for the `traceEvents` of a file."""
    for process in range(trace.stages + 1):
        name = f"stage {process - 1}" if process else "coordinator"
        yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process}}
        for kind in Kind:
            yield {
                "ph": "M",
                "name": "thread_name",
                "pid": process,
                "tid": kind,
                "args": {"name": kind.name.lower()},
            }
    for number, span in enumerate(trace.spans):
        yield from _events(number, span)
    for number, flight in enumerate(flights(trace)):
        yield from _flow(number, flight)
    in_flight = 0
    changes = [(f.sent, 1) for f in flights(trace)] + [
        (f.ended, -1) for f in flights(trace) if f.ended is not None
    ]
    for at, step in sorted(changes):
        in_flight += step
        yield {
            "ph": "C", "name": "windows in flight", "cat": "derived", "pid": 0, "ts": _us(at),
            "args": {"windows": in_flight},
        }  # fmt: skip


def _events(number: int, span: Span) -> Iterator[dict[str, Any]]:
    kind = Kind(span.kind)
    args: dict[str, Any] = {"session": str(span.session)}  # as text: JavaScript's numbers have 53 bits
    args |= {"epoch": span.epoch, "window": span.window, "value": span.value, "detail": span.detail}
    event = {
        "name": _NAME[kind], "cat": "meshpipe", "pid": span.stage + 1, "tid": kind, "ts": _us(span.began), "args": args,
    }  # fmt: skip
    if kind in INSTANTS:
        yield event | {"ph": "i", "s": "t"}
    elif kind in ALONE:
        yield event | {"ph": "X", "dur": _us(span.ended - span.began)}
    else:
        args["dur"] = _us(span.ended - span.began)
        yield event | {"ph": "b", "id": number}
        yield event | {"ph": "e", "id": number, "ts": _us(span.ended), "cat": "derived", "args": {}}


def _flow(number: int, flight: Flight) -> Iterator[dict[str, Any]]:
    """Arrows from decode to decode of one window."""
    decodes = [(stage, stay) for stage, stay in sorted(flight.stays.items()) if stay.end == "computed"]
    for at, (stage, stay) in enumerate(decodes if len(decodes) > 1 else ()):
        step = "s" if at == 0 else "f" if at == len(decodes) - 1 else "t"
        yield {
            "ph": step, "id": number, "name": "window", "cat": "derived", "bp": "e", "pid": stage + 1,
            "tid": Kind.COMPUTE, "ts": _us((stay.began + stay.ended) / 2),
        }  # fmt: skip


def _span(event: dict[str, Any]) -> Span:
    kind, args = _KIND[event["name"]], event["args"]
    began = float(event["ts"]) / 1e6
    ended = began + float(event.get("dur", args.get("dur", 0.0))) / 1e6
    rest = (int(args[name]) for name in ("session", "epoch", "window", "value", "detail"))
    return Span(kind, began, ended, max(COORDINATOR, int(event["pid"]) - 1), *rest)


def _us(seconds: float) -> float:
    return round(seconds * 1e6, _PLACES)
