"""The command line. `commands` has them all; importing it takes long enough for Ctrl-C to be pressed meanwhile."""

from __future__ import annotations

import signal
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    try:
        from meshpipe.cli.commands import run

        return run(arguments)
    except BaseException as error:
        if _is_interrupt(error):
            return 128 + signal.SIGINT
        raise


def _is_interrupt(error: BaseException) -> bool:
    """Ctrl-C, which comes out of a nursery in a group."""
    subgroup = getattr(error, "subgroup", None)
    return isinstance(error, KeyboardInterrupt) or (
        subgroup is not None and subgroup(KeyboardInterrupt) is not None
    )
