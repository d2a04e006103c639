"""A pipe that exists only in arithmetic: what speed a policy reaches on a text, without a model or a clock.

A deterministic discrete-event simulation of one session on S stages. The stages are first come, first served
and run one window at a time for as long as their cost curve says; links only delay; the last stage answers
straight to the coordinator, which is on the first stage's host. The target is a text: the model's choice at a
position is the text's token there. All that decides is the real thing: `Ledger`, `Composite` and `Pace`.

Stages keep the rules that make skipping safe. A Discard travels with the delay of the links, overtakes what
is queued, and drops stale windows unrun; having dropped a window of an epoch, a stage drops every later one of
it. The last stage marks an epoch stale for itself at its first mismatch, inside a window or between a window's
last pick and the next window's first token. A window that starts above a stage's cache is an error here too.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count

from attrs import define, evolve, field, frozen

from meshpipe.errors import ProtocolError
from meshpipe.messages import Reply, Timing, Window
from meshpipe.speculation.composite import Composite
from meshpipe.speculation.ledger import Ledger, Limits
from meshpipe.speculation.ngram import Draft, NgramProposer
from meshpipe.speculation.policy import CostCurve, Pace, Pipe


@frozen
class Topology:
    """Stages' cost curves, and the one-way delay in seconds of each link.

    `links[s]` leads from stage s to the next one; the last one is the return from the last stage to the
    coordinator. Of a single stage it is the only one.
    """

    curves: tuple[CostCurve, ...]
    links: tuple[float, ...]

    def __attrs_post_init__(self) -> None:
        if len(self.curves) != len(self.links):
            raise ValueError(f"{len(self.curves)} stages need as many links, not {len(self.links)}")

    def pipe(self) -> Pipe:
        """What handshakes and probes would have told of it."""
        return Pipe(self.curves, sum(self.links))


@frozen
class Outcome:
    """What a simulated session did. Times in seconds from the dispatch of the prompt."""

    times: tuple[float, ...]
    """When each output token was committed."""
    windows: int
    rows: int
    stale_rows: int
    """Rows dispatched that became stale, run or not."""
    busy: tuple[float, ...]
    """Seconds that each stage computed."""

    def rate(self, first: int = 0, last: int = -1) -> float:
        """Decode tokens per second between two output tokens, by their index; of all by default."""
        tokens = range(len(self.times))[last] - first
        return tokens / (self.times[last] - self.times[first])


class Oracle(NgramProposer):
    """A proposer that knows the text, and lies when it is told to: `lie(position)` says where.

    It is as confident as an n-gram match of `match` tokens, rightly or not.
    """

    def __init__(
        self, text: Sequence[int], *, lie: Callable[[int], bool] = lambda position: False, match: int = 64
    ) -> None:
        super().__init__()
        self._text = text
        self._lie = lie
        self._match = match
        self._frontier = 0

    def extend(self, tokens: Sequence[int]) -> None:
        self._frontier += len(tokens)

    def propose(self, suffix: Sequence[int], limit: int) -> Draft:
        start = self._frontier + len(suffix)
        stop = min(start + limit, len(self._text))
        tokens = tuple(self._text[at] ^ self._lie(at) for at in range(start, stop))
        return Draft(tokens, self._match + len(suffix))


@define
class _Stage:
    """One stage: a queue, a cache length, and the epoch below which windows are stale."""

    index: int
    queue: deque[tuple[float, Window]] = field(factory=deque)
    running: bool = False
    fresh_epoch: int = 0
    cached: int = 0
    busy: float = 0.0
    expected: int | None = None  # last stage: its pick for the next window's first token


class _Simulation:
    def __init__(
        self,
        topology: Topology,
        text: Sequence[int],
        prompt: int,
        pace: Pace,
        proposer: NgramProposer | None,
    ) -> None:
        self.topology = topology
        self.text = text
        self.pace = pace
        self.ledger = Ledger(0, text[:prompt], Limits(max_tokens=len(text) - prompt, context=len(text) + 1))
        self.composite = Composite(self.ledger, proposer)
        self.composite.update()
        self.stages = [_Stage(index) for index in range(len(topology.curves))]
        self.now = 0.0
        self.times: list[float] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._sent: dict[int, float] = {}

    def after(self, delay: float, action: Callable[..., None], *arguments: object) -> None:
        event: Callable[[], None] = partial(action, *arguments)
        heapq.heappush(self._events, (self.now + delay, next(self._order), event))

    def run(self) -> Outcome:
        self.dispatch()
        while self.ledger.finished is None:
            if not self._events:
                raise ProtocolError("the simulated session waits for nothing: a lost window or a deadlock")
            self.now, _, action = heapq.heappop(self._events)
            action()
        counters = self.ledger.counters
        return Outcome(
            times=tuple(self.times),
            windows=counters.windows,
            rows=counters.tokens,
            stale_rows=counters.stale_tokens,
            busy=tuple(stage.busy for stage in self.stages),
        )

    # The coordinator.

    def dispatch(self) -> None:
        while self.ledger.finished is None:
            survival = [1.0] if self.ledger.prefilling else self.composite.survival()
            width = 1 if self.ledger.prefilling else self.pace.next_width(survival)
            window = self.composite.dispatch(width) if width else None
            if window is None:
                return
            if window.wanted:
                self.pace.sent(window.number, survival[: window.wanted])
            self._sent[window.number] = self.now
            self.arrive(0, window)

    def replied(self, reply: Reply) -> None:
        self.pace.pipe.observe(self.now - self._sent[reply.number], reply.timings)
        for commit in self.ledger.receive(reply):
            self.times += [self.now] * len(commit.tokens)
            self.pace.retired(commit.number, self.composite.update())
            if commit.diverged:
                self.pace.restart()
            if commit.discard is not None:
                self.discard(0, commit.discard.epoch)
        self.dispatch()

    def discard(self, index: int, epoch: int) -> None:
        stage = self.stages[index]
        stage.fresh_epoch = max(stage.fresh_epoch, epoch)
        if index + 1 < len(self.stages):
            self.after(self.topology.links[index], self.discard, index + 1, epoch)

    # The stages.

    def arrive(self, index: int, window: Window) -> None:
        stage = self.stages[index]
        stage.queue.append((self.now, window))
        if not stage.running:
            self.start(stage)

    def start(self, stage: _Stage) -> None:
        """Run the next window that is not stale, if there is one."""
        last = stage.index + 1 == len(self.stages)
        while stage.queue:
            arrived, window = stage.queue.popleft()
            if window.epoch < stage.fresh_epoch:
                continue
            if window.epoch > stage.fresh_epoch:
                stage.fresh_epoch, stage.expected = window.epoch, None
            elif last and stage.expected is not None and window.tokens[0] != stage.expected:
                stage.fresh_epoch += 1
                continue
            if window.start > stage.cached:
                raise ProtocolError(f"window at {window.start}, but stage {stage.index} has {stage.cached}")
            stage.cached = window.stop
            stage.running = True
            service = self.topology.curves[stage.index](window.width)
            stage.busy += service
            timing = Timing(stage.index, self.now - arrived, service, window.width)
            self.after(service, self.done, stage, window, timing)
            return

    def done(self, stage: _Stage, window: Window, timing: Timing) -> None:
        stage.running = False
        window = evolve(window, timings=(*window.timings, timing))
        delay = self.topology.links[stage.index]
        if stage.index + 1 < len(self.stages):
            self.after(delay, self.arrive, stage.index + 1, window)
        elif window.wanted:
            self.after(delay, self.replied, self.pick(stage, window))
        self.start(stage)

    def pick(self, stage: _Stage, window: Window) -> Reply:
        """The last stage's picks, up to the first that differs from the window."""
        first = window.stop - window.wanted
        picks: list[int] = []
        for position in range(first + 1, window.stop + 1):
            picks.append(self.text[position] if position < len(self.text) else 0)
            if position < window.stop and picks[-1] != window.tokens[position - window.start]:
                if stage.fresh_epoch == window.epoch:
                    stage.fresh_epoch += 1
                break
        stage.expected = picks[-1]
        return Reply(window.session, window.epoch, window.number, first, tuple(picks), window.timings)


def simulate(
    topology: Topology,
    text: Sequence[int],
    prompt: int,
    pace: Pace,
    proposer: NgramProposer | None = None,
) -> Outcome:
    """Decode `text` after its first `prompt` tokens on a simulated pipe; what it took.

    Raises ProtocolError if the session deadlocks or a stage meets a window above its cache, neither of which
    may ever happen.
    """
    return _Simulation(topology, text, prompt, pace, proposer).run()
