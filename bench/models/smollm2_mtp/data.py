"""The text to train on, which the model writes itself, with the model's hidden row and greedy choice at every position.

Many lanes share each decode, prompts and continuations alike. Some lanes are greedy, which is what the block shall
foretell, others are sampled, since a small model repeats itself when it is greedy; a lane that repeats itself is
ended. A few lanes only read: sources and help texts of the standard library. The layers are run by PyTorch.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from attrs import define, field
from numpy.typing import NDArray

from bench.models.smollm2_mtp import express, prompts
from bench.prompts import chat
from meshpipe.llama.gguf import read_header
from meshpipe.llama.vocabulary import Vocabulary

LANES, CONTEXT, BATCH = 128, 768, 768
PROMPT = 320  # tokens of the longest prompt
GREEDY, READ = 0.55, 0.08  # shares of lanes
MIN_P = 0.05
TOKENS, LABELS, HIDDEN, INDEX = "tokens.i32", "labels.i32", "hidden.f16", "index.jsonl"


@define
class Lane:
    """One text as it grows."""

    pending: list[int]
    """Tokens that are to be run next."""
    temperature: float | None
    """0 is greedy, None reads only."""
    room: int
    """Tokens it may still write."""
    prompt: int
    tokens: list[int] = field(factory=list)
    labels: list[int] = field(factory=list)
    hidden: list[NDArray[np.float16]] = field(factory=list)


@define
class Record:
    """Where one text lies in the files, and how many of its tokens are the prompt's."""

    start: int
    length: int
    prompt: int
    temperature: float | None


def generate(directory: Path, count: int, seed: int, threads: int = 2) -> None:
    """Writes texts of `count` tokens in all, prompts included, into `directory`, and appends to what is there."""
    from bench.models.smollm2_mtp.trunk import Trunk  # PyTorch, which only training needs

    directory.mkdir(parents=True, exist_ok=True)
    trunk = Trunk(read_header(express.original()), lanes=LANES, context=CONTEXT, threads=threads)
    vocabulary = Vocabulary(express.original())
    done = sum(record.length for record in records(directory))
    draw = random.Random(f"{seed}-{done}")
    began, before = time.monotonic(), done
    lanes: list[Lane | None] = [None] * LANES
    while done + sum(len(lane.tokens) for lane in lanes if lane) < count:
        chosen: list[tuple[int, Lane]] = []
        used = 0
        for number in range(LANES):
            lane = lanes[number]
            if lane is None:
                trunk.clear(number)
                lane = lanes[number] = _begin(vocabulary, draw)
            if used + len(lane.pending) <= BATCH:
                chosen.append((number, lane))
                used += len(lane.pending)
        counts = [len(lane.pending) for _, lane in chosen]
        tokens = [token for _, lane in chosen for token in lane.pending]
        logits, hidden = trunk.run(tokens, [number for number, _ in chosen], counts)
        labels, half = logits.argmax(dim=1), hidden.half().numpy()
        stop = 0
        for number, lane in chosen:
            start, stop = stop, stop + len(lane.pending)
            lane.tokens += lane.pending
            lane.labels += labels[start:stop].tolist()
            lane.hidden.append(half[start:stop].copy())
            if _ended(lane, logits[stop - 1].numpy(), vocabulary.end_tokens, draw):
                done += _append(directory, lane)
                lanes[number] = None
                rate = (done - before) / (time.monotonic() - began)
                print(f"{done} tokens, {rate:.0f} tokens/s", flush=True)
    for lane in lanes:
        if lane is not None and lane.tokens:  # the last to come may not have had their turn
            _append(directory, lane)


def _begin(vocabulary: Vocabulary, draw: random.Random) -> Lane:
    """A new lane with its prompt."""
    excluded = {text for _, text in prompts.held_out()}
    while True:
        if draw.random() < READ:
            text = prompts.source(draw, 1200) if draw.random() < 0.5 else prompts.passage(draw)
            tokens, temperature = vocabulary.tokenize(text), None
        else:
            text = prompts.instruction(draw)
            tokens = chat(vocabulary, text)
            temperature = 0.0 if draw.random() < GREEDY / (1 - READ) else draw.uniform(0.4, 1.0)
        if 16 <= len(tokens) <= PROMPT and text not in excluded:
            return Lane(list(tokens), temperature, draw.randint(160, CONTEXT - PROMPT - 1), len(tokens))


def _ended(lane: Lane, logits: NDArray[np.float32], ends: frozenset[int], draw: random.Random) -> bool:
    """Chooses the lane's next token; whether there is none."""
    if lane.temperature is None or lane.room == 0 or _repeats(lane.tokens[lane.prompt :]):
        return True
    token = lane.labels[-1]
    if lane.temperature:
        likely = np.flatnonzero(logits > logits[token] + lane.temperature * np.log(MIN_P))
        weights = np.exp((logits[likely] - logits[token]) / lane.temperature)
        token = draw.choices(likely.tolist(), weights.tolist())[0]
    lane.pending = [token]
    lane.room -= 1
    return token in ends


def _repeats(tokens: list[int], length: int = 48, period: int = 48) -> bool:
    """Whether the last tokens are what stood a short period before."""
    last = tokens[-length:]
    return len(tokens) >= length + period and any(
        tokens[-length - shift : -shift] == last for shift in range(1, period + 1)
    )


def _append(directory: Path, lane: Lane) -> int:
    start = (directory / TOKENS).stat().st_size // 4 if (directory / TOKENS).exists() else 0
    for name, array in (
        (TOKENS, np.array(lane.tokens, np.int32)),
        (LABELS, np.array(lane.labels, np.int32)),
        (HIDDEN, np.concatenate(lane.hidden)),
    ):
        with (directory / name).open("ab") as file:
            file.write(array.tobytes())
    line = {
        "start": start,
        "length": len(lane.tokens),
        "prompt": lane.prompt,
        "temperature": lane.temperature,
    }
    with (directory / INDEX).open("a") as file:
        file.write(json.dumps(line) + "\n")
    return len(lane.tokens)


def records(directory: Path) -> Iterator[Record]:
    """The texts that `directory` has."""
    index = directory / INDEX
    if index.exists():
        for line in index.read_text().splitlines():
            yield Record(**json.loads(line))
