"""Trains the NextN block to foretell the model's own choices. PyTorch on a CPU (extra `train`).

The block's input at row i is the model's hidden row of position i and the token at i + 1; what it should say is the
model's greedy choice after that token. Two things are asked of it in each step:

- one draft at every position: half of the loss is the cross-entropy of the model's choice, half the
  distance to the model's own distribution, which its next hidden row gives for nothing;
- on a part of the rows a second draft from the block's own output and the model's choice, whose keys and values are the
  first pass's up to the row and its own: what chaining does at inference.

Both are computed over the tokens that the batch's labels name and a sample of the frequent ones, not over the
whole vocabulary. Texts lie end to end; a batch is windows of that stream, and attention stays within a text.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # a thread that waits leaves the core to others

import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attrs import astuple, define, evolve, frozen
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from bench.models.smollm2_mtp import block as blocks
from bench.models.smollm2_mtp import express
from bench.models.smollm2_mtp.data import HIDDEN, LABELS, TOKENS, records
from meshpipe.llama.gguf import Header, read_header

EPSILON = 1e-5
WINDOW = 256
HELD_OUT = 0.06  # share of the texts, the last ones, to watch progress with
FREQUENT = 12_000  # tokens that negatives are drawn from

Array = NDArray[Any]


@frozen
class Stream:
    """Texts end to end."""

    tokens: Tensor
    labels: Tensor
    text: Tensor
    """Number of the text that each position belongs to."""
    written: Tensor
    """Whether the model wrote it, greedily."""
    hidden: Array

    @staticmethod
    def read(directory: Path) -> tuple[Stream, Stream]:
        """The texts to train on, and those held out: the last ones."""
        found = list(records(directory))
        lengths = [record.length for record in found]
        total, cut = sum(lengths), sum(lengths[: int(len(found) * (1 - HELD_OUT))])
        tokens, labels = (np.fromfile(directory / name, np.int32, total) for name in (TOKENS, LABELS))
        text = np.repeat(np.arange(len(found)), lengths)
        written = [(np.arange(r.length) >= r.prompt) & (r.temperature == 0) for r in found]
        hidden = np.fromfile(directory / HIDDEN, np.float16, total * 576).reshape(total, 576)
        columns = (torch.from_numpy(array.astype(np.int64)) for array in (tokens, labels, text))
        whole = Stream(*columns, torch.from_numpy(np.concatenate(written)), hidden)
        return whole.part(slice(cut)), whole.part(slice(cut, None))

    def part(self, which: slice) -> Stream:
        """Some of the positions."""
        return Stream(*(value[which] for value in astuple(self, recurse=False)))

    @staticmethod
    def joined(streams: Sequence[Stream]) -> Stream:
        """One after the other."""
        numbered = [evolve(some, text=some.text + (n << 32)) for n, some in enumerate(streams)]
        columns = zip(*(astuple(some, recurse=False) for some in numbered), strict=True)
        return Stream(*(np.concatenate(c) if isinstance(c[0], np.ndarray) else torch.cat(c) for c in columns))

    def batch(self, starts: Sequence[int]) -> Batch:
        """Windows that begin at `starts`; each needs WINDOW + 2 positions."""
        index = torch.as_tensor(starts)[:, None] + torch.arange(WINDOW + 2)
        hidden = torch.from_numpy(self.hidden[index[:, : WINDOW + 1].numpy()].astype(np.float32))
        tokens, labels, text = self.tokens[index], self.labels[index], self.text[index]
        now, after, last = text[:, :WINDOW], text[:, 1 : WINDOW + 1], text[:, 2:]
        causal = torch.ones(WINDOW, WINDOW, dtype=torch.bool).tril()
        first = now == after
        return Batch(
            hidden[:, :WINDOW],
            tokens[:, 1 : WINDOW + 1],
            labels[:, 1 : WINDOW + 1],
            labels[:, 2:],
            hidden[:, 1:],
            self.written[index[:, 1 : WINDOW + 1]],
            first,
            first & (now == last) & (tokens[:, 2:] == labels[:, 1 : WINDOW + 1]),
            ((now[:, :, None] == now[:, None, :]) & causal)[:, None],
        )


@frozen
class Batch:
    """Windows of a stream, `[windows, WINDOW, ...]`."""

    hidden: Tensor
    tokens: Tensor
    """Of the position after each hidden row."""
    labels: Tensor
    chained_labels: Tensor
    next_hidden: Tensor
    """The model's hidden row that gave the label."""
    written: Tensor
    """Where the token is one that the model wrote, greedily."""
    counts: Tensor
    """Where there is a label."""
    chained_counts: Tensor
    """Where the text went the way that the model chose, so that there is a label for the second draft."""
    mask: Tensor


class Block(nn.Module):
    """The NextN block as llama.cpp computes it for `mimo2`, in float32."""

    def __init__(
        self, weights: blocks.Weights, embedding: Tensor, heads: int, groups: int, base: float
    ) -> None:
        super().__init__()
        self.weights = nn.ParameterDict(
            {_key(name): nn.Parameter(torch.from_numpy(w.copy())) for name, w in weights.items()}
        )
        self.heads, self.groups = heads, groups
        self.embedding = embedding
        size = len(embedding[0]) // heads
        angles = torch.arange(WINDOW + 1)[:, None] * base ** (-torch.arange(0, size, 2) / size)
        self.cos, self.sin = angles.cos(), angles.sin()

    def forward(
        self, hidden: Tensor, tokens: Tensor, mask: Tensor, past: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Output rows (before the head's norm), and keys and values. With `past`, rows are one position later."""
        rows = self.inputs(hidden, tokens) @ self.weights["nextn/eh_proj/weight"].T
        mixed, own = self.attention(rows, mask, past)
        rows = rows + mixed @ self.weights["attn_output/weight"].T
        return rows + self.features(rows) @ self.weights["ffn_down/weight"].T, own

    def inputs(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """The token's embedding and the hidden row, each normalized, side by side."""
        embedded = self.norm(self.embedding[tokens], "nextn.enorm")
        return torch.cat([embedded, self.norm(hidden, "nextn.hnorm")], dim=-1)

    def attention(
        self, rows: Tensor, mask: Tensor, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """What the heads mix, before the output matrix, and the rows' own keys and values."""
        attended = self.norm(rows, "attn_norm") @ self.weights["attn_qkv/weight"].T
        size = rows.shape[-1] // self.heads
        parts = attended.split([rows.shape[-1], self.groups * size, self.groups * size], dim=-1)
        queries, keys, values = (part.unflatten(-1, (-1, size)).transpose(1, 2) for part in parts)
        shift = 0 if past is None else 1
        queries, keys = self.rotate(queries, shift), self.rotate(keys, shift)
        own = keys, values
        if past is not None:
            keys, values = torch.cat([past[0], keys], dim=2), torch.cat([past[1], values], dim=2)
        repeat = self.heads // self.groups
        keys, values = keys.repeat_interleave(repeat, dim=1), values.repeat_interleave(repeat, dim=1)
        mixed = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        return mixed.transpose(1, 2).flatten(2), own

    def features(self, rows: Tensor) -> Tensor:
        """The feed-forward's inner rows."""
        normed = self.norm(rows, "ffn_norm")
        gate = functional.silu(normed @ self.weights["ffn_gate/weight"].T)
        return gate * (normed @ self.weights["ffn_up/weight"].T)

    def norm(self, rows: Tensor, name: str) -> Tensor:
        """Root-mean-square normalization."""
        weight = self.weights[_key(f"{name}.weight")]
        return functional.rms_norm(rows, weight.shape, weight, EPSILON)

    def rotate(self, rows: Tensor, shift: int) -> Tensor:
        """Rotary embedding in halves; `[windows, heads, rows, size]`."""
        count = rows.shape[2]
        cos, sin = self.cos[shift : shift + count], self.sin[shift : shift + count]
        low, high = rows.chunk(2, dim=-1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)

    def drafts(self, batch: Batch, chained: int) -> tuple[Tensor, Tensor]:
        """Head inputs of the first draft, and of the second in the first `chained` windows."""
        rows, past = self(batch.hidden, batch.tokens, batch.mask)
        own = torch.eye(WINDOW, dtype=torch.bool).expand(chained, 1, WINDOW, WINDOW)
        mask = torch.cat([batch.mask[:chained], own], dim=-1)
        cut = past[0][:chained], past[1][:chained]
        second, _ = self(rows[:chained], batch.labels[:chained], mask, cut)
        return self.norm(rows, "nextn.shared_head_norm"), self.norm(second, "nextn.shared_head_norm")


def _key(name: str) -> str:
    return name.replace(".", "/")


@define
class Settings:
    """How to train; a step is `windows` windows, of which `chained` draft twice."""

    steps: int = 2000
    windows: int = 4
    chained: int = 1
    negatives: int = 1500
    rate: float = 2.5e-4
    warmup: int = 10
    average: float = 0.97
    seed: int = 1
    threads: int = 2
    every: int = 100


def build(header: Header, weights: blocks.Weights) -> tuple[Block, Tensor]:
    """The block with these weights, and the embedding, which is the head too."""
    from gguf import GGMLQuantizationType, dequantize

    tensor = header.tensors["token_embd.weight"]
    wide = dequantize(express.read_rows(tensor), GGMLQuantizationType(tensor.kind))
    embedding = torch.from_numpy(np.ascontiguousarray(wide, np.float32))
    heads, groups = header.integer(".attention.head_count"), header.integer(".attention.head_count_kv")
    return Block(weights, embedding, heads, groups, float(header.get(".rope.freq_base"))), embedding


def train(directories: Sequence[Path], target: Path, settings: Settings, begin: Path | None = None) -> None:
    """Trains on the texts in `directories`; writes the block to `target` each time it is better than before."""
    torch.manual_seed(settings.seed)
    torch.set_num_threads(settings.threads)
    header = read_header(express.original())
    initial = blocks.initial(header)
    block, embedding = build(header, blocks.read(begin) if begin else initial)
    output_norm = torch.from_numpy(initial["nextn.shared_head_norm.weight"].copy())
    stream, held_out = map(Stream.joined, zip(*map(Stream.read, directories), strict=True))
    print(f"{len(stream.tokens)} tokens to train on, {len(held_out.tokens)} held out", flush=True)
    if not begin:
        fit(block, stream)
    frequent = stream.labels.bincount(minlength=len(embedding)).argsort(descending=True)[:FREQUENT]
    optimizer = torch.optim.AdamW(block.parameters(), lr=settings.rate, weight_decay=0.01, betas=(0.9, 0.98))
    average = {name: p.detach().clone() for name, p in block.named_parameters()}
    began = time.monotonic()

    def keep(step: int, best: float) -> float:
        """Measures the averaged weights, and saves them if they are better than `best`."""
        first, second = _measure(block, average, held_out, embedding)
        seconds = time.monotonic() - began
        print(
            f"step {step} of {settings.steps}, accepted {first:.3f} {second:.3f}, {seconds:.0f} s", flush=True
        )
        if first + second > best:
            weights = {
                name.removeprefix("weights.").replace("/", "."): p.numpy() for name, p in average.items()
            }
            names = " ".join(path.name for path in directories)
            provenance = {
                "command": f"train {names} --steps {settings.steps} --rate {settings.rate} --seed {settings.seed}",
                "begun with": begin.name if begin else "the last layer",
                "step": str(step),
                "tokens": str(len(stream.tokens)),
                "held out": f"accepted {first:.3f}, then {second:.3f}, of {len(held_out.tokens)} tokens",
            }
            blocks.save(target, weights, provenance)
        return max(best, first + second)

    best = keep(0, 0.0)
    for step, starts in zip(range(settings.steps), _windows(stream, settings), strict=False):
        warm = min(1.0, (step + 1) / settings.warmup)
        rate = settings.rate * warm * 0.5 * (1 + math.cos(math.pi * step / settings.steps))
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        batch = stream.batch(starts)
        loss = _loss(block, batch, embedding, output_norm, frequent, settings)
        loss.backward()
        nn.utils.clip_grad_norm_(block.parameters(), 1.0)
        optimizer.step()
        decay = min(settings.average, (1 + step) / (10 + step))
        for name, parameter in block.named_parameters():
            average[name].lerp_(parameter.detach(), 1 - decay)
        if (step + 1) % settings.every == 0 or step + 1 == settings.steps:
            best = keep(step + 1, best)


@torch.no_grad()
def fit(block: Block, stream: Stream, limit: int = 60_000) -> None:
    """Sets the block's linear maps by least squares, one after the other, to give the model's next hidden row.

    First the map of the inputs, then the attention's output, then the feed-forward's, each on what is left by those
    before it; the rest stays the last layer's. Costs seconds and saves the first thousand steps.
    """
    starts = range(0, min(len(stream.tokens), limit) - WINDOW - 2, WINDOW)
    batches = [stream.batch([start]) for start in starts]
    counts = [batch.counts for batch in batches]
    targets = [functional.rms_norm(batch.next_hidden, batch.next_hidden.shape[-1:]) for batch in batches]
    given = [block.inputs(batch.hidden, batch.tokens) for batch in batches]
    rows = _fit(block.weights["nextn/eh_proj/weight"], given, targets, counts)
    given = [block.attention(some, batch.mask, None)[0] for some, batch in zip(rows, batches, strict=True)]
    left = [target - some for target, some in zip(targets, rows, strict=True)]
    more = _fit(block.weights["attn_output/weight"], given, left, counts)
    rows = [some + other for some, other in zip(rows, more, strict=True)]
    left = [target - some for target, some in zip(targets, rows, strict=True)]
    _fit(block.weights["ffn_down/weight"], [block.features(some) for some in rows], left, counts)


def _fit(matrix: Tensor, given: list[Tensor], targets: list[Tensor], counts: list[Tensor]) -> list[Tensor]:
    """Sets `matrix` by ridge regression and returns what it gives."""
    size = matrix.shape[1]
    square, product = torch.zeros(size, size), torch.zeros(size, len(matrix))
    for some, target, where in zip(given, targets, counts, strict=True):
        square += some[where].T @ some[where]
        product += some[where].T @ target[where]
    ridge = 0.02 * square.diagonal().mean() * torch.eye(size)
    matrix.copy_(torch.linalg.solve(square + ridge, product).T)
    return [some @ matrix.T for some in given]


def _windows(stream: Stream, settings: Settings) -> Iterator[list[int]]:
    """Starts of the windows of each batch: the stream in random order, pass after pass, cut elsewhere each time."""
    generator = torch.Generator().manual_seed(settings.seed)
    waiting: list[int] = []
    while True:
        while len(waiting) < settings.windows:
            first = int(torch.randint(WINDOW, (1,), generator=generator))
            starts = torch.arange(first, len(stream.tokens) - WINDOW - 2, WINDOW)
            waiting += starts[torch.randperm(len(starts), generator=generator)].tolist()
        yield waiting[: settings.windows]
        del waiting[: settings.windows]


def _loss(
    block: Block, batch: Batch, embedding: Tensor, output_norm: Tensor, frequent: Tensor, settings: Settings
) -> Tensor:
    chained = settings.chained
    first, second = block.drafts(batch, chained)
    labels = batch.labels[batch.counts]
    chained_counts = batch.chained_counts[:chained]
    chained_labels = batch.chained_labels[:chained][chained_counts]
    negatives = frequent[torch.randint(len(frequent), (settings.negatives,))]
    candidates = torch.cat([labels, chained_labels, negatives]).unique()
    matrix = embedding[candidates]
    with torch.no_grad():
        rows = functional.rms_norm(batch.next_hidden[batch.counts], output_norm.shape, output_norm, EPSILON)
        distribution = (rows @ matrix.T).softmax(dim=-1)
    said = first[batch.counts] @ matrix.T
    hard = functional.cross_entropy(said, torch.searchsorted(candidates, labels))
    soft = functional.cross_entropy(said, distribution)
    chain = functional.cross_entropy(
        second[chained_counts] @ matrix.T, torch.searchsorted(candidates, chained_labels)
    )
    return 0.5 * hard + 0.5 * soft + 0.5 * chain


@torch.no_grad()
def _measure(
    block: Block, average: dict[str, Tensor], stream: Stream, embedding: Tensor
) -> tuple[float, float]:
    """Share of first drafts that are the model's choice in what it wrote, and of second ones; averaged weights."""
    parameters = dict(block.named_parameters())
    kept = {name: p.detach().clone() for name, p in parameters.items()}
    for name, p in parameters.items():
        p.copy_(average[name])
    right, counts = torch.zeros(2), torch.zeros(2)
    starts = list(range(0, len(stream.tokens) - WINDOW - 2, WINDOW))
    for start in starts:
        batch = stream.batch([start])
        for number, (rows, labels, where) in enumerate(
            zip(
                block.drafts(batch, 1),
                (batch.labels, batch.chained_labels),
                (batch.counts, batch.chained_counts),
                strict=True,
            )
        ):
            where = where & batch.written[: len(where)]
            right[number] += ((rows[where] @ embedding.T).argmax(dim=-1) == labels[where]).sum()
            counts[number] += where.sum()
    for name, p in parameters.items():
        p.copy_(kept[name])
    first, second = (right / counts.clamp(min=1)).tolist()
    return first, second
