"""llama.cpp's own options, under their usual names, and how a model file is loaded with them.

What could be tried on a CPU was; `n_gpu_layers`, `devices`, `main_gpu`, `split_mode`, `tensor_split`, `offload_kqv` and
`op_offload` pass through untried.
"""

from __future__ import annotations

import ctypes
import math
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import llama_cpp
from attrs import Attribute, field, frozen

from meshpipe.errors import EngineError, ModelError, UsageError
from meshpipe.llama import bindings
from meshpipe.llama.machine import devices, has_gpu
from meshpipe.llama.memory import available
from meshpipe.llama.progress import report, watched

CACHE_TYPES = {
    "f32": 0, "f16": 1, "bf16": 30, "q8_0": 8, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "iq4_nl": 20,
}  # fmt: skip
ROPE_SCALING = {"none": 0, "linear": 1, "yarn": 2, "longrope": 3}
SPLIT_MODES = {"none": 0, "layer": 1, "row": 2}
INTEGERS = {
    "n_gpu_layers": (-1, 2**31 - 1),
    "main_gpu": (0, 1023),
    "yarn_orig_ctx": (0, 2**31 - 1),
    "batch": (2, 2**20),
}
"""What the options that are numbers may be, both ends included: beyond, a C integer would wrap around."""
# llama_load_mode by (mmap, mlock)
_LOAD_MODES = {(False, False): 0, (True, False): 1, (False, True): 2, (True, True): 3}


def _one_of(allowed: Mapping[str, int]) -> Callable[[Any, Attribute[Any], Any], None]:
    def check(_: Any, option: Attribute[Any], value: Any) -> None:
        if value not in allowed and value is not option.default:
            raise UsageError(f"{option.name} is {value!r}; it must be one of {', '.join(allowed)}")

    return check


def _integer(_: Any, option: Attribute[Any], value: Any) -> None:
    low, high = INTEGERS[option.name]
    if value is not option.default and not (isinstance(value, int) and low <= value <= high):
        raise UsageError(f"{option.name} is {value!r}; it must be an integer from {low} to {high}")


def _size(_: Any, option: Attribute[Any], value: Any) -> None:
    if value is not None and not (isinstance(value, (int, float)) and 0 <= value < math.inf):
        raise UsageError(f"{option.name} is {value!r}; it must be a number of GiB, 0 or more")


@frozen
class EngineOptions:
    """Options that llama.cpp's users know. None leaves llama.cpp's default.

    `devices` are names as `llama-server --list-devices` prints them; an unknown one is an error that lists all.
    `batch` is the most rows of a decode when exactness is not asked for. `repack` turns on the CPU's extra
    buffer types (AMX, weight repacking): faster prefill, other bits, and on some machines a crash, hence a
    trial in a child process first. `memory_limit` is what a stage may take of main memory, in GiB; None: what is
    there, and more for weights that are mapped. Nothing is checked where llama.cpp may use a GPU's.
    """

    n_gpu_layers: int | None = field(default=None, validator=_integer)
    devices: tuple[str, ...] | None = None
    main_gpu: int | None = field(default=None, validator=_integer)
    split_mode: str | None = field(default=None, validator=_one_of(SPLIT_MODES))
    tensor_split: tuple[float, ...] | None = None
    mmap: bool = True
    mlock: bool = False
    cache_type_k: str = field(default="f16", validator=_one_of(CACHE_TYPES))
    cache_type_v: str = field(default="f16", validator=_one_of(CACHE_TYPES))
    rope_scaling: str | None = field(default=None, validator=_one_of(ROPE_SCALING))
    rope_freq_base: float | None = None
    rope_freq_scale: float | None = None
    yarn_orig_ctx: int | None = field(default=None, validator=_integer)
    yarn_ext_factor: float | None = None
    yarn_attn_factor: float | None = None
    yarn_beta_fast: float | None = None
    yarn_beta_slow: float | None = None
    offload_kqv: bool | None = None
    op_offload: bool | None = None
    batch: int = field(default=512, validator=_integer)
    repack: bool = False
    memory_limit: float | None = field(default=None, validator=_size)

    def memory_budget(self) -> int | None:
        """Bytes of main memory that a stage may take now; None: any."""
        if self.n_gpu_layers != 0 and has_gpu():
            return None
        return available() if self.memory_limit is None else int(self.memory_limit * 2**30)

    @property
    def evictable(self) -> bool:
        """Whether weights may exceed the budget: they are pages of a file then, and nobody has set a limit."""
        return self.mmap and not self.mlock and not self.repack and self.memory_limit is None

    @property
    def scales_rope(self) -> bool:
        """Whether the context may exceed what the model was trained on."""
        return any(
            option is not None for option in (self.rope_scaling, self.rope_freq_base, self.rope_freq_scale)
        )

    def load(self, path: Path, *, vocab_only: bool = False, mtp: bool = False) -> Any:
        """Loads a GGUF, with its NextN layers if `mtp`, and returns llama.cpp's model pointer.

        Raises ModelError when llama.cpp refuses it.
        """
        bindings.start()
        params = llama_cpp.llama_model_default_params()
        params.vocab_only = vocab_only
        params.load_mtp = mtp
        params.use_extra_bufts = self.repack
        params.load_mode = _LOAD_MODES[self.mmap, self.mlock]
        chosen = _devices(self.devices)
        if chosen is not None:
            params.devices = ctypes.cast(chosen, ctypes.c_void_p)
        for name in ("n_gpu_layers", "main_gpu"):
            if getattr(self, name) is not None:
                setattr(params, name, getattr(self, name))
        if self.split_mode is not None:
            params.split_mode = SPLIT_MODES[self.split_mode]
        if self.tensor_split is not None:
            shares = (*self.tensor_split, *[0.0] * llama_cpp.llama_max_devices())
            params.tensor_split = (ctypes.c_float * len(shares))(*shares)
        if watched() and not vocab_only:
            params.progress_callback = _told(f"loading {path.name}")
        model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        if not model:
            raise ModelError(f"llama.cpp could not load {path}: the log of meshpipe.llama says why")
        return model

    def apply_to_context(self, params: Any) -> None:
        """Sets the context's part of the options on `llama_context_params`."""
        params.type_k = CACHE_TYPES[self.cache_type_k]
        params.type_v = CACHE_TYPES[self.cache_type_v]
        if self.rope_scaling is not None:
            params.rope_scaling_type = ROPE_SCALING[self.rope_scaling]
        for name in (
            "rope_freq_base", "rope_freq_scale", "yarn_orig_ctx", "yarn_ext_factor", "yarn_attn_factor",
            "yarn_beta_fast", "yarn_beta_slow", "offload_kqv", "op_offload",
        ):  # fmt: skip
            if getattr(self, name) is not None:
                setattr(params, name, getattr(self, name))

    def require_repack_survives(self, path: Path) -> None:
        """Raises EngineError unless a child process decodes one row with `repack` on."""
        trial = subprocess.run(
            [sys.executable, "-m", "meshpipe.llama.options", str(path)], capture_output=True, timeout=600
        )
        if trial.returncode != 0:
            raise EngineError(
                f"repack=True crashed a trial process (exit status {trial.returncode}): this machine announces "
                "instructions that it does not execute; leave repack off"
            )


def _told(what: str) -> Any:
    """llama.cpp's progress callback, which goes on whatever it is told."""

    def tell(share: float, _: object) -> bool:
        report(what, round(share * 1000), 1000)
        return True

    return llama_cpp.llama_progress_callback(tell)


def _devices(names: tuple[str, ...] | None) -> ctypes.Array[ctypes.c_void_p] | None:
    """llama.cpp's device handles, NULL at the end. Raises UsageError for a name that it does not know."""
    if names is None:
        return None
    known = devices()
    for name in names:
        if name not in known:
            raise UsageError(f"no device {name!r} here; there are: {', '.join(known)}")
    return (ctypes.c_void_p * (len(names) + 1))(*(known[name] for name in names), None)


def _try_repack(path: str) -> None:
    """Decodes two rows of zeros with repacking on; run as a child process, which may crash."""
    model = EngineOptions(repack=True).load(Path(path))
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = 256, 32, 32
    context = llama_cpp.llama_init_from_model(model, params)
    batch = llama_cpp.llama_batch_init(32, 0, 1)
    if llama_cpp.llama_vocab_type(llama_cpp.llama_model_get_vocab(model)) == 0:  # no vocabulary: embeddings
        batch = llama_cpp.llama_batch_init(32, llama_cpp.llama_model_n_embd(model), 1)
        ctypes.memset(batch.embd, 0, 32 * 4 * llama_cpp.llama_model_n_embd(model))
    batch.n_tokens = 32
    for row in range(32):
        if batch.token:
            batch.token[row] = 0
        batch.pos[row] = row
        batch.n_seq_id[row] = 1
        batch.seq_id[row][0] = 0
        batch.logits[row] = row == 31
    sys.exit(llama_cpp.llama_decode(context, batch))


if __name__ == "__main__":
    _try_repack(sys.argv[1])
