"""Writes tiny models with random weights, of every architecture that llama.cpp can be told about by metadata.

`metadata` says what a model of an architecture is; which tensors it then has is asked of llama.cpp; the file is
written with the `gguf` package. A model has a vocabulary of 96 dummy tokens, no tokenizer, and 6 layers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from meshpipe.llama import gguf as ours
from meshpipe.llama.twin import tensor_shapes

VOCABULARY = 96
LAYERS = 6
TYPES = gguf.GGUFValueType
Key = tuple[Any, TYPES, TYPES | None]
"""A value, its type, and for an array its elements' type."""

EXPERTS = {
    "llama4", "cohere2moe", "grok", "qwen2moe", "qwen3moe", "qwen3vlmoe", "phimoe", "dbrx", "olmoe", "arctic",
    "deepseek", "deepseek2", "glm4moe", "exaone-moe", "bailingmoe", "bailingmoe2", "dots1", "ernie4_5-moe",
    "hunyuan-moe", "hy_v3", "gpt-oss", "smallthinker", "grovemoe", "minimax-m2", "paddleocr", "mimo2",
    "step35", "mistral4", "mellum", "laguna", "maple", "granitemoe", "minimax-m3",
}  # fmt: skip
WINDOWS = {
    "gemma2", "gemma3", "cohere2", "olmo2", "gpt-oss", "plamo3", "smallthinker", "afmoe", "mellum",
    "muse-glimmer", "exaone-moe", "laguna", "llama4", "gemma3n", "mimo2", "step35", "cohere2moe", "maple",
    "granite_swa", "spark2_5", "exaone4", "phi3",
}  # fmt: skip
STATED_PATTERN = {"mimo2", "step35", "maple", "granite_swa", "spark2_5"}
LATENT = {"deepseek2", "mistral4"}
SECTIONS = {"qwen2vl", "qwen3vl", "qwen3vlmoe", "paddleocr", "hunyuan_vl"}
FUSED_ATTENTION = {
    "chatglm", "codeshell", "dbrx", "falcon", "gpt2", "gptneox", "jais", "mpt", "openelm", "phi2", "phi3", "qwen",
    "starcoder",
}  # fmt: skip
ONE_GROUP_PER_HEAD = {"olmoe", "jais", "dots1"}


def metadata(arch: str, layers: int = LAYERS, nextn: int = 0, **changes: Any) -> dict[str, Key]:
    """What a tiny model of `arch` says of itself; keys without the architecture's name in front.

    `changes` replaces values (or adds unsigned integers); None removes a key. `_` stands for a dot.
    """
    u32, f32, i32, flag = TYPES.UINT32, TYPES.FLOAT32, TYPES.INT32, TYPES.BOOL
    keys: dict[str, Key] = {}

    def put(kind: TYPES, **values: Any) -> None:
        for name, content in values.items():
            if isinstance(content, list):
                keys[name.replace("__", ".")] = (content, TYPES.ARRAY, kind)
            else:
                keys[name.replace("__", ".")] = (content, kind, None)

    put(u32, vocab_size=VOCABULARY, context_length=512, embedding_length=128, block_count=layers + nextn)
    put(u32, feed_forward_length=192, attention__head_count=4)
    put(u32, attention__head_count_kv=4 if arch in ONE_GROUP_PER_HEAD else 2)
    put(f32, attention__layer_norm_epsilon=1e-5, attention__layer_norm_rms_epsilon=1e-5)
    put(u32, rope__dimension_count=32)
    put(f32, logit_scale=1.5, attention__clamp_kqv=8.0, attention__max_alibi_bias=8.0, residual_scale=0.8)
    put(f32, embedding_scale=3.0)
    put(flag, use_parallel_residual=False)
    if nextn:
        put(u32, nextn_predict_layers=nextn)
    if arch in EXPERTS:
        put(u32, expert_count=4, expert_used_count=2, expert_feed_forward_length=64, expert_shared_count=1)
        put(u32, expert_shared_feed_forward_length=64, expert_gating_func=2, leading_dense_block_count=1)
        put(u32, interleave_moe_layer_step=1, experts_per_group=1)
        put(f32, expert_group_scale=1.0, swiglu_clamp_exp=7.0)
    if arch in WINDOWS:
        put(u32, attention__sliding_window=8)
    if arch in STATED_PATTERN:
        put(
            flag, attention__sliding_window_pattern=[n % 3 != 2 or n >= layers for n in range(layers + nextn)]
        )
    if arch in LATENT:
        put(u32, attention__q_lora_rank=64, attention__kv_lora_rank=64, attention__head_count_kv=1)
        put(u32, attention__key_length=80, attention__value_length=64, rope__dimension_count=16)
        put(u32, attention__key_length_mla=48, attention__value_length_mla=32)
    if arch in SECTIONS:
        put(i32, rope__dimension_sections=[4, 4, 4, 4])
    if arch in ("qwen3vl", "qwen3vlmoe"):
        put(u32, n_deepstack_layers=3)
    if arch == "dots1":
        put(u32, attention__key_length=32, attention__value_length=32)
    if arch == "mpt":
        put(u32, attention__head_count_kv=4)
    if arch == "apertus":
        ramp = [0.5 + 0.1 * n for n in range(layers)]
        put(f32, xielu__alpha_n=ramp, xielu__alpha_p=ramp, xielu__beta=ramp)
        put(f32, xielu__eps=[1e-6] * layers)
    for name, content in changes.items():
        dotted = name.replace("__", ".")
        if content is None:
            keys.pop(dotted, None)
        elif dotted in keys and not isinstance(content, list):
            keys[dotted] = (content, *keys[dotted][1:])
        else:
            put(
                f32 if isinstance(content, float) else flag if isinstance(content, bool) else u32,
                **{name: content},
            )
    return keys


def write(
    path: Path,
    arch: str,
    keys: dict[str, Key] | None = None,
    *,
    tied: bool = False,
    quantization: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    seed: int = 1,
) -> Path:
    """Writes a model with random weights. `tied`: without an output matrix, if the architecture allows it.

    Matrices have the type `quantization` where their rows are long enough for its blocks.
    """
    keys = metadata(arch) if keys is None else keys
    writer = gguf.GGUFWriter(path, arch)
    fixed = {"general.architecture": arch, "tokenizer.ggml.model": "no_vocab"}
    ask = {key: ours.value(ours.STRING, content) for key, content in fixed.items()}
    writer.add_tokenizer_model("no_vocab")
    for name, (content, kind, element) in keys.items():
        # Of all keys, llama.cpp has these without the architecture's name.
        full = name if name.startswith("xielu.") else f"{arch}.{name}"
        writer.add_key_value(full, content, kind, element)
        ask[full] = ours.value(kind, content) if element is None else ours.array(element, content)
    rng = np.random.default_rng(seed)
    for name, shape in _as_published(arch, tensor_shapes(ask)).items():
        # Scales belong to quantizations that bring them along.
        if name.startswith("rope_f") or name.endswith("scale") or (tied and name == "output.weight"):
            continue
        values = rng.standard_normal(shape[::-1]).astype(np.float32)
        if len(shape) == 1:
            values = 0.1 * values + ("norm" in name)
        else:
            values *= shape[0] ** -0.5
        block, _ = gguf.GGML_QUANT_SIZES[quantization]
        if len(shape) > 1 and shape[0] % block == 0 and quantization != gguf.GGMLQuantizationType.F32:
            writer.add_tensor(name, gguf.quants.quantize(values, quantization), raw_dtype=quantization)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _as_published(arch: str, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The tensors that a published file has: llama.cpp told of metadata alone never fuses q, k and v, and always
    fuses the gates of experts with their upward matrices."""
    result: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        if "ffn_gate_up_exps" in name:
            for part in ("ffn_gate_exps", "ffn_up_exps"):
                result[name.replace("ffn_gate_up_exps", part)] = (shape[0], shape[1] // 2, *shape[2:])
        elif _is_fused(arch, name, shapes) and ".attn_q." in name:
            parts = [shapes[name.replace("attn_q", part)] for part in ("attn_q", "attn_k", "attn_v")]
            fused = (*shape[:-1], sum(part[-1] for part in parts))
            result[name.replace("attn_q", "attn_qkv")] = fused
        elif not _is_fused(arch, name, shapes) or not any(part in name for part in (".attn_k.", ".attn_v.")):
            result[name] = shape
    return result


def _is_fused(arch: str, name: str, shapes: dict[str, tuple[int, ...]]) -> bool:
    """Whether the q, k and v of this tensor's layer are one tensor: of mimo2, in its NextN layers."""
    nextn = f"{name[: name.index('.', 4)]}.nextn.eh_proj.weight" if name.startswith("blk.") else ""
    return arch in FUSED_ATTENTION or (arch == "mimo2" and nextn in shapes)


def tokens(count: int, seed: int = 0) -> list[int]:
    """Random token ids."""
    return [int(token) for token in np.random.default_rng(seed).integers(0, VOCABULARY, count)]
