"""What may befall sessions with a proposer that runs ahead, of any kind: the output stays serial."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import trio
from attrs import evolve, frozen
from determinism import run
from hypothesis import strategies as st
from simulated import Simulated, SimulatedDrafter, mixed, serial, simulated

from meshpipe import Speculation

COUNT = 40
"""Tokens of each request."""


@frozen
class Ordeal:
    """A pipeline of so many stages, `delay` apart, and what goes wrong there.

    The proposer takes `seconds` a token and is wrong at every `every`-th position; requests are given up in the
    middle if `cancelled`; replies are lost after each of the times in `lost`.
    """

    stages: int
    depth: int | Literal["auto"]
    width: int | Literal["auto"]
    delay: float | None
    seconds: float
    every: int
    cancelled: bool
    lost: Sequence[float]

    def lies(self, position: int) -> bool:
        """Whether the proposer is wrong there."""
        return position % self.every == 0

    def endure(
        self, proposer: SimulatedDrafter, kind: str, speculation: Speculation, prompts: Sequence[list[int]]
    ) -> None:
        """Runs a request for each prompt, all at once on two lanes; `kind` is what `simulated` calls the proposer."""
        speculation = evolve(speculation, depth=self.depth, width=self.width)

        async def one(sim: Simulated, prompt: list[int]) -> None:
            tokens: list[int] = []
            async with sim.coordinator.generate(
                prompt, max_tokens=COUNT, speculation=speculation
            ) as generation:
                async for piece in generation:
                    tokens += piece.tokens
                    if self.cancelled and len(tokens) > COUNT // 2:
                        break
            assert tokens == serial(mixed, prompt, COUNT)[: len(tokens)]
            assert self.cancelled or len(tokens) == COUNT

        async def lose(sim: Simulated) -> None:
            for wait in self.lost:
                await trio.sleep(wait)
                sim.coordinator.reroute()

        async def main() -> None:
            named = {kind: proposer}
            async with simulated(mixed, self.stages, delay=self.delay, lanes=2, **named) as sim:  # type: ignore[arg-type]
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(lose, sim)
                    for prompt in prompts:
                        nursery.start_soon(one, sim, prompt)
                await trio.sleep(5)
                sim.assert_nothing_is_left()
                assert not proposer.lanes

        run(main)


ordeals = st.builds(
    Ordeal,
    stages=st.integers(1, 4),
    depth=st.one_of(st.just("auto"), st.integers(1, 6)),
    width=st.one_of(st.just("auto"), st.integers(1, 9)),
    delay=st.sampled_from([None, 0.0, 0.1]),
    seconds=st.sampled_from([0.0, 0.001, 0.03]),
    every=st.integers(1, 30),
    cancelled=st.booleans(),
    lost=st.lists(st.floats(0, 3), max_size=3),
)
