"""When each stage computed, seen from the coordinator: the times that replies carry, laid out on one clock.

A reply says how long each stage queued and computed its window. The delay of every link is known (the rig sets
it), so that going back from the reply's arrival gives when each stage began and ended, on this host's clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import trio
from attrs import define, field

from meshpipe import Coordinator
from meshpipe.messages import Reply

Span = tuple[float, float]


@define
class Trace:
    """Replies as they arrived; `delay` is the seconds of every link and of the return."""

    delay: float
    replies: list[tuple[float, Reply]] = field(factory=list)

    def verifying(self) -> list[tuple[float, Reply]]:
        """Without the first reply of every session: that one belongs to its prompt."""
        seen: set[int] = set()
        kept = []
        for at, reply in self.replies:
            if reply.session in seen:
                kept.append((at, reply))
            seen.add(reply.session)
        return kept

    def spans(self) -> list[list[Span]]:
        """For each stage, when it computed verify windows: disjoint and ascending, in seconds."""
        found: dict[int, list[Span]] = {}
        for at, reply in self.verifying():
            end = at - self.delay
            for timing in reversed(reply.timings):
                found.setdefault(timing.stage, []).append((end - timing.service, end))
                end -= timing.service + timing.queued + self.delay
        return [_union(found[stage]) for stage in sorted(found)]

    def service(self) -> list[float]:
        """Mean seconds of a decode at each stage."""
        found: dict[int, list[float]] = {}
        for _, reply in self.verifying():
            for timing in reply.timings:
                found.setdefault(timing.stage, []).append(timing.service)
        return [sum(found[stage]) / len(found[stage]) for stage in sorted(found)]


def _union(spans: Sequence[Span]) -> list[Span]:
    """Windows of one decode have the same span; estimates of neighbours may touch."""
    joined: list[Span] = []
    for start, stop in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return joined


def busy(spans: Sequence[Span], within: Span) -> float:
    """Seconds of `within` that the spans cover."""
    return sum(max(0.0, min(stop, within[1]) - max(start, within[0])) for start, stop in spans)


def overlap(stages: Sequence[Sequence[Span]], within: Span, least: int) -> float:
    """Share of `within` in which at least that many stages compute."""
    changes = [
        (at, step) for spans in stages for span in spans for at, step in zip(span, (1, -1), strict=True)
    ]
    count, since, total = 0, within[0], 0.0
    for at, step in sorted(changes):
        at = min(max(at, within[0]), within[1])
        total += (at - since) if count >= least else 0.0
        count, since = count + step, at
    return total / (within[1] - within[0])


@contextmanager
def tracing(pipe: Coordinator, delay: float) -> Iterator[Trace]:
    """Notes every reply that comes into the pipeline's sink."""
    trace = Trace(delay)
    sink = pipe.sink
    send, try_send = sink.send, sink.try_send

    def note(message: object) -> None:
        if isinstance(message, Reply):
            trace.replies.append((trio.current_time(), message))

    async def noting_send(message: object) -> None:
        note(message)
        await send(message)

    def noting_try_send(message: object) -> bool:
        note(message)
        return try_send(message)

    sink.send, sink.try_send = noting_send, noting_try_send  # type: ignore[method-assign]
    try:
        yield trace
    finally:
        sink.send, sink.try_send = send, try_send  # type: ignore[method-assign]
