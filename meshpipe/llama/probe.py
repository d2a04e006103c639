"""The probe at load: what decodes of an engine cost, and of which class they have to be to give the same bits.

It is evidence and no proof: it tries one place in the cache, and some sizes (`docs/exactness.md`).
"""

from __future__ import annotations

import hashlib
import time
from typing import TYPE_CHECKING

import numpy as np
from attrs import evolve, frozen

from meshpipe.llama.decodes import EXACT_ROWS, DecodeClass, Span
from meshpipe.messages import Rows

if TYPE_CHECKING:
    from meshpipe.llama.engine import StageEngine

SIZES = (1, 2, 4, 8, 16, 32, EXACT_ROWS)
"""Rows of the decodes that are timed."""
LONG = 1.0
"""Seconds of a decode after which no larger one is tried, so that the probe of a large model stays short."""


@frozen
class Probed:
    """`cost`: seconds of a decode by its rows. `fingerprint`: a digest of the bits that fixed rows gave."""

    cost: tuple[tuple[int, float], ...]
    fingerprint: str
    decodes: DecodeClass


def probe(engine: StageEngine) -> Probed:
    """Times decodes on lane 0, and looks whether a row keeps its bits alone, in pairs and in groups.

    Leaves the lane empty. Raises EngineError if llama.cpp fails.
    """
    decodes = engine.decodes
    total = min(EXACT_ROWS, engine.context, decodes.most)
    rng = np.random.default_rng(0)
    tokens = [int(t) for t in rng.integers(0, engine.n_vocab, total)]
    rows = rng.standard_normal((total, engine.n_embd)).astype(np.float32)

    def decode(low: int, high: int) -> tuple[Rows, float]:
        if engine.slice.is_first:
            span = Span(0, low, tokens[low:high], wanted=high - low)
        else:
            span = Span(0, low, rows=rows[low:high], wanted=high - low)
        began = time.perf_counter()
        (result,) = engine.run([span])
        return result, time.perf_counter() - began

    decode(0, 1)  # the first decode pays for page faults and graph reservation
    cost: list[tuple[int, float]] = []
    for size in SIZES:
        if size > total or (cost and cost[-1][1] > LONG):
            break
        cost.append((size, min(decode(0, size)[1] for _ in range(2))))
    bits = hashlib.blake2b(decode(0, min(8, total))[0].tobytes(), digest_size=16).hexdigest()
    if decodes.exact:
        size = max(1, cost[-1][0])
        engine.decodes = evolve(decodes, least=1)
        together, _ = decode(0, size)
        lone_equal = size < 2 or bool(np.array_equal(decode(size - 1, size)[0][0], together[-1]))
        groups_equal = all(
            bool(np.array_equal(decode(size - k, size)[0], together[-k:])) for k in (2, 3, 7, 16) if k < size
        )
        if not groups_equal:
            decodes = evolve(decodes, most=1, least=1)
        else:
            decodes = evolve(decodes, least=2 if engine.threads > 1 or not lone_equal else 1)
    engine.clear(0)
    return Probed(tuple(cost), f"{bits}/{'exact' if decodes.exact else 'free'}", decodes)
