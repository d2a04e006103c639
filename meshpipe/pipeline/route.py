"""How messages reach a stage: routes, arrivals, the mailbox, and the ends that deliver into it.

A stage serves several coordinators; each has a route through it, with the way on and the way back.
"""

from __future__ import annotations

import logging
from typing import Protocol

import trio
from attrs import define, field, frozen

from meshpipe.actors import Mailbox
from meshpipe.messages import (
    CloseSession,
    Discard,
    Echo,
    OpenSession,
    Progress,
    Reply,
    SessionFailed,
    SessionOpened,
    Spans,
    Window,
)
from meshpipe.telemetry.spans import Kind, Recorder, Span

log = logging.getLogger("meshpipe.stage")

_MESSAGE, _TOKEN = 1024, 36  # bytes that a window takes in memory, about, and each of its tokens

Downward = OpenSession | Window | CloseSession | Discard | Echo
"""What travels from the coordinator to the last stage."""
UPWARD = (Reply, Progress, SessionOpened, SessionFailed, Echo, Spans)
"""What travels to the coordinator."""


class Sender(Protocol):
    """Where a stage sends: a `Ref`, or a link's end that looks like one."""

    async def send(self, message: object) -> None:
        """Waits for room if need be. Raises ActorGoneError."""

    def try_send(self, message: object) -> bool:
        """Says False if there is no room. Raises ActorGoneError."""


@define(eq=False)
class Route:
    """One coordinator's path through this stage: the next stage (None at the last), and the way back.

    `index` is the stage's place on it. `lost` from when its coordinator is gone: what is still queued of it opens
    no session any more. `recorder` is told what the stage does for it.
    """

    downstream: Sender | None
    back: Sender
    index: int = 0
    lost: bool = False
    recorder: Recorder = field(factory=Recorder)


@frozen
class Arrival:
    """A message that came along a route, at `at` on this host's clock (seconds)."""

    route: Route
    message: Downward
    at: float


@frozen
class RouteLost:
    """A route's coordinator is gone: its sessions end, nothing is sent."""

    route: Route


StageMessage = Arrival | RouteLost


ROOM = 1 << 26
"""Bytes of windows that wait at a stage, unless told otherwise."""


def stage_mailbox(room: int = ROOM) -> Mailbox[StageMessage]:
    """A stage's mailbox. `room` bounds the queue of windows, in bytes: two epochs' credits of all lanes.

    Discards are hints and have a queue of their own, so that they are seen before the windows they concern.
    """

    def queue(message: StageMessage) -> str:
        urgent = isinstance(message, RouteLost) or isinstance(message.message, (Discard, Echo))
        return "control" if urgent else "windows"

    def weight(message: StageMessage) -> int:
        window = message.message if isinstance(message, Arrival) else None
        if isinstance(window, Window):
            rows = 0 if window.rows is None else window.rows.nbytes
            return _MESSAGE + _TOKEN * len(window.tokens) + rows
        return 1 if queue(message) == "control" else _MESSAGE

    return Mailbox({"control": 1024, "windows": room}, sort=queue, weigh=weight)


@frozen
class Inlet:
    """A `Sender` into a stage's mailbox along one route: how a coordinator in this process, or a link, delivers."""

    mailbox: Mailbox[StageMessage]
    route: Route

    async def send(self, message: object) -> None:
        """See `Sender.send`."""
        await self.mailbox.ref.send(self._arrival(message))

    def try_send(self, message: object) -> bool:
        """See `Sender.try_send`."""
        return self.mailbox.put_nowait(self._arrival(message))

    def _arrival(self, message: object) -> Arrival:
        if not isinstance(message, Downward):
            raise TypeError(f"a stage does not take {type(message).__name__}")
        return Arrival(self.route, message, trio.current_time())


@frozen
class Nothing:
    """The inbox of a link that carries messages one way only: nothing but heartbeats comes the other way."""

    async def send(self, message: object) -> None:
        """See `Sender.send`."""
        self.try_send(message)

    def try_send(self, message: object) -> bool:
        """See `Sender.try_send`."""
        log.warning("%s came up a one-way link; ignored", type(message).__name__)
        return True


def record(
    route: Route, kind: Kind, window: Window, began: float, ended: float, value: int, detail: int = 0
) -> None:
    """Tells the route's recorder, if it is on, what became of a window."""
    if route.recorder.on:
        session, epoch, number = window.session, window.epoch, window.number
        route.recorder.add(Span(kind, began, ended, route.index, session, epoch, number, value, detail))
