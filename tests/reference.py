"""llama.cpp by raw calls: what the unsplit model says, and what a chain of slices says.

Shares no code with `meshpipe.llama.engine`, so that the two can be compared. Everything runs in the class of
decodes that this project calls exact: flash attention on, no extra buffer types, one thread, at most 63 rows.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import llama_cpp
import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp_ext

Floats = npt.NDArray[np.float32]
ROWS = 63


class _Tensor(ctypes.Structure):
    """The head of ggml's struct ggml_tensor."""

    _fields_ = (
        ("type", ctypes.c_int32),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
    )


@functools.cache
def _ggml() -> ctypes.CDLL:
    llama_cpp.llama_backend_init()
    path = next(
        p
        for p in (Path(llama_cpp.__file__).parent / "lib").glob("libggml-base.*")
        if p.suffix in (".so", ".dylib")
    )
    library = ctypes.CDLL(str(path))
    library.ggml_get_name.restype = ctypes.c_char_p
    library.ggml_get_name.argtypes = [ctypes.c_void_p]
    library.ggml_backend_tensor_get.argtypes = [
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_size_t,
    ]
    return library


@llama_cpp.llama_log_callback
def _quiet(_level: int, _text: bytes, _data: object) -> None:
    pass


class Raw:
    """One GGUF file, loaded: decodes rows of sequence 0 and keeps what was asked for."""

    def __init__(
        self,
        path: str | Path,
        context: int = 1024,
        threads: int = 1,
        taps: Sequence[str] = (),
        mtp: bool = False,
    ) -> None:
        ggml = _ggml()
        llama_cpp.llama_log_set(_quiet, ctypes.c_void_p(0))
        params = llama_cpp.llama_model_default_params()
        params.use_extra_bufts = False
        params.n_gpu_layers = 0
        params.load_mtp = mtp
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        assert self.model, f"llama.cpp cannot load {path}"
        self.taps = taps
        self.tapped: dict[str, Floats] = {}
        # With one tap, the graph ends there.
        stop_at = taps[-1] if len(taps) == 1 else None

        @llama_cpp.ggml_backend_sched_eval_callback
        def tap(tensor: int, ask: bool, _data: object) -> bool:
            name = ggml.ggml_get_name(tensor).decode()
            if ask or name not in self.taps:
                return name in self.taps if ask else True
            shape = _Tensor.from_address(tensor).ne
            rows = np.empty((shape[1], shape[0]), np.float32)
            ggml.ggml_backend_tensor_get(tensor, rows.ctypes.data, 0, rows.nbytes)
            self.tapped[name] = rows
            return name != stop_at

        options = llama_cpp.llama_context_default_params()
        options.n_ctx = context
        options.n_batch = options.n_ubatch = ROWS + 1
        options.n_threads = options.n_threads_batch = threads
        options.flash_attn_type = 1
        options.swa_full = True
        options.no_perf = True
        if taps:
            self._keep = options.cb_eval = tap
        self.context = llama_cpp.llama_init_from_model(self.model, options)
        assert self.context, f"llama.cpp cannot make a context for {path}"
        self.drafter = None
        if mtp:
            options.ctx_type = llama_cpp.LLAMA_CONTEXT_TYPE_MTP
            self.drafter = llama_cpp.llama_init_from_model(self.model, options)
            assert self.drafter, f"llama.cpp cannot make an MTP context for {path}"
            llama_cpp_ext.llama_set_embeddings_nextn(self.context, True, False)
            llama_cpp_ext.llama_set_embeddings_nextn(self.drafter, True, True)
        self.n_embd = llama_cpp.llama_model_n_embd(self.model)
        self.n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.sections = 4 if llama_cpp.llama_model_rope_type(self.model) in (8, 40) else 1

    def close(self) -> None:
        if self.drafter is not None:
            llama_cpp.llama_free(self.drafter)
        llama_cpp.llama_free(self.context)
        llama_cpp.llama_model_free(self.model)

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def trim(self, position: int) -> None:
        memory = llama_cpp.llama_get_memory(self.context)
        assert llama_cpp.llama_memory_seq_rm(memory, 0, position, -1)

    def decode(self, start: int, tokens: Sequence[int] = (), rows: Floats | None = None) -> None:
        """Runs one decode of token ids or activations at positions from `start`; of both, on the MTP context."""
        count = len(tokens) if rows is None else len(rows)
        assert 0 < count <= ROWS
        batch = llama_cpp.llama_batch()
        batch.n_tokens = count
        if len(tokens):
            batch.token = (ctypes.c_int32 * count)(*tokens)
        if rows is not None:
            rows = np.ascontiguousarray(rows, np.float32)
            batch.embd = rows.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        if len(tokens):
            positions = list(range(start, start + count))
        else:
            # llama.cpp gives text the same position in three sections and 0 in the fourth.
            positions = list(range(start, start + count)) * min(self.sections, 3) + [0] * count * (
                self.sections > 3
            )
        batch.pos = (ctypes.c_int32 * len(positions))(*positions)
        batch.n_seq_id = (ctypes.c_int32 * count)(*[1] * count)
        sequence = (ctypes.c_int32 * 1)(0)
        pointers = (ctypes.POINTER(ctypes.c_int32) * count)(*[sequence] * count)
        batch.seq_id = ctypes.cast(pointers, type(batch.seq_id))
        batch.logits = (ctypes.c_int8 * count)(*[1] * count)
        self.tapped.clear()
        both = len(tokens) and rows is not None
        assert llama_cpp.llama_decode(self.drafter if both else self.context, batch) == 0

    def mtp_drafts(self, tokens: Sequence[int], count: int, heads: int = 1) -> list[tuple[int, float]]:
        """What native MTP says follows the tokens, everything computed anew."""

        def clear() -> None:
            llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(self.drafter), 0, -1, -1)

        self.trim(0)
        hidden, start = [], 0
        for width in chunks(len(tokens)):
            self.decode(start, tokens[start : start + width])
            pointer = llama_cpp_ext.llama_get_embeddings_nextn(self.context)
            hidden.append(np.ctypeslib.as_array(pointer, (width, self.n_embd)).copy())
            start += width
        # The pair of position p is the row of p - 1 and the token at p; guesses join with the head's own row.
        line, rows = list(tokens), list(np.concatenate(hidden)[:-1])
        drafts: list[tuple[int, float]] = []
        for step in range(count):
            clear()
            llama_cpp_ext.llama_set_nextn_layer_offset(self.drafter, min(step, heads - 1))
            start = 0
            for width in chunks(len(rows)):
                stop = start + width
                self.decode(start + 1, line[start + 1 : stop + 1], np.stack(rows[start:stop]))
                start = stop
            last = width - 1
            pointer = llama_cpp.llama_get_logits_ith(self.drafter, last)
            logits = np.ctypeslib.as_array(pointer, (self.n_vocab,)).astype(np.float64)
            token = int(logits.argmax())
            drafts.append((token, float(1 / np.exp(logits - logits[token]).sum())))
            row = llama_cpp_ext.llama_get_embeddings_nextn_ith(self.drafter, last)
            rows.append(np.ctypeslib.as_array(row, (self.n_embd,)).copy())
            line.append(token)
        return drafts

    def logits(self, count: int) -> Floats:
        """The last decode's logits, float32 (count, n_vocab)."""
        pointer = llama_cpp.llama_get_logits(self.context)
        return np.ctypeslib.as_array(pointer, (count, self.n_vocab)).copy()


Decode = Callable[[int, Sequence[int]], Floats]


def chunks(count: int, widths: Sequence[int] = (ROWS,)) -> list[int]:
    """Cuts `count` rows into decodes of these widths, the last one repeated."""
    result: list[int] = []
    while sum(result) < count:
        result.append(min(widths[min(len(result), len(widths) - 1)], count - sum(result)))
    return result


def unsplit_logits(
    path: str | Path,
    tokens: Sequence[int],
    widths: Sequence[int] = (ROWS,),
    threads: int = 1,
    context: int = 1024,
) -> Floats:
    """Logits of every position, float32 (len(tokens), n_vocab), decoded in chunks of `widths`."""
    with Raw(path, context, threads) as raw:
        result = []
        start = 0
        for count in chunks(len(tokens), widths):
            raw.decode(start, tokens[start : start + count])
            result.append(raw.logits(count))
            start += count
    return np.concatenate(result)


def split_logits(
    slices: Sequence[str | Path],
    lengths: Sequence[int],
    tokens: Sequence[int],
    widths: Sequence[int] = (ROWS,),
    context: int = 1024,
    trims: bool = False,
    tap: str = "l_out-{}",
) -> Floats:
    """Like `unsplit_logits`, of a chain of slices with these numbers of layers.

    `tap` names the graph node that leaves a slice, by its last local layer.

    `trims`: before every decode but the first, two rows of other tokens are run after the last position and
    trimmed away again, on every slice.
    """
    stages = [
        Raw(path, context, taps=[tap.format(length - 1)] if number < len(slices) - 1 else [])
        for number, (path, length) in enumerate(zip(slices, lengths, strict=True))
    ]

    def run(start: int, ids: Sequence[int]) -> Floats:
        rows: Floats | None = None
        for stage in stages:
            stage.decode(start, ids if rows is None else (), rows)
            rows = next(iter(stage.tapped.values())) if stage.taps else stage.logits(len(ids))
        assert rows is not None
        return rows

    result = []
    start = 0
    for count in chunks(len(tokens), widths):
        if trims and start:
            run(start, [tokens[0], tokens[1]])
            for stage in stages:
                stage.trim(start)
        result.append(run(start, tokens[start : start + count]))
        start += count
    for stage in stages:
        stage.close()
    return np.concatenate(result)


def greedy(path: str | Path, prompt: Sequence[int], count: int, context: int = 1024) -> list[int]:
    """The unsplit model's `count` greedy tokens after the prompt: chunks of 63 rows, then one row at a time."""
    with Raw(path, context) as raw:
        start = 0
        for width in chunks(len(prompt)):
            raw.decode(start, prompt[start : start + width])
            start += width
        result = [int(raw.logits(width)[-1].argmax())]
        while len(result) < count:
            raw.decode(start, result[-1:])
            start += 1
            result.append(int(raw.logits(1)[0].argmax()))
    return result
