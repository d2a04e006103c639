"""All commands, and what their exit codes mean."""

from __future__ import annotations

import argparse
import errno
import logging
import os
import sys
from collections.abc import Sequence

from meshpipe.cli import chat, config, demo, doctor, generate, lock, models, serve, stage, trace
from meshpipe.cli.arguments import Commands, Parser, checked
from meshpipe.configuration.kinds import Choice
from meshpipe.errors import MeshpipeError, StageLostError

EXIT_CODES = """\
exit codes:
  0    done
  1    a check that was asked for failed
  2    wrong arguments, files or peers; one line on standard error says which and why
  3    a stage was lost or could not be reached: the same command may work later
  5    stage: a decode hung and did not move again
  130  interrupted
"""


def run(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code, and says in one line on standard error what was wrong."""
    try:
        options = parser().parse_args(arguments)
        logging.basicConfig(
            level=options.log.upper(),
            format="%(asctime)s %(name)s %(levelname)s %(message)s",
            stream=sys.stderr,
        )
        code: int = options.run(options)
        sys.stdout.flush()
        return code
    except StageLostError as error:
        print(f"meshpipe: {error}", file=sys.stderr)
        return 3
    except MeshpipeError as error:
        print(f"meshpipe: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of our output has had enough
        sys.stderr.close()
        return 0
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        print(f"meshpipe: cannot write the output: {error.strerror}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is left in its buffer
        return 2


def parser() -> argparse.ArgumentParser:
    """All commands with their arguments."""
    top = Parser(
        prog="meshpipe",
        description="Run one large language model over machines that are far apart.",
        epilog=f"examples:\n  meshpipe demo\n  meshpipe generate --help\n\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument(
        "--log",
        type=checked(Choice(("debug", "info", "warning", "error"))),
        default="warning",
        metavar="LEVEL",
        help="debug, info, warning (default), error",
    )
    commands: Commands = top.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for module in (generate, chat, serve, stage, models, trace, demo, doctor, lock, config):
        module.add_commands(commands)
    return top
