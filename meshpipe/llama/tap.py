"""Takes the activations that leave a stage's last layer, and stops the graph there.

ggml offers every node of a graph to an evaluation callback (about 470 a decode for 15 layers). The callback
here wants one tensor, `l_out-<layer>`: it copies its rows and returns False, which ends the graph, so that the
final norm and the head are never computed. `tap.c` does that for next to nothing; it is compiled once per
user with the C compiler at hand. Where there is none, the same callback in Python costs some 0.3 ms a decode.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from meshpipe.llama import bindings
from meshpipe.messages import Rows

_SOURCE = Path(__file__).with_name("tap.c")
_VOID, _SIZE = ctypes.c_void_p, ctypes.c_size_t


class _Tap(ctypes.Structure):
    """`struct tap` of tap.c."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("name_of", _VOID),
        ("bytes_of", _VOID),
        ("copy", _VOID),
        ("rows", _VOID),
        ("capacity", _SIZE),
        ("used", _SIZE),
    )


class Watch(ctypes.Structure):
    """`struct watch` of tap.c: `abort` not 0 ends the decode, `steps` counts the nodes of graphs computed."""

    _fields_ = (("abort", ctypes.c_int), ("steps", ctypes.c_longlong))


def _cache_directory() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "meshpipe" / "tap"


@functools.cache
def compiled() -> ctypes.CDLL | None:
    """The compiled tap, or None where no C compiler works."""
    source = _SOURCE.read_bytes()
    key = hashlib.sha256(source + f"{platform.system()} {platform.machine()}".encode()).hexdigest()[:16]
    library = _cache_directory() / f"tap-{key}.so"
    if not library.exists():
        compiler = next(filter(None, map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))), None)
        if compiler is None:
            bindings.logger.info("no C compiler found: tapping activations from Python, which is slower")
            return None
        try:
            library.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
                built = Path(scratch) / library.name
                command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(built), str(_SOURCE)]
                subprocess.run(command, check=True, capture_output=True, timeout=60)
                built.replace(library)
        except (OSError, subprocess.SubprocessError) as error:
            bindings.logger.info("the tap does not compile (%s): tapping activations from Python", error)
            return None
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:  # a cache on a disk that allows no code, or of a machine with other libraries
        bindings.logger.info("the tap does not load (%s): tapping activations from Python", error)
        return None


def abort_callback() -> Any:
    """A callback for `llama_context_params.abort_callback` whose data is a pointer to a `Watch`.

    None where the tap could not be compiled: called from Python once a node, it would cost more than it saves.
    """
    library = compiled()
    return library and ctypes.cast(library.meshpipe_abort, llama_cpp.ggml_abort_callback)


class Tap:
    """Receives the rows of one named tensor during decodes.

    `callback` and `user_data` go into `llama_context_params`. Between `expect` and `take`, decodes append rows.
    """

    def __init__(self, tensor: str, n_embd: int, *, use_compiled: bool = True) -> None:
        self._n_embd = n_embd
        # Kept alive for as long as llama.cpp may call.
        self._keep: list[Any] = [tensor.encode()]
        self._struct = _Tap(name=self._keep[0])
        name_of = bindings.function("ggml_get_name", ctypes.c_char_p, _VOID)
        bytes_of = bindings.function("ggml_nbytes", _SIZE, _VOID)
        copy = bindings.function("ggml_backend_tensor_get", None, _VOID, _VOID, _SIZE, _SIZE)
        self._rows: Rows = np.empty((0, n_embd), np.float32)
        library = compiled() if use_compiled else None
        if library is not None:
            for slot, function in (("name_of", name_of), ("bytes_of", bytes_of), ("copy", copy)):
                setattr(self._struct, slot, ctypes.cast(function, _VOID))
            self.callback = ctypes.cast(library.meshpipe_tap, llama_cpp.ggml_backend_sched_eval_callback)
        else:
            wanted, struct = self._keep[0], self._struct

            def tap(tensor_pointer: int, ask: bool, _user_data: int) -> bool:
                if ask:
                    return bool(name_of(tensor_pointer) == wanted)
                size = bytes_of(tensor_pointer)
                if struct.used + size <= struct.capacity:
                    copy(tensor_pointer, struct.rows + struct.used, 0, size)
                struct.used += size
                return False

            self.callback = llama_cpp.ggml_backend_sched_eval_callback(tap)

    @property
    def user_data(self) -> ctypes.c_void_p:
        """What llama.cpp hands back to the callback."""
        return ctypes.cast(ctypes.byref(self._struct), _VOID)

    def expect(self, count: int) -> None:
        """Makes room for the `count` rows that the next decodes produce."""
        self._rows = np.empty((count, self._n_embd), np.float32)
        self._struct.rows = self._rows.ctypes.data
        self._struct.capacity = self._rows.nbytes
        self._struct.used = 0

    def take(self) -> Rows | None:
        """The rows that were expected, shape (count, n_embd); None when other than that many came."""
        complete = self._struct.used == self._rows.nbytes
        self._struct.capacity = 0
        return self._rows if complete else None
