"""The ledger against an adversary who owns everything around it.

The adversary chooses the target, what is proposed and when, how wide windows are, how many credits there
are, which stage runs or drops which window and when, and which replies come: early, late, twice, shortened,
forged or never. It cancels, reroutes and resumes. Its stages keep caches of hashes in which each entry
depends on all that was run before it, so that a hole or a left-over in any cache changes the text. What the
ledger commits must be the target's serial text all the same, and whatever happened, there must be a way on.
"""

from __future__ import annotations

import copy
import itertools
from collections import deque
from collections.abc import Sequence
from random import Random

import pytest
from attrs import Factory, define, evolve, frozen
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from meshpipe.errors import ProtocolError
from meshpipe.messages import Proposal, Reply, Window
from meshpipe.speculation.ledger import Ledger, Limits

END = 9
"""The end token; the others are 0 … vocabulary - 1."""


@frozen
class Target:
    """A model: a pure function of the tokens before, computed stage by stage like the real one."""

    seed: int
    vocabulary: int
    stages: int

    def layer(self, stage: int, before: int, row: int) -> int:
        """A stage's activation for a row, given its cache's last entry before that row."""
        return hash((self.seed, stage, before, row))

    def pick(self, row: int) -> int:
        return END if row % 97 == 0 else row % self.vocabulary

    def serial(self, prompt: Sequence[int], length: int) -> tuple[list[int], list[list[int]]]:
        """The prompt and its continuation, one position at a time, as if no token ever ended it.

        Also what that leaves in the cache of each stage.
        """
        text, caches = list(prompt), [[0] for _ in range(self.stages)]
        for position in range(length):
            row = text[position]
            for stage, cache in enumerate(caches):
                row = self.layer(stage, cache[-1], row)
                cache.append(row)
            if position + 1 == len(text):
                text.append(self.pick(row))
        return text, [cache[1:] for cache in caches]


@define
class Stage:
    """One stage's cache of a lane, its queue, and the epochs of which it dropped a window."""

    target: Target
    index: int
    cache: list[int] = Factory(list)
    queue: deque[tuple[Window, list[int]]] = Factory(deque)
    dropped: set[int] = Factory(set)
    expected: tuple[int, int, int] | None = None
    """At the last stage: epoch, position and value of its newest pick."""

    def run(self, window: Window, rows: list[int]) -> list[int]:
        assert window.start <= len(self.cache), "a window starts above the cache's length"
        del self.cache[window.start :]
        for row in rows:
            before = self.cache[-1] if self.cache else 0
            self.cache.append(self.target.layer(self.index, before, row))
        return self.cache[window.start :]


class World:
    """One ledger, its stages, what is on the wire, and what a naive observer expects of them."""

    def __init__(
        self,
        target: Target,
        prompt: list[int],
        limits: Limits,
        *,
        session: int = 0,
        cached: int = 0,
        junk: int = 0,
        generated: Sequence[int] = (),
    ) -> None:
        self.target, self.prompt, self.limits = target, prompt, limits
        self.text, self.caches = target.serial(prompt, limits.context + 60)
        self.end = self.find_end()
        self.ledger = Ledger(session, prompt, limits, cached=cached, generated=generated)
        self.stages = [Stage(target, index) for index in range(target.stages)]
        # The cached prefix, and behind it what an earlier session of the lane left there.
        rows = self.text[:cached] + [1] * junk
        prefix = Window(session, 0, 0, 0, tuple(rows), 0)
        for stage in self.stages:
            rows = stage.run(prefix, rows)
        self.emitted = list(generated)
        self.sent: dict[int, Window] = {}  # all windows by number
        self.open: dict[int, Window] = {}  # of this epoch, not retired, in dispatch order
        self.wire: list[Reply] = []  # replies on their way
        self.answered: set[int] = set()  # windows whose genuine reply arrived
        self.sources: dict[int, str] = {}  # by position
        self.confirmed = cached  # every stage's cache holds the committed tokens up to there
        self.reach = 0
        self.late = self.duplicates = self.stale = self.stale_tokens = self.sent_tokens = 0

    # The observer.

    @property
    def due(self) -> int:
        """Windows in flight, counted without the ledger's help."""
        return sum(1 for window in self.open.values() if window.wanted)

    def find_end(self) -> tuple[int, str]:
        """Where serial decoding ends, and why."""
        limits, start = self.limits, len(self.prompt)
        for stop in range(start + 1, len(self.text) + 1):
            output = self.text[start:stop]
            if output[-1] in limits.end_tokens:
                return stop, "end"
            if any(tuple(output[-len(s) :]) == s for s in limits.stop_sequences):
                return stop, "stop"
            if len(output) == limits.max_tokens:
                return stop, "length"
            if stop == limits.context:
                return stop, "context"
        raise AssertionError("the text is too short")

    def new_epoch(self, epoch: int) -> None:
        """Checks that the ledger has just raised its epoch to `epoch`."""
        assert self.ledger.epoch == epoch
        self.stale += len(self.open)
        self.stale_tokens += sum(window.width for window in self.open.values())
        self.open.clear()
        self.reach = self.ledger.horizon

    def check(self) -> None:
        ledger = self.ledger
        frontier = ledger.frontier
        stop, reason = self.end
        assert frontier <= stop
        assert list(ledger.committed) == self.text[:frontier]
        assert self.emitted == self.text[len(self.prompt) : frontier]
        if ledger.finished is None:
            assert frontier < stop
        elif ledger.finished != "cancelled":
            assert (frontier, ledger.finished) == (stop, reason)
        assert ledger.in_flight == self.due
        assert ledger.confirmed == self.confirmed
        for stage, cache in zip(self.stages, self.caches, strict=True):
            assert stage.cache[: self.confirmed] == cache[: self.confirmed]
        assert ledger.horizon == frontier + len(ledger.optimistic)
        assert len(ledger.optimistic) <= self.limits.max_optimistic
        # Windows in flight are one line of tokens with the committed ones and the suffix.
        line = list(ledger.committed) + list(ledger.optimistic)
        windows = list(self.open.values())
        for window, following in itertools.pairwise(windows):
            assert window.stop == following.start
        for window in windows:
            assert line[window.start : window.stop] == list(window.tokens)
        if windows:
            assert windows[-1].stop == ledger.horizon - ledger.undispatched
        assert len(ledger._held) <= ledger.in_flight  # bounded
        counters = ledger.counters
        assert counters.windows == len(self.sent)
        assert counters.tokens == self.sent_tokens
        assert (counters.late, counters.duplicates) == (self.late, self.duplicates)
        assert (counters.stale_windows, counters.stale_tokens) == (self.stale, self.stale_tokens)
        assert sum(tally.dispatched for tally in counters.sources.values()) == sum(
            tally.dispatched for tally in counters.distances.values()
        )

    def fork(self) -> World:
        """A copy that shares only what never changes."""
        constant = (self.text, self.caches, self.target, self.limits, *self.sent.values(), *self.wire)
        return copy.deepcopy(self, {id(value): value for value in constant})

    # What can happen.

    def dispatch(self, width: int) -> bool:
        ledger = self.ledger
        before, credits = self.due, ledger.credits
        start, horizon, prefilling = ledger.horizon - ledger.undispatched, ledger.horizon, ledger.prefilling
        window = ledger.next_window(width)
        if window is None:
            assert ledger.finished is not None or start == horizon or before >= credits
            return False
        assert ledger.finished is None
        assert (window.session, window.epoch, window.start) == (ledger.session, ledger.epoch, start)
        assert window.number == len(self.sent)
        if prefilling:
            assert 1 <= window.width <= self.limits.prefill_width
            assert window.stop <= ledger.frontier
            assert window.wanted == (window.stop == ledger.frontier)
        else:
            assert before < credits
            assert window.wanted == window.width == min(width, horizon - start)
            assert window.stop < self.end_bound
        if all(other.epoch < window.epoch for other in self.sent.values()):
            assert window.start == self.confirmed
        self.sent_tokens += window.width
        self.sent[window.number] = self.open[window.number] = window
        self.stages[0].queue.append((window, list(window.tokens)))
        return True

    @property
    def end_bound(self) -> int:
        return min(len(self.prompt) + self.limits.max_tokens, self.limits.context)

    def step(self, index: int, drop: bool = False, short: bool = False) -> None:
        """A stage takes the next window of its queue and runs it, or drops it if it may (or must)."""
        stage = self.stages[index]
        last = index + 1 == len(self.stages)
        if not stage.queue:
            return
        window, rows = stage.queue.popleft()
        may_drop = window.epoch < self.ledger.epoch
        if last and stage.expected is not None:
            epoch, position, token = stage.expected
            if epoch == window.epoch and (
                position < window.start  # a mismatch inside an earlier window, or that one was dropped
                or (
                    window.start <= position < window.stop and window.tokens[position - window.start] != token
                )
            ):
                may_drop = True
        if window.epoch in stage.dropped or (may_drop and drop):
            stage.dropped.add(window.epoch)
            return
        rows = stage.run(window, rows)
        if not last:
            self.stages[index + 1].queue.append((window, rows))
            return
        if not window.wanted:
            return
        first = window.width - window.wanted
        picks = [self.target.pick(row) for row in rows[first:]]
        agree = 0
        while agree + 1 < window.wanted and picks[agree] == window.tokens[first + agree + 1]:
            agree += 1
        stage.expected = (window.epoch, window.start + first + agree + 1, picks[agree])
        if short:
            picks = picks[: agree + 1]
        self.wire.append(
            Reply(window.session, window.epoch, window.number, window.start + first, tuple(picks))
        )

    def deliver(self, reply: Reply) -> int:
        """Gives a reply to the ledger, checks every commit; returns how many tokens were committed."""
        ledger = self.ledger
        epoch, frontier, suffix, horizon = ledger.epoch, ledger.frontier, ledger.optimistic, ledger.horizon
        dispatched = horizon - ledger.undispatched
        was_finished = ledger.finished
        commits = ledger.receive(reply)
        if reply.epoch < epoch:
            self.late += 1
            assert commits == ()
        elif reply.number in self.answered:
            self.duplicates += 1
            assert commits == ()
        else:
            self.answered.add(reply.number)
            first_due = min(number for number, window in self.open.items() if window.wanted)
            assert bool(commits) == (reply.number == first_due)
        if commits:
            assert was_finished is None
        position = frontier
        for commit in commits:
            window = next(window for window in self.open.values() if window.wanted)
            assert (commit.number, commit.width) == (window.number, window.wanted)  # FIFO, and not stale
            assert window.epoch == epoch
            for number in [number for number in self.open if number <= window.number]:
                del self.open[number]
            assert commit.start == position
            assert 1 <= len(commit.tokens) <= commit.width
            for token, source in zip(commit.tokens, commit.sources, strict=True):
                foreseen = position < horizon and suffix[position - frontier] == token
                assert source == (self.sources[position] if foreseen else None)
                position += 1
            assert commit.accepted == sum(source is not None for source in commit.sources)
            self.emitted.extend(commit.tokens)
            wrong = commit.sources[-1] is None and position <= horizon
            assert commit.diverged == (wrong and position <= dispatched)
            raised = commit.diverged or (commit.finished is not None and bool(self.open))
            stale = len(self.open) if raised else 0
            stale_tokens = sum(window.width for window in self.open.values()) if raised else 0
            assert (commit.stale_windows, commit.stale_tokens) == (stale, stale_tokens)
            kept = position - 1 if wrong else position
            gone = wrong or commit.finished is not None
            assert commit.dropped == (max(horizon - max(dispatched, kept), 0) if gone else 0)
            if raised:
                epoch += 1
                self.new_epoch(epoch)
            assert (commit.discard is not None) == (stale > 0)
            if commit.discard is not None:
                assert (commit.discard.session, commit.discard.epoch) == (ledger.session, epoch)
            if gone:
                assert ledger.optimistic == ()
                assert commit is commits[-1]
            assert commit.epoch == epoch
        if commits:
            self.confirmed = ledger.frontier - 1
            assert commits[-1].finished == ledger.finished
        assert (ledger.epoch, ledger.frontier) == (epoch, position)
        return position - frontier

    def propose(self, start: int, tokens: tuple[int, ...], source: str, epoch: int) -> None:
        ledger = self.ledger
        frontier, horizon, suffix = ledger.frontier, ledger.horizon, ledger.optimistic
        proposal = Proposal(ledger.session, epoch, start, tokens, source)
        self.reach = max(self.reach, horizon)
        live = epoch == ledger.epoch and ledger.finished is None
        if live and not 0 <= start <= self.reach:
            with pytest.raises(ProtocolError, match="must start there or below"):
                ledger.propose(proposal)
            assert ledger.optimistic == suffix
            return
        added = ledger.propose(proposal)
        assert added == ledger.horizon - horizon
        if not live:
            assert added == 0
            return
        self.reach = max(self.reach, start + len(tokens))
        line = list(ledger.committed) + list(suffix)
        known = line[start : start + len(tokens)]
        if start > horizon or list(tokens[: len(known)]) != known:
            assert added == 0
        else:
            fresh = tokens[len(known) :]
            room = min(self.end_bound - 1 - horizon, self.limits.max_optimistic - len(suffix))
            assert added == max(0, min(len(fresh), room))
            assert ledger.optimistic == suffix + fresh[:added]
        assert ledger.frontier == frontier
        for position in range(horizon, horizon + added):
            self.sources[position] = source

    def forge(self, reply: Reply) -> None:
        """Gives the ledger what no correct stage can send: all kinds of it."""
        ledger, window = self.ledger, self.sent[reply.number]
        forged = [
            evolve(reply, session=reply.session + 1),
            evolve(reply, epoch=ledger.epoch + 1),
            evolve(reply, epoch=ledger.epoch, number=len(self.sent)),
        ]
        if ledger.epoch:  # windows of another epoch, windows that want no reply
            forged += [
                evolve(reply, epoch=ledger.epoch, number=other.number)
                for other in self.sent.values()
                if other.epoch < ledger.epoch or not other.wanted
            ]
        if reply.number in self.open and reply.number not in self.answered:
            forged += [
                evolve(reply, start=reply.start + 1),
                evolve(reply, tokens=()),
                evolve(reply, tokens=reply.tokens + (0,) * window.wanted),
            ]
            wrong = [(token + 1) % self.target.vocabulary for token in window.tokens[1:]]
            for count in range(1, window.wanted):
                forged.append(evolve(reply, tokens=window.tokens[1 : count + 1]))
                if count > 1:
                    forged.append(evolve(reply, tokens=tuple(wrong[:count])))
        for reply in forged:
            before = copy.deepcopy(vars(ledger))
            with pytest.raises(ProtocolError):
                ledger.receive(reply)
            assert vars(ledger) == before

    def reroute(self) -> None:
        ledger = self.ledger
        epoch, suffix, finished = ledger.epoch, ledger.optimistic, ledger.finished
        discard = ledger.reroute()
        if finished is not None:
            assert (discard, ledger.epoch) == (None, epoch)
            return
        assert discard is not None
        assert (discard.session, discard.epoch) == (ledger.session, epoch + 1)
        self.new_epoch(epoch + 1)
        assert ledger.optimistic == suffix

    def revive(self, cached: int, junk: int) -> None:
        """The stages are replaced by others, whose caches hold a prefix at most, and rubbish behind it."""
        ledger = self.ledger
        epoch, suffix, finished = ledger.epoch, ledger.optimistic, ledger.finished
        discard = ledger.resume(cached)
        if finished is not None:
            assert (discard, ledger.epoch) == (None, epoch)
            return
        assert discard is not None
        assert (discard.session, discard.epoch) == (ledger.session, epoch + 1)
        self.confirmed = cached
        self.new_epoch(epoch + 1)
        assert ledger.optimistic == suffix
        for stage, cache in zip(self.stages, self.caches, strict=True):
            stage.queue.clear()
            stage.dropped.clear()
            stage.expected = None
            stage.cache = cache[:cached] + [1] * junk

    def cancel(self) -> None:
        ledger = self.ledger
        epoch, finished, pending = ledger.epoch, ledger.finished, bool(self.open)
        discard = ledger.finish("cancelled")
        if finished is not None:
            assert (discard, ledger.epoch, ledger.finished) == (None, epoch, finished)
            return
        assert (discard is not None) == pending
        if discard is not None:
            assert discard.epoch == epoch + 1
            self.new_epoch(epoch + 1)
        assert ledger.finished == "cancelled"
        assert ledger.optimistic == ()
        assert not ledger.prefilling

    def drain(self) -> None:
        """From here on all goes well: whatever happened before, each round commits, until the end."""
        lost = {n for n, w in self.open.items() if w.wanted and n not in self.answered}
        lost -= {reply.number for reply in self.wire}
        lost -= {window.number for stage in self.stages for window, _ in stage.queue}
        if lost:
            self.reroute()
        while self.ledger.finished is None:
            for _ in range(self.limits.context):
                if not self.dispatch(3):
                    break
            for index, stage in enumerate(self.stages):
                while stage.queue:
                    self.step(index)
            committed = 0
            while self.wire:
                committed += self.deliver(self.wire.pop(0))
            assert committed > 0, "no progress"
            self.check()
        assert (self.ledger.frontier, self.ledger.finished) == self.end
        assert not self.dispatch(1)


COMMON = ("propose", "propose", "dispatch", "dispatch", "run_stage", "run_stages", "deliver", "deliver")
RARE = ("lose", "forge", "set_credits", "reroute", "revive", "cancel", "resume")
MOVES = st.tuples(st.sampled_from(3 * COMMON + RARE), st.integers(0, 63), st.integers(0, 63))


class LedgerMachine(RuleBasedStateMachine):
    world: World

    @initialize(
        seed=st.integers(0, 2**16),
        vocabulary=st.integers(2, 4),
        stages=st.integers(1, 4),
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=9),
        cached=st.integers(0, 8),
        junk=st.integers(0, 3),
        max_tokens=st.one_of(st.integers(1, 60), st.just(60)),
        context=st.one_of(st.integers(2, 60), st.just(60)),
        ends=st.booleans(),
        stops=st.lists(st.lists(st.integers(0, 2), min_size=3, max_size=5), max_size=2),
        prefill_width=st.integers(1, 5),
        max_optimistic=st.sampled_from([5, 64]),
        credits=st.integers(1, 5),
    )
    def begin(
        self,
        seed: int,
        vocabulary: int,
        stages: int,
        prompt: list[int],
        cached: int,
        junk: int,
        max_tokens: int,
        context: int,
        ends: bool,
        stops: list[list[int]],
        prefill_width: int,
        max_optimistic: int,
        credits: int,
    ) -> None:
        context = max(context, len(prompt) + 1)
        limits = Limits(
            max_tokens, context, frozenset([END] if ends else []), stops, prefill_width, max_optimistic
        )
        cached = min(cached, len(prompt) - 1)
        self.world = World(Target(seed, vocabulary, stages), prompt, limits, cached=cached, junk=junk)
        self.world.ledger.credits = credits

    @rule(moves=st.lists(MOVES, min_size=1, max_size=20))
    def play(self, moves: list[tuple[str, int, int]]) -> None:
        """Some moves, each a kind and two numbers that say how."""
        for kind, n, m in moves:
            if self.world.ledger.finished is not None and n % 4 == 0:
                self.begin_again(n, m)
            getattr(self, kind)(n, m)
            self.world.check()

    @rule(seed=st.integers(0, 2**32), count=st.integers(10, 80))
    def storm(self, seed: int, count: int) -> None:
        """Many moves at random: hypothesis likes short lists, and deep pipes need long ones."""
        random = Random(seed)
        self.play(
            [
                (
                    random.choice(RARE if random.random() < 0.07 else COMMON),
                    random.randrange(64),
                    random.randrange(64),
                )
                for _ in range(count)
            ]
        )

    def dispatch(self, n: int, m: int) -> None:
        for _ in range(1 + m % 4):
            if not self.world.dispatch(1 + n % 5):
                break

    def propose(self, n: int, m: int) -> None:
        """Mostly right and anchored at the horizon; else overlapping, beyond it, or of another epoch."""
        world = self.world
        right, wrong, overlap = n % 9, (0, 0, 1, 2)[n // 9 % 4], (0, 0, 0, 0, 0, 1, 2, 4, -1, -2)[m % 10]
        start = max(world.ledger.horizon - overlap, 0)
        text = world.text[start : start + right + wrong]
        tokens = text[:right] + [(token + 1) % world.target.vocabulary for token in text[right:]]
        epoch = world.ledger.epoch - (m > 58)
        world.propose(start, tuple(tokens), "mtp" if n < 32 else "ngram", epoch)

    def run_stage(self, n: int, m: int) -> None:
        """Some stage takes some windows; `m` says whether it drops what it may, and shortens replies."""
        index = n % len(self.world.stages)
        for _ in range(1 + n // 4 % 3):
            self.world.step(index, drop=m % 2 == 1, short=m // 2 % 2 == 1)

    def run_stages(self, n: int, m: int) -> None:
        """The first stages take all their windows, so that some reach the end."""
        for index, stage in enumerate(self.world.stages[: 1 + n % 6]):
            while stage.queue:
                self.world.step(index, drop=m % 2 == 1, short=m // 2 % 2 == 1)

    def deliver(self, n: int, m: int) -> None:
        """Any of the replies on the wire, the first more often; if it is kept there, it comes once more."""
        wire = self.world.wire
        if wire:
            reply = wire[max(n - 32, 0) % len(wire)]
            if m % 6:
                wire.remove(reply)
            self.world.deliver(reply)

    def lose(self, n: int, m: int) -> None:
        if self.world.wire:
            del self.world.wire[n % len(self.world.wire)]

    def forge(self, n: int, m: int) -> None:
        if self.world.wire:
            self.world.forge(self.world.wire[n % len(self.world.wire)])

    def set_credits(self, n: int, m: int) -> None:
        self.world.ledger.credits = 1 + n % 5

    def reroute(self, n: int, m: int) -> None:
        self.world.reroute()

    def revive(self, n: int, m: int) -> None:
        """Replies that are on the wire come all the same."""
        self.world.revive(n * m % self.world.ledger.frontier, n % 3)

    def cancel(self, n: int, m: int) -> None:
        if self.world.ledger.generated > n % 40:
            self.world.cancel()

    def resume(self, n: int, m: int) -> None:
        """The lane is lost; a new one goes on from the committed tokens alone."""
        old = self.world
        if old.ledger.finished in (None, "cancelled") and old.ledger.generated > n % 20:
            self.succeed(old.target, list(old.ledger.committed)[len(old.prompt) :], n, m)

    def begin_again(self, n: int, m: int) -> None:
        """After a session that has ended: another text with the same prompt and limits."""
        self.succeed(evolve(self.world.target, seed=64 * m + n), [], n, m)

    def succeed(self, target: Target, generated: list[int], n: int, m: int) -> None:
        old = self.world
        self.world = World(
            target,
            old.prompt,
            old.limits,
            session=old.ledger.session + 1,
            cached=min(m % 16, len(old.prompt) + len(generated) - 1),
            junk=n % 3,
            generated=generated,
        )
        self.world.ledger.credits = 1 + n % 5

    @rule(lose=st.booleans())
    def look_ahead(self, lose: bool) -> None:
        """On a copy of the world: is there a way on? Also if all that is on the wire is lost?"""
        world = self.world.fork()
        if lose:
            world.wire.clear()
        if world.ledger.finished is None:
            world.drain()

    @invariant()
    def holds(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world") and self.world.ledger.finished is None:
            self.world.drain()


def attack(examples: int, steps: int, *, derandomize: bool) -> None:
    run_state_machine_as_test(
        LedgerMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            derandomize=derandomize,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_adversary() -> None:
    attack(120, 20, derandomize=True)


@pytest.mark.slow
@pytest.mark.timeout(900)  # about a minute of computing, on machines that may be busy
def test_adversary_at_length() -> None:
    attack(1000, 15, derandomize=False)
