"""Mailboxes and references: how one task hands messages to another.

A `Mailbox` has several queues, each with its own bound, named in order of priority. Which queue a message
goes to is decided by its `sort` function, so that a message which would relieve a full queue never waits
behind it. Senders hold a `Ref`; only the owner sees what is queued, may look ahead, and may take messages out
of turn. Nothing here needs a clock, a thread or a lock: everything runs on one trio event loop, and what is
not `async` never yields to another task.

A message is in exactly one place: a cancelled send was not delivered, a cancelled receive took nothing.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Generic, TypeVar

import outcome
import trio

from meshpipe.errors import ActorGoneError, AskFailedError

M = TypeVar("M")


class Ask(Generic[M]):
    """A message whose sender waits for an answer. The first `answer` or `fail` counts, later ones do not."""

    def __init__(self, message: M, settle: Callable[[object, str | None], None]) -> None:
        self.message = message
        self._settle: Callable[[object, str | None], None] | None = settle

    def answer(self, value: object) -> None:
        """Gives the sender its answer."""
        self._settle_once(value, None)

    def fail(self, reason: str) -> None:
        """Raises `AskFailedError(reason)` at the sender."""
        self._settle_once(None, reason)

    def _settle_once(self, value: object, reason: str | None) -> None:
        if (settle := self._settle) is not None:
            self._settle = None
            settle(value, reason)


def _bare(message: M | Ask[M]) -> M:
    """The message itself, also of one whose sender waits for an answer."""
    return message.message if isinstance(message, Ask) else message


class _Queue(Generic[M]):
    """One bounded queue and the senders that wait for room in it, both first in, first out."""

    def __init__(self, bound: int, weigh: Callable[[M], int]) -> None:
        self.bound = bound
        self.load = 0  # what `items` weigh
        self.items: deque[M | Ask[M]] = deque()
        self.senders: OrderedDict[trio.lowlevel.Task, M | Ask[M]] = OrderedDict()
        self.waited = 0.0
        self._weigh = weigh

    def admits(self, message: M | Ask[M]) -> bool:
        """Puts the message in if there is room; an empty queue has room for any."""
        weight = self._weigh(_bare(message))
        if self.items and self.load + weight > self.bound:
            return False
        self.items.append(message)
        self.load += weight
        return True

    def remove(self, wanted: Callable[[M], bool] | None, limit: int) -> list[M | Ask[M]]:
        """Takes out the first `limit` messages that are wanted (None: all are), in order."""
        taken: list[M | Ask[M]] = []
        if wanted is None:
            while self.items and len(taken) < limit:
                taken.append(self.items.popleft())
        else:
            left: deque[M | Ask[M]] = deque()
            for item in self.items:
                (taken if len(taken) < limit and wanted(_bare(item)) else left).append(item)
            self.items = left
        for item in taken:
            self.load -= self._weigh(_bare(item))
        if self.senders:
            self._admit_senders()
        return taken

    def _admit_senders(self) -> None:
        """Moves waiting senders' messages in while there is room."""
        while self.senders:
            task, message = next(iter(self.senders.items()))
            if not self.admits(message):
                return
            del self.senders[task]
            trio.lowlevel.reschedule(task)


class Mailbox(Generic[M]):
    """The owner's side: receive in order of priority, look ahead, take out of turn, close.

    `bounds` maps each queue's name to the most that it holds, the most urgent queue first: messages, or what
    `weigh` counts them as. A message that is heavier than its queue's bound still finds room when nothing else
    is in it. `sort` names the queue of a message.
    """

    def __init__(
        self,
        bounds: Mapping[str, int],
        sort: Callable[[M], str],
        weigh: Callable[[M], int] = lambda message: 1,
    ) -> None:
        self._queues: dict[str, _Queue[M]] = {name: _Queue(bound, weigh) for name, bound in bounds.items()}
        self._sort = sort
        self._receivers: dict[trio.lowlevel.Task, tuple[str, ...]] = {}  # and the queues that each waits for
        self._closed: str | None = None
        self.ref: Ref[M] = Ref(self)

    # ---- the owner's side -----------------------------------------------------------------------------

    async def wait(self, *queues: str) -> None:
        """Returns when one of `queues` (all, if none is named) holds a message; takes nothing.

        Raises `trio.EndOfChannel` when the mailbox is closed and those queues are empty. A checkpoint always.
        """
        names = queues or tuple(self._queues)
        waited = False
        while True:
            if self.waiting(*names):
                if waited:
                    return
                await trio.lowlevel.checkpoint()  # without waiting; another receiver may be quicker
            elif self._closed is not None:
                raise trio.EndOfChannel
            else:
                await self._arrival(names)
            waited = True

    async def _arrival(self, queues: tuple[str, ...]) -> None:
        """Returns when a message was put into one of the queues, or the mailbox was closed."""
        task = trio.lowlevel.current_task()
        self._receivers[task] = queues

        def abort(_: object) -> trio.lowlevel.Abort:
            self._receivers.pop(task, None)
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)

    async def receive(self, *queues: str) -> M | Ask[M]:
        """Takes the first message of the most urgent of `queues` (all, if none is named) that has one."""
        while True:
            await self.wait(*queues)
            for name in queues or self._queues:
                box = self._queues[name]
                if box.items:  # or another receiver was quicker: then wait again
                    return box.remove(None, 1)[0]

    def __aiter__(self) -> Mailbox[M]:
        """`async for` gives every message until the mailbox is closed and empty."""
        return self

    async def __anext__(self) -> M | Ask[M]:
        try:
            return await self.receive()
        except trio.EndOfChannel:
            raise StopAsyncIteration from None

    def peek(self, queue: str) -> Iterator[M]:
        """What waits in `queue`, in order, without taking it (an `Ask` shows its message)."""
        return (_bare(item) for item in self._queues[queue].items)

    def waiting(self, *queues: str) -> bool:
        """Whether one of `queues` holds a message."""
        return any(self._queues[name].items for name in queues)

    def take(
        self, queue: str, wanted: Callable[[M], bool] | None = None, limit: int | None = None
    ) -> list[M | Ask[M]]:
        """Takes the messages of `queue` that are `wanted` (default: all), in order, at most `limit`.

        Never waits. The room goes to senders that wait for it, in their order; what they bring is not looked
        at by this call.
        """
        box = self._queues[queue]
        return box.remove(wanted, len(box.items) if limit is None else limit)

    def close(self, reason: str) -> None:
        """Refuses further messages: senders, waiting ones too, get `ActorGoneError(reason)`; asks that are
        queued fail. What is queued can still be received. Closing twice keeps the first reason."""
        if self._closed is not None:
            return
        self._closed = reason
        while self._receivers:
            trio.lowlevel.reschedule(self._receivers.popitem()[0])
        for box in self._queues.values():
            while box.senders:
                task, _ = box.senders.popitem(last=False)
                trio.lowlevel.reschedule(task, outcome.Error(ActorGoneError(reason)))
            for item in box.items:
                if isinstance(item, Ask):
                    item.fail(reason)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed is not None

    def waited(self, queue: str) -> float:
        """Seconds that senders have spent waiting for room in `queue`, all together."""
        return self._queues[queue].waited

    # ---- the senders' side, through Ref ---------------------------------------------------------------

    def put_nowait(self, message: M | Ask[M]) -> bool:
        """Queues the message and says True, or says False if its queue is full. Raises `ActorGoneError`."""
        if self._closed is not None:
            raise ActorGoneError(self._closed)
        queue = self._sort(_bare(message))
        box = self._queues[queue]
        if box.senders or not box.admits(message):
            return False
        for task in [task for task, queues in self._receivers.items() if queue in queues]:
            del self._receivers[task]
            trio.lowlevel.reschedule(task)
        return True

    async def put(self, message: M | Ask[M]) -> None:
        """Queues the message, after waiting for room if need be. Raises `ActorGoneError`."""
        await trio.lowlevel.checkpoint_if_cancelled()
        if self.put_nowait(message):
            await trio.lowlevel.cancel_shielded_checkpoint()
            return
        box = self._queues[self._sort(_bare(message))]
        task = trio.lowlevel.current_task()
        box.senders[task] = message

        def abort(_: object) -> trio.lowlevel.Abort:
            box.senders.pop(task, None)
            return trio.lowlevel.Abort.SUCCEEDED

        began = trio.current_time()
        try:
            await trio.lowlevel.wait_task_rescheduled(abort)
        finally:
            box.waited += trio.current_time() - began


class Ref(Generic[M]):
    """A sender's handle on an actor; the same whether the actor runs in this process or behind a link."""

    def __init__(self, mailbox: Mailbox[M]) -> None:
        self._mailbox = mailbox

    async def send(self, message: M | Ask[M]) -> None:
        """Queues the message, waiting while its queue is full (back-pressure). An `Ask` passes a question on.

        Raises `ActorGoneError` if the actor is gone or goes away while this waits.
        """
        await self._mailbox.put(message)

    def try_send(self, message: M) -> bool:
        """Queues the message if there is room, and says whether it did; never waits. For hints.

        Raises `ActorGoneError` if the actor is gone.
        """
        return self._mailbox.put_nowait(message)

    async def ask(self, message: M, deadline: float) -> object:
        """Sends the message and returns what its handler answers, within `deadline` seconds.

        Raises `AskFailedError` if the handler failed or the deadline passed, `ActorGoneError` if the actor
        is gone.
        """
        settled = trio.Event()
        outcome: list[tuple[object, str | None]] = []

        def settle(value: object, reason: str | None) -> None:
            outcome.append((value, reason))
            settled.set()

        with trio.move_on_after(deadline):
            await self._mailbox.put(Ask(message, settle))
            await settled.wait()
        if not outcome:
            raise AskFailedError(f"no answer to {type(message).__name__} within {deadline:g} s")
        value, reason = outcome[0]
        if reason is not None:
            raise AskFailedError(reason)
        return value
