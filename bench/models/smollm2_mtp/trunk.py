"""SmolLM2's layers in PyTorch, for text in bulk: on a CPU nearly twice as fast as llama.cpp with so many lanes.

Weights are widened to float32. A row's choice is llama.cpp's, which rounds activations to bytes, at all but one
position in a hundred.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor
from torch.nn import functional

from bench.models.smollm2_mtp import express
from meshpipe.llama.gguf import Header

EPSILON = 1e-5
TOGETHER = 16  # lanes of one attention call: the longest of them sets its length


class Trunk:
    """The model, and the keys and values of `lanes` texts of up to `context` tokens."""

    def __init__(self, header: Header, *, lanes: int, context: int, threads: int) -> None:
        from gguf import GGMLQuantizationType, dequantize

        torch.set_num_threads(threads)
        weights = {
            name: torch.from_numpy(
                np.array(dequantize(rows, GGMLQuantizationType(kind)), np.float32).reshape(shape[::-1])
            )
            for name, shape, kind, rows in express.trunk(header)
        }
        self.embedding, self.norm = weights["token_embd.weight"], weights["output_norm.weight"]
        self.layers = []
        for layer in range(header.integer(".block_count")):
            own = {
                name.removeprefix(f"blk.{layer}.").removesuffix(".weight"): tensor
                for name, tensor in weights.items()
                if name.startswith(f"blk.{layer}.")
            }
            own["qkv"] = torch.cat([own.pop("attn_q"), own.pop("attn_k"), own.pop("attn_v")])
            own["ffn"] = torch.cat([own.pop("ffn_gate"), own.pop("ffn_up")])
            self.layers.append(own)
        self.groups = header.integer(".attention.head_count_kv")
        self.width = header.integer(".embedding_length")
        self.size = size = self.width // header.integer(".attention.head_count")
        angles = torch.arange(context)[:, None] * float(header.get(".rope.freq_base")) ** (
            -torch.arange(0, size, 2) / size
        )
        self.cos, self.sin = angles.cos(), angles.sin()
        self.lengths = torch.zeros(lanes, dtype=torch.long)
        shape = (len(self.layers), lanes, self.groups, context, size)
        self.keys, self.values = torch.zeros(shape), torch.zeros(shape)

    @torch.no_grad()
    def run(self, tokens: ArrayLike, lanes: ArrayLike, counts: ArrayLike) -> tuple[Tensor, Tensor]:
        """Appends `counts[i]` of the tokens to the text of `lanes[i]`, each lane once; several only to an empty one.

        Returns logits `[tokens, vocabulary]` and hidden rows before the output norm, `[tokens, n_embd]`.
        """
        whose, many = torch.as_tensor(np.asarray(lanes)), torch.as_tensor(np.asarray(counts))
        ends = many.cumsum(0)
        prompts = [
            (int(lane), slice(int(end - count), int(end)))
            for lane, count, end in zip(whose, many, ends, strict=True)
            if count > 1
        ]
        single = many == 1
        decoding, places = whose[single], ends[single] - 1
        row_lanes = whose.repeat_interleave(many)
        offsets = torch.arange(len(row_lanes)) - (ends - many).repeat_interleave(many)
        positions = self.lengths[row_lanes] + offsets
        self.lengths[whose] += many
        rows = self.embedding[torch.as_tensor(np.asarray(tokens), dtype=torch.long)]
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        for layer, own in enumerate(self.layers):
            mixed = functional.rms_norm(rows, (self.width,), own["attn_norm"], EPSILON) @ own["qkv"].T
            queries, keys, values = mixed.unflatten(1, (-1, self.size)).split(
                [self.width // self.size, self.groups, self.groups], dim=1
            )
            queries, keys = _rotated(queries, cos, sin), _rotated(keys, cos, sin)
            self.keys[layer, row_lanes, :, positions] = keys
            self.values[layer, row_lanes, :, positions] = values
            attended = torch.empty_like(queries)
            for _, part in prompts:
                attended[part] = functional.scaled_dot_product_attention(
                    queries[part].transpose(0, 1)[None],
                    keys[part].transpose(0, 1)[None],
                    values[part].transpose(0, 1)[None],
                    is_causal=True,
                    enable_gqa=True,
                )[0].transpose(0, 1)
            if len(decoding):
                attended[places] = self._last(layer, decoding, queries[places])
            rows = rows + attended.flatten(1) @ own["attn_output"].T
            inner = functional.rms_norm(rows, (self.width,), own["ffn_norm"], EPSILON) @ own["ffn"].T
            gate, up = inner.chunk(2, dim=-1)
            rows = rows + (functional.silu(gate) * up) @ own["ffn_down"].T
        return functional.rms_norm(rows, (self.width,), self.norm, EPSILON) @ self.embedding.T, rows

    def _last(self, layer: int, lanes: Tensor, queries: Tensor) -> Tensor:
        """What the last position of each of these lanes attends to; `[lanes, heads, size]`, as the queries."""
        asked = torch.zeros(len(self.lengths), *queries.shape[1:])
        asked[lanes] = queries
        grouped = asked.unflatten(1, (self.groups, -1))  # queries of a group are rows of one attention
        found = torch.empty_like(grouped)
        for first in range(0, len(self.lengths), TOGETHER):
            some = slice(first, first + TOGETHER)
            longest = max(1, int(self.lengths[some].max()))
            mask = torch.arange(longest) < self.lengths[some, None].clamp(min=1)
            found[some] = functional.scaled_dot_product_attention(
                grouped[some],
                self.keys[layer, some, :, :longest],
                self.values[layer, some, :, :longest],
                attn_mask=mask[:, None, None],
            )
        return found.flatten(1, 2)[lanes]

    def clear(self, lane: int) -> None:
        """Forgets the lane's text."""
        self.lengths[lane] = 0


def _rotated(rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = rows.chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)
