"""Another coordinator on the same stages: once told to, it generates until it is killed."""

from __future__ import annotations

import json
import sys
from contextlib import suppress

import trio

from meshpipe import MeshpipeError, StagePlace, Topology
from meshpipe.pipeline.remote import open_remote

from .harness import Tokens


async def main(places: str) -> None:
    """Says so when its first token has come."""
    await trio.to_thread.run_sync(sys.stdin.readline)  # until it is wanted
    topology = Topology(
        tuple(StagePlace(place["address"], standby=tuple(place["standby"])) for place in json.loads(places))
    )
    async with open_remote(topology, Tokens()) as pipeline:  # type: ignore[arg-type]
        said = False
        while True:
            with suppress(MeshpipeError):  # of a fault before this one, perhaps
                async with pipeline.generate([1, 2, 3], max_tokens=400) as generation:
                    async for _ in generation:
                        if not said:
                            print("generating", flush=True)
                            said = True


if __name__ == "__main__":
    trio.run(main, sys.argv[1])
