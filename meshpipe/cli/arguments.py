"""Arguments that several commands share."""

from __future__ import annotations

import argparse
from typing import Any

from attrs import fields

from meshpipe.errors import UsageError
from meshpipe.llama.options import CACHE_TYPES, EngineOptions
from meshpipe.wire.conditions import Conditions

Commands = Any  # argparse's subparsers object has no public type


def command(commands: Commands, name: str, summary: str, *examples: str) -> argparse.ArgumentParser:
    """A subcommand with examples in its help."""
    epilog = "examples:\n" + "\n".join(f"  {example}" for example in examples)
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=summary,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return parser


def add_engine(parser: argparse.ArgumentParser) -> None:
    """What `StageEngine` and `EngineOptions` take."""
    group = parser.add_argument_group("engine")
    group.add_argument("--lanes", type=int, default=1, help="sessions at a time (default 1)")
    group.add_argument("--context", type=int, default=4096, help="tokens a lane (default 4096)")
    group.add_argument("--threads", type=int, default=1, help="threads a stage (default 1)")
    group.add_argument(
        "--no-exact",
        action="store_true",
        help="let decodes be of any shape: faster prefill, output may differ from the unsplit model's",
    )
    for name in ("n_gpu_layers", "main_gpu", "yarn_orig_ctx", "batch"):
        group.add_argument(f"--{name.replace('_', '-')}", type=int)
    for name in (
        "rope_freq_base", "rope_freq_scale", "yarn_ext_factor", "yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow",
    ):  # fmt: skip
        group.add_argument(f"--{name.replace('_', '-')}", type=float)
    group.add_argument("--devices", type=lambda text: tuple(text.split(",")), help="device names, by comma")
    group.add_argument("--tensor-split", type=lambda text: tuple(map(float, text.split(","))), metavar="A,B")
    group.add_argument("--rope-scaling", choices=("none", "linear", "yarn", "longrope"))
    group.add_argument("--split-mode", choices=("none", "layer", "row"))
    group.add_argument("--cache-type-k", choices=sorted(CACHE_TYPES))
    group.add_argument("--cache-type-v", choices=sorted(CACHE_TYPES))
    group.add_argument("--no-mmap", dest="mmap", action="store_false", default=None)
    group.add_argument("--mlock", action="store_true", default=None)
    group.add_argument(
        "--repack", action="store_true", default=None, help="CPU weight repacking, after a trial"
    )


def engine_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of `StageEngine`."""
    names = [field.name for field in fields(EngineOptions)]
    given = {name: getattr(options, name, None) for name in names}
    return {
        "lanes": options.lanes,
        "context": options.context,
        "threads": options.threads,
        "exact": not options.no_exact,
        "options": EngineOptions(**{name: value for name, value in given.items() if value is not None}),
    }


def engine_flags(options: argparse.Namespace) -> list[str]:
    """The same as flags, for the command of a child process, without lanes, context and threads."""
    flags = ["--no-exact"] if options.no_exact else []
    for field in fields(EngineOptions):
        value = getattr(options, field.name, None)
        if value is None:
            continue
        flag = f"--{field.name.replace('_', '-')}"
        if field.name == "mmap":
            flags += ["--no-mmap"]
        elif value is True:
            flags += [flag]
        elif isinstance(value, tuple):
            flags += [flag, ",".join(map(str, value))]
        else:
            flags += [flag, str(value)]
    return flags


def parse_conditions(text: str) -> Conditions:
    """`delay=0.1,jitter=0.01,bandwidth=1e6` as link conditions. Raises UsageError."""
    values: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, equals, number = part.partition("=")
        try:
            if not equals or name not in ("delay", "jitter", "bandwidth", "loss", "stall"):
                raise ValueError
            values[name] = float(number)
        except ValueError:
            raise UsageError(
                f"link conditions look like delay=0.1,jitter=0.01,bandwidth=1e6 (seconds, bytes a second), not {text!r}"
            ) from None
    return Conditions(**values)  # type: ignore[arg-type]
