"""The NextN block by itself: its tensors as float32 arrays to train, and as a small GGUF file to keep.

Names are llama.cpp's without the layer (`attn_qkv.weight`); arrays have numpy's order, `[out, in]`. Matrices are
kept as Q8_0, vectors as float32. The file's metadata tell where the block comes from (`provenance.*`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.models.smollm2_mtp.express import ARCHITECTURE, Entry, halves, read_rows, write
from meshpipe.llama import gguf
from meshpipe.llama.gguf import Header, read_header

Weights = dict[str, NDArray[np.float32]]

COPIED = ("attn_output", "attn_norm", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")
F32, Q8_0 = 0, 8


def initial(header: Header) -> Weights:
    """Weights to begin training with: the model's last layer, fed with the token's embedding and some of the row."""
    from gguf import GGMLQuantizationType, dequantize

    def weights(name: str, heads: int = 0) -> NDArray[np.float32]:
        tensor = header.tensors[name]
        rows = halves(read_rows(tensor), heads) if heads else read_rows(tensor)
        return np.asarray(dequantize(rows, GGMLQuantizationType(tensor.kind)), np.float32).reshape(
            tensor.shape[::-1]
        )

    last = f"blk.{header.integer('.block_count') - 1}"
    result = {f"{name}.weight": weights(f"{last}.{name}.weight") for name in COPIED}
    result["attn_qkv.weight"] = np.concatenate(
        [
            weights(f"{last}.attn_q.weight", header.integer(".attention.head_count")),
            weights(f"{last}.attn_k.weight", header.integer(".attention.head_count_kv")),
            weights(f"{last}.attn_v.weight"),
        ]
    )
    one = np.eye(header.integer(".embedding_length"), dtype=np.float32)
    result["nextn.eh_proj.weight"] = np.concatenate([0.3 * one, one], axis=1)
    result["nextn.enorm.weight"] = np.ones(len(one), np.float32)
    result["nextn.hnorm.weight"] = weights("output_norm.weight")
    result["nextn.shared_head_norm.weight"] = weights("output_norm.weight")
    return result


def save(path: Path, weights: Weights, provenance: Mapping[str, str]) -> None:
    """Writes the block, quantized."""
    values = {"general.architecture": gguf.value(gguf.STRING, ARCHITECTURE)}
    values |= {f"provenance.{key}": gguf.value(gguf.STRING, text) for key, text in provenance.items()}
    write(path, values, [_entry(name, array) for name, array in sorted(weights.items())])


def load(path: Path, layer: int) -> list[Entry]:
    """The tensors of a block's file, named as those of `layer`."""
    return [
        (f"blk.{layer}.{tensor.name}", tensor.shape, tensor.kind, read_rows(tensor))
        for tensor in read_header(path).tensors.values()
    ]


def read(path: Path) -> Weights:
    """The weights of a block's file, as they are after quantization."""
    from gguf import GGMLQuantizationType, dequantize

    return {
        tensor.name: np.array(
            dequantize(read_rows(tensor), GGMLQuantizationType(tensor.kind)), np.float32
        ).reshape(tensor.shape[::-1])
        for tensor in read_header(path).tensors.values()
    }


def _entry(name: str, array: NDArray[np.float32]) -> Entry:
    shape = array.shape[::-1]
    if array.ndim == 1:
        return name, shape, F32, array.view(np.uint8).reshape(1, -1)
    return name, shape, Q8_0, quantize(array)


def quantize(array: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Rows as ggml's Q8_0: blocks of 32 weights, each a float16 scale and 32 signed bytes."""
    blocks = array.reshape(-1, 32)
    scale = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0)
    numbers = np.rint(blocks * inverse).astype(np.int8)
    packed = np.concatenate([scale.astype(np.float16).view(np.uint8), numbers.view(np.uint8)], axis=1)
    return packed.reshape(len(array), -1)
