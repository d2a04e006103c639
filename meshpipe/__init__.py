"""meshpipe: one large language model over machines that are far apart.

    async with Pipeline.spawn("model.gguf", split="0,15,30") as pipeline:
        async with pipeline.generate("Once upon a time", max_tokens=64) as generation:
            async for piece in generation:
                print(piece.text, end="")
    print(generation.report)

Everything here runs on trio; `meshpipe.aio` and `meshpipe.blocking` have the same for asyncio and for plain threads.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshpipe.errors import MeshpipeError
    from meshpipe.messages import Sampling
    from meshpipe.pipeline.api import Pipeline
    from meshpipe.pipeline.coordinator import Completion, Coordinator, Generation
    from meshpipe.pipeline.fallback import LocalFallback
    from meshpipe.pipeline.report import Report
    from meshpipe.pipeline.request import Piece
    from meshpipe.speculation.ngram import NgramConfig
    from meshpipe.speculation.settings import Speculation
    from meshpipe.topology.layout import StagePlace, Topology
    from meshpipe.wire.conditions import Conditions

__version__ = "0.1.0"

# Where each name lives. Looked up on first use, so that what needs no engine does not load one.
_HOMES = {
    "Completion": "pipeline.coordinator",
    "Conditions": "wire.conditions",
    "Coordinator": "pipeline.coordinator",
    "Generation": "pipeline.coordinator",
    "LocalFallback": "pipeline.fallback",
    "MeshpipeError": "errors",
    "NgramConfig": "speculation.ngram",
    "Piece": "pipeline.request",
    "Pipeline": "pipeline.api",
    "Report": "pipeline.report",
    "Sampling": "messages",
    "Speculation": "speculation.settings",
    "StagePlace": "topology.layout",
    "Topology": "topology.layout",
}

__all__ = [
    "Completion",
    "Conditions",
    "Coordinator",
    "Generation",
    "LocalFallback",
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


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
