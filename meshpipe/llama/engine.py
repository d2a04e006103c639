"""One stage's llama.cpp: runs rows of any lanes through a layer range, trims lanes by position.

**What exact means.** The output of a split must be the unsplit model's, bit for bit, whatever speculation and
batching do to the grouping of rows into decodes. A row's bits may depend on the rows it shares a decode with and
on where its lane's cache lies (`docs/exactness.md` has the measurements), so an engine keeps every decode in one
*class* in which they do not:

- flash attention is on, extra buffer types (AMX, weight repacking) are off;
- every lane has a cache of its own: in a shared one, cells that a trim frees are taken by other lanes, and
  attention sums in the order of cells, so that a row's bits would come to depend on the other lanes' past;
- at most 63 rows a decode: from 64 query rows on, ggml's CPU flash attention takes another kernel;
- a lone row is accompanied by a second one, which is trimmed away, where it would take a path of its own: with
  several threads (flash attention then splits the cache among them), or where a probe at load saw other bits;
- where the probe sees that grouping changes bits at all, rows run one by one.

Which rows share a decode: `meshpipe.llama.decodes`; the probe: `meshpipe.llama.probe`.

`exact=False` lifts the bounds on rows, and is about twice as fast at prefill on a CPU.

An engine is not thread-safe: one job at a time. Everything here blocks; `meshpipe.pipeline` runs it in a thread.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp import llama_cpp_ext

from meshpipe.errors import CapacityError, EngineError, UsageError
from meshpipe.llama import architectures, bindings
from meshpipe.llama import probe as probing
from meshpipe.llama.context import Loaded, context_params
from meshpipe.llama.decodes import EXACT_ROWS, DecodeClass, Piece, Span, group_rows
from meshpipe.llama.memory import check_fits, need
from meshpipe.llama.mtp import Mtp, load_mtp
from meshpipe.llama.options import EngineOptions
from meshpipe.llama.slicing import Slice, read_slice, slice_nextn
from meshpipe.llama.tap import Tap, Watch, abort_callback
from meshpipe.messages import Rows
from meshpipe.wording import counted

_MULTI_SECTION_ROPE = (8, 40)  # LLAMA_ROPE_TYPE_MROPE, LLAMA_ROPE_TYPE_IMROPE


class Aborted(EngineError):
    """A decode was ended by `StageEngine.abort`; its lanes were trimmed to where it had started."""


class StageEngine(Loaded):
    """Runs one slice of a model.

    `fingerprint`, after a probe, is a digest of the bits that fixed rows gave: engines of the same slice that agree
    in it compute alike, as far as those rows show.

    `lanes` sequences of up to `context` tokens each. `probe` times decodes of 1 to 63 rows and checks whether
    grouping changes bits; without it `cost` is empty and the class is the one that the CPU backend was seen to
    need. `mtp`: a last stage whose file holds NextN layers drafts with them, by its `mtp`; without, or for other
    stages, that is None and costs nothing. `keep`: bytes that whoever uses it takes for rows that it has given, for
    which there must be memory too. Raises ModelError (file), CapacityError (does not fit), UsageError
    (arguments).
    """

    def __init__(
        self,
        path: str | Path,
        *,
        lanes: int = 1,
        context: int = 4096,
        threads: int = 1,
        exact: bool = True,
        probe: bool = False,
        mtp: bool = False,
        keep: int = 0,
        options: EngineOptions | None = None,
    ) -> None:
        options = options or EngineOptions()
        for name, value, most in (
            ("lanes", lanes, 255),
            ("context", context, 2**31),
            ("threads", threads, 512),
        ):
            if not 1 <= value <= most:
                raise UsageError(f"{name} must be from 1 to {most}, not {value}")
        bindings.start()
        self.slice: Slice = read_slice(path)
        self.lanes, self.context, self.threads = lanes, context, threads
        self.cost: tuple[tuple[int, float], ...] = ()
        self.fingerprint = ""
        self.mtp: Mtp | None = None
        self.draft_cost = 0.0
        self._hidden: list[list[Rows]] = []
        self._lengths = [0] * lanes
        self._watch = Watch()
        self._decodes_run = 0
        self._tap: Tap | None = None
        if options.repack:
            options.require_repack_survives(self.slice.path)
        takes = need(
            self.slice.path,
            lanes=lanes,
            cells=self._cells,
            keys=options.cache_type_k,
            values=options.cache_type_v,
            keep=0 if self.slice.is_last else keep,
        )
        layers = f"layers {self.slice.start}:{self.slice.stop}"
        what = f"a stage of {layers} with {counted(lanes, 'lane')} × {context} tokens"
        check_fits(takes, options.memory_budget(), what, evictable=options.evictable)
        mtp = mtp and self.slice.is_last and self.slice.draft_heads > 0
        apart = architectures.drafts_apart(self.slice.architecture)
        self._model = options.load(self.slice.path, mtp=mtp and not apart)
        try:
            self.n_embd: int = llama_cpp.llama_model_n_embd(self._model)
            self.n_vocab: int = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
            self._sections = 4 if llama_cpp.llama_model_rope_type(self._model) in _MULTI_SECTION_ROPE else 1
            trained = llama_cpp.llama_model_n_ctx_train(self._model)
            if context > trained and not options.scales_rope:
                raise CapacityError(
                    f"context {context} exceeds the {trained} tokens that the model was trained on; "
                    "ask for less or set RoPE scaling"
                )
            self._capacity = EXACT_ROWS + 1 if exact else options.batch
            self._context = self._make_context(options)
            if mtp and apart:
                self.mtp = load_mtp(
                    slice_nextn(path), lanes=lanes, context=context, threads=threads, options=options
                )
            elif mtp:
                heads = self.slice.draft_heads
                self.mtp = Mtp(
                    self._model, heads, lanes=lanes, context=context, threads=threads, options=options
                )
        except BaseException:
            self.close()
            raise
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._allocate_batch()
        if exact:
            self.decodes = DecodeClass(EXACT_ROWS, 2 if threads > 1 else 1, True)
        else:
            self.decodes = DecodeClass(self._capacity - 1, 1, False)
        if probe:
            found = probing.probe(self)
            self.cost, self.fingerprint, self.decodes = found.cost, found.fingerprint, found.decodes
            if self.mtp is not None:
                self.draft_cost = self.mtp.probe()

    @property
    def _cells(self) -> int:
        """Positions of a lane's cache as llama.cpp rounds them, with one more for a spare row."""
        return -(-(self.context + 1) // 256) * 256

    def _make_context(self, options: EngineOptions) -> object:
        params = context_params(
            lanes=self.lanes, cells=self._cells, rows=self._capacity, threads=self.threads, options=options
        )
        if not self.slice.is_last:
            self._tap = Tap(self.slice.tapped_tensor, self.n_embd)
            params.cb_eval = self._tap.callback
            params.cb_eval_user_data = self._tap.user_data
        callback = abort_callback()
        if callback is not None:
            params.abort_callback = callback
            params.abort_callback_data = ctypes.cast(ctypes.byref(self._watch), ctypes.c_void_p)
        context = llama_cpp.llama_init_from_model(self._model, params)
        if not context:
            raise CapacityError(
                f"llama.cpp could not make a context of {counted(self.lanes, 'lane')} × {self.context} tokens for "
                f"{self.slice.path.name}: ask for fewer lanes or less context (its log says why)"
            )
        return context

    def _allocate_batch(self) -> None:
        """Fixed arrays that every decode fills; the batch struct points into them."""
        most = self._capacity
        self._token = np.zeros(most, np.int32)
        self._embd = np.zeros((most, self.n_embd), np.float32)
        self._positions = np.arange(self.context + 1, dtype=np.int32)
        self._pos = np.zeros((self._sections, most), np.int32)
        self._want = np.zeros(most, np.int8)
        self._ids = np.arange(self.lanes, dtype=np.int32)
        self._first_id = self._ids.ctypes.data
        self._seq = np.zeros(most, np.uintp)  # a pointer into _ids per row
        self._n_seq = np.ones(most, np.int32)
        # llama.cpp wants the sections one after the other, which for one section they are already.
        self._flat_pos = self._pos[0] if self._sections == 1 else np.zeros(most * self._sections, np.int32)
        batch = llama_cpp.llama_batch()
        if self.slice.is_first:
            batch.token = self._token.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        else:
            batch.embd = self._embd.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        batch.pos = self._flat_pos.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        batch.n_seq_id = self._n_seq.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        batch.seq_id = self._seq.ctypes.data_as(ctypes.POINTER(ctypes.POINTER(ctypes.c_int32)))
        batch.logits = self._want.ctypes.data_as(ctypes.POINTER(ctypes.c_int8))
        self._batch = batch

    @property
    def vocab(self) -> Any:
        """llama.cpp's vocabulary pointer; of a slice that keeps none, one without tokens' text."""
        return llama_cpp.llama_model_get_vocab(self._model)

    # ---------------------------------------------------------------- lanes

    def length(self, lane: int) -> int:
        """Number of positions in the lane's cache."""
        return self._lengths[self._checked(lane)]

    def trim(self, lane: int, position: int) -> None:
        """Forgets the lane's cache from `position` on. Raises EngineError if the cache is shorter."""
        have = self._lengths[self._checked(lane)]
        if not 0 <= position <= have:
            raise EngineError(f"cannot trim lane {lane} to position {position}: its cache holds {have}")
        if position == have:
            return
        if not llama_cpp.llama_memory_seq_rm(self._memory, lane, position, -1):
            raise EngineError(
                f"llama.cpp refused to trim lane {lane} to position {position}: "
                f"the cache of this architecture ({self.slice.architecture}) cannot be cut there"
            )
        self._lengths[lane] = position

    def clear(self, lane: int) -> None:
        """Forgets the lane's whole cache."""
        self.trim(lane, 0)

    def _checked(self, lane: int) -> int:
        if not 0 <= lane < self.lanes:
            raise EngineError(f"no lane {lane}: this engine has lanes 0 to {self.lanes - 1}")
        return lane

    # ---------------------------------------------------------------- running

    def run(self, spans: Sequence[Span], *, keep: bool = True) -> list[Rows]:
        """Trims every span's lane to its start and runs the spans, as one indivisible job.

        Spans of one lane must follow each other without a gap. Returns one float32 array a span: activations,
        shape (count, n_embd), or on the last stage logits, shape (wanted, n_vocab). Where `keep` is false, logits
        may be llama.cpp's own memory, which holds them until the next job. Raises EngineError for spans that
        cannot be run (nothing was changed then) and when llama.cpp fails; Aborted after `abort`. After a failed
        decode every lane of the job is trimmed to its first start.
        """
        starts = self._check(spans)
        for lane, start in starts.items():
            self.trim(lane, start)
        pieces: list[list[Rows]] = [[] for _ in spans]
        self._hidden = [[] for _ in spans]
        decodes = list(group_rows(spans, self.decodes.most))
        copy = self.slice.is_last and (keep or len(decodes) > 1)
        try:
            for decode in decodes:
                for index, rows in self._decode(spans, decode):
                    pieces[index].append(rows.copy() if copy else rows)
        except EngineError:
            for lane, start in starts.items():
                self.trim(lane, start)
            raise
        width = self.n_vocab if self.slice.is_last else self.n_embd
        empty = np.empty((0, width), np.float32)
        return [np.concatenate(p) if len(p) > 1 else (p[0] if p else empty) for p in pieces]

    def hidden_rows(self) -> list[Rows | None]:
        """For each span of the last `run`: its rows before the final norm, (count, n_embd); None if not asked for."""
        return [np.concatenate(rows) if rows else None for rows in self._hidden]

    @property
    def gives_hidden_rows(self) -> bool:
        """Whether spans may ask for hidden rows."""
        return self.slice.is_last and architectures.gives_hidden_rows(self.slice.architecture)

    def abort(self) -> None:
        """Ends the running decode early (from any thread); without effect where no C compiler was found."""
        self._watch.abort = 1

    @property
    def steps(self) -> int:
        """A number that rises as decodes compute (readable from any thread).

        On a CPU with the compiled tap with every node of a graph; else with every decode.
        """
        return self._decodes_run + int(self._watch.steps)

    def rearm(self) -> None:
        """Forgets an `abort`."""
        self._watch.abort = 0

    def _check(self, spans: Sequence[Span]) -> dict[int, int]:
        """The first start of every lane in the job."""
        starts: dict[int, int] = {}
        lengths: dict[int, int] = {}
        for span in spans:
            have = lengths.get(span.lane, self.length(span.lane))
            if span.lane in lengths and span.start != have:
                raise EngineError(
                    f"spans of lane {span.lane} must be consecutive: one ends at {have}, "
                    f"the next starts at {span.start}"
                )
            if span.start < 0 or span.start > have:
                raise EngineError(
                    f"a window of lane {span.lane} starts at position {span.start}, above the {have} in its cache"
                )
            if span.count == 0:
                raise EngineError(f"a span of lane {span.lane} at position {span.start} has no rows")
            if span.stop > self.context:
                raise CapacityError(
                    f"lane {span.lane} would reach position {span.stop} of a context of {self.context}"
                )
            if not 0 <= span.wanted <= span.count:
                raise EngineError(f"{span.wanted} rows wanted of a span of {span.count}")
            if span.hidden and not self.gives_hidden_rows:
                raise EngineError(
                    f"layers {self.slice.start}:{self.slice.stop} of {self.slice.architecture} give no hidden rows: "
                    "ask the last stage of an architecture whose NextN layers llama.cpp can draft with"
                )
            self._check_input(span)
            starts.setdefault(span.lane, span.start)
            lengths[span.lane] = span.stop
        return starts

    def _check_input(self, span: Span) -> None:
        if self.slice.is_first:
            if span.rows is not None:
                raise EngineError("the first stage takes token ids, not activations")
            bad = next((t for t in span.tokens if not 0 <= t < self.n_vocab), None)
            if bad is not None:
                raise EngineError(f"token {bad} is outside the vocabulary of {self.n_vocab}")
        elif span.rows is None:
            raise EngineError(f"stage {self.slice.start}:{self.slice.stop} takes activations, not token ids")
        elif span.rows.shape != (span.count, self.n_embd) or span.rows.dtype != np.float32:
            raise EngineError(
                f"activations must be float32 of shape ({span.count}, {self.n_embd}), "
                f"not {span.rows.dtype} of {span.rows.shape}"
            )

    def _decode(self, spans: Sequence[Span], decode: Sequence[Piece]) -> Iterator[tuple[int, Rows]]:
        """One llama_decode; yields the result of every piece."""
        count = 0
        wants: list[int] = []  # of each piece: how many of its last rows are wanted
        for piece in decode:
            span, stop = spans[piece.index], count + piece.high - piece.low
            if span.rows is None:
                self._token[count:stop] = span.tokens[piece.low : piece.high]
            else:
                self._embd[count:stop] = span.rows[piece.low : piece.high]
            # llama.cpp gives text three equal RoPE sections, and 0 in the fourth.
            self._pos[:3, count:stop] = self._positions[span.start + piece.low : span.start + piece.high]
            self._seq[count:stop] = self._first_id + 4 * span.lane
            want = stop - count  # an unflagged row would be dropped inside the last layer
            if self.slice.is_last:
                want = min(want, max(0, piece.high - (span.count - span.wanted)))
            self._want[count : stop - want] = 0
            self._want[stop - want : stop] = 1
            wants.append(want)
            count = stop
        lone = count < self.decodes.least
        skip = 0  # rows of the result before the first that is wanted
        if lone:
            self._token[count] = 0
            self._embd[count] = 0
            self._pos[:3, count] = self._pos[0, count - 1] + 1
            self._seq[count] = self._seq[count - 1]
            self._want[count] = 1
            count += 1
        elif self.slice.is_last and self.decodes.least > 1 and sum(wants) == 1:
            # The last layer's tail and the head see the wanted rows alone: keep them company too.
            skip = 1 - int(self._want[0])
            self._want[1 - skip] = 1
        if self._sections > 1:
            self._flat_pos[: count * self._sections] = self._pos[:, :count].ravel()
        self._batch.n_tokens = count
        if self._tap is not None:
            self._tap.expect(count)
        hidden = any(spans[piece.index].hidden for piece in decode)
        if self.gives_hidden_rows:
            llama_cpp_ext.llama_set_embeddings_nextn(self._context, hidden, False)
        status = llama_cpp.llama_decode(self._context, self._batch)
        self._decodes_run += 1
        if status == 2:
            raise Aborted("the decode was aborted")
        if status != 0:
            hint = "no room in the cache" if status == 1 else "its log says why"
            raise EngineError(f"llama_decode failed with status {status} for {count} rows ({hint})")
        for piece in decode:
            self._lengths[spans[piece.index].lane] = spans[piece.index].start + piece.high
        if hidden:
            self._keep_hidden(spans, decode, count)
        if lone:
            lane = spans[decode[0].index].lane
            llama_cpp.llama_memory_seq_rm(self._memory, lane, self._lengths[lane], -1)
        yield from self._results(decode, wants, count, skip)

    def _keep_hidden(self, spans: Sequence[Span], decode: Sequence[Piece], count: int) -> None:
        pointer = llama_cpp_ext.llama_get_embeddings_nextn(self._context)
        rows = np.ctypeslib.as_array(pointer, (count, self.n_embd))
        at = 0
        for piece in decode:
            stop = at + piece.high - piece.low
            if spans[piece.index].hidden:
                self._hidden[piece.index].append(rows[at:stop].copy())
            at = stop

    def _results(
        self, decode: Sequence[Piece], wants: Sequence[int], count: int, skip: int
    ) -> Iterator[tuple[int, Rows]]:
        """The wanted rows of every piece; `skip` rows that nobody wants come before them."""
        if self._tap is not None:
            rows = self._tap.take()
            if rows is None:
                raise EngineError(
                    f"the graph of {self.slice.architecture} gave no {self.slice.tapped_tensor} of "
                    f"{count} rows × {self.n_embd}: this architecture cannot be split here"
                )
        elif any(wants):
            pointer = llama_cpp.llama_get_logits(self._context)
            rows = np.ctypeslib.as_array(pointer, (skip + sum(wants), self.n_vocab))
        else:
            return
        at = skip
        for piece, want in zip(decode, wants, strict=True):
            if want:
                yield piece.index, rows[at : at + want]
            at += want

    def close(self) -> None:
        """Frees the contexts and the model; safe to call twice."""
        if self.mtp is not None:
            self.mtp.close()
        super().close()
