"""The lock on a topology: which layers of which model are served where, by which version; nothing else is accepted.

`meshpipe lock` writes what it finds behind a topology file. With `--lock FILE`, the coordinator refuses stages that
are not what is recorded, each time that it joins them and before anything but the handshake is said, and a stage
refuses to serve other layers, another model or another version, and to go on to an address that is not recorded.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attrs import asdict, define, field, frozen

from meshpipe.errors import HandshakeError, UsageError
from meshpipe.files import write_whole
from meshpipe.messages import PROTOCOL_VERSION, StageDescriptor
from meshpipe.topology.layout import StagePlace


@frozen
class LockedStage:
    """One stage: its layers [start, stop), the digest of the whole model, the version, all its addresses."""

    layers: tuple[int, int]
    model_digest: str
    version: str
    addresses: tuple[str, ...]


@frozen
class Lock:
    """The stages in order, how activations travel, and the protocol's version."""

    stages: tuple[LockedStage, ...]
    activation: str
    protocol: int = PROTOCOL_VERSION


def make_lock(places: Sequence[StagePlace], descriptors: Sequence[StageDescriptor], activation: str) -> Lock:
    """What was found behind the places; standbys are recorded by their addresses."""
    return Lock(
        tuple(
            LockedStage(
                descriptor.layers,
                descriptor.model_digest,
                descriptor.version,
                (place.address, *place.standby),
            )
            for place, descriptor in zip(places, descriptors, strict=True)
        ),
        activation,
    )


def write_lock(lock: Lock, path: str | Path) -> None:
    """Raises UsageError if the file cannot be written."""
    try:
        write_whole(path, json.dumps(asdict(lock), indent=2) + "\n")
    except OSError as error:
        raise UsageError(f"cannot write the lock file {path}: {error.strerror}") from None


def read_lock(path: str | Path) -> Lock:
    """Raises UsageError for a file that is none."""
    try:
        data: Any = json.loads(Path(path).read_bytes())
        stages = tuple(
            LockedStage(
                layers=(int(stage["layers"][0]), int(stage["layers"][1])),
                model_digest=str(stage["model_digest"]),
                version=str(stage["version"]),
                addresses=tuple(str(address) for address in stage["addresses"]),
            )
            for stage in data["stages"]
        )
        return Lock(stages, str(data["activation"]), int(data["protocol"]))
    except OSError as error:
        raise UsageError(f"cannot read the lock file {path}: {error.strerror}") from None
    except (ValueError, TypeError, LookupError) as error:
        raise UsageError(f"{path} is no lock file ({error!r}): write one with `meshpipe lock`") from None


def check_places(lock: Lock, places: Sequence[StagePlace], activation: str) -> None:
    """Coordinator, before it connects: whether it goes only where the lock says. Raises HandshakeError."""
    problems = _of_all(lock, activation)
    problems.compare("number of stages", len(lock.stages), len(places))
    for number, (locked, place) in enumerate(zip(lock.stages, places, strict=False)):
        if place.address not in locked.addresses:
            problems.add(
                f"stage {number} at {place.address}: the lock has it at {' or '.join(locked.addresses)}",
                number,
            )
    problems.refuse()


def check_descriptors(lock: Lock, descriptors: Sequence[StageDescriptor]) -> None:
    """Coordinator, before any traffic: whether the stages are what the lock says. Raises HandshakeError."""
    problems = _Problems()
    problems.compare("number of stages", len(lock.stages), len(descriptors))
    for number, (locked, found) in enumerate(zip(lock.stages, descriptors, strict=False)):
        problems.compare(f"layers of stage {number}", locked.layers, found.layers, number)
        problems.compare(f"model digest of stage {number}", locked.model_digest, found.model_digest, number)
        problems.compare(f"version of stage {number}", locked.version, found.version, number)
    problems.refuse()


def check_stage(
    lock: Lock, descriptor: StageDescriptor, number: int, onward: str | None, activation: str
) -> None:
    """A stage, at a caller: whether itself, and the next address, are what the lock says. Raises HandshakeError.

    `number` is the stage's on the caller's route.
    """
    problems = _of_all(lock, activation)
    at = next((n for n, locked in enumerate(lock.stages) if locked.layers == descriptor.layers), None)
    if at is None:
        problems.add(f"layers: the lock has no stage of {descriptor.layers}", number)
    else:
        problems.compare("model digest", lock.stages[at].model_digest, descriptor.model_digest, number)
        problems.compare("version", lock.stages[at].version, descriptor.version, number)
        following = lock.stages[at + 1].addresses if at + 1 < len(lock.stages) else ()
        if onward is not None and onward not in following:
            problems.add(
                f"next stage at {onward}: the lock has it at {' or '.join(following) or 'none'}", number + 1
            )
    problems.refuse()


@define
class _Problems:
    """What differs from a lock; `stage` is the first stage that it is about, None: it is about all of them."""

    texts: list[str] = field(factory=list)
    stage: int | None = None

    def add(self, text: str, stage: int | None = None) -> None:
        self.texts.append(text)
        self.stage = stage if self.stage is None else self.stage

    def compare(self, what: str, locked: object, found: object, stage: int | None = None) -> None:
        if locked != found:
            self.add(f"{what}: the lock has {locked}, found {found}", stage)

    def refuse(self) -> None:
        """Raises HandshakeError, with the stage, if there are any."""
        if self.texts:
            error = HandshakeError(
                f"{'; '.join(self.texts)}; lock anew with `meshpipe lock` if that is meant to be"
            )
            error.stage = self.stage
            raise error


def _of_all(lock: Lock, activation: str) -> _Problems:
    problems = _Problems()
    problems.compare("protocol version", lock.protocol, PROTOCOL_VERSION)
    problems.compare("activation type", lock.activation, activation)
    return problems
