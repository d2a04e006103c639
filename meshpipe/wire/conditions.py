"""Link conditions: what a frame suffers between two machines, injected where there is only one.

A wire is pipelined: delay does not limit how much is under way, bandwidth does. Frames of one connection keep
their order, so a lost one (here: a stall until it would have been sent again) holds up those behind it, as on
TCP. `Schedule` is the arithmetic, without a clock; `Wire` applies it to a connection, on trio's real clock or
its autojump clock; `meshpipe.wire.proxy` applies it to any TCP peer from outside.
"""

from __future__ import annotations

import math
import random
from collections import deque
from typing import Any

import attrs
import trio
from attrs import field, frozen

from meshpipe.errors import StageLostError, UsageError

from .connections import Connection
from .frames import Frame, Kind

SEGMENT = 1448
"""Bytes that are lost together: a TCP segment on Ethernet."""


def _sensible(instance: object, attribute: attrs.Attribute[Any], value: float | None) -> None:
    low = value is None or value > 0 or (value == 0 and attribute.name not in ("bandwidth", "window"))
    high = value is None or value < 1 or attribute.name != "loss"
    if not (low and high):
        raise UsageError(
            f"link condition {attribute.name} is {value}; expected a positive number, loss below 1"
        )


@frozen
class Conditions:
    """What one direction of one connection suffers.

    `delay`: seconds one way. `jitter`: up to that many seconds more, uniformly. `bandwidth`: bytes per second,
    None for no limit. `loss`: probability that a segment is lost, which stalls the connection for `stall`
    seconds. `cut_after`: seconds after which the connection breaks, None for never. `window`: bytes that may be
    under way before the sender has to wait. `seed` of the random numbers.
    """

    delay: float = field(default=0.0, validator=_sensible)
    jitter: float = field(default=0.0, validator=_sensible)
    bandwidth: float | None = field(default=None, validator=_sensible)
    loss: float = field(default=0.0, validator=_sensible)
    stall: float = field(default=0.2, validator=_sensible)
    cut_after: float | None = field(default=None, validator=_sensible)
    window: int = field(default=64 << 20, validator=_sensible)
    seed: int = 0

    @classmethod
    def parse(cls, text: str) -> Conditions:
        """From `delay=0.1,jitter=0.01,bandwidth=1e6`. Raises UsageError."""
        values: dict[str, Any] = {}
        for part in filter(None, text.split(",")):
            name, equals, number = part.partition("=")
            try:
                if not equals or name not in ("delay", "jitter", "bandwidth", "loss", "stall"):
                    raise ValueError
                values[name] = float(number)
            except ValueError:
                raise UsageError(
                    "link conditions look like delay=0.1,jitter=0.01,bandwidth=1e6 (seconds, bytes a second), "
                    f"not {text!r}"
                ) from None
        return cls(**values)


class Schedule:
    """When what is sent arrives: a queue before the bottleneck, then delay, jitter and stalls, in order."""

    def __init__(self, conditions: Conditions) -> None:
        self._conditions = conditions
        self._random = random.Random(conditions.seed)
        self._free_at = -math.inf
        self._last_arrival = -math.inf

    def arrival(self, now: float, size: int) -> float:
        """The time at which the last of `size` bytes that are sent at `now` arrives."""
        conditions = self._conditions
        transmission = size / conditions.bandwidth if conditions.bandwidth else 0.0
        self._free_at = max(now, self._free_at) + transmission
        arrival = self._free_at + conditions.delay
        if conditions.jitter:
            arrival += self._random.uniform(0.0, conditions.jitter)
        if conditions.loss:
            segments = max(1, math.ceil(size / SEGMENT))
            if self._random.random() > (1.0 - conditions.loss) ** segments:
                arrival += conditions.stall
        self._last_arrival = max(arrival, self._last_arrival)
        return self._last_arrival


class Wire:
    """The sending half of a connection under conditions: `send` queues, `run` delivers when the time has come.

    On the real clock a frame is up to a millisecond late (the event loop's timer counts in milliseconds).
    """

    def __init__(self, connection: Connection, conditions: Conditions) -> None:
        self._connection = connection
        self._conditions = conditions
        self._schedule = Schedule(conditions)
        self._frames: deque[tuple[float, Frame]] = deque()
        self._under_way = 0
        self._changed = trio.lowlevel.ParkingLot()

    async def send(self, frame: Frame) -> int:
        """Puts the frame on its way, and returns its size; waits while the wire's window is full."""
        await trio.lowlevel.checkpoint()
        while self._under_way >= self._conditions.window:
            await self._changed.park()
        self._under_way += frame.size
        self._frames.append((self._schedule.arrival(trio.current_time(), frame.size), frame))
        self._changed.unpark_all()
        return frame.size

    async def run(self) -> None:
        """Delivers until the END frame has arrived. Raises `StageLostError` when the wire is cut."""
        cut_after = self._conditions.cut_after
        with trio.move_on_after(math.inf if cut_after is None else cut_after):
            await self._deliver()
            return
        raise StageLostError(f"{self._connection.peer} is lost: the wire was cut after {cut_after} s")

    async def _deliver(self) -> None:
        while True:
            while not self._frames:
                await self._changed.park()
            arrival, frame = self._frames.popleft()
            await trio.sleep_until(arrival)
            await self._connection.send(frame)
            self._under_way -= frame.size
            self._changed.unpark_all()
            if frame.kind is Kind.END:
                return
