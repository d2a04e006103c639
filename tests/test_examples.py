"""The examples run as they stand, and say what they promise."""

from __future__ import annotations

import re
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from meshpipe.topology.layout import read_topology

EXAMPLES = Path(__file__).parent.parent / "examples"
OF_LLAMA_CPP = "ignore:unclosed file <_io.TextIOWrapper name='/dev/null'"
"""It keeps two open until the interpreter ends, which depending on the order of its end is a warning."""


def run(name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-W", OF_LLAMA_CPP, str(EXAMPLES / name), *arguments],
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
def test_notebook() -> None:
    output = run("notebook.py").splitlines()
    assert "red" in output[0]
    assert output[-2].startswith("  off: ")
    assert float(output[-1].split()[-1]) > 0.5


@pytest.mark.parametrize(
    "name", ["local.py", "spawn.py", "notebook.py", "trio_service.py", "fastapi_service.py", "connect.py"]
)
def test_a_bad_model_is_one_line(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which the interpreter prints as it ends, with 1 as its exit code."""
    monkeypatch.setattr(sys, "argv", [name, "none.gguf"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert isinstance(ended.value.code, str)
    assert "none.gguf" in ended.value.code
    assert "\n" not in ended.value.code
    assert not capsys.readouterr().err


@contextmanager
def serving(name: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """An example that serves until it is interrupted, which it takes without a word."""
    process = subprocess.Popen(
        [sys.executable, str(EXAMPLES / name), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
        assert process.stdout is not None
        assert "Traceback" not in process.stdout.read()
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def port_said(process: subprocess.Popen[str], before: str) -> int:
    """The port that follows `before` in what the process prints."""
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if found := re.search(before + r"(\d+)", line):
            return int(found[1])
    raise AssertionError("".join(seen))


@pytest.mark.slow
def test_trio_service(smollm2: Path) -> None:
    with serving("trio_service.py", str(smollm2), "0") as service:
        port = port_said(service, "listening on port ")
        with socket.create_connection(("127.0.0.1", port), timeout=60) as one:
            one.sendall(b"The capital of France is\n")
            with one.makefile() as reply:
                assert "Paris" in reply.read()
        with socket.create_connection(("127.0.0.1", port), timeout=60) as two:
            two.shutdown(socket.SHUT_WR)
            with two.makefile() as reply:
                assert "the prompt is empty" in reply.read()


@pytest.mark.slow
def test_fastapi_service(smollm2: Path) -> None:
    with serving("fastapi_service.py", str(smollm2), "127.0.0.1:0") as service:
        port = port_said(service, "Running on http://127.0.0.1:")
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            answer = client.get("/continue", params={"text": "The capital of France is", "tokens": 8}).json()
            assert "Paris" in answer["text"]
            assert client.get("/continue", params={"text": ""}).status_code == 400
            with client.stream("GET", "/poem", params={"about": "rivers"}) as poem:
                whole = "".join(poem.iter_text())
            with client.stream("GET", "/poem", params={"about": "rivers"}) as poem:
                first = next(poem.iter_text())  # and then it hangs up
            assert whole.startswith(first)
            while client.get("/load").json()["active"]:
                pass


@pytest.mark.slow
def test_connect() -> None:
    output = run("connect.py")
    assert "stage 0:15 serves at 127.0.0.1" in output
    assert "by the direct route" in output


def test_the_sample_topology() -> None:
    """tests/test_readme.py connects by one like it."""
    places = read_topology(EXAMPLES / "mesh.toml").stages
    assert [place.layers for place in places] == [(0, 15), (15, 30)]
