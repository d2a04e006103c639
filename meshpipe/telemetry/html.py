"""The HTML report: one file that needs nothing else, with the analysis in words and a timeline to zoom and hover."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from meshpipe.errors import UsageError
from meshpipe.files import write_whole
from meshpipe.wording import counted

from .intervals import levels
from .overlap import Analysis, Percentiles, analyse
from .trace import Flight, Trace, flights


def write_html(trace: Trace, path: str | Path) -> None:
    """Writes the report. Raises UsageError if there is nothing to report on, or the file cannot be written."""
    page = render(trace)
    try:
        write_whole(path, page)
    except OSError as error:
        raise UsageError(f"cannot write the report to {path}: {error}") from None


def render(trace: Trace) -> str:
    """The report as a page. Raises UsageError if the trace has no verify window."""
    found = analyse(trace)
    if found is None:
        raise UsageError("the trace has no verify window: there is nothing to show")
    page = files("meshpipe.telemetry").joinpath("report.html").read_text(encoding="utf-8")
    data = json.dumps(timeline(trace, found), separators=(",", ":")).replace("</", "<\\/")
    page = page.replace("__RUN__", escape(trace.run)).replace("__SUMMARY__", _summary(found))
    return page.replace("__DATA__", data)


def timeline(trace: Trace, found: Analysis) -> dict[str, Any]:
    """What the page's script draws; times in seconds, arrays in the order that it takes apart."""
    followed = flights(trace)
    sessions = sorted({flight.session for flight in followed})
    numbers = {session: at for at, session in enumerate(sessions)}
    before = _rows_before(followed)
    last = max(
        max(flight.ended or 0.0, *(stay.ended for stay in flight.stays.values()), 0.0) for flight in followed
    )
    aloft = [(flight.sent, flight.ended if flight.ended is not None else last) for flight in followed]
    changes: list[tuple[float, int]] = []
    for began, ended, count in levels(aloft):
        if changes and changes[-1][0] == began:
            changes.pop()
        changes += [(began, count), (ended, 0)]
    return {
        "stages": trace.stages,
        "from": min(flight.sent for flight in followed),
        "to": last,
        "busy": [work.busy for work in found.work],
        "most": max((count for _, count in changes), default=0) or 1,
        "sessions": [at + 1 for at in range(len(sessions))],
        "inFlight": [[_short(at), count] for at, count in changes],
        "flights": [
            [
                numbers[flight.session],
                flight.number,
                flight.epoch,
                flight.start,
                flight.rows,
                _short(flight.sent),
                None if flight.replied is None else _short(flight.replied),
                None if flight.ended is None else _short(flight.ended),
                flight.tokens,
                flight.outcome.value,
                [
                    [
                        stage,
                        _short(stay.came),
                        _short(stay.began),
                        _short(stay.ended),
                        stay.rows,
                        before.get((flight.session, flight.number, stage), 0),
                        stay.end,
                    ]
                    for stage, stay in sorted(flight.stays.items())
                ],
            ]
            for flight in followed
        ],
    }


def _rows_before(followed: Sequence[Flight]) -> dict[tuple[int, int, int], int]:
    """By (session, window, stage): rows of the same decode that belong to windows before it."""
    taken: dict[tuple[int, float], int] = defaultdict(int)
    before = {}
    for flight in followed:
        for stage, stay in flight.stays.items():
            if stay.end != "dropped":
                before[flight.session, flight.number, stage] = taken[stage, stay.began]
                taken[stage, stay.began] += flight.rows
    return before


def _short(seconds: float) -> float:
    return round(seconds, 7)


# ---- the words ----------------------------------------------------------------------------------------


def _summary(found: Analysis) -> str:
    seconds = found.interval[1] - found.interval[0]
    cards = [
        (f"{found.tokens_per_second:.1f}", "tokens/s"),
        (f"{found.at_least(2):.0%}", "two or more stages computing"),
        (f"{found.in_flight[0]:.1f}", f"windows in flight, at most {found.in_flight[1]}"),
        (f"{found.tokens}", f"tokens in {seconds:.2f} s"),
        (f"{found.requests}", "requests"),
        (f"{found.between_windows} of {found.overlaps}", "overlaps are between different windows"),
        (f"{found.joined} of {found.windows}", "windows known at every stage"),
    ]
    stages = [
        (
            f"stage {stage}",
            f"{work.busy:.0%} {_meter(work.busy)}",
            str(work.decodes),
            str(work.windows),
            str(work.rows),
            f"{work.service * 1e3:.1f}",
            f"{work.in_vain * 1e3:.0f}",
            f"{work.stale_run} / {work.aborted} / {work.dropped}",
        )
        for stage, work in enumerate(found.work)
    ]
    concurrent = [
        (f"{count}", f"{share:.1%} {_meter(share)}") for count, share in enumerate(found.concurrent)
    ]
    waits = [(cause, f"{share:.1%} {_meter(share)}") for cause, share in found.waits.items()]
    transit = [(name, f"{took * 1e3:.1f}") for name, took in found.transit.items()]
    latencies = [
        (name, *_percentiles(values))
        for name, values in (
            ("to the first token (TTFT)", found.ttft),
            ("between tokens (ITL)", found.itl),
            ("a token, by request (TPOT)", found.tpot),
        )
    ]
    return "\n".join(
        [
            f"<h1>meshpipe trace</h1><p class='soft'>run {escape(found.run)}, {counted(found.stages, 'stage')}</p>",
            *(f"<p class='caveat'>{escape(caveat)}</p>" for caveat in found.caveats),
            f"<p class='limit'>{escape(found.bottleneck)}</p>",
            "<div class='cards'>",
            *(f"<div class='card'><b>{value}</b>{escape(name)}</div>" for value, name in cards),
            "</div><h2>Figures</h2><div class='tables'>",
            _table(
                "Stages, from the first verify decode to the last one's end",
                (
                    "",
                    "busy",
                    "decodes",
                    "windows",
                    "rows",
                    "ms a decode",
                    "ms in vain",
                    "stale run / aborted / dropped",
                ),
                stages,
            ),
            _table("Stages computing at a time", ("", "share of the time"), concurrent),
            _table("What requests waited for", ("", "share of their time"), waits),
            _table("A window's way, mean", ("", "ms"), transit),
            _table("Latency in ms", ("", "mean", "50%", "90%", "99%", "most"), latencies),
            "</div>",
        ]
    )


def _table(caption: str, heads: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    """`rows` hold HTML."""
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _meter(share: float) -> str:
    return f"<span class='meter' style='width:{max(0.0, min(1.0, share)) * 60:.0f}px'></span>"


def _percentiles(values: Percentiles | None) -> tuple[str, ...]:
    if values is None:
        return ("",) * 5
    numbers = (values.mean, values.p50, values.p90, values.p99, values.most)
    return tuple(f"{number * 1e3:.1f}" for number in numbers)
