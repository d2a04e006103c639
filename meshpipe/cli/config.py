"""`meshpipe config`: every setting, its value here, and where it comes from."""

from __future__ import annotations

import argparse
import json
from typing import Any

from meshpipe.cli.arguments import Commands, add_settings, command, configured
from meshpipe.configuration import Configured, groups


def add_commands(commands: Commands) -> None:
    """Adds `config`."""
    parser = command(
        commands,
        "config",
        "Print all settings, with where each value comes from; the output is a configuration file.",
        "meshpipe config",
        "meshpipe config > meshpipe.toml && meshpipe generate --config meshpipe.toml --prompt Hello",
        "MESHPIPE_LANES=8 meshpipe config --model M.gguf --depth 12 --json",
    )
    add_settings(parser, *(name for name, _ in groups()))
    parser.add_argument("--json", action="store_true", help="one object: value, origin and what is allowed")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Prints TOML, or one JSON object by setting."""
    found = configured(options)
    found.settings.speculation_settings()  # refuses what contradicts itself
    if options.json:
        print(json.dumps(_as_dict(found)))
    else:
        print(as_toml(found), end="")
    return 0


def as_toml(found: Configured) -> str:
    """A configuration file that says the same; each line ends with where the value comes from."""
    lines: list[str] = []
    for group, members in groups():
        lines += ["", f"# {group}"]
        for setting in members:
            value = getattr(found.settings, setting.name)
            if value is None:
                lines.append(f"# {setting.name} =  # {setting.unset}")
            else:
                lines.append(f"{setting.name} = {_toml(value)}  # {found.origins[setting.name]}")
    return "\n".join(lines[1:]) + "\n"


def _toml(value: Any) -> str:
    """Text, numbers, truth values and lists of them are written as in JSON."""
    return json.dumps(value, ensure_ascii=False)


def _as_dict(found: Configured) -> dict[str, Any]:
    return {
        setting.name: {
            "value": getattr(found.settings, setting.name),
            "origin": found.origins[setting.name],
            "group": group,
            "default": setting.default,
            "allowed": setting.kind.allowed,
            "help": setting.help,
        }
        for group, members in groups()
        for setting in members
    }
