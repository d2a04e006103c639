"""What a stage takes of main memory, what is there, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny

from meshpipe.errors import CapacityError, UsageError
from meshpipe.llama import options as options_module
from meshpipe.llama.decodes import Span
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


def test_weights_may_exceed_memory_where_they_are_mapped_caches_never(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for evictable in (True, False):
        check_fits(Need(10, 10), 20, "it", evictable=evictable)
        check_fits(Need(10, 10), None, "it", evictable=evictable)
        with pytest.raises(CapacityError, match=r"it needs .* for weights"):
            check_fits(Need(10, 10), 9, "it", evictable=evictable)
    with pytest.raises(CapacityError):
        check_fits(Need(10, 10), 19, "it", evictable=False)
    assert not caplog.records
    check_fits(Need(10, 10), 10, "it", evictable=True)
    (warning,) = caplog.messages
    assert "read from the disk for every token" in warning


@pytest.mark.parametrize("option", [{"mmap": False}, {"mlock": True}, {"memory_limit": 0.0005}])
def test_a_stage_larger_than_memory_runs_unless_its_weights_must_stay(
    model: Path, option: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    takes = need(model, lanes=1, cells=256)
    assert takes.total > 0.0005 * 2**30 > takes.cache
    monkeypatch.setattr(options_module, "available", lambda: takes.total - 1)
    with StageEngine(model, context=100) as engine:
        engine.run([Span(0, 0, [1, 2], wanted=1)])
    assert ["slow" in message for message in caplog.messages] == [True]
    with pytest.raises(CapacityError, match="memory are there"):
        StageEngine(model, context=100, options=EngineOptions(**option))


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


Group = Callable[..., None]


@pytest.fixture
def group(tmp_path: Path) -> Group:
    """Makes a control group below `tmp_path`, where 5 MB are free; what its files hold by name."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemAvailable: 5000 kB\n")

    def make(path: str, **files: str) -> None:
        place = tmp_path / "sys/fs/cgroup" / path
        place.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (place / f"memory.{name}").write_text(content + "\n")

    return make


def test_what_control_groups_leave(tmp_path: Path, group: Group) -> None:
    """Of version 2: the tightest of the process's own and those above it."""
    (tmp_path / "proc/self/cgroup").write_text("0::/pod/mine\n")
    free = 5000 * 1024
    assert available(tmp_path) == free
    group("pod", max="4000000", stat="anon 1000000\nshmem 500000\nfile 2000000")
    assert available(tmp_path) == 2500000
    group("pod/mine", max="max", stat="anon 9\nshmem 0")
    assert available(tmp_path) == 2500000
    group("pod/mine", max="1000000")
    assert available(tmp_path) == 1000000 - 9
    group("pod/other", max="1", stat="anon 0\nshmem 0")
    group("", max="900000", stat="file 9")  # does not say what is used
    assert available(tmp_path) == 1000000 - 9
    group("", stat="anon 900001\nshmem 0")
    assert available(tmp_path) == 0


def test_what_control_groups_of_version_1_leave(tmp_path: Path, group: Group) -> None:
    (tmp_path / "proc/self/cgroup").write_text("9:name=systemd:/\n4:memory:/host/name:of/it\n1:cpu:/\n0::/\n")
    used = "rss 7\ntotal_rss 1000000\ntotal_shmem 9"
    group("memory", limit_in_bytes="3000000", stat=used)  # a container's own, by another name on the host
    assert available(tmp_path) == 2000000 - 9
    group("memory/host/name:of/it", limit_in_bytes=str(2**63 - 4096), stat=used)
    assert available(tmp_path) == 2000000 - 9
    group("memory/host/name:of", limit_in_bytes="1500000", stat=used)
    assert available(tmp_path) == 500000 - 9
