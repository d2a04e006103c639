"""Disks that are full: one clear error, nothing half-written under a name, and no request lost."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NoReturn

import pytest
import tiny
import trio
from chaos.disk import on_a_disk
from chaos.harness import Tokens
from test_telemetry import golden

from meshpipe import Topology
from meshpipe.cli.trace import recorded
from meshpipe.errors import CapacityError, UsageError
from meshpipe.files import write_whole
from meshpipe.llama.certify import certify
from meshpipe.pipeline import children
from meshpipe.pipeline.remote import open_remote
from meshpipe.telemetry.html import write_html
from meshpipe.telemetry.perfetto import read_trace, write_trace
from meshpipe.telemetry.plot import write_plot
from meshpipe.telemetry.trace import Trace
from meshpipe.topology.lock import Lock, LockedStage, write_lock


@contextmanager
def nearly_full() -> Iterator[None]:
    """No file may grow beyond 100 bytes: the kernel refuses the rest of a write, as it does on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def a_lock(_trace: Trace, path: Path) -> None:
    write_lock(Lock((LockedStage((0, 3), "cafe" * 16, "1", ("127.0.0.1:7001",)),), "float32"), path)


@pytest.mark.parametrize(
    ("write", "name"),
    [(write_trace, "a.json"), (write_html, "a.html"), (write_plot, "a.png"), (a_lock, "a.lock")],
)
async def test_what_was_there_stays_when_a_disk_becomes_full(
    write: Callable[[Trace, Path], None], name: str, tmp_path: Path, autojump_clock: object
) -> None:
    trace, path = await golden(), tmp_path / name
    for there in (False, True):
        if there:
            path.write_text("what was there")
        with nearly_full(), pytest.raises(UsageError, match=f"cannot write .*{name}: .*[Ff]ile too large"):
            write(trace, path)
        assert [file.name for file in tmp_path.iterdir()] == [name] * there
    assert path.read_text() == "what was there"
    write(trace, path)
    assert len(path.read_bytes()) > 100


async def test_a_trace_to_a_full_device_is_an_error_and_leaves_the_device(
    tmp_path: Path, autojump_clock: object
) -> None:
    trace = await golden()
    with pytest.raises(UsageError, match=r"cannot write the trace to /dev/full: .*No space left"):
        write_trace(trace, "/dev/full")
    assert Path("/dev/full").is_char_device()
    link, file = tmp_path / "link.json", tmp_path / "file.json"
    link.symlink_to(file)
    write_trace(trace, link)
    assert link.is_symlink()
    assert read_trace(file).run == trace.run


def test_files_get_the_permissions_that_files_get(tmp_path: Path) -> None:
    write_whole(tmp_path / "one", "one")
    (tmp_path / "other").write_text("other")
    assert (tmp_path / "one").stat().st_mode == (tmp_path / "other").stat().st_mode
    (tmp_path / "one").chmod(0o600)
    write_whole(tmp_path / "one", "two")
    assert (tmp_path / "one").read_text() == "two"
    assert (tmp_path / "one").stat().st_mode & 0o777 == 0o600


def test_threads_that_write_the_same_file_do_not_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All have written, and none has renamed, before the first does."""
    texts, sync = ["one", "the other", "a third"], os.fsync
    written = threading.Barrier(len(texts), timeout=10)

    def meet(file: int) -> None:
        sync(file)
        written.wait()

    monkeypatch.setattr(os, "fsync", meet)
    with ThreadPoolExecutor() as pool:
        list(pool.map(partial(write_whole, tmp_path / "same"), texts))
    assert (tmp_path / "same").read_text() in texts
    assert [file.name for file in tmp_path.iterdir()] == ["same"]


def test_output_to_a_full_disk_is_one_line_on_standard_error() -> None:
    command = [sys.executable, "-m", "meshpipe", "config"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert done.stderr == "meshpipe: cannot write the output: No space left on device\n"


@pytest.mark.slow
def test_no_room_for_a_twin_says_nothing_about_the_split(tmp_path: Path) -> None:
    """It is an error of the moment, and not remembered as a failure of the split."""
    model = tiny.write(tmp_path / "tiny.gguf", "gemma3")
    with nearly_full(), pytest.raises(CapacityError, match=r"is not certified: .*TMPDIR"):
        certify(model, (0, 3, 6), cache=tmp_path / "certificates")
    assert not (tmp_path / "certificates").exists()


async def test_children_that_cannot_start_again_leave_no_pipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "PAUSES", (0.01, 0.01))
    starts = tmp_path / "starts"
    starts.touch()
    at_first = 'echo \'{"address": "a:1"}\'; read line'
    script = f"[ -s {starts} ] || first=1; echo >> {starts}; [ $first ] || exit 2; {at_first}"
    async with children.open_children([(0, 1)], [["sh", "-c", script]], 10.0) as running:
        before = len(os.listdir("/proc/self/fd"))
        os.kill(running.pids[0], 9)
        with trio.fail_after(10):
            while starts.stat().st_size < 20:  # noqa: ASYNC110
                await trio.sleep(0.01)
        assert len(os.listdir("/proc/self/fd")) <= before + 6  # of one that is being started


async def test_no_child_is_started_again_when_all_are_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One was lost a moment before, and another takes its time to end."""
    monkeypatch.setattr(children, "PAUSES", (0.1, 0.1))
    starts = tmp_path / "starts"
    ready = 'echo \'{"address": "a:1"}\'; read line'
    commands = [["sh", "-c", f"echo >> {starts}; {ready}"], ["sh", "-c", f"{ready}; sleep 0.5"]]
    async with children.open_children([(0, 1), (1, 2)], commands, 10.0) as running:
        os.kill(running.pids[0], 9)
        with trio.fail_after(10):
            while running._running[0].returncode is None:  # noqa: ASYNC110
                await trio.sleep(0.01)
    assert starts.stat().st_size == 1


@pytest.mark.slow
def test_a_stage_without_room_for_its_slice_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    model = tiny.write(tmp_path / "tiny.gguf", "llama")
    disk = tmp_path / "disk"
    disk.mkdir()
    (disk / "full").touch()
    stage = [sys.executable, "-m", "meshpipe", "stage", "--model", str(model), "--layers", "0:3"]
    done = subprocess.run(on_a_disk(disk, stage), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("meshpipe: ")
    assert len(done.stderr.splitlines()) == 1
    assert "larger disk" in done.stderr or "File too large" in done.stderr
    assert [file.name for file in disk.rglob("*") if file.is_file()] == ["full"]


@pytest.mark.slow
async def test_a_stage_whose_log_is_on_a_full_disk_serves(tmp_path: Path) -> None:
    model = tiny.write(tmp_path / "tiny.gguf", "llama")
    command = children.stage_command((0, 6), ["--model", str(model), "--context", "64"])
    at = command.index("stage")
    command = ["sh", "-c", 'exec "$@" 2>/dev/full', "sh", *command[:at], "--log", "debug", *command[at:]]
    async with children.open_children([(0, 6)], [command], 60.0) as running:
        topology = Topology(tuple(running.places))
        async with open_remote(topology, Tokens()) as pipeline:  # type: ignore[arg-type]
            done = await pipeline.complete([5, 6, 7], max_tokens=10)
    assert len(done.tokens) == 10


def test_a_trace_that_has_no_folder_is_refused_before_anything_runs(tmp_path: Path) -> None:
    def opener() -> NoReturn:
        raise AssertionError("it was opened")

    with pytest.raises(UsageError, match="there is no folder"):
        recorded(opener, str(tmp_path / "nowhere" / "run.json"))
