"""Slices of every architecture that this project can write give the whole model's logits, bit for bit."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import reference
import tiny

from meshpipe.errors import ModelError, SplitError
from meshpipe.llama import architectures
from meshpipe.llama.gguf import read_header
from meshpipe.llama.slicing import slice_model

WIDTHS = (17, 1, 1, 5, 2)
TOKENS = tiny.tokens(30)

# In order of how much they differ from llama.
FAST = (
    "llama", "qwen2", "qwen3", "qwen3moe", "gemma3", "phi3", "mimo2", "deepseek2", "glm4moe", "granite", "gpt-oss",
    "gpt2", "step35",
)  # fmt: skip
OTHERS = sorted(
    arch for arch, rules in architectures.ARCHITECTURES.items() if rules.tested and arch not in FAST
)
ONE_LAYER_STAGES = (0, 1, 2, 3, 4, 5, 6)
UNEVEN = (0, 1, 3, 6)
# The boundaries that these architectures have, where not every layer can be one.
BOUNDARIES = {
    "llama4": [(0, 4, 8, 12), (0, 8, 12)],
    "smollm3": [(0, 4, 8, 12), (0, 8, 12)],
    "smallthinker": [(0, 8, 16)],
    "cohere2": [(0, 1, 3, 6), (0, 2, 4, 6)],
    "cohere2moe": [(0, 2, 4, 6), (0, 3, 6)],
    "exaone-moe": [(0, 1, 3, 6), (0, 2, 4, 6)],
    "maple": [(0, 1, 3, 6), (0, 2, 4, 6)],
}


def assert_split_equals_whole(
    path: Path, boundaries: tuple[int, ...], whole: reference.Floats, *, mtp: bool = False
) -> None:
    pairs = list(itertools.pairwise(boundaries))
    slices = [slice_model(path, start, stop, mtp=mtp, cache=path.parent / "slices") for start, stop in pairs]
    tap = architectures.row(read_header(path)).boundary
    lengths = [stop - start for start, stop in pairs]
    split = reference.split_logits(slices, lengths, TOKENS, WIDTHS, context=256, trims=True, tap=tap)
    np.testing.assert_array_equal(split, whole, err_msg=f"split {boundaries}")


def whole_logits(path: Path) -> reference.Floats:
    whole = reference.unsplit_logits(path, TOKENS, WIDTHS, context=256)
    assert np.isfinite(whole).all()
    # The model must care: about its input, and about the order of its layers.
    assert np.ptp(whole, axis=0).min() > 1e-3
    return whole


def check(arch: str, directory: Path) -> None:
    boundaries = BOUNDARIES.get(arch, [ONE_LAYER_STAGES, UNEVEN])
    path = tiny.write(directory / f"{arch}.gguf", arch, tiny.metadata(arch, boundaries[0][-1]))
    whole = whole_logits(path)
    for split in boundaries:
        assert_split_equals_whole(path, split, whole)


@pytest.mark.parametrize("arch", FAST)
def test_split_equals_whole(arch: str, tmp_path: Path) -> None:
    check(arch, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("arch", OTHERS)
def test_split_equals_whole_for_other_architectures(arch: str, tmp_path: Path) -> None:
    check(arch, tmp_path)


@pytest.mark.parametrize("cuts", [(0, 1, 8), (0, 5, 8), (0, 6, 8), (0, 7, 8), (0, 2, 3, 8)])
def test_sliding_windows_at_cuts_off_the_pattern(cuts: tuple[int, ...], tmp_path: Path) -> None:
    """Gemma 3 attends globally in every sixth layer; the window of 8 is well below the 30 tokens."""
    path = tiny.write(tmp_path / "m.gguf", "gemma3", tiny.metadata("gemma3", 8))
    whole = whole_logits(path)
    assert_split_equals_whole(path, cuts, whole)


def test_a_wrong_window_pattern_would_be_seen(tmp_path: Path) -> None:
    """That layers have their pattern matters for these logits: the tests above can fail."""
    path = tiny.write(tmp_path / "m.gguf", "gemma3")
    keys = tiny.metadata("gemma3", attention__sliding_window_pattern=[True] * tiny.LAYERS)
    other = tiny.write(tmp_path / "other.gguf", "gemma3", keys)
    assert not np.array_equal(whole_logits(path), whole_logits(other))


@pytest.mark.parametrize("period", [2, 3])
def test_a_stated_period_is_cut_like_the_implied_one(period: int, tmp_path: Path) -> None:
    keys = tiny.metadata("gemma3", attention__sliding_window_pattern=period)
    path = tiny.write(tmp_path / "m.gguf", "gemma3", keys)
    assert_split_equals_whole(path, UNEVEN, whole_logits(path))


@pytest.mark.parametrize(
    "arch",
    [
        "mimo2",
        "glm4moe",
        *(pytest.param(arch, marks=pytest.mark.slow) for arch in ("deepseek2", "step35", "hy_v3")),
    ],
)
@pytest.mark.parametrize("mtp", [False, True])
def test_nextn_layers_are_left_out_or_kept_in_the_last_stage(arch: str, mtp: bool, tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "m.gguf", arch, tiny.metadata(arch, nextn=1))
    assert_split_equals_whole(path, (0, 2, 5, 6), whole_logits(path), mtp=mtp)
    last = read_header(slice_model(path, 5, 6, mtp=mtp, cache=tmp_path / "slices"))
    middle = read_header(slice_model(path, 2, 5, mtp=mtp, cache=tmp_path / "slices"))
    assert architectures.trunk_layers(middle) == 3
    assert not any("nextn" in name for name in middle.tensors)
    assert any(name.startswith("blk.1.nextn.") for name in last.tensors) == mtp
    assert architectures.nextn_layers(last) - (not mtp and architectures.nextn_layers(last)) == mtp


@pytest.mark.parametrize("lead", [0, 2, 6])
def test_leading_dense_blocks(lead: int, tmp_path: Path) -> None:
    keys = tiny.metadata("deepseek2", leading_dense_block_count=lead)
    path = tiny.write(tmp_path / "m.gguf", "deepseek2", keys)
    assert_split_equals_whole(path, UNEVEN, whole_logits(path))
    counts = [
        read_header(slice_model(path, start, stop, cache=tmp_path / "slices")).get(
            ".leading_dense_block_count", 0
        )
        for start, stop in ((0, 1), (1, 3), (3, 6))
    ]
    assert counts == {0: [0, 0, 0], 2: [1, 1, 0], 6: [1, 2, 3]}[lead]


@pytest.mark.slow
def test_deepseek2_lite_is_told_by_its_number_of_layers(tmp_path: Path) -> None:
    """27 layers mean no low-rank query: slices must say so, and no slice of another model may have 27."""
    keys = tiny.metadata("deepseek2", 27, attention__q_lora_rank=None, expert_gating_func=None)
    path = tiny.write(tmp_path / "lite.gguf", "deepseek2", keys)
    assert_split_equals_whole(path, (0, 10, 27), whole_logits(path))
    other = tiny.write(tmp_path / "m.gguf", "deepseek2", tiny.metadata("deepseek2", 30))
    with pytest.raises(SplitError, match="27 layers"):
        slice_model(other, 0, 27, cache=tmp_path)


def test_minicpm_scales_residuals_by_its_number_of_layers(tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "m.gguf", "minicpm", tiny.metadata("minicpm", residual_scale=None))
    assert_split_equals_whole(path, UNEVEN, whole_logits(path))


def test_interleaved_experts_bind_the_cuts(tmp_path: Path) -> None:
    path = tiny.write(
        tmp_path / "m.gguf", "ernie4_5-moe", tiny.metadata("ernie4_5-moe", interleave_moe_layer_step=2)
    )
    assert_split_equals_whole(path, (0, 2, 6), whole_logits(path))
    with pytest.raises(SplitError, match="multiples of 2"):
        slice_model(path, 0, 3, cache=tmp_path)


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "F16"])
@pytest.mark.parametrize("tied", [False, True])
def test_tensor_types_and_tied_heads(kind: str, tied: bool, tmp_path: Path) -> None:
    quantization = tiny.gguf.GGMLQuantizationType[kind]
    path = tiny.write(tmp_path / "m.gguf", "llama", tied=tied, quantization=quantization)
    assert_split_equals_whole(path, UNEVEN, whole_logits(path))


def test_per_layer_arrays_are_cut(tmp_path: Path) -> None:
    keys = tiny.metadata(
        "openelm", attention__head_count=[4, 4, 2, 2, 4, 2], attention__head_count_kv=[2, 1, 1, 2, 4, 1],
        feed_forward_length=[64, 96, 128, 160, 192, 224], attention__key_length=32, attention__value_length=32,
    )  # fmt: skip
    path = tiny.write(tmp_path / "m.gguf", "openelm", keys)
    assert_split_equals_whole(path, UNEVEN, whole_logits(path))
    header = read_header(slice_model(path, 1, 3, cache=tmp_path / "slices"))
    assert header.get(".feed_forward_length") == [96, 128]
    assert header.get(".attention.head_count_kv") == [1, 1]


@pytest.mark.parametrize(
    ("arch", "changes", "reason"),
    [
        ("gemma2", {}, "scales or normalizes"),
        ("gemma", {}, "scales or normalizes"),
        ("bloom", {}, "scales or normalizes"),
        ("cogvlm", {}, "image"),
        ("glm4", {}, "RoPE sections"),
        ("llama4", {"attention__sliding_window": 0}, "without attention chunks"),
    ],
)
def test_what_cannot_be_split_is_refused_from_its_metadata(
    arch: str, changes: dict[str, int], reason: str, tmp_path: Path
) -> None:
    path = tiny.write(tmp_path / "m.gguf", arch, tiny.metadata(arch, **changes))
    with pytest.raises(ModelError, match=f"cannot be split: .*{reason}"):
        slice_model(path, 0, 3, cache=tmp_path)
    # Whole, it can be run.
    assert read_header(slice_model(path, 0, 6, cache=tmp_path)).architecture == arch


def test_gemma3_with_62_layers_has_an_attention_scale_of_its_own(tmp_path: Path) -> None:
    keys = tiny.metadata(
        "gemma3", 62, attention__key_length=64, attention__value_length=64, rope__dimension_count=64
    )
    path = tiny.write(tmp_path / "m.gguf", "gemma3", keys)
    with pytest.raises(ModelError, match="62 layers"):
        slice_model(path, 0, 31, cache=tmp_path)


def test_a_stage_without_a_window_is_refused_where_llama_cpp_would_abort(tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "m.gguf", "cohere2")
    with pytest.raises(SplitError, match="no sliding window"):
        slice_model(path, 3, 4, cache=tmp_path)


def test_boundaries_off_the_rope_period_are_refused(tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "m.gguf", "smollm3", tiny.metadata("smollm3", 8))
    with pytest.raises(SplitError, match="multiples of 4"):
        slice_model(path, 2, 8, cache=tmp_path)
    assert_split_equals_whole(path, (0, 4, 8), whole_logits(path))
