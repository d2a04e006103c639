"""The peers that meshpipe is measured against: llama.cpp unsplit, and llama.cpp's own RPC backend.

Both are raw calls in child processes, one thread each, flash attention on, no extra buffer types, prompts in
decodes of 63 rows and then one row at a time: the class of decodes in which meshpipe promises equal tokens.
The RPC backend gets the same placement that meshpipe has: the last `remote` layers and the head on the server.

    python -m bench.peers generate --model M.gguf [--rpc HOST:PORT --remote 15]
    python -m bench.peers serve HOST:PORT

`generate` answers JSON requests `{"prompt": [...], "count": n, "temperature": t, "seed": s}`, one a line, with
`{"tokens": [...], "times": [...]}`: the tokens and when each was known, seconds after the request.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from meshpipe.llama.sampling import Sampler
from meshpipe.messages import Sampling

ROWS = 63


@functools.cache
def library(name: str) -> ctypes.CDLL:
    """One of the libraries that come with llama-cpp-python; llama.cpp's device registry is shared by all."""
    found = (Path(llama_cpp.__file__).parent / "lib").glob(f"lib{name}.*")
    path = next((path for path in sorted(found) if path.suffix in (".so", ".dylib")), None)
    if path is None:
        sys.exit(
            f"llama-cpp-python was built without lib{name}: set CMAKE_ARGS=-DGGML_RPC=ON and reinstall it"
        )
    return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def serve(endpoint: str) -> None:
    """Runs an RPC server with the CPU as its device, on one thread, until the process ends."""
    llama_cpp.llama_backend_init()
    ggml, rpc = library("ggml"), library("ggml-rpc")
    ggml.ggml_backend_dev_by_type.restype = ctypes.c_void_p
    cpu = ggml.ggml_backend_dev_by_type(0)
    devices = (ctypes.c_void_p * 1)(cpu)
    rpc.ggml_backend_rpc_start_server.argtypes = [
        ctypes.c_char_p,
        ctypes.c_char_p,
        ctypes.c_size_t,
        ctypes.c_size_t,
        ctypes.c_void_p,
    ]
    rpc.ggml_backend_rpc_start_server(endpoint.encode(), None, 1, 1, devices)


def register(endpoint: str) -> Any:
    """Adds the devices of an RPC server; returns them as llama.cpp's null-terminated list."""
    llama_cpp.llama_backend_init()
    base, ggml, rpc = library("ggml-base"), library("ggml"), library("ggml-rpc")
    rpc.ggml_backend_rpc_add_server.restype = ctypes.c_void_p
    rpc.ggml_backend_rpc_add_server.argtypes = [ctypes.c_char_p]
    base.ggml_backend_reg_dev_get.restype = ctypes.c_void_p
    base.ggml_backend_reg_dev_get.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    ggml.ggml_backend_register.argtypes = [ctypes.c_void_p]
    server = rpc.ggml_backend_rpc_add_server(endpoint.encode())
    if not server:
        sys.exit(f"no RPC server answers at {endpoint}")
    ggml.ggml_backend_register(server)
    return (ctypes.c_void_p * 2)(base.ggml_backend_reg_dev_get(server, 0), None)


@llama_cpp.llama_log_callback
def quiet(_level: int, _text: bytes, _data: object) -> None:
    """Drops llama.cpp's messages."""


class Llama:
    """A model behind raw calls, on sequence 0; with `rpc`, its last `remote` layers and head on that server."""

    def __init__(self, path: str, context: int, rpc: str | None = None, remote: int = 15) -> None:
        llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
        params = llama_cpp.llama_model_default_params()
        params.use_extra_bufts = False  # repacking faults on machines that announce AMX and lack it
        params.n_gpu_layers = 0
        if rpc is not None:
            self._devices = register(rpc)
            params.devices = ctypes.cast(self._devices, ctypes.c_void_p)
            params.n_gpu_layers = remote + 1  # the head counts as a layer
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), params)
        if not self.model:
            sys.exit(f"llama.cpp cannot load {path}")
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = context
        options.n_batch = options.n_ubatch = ROWS + 1
        options.n_threads = options.n_threads_batch = 1
        options.flash_attn_type = 1
        options.no_perf = True
        self.context = llama_cpp.llama_init_from_model(self.model, options)
        if not self.context:
            sys.exit("llama.cpp cannot make a context")
        self.n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self._batch = llama_cpp.llama_batch_init(ROWS + 1, 0, 1)

    def decode(self, start: int, tokens: Sequence[int]) -> None:
        """One decode; logits of the last row only."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for index, token in enumerate(tokens):
            batch.token[index] = token
            batch.pos[index] = start + index
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = 0
            batch.logits[index] = index == len(tokens) - 1
        if llama_cpp.llama_decode(self.context, batch) != 0:
            sys.exit("llama.cpp's decode failed")

    def generate(
        self, prompt: Sequence[int], count: int, temperature: float = 0.0, seed: int = 0
    ) -> tuple[list[int], list[float]]:
        """`count` tokens after the prompt, end tokens or not, and the seconds after which each was known."""
        began = time.perf_counter()
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), False)
        for start in range(0, len(prompt), ROWS):
            self.decode(start, prompt[start : start + ROWS])
        tokens, times = list(prompt), []
        with Sampler(Sampling(temperature=temperature, seed=seed), self.n_vocab) as sampler:
            while True:
                pointer = llama_cpp.llama_get_logits_ith(self.context, -1)
                logits = np.ctypeslib.as_array(pointer, (self.n_vocab,))
                tokens.append(sampler.pick(logits, tokens, len(tokens)))
                times.append(time.perf_counter() - began)
                if len(times) == count:
                    return tokens[len(prompt) :], times
                self.decode(len(tokens) - 1, tokens[-1:])


def answer(arguments: argparse.Namespace) -> None:
    """Answers requests on standard input until it ends."""
    llama = Llama(arguments.model, arguments.context, arguments.rpc, arguments.remote)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        tokens, times = llama.generate(**json.loads(line))
        print(json.dumps({"tokens": tokens, "times": times}), flush=True)


def main(argv: list[str] | None = None) -> None:
    """The command line; see the top of this file."""
    parser = argparse.ArgumentParser("python -m bench.peers", description=__doc__)
    commands = parser.add_subparsers(required=True)
    generating = commands.add_parser("generate")
    generating.add_argument("--model", required=True)
    generating.add_argument("--context", type=int, default=4096)
    generating.add_argument("--rpc", metavar="HOST:PORT")
    generating.add_argument("--remote", type=int, default=15, help="layers on the server, besides the head")
    generating.set_defaults(run=answer)
    serving = commands.add_parser("serve")
    serving.add_argument("endpoint", metavar="HOST:PORT")
    serving.set_defaults(run=lambda arguments: serve(arguments.endpoint))
    arguments = parser.parse_args(argv)
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        arguments.run(arguments)


if __name__ == "__main__":
    main()
