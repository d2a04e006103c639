"""Twenty faults at random moments, and the real model; many more with `python -m tests.chaos --faults 200`."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import tiny
import trio
from chaos.harness import FAULTS, MOMENTS, Plan, attack
from reference import greedy

from meshpipe import Pipeline
from meshpipe.llama.vocabulary import Vocabulary
from meshpipe.wire.link import Heartbeat

pytestmark = pytest.mark.slow


CLOSE_TOGETHER = Plan(
    gap=(0.02, 0.15),
    heartbeat=Heartbeat(0.2, 1.0),
    requests=8,
    sizes=(1, 40, 200),
    counts=(1, 20, 40),
)


@pytest.mark.timeout(400)  # starting Python again and again takes its time on a busy machine
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts descriptors in /proc")
async def test_no_request_is_lost_while_there_is_a_standby(tmp_path: Path) -> None:
    """Every kind of fault there is, once at least."""
    tally = await attack(tiny.write(tmp_path / "tiny.gguf", "llama"), len(FAULTS), 7, CLOSE_TOGETHER)
    assert {fault.kind for fault in tally.faults} == set(FAULTS)
    assert {fault.moment for fault in tally.faults} == set(MOMENTS)
    assert tally.errors == []


async def test_the_real_model_says_the_same_over_stages_that_are_killed(smollm2: Path) -> None:
    """Without standbys: the children are started again, and the prompt is run again."""
    vocabulary = Vocabulary(smollm2)
    prompt = vocabulary.tokenize("Count: 1 2 3 4 5 6 7 8 9 10 1 2 3 4 5 6 7 8 9")
    vocabulary.close()
    tokens: list[int] = []
    async with Pipeline.spawn(smollm2, "0,15,30", context=512) as pipeline:
        async with pipeline.generate(prompt, max_tokens=30, ignore_end=True) as generation:
            async for piece in generation:
                tokens += piece.tokens
                if len(tokens) >= 10 and pipeline.way.generation == 1 and pipeline.way.up:
                    os.kill(pipeline.processes[1], signal.SIGKILL)
                    while pipeline.way.up:  # noqa: ASYNC110
                        await trio.sleep(0.01)
        assert generation.report is not None
        assert generation.report.resumes == 1
        assert generation.report.exact
    assert tokens == greedy(smollm2, prompt, 30)
