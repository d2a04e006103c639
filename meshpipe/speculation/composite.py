"""Several proposers, one line of tokens: what is expected to follow, who says so, and how sure it is.

A *prefix* source (native MTP, a draft model) computes, and its few tokens come by message and late; the n-gram
proposer answers at once, at any length. The composite keeps a single line of guesses after the committed
tokens. Its head has been dispatched and is the ledger's; the rest can still change:

- A prefix source's tokens are put in their place; what was guessed there and is not dispatched yields, unless
  it is the same.
- A tail comes from the n-gram proposer, asked with everything before it. After a prefix it counts only if its
  match reaches back beyond the prefix: then the n-gram agrees with each token of it. (A match inside the
  prefix alone says nothing about whether this prefix belongs here.)
- With no prefix the n-gram proposer fills the line alone.

Every guess is judged by the commit at its position, whether it was dispatched or not, under its own source
and *level*; a guess after a wrong one is not judged. So a tail's rejection never counts against the prefix,
and a source that is not asked to dispatch still shows when it becomes good again. The level of an n-gram
guess is the binary order of its agreeing context (1, 2-3, 4-7, …). That of a prefix source's token is the tenth
in which its own probability lies, so that what a source believes is corrected by how often it was right
(`Calibration`); if it gives none, the token's place in the proposal.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from attrs import define, field, frozen

from meshpipe.messages import Proposal, Window
from meshpipe.speculation.ledger import Ledger
from meshpipe.speculation.ngram import NgramProposer
from meshpipe.speculation.policy import Verdict

NGRAM = "ngram"
MTP = "mtp"


@define
class Acceptance:
    """How often the guesses of one source and level are right, given that all before them were.

    A mean over roughly the last `memory` judgements, which starts as if `weight` of them had been `prior`.
    """

    prior: float
    weight: float = 4.0
    memory: float = 32.0
    judged: int = 0
    accepted: int = 0
    _right: float = field(init=False)
    _all: float = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._right = self.prior * self.weight
        self._all = self.weight

    @property
    def rate(self) -> float:
        """The estimate, from 0 to 1."""
        return self._right / self._all

    def judge(self, right: bool) -> None:
        """Count one more guess."""
        self.judged += 1
        self.accepted += right
        keep = 1 - 1 / self.memory
        self._right = self._right * keep + right
        self._all = self._all * keep + 1


Calibration = dict[tuple[str, int], Acceptance]
"""Acceptance by source and level. That of a source that gives probabilities belongs to it and the target, not to a
text: sessions share it, so that a new one need not learn it again."""


@frozen
class Guess:
    """A token expected at a position, who says so, and how often guesses like it are right."""

    token: int
    source: str
    acceptance: Acceptance


class Composite:
    """The line of guesses of one session, beside its ledger.

    ngram: the session's n-gram proposer, with nothing committed yet; None to go without.
    ahead: tokens after the last dispatched one that are kept ready; at least the widest window.
    calibration: of the sources that give probabilities; shared with other sessions.

    Call `update` once with the prompt in the ledger, and after every `Ledger.receive`.
    """

    # By level: contexts of 1, 2-3, 4-7, … 128 and more tokens. A little below the rates that `python -m bench
    # ngram` finds, which proved as fast with half the stale rows; a session soon knows better.
    NGRAM_PRIORS = (0.20, 0.30, 0.45, 0.65, 0.85, 0.95, 0.98, 0.99)
    PREFIX_PRIOR = 0.5
    # A token to which a source gives less than a tenth is its likeliest one all the same: SmolLM2's NextN block was
    # right with 8% of them. A prior below what is sent at all would leave them out after the first that is wrong.
    LEAST_PRIOR = 0.08

    def __init__(
        self,
        ledger: Ledger,
        ngram: NgramProposer | None = None,
        *,
        ahead: int = 32,
        calibration: Calibration | None = None,
    ) -> None:
        self.acceptance: Calibration = {}
        self._calibration: Calibration = {} if calibration is None else calibration
        self._ledger = ledger
        self._ngram = ngram
        self._ahead = ahead
        self._line: list[Guess] = []  # from the frontier on
        self._prefix_start: int | None = None  # position of the first guess that a prefix source gave
        self._seen = 0  # committed tokens that were judged and indexed

    def index(self, most: int) -> bool:
        """Indexes the next `most` tokens of the prompt, of which nothing was guessed; says whether some are left."""
        fresh = self._ledger.committed[self._seen : self._seen + most]
        self._seen += len(fresh)
        if self._ngram is not None:
            self._ngram.extend(fresh)
        return self._seen < self._ledger.frontier

    def update(self) -> Verdict:
        """Judge the line by what was committed since, and index that; what became of the guesses."""
        fresh = self._ledger.committed[self._seen :]
        self._seen += len(fresh)
        if self._ngram is not None:
            self._ngram.extend(fresh)
        accepted = 0
        for guess, token in zip(self._line, fresh, strict=False):
            right = guess.token == token
            guess.acceptance.judge(right)
            if not right:
                self._line.clear()
                self._prefix_start = None
                return Verdict(accepted, True)
            accepted += 1
        del self._line[:accepted]
        if self._prefix_start is not None and self._prefix_start < self._seen:
            # Committed prefix tokens are text like any other; those still to come keep the n-gram in check.
            rest = next((at for at, guess in enumerate(self._line) if guess.source != NGRAM), None)
            self._prefix_start = None if rest is None else self._seen + rest
        return Verdict(accepted, False)

    def offer(self, proposal: Proposal) -> int:
        """Put a prefix source's proposal in its place; returns how many tokens of it now stand undispatched.

        Ignored (0) if it is of another epoch, leaves a gap, or differs from what is committed or dispatched.
        """
        ledger = self._ledger
        if proposal.epoch != ledger.epoch or ledger.finished is not None:
            return 0
        start = proposal.start - ledger.frontier  # index into the line; below 0: committed by now
        fixed = ledger.horizon - ledger.frontier  # guesses that the ledger has
        if start > len(self._line):
            return 0
        known = list(ledger.committed[proposal.start : ledger.frontier])
        known += [guess.token for guess in self._line[max(start, 0) : fixed]]
        if any(known[at] != token for at, token in enumerate(proposal.tokens[: len(known)])):
            return 0
        believed = proposal.probabilities
        fresh = [
            Guess(
                token, proposal.source, self._acceptance(proposal.source, place, believed[place : place + 1])
            )
            for place, token in enumerate(proposal.tokens[len(known) :], len(known))
        ]
        if fresh:
            at = max(start, fixed)
            replaced = self._line[at : at + len(fresh)]
            same = [guess.token for guess in replaced] == [guess.token for guess in fresh]
            self._line[at : at + len(fresh) if same else None] = fresh
            if self._prefix_start is None:
                self._prefix_start = ledger.frontier + at
        return len(fresh)

    def survival(self) -> list[float]:
        """For each token that could be sent next: the probability that it and all before it are right.

        The first is 1.0 if it is committed (the input). Never rising. See `Pace.next_width`.
        """
        self._fill()
        start = self._ledger.horizon - self._ledger.undispatched - self._ledger.frontier
        sure = 1.0
        survival = [1.0] * -start
        for at, guess in enumerate(self._line[: max(start, 0) + self._ahead]):
            sure *= guess.acceptance.rate
            if at >= start:
                survival.append(sure)
        return survival

    def tokens(self, start: int, stop: int) -> list[int]:
        """The committed tokens and guesses at positions `[start, stop)`; fewer where nothing is guessed yet."""
        frontier = self._ledger.frontier
        committed = list(self._ledger.committed[start : min(stop, frontier)])
        return committed + [
            guess.token for guess in self._line[max(start - frontier, 0) : max(stop - frontier, 0)]
        ]

    def reach(self, least: float) -> int:
        """The position up to which the guesses are all right with a probability of `least` or more."""
        sure, position = 1.0, self._ledger.frontier
        for guess in self._line:
            sure *= guess.acceptance.rate
            if sure < least:
                break
            position += 1
        return position

    def dispatch(self, width: int) -> Window | None:
        """Hand the ledger what it lacks for a window of `width` tokens, and take that window from it."""
        ledger = self._ledger
        if not ledger.prefilling:
            fixed = ledger.horizon - ledger.frontier
            lacking = max(0, width - ledger.undispatched)
            for source, run in groupby(self._line[fixed : fixed + lacking], key=lambda guess: guess.source):
                tokens = tuple(guess.token for guess in run)
                ledger.propose(Proposal(ledger.session, ledger.epoch, ledger.horizon, tokens, source))
        return ledger.next_window(width)

    def _fill(self) -> None:
        """Let the n-gram proposer lengthen the line."""
        ledger = self._ledger
        room = ledger.horizon - ledger.frontier + self._ahead - len(self._line)
        if self._ngram is None or room <= 0 or ledger.finished is not None:
            return
        draft = self._ngram.propose([guess.token for guess in self._line], room)
        if self._prefix_start is not None:
            guessed = ledger.frontier + len(self._line) - self._prefix_start
            if draft.match <= guessed:
                return
        self._line += [
            Guess(token, NGRAM, self._acceptance(NGRAM, min(match.bit_length(), len(self.NGRAM_PRIORS)) - 1))
            for match, token in enumerate(draft.tokens, draft.match)
        ]

    def _acceptance(self, source: str, level: int, believed: Sequence[float] = ()) -> Acceptance:
        """`believed`: the source's own probability of the token, if it gave one."""
        if believed:
            level = min(max(int(believed[0] * 10), 0), 9)
            prior = max((level + 0.5) / 10, self.LEAST_PRIOR)
            return self._calibration.setdefault((source, level), Acceptance(prior, 2.0, 128.0))
        prior = self.NGRAM_PRIORS[level] if source == NGRAM else self.PREFIX_PRIOR
        return self.acceptance.setdefault((source, level), Acceptance(prior))

    def summary(self) -> dict[str, tuple[int, int]]:
        """By source: guesses judged and guesses accepted (by all sessions that share the calibration)."""
        totals: dict[str, tuple[int, int]] = {}
        for (source, _), seen in (self.acceptance | self._calibration).items():
            judged, accepted = totals.get(source, (0, 0))
            totals[source] = (judged + seen.judged, accepted + seen.accepted)
        return totals
