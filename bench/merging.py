"""Which queued windows should share a decode: three rules, on simulated stages and trio's virtual clock.

Two equal stages with the measured costs of half a 135M model; one window a session in flight, nothing is
guessed. Rates are of all sessions together. The virtual clock makes the numbers the same on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from unittest.mock import patch

import trio
import trio.testing

from bench import report
from meshpipe.actors.scope import owned_nursery
from meshpipe.messages import StageDescriptor
from meshpipe.pipeline import stage
from meshpipe.pipeline.coordinator import Coordinator
from meshpipe.pipeline.local import join_stages
from meshpipe.pipeline.merging import Cost, merged_count
from meshpipe.pipeline.runner import SimulatedRunner
from meshpipe.pipeline.sink import ReturnSink
from meshpipe.speculation.settings import Speculation
from meshpipe.wire import Conditions

COST = ((1, 0.009), (2, 0.0141), (4, 0.0219), (8, 0.0367), (16, 0.066), (63, 0.25))
TOKENS = 60
Rule = Callable[..., int]


class Numbers:
    """A vocabulary whose tokens are their own text."""

    size = 1000
    end_tokens: frozenset[int] = frozenset()

    def piece(self, token: int) -> bytes:
        return f"{token} ".encode()


def alone(rows: Sequence[int], cost: Cost, most: int, *, backlogged: bool) -> int:
    """Every window by itself."""
    return 1


def all_that_can(rows: Sequence[int], cost: Cost, most: int, *, backlogged: bool) -> int:
    """As many as fit into a decode."""
    return max(count for count in range(1, len(rows) + 1) if count == 1 or sum(rows[:count]) <= most)


def least_mean(rows: Sequence[int], cost: Cost, most: int, *, backlogged: bool) -> int:
    """Always the least mean time to completion."""
    return merged_count(rows, cost, most, backlogged=False)


RULES: dict[str, Rule] = {
    "each alone": alone,
    "all that can": all_that_can,
    "least mean": least_mean,
    "ours": merged_count,
}


async def throughput(sessions: int, delay: float) -> float:
    """Tokens per second of all sessions together, which begin 3 ms after each other."""
    runners = [
        SimulatedRunner(
            StageDescriptor("sim", (i, i + 1), 2, 8, Numbers.size, sessions, 4096, COST),
            target=lambda tokens: len(tokens) % 997,
        )
        for i in range(2)
    ]
    async with owned_nursery() as nursery:
        sink = ReturnSink()
        first, _ = join_stages(nursery, runners, sink, Conditions(delay=delay))
        coordinator = Coordinator(
            nursery,
            first,
            sink,
            [runner.descriptor for runner in runners],
            Numbers(),  # type: ignore[arg-type]
            link=2 * delay,
        )

        async def session(number: int) -> None:
            await trio.sleep(0.003 * number)
            await coordinator.complete(
                [number] * 8, max_tokens=TOKENS, speculation=Speculation(mode="off"), reuse=False
            )

        began = trio.current_time()
        async with trio.open_nursery() as requests:
            for number in range(sessions):
                requests.start_soon(session, number)
        return sessions * TOKENS / (trio.current_time() - began)
    raise AssertionError("not reached")


def main(argv: list[str]) -> None:
    """Simulates, and prints the table."""
    arguments = report.parser("merging", __doc__).parse_args(argv)
    rows = []
    for delay in (0.0005, 0.025, 0.1):
        for sessions in (8, 32) if arguments.quick else (8, 16, 32):
            row: dict[str, float | str] = {
                "bench": "merging",
                "delay_ms": delay * 1000,
                "sessions": sessions,
            }
            for name, rule in RULES.items():
                with patch.object(stage, "merged_count", rule):
                    clock = trio.testing.MockClock(autojump_threshold=0)
                    row[name] = trio.run(throughput, sessions, delay, clock=clock)
            rows.append(row)
    print(report.table(rows))
    report.finish(arguments, rows)
