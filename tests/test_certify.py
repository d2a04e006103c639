"""Certificates: good splits pass, wrong slices fail and are located, and nothing takes this process along."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import reference
import tiny
from attrs import evolve

from meshpipe.errors import ModelError, SplitError
from meshpipe.llama import architectures, certify, gguf, slicing
from meshpipe.llama.architectures import Architecture
from meshpipe.llama.gguf import Header, read_header
from meshpipe.llama.twin import small_metadata, write_twin


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("gemma3") / "gemma3.gguf", "gemma3", tiny.metadata("gemma3", 8))


def run_here(path: Path, boundaries: tuple[int, ...], directory: Path) -> certify.Certificate:
    """What the child process does, here, where the test can break the slicing."""
    directory.mkdir(exist_ok=True)
    return certify._run_twin(read_header(path), boundaries, 0, directory)


# ------------------------------------------------------------------ twins


def test_a_twin_is_small_and_alike(smollm2: Path, tmp_path: Path) -> None:
    write_twin(read_header(smollm2), tmp_path / "twin.gguf")
    model, twin = read_header(smollm2), read_header(tmp_path / "twin.gguf")
    assert list(twin.tensors) == list(model.tensors)
    assert [tensor.kind for tensor in twin.tensors.values()] == [
        tensor.kind for tensor in model.tensors.values()
    ]
    assert twin.integer(".block_count") == 30
    assert (tmp_path / "twin.gguf").stat().st_size < smollm2.stat().st_size / 3
    tokens = tiny.tokens(20)
    logits = reference.unsplit_logits(tmp_path / "twin.gguf", tokens, context=256)
    assert logits.shape == (20, 96)
    assert np.isfinite(logits).all()


def test_a_twin_reads_no_weights(smollm2: Path, tmp_path: Path) -> None:
    """A sparse file with the header of the real model has the same twin."""
    header = read_header(smollm2)
    first = min(tensor.offset for tensor in header.tensors.values())
    hollow = tmp_path / "hollow.gguf"
    with smollm2.open("rb") as source, hollow.open("wb") as file:
        file.write(source.read(first))
        file.truncate(smollm2.stat().st_size)
    write_twin(header, tmp_path / "a.gguf")
    write_twin(read_header(hollow), tmp_path / "b.gguf")
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


def test_a_seed_gives_one_twin(gemma3: Path, tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_twin(read_header(gemma3), tmp_path / name, seed)
    a, b, c = ((tmp_path / name).read_bytes() for name in "abc")
    assert a == b != c


def test_widths_that_differ_between_layers_stay_different(tmp_path: Path) -> None:
    keys = tiny.metadata(
        "openelm", attention__head_count=[8, 4, 2, 2, 8, 2], attention__head_count_kv=[2, 1, 1, 2, 4, 1],
        feed_forward_length=[64, 96, 128, 160, 192, 224], attention__key_length=32, attention__value_length=32,
    )  # fmt: skip
    header = read_header(tiny.write(tmp_path / "m.gguf", "openelm", keys))
    small = small_metadata(header)
    widths = small["openelm.feed_forward_length"].decode()
    assert len(set(widths)) == 6
    assert widths == sorted(widths)
    heads, groups = (small[f"openelm.attention.{key}"].decode() for key in ("head_count", "head_count_kv"))
    assert all(a % b == 0 for a, b in zip(heads, groups, strict=True))
    assert run_here(header.path, (0, 2, 6), tmp_path).passed


# ------------------------------------------------------------------ certificates


def test_a_good_split_passes_and_is_remembered(
    gemma3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = certify.certify(gemma3, (0, 1, 5, 8), cache=tmp_path)
    assert first.passed, first.describe()
    assert first.rows == sum(width for width, _ in certify.DECODES)
    assert len(list(tmp_path.iterdir())) == 1

    def again(*_: object) -> certify.Certificate:
        raise AssertionError("certified twice")

    monkeypatch.setattr(certify, "_in_child", again)
    assert certify.certify(gemma3, (0, 1, 5, 8), cache=tmp_path) == first
    for other in ((0, 2, 8), (0, 5, 8)):
        with pytest.raises(AssertionError, match="certified twice"):
            certify.certify(gemma3, other, cache=tmp_path)


@pytest.mark.parametrize("damage", ["", "{", '{"a": 1}', "[]", '{"boundaries": 3}', "\0"])
def test_a_damaged_memory_is_certified_again(
    damage: str, gemma3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        certify, "_in_child", lambda header, split, seed: certify.Certificate("x", split, rows=seed)
    )
    first = certify.certify(gemma3, (0, 8), cache=tmp_path)
    (remembered,) = tmp_path.iterdir()
    remembered.write_text(damage)
    assert certify.certify(gemma3, (0, 8), cache=tmp_path) == first
    assert list(tmp_path.iterdir()) == [remembered]


@pytest.mark.parametrize(
    ("arch", "broken", "boundaries", "cut", "layer"),
    [
        # Gemma 3 attends globally in layer 5; alone, the second stage would do so in its sixth layer.
        ("gemma3", {"window_period": 0}, (0, 3, 8), 8, 5),
        # RoPE is left out in every fourth layer: the second stage would leave it out in layer 5.
        ("smollm3", {"cut_period": 1}, (0, 2, 8), 8, 3),
        # Granite multiplies what comes in.
        ("granite", {"scales_input": False}, (0, 3, 6), 6, 3),
        # A first layer that normalizes what comes in.
        ("bloom", {"refused": ""}, (0, 2, 4, 6), 4, 2),
    ],
)
def test_a_wrong_rule_fails_and_is_located(
    arch: str,
    broken: dict[str, object],
    boundaries: tuple[int, ...],
    cut: int,
    layer: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tiny.write(tmp_path / "m.gguf", arch, tiny.metadata(arch, boundaries[-1]))
    monkeypatch.setitem(
        architectures.ARCHITECTURES, arch, evolve(architectures.ARCHITECTURES[arch], **broken)
    )
    certificate = run_here(path, boundaries, tmp_path / "twin")
    assert not certificate.passed
    assert (certificate.cut, certificate.layer) == (cut, layer), certificate.describe()
    assert f"the first layer to differ is {layer}" in certificate.describe()


def test_leading_dense_blocks_that_are_not_cut_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny.write(
        tmp_path / "m.gguf", "deepseek2", tiny.metadata("deepseek2", leading_dense_block_count=2)
    )
    original = architectures.slice_metadata

    def forgetful(header: Header, start: int, stop: int, nextn: bool) -> dict[str, gguf.Value]:
        result = original(header, start, stop, nextn)
        return {**result, "deepseek2.leading_dense_block_count": gguf.value(gguf.U32, 2)}

    monkeypatch.setattr(architectures, "slice_metadata", forgetful)
    with pytest.raises(ModelError, match="could not load"):
        run_here(path, (0, 2, 6), tmp_path / "twin")


def test_swapped_layers_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny.write(tmp_path / "m.gguf", "llama")
    original = slicing._plan

    def swapped(header: Header, start: int, stop: int, *rest: object) -> slicing._Plan:
        plan = original(header, start, stop, *rest)  # type: ignore[arg-type]
        if (start, stop) == (0, 6):
            return plan
        copies = list(plan.copies)
        named = {tensor.name: number for number, (tensor, _) in enumerate(copies)}
        a, b = (named.get(f"blk.{layer}.ffn_up.weight") for layer in (4, 5))
        if a is not None and b is not None:
            (first, at), (second, other) = copies[a], copies[b]
            copies[a], copies[b] = (second, at), (first, other)
        return evolve(plan, copies=copies)

    monkeypatch.setattr(slicing, "_plan", swapped)
    certificate = run_here(path, (0, 3, 6), tmp_path / "twin")
    assert not certificate.passed
    assert certificate.cut == 6


@pytest.mark.slow
def test_an_abort_of_the_twin_is_a_failed_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child process is told to allow what llama.cpp aborts on: this process survives and says why."""
    path = tiny.write(tmp_path / "m.gguf", "cohere2")
    code = (
        "import sys; from attrs import evolve; from meshpipe.llama import architectures, certify\n"
        "rows = architectures.ARCHITECTURES\n"
        "rows['cohere2'] = evolve(rows['cohere2'], needs_window=False); certify._main()"
    )
    original = subprocess.run

    def run(command: list[str], **options: object) -> object:
        assert command == [sys.executable, "-m", "meshpipe.llama.certify"]
        return original([sys.executable, "-c", code], **options)  # type: ignore[call-overload]

    lenient = evolve(architectures.ARCHITECTURES["cohere2"], needs_window=False)
    monkeypatch.setitem(architectures.ARCHITECTURES, "cohere2", lenient)
    monkeypatch.setattr(certify.subprocess, "run", run)
    certificate = certify.certify(path, (0, 3, 4, 6), cache=tmp_path)
    assert not certificate.passed
    assert "exit status -6" in certificate.failure
    assert "GGML_ASSERT" in certificate.failure


def test_what_metadata_refuse_is_not_run(gemma3: Path, tmp_path: Path) -> None:
    with pytest.raises(SplitError, match="end with 8"):
        certify.certify(gemma3, (0, 9), cache=tmp_path)
    path = tiny.write(tmp_path / "m.gguf", "bloom")
    with pytest.raises(ModelError, match="cannot be split"):
        certify.certify(path, (0, 3, 6), cache=tmp_path)


def test_unknown_architectures_are_certified_and_known_ones_are_not(
    gemma3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its row removed, Gemma 3 is an architecture that nobody has described yet."""
    asked: list[tuple[int, ...]] = []

    def ask(header: Header, boundaries: tuple[int, ...], seed: int) -> certify.Certificate:
        asked.append(boundaries)
        return certify.Certificate(header.architecture, boundaries, failure="the logits differ")

    monkeypatch.setattr(certify, "_in_child", ask)
    assert certify.ensure_certified(gemma3, (0, 3, 8)) is None
    monkeypatch.setitem(architectures.ARCHITECTURES, "gemma3", Architecture())
    assert certify.ensure_certified(gemma3, (0, 8)) is None
    assert asked == []
    with pytest.raises(ModelError, match="is not what the whole model is: the logits differ"):
        certify.ensure_certified(gemma3, (0, 3, 8))
    assert asked == [(0, 3, 8)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "arch", sorted(a for a, rules in architectures.ARCHITECTURES.items() if rules.tested)
)
def test_every_tested_architecture_has_a_twin_that_passes(arch: str, tmp_path: Path) -> None:
    layers = 16 if arch == "smallthinker" else 12 if architectures.ARCHITECTURES[arch].cut_period > 1 else 6
    boundaries = {16: (0, 8, 16), 12: (0, 4, 12), 6: (0, 3, 6)}[layers]
    path = tiny.write(tmp_path / "m.gguf", arch, tiny.metadata(arch, layers))
    certificate = certify.certify(path, boundaries, cache=tmp_path / "certificates")
    assert certificate.passed, certificate.describe()


@pytest.mark.slow
def test_certifying_the_real_model_takes_seconds(smollm2: Path, tmp_path: Path) -> None:
    certificate = certify.certify(smollm2, (0, 1, 15, 29, 30), cache=tmp_path)
    assert certificate.passed, certificate.describe()


@pytest.mark.slow
def test_the_size_of_a_model_does_not_matter(tmp_path: Path) -> None:
    """A 70B Llama that is all header, in a sparse file of 40 GiB: four stages certified in under 30 s."""
    q4, q6, width = 12, 14, 8192
    tensors: list[tuple[str, tuple[int, ...], int]] = [
        ("token_embd.weight", (width, 128256), q4), ("output_norm.weight", (width,), 0),
        ("output.weight", (width, 128256), q6), ("rope_freqs.weight", (64,), 0),
    ]  # fmt: skip
    for layer in range(80):
        tensors += [
            (f"blk.{layer}.{name}.weight", shape, kind)
            for name, shape, kind in (
                ("attn_norm", (width,), 0), ("ffn_norm", (width,), 0), ("attn_q", (width, width), q4),
                ("attn_k", (width, 1024), q4), ("attn_v", (width, 1024), q6), ("attn_output", (width, width), q4),
                ("ffn_gate", (width, 28672), q4), ("ffn_up", (width, 28672), q4),
                ("ffn_down", (28672, width), q6 if layer % 2 else q4),
            )
        ]  # fmt: skip
    numbers = {
        "vocab_size": 128256, "context_length": 131072, "embedding_length": width, "block_count": 80,
        "feed_forward_length": 28672, "attention.head_count": 64, "attention.head_count_kv": 8,
        "rope.dimension_count": 128,
    }  # fmt: skip
    metadata = {f"llama.{key}": gguf.value(gguf.U32, number) for key, number in numbers.items()}
    metadata["llama.attention.layer_norm_rms_epsilon"] = gguf.value(gguf.F32, 1e-5)
    metadata["general.architecture"] = gguf.value(gguf.STRING, "llama")
    path = tmp_path / "large.gguf"
    encoded, _, length = gguf.encode_header(metadata, tensors)
    with path.open("wb") as file:
        file.write(encoded)
        file.truncate(length)
    began = time.perf_counter()
    certificate = certify.certify(path, (0, 20, 40, 60, 80), cache=tmp_path)
    assert certificate.passed, certificate.describe()
    assert time.perf_counter() - began < 30
