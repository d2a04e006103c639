"""llama.cpp as a library: start it once, send its log to Python's, bind what llama_cpp leaves out."""

from __future__ import annotations

import ctypes
import functools
import logging
from pathlib import Path
from typing import Any

import llama_cpp

logger = logging.getLogger("meshpipe.llama")

LIBRARIES = Path(llama_cpp.__file__).parent / "lib"

# ggml_log_level -> logging level, one step down: what llama.cpp calls an error, ours may handle. 5 continues a line.
_LEVELS = {1: logging.DEBUG, 2: logging.DEBUG, 3: logging.INFO, 4: logging.WARNING}

# What llama.cpp says of a decode that was aborted on purpose.
_ABORTED = ("failed with error 1", "compute status: 1", "failed to decode, ret = 2", ", +inf)")


class _Log:
    """Joins llama.cpp's partial log lines and hands whole ones to Python logging."""

    def __init__(self) -> None:
        self.level = logging.DEBUG
        self.partial = ""

    def __call__(self, level: int, text: bytes, _user_data: object) -> None:
        if level != 5:
            self.level = _LEVELS.get(level, logging.DEBUG)
        *lines, self.partial = (self.partial + text.decode("utf-8", "replace")).split("\n")
        for line in lines:
            if line.strip(" ."):
                logger.log(logging.DEBUG if line.endswith(_ABORTED) else self.level, "%s", line)


_log_callback = llama_cpp.llama_log_callback(_Log())


@functools.cache
def start() -> None:
    """Initialises llama.cpp for this process; safe to call often."""
    llama_cpp.llama_log_set(_log_callback, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()


@functools.cache
def _libraries() -> tuple[ctypes.CDLL, ...]:
    """ggml's libraries, as llama_cpp bundles them: tensors and files, and the registry of devices."""
    start()
    found = [
        LIBRARIES / f"{prefix}{name}{suffix}"
        for name in ("ggml-base", "ggml")
        for prefix, suffix in (("lib", ".so"), ("lib", ".dylib"), ("", ".dll"))
        if (LIBRARIES / f"{prefix}{name}{suffix}").exists()
    ]
    if not found:
        raise OSError(f"no ggml library in {LIBRARIES}: is llama-cpp-python installed?")
    return tuple(ctypes.CDLL(str(path)) for path in found)


@functools.cache
def function(name: str, restype: Any, *argtypes: Any) -> Any:
    """A function of ggml by name, with its signature."""
    library = next((library for library in _libraries() if hasattr(library, name)), None)
    if library is None:
        raise OSError(f"the ggml libraries in {LIBRARIES} have no function {name}")
    found = getattr(library, name)
    found.restype, found.argtypes = restype, list(argtypes)
    return found
