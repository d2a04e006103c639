"""How far another process's clock is ahead of ours, from questions and answers that carry the time.

A heartbeat, or the last question of a handshake, that leaves at `sent`, is answered at `clock` on the peer's clock and
comes back at `received` shows that the peer's clock is ahead by `clock - (sent + received) / 2`, give or take half
the round trip: that much, if one way took all of it. Of many the one with the shortest round trip has suffered least
from queues and busy machines, and is believed alone (the minimum filter of NTP: RFC 5905, section 10). What remains
is half the difference between the two ways' delays, which no exchange of messages can show.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from attrs import frozen

Beat = tuple[float, float, float]
"""A heartbeat: when it was sent (our clock), answered (the peer's), and its answer received (ours); seconds."""


@frozen
class Offset:
    """`ahead`: seconds by which a clock is ahead of the reference; it lies within `give_or_take` of that."""

    ahead: float = 0.0
    give_or_take: float = 0.0


def estimate(beats: Iterable[Beat]) -> Offset | None:
    """The peer's clock against ours; None without a heartbeat."""
    best = min(beats, key=lambda beat: beat[2] - beat[0], default=None)
    if best is None:
        return None
    sent, clock, received = best
    return Offset(clock - (sent + received) / 2, (received - sent) / 2)


def chain(hops: Sequence[Offset | None]) -> list[Offset | None]:
    """Each stage's clock against the coordinator's, from each hop's next clock against its own.

    `hops[0]` is stage 0 against the coordinator, `hops[1]` stage 1 against stage 0, and so on. What lies behind
    an unknown hop is unknown.
    """
    known: Offset | None = Offset()
    along = []
    for hop in hops:
        if known is not None:
            known = hop and Offset(known.ahead + hop.ahead, known.give_or_take + hop.give_or_take)
        along.append(known)
    return along
