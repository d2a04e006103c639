"""`meshpipe lock`: records what stages serve, so that `--lock` accepts nothing else."""

from __future__ import annotations

import argparse

import trio

from meshpipe.cli.arguments import Commands, add_settings, command, configured
from meshpipe.cli.pipelines import pipeline_of
from meshpipe.errors import UsageError
from meshpipe.portal import Opener
from meshpipe.topology.layout import read_topology
from meshpipe.topology.lock import Lock, make_lock, write_lock
from meshpipe.wording import counted

KEYS = ("tls_cert", "tls_key", "tls_ca", "key_file", "coordinator_key_file")


def add_commands(commands: Commands) -> None:
    """Adds `lock`."""
    parser = command(
        commands,
        "lock",
        "Record which layers of which model the stages of a topology serve.",
        "meshpipe lock --topology mesh.toml --key-file mesh.key --output mesh.lock",
        "meshpipe generate --topology mesh.toml --key-file mesh.key --lock mesh.lock --prompt Hello",
    )
    add_settings(parser, "topology", "model", "direct_return", "return_host", "links", *KEYS)
    parser.add_argument("--output", default="mesh.lock", metavar="FILE", help="default: mesh.lock")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Joins the stages once and writes down what they are."""
    found = configured(options)
    if found.settings.topology is None:
        raise UsageError("name the stages with --topology")
    topology = read_topology(found.settings.topology)

    async def record(opener: Opener) -> Lock:
        async with opener() as pipeline:
            return make_lock(topology.stages, pipeline.descriptors, topology.activation)

    lock = trio.run(record, pipeline_of(found))
    write_lock(lock, options.output)
    print(
        f"{options.output}: {counted(len(lock.stages), 'stage')} of model {lock.stages[0].model_digest[:16]}…"
    )
    return 0
