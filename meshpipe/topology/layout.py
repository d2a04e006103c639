"""The topology file: which model, which stages, where.

model = "SmolLM2.gguf"            # where the coordinator finds the vocabulary
activation = "float32"            # how activations travel: float32 (exact), float16, bfloat16, int8

[[stages]]
layers = "0:15"
address = "10.0.0.1:7001"         # where the stage before it reaches it

[[stages]]
layers = "15:30"
address = "10.0.0.2:7001"
return_address = "10.0.0.2:7001"  # where the coordinator opens the return stream, if that is another address
standby = ["10.0.0.3:7001"]       # stages of the same layers that take over if this one is lost
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from attrs import frozen

from meshpipe.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ACTIVATIONS = ("float32", "float16", "bfloat16", "int8")


@frozen
class StagePlace:
    """Where one stage is. `layers` [start, stop) is checked against what the stage says of itself.

    `standby` are the addresses of stages of the same layers that take over when it is lost.
    """

    address: str
    layers: tuple[int, int] | None = None
    return_address: str | None = None
    standby: tuple[str, ...] = ()

    @property
    def choices(self) -> tuple[StagePlace, ...]:
        """This place, then its standbys."""
        return (self, *(StagePlace(address, self.layers) for address in self.standby))


@frozen
class Topology:
    """Stages in order, the model file for the vocabulary, and how activations travel."""

    stages: tuple[StagePlace, ...]
    model: str | None = None
    activation: str = "float32"


def read_topology(path: str | Path) -> Topology:
    """Reads a TOML or (`.json`) JSON topology file. Raises UsageError naming the key that is wrong.

    A relative `model` is looked up beside the file.
    """
    path = Path(path)
    try:
        data: Any = (
            json.loads(path.read_bytes()) if path.suffix == ".json" else tomllib.loads(path.read_text())
        )
    except OSError as error:
        raise UsageError(f"cannot read the topology file {path}: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(
            f"{path} is not valid {'JSON' if path.suffix == '.json' else 'TOML'}: {error}"
        ) from None
    if not isinstance(data, dict):
        raise UsageError(f"{path} must hold a table with the key 'stages', not a {type(data).__name__}")
    _only_known(path, data, {"model", "activation", "stages"})
    stages = data.get("stages")
    if not isinstance(stages, list) or not stages:
        raise UsageError(f"{path}: 'stages' must be a list of at least one stage")
    model = _text(path, data, "model")
    activation = _text(path, data, "activation") or "float32"
    if activation not in ACTIVATIONS:
        raise UsageError(f"{path}: activation is {activation!r}; allowed: {', '.join(ACTIVATIONS)}")
    return Topology(
        tuple(_stage(path, number, stage) for number, stage in enumerate(stages)),
        str(path.parent / model) if model else None,
        activation,
    )


def _stage(path: Path, number: int, stage: Any) -> StagePlace:
    if not isinstance(stage, dict):
        raise UsageError(f"{path}: stage {number} must be a table with the key 'address'")
    _only_known(path, stage, {"address", "layers", "return_address", "standby"}, f"stage {number}")
    address = _text(path, stage, "address")
    if not address:
        raise UsageError(f"{path}: stage {number} has no 'address'")
    layers = _text(path, stage, "layers")
    standby = stage.get("standby", [])
    if not isinstance(standby, list) or not all(isinstance(other, str) for other in standby):
        raise UsageError(f"{path}: 'standby' of stage {number} must be a list of addresses, not {standby!r}")
    return StagePlace(
        address,
        parse_layers(layers) if layers else None,
        _text(path, stage, "return_address"),
        tuple(standby),
    )


def parse_layers(text: str) -> tuple[int, int]:
    """`"15:30"` as (15, 30). Raises UsageError."""
    start, colon, stop = text.partition(":")
    if not (colon and start.isdecimal() and stop.isdecimal() and int(start) < int(stop)):
        raise UsageError(f"layers must look like 15:30, first layer and the one after the last, not {text!r}")
    return int(start), int(stop)


def _only_known(path: Path, table: dict[str, Any], known: set[str], where: str = "the file") -> None:
    unknown = sorted(set(table) - known)
    if unknown:
        raise UsageError(f"{path}: {where} has unknown key {unknown[0]!r}; known: {', '.join(sorted(known))}")


def _text(path: Path, table: dict[str, Any], key: str) -> str | None:
    value = table.get(key)
    if value is not None and not isinstance(value, str):
        raise UsageError(f"{path}: {key!r} must be text, not {value!r}")
    return value
