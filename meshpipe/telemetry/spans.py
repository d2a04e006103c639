"""Spans: what was done, when and where, to which window; recorded in a ring that costs next to nothing.

Everyone who does something that is worth seeing holds a `Recorder` and says so in one line, if it is on. Each process
has its own clock (trio's); `clocks` brings them together, `trace` joins what belongs together.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from attrs import frozen

from meshpipe.errors import ProtocolError
from meshpipe.messages import Reply, Window

CAPACITY = 1 << 16
"""Spans that a recorder keeps: some thousand windows of a pipeline in one process. The oldest go first."""

COORDINATOR = -1
"""The `stage` of what happens at the coordinator."""


class Kind(IntEnum):
    """What a span is about; the table `NAMES` explains each."""

    REQUEST = 0
    SESSION = 1
    PROPOSE = 2
    WAIT = 3
    PREFILL = 4
    DISPATCH = 5
    QUEUE = 6
    COMPUTE = 7
    ABORT = 8
    DROP = 9
    SERIALIZE = 10
    WRITE = 11
    REPLY = 12
    COMMIT = 13
    DRAFT = 14


class Cause(IntEnum):
    """Why a session does not send one more window: the `detail` of WAIT."""

    REPLY = 0
    """Enough windows are in flight, or as many as it may have: what it waits for is the oldest one's reply."""
    CREDIT = 1
    """It has something to send, but the pipe is full of others' windows."""
    PROPOSAL = 2
    """No proposer knows what could follow."""


@frozen
class Name:
    """A row of the table of names: who records it, what it means, the meaning (unit) of `value` and `detail`."""

    kind: Kind
    name: str
    where: str
    meaning: str
    value: str = ""
    detail: str = ""


NAMES = tuple(
    Name(kind, f"meshpipe.{kind.name.lower()}", *rest)
    for kind, rest in {
        Kind.REQUEST: ("coordinator", "from the request to its end", "", ""),
        Kind.SESSION: ("session", "holding a lane", "tokens generated", "tokens of the prompt"),
        Kind.PROPOSE: ("session, proposer", "asking, or computing, what could follow", "tokens", "1 if computing"),
        Kind.WAIT: ("session", "nothing could be sent", "windows in flight", "cause: 0 reply, 1 credit, 2 proposal"),
        Kind.PREFILL: ("session", "a prefill window went out (an instant)", "rows", "position of the first"),
        Kind.DISPATCH: ("session", "a verify window went out (an instant)", "rows", "position of the first"),
        Kind.QUEUE: ("stage", "from a window's arrival to the begin of its decode", "rows", ""),
        Kind.COMPUTE: ("stage", "the decode that ran the window", "rows of the decode", "rows of the window"),
        Kind.ABORT: ("stage", "a decode broken off: all of it was stale", "rows of the decode", "rows of the window"),
        Kind.DROP: ("stage, link", "a stale window waited, and was dropped unrun", "rows", "1 on the link"),
        Kind.SERIALIZE: ("link", "making a frame of a window or reply", "bytes", "1 for a reply"),
        Kind.WRITE: ("link", "handing the frame to the network; never one that failed", "bytes", "1 for a reply"),
        Kind.REPLY: ("session", "a reply came (an instant)", "picks", ""),
        Kind.COMMIT: ("session", "a reply retired (an instant)", "tokens committed", "1 if the last corrects"),
        Kind.DRAFT: ("last stage", "native MTP after the decode", "tokens drafted", "tokens asked for"),
    }.items()
)  # fmt: skip
"""Every name, once. Begin and end are seconds of the recording process's clock."""


class Span(NamedTuple):
    """One thing that was done, from `began` to `ended` (seconds; equal for an instant). See `NAMES`."""

    kind: int
    began: float
    ended: float
    stage: int = COORDINATOR
    session: int = 0
    epoch: int = 0
    window: int = 0
    value: int = 0
    detail: int = 0


class Recorder:
    """A ring of spans. `on` tells whether to `add` any; it begins off."""

    __slots__ = ("_ring", "add", "on")

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.on = False
        self._ring: deque[Span] = deque(maxlen=capacity)
        self.add: Callable[[Span], None] = self._ring.append
        """Puts a span into the ring; nothing more, so that it takes well below a microsecond."""

    def listen(self, listener: Callable[[Span], None] | None) -> None:
        """Tells `listener` each span too, as it comes; None: nobody."""
        append = self._ring.append

        def both(span: Span) -> None:
            append(span)
            assert listener is not None
            listener(span)

        self.add = append if listener is None else both

    def start(self) -> None:
        """Forgets what it has, and records from now on."""
        self._ring.clear()
        self.on = True

    def stop(self) -> list[Span]:
        """Ends the recording; gives what was recorded, oldest first."""
        self.on = False
        spans = list(self._ring)
        self._ring.clear()
        return spans

    @property
    def full(self) -> bool:
        """Whether the ring has come round: the oldest spans may be gone."""
        return len(self._ring) == self._ring.maxlen


@frozen(eq=False)
class LinkSpans:
    """What a link tells about its frames, as spans of stage `stage`, which sends them (`wire.link.Watch`)."""

    recorder: Recorder
    stage: int

    def packed(self, message: object, began: float, ended: float, size: int) -> None:
        """A frame was made."""
        self._about(Kind.SERIALIZE, message, began, ended, size)

    def written(self, message: object, began: float, ended: float, size: int) -> None:
        """A frame was handed over."""
        self._about(Kind.WRITE, message, began, ended, size)

    def dropped(self, window: Window, at: float) -> None:
        """A stale window was taken out of the outbox."""
        if self.recorder.on:
            self.recorder.add(
                Span(
                    Kind.DROP,
                    at,
                    at,
                    self.stage,
                    window.session,
                    window.epoch,
                    window.number,
                    window.width,
                    1,
                )
            )

    def _about(self, kind: Kind, message: object, began: float, ended: float, size: int) -> None:
        if self.recorder.on and isinstance(message, (Window, Reply)):
            is_reply = isinstance(message, Reply)
            number = message.number
            self.recorder.add(
                Span(kind, began, ended, self.stage, message.session, message.epoch, number, size, is_reply)
            )


# ---- as bytes -----------------------------------------------------------------------------------------

_LAYOUT = np.dtype(
    [
        ("kind", "u1"), ("began", "<f8"), ("ended", "<f8"), ("stage", "<i2"), ("session", "<i8"),
        ("epoch", "<i4"), ("window", "<i4"), ("value", "<i4"), ("detail", "<i4"),
    ]
)  # fmt: skip

_AS_COME = np.dtype([(name, "<f8" if _LAYOUT[name].kind == "f" else "<i8") for name in _LAYOUT.names or ()])

SPAN_BYTES = _LAYOUT.itemsize


def pack_spans(spans: Iterable[Span]) -> bytes:
    """Spans as bytes, `SPAN_BYTES` each. Numbers of 64 bits, which a peer may have said, lose their upper ones."""
    return np.array(list(spans), _AS_COME).astype(_LAYOUT).tobytes()


def unpack_spans(data: bytes) -> list[Span]:
    """What `pack_spans` has packed, from a peer. Raises ProtocolError."""
    if len(data) % SPAN_BYTES:
        raise ProtocolError(f"spans come in pieces of {SPAN_BYTES} bytes, not {len(data)} bytes")
    spans = [Span(*row) for row in np.frombuffer(data, _LAYOUT).tolist()]
    for span in spans:
        if span.kind >= len(Kind) or not (math.isfinite(span.began) and math.isfinite(span.ended)):
            raise ProtocolError(f"a span of unknown kind or without a time: {span}")
    return spans
