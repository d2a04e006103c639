"""How many tokens of native MTP a window should ask for, so that asking pays.

The drafts come with a window's reply and are the next window's guesses. So a round trip costs their computation and
their rows, and brings the drafts that are right besides its free token. Where the pipe is short or full, that can be
more than it brings; then none are asked for, nothing is computed, and after a while a few are tried again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from attrs import define, field

from meshpipe.speculation.composite import Acceptance
from meshpipe.speculation.policy import Pipe

TRIAL = 4
"""Drafts that a trial asks for before it is judged."""
RESTS = (64, 1024)
"""Tokens without drafts after the first trial that failed, and after many."""


@define
class Drafting:
    """One session's answer to "how many drafts?".

    `cost`: seconds of one draft; `most`: drafts at most; `always`: at least one, whether it pays or not.
    """

    pipe: Pipe
    cost: float
    most: int
    always: bool = False
    _places: list[Acceptance] = field(init=False)
    _offered: dict[int, tuple[int, int]] = field(factory=dict)  # by position: (token, place in its draft)
    _resting: int = RESTS[0]  # tokens to commit before the next trial
    _rest: int = RESTS[0]
    _trial: int = 0  # drafts that this trial may still ask for

    def __attrs_post_init__(self) -> None:
        self._places = [Acceptance(0.5) for _ in range(self.most)]

    def wanted(self, sessions: int = 1) -> int:
        """Drafts to ask for with the next window, while so many sessions share the pipe."""
        best = self.paying(sessions)
        if best or not self.most:
            self._trial = 0
            return best
        if not self._best([1.0] * self.most, sessions):
            return 0  # it could not pay even if it were always right
        if self._trial:
            self._trial -= 1
            if not self._trial:
                self._resting, self._rest = self._rest, min(self._rest * 2, RESTS[1])
            return 1
        if self._resting <= 0:
            self._trial = TRIAL
        return 0

    def paying(self, sessions: int = 1) -> int:
        """Drafts that pay by what is known, trials aside: what a prefill window is fed for."""
        if not self.most:
            return 0
        return max(self._best([place.rate for place in self._places], sessions), int(self.always))

    def drafted(self, start: int, tokens: Sequence[int], seconds: float) -> None:
        """Drafts came, for the positions from `start` on; `seconds` is what they took in all."""
        self._offered = {start + place: (token, place) for place, token in enumerate(tokens)}
        if tokens and seconds > 0:
            self.cost += (seconds / len(tokens) - self.cost) / 16

    def committed(self, start: int, tokens: Sequence[int]) -> None:
        """Tokens were committed at the positions from `start` on."""
        self._resting -= len(tokens)
        for position, token in enumerate(tokens, start):
            if not self._offered:
                return
            guess = self._offered.pop(position, None)
            if guess is None or guess[0] != token:
                self._offered.clear()
            if guess is not None:
                self._places[guess[1]].judge(guess[0] == token)

    def _best(self, rates: Sequence[float], sessions: int) -> int:
        """The number of drafts with the most commits a second."""
        values = list(self._values(rates, sessions))
        return values.index(max(values))

    def _values(self, rates: Sequence[float], sessions: int) -> Iterator[float]:
        """Commits a second with 0, 1, 2, … drafts a round trip, at these rates of acceptance by place."""
        commits = sure = 1.0
        for count in range(self.most + 1):
            if count:
                sure *= rates[count - 1]
                commits += sure
            drafting = count * self.cost
            alone = self.pipe.latency(1 + count) + drafting
            shared = sessions * (self.pipe.slowest(1 + count) + drafting)
            yield commits / max(alone, shared)
