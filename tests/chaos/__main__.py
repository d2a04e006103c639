"""Runs the chaos harness and prints what became of it as one JSON object.

python -m tests.chaos --faults 200 --seed 1
python -m tests.chaos --seconds 1200 --load 16      # a soak: how memory grew is in the output
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
from pathlib import Path

import trio

sys.path.insert(0, str(Path(__file__).parent.parent))

import tiny

from .harness import attack


def main() -> None:
    """The command line; see the top of this file."""
    parser = argparse.ArgumentParser("python -m tests.chaos", description="Faults at random moments.")
    parser.add_argument("--faults", type=int, default=10**9, help="how many (default: as many as come)")
    parser.add_argument("--seconds", type=float, help="for how long (default: until all faults have come)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--load", type=int, default=3, help="requests at a time")
    parser.add_argument("--log", default="error")
    arguments = parser.parse_args()
    if arguments.seconds is None and arguments.faults == 10**9:
        parser.error("say --faults or --seconds")
    logging.basicConfig(level=arguments.log.upper(), stream=sys.stderr)
    with tempfile.TemporaryDirectory() as directory:
        model = tiny.write(Path(directory) / "tiny.gguf", "llama")
        tally = trio.run(
            lambda: attack(
                model, arguments.faults, arguments.seed, seconds=arguments.seconds, load=arguments.load
            )
        )
    print(json.dumps({"seed": arguments.seed, **tally.to_dict()}, indent=1))


if __name__ == "__main__":
    main()
