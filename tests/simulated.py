"""A pipeline without a model: simulated engines behind real actors and links, for trio's autojump clock."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import trio
from attrs import evolve

from meshpipe.actors.scope import owned_nursery
from meshpipe.llama.draft import Drafted, DraftEngine
from meshpipe.messages import Rows, Sampling, StageDescriptor
from meshpipe.pipeline.coordinator import Coordinator
from meshpipe.pipeline.local import join_stages
from meshpipe.pipeline.runner import Guesser, Job, Picks, Result, SimulatedRunner
from meshpipe.pipeline.sink import ReturnSink
from meshpipe.pipeline.stage import Stage
from meshpipe.pipeline.tracing import Tracer
from meshpipe.speculation.run_ahead import DraftJob
from meshpipe.telemetry.spans import Recorder
from meshpipe.wire import Conditions

VOCABULARY = 1000
COST = ((1, 0.009), (2, 0.014), (4, 0.022), (8, 0.037), (16, 0.066), (63, 0.25))
Target = Callable[[Sequence[int]], int]


class FakeVocabulary:
    """Tokens that are their own text."""

    size = VOCABULARY
    end_tokens = frozenset({VOCABULARY - 1})

    def tokenize(self, text: str, **_: Any) -> tuple[int, ...]:
        return tuple(int(word) for word in text.split())

    def close(self) -> None:
        """Nothing to free."""

    def piece(self, token: int) -> bytes:
        return f"{token} ".encode()


def periodic(period: int = 7) -> Target:
    """Says the same tokens over and over: text that is wholly foretold."""
    return lambda tokens: len(tokens) % period


def novel(tokens: Sequence[int]) -> int:
    """Says what nobody could foretell, and depends on every token before."""
    digest = hashlib.blake2b(repr(tokens[-64:]).encode() + len(tokens).to_bytes(4, "big"), digest_size=4)
    return int.from_bytes(digest.digest(), "big") % (VOCABULARY - 1)


def mixed(tokens: Sequence[int]) -> int:
    """Long foretold runs with surprises in between, where what follows depends on the surprise."""
    position = len(tokens)
    if position % 41 == 0:
        return 500 + novel(tokens) % 3
    return position % 41 + 50 * (max(tokens[-(position % 41) :], default=0) % 3)


def serial(target: Target, prompt: Sequence[int], count: int) -> list[int]:
    """What one call at a time says."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(target(tokens))
        if tokens[-1] in FakeVocabulary.end_tokens:
            break
    return tokens[len(prompt) :]


def guesser(target: Target, right: float, sure: float = 0.5) -> Guesser:
    """Native MTP that is right with that probability at each token, and always as sure of it."""

    def draft(tokens: Sequence[int], count: int) -> list[tuple[int, float]]:
        line, drafts = list(tokens), []
        for _ in range(count):
            token = target(line)
            if novel(line) % 1000 >= 1000 * right:
                token = (token + 1) % (VOCABULARY - 1)
            drafts.append((token, sure))
            line.append(token)
        return drafts

    return draft


def row_of(tokens: Sequence[int], stage: int) -> Rows:
    """What leaves a stage for the last of these tokens: depends on where it is, and on many of those before it."""
    said = np.asarray((stage, len(tokens), *tokens[-48:]), np.int32)
    digest = hashlib.blake2b(said.tobytes(), digest_size=8).digest()
    return np.frombuffer(digest, np.uint8).astype(np.float32)


class CheckedRunner(SimulatedRunner):
    """One whose rows are `row_of`, and which fails the test if it is sent others than the stage before it made."""

    async def run(self, jobs: Sequence[Job]) -> list[Result]:
        results = await super().run(jobs)
        (stage, _), lines = self.descriptor.layers, [job.tokens for job in jobs]
        for place, (job, line) in enumerate(zip(jobs, lines, strict=True)):
            positions = range(job.window.start + 1, job.window.stop + 1)
            if stage > 0:
                assert job.window.rows is not None
                came = [row_of(line[:position], stage - 1) for position in positions]
                assert np.array_equal(job.window.rows, came)
            if not isinstance(results[place], Picks):
                results[place] = np.array([row_of(line[:position], stage) for position in positions])
        return results


class SimulatedDrafter(DraftEngine):
    """Drafts what `target` says except where `lie(position)`; `seconds` of trio's clock a token, less to catch up.

    Fails the test if it is asked to run above its cache, or for a lane that no session has.
    """

    def __init__(
        self,
        target: Target,
        *,
        seconds: float = 0.005,
        lie: Callable[[int], bool] = lambda position: False,
        context: int = 4096,
        turn: int = 1,
    ) -> None:
        self.context, self.catch_up = context, 32
        self.drafted = 0
        self.closed = False
        self.lanes: set[int] = set()
        self.engine = self
        self._target, self._seconds, self._lie, self._turn = target, seconds, lie, turn
        self._caches: dict[int, list[int]] = {}

    def open(self, lane: int, sampling: Sampling) -> None:
        self.lanes.add(lane)

    def close_lane(self, lane: int) -> None:
        self.lanes.remove(lane)

    def close(self) -> None:
        self.closed = True

    def keep(self, lane: int, start: int, rows: Rows) -> None:
        raise AssertionError("a draft model is sent no rows")

    async def run(self, jobs: Sequence[DraftJob]) -> tuple[list[Drafted], float]:  # type: ignore[override]
        assert len({job.lane for job in jobs}) == len(jobs)
        found, seconds = [], 0.0
        for job in jobs:
            assert job.lane in self.lanes
            cache = self._caches.setdefault(job.lane, [])
            assert job.start <= len(cache)
            cache[job.start :] = job.tokens
            tokens: list[int] = []
            for _ in range(min(job.most, self._turn)):
                cache += tokens[-1:]
                token = self._target(cache)
                tokens.append(token ^ 1 if self._lie(len(cache)) else token)
            self.drafted += len(tokens)
            seconds = max(seconds, self._seconds * (max(len(tokens), 1) + len(job.tokens) / 16))
            found.append(Drafted(tuple(tokens), (0.9,) * len(tokens)))
        await trio.sleep(seconds)
        return found, seconds


class SimulatedNextn(SimulatedDrafter):
    """A NextN block: as before, but it needs the hidden row of a position, and looks whether rows are of its line."""

    def __init__(self, target: Target, **options: Any) -> None:
        super().__init__(target, **options)
        self.catch_up = self.context
        self.rows_kept = 0
        self._rows: dict[int, dict[int, int]] = {}  # by lane and position: the row's token

    def trim(self, lane: int, position: int) -> None:
        kept = self._rows.setdefault(lane, {})
        self._rows[lane] = {at: token for at, token in kept.items() if at < position}

    def keep(self, lane: int, start: int, rows: Rows) -> None:
        self.rows_kept += len(rows)
        assert [int(row[0]) for row in rows] == list(range(start, start + len(rows)))
        self._rows.setdefault(lane, {}).update((int(row[0]), int(row[1])) for row in rows)

    async def run(self, jobs: Sequence[DraftJob]) -> tuple[list[Drafted], float]:
        can = []
        for job in jobs:
            rows = self._rows.get(job.lane, {})
            assert rows == {at: job.line[at] for at in rows}
            can.append(any(at < job.stop - 1 for at in rows))
        able = [job if ready else evolve(job, most=0) for job, ready in zip(jobs, can, strict=True)]
        found, seconds = await super().run(able)
        return [evolve(drafted, waits=not ready) for drafted, ready in zip(found, can, strict=True)], seconds


class Simulated:
    """The pipeline, its stages, and what they run on."""

    def __init__(self, coordinator: Coordinator, stages: list[Stage]) -> None:
        self.coordinator = coordinator
        self.stages = stages

    def assert_nothing_is_left(self) -> None:
        """No session, lane or credit is held anywhere."""
        assert self.coordinator.active == 0
        assert self.coordinator.lanes.free == self.coordinator.lanes.count
        assert self.coordinator.credits.sessions == 0
        assert self.coordinator.credits.work == 0
        assert self.coordinator.sink.sessions() == []
        assert [stage.lanes_busy for stage in self.stages] == [0] * len(self.stages)


@asynccontextmanager
async def simulated(
    target: Target,
    stages: int = 2,
    *,
    delay: float | None = 0.1,
    lanes: int = 4,
    context: int = 4096,
    cost: tuple[tuple[int, float], ...] = COST,
    jitter: float = 0.0,
    vocabulary: FakeVocabulary | None = None,
    drafter: Guesser | None = None,
    draft_cost: float = 0.004,
    small: SimulatedDrafter | None = None,
    nextn: SimulatedNextn | None = None,
    **options: Any,
) -> AsyncIterator[Simulated]:
    """Opens a pipeline whose last stage says what `target` says; `options` are the coordinator's.

    `drafter` stands for native MTP at the last stage, at `draft_cost` seconds a token, `nextn` for it at the
    coordinator, `small` for every draft model.
    """
    described = [
        StageDescriptor("sim", (i, i + 1), stages, 8, VOCABULARY, lanes, context, cost) for i in range(stages)
    ]
    if drafter is not None:
        described[-1] = evolve(described[-1], mtp=1, draft_cost=draft_cost)
    runners = [SimulatedRunner(descriptor, target, drafter) for descriptor in described]
    async with owned_nursery() as nursery:
        sink = ReturnSink()
        conditions = Conditions(delay=delay, jitter=jitter) if delay is not None else None
        recorder = Recorder()
        first, actors = join_stages(nursery, runners, sink, conditions, recorder)
        coordinator = Coordinator(
            nursery,
            first,
            sink,
            [runner.descriptor for runner in runners],
            vocabulary or FakeVocabulary(),  # type: ignore[arg-type]
            link=(delay or 0.0) * stages,
            **options,
            tracer=Tracer(recorder, stages),
        )
        coordinator.load_draft = lambda *_: lambda: small  # type: ignore[assignment, return-value]
        if nextn is not None:
            coordinator.nextn = lambda: nextn
        yield Simulated(coordinator, actors)
