"""The command line.

Exit codes: 0 done; 1 a check that was asked for failed (certify); 2 wrong arguments, files or peers, with one
line that says why; 130 interrupted.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from meshpipe.cli import demo, generate, models, stage
from meshpipe.errors import MeshpipeError


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="meshpipe",
        description="Run one large language model over machines that are far apart.",
        epilog="Exit codes: 0 done; 1 a check failed; 2 wrong arguments, files or peers; 130 interrupted.",
    )
    parser.add_argument(
        "--log", default="warning", metavar="LEVEL", help="debug, info, warning (default), error"
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for module in (generate, stage, models, demo):
        module.add_commands(commands)
    options = parser.parse_args(arguments)
    level = getattr(logging, options.log.upper(), None)
    if not isinstance(level, int):
        parser.error(f"--log: {options.log!r} is no level; use debug, info, warning or error")
    logging.basicConfig(
        level=level, format="%(asctime)s %(name)s %(levelname)s %(message)s", stream=sys.stderr
    )
    try:
        code: int = options.run(options)
        return code
    except MeshpipeError as error:
        print(f"meshpipe: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has had enough
        sys.stderr.close()
        return 0
