"""Where settings come from. A later source overrides an earlier one:

1. the defaults,
2. what a model recommends for itself: `M.meshpipe.toml` beside `M.gguf`, speculation settings only,
3. a configuration file in TOML (`--config`, or MESHPIPE_CONFIG),
4. the environment, MESHPIPE_LANES=4,
5. flags, --lanes 4.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

from meshpipe.configuration.kinds import File
from meshpipe.configuration.schema import Configuration, settings
from meshpipe.errors import UsageError
from meshpipe.topology.layout import read_topology

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PREFIX = "MESHPIPE_"
FILE_VARIABLE = PREFIX + "CONFIG"
DEFAULT = "default"


@frozen
class Configured:
    """The settings, and for each where its value comes from: a flag, a variable, a file's path or "default"."""

    settings: Configuration
    origins: Mapping[str, str]

    def given(self, name: str) -> bool:
        """Whether somebody said so; else it is the default."""
        return self.origins[name] != DEFAULT

    def say(self, name: str) -> str:
        """`lanes (from MESHPIPE_LANES)`, for errors."""
        return f"{name} (from {self.origins[name]})"


def configure(
    flags: Mapping[str, object] | None = None,
    *,
    file: str | Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Configured:
    """Puts the sources together; `flags` by setting name, None where a flag was not given.

    `environment` is the process's unless given; `file` is that of MESHPIPE_CONFIG unless given. Blocks: reads
    files. Raises UsageError naming the setting, where it was said, its value, and what is allowed.
    """
    environment = os.environ if environment is None else environment
    said: dict[str, tuple[object, str]] = {}  # raw value and origin
    file = file or environment.get(FILE_VARIABLE)
    if file:
        said |= {name: (value, str(file)) for name, value in read_settings(Path(file)).items()}
    said |= _from_environment(environment)
    for name, value in (flags or {}).items():
        if value is not None:
            said[name] = (value, settings()[name].flag)
    values = {name: settings()[name].read(value, origin) for name, (value, origin) in said.items()}
    origins = dict.fromkeys(settings(), DEFAULT) | {name: origin for name, (_, origin) in said.items()}
    model = values.get("model")
    if model is None and "topology" in values:
        model = read_topology(values["topology"]).model
    if model is not None:
        for name, value in recommended(model).items():
            if name not in values:
                values[name] = value
                origins[name] = str(recommendation_file(model))
    return Configured(Configuration(**values), origins)


def recommendation_file(model: str | Path) -> Path:
    """`M.meshpipe.toml` for `M.gguf`: the model's own speculation settings, if it exists."""
    return Path(model).with_suffix(".meshpipe.toml")


def recommended(model: str | Path) -> dict[str, Any]:
    """What a model recommends for itself, by setting name; nothing if it has no such file.

    Only speculation settings may stand there: a model that was downloaded decides nothing about addresses,
    keys or the engine. Raises UsageError.
    """
    file = recommendation_file(model)
    if not file.is_file():
        return {}
    return {
        name: settings()[name].read(value, str(file))
        for name, value in read_settings(file, group="speculation").items()
    }


def read_settings(file: Path, group: str | None = None) -> dict[str, Any]:
    """The raw values of a TOML file, all of them known settings (of `group`). Raises UsageError.

    Relative paths begin at the file.
    """
    try:
        table: dict[str, Any] = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read the configuration {file}: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"the configuration {file} is not valid TOML: {error}") from None
    for name in table:
        if name not in settings():
            raise UsageError(f"{file}: {name} is no setting{_near(name, list(settings()))}")
        if group is not None and settings()[name].group != group:
            allowed = ", ".join(s.name for s in settings().values() if s.group == group)
            raise UsageError(f"{file}: {name} may not be set here; allowed: {allowed}")
        if isinstance(settings()[name].kind, File) and isinstance(table[name], str):
            table[name] = str(file.parent / table[name])  # stays as it is if absolute
    return table


def _from_environment(environment: Mapping[str, str]) -> dict[str, tuple[object, str]]:
    by_variable = {setting.variable: setting.name for setting in settings().values()}
    found: dict[str, tuple[object, str]] = {}
    for variable, value in environment.items():
        if not variable.startswith(PREFIX) or variable == FILE_VARIABLE or not value:
            continue
        if variable not in by_variable:
            raise UsageError(
                f"{variable} in the environment is no setting{_near(variable, list(by_variable))}"
            )
        found[by_variable[variable]] = (value, variable)
    return found


def _near(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {close[0]}?" if close else "; `meshpipe config` prints all there are"
