"""The ledger of a session's verify windows: what is final, what is in flight, what a reply commits.

It knows no clock, no channel and no model. It is told a prompt, proposals and replies; it gives windows and
commits, and it alone decides what is accepted. Everything that is about order lives here, so that tests can
attack it alone and so that every pipeline (in one process, over a network, simulated) shares it.

The rules, with `n` committed tokens, that is, the frontier at `n`:

1.  Positions `0 … n-1` are final. The token at `n-1` need not have been run yet; it is the *input*. After
    it stands the optimistic suffix: proposed tokens, of which a head was dispatched and the rest was not.
2.  Windows are cut off this line of tokens from left to right, without gap or overlap. Inside an epoch, a
    window starts where the one before it stopped. A window that starts at `n-1` with nothing in flight is
    the mandatory one: it needs no speculation, and `credits`, where they are set, cannot forbid it. Any
    other carries only optimistic tokens.
3.  A proposal counts only in its own epoch and is anchored at an absolute position. What it repeats of the
    committed tokens and of the suffix must be equal (it is then cut off), else all of it is dropped. It may
    not leave a gap: to start beyond every position that the suffix or a proposal has reached in this epoch
    is an error. (A smaller gap is honest: what stood there was dropped while the proposal was on its way.
    It is ignored.)
4.  A reply's tokens are the model's choices for the positions after its window's rows. They are walked from
    the frontier on, each one is committed, and each is compared with what stands in the suffix at that
    position:
      - equal: accepted; on to the next;
      - a dispatched token that differs: what was committed is the *correction*. The session has diverged:
        the epoch rises, all in flight is stale, the suffix is forgotten, and the next window starts at the
        correction;
      - an undispatched token that differs: the undispatched tokens are dropped and the epoch stays, since
        nothing that was sent is wrong;
      - nothing stands there: a *free* token; it becomes the input.
    So the last row of a window is checked against the first token of the window after it.
5.  Replies retire in dispatch order. One that comes before its turn is held, at most one for each window in
    flight. One of an older epoch is late, one that was seen before is a duplicate: both only count. What no
    correct stage can say is a `ProtocolError`, and leaves the ledger as it was: another session, an epoch
    that has not begun, a window that was never sent or wants no reply, rows that the window did not ask
    for, or fewer rows than it asked for unless the last of them is the first that differs from the window.
6.  Positions are *confirmed* once a reply that was computed after them has retired: it crossed every stage,
    and stages drop windows monotonically (having dropped one of an epoch they drop all later ones of it),
    so every stage's cache reaches up to there. No epoch starts above the confirmed positions. Stages trim
    their cache to a window's start before they run it, which is all the repair there is.
7.  When a reply is lost for good, `reroute` raises the epoch and dispatches again from the confirmed
    positions: from the input as a rule, from the end of the cached prefix if not even the prompt was
    confirmed. The suffix stays, since nothing says that it is wrong. When caches are lost (a stage died, or
    the session moves to another lane), `resume` does the same from as far as the caches still reach.
8.  Committed tokens that are more than the input and not yet run (a prompt, or a resumed session) go out as
    *prefill* windows: no wider than `prefill_width`, not bounded by `credits`, wanting no reply except one
    row of the last. Speculation may follow the last one at once.
9.  The session finishes at the commit of an end token, of the last token of a stop sequence, of the
    `max_tokens`-th token or of the `context`-th position; nothing after that token is committed. The last
    two are known beforehand, so no token is dispatched whose prediction they would cut off.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from attrs import Factory, define, field, frozen

from meshpipe.errors import CapacityError, ProtocolError, UsageError
from meshpipe.messages import Discard, Proposal, Reply, Window


def _stop_sequences(sequences: Iterable[Iterable[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(sequence) for sequence in sequences)


@frozen
class Limits:
    """What ends a session and what bounds its windows.

    max_tokens: tokens to generate at most, those of a resumed session included.
    context: positions of the lane; prompt and generated tokens together never exceed it.
    end_tokens: tokens that end the output; the one that does is committed.
    stop_sequences: sequences of generated tokens that end the output; committed too.
    prefill_width: tokens of a prefill window at most.
    max_optimistic: tokens of the optimistic suffix at most; longer proposals are cut.

    Raises UsageError for a value that is out of range.
    """

    max_tokens: int
    context: int
    end_tokens: frozenset[int] = frozenset()
    stop_sequences: tuple[tuple[int, ...], ...] = field(default=(), converter=_stop_sequences)
    prefill_width: int = 512
    max_optimistic: int = 1024

    def __attrs_post_init__(self) -> None:
        for name in ("max_tokens", "context", "prefill_width", "max_optimistic"):
            value = getattr(self, name)
            if value < 1:
                raise UsageError(f"{name} is {value}; it must be at least 1")
        if () in self.stop_sequences:
            raise UsageError("stop_sequences holds an empty sequence; leave it out, or give it a token")


@frozen
class Commit:
    """What one retired reply made final.

    number, width: of the window that was answered; `width` counts the rows that wanted a pick.
    start: position of the first committed token.
    tokens: the committed tokens, at least one; the first of them is always at the old frontier.
    sources: for each token the source whose proposal foresaw it; None for a correction or a free token, which
        only the last token can be.
    diverged: the last token is a correction.
    dropped: undispatched proposed tokens that were forgotten. A proposer that ran ahead has to begin again
        at the frontier when `diverged or dropped`.
    stale_windows, stale_tokens: what was in flight and is of no more use, prefill windows included.
    discard: the hint to send to the stages; None when nothing became stale.
    epoch: the session's epoch from now on.
    finished: why the session ended with this commit, or None.
    """

    number: int
    width: int
    start: int
    tokens: tuple[int, ...]
    sources: tuple[str | None, ...]
    diverged: bool
    dropped: int
    stale_windows: int
    stale_tokens: int
    discard: Discard | None
    epoch: int
    finished: str | None

    @property
    def accepted(self) -> int:
        """How many of the tokens a proposal foresaw."""
        return len(self.sources) - self.sources.count(None)


@define
class Tally:
    """Of proposed tokens: `dispatched` in a window, `judged` by a commit at their position, `accepted` by it.

    accepted / judged is the probability that a token is right, given that all before it were;
    accepted / dispatched is the share of dispatched tokens that became output.
    """

    dispatched: int = 0
    judged: int = 0
    accepted: int = 0


@define
class Counters:
    """What happened to a session so far; for metrics and policies, the ledger itself never reads it.

    `distances` counts dispatched tokens by their distance from the frontier (0: the next position) when they
    were last dispatched; `sources` counts all by proposer, undispatched ones that met a commit too.
    """

    windows: int = 0
    tokens: int = 0
    stale_windows: int = 0
    stale_tokens: int = 0
    divergences: int = 0
    reroutes: int = 0
    resumes: int = 0
    late: int = 0
    duplicates: int = 0
    ignored_proposals: int = 0
    sources: dict[str, Tally] = Factory(dict)
    distances: dict[int, Tally] = Factory(dict)


@define
class _Draft:
    """A token of the optimistic suffix; `distance` from the frontier at its last dispatch (0 before)."""

    token: int
    source: str
    distance: int = 0


class Ledger:
    """One session's tokens and windows, under the rules at the top of this file.

    session: the number that windows, replies and proposals carry. A ledger that is made to go on with what
        another has `generated` needs a new number, so that what is left of the old life cannot be mistaken
        for the new one; `resume` keeps the number and raises the epoch instead.
    prompt: at least one token.
    cached: leading positions that every stage's cache already holds; at least the last token must be run.
    generated: tokens that an earlier ledger committed after this prompt; they are run again as prefill,
        count towards `max_tokens`, and are not committed twice.

    Every call costs time in proportion to the tokens it takes or gives (and the bounded suffix), never to
    the length of the context.

    Raises UsageError for an empty prompt or a wrong `cached` or `generated`, CapacityError if the context
    leaves no room for output.
    """

    def __init__(
        self,
        session: int,
        prompt: Sequence[int],
        limits: Limits,
        *,
        cached: int = 0,
        generated: Sequence[int] = (),
    ) -> None:
        if not prompt:
            raise UsageError("the prompt is empty; the model needs at least one token to continue")
        if len(prompt) >= limits.context:
            raise CapacityError(
                f"the prompt has {len(prompt)} tokens and the context {limits.context}; "
                "the prompt must be shorter, to leave room for output"
            )
        if not 0 <= cached < len(prompt) + len(generated):
            raise UsageError(
                f"cached is {cached}; with {len(prompt)} prompt and {len(generated)} generated tokens it "
                f"must be in 0 … {len(prompt) + len(generated) - 1}, so that at least one token is run"
            )
        self.session = session
        self.limits = limits
        self.epoch = 0
        self.finished: str | None = None
        """Why the session ended: "end", "stop", "length", "context" or what `finish` was told; else None."""
        self.counters = Counters()
        self._credits: int | None = None
        self._prompt_length = len(prompt)
        self._end = min(len(prompt) + limits.max_tokens, limits.context)  # the frontier never passes it
        self._committed = list(prompt)
        self._suffix: list[_Draft] = []
        self._windows: deque[Window] = deque()  # of this epoch, not retired; prefill windows included
        self._held: dict[int, Reply] = {}  # by window number, waiting for their turn
        self._sent = self._confirmed = cached  # where the next window starts; rule 6
        self._reach = 0  # the highest position that suffix or proposals reached in this epoch
        self._next_number = 0
        self._first_due = 0  # number of the epoch's first window that wants a reply
        self._due = 0  # number of the window whose reply retires next
        for token in generated:
            if self.finished is not None:
                raise UsageError(
                    f"generated has {len(generated)} tokens, but the session ended ({self.finished}) "
                    f"after {self.generated}; resume only a session that has not ended"
                )
            self._append(token)

    # What stands where.

    @property
    def committed(self) -> Sequence[int]:
        """The final tokens, prompt and output, by position: the live list, not a copy; it only grows."""
        return self._committed

    @property
    def frontier(self) -> int:
        """Number of committed tokens: the position that the next commit fills."""
        return len(self._committed)

    @property
    def generated(self) -> int:
        """Number of committed tokens after the prompt."""
        return len(self._committed) - self._prompt_length

    @property
    def end(self) -> int:
        """The number of committed tokens at which `max_tokens` or the context ends the session."""
        return self._end

    @property
    def optimistic(self) -> tuple[int, ...]:
        """The suffix: tokens from the frontier on that are dispatched or proposed but not committed."""
        return tuple(draft.token for draft in self._suffix)

    @property
    def horizon(self) -> int:
        """The position after the last optimistic token: where a new proposal starts."""
        return len(self._committed) + len(self._suffix)

    @property
    def confirmed(self) -> int:
        """Positions that every stage's cache is known to reach, with final tokens (rule 6)."""
        return self._confirmed

    @property
    def undispatched(self) -> int:
        """Number of tokens that wait for a window: what is left to prefill, the input, proposals."""
        return self.horizon - self._sent

    @property
    def prefilling(self) -> bool:
        """Whether the next window is a prefill window."""
        return self.finished is None and self._sent < self.frontier - 1

    @property
    def in_flight(self) -> int:
        """Number of this epoch's windows whose reply has not retired (not those that want none)."""
        return self._next_number - self._due

    @property
    def credits(self) -> int | None:
        """How many windows may be in flight, the mandatory one included: at least 1; None: whoever asks decides.

        Lowering it takes nothing back; no further window is given until enough replies have retired.
        """
        return self._credits

    @credits.setter
    def credits(self, credits: int | None) -> None:
        if credits is not None and credits < 1:
            raise UsageError(f"credits is {credits}; it must be at least 1, for the mandatory window")
        self._credits = credits

    # What goes out.

    def next_window(self, width: int) -> Window | None:
        """The next window to send, in dispatch order; None if there is nothing to send, or no credit for it.

        Prefill windows come first; for them `prefill_width` is the bound and neither `width` nor `credits`
        (`prefilling` says beforehand which kind comes). A verify window has at most `width` tokens.

        Raises UsageError if `width` is below 1.
        """
        if width < 1:
            raise UsageError(f"a window's width is {width}; it must be at least 1")
        if self.finished is not None:
            return None
        start, frontier = self._sent, self.frontier
        if self.prefilling:
            stop = min(start + self.limits.prefill_width, frontier)
            tokens = self._committed[start:stop]
            wanted = 1 if stop == frontier else 0
        else:
            stop = min(start + width, self.horizon)
            if stop == start or (self._credits is not None and self.in_flight >= self._credits):
                return None
            drafts = self._suffix[max(start - frontier, 0) : stop - frontier]
            for position, draft in enumerate(drafts, max(start, frontier)):
                draft.distance = position - frontier
                self._source(draft.source).dispatched += 1
                self._distance(draft.distance).dispatched += 1
            tokens = self._committed[start:frontier] + [draft.token for draft in drafts]
            wanted = len(tokens)
        window = Window(self.session, self.epoch, self._next_number, start, tuple(tokens), wanted)
        self._windows.append(window)
        self._sent = stop
        self._next_number += 1
        if not wanted:
            self._first_due = self._due = self._next_number
        self.counters.windows += 1
        self.counters.tokens += window.width
        return window

    # What comes in.

    def propose(self, proposal: Proposal) -> int:
        """Adds a proposal to the optimistic suffix; returns how many tokens it lengthened it by.

        Raises ProtocolError for another session's proposal and for one that leaves a gap.
        """
        if proposal.session != self.session:
            raise ProtocolError(f"a proposal for session {proposal.session} came to session {self.session}")
        if self.finished is not None or proposal.epoch != self.epoch:
            self.counters.ignored_proposals += 1
            return 0
        reach = max(self._reach, self.horizon)
        if not 0 <= proposal.start <= reach:
            raise ProtocolError(
                f"a proposal of {proposal.source!r} starts at position {proposal.start}; the tokens known or "
                f"proposed in epoch {self.epoch} reach up to {reach}, and it must start there or below"
            )
        self._reach = max(reach, proposal.start + len(proposal.tokens))
        known = self.horizon - proposal.start
        repeated = enumerate(proposal.tokens[: max(known, 0)], proposal.start)
        if known < 0 or any(self._token(position) != token for position, token in repeated):
            self.counters.ignored_proposals += 1
            return 0
        # The last token before the end is committed but never run, so a guess at it is of no use.
        room = min(self._end - 1 - self.horizon, self.limits.max_optimistic - len(self._suffix))
        fresh = proposal.tokens[known : known + max(room, 0)]
        self._suffix.extend(_Draft(token, proposal.source) for token in fresh)
        return len(fresh)

    def receive(self, reply: Reply) -> tuple[Commit, ...]:
        """Takes a reply; returns a commit for each window that retires with it, in dispatch order.

        That is none for one that is held, late or a duplicate, and several for one that others waited for.
        Raises ProtocolError, and changes nothing, for a reply that cannot be true (rule 5).
        """
        if reply.session != self.session:
            raise ProtocolError(f"a reply for session {reply.session} came to session {self.session}")
        if reply.epoch < self.epoch:
            self.counters.late += 1
            return ()
        self._check(reply)
        if reply.number < self._due or reply.number in self._held:
            self.counters.duplicates += 1
            return ()
        self._held[reply.number] = reply
        commits = []
        while (ready := self._held.pop(self._due, None)) is not None:
            commits.append(self._retire(ready))
        return tuple(commits)

    def reroute(self) -> Discard | None:
        """To be called when a reply is lost for good (its route failed): dispatches again in a new epoch.

        Returns the hint for the stages; None if the session is finished and nothing has to be done.
        """
        if self.finished is not None:
            return None
        self.counters.reroutes += 1
        self._raise_epoch()
        return Discard(self.session, self.epoch)

    def resume(self, cached: int = 0) -> Discard | None:
        """To be called when caches are lost: in a new epoch, runs the committed tokens from `cached` on again.

        `cached` leading positions are held by every stage's cache for certain. Returns the hint for the stages;
        None if the session is finished and nothing has to be done. Raises UsageError unless `cached` leaves a
        committed token to run.
        """
        if not 0 <= cached < self.frontier:
            raise UsageError(
                f"cached is {cached}; with {self.frontier} committed tokens it must be in 0 … {self.frontier - 1}, "
                "so that at least one token is run"
            )
        if self.finished is not None:
            return None
        self.counters.resumes += 1
        self._confirmed = cached
        self._raise_epoch()
        return Discard(self.session, self.epoch)

    def finish(self, reason: str) -> Discard | None:
        """Ends the session from outside (cancelled, a stop string): nothing more is dispatched or committed.

        Returns the hint for the stages if something was in flight. A finished session keeps its reason.
        """
        if self.finished is not None:
            return None
        self.finished = reason
        self._suffix.clear()
        if not self._windows:
            return None
        self._raise_epoch()
        return Discard(self.session, self.epoch)

    # How it is done.

    def _check(self, reply: Reply) -> None:
        """Raises ProtocolError if no correct stage can have sent this reply (not of an older epoch)."""
        said = f"session {self.session}: a reply to window {reply.number} of epoch {reply.epoch}"
        if reply.epoch > self.epoch:
            raise ProtocolError(f"{said} came, but the session is in epoch {self.epoch}")
        if not self._first_due <= reply.number < self._next_number:
            raise ProtocolError(
                f"{said} came, but the windows of that epoch that want a reply are numbered "
                f"from {self._first_due} to below {self._next_number}"
            )
        if reply.number < self._due:
            return  # a duplicate; its window is no longer known
        window = self._windows[reply.number - self._windows[0].number]
        first = window.stop - window.wanted
        if reply.start != first:
            raise ProtocolError(
                f"{said} starts at position {reply.start}; its first wanted row is at {first}"
            )
        count = len(reply.tokens)
        if not 1 <= count <= window.wanted:
            raise ProtocolError(
                f"{said} has {count} rows; the window wants {window.wanted}, at least 1 must come"
            )
        if count < window.wanted:
            following = window.tokens[first + 1 - window.start :]
            if reply.tokens[:-1] != following[: count - 1] or reply.tokens[-1] == following[count - 1]:
                raise ProtocolError(
                    f"{said} has {count} rows of {window.wanted}; a reply may be short only if its last row "
                    "is the first that differs from the window"
                )

    def _retire(self, reply: Reply) -> Commit:
        """Rule 4: walks the reply whose turn it is."""
        window = self._windows.popleft()
        while window.number != reply.number:  # prefill windows, which this reply confirms
            window = self._windows.popleft()
        self._due += 1
        start, horizon = self.frontier, self.horizon
        sources: list[str | None] = []
        diverged = False
        for position, token in enumerate(reply.tokens, start):
            draft = self._suffix[position - start] if position < horizon else None
            agrees = draft is not None and draft.token == token
            if draft is not None:
                self._judge(draft, agrees, dispatched=position < self._sent)
                diverged = not agrees and position < self._sent
            self._append(token)
            sources.append(draft.source if draft is not None and agrees else None)
            if not agrees or self.finished is not None:
                break
        tokens = reply.tokens[: len(sources)]
        self._confirmed = self.frontier - 1
        accepted = len(sources) - sources.count(None)
        dropped = stale_windows = stale_tokens = 0
        del self._suffix[:accepted]
        if self._suffix and (accepted < len(sources) or self.finished is not None):
            dropped = horizon - max(self._sent, start + accepted)
            self._suffix.clear()
        if diverged or (self.finished is not None and self._windows):
            self.counters.divergences += diverged
            stale_windows, stale_tokens = self._raise_epoch()
        return Commit(
            number=reply.number,
            width=window.wanted,
            start=start,
            tokens=tokens,
            sources=tuple(sources),
            diverged=diverged,
            dropped=dropped,
            stale_windows=stale_windows,
            stale_tokens=stale_tokens,
            discard=Discard(self.session, self.epoch) if stale_windows else None,
            epoch=self.epoch,
            finished=self.finished,
        )

    def _append(self, token: int) -> None:
        """The one place where a token becomes final; rule 9."""
        self._committed.append(token)
        if token in self.limits.end_tokens:
            self.finished = "end"
        elif any(self._ends_with(sequence) for sequence in self.limits.stop_sequences):
            self.finished = "stop"
        elif self.generated == self.limits.max_tokens:
            self.finished = "length"
        elif self.frontier == self.limits.context:
            self.finished = "context"

    def _ends_with(self, sequence: tuple[int, ...]) -> bool:
        """Whether the generated tokens end with the sequence; the prompt takes no part."""
        return (
            self._committed[-1] == sequence[-1]
            and self.generated >= len(sequence)
            and tuple(self._committed[-len(sequence) :]) == sequence
        )

    def _raise_epoch(self) -> tuple[int, int]:
        """Begins a new epoch at the confirmed positions; returns the windows and tokens that became stale."""
        windows, tokens = len(self._windows), sum(window.width for window in self._windows)
        self.counters.stale_windows += windows
        self.counters.stale_tokens += tokens
        self._windows.clear()
        self._held.clear()
        self.epoch += 1
        self._sent = self._confirmed
        self._reach = self.horizon
        self._first_due = self._due = self._next_number
        return windows, tokens

    def _token(self, position: int) -> int:
        ahead = position - self.frontier
        return self._committed[position] if ahead < 0 else self._suffix[ahead].token

    def _source(self, source: str) -> Tally:
        return self.counters.sources.setdefault(source, Tally())

    def _distance(self, distance: int) -> Tally:
        return self.counters.distances.setdefault(distance, Tally())

    def _judge(self, draft: _Draft, agrees: bool, *, dispatched: bool) -> None:
        tallies = [self._source(draft.source)]
        if dispatched:
            tallies.append(self._distance(draft.distance))
        for tally in tallies:
            tally.judged += 1
            tally.accepted += agrees
