"""Twelve faults at random moments; many more with `python -m tests.chaos --faults 200`."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
from chaos.harness import attack

pytestmark = pytest.mark.slow


@pytest.mark.timeout(400)  # starting Python again and again takes its time on a busy machine
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts descriptors in /proc")
async def test_no_request_is_lost_while_there_is_a_standby(tmp_path: Path) -> None:
    tally = await attack(tiny.write(tmp_path / "tiny.gguf", "llama"), faults=12, seed=7)
    assert len(tally.faults) == 12
    assert tally.errors == []
