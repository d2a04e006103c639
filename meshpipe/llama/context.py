"""llama.cpp's contexts: how every one is made here, and how it and its model are freed."""

from __future__ import annotations

import logging
from typing import Any, TypeVar

import llama_cpp

from meshpipe.llama.grammar import unused
from meshpipe.llama.options import EngineOptions

Self = TypeVar("Self", bound="Loaded")

log = logging.getLogger("meshpipe.llama")

GRACE = 1.0
"""Seconds that freeing a model waits for grammars that were given up."""


def context_params(*, lanes: int, cells: int, rows: int, threads: int, options: EngineOptions) -> Any:
    """`llama_context_params` for lanes with a cache of `cells` positions each, and decodes of up to `rows` rows.

    Every lane has a cache of its own (`docs/exactness.md`).
    """
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = lanes * cells
    params.n_batch = params.n_ubatch = rows
    params.n_seq_max = lanes
    params.n_threads = params.n_threads_batch = threads
    params.flash_attn_type = 1
    params.kv_unified = False
    params.swa_full = True  # a sliding-window cache could not be trimmed at will
    params.no_perf = True
    options.apply_to_context(params)
    return params


def free_model(model: Any) -> None:
    """Frees llama.cpp's model; leaves it in memory if a grammar that was given up still reads its vocabulary."""
    if unused(llama_cpp.llama_model_get_vocab(model), GRACE):
        llama_cpp.llama_model_free(model)
    else:
        log.warning(
            "a model stays in memory: a grammar that took too long still computes with its vocabulary"
        )


class Loaded:
    """Has a context of llama.cpp, and its model where nobody else has; `close`, or leaving a `with`, frees them."""

    _model: Any = None
    _context: Any = None

    def close(self) -> None:
        """Safe to call twice."""
        if self._context:
            llama_cpp.llama_free(self._context)
            self._context = None
        if self._model:
            free_model(self._model)
            self._model = None

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
