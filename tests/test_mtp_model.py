"""The demo model with a NextN block: its trunk is the original, and the block drafts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench.models.smollm2_mtp import assemble
from bench.models.smollm2_mtp.block import quantize
from bench.models.smollm2_mtp.contexts import Context, Model
from bench.models.smollm2_mtp.express import halves
from meshpipe.llama.gguf import read_header
from meshpipe.llama.vocabulary import Vocabulary

TEXT = Path(__file__).parent.parent / "docs" / "exactness.md"


def test_halves_undo_the_interleaved_order() -> None:
    rows = np.arange(2 * 8, dtype=np.uint8).reshape(16, 1)  # two heads of 8 rows
    interleaved = rows.reshape(2, 2, 4, 1).swapaxes(1, 2).reshape(16, 1)
    assert interleaved[:4, 0].tolist() == [0, 4, 1, 5]
    assert halves(interleaved, heads=2).tolist() == rows.tolist()


def test_quantized_as_ggml_does() -> None:
    gguf = pytest.importorskip("gguf")
    array = np.random.default_rng(1).standard_normal((6, 64)).astype(np.float32)
    array[2, :32] = 0
    expected = gguf.quantize(array, gguf.GGMLQuantizationType.Q8_0)
    assert quantize(array).tolist() == expected.tolist()


def test_assembled_once(smollm2: Path) -> None:
    path = assemble()
    header = read_header(path)
    assert header.architecture == "mimo2"
    assert header.integer(".nextn_predict_layers") == 1
    written = path.stat().st_mtime_ns
    assert assemble() == path
    assert path.stat().st_mtime_ns == written


@pytest.mark.slow
def test_trunk_is_the_original(smollm2: Path) -> None:
    """Sums of products of queries and keys are taken in another order, hence other roundings: only near-ties flip."""
    vocabulary = Vocabulary(smollm2)
    tokens = np.array(vocabulary.tokenize(TEXT.read_text())[:384], np.int32)
    found = []
    for path in (smollm2, assemble()):
        model = Model(path)
        with Context(model, context=512, batch=32) as context:
            pieces = []
            for start in range(0, len(tokens), 32):
                positions = np.arange(start, start + 32)
                logits, _ = context.run(tokens[start : start + 32], positions, np.zeros(32))
                pieces.append(logits.copy())
        model.close()
        found.append(np.concatenate(pieces))
    original, ours = found
    ordered = np.sort(original, axis=1)
    clear = ordered[:, -1] - ordered[:, -2] > 1.0
    same = original.argmax(axis=1) == ours.argmax(axis=1)
    assert clear.mean() > 0.4
    assert same[clear].all()
    assert same.mean() > 0.9
