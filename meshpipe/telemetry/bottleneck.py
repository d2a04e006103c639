"""What limits a run, in a sentence with the arithmetic.

Either a stage computes nearly all the time, and its time a token is the limit; or the pipe is not full, and Little's
law says how the rate comes about: windows in flight x tokens a window / seconds a window (Little, "A Proof for the
Queuing Formula L = λW", 1961).
"""

from __future__ import annotations

from collections.abc import Sequence

from .trace import Flight, Outcome

SATURATED = 0.6
"""Share of the interval from which a stage's computing is called the bottleneck."""


def bottleneck(
    busy: Sequence[float],
    in_vain: Sequence[float],
    waits: dict[str, float],
    transit: dict[str, float],
    verify: Sequence[Flight],
    tokens: int,
    seconds: float,
) -> str:
    """What limits, in a sentence with the arithmetic."""
    stage = max(range(len(busy)), key=lambda at: round(busy[at], 6))
    rate, most = tokens / seconds, busy[stage]
    retired = [f for f in verify if f.outcome in (Outcome.ACCEPTED, Outcome.CORRECTED)]
    if most >= SATURATED and tokens:
        vain, each_ms = in_vain[stage] / (most * seconds), most * seconds * 1e3 / tokens
        return (
            f"Stage {stage} limits: it computes {most:.0%} of the time, {each_ms:.1f} ms "
            f"a token ({vain:.0%} of that in vain), so that {rate:.1f} tokens/s are {most:.0%} of the "
            f"{rate / most:.1f} that it could give."
        )
    if not retired:
        return "No verify window retired: there is nothing to say about decoding."
    latency = sum(transit.values())
    wire = sum(took for name, took in transit.items() if name.startswith("wire"))
    each = sum(f.tokens for f in retired) / len(retired)
    flying = len(retired) * latency / seconds
    law = (
        f"{flying:.2f} windows in flight that retire x {each:.2f} tokens each / {latency * 1e3:.0f} ms "
        f"= {flying * each / latency:.1f} tokens/s"
    )
    cause = max(waits, key=lambda name: waits[name])
    share = f"{waits[cause]:.0%}"
    return {
        "proposal": f"Proposals limit: {share} of the time nothing was known that could be sent, and a window is on "
        f"the wire for {wire * 1e3:.0f} ms: {law}.",
        "credit": f"The pipe is full of others' windows: {share} of the time sessions waited for credit; {law}.",
        "wire": f"The wire limits: {share} of the time the oldest window was on it, for {wire * 1e3:.0f} of the "
        f"{latency * 1e3:.0f} ms that a window takes: {law}.",
        "compute": f"Latency of the stages limits: {share} of the time the oldest window was being computed, though no "
        f"stage is busy all the time (stage {stage}: {most:.0%}): {law}.",
        "queue": f"Queues limit: {share} of the time the oldest window waited at a stage (the busiest, stage {stage}, "
        f"computes {most:.0%} of the time): {law}.",
        "lane": f"Lanes limit: requests spent {share} of their time waiting for one; {law}.",
        "client": f"Demand limits: {share} of the time nobody had asked for anything; {law}.",
    }[cause]
