"""Writes a miniature twin of a model: everything that decides how its layers behave, at the smallest widths.

The twin has the model's architecture, number of layers, per-layer metadata, and for every tensor one of the
same name and type; heads, rows, experts and vocabulary are few, and the weights are random. What a layer does
because of its index, or because of how many layers there are, it does in the twin too. Only the model's header
is read, so that a twin takes seconds whatever the model's size.

Which shape a tensor has at other widths is asked of llama.cpp itself: given metadata alone it creates every
tensor that the architecture can have. Bad metadata can abort the process there, so call this in a child.
"""

from __future__ import annotations

import ctypes
import math
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from meshpipe.errors import ModelError
from meshpipe.llama import architectures, bindings, gguf
from meshpipe.llama.gguf import Header, Value
from meshpipe.llama.slicing import slice_keys

VOCABULARY = 96
_UNIT = 256  # one block of the K quantizations
_WINDOW = 8
_POOL = 1 << 18
_DEVIATION = 0.06


class _Tensor(ctypes.Structure):
    """The head of ggml's `struct ggml_tensor`."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
    )


class _ReadParameters(ctypes.Structure):
    """`struct gguf_init_params`."""

    _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))


def tensor_shapes(metadata: Mapping[str, Value]) -> dict[str, tuple[int, ...]]:
    """Every tensor that llama.cpp makes of these metadata, with its shape; dimensions of 1 at the end are cut.

    Raises ModelError when llama.cpp refuses the metadata; some that are wrong abort the process instead.
    """
    bindings.start()
    read = bindings.function("gguf_init_from_file", ctypes.c_void_p, ctypes.c_char_p, _ReadParameters)
    free = bindings.function("gguf_free", None, ctypes.c_void_p)
    name_of = bindings.function("ggml_get_name", ctypes.c_char_p, ctypes.c_void_p)
    shapes: dict[str, tuple[int, ...]] = {}

    def note(tensor: int, _user_data: object) -> None:
        shape = list(_Tensor.from_address(tensor).ne)
        while len(shape) > 1 and shape[-1] == 1:
            shape.pop()
        shapes[name_of(tensor).decode()] = tuple(shape)

    callback = llama_cpp.llama_model_set_tensor_data_t(note)
    with tempfile.NamedTemporaryFile(suffix=".gguf") as file:
        file.write(gguf.encode_header(metadata, [])[0])
        file.flush()
        context = read(file.name.encode(), _ReadParameters(True, None))
    params = llama_cpp.llama_model_default_params()
    params.n_gpu_layers = 0
    params.load_mtp = True
    model = llama_cpp.llama_model_init_from_user(context, callback, None, params)
    if not model:
        free(context)
        raise ModelError("llama.cpp refuses these metadata; the log of meshpipe.llama says why")
    llama_cpp.llama_model_free(model)
    free(context)
    return shapes


def small_metadata(header: Header) -> dict[str, Value]:
    """The model's metadata with every width shrunk, without its vocabulary and without NextN layers."""
    arch, layers = header.architecture, architectures.trunk_layers(header)
    every = header.metadata
    if architectures.nextn_layers(header):
        every = architectures.slice_metadata(header, 0, layers, nextn=False)
    result = {
        key: entry
        for key, entry in every.items()
        if not key.startswith(("tokenizer.", "split.", "general.")) or key == "general.architecture"
    }

    def put(key: str, content: Any) -> None:
        old = every.get(arch + key)
        if old is None or not old.is_array:
            result[arch + key] = gguf.value(gguf.U32 if old is None else old.kind, content)
        else:
            assert old.element is not None
            result[arch + key] = gguf.array(old.element, content)

    def relabel(key: str, size: Callable[[int], int]) -> None:
        """Each distinct value becomes the size of its rank (0, 1, …) among them; 0 stays 0."""
        entry = every.get(arch + key)
        if entry is not None:
            old = entry.decode()
            several = old if isinstance(old, list) else [old]
            rank = {number: place for place, number in enumerate(_distinct(several))}
            new = [size(rank[number]) if number > 0 else number for number in several]
            put(key, new if isinstance(old, list) else new[0])

    def units(rank: int) -> int:
        return (rank + 1) * _UNIT

    result["tokenizer.ggml.model"] = gguf.value(gguf.STRING, "no_vocab")
    put(".vocab_size", VOCABULARY)

    heads = header.get(".attention.head_count", 0)
    groups = header.get(".attention.head_count_kv", heads)
    first = heads[0] if isinstance(heads, list) else heads
    width = header.integer(".embedding_length")
    small = _UNIT
    if first:
        # Powers of two, so that every number of heads is a multiple of every number of key heads.
        size = header.integer(".attention.key_length", width // first)
        steps = len(_distinct(groups if isinstance(groups, list) else [groups])) if heads != groups else 0
        widen = math.lcm(size << steps, _UNIT) // (size << steps)
        widen = widen if widen <= 4 else 1
        relabel(".attention.head_count", lambda rank: widen << (steps + rank))
        relabel(".attention.head_count_kv", lambda rank: (1 if steps else widen) << rank)
        rows = _first(result[f"{arch}.attention.head_count"]) * size
        small = rows if width == first * size else _UNIT if rows != _UNIT else 2 * _UNIT
    put(".embedding_length", small)
    for key in (".feed_forward_length", ".expert_feed_forward_length", ".expert_shared_feed_forward_length"):
        relabel(key, units)
    relabel(".attention.q_lora_rank", units)
    experts = header.get(".expert_count", 0)
    if experts:
        put(".expert_count", min(experts, 8))
        relabel(".expert_used_count", lambda rank: min(2 + rank, experts, 4))
        if header.get(".expert_group_count", 0) > 1:
            put(".expert_group_count", 2)
            put(".expert_group_used_count", 1)
    for key in (".attention.sliding_window", ".attention.chunk_size"):
        if header.get(key, 0):
            put(key, _WINDOW)
    if "position_embd.weight" in header.tensors:
        put(".context_length", 512)
    return result


def _distinct(numbers: list[int]) -> list[int]:
    """The distinct numbers above 0, ascending."""
    return sorted({number for number in numbers if number > 0})


def _first(entry: Value) -> int:
    """An integer, the first of an array."""
    content = entry.decode()
    return int(content[0] if isinstance(content, list) else content)


def write_twin(header: Header, path: Path, seed: int = 0, tapped: int | None = None) -> None:
    """Writes the miniature twin of a model to `path`.

    With `tapped`, the twin says that it ends before that layer, though it holds them all: an engine then gives
    the whole model's activations there. Raises ModelError where llama.cpp refuses the small widths.
    """
    layers = architectures.trunk_layers(header)
    metadata = small_metadata(header)
    shapes = tensor_shapes(metadata)
    rng = np.random.default_rng(seed)
    table, data = [], []
    pools: dict[int, npt.NDArray[np.uint8]] = {}
    for tensor in header.tensors.values():
        if tensor.layer is not None and tensor.layer >= layers:
            continue
        shape = _shape_of(tensor.name, shapes)
        if shape is None:
            raise ModelError(
                f"no twin of {header.path.name}: llama.cpp does not say what shape {tensor.name} has"
            )
        kind = tensor.kind
        if shape[0] % gguf.TENSOR_TYPES[kind][1]:
            kind = 1  # f16: too narrow for a block of its type
        table.append((tensor.name, shape, kind))
        data.append(_weights(tensor.name, shape, kind, rng, pools))
    if tapped is not None:
        metadata |= slice_keys(0, tapped, layers, "")
    encoded, offsets, length = gguf.encode_header(metadata, table)
    with path.open("wb") as file:
        file.write(encoded)
        for offset, content in zip(offsets, data, strict=True):
            file.seek(offset)
            file.write(content)
        file.truncate(length)


def _shape_of(name: str, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...] | None:
    """A tensor's shape, also where llama.cpp made the parts of a fused one, or the fused one of its parts."""
    if name in shapes:
        return shapes[name]
    if ".attn_qkv." in name:
        parts = [shapes.get(name.replace("attn_qkv", part)) for part in ("attn_q", "attn_k", "attn_v")]
        known = [part for part in parts if part]
        return (*known[0][:-1], sum(part[-1] for part in known)) if len(known) == 3 else None
    if fused := shapes.get(re.sub(r"\.ffn_(gate|up)_exps\.", ".ffn_gate_up_exps.", name)):
        return (fused[0], fused[1] // 2, *fused[2:])
    return None


def _weights(
    name: str,
    shape: tuple[int, ...],
    kind: int,
    rng: np.random.Generator,
    pools: dict[int, npt.NDArray[np.uint8]],
) -> bytes:
    """Random weights: norms about 1, factors of RoPE above 0, everything else about 0."""
    count = math.prod(shape)
    if kind == 0 and (len(shape) == 1 or "norm" in name):
        centre, reach = (1.0, 0.25) if re.search(r"norm|factors|freqs|scale", name) else (0.0, 0.05)
        return (centre + rng.uniform(-reach, reach, count)).astype(np.float32).tobytes()
    if kind not in pools:
        pools[kind] = _quantized(rng.standard_normal(_POOL).astype(np.float32) * np.float32(_DEVIATION), kind)
    _, elements, size = gguf.TENSOR_TYPES[kind]
    blocks = count // elements
    pool = pools[kind].reshape(-1, size)
    return np.take(pool, np.arange(blocks) + rng.integers(len(pool)), axis=0, mode="wrap").tobytes()


def _quantized(values: npt.NDArray[np.float32], kind: int) -> npt.NDArray[np.uint8]:
    """`values`, a multiple of 256, as blocks of a ggml type."""
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    quantize = bindings.function(
        "ggml_quantize_chunk",
        ctypes.c_size_t,
        ctypes.c_int,
        pointer,
        pointer,
        number,
        number,
        number,
        pointer,
    )
    rows = len(values) // _UNIT
    result = np.empty(gguf.tensor_size(kind, (_UNIT, rows)), np.uint8)
    importance = np.ones(_UNIT, np.float32)
    quantize(kind, values.ctypes.data, result.ctypes.data, 0, rows, _UNIT, importance.ctypes.data)
    return result
