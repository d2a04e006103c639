"""The actor runtime: mailboxes, references, actors, supervision."""

from __future__ import annotations

import logging
import sys
from collections import Counter, deque

import hypothesis.strategies as st
import pytest
import trio
from attrs import frozen
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from trio.testing import wait_all_tasks_blocked

from meshpipe.actors import Actor, Ask, Crash, Mailbox, Restarts, handles, log_crash, supervise
from meshpipe.actors.scope import owned_nursery
from meshpipe.errors import ActorGoneError, AskFailedError, MeshpipeError

if sys.version_info < (3, 11):
    from exceptiongroup import BaseExceptionGroup


@frozen
class Job:
    number: int


@frozen
class Stop:
    number: int = 0


@frozen
class Total:
    pass


def sort(message: object) -> str:
    return "work" if isinstance(message, Job) else "control"


def mailbox(work: int = 2, control: int = 2) -> Mailbox:
    return Mailbox({"control": control, "work": work}, sort)


# ---- mailbox ------------------------------------------------------------------------------------------


async def test_the_urgent_queue_comes_first_and_each_queue_is_first_in_first_out() -> None:
    box = mailbox(work=3)
    for message in (Job(1), Job(2), Stop(1), Stop(2)):
        assert box.ref.try_send(message)
    assert [await box.receive() for _ in range(4)] == [Stop(1), Stop(2), Job(1), Job(2)]


async def test_a_full_queue_does_not_hold_up_the_other_one() -> None:
    box = mailbox(work=1)
    async with trio.open_nursery() as nursery:
        await box.ref.send(Job(1))
        nursery.start_soon(box.ref.send, Job(2))
        await wait_all_tasks_blocked()
        assert not box.ref.try_send(Job(3))
        with trio.fail_after(1):
            await box.ref.send(Stop())
        assert await box.receive("control") == Stop()
        assert [await box.receive("work"), await box.receive("work")] == [Job(1), Job(2)]


async def test_the_owner_sees_and_takes_out_of_turn() -> None:
    box = mailbox(work=5)
    for n in range(5):
        box.ref.try_send(Job(n))
    assert [job.number for job in box.peek("work")] == [0, 1, 2, 3, 4]
    assert box.take("work", lambda job: job.number % 2 == 1) == [Job(1), Job(3)]
    assert box.take("work", limit=2) == [Job(0), Job(2)]
    assert box.take("work", lambda job: True, limit=0) == []
    assert box.take("work") == [Job(4)]
    assert list(box.peek("work")) == []


async def test_taking_lets_waiting_senders_in_by_their_order() -> None:
    box = mailbox(work=1)
    await box.ref.send(Job(0))
    async with trio.open_nursery() as nursery:
        for n in (1, 2, 3):
            nursery.start_soon(box.ref.send, Job(n))
            await wait_all_tasks_blocked()
        assert box.take("work") == [Job(0)]
        assert not box.ref.try_send(Job(9)), "a newcomer may not overtake those who wait"
        assert [await box.receive() for _ in range(3)] == [Job(1), Job(2), Job(3)]


async def test_a_watcher_hears_control_only(autojump_clock: trio.testing.MockClock) -> None:
    box = mailbox()
    heard = []

    async def watch() -> None:
        heard.append(await box.receive("control"))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        await box.ref.send(Job(1))
        await wait_all_tasks_blocked()
        assert heard == []
        await box.ref.send(Stop())
        await wait_all_tasks_blocked()
        assert heard == [Stop()]
    assert list(box.peek("work")) == [Job(1)]


async def test_cancelled_send_delivers_nothing_and_cancelled_receive_takes_nothing() -> None:
    box = mailbox(work=1)
    await box.ref.send(Job(1))
    with trio.CancelScope() as scope:
        scope.cancel()
        await box.ref.send(Stop())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(box.ref.send, Job(2))
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(box.receive, "control")
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
        box.ref.try_send(Stop(5))
    assert box.take("work") == [Job(1)]
    assert box.take("control") == [Stop(5)]


async def test_closing_wakes_everybody() -> None:
    box = mailbox(work=1)
    await box.ref.send(Job(1))
    failures = []

    async def send() -> None:
        try:
            await box.ref.send(Job(2))
        except ActorGoneError as error:
            failures.append(str(error))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        await wait_all_tasks_blocked()
        box.close("shut")
        box.close("again")
    assert failures == ["shut"]
    assert [message async for message in box] == [Job(1)]
    with pytest.raises(trio.EndOfChannel):
        await box.wait("control")
    with pytest.raises(ActorGoneError, match="shut"):
        box.ref.try_send(Stop())


async def test_the_time_that_senders_wait_is_measured(autojump_clock: trio.testing.MockClock) -> None:
    box = mailbox(work=1)
    await box.ref.send(Job(1))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(box.ref.send, Job(2))
        await trio.sleep(3)
        box.take("work", limit=1)
    assert box.waited("work") == 3
    assert box.waited("control") == 0


async def test_bounds_may_count_what_messages_weigh() -> None:
    box: Mailbox = Mailbox({"work": 10}, lambda job: "work", lambda job: job.number)
    assert box.ref.try_send(Job(99)), "nothing else is in it"
    assert not box.ref.try_send(Job(1))
    async with trio.open_nursery() as nursery:
        for number in (6, 5, 4):
            nursery.start_soon(box.ref.send, Job(number))
            await wait_all_tasks_blocked()
        assert box.take("work") == [Job(99)]
        assert list(box.peek("work")) == [Job(6)], "5 has no room, and 4 may not overtake it"
        assert box.take("work", lambda job: job.number == 6) == [Job(6)]
        assert list(box.peek("work")) == [Job(5), Job(4)]


class MailboxMachine(RuleBasedStateMachine):
    """A mailbox against two plain deques: what does not wait must agree with them step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.box = mailbox(work=3, control=2)
        self.work: deque[Job] = deque()
        self.control: deque[Stop] = deque()
        self.count = 0

    @rule()
    def send_work(self) -> None:
        self.count += 1
        assert self.box.put_nowait(Job(self.count)) == (len(self.work) < 3)
        if len(self.work) < 3:
            self.work.append(Job(self.count))

    @rule()
    def send_control(self) -> None:
        self.count += 1
        assert self.box.put_nowait(Stop(self.count)) == (len(self.control) < 2)
        if len(self.control) < 2:
            self.control.append(Stop(self.count))

    @rule(limit=st.none() | st.integers(0, 4))
    def take_control(self, limit: int | None) -> None:
        expected = [
            self.control.popleft() for _ in range(min(len(self.control), 9 if limit is None else limit))
        ]
        assert self.box.take("control", limit=limit) == expected

    @precondition(lambda self: self.work)
    @rule(divisor=st.integers(1, 3), limit=st.none() | st.integers(0, 4))
    def take_some_work(self, divisor: int, limit: int | None) -> None:
        expected = [job for job in self.work if job.number % divisor == 0][:limit]
        self.work = deque(job for job in self.work if job not in expected)
        assert self.box.take("work", lambda job: job.number % divisor == 0, limit) == expected

    @invariant()
    def same(self) -> None:
        assert list(self.box.peek("work")) == list(self.work)
        assert list(self.box.peek("control")) == list(self.control)


TestMailboxMachine = MailboxMachine.TestCase


# ---- actors -------------------------------------------------------------------------------------------


class Adder(Actor[Job | Stop | Total]):
    """Adds numbers; dies of negative ones."""

    def __init__(self, box: Mailbox) -> None:
        super().__init__(box)
        self.total = 0

    @handles(Job)
    async def add(self, job: Job) -> None:
        if job.number < 0:
            raise ValueError(f"negative: {job.number}")
        self.total += job.number

    @handles(Total)
    async def say(self, message: Total) -> int:
        return self.total

    @handles(Stop)
    async def stop(self, message: Stop) -> None:
        self.mailbox.close("stopped")


async def test_ask_is_answered_by_the_handler() -> None:
    box = mailbox()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(supervise, box, Adder)
        await box.ref.send(Job(2))
        await box.ref.send(Job(3))
        while await box.ref.ask(Total(), deadline=5) != 5:  # control goes before work
            pass
        await box.ref.send(Stop())
    with pytest.raises(ActorGoneError):
        await box.ref.send(Job(1))


async def test_ask_has_a_deadline(autojump_clock: trio.testing.MockClock) -> None:
    box = mailbox()
    with pytest.raises(AskFailedError, match="no answer to Total within 3 s"):
        await box.ref.ask(Total(), deadline=3)
    assert trio.current_time() == 3
    box.close("gone")


async def test_queued_asks_fail_when_the_mailbox_closes() -> None:
    box = mailbox()
    async with trio.open_nursery() as nursery:

        async def ask() -> None:
            with pytest.raises(AskFailedError, match="shut"):
                await box.ref.ask(Total(), deadline=60)

        nursery.start_soon(ask)
        await wait_all_tasks_blocked()
        box.close("shut")


def test_an_actor_without_a_handler_or_with_two_is_refused() -> None:
    with pytest.raises(TypeError, match="accepts Stop but has no handler"):

        class Deaf(Actor[Job | Stop]):
            @handles(Job)
            async def job(self, job: Job) -> None: ...

    with pytest.raises(TypeError, match="two handlers for Job"):

        class Torn(Actor[Job]):
            @handles(Job)
            async def one(self, job: Job) -> None: ...

            @handles(Job)
            async def two(self, job: Job) -> None: ...


async def test_an_unknown_message_is_an_error_that_names_it() -> None:
    with pytest.raises(TypeError, match="Adder does not accept str"):
        await Adder(mailbox()).dispatch("hello")


# ---- supervision --------------------------------------------------------------------------------------


async def test_a_restart_keeps_the_queue_and_drops_the_fatal_message(
    autojump_clock: trio.testing.MockClock,
) -> None:
    box = mailbox(work=4)
    crashes: list[Crash] = []
    actors: list[Adder] = []

    def make(box: Mailbox) -> Adder:
        actors.append(Adder(box))
        return actors[-1]

    async with trio.open_nursery() as nursery:
        for n in (1, -7, 2):
            await box.ref.send(Job(n))
        nursery.start_soon(supervise, box, make, Restarts(limit=3), crashes.append)
        await trio.sleep(1)
        assert [actor.total for actor in actors] == [1, 2]
        await box.ref.send(Stop())
    (crash,) = crashes
    assert (crash.actor, crash.message, crash.restarting) == ("Adder", Job(-7), True)
    assert "negative: -7" in crash.traceback
    assert "test_actors.py" in crash.traceback


async def test_back_off_grows_and_then_the_parent_fails(autojump_clock: trio.testing.MockClock) -> None:
    box = mailbox(work=9)
    times: list[float] = []
    for n in range(1, 5):
        await box.ref.send(Job(-n))
    with pytest.raises(ValueError, match="negative: -4"):
        await supervise(
            box, Adder, Restarts(limit=3, delay=1, longest=2), lambda _: times.append(trio.current_time())
        )
    assert times == [0, 1, 3, 5]
    with pytest.raises(ActorGoneError, match="Adder has ended"):
        box.ref.try_send(Job(1))


async def test_old_crashes_are_forgiven(autojump_clock: trio.testing.MockClock) -> None:
    box = mailbox(work=9)
    crashes: list[Crash] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(supervise, box, Adder, Restarts(limit=1, within=10), crashes.append)
        for _ in range(5):
            await box.ref.send(Job(-1))
            await trio.sleep(11)
        assert Counter(crash.restarting for crash in crashes) == {True: 5}
        await box.ref.send(Stop())


async def test_a_crash_fails_the_ask_that_caused_it_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    box = mailbox()

    async def ask() -> None:
        with pytest.raises(AskFailedError, match="Adder failed at Job: ValueError"):
            await box.ref.ask(Job(-1), deadline=5)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await wait_all_tasks_blocked()
        with caplog.at_level(logging.ERROR), pytest.raises(ValueError, match="negative"):
            await supervise(box, Adder, report=log_crash)
    assert "Adder crashed at Job(number=-1), giving up" in caplog.text


async def test_cancelling_the_parent_ends_the_actor_and_its_mailbox() -> None:
    box = mailbox()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(supervise, box, Adder)
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert box.closed


@pytest.mark.parametrize("other", [AskFailedError("too"), ValueError("a defect")])
async def test_what_a_block_and_its_tasks_raise(other: Exception) -> None:
    """Two of our own errors have one cause: the block's is raised. A defect is never hidden."""

    async def fail() -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise other

    async def block() -> None:
        async with owned_nursery() as nursery:
            nursery.start_soon(fail)
            await wait_all_tasks_blocked()
            raise ActorGoneError("gone")

    ours = isinstance(other, MeshpipeError)
    with pytest.raises(ActorGoneError if ours else BaseExceptionGroup) as caught:
        await block()
    group = caught.value.__cause__ if ours else caught.value
    assert isinstance(group, BaseExceptionGroup)
    assert group.exceptions == (other,)


def test_an_ask_is_settled_once() -> None:
    settled: list[object] = []
    ask = Ask(Total(), lambda value, reason: settled.append((value, reason)))
    ask.answer(1)
    ask.fail("late")
    ask.answer(2)
    assert settled == [(1, None)]
