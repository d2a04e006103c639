"""Where a row's bits depend on its company, what staying exact costs, and what inexact encodings change.

The first four tables ask llama.cpp itself, by raw calls: the demo model, flash attention on, no extra buffer
types, CPU. Every case decodes the same 128 positions, which follow `context` others; the reference decodes them
one row at a time with one thread. `python -m bench exactness` takes a few minutes on two cores.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
import numpy.typing as npt

from bench import report, texts
from meshpipe.cli.demo import demo_model
from meshpipe.llama.bindings import start
from meshpipe.llama.decodes import Span
from meshpipe.llama.engine import StageEngine
from meshpipe.llama.options import EngineOptions
from meshpipe.llama.slicing import slice_model
from meshpipe.messages import Rows
from meshpipe.wire.codec import ENCODINGS, decode_rows, encode_rows

COUNT = 128  # positions compared
TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1")
LAYERS = 6  # of the models written in these types
QUICK = ("grouping", "weights")


class Raw:
    """llama.cpp as it comes: decodes of any number of rows, lanes in one cache or in their own."""

    def __init__(
        self, path: Path, *, threads: int = 1, lanes: int = 1, unified: bool = False, flash: bool = True
    ) -> None:
        start()
        self._model = EngineOptions().load(path)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = 1024 * lanes
        params.n_batch = params.n_ubatch = 512
        params.n_seq_max = lanes
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = int(flash)
        params.kv_unified = unified
        params.no_perf = True
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        self._batch = llama_cpp.llama_batch_init(512, 0, 1)
        self._n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))

    def run(
        self, tokens: Sequence[int], position: int, lane: int = 0, width: int = 63, wanted: bool = True
    ) -> Rows:
        """Trims the lane to `position`, decodes the tokens `width` rows at a time; their logits if wanted."""
        llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(self._context), lane, position, -1)
        parts: list[Rows] = [np.empty((0, self._n_vocab), np.float32)]
        for low in range(0, len(tokens), width):
            chunk = tokens[low : low + width]
            self._batch.n_tokens = len(chunk)
            for row, token in enumerate(chunk):
                self._batch.token[row] = token
                self._batch.pos[row] = position + low + row
                self._batch.n_seq_id[row] = 1
                self._batch.seq_id[row][0] = lane
                self._batch.logits[row] = wanted or row == len(chunk) - 1
            assert llama_cpp.llama_decode(self._context, self._batch) == 0
            if wanted:
                pointer = llama_cpp.llama_get_logits(self._context)
                parts.append(np.ctypeslib.as_array(pointer, (len(chunk), self._n_vocab)).copy())
        return np.concatenate(parts)

    def forget(self, lane: int, position: int = 0) -> None:
        """Trims the lane."""
        llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(self._context), lane, position, -1)

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self._context)
        llama_cpp.llama_model_free(self._model)


def compare(logits: Rows, reference: Rows) -> dict[str, Any]:
    """How far rows of logits agree."""
    difference = np.abs(logits - reference)
    return {
        "equal rows": f"{int((difference.max(axis=1) == 0).sum())}/{len(logits)}",
        "max |Δ|": float(difference.max()),
        "RMS Δ": float(np.sqrt(np.mean(difference.astype(np.float64) ** 2))),
        "same greedy": f"{int((logits.argmax(axis=1) == reference.argmax(axis=1)).sum())}/{len(logits)}",
    }


def language(count: int) -> list[int]:
    """Tokens that the demo model and its users wrote."""
    tokens = [token for text in texts.load() if text["kind"] == "novel" for token in text["tokens"]]
    return tokens[:count]


# ---- what changes a row's bits --------------------------------------------------------------------------


def grouping(model: Path, quick: bool) -> Iterator[report.Row]:
    """Rows of a decode, threads, and how much lies in the cache before."""
    tokens = language(600 + COUNT)
    widths = (1, 2, 3, 7, 16, 32, 48, 63, 64, 96, 128)
    for context in (100,) if quick else (100, 600):
        mine = tokens[context : context + COUNT]
        reference: Rows | None = None
        for threads in (1, 2):
            with Raw(model, threads=threads) as raw:
                raw.run(tokens[:context], 0, wanted=False)
                if reference is None:
                    reference = raw.run(mine, context, width=1)
                for width in widths if context == 600 else (1, 2, 63, 64):
                    logits = raw.run(mine, context, width=width)
                    case = {"context": context, "threads": threads, "rows a decode": width}
                    yield case | compare(logits, reference)
    if quick:
        return
    with Raw(model, flash=False) as raw:
        raw.run(tokens[:600], 0, wanted=False)
        reference = raw.run(tokens[600:], 600, width=1)
        for width in (2, 16):
            case = {"context": 600, "threads": 1, "rows a decode": f"{width}, flash attention off both times"}
            yield case | compare(raw.run(tokens[600:], 600, width=width), reference)


def cell_order(model: Path) -> Iterator[report.Row]:
    """Another lane's trim frees cells in a shared cache; this lane's next rows take them."""
    tokens = language(300 + COUNT)
    for unified in (False, True):
        with Raw(model, lanes=2, unified=unified) as raw:
            raw.run(tokens[:300], 0, wanted=False)
            reference = raw.run(tokens[300:], 300)
            raw.forget(0)
            raw.run(tokens[:100], 0, wanted=False)
            raw.run(tokens[200:263], 0, lane=1, wanted=False)
            raw.run(tokens[100:300], 100, wanted=False)
            raw.forget(1)
            logits = raw.run(tokens[300:], 300)
        yield {"cache": "one for all lanes" if unified else "one a lane"} | compare(logits, reference)


def weights(model: Path, quick: bool) -> Iterator[report.Row]:
    """Kernels differ by type: alone and in groups, and the class that the engine's probe chooses.

    The reference is 63 rows a decode here.
    """
    tokens = language(64 + COUNT)
    with tempfile.TemporaryDirectory() as directory:
        for name in ("F16",) if quick else TYPES:
            path = retyped(model, Path(directory) / f"{name}.gguf", gguf.GGMLQuantizationType[name])
            with Raw(path) as raw:
                raw.run(tokens[:64], 0, wanted=False)
                reference = raw.run(tokens[64:], 64)
                row: dict[str, Any] = {"weights": name}
                for width in (1, 2, 3, 4, 7, 16, 33):
                    found = compare(raw.run(tokens[64:], 64, width=width), reference)
                    row[f"width {width}"] = found["equal rows"].split("/")[0]
                    if width == 1:
                        row |= {"width 1, max |Δ|": found["max |Δ|"]}
            with StageEngine(path, context=256, probe=True) as engine:
                row["engine's rows a decode"] = f"{engine.decodes.least} to {engine.decodes.most}"
            path.unlink()
            yield row


def retyped(source: Path, path: Path, kind: gguf.GGMLQuantizationType) -> Path:
    """The model's first layers with all matrices in another type."""
    reader = gguf.GGUFReader(source)
    arch = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(path, arch)
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        element = field.types[1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        value = LAYERS if key == f"{arch}.block_count" else field.contents()
        writer.add_key_value(key, value, field.types[0], element)
    for tensor in reader.tensors:
        if tensor.name.startswith("blk.") and int(tensor.name.split(".")[1]) >= LAYERS:
            continue
        values: npt.NDArray[np.float32] = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values)
        else:
            writer.add_tensor(tensor.name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# ---- what exactness costs -------------------------------------------------------------------------------


def cost(model: Path, repeats: int) -> Iterator[report.Row]:
    """Prefill in decodes of 63 rows and of 512; a lone row and one with a spare row."""
    tokens = language(600 + COUNT)
    for threads in (1, 2):
        with Raw(model, threads=threads) as raw:
            for width in (63, 512):
                seconds = best(lambda w=width: raw.run(tokens[:512], 0, width=w, wanted=False), repeats)  # type: ignore[misc]
                case = {"job": f"prefill of 512, {width} rows a decode", "threads": threads}
                yield case | spent(*seconds, 512)
            raw.run(tokens[:600], 0, wanted=False)
            for width in (1, 2):
                rows = tokens[600 : 600 + width]
                seconds = best(lambda r=rows: raw.run(r, 600, width=2), 10 * repeats)  # type: ignore[misc]
                case = {"job": f"one decode of {width} rows after 600", "threads": threads}
                yield case | spent(*seconds, width)


def best(work: Any, repeats: int) -> tuple[float, float]:
    """The least wall time and the least processor time of several tries, seconds.

    On a machine that others use, the processor time of one thread is the better measure; with two threads, one
    of which waits for the other in a loop, neither is good.
    """
    walls, cpus = [], []
    for _ in range(repeats):
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    return min(walls), min(cpus)


def spent(wall: float, cpu: float, rows: int) -> dict[str, float]:
    """Columns."""
    return {"wall ms": wall * 1000, "CPU ms": cpu * 1000, "CPU ms a row": cpu * 1000 / rows}


# ---- inexact encodings ----------------------------------------------------------------------------------


class Halves:
    """Two stages, with an encoding of the rows between them."""

    def __init__(self, model: Path) -> None:
        slices = [slice_model(model, *layers) for layers in ((0, 15), (15, 30))]
        self.first, self.last = (StageEngine(path, context=1024) for path in slices)

    def run(self, tokens: Sequence[int], position: int, encoding: str, wanted: int) -> Rows:
        """Logits of the last `wanted` rows."""
        (rows,) = self.first.run([Span(0, position, tokens)])
        payload = np.frombuffer(encode_rows(rows, encoding), np.uint8)
        rows = np.ascontiguousarray(decode_rows(payload, encoding, *rows.shape))
        (logits,) = self.last.run([Span(0, position, rows=rows, wanted=wanted)])
        return logits

    def close(self) -> None:
        """Frees both."""
        self.first.close()
        self.last.close()


def encodings(model: Path, quick: bool) -> Iterator[report.Row]:
    """Logits over a given text, and how long greedy generation stays the same, against float32."""
    count, per_prompt = (200, 40) if quick else (700, 128)
    text = language(count)
    prompts = [t["tokens"][: t["prompt"]] for t in texts.load() if t["kind"] in ("greedy", "copy")][::4]
    prompts = [prompt for prompt in prompts if len(prompt) < 400][: 2 if quick else 4]
    halves = Halves(model)
    reference: Rows | None = None
    written: list[list[int]] = []
    for encoding in ENCODINGS:
        logits = halves.run(text, 0, encoding, len(text))
        outputs = [greedy(halves, prompt, per_prompt, encoding) for prompt in prompts]
        if reference is None:
            reference, written = logits, outputs
        agreed = [common(ours, theirs) for ours, theirs in zip(outputs, written, strict=True)]
        yield (
            {"activations": encoding, "bytes a row of 576": encode_rows(np.ones((1, 576), np.float32), encoding).nbytes}
            | compare(logits, reference)
            | {f"tokens of {per_prompt} before greedy generation differs": ", ".join(map(str, agreed))}
        )  # fmt: skip
    yield {"activations": "(the logits' own standard deviation)", "RMS Δ": float(reference.std())}
    halves.close()


def greedy(halves: Halves, prompt: Sequence[int], count: int, encoding: str) -> list[int]:
    """Greedy tokens after the prompt."""
    written: list[int] = []
    tokens, position = list(prompt), 0
    while len(written) < count:
        logits = halves.run(tokens, position, encoding, 1)
        position += len(tokens)
        tokens = [int(logits[0].argmax())]
        written += tokens
    return written


def common(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the common prefix."""
    return next((n for n, (a, b) in enumerate(zip(left, right, strict=True)) if a != b), len(left))


def main(argv: list[str]) -> None:
    """Measures, and prints a table for every question."""
    parser = report.parser("exactness", __doc__)
    parser.add_argument("--model", type=Path, help="GGUF file (default: the demo's)")
    parser.add_argument(
        "--part",
        choices=("grouping", "cells", "weights", "cost", "encodings"),
        help="default: all; --quick: grouping and weights",
    )
    arguments = parser.parse_args(argv)
    model, quick = arguments.model or demo_model(), arguments.quick
    parts = {
        "grouping": lambda: grouping(model, quick),
        "cells": lambda: cell_order(model),
        "weights": lambda: weights(model, quick),
        "cost": lambda: cost(model, 1 if quick else 3),
        "encodings": lambda: encodings(model, quick),
    }
    rows: list[report.Row] = []
    for name, measure in parts.items():
        if name == arguments.part or (arguments.part is None and (not quick or name in QUICK)):
            found = list(measure())
            print(f"\n### {name}\n\n{report.table(found)}", flush=True)
            rows += [{"bench": "exactness", "part": name, **row} for row in found]
    report.finish(arguments, rows)
