"""Native multi-token prediction: a model's own NextN layers guess the tokens after the next one.

A NextN head takes the pair (h_p, x_{p+1}), the trunk's hidden row at position p (before the final norm) and the
token that follows, at position p + 1, and its logits are a guess for position p + 2. Its own hidden row stands in
for h_{p+1}, so that one head can be chained; where a model has several, each step takes the next. In llama.cpp
the heads are a second context on the same model, with a cache of their own, that is trimmed like any other.

What has to hold for a draft is that the cache has the pairs of all positions up to the one drafted from. So a
`Mtp` keeps the last `KEPT` hidden rows of every lane, and feeds lazily: what lies between the cache's end and the
position drafted from is fed when a draft is wanted, in one go. A cache that lags behind by more than `AGAIN` rows,
since nothing was to be drafted, begins again with the last of them. So it does where rows are missing (windows ran that
kept none, or a lane took over a prefix). It has less to attend to then: such drafts may be worse, never wrong, since
the model itself checks them.

Away from the trunk the line of tokens runs ahead of the rows: past the last row that is known, a draft goes along
the tokens that were told, on the head's own rows, and on from their end. Such a chain is kept from one draft to the
next. Newer rows would make it better, but all of it has to be run again from there, one by one: that is done once
as many of its positions have become known as are to be repeated, so that no token costs more than twice.

It knows nothing of stages: rows and tokens come by lane and position from whoever has them. Not thread-safe, and
everything here blocks.

The order of calls into llama.cpp follows from its MTP graphs (`src/models/*.cpp`, `graph_mtp`): a head's pairs
must lie in its own layer's cache, and cells belong to positions, so heads other than the first are fed by
trimming and running the same positions again.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt
from attrs import define, field
from llama_cpp import llama_cpp_ext

from meshpipe.errors import CapacityError, EngineError, ModelError
from meshpipe.llama import bindings
from meshpipe.llama.context import Loaded, context_params
from meshpipe.llama.options import EngineOptions
from meshpipe.llama.slicing import read_slice
from meshpipe.messages import Rows
from meshpipe.wording import counted

KEPT = 256
"""Hidden rows kept of each lane: what an empty cache begins with at most."""
AGAIN = 64
"""Rows that one draft feeds at most to a cache that was fed before: with more to attend to, first drafts of SmolLM2's
block were right at 42.2% of 768 positions, with so many at 41.7%."""
MOST_DRAFTS = 64
"""Tokens of one draft at most."""

_ROWS = 63  # of one decode: the class whose bits do not depend on how rows are grouped

Drafts = list[tuple[int, float]]
"""Tokens with the head's own probability of each, given those before it."""


@define(eq=False)
class _Chain:
    """The line that is being drafted: its pairs from position `start` on, and the head that ran last."""

    start: int
    rows: list[Rows]
    tokens: list[int]
    head: int = 0

    @property
    def stop(self) -> int:
        """The position after its last token."""
        return self.start + len(self.tokens)

    def cut(self, tokens: Sequence[int]) -> None:
        """Keeps what agrees with a line of tokens, which are by position."""
        line = tokens[self.start : self.stop]
        agreeing = next((at for at, token in enumerate(line) if token != self.tokens[at]), len(line))
        del self.tokens[agreeing:], self.rows[agreeing:]


@define(eq=False)
class _Lane:
    ring: Rows  # row of position p at p % KEPT
    low: int = 0
    high: int = 0  # rows of positions [low, high) are kept
    base: int = 1
    tokens: list[int] = field(factory=list)  # of the pairs in the cache, positions [base, fed)
    chain: _Chain | None = None

    @property
    def fed(self) -> int:
        """The position after the last pair in the cache."""
        return self.base + len(self.tokens)


class Mtp(Loaded):
    """Drives the NextN heads of a model that llama.cpp has loaded with them.

    `model` is llama.cpp's pointer; `heads` how many NextN layers it has; `lanes` sequences of up to `context`
    positions each. Memory: a cache of `heads` layers, and `KEPT` rows a lane once it is used. Raises CapacityError.
    """

    def __init__(
        self,
        model: Any,
        heads: int,
        *,
        lanes: int = 1,
        context: int = 4096,
        threads: int = 1,
        options: EngineOptions | None = None,
        owned: bool = False,
    ) -> None:
        self.heads, self.lanes = heads, lanes
        self.n_embd: int = llama_cpp.llama_model_n_embd_out(model)
        self.n_vocab: int = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self._model = model if owned else None
        params = context_params(
            lanes=lanes,
            cells=-(-(context + MOST_DRAFTS) // 256) * 256,
            rows=_ROWS + 1,
            threads=threads,
            options=options or EngineOptions(),
        )
        params.ctx_type = llama_cpp.LLAMA_CONTEXT_TYPE_MTP
        self._context = llama_cpp.llama_init_from_model(model, params)
        if not self._context:
            self.close()
            raise CapacityError(
                f"llama.cpp could not make an MTP context of {counted(lanes, 'lane')} × {context} tokens: ask "
                "for fewer lanes or less context, or go without MTP (its log says why)"
            )
        llama_cpp_ext.llama_set_embeddings_nextn(self._context, True, True)
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._lanes: dict[int, _Lane] = {}
        self._allocate_batch()

    def _allocate_batch(self) -> None:
        most = _ROWS + 1
        self._token = np.zeros(most, np.int32)
        self._embd = np.zeros((most, self.n_embd), np.float32)
        self._pos = np.zeros(most, np.int32)
        self._want = np.zeros(most, np.int8)
        self._ids = np.arange(self.lanes, dtype=np.int32)
        self._seq = np.zeros(most, np.uintp)
        self._n_seq = np.ones(most, np.int32)
        batch = llama_cpp.llama_batch()
        batch.token = self._token.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        batch.embd = self._embd.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        batch.pos = self._pos.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        batch.n_seq_id = self._n_seq.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        batch.seq_id = self._seq.ctypes.data_as(ctypes.POINTER(ctypes.POINTER(ctypes.c_int32)))
        batch.logits = self._want.ctypes.data_as(ctypes.POINTER(ctypes.c_int8))
        self._batch = batch

    # ---------------------------------------------------------------- what is known of a lane

    def keep(self, lane: int, start: int, rows: Rows) -> None:
        """Notes the trunk's hidden rows, float32 (n, n_embd), of positions `[start, start + n)`.

        What was known of the lane from `start` on is forgotten.
        """
        state = self._of(lane)
        self.trim(lane, start)
        if state.high != start:
            state.low = start
        state.high = start + len(rows)
        state.low = max(state.low, state.high - KEPT)
        kept = np.arange(max(start, state.low), state.high)
        state.ring[kept % KEPT] = rows[kept[0] - start :] if len(kept) else rows

    def trim(self, lane: int, position: int) -> None:
        """The tokens from `position` on may be others from now on."""
        state = self._lanes.get(lane)
        if state is None:
            return
        state.high = min(state.high, position)
        state.low = min(state.low, state.high)
        # The pair at `position` holds the token there, which may be the same as before: `_resume` looks, and `draft`
        # at what a chain has from there on.
        del state.tokens[max(position + 1 - state.base, 0) :]
        if state.chain is not None and position < state.chain.start:
            state.chain = None

    def length(self, lane: int) -> int:
        """The position after the last one whose pair is in the lane's cache."""
        state = self._lanes.get(lane)
        return state.fed if state is not None else 1

    # ---------------------------------------------------------------- feeding and drafting

    def feed(self, lane: int, tokens: Sequence[int]) -> None:
        """Puts the pairs of a lane's tokens, which are by position, into the cache as far as rows are kept.

        Raises EngineError when llama.cpp fails; the lane's cache is then empty.
        """
        state = self._of(lane)
        stop = min(len(tokens), state.high + 1)
        if self._resume(state, lane, tokens, stop, KEPT) < stop:
            self._run_pairs(state, lane, tokens, stop, wanted=False)

    def draft(
        self,
        lane: int,
        tokens: Sequence[int],
        count: int,
        least: float = 0.0,
        until: float = math.inf,
    ) -> Drafts:
        """Guesses for the positions `len(tokens)`, `len(tokens) + 1`, … after a lane's tokens, at most `count`.

        Feeds first what the cache lacks, and goes along those tokens whose rows are not known yet. It ends before the
        first guess whose probability, times those before it, is below `least`, and after the first step that ends
        later than `until` (`time.perf_counter`), with or without a guess: asked again, it goes on from there. Returns
        nothing if no row is kept from which it could begin (`can_draft`). Raises EngineError as `feed` does.
        """
        state, stop = self._of(lane), len(tokens)
        count = min(count, MOST_DRAFTS)
        if count < 1 or not self.can_draft(lane, stop):
            return []
        anchor = min(stop - 1, state.high)  # the last position whose pair has a row of the trunk
        chain, results = state.chain, None
        if chain is not None:
            chain.cut(tokens)
            if not chain.tokens or stop - 1 - anchor <= anchor - chain.start:
                chain = None
        if chain is None:
            if self._resume(state, lane, tokens, anchor + 1, AGAIN) == anchor + 1:
                state.tokens.pop()  # its logits are wanted: once more
            results = self._run_pairs(state, lane, tokens, anchor + 1, wanted=True)
            chain = state.chain = _Chain(anchor, [state.ring[(anchor - 1) % KEPT].copy()], [tokens[anchor]])
        drafts: Drafts = []
        sure = 1.0
        while True:
            logits, row = results if results is not None else self._step(chain, lane)
            results = None
            if chain.stop < stop:
                token = tokens[chain.stop]
            else:
                token, probability = _most_likely(logits)
                sure *= probability
                if sure < least:
                    return drafts
                drafts.append((token, probability))
            chain.rows.append(row)
            chain.tokens.append(token)
            if len(drafts) == count or time.perf_counter() >= until:
                return drafts

    def can_draft(self, lane: int, stop: int) -> bool:
        """Whether a row is kept from which a draft after `stop` tokens could begin."""
        state = self._of(lane)
        return state.low < min(stop - 1, state.high)

    def _resume(self, state: _Lane, lane: int, tokens: Sequence[int], stop: int, most: int) -> int:
        """The position from which pairs have to be fed, up to `stop`.

        Of what is in the cache, what holds stays, unless it lags behind by more than `most` or rows are missing.
        """
        state.chain = None
        del state.tokens[max(stop - state.base, 0) :]
        if state.tokens and state.tokens[-1] != tokens[state.fed - 1]:
            state.tokens.pop()
        gap = state.fed < stop and not state.low < state.fed  # the row before is missing
        if not state.tokens:  # begin where rows do
            most = KEPT
        if gap or stop - state.fed > most or not state.tokens:
            state.base, state.tokens = max(state.low + 1, stop - most), []
            llama_cpp.llama_memory_seq_rm(self._memory, lane, -1, -1)
        return state.fed

    def _run_pairs(
        self, state: _Lane, lane: int, tokens: Sequence[int], stop: int, *, wanted: bool
    ) -> tuple[Rows, Rows]:
        """Feeds the positions `[fed, stop)` to every head; the first head's logits and row of the last, if wanted."""
        start = state.fed
        positions = np.arange(start, stop)
        rows = state.ring[(positions - 1) % KEPT]
        fresh = list(tokens[start:stop])
        try:
            for head in reversed(range(self.heads)):  # the first head last, whose results are wanted
                llama_cpp.llama_memory_seq_rm(self._memory, lane, start, -1)
                self._use(head)
                self._decode(lane, start, rows, fresh, wanted=wanted and head == 0)
        except EngineError:
            state.base, state.tokens = 1, []
            llama_cpp.llama_memory_seq_rm(self._memory, lane, -1, -1)
            raise
        state.tokens += fresh
        return self._results() if wanted else (np.empty(0, np.float32), np.empty(0, np.float32))

    def _step(self, chain: _Chain, lane: int) -> tuple[Rows, Rows]:
        """Runs the last pair of the chain, under the next head if there is one."""
        head = min(len(chain.tokens) - 1, self.heads - 1)
        at = len(chain.tokens) - 1
        if head != chain.head:  # its layer's cache has nothing of the chain yet
            chain.head, at = head, 0
        llama_cpp.llama_memory_seq_rm(self._memory, lane, chain.start + at, -1)
        self._use(head)
        rows = np.stack(chain.rows[at:])
        self._decode(lane, chain.start + at, rows, chain.tokens[at:], wanted=True)
        return self._results()

    def probe(self) -> float:
        """Seconds of one draft, the pair that it needs fed; measured on lane 0, which must be unused."""
        self.keep(0, 0, np.zeros((3, self.n_embd), np.float32))
        self.draft(0, [0, 0, 0], 1)  # pays for page faults and graph reservation
        seconds = []
        for _ in range(2):
            began = time.perf_counter()
            self.draft(0, [0, 0, 0, 0], 1)
            seconds.append(time.perf_counter() - began)
        del self._lanes[0]
        llama_cpp.llama_memory_seq_rm(self._memory, 0, -1, -1)
        return min(seconds)

    # ---------------------------------------------------------------- llama.cpp

    def _of(self, lane: int) -> _Lane:
        if not 0 <= lane < self.lanes:
            raise EngineError(f"no lane {lane}: this MTP context has lanes 0 to {self.lanes - 1}")
        if lane not in self._lanes:
            self._lanes[lane] = _Lane(np.zeros((KEPT, self.n_embd), np.float32))
        return self._lanes[lane]

    def _use(self, head: int) -> None:
        if self.heads > 1:
            llama_cpp_ext.llama_set_nextn_layer_offset(self._context, head)

    def _decode(self, lane: int, start: int, rows: Rows, tokens: Sequence[int], *, wanted: bool) -> None:
        """Runs pairs at positions `[start, start + n)`; with `wanted`, the last one gives logits and a row.

        That one is then run by itself: of several rows, some architectures' graphs give the hidden row of the first.
        """
        cuts = [*range(0, len(tokens) - wanted, _ROWS), *([len(tokens) - 1] if wanted else []), len(tokens)]
        for low, high in pairwise(cuts):
            count = high - low
            self._token[:count] = tokens[low:high]
            self._embd[:count] = rows[low:high]
            self._pos[:count] = np.arange(start + low, start + high)
            self._seq[:count] = self._ids.ctypes.data + 4 * lane
            self._want[:count] = wanted and high == len(tokens)
            self._batch.n_tokens = count
            status = llama_cpp.llama_decode(self._context, self._batch)
            if status != 0:
                raise EngineError(
                    f"llama_decode failed with status {status} for {count} pairs of MTP at position {start + low} "
                    "(its log says why)"
                )

    def _results(self) -> tuple[Rows, Rows]:
        """Logits (n_vocab,) and hidden row (n_embd,) of the one row that was wanted."""
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits(self._context), (self.n_vocab,))
        row = np.ctypeslib.as_array(llama_cpp_ext.llama_get_embeddings_nextn(self._context), (self.n_embd,))
        return logits, row.copy()


def load_mtp(
    path: str | Path,
    *,
    lanes: int = 1,
    context: int = 4096,
    threads: int = 1,
    options: EngineOptions | None = None,
) -> Mtp:
    """Loads the NextN layers of a model, of its last stage's slice or of their own (`slice_nextn`).

    Raises ModelError for a file without NextN layers that llama.cpp can draft with, and CapacityError.
    """
    bindings.start()
    found = read_slice(path)
    if not found.draft_heads:
        raise ModelError(
            f"{found.path} has no NextN layers with which llama.cpp could draft ({found.architecture}); give a "
            "model that has, or its slice that holds them"
        )
    options = options or EngineOptions()
    model = options.load(found.path, mtp=True)
    return Mtp(
        model, found.draft_heads, lanes=lanes, context=context, threads=threads, options=options, owned=True
    )


def _most_likely(logits: npt.NDArray[np.float32]) -> tuple[int, float]:
    """The greedy token, and its share of the softmax."""
    token = int(logits.argmax())
    return token, float(1.0 / np.exp(logits - logits[token]).sum())
