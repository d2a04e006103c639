"""The chaos harness: a pipeline of real processes, requests that run all the time, and one fault after the other.

Two stages of a tiny model with random weights (so that a decode takes a millisecond), each with a warm standby,
all behind relays that can be told to misbehave; links are `DELAY` seconds long. A seed decides which faults come,
when, and what is asked for meanwhile. What must hold, whatever happens:

- every request ends in bounded time, with exactly the tokens of an undisturbed run, or with a clear error and a
  beginning of them; nothing comes twice;
- after each fault a new request succeeds;
- at the end no lane, task or descriptor is left behind, here or at a stage.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import trio
from attrs import define, field

from meshpipe import Coordinator, MeshpipeError, Sampling, StagePlace, Topology
from meshpipe.actors.scope import owned_nursery
from meshpipe.pipeline.children import Children, open_children, stage_command
from meshpipe.pipeline.remote import open_remote
from meshpipe.pipeline.way import WayState

from .wire import Relay

DELAY = 0.005
LANES = 4
CONTEXT = 512
SPLIT = ((0, 3), (3, 6))
DEADLINE = 60.0
"""Seconds within which every request has to end."""

FAULTS = (
    "kill", "kill", "stop", "blink", "reset", "reset", "hole", "held", "cut", "cut", "cancel", "terminate",
)  # fmt: skip
"""What can happen, some of it more often; "coordinator" and "rolling" come once in a while besides."""


class Tokens:
    """A vocabulary of numbers."""

    size = 96
    end_tokens: frozenset[int] = frozenset()

    def piece(self, token: int) -> bytes:
        """A token is its number."""
        return f"{token} ".encode()


@define
class Fault:
    """One fault: what, to which process or relay, and when it was noticed, mended, and felt no more (seconds)."""

    kind: str
    target: int
    noticed: float | None = None
    joined: float | None = None
    going_on: float | None = None


@define
class Tally:
    """What became of the requests, and of the faults."""

    faults: list[Fault] = field(factory=list)
    requests: int = 0
    resumed: int = 0
    cancelled: int = 0
    errors: list[str] = field(factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain data: counts, and median and worst times by kind of fault, in seconds."""
        kinds = Counter(fault.kind for fault in self.faults)
        times: dict[str, Any] = {}
        for kind in kinds:
            mine = [fault for fault in self.faults if fault.kind == kind]
            times[kind] = {
                name: _median_and_worst(
                    [value for fault in mine if (value := getattr(fault, name)) is not None]
                )
                for name in ("noticed", "joined", "going_on")
            }
        return {
            "faults": dict(kinds),
            "requests": self.requests,
            "resumed": self.resumed,
            "cancelled": self.cancelled,
            "errors": self.errors,
            "seconds": times,
        }


def _median_and_worst(values: list[float]) -> list[float] | None:
    return [round(statistics.median(values), 3), round(max(values), 3), len(values)] if values else None


class Chaos:
    """The pipeline under attack, and what is known of it."""

    def __init__(
        self, pipeline: Coordinator, children: Children, relays: list[Relay], topology: Topology, seed: int
    ) -> None:
        self.pipeline, self.children, self.relays, self.topology = pipeline, children, relays, topology
        self.tally = Tally()
        self.random = random.Random(seed)
        self.reference: dict[tuple[int, ...], list[int]] = {}
        self._current: Fault | None = None
        self._began = 0.0
        self._interrupted: set[int] = set()
        changed = pipeline.way.on_change

        def on_change() -> None:
            changed()
            self._way_changed()

        pipeline.way.on_change = on_change

    # ---------------------------------------------------------------- requests

    def a_request(self) -> tuple[list[int], int, Sampling]:
        """A prompt, how many tokens to generate, and how."""
        pick = self.random
        prompt = [pick.randrange(96) for _ in range(pick.choice((1, 5, 40, 200)))]
        count = pick.choice((1, 20, 60, 120))
        return prompt, count, Sampling(temperature=pick.choice((0.0, 0.0, 0.8)), seed=pick.randrange(1000))

    async def learn(self, requests: list[tuple[list[int], int, Sampling]]) -> None:
        """What the undisturbed pipeline says."""
        for prompt, count, sampling in requests:
            done = await self.pipeline.complete(prompt, max_tokens=count, sampling=sampling)
            self.reference[(*prompt, count, sampling.seed)] = list(done.tokens)

    async def ask(self, request: tuple[list[int], int, Sampling], patience: float | None = None) -> bool:
        """Runs one request and checks what it says; whether it came to its end."""
        prompt, count, sampling = request
        expected = self.reference[(*prompt, count, sampling.seed)]
        tokens: list[int] = []
        failure: MeshpipeError | None = None
        self.tally.requests += 1
        me = self.tally.requests
        cancelled = False
        with trio.fail_after(DEADLINE):
            async with self.pipeline.generate(prompt, max_tokens=count, sampling=sampling) as generation:
                self._interrupted.add(me)
                try:
                    with trio.move_on_after(float("inf") if patience is None else patience) as scope:
                        async for piece in generation:
                            tokens += piece.tokens
                            self._piece_came(me)
                    cancelled = scope.cancelled_caught
                except MeshpipeError as error:
                    failure = error
                finally:
                    self._interrupted.discard(me)
        assert tokens == expected[: len(tokens)], f"request {me} said {tokens}, not {expected}"
        if cancelled:
            self.tally.cancelled += 1
            return True
        if failure is not None:
            self.tally.errors.append(f"{type(failure).__name__}: {failure}")
            return False
        assert tokens == expected, f"request {me} ended after {len(tokens)} of {len(expected)} tokens"
        assert generation.report is not None
        assert generation.report.exact
        self.tally.resumed += generation.report.resumes > 0
        return True

    # ---------------------------------------------------------------- faults

    def _way_changed(self) -> None:
        fault, way = self._current, self.pipeline.way
        if fault is None:
            return
        if way.state is WayState.BROKEN and fault.noticed is None:
            fault.noticed = trio.current_time() - self._began
        if way.state is WayState.UP and fault.joined is None:
            fault.joined = trio.current_time() - self._began

    def _piece_came(self, request: int) -> None:
        fault = self._current
        if fault is not None and fault.joined is not None and fault.going_on is None:
            fault.going_on = trio.current_time() - self._began

    def _victim(self) -> int:
        """A process that is in use, more often than not."""
        used = [index for index, relay in enumerate(self.relays) if relay.used]
        return self.random.choice(used if used and self.random.random() < 0.8 else range(len(self.relays)))

    async def strike(self, kind: str) -> None:
        """One fault, from its beginning to where all is as it was but for what it has done."""
        target = self._victim()
        fault = Fault(kind, target)
        self.tally.faults.append(fault)
        relay, pick = self.relays[target], self.random
        self._current, self._began = fault, trio.current_time()
        if kind == "kill":
            self._signal(target, signal.SIGKILL)
        elif kind == "terminate":
            self._signal(target, signal.SIGTERM)
        elif kind in ("stop", "blink"):
            self._signal(target, signal.SIGSTOP)
            await trio.sleep(pick.uniform(0.05, 1.0) if kind == "blink" else pick.uniform(4.0, 6.0))
            self._signal(target, signal.SIGCONT)
        elif kind == "reset":
            relay.reset()
        elif kind == "hole":
            relay.set(hole=True)
            await trio.sleep(pick.uniform(4.0, 6.0))
            relay.set()
        elif kind == "held":
            relay.set(held=True)
            await trio.sleep(pick.uniform(0.05, 1.0))
            relay.set()
        elif kind == "cut":
            relay.cut()
        elif kind == "cancel":
            with suppress(MeshpipeError):
                await self.ask(self.random.choice(self.requests), patience=pick.uniform(0.0, 0.2))
        elif kind == "coordinator":
            await self._lose_another_coordinator()
        elif kind == "rolling":
            for process in range(len(self.relays)):
                self._signal(process, signal.SIGTERM)
                await self._prove()
        else:
            raise ValueError(kind)
        await self._prove()
        self._current = None

    requests: list[tuple[list[int], int, Sampling]]

    async def _prove(self) -> None:
        """After a fault a new request succeeds; one that meets the lost stage may have to be asked again."""
        with trio.fail_after(DEADLINE):
            while not await self.ask(self.random.choice(self.requests)):
                pass

    def _signal(self, process: int, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.children.pids[process], number)

    async def _lose_another_coordinator(self) -> None:
        """One that shares the stages generates, and is killed; the stages free its lanes."""
        places = [
            {"address": place.address, "standby": list(place.standby)} for place in self.topology.stages
        ]
        tests = str(Path(__file__).parent.parent)
        process = await trio.lowlevel.open_process(
            [sys.executable, "-m", "chaos.other", json.dumps(places)],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")])},
        )
        assert process.stdout is not None
        try:
            with trio.fail_after(DEADLINE):
                await process.stdout.receive_some()
                await trio.sleep(self.random.uniform(0.0, 0.2))
        finally:
            process.kill()
            await process.wait()
            await process.stdout.aclose()


@asynccontextmanager
async def opened(model: Path, seed: int) -> AsyncIterator[Chaos]:
    """The processes, their relays, and a pipeline over them."""
    layers = [*SPLIT, *SPLIT]
    arguments = [
        "--model", str(model), "--lanes", str(LANES), "--context", str(CONTEXT), "--threads", "1",
        "--conditions", f"delay={DELAY}", "--drain-seconds", "0.5",
    ]  # fmt: skip
    commands = [stage_command(range_, arguments) for range_ in layers]
    async with open_children(layers, commands, 120.0) as children, owned_nursery() as nursery:
        relays = [Relay(_address_of(children, index)) for index in range(len(layers))]
        for relay in relays:
            await nursery.start(relay.run)
        half = len(SPLIT)
        topology = Topology(
            tuple(
                StagePlace(relays[index].address, SPLIT[index], standby=(relays[index + half].address,))
                for index in range(half)
            )
        )
        async with open_remote(topology, Tokens(), lanes=LANES, context=CONTEXT) as pipeline:  # type: ignore[arg-type]
            yield Chaos(pipeline, children, relays, topology, seed)


def _address_of(children: Children, index: int) -> Callable[[], str]:
    return lambda: children.places[index].address


async def attack(
    model: Path, faults: int, seed: int, *, seconds: float | None = None, load: int = 3
) -> Tally:
    """`faults` faults, or as many as come in `seconds`, while `load` requests run at any time."""
    async with opened(model, seed) as chaos:
        chaos.requests = [chaos.a_request() for _ in range(12)]
        await chaos.learn(chaos.requests)
        descriptors = _descriptors()
        running = True

        async def keep_asking() -> None:
            while running:
                await chaos.ask(chaos.random.choice(chaos.requests))

        end = None if seconds is None else time.monotonic() + seconds
        async with trio.open_nursery() as nursery:
            for _ in range(load):
                nursery.start_soon(keep_asking)
            number = 0
            while number < faults and (end is None or time.monotonic() < end):
                await trio.sleep(chaos.random.uniform(0.05, 0.4))
                number += 1
                rare = {number % 20 == 10: "coordinator", number % 20 == 19: "rolling"}.get(True)
                await chaos.strike(rare or chaos.random.choice(FAULTS))
            running = False
        await _nothing_is_left(chaos, descriptors)
        return chaos.tally


async def _nothing_is_left(chaos: Chaos, descriptors: int) -> None:
    """All lanes are free, here and at the stages, and no descriptor is held that was not before."""
    pipeline = chaos.pipeline
    await pipeline.way.wait_up(DEADLINE)
    with trio.move_on_after(20):
        while pipeline.active or pipeline.lanes.free < LANES or _descriptors() > descriptors:  # noqa: ASYNC110
            await trio.sleep(0.05)
    left = (pipeline.active, LANES - pipeline.lanes.free, max(0, _descriptors() - descriptors))
    assert left == (0, 0, 0), f"left behind: {left[0]} requests, {left[1]} lanes, {left[2]} descriptors"
    before = chaos.tally.resumed
    async with trio.open_nursery() as nursery:
        for request in chaos.requests[:LANES]:
            nursery.start_soon(chaos.ask, request)
    assert chaos.tally.resumed == before, "a stage held a lane that should have been free"


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
