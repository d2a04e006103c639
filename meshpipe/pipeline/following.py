"""A session's side of a proposer that runs ahead: what it tells it, and what it makes of the answers.

The proposer is told of what it cannot know: tokens that the model corrected or chose freely, tokens that another
source had dispatched, and how far to go. Its limit is what has been dispatched and a reserve of one window more:
the pipe takes what fills it, so the proposer is as far ahead as the pipe is long, and no further. It is asked for
nothing while the line is too unsure to be sent, nor while other sources keep the reserve full.

What does not fit (a proposal was lost, or crossed with what was dispatched) cuts the line, and the proposer begins
again at the last position that both agree on.

The NextN block also wants the trunk's hidden rows: those of confirmed positions are passed on, after the replies that
brought them have retired. It keeps them, so that a pipeline whose stages were lost and replaced has to send only what
comes after (`hidden_from`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import trio

from meshpipe.actors import Ref
from meshpipe.errors import ActorGoneError
from meshpipe.messages import CloseSession, Follow, Hidden, OpenSession, Proposal, Rows
from meshpipe.pipeline.proposer import Told
from meshpipe.speculation.composite import Composite
from meshpipe.speculation.ledger import Ledger
from meshpipe.speculation.policy import Pace
from meshpipe.speculation.worth import Worth

CLOSE_DEADLINE = 1.0
"""Seconds that a session which has ended waits for a proposer with a full mailbox."""


class Following:
    """One session's proposer. `made`: by source, the tokens that it proposed and the seconds that it computed.

    `hidden_from`: the position of the first hidden row that is still wanted; None: none is. `worth` says when it pays
    to draft, None: always; `sessions` how many share the pipe.
    """

    def __init__(
        self,
        proposer: Ref[Told],
        ledger: Ledger,
        composite: Composite,
        pace: Pace,
        opening: OpenSession,
        *,
        hidden_from: int | None = None,
        worth: Worth | None = None,
        sessions: Callable[[], int] = lambda: 1,
    ) -> None:
        self.made: dict[str, tuple[int, float]] = {}
        self.hidden_from = hidden_from
        self._rows: list[Hidden] = []  # that the proposer was not sent yet
        self._proposer = proposer
        self._ledger = ledger
        self._composite = composite
        self._pace = pace
        self._worth = worth
        self._sessions = sessions
        self._offered: dict[int, int] = {}  # by position: tokens that it proposed
        self._line = 0  # how often it was cut
        self._known = 0  # positions up to which the proposer knows the line
        self._last: Follow | None = None
        self._gone = False
        self._opening = None if self._send(opening) else opening  # to be sent when there is room

    def offered(self, proposal: Proposal) -> None:
        """Gives the session's composite what came in time."""
        made, seconds = self.made.get(proposal.source, (0, 0.0))
        self.made[proposal.source] = made + len(proposal.tokens), seconds + proposal.seconds
        if self._worth is not None:
            self._worth.drafted(len(proposal.tokens), proposal.seconds)
        if proposal.line != self._line:
            return
        self._offered.update(enumerate(proposal.tokens, proposal.start))
        self._composite.offer(proposal)
        stop = proposal.start + len(proposal.tokens)
        if self._composite.tokens(proposal.start, stop) == list(proposal.tokens):
            self._known = max(self._known, stop)
        else:
            self.cut()

    def revealed(self, start: int, rows: Rows) -> None:
        """Hidden rows, float32 (n, n_embd), of confirmed positions from `start` on; what is known is left out."""
        if self.hidden_from is None or self._gone:
            return
        fresh = rows[max(self.hidden_from - start, 0) :]
        if len(fresh):
            stop = start + len(rows)
            self._rows.append(Hidden(self._ledger.session, stop - len(fresh), fresh))
            self.hidden_from = stop

    def committed(self, start: int, tokens: Sequence[int]) -> None:
        """Tokens were committed at the positions from `start` on: what was proposed there was right, or not."""
        if self._worth is None:
            return
        self._worth.committed(len(tokens))
        for position, token in enumerate(tokens, start):
            guess = self._offered.pop(position, None)
            if guess is not None:
                self._worth.acceptance.judge(guess == token)
            if guess != token:
                self._offered.clear()

    def cut(self) -> None:
        """What follows the last committed token but one is not what the proposer thinks, or may not be."""
        self._line += 1
        self._known = min(self._known, self._ledger.frontier - 1)

    def tell(self) -> None:
        """Sends the proposer what it does not know yet, and the new limit, if there is need to."""
        if self._opening is not None:
            if not self._send(self._opening):
                return
            self._opening = None
        self._tell_line()
        # The line first, which may have been cut: rows belong to it as it is now.
        while self._rows and not self._gone and self._send(self._rows[0]):
            self._rows.pop(0)

    def _tell_line(self) -> None:
        ledger, last = self._ledger, self._last
        if self._gone or ledger.finished is not None:
            return
        end = max(self._known, ledger.horizon)
        tokens = tuple(self._composite.tokens(self._known, end))
        message = Follow(ledger.session, ledger.epoch, self._line, self._known, tokens, self._limit(end))
        if last is not None and not tokens and (message.epoch, message.line) == (last.epoch, last.line):
            busy = end + self._reserve // 2 < last.limit <= message.limit
            if busy or last.limit == message.limit:
                return
        if self._send(message):
            self._known, self._last = end, message

    async def close(self) -> None:
        """The session has ended. Waits for room if need be: a proposer that missed it would keep the session's lane.

        But not for long: one that takes nothing any more hangs, and nothing depends on a proposer.
        """
        with suppress(ActorGoneError), trio.move_on_after(CLOSE_DEADLINE):
            if not self._send(CloseSession(self._ledger.session)) and not self._gone:
                await self._proposer.send(CloseSession(self._ledger.session))

    @property
    def _reserve(self) -> int:
        return max(4, self._pace.widest)

    def _limit(self, end: int) -> int:
        """Position below which tokens are wanted."""
        ledger = self._ledger
        if not ledger.generated:
            return end  # nothing is sent before the model has spoken
        if self._worth is not None and not self._worth.pays(self._sessions()):
            return end
        sure = self._composite.reach(self._pace.least)
        if sure < end or sure - ledger.horizon >= self._reserve:
            return end
        return min(ledger.horizon + self._reserve, ledger.end - 1)

    def _send(self, message: Told) -> bool:
        """Says whether there was room; there is none any more where the proposer is `_gone`."""
        try:
            return self._proposer.try_send(message)
        except ActorGoneError:
            self._gone = True
            return False
