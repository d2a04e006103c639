"""The pipeline as a few lines of text that move: stages, the windows on their way, acceptance, speed.

Where a window is between its dispatch and its reply, the coordinator does not see; it is drawn where windows of late
were after as much time, by what replies say of each stage. Told by one thread, read by another.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic

from meshpipe.messages import Timing

from .observers import Summary
from .spans import Kind, Span

MEMORY = 3.0
"""Seconds that rates and shares are taken over."""
FRESHNESS = 0.2
"""Weight of the latest reply in the mean times."""


class LiveView:
    """An `Observer`, and a listener to spans (`Recorder.listen`). `clock` gives seconds."""

    def __init__(self, stages: int, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._flying: dict[tuple[int, int], tuple[float, int, int]] = {}  # (sent at, epoch, rows)
        self._queue = [0.0] * stages
        self._service = [0.0] * stages
        self._wire = 0.0  # seconds of a traversal that no stage accounts for
        self._computed: deque[tuple[float, tuple[float, ...]]] = deque()  # (at, seconds by stage)
        self._commits: deque[tuple[float, int, int]] = deque()  # (at, tokens, rows)
        self._tokens = self._stale = 0

    def note(self, span: Span) -> None:
        """A span of the coordinator's."""
        now, key = self._clock(), (span.session, span.window)
        with self._lock:
            if span.kind == Kind.DISPATCH:
                self._flying[key] = (now, span.epoch, span.value)
            elif span.kind == Kind.COMMIT:
                _, _, rows = self._flying.pop(key, (0.0, 0, span.value))
                self._commits.append((now, span.value, rows))
                self._tokens += span.value
                if span.detail:
                    self._drop(span.session, span.epoch, now)
            elif span.kind == Kind.SESSION:
                self._drop(span.session, 2**31, now)

    def _drop(self, session: int, epoch: int, now: float) -> None:
        """What is in flight of an epoch and those before it has become stale."""
        for key, (_, of, rows) in list(self._flying.items()):
            if key[0] == session and of <= epoch:
                del self._flying[key]
                self._stale += 1
                self._commits.append((now, 0, rows))

    def replied(self, latency: float, timings: Sequence[Timing]) -> None:
        """See `Observer.replied`."""
        with self._lock:
            self._wire += FRESHNESS * (latency - sum(t.queued + t.service for t in timings) - self._wire)
            shares = [0.0] * len(self._service)
            for timing in timings:
                self._queue[timing.stage] += FRESHNESS * (timing.queued - self._queue[timing.stage])
                self._service[timing.stage] += FRESHNESS * (timing.service - self._service[timing.stage])
                shares[timing.stage] = timing.service
            self._computed.append((self._clock(), tuple(shares)))

    def finished(self, report: Summary) -> None:
        """See `Observer.finished`."""

    def text(self, columns: int = 80) -> str:
        """The pipeline now, in lines of at most `columns`."""
        now = self._clock()
        with self._lock:
            for recent in (self._commits, self._computed):
                while recent and recent[0][0] < now - MEMORY:
                    recent.popleft()
            tokens = sum(count for _, count, _ in self._commits)
            rows = sum(rows for _, _, rows in self._commits)
            since = min([MEMORY, *(now - at for at, *_ in list(self._commits)[:1])])
            rate = f"{tokens / since:.1f} tokens/s" if tokens and since > 0.1 else "no tokens yet"
            useful = f", {tokens / rows:.0%} of the rows were right" if rows else ""
            head = f"{rate}{useful}, {len(self._flying)} windows in flight, {self._stale} stale, {self._tokens} tokens"
            labels, marks = self._track(now, columns)
            busy = "   ".join(
                f"stage {stage} {_bar(sum(part[stage] for _, part in self._computed) / MEMORY)} "
                f"{self._service[stage] * 1e3:.0f} ms"
                for stage in range(len(self._service))
            )
        return "\n".join(line[:columns] for line in (head, labels, marks, busy))

    def _track(self, now: float, columns: int) -> tuple[str, str]:
        """The way of a window, each piece as long as it takes, and below it the windows that are on it."""
        stages = len(self._service)
        hop = self._wire / max(stages, 1)  # the first stage is beside the coordinator
        pieces = [
            piece
            for stage in range(stages)
            for piece in (
                (f"[stage {stage}]", self._queue[stage] + self._service[stage]),
                (" wire " if stage < stages - 1 else " back ", hop),
            )
        ]
        total = sum(took for _, took in pieces)
        if total <= 0:
            return "", ""
        room = columns - sum(len(name) for name, _ in pieces)
        labels, edges, at = "", [0], 0.0
        for name, took in pieces:
            width = len(name) + max(0, int(room * took / total))
            labels += name.center(width, "#" if name.startswith("[") else "·")
            edges.append(len(labels))
        marks = [" "] * len(labels)
        for sent, _, _ in self._flying.values():
            age, at = now - sent, 0.0
            for number, (_, took) in enumerate(pieces):
                if age < at + took or number == len(pieces) - 1:
                    share = min(1.0, (age - at) / took) if took else 0.0
                    place = edges[number] + int(share * (edges[number + 1] - edges[number]))
                    place = min(place, len(marks) - 1)
                    marks[place] = "●" if marks[place] == " " else "◆"
                    break
                at += took
        return labels, "".join(marks)


def _bar(share: float, width: int = 10) -> str:
    filled = round(min(1.0, share) * width)
    return "█" * filled + "░" * (width - filled)
