"""`meshpipe stage`: serves a layer range to coordinators."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from contextlib import suppress
from functools import partial

import trio

from meshpipe.cli.arguments import Commands, add_engine, command, engine_arguments, parse_conditions
from meshpipe.cli.security import add_security, security_of
from meshpipe.llama.engine import StageEngine
from meshpipe.llama.slicing import slice_model
from meshpipe.pipeline.host import StageHost
from meshpipe.pipeline.runner import LlamaRunner
from meshpipe.topology.layout import parse_layers
from meshpipe.wire.endpoints import Address, listen, local_address
from meshpipe.wire.security import Security


def add_commands(commands: Commands) -> None:
    """Adds `stage`."""
    parser = command(
        commands,
        "stage",
        "Serve a range of a model's layers.",
        "meshpipe stage --model M.gguf --layers 15:30 --listen 127.0.0.1:7001",
        "meshpipe stage --model M.gguf --layers 15:30 --listen 10.0.0.2:7001 --lanes 8 --key-file mesh.key",
    )
    parser.add_argument("--model", required=True, help="GGUF file (of a model in several files, the first)")
    parser.add_argument(
        "--layers", required=True, metavar="A:B", help="first layer, and the one after the last"
    )
    parser.add_argument(
        "--listen", default="127.0.0.1:7001", metavar="HOST:PORT", help="port 0: any free one"
    )
    parser.add_argument(
        "--insecure", action="store_true", help="listen to strangers with neither TLS nor a key"
    )
    parser.add_argument(
        "--drain-seconds", type=float, default=30.0, help="after SIGTERM, time for open sessions"
    )
    parser.add_argument(
        "--conditions", default="", help="suffered by what is sent on, for experiments: delay=0.1"
    )
    parser.add_argument("--conditions-upward", default="", help="suffered by what is sent back up the link")
    parser.add_argument("--exit-with-parent", action="store_true", help="end when standard input ends")
    parser.add_argument("--json", action="store_true", help="say that it is ready as one JSON object")
    add_engine(parser)
    add_security(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Loads the slice, says on one line that it is ready, serves until SIGTERM or SIGINT."""
    security = security_of(options)
    start, stop = parse_layers(options.layers)
    address = Address.parse(options.listen)
    path = slice_model(options.model, start, stop)
    with StageEngine(path, probe=True, **engine_arguments(options)) as engine:
        trio.run(partial(_serve, LlamaRunner(engine), address, security, options))
    return 0


async def _serve(
    runner: LlamaRunner, address: Address, security: Security, options: argparse.Namespace
) -> None:
    host = StageHost(
        runner,
        security,
        conditions=parse_conditions(options.conditions) if options.conditions else None,
        conditions_upward=parse_conditions(options.conditions_upward) if options.conditions_upward else None,
    )
    listeners = await listen(address, security, options.insecure)
    async with trio.open_nursery() as nursery:
        await nursery.start(host.run, listeners)
        _say_ready(runner, str(local_address(listeners[0])), options.json)
        if options.exit_with_parent:
            nursery.start_soon(_until_input_ends, nursery.cancel_scope)
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async for number in signals:
                if number == signal.SIGTERM and not host.draining:
                    nursery.start_soon(_drain, host, options.drain_seconds, nursery.cancel_scope)
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
        }
        print(json.dumps(ready), flush=True)
    else:
        print(
            f"ready: layers {start}:{stop} of {descriptor.layer_count} on {address}, "
            f"{descriptor.lanes} lanes of {descriptor.context} tokens",
            flush=True,
        )


async def _drain(host: StageHost, seconds: float, scope: trio.CancelScope) -> None:
    with trio.move_on_after(seconds):
        await host.drain()
    scope.cancel()


async def _until_input_ends(scope: trio.CancelScope) -> None:
    with suppress(OSError):
        stream = trio.lowlevel.FdStream(sys.stdin.fileno())
        async for _ in stream:
            pass
    scope.cancel()
