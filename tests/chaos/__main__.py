"""Runs the chaos harness and prints what became of it as one JSON object.

python -m tests.chaos --faults 200 --seed 1
python -m tests.chaos --soak 1200 --load 16      # a soak, in seconds: how memory grew is in the output
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
from functools import partial
from pathlib import Path

import trio

sys.path.insert(0, str(Path(__file__).parent.parent))

import tiny

from .harness import Plan, attack


def main() -> None:
    """The command line; see the top of this file."""
    parser = argparse.ArgumentParser("python -m tests.chaos", description="Faults at random moments.")
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--faults", type=int, metavar="N", help="as many, one close upon the other")
    length.add_argument("--soak", type=float, metavar="SECONDS", help="one every ten seconds or so")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--load", type=int, default=3, help="requests at a time")
    parser.add_argument("--log", default="error")
    arguments = parser.parse_args()
    if arguments.soak is None:
        plan = Plan(load=arguments.load)
    else:  # long links, so that not the processor's time is what requests wait for; two processes live all the while
        plan = Plan(load=arguments.load, gap=(5.0, 15.0), delay=0.05, spared=frozenset({0, 1}))
    logging.basicConfig(level=arguments.log.upper(), stream=sys.stderr)
    with tempfile.TemporaryDirectory() as directory:
        model = tiny.write(Path(directory) / "tiny.gguf", "llama")
        faults = sys.maxsize if arguments.faults is None else arguments.faults
        tally = trio.run(partial(attack, model, faults, arguments.seed, plan, seconds=arguments.soak))
    print(json.dumps({"seed": arguments.seed, **tally.to_dict()}, indent=1))


if __name__ == "__main__":
    main()
