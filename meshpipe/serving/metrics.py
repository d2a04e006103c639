"""What Prometheus is told, in a registry of the server's own.

`Metrics.answered` is the one place where a finished request is looked at: what else is to be told of its reports
belongs there.
"""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from meshpipe.pipeline.coordinator import Coordinator
from meshpipe.pipeline.report import Report
from meshpipe.telemetry.prometheus import Histograms

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4


class Metrics:
    """Counters of one server, and the pipeline's histograms; gauges read the pipeline when they are asked for."""

    def __init__(self, pipeline: Coordinator) -> None:
        self.registry = CollectorRegistry()
        pipeline.observers.append(Histograms(self.registry))

        def counter(name: str, words: str, *labels: str) -> Counter:
            return Counter(f"meshpipe_{name}", words, labels, registry=self.registry)

        self.requests = counter("requests", "Requests by endpoint and HTTP status", "endpoint", "status")
        self.disconnects = counter("disconnects", "Requests whose client went away")
        self._prompt = counter("prompt_tokens", "Tokens of prompts")
        self._cached = counter("cached_tokens", "Tokens of prompts that were in a cache")
        self._completion = counter("completion_tokens", "Tokens of answers")
        self._windows = counter("windows", "Windows dispatched")
        self._stale_windows = counter("stale_windows", "Windows that a divergence made useless")
        self._stale_tokens = counter("stale_tokens", "Tokens in such windows")
        self._drafted = counter("drafted_tokens", "Tokens proposed and dispatched", "source")
        self._accepted = counter("accepted_tokens", "Proposed tokens that the model confirmed", "source")
        self._gauge("lanes", "Sessions that the pipeline runs at a time", lambda: pipeline.lanes.count)
        self._gauge("lanes_free", "Lanes without a session", lambda: pipeline.lanes.free)
        self._gauge("generations", "Generations that run or wait for a lane", lambda: pipeline.active)

    def _gauge(self, name: str, words: str, read: object) -> None:
        Gauge(f"meshpipe_{name}", words, registry=self.registry).set_function(read)  # type: ignore[arg-type]

    def answered(self, reports: Sequence[Report]) -> None:
        """A request is done; `reports` are those of its choices that ended."""
        for report in reports:
            self._prompt.inc(report.prompt_tokens)
            self._cached.inc(report.cached_tokens)
            self._completion.inc(report.completion_tokens)
            self._windows.inc(report.windows)
            self._stale_windows.inc(report.stale_windows)
            self._stale_tokens.inc(report.stale_tokens)
            for name, source in report.sources.items():
                self._drafted.labels(name).inc(source.drafted)
                self._accepted.labels(name).inc(source.accepted)

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self.registry)
