"""meshpipe: one large language model over machines that are far apart.

    async with Pipeline.spawn("model.gguf", split="0,15,30") as pipeline:
        async with pipeline.generate("Once upon a time", max_tokens=64) as generation:
            async for piece in generation:
                print(piece.text, end="")
    print(generation.report)

Everything here runs on trio.
"""

from meshpipe.errors import MeshpipeError
from meshpipe.messages import Sampling
from meshpipe.pipeline.coordinator import Completion, Coordinator, Generation
from meshpipe.pipeline.local import open_local
from meshpipe.pipeline.remote import open_remote, open_spawned
from meshpipe.pipeline.report import Report
from meshpipe.pipeline.session import Piece
from meshpipe.speculation.ngram import NgramConfig
from meshpipe.speculation.settings import Speculation
from meshpipe.topology.layout import StagePlace, Topology
from meshpipe.wire.conditions import Conditions

__version__ = "0.1.0"


class Pipeline:
    """Three ways to a `Coordinator`, each an async context manager.

    `local`: all stages in this process. `spawn`: a child process for each stage. `connect`: stages that are
    running already.
    """

    local = staticmethod(open_local)
    spawn = staticmethod(open_spawned)
    connect = staticmethod(open_remote)


__all__ = [
    "Completion",
    "Conditions",
    "Coordinator",
    "Generation",
    "MeshpipeError",
    "NgramConfig",
    "Piece",
    "Pipeline",
    "Report",
    "Sampling",
    "Speculation",
    "StagePlace",
    "Topology",
    "__version__",
]
