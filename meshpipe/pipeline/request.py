"""What goes into a session and what comes out of it: the request, its pieces, the messages of its mailbox."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import trio
from attrs import define, field, frozen

from meshpipe.actors import Mailbox, Ref
from meshpipe.messages import (
    Progress,
    Proposal,
    Reply,
    Sampling,
    SessionFailed,
    SessionOpened,
    TokenLogprobs,
)
from meshpipe.pipeline.credits import CreditScheduler
from meshpipe.pipeline.lanes import Lanes, Lease
from meshpipe.pipeline.proposer import Told
from meshpipe.pipeline.report import Report
from meshpipe.pipeline.way import Way
from meshpipe.speculation.composite import Calibration
from meshpipe.speculation.ledger import Ledger
from meshpipe.speculation.ngram import SharedStore
from meshpipe.speculation.policy import Pipe
from meshpipe.speculation.settings import Speculation
from meshpipe.speculation.worth import Worth
from meshpipe.telemetry.observers import Observer
from meshpipe.telemetry.spans import Recorder


class Text(Protocol):
    """Turns tokens into text as they come (`meshpipe.llama.vocabulary.TextStream`)."""

    def feed(self, tokens: Sequence[int]) -> str:
        """The text that these tokens complete."""

    def finish(self) -> str:
        """What is left of an unfinished character."""


@frozen
class Piece:
    """Output of one commit: its tokens and the text they complete. The last piece carries the report.

    `logprobs`, if they were asked for, has an entry for each token. `sources` names for each token the proposer
    that foresaw it, or None; `diverged` says that the last token took the place of a wrong guess.
    """

    text: str
    tokens: tuple[int, ...]
    report: Report | None = None
    sources: tuple[str | None, ...] = ()
    diverged: bool = False
    logprobs: tuple[TokenLogprobs, ...] = ()


@define(eq=False)
class Output:
    """Where a session's pieces go; after `channel` is closed, `failure` says whether it ended badly."""

    channel: trio.MemorySendChannel[Piece]
    failure: Exception | None = None


@frozen
class Cancel:
    """Ends the session from outside."""

    reason: str = "cancelled"


@frozen
class Reroute:
    """Replies may be lost for good: what is in flight has to be dispatched again."""


@frozen
class WayChanged:
    """A hint to look at the state of the way to the stages."""


SessionMessage = Reply | Progress | SessionOpened | SessionFailed | Proposal | Cancel | Reroute | WayChanged


QUEUES = ("urgent", "control", "replies")


def session_mailbox() -> Mailbox[SessionMessage]:
    """Replies are bounded by the windows in flight; the bound only keeps a mad peer from filling memory."""
    return Mailbox({"urgent": 64, "control": 64, "replies": 4096}, sort=_queue_of)


def _queue_of(message: SessionMessage) -> str:
    """Cancellation and news of the way find room however many proposals there are."""
    if isinstance(message, (Cancel, Reroute, WayChanged)):
        return "urgent"
    return "replies" if isinstance(message, (Reply, Progress, SessionOpened)) else "control"


@frozen
class Request:
    """What a session is asked to do, checked and tokenized.

    `mtp_at`: where native MTP drafts, "last" or "coordinator", if it does; `proposer`: who runs ahead, if anyone,
    and `worth` when it does if it need not always.
    """

    ledger: Ledger
    lease: Lease
    sampling: Sampling
    speculation: Speculation
    stops: tuple[str, ...]
    text: Text
    exact: bool
    shared: SharedStore | None = None
    mtp_at: str | None = None
    proposer: Ref[Told] | None = None
    worth: Worth | None = None
    calibration: Calibration | None = None


@frozen
class Surroundings:
    """What sessions share: the way to the first stage, the pipe, its credits and lanes, and two deadlines.

    `stall_deadline`: seconds that silence may last, beyond what the stages' speed explains. `resume_deadline`:
    seconds that a session waits for a way that is broken to be formed again. `mtp` and `draft_cost` are the last
    stage's. `recorder` and `observers` are told what happens.
    """

    first: Way
    pipe: Pipe
    credits: CreditScheduler
    lanes: Lanes
    stall_deadline: float
    resume_deadline: float
    mtp: int = 0
    draft_cost: float = 0.0
    recorder: Recorder = field(factory=Recorder)
    observers: list[Observer] = field(factory=list)
