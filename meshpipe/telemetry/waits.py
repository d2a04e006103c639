"""What requests waited for, and where a window's time went."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import pairwise

from .intervals import union
from .spans import Cause, Kind
from .trace import Flight, Outcome, Trace

CAUSES = ("proposal", "credit", "wire", "compute", "queue", "lane", "client")
"""What a request can wait for. "proposal": nobody knew what could follow; "credit": the pipe was full of other
sessions' windows; "wire", "compute", "queue": where the oldest window in flight was, when no more could usefully be
sent; "lane": all were taken; "client": nobody asked for anything."""


def waits_by_cause(trace: Trace, followed: Iterable[Flight]) -> dict[str, float]:
    """Seconds of waiting by cause, as shares of the time that requests took to decode, and that nobody asked.

    A session's waits count from its first commit on. Where it waited for a reply, the piece that its oldest window
    in flight was in says what for.
    """
    seconds = dict.fromkeys(CAUSES, 0.0)
    of_session: dict[int, list[Flight]] = defaultdict(list)
    for flight in followed:
        of_session[flight.session].append(flight)
    decoding_from: dict[int, float] = {}
    for span in trace.of(Kind.COMMIT):
        decoding_from.setdefault(span.session, span.began)
    oldest = {session: _Oldest(some, trace.stages) for session, some in of_session.items()}
    total = 0.0
    for span in trace.of(Kind.WAIT):
        began, ended = max(span.began, decoding_from.get(span.session, span.ended)), span.ended
        if began >= ended or span.session not in oldest:
            continue
        if span.detail == Cause.CREDIT:
            seconds["credit"] += ended - began
        elif span.detail == Cause.PROPOSAL:
            seconds["proposal"] += ended - began
        else:
            for piece, took in oldest[span.session].pieces(began, ended):
                seconds[piece] += took
    sessions = {span.session: span for span in trace.of(Kind.SESSION)}
    for session, span in sessions.items():
        total += max(0.0, span.ended - decoding_from.get(session, span.ended))
    for span in trace.of(Kind.REQUEST):
        held = sessions.get(span.session)
        seconds["lane"] += (held.began if held is not None else span.ended) - span.began
    requests = union((span.began, span.ended) for span in trace.of(Kind.REQUEST))
    seconds["client"] = sum(later[0] - earlier[1] for earlier, later in pairwise(requests))
    total += seconds["lane"] + seconds["client"]
    return {cause: took / total if total else 0.0 for cause, took in seconds.items()}


class _Oldest:
    """Where a session's oldest window in flight is, for waits that are asked about in ascending order."""

    def __init__(self, sent: Iterable[Flight], stages: int) -> None:
        self._flights = sorted(sent, key=lambda flight: flight.number)
        self._stages = stages
        self._at = 0

    def pieces(self, began: float, ended: float) -> Iterator[tuple[str, float]]:
        """("wire" | "queue" | "compute", seconds) of a wait."""
        while self._at < len(self._flights):
            flight = self._flights[self._at]
            if flight.prefill or (flight.ended is not None and flight.ended <= began):
                self._at += 1
            else:
                break
        else:
            return
        for piece, since, until in flight.legs(self._stages):
            took = min(until, ended) - max(since, began)
            if took > 0:
                yield piece, took


def transit_times(verify: Iterable[Flight], stages: int) -> dict[str, float]:
    """Mean seconds that a window which retired spent in each piece, named by place."""
    retired = [f for f in verify if f.outcome in (Outcome.ACCEPTED, Outcome.CORRECTED)]
    found: dict[str, float] = {}
    for flight in retired:
        wires = iter([*(f"wire to stage {stage}" for stage in range(stages)), "wire back"])
        stage = -1
        for piece, began, ended in flight.legs(stages):
            if piece == "wire":
                name, stage = next(wires), stage + 1
            else:
                name = f"{piece} at stage {stage}"
            found[name] = found.get(name, 0.0) + (ended - began) / len(retired)
    return found
