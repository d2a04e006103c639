"""Mutation proof as a test; `python -m tests.mutants` prints which test caught which fault."""

import runpy
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.timeout(900)  # about a minute of computing, on machines that may be busy
def test_every_fault_in_the_ledger_is_caught() -> None:
    main = runpy.run_path(str(Path(__file__).with_name("mutants") / "__main__.py"))["main"]
    assert main() == 0, "a fault survived; see the output"
