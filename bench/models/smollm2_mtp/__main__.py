"""`python -m bench.models.smollm2_mtp generate | train | evaluate | assemble`."""

from __future__ import annotations

import argparse
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.models.smollm2_mtp", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("generate", help="let the model write the text to train on")
    command.add_argument("directory", type=Path)
    command.add_argument("--tokens", type=int, default=1_000_000)
    command.add_argument("--seed", type=int, default=1)
    command = commands.add_parser("assemble", help="write the GGUF file with the block of the sources")
    command.add_argument("path", type=Path, nargs="?", help="default: in the cache")
    command.add_argument("--block", type=Path, help="another block")
    options = parser.parse_args()
    if options.command == "generate":
        from bench.models.smollm2_mtp.data import generate

        generate(options.directory, options.tokens, options.seed)
    if options.command == "assemble":
        from bench.models.smollm2_mtp.assemble import assemble

        print(assemble(options.path, options.block))


if __name__ == "__main__":
    main()
