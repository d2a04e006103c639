"""An analysis in words, for the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from .overlap import Analysis, Percentiles


def summary(found: Analysis) -> str:
    """Lines of text, the sentence that says what limits first."""
    return "\n".join(_lines(found))


def _lines(found: Analysis) -> Iterator[str]:
    yield found.bottleneck
    yield from (f"Caveat: {caveat}." for caveat in found.caveats)
    seconds = found.interval[1] - found.interval[0]
    yield ""
    yield (
        f"{found.tokens} tokens of {found.requests} requests in {seconds:.3f} s of verifying: "
        f"{found.tokens_per_second:.1f} tokens/s"
    )
    yield (
        f"{found.windows} windows, {found.joined} of them known at every stage: "
        + ", ".join(f"{count} {outcome}" for outcome, count in found.outcomes.items() if count)
    )
    yield f"{found.in_flight[0]:.2f} windows in flight in the mean, at most {found.in_flight[1]}"
    yield "stages computing at a time: " + ", ".join(
        f"{count}: {share:.1%}" for count, share in enumerate(found.concurrent)
    )
    yield (
        f"{found.overlaps} overlaps of decodes, {found.between_windows} between different windows, "
        f"{found.between_sessions} between different sessions"
    )
    yield ""
    yield (
        f"{'stage':>5} {'busy':>7} {'decodes':>8} {'rows':>7} {'ms each':>8} {'ms in vain':>11} {'stale run':>10} "
        f"{'dropped':>8}"
    )
    for stage, work in enumerate(found.work):
        yield (
            f"{stage:>5} {work.busy:>7.1%} {work.decodes:>8} {work.rows:>7} {work.service * 1e3:>8.1f} "
            f"{work.in_vain * 1e3:>11.1f} {work.stale_run:>10} {work.dropped:>8}"
        )
    yield ""
    yield "waits: " + ", ".join(f"{cause} {share:.1%}" for cause, share in found.waits.items() if share > 0)
    yield "a window's way (ms): " + ", ".join(
        f"{name} {took * 1e3:.1f}" for name, took in found.transit.items()
    )
    for name, values in (("TTFT", found.ttft), ("ITL", found.itl), ("TPOT", found.tpot)):
        if values is not None:
            yield f"{name:>4} (ms): {_percentiles(values)}"


def _percentiles(values: Percentiles) -> str:
    return (
        f"mean {values.mean * 1e3:.1f}, median {values.p50 * 1e3:.1f}, 90% {values.p90 * 1e3:.1f}, "
        f"99% {values.p99 * 1e3:.1f}, most {values.most * 1e3:.1f} of {values.count}"
    )
