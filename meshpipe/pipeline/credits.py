"""The credit scheduler: who may have one more window in flight.

A credit is the right to have one more window in flight. Every session has one of its own, for its mandatory
window. The others are lent from a pool that Little's law sizes: the pipe is full when the work in flight, in
seconds of the slowest stage, equals the latency of a window and a little more (`Pipe.room`). What the mandatory
windows leave of that is shared among the sessions that want to speculate, so that speculation ends by itself when
there are enough sessions to fill the pipe. Guesses inside a window are speculation too: beside others, none is longer
than a row and its session's share.

Pure arithmetic, called without awaiting: nobody else runs between the question and the taking.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from attrs import define, field

from meshpipe.errors import UsageError


@define(eq=False)
class Credits:
    """One session's credits. `close` gives back exactly what it holds."""

    _scheduler: CreditScheduler
    wants: bool = False
    _mandatory: float = 0.0
    _borrowed: dict[int, float] = field(factory=dict)
    _mandatory_window: int | None = None

    @property
    def held(self) -> int:
        """Windows that hold a credit now, the mandatory one included."""
        return len(self._borrowed) + (self._mandatory_window is not None)

    @property
    def work(self) -> float:
        """Seconds of the slowest stage that this session has in flight."""
        return self._mandatory + self.borrowed

    @property
    def borrowed(self) -> float:
        """Of these, the seconds that its speculative windows take."""
        return sum(self._borrowed.values())

    def others(self) -> float:
        """Seconds of work that all other sessions have in flight."""
        return self._scheduler.work - self.work

    def may_borrow(self, room: float) -> bool:
        """Whether a speculative window may go into a pipe that has room for `room` seconds of work.

        Marks the session as wanting to speculate.
        """
        self.wants = True
        return self._scheduler.has_room(self, room)

    def longest(self, cost: Callable[[int], float], room: float) -> float:
        """Seconds of the slowest stage that one window may take beside other sessions', whose rows wait for it.

        That is a row, and this session's share of what a row of every session, all in one decode, leaves of the pool
        of `room` seconds. `cost` is of decodes, by their rows. Infinite for a session that is alone. Marks the
        session as wanting to speculate.
        """
        self.wants = True
        sessions = self._scheduler.sessions
        if sessions == 1:
            return math.inf
        return cost(1) + max(0.0, room - cost(sessions)) / self._scheduler.wanting

    def take(self, window: int, work: float) -> None:
        """Window number `window` is in flight: as the mandatory one if the session has none, else borrowed.

        Raises UsageError for a window that holds a credit already.
        """
        if window == self._mandatory_window or window in self._borrowed:
            raise UsageError(f"window {window} holds a credit already")
        if self._mandatory_window is None:
            self._mandatory_window, self._mandatory = window, work
        else:
            self._borrowed[window] = work

    def retire(self, window: int) -> None:
        """The window and all before it have retired: the oldest one left becomes the mandatory one."""
        if self._mandatory_window is not None and self._mandatory_window <= window:
            self._mandatory_window, self._mandatory = None, 0.0
        for number in [number for number in self._borrowed if number <= window]:
            del self._borrowed[number]
        if self._mandatory_window is None and self._borrowed:
            oldest = min(self._borrowed)
            self._mandatory_window, self._mandatory = oldest, self._borrowed.pop(oldest)

    def drop_all(self) -> None:
        """Everything in flight is stale."""
        self._mandatory_window, self._mandatory = None, 0.0
        self._borrowed.clear()

    def close(self) -> None:
        """The session has ended; safe to call twice."""
        self.drop_all()
        self._scheduler.forget(self)


class CreditScheduler:
    """Shares a pipe among sessions."""

    def __init__(self) -> None:
        self._sessions: list[Credits] = []

    def open(self) -> Credits:
        """A new session's credits."""
        credits = Credits(self)
        self._sessions.append(credits)
        return credits

    def forget(self, credits: Credits) -> None:
        """See `Credits.close`."""
        if credits in self._sessions:
            self._sessions.remove(credits)

    @property
    def sessions(self) -> int:
        """Number of open sessions."""
        return len(self._sessions)

    @property
    def wanting(self) -> int:
        """Sessions that want to speculate; at least one: who asks."""
        return sum(credits.wants for credits in self._sessions) or 1

    @property
    def work(self) -> float:
        """Seconds of the slowest stage that are in flight, of all sessions."""
        return sum(credits.work for credits in self._sessions)

    def has_room(self, asking: Credits, room: float) -> bool:
        """Whether `asking` may borrow for one more window: the pool and its fair share of it are not used up.

        The pool is `room` seconds of work. The window that crosses its edge may go: the
        pipe is full with the next whole number of windows, and one less leaves the slowest stage idle.

        A share is what the mandatory windows leave, divided by the sessions that want to speculate. One that
        has borrowed nothing may exceed its share if the pool has room.
        """
        full = room * (1 - 1e-9)
        if self.work >= full:
            return False
        pool = full - sum(credits.work - credits.borrowed for credits in self._sessions)
        return asking.borrowed == 0 or asking.borrowed < pool / self.wanting
