"""The return sink: where the last stage's replies, every stage's complaints, and late proposals come in."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from meshpipe.actors import Ref
from meshpipe.errors import ActorGoneError
from meshpipe.messages import Echo, Progress, Proposal, Reply, SessionFailed, SessionOpened, Spans
from meshpipe.pipeline.request import SessionMessage


class ReturnSink:
    """Hands what comes back to its session; a `Sender`, so that links and stages in this process use it alike.

    What comes for a session that has ended is forgotten.
    """

    def __init__(self) -> None:
        self.on_lost: Callable[[int, str], None] | None = None
        """Called when a stage says that all its sessions have failed; None: every session is told."""
        self.on_spans: Callable[[Spans], None] = lambda spans: None
        """Called with what a stage has recorded."""
        self._sessions: dict[int, Ref[SessionMessage]] = {}

    def register(self, session: int, ref: Ref[SessionMessage]) -> None:
        """From now on the session gets its messages."""
        self._sessions[session] = ref

    def forget(self, session: int) -> None:
        """The session has ended."""
        self._sessions.pop(session, None)

    def sessions(self) -> list[Ref[SessionMessage]]:
        """Those that are registered now."""
        return list(self._sessions.values())

    def tell_all(self, message: SessionMessage) -> None:
        """For every session; one whose mailbox is full does without."""
        for ref in self._sessions.values():
            with suppress(ActorGoneError):
                ref.try_send(message)

    async def send(self, message: object) -> None:
        """See `Sender.send`; waits while the session's mailbox is full."""
        for ref in self._claimants(message):
            with suppress(ActorGoneError):
                await ref.send(message)  # type: ignore[arg-type]

    def try_send(self, message: object) -> bool:
        """See `Sender.try_send`."""
        room = True
        for ref in self._claimants(message):
            with suppress(ActorGoneError):
                room = ref.try_send(message) and room  # type: ignore[arg-type]
        return room

    def _claimants(self, message: object) -> list[Ref[SessionMessage]]:
        if isinstance(message, Spans):
            self.on_spans(message)
            return []
        if not isinstance(message, (Reply, Progress, SessionOpened, SessionFailed, Echo, Proposal)):
            raise TypeError(f"a return sink does not take {type(message).__name__}")
        if message.session is None:
            if self.on_lost is None:
                return list(self._sessions.values())
            self.on_lost(message.stage, message.reason)
            return []
        ref = self._sessions.get(message.session)
        return [] if ref is None else [ref]
