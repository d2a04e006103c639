"""The demo: shows a speed-up, says that the output is the unsplit model's, and has checked it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from meshpipe.cli import main
from meshpipe.cli.demo import OZYMANDIAS, Screen, resident_bytes


def test_without_its_model_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["demo"]) == 2
    assert "pip install 'meshpipe[demo]'" in capsys.readouterr().err


def test_resident_bytes() -> None:
    mine = resident_bytes(os.getpid())
    assert mine is not None
    assert 5 << 20 < mine < 64 << 30
    assert resident_bytes(2**30) is None


async def test_plain_text_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen(silent=False)
    screen.begin()
    for piece in ("\n", "\nI met a", " traveller\n\nfrom", " an antique land"):
        screen.show(piece, 2)
    assert capsys.readouterr().out == "I met a traveller\n\nfrom an antique land"


@pytest.mark.slow
def test_demo() -> None:
    done = subprocess.run(
        [
            sys.executable, "-m", "meshpipe", "demo", "--json",
            "--delay-ms", "50", "--max-tokens", "120", "--serial-tokens", "12",
        ],
        capture_output=True,
        text=True,
        timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["equal"] is True
    assert result["pipelined"]["tokens"] == result["unsplit"]["tokens"]
    assert result["serial"]["tokens"] == result["unsplit"]["tokens"][:12]
    assert result["pipelined"]["text"].strip() in (OZYMANDIAS * 2).removeprefix("Ozymandias")
    assert result["ratio"] > 2
    assert len(result["pipelined"]["memory"]) == 2
    assert all(0 < stage < result["unsplit"]["memory"][0] for stage in result["pipelined"]["memory"])
