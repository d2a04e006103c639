"""What a layer range of each architecture needs so that llama.cpp runs it as it runs the whole model.

Most of it is the same for all: a slice declares fewer layers, and every per-layer array is cut. What is not the
same follows from how llama.cpp derives a layer's behaviour from its absolute index or from the number of
layers; one row of `ARCHITECTURES` states that for an architecture. An architecture without a row is sliced by
the common rules alone, and is trusted only after `meshpipe.llama.certify` has shown that they suffice.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from attrs import frozen

from meshpipe.errors import ModelError, SplitError
from meshpipe.llama import gguf
from meshpipe.llama.gguf import Header, Value


@frozen
class Architecture:
    """One architecture's row.

    `window_period`: every n-th layer attends globally unless the metadata say otherwise (0: no such rule), the
    first of each period when `dense_first`, else the last. `window_always`: that holds even if the metadata
    name no window. `cut_period`: something else repeats every n layers that no metadata can shift (RoPE left
    out, say), so that only multiples of n can be boundaries. `odd_counts`: numbers of layers that give a model
    a behaviour which a slice with another number of layers cannot be given. `sections`: activations are taken
    only if rope sections are stated. `tested`: this project's tests compare its slices with the whole model.
    """

    window_period: int = 0
    dense_first: bool = False
    window_always: bool = False
    cut_period: int = 1
    odd_counts: tuple[int, ...] = ()
    sections: bool = False
    refused: str = ""
    tested: bool = False


_RECURRENT = "its recurrent state cannot be taken back to an earlier position"
_ENCODER = "it is an encoder: it does not generate text from left to right"
_DIFFUSION = "it generates by diffusion, not from left to right"
_STREAMS = "more than one row per token passes from layer to layer"
_SHARED = "layers use results of earlier layers besides the residual stream"
_DRAFT = "it is the draft half of another model"
_LOOPS = "it runs its layers several times"
_OTHER = "it is not a text-to-text language model"

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(tested=True),
}


def row(header: Header) -> Architecture:
    """The row of the model's architecture; the empty row for one that has none."""
    return ARCHITECTURES.get(header.architecture, Architecture())


def trunk_layers(header: Header) -> int:
    """Number of layers that a split divides: all but the NextN layers."""
    return header.integer(".block_count") - nextn_layers(header)


def nextn_layers(header: Header) -> int:
    """Number of NextN (multi-token prediction) layers behind the trunk."""
    return header.integer(".nextn_predict_layers", 0)


def slice_metadata(header: Header, start: int, stop: int, nextn: bool) -> dict[str, Value]:
    """The metadata, but the tokenizer's, of a slice with the trunk layers `[start, stop)`.

    `nextn`: the NextN layers follow. Raises ModelError for a model that cannot be split.
    """
    arch = header.architecture
    layers, extra = trunk_layers(header), nextn_layers(header)
    kept = extra if nextn else 0
    result: dict[str, Value] = {}
    for key, entry in header.metadata.items():
        if key.startswith("split."):
            continue
        result[key] = entry
        per_layer = entry.is_array and key.startswith(arch + ".") and entry.count in (layers, layers + extra)
        if per_layer and key.removeprefix(arch) not in _NOT_PER_LAYER:
            items = entry.decode()
            tail = items[layers:] if nextn else []
            assert entry.element is not None
            result[key] = gguf.array(entry.element, items[start:stop] + tail)
    result[f"{arch}.block_count"] = gguf.value(gguf.U32, stop - start + kept)
    if extra:
        result[f"{arch}.nextn_predict_layers"] = gguf.value(gguf.U32, kept)
    lead = header.integer(".leading_dense_block_count", 0)
    if lead:
        result[f"{arch}.leading_dense_block_count"] = gguf.value(
            gguf.U32, min(max(lead - start, 0), stop - start)
        )
    return result


_NOT_PER_LAYER = {".rope.dimension_sections"}


def check_range(header: Header, start: int, stop: int) -> None:
    """Raises SplitError for a layer range that the model does not have."""
    layers = trunk_layers(header)
    if not 0 <= start < stop <= layers:
        raise SplitError(
            f"layers {start}:{stop} are no range of {header.path.name}, which has layers 0:{layers}; "
            f"give 0 <= start < stop <= {layers}"
        )


def vocabulary_size(header: Header) -> int:
    """Number of tokens, from the embedding's rows."""
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{header.path}: has no token embedding; it is no complete language model")
    return embedding.shape[1]
