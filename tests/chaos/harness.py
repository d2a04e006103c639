"""The chaos harness: a pipeline of real processes, requests that run all the time, and one fault after the other.

Two stages of a tiny model with random weights (so that a decode takes a millisecond), each with a warm standby,
all behind relays that can be told to misbehave; links are some milliseconds long. A seed decides which faults come,
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
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import trio
from attrs import frozen

from meshpipe import Coordinator, MeshpipeError, Sampling, StagePlace, Topology
from meshpipe.actors.scope import owned_nursery
from meshpipe.pipeline.children import Children, open_children, stage_command
from meshpipe.pipeline.remote import open_remote
from meshpipe.pipeline.way import WayState
from meshpipe.telemetry.spans import Kind, Span
from meshpipe.wire.link import HEARTBEAT, Heartbeat

from .disk import on_a_disk
from .memory import Sample, look, summary
from .tally import Fault, Tally
from .wire import Relay

CONTEXT = 512
SPLIT = ((0, 3), (3, 6))
PROCESSES = range(2 * len(SPLIT))
"""Numbers of the processes: the stages in order, then their standbys."""
DEADLINE = 90.0
"""Seconds within which every request has to end."""

FAULTS = (
    "kill", "kill", "terminate", "stop", "blink", "blink", "reset", "reset", "path", "hole", "held", "held",
    "cut", "cut", "cut", "cancel", "cancel", "disk", "coordinator", "rolling",
)  # fmt: skip
"""What can happen, some of it more often: dealt like cards, and shuffled anew when all have come."""

DEADLY = frozenset({"kill", "terminate", "disk"})
"""Those that end a process; `rolling` ends all."""

MOMENTS = ("", "prefill", "decode", "divergence", "close")
"""Which moment of a request a fault waits for; the empty one is any."""

Ask = tuple[list[int], int, Sampling]
"""A prompt, how many tokens to generate, and how."""


@frozen
class Plan:
    """How much happens. `load`: requests at a time; `gap`: seconds between faults; `delay`: of links, one way.

    `sizes`: lengths of prompts, and `counts` of answers, to choose from; `spared` processes are never ended.
    """

    load: int = 3
    gap: tuple[float, float] = (0.05, 0.4)
    delay: float = 0.005
    heartbeat: Heartbeat = HEARTBEAT
    requests: int = 12
    sizes: Sequence[int] = (1, 5, 40, 200)
    counts: Sequence[int] = (1, 20, 60, 120)
    spared: frozenset[int] = frozenset()

    @property
    def lanes(self) -> int:
        """As many as there are requests at a time, and one for another coordinator."""
        return self.load + 1

    @property
    def hang(self) -> tuple[float, float]:
        """Seconds that something hangs which is to be noticed."""
        return 1.6 * self.heartbeat.deadline, 2.4 * self.heartbeat.deadline


class Tokens:
    """A vocabulary of numbers."""

    size = 96
    end_tokens: frozenset[int] = frozenset()

    def piece(self, token: int) -> bytes:
        """A token is its number."""
        return f"{token} ".encode()


class Chaos:
    """The pipeline under attack, and what is known of it."""

    def __init__(
        self,
        pipeline: Coordinator,
        children: Children,
        relays: list[Relay],
        disks: list[Path],
        topology: Topology,
        plan: Plan,
        seed: int,
        nursery: trio.Nursery,
    ) -> None:
        self.pipeline, self.children, self.relays, self.disks = pipeline, children, relays, disks
        self.topology, self.plan = topology, plan
        self._nursery = nursery
        self._another: trio.Process | None = None
        self.tally = Tally()
        self.random = random.Random(seed)
        self.requests = [self._a_request() for _ in range(plan.requests)]
        self._reference: dict[int, list[int]] = {}
        self._current: Fault | None = None
        self._began = 0.0
        self._moments = {moment: trio.Event() for moment in MOMENTS}
        changed = pipeline.way.on_change

        def on_change() -> None:
            changed()
            self._way_changed()

        pipeline.way.on_change = on_change

    # ---------------------------------------------------------------- requests

    def _a_request(self) -> Ask:
        pick = self.random
        prompt = [pick.randrange(96) for _ in range(pick.choice(self.plan.sizes))]
        count = pick.choice(self.plan.counts)
        return prompt, count, Sampling(temperature=pick.choice((0.0, 0.0, 0.8)), seed=pick.randrange(1000))

    async def learn(self) -> None:
        """What the undisturbed pipeline says."""

        async def one(number: int, prompt: list[int], count: int, sampling: Sampling) -> None:
            done = await self.pipeline.complete(prompt, max_tokens=count, sampling=sampling)
            self._reference[number] = list(done.tokens)

        async with trio.open_nursery() as nursery:
            for number, request in enumerate(self.requests):
                nursery.start_soon(one, number, *request)

    async def ask(self, number: int | None = None, patience: float | None = None) -> bool:
        """Runs a request (which one: chance decides) and checks what it says; whether it came to its end."""
        if number is None:
            number = self.random.randrange(len(self.requests))
        (prompt, count, sampling), expected = self.requests[number], self._reference[number]
        tokens: list[int] = []
        failure: MeshpipeError | None = None
        self.tally.requests += 1
        me = self.tally.requests
        cancelled = False
        with trio.fail_after(DEADLINE):
            async with self.pipeline.generate(prompt, max_tokens=count, sampling=sampling) as generation:
                self._it_is("prefill")
                try:
                    with trio.move_on_after(float("inf") if patience is None else patience) as scope:
                        async for piece in generation:
                            tokens += piece.tokens
                            self._it_is("close" if piece.report is not None else "decode")
                            self._piece_came()
                    cancelled = scope.cancelled_caught
                except MeshpipeError as error:
                    failure = error
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

    def span(self, span: Span) -> None:
        """Looks for divergences in what the pipeline records."""
        if span.kind == Kind.COMMIT and span.detail:
            self._it_is("divergence")

    def _it_is(self, moment: str) -> None:
        self._moments[moment].set()
        self._moments[moment] = trio.Event()

    # ---------------------------------------------------------------- faults

    def faults(self) -> Iterator[str]:
        """One deal of the cards after the other."""
        while True:
            cards = list(FAULTS)
            self.random.shuffle(cards)
            yield from cards

    def _way_changed(self) -> None:
        fault, way = self._current, self.pipeline.way
        if fault is None:
            return
        if way.state is WayState.BROKEN and fault.noticed is None:
            fault.noticed = trio.current_time() - self._began
        if way.state is WayState.UP and fault.noticed is not None and fault.joined is None:
            fault.joined = trio.current_time() - self._began

    def _piece_came(self) -> None:
        fault = self._current
        if fault is not None and fault.joined is not None and fault.going_on is None:
            fault.going_on = trio.current_time() - self._began

    async def _victim(self, kind: str) -> int:
        """A process whose stage has another one that is ready, and that is in use, more often than not.

        For `rolling` all have to be ready, since it ends one of each stage.
        """
        spared = self.plan.spared if kind in DEADLY else ()
        standing: list[int] = []

        def found() -> list[int]:
            standing[:] = [index for index in PROCESSES if index not in spared and self._ready(_twin(index))]
            return standing if kind != "rolling" or all(map(self._ready, PROCESSES)) else []

        await _until(found)
        used = [index for index in standing if self.relays[index].used]
        return self.random.choice(used if used and self.random.random() < 0.8 else standing)

    def _ready(self, process: int) -> bool:
        return process in self.children._ready

    async def strike(self, kind: str) -> None:
        """One fault, from its beginning to where all is as it was but for what it has done."""
        pick = self.random
        moment, target = pick.choice(MOMENTS), await self._victim(kind)
        with trio.move_on_after(0.5) as waited:
            if moment:
                await self._moments[moment].wait()
                await trio.sleep(pick.choice((0.0, pick.uniform(0.0, 4 * self.plan.delay))))
        fault = Fault(kind, target, "" if waited.cancelled_caught else moment)
        self.tally.faults.append(fault)
        self._current, self._began = fault, trio.current_time()
        await self._do(kind, target)
        await self._prove()
        self._current = None

    async def _do(self, kind: str, target: int) -> None:
        relay, pick = self.relays[target], self.random
        if kind == "kill":
            await self._end(target, signal.SIGKILL)
        elif kind == "terminate":
            await self._end(target, signal.SIGTERM)
        elif kind in ("stop", "blink"):
            self._signal(target, signal.SIGSTOP)
            await trio.sleep(
                pick.uniform(0.05, 0.4 * self.plan.heartbeat.deadline)
                if kind == "blink"
                else pick.uniform(*self.plan.hang)
            )
            self._signal(target, signal.SIGCONT)
        elif kind == "reset":
            relay.reset()
        elif kind == "hole":
            relay.set(hole=True)
            await trio.sleep(pick.uniform(*self.plan.hang))
            relay.set()
        elif kind == "path":
            relay.swallow_one(pick)
            await trio.sleep(pick.uniform(*self.plan.hang))
            relay.spare_all()
        elif kind == "held":
            relay.set(held=True)
            await trio.sleep(pick.uniform(0.05, 0.4 * self.plan.heartbeat.deadline))
            relay.set()
        elif kind == "cut":
            relay.cut()
        elif kind == "cancel":
            with suppress(MeshpipeError):
                await self.ask(patience=pick.uniform(0.0, 0.2))
        elif kind == "disk":
            await self._fill_the_disk(target)
        elif kind == "coordinator":
            await self._lose_another_coordinator()
        elif kind == "rolling":
            await self._restart_all()
        else:
            raise ValueError(kind)

    async def _prove(self) -> None:
        """After a fault a new request succeeds; one that meets the lost stage may have to be asked again."""
        with trio.fail_after(DEADLINE):
            while not await self.ask():
                pass

    def _signal(self, process: int, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.children.pids[process], number)

    async def _end(self, process: int, number: signal.Signals) -> None:
        """Returns when it is known to have ended."""
        ended = self.children.pids[process]
        self._signal(process, number)
        await _until(lambda: not self._ready(process) or self.children.pids[process] != ended)

    async def _restart_all(self) -> None:
        """First those of one half, then, when others have come in their place, those of the other half."""
        for wave in (PROCESSES[: len(SPLIT)], PROCESSES[len(SPLIT) :]):
            async with trio.open_nursery() as nursery:
                for process in wave:
                    if process not in self.plan.spared:
                        nursery.start_soon(self._end, process, signal.SIGTERM)
            await self._prove()
            if wave.start == 0:
                await _until(lambda: all(map(self._ready, PROCESSES)))

    async def _fill_the_disk(self, process: int) -> None:
        """The process ends, and cannot start again until its disk has room; its standby serves meanwhile."""
        full = self.disks[process] / "full"
        full.touch()
        try:
            ended = self.children.pids[process]
            await self._end(process, signal.SIGKILL)
            await _until(lambda: self.children.pids[process] != ended)
            await self._prove()
        finally:
            full.unlink()

    async def prepare_another_coordinator(self) -> None:
        """A process that waits for a word to join the same stages; starting Python takes longer than most faults."""
        places = [
            {"address": place.address, "standby": list(place.standby)} for place in self.topology.stages
        ]
        tests = str(Path(__file__).parent.parent)
        self._another = await self._nursery.start(
            partial(
                trio.run_process,
                [sys.executable, "-m", "chaos.other", json.dumps(places)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                check=False,
                env={**os.environ, "PYTHONPATH": os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")])},
            )
        )

    async def _lose_another_coordinator(self) -> None:
        """One that shares the stages generates, and is killed; the stages free its lanes."""
        if self._another is None:
            await self.prepare_another_coordinator()
        assert self._another is not None
        assert self._another.stdin is not None
        assert self._another.stdout is not None
        with trio.fail_after(DEADLINE):
            await self._another.stdin.send_all(b"go\n")
            said = await self._another.stdout.receive_some()
            assert said, "the other coordinator has ended before it generated anything"
            await trio.sleep(self.random.uniform(0.0, 0.2))
        await self.dismiss_another_coordinator()

    async def dismiss_another_coordinator(self) -> None:
        """Kills it, if there is one."""
        if self._another is not None:
            self._another.kill()
            await self._another.wait()
            for pipe in (self._another.stdin, self._another.stdout):
                assert pipe is not None
                await pipe.aclose()
            self._another = None


@asynccontextmanager
async def opened(model: Path, seed: int, plan: Plan) -> AsyncIterator[Chaos]:
    """The processes, their relays, and a pipeline over them."""
    layers = [*SPLIT, *SPLIT]
    arguments = [
        "--model", str(model), "--lanes", str(plan.lanes), "--context", str(CONTEXT), "--threads", "1",
        "--conditions", f"delay={plan.delay}", "--drain-seconds", "0.5",
        "--heartbeat", str(plan.heartbeat.every), "--heartbeat-deadline", str(plan.heartbeat.deadline),
    ]  # fmt: skip
    disks = [model.parent / f"disk-{index}" for index in range(len(layers))]
    for disk in disks:
        disk.mkdir()
    commands = [
        on_a_disk(disk, stage_command(range_, arguments)) for disk, range_ in zip(disks, layers, strict=True)
    ]
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
        async with open_remote(
            topology,
            Tokens(),  # type: ignore[arg-type]
            lanes=plan.lanes,
            context=CONTEXT,
            heartbeat=plan.heartbeat,
        ) as pipeline:
            chaos = Chaos(pipeline, children, relays, disks, topology, plan, seed, nursery)
            async with pipeline.tracing(chaos.span):
                yield chaos


async def _until(condition: Callable[[], object]) -> None:
    with trio.fail_after(DEADLINE):
        while not condition():  # noqa: ASYNC110
            await trio.sleep(0.02)


def _twin(process: int) -> int:
    """The other process of the same stage."""
    return (process + len(SPLIT)) % len(PROCESSES)


def _address_of(children: Children, index: int) -> Callable[[], str]:
    return lambda: children.places[index].address


async def attack(
    model: Path, faults: int, seed: int, plan: Plan | None = None, *, seconds: float | None = None
) -> Tally:
    """`faults` faults, or as many as come in `seconds`, with memory looked at every five seconds."""
    plan = plan or Plan()
    async with opened(model, seed, plan) as chaos:
        await chaos.learn()
        before = await _held(chaos)
        running = True

        async def keep_asking() -> None:
            while running:
                await chaos.ask()

        end = None if seconds is None else time.monotonic() + seconds
        samples: dict[str, list[Sample]] = {}
        async with trio.open_nursery() as nursery, trio.open_nursery() as watching:
            watching.start_soon(_sample, chaos, samples)
            for _ in range(plan.load):
                nursery.start_soon(keep_asking)
            await chaos.prepare_another_coordinator()
            cards = chaos.faults()
            while len(chaos.tally.faults) < faults and (end is None or time.monotonic() < end):
                await trio.sleep(chaos.random.uniform(*plan.gap))
                await chaos.strike(next(cards))
            running = False
            await chaos.dismiss_another_coordinator()
            watching.cancel_scope.cancel()
        chaos.tally.memory = summary(samples)
        await _nothing_is_left(chaos, before)
        return chaos.tally


async def _sample(chaos: Chaos, samples: dict[str, list[Sample]]) -> None:
    """Looks at all processes, again and again, until cancelled."""
    while True:
        named = {f"stage process {index}": pid for index, pid in enumerate(chaos.children.pids)}
        for name, pid in {"coordinator": os.getpid(), **named}.items():
            if (sample := look(pid)) is not None:
                samples.setdefault(name, []).append(sample)
        await trio.sleep(5.0)


@frozen
class Held:
    """What an idle pipeline holds: descriptors here, and at most at a stage; tasks that are not a relay's."""

    descriptors: int
    at_a_stage: int
    tasks: int


def _now_held(chaos: Chaos) -> Held:
    stages = [sample.descriptors for pid in chaos.children.pids if (sample := look(pid)) is not None]
    tasks = trio.lowlevel.current_statistics().tasks_living - sum(relay.tasks for relay in chaos.relays)
    return Held(len(os.listdir("/proc/self/fd")), max(stages), tasks)


async def _held(chaos: Chaos) -> Held:
    """When all requests are over."""
    await _until(lambda: not chaos.pipeline.active)
    await trio.sleep(0.1)
    return _now_held(chaos)


async def _nothing_is_left(chaos: Chaos, before: Held) -> None:
    """All lanes are free, here and at the stages, and neither descriptors nor tasks are more than they were."""
    pipeline, lanes = chaos.pipeline, chaos.plan.lanes
    await pipeline.way.wait_up(DEADLINE)

    def left() -> dict[str, int]:
        now = _now_held(chaos)
        found = {
            "requests": pipeline.active,
            "lanes": lanes - pipeline.lanes.free,
            "descriptors": now.descriptors - before.descriptors,
            "descriptors of a stage": now.at_a_stage - before.at_a_stage,
            "tasks": now.tasks - before.tasks,
        }
        return {name: number for name, number in found.items() if number > 0}

    with trio.move_on_after(20):
        while left():  # noqa: ASYNC110
            await trio.sleep(0.05)
    assert not left(), f"left behind: {left()}"
    resumed = chaos.tally.resumed
    async with trio.open_nursery() as nursery:
        for number in range(lanes):
            nursery.start_soon(chaos.ask, number % len(chaos.requests))
    assert chaos.tally.resumed == resumed, "a stage held a lane that should have been free"
