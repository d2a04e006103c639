"""Flags: those of the settings come from the schema, so that they are named and checked as everywhere."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from meshpipe.configuration import Configured, Setting, configure, settings
from meshpipe.configuration.kinds import Kind, Switch
from meshpipe.errors import UsageError

Commands = Any  # argparse's subparsers object has no public type


class Parser(argparse.ArgumentParser):
    """Says in one line what is wrong with the arguments, by a UsageError."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False} | options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As argparse's, but what no command knows is an error of the command that it was given to."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            near = difflib.get_close_matches(unknown[0].partition("=")[0], self._option_string_actions, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


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


def add_settings(parser: argparse.ArgumentParser, *names: str) -> None:
    """Flags for settings, by group or by name; and `--config`. `configured` then puts all sources together."""
    parser.usage = f"{parser.prog} [options]"  # argparse would fill a screen
    chosen = [s for s in settings().values() if s.group in names or s.name in names]
    for group in dict.fromkeys(setting.group for setting in chosen):
        flags = parser.add_argument_group(group)
        for setting in chosen:
            if setting.group == group:
                _add_flag(flags, setting)
    parser.add_argument(
        "--config", dest="config_file", metavar="FILE", help="settings in TOML (see `meshpipe config`)"
    )


def _add_flag(flags: Any, setting: Setting) -> None:
    default = f"default {setting.default}" if setting.default is not None else setting.unset
    if isinstance(setting.default, bool):
        default = "default yes" if setting.default else "default no"
    text = f"{setting.help} ({default})" if default != "unset" else setting.help
    text = text.replace("%", "%%")
    if isinstance(setting.kind, Switch):
        flags.add_argument(setting.flag, action=argparse.BooleanOptionalAction, default=None, help=text)
    else:
        flags.add_argument(setting.flag, metavar=setting.kind.metavar.replace("%", "%%"), help=text)


def configured(options: argparse.Namespace) -> Configured:
    """The settings that flags, environment and files come to. Raises UsageError."""
    flags = {name: getattr(options, name, None) for name in settings()}
    return configure(flags, file=options.config_file)


def flags_of(configured: Configured, *groups: str, but: Sequence[str] = ()) -> list[str]:
    """The settings of these groups that are not left at their defaults, as flags for a child process."""
    flags: list[str] = []
    for setting in settings().values():
        if setting.group not in groups or setting.name in but or not configured.given(setting.name):
            continue
        value = getattr(configured.settings, setting.name)
        if isinstance(value, bool):
            flags.append(setting.flag if value else setting.flag.replace("--", "--no-", 1))
        else:
            text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            flags.append(f"{setting.flag}={text}")
    return flags


def checked(kind: Kind) -> Callable[[str], Any]:
    """For an argument that is no setting: argparse's `type` that reads this kind."""

    def read(text: str) -> Any:
        try:
            return kind.read(text)
        except (ValueError, TypeError):
            raise argparse.ArgumentTypeError(f"{text!r} is not allowed: it must be {kind.allowed}") from None

    return read
