"""Stages that run already, on whatever machines.

    python examples/connect.py [mesh.toml [MODEL.gguf]]

With a topology file (`examples/mesh.toml` is one) it joins the stages that the file names; the model is needed
for its vocabulary, if the file names none. Without a topology file it first starts two stages here, as you would
on two machines, with the small model that `pip install 'meshpipe[demo]'` brings.
"""

import json
import subprocess
import sys
from contextlib import ExitStack

import trio

from meshpipe import MeshpipeError, Pipeline, StagePlace, Topology
from meshpipe.cli.demo import demo_model


def start_stage(model: str, layers: str, running: ExitStack) -> StagePlace:
    """`meshpipe stage` in a process of its own, which ends when `running` does."""
    stage = subprocess.Popen(
        [
            sys.executable, "-m", "meshpipe", "stage", "--model", model, "--layers", layers,
            "--listen", "127.0.0.1:0", "--context", "1024", "--json",
        ],
        stdout=subprocess.PIPE,
    )  # fmt: skip
    running.enter_context(stage)  # waits for its end
    running.callback(stage.terminate)  # after this
    assert stage.stdout is not None
    ready = json.loads(stage.stdout.readline())  # it says so on one line
    print(f"stage {layers} serves at {ready['address']}")
    return StagePlace(ready["address"], tuple(ready["layers"]))


async def generate(topology: Topology | str, model: str | None = None) -> None:
    async with Pipeline.connect(topology, model) as pipeline:
        print(f"connected; replies come back by the {pipeline.return_route()} route")
        async with pipeline.generate("The lighthouse keeper", max_tokens=40) as generation:
            async for piece in generation:
                print(piece.text, end="", flush=True)
        print()


def main() -> None:
    if len(sys.argv) > 1:
        trio.run(generate, *sys.argv[1:3])
        return
    model = str(demo_model())
    with ExitStack() as running:
        places = tuple(start_stage(model, layers, running) for layers in ("0:15", "15:30"))
        trio.run(generate, Topology(places, model=model))


if __name__ == "__main__":
    try:
        main()
    except MeshpipeError as error:
        sys.exit(str(error))
