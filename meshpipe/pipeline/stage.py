"""The stage actor: its mailbox is the queue of windows, its engine runs them, its results travel on.

How a window goes through:

- Messages for one session arrive in order: OpenSession, windows, CloseSession. They wait in the `windows`
  queue. A Discard comes by the `control` queue and so overtakes them; it is looked at even while a decode runs.
- A stale window is dropped unrun. Dropping is monotonic: once an epoch is stale here, every window of it is.
  The last stage sees staleness first: when its pick differs from the next token that was dispatched, inside a
  window or against the first of the next window, the rest of that epoch is stale.
- What can share a decode runs together when that is quicker in the mean (`merging`). Windows of one session stay
  in order; sessions take turns, so that one with many guesses in flight delays the others by one job of its own.
- Verify windows go before prefill windows, but after one turn of every session that has any waiting, one prefill
  window may run. So prompts, however many, stall a session by one window between two turns of its own. Prompts take
  turns too: a short one does not wait for all of a long one.
- An idle stage never waits for company: it runs what is there.
- What the lane's cache holds already is not run again: a window, or the head of one, that says the same tokens at the
  same positions is answered with the rows that were kept (`kept`). So, after a stage was lost, the others run next
  to nothing again.

A window that cannot be run ends its session with a SessionFailed and nothing else.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat

import numpy as np
import trio
from attrs import define, evolve, frozen

from meshpipe.actors import Actor, Mailbox, handles
from meshpipe.actors.scope import owned_nursery
from meshpipe.errors import ActorGoneError, MeshpipeError, UsageError
from meshpipe.messages import (
    CloseSession,
    Discard,
    Echo,
    OpenSession,
    Progress,
    Reply,
    Rows,
    SessionFailed,
    SessionOpened,
    Timing,
    Window,
)
from meshpipe.pipeline.kept import KeptRows
from meshpipe.pipeline.lanes import prefix_digest
from meshpipe.pipeline.merging import merged_count
from meshpipe.pipeline.route import Arrival, Route, RouteLost, Sender, StageMessage, record
from meshpipe.pipeline.runner import Aborted, Job, Picks, Result, Runner
from meshpipe.pipeline.watchdog import Watchdog
from meshpipe.speculation.policy import CostCurve
from meshpipe.telemetry.spans import Kind

log = logging.getLogger("meshpipe.stage")

_NEVER = 2**63
"""Above every epoch: a session whose windows are all stale."""


@define(eq=False)
class _Session:
    """What a stage keeps of a session. `tokens` are by position, as the windows said them."""

    number: int
    route: Route
    lane: int
    tokens: list[int]
    opening: OpenSession
    stale_below: int = 0  # windows of lower epochs are stale
    turn: int = 0  # number of the last job that ran a window of it
    epoch: int = 0  # the latest that came
    rows: int = 0  # that came of it
    expected: tuple[int, int, int] | None = None  # last stage: (epoch, position after its last window, pick)

    def make_stale(self, epoch: int) -> None:
        """Marks the epoch and all before it as stale."""
        self.stale_below = max(self.stale_below, epoch + 1)

    def count(self, window: Window) -> int:
        """How many rows of the latest epoch have come with this window."""
        if window.epoch > self.epoch:
            self.epoch, self.rows = window.epoch, 0
        if window.epoch == self.epoch:
            self.rows += max(1, window.width)
        return self.rows


@frozen(eq=False)
class _Queued:
    session: _Session
    window: Window
    at: float

    @property
    def is_prefill(self) -> bool:
        return self.window.wanted < self.window.width

    @property
    def is_stale(self) -> bool:
        return self.window.epoch < self.session.stale_below

    def record(self, kind: Kind, began: float, ended: float, value: int, detail: int = 0) -> None:
        record(self.session.route, kind, self.window, began, ended, value, detail)

    def contradicts_pick(self) -> bool:
        """Last stage: whether the pick of the window before has shown this one's epoch to be stale."""
        window = self.window
        if self.session.expected is None or self.is_prefill:
            return False
        epoch, position, token = self.session.expected
        return (epoch, position) == (window.epoch, window.start) and window.tokens[:1] != (token,)


@frozen(eq=False)
class _Known:
    """How many of a window's first rows need not be run, and what came of them, if that is sent on."""

    count: int = 0
    rows: Rows | None = None

    def is_all_of(self, window: Window) -> bool:
        """Whether nothing is left to run."""
        return 0 < self.count == window.width

    def left_of(self, window: Window) -> Window:
        """The window without these rows."""
        if not self.count:
            return window
        tokens = window.tokens[self.count :]
        return evolve(
            window,
            start=window.start + self.count,
            tokens=tokens,
            rows=None if window.rows is None else window.rows[self.count :],
            wanted=min(window.wanted, len(tokens)),
        )


_NOTHING = _Known()


def companions(queue: Sequence[_Queued]) -> list[_Queued]:
    """The windows that could share a decode with the first, in the order in which to add them.

    Either the windows of its session that follow it, which run as one; or the first windows of neighbouring
    lanes that are as wide (`share_decode` of the engine): of the two neighbours at hand the one that waits longer.
    """
    first = queue[0]
    own = [queued for queued in queue if queued.session is first.session]
    if len(own) > 1:
        return own
    waiting: dict[int, tuple[int, _Queued]] = {}  # by lane: (place in the queue, its first window)
    for place, queued in enumerate(queue):
        waiting.setdefault(queued.session.lane, (place, queued))
    family, low, high = [first], first.session.lane, first.session.lane
    while True:
        sides = [waiting[lane] for lane in (low - 1, high + 1) if lane in waiting]
        sides = [side for side in sides if side[1].window.width == first.window.width]
        if not sides:
            return family
        _, nearest = min(sides, key=lambda side: side[0])
        family.append(nearest)
        low, high = min(low, nearest.session.lane), max(high, nearest.session.lane)


@define
class StageCounters:
    """What the stage did so far, in windows, rows and seconds. `rows_known`: not run, since the cache held them."""

    jobs: int = 0
    windows_run: int = 0
    rows_run: int = 0
    rows_known: int = 0
    windows_dropped: int = 0
    rows_dropped: int = 0
    rows_run_in_vain: int = 0
    aborted: int = 0
    busy: float = 0.0


class Stage(Actor[StageMessage]):
    """Runs windows; see the top of this file. `keep`: bytes of rows that it may keep, to send them again."""

    def __init__(self, mailbox: Mailbox[StageMessage], runner: Runner, keep: int = 0) -> None:
        super().__init__(mailbox)
        self.counters = StageCounters()
        self._runner = runner
        self._cost = CostCurve(runner.descriptor.cost or ((1, 1.0), (2, 2.0)))
        self.watchdog = Watchdog(self._cost, runner.steps)
        self._is_last = runner.descriptor.layers[1] == runner.descriptor.layer_count
        self._sessions: dict[tuple[Route, int], _Session] = {}
        self._lanes: dict[int, _Session] = {}
        described = runner.descriptor
        self._kept = KeptRows(
            described.lanes, described.context, described.n_embd, 0 if self._is_last else keep
        )
        self._cached: dict[
            int, tuple[OpenSession, list[int]]
        ] = {}  # by lane: of its last session, and `tokens`
        self._ready: deque[_Queued] = deque()
        self._running: list[_Queued] = []
        self._last_prefill = 0  # number of the last job that ran a prefill window
        self._closed_one = trio.lowlevel.ParkingLot()

    @property
    def lanes_busy(self) -> int:
        """Number of open sessions."""
        return len(self._sessions)

    async def wait_idle(self) -> None:
        """Returns when no session is open."""
        while self._sessions:
            await self._closed_one.park()

    async def run(self) -> None:
        """Runs until the mailbox is closed and empty."""
        async with owned_nursery() as nursery:
            nursery.start_soon(self._watch_control)
            await self._work()

    async def _work(self) -> None:
        while True:
            backlogged = await self._collect()
            if not backlogged:
                try:
                    await self.mailbox.wait()
                except trio.EndOfChannel:
                    return
                await self._collect()
            if self._ready:
                await self._run_job(self._choose(backlogged))

    async def _collect(self) -> bool:
        """Takes what has come, drops what is stale; says whether a window is ready to run."""
        await self._take_control()
        for message in self.mailbox.take("windows"):
            await self.dispatch(message)
        self._drop_stale()
        return bool(self._ready)

    # ---------------------------------------------------------------- what arrives

    @handles(Arrival)
    async def arrived(self, arrival: Arrival) -> None:
        """A message along a route."""
        message = arrival.message
        if isinstance(message, Window):
            await self._arrived_window(arrival.route, message, arrival.at)
        elif isinstance(message, OpenSession):
            await self._open(arrival.route, message)
        elif isinstance(message, CloseSession):
            await self._close(arrival.route, message)
        elif isinstance(message, Echo):
            self._hint(arrival.route.downstream or arrival.route.back, message)
        else:
            self._discard(arrival.route, message)

    @handles(RouteLost)
    async def route_lost(self, lost: RouteLost) -> None:
        """The coordinator is gone: frees its lanes, after the decode at hand."""
        for session in [s for s in self._sessions.values() if s.route is lost.route]:
            session.stale_below = _NEVER
            if not self._running:
                self._forget(session)

    async def _take_control(self) -> None:
        for message in self.mailbox.take("control"):
            await self.dispatch(message)

    async def _watch_control(self) -> None:
        """Takes Discards, also while a job runs, and ends its decode if all that it computes is stale."""
        while True:
            try:
                await self.mailbox.wait("control")
            except trio.EndOfChannel:
                return
            await self._take_control()
            if self._running and all(queued.is_stale for queued in self._running):
                self._runner.abort()

    async def _open(self, route: Route, message: OpenSession) -> None:
        if route.lost:
            return
        lanes = self._runner.descriptor.lanes
        problem: str | None = None
        refused = wrong = False
        if (route, message.session) in self._sessions:
            problem = f"session {message.session} is open already"
        elif not 0 <= message.lane < lanes:
            problem = f"lane {message.lane} was asked for; this stage has lanes 0 to {lanes - 1}"
        elif message.lane in self._lanes:
            problem = f"lane {message.lane} is taken by another session; choose a free one"
            refused = True
        elif message.prefix != prefix_digest((held := self._held(message))[: max(0, message.cached)]):
            problem = (
                f"lane {message.lane} does not hold the {message.cached} cached tokens that were named: "
                "another coordinator has used it, or the stage was started anew; ask again, without reuse"
            )
            refused = True
        else:
            try:
                self._runner.open(message.lane, message.sampling, message.prompt)
            except MeshpipeError as error:
                problem, wrong = str(error), isinstance(error, UsageError)
        if problem is not None:  # the caller is told; `meshpipe doctor` asks for a lane that there is not
            await self._fail(
                route, message.session, problem, refused=refused, wrong=wrong, level=logging.INFO
            )
            return
        session = _Session(message.session, route, message.lane, held, message, turn=self.counters.jobs)
        self._cached[message.lane] = message, session.tokens
        self._sessions[route, message.session] = self._lanes[message.lane] = session
        known = len(held) if self._is_last else min(len(held), self._kept.length(message.lane))
        positions = (*message.held, known)
        if route.downstream is not None:
            await self._send(route.downstream, evolve(message, held=positions))
        else:
            await self._send(route.back, SessionOpened(message.session, positions))

    def _held(self, message: OpenSession) -> list[int]:
        """The first tokens in the lane's cache that the session may go on from.

        Those of its prefix, of whichever coordinator's session they are; all, if it was open here before, and the
        rows that came and will come are the same bits.
        """
        if message.lane not in self._cached:
            return []
        before, tokens = self._cached[message.lane]
        most = self._runner.length(message.lane)
        if not message.alike or (before.session, before.alike) != (message.session, message.alike):
            most = max(0, min(most, message.cached))
        return tokens[:most]

    async def _close(self, route: Route, message: CloseSession) -> None:
        session = self._sessions.get((route, message.session))
        if session is not None:
            self._forget(session)
        if route.downstream is not None:
            await self._send(route.downstream, message)

    async def _arrived_window(self, route: Route, window: Window, at: float) -> None:
        session = self._sessions.get((route, window.session))
        if session is None:  # refused, failed or closed: what still comes is of no use
            self._count_dropped(route, window, at)
        elif session.count(window) > (context := self._runner.descriptor.context):
            # The positions of an epoch are all different: without this, what is `_ready` would have no bound.
            await self._fail_session(
                session, f"epoch {window.epoch} has more rows than the {context} positions of its lane"
            )
        else:
            session.make_stale(window.epoch - 1)  # a Discard may be lost; what is left of them must not run
            self._ready.append(_Queued(session, window, at))

    def _discard(self, route: Route, message: Discard) -> None:
        session = self._sessions.get((route, message.session))
        if session is not None:
            session.stale_below = max(session.stale_below, message.epoch)
        if route.downstream is not None:
            self._hint(route.downstream, message)

    def _forget(self, session: _Session) -> None:
        """Frees the session's lane and drops its windows."""
        del self._sessions[session.route, session.number]
        del self._lanes[session.lane]
        session.stale_below = _NEVER
        self._runner.close(session.lane)
        self._closed_one.unpark_all()

    # ---------------------------------------------------------------- what runs

    def _drop_stale(self) -> None:
        """Removes stale windows, the last stage's own findings included."""
        kept: deque[_Queued] = deque()
        for queued in self._ready:
            if queued.contradicts_pick():
                queued.session.make_stale(queued.window.epoch)
            if queued.is_stale:
                self._count_dropped(queued.session.route, queued.window, queued.at)
            else:
                kept.append(queued)
        self._ready = kept

    def _choose(self, backlogged: bool) -> list[_Queued]:
        """Takes the windows of the next job out of `_ready`.

        `backlogged`: they were waiting already when the last job ended, so that throughput is what counts.
        """
        if len(self._ready) == 1:
            return [self._ready.popleft()]
        verify: list[_Queued] = []
        prefill: dict[int, _Queued] = {}  # by lane: its next window
        for queued in self._ready:
            if queued.is_prefill:
                prefill.setdefault(queued.session.lane, queued)
            elif queued.session.lane not in prefill:
                verify.append(queued)
        stalled = any(queued.session.turn < self._last_prefill for queued in verify)
        if prefill and not stalled:
            chosen = [min(prefill.values(), key=lambda queued: queued.session.turn)]
        else:
            verify.sort(key=lambda queued: queued.session.turn)
            family = companions(verify)
            rows = [queued.window.width for queued in family]
            most = self._runner.descriptor.most_rows
            chosen = family[: merged_count(rows, self._cost, most, backlogged=backlogged)]
        picked = set(map(id, chosen))
        self._ready = deque(queued for queued in self._ready if id(queued) not in picked)
        return chosen

    async def _run_job(self, chosen: list[_Queued]) -> None:
        """Computes the windows, in one decode if all goes well, and sends the results on."""
        self._running = chosen  # from here on a lost route lets its lanes be until the job is done
        runnable = [queued for queued in chosen if await self._starts_in_cache(queued, chosen)]
        problem = await self._compute(runnable) if runnable else None
        self._running = []
        if chosen[0].is_prefill:
            self._last_prefill = self.counters.jobs
        for session in [s for s in self._sessions.values() if s.stale_below == _NEVER]:
            self._forget(session)
        if problem is not None:
            await self._after_failure(runnable, problem)

    async def _compute(self, runnable: list[_Queued]) -> MeshpipeError | None:
        """One decode of what is not known; sends all results on, or says what went wrong."""
        jobs: list[Job] = []
        heads: list[_Known] = []  # by window
        waiting = [*runnable, *self._ready]
        for place, queued in enumerate(runnable):
            session, window = queued.session, queued.window
            known = self._known(session, window)
            heads.append(known)
            if known.is_all_of(window):
                continue
            session.tokens[window.start :] = window.tokens
            self._kept.trim(session.lane, window.start + known.count)
            session.turn = self.counters.jobs + 1
            opening = session.opening
            follows = None
            if self._is_last and (opening.mtp or opening.hidden_from is not None):
                after = next((q for q in waiting[place + 1 :] if q.session is session), None)
                follows = after.window.tokens[0] if after is not None and after.window.tokens else None
            left = known.left_of(window)
            jobs.append(Job(session.lane, left, session.tokens, opening.mtp, opening.hidden_from, follows))
        self._running = runnable
        began = trio.current_time()
        results: list[Result] | MeshpipeError | None = await self._decode(jobs) if jobs else []
        service = trio.current_time() - began
        if results is None:
            ended, rows = trio.current_time(), sum(job.window.width for job in jobs)
            for queued in runnable:
                queued.record(Kind.ABORT, began, ended, rows, queued.window.width)
        if isinstance(results, list):
            await self._deliver(runnable, heads, results, began, service)
        return results if isinstance(results, MeshpipeError) else None

    async def _decode(self, jobs: Sequence[Job]) -> list[Result] | MeshpipeError | None:
        """The results, or what went wrong; None if it was aborted."""
        began = trio.current_time()
        rows = drafts = 0
        for job in jobs:
            rows += job.window.width
            drafts += job.window.drafts
        self.watchdog.began(rows, drafts * self._runner.descriptor.draft_cost)
        try:
            return await self._runner.run(jobs)
        except Aborted:
            self.counters.aborted += 1
            return None
        except MeshpipeError as error:
            return error
        finally:
            self.watchdog.ended()
            self.counters.jobs += 1
            self.counters.busy += trio.current_time() - began

    def _known(self, session: _Session, window: Window) -> _Known:
        """The rows of a window that the cache holds, and whose results, if they are sent on, are kept."""
        lane, start, length = session.lane, window.start, self._runner.length(session.lane)
        if not (0 <= start < length and 0 <= window.wanted <= window.width):
            return _NOTHING
        if self._is_last:
            stop, hidden_from = window.stop - window.wanted, session.opening.hidden_from
            stop = stop if hidden_from is None else min(stop, hidden_from)
        else:
            stop = min(window.stop, self._kept.length(lane))
        held = session.tokens[start : max(start, min(stop, length))]
        same = (place for place, (a, b) in enumerate(zip(held, window.tokens, strict=False)) if a != b)
        count = next(same, len(held))
        if not count:
            return _NOTHING
        return _Known(count, None if self._is_last else self._kept.get(lane, start, start + count))

    async def _starts_in_cache(self, queued: _Queued, chosen: Iterable[_Queued]) -> bool:
        """Rule: no window runs above what the cache holds of its session; of several of one session the first must fit.

        A lane's cache may hold more, of a session before: that is not this one's to attend to.
        """
        session, window = queued.session, queued.window
        first = next(other for other in chosen if other.session is session)
        have = min(self._runner.length(session.lane), len(session.tokens))
        if first is not queued or 0 <= window.start <= have:
            return not queued.is_stale
        await self._fail_session(
            session,
            f"a window starts at position {window.start}, which is not within the {have} positions that the cache of "
            f"lane {session.lane} holds of this session",
        )
        return False

    async def _after_failure(self, runnable: list[_Queued], problem: MeshpipeError) -> None:
        """A decode failed: of several windows each is tried alone, so that one cannot take others along."""
        for queued in runnable:
            if queued.is_stale or queued.contradicts_pick():  # or its session is gone
                continue
            if len(runnable) > 1:
                await self._run_job([queued])
            else:
                await self._fail_session(queued.session, str(problem), wrong=isinstance(problem, UsageError))

    def _whole(self, queued: _Queued, known: _Known, computed: Iterator[Result]) -> Result:
        """A window's result: what is known, and the next of `computed` if that is not all."""
        window = queued.window
        if known.is_all_of(window):
            return Picks(()) if known.rows is None else known.rows
        result = next(computed)
        if isinstance(result, Picks) or known.rows is None:
            return result
        return np.concatenate([known.rows, result])

    async def _deliver(
        self,
        runnable: list[_Queued],
        heads: list[_Known],
        computed: list[Result],
        began: float,
        service: float,
    ) -> None:
        counts = [queued.window.width - known.count for queued, known in zip(runnable, heads, strict=True)]
        rows = sum(counts)
        results = list(map(self._whole, runnable, heads, repeat(iter(computed))))
        drafting = [result.drafting if isinstance(result, Picks) else 0.0 for result in results]
        service -= sum(drafting)
        drafted = began + service
        for queued, count, result, seconds in zip(runnable, counts, results, drafting, strict=True):
            session, window = queued.session, queued.window
            timings = window.timings
            self.counters.rows_known += window.width - count
            if count:
                self.counters.windows_run += 1
                self.counters.rows_run += count
                # Between two windows of one decode lie the drafts of both: they delay either reply alike.
                timing = Timing(session.route.index, began - queued.at, service, rows, sum(drafting))
                timings = (*timings, timing)
            if count and session.route.recorder.on:
                queued.record(Kind.QUEUE, queued.at, began, window.width)
                queued.record(Kind.COMPUTE, began, began + service, rows, count)
                if isinstance(result, Picks) and window.drafts and seconds:
                    queued.record(Kind.DRAFT, drafted, drafted + seconds, len(result.drafts), window.drafts)
            drafted += seconds
            if queued.contradicts_pick():  # the window before was of the same decode
                session.make_stale(window.epoch)
            if queued.is_stale:
                self.counters.rows_run_in_vain += count
                continue
            if not self._is_last:
                assert session.route.downstream is not None
                assert not isinstance(result, Picks)
                await self._send(session.route.downstream, window.onward(result, timings))
            elif window.wanted:
                assert isinstance(result, Picks)
                first = window.stop - window.wanted
                self._note_picks(session, window, first, result.tokens)
                reply = Reply(
                    session.number,
                    window.epoch,
                    window.number,
                    first,
                    result.tokens,
                    timings,
                    logprobs=result.logprobs,
                    drafts=result.drafts,
                    hidden=result.hidden,
                )
                await self._send(session.route.back, reply)
            else:
                assert isinstance(result, Picks)
                progress = Progress(session.number, window.number, window.stop, result.hidden)
                await self._send(session.route.back, progress)
        self._keep(runnable, heads, results)

    def _keep(self, runnable: list[_Queued], heads: list[_Known], results: list[Result]) -> None:
        """Keeps what was computed, once it is on its way."""
        for queued, known, result in zip(runnable, heads, results, strict=True):
            if not isinstance(result, Picks) and not known.is_all_of(queued.window):
                start = queued.window.start + known.count
                self._kept.put(queued.session.lane, start, result[known.count :])

    def _note_picks(self, session: _Session, window: Window, first: int, picks: tuple[int, ...]) -> None:
        """Last stage: a pick that differs from what was dispatched makes the rest of the epoch stale."""
        position = first + len(picks)
        if position < window.stop:
            session.make_stale(window.epoch)
        else:
            session.expected = (window.epoch, position, picks[-1])

    # ---------------------------------------------------------------- what leaves

    async def _send(self, to: Sender, message: object) -> None:
        """Sends along a route; a route that is gone is told by its RouteLost, not here."""
        try:
            if not to.try_send(message):  # does not cost the turn that a send with room to spare does
                await to.send(message)
        except ActorGoneError:
            log.debug("no one takes %s any more", type(message).__name__)

    def _hint(self, to: Sender, message: object) -> None:
        """Sends what is better lost than waited for."""
        try:
            to.try_send(message)
        except ActorGoneError:
            log.debug("no one takes %s any more", type(message).__name__)

    async def _fail_session(self, session: _Session, reason: str, *, wrong: bool = False) -> None:
        self._forget(session)
        await self._fail(session.route, session.number, reason, wrong=wrong)

    async def _fail(
        self,
        route: Route,
        session: int,
        reason: str,
        *,
        refused: bool = False,
        wrong: bool = False,
        level: int = logging.WARNING,
    ) -> None:
        log.log(level, "stage %d: session %d failed: %s", route.index, session, reason)
        await self._send(route.back, SessionFailed(session, route.index, reason, refused, wrong))

    def _count_dropped(self, route: Route, window: Window, came: float) -> None:
        record(route, Kind.DROP, window, came, trio.current_time(), window.width)
        self.counters.windows_dropped += 1
        self.counters.rows_dropped += window.width
