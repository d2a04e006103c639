"""The credit scheduler under arbitrary arrivals, cancellations and replies."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from meshpipe.errors import UsageError
from meshpipe.pipeline.credits import Credits, CreditScheduler
from meshpipe.speculation.policy import CostCurve

LATENCY = 1.0
WORK = 0.09
COST = CostCurve(((1, WORK), (8, 0.4), (63, 2.5)))


class Sharing(RuleBasedStateMachine):
    """Sessions that send, retire, diverge and leave; the model is a list of windows in flight for each."""

    sessions = Bundle("sessions")

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = CreditScheduler()
        self.flying: dict[Credits, list[int]] = {}
        self.next = 0

    @rule(target=sessions)
    def arrive(self) -> Credits:
        credits = self.scheduler.open()
        self.flying[credits] = []
        return credits

    @rule(credits=sessions)
    def send(self, credits: Credits) -> None:
        mandatory = not self.flying[credits]
        if mandatory or credits.may_borrow(LATENCY):
            credits.take(self.next, WORK)
            self.flying[credits].append(self.next)
            self.next += 1

    @rule(credits=sessions)
    def lose_interest(self, credits: Credits) -> None:
        credits.wants = False

    @precondition(lambda self: any(self.flying.values()))
    @rule(credits=sessions, count=st.integers(1, 3))
    def retire(self, credits: Credits, count: int) -> None:
        windows = self.flying[credits]
        if windows:
            last = windows[: min(count, len(windows))][-1]
            credits.retire(last)
            self.flying[credits] = [window for window in windows if window > last]

    @rule(credits=sessions)
    def diverge(self, credits: Credits) -> None:
        credits.drop_all()
        self.flying[credits] = []

    @rule(credits=consumes(sessions), twice=st.booleans())
    def leave(self, credits: Credits, twice: bool) -> None:
        before = sum(other.held for other in self.flying if other is not credits)
        credits.close()
        if twice:
            credits.close()
        del self.flying[credits]
        assert sum(other.held for other in self.flying) == before

    @invariant()
    def credits_are_neither_lost_nor_made(self) -> None:
        assert self.scheduler.sessions == len(self.flying)
        for credits, windows in self.flying.items():
            assert credits.held == len(windows)
            assert credits.work == pytest.approx(len(windows) * WORK)
        assert self.scheduler.work == pytest.approx(WORK * sum(map(len, self.flying.values())))

    @invariant()
    def speculation_stays_within_the_pool(self) -> None:
        borrowed = sum(credits.borrowed for credits in self.flying)
        mandatory = self.scheduler.work - borrowed
        # Mandatory windows need no leave, so that they may take what was lent before they came.
        assert borrowed < LATENCY + WORK or mandatory > 0


Sharing.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestSharing = Sharing.TestCase


@given(count=st.integers(1, 30))
def test_enough_sessions_end_speculation_by_themselves(count: int) -> None:
    scheduler = CreditScheduler()
    sessions = [scheduler.open() for _ in range(count)]
    number = 0
    for credits in sessions:
        credits.take(number, WORK)
        number += 1
    for _ in range(40):
        for credits in sessions:
            if credits.may_borrow(LATENCY):
                credits.take(number, WORK)
                number += 1
    spare = math.ceil(LATENCY / WORK) - count  # the window that crosses the edge may go
    total = sum(credits.held for credits in sessions)
    assert total <= count + max(0, spare)
    assert total > max(0, spare)  # shares are whole windows: less than one a session may stay unused
    if spare >= count:  # the shares differ by one window at most
        held = [credits.held for credits in sessions]
        assert max(held) - min(held) <= 1


def test_a_newcomer_gets_its_share_as_windows_retire() -> None:
    scheduler = CreditScheduler()
    greedy, late = scheduler.open(), scheduler.open()
    number = 0
    while greedy.held == 0 or greedy.may_borrow(LATENCY):
        greedy.take(number, WORK)
        number += 1
    assert greedy.held == math.ceil(LATENCY / WORK)
    late.take(1000, WORK)
    for turn in range(20):  # each retires its oldest and asks for another, the greedy one first
        greedy.retire(turn)
        if greedy.may_borrow(LATENCY):
            greedy.take(number, WORK)
            number += 1
        if late.may_borrow(LATENCY):
            late.take(1001 + turn, WORK)
    assert abs(greedy.held - late.held) <= 2


@given(count=st.integers(2, 40), wanting=st.integers(1, 40))
def test_guesses_inside_windows_share_what_a_row_of_each_session_leaves(count: int, wanting: int) -> None:
    scheduler = CreditScheduler()
    sessions = [scheduler.open() for _ in range(count)]
    assert scheduler.wanting == 1
    asking = sessions[: min(wanting, count)]
    for credits in asking:
        credits.longest(COST, LATENCY)
    guesses = sum(credits.longest(COST, LATENCY) - COST(1) for credits in asking)
    assert guesses == pytest.approx(max(0.0, LATENCY - COST(count)))


def test_a_session_that_is_alone_may_guess_what_it_likes() -> None:
    scheduler = CreditScheduler()
    alone = scheduler.open()
    assert alone.longest(COST, LATENCY) == math.inf
    other = scheduler.open()
    assert COST(1) < alone.longest(COST, LATENCY) < LATENCY
    other.close()
    assert alone.longest(COST, LATENCY) == math.inf


def test_a_window_takes_one_credit() -> None:
    credits = CreditScheduler().open()
    credits.take(1, WORK)
    with pytest.raises(UsageError, match="window 1 holds a credit already"):
        credits.take(1, WORK)
