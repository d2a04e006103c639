"""`meshpipe doctor`: looks at this machine, a model, and the stages of a topology, and says what to do."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Literal

import trio
from attrs import asdict, field, frozen
from rich.console import Console
from rich.text import Text

from meshpipe.blocking import Pipeline
from meshpipe.cli.arguments import Commands, add_settings, command, configured
from meshpipe.cli.demo import demo_model
from meshpipe.cli.pipelines import pipeline_of
from meshpipe.configuration import Configuration, Configured
from meshpipe.errors import EngineError, MeshpipeError, UsageError
from meshpipe.llama import machine, tap
from meshpipe.llama.inspection import inspect_model
from meshpipe.llama.options import EngineOptions
from meshpipe.llama.slicing import cache_directory
from meshpipe.pipeline.coordinator import Coordinator
from meshpipe.pipeline.examine import Health, examine
from meshpipe.topology.layout import Topology, read_topology
from meshpipe.wording import counted

REBUILD = "CMAKE_ARGS='-DLLAVA_BUILD=OFF {}' pip install --force-reinstall --no-cache-dir --no-deps llama-cpp-python"
ROOM = 10 << 30  # bytes that a slice may well need

Status = Literal["ok", "warning", "failed", "skipped"]


@frozen
class Check:
    """What was looked at, what was found, and what to do about it (empty: nothing)."""

    name: str
    status: Status
    finding: str
    advice: str = ""
    numbers: dict[str, object] = field(factory=dict)


def add_commands(commands: Commands) -> None:
    """Adds `doctor`."""
    parser = command(
        commands,
        "doctor",
        "Check this machine, a model and the stages of a topology, and say what to do.",
        "meshpipe doctor",
        "meshpipe doctor --model M.gguf --json",
        "meshpipe doctor --topology mesh.toml --key-file mesh.key",
    )
    add_settings(parser, "model", "topology", "links", "security")
    parser.add_argument("--json", action="store_true", help="print one object: a list of checks")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """0 if nothing failed, else 1."""
    found = configured(options)
    console = Console(highlight=False)
    checks: list[Check] = []
    for check in all_checks(found):
        checks.append(check)
        if not options.json:
            say(console, check)
    healthy = all(check.status != "failed" for check in checks)
    if options.json:
        print(json.dumps({"healthy": healthy, "checks": [asdict(check) for check in checks]}))
    return 0 if healthy else 1


STYLES = {"ok": "green", "warning": "yellow", "failed": "red", "skipped": "dim"}


def say(console: Console, check: Check) -> None:
    """One line, and one more with what to do."""
    line = Text.assemble((f"{check.status:>8}", STYLES[check.status]), f"  {check.name}: {check.finding}")
    console.print(line, soft_wrap=True)
    if check.advice:
        console.print(Text(f"{'':>8}  → {check.advice}"), soft_wrap=True)


def all_checks(found: Configured) -> Iterator[Check]:
    """All that the settings give cause for, one after the other."""
    yield versions()
    yield instructions(machine.built_for(), machine.cpu_flags())
    yield compiler()
    yield repacking(machine.cpu_flags())
    yield Check("devices", "ok", ", ".join(machine.devices()))
    yield disk(cache_directory())
    digest: str | None = None
    if found.settings.model is not None:
        check, digest = model(found.settings.model)
        yield check
    if found.settings.topology is None:
        yield Check(
            "stages", "skipped", "no topology was named", "name one with --topology to examine its stages"
        )
        return
    yield from stages(found, read_topology(found.settings.topology), digest)


# ---------------------------------------------------------------- this machine


def versions() -> Check:
    """What runs here."""
    names = ("meshpipe", "llama-cpp-python", "trio")
    installed = {name: _version(name) for name in names}
    finding = ", ".join(f"{name} {version}" for name, version in installed.items())
    return Check("versions", "ok", f"Python {platform.python_version()}, {finding}", numbers=dict(installed))


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed as a package"


def instructions(built: set[str], flags: set[str]) -> Check:
    """Whether llama.cpp was built for this processor."""
    name = "llama.cpp's build"
    used = ", ".join(sorted(set(machine.INSTRUCTIONS) & built)) or "no vector instructions"
    if not flags:
        return Check(name, "skipped", f"built for {used}; what this processor can do is not known here")
    unused = machine.unused_instructions(built, flags)
    if unused:
        return Check(
            name,
            "warning",
            f"built for {used}; this processor also has {', '.join(unused)}",
            f"build it here: {REBUILD.format('-DGGML_NATIVE=ON')}",
        )
    return Check(name, "ok", f"built for {used}: all that this processor has")


def compiler() -> Check:
    """Whether activations can be tapped by compiled code."""
    if tap.compiled() is not None:
        return Check("C compiler", "ok", "activations leave through a compiled callback")
    return Check(
        "C compiler",
        "warning",
        "none that works: activations leave through Python, some 0.3 ms a decode slower",
        "install one (cc, gcc or clang), or set CC",
    )


def repacking(flags: set[str], model: Path | None = None) -> Check:
    """Whether weight repacking (and AMX, where announced) survives, tried in a child process."""
    name = "AMX and repacking"
    announced = "the processor announces AMX" if machine.AMX in flags else "the processor has no AMX"
    try:
        EngineOptions().require_repack_survives(model or demo_model())
    except UsageError:
        return Check(
            name, "skipped", f"{announced}; no small model to try it with", "pip install 'meshpipe[demo]'"
        )
    except EngineError:
        return Check(
            name,
            "warning",
            f"{announced}; a trial decode with repacking crashed (in a child process)",
            "leave `repack` off, as it is by default, and load models by nothing else here that turns it on",
        )
    return Check(name, "ok", f"{announced}; a trial decode with repacking worked, `--repack` may be used")


def disk(directory: Path) -> Check:
    """Whether slices can be written."""
    at = next(parent for parent in (directory, *directory.parents) if parent.exists())
    free = shutil.disk_usage(at).free
    finding = f"{directory} ({free / 2**30:.1f} GiB free)"
    numbers: dict[str, object] = {"free": free}
    if not os.access(at, os.W_OK):
        advice = "set XDG_CACHE_HOME to a directory that can be written"
        return Check("cache", "failed", f"{finding} cannot be written", advice, numbers)
    if free < ROOM:
        advice = "a slice is as large as its share of the model: free space, or set XDG_CACHE_HOME to a larger disk"
        return Check("cache", "warning", finding, advice, numbers)
    return Check("cache", "ok", finding, numbers=numbers)


# ---------------------------------------------------------------- a model


def model(path: str) -> tuple[Check, str | None]:
    """Whether a file is a model that can be split; and its digest."""
    try:
        info = inspect_model(path)
    except MeshpipeError as error:
        return Check("model", "failed", str(error), "give the path of a GGUF file"), None
    numbers: dict[str, object] = {"digest": info.digest, "layers": info.layers}
    finding = f"{info.name or Path(path).name}, {info.architecture}, {info.layers} layers, digest {info.digest[:12]}"
    if info.refusal:
        return Check(
            "model", "failed", f"{finding}: {info.refusal}", "choose another model", numbers
        ), info.digest
    if not info.tested:
        advice = (
            f"meshpipe certify {path} --split … proves a split on a miniature; that is done by itself too"
        )
        return Check(
            "model", "warning", f"{finding}; this architecture is not in the tests", advice, numbers
        ), info.digest
    return Check("model", "ok", finding, numbers=numbers), info.digest


# ---------------------------------------------------------------- the stages of a topology


def stages(found: Configured, topology: Topology, digest: str | None) -> Iterator[Check]:
    """Every stage by itself, what they have in common, and the whole route."""
    health = trio.run(_examine_all, topology, found.settings)
    for one in health:
        yield stage(one)
    if any(one.error is not None for one in health):
        return
    yield same_model(health, digest)
    yield route(found, topology)


async def _examine_all(topology: Topology, settings: Configuration) -> list[Health]:
    """One after the other: they share this machine's line."""
    security = settings.security()
    return [
        await examine(topology, number, security, settings.connect_deadline)
        for number in range(len(topology.stages))
    ]


def stage(health: Health) -> Check:
    """One stage, as it was found."""
    name = f"stage {health.stage} at {health.address}"
    descriptor = health.descriptor
    if descriptor is None or health.error is not None:
        return Check(name, "failed", health.error or "no answer", _remedy(health.error or ""))
    numbers: dict[str, object] = {
        "layers": descriptor.layers,
        "model_digest": descriptor.model_digest,
        "lanes": descriptor.lanes,
        "context": descriptor.context,
        "exact": descriptor.exact,
        "round_trip": health.round_trip,
        "bandwidth": health.bandwidth,
        "clock_ahead": health.clock.ahead if health.clock is not None else None,
        "clock_give_or_take": health.clock.give_or_take if health.clock is not None else None,
    }
    parts = [
        f"layers {descriptor.layers[0]}:{descriptor.layers[1]}",
        f"{counted(descriptor.lanes, 'lane')} of {descriptor.context}",
    ]
    if health.round_trip is not None:
        parts.append(f"round trip {health.round_trip * 1e3:.1f} ms")
    if health.bandwidth is not None:
        parts.append(f"{health.bandwidth * 8 / 1e6:.0f} Mbit/s from here")
    if health.clock is not None:
        parts.append(f"clock known to ±{health.clock.give_or_take * 1e3:.1f} ms")
    row = descriptor.n_embd * 4
    if health.bandwidth is not None and health.round_trip is not None:
        prefill = row * descriptor.most_rows / health.bandwidth
        if prefill > max(0.1, health.round_trip):
            advice = (
                f'a prefill window takes {prefill:.1f} s on this line: activation = "float16" in the topology halves '
                "that, and changes the output a little"
            )
            return Check(name, "warning", ", ".join(parts), advice, numbers)
    if not descriptor.exact:
        advice = "start it without --no-exact if output has to be the unsplit model's"
        return Check(name, "warning", ", ".join([*parts, "not exact"]), advice, numbers)
    return Check(name, "ok", ", ".join(parts), numbers=numbers)


def _remedy(error: str) -> str:
    """What to do about a stage that cannot be examined."""
    for sign, advice in (
        ("shared key", "give --key-file the file that the stage was started with"),
        ("certificate", "give --tls-ca (and --tls-cert, --tls-key) that match the stage's"),
        ("layers", "correct `layers` in the topology, or restart the stage with these"),
        ("shutting down", "start it again"),
        ("version", "install the same meshpipe on both machines"),
    ):
        if sign in error:
            return advice
    return "see that `meshpipe stage` runs there, that the address is right, and that no firewall is between"


def same_model(health: Iterable[Health], digest: str | None) -> Check:
    """Whether all stages, and the model that was named, are of one model."""
    digests = {
        f"stage {one.stage}": one.descriptor.model_digest for one in health if one.descriptor is not None
    }
    if digest is not None:
        digests["the model here"] = digest
    if len(set(digests.values())) == 1:
        return Check("model digest", "ok", f"{next(iter(digests.values()))[:12]} everywhere")
    finding = ", ".join(f"{where} has {value[:12]}" for where, value in digests.items())
    return Check(
        "model digest", "failed", finding, "start all stages with (slices of) the same file", dict(digests)
    )


def route(found: Configured, topology: Topology) -> Check:
    """The whole pipeline: opened, timed, closed."""
    if found.settings.model is None and topology.model is None:
        return Check("route", "skipped", "no model for its vocabulary", "name it with --model")
    try:
        with Pipeline(pipeline_of(found)) as pipeline:
            seconds = pipeline.run(_best_round_trip)
            way = pipeline.coordinator.return_route()
    except MeshpipeError as error:
        return Check("route", "failed", str(error), _remedy(str(error)))
    finding = f"all stages and back in {seconds * 1e3:.1f} ms, replies by the {way} route"
    numbers: dict[str, object] = {"round_trip": seconds, "return_route": way}
    if way == "relay":
        advice = "let this machine reach the last stage (return_address in the topology): it is shorter"
        return Check("route", "warning", finding, advice, numbers)
    return Check("route", "ok", finding, numbers=numbers)


async def _best_round_trip(coordinator: Coordinator) -> float:
    return min([await coordinator.round_trip() for _ in range(3)])
