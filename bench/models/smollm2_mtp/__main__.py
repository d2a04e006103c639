"""`python -m bench.models.smollm2_mtp generate | train | evaluate | assemble`."""

from __future__ import annotations

import argparse
from pathlib import Path

from bench.models.smollm2_mtp.assemble import assemble


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.models.smollm2_mtp", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("generate", help="let the model write the text to train on")
    command.add_argument("directory", type=Path)
    command.add_argument("--tokens", type=int, default=400_000)
    command.add_argument("--seed", type=int, default=1)
    command.add_argument("--threads", type=int, default=2)
    command = commands.add_parser("train", help="train the block on that text")
    command.add_argument("directory", type=Path, nargs="+")
    command.add_argument("--block", type=Path, required=True, help="where to write the block")
    command.add_argument("--begin", type=Path, help="a block to go on from")
    command.add_argument("--steps", type=int, default=2000)
    command.add_argument("--rate", type=float, default=2.5e-4, help="the highest learning rate")
    command.add_argument("--seed", type=int, default=1)
    command.add_argument("--threads", type=int, default=2)
    command = commands.add_parser("evaluate", help="measure how often drafts are accepted, with llama.cpp")
    command.add_argument("--block", type=Path, help="default: the block of the sources")
    command.add_argument("--tokens", type=int, default=128, help="tokens to write to each prompt")
    command.add_argument("--each", type=int, default=5, help="prompts of each kind")
    command.add_argument("--threads", type=int, default=2)
    command = commands.add_parser("assemble", help="write the GGUF file with the block of the sources")
    command.add_argument("path", type=Path, nargs="?", help="default: in the cache")
    command.add_argument("--block", type=Path, help="another block")
    options = parser.parse_args()
    if options.command == "generate":
        from bench.models.smollm2_mtp.data import generate

        generate(options.directory, options.tokens, options.seed, options.threads)
    if options.command == "train":
        from bench.models.smollm2_mtp.train import Settings, train

        settings = Settings(
            steps=options.steps, rate=options.rate, seed=options.seed, threads=options.threads
        )
        train(options.directory, options.block, settings, options.begin)
    if options.command == "evaluate":
        from bench.models.smollm2_mtp.evaluate import evaluate, table

        print(table(evaluate(assemble(block=options.block), options.tokens, options.each, options.threads)))
    if options.command == "assemble":
        print(assemble(options.path, options.block))


if __name__ == "__main__":
    main()
