"""The ledger, rule by rule. What they do together is attacked in `test_ledger_adversary.py`."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
from attrs import evolve

from meshpipe.errors import CapacityError, ProtocolError, UsageError
from meshpipe.messages import Discard, Proposal, Reply, Window
from meshpipe.speculation.ledger import Commit, Ledger, Limits

SESSION = 7


def make(
    prompt: Sequence[int] = (1, 2, 3),
    *,
    credits: int = 4,
    cached: int | None = None,
    generated: Sequence[int] = (),
    max_tokens: int = 100,
    context: int = 1000,
    end_tokens: Sequence[int] = (),
    stop_sequences: Sequence[Sequence[int]] = (),
    prefill_width: int = 512,
    max_optimistic: int = 1024,
) -> Ledger:
    """A ledger whose prompt needs no prefill, unless `cached` says otherwise."""
    limits = Limits(max_tokens, context, frozenset(end_tokens), stop_sequences, prefill_width, max_optimistic)
    if cached is None:
        cached = len(prompt) + len(generated) - 1
    ledger = Ledger(SESSION, prompt, limits, cached=cached, generated=generated)
    ledger.credits = credits
    return ledger


def propose(ledger: Ledger, *tokens: int, start: int | None = None, source: str = "ngram") -> int:
    start = ledger.horizon if start is None else start
    return ledger.propose(Proposal(SESSION, ledger.epoch, start, tokens, source))


def send(ledger: Ledger, width: int = 100) -> Window:
    window = ledger.next_window(width)
    assert window is not None
    return window


def answer(window: Window, *tokens: int) -> Reply:
    return Reply(window.session, window.epoch, window.number, window.stop - window.wanted, tokens)


def receive(ledger: Ledger, window: Window, *tokens: int) -> Commit:
    (commit,) = ledger.receive(answer(window, *tokens))
    return commit


def test_without_proposals_each_window_is_the_input_and_each_reply_a_free_token() -> None:
    ledger = make()
    for position, token in enumerate((4, 5, 6), 3):
        window = send(ledger)
        assert (window.start, window.tokens, window.wanted) == (position - 1, (token - 1,), 1)
        assert ledger.next_window(100) is None
        assert ledger.in_flight == 1
        commit = receive(ledger, window, token)
        assert (commit.start, commit.tokens, commit.sources) == (position, (token,), (None,))
        assert not commit.diverged
        assert commit.accepted == 0
    assert list(ledger.committed) == [1, 2, 3, 4, 5, 6]
    assert (ledger.epoch, ledger.in_flight, ledger.frontier, ledger.generated) == (0, 0, 6, 3)


def test_windows_are_cut_without_gap_within_credits() -> None:
    ledger = make(credits=3)
    propose(ledger, 4, 5, 6, 7, 8, 9, 10)
    windows = [send(ledger, 2), send(ledger, 3), send(ledger, 1)]
    assert [(w.number, w.start, w.tokens) for w in windows] == [
        (0, 2, (3, 4)),
        (1, 4, (5, 6, 7)),
        (2, 7, (8,)),
    ]
    assert ledger.next_window(2) is None  # no credit
    assert (ledger.in_flight, ledger.undispatched, ledger.horizon) == (3, 2, 10)
    assert ledger.optimistic == (4, 5, 6, 7, 8, 9, 10)
    receive(ledger, windows[0], 4, 5)
    assert ledger.in_flight == 2
    assert send(ledger, 5).tokens == (9, 10)
    assert ledger.next_window(5) is None  # nothing left


def test_lowering_credits_takes_nothing_back_and_the_mandatory_window_stays() -> None:
    ledger = make(credits=2)
    propose(ledger, 4, 5, 6)
    first, second = send(ledger, 1), send(ledger, 1)
    ledger.credits = 1
    receive(ledger, first, 4)
    assert ledger.in_flight == 1
    assert ledger.next_window(1) is None
    receive(ledger, second, 5)
    assert send(ledger, 1).tokens == (5,)
    with pytest.raises(UsageError, match="credits is 0"):
        ledger.credits = 0
    ledger.credits = None
    assert send(ledger, 1).tokens == (6,)


def test_a_reply_is_walked_to_its_first_difference() -> None:
    ledger = make()
    propose(ledger, 4, 5, 60, 7, 8, source="a")
    window, stale = send(ledger, 4), send(ledger, 1)
    propose(ledger, 9, 10, source="b")
    commit = receive(ledger, window, 4, 5, 6, 7)
    assert commit == Commit(
        number=0,
        width=4,
        start=3,
        tokens=(4, 5, 6),
        sources=("a", "a", None),
        diverged=True,
        dropped=3,
        stale_windows=1,
        stale_tokens=1,
        discard=Discard(SESSION, 1),
        epoch=1,
        finished=None,
    )
    assert commit.accepted == 2
    assert (ledger.epoch, ledger.in_flight, ledger.optimistic) == (1, 0, ())
    assert ledger.receive(answer(stale, 7)) == ()
    assert ledger.counters.late == 1
    assert (ledger.counters.stale_windows, ledger.counters.stale_tokens) == (1, 1)
    # The new epoch starts at the correction.
    window = send(ledger)
    assert (window.epoch, window.number, window.start, window.tokens) == (1, 2, 5, (6,))


def test_a_divergence_in_the_last_window_in_flight_needs_no_discard() -> None:
    ledger = make()
    propose(ledger, 4, 50)
    commit = receive(ledger, send(ledger), 4, 5)
    assert (commit.tokens, commit.diverged, commit.stale_windows, commit.discard) == ((4, 5), True, 0, None)
    assert (commit.epoch, ledger.epoch) == (1, 1)


@pytest.mark.parametrize("right", [True, False])
def test_the_last_row_is_checked_against_the_next_windows_first_token(right: bool) -> None:
    ledger = make()
    propose(ledger, 4, 5, 6)
    first, second = send(ledger, 2), send(ledger, 2)
    commit = receive(ledger, first, 4, 5 if right else 50)
    assert (commit.diverged, commit.accepted, commit.stale_windows) == ((not right), 1 + right, 1 - right)
    if right:
        assert receive(ledger, second, 6, 7).sources == ("ngram", None)
        assert list(ledger.committed) == [1, 2, 3, 4, 5, 6, 7]
    else:
        assert send(ledger).tokens == (50,)


def test_undispatched_tokens_meet_the_last_row() -> None:
    ledger = make()
    propose(ledger, 4, 5, 6)
    commit = receive(ledger, send(ledger, 1), 4)
    assert (commit.sources, commit.diverged, commit.dropped) == (("ngram",), False, 0)
    assert (ledger.optimistic, ledger.epoch) == ((5, 6), 0)
    commit = receive(ledger, send(ledger, 1), 50)
    assert (commit.sources, commit.diverged, commit.dropped, commit.epoch) == ((None,), False, 2, 0)
    assert ledger.optimistic == ()
    assert send(ledger).tokens == (50,)


def test_early_replies_wait_for_their_turn() -> None:
    ledger = make()
    propose(ledger, 4, 5, 6)
    windows = [send(ledger, 1) for _ in range(4)]
    assert ledger.receive(answer(windows[2], 6)) == ()
    assert ledger.receive(answer(windows[1], 5)) == ()
    assert ledger.receive(answer(windows[1], 5)) == ()
    assert (ledger.counters.duplicates, ledger.in_flight, ledger.frontier) == (1, 4, 3)
    commits = ledger.receive(answer(windows[0], 4))
    assert [commit.number for commit in commits] == [0, 1, 2]
    assert [commit.tokens for commit in commits] == [(4,), (5,), (6,)]
    assert ledger.in_flight == 1
    assert ledger.receive(answer(windows[0], 4)) == ()
    assert ledger.counters.duplicates == 2
    assert ledger.in_flight == 1


def test_a_divergence_forgets_held_replies() -> None:
    ledger = make()
    propose(ledger, 40, 5)
    windows = [send(ledger, 1) for _ in range(3)]
    ledger.receive(answer(windows[1], 5))
    assert receive(ledger, windows[0], 4).stale_windows == 2
    send(ledger)
    assert list(ledger.committed) == [1, 2, 3, 4]


def test_a_short_reply_ends_with_the_first_difference() -> None:
    ledger = make()
    propose(ledger, 4, 5, 6)
    window = send(ledger)
    for tokens in ((4,), (4, 5, 6), (40, 50), (40, 5)):
        with pytest.raises(ProtocolError, match="first that differs"):
            ledger.receive(answer(window, *tokens))
    assert receive(ledger, window, 4, 50).tokens == (4, 50)


def test_impossible_replies_are_named() -> None:
    ledger = make((1, 2, 3, 4, 5), cached=0, prefill_width=2)
    prefill, _, last = send(ledger), send(ledger), send(ledger)
    good = answer(last, 6)
    for reply, words in (
        (evolve(good, session=8), "for session 8 came to session 7"),
        (evolve(good, epoch=1), "session is in epoch 0"),
        (evolve(good, number=3), "numbered from 2 to below 3"),
        (evolve(good, number=prefill.number), "numbered from 2 to below 3"),
        (evolve(good, start=3), "starts at position 3; its first wanted row is at 4"),
        (evolve(good, tokens=()), "has 0 rows; the window wants 1"),
        (evolve(good, tokens=(6, 7)), "has 2 rows; the window wants 1"),
    ):
        before = copy.deepcopy(vars(ledger))
        with pytest.raises(ProtocolError, match=words):
            ledger.receive(reply)
        assert vars(ledger) == before
    assert [commit.tokens for commit in ledger.receive(good)] == [(6,)]
    # A window of an older epoch cannot be answered in the new one.
    propose(ledger, 70)
    receive(ledger, send(ledger), 7, 8)
    with pytest.raises(ProtocolError, match="numbered from 4 to below 4"):
        ledger.receive(evolve(good, epoch=1))


def test_prefill_pipelines_without_credits_and_wants_one_row() -> None:
    ledger = make(range(10), cached=1, credits=1, prefill_width=4)
    assert ledger.prefilling
    assert ledger.undispatched == 9
    windows = []
    while (window := ledger.next_window(1)) is not None:
        windows.append(window)
    assert [(w.start, w.stop, w.wanted) for w in windows] == [(1, 5, 0), (5, 9, 0), (9, 10, 1)]
    assert not ledger.prefilling
    assert ledger.in_flight == 1
    commit = receive(ledger, windows[-1], 10)
    assert (commit.start, commit.tokens, ledger.in_flight) == (10, (10,), 0)


def test_the_last_prefill_window_wants_only_its_last_row_and_speculation_follows_at_once() -> None:
    ledger = make(range(8), cached=0, credits=2, prefill_width=4)
    propose(ledger, 8, 9)
    first, last, verify = send(ledger), send(ledger), send(ledger)
    assert (first.wanted, last.wanted, last.width) == (0, 1, 4)
    assert (verify.start, verify.tokens, verify.wanted) == (8, (8, 9), 2)
    reply = answer(last, 80)
    assert reply.start == 7
    (commit,) = ledger.receive(reply)
    assert (commit.width, commit.tokens, commit.diverged, commit.stale_tokens) == (1, (80,), True, 2)
    assert send(ledger).start == 8  # the whole prompt is confirmed


def test_proposals_are_trimmed_dropped_or_refused() -> None:
    ledger = make()
    assert propose(ledger, 4, 5) == 2
    assert propose(ledger, 4, 5, 6, start=3) == 1
    assert propose(ledger, 2, 3, 4, 5, 6, 7, start=1) == 1  # over committed tokens too
    assert propose(ledger, 2, 3, start=1) == 0
    assert propose(ledger, 5, 60, 70, start=4) == 0  # disagrees with the suffix
    assert propose(ledger, 20, 3, 4, 5, 6, 7, 8, start=1) == 0  # disagrees with what is committed
    assert ledger.optimistic == (4, 5, 6, 7)
    assert ledger.propose(Proposal(SESSION, 1, ledger.horizon, (8,))) == 0  # another epoch's
    assert ledger.counters.ignored_proposals == 3
    assert propose(ledger) == 0
    with pytest.raises(ProtocolError, match="reach up to 8"):
        propose(ledger, 9, start=9)
    with pytest.raises(ProtocolError, match="starts at position -1"):
        propose(ledger, 9, start=-1)
    with pytest.raises(ProtocolError, match="for session 8 came to session 7"):
        ledger.propose(Proposal(8, 0, ledger.horizon, (8,)))
    assert ledger.optimistic == (4, 5, 6, 7)


def test_a_gap_where_dropped_tokens_stood_is_honest() -> None:
    ledger = make()
    propose(ledger, 4, 5, 6)
    receive(ledger, send(ledger, 1), 40)
    assert (ledger.epoch, ledger.horizon) == (0, 4)
    assert propose(ledger, 7, start=6) == 0
    assert propose(ledger, 8, start=7) == 0
    assert ledger.counters.ignored_proposals == 2
    with pytest.raises(ProtocolError, match="reach up to 8"):
        propose(ledger, 9, start=9)


def test_what_the_suffix_reached_before_a_reroute_is_no_gap_after_it() -> None:
    ledger = make()
    propose(ledger, 4, 5, 6)
    send(ledger, 1)
    ledger.reroute()
    receive(ledger, send(ledger, 1), 40)
    assert (ledger.epoch, ledger.horizon) == (1, 4)
    assert propose(ledger, 7, start=6) == 0


def test_a_new_epoch_forgets_what_proposals_reached() -> None:
    ledger = make()
    propose(ledger, 4, 5, 6)
    receive(ledger, send(ledger), 40)
    assert ledger.epoch == 1
    with pytest.raises(ProtocolError, match="reach up to 4"):
        propose(ledger, 7, start=5)


def test_caps_bound_what_is_dispatched() -> None:
    for ledger in (make(max_tokens=3), make(context=6)):
        assert propose(ledger, 4, 5, 6, 7, 8) == 2  # the third token need not be run
        window = send(ledger)
        assert window.tokens == (3, 4, 5)
        assert propose(ledger, 6) == 0
        commit = receive(ledger, window, 4, 5, 6)
        assert commit.tokens == (4, 5, 6)
        assert (
            commit.finished == ledger.finished == ("length" if ledger.limits.max_tokens == 3 else "context")
        )
        assert ledger.next_window(1) is None
    assert propose(make(max_optimistic=2), 4, 5, 6) == 2


def test_an_end_token_ends_at_its_commit() -> None:
    ledger = make(end_tokens=[5])
    propose(ledger, 4, 5, 6, 7)
    window, stale = send(ledger, 3), send(ledger, 1)
    assert ledger.finished is None  # proposed and dispatched end tokens end nothing
    commit = receive(ledger, window, 4, 5, 6)
    assert (commit.tokens, commit.finished, commit.diverged) == ((4, 5), "end", False)
    assert (commit.stale_windows, commit.stale_tokens, commit.dropped) == (1, 1, 1)
    assert commit.discard == Discard(SESSION, 1)
    assert ledger.receive(answer(stale, 7)) == ()
    assert ledger.next_window(1) is None
    assert propose(ledger, 9) == 0
    assert ledger.reroute() is None
    assert ledger.finish("cancelled") is None
    assert ledger.finished == "end"
    assert list(ledger.committed) == [1, 2, 3, 4, 5]


def test_an_end_token_as_the_last_of_all_is_an_end() -> None:
    ledger = make(end_tokens=[4], max_tokens=1)
    assert receive(ledger, send(ledger), 4).finished == "end"


def test_stop_sequences_span_windows_but_not_the_prompt() -> None:
    ledger = make((1, 2, 3), stop_sequences=[(3, 4), (4, 5, 6)])
    propose(ledger, 4, 5, 6, 7)
    first, second = send(ledger, 2), send(ledger, 3)
    commit = receive(ledger, first, 4, 5)
    assert (commit.tokens, commit.finished) == ((4, 5), None)
    commit = receive(ledger, second, 6, 7, 8)
    assert (commit.tokens, commit.sources, commit.finished) == ((6,), ("ngram",), "stop")
    assert commit.discard is None  # nothing was behind it


def test_a_resume_runs_again_what_the_caches_do_not_hold() -> None:
    ledger = make(prefill_width=2)
    receive(ledger, send(ledger), 4)
    propose(ledger, 5, 6)
    old = send(ledger, 3)
    assert ledger.resume(1) == Discard(SESSION, 1)
    assert (ledger.confirmed, ledger.optimistic, ledger.counters.resumes) == (1, (5, 6), 1)
    again, input_ = send(ledger), send(ledger)
    assert (again.start, again.tokens, again.wanted, again.epoch) == (1, (2, 3), 0, 1)
    assert (input_.start, input_.tokens, input_.wanted) == (3, (4, 5, 6), 3)
    assert ledger.receive(answer(old, 5, 6, 7)) == ()
    assert receive(ledger, input_, 5, 6, 7).tokens == (5, 6, 7)
    with pytest.raises(UsageError, match=r"must be in 0 … 6"):
        ledger.resume(7)
    ledger.finish("cancelled")
    assert ledger.resume() is None


def test_a_lost_reply_is_rerouted_from_the_input() -> None:
    ledger = make()
    propose(ledger, 4, 5, 6, 7)
    receive(ledger, send(ledger, 1), 4)
    lost, later = send(ledger, 1), send(ledger, 1)
    ledger.receive(answer(later, 6))
    assert ledger.reroute() == Discard(SESSION, 1)
    assert (ledger.in_flight, ledger.optimistic, ledger.counters.reroutes) == (0, (5, 6, 7), 1)
    assert (ledger.counters.stale_windows, ledger.counters.divergences) == (2, 0)
    window = send(ledger, 2)
    assert (window.epoch, window.start, window.tokens) == (1, 3, (4, 5))
    assert ledger.receive(answer(lost, 5)) == ()
    # What was dispatched before but not again counts as undispatched.
    assert receive(ledger, window, 5, 60).diverged is False
    assert ledger.epoch == 1


def test_a_lost_prefill_reply_is_rerouted_from_the_cached_prefix() -> None:
    ledger = make(range(10), cached=3, prefill_width=4)
    send(ledger)
    send(ledger)
    assert ledger.reroute() == Discard(SESSION, 1)
    assert (ledger.counters.stale_windows, ledger.counters.stale_tokens) == (2, 7)
    first, last = send(ledger), send(ledger)
    assert [(w.start, w.stop, w.wanted) for w in (first, last)] == [(3, 7, 0), (7, 10, 1)]
    assert ledger.confirmed == 3
    assert receive(ledger, last, 10).tokens == (10,)
    assert ledger.confirmed == 10
    assert ledger.reroute() == Discard(SESSION, 2)
    assert send(ledger).start == 10


def test_cancel() -> None:
    ledger = make(range(10), cached=0, prefill_width=4)
    assert ledger.finish("cancelled") is None  # nothing was sent
    ledger = make(range(10), cached=0, prefill_width=4)
    send(ledger)
    propose(ledger, 10)
    assert ledger.finish("cancelled") == Discard(SESSION, 1)
    assert (ledger.finished, ledger.optimistic, ledger.next_window(1)) == ("cancelled", (), None)
    assert not ledger.prefilling


def test_resume_runs_committed_tokens_again_and_emits_none_twice() -> None:
    ledger = make(generated=(4, 5), cached=0, max_tokens=4, stop_sequences=[(5, 6)])
    assert (ledger.frontier, ledger.generated) == (5, 2)
    window = send(ledger)
    assert (window.tokens, window.wanted) == ((1, 2, 3, 4, 5), 1)
    assert propose(ledger, 7, 8) == 1
    commit = receive(ledger, window, 6)
    assert (commit.start, commit.tokens, commit.finished) == (5, (6,), "stop")
    assert make(generated=(4, 5), max_tokens=2).finished == "length"
    assert make(generated=(4, 5), max_tokens=2).next_window(1) is None
    with pytest.raises(UsageError, match=r"ended \(end\) after 1"):
        make(generated=(4, 5), end_tokens=[4])


def test_arguments_are_checked() -> None:
    with pytest.raises(UsageError, match="prompt is empty"):
        make(())
    with pytest.raises(CapacityError, match="3 tokens and the context 3"):
        make(context=3)
    for cached in (-1, 3):
        with pytest.raises(UsageError, match="must be in 0 … 2"):
            make(cached=cached)
    for name in ("max_tokens", "context", "prefill_width", "max_optimistic"):
        with pytest.raises(UsageError, match=f"{name} is 0"):
            Limits(**{"max_tokens": 1, "context": 1, name: 0})
    with pytest.raises(UsageError, match="empty sequence"):
        make(stop_sequences=[()])
    with pytest.raises(UsageError, match="width is 0"):
        make().next_window(0)


def test_tallies() -> None:
    ledger = make()
    propose(ledger, 4, 5, source="mtp")
    propose(ledger, 60, 7, source="ngram")
    receive(ledger, send(ledger, 4), 4, 5, 6, 7)
    sources = ledger.counters.sources
    assert (sources["mtp"].dispatched, sources["mtp"].judged, sources["mtp"].accepted) == (2, 2, 2)
    assert (sources["ngram"].dispatched, sources["ngram"].judged, sources["ngram"].accepted) == (1, 1, 0)
    distances = ledger.counters.distances
    assert [(d, t.judged, t.accepted) for d, t in sorted(distances.items())] == [
        (0, 1, 1),
        (1, 1, 1),
        (2, 1, 0),
    ]


def test_the_cost_of_a_call_does_not_grow_with_the_context() -> None:
    """Counts the committed tokens that a round touches, instead of timing it."""

    class Counting(list[int]):
        touched = 0

        def __getitem__(self, key):  # type: ignore[no-untyped-def]
            Counting.touched += len(range(*key.indices(len(self)))) if isinstance(key, slice) else 1
            return super().__getitem__(key)

        def __iter__(self):  # type: ignore[no-untyped-def]
            raise AssertionError("a call walks the whole context")

        def copy(self) -> list[int]:
            raise AssertionError("a call copies the whole context")

    costs = []
    for length in (10, 100_000):
        ledger = make(range(length), context=200_000, stop_sequences=[(5, 6, 7)])
        ledger._committed = Counting(ledger._committed)
        Counting.touched = 0
        for _ in range(20):
            propose(ledger, 4, 5, 6, start=ledger.frontier)
            first, second = send(ledger, 2), send(ledger, 2)
            ledger.receive(answer(first, 4, 5))
            ledger.receive(answer(second, 60, 7))
            assert ledger.committed[-1] == 60
        costs.append(Counting.touched)
    assert costs[0] == costs[1]
