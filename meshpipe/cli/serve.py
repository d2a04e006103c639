"""`meshpipe serve`: a server for OpenAI's clients."""

from __future__ import annotations

import argparse
import importlib.util
import json
import signal
from pathlib import Path

import trio

from meshpipe.cli.arguments import Commands, add_settings, command, configured
from meshpipe.cli.pipelines import pipeline_of
from meshpipe.cli.progress import shown
from meshpipe.cli.trace import add_trace, recorded
from meshpipe.configuration import Configured
from meshpipe.errors import UsageError
from meshpipe.portal import Opener
from meshpipe.topology.layout import read_topology
from meshpipe.wording import counted


def add_commands(commands: Commands) -> None:
    """Adds `serve`."""
    parser = command(
        commands,
        "serve",
        "Serve the model to OpenAI clients, over HTTP.",
        "meshpipe serve --model M.gguf --split 2 --spawn --lanes 4 --port 8000",
        "meshpipe serve --topology mesh.toml --key-file mesh.key --api-key-file keys.txt --host 0.0.0.0",
        'curl localhost:8000/v1/completions -d \'{"model": "M", "prompt": "Once upon", "temperature": 0}\'',
    )
    parser.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help="a key that clients have to send (several times; other users of this machine may see it: prefer "
        "--api-key-file)",
    )
    add_settings(parser, "pipeline", "engine", "speculation", "links", "security", "server")
    parser.add_argument("--json", action="store_true", help="say that it is ready as one JSON object")
    add_trace(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Opens the pipeline, says on one line where it serves, serves until SIGTERM or SIGINT."""
    needed = ("hypercorn", "starlette", "pydantic", "prometheus_client")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"the server needs {', '.join(missing)}: pip install 'meshpipe[server]'")
    found = configured(options)
    keys = (*options.api_key, *_keys_of(found.settings.api_key_file))
    topology = found.settings.topology
    places = read_topology(topology).stages if topology is not None else ()
    addresses = tuple(place.address for place in places)
    opener = shown(recorded(pipeline_of(found), options.trace))
    trio.run(_serve, opener, found, keys, addresses, options.json)
    return 0


def _keys_of(path: str | None) -> list[str]:
    if path is None:
        return []
    try:
        keys = Path(path).read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read API keys from {path}: {error}") from None
    if not keys:
        raise UsageError(f"{path} holds no API key: write one a line")
    return keys


async def _serve(
    open_pipeline: Opener, found: Configured, keys: tuple[str, ...], addresses: tuple[str, ...], as_json: bool
) -> None:
    from meshpipe.serving.app import Service, application
    from meshpipe.serving.server import open_listener, serve

    chosen = found.settings
    listener = open_listener(
        chosen.host, chosen.port, chosen.send_deadline
    )  # says what is wrong before it loads
    async with open_pipeline() as pipeline:
        service = Service(
            pipeline,
            chosen.served_name or _name_of(chosen.model or chosen.topology),
            chosen.speculation_settings(),
            chosen.queue,
            keys,
            addresses,
        )
        host, port = listener.getsockname()[:2]
        ended = trio.Event()
        async with trio.open_nursery() as nursery:
            await nursery.start(_watch_signals, ended, nursery.cancel_scope)

            async def serve_until_ended() -> None:
                await serve(application(service), listener, until=ended.wait)
                nursery.cancel_scope.cancel()

            nursery.start_soon(serve_until_ended)
            url = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
            ready = {
                "url": url,
                "model": service.name,
                "lanes": pipeline.lanes.count,
                "context": pipeline.context,
            }
            if as_json:
                print(json.dumps(ready), flush=True)
            else:
                print(
                    f"ready: {service.name} at {url}, "
                    f"{counted(pipeline.lanes.count, 'lane')} of {pipeline.context} tokens",
                    flush=True,
                )


async def _watch_signals(
    ended: trio.Event, scope: trio.CancelScope, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """The first signal ends the server gracefully, a second one at once."""
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        task_status.started()
        async for _ in signals:
            if ended.is_set():
                scope.cancel()
            ended.set()


def _name_of(path: str | None) -> str:
    return Path(path or "model").stem
