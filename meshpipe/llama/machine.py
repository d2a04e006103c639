"""What this machine can do, and whether llama.cpp was built to use it."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Set
from pathlib import Path

import llama_cpp

from meshpipe.llama import bindings

# What llama.cpp calls an instruction set, and what the kernel calls it (x86 and ARM).
INSTRUCTIONS: Mapping[str, str] = {
    "AVX": "avx", "AVX2": "avx2", "FMA": "fma", "F16C": "f16c", "BMI2": "bmi2", "AVX_VNNI": "avx_vnni",
    "AVX512": "avx512f", "AVX512_VBMI": "avx512_vbmi", "AVX512_VNNI": "avx512_vnni", "AVX512_BF16": "avx512_bf16",
    "DOTPROD": "asimddp", "MATMUL_INT8": "i8mm", "SVE": "sve",
}  # fmt: skip
AMX = "amx_tile"
_GPU, _INTEGRATED_GPU = 1, 2  # of ggml_backend_dev_type


def built_for() -> set[str]:
    """The instruction sets, and other features, that llama.cpp's CPU backend was built with."""
    bindings.start()
    text = llama_cpp.llama_print_system_info().decode()
    pairs = (part.split("=") for part in text.replace("CPU :", "").split("|") if "=" in part)
    return {name.strip() for name, value in pairs if value.strip() != "0"}


def cpu_flags(description: Path = Path("/proc/cpuinfo")) -> set[str]:
    """What the kernel says that the processor can do; nothing where it does not say."""
    try:
        lines = description.read_text().splitlines()
    except OSError:
        return set()
    return next(
        (set(line.split(":", 1)[1].split()) for line in lines if line.startswith(("flags", "Features"))),
        set(),
    )


def unused_instructions(built: Set[str], flags: Set[str]) -> list[str]:
    """Instruction sets of the processor that llama.cpp was not built for."""
    return [name for name, flag in INSTRUCTIONS.items() if flag in flags and name not in built]


def devices() -> dict[str, int]:
    """llama.cpp's devices: name and handle."""
    count = bindings.function("ggml_backend_dev_count", ctypes.c_size_t)()
    get = bindings.function("ggml_backend_dev_get", ctypes.c_void_p, ctypes.c_size_t)
    name_of = bindings.function("ggml_backend_dev_name", ctypes.c_char_p, ctypes.c_void_p)
    return {name_of(get(index)).decode(): get(index) for index in range(count)}


def has_gpu() -> bool:
    """Whether a device keeps weights elsewhere than in main memory.

    `llama_supports_gpu_offload` does not tell: it is true of every build with the RPC backend.
    """
    by_type = bindings.function("ggml_backend_dev_by_type", ctypes.c_void_p, ctypes.c_int)
    return any(by_type(kind) is not None for kind in (_GPU, _INTEGRATED_GPU))
