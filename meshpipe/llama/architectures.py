"""What a layer range of each architecture needs so that llama.cpp runs it as it runs the whole model.

Most of it is the same for all: a slice declares fewer layers, and every per-layer array is cut. What is not
the same follows from how llama.cpp derives a layer's behaviour from its absolute index or from the number of
layers; one row of `ARCHITECTURES` states that for an architecture. An architecture without a row is sliced
by the common rules alone, and is trusted only after `meshpipe.llama.certify` has shown that they suffice.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import numpy as np
from attrs import frozen

from meshpipe.errors import ModelError, SplitError
from meshpipe.llama import gguf
from meshpipe.llama.gguf import Header, Value


@frozen
class Architecture:
    """One architecture's row.

    `refused`: why it cannot be split at all.

    `window_period`: every n-th layer attends globally, the others through a sliding window, unless the metadata
    state another pattern (0: no such rule). The global layer is the last of a period, or the first with
    `dense_first`. `window_always`: the pattern holds even if the metadata name no window size. `needs_window`:
    every stage must have a layer with a window (llama.cpp aborts on positions that no layer uses, and global
    layers may have no RoPE).

    `cut_period`: something that no metadata can shift repeats every n layers (RoPE is left out, say), so that
    only multiples of n can be boundaries.

    `special_counts`: numbers of layers by which llama.cpp recognises a particular model and treats it in its own
    way. A stage must not have that many layers, and a model that has cannot be split, unless `stated` says in
    metadata what its number of layers implied: it gives keys and values from the whole model's header.

    `scales_input`: incoming rows are multiplied by `embedding_scale`, so that other stages than the first must
    state none. `needs_sections`: activations are taken only when the RoPE sections are stated; with text all
    sections have the same position, so that any sections give the same rotation.

    `nextn`: with how many NextN layers llama.cpp can draft (more abort, or are left unused); 0: it has no graph for
    them.

    `boundary`: the graph node with the rows that leave the last layer, by the layer's number in the slice.

    `tested`: this project's tests compare its slices with the whole model, bit for bit.
    """

    refused: str = ""
    window_period: int = 0
    dense_first: bool = False
    window_always: bool = False
    needs_window: bool = False
    cut_period: int = 1
    special_counts: tuple[int, ...] = ()
    stated: Callable[[Header], dict[str, Value]] | None = None
    scales_input: bool = False
    needs_sections: bool = False
    nextn: int = 0
    boundary: str = "l_out-{}"
    tested: bool = False


def _minicpm(header: Header) -> dict[str, Value]:
    """The default residual scale, which shrinks with the number of layers."""
    if header.get(".residual_scale") is not None:
        return {}
    scale = np.float32(1.4) / np.sqrt(np.float32(trunk_layers(header)))
    return {".residual_scale": gguf.value(gguf.F32, float(scale))}


def _deepseek2(header: Header) -> dict[str, Value]:
    """The "lite" models have no low-rank query, and GLM 4.7 Lite a gating function that older files omit."""
    layers, vocabulary = trunk_layers(header), vocabulary_size(header)
    result = {}
    if layers in (26, 27) or (layers == 48 and vocabulary == 128256):
        result[".attention.q_lora_rank"] = gguf.value(gguf.U32, 0)
    if not header.get(".expert_gating_func"):
        sigmoid = layers in (47, 48) and vocabulary == 154880
        result[".expert_gating_func"] = gguf.value(gguf.U32, 2 if sigmoid else 1)
    return result


_RECURRENT = "it keeps a recurrent state, which cannot be taken back to an earlier position"
_ENCODER = "it is an encoder; it does not generate text from left to right"
_DIFFUSION = "it generates by diffusion, not from left to right"
_STREAMS = "more than one row per token passes from layer to layer"
_SHARED = "its layers use results of earlier layers besides the row that passes between them"
_INPUT = "llama.cpp scales or normalizes whatever comes into its first layer, activations too"
_IMAGE = "llama.cpp takes incoming activations for an image"
_DRAFT = "it is the draft half of another model"
_LOOPS = "it runs its layers several times"
_OTHER = "it is not a text-to-text language model"

_NOT_EVEN_WHOLE = frozenset({_RECURRENT, _ENCODER, _DIFFUSION, _DRAFT, _OTHER})

_PLAIN = Architecture(tested=True)
_LARGE = tuple(range(64, 513))
_ANY = 512

ARCHITECTURES: dict[str, Architecture] = {
    **dict.fromkeys(
        (
            "llama", "deci", "falcon", "gpt2", "gptneox", "mpt", "starcoder", "refact", "stablelm", "qwen", "qwen2",
            "qwen2moe", "qwen2vl", "qwen3", "qwen3moe", "qwen3vl", "qwen3vlmoe", "phi2", "phi3", "phimoe", "plamo",
            "codeshell", "orion", "internlm2", "starcoder2", "xverse", "dbrx", "olmo", "olmoe", "openelm", "arctic",
            "deepseek", "chatglm", "bitnet", "jais", "jais2", "nemotron", "exaone", "bailingmoe", "bailingmoe2",
            "dots1", "arcee", "ernie4_5", "ernie4_5-moe", "hunyuan-moe", "hunyuan-dense", "hunyuan_vl",
            "seed_oss", "grovemoe", "apertus", "minimax-m2", "pangu-embedded", "mistral3", "mistral4", "paddleocr",
            "maincoder", "spark2_5",
        ),
        _PLAIN,
    ),
    **dict.fromkeys(("mimo2", "hy_v3"), Architecture(nextn=_ANY, tested=True)),
    "deepseek2": Architecture(special_counts=(26, 27, 47, 48), stated=_deepseek2, nextn=1, tested=True),
    "command-r": Architecture(special_counts=_LARGE, tested=True),
    "baichuan": Architecture(special_counts=(32, 40), tested=True),
    "minicpm": Architecture(scales_input=True, stated=_minicpm, tested=True),
    "granite": Architecture(scales_input=True, tested=True),
    "granitemoe": Architecture(scales_input=True, tested=True),
    "granite_swa": Architecture(scales_input=True, tested=True),
    "grok": Architecture(scales_input=True, tested=True),
    "gemma3": Architecture(window_period=6, special_counts=(62,), tested=True),
    "cohere2": Architecture(window_period=4, window_always=True, needs_window=True, tested=True),
    "cohere2moe": Architecture(
        window_period=4, window_always=True, needs_window=True, dense_first=True, nextn=1, tested=True
    ),
    "maple": Architecture(needs_window=True, tested=True),
    "olmo2": Architecture(window_period=4, tested=True),
    "gpt-oss": Architecture(window_period=2, window_always=True, tested=True),
    "plamo3": Architecture(window_period=8, tested=True),
    "mellum": Architecture(window_period=4, tested=True),
    "exaone4": Architecture(special_counts=(64,), tested=True),
    "exaone-moe": Architecture(window_period=4, window_always=True, needs_window=True, tested=True),
    "laguna": Architecture(window_period=4, dense_first=True, tested=True),
    "smollm3": Architecture(cut_period=4, tested=True),
    "smallthinker": Architecture(
        window_period=4, dense_first=True, cut_period=4, special_counts=(4,), tested=True
    ),
    "llama4": Architecture(window_period=4, window_always=True, cut_period=4, tested=True),
    "step35": Architecture(boundary="h_nextn", nextn=_ANY, tested=True),
    "glm4moe": Architecture(needs_sections=True, nextn=1, tested=True),
    **dict.fromkeys(("gemma", "gemma2", "afmoe", "bloom", "minicpm3", "muse-glimmer"), Architecture(_INPUT)),
    "talkie": Architecture("its layers use the embedding besides the row that passes between them"),
    **dict.fromkeys(("gemma3n", "deepseek4", "glm5-next", "hy_v4", "qwen4exp"), Architecture(_STREAMS)),
    **dict.fromkeys(("gemma4", "glm-dsa", "dots3note"), Architecture(_SHARED)),
    "kimi-k3": Architecture(_SHARED),
    **dict.fromkeys(("nanbeige", "hrm_text"), Architecture(_LOOPS)),
    **dict.fromkeys(("cogvlm", "graniteswitch"), Architecture(_IMAGE)),
    **dict.fromkeys(("gemma4-assistant", "eagle3", "dflash"), Architecture(_DRAFT)),
    **dict.fromkeys(
        (
            "mamba", "mamba2", "jamba", "falcon-h1", "granitehybrid", "nemotron_h", "nemotron_h_moe", "plamo2",
            "lfm2", "lfm2moe", "qwen3next", "qwen35", "qwen35moe", "kimi-linear", "bailingmoe3", "minimax-01",
            "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7",
        ),
        Architecture(_RECURRENT),
    ),
    **dict.fromkeys(
        (
            "bert", "modern-bert", "nomic-bert", "nomic-bert-moe", "neo-bert", "jina-bert-v2", "jina-bert-v3",
            "eurobert", "gemma-embedding", "llama-embed", "t5", "t5encoder",
        ),
        Architecture(_ENCODER),
    ),
    **dict.fromkeys(("dream", "llada", "llada-moe", "rnd1"), Architecture(_DIFFUSION)),
    **dict.fromkeys(
        ("clip", "chameleon", "wavtokenizer-dec", "deepseek2-ocr", "qwen3tts", "pockettts"), Architecture(_OTHER)
    ),
}  # fmt: skip

_RECURRENT_TENSORS = re.compile(r"blk\.\d+\.(ssm_|time_mix_|shortconv|channel_mix_)")
_NOT_PER_LAYER = frozenset({".rope.dimension_sections"})
# Extra inputs for image tokens, beside the row of a text token: zeros for text, and no part of an activation.
_IMAGE_KEYS = {".n_deepstack_layers", ".deepstack_mapping"}


def row(header: Header) -> Architecture:
    """The row of the model's architecture; the empty row for one that has none."""
    return ARCHITECTURES.get(header.architecture, Architecture())


def boundary(architecture: str, layers: int) -> str:
    """Name of the graph node whose rows leave the last of a slice's `layers` layers."""
    return ARCHITECTURES.get(architecture, Architecture()).boundary.format(layers - 1)


def trunk_layers(header: Header) -> int:
    """Number of layers that a split divides: all but the NextN layers. Raises ModelError."""
    layers = header.integer(".block_count") - nextn_layers(header)
    if not 0 < layers <= 512:
        raise ModelError(f"{header.path}: should have 1 to 512 layers before its NextN layers, not {layers}")
    return layers


def cache_elements(header: Header, layer: int) -> tuple[int, int]:
    """Keys and values, in numbers, that a layer's cache holds for each position; none for a layer without attention."""

    def at(key: str, default: int) -> int:
        found = header.get(key, default)
        return int(found[layer] if isinstance(found, list) else found)

    heads = at(".attention.head_count", 0)
    if not heads:
        return 0, 0
    width = header.integer(".embedding_length") // heads
    groups = at(".attention.head_count_kv", heads)
    return groups * at(".attention.key_length", width), groups * at(".attention.value_length", width)


def nextn_layers(header: Header) -> int:
    """Number of NextN (multi-token prediction) layers behind the trunk."""
    return header.integer(".nextn_predict_layers", 0)


def draft_heads(header: Header) -> int:
    """With how many NextN layers that the file holds llama.cpp can draft."""
    declared = nextn_layers(header)
    trunk = header.integer(".block_count") - declared
    held = sum(
        f"blk.{number}.nextn.eh_proj.weight" in header.tensors for number in range(trunk, trunk + declared)
    )
    return held if held == declared and declared <= row(header).nextn else 0


def drafts_apart(architecture: str) -> bool:
    """Whether NextN layers need a file of their own: llama.cpp's MTP graph aborts on the RoPE sections that a stage
    needs to take activations."""
    return ARCHITECTURES.get(architecture, Architecture()).needs_sections


def gives_hidden_rows(architecture: str) -> bool:
    """Whether llama.cpp gives the rows before the final norm, which NextN layers take."""
    return ARCHITECTURES.get(architecture, Architecture()).nextn > 0


def vocabulary_size(header: Header) -> int:
    """Number of tokens, from the embedding's rows. Raises ModelError for a file without weights."""
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(
            f"{header.path}: has no token embedding (a vocabulary-only file, or not a text model); "
            "a complete model is needed"
        )
    return embedding.shape[1]


def refusal(header: Header, whole: bool = False) -> str:
    """Why the model cannot be split, in words that follow a colon; empty if it can.

    `whole`: why it cannot be run even in one piece.
    """
    rules = row(header)
    if rules.refused and (rules.refused in _NOT_EVEN_WHOLE or not whole):
        return rules.refused
    if header.get(".attention.causal") is False or header.get(".pooling_type", 0):
        return _ENCODER
    if any(_RECURRENT_TENSORS.match(name) for name in header.tensors):
        return _RECURRENT
    if whole:
        return ""
    layers = trunk_layers(header)
    if layers in rules.special_counts and rules.stated is None and not _ordinary(header):
        return f"llama.cpp treats {layers} layers of {header.architecture} in a way that fewer layers cannot have"
    if header.architecture == "glm4" and not all((header.get(".rope.dimension_sections") or [0, 0])[:2]):
        return "llama.cpp aborts on activations for glm4 without RoPE sections (a multimodal conversion has them)"
    if header.architecture == "llama4" and header.get(".attention.sliding_window") == 0:
        return "without attention chunks, which layer goes without RoPE depends on the number of layers"
    return ""


def _ordinary(header: Header) -> bool:
    """Whether a special number of layers makes no difference: Gemma 3's 27B, whose attention has its own scale."""
    heads = header.get(".attention.head_count")
    return (
        header.architecture == "gemma3"
        and isinstance(heads, int)
        and header.integer(".embedding_length") // heads == header.get(".attention.key_length")
    )


def cut_period(header: Header) -> int:
    """Boundaries must be multiples of this number of layers."""
    step = header.get(".interleave_moe_layer_step", 1)
    return math.lcm(row(header).cut_period, step if isinstance(step, int) and step > 0 else 1)


def check_range(header: Header, start: int, stop: int) -> None:
    """Raises ModelError for a model that cannot be split, SplitError for a range that no stage can have."""
    layers = trunk_layers(header)
    vocabulary_size(header)
    name = header.path.name
    if "meshpipe.slice.start" in header.metadata:
        raise ModelError(f"{header.path}: is a slice already; slice the whole model")
    if not 0 <= start < stop <= layers:
        raise SplitError(
            f"layers {start}:{stop} are no range of {name}, which has layers 0:{layers}; "
            f"give 0 <= start < stop <= {layers}"
        )
    present = {tensor.layer for tensor in header.tensors.values()}
    if missing := [number for number in range(start, stop) if number not in present]:
        raise ModelError(f"{header.path}: has no tensors of layer {missing[0]}; a complete model is needed")
    whole = (start, stop) == (0, layers)
    if reason := refusal(header, whole):
        raise ModelError(f"{name} ({header.architecture}) cannot be {'used' if whole else 'split'}: {reason}")
    check_stage(header, start, stop)


def check_stage(header: Header, start: int, stop: int) -> None:
    """Raises SplitError if the rules of the architecture allow no stage with the layers `[start, stop)`."""
    rules, name = row(header), f"{header.path.name} ({header.architecture})"
    layers, period = trunk_layers(header), cut_period(header)
    if (start, stop) == (0, layers):
        return
    if start % period or (stop % period and stop < layers):
        raise SplitError(f"boundaries of {name} must be multiples of {period} layers, unlike {start}:{stop}")
    if stop - start in rules.special_counts:
        raise SplitError(
            f"no stage of {name} can have {stop - start} layers: llama.cpp would take it for a particular model "
            "of that size; move a boundary"
        )
    pattern = window_pattern(header)
    if rules.needs_window and pattern and not any(pattern[start:stop]):
        raise SplitError(
            f"layers {start}:{stop} of {name} have no sliding window, and llama.cpp cannot run such layers alone; "
            "move a boundary"
        )


def window_pattern(header: Header) -> list[bool] | None:
    """Which layers, NextN layers included, attend through a sliding window; None where no layer does."""
    rules = row(header)
    layers, extra = trunk_layers(header), nextn_layers(header)
    stated = header.get(".attention.sliding_window_pattern")
    if isinstance(stated, list):
        return [bool(number) for number in stated] if any(stated) else None
    if not header.get(".attention.sliding_window", 0) and not rules.window_always:
        return None
    period = stated if isinstance(stated, int) and stated > 0 else rules.window_period
    if not period or not (rules.window_period or header.architecture not in ARCHITECTURES):
        return None
    dense = 0 if rules.dense_first else period - 1
    return [n < layers and (n % period) != dense for n in range(layers + extra)]


def slice_metadata(header: Header, start: int, stop: int, nextn: bool) -> dict[str, Value]:
    """The metadata of a slice with the trunk layers `[start, stop)`, its vocabulary's unchanged.

    `nextn`: the NextN layers follow.
    """
    rules, arch = row(header), header.architecture
    layers, extra = trunk_layers(header), nextn_layers(header)
    pattern = window_pattern(header)
    # llama.cpp insists on a layer with a window where the architecture has them. A NextN layer that is declared,
    # but not there, satisfies it and is never run.
    phantom = bool(pattern and not any(pattern[start:stop]) and not (nextn and any(pattern[layers:])))
    kept = (extra if nextn else 0) + phantom

    def cut(items: list[object], declared: object = None) -> list[object]:
        inside = items[start:stop] + (items[layers:] if nextn else [])
        return [*inside, items[stop - 1] if declared is None else declared] if phantom else inside

    result = {key: entry for key, entry in header.metadata.items() if not key.startswith("split.")}
    for key, entry in header.metadata.items():
        general = key.startswith(("tokenizer.", "general.", "split."))
        if general or not entry.is_array or key.removeprefix(arch) in _NOT_PER_LAYER:
            continue
        if entry.count in (layers, layers + extra):
            assert entry.element is not None
            result[key] = gguf.array(entry.element, cut(entry.decode()))
    changed: dict[str, Value] = {".block_count": gguf.value(gguf.U32, stop - start + kept)}
    if extra or kept:
        changed[".nextn_predict_layers"] = gguf.value(gguf.U32, kept)
    if pattern:
        changed[".attention.sliding_window_pattern"] = gguf.array(gguf.BOOL, cut(list(pattern), True))
    if lead := header.integer(".leading_dense_block_count", 0):
        dense = min(max(lead - start, 0), stop - start)
        changed[".leading_dense_block_count"] = gguf.value(gguf.U32, dense)
    if rules.stated is not None:
        changed |= rules.stated(header)
    if start > 0 and rules.scales_input:
        changed[".embedding_scale"] = gguf.value(gguf.F32, 0.0)
    if start > 0 and rules.needs_sections and not header.get(".rope.dimension_sections"):
        width = _head_width(header)
        sections = [width // 4, width // 2 - width // 4, 0, 0]
        changed[".rope.dimension_sections"] = gguf.array(gguf.I32, sections)
    for suffix in _IMAGE_KEYS:
        result.pop(arch + suffix, None)
    return result | {arch + suffix: entry for suffix, entry in changed.items()}


def _head_width(header: Header) -> int:
    """Dimensions of a head that RoPE rotates."""
    heads = header.get(".attention.head_count")
    size = header.integer(".embedding_length") // int(heads[0] if isinstance(heads, list) else heads)
    return header.integer(".rope.dimension_count", header.integer(".attention.key_length", size))
