"""A trace: the spans of one run on one clock, and what became of every window.

Each process records with its own clock. `Trace.join` puts all on the coordinator's, and begins at 0. `flights` follows
every window: when it was sent, when it came to each stage, was computed or dropped there, when the reply came and
retired. What is accepted only the coordinator's commits tell; the rest follows from order.
"""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Iterable, Sequence
from enum import Enum

from attrs import define, evolve, field, frozen

from .clocks import Offset
from .spans import Kind, Span


@frozen
class Track:
    """The spans of one process, and its clock against the coordinator's (None: not known, of no use).

    `full`: its ring has come round, so that the oldest may be missing.
    """

    spans: Sequence[Span]
    full: bool
    clock: Offset | None


@define
class Trace:
    """The spans of one run, ascending in `began`; seconds from the first one.

    `give_or_take`: by how many seconds the times of a process may be off at most. `missing`: stages of which
    nothing came. `full`: the oldest spans are gone. `rejoined`: times that the way to the stages was formed anew
    meanwhile, so that of what they did before the last time nothing is known. `unix`: the Unix time of second 0.
    """

    stages: int
    run: str = field(factory=lambda: secrets.token_hex(8))
    spans: list[Span] = field(factory=list, repr=False)
    give_or_take: float = 0.0
    missing: tuple[int, ...] = ()
    full: bool = False
    rejoined: int = 0
    unix: float = 0.0

    def join(self, tracks: Iterable[Track], missing: Iterable[int], unix: float = 0.0) -> None:
        """Fills the trace with what was recorded in each process; `unix` is the Unix time at the clock's 0."""
        joined: list[Span] = []
        for track in tracks:
            self.full |= track.full
            if track.clock is not None:
                self.give_or_take = max(self.give_or_take, track.clock.give_or_take)
                ahead = track.clock.ahead
                joined += [
                    span._replace(began=span.began - ahead, ended=span.ended - ahead) for span in track.spans
                ]
        joined.sort(key=lambda span: span.began)
        zero = min((span.began for span in joined), default=0.0)
        self.spans = [span._replace(began=span.began - zero, ended=span.ended - zero) for span in joined]
        self.missing = tuple(sorted(set(missing)))
        self.unix = unix + zero

    def of(self, *kinds: Kind) -> list[Span]:
        """The spans of some kinds."""
        return [span for span in self.spans if span.kind in kinds]


class Outcome(Enum):
    """What a window came to."""

    ACCEPTED = "accepted"
    """All that it carried was right."""
    CORRECTED = "corrected"
    """It was right up to a point, and brought the correction."""
    STALE = "stale"
    """Sent in vain: what it builds on was corrected, or the session had ended."""
    PREFILL = "prefill"
    UNFINISHED = "unfinished"
    """Still in flight when the recording ended."""


@define
class Stay:
    """A window at a stage: when it `came`; when its decode `began` and `ended`, of `rows` rows; or how it went.

    `end` is "computed", "aborted" (in the middle of a decode) or "dropped".
    """

    came: float
    began: float
    ended: float
    rows: int
    end: str = "computed"


@define
class Flight:
    """One window from its dispatch to its end. Times in seconds, None if it did not come to that."""

    session: int
    number: int
    epoch: int
    start: int
    rows: int
    sent: float
    prefill: bool
    stays: dict[int, Stay] = field(factory=dict)
    written: dict[int, tuple[float, float]] = field(factory=dict)  # by sending stage
    serialized: dict[int, tuple[float, float]] = field(factory=dict)
    dropped_after: int | None = None  # on the link that leaves this stage
    replied: float | None = None
    ended: float | None = None
    tokens: int = 0
    outcome: Outcome = Outcome.UNFINISHED

    def unseen(self, stages: int) -> list[int]:
        """Stages that it must have come to, and that have told nothing of it."""
        for stage in range(stages):
            if self.dropped_after == stage - 1:
                return []
            if stage not in self.stays:
                # What is stale, or not over, may have been under way to this stage.
                lost = self.outcome in (Outcome.ACCEPTED, Outcome.CORRECTED)
                return list(range(stage, stages)) if lost else []
            if self.stays[stage].end != "computed":
                return []
        return []

    def legs(self, stages: int) -> list[tuple[str, float, float]]:
        """Its life in pieces, in order: ("wire" | "queue" | "compute", began, ended)."""
        at, found = self.sent, []
        for stage in range(stages):
            stay = self.stays.get(stage)
            if stay is None:
                break
            found += [("wire", at, stay.came), ("queue", stay.came, stay.began)]
            found.append(("compute", stay.began, stay.ended))
            at = stay.ended
        else:
            if self.replied is not None:
                found.append(("wire", at, self.replied))
        return found


def flights(trace: Trace) -> list[Flight]:
    """Every window that was sent while the trace was recorded, in order of dispatch."""
    found: dict[tuple[int, int], Flight] = {}
    by_session: dict[int, list[Flight]] = defaultdict(list)
    for span in trace.of(Kind.DISPATCH, Kind.PREFILL):
        flight = Flight(
            span.session,
            span.window,
            span.epoch,
            span.detail,
            span.value,
            span.began,
            span.kind == Kind.PREFILL,
        )
        found[span.session, span.window] = flight
        by_session[span.session].append(flight)
    over: dict[int, list[tuple[float, int]]] = defaultdict(
        list
    )  # by session: (from when, epochs below are over)
    for span in trace.spans:
        flight_of = found.get((span.session, span.window))
        if span.kind == Kind.SESSION:
            over[span.session].append((span.ended, 2**31))
        elif flight_of is not None:
            _note(flight_of, span, over[span.session])
    for session, sent in by_session.items():
        _settle(sent, sorted(over[session]))
    return list(found.values())


def _note(flight: Flight, span: Span, over: list[tuple[float, int]]) -> None:
    """What one span says of its window."""
    match span.kind:
        case Kind.DISPATCH | Kind.PREFILL:
            over.append((span.began, span.epoch))
        case Kind.QUEUE:
            waiting = Stay(span.began, span.ended, span.ended, span.value)
            flight.stays[span.stage] = evolve(flight.stays.get(span.stage, waiting), came=span.began)
        case Kind.COMPUTE | Kind.ABORT:
            stay = flight.stays.get(span.stage)
            came = span.began if stay is None else stay.came
            end = "computed" if span.kind == Kind.COMPUTE else "aborted"
            flight.stays[span.stage] = Stay(came, span.began, span.ended, span.value, end)
        case Kind.DROP if span.detail:
            flight.dropped_after = span.stage
        case Kind.DROP:
            flight.stays.setdefault(span.stage, Stay(span.began, span.ended, span.ended, 0, "dropped"))
        case Kind.WRITE:
            flight.written[span.stage] = (span.began, span.ended)
        case Kind.SERIALIZE:
            flight.serialized[span.stage] = (span.began, span.ended)
        case Kind.REPLY:
            flight.replied = span.began
        case Kind.COMMIT:
            flight.ended, flight.tokens = span.began, span.value
            flight.outcome = Outcome.CORRECTED if span.detail else Outcome.ACCEPTED
            if span.detail:
                over.append((span.began, span.epoch + 1))


def _settle(sent: Sequence[Flight], over: Sequence[tuple[float, int]]) -> None:
    """Says of a session's windows without a commit what they came to."""
    for flight in sent:
        if flight.outcome is Outcome.UNFINISHED:
            ends = [at for at, epochs in over if flight.epoch < epochs and at >= flight.sent]
            if (
                flight.prefill
                and flight.stays
                and not (ends and ends[0] < max(s.ended for s in flight.stays.values()))
            ):
                flight.outcome = Outcome.PREFILL
                flight.ended = max(stay.ended for stay in flight.stays.values())
            elif ends:
                flight.outcome, flight.ended = Outcome.STALE, ends[0]
        if flight.prefill and flight.outcome is Outcome.ACCEPTED:
            flight.outcome = Outcome.PREFILL
