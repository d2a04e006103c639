"""The proposer actor: drafts ahead of all sessions that use it, on the coordinator's machine.

It computes with a draft model, or with the model's own NextN block. Sessions tell it their lines (`Follow`), and for
the block the trunk's hidden rows as they come (`Hidden`); it answers with Proposals to their mailboxes. It drafts as
long as a session's limit allows and never waits for an answer: what is told meanwhile is looked at after each job,
which is short, so that what it goes on with is not stale. Sessions that want a token at the same time get it from one
decode where the engine can do that. A line that has to be caught up with first (a prompt) goes in bounded jobs, in
turn with drafting.

Nothing depends on a proposer: when it fails, that is logged, and its sessions go on without.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Protocol

import trio
from attrs import define, field

from meshpipe.actors import Actor, Mailbox, Ref, handles, supervise
from meshpipe.errors import MeshpipeError
from meshpipe.llama.draft import Drafted, DraftEngine, DraftModel
from meshpipe.llama.nextn import NextnModel
from meshpipe.llama.vocabulary import Vocabulary
from meshpipe.messages import CloseSession, Follow, Hidden, OpenSession, Proposal
from meshpipe.pipeline.route import Sender
from meshpipe.speculation.run_ahead import DraftJob, RunAhead
from meshpipe.telemetry.spans import Kind, Recorder, Span

log = logging.getLogger("meshpipe.proposer")

TURN = 0.005
"""Seconds of drafting between two looks at the mailbox; at least one token."""

Told = OpenSession | Follow | Hidden | CloseSession


class Drafter(Protocol):
    """What a proposer computes with: a model in a thread, or a simulated one on a virtual clock."""

    @property
    def engine(self) -> DraftEngine:
        """What it computes with, to be told of sessions, lines and rows between jobs."""

    async def run(self, jobs: Sequence[DraftJob]) -> tuple[list[Drafted], float]:
        """Runs jobs of different lanes; what each one brought, and the seconds that it took. Raises EngineError."""


class ThreadedDrafter:
    """Runs a draft model's or NextN block's jobs in one worker thread at a time."""

    def __init__(self, engine: DraftEngine) -> None:
        self.engine = engine
        self._thread = trio.CapacityLimiter(1)

    async def run(self, jobs: Sequence[DraftJob]) -> tuple[list[Drafted], float]:
        """See `Drafter.run`."""
        return await trio.to_thread.run_sync(self._run, jobs, limiter=self._thread)

    def _run(self, jobs: Sequence[DraftJob]) -> tuple[list[Drafted], float]:
        began = time.perf_counter()
        return self.engine.run(jobs, TURN), time.perf_counter() - began


def proposer_mailbox() -> Mailbox[Told]:
    """All in one queue: a session's messages are to be taken in order."""
    return Mailbox({"told": 4096}, sort=lambda _: "told")


class Proposer(Actor[Told]):
    """Drafts for sessions with `drafter`; proposals of `source` go to `sink`, which knows the sessions."""

    def __init__(
        self, mailbox: Mailbox[Told], drafter: Drafter, sink: Sender, source: str, recorder: Recorder
    ) -> None:
        super().__init__(mailbox)
        self._drafter, self._engine = drafter, drafter.engine
        self._sink = sink
        self._source = source
        self._recorder = recorder
        self._lanes: dict[int, RunAhead] = {}  # those of sessions that have ended too, for their caches
        self._sessions: dict[int, RunAhead] = {}
        self._spent: dict[int, float] = {}  # by session: seconds that no proposal has told of yet
        self._catch_up_next = False

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await self.mailbox.wait()
            await self._listen()
            while jobs := self._jobs():
                began = trio.current_time()
                try:
                    drafted, seconds = await self._drafter.run(jobs)
                except MeshpipeError as error:
                    log.warning("%s proposer: sessions go on without: %s", self._source, error)
                    for job in jobs:
                        self._drop(job.session)
                    continue
                self._record(jobs, drafted, began)
                await self._listen()
                for job, found in zip(jobs, drafted, strict=True):
                    self._propose(job, found, seconds / len(jobs))

    def _record(self, jobs: Sequence[DraftJob], drafted: Sequence[Drafted], began: float) -> None:
        if self._recorder.on:
            ended = trio.current_time()
            for job, found in zip(jobs, drafted, strict=True):
                count = len(found.tokens)
                self._recorder.add(
                    Span(Kind.PROPOSE, began, ended, session=job.session, value=count, detail=1)
                )

    async def _listen(self) -> None:
        for message in self.mailbox.take("told"):
            await self.dispatch(message)

    @handles(OpenSession)
    async def opened(self, message: OpenSession) -> None:
        """A session begins, on its lane if that is free here; its cache may hold the head of the prompt."""
        taken = {ahead.lane for ahead in self._sessions.values()}
        lane = next(lane for lane in chain((message.lane,), count()) if lane not in taken)
        before = self._lanes.get(lane)
        self._engine.open(lane, message.sampling)
        self._sessions[message.session] = self._lanes[lane] = RunAhead(
            message.session,
            lane,
            self._engine.context,
            tokens=before.tokens if before is not None else [],
            cached=before.cached if before is not None else 0,
        )
        self._spent[message.session] = 0.0

    @handles(Follow)
    async def told(self, message: Follow) -> None:
        """How a session's line goes."""
        ahead = self._sessions.get(message.session)
        if ahead is not None:
            self._engine.trim(ahead.lane, ahead.follow(message))

    @handles(Hidden)
    async def knows(self, message: Hidden) -> None:
        """Hidden rows of a session's line."""
        ahead = self._sessions.get(message.session)
        if ahead is not None:
            self._engine.keep(ahead.lane, message.start, message.rows)
            ahead.came()

    @handles(CloseSession)
    async def closed(self, message: CloseSession) -> None:
        """A session has ended."""
        self._drop(message.session)

    def _drop(self, session: int) -> None:
        self._spent.pop(session, None)
        ended = self._sessions.pop(session, None)
        if ended is not None:
            self._engine.close_lane(ended.lane)

    def _jobs(self) -> list[DraftJob]:
        """All that draft next, by lane; or one that catches up. Where there are both, in turn."""
        ready = [ahead.job(self._engine.catch_up) for ahead in self._sessions.values()]
        drafting = [job for job in ready if job is not None and job.most]
        behind = [job for job in ready if job is not None and not job.most]
        if behind and (self._catch_up_next or not drafting):
            self._catch_up_next = False
            return behind[:1]
        self._catch_up_next = True
        return sorted(drafting, key=lambda job: job.lane)

    def _propose(self, job: DraftJob, drafted: Drafted, seconds: float) -> None:
        """Says what still continues the session's line."""
        ahead = self._sessions.get(job.session)
        if ahead is None:
            return
        self._spent[job.session] += seconds
        ahead.waits = drafted.waits
        count = ahead.ran(job, drafted.tokens)
        if not count:
            return
        proposal = Proposal(
            job.session,
            ahead.epoch,
            len(ahead.tokens) - count,
            drafted.tokens[-count:],
            self._source,
            drafted.probabilities[-count:],
            ahead.line,
            self._spent[job.session],
        )
        if self._sink.try_send(proposal):  # else the session misses it, and tells its line anew
            self._spent[job.session] = 0.0


Load = Callable[[], Drafter]
"""Loads what a proposer computes with; blocks. Raises MeshpipeError."""


def draft_model(path: str | Path, vocabulary: Vocabulary, lanes: int, context: int, threads: int) -> Load:
    """Loads a draft model for a pipeline with this vocabulary, so many lanes, and so many tokens a lane."""
    return lambda: ThreadedDrafter(
        DraftModel(path, vocabulary, lanes=lanes, context=context, threads=threads)
    )


def nextn_block(path: str | Path, digest: str, lanes: int, context: int) -> Load:
    """Loads the NextN block of the model with this digest, for so many lanes, and so many tokens a lane."""
    return lambda: ThreadedDrafter(NextnModel(path, digest, lanes=lanes, context=context))


@define(eq=False)
class Proposers:
    """The proposers of a pipeline, by name: loaded when first asked for, shared by all sessions."""

    nursery: trio.Nursery
    sink: Sender
    recorder: Recorder
    _running: dict[Hashable, Ref[Told]] = field(factory=dict)
    _loading: trio.Lock = field(factory=trio.Lock)

    async def get(self, name: Hashable, source: str, load: Load) -> Ref[Told]:
        """The proposer of this name, whose proposals are of `source`. Raises what loading raises."""
        async with self._loading:
            if name not in self._running:
                drafter = await trio.to_thread.run_sync(load)
                mailbox = proposer_mailbox()
                self._running[name] = mailbox.ref
                self.nursery.start_soon(self._run, name, source, mailbox, drafter)
            return self._running[name]

    async def _run(self, name: Hashable, source: str, mailbox: Mailbox[Told], drafter: Drafter) -> None:
        make = partial(Proposer, drafter=drafter, sink=self.sink, source=source, recorder=self.recorder)
        try:
            with suppress(Exception):  # which `supervise` has logged: sessions go on without
                await supervise(mailbox, make)
        finally:
            self._running.pop(name, None)
            drafter.engine.close()
