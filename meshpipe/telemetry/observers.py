"""What metrics and the live view are told while a pipeline runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from meshpipe.messages import Timing


class SourceCount(Protocol):
    """Of one proposer: tokens sent in windows, tokens judged by a commit, tokens accepted."""

    @property
    def drafted(self) -> int: ...
    @property
    def judged(self) -> int: ...
    @property
    def accepted(self) -> int: ...


class Summary(Protocol):
    """What is used of a request's `pipeline.report.Report`; times in seconds."""

    @property
    def prompt_tokens(self) -> int: ...
    @property
    def completion_tokens(self) -> int: ...
    @property
    def finish_reason(self) -> str: ...
    @property
    def ttft(self) -> float: ...
    @property
    def total(self) -> float: ...
    @property
    def tpot(self) -> float | None: ...
    @property
    def windows(self) -> int: ...
    @property
    def stale_windows(self) -> int: ...
    @property
    def sources(self) -> Mapping[str, SourceCount]: ...


class Observer(Protocol):
    """Is told of every reply and every request that ended; called on the event loop, must be quick."""

    def replied(self, latency: float, timings: Sequence[Timing]) -> None:
        """A window came back, `latency` seconds after it went out; what each stage spent on it."""

    def finished(self, report: Summary) -> None:
        """A request has its last token."""
