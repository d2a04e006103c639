"""A session's line of tokens, as a proposer that runs ahead of it knows it; by position alone.

The line is what the session told, and after that what the proposer drafted. A head of it is in the cache of the
proposer's engine. Told tokens that agree with drafted ones confirm them; at the first that differs, the rest of the
line is forgotten and the cache is trimmed by where the next job starts. So a divergence needs no roll-back here
either, and a line that begins like the one before it on the same lane finds its head in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import field, frozen, mutable

from meshpipe.errors import ProtocolError
from meshpipe.messages import Follow


@frozen
class DraftJob:
    """Run `tokens` at positions from `start` on; then draft up to `most` tokens after them, if that is not 0.

    `line` is the whole line (live, to be read only until the job has ended).
    """

    session: int
    lane: int
    start: int
    tokens: tuple[int, ...]
    most: int
    line: Sequence[int] = field(eq=False, repr=False)

    @property
    def stop(self) -> int:
        """The position after the last token that is run: that of the first one drafted."""
        return self.start + len(self.tokens)


@mutable
class RunAhead:
    """One session on one lane. `context` positions are all that the proposer's engine has room for.

    `tokens`: the line by position; `cached`: how many of them the engine's cache holds. Both may be taken over from
    the session that had the lane before. `waits`: nothing can be drafted before something is told.
    """

    session: int
    lane: int
    context: int
    tokens: list[int] = field(factory=list)
    cached: int = 0
    epoch: int = 0
    line: int = -1
    limit: int = 0
    waits: bool = False

    def follow(self, message: Follow) -> int:
        """Takes the session's word for its line; the position up to which that is what it was.

        Raises ProtocolError if it leaves a gap.
        """
        start, told = message.start, message.tokens
        if not 0 <= start <= len(self.tokens):
            raise ProtocolError(
                f"session {self.session} tells its line from position {start} on; the proposer knows it up to "
                f"{len(self.tokens)}, and it must start there or below"
            )
        holds = len(self.tokens)
        agreeing = _common(told, self.tokens[start : start + len(told)])
        if agreeing < len(told):
            holds = start + agreeing
            self.tokens[holds:] = told[agreeing:]
        elif message.line != self.line:
            holds = start + len(told)
            del self.tokens[holds:]
        self.cached = min(self.cached, holds)
        self.epoch, self.line, self.limit = message.epoch, message.line, message.limit
        self.waits = False
        return holds

    def came(self) -> None:
        """Hidden rows have come."""
        self.waits = False

    def job(self, rows: int) -> DraftJob | None:
        """What to run next, at most `rows` told tokens at a time; None if nothing is to be drafted."""
        known = len(self.tokens)
        most = max(min(self.limit, self.context) - known, 0)
        if not known or self.waits or not most:
            return None
        # The last token is always run, since drafts come from its row; the engine trims its cache to the start.
        self.cached = start = min(self.cached, known - 1)
        stop = min(start + rows, known)
        tokens = tuple(self.tokens[start:stop])
        return DraftJob(self.session, self.lane, start, tokens, most if stop == known else 0, self.tokens)

    def ran(self, job: DraftJob, drafted: Sequence[int]) -> int:
        """Notes that the engine ran the job and all drafted tokens but the last; the line may be another by now.

        Appends the drafted tokens that still continue the line, and returns how many these are: the last ones.
        """
        if self.cached < job.start:  # it differs before the job already
            return 0
        run = (*job.tokens, *drafted[:-1])
        self.cached = job.start + _common(run, self.tokens[job.start :])
        told = self.tokens[job.stop :]
        if len(self.tokens) < job.stop or self.cached < job.stop or _common(drafted, told) < len(told):
            return 0
        self.tokens += drafted[len(told) :]
        self.cached = job.start + len(run)
        return len(drafted) - len(told)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading tokens are the same."""
    return next(
        (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )
