"""`meshpipe stage`: serves a layer range to coordinators."""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial

import trio

from meshpipe.cli.arguments import Commands, add_settings, command, configured
from meshpipe.cli.progress import bars
from meshpipe.configuration import Configuration
from meshpipe.errors import UsageError
from meshpipe.llama.engine import StageEngine
from meshpipe.llama.slicing import slice_model
from meshpipe.pipeline.host import StageHost
from meshpipe.pipeline.runner import LlamaRunner
from meshpipe.topology.layout import parse_layers
from meshpipe.wire.conditions import Conditions
from meshpipe.wire.endpoints import Address, listen, local_address
from meshpipe.wording import counted

log = logging.getLogger("meshpipe.stage")

HANGS = 5
"""Exit status of a stage whose decode hung for good."""


def add_commands(commands: Commands) -> None:
    """Adds `stage`."""
    parser = command(
        commands,
        "stage",
        "Serve a range of a model's layers.",
        "meshpipe stage --model M.gguf --layers 15:30 --listen 127.0.0.1:7001",
        "meshpipe stage --model M.gguf --layers 15:30 --listen 10.0.0.2:7001 --lanes 8 --key-file mesh.key",
    )
    add_settings(parser, "model", "engine", "stage", "links", "security")
    parser.add_argument("--exit-with-parent", action="store_true", help="end when standard input ends")
    parser.add_argument("--json", action="store_true", help="say that it is ready as one JSON object")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Loads the slice, says on one line that it is ready, serves until SIGTERM or SIGINT."""
    found = configured(options).settings
    if found.model is None or found.layers is None:
        raise UsageError("name the model and the layers: --model M.gguf --layers 15:30")
    start, stop = parse_layers(found.layers)
    address = Address.parse(found.listen)
    security = found.security()
    keep = int(found.keep_rows * 2**20)
    host = partial(
        StageHost,
        security=security,
        conditions=Conditions.parse(found.conditions) if found.conditions else None,
        conditions_upward=Conditions.parse(found.conditions_upward) if found.conditions_upward else None,
        heartbeat=found.links_heartbeat(),
        connect_deadline=found.connect_deadline,
        lock=found.topology_lock(),
        keep=keep,
    )
    with nullcontext() if options.json else bars():
        path = slice_model(found.model, start, stop, mtp=found.mtp)
        engine = StageEngine(path, probe=True, keep=keep, **found.stage_engine())
    with engine:
        trio.run(partial(_serve, host, LlamaRunner(engine), address, found, options))
    return 0


async def _serve(
    make_host: Callable[[LlamaRunner], StageHost],
    runner: LlamaRunner,
    address: Address,
    found: Configuration,
    options: argparse.Namespace,
) -> None:
    host = make_host(runner)
    listeners = await listen(address, host.security, found.insecure)
    async with trio.open_nursery() as nursery:
        await nursery.start(host.run, listeners)
        _say_ready(runner, str(local_address(listeners[0])), options.json)
        nursery.start_soon(_end_if_hopeless, host)
        if options.exit_with_parent:
            nursery.start_soon(_until_input_ends, nursery.cancel_scope)
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async for number in signals:
                if number == signal.SIGTERM and not host.draining:
                    nursery.start_soon(_drain, host, found.drain_seconds, nursery.cancel_scope)
                else:
                    nursery.cancel_scope.cancel()
                    break


def _say_ready(runner: LlamaRunner, address: str, as_json: bool) -> None:
    descriptor = runner.descriptor
    start, stop = descriptor.layers
    if as_json:
        ready = {
            "address": address,
            "layers": [start, stop],
            "layer_count": descriptor.layer_count,
            "model_digest": descriptor.model_digest,
            "lanes": descriptor.lanes,
            "context": descriptor.context,
            "exact": descriptor.exact,
            "mtp": descriptor.mtp,
        }
        print(json.dumps(ready), flush=True)
    else:
        print(
            f"ready: layers {start}:{stop} of {descriptor.layer_count} on {address}, "
            f"{counted(descriptor.lanes, 'lane')} of {descriptor.context} tokens",
            flush=True,
        )


async def _drain(host: StageHost, seconds: float, scope: trio.CancelScope) -> None:
    with trio.move_on_after(seconds):
        await host.drain()
    scope.cancel()


async def _end_if_hopeless(host: StageHost) -> None:
    """llama.cpp cannot be called back from a decode that hangs: only a new process helps, which others start."""
    await host.stage.watchdog.hopeless.wait()
    log.error("this stage hangs for good; ending the process: %s", host.stage.watchdog.hangs)
    logging.shutdown()
    os._exit(HANGS)


async def _until_input_ends(scope: trio.CancelScope) -> None:
    with suppress(OSError):
        stream = trio.lowlevel.FdStream(sys.stdin.fileno())
        async for _ in stream:
            pass
    scope.cancel()
