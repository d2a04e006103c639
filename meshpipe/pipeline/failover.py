"""Failover: keeps a way to the stages, and forms it anew when it is lost, for as long as the pipeline is open.

What is lost is noticed by the links: at once when a connection ends, by heartbeats when it falls silent, by the
sessions when no reply comes. Then the same stages are tried first, with little patience if there are others; the
stage that cannot be reached gives way to the next of its standbys, in turn, and after a round of all its places
there is a pause that doubles. Nobody goes back from a standby that works. Meanwhile stages of this process's own may
serve (`meshpipe.pipeline.fallback`): they are a way like any other, until that to the others is whole again.

Which stage gives way is what everything hangs on: blame for the wrong one leaves the dead one where it is. So an error
names the stage, if it is known which; else it is the one whose loss was told during the attempt; and where nobody
knows (time ran out), it is each in turn, beginning with the one that was lost. A loss that is told while the way is
being formed fails the attempt, even if all stages have answered: it will not be told again.

A broken way is hopeful, so that new requests wait for it, until some stage has been looked for in vain at all of its
places, and as long as all stages of an attempt have answered, or a fallback is to come.

The stages that take over must be able to do what those before did (model, lanes, context, rows). Whether they
compute the same bits is what their fingerprints say; sessions put that into their reports.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from itertools import count

import trio
from attrs import frozen

from meshpipe.actors.scope import owned_nursery
from meshpipe.errors import ActorGoneError, HandshakeError, MeshpipeError, StageLostError
from meshpipe.messages import Echo, StageDescriptor
from meshpipe.pipeline.request import session_mailbox
from meshpipe.pipeline.route import Sender
from meshpipe.pipeline.sink import ReturnSink
from meshpipe.pipeline.way import Way
from meshpipe.topology.layout import StagePlace
from meshpipe.wire.endpoints import STEADY, WARM_UP

log = logging.getLogger("meshpipe.failover")

QUICK = 1.0
"""Seconds of patience, and ten times the links' delay, with a lost stage that others can replace."""
HOPELESS = 2
"""Attempts that run out of time before a stage of this process's own is started anew."""
PAUSES = (0.05, 2.0)
"""Seconds between rounds of attempts: at first, and at most."""
HERE_AFTER = 2.0
"""Seconds for which a way has been broken, and a round of attempts, before this process serves by itself."""
HYSTERESIS = 1.25
"""By how much a pipeline that is formed anew may exceed the limit of its round trip."""


@frozen
class Joined:
    """Stages that are joined: the way in, what they are, and the seconds of a round trip over all of them."""

    first: Sender
    descriptors: tuple[StageDescriptor, ...]
    round_trip: float


@frozen
class Attempt:
    """What is to be joined: a place for every stage; `patience` in seconds; `incarnation` counts attempts.

    `answered` is to be called when all stages have been reached, and what is left is to be made ready.
    """

    places: tuple[StagePlace, ...]
    patience: float
    incarnation: int
    answered: Callable[[], None] = lambda: None


Join = Callable[[Attempt], AbstractAsyncContextManager[Joined]]
"""Joins the stages, holds them joined as long as the context lasts. Raises MeshpipeError, with the stage if known."""


Here = Callable[[Sequence[StageDescriptor]], AbstractAsyncContextManager[Joined]]
"""Joins stages of this process's own that can stand for those. Raises MeshpipeError."""


class Candidates:
    """Which of its places each stage is tried at. `places` may change between two calls."""

    def __init__(self, places: Callable[[], Sequence[StagePlace]]) -> None:
        self._places = places
        self._turns = [0] * len(places())

    def chosen(self) -> tuple[StagePlace, ...]:
        """A place for every stage."""
        places = [place.choices for place in self._places()]
        return tuple(choices[turn % len(choices)] for choices, turn in zip(places, self._turns, strict=True))

    def turn(self, stage: int) -> int:
        """Which of its places the stage is tried at, from 0."""
        return self._turns[stage] % self.count(stage)

    def count(self, stage: int) -> int:
        """How many places the stage has."""
        return len(self._places()[stage].choices) if 0 <= stage < len(self._turns) else 1

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return len(self._turns)

    @property
    def standbys(self) -> int:
        """How many there are, of all stages."""
        return sum(len(place.choices) - 1 for place in self._places())

    def blame(self, stage: int) -> None:
        """The stage could not be reached where it was looked for: the next place is its turn."""
        if 0 <= stage < len(self._turns):
            self._turns[stage] += 1


class Failover:
    """Keeps `way` up; `run` it as long as the pipeline is open.

    `adopt` is told of stages that have taken over, before sessions use them: their descriptors, the round trip,
    and whether their caches may hold what they held. `on_hang` is told of a stage that has let `HOPELESS` attempts
    run out of time. `max_round_trip`: seconds that a round trip may take when
    the pipeline is formed (never later: jitter ends no session). `same_bits`: only stages that compute alike may take
    over. `here`: what serves while no others can be joined.
    """

    def __init__(
        self,
        way: Way,
        places: Callable[[], Sequence[StagePlace]],
        join: Join,
        *,
        max_round_trip: float | None = None,
        on_hang: Callable[[int], None] = lambda stage: None,
        same_bits: bool = False,
        here: Here | None = None,
    ) -> None:
        self.way = way
        self.serves_here = False
        """Whether the way leads to this process's own stages."""
        self.adopt: Callable[[Sequence[StageDescriptor], float, bool], None] = lambda *_: None
        self._candidates = Candidates(places)
        self._join = join
        self._max_round_trip = max_round_trip
        self._on_hang = on_hang
        self._same_bits = same_bits
        self._here = here
        self._not_here = trio.CancelScope()  # ends what serves here, if anything does
        self._loads_here = False  # or serves, or is being closed
        self._caches_elsewhere = False
        self._lost = trio.Event()
        self._suspect = 0
        self._told: StageLostError | None = None  # the first loss during the attempt at hand
        self._in_vain: Counter[int] = Counter()  # by stage: attempts that failed for it since the way broke
        self._answered = False  # all stages of the attempt at hand
        self._here_to_come = False
        way.give_up = self._given_up
        way.hopeful = self._hopeful

    def lost(self, stage: int, reason: str) -> None:
        """A stage, or the link to it, is gone; the first word of it counts."""
        if not self.way.up or self.serves_here:
            if self._told is None:
                self._told = StageLostError(f"stage {stage}: {reason}")
                self._told.stage = stage
            return
        log.warning("stage %d is lost: %s", stage, reason)
        self._suspect = stage
        self._in_vain.clear()
        self._here_to_come = self._here is not None
        self.way.broke(f"stage {stage}: {reason}")
        self._lost.set()

    def _given_up(self, reason: str, stage: int | None) -> None:
        """See `Way.give_up`: who waits in vain for what serves here knows nothing of those that are to be joined."""
        if self.way.up and not self.serves_here:
            self.lost(self._suspect if stage is None else stage, reason)

    def _hopeful(self) -> bool:
        """See `Way.hopeful`."""
        missing = any(tries >= self._candidates.count(stage) for stage, tries in self._in_vain.items())
        return not missing or self._answered or self._here_to_come

    async def run(self, *, task_status: trio.TaskStatus[Joined] = trio.TASK_STATUS_IGNORED) -> None:
        """Forms the way, starts with what it joined, and from then on forms it anew until cancelled.

        Raises what joining raises if the way cannot be formed the first time, of whatever places.
        """
        incarnations = count()
        try:
            async with owned_nursery() as nursery:
                known = await self._form_first(incarnations, task_status)
                while True:
                    known = await self._form_again(incarnations, known, nursery)
        finally:
            self.way.close()

    async def _form_first(self, incarnations: count[int], task_status: trio.TaskStatus[Joined]) -> Joined:
        """Tries once, and once more for each standby; what a stage without any lacks is an error at once."""
        left = self._candidates.standbys
        while True:
            try:
                return await self._hold(next(incarnations), WARM_UP, None, task_status)
            except MeshpipeError as error:
                stage = error.stage or 0
                if not left or self.way.generation or self._candidates.count(stage) == 1:
                    raise
                log.warning("stage %d is looked for elsewhere: %s", stage, error)
                self._candidates.blame(stage)
                left -= 1

    async def _form_again(self, incarnations: count[int], known: Joined, nursery: trio.Nursery) -> Joined:
        """Tries until the way was up once more, and lost again."""
        delay = 10 * known.round_trip
        patience = (QUICK if self._candidates.count(self._suspect) > 1 else STEADY) + delay
        pause, longest = PAUSES
        hung: Counter[int] = Counter()
        here, lost = self._here, self.way.reason
        found: dict[tuple[int, int], str] = {}  # what was wrong with each place of late
        while True:
            began = trio.current_time()
            try:
                return await self._hold(next(incarnations), patience, known)
            except MeshpipeError as error:
                stage = self._to_blame(error)
                log.info("not joined again yet, for stage %d: %s", stage, error)
                found[stage, self._candidates.turn(stage)] = str(error)
                if not self.way.up:
                    self.way.reason = f"{lost}; looked for anew: {'; '.join(found.values())}"
                self._candidates.blame(stage)
                self._in_vain[stage] += 1
                hung[stage] += trio.current_time() - began >= patience / 2
                if hung[stage] == HOPELESS:
                    self._on_hang(stage)
                    hung[stage] = 0
            finally:
                self._answered = False
            patience = STEADY + delay
            choices = self._candidates.count(stage)
            due = trio.current_time() - self.way.since > HERE_AFTER and self._in_vain[stage] >= choices
            if here is not None and due and not self._loads_here:
                self._not_here, self._loads_here = trio.CancelScope(), True
                nursery.start_soon(self._serve_here, here, known, self._not_here)
                here = None
            self.way.reconsider()
            if self._in_vain[stage] % choices == 0:
                await trio.sleep(pause)
                pause = min(longest, 2 * pause)

    def _to_blame(self, error: MeshpipeError) -> int:
        """The stage for which an attempt has failed; see the top of this file. Peers may name one that there is not."""
        stages = self._candidates.stages
        for stage in (error.stage, None if self._told is None else self._told.stage):
            if stage is not None and 0 <= stage < stages:
                return stage
        suspect = self._suspect % stages
        self._suspect = (suspect + 1) % stages
        return suspect

    async def _hold(
        self,
        incarnation: int,
        patience: float,
        known: Joined | None,
        task_status: trio.TaskStatus[Joined] = trio.TASK_STATUS_IGNORED,
    ) -> Joined:
        """Joins the stages once and holds them until one is lost; returns what was joined."""
        self._told = None

        def answered() -> None:
            self._answered = True

        async with self._join(Attempt(self._candidates.chosen(), patience, incarnation, answered)) as joined:
            if self._told is not None:
                raise self._told
            self._check_round_trip(joined, again=known is not None)
            same = False
            if known is not None:
                check_successors(known.descriptors, joined.descriptors, same_bits=self._same_bits)
                same = _instances(known) == _instances(joined) and not self._caches_elsewhere
                self.adopt(joined.descriptors, joined.round_trip, same)
                log.warning("the stages are joined again")
            self._lost = trio.Event()
            self.serves_here = self._caches_elsewhere = False
            self.way.formed(joined.first, same_caches=same, fingerprints=_fingerprints(joined))
            self._not_here.cancel()
            task_status.started(joined)
            await self._lost.wait()
        return joined

    async def _serve_here(self, here: Here, known: Joined, scope: trio.CancelScope) -> None:
        """Stages of this process are the way until others are joined again, or they cannot be had.

        Loading cannot be broken off: it may go on for a while after `scope` was cancelled.
        """
        log.warning("no other stages are found: loading the model here")
        try:
            with scope:
                async with here(known.descriptors) as joined:
                    await trio.lowlevel.checkpoint_if_cancelled()  # others may have been quicker than loading
                    check_successors(known.descriptors, joined.descriptors, same_bits=self._same_bits)
                    self.adopt(joined.descriptors, joined.round_trip, False)
                    self.serves_here = self._caches_elsewhere = True
                    self.way.formed(joined.first, fingerprints=_fingerprints(joined))
                    log.warning("serving from here until the stages are joined again")
                    await trio.sleep_forever()
        except MeshpipeError as error:
            log.warning("cannot serve from here meanwhile: %s", error)
            self._here_to_come = False
            self.way.reconsider()
        finally:
            self._loads_here = False

    def _check_round_trip(self, joined: Joined, *, again: bool) -> None:
        limit = self._max_round_trip
        if limit is not None and joined.round_trip > limit * (HYSTERESIS if again else 1.0):
            raise StageLostError(
                f"a round trip over the stages takes {joined.round_trip * 1000:.0f} ms; the limit is "
                f"{limit * 1000:.0f} ms: take stages that are nearer, or allow more"
            )


def check_successors(
    before: Sequence[StageDescriptor], now: Sequence[StageDescriptor], *, same_bits: bool = False
) -> None:
    """Whether stages can take over from others; raises HandshakeError with the stage that cannot.

    `same_bits`: their fingerprints have to agree. The handshake has seen to model, lanes and context.
    """
    for stage, (old, new) in enumerate(zip(before, now, strict=True)):
        if same_bits and new.fingerprint != old.fingerprint:
            error = HandshakeError(
                f"stage {stage} may not take over: its fingerprint is {new.fingerprint!r}, that of the one before is "
                f"{old.fingerprint!r}, so that its bits may differ; start it on a like machine with the same options, "
                "or allow it (same_bits)"
            )
            error.stage = stage
            raise error
        if new.layers != old.layers or new.most_rows < old.most_rows or new.mtp < old.mtp:
            error = HandshakeError(
                f"stage {stage} cannot take over: it has layers {new.layers[0]}:{new.layers[1]}, decodes of up to "
                f"{new.most_rows} rows and {new.mtp} NextN heads, the one before had "
                f"{old.layers[0]}:{old.layers[1]}, {old.most_rows} and {old.mtp}"
            )
            error.stage = stage
            raise error


def _fingerprints(joined: Joined) -> tuple[str, ...]:
    return tuple(descriptor.fingerprint for descriptor in joined.descriptors)


def _instances(joined: Joined) -> list[str]:
    return [descriptor.instance for descriptor in joined.descriptors]


async def round_trip(first: Sender, sink: ReturnSink, number: int, deadline: float) -> float:
    """Seconds that a message takes to the last stage and back the way that replies come.

    `number` is nobody else's. Raises StageLostError after `deadline` seconds.
    """
    mailbox = session_mailbox()
    sink.register(number, mailbox.ref)
    began = trio.current_time()
    try:
        with trio.fail_after(deadline):
            await first.send(Echo(number))
            await mailbox.receive()
            return trio.current_time() - began
    except (trio.TooSlowError, ActorGoneError):
        raise StageLostError(f"no answer from the last stage within {deadline:g} s") from None
    finally:
        sink.forget(number)
