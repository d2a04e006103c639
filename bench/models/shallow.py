"""A shallow model: some layers of a GGUF, its embedding and its head, as a draft model for the whole.

    python -m bench.models.shallow --layers 0:12,29:30 --output shallow.gguf [--model M.gguf]

Nothing is trained. What such a model guesses is worse than what a real small model would, but it has the same
vocabulary, it costs in proportion to its layers, and everybody who has the model can make it in a second. For
architectures whose layers are all alike (no sliding windows, no experts).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from bench.rig import demo_model
from meshpipe.llama import gguf


def write_shallow(model: Path, layers: Sequence[int], output: Path) -> Path:
    """Writes the layers, in that order, as a model of its own."""
    header = gguf.read_header(model)
    metadata = dict(header.metadata)
    metadata[f"{header.architecture}.block_count"] = gguf.value(gguf.U32, len(layers))
    kept = [(tensor.name, tensor) for tensor in header.tensors.values() if tensor.layer is None]
    for number, layer in enumerate(layers):
        kept += [
            (f"blk.{number}.{tensor.name.split('.', 2)[2]}", tensor)
            for tensor in header.tensors.values()
            if tensor.layer == layer
        ]
    table = [(name, tensor.shape, tensor.kind) for name, tensor in kept]
    encoded, offsets, length = gguf.encode_header(metadata, table, header.alignment)
    with output.open("wb") as file:
        file.truncate(length)
        file.write(encoded)
        for (_, tensor), offset in zip(kept, offsets, strict=True):
            with tensor.path.open("rb") as source:
                source.seek(tensor.offset)
                file.seek(offset)
                file.write(source.read(tensor.size))
    return output


def ranges(text: str) -> list[int]:
    """`0:12,29:30` as layer numbers."""
    pairs = [part.split(":") for part in text.split(",")]
    return [layer for start, stop in pairs for layer in range(int(start), int(stop))]


if __name__ == "__main__":
    parser = argparse.ArgumentParser("bench.models.shallow", description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=demo_model())
    parser.add_argument("--layers", type=ranges, required=True, metavar="A:B,C:D")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    print(write_shallow(options.model, options.layers, options.output))
