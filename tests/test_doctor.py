"""The doctor: what it measures of stages, what it finds wrong, and that it says what to do."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from attrs import evolve
from rich.console import Console
from test_remote import SECURITIES, joined, lanes_free, mesh

from meshpipe import StagePlace, Topology
from meshpipe.cli import doctor, main
from meshpipe.errors import EngineError
from meshpipe.llama import machine
from meshpipe.llama.options import EngineOptions
from meshpipe.pipeline import examine as examining
from meshpipe.pipeline.examine import examine


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """On loopback no transfer is ever long enough."""
    monkeypatch.setattr(examining, "MOST_BYTES", examining.FIRST_BYTES)


@contextmanager
def proxied(address: str, *arguments: str) -> Iterator[str]:
    """The address of a bad wire to it."""
    command = [sys.executable, "-m", "meshpipe.wire.proxy", "--until-eof", "--to", address, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        yield f"127.0.0.1:{process.stdout.readline().strip()}"
        process.stdin.close()
        assert process.wait(10) == 0


async def test_it_measures_the_way_to_a_stage() -> None:
    async with mesh(1, n_embd=1024) as m:
        (place,) = m.topology.stages
        with proxied(place.address, "--delay-ms", "20", "--bandwidth-mbit", "40") as address:
            health = await examine(Topology((evolve(place, address=address),)), 0)
        assert health.error is None
        assert health.descriptor is not None
        assert health.descriptor.n_embd == 1024
        assert health.round_trip is not None
        assert 0.04 <= health.round_trip < 0.5
        assert health.bandwidth is not None
        assert 1e6 < health.bandwidth <= 5.2e6  # 40 Mbit/s are 5 MB/s
        assert health.clock is not None
        assert health.clock.ahead == pytest.approx(0, abs=0.5)  # it is this process's own
        assert health.clock.give_or_take >= 0.02


@pytest.mark.parametrize("security", SECURITIES)
async def test_a_stage_that_is_in_use_notices_nothing(security: str) -> None:
    ours = SECURITIES[security]()
    async with mesh(3, ours, lanes=1) as m, joined(m.topology, security=ours) as pipeline:
        async with pipeline.generate([1, 2, 3], max_tokens=200) as generation:
            await generation.__anext__()
            for stage in range(3):
                health = await examine(m.topology, stage, ours)
                assert health.error is None
                assert doctor.stage(health).status == "ok"
            assert sum([len(piece.tokens) async for piece in generation]) > 100
        again = await pipeline.complete([1, 2, 3], max_tokens=5)
        assert again.report.cached_tokens == 2
        await lanes_free(m.hosts)


async def test_what_is_wrong_with_a_stage_is_said_with_what_to_do() -> None:
    async with mesh(2) as m:
        first, second = m.topology.stages
        wrong = Topology((evolve(first, layers=(0, 1)), evolve(second, layers=(5, 6))))
        said = doctor.stage(await examine(wrong, 1))
        assert said.status == "failed"
        assert "layers" in said.finding
        assert "correct `layers`" in said.advice
    gone = doctor.stage(await examine(Topology((StagePlace("127.0.0.1:1"),)), 0))
    assert gone.status == "failed"
    assert "cannot reach 127.0.0.1:1" in gone.finding
    assert "firewall" in gone.advice
    async with mesh(1, SECURITIES["key"]()) as m:
        keyless = doctor.stage(await examine(m.topology, 0))
        assert "shared key" in keyless.finding
        assert "--key-file" in keyless.advice


async def test_models_that_differ_are_named() -> None:
    async with mesh(2) as m:
        health = [await examine(m.topology, stage) for stage in range(2)]
    assert doctor.same_model(health, "sim").status == "ok"
    other = doctor.same_model(health, "another")
    assert other.status == "failed"
    assert other.finding == "stage 0 has sim, stage 1 has sim, the model here has another"


def test_a_build_that_leaves_instructions_out_is_found() -> None:
    check = doctor.instructions({"AVX", "AVX2"}, {"avx", "avx2", "avx512f", "sse"})
    assert check.status == "warning"
    assert "also has AVX512" in check.finding
    assert "GGML_NATIVE=ON" in check.advice
    assert doctor.instructions({"AVX", "AVX2"}, {"avx", "avx2"}).status == "ok"
    assert doctor.instructions({"AVX"}, set()).status == "skipped"
    assert machine.built_for()  # llama.cpp still says it in the form that is read


def test_flags_of_the_processor(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("processor : 0\nflags\t\t: fpu avx2 amx_tile\n\nprocessor : 1\nflags : fpu\n")
    assert machine.cpu_flags(file) == {"fpu", "avx2", "amx_tile"}
    assert machine.cpu_flags(tmp_path / "none") == set()


def test_a_probe_that_crashes_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def crash(self: EngineOptions, path: Path) -> None:
        raise EngineError("crashed")

    monkeypatch.setattr(EngineOptions, "require_repack_survives", crash)
    check = doctor.repacking({machine.AMX}, tmp_path)
    assert check.status == "warning"
    assert check.finding.startswith("the processor announces AMX; a trial decode with repacking crashed")


def test_a_cache_that_cannot_be_written_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)
    check = doctor.disk(tmp_path / "not" / "there")
    assert (check.status, check.advice) == ("failed", "set XDG_CACHE_HOME to a directory that can be written")


def test_it_says_checks_in_words_and_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EngineOptions, "require_repack_survives", lambda self, path: None)
    file = tmp_path / "mesh.toml"
    file.write_text('[[stages]]\naddress = "127.0.0.1:1"\n')
    model = str(tmp_path / "none.gguf")
    assert main(["doctor", "--model", model, "--topology", str(file), "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["healthy"] is False
    status = {check["name"]: check["status"] for check in said["checks"]}
    assert status["model"] == status["stage 0 at 127.0.0.1:1"] == "failed"
    assert status["versions"] == "ok"
    assert all(check["advice"] for check in said["checks"] if check["status"] in ("failed", "warning"))
    doctor.say(Console(), doctor.Check("name", "failed", "finding", "advice"))
    assert capsys.readouterr().out == "  failed  name: finding\n          → advice\n"


@pytest.mark.slow
def test_a_healthy_topology(tmp_path: Path, smollm2: Path) -> None:
    stages = [
        subprocess.Popen(
            [sys.executable, "-m", "meshpipe", "stage", "--model", str(smollm2), "--layers", layers,
             "--listen", "127.0.0.1:0", "--context", "512", "--json"],
            stdout=subprocess.PIPE, text=True,
        )
        for layers in ("0:15", "15:30")
    ]  # fmt: skip
    try:
        lines = [f'model = "{smollm2}"']
        for stage in stages:
            assert stage.stdout is not None
            ready = json.loads(stage.stdout.readline())
            lines.append(
                '[[stages]]\nlayers = "{}:{}"'.format(*ready["layers"]) + f'\naddress = "{ready["address"]}"'
            )
        file = tmp_path / "mesh.toml"
        file.write_text("\n".join(lines))
        done = subprocess.run(
            [sys.executable, "-m", "meshpipe", "doctor", "--model", str(smollm2), "--topology", str(file)],
            capture_output=True,
            text=True,
            timeout=120,
        )
    finally:
        for stage in stages:
            stage.terminate()
            stage.wait(20)
            assert stage.stdout is not None
            stage.stdout.close()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ok  stage 1 at" in done.stdout
    assert "replies by the direct route" in done.stdout
    assert "everywhere" in done.stdout
    assert "\x1b" not in done.stdout
