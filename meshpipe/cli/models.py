"""`meshpipe inspect`, `slice` and `certify`: what can be done with a model file alone."""

from __future__ import annotations

import argparse
import json
import time

from attrs import asdict

from meshpipe.cli.arguments import Commands, command
from meshpipe.cli.progress import bars
from meshpipe.llama.certify import certify
from meshpipe.llama.inspection import inspect_model, plan_split
from meshpipe.llama.slicing import slice_model
from meshpipe.topology.layout import parse_layers


def add_commands(commands: Commands) -> None:
    """Adds `inspect`, `slice` and `certify`."""
    parser = command(
        commands,
        "inspect",
        "Say what a model file is, and whether and how it can be split.",
        "meshpipe inspect M.gguf",
        "meshpipe inspect M.gguf --json",
    )
    parser.add_argument("model", help="GGUF file (of a model in several files, the first)")
    parser.add_argument("--json", action="store_true", help="print one object")
    parser.set_defaults(run=_inspect)

    parser = command(
        commands,
        "slice",
        "Write the file of a layer range into the cache, and print its path.",
        "meshpipe slice M.gguf --layers 15:30",
    )
    parser.add_argument("model", help="GGUF file (of a model in several files, the first)")
    parser.add_argument(
        "--layers", required=True, metavar="A:B", help="first layer, and the one after the last"
    )
    parser.add_argument("--mtp", action="store_true", help="keep the NextN layers in the last stage")
    parser.add_argument("--json", action="store_true", help="print one object")
    parser.set_defaults(run=_slice)

    parser = command(
        commands,
        "certify",
        "Run a miniature twin of the model whole and split, and compare every bit.",
        "meshpipe certify M.gguf --split 0,15,30",
    )
    parser.add_argument("model", help="GGUF file (of a model in several files, the first)")
    parser.add_argument("--split", required=True, help="boundaries, 0,15,30, or a number of stages, 2")
    parser.add_argument("--json", action="store_true", help="print one object")
    parser.set_defaults(run=_certify)


def _inspect(options: argparse.Namespace) -> int:
    info = inspect_model(options.model)
    print(json.dumps(info.as_dict()) if options.json else info.table())
    return 0


def _slice(options: argparse.Namespace) -> int:
    start, stop = parse_layers(options.layers)
    began = time.perf_counter()
    with bars():
        path = slice_model(options.model, start, stop, mtp=options.mtp)
    if options.json:
        stat = path.stat()
        print(
            json.dumps(
                {
                    "path": str(path),
                    "layers": [start, stop],
                    "bytes": stat.st_size,
                    "bytes_on_disk": stat.st_blocks * 512,
                    "seconds": time.perf_counter() - began,
                }
            )
        )
    else:
        print(path)
    return 0


def _certify(options: argparse.Namespace) -> int:
    boundaries = plan_split(options.model, options.split)
    certificate = certify(options.model, boundaries)
    print(json.dumps(asdict(certificate)) if options.json else certificate.describe())
    return 0 if certificate.passed else 1
