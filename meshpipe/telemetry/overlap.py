"""What a trace says: how busy each stage was, how much they overlapped, what sessions waited for, and what limits.

All from the joined spans of one run, of one request or of thousands. The *interval* is from the first verify decode
to the end of the last one: loading prompts before it and silence after it say nothing about decoding.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise

from attrs import asdict, frozen

from .bottleneck import bottleneck
from .intervals import Interval, clipped, length, levels, shares, union
from .spans import Kind
from .trace import Flight, Outcome, Trace, flights
from .waits import transit_times, waits_by_cause

RESOLUTION = 1e-6
"""Seconds: decodes that touch do not overlap, whatever the last bits of their times say."""
SLICES = 200
"""Points of the occupancy over time."""


# ---- the analysis -------------------------------------------------------------------------------------


@frozen
class Percentiles:
    """Of one quantity, in seconds."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Percentiles | None:
        """None for no values. Nearest rank, so that every percentile is a value that occurred."""
        ordered = sorted(values)
        if not ordered:
            return None
        p50, p90, p99 = (ordered[min(len(ordered) - 1, int(len(ordered) * q))] for q in (0.5, 0.9, 0.99))
        return cls(len(ordered), sum(ordered) / len(ordered), p50, p90, p99, ordered[-1])


@frozen
class StageWork:
    """What one stage did in the interval; `busy` is its share of it, `service` seconds a decode in the mean.

    `in_vain` is seconds computed for windows that were stale in the end, a decode's time shared out by rows;
    of those `stale_run` were run, `aborted` broken off, and `dropped` dropped unrun.
    """

    busy: float
    decodes: int
    windows: int
    rows: int
    service: float
    in_vain: float
    stale_run: int
    aborted: int
    dropped: int


@frozen
class Analysis:
    """See the functions that make it; times in seconds, shares from 0 to 1.

    `concurrent[k]`: share of the interval with exactly k stages computing. `overlaps`: pairs of decodes of
    different stages at the same time; `between_windows` of them have no window in common (all, if the clocks are
    right: a window is at one place at a time), `between_sessions` not even a session. `in_flight`: windows, in
    the mean and at most; `occupancy`: (time, mean windows in flight since the one before). `waits`: share of the
    sessions' decode time by cause. `transit`: mean seconds of a verify window that retired, by piece. `joined`
    of the `windows` are known at every stage that they must have come to.
    """

    run: str
    stages: int
    interval: Interval
    requests: int
    tokens: int
    tokens_per_second: float
    work: tuple[StageWork, ...]
    concurrent: tuple[float, ...]
    overlaps: int
    between_windows: int
    between_sessions: int
    in_flight: tuple[float, int]
    occupancy: tuple[tuple[float, float], ...]
    waits: dict[str, float]
    transit: dict[str, float]
    outcomes: dict[str, int]
    windows: int
    joined: int
    ttft: Percentiles | None
    itl: Percentiles | None
    tpot: Percentiles | None
    bottleneck: str
    caveats: tuple[str, ...]

    def at_least(self, stages: int) -> float:
        """Share of the interval with at least that many stages computing."""
        return sum(self.concurrent[stages:])

    def to_dict(self) -> dict[str, object]:
        """Plain data, for JSON."""
        return asdict(self)


def analyse(trace: Trace) -> Analysis | None:
    """The analysis; None if no verify window was computed while the trace was recorded."""
    followed = flights(trace)
    within = _interval(followed)
    if within is None:
        return None
    stages = trace.stages
    busy = [union((s.began, s.ended) for s in _decodes(followed, stage)) for stage in range(stages)]
    work = tuple(_work(followed, stage, busy[stage], within) for stage in range(stages))
    overlaps = _overlaps(followed, stages)
    verify = [flight for flight in followed if not flight.prefill]
    retired = [flight for flight in verify if flight.tokens]
    tokens = sum(flight.tokens for flight in retired)
    end = max([within[1], *(flight.ended for flight in retired if flight.ended is not None)])
    aloft = [(f.sent, f.ended if f.ended is not None else within[1]) for f in verify]
    outcomes = {outcome.value: sum(f.outcome is outcome for f in followed) for outcome in Outcome}
    ttft, itl, tpot = _latencies(trace)
    waits = waits_by_cause(trace, followed)
    transit = transit_times(verify, stages)
    return Analysis(
        run=trace.run,
        stages=stages,
        interval=within,
        requests=len({flight.session for flight in followed}),
        tokens=tokens,
        tokens_per_second=tokens / (end - within[0]),
        work=work,
        concurrent=tuple(shares(busy, within)),
        overlaps=overlaps[0],
        between_windows=overlaps[1],
        between_sessions=overlaps[2],
        in_flight=_in_flight(aloft, within),
        occupancy=_occupancy(aloft, within),
        waits=waits,
        transit=transit,
        outcomes=outcomes,
        windows=len(followed),
        joined=sum(not flight.unseen(stages) for flight in followed),
        ttft=ttft,
        itl=itl,
        tpot=tpot,
        bottleneck=bottleneck(
            [one.busy for one in work],
            [one.in_vain for one in work],
            waits,
            transit,
            verify,
            tokens,
            end - within[0],
        ),
        caveats=_caveats(trace, overlaps),
    )


def _interval(followed: Iterable[Flight]) -> Interval | None:
    """From the first verify decode to the end of the last one."""
    decodes = [
        stay
        for flight in followed
        if not flight.prefill
        for stay in flight.stays.values()
        if stay.end != "dropped"
    ]
    if not decodes:
        return None
    within = min(stay.began for stay in decodes), max(stay.ended for stay in decodes)
    return within if within[0] < within[1] else None


@frozen
class _Decode:
    began: float
    ended: float
    windows: frozenset[tuple[int, int]]
    sessions: frozenset[int]


def _decodes(followed: Iterable[Flight], stage: int) -> list[_Decode]:
    """A stage's decodes, ascending; windows that shared one began and ended together."""
    found: dict[Interval, list[Flight]] = defaultdict(list)
    for flight in followed:
        stay = flight.stays.get(stage)
        if stay is not None and stay.end != "dropped":
            found[stay.began, stay.ended].append(flight)
    return [
        _Decode(
            began, ended, frozenset((f.session, f.number) for f in some), frozenset(f.session for f in some)
        )
        for (began, ended), some in sorted(found.items(), key=lambda item: item[0])
    ]


def _work(followed: Sequence[Flight], stage: int, busy: Sequence[Interval], within: Interval) -> StageWork:
    here = [(flight, flight.stays[stage]) for flight in followed if stage in flight.stays]
    here = [(f, stay) for f, stay in here if within[0] <= stay.began < within[1] or stay.end == "dropped"]
    run = [(flight, stay) for flight, stay in here if stay.end != "dropped"]
    decodes = {(stay.began, stay.ended) for _, stay in run}
    stale = [
        (flight, stay) for flight, stay in run if flight.outcome is Outcome.STALE or stay.end == "aborted"
    ]
    return StageWork(
        busy=length(clipped(busy, within)) / (within[1] - within[0]),
        decodes=len(decodes),
        windows=len(run),
        rows=sum(flight.rows for flight, _ in run),
        service=sum(ended - began for began, ended in decodes) / len(decodes) if decodes else 0.0,
        in_vain=sum((stay.ended - stay.began) * flight.rows / max(stay.rows, 1) for flight, stay in stale),
        stale_run=sum(stay.end == "computed" for _, stay in stale),
        aborted=sum(stay.end == "aborted" for _, stay in stale),
        dropped=len(here) - len(run),
    )


def _overlaps(followed: Sequence[Flight], stages: int) -> tuple[int, int, int]:
    """Pairs of decodes of two stages at the same time: all, without a common window, without a common session."""
    decodes = [_decodes(followed, stage) for stage in range(stages)]
    pairs = windows = sessions = 0
    for stage, ones in enumerate(decodes):
        for others in decodes[stage + 1 :]:
            first = 0  # others before it have ended; a stage has one decode at a time, so they stay ended
            for one in ones:
                while first < len(others) and others[first].ended <= one.began:
                    first += 1
                for other in others[first:]:
                    if other.began >= one.ended - RESOLUTION:
                        break
                    if other.ended <= one.began + RESOLUTION:
                        continue
                    pairs += 1
                    windows += one.windows.isdisjoint(other.windows)
                    sessions += one.sessions.isdisjoint(other.sessions)
    return pairs, windows, sessions


def _in_flight(aloft: Sequence[Interval], within: Interval) -> tuple[float, int]:
    found = list(levels(clipped(aloft, within)))
    area = sum((ended - began) * count for began, ended, count in found)
    return area / (within[1] - within[0]), max((count for *_, count in found), default=0)


def _occupancy(aloft: Sequence[Interval], within: Interval) -> tuple[tuple[float, float], ...]:
    step = (within[1] - within[0]) / SLICES
    areas = [0.0] * SLICES
    for began, ended, count in levels(clipped(aloft, within)):
        first = min(SLICES - 1, int((began - within[0]) / step))
        last = min(SLICES - 1, int((ended - within[0]) / step))
        for at in range(first, last + 1):
            left = within[0] + at * step
            areas[at] += max(0.0, min(ended, left + step) - max(began, left)) * count
    return tuple((within[0] + (at + 1) * step, area / step) for at, area in enumerate(areas))


def _latencies(trace: Trace) -> tuple[Percentiles | None, Percentiles | None, Percentiles | None]:
    """Time to the first token of each request; between tokens, each commit's shared out; per token of each request."""
    asked = {span.session: span.began for span in trace.of(Kind.SESSION, Kind.REQUEST)[::-1]}
    commits: dict[int, list[tuple[float, int]]] = defaultdict(list)
    for span in trace.of(Kind.COMMIT):
        commits[span.session].append((span.began, span.value))
    for span in trace.of(Kind.REQUEST):  # a request begins before its session has a lane
        asked[span.session] = span.began
    first = [some[0][0] - asked[session] for session, some in commits.items() if session in asked]
    between = [
        (at - before) / tokens
        for some in commits.values()
        for (before, _), (at, tokens) in pairwise(some)
        for _ in range(tokens)
    ]
    each = [
        (some[-1][0] - some[0][0]) / later
        for some in commits.values()
        if (later := sum(tokens for _, tokens in some[1:]))
    ]
    return Percentiles.of(first), Percentiles.of(between), Percentiles.of(each)


def _caveats(trace: Trace, overlaps: tuple[int, int, int]) -> tuple[str, ...]:
    found = []
    if trace.full:
        found.append("the recording was longer than the ring holds: its beginning is missing")
    if trace.rejoined:
        times = "once" if trace.rejoined == 1 else f"{trace.rejoined} times"
        found.append(
            f"a stage was lost and the stages were joined again {times}: what they did before is not in the trace"
        )
    if trace.missing:
        found.append(f"nothing is known from stages {', '.join(map(str, trace.missing))}")
    if overlaps[0] != overlaps[1]:
        found.append(
            f"{overlaps[0] - overlaps[1]} overlaps show a window at two stages at once: the clocks are joined to "
            f"within {trace.give_or_take * 1e3:.1f} ms only"
        )
    return tuple(found)
