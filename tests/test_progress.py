"""Progress of slicing and loading reaches whoever watches, and bars appear on terminals only."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import llama_cpp
import pytest
import trio
from rich.console import Console
from simulated import periodic, simulated
from tiny import metadata, write

from meshpipe import blocking
from meshpipe.cli.progress import bars
from meshpipe.llama.options import EngineOptions
from meshpipe.llama.progress import report, watched, watching
from meshpipe.llama.slicing import slice_model
from meshpipe.pipeline.coordinator import Coordinator


def test_slicing_says_how_far_it_is(tmp_path: Path) -> None:
    model = write(tmp_path / "m.gguf", "llama", metadata("llama"))
    seen: dict[str, list[tuple[int, int]]] = defaultdict(list)
    with watching(lambda what, done, total: seen[what].append((done, total))):
        slice_model(model, 2, 4, cache=tmp_path / "cache")
        slice_model(model, 2, 4, cache=tmp_path / "cache")  # is there already
    assert not watched()
    (steps,) = seen.values()
    assert list(seen) == ["writing layers 2:4"]
    assert steps == sorted(steps)
    assert steps[0][0] == 0
    (total,) = {total for _, total in steps}
    assert steps[-1] == (total, total)


def test_loading_says_how_far_it_is(tmp_path: Path) -> None:
    model = write(tmp_path / "m.gguf", "llama", metadata("llama"))
    seen: list[tuple[str, int, int]] = []
    with watching(lambda *progress: seen.append(progress)):
        llama_cpp.llama_model_free(EngineOptions().load(model))
    assert seen[-1] == ("loading m.gguf", 1000, 1000)


def test_a_pipeline_in_a_thread_is_watched_from_here() -> None:
    @asynccontextmanager
    async def opener() -> AsyncIterator[Coordinator]:
        await trio.to_thread.run_sync(report, "loading", 1, 2)
        async with simulated(periodic()) as sim:
            yield sim.coordinator

    seen: list[tuple[str, int, int]] = []
    with watching(lambda *progress: seen.append(progress)), blocking.Pipeline(opener):
        pass
    assert seen == [("loading", 1, 2)]


@pytest.mark.parametrize("terminal", [True, False])
def test_bars_are_for_terminals(terminal: bool) -> None:
    screen = io.StringIO()
    with bars(Console(file=screen, force_terminal=terminal, width=80)):
        for done in range(3):
            report("writing layers 0:15", done, 2)
        assert watched() is terminal
    assert ("writing layers 0:15" in screen.getvalue()) is terminal
    assert terminal or screen.getvalue() == ""
