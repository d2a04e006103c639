"""The way to the first stage as it is now, and what becomes of it.

    forming ──formed──▶ up ──broke──▶ broken ──formed──▶ up …          any of them ──close──▶ closed

A `Way` is what sessions send through. While it is not up, what is sent is forgotten: every session begins again
from its committed tokens when it sees that the way has been formed anew (`generation` has risen). Who forms it
anew is somebody else (`meshpipe.pipeline.failover`); a pipeline in one process has a way that is up for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

import trio

from meshpipe.errors import ActorGoneError, StageLostError
from meshpipe.pipeline.route import Sender


class WayState(Enum):
    """See the top of this file."""

    FORMING = "forming"
    UP = "up"
    BROKEN = "broken"
    CLOSED = "closed"


class Way:
    """A `Sender` to whatever stage is first now; up at once if `first` is given.

    `generation` counts the times it was formed. `same_caches` says that the stages are the processes of the
    generation before, so that their caches may hold what they held; `fingerprints` are those of the stages'
    descriptors, in order. `reason` and `since` say why and when (trio's time) it came into its state.
    """

    def __init__(self, first: Sender | None = None) -> None:
        self.state = WayState.FORMING
        self.generation = 0
        self.same_caches = False
        self.fingerprints: tuple[str, ...] = ()
        self.reason = "it has not been formed yet"
        self.since = 0.0
        self.on_change: Callable[[], None] = lambda: None
        """Called after every change of state."""
        self.give_up: Callable[[str, int | None], None] | None = None
        """Called by whoever finds it dead, with the reason and the stage, if it is known which; None: nobody can form
        it anew."""
        self.hopeful: Callable[[], bool] = lambda: False
        """Whether, while it is broken, it is being formed anew and nothing speaks against that yet."""
        self._first: Sender | None = None
        self._changed = trio.lowlevel.ParkingLot()
        if first is not None:
            self.formed(first)

    @property
    def up(self) -> bool:
        """Whether what is sent goes anywhere."""
        return self.state is WayState.UP

    def formed(self, first: Sender, *, same_caches: bool = False, fingerprints: tuple[str, ...] = ()) -> None:
        """The stages are joined: from now on sessions send to `first`."""
        self._enter(WayState.UP, "")
        self._first = first
        self.generation += 1
        self.same_caches = same_caches
        self.fingerprints = fingerprints
        self.on_change()

    def broke(self, reason: str) -> None:
        """A stage or a link of it is lost. The first reason counts."""
        if self.up:
            self._enter(WayState.BROKEN, reason)
            self._first = None
            self.on_change()

    def close(self) -> None:
        """Nobody will form it any more."""
        self._enter(WayState.CLOSED, "the pipeline is closed")
        self._first = None
        self.on_change()

    async def wait_up(self, deadline: float, at_most: float = 0.0) -> None:
        """Returns when it is up. Raises StageLostError if it is closed, or after `deadline` seconds.

        As long as it is `hopeful` it is waited for `at_most` seconds, if those are more.
        """
        began = trio.current_time()
        with trio.move_on_at(began + deadline):
            while self.state in (WayState.FORMING, WayState.BROKEN):
                await self._changed.park()
        with trio.move_on_at(began + at_most):
            while self.state is WayState.BROKEN and self.hopeful():
                await self._changed.park()
        if not self.up:
            waited = trio.current_time() - began
            raise StageLostError(f"{self.reason}; no route to the stages for {waited:.2g} s, try again later")

    def reconsider(self) -> None:
        """What `hopeful` says may have changed."""
        self._changed.unpark_all()

    async def send(self, message: object) -> None:
        """See `Sender.send`; never raises ActorGoneError."""
        first = self._first
        try:
            if first is not None:
                await first.send(message)
        except ActorGoneError:
            pass  # whoever carries the link says so

    def try_send(self, message: object) -> bool:
        """See `Sender.try_send`; never raises ActorGoneError."""
        try:
            return self._first is None or self._first.try_send(message)
        except ActorGoneError:
            return True

    def _enter(self, state: WayState, reason: str) -> None:
        self.state, self.reason = state, reason
        self.since = trio.current_time()
        self._changed.unpark_all()
