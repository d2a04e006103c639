"""The demo model with a NextN block: its trunk is the original, and the block drafts."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from bench.models.smollm2_mtp import assemble, prompts
from bench.models.smollm2_mtp.block import quantize
from bench.models.smollm2_mtp.contexts import Context, Model
from bench.models.smollm2_mtp.data import Lane, _append
from bench.models.smollm2_mtp.evaluate import Count, evaluate
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


def test_prompts_of_every_kind_and_none_of_the_held_out() -> None:
    held_out = {text for _, text in prompts.held_out()}
    for kind, _ in prompts.KINDS:
        draw = random.Random(1)
        texts = {kind(draw) for _ in range(40)}
        assert len(texts) > 20
        assert not texts & held_out


def test_drafts_of_texts_only_read_have_no_successors() -> None:
    count = Count(accepted=[0])
    for draft in (3, 4, 3, 3):
        count.add([draft], [3])
    assert str(count).split() == ["75.0%", "-", "-", "0.75", "4"]


def test_texts_end_to_end(tmp_path: Path) -> None:
    """What windows hold of two directories' texts, and where there is something to learn."""
    torch = pytest.importorskip("torch")
    from bench.models.smollm2_mtp.train import WINDOW, Stream

    for name, temperature in (("a", 0.0), ("b", 0.5)):
        (tmp_path / name).mkdir()
        for start in range(0, 400, 20):
            lane = Lane(
                [], temperature, 0, 5, list(range(start, start + 20)), list(range(start + 1, start + 21))
            )
            lane.hidden = [np.full((20, 576), start, np.float16)]
            _append(tmp_path / name, lane)
    pairs = [Stream.read(tmp_path / name) for name in "ab"]
    assert [[len(stream.tokens) for stream in pair] for pair in pairs] == [[360, 40]] * 2
    stream = Stream.joined([pair[0] for pair in pairs])
    assert stream.text.diff().count_nonzero() == 2 * 18 - 1
    batch = stream.batch([200])
    assert batch.tokens[0].tolist() == [*range(201, 360), *range(WINDOW - 159)]
    assert torch.equal(batch.counts[0], torch.arange(201, 201 + WINDOW) % 20 > 0)
    assert torch.equal(batch.written[0, :40], torch.arange(201, 241) % 20 >= 5)
    assert not batch.written[0, 159:].any()
    assert batch.mask[0, 0, 30].nonzero()[:, 0].tolist() == list(range(20, 31))


@pytest.mark.slow
def test_trunk_is_the_original(smollm2: Path) -> None:
    """Sums of products of queries and keys are taken in another order, hence other roundings: only near-ties flip."""
    vocabulary = Vocabulary(smollm2)
    tokens = np.array(vocabulary.tokenize(TEXT.read_text())[:384], np.int32)
    found = []
    for path in (smollm2, assemble()):
        model = Model(path)
        with Context(model, context=512, batch=32, threads=1) as context:
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


@pytest.mark.slow
def test_trained_as_it_is_run(smollm2: Path, tmp_path: Path) -> None:
    """The block that PyTorch trains drafts what llama.cpp's MTP context drafts, chained too."""
    torch = pytest.importorskip("torch")
    from bench.models.smollm2_mtp import block as blocks
    from bench.models.smollm2_mtp import train

    header = read_header(smollm2)
    untrained = tmp_path / "untrained.gguf"
    blocks.save(untrained, blocks.initial(header), {})
    model = Model(assemble(tmp_path / "model.gguf", untrained))
    count = 40
    tokens = np.array(Vocabulary(smollm2).tokenize(TEXT.read_text())[:count], np.int32)
    lane = np.zeros(count)
    with Context(model, context=256) as target, Context(model, context=256, mtp=True) as mtp:
        logits, hidden = (array.copy() for array in target.run(tokens, np.arange(count), lane))
        labels = logits.argmax(axis=1)
        expected, rows = (
            array.copy() for array in mtp.run(tokens[1:], np.arange(1, count), lane[1:], hidden[:-1])
        )
        mtp.trim(0, count - 1)
        mtp.run(tokens[-1:], [count - 1], [0], hidden[-2:-1])
        chained, _ = mtp.run(labels[-1:], [count], [0], rows[-1:])
        chained = chained.copy()
    model.close()
    block, embedding = train.build(header, blocks.read(untrained))
    mask = torch.ones(count - 1, count - 1, dtype=torch.bool).tril()[None, None]
    given = torch.from_numpy(hidden[None, :-1]), torch.from_numpy(tokens[None, 1:].astype(np.int64))
    with torch.no_grad():
        out, past = block(*given, mask)
        found = block.norm(out[0], "nextn.shared_head_norm") @ embedding.T
        # Of the second pass only the last row counts: it sees all of the first pass and itself.
        own = torch.eye(count - 1, dtype=torch.bool)[None, None]
        again = torch.from_numpy(labels[None, 1:].astype(np.int64))
        second, _ = block(out, again, torch.cat([mask, own], dim=-1), past)
        last = block.norm(second[0, -1], "nextn.shared_head_norm") @ embedding.T
    # llama.cpp rounds what goes into each product of matrices to 8 bits, and the second draft has gone through twice
    # as many.
    for ours, theirs in ((found.numpy(), expected), (last.numpy(), chained[0])):
        assert np.sqrt(np.mean((ours - theirs) ** 2)) < 0.1 * theirs.std()


@pytest.mark.slow
def test_the_block_was_trained(smollm2: Path) -> None:
    """An untrained one is right about once in a hundred."""
    counts = evaluate(assemble(), 24, each=1, threads=1, kinds={"math", "roleplay"})
    read = counts.pop("read: prompts")
    assert 0 < read.accepted[0] < read.anchors
    assert {kind: count.anchors for kind, count in counts.items()} == {"math": 22, "roleplay": 22}
    assert sum(count.accepted[0] for count in counts.values()) > 0.2 * 44
