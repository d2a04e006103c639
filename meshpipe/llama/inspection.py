"""What a model file is, layer by layer, and whether and how it can be split: read from its header alone."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from pathlib import Path
from typing import Any

import attrs
from attrs import frozen

from meshpipe.errors import SplitError
from meshpipe.llama import architectures, gguf
from meshpipe.llama.gguf import Header, Tensor, read_header
from meshpipe.llama.identity import digest_of
from meshpipe.topology.split import Boundaries, check_split, even_split, parse_split

_CACHE_ELEMENT = 2  # bytes of an f16 key or value


@frozen
class ModelInfo:
    """A model in numbers. Sizes are bytes in the file; a layer's cache is bytes per token of context (f16)."""

    path: Path
    files: int
    name: str
    architecture: str
    digest: str
    layers: int
    nextn_layers: int
    draft_heads: int
    """NextN layers that llama.cpp can draft with."""
    embedding_length: int
    context_length: int
    vocabulary: int
    tied_head: bool
    types: dict[str, int]
    """Bytes of each tensor type."""
    total_bytes: int
    embedding_bytes: int
    head_bytes: int
    """What the last stage reads for logits: the output matrix, or the embedding if that is tied to it."""
    layer_bytes: tuple[int, ...]
    layer_active_bytes: tuple[int, ...]
    """What one token reads of each layer: of experts, those that it uses."""
    nextn_bytes: int
    layer_cache_bytes: tuple[int, ...]
    refusal: str
    """Why the model cannot be split; empty if it can."""
    cut_period: int
    """Boundaries must be multiples of this."""
    tested: bool
    """Whether this project's tests compare slices of this architecture with the whole; else certify a split."""

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return attrs.asdict(self, value_serializer=lambda _i, _f, v: str(v) if isinstance(v, Path) else v)

    def table(self) -> str:
        """The same as text, a few lines."""
        rows = [
            ("model", f"{self.name} ({self.architecture}), {self.path.name}"),
            ("size", _size(self.total_bytes) + (f" in {self.files} files" if self.files > 1 else "")),
            ("types", ", ".join(f"{kind} {_size(size)}" for kind, size in self.types.items())),
            ("layers", f"{self.layers}" + self._nextn()),
            ("per layer", _ranges(self.layer_bytes)),
            ("cache per token", _ranges(self.layer_cache_bytes)),
            ("embedding", f"{_size(self.embedding_bytes)}, {self.embedding_length} wide"),
            ("head", _size(self.head_bytes) + (" (the embedding)" if self.tied_head else "")),
            ("vocabulary", f"{self.vocabulary} tokens"),
            ("context", f"{self.context_length} tokens"),
            ("digest", self.digest[:32]),
            ("split", self._how()),
        ]
        return "\n".join(f"{name:<16}{content}" for name, content in rows)

    def _nextn(self) -> str:
        if not self.nextn_layers:
            return ""
        use = "native MTP" if self.draft_heads else "which llama.cpp cannot draft with"
        return f" and {self.nextn_layers} NextN ({use})"

    def _how(self) -> str:
        if self.refusal:
            return f"not possible: {self.refusal}"
        where = f"at multiples of {self.cut_period} layers" if self.cut_period > 1 else "at any layer"
        known = "tested architecture" if self.tested else "certify the split first (generate does)"
        return f"{where}; {known}"


def inspect_model(path: str | os.PathLike[str]) -> ModelInfo:
    """Reads what a model is from its header. Raises ModelError."""
    return describe(read_header(path))


def describe(header: Header) -> ModelInfo:
    """Like `inspect_model`, of a header that has been read already."""
    layers = architectures.trunk_layers(header)
    vocabulary = architectures.vocabulary_size(header)
    by_layer: list[list[Tensor]] = [[] for _ in range(layers)]
    for tensor in header.tensors.values():
        if tensor.layer is not None and tensor.layer < layers:
            by_layer[tensor.layer].append(tensor)
    types: Counter[str] = Counter()
    for tensor in header.tensors.values():
        types[gguf.TENSOR_TYPES[tensor.kind][0]] += tensor.size
    output = header.tensors.get("output.weight")
    embedding = header.tensors["token_embd.weight"]
    return ModelInfo(
        path=header.path,
        files=len({tensor.path for tensor in header.tensors.values()}),
        name=str(header.get("general.name", header.path.stem)),
        architecture=header.architecture,
        digest=digest_of(header),
        layers=layers,
        nextn_layers=architectures.nextn_layers(header),
        draft_heads=architectures.draft_heads(header),
        embedding_length=header.integer(".embedding_length"),
        context_length=header.integer(".context_length"),
        vocabulary=vocabulary,
        tied_head=output is None,
        types=dict(types.most_common()),
        total_bytes=sum(types.values()),
        embedding_bytes=embedding.size,
        head_bytes=(output or embedding).size,
        layer_bytes=tuple(sum(t.size for t in tensors) for tensors in by_layer),
        layer_active_bytes=tuple(_active(header, tensors) for tensors in by_layer),
        nextn_bytes=sum(t.size for t in header.tensors.values() if t.layer is not None and t.layer >= layers),
        layer_cache_bytes=tuple(
            _CACHE_ELEMENT * sum(architectures.cache_elements(header, layer)) for layer in range(layers)
        ),
        refusal=architectures.refusal(header),
        cut_period=architectures.cut_period(header),
        tested=architectures.row(header).tested,
    )


def plan_split(
    path: str | os.PathLike[str], split: str, *, mtp: bool = False, context: int = 4096
) -> Boundaries:
    """The boundaries that `split` names for a model: as they are (`0,15,30`), or planned (`2`: two stages).

    A stage costs what one token makes it read: weights (of experts, those in use), half of `context` tokens'
    cache, and on the last stage the head, and the NextN layers with their head if `mtp`. Raises ModelError,
    SplitError.
    """
    header = read_header(path)
    info = describe(header)
    wanted = parse_split(split)
    if isinstance(wanted, tuple):
        boundaries = check_split(wanted, info.layers)
        for start, stop in itertools.pairwise(boundaries):
            architectures.check_range(header, start, stop)
        return boundaries
    if wanted > 1 and info.refusal:
        architectures.check_range(header, 0, 1)
    weights = zip(info.layer_active_bytes, info.layer_cache_bytes, strict=True)
    costs = [weight + cache * context / 2 for weight, cache in weights]
    tail = info.head_bytes + (info.nextn_bytes + info.head_bytes if mtp and info.draft_heads else 0)

    def allowed(start: int, stop: int) -> bool:
        try:
            architectures.check_stage(header, start, stop)
        except SplitError:
            return False
        return True

    return even_split(costs, wanted, tail=tail, allowed=allowed)


def _active(header: Header, tensors: list[Tensor]) -> int:
    experts = header.integer(".expert_count", 0)
    used = header.get(".expert_used_count", 0)
    share = (max(used) if isinstance(used, list) else used) / experts if experts else 1.0
    return int(sum(t.size * (share if "_exps" in t.name else 1.0) for t in tensors))


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _ranges(sizes: tuple[int, ...]) -> str:
    """Sizes by ranges of equal layers: `0-2 5.0 MiB, 3-60 9.1 MiB`; their span if there are many ranges."""
    starts = [n for n in range(len(sizes)) if n == 0 or sizes[n] != sizes[n - 1]]
    if len(starts) > 4:
        return f"{_size(min(sizes))} to {_size(max(sizes))}"
    stops = [*starts[1:], len(sizes)]
    parts = [f"{start}-{stop - 1} {_size(sizes[start])}" for start, stop in zip(starts, stops, strict=True)]
    return ", ".join(parts) if len(parts) > 1 else _size(sizes[0])
