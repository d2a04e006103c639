"""From what a caller says of a split to boundaries that may be used."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from meshpipe.llama.certify import ensure_certified
from meshpipe.llama.inspection import plan_split
from meshpipe.topology.split import Boundaries

Split = str | int | Sequence[int]
"""Boundaries, `"0,15,30"` or `[0, 15, 30]`, or a number of stages."""


def plan(model: str | Path, split: Split, context: int = 4096, mtp: bool = False) -> Boundaries:
    """The boundaries of a split, certified if the architecture is not one that is known to split well.

    `mtp`: the last stage is to draft with the model's NextN layers. Raises ModelError and SplitError. Blocks: reads
    the model's header, and may run a miniature of it.
    """
    text = (
        split
        if isinstance(split, str)
        else str(split)
        if isinstance(split, int)
        else ",".join(map(str, split))
    )
    boundaries = plan_split(model, text, mtp=mtp, context=context)
    ensure_certified(model, boundaries)
    return boundaries
