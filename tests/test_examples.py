"""The examples run as they stand, and say what they promise."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from meshpipe.topology.layout import read_topology

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / name), *arguments],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return done.stdout


@pytest.mark.slow
def test_local() -> None:
    output = run("local.py")
    assert output.count("> ") == output.count("[60 tokens") + output.count(", end]")


@pytest.mark.slow
def test_spawn() -> None:
    output = run("spawn.py")
    assert output.count("February | 28\nMarch | 31\nApril | 30") == 2
    assert output.endswith("the same tokens\n")


@pytest.mark.slow
def test_connect() -> None:
    output = run("connect.py")
    assert "stage 0:15 serves at 127.0.0.1" in output
    assert "by the direct route" in output


@pytest.mark.slow
def test_connect_by_a_topology_file(smollm2: Path, tmp_path: Path) -> None:
    """The sample file, with the ports that were free."""
    text = (EXAMPLES / "mesh.toml").read_text()
    stages: list[subprocess.Popen[bytes]] = []
    try:
        for place in read_topology(EXAMPLES / "mesh.toml").stages:
            assert place.layers is not None
            layers = "{}:{}".format(*place.layers)
            stages.append(
                subprocess.Popen(
                    [
                        sys.executable, "-m", "meshpipe", "stage", "--model", str(smollm2), "--layers", layers,
                        "--listen", "127.0.0.1:0", "--json",
                    ],
                    stdout=subprocess.PIPE,
                )
            )  # fmt: skip
            stdout = stages[-1].stdout
            assert stdout is not None
            text = text.replace(f'"{place.address}"', f'"{json.loads(stdout.readline())["address"]}"')
        (tmp_path / "mesh.toml").write_text(text)
        output = run("connect.py", str(tmp_path / "mesh.toml"), str(smollm2))
    finally:
        for stage in stages:
            stage.terminate()
            assert stage.stdout is not None
            stage.stdout.close()
        codes = [stage.wait(20) for stage in stages]
    assert "by the direct route" in output
    assert codes == [0, 0]
