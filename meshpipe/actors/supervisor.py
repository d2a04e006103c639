"""Supervision: what it means when an actor crashes.

The mailbox belongs to the supervisor's call, not to the actor: it survives a restart, so references stay
good and what is queued is handled by the successor. The message at hand when the actor crashed has left the
mailbox and is never tried again; it is in the report.
"""

from __future__ import annotations

import logging
import traceback
from collections import deque
from collections.abc import Callable

import trio
from attrs import frozen

from .actor import Actor
from .mailbox import M, Mailbox

log = logging.getLogger("meshpipe.actors")


@frozen
class Restarts:
    """How often an actor is started again: at most `limit` times in any `within` seconds.

    The n-th restart in that time waits `delay * 2**(n-1)` seconds, at most `longest`. `limit` 0: never.
    """

    limit: int = 0
    within: float = 60.0
    delay: float = 0.1
    longest: float = 10.0


NEVER = Restarts(limit=0)


@frozen
class Crash:
    """One crash: which actor, at which message (None: between messages), why, and whether it starts again."""

    actor: str
    message: object | None
    error: Exception
    traceback: str
    restarting: bool


def log_crash(crash: Crash) -> None:
    """The default report: one log record with the message and the traceback."""
    then = "restarting" if crash.restarting else "giving up"
    log.error("%s crashed at %r, %s\n%s", crash.actor, crash.message, then, crash.traceback)


async def supervise(
    mailbox: Mailbox[M],
    make: Callable[[Mailbox[M]], Actor[M]],
    restarts: Restarts = NEVER,
    report: Callable[[Crash], None] = log_crash,
) -> None:
    """Runs `make(mailbox)` until it ends by itself; after a crash, makes and runs a fresh one.

    When the restarts are used up, the crash fails the parent: its exception is raised from here, unchanged.
    However this ends, the mailbox is closed, so that nobody waits for an actor that is gone.
    """
    crashes: deque[float] = deque()
    name = "actor"
    try:
        while True:
            actor = make(mailbox)
            name = type(actor).__name__
            try:
                await actor.run()
                return
            except Exception as error:
                now = trio.current_time()
                while crashes and crashes[0] < now - restarts.within:
                    crashes.popleft()
                restarting = len(crashes) < restarts.limit
                report(Crash(name, actor.handling, error, traceback.format_exc(), restarting))
                if not restarting:
                    raise
                crashes.append(now)
            await trio.sleep(min(restarts.longest, restarts.delay * 2 ** (len(crashes) - 1)))
    finally:
        mailbox.close(f"{name} has ended")
