"""One line of guesses from several sources, judged by commits."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from meshpipe.messages import Proposal, Reply, Window
from meshpipe.speculation.composite import NGRAM, Acceptance, Composite
from meshpipe.speculation.ledger import Ledger, Limits
from meshpipe.speculation.ngram import NgramConfig, NgramProposer
from meshpipe.speculation.policy import Verdict


def session(prompt: Sequence[int], ngram: bool = True, ahead: int = 8) -> tuple[Ledger, Composite]:
    ledger = Ledger(1, prompt, Limits(max_tokens=1_000, context=4_000))
    proposer = NgramProposer(NgramConfig(min_match=2)) if ngram else None
    composite = Composite(ledger, proposer, ahead=ahead)
    composite.update()
    return ledger, composite


def say(ledger: Ledger, composite: Composite, window: Window | None, tokens: Sequence[int]) -> Verdict:
    assert window is not None
    first = window.stop - window.wanted
    ledger.receive(Reply(1, window.epoch, window.number, first, tuple(tokens)))
    return composite.update()


def prefix(ledger: Ledger, tokens: Sequence[int], start: int | None = None, source: str = "mtp") -> Proposal:
    return Proposal(1, ledger.epoch, ledger.frontier if start is None else start, tuple(tokens), source)


def prompted(ledger: Ledger, composite: Composite, token: int) -> None:
    """Run the prompt; the model continues with `token`."""
    window = composite.dispatch(1)
    say(ledger, composite, window, [token])


def test_the_ngram_proposer_fills_the_line_alone() -> None:
    ledger, composite = session([1, 2, 3, 4, 5, 6, 1])
    prompted(ledger, composite, 2)
    sure = composite.survival()
    assert len(sure) == 1 + 8  # the input and `ahead` guesses: 3 4 5 6 1 2 3 4
    assert sure[0] == 1.0
    assert sure == sorted(sure, reverse=True)
    window = composite.dispatch(4)
    assert window is not None
    assert window.tokens == (2, 3, 4, 5)
    assert ledger.optimistic == (3, 4, 5)  # the ledger has what was sent and no more
    window = composite.dispatch(3)
    assert window is not None
    assert window.tokens == (6, 1, 2)


def test_without_guesses_only_the_input_can_go() -> None:
    ledger, composite = session([1, 2, 3], ngram=False)
    prompted(ledger, composite, 9)
    assert composite.survival() == [1.0]
    window = composite.dispatch(16)
    assert window is not None
    assert window.tokens == (9,)
    assert composite.survival() == []
    assert composite.dispatch(16) is None


def test_a_prefix_is_extended_where_the_ngram_agrees_with_it() -> None:
    ledger, composite = session([1, 2, 3, 4, 5, 6, 7, 8, 9, 1])
    prompted(ledger, composite, 2)
    assert composite.offer(prefix(ledger, [3, 4])) == 2
    assert len(composite.survival()) == 1 + 8
    window = composite.dispatch(6)
    assert window is not None
    assert window.tokens == (2, 3, 4, 5, 6, 7)
    verdict = say(ledger, composite, window, [3, 4, 5, 6, 7, 8])
    assert verdict == Verdict(6, rejected=False)
    # 8 was not sent, but foreseen; only what was sent counts in the ledger.
    assert composite.summary() == {"mtp": (2, 2), NGRAM: (4, 4)}
    assert ledger.counters.sources["mtp"].accepted == 2
    assert ledger.counters.sources[NGRAM].accepted == 3


def test_a_prefix_that_the_ngram_does_not_agree_with_stays_alone() -> None:
    # 3 4 is known text, but after 1 2 comes 5: the match lies inside the prefix and says nothing of it.
    ledger, composite = session([1, 2, 5, 6, 3, 4, 7, 8, 1])
    prompted(ledger, composite, 2)
    composite.offer(prefix(ledger, [3, 4]))
    assert len(composite.survival()) == 1 + 2
    # With the prefix committed it is text like any other, and the n-gram goes on.
    window = composite.dispatch(3)
    assert window is not None
    assert window.tokens == (2, 3, 4)
    say(ledger, composite, window, [3, 4, 7])
    assert len(composite.survival()) > 1


def test_a_late_prefix_replaces_what_was_not_sent_and_not_what_was() -> None:
    ledger, composite = session([1, 2, 3, 4, 5, 6, 1])
    prompted(ledger, composite, 2)
    composite.survival()
    window = composite.dispatch(2)
    assert window is not None
    assert window.tokens == (2, 3)
    assert composite.offer(prefix(ledger, [9, 9])) == 0  # 3 is on its way
    assert composite.offer(prefix(ledger, [3, 40])) == 1
    second = composite.dispatch(5)
    assert second is not None
    assert second.tokens == (40,)


def test_a_prefix_equal_to_the_line_keeps_its_tail_and_takes_the_credit() -> None:
    ledger, composite = session([1, 2, 3, 4, 5, 6, 1])
    prompted(ledger, composite, 2)
    before = len(composite.survival())
    assert composite.offer(prefix(ledger, [3, 4])) == 2
    assert len(composite.survival()) == before
    window = composite.dispatch(4)
    assert window is not None
    assert window.tokens == (2, 3, 4, 5)
    assert say(ledger, composite, window, [3, 4, 99]) == Verdict(2, rejected=True)
    assert composite.summary() == {"mtp": (2, 2), NGRAM: (1, 0)}


def test_a_tails_rejection_does_not_count_against_the_prefix() -> None:
    ledger, composite = session([1, 2, 3, 4, 5, 6, 1])
    prompted(ledger, composite, 2)
    composite.offer(prefix(ledger, [3]))
    composite.survival()
    rates = {key: seen.rate for key, seen in composite.acceptance.items()}
    window = composite.dispatch(4)
    say(ledger, composite, window, [3, 99])
    assert composite.acceptance["mtp", 0].rate > rates["mtp", 0]
    assert composite.summary() == {"mtp": (1, 1), NGRAM: (1, 0)}


def test_what_follows_a_wrong_guess_is_not_judged_and_is_forgotten() -> None:
    ledger, composite = session([1, 2, 3, 4, 5, 6, 1])
    prompted(ledger, composite, 2)
    composite.survival()
    window = composite.dispatch(8)
    assert say(ledger, composite, window, [50]) == Verdict(0, rejected=True)
    assert composite.summary() == {NGRAM: (1, 0)}
    assert composite.survival() == [1.0]
    window = composite.dispatch(8)
    assert window is not None
    assert (window.epoch, window.tokens) == (1, (50,))


def test_guesses_are_judged_though_nothing_of_them_was_sent() -> None:
    ledger, composite = session([1, 2, 3, 4, 5, 6, 1])
    prompted(ledger, composite, 2)
    for token in (3, 4, 5):
        composite.survival()
        window = composite.dispatch(1)
        assert say(ledger, composite, window, [token]) == Verdict(1, rejected=False)
    assert composite.summary() == {NGRAM: (3, 3)}
    composite.survival()
    assert say(ledger, composite, composite.dispatch(1), [77]) == Verdict(0, rejected=True)
    assert composite.summary() == {NGRAM: (4, 3)}


def test_proposals_of_another_epoch_or_beyond_a_gap_are_ignored() -> None:
    ledger, composite = session([1, 2, 3], ngram=False)
    prompted(ledger, composite, 4)
    assert composite.offer(Proposal(1, 5, ledger.frontier, (1,), "mtp")) == 0
    assert composite.offer(prefix(ledger, [1], start=ledger.frontier + 1)) == 0
    assert composite.offer(prefix(ledger, [4, 6], start=ledger.frontier - 1)) == 1  # 4 is committed by now
    assert composite.offer(prefix(ledger, [5, 6], start=ledger.frontier - 1)) == 0  # and 5 is not
    assert composite.offer(prefix(ledger, [7], start=ledger.frontier + 1, source="draft")) == 1
    window = composite.dispatch(8)
    assert window is not None
    assert window.tokens == (4, 6, 7)
    assert set(ledger.counters.sources) == {"mtp", "draft"}


def test_a_sources_own_probability_is_believed_until_it_proves_wrong() -> None:
    ledger, composite = session([1, 2, 3], ngram=False)
    prompted(ledger, composite, 4)
    proposal = Proposal(1, 0, ledger.frontier, (5, 6), "draft", probabilities=(0.97, 0.12))
    assert composite.offer(proposal) == 2
    sure = composite.survival()
    assert sure == [1.0, 0.95, 0.95 * 0.15]
    for token in range(5, 40):  # what it holds for unlikely is right all the time
        composite.offer(Proposal(1, 0, ledger.frontier, (token,), "draft", probabilities=(0.12,)))
        say(ledger, composite, composite.dispatch(1), [token])
    composite.offer(Proposal(1, 0, ledger.frontier, (99, 98), "draft", probabilities=(0.12, 0.97)))
    assert composite.survival()[1] > 0.9


def test_after_a_lost_reply_the_line_is_sent_again() -> None:
    ledger, composite = session([1, 2, 3, 4, 5, 6, 1])
    prompted(ledger, composite, 2)
    composite.survival()
    first = composite.dispatch(3)
    composite.dispatch(3)
    ledger.reroute()
    sure = composite.survival()
    assert sure[0] == 1.0
    again = composite.dispatch(3)
    assert first is not None
    assert again is not None
    assert (again.start, again.tokens) == (first.start, first.tokens)


def test_acceptance_starts_at_the_prior_and_follows_what_it_sees() -> None:
    seen = Acceptance(prior=0.9)
    assert seen.rate == 0.9
    for _ in range(40):
        seen.judge(False)
    assert seen.rate < 0.15
    for _ in range(300):
        seen.judge(True)
    assert seen.rate > 0.97
    assert (seen.judged, seen.accepted) == (340, 300)


@given(
    st.lists(st.integers(0, 2), min_size=2, max_size=12),
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 2), max_size=4), st.integers(1, 5), st.integers(0, 3), st.booleans()
        ),
        max_size=25,
    ),
)
def test_whatever_is_offered_the_line_and_the_ledger_agree(
    prompt: list[int], moves: list[tuple[list[int], int, int, bool]]
) -> None:
    """The target counts its own prefix; offers, widths and lost replies are arbitrary."""
    ledger, composite = session(prompt)
    prompted(ledger, composite, 0)
    waiting: list[Window] = []

    def truth(position: int) -> int:
        return (position * position // 3) % 3

    for offered, width, answered, lose in moves:
        composite.offer(prefix(ledger, offered, start=ledger.frontier))
        sure = composite.survival()
        assert all(0 < rate <= 1 for rate in sure)
        assert sure == sorted(sure, reverse=True)
        window = composite.dispatch(width)
        assert (window is None) == (not sure)
        if window is not None:
            assert window.width == min(width, len(sure))
            waiting.append(window)
        for _ in range(answered):
            if not waiting:
                break
            window = waiting.pop(0)
            picks: list[int] = []
            for position in range(window.start, window.stop):
                picks.append(truth(position + 1))
                if position + 1 < window.stop and picks[-1] != window.tokens[position + 1 - window.start]:
                    break
            say(ledger, composite, window, picks)
            waiting = [window for window in waiting if window.epoch == ledger.epoch]
        if lose:
            ledger.reroute()
            waiting.clear()
        generated = list(ledger.committed[len(prompt) + 1 :])
        assert generated == [truth(len(prompt) + 1 + at) for at in range(len(generated))]
