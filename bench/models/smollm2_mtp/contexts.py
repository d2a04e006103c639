"""The two llama.cpp contexts of a model with a NextN block, with numpy arrays going in and out."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import TracebackType
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp import llama_cpp_ext
from numpy.typing import ArrayLike, NDArray

from meshpipe.errors import EngineError, ModelError
from meshpipe.llama import bindings

Logits = NDArray[np.float32]
Hidden = NDArray[np.float32]


class Model:
    """A loaded GGUF with its NextN block."""

    def __init__(self, path: Path) -> None:
        bindings.start()
        params = llama_cpp.llama_model_default_params()
        params.use_extra_bufts = False  # repacking faults on machines that announce AMX and lack it
        params.load_mtp = True
        self.pointer = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        if not self.pointer:
            raise ModelError(f"llama.cpp could not load {path}")
        self.n_embd: int = llama_cpp.llama_model_n_embd(self.pointer)
        self.n_vocab: int = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.pointer))

    def close(self) -> None:
        """Frees the model, after its contexts."""
        llama_cpp.llama_model_free(self.pointer)


class Context:
    """A target context, or with `mtp` the NextN block's, of several lanes."""

    def __init__(
        self,
        model: Model,
        *,
        context: int,
        lanes: int = 1,
        batch: int = 512,
        threads: int = 2,
        mtp: bool = False,
    ) -> None:
        self.model, self.mtp, self.batch = model, mtp, batch
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = lanes * (-(-context // 256) * 256)
        params.n_batch = params.n_ubatch = batch
        params.n_seq_max = lanes
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = 1
        params.kv_unified = False
        params.swa_full = True
        if mtp:
            params.ctx_type = llama_cpp.LLAMA_CONTEXT_TYPE_MTP
        self._context: Any = llama_cpp.llama_init_from_model(model.pointer, params)
        if not self._context:
            raise EngineError(f"llama.cpp could not make a context of {lanes} lanes of {context} tokens")
        llama_cpp_ext.llama_set_embeddings_nextn(self._context, True, mtp)
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._ids = np.arange(lanes, dtype=np.int32)

    def run(
        self,
        tokens: ArrayLike,
        positions: ArrayLike,
        lanes: ArrayLike,
        hidden: Hidden | None = None,
    ) -> tuple[Logits, Hidden]:
        """Decodes one row per token: logits `[rows, vocabulary]` and hidden rows `[rows, n_embd]`.

        Both are views of llama.cpp's buffers, valid until the next call. The MTP context needs `hidden`, the
        row of the position before each token's. Raises EngineError.
        """
        held = [np.ascontiguousarray(array, np.int32) for array in (tokens, positions)]
        count = len(held[0])
        ones, flags = np.ones(count, np.int32), np.ones(count, np.int8)
        sequences = (self._ids.ctypes.data + 4 * np.asarray(lanes, np.int64)).astype(np.uintp)
        rows = None if hidden is None else np.ascontiguousarray(hidden, np.float32)
        batch = llama_cpp.llama_batch()
        batch.n_tokens = count
        int32 = ctypes.POINTER(ctypes.c_int32)
        batch.token, batch.pos = (array.ctypes.data_as(int32) for array in held)
        batch.n_seq_id = ones.ctypes.data_as(int32)
        batch.seq_id = sequences.ctypes.data_as(ctypes.POINTER(int32))
        batch.logits = flags.ctypes.data_as(ctypes.POINTER(ctypes.c_int8))
        if rows is not None:
            batch.embd = rows.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        status = llama_cpp.llama_decode(self._context, batch)
        if status != 0:
            raise EngineError(f"llama_decode returned {status} for {count} rows")
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits(self._context), (count, self.model.n_vocab))
        nextn = llama_cpp_ext.llama_get_embeddings_nextn(self._context)
        return logits, np.ctypeslib.as_array(nextn, (count, self.model.n_embd))

    def trim(self, lane: int, position: int) -> None:
        """Forgets the lane's tokens from `position` on."""
        if not llama_cpp.llama_memory_seq_rm(self._memory, lane, position, -1):
            raise EngineError(f"llama.cpp refused to trim lane {lane} to {position} tokens")

    def close(self) -> None:
        """Frees the context."""
        llama_cpp.llama_free(self._context)

    def __enter__(self) -> Context:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.close()
