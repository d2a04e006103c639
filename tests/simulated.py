"""A pipeline without a model: simulated engines behind real actors and links, for trio's autojump clock."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from attrs import evolve

from meshpipe.actors.scope import owned_nursery
from meshpipe.messages import StageDescriptor
from meshpipe.pipeline.coordinator import Coordinator
from meshpipe.pipeline.local import join_stages
from meshpipe.pipeline.runner import Drafter, SimulatedRunner
from meshpipe.pipeline.sink import ReturnSink
from meshpipe.pipeline.stage import Stage
from meshpipe.pipeline.tracing import Tracer
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


def guesser(target: Target, right: float, sure: float = 0.5) -> Drafter:
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
    drafter: Drafter | None = None,
    draft_cost: float = 0.004,
    **options: Any,
) -> AsyncIterator[Simulated]:
    """Opens a pipeline whose last stage says what `target` says; `options` are the coordinator's.

    `drafter` stands for native MTP, at `draft_cost` seconds a token.
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
        yield Simulated(coordinator, actors)
