"""Whether a proposer that runs ahead is worth its computation.

What it drafts costs a core's time, and rows of the stages when it is wrong. On a long pipe that is little beside a
round trip saved; on a short one it is more than it brings, the more so where drafts and stages share cores. So drafting
counts as if nothing else could go on meanwhile: a round trip of `n` drafts takes the pipe's latency with these rows and
the seconds of `n` drafts, and brings the drafts that are right besides its free token. If no `n` beats none, nothing is
drafted; after a while a few are tried again, less often each time.
"""

from __future__ import annotations

from attrs import define, field

from meshpipe.speculation.composite import Acceptance
from meshpipe.speculation.drafting import RESTS, TRIAL
from meshpipe.speculation.policy import Pipe

MOST = 8
"""Drafts of a round trip that are considered."""


@define(eq=False)
class Worth:
    """What is known of one proposer, by all sessions of a pipeline: it is a matter of machines and models.

    `cost`: seconds of one draft; 0 until that is known.
    """

    pipe: Pipe
    cost: float = 0.0
    acceptance: Acceptance = field(factory=lambda: Acceptance(0.5, memory=16))
    _drafted: int = 0  # tokens
    _resting: int = 0  # tokens to commit before the next trial
    _rest: int = RESTS[0]
    _trial: int = 0  # drafts that this trial may still make

    def pays(self, sessions: int = 1) -> bool:
        """Whether to draft now, while so many sessions share the pipe."""
        if self._gains(self.acceptance.rate, sessions):
            self._trial, self._rest = 0, RESTS[0]
            return True
        if not self._gains(1.0, sessions):
            return False
        if not self._trial and self._resting <= 0:
            self._trial = TRIAL
        return self._trial > 0

    def drafted(self, tokens: int, seconds: float) -> None:
        """So many tokens were drafted, in so many seconds.

        These may include catching up with a prompt, as the first surely do: they are left out, and from then on a lower
        cost is believed at once, a higher one slowly.
        """
        if tokens and seconds > 0 and self._drafted:
            each = seconds / tokens
            lower = not self.cost or each < self.cost
            self.cost = each if lower else self.cost + (min(each, 2 * self.cost) - self.cost) / 16
        self._drafted += tokens
        if self._trial:
            self._trial = max(0, self._trial - tokens)
            if not self._trial:
                self._resting, self._rest = self._rest, min(self._rest * 2, RESTS[1])

    def committed(self, tokens: int) -> None:
        """So many tokens were committed, by any session."""
        self._resting -= tokens

    def _gains(self, rate: float, sessions: int) -> bool:
        """Whether drafts with this acceptance bring more commits a second than none."""
        none = 1 / max(self.pipe.latency(1), sessions * self.pipe.slowest(1))
        commits = sure = 1.0
        for count in range(1, MOST + 1):
            sure *= rate
            commits += sure
            drafting = count * self.cost
            alone = self.pipe.latency(1 + count) + drafting
            if commits / max(alone, sessions * max(self.pipe.slowest(1 + count), drafting)) > none:
                return True
        return False
