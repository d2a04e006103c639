"""What a stage takes of main memory, what is there, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny

from meshpipe.errors import CapacityError, UsageError
from meshpipe.llama.engine import StageEngine
from meshpipe.llama.inspection import inspect_model
from meshpipe.llama.memory import Need, available, check_fits, need
from meshpipe.llama.options import EngineOptions
from meshpipe.llama.slicing import slice_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("memory") / "tiny.gguf", "llama")


def test_what_caches_and_weights_take(model: Path) -> None:
    whole = need(model, lanes=3, cells=512)
    half = need(slice_model(model, 0, 3), lanes=3, cells=512)
    assert 2 * half.cache == whole.cache
    info = inspect_model(model)
    assert whole.cache == 3 * 512 * sum(info.layer_cache_bytes)
    assert info.total_bytes <= whole.weights <= model.stat().st_size
    assert half.weights < whole.weights
    q8 = need(model, lanes=3, cells=512, keys="q8_0")
    assert q8.cache == whole.cache * (2 + 34 / 32) / 4
    assert need(model, lanes=6, cells=256).cache == whole.cache
    assert whole.total == whole.weights + whole.cache


def test_what_does_not_fit_is_refused_before_it_is_loaded(model: Path) -> None:
    with pytest.raises(CapacityError, match=r"0:6 with 200 lanes × 100000 tokens needs .* and .* are there"):
        StageEngine(model, lanes=200, context=100_000, options=EngineOptions(memory_limit=0.01))
    with StageEngine(model, lanes=2, context=256, options=EngineOptions(memory_limit=0.1)):
        pass
    check_fits(Need(10, 10), 20, "it")
    check_fits(Need(10, 10), None, "it")


@pytest.mark.parametrize("size", [float("nan"), float("inf"), -1, "3"])
def test_a_limit_is_a_size(size: Any) -> None:
    with pytest.raises(UsageError, match="memory_limit is"):
        EngineOptions(memory_limit=size)


def test_what_is_there(tmp_path: Path) -> None:
    found = available()
    assert found is not None
    assert found > 2**26
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    5000 kB\n")
    assert available(tmp_path) == 5000 * 1024
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    assert available(tmp_path) == 5000 * 1024
    (group / "memory.max").write_text("4000000\n")
    (group / "memory.stat").write_text("file 9\n")
    assert available(tmp_path) == 5000 * 1024
    (group / "memory.stat").write_text("anon 1000000\nfile 9\n")
    assert available(tmp_path) == 3000000
