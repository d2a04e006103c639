"""Histograms for Prometheus, fed while a pipeline runs. Needs prometheus-client (extra `telemetry`).

    registry = CollectorRegistry()
    pipeline.observers.append(Histograms(registry))
    start_http_server(9100, registry=registry)

The server of `meshpipe serve` shows them at /metrics, beside its own counters.
"""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Histogram

from meshpipe.messages import Timing

from .observers import Summary

LATENCIES = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 63)


class Histograms:
    """An `Observer` that keeps histograms in a registry; seconds, by stage where a stage is concerned."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, words: str, buckets: Sequence[float], *labels: str) -> Histogram:
            return Histogram(f"meshpipe_{name}", words, labels, buckets=buckets, registry=registry)

        self._ttft = histogram(
            "time_to_first_token_seconds", "From a session's begin to its first token", LATENCIES
        )
        self._tpot = histogram(
            "time_per_output_token_seconds", "Of one request, after the first token", SHORT
        )
        self._request = histogram("request_seconds", "From a session's begin to its end", LATENCIES)
        self._window = histogram("window_seconds", "From a window's dispatch to its reply", LATENCIES)
        self._network = histogram(
            "window_network_seconds", "Of that, neither queued nor computing at a stage", LATENCIES
        )
        self._queue = histogram("stage_queue_seconds", "A window's wait at a stage", SHORT, "stage")
        self._compute = histogram("stage_compute_seconds", "The decode that ran a window", SHORT, "stage")
        self._rows = histogram("stage_decode_rows", "Rows of the decode that ran a window", COUNTS, "stage")

    def replied(self, latency: float, timings: Sequence[Timing]) -> None:
        """See `Observer.replied`."""
        self._window.observe(latency)
        self._network.observe(max(0.0, latency - sum(t.queued + t.service for t in timings)))
        for timing in timings:
            self._queue.labels(timing.stage).observe(timing.queued)
            self._compute.labels(timing.stage).observe(timing.service)
            self._rows.labels(timing.stage).observe(timing.rows)

    def finished(self, report: Summary) -> None:
        """See `Observer.finished`."""
        self._ttft.observe(report.ttft)
        self._request.observe(report.total)
        if report.tpot is not None:
            self._tpot.observe(report.tpot)
