"""The n-gram proposers: what a token costs to index as the context grows, and which gate pays.

Parts, told apart by the column `part`:
- *growth*: microseconds per committed token and per query, at several context lengths.
- *memory*: bytes per token.
- *match*: on recorded texts (`bench/data/texts.json`), how often guesses are right by the length of the
  agreeing context: `first` of the first guess, `run` the mean accepted of 16.
- *gate*: the same texts decoded on a simulated pipe of two stages 100 ms apart, by `min_match`: speed over not
  speculating, stale rows per output token, and accepted guesses per guess sent.
"""

from __future__ import annotations

import argparse
import random
import re
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from bench import report, texts
from meshpipe.speculation.ngram import CacheIndex, Index, NgramConfig, NgramProposer, SuffixIndex
from meshpipe.speculation.policy import CostCurve, Pace
from meshpipe.speculation.simulate import Topology, simulate

KINDS: tuple[Literal["suffix", "cache"], ...] = ("suffix", "cache")
DRAFT = 16
# Two halves of a 135M model, one thread of a small machine.
FAR = Topology(
    (
        CostCurve(((1, 0.0043), (2, 0.0080), (4, 0.0153), (8, 0.0280), (16, 0.0528))),
        CostCurve(((1, 0.0090), (2, 0.0141), (4, 0.0219), (8, 0.0367), (16, 0.0660))),
    ),
    (0.1, 0.1),
)


def words(length: int) -> list[int]:
    """Words, spaces and signs of Python's own library, numbered: natural text at any length."""
    numbers: dict[str, int] = {}
    found: list[int] = []
    for path in sorted(Path(argparse.__file__).parent.glob("*.py")):
        if len(found) < length:
            pieces = re.findall(r"\w+|\s+|[^\w\s]", path.read_text(errors="replace"))
            found += [numbers.setdefault(piece, len(numbers)) for piece in pieces]
    return found[:length]


def streams(length: int) -> dict[str, list[int]]:
    """What to index: natural text, and what an index may choke on."""
    rng = random.Random(1)
    runs: list[int] = []
    while len(runs) < length:
        runs += [1] * 500 + [2]
    return {
        "source code": words(length),
        "one token": [1] * length,
        "period of 37": [at % 37 for at in range(length)],
        "random of 50,000": [rng.randrange(50_000) for _ in range(length)],
        "random of 2": [rng.randrange(2) for _ in range(length)],
        "runs of 500": runs[:length],
    }


def growth(longest: int) -> Iterator[dict[str, Any]]:
    """Near each length: 100 commits of 5 tokens, each followed by a query with the next 32 as the suffix.

    Processor time of this thread, so that other work on the machine does not count.
    """
    lengths = [length for length in (1_000, 3_000, 10_000, 30_000, 100_000) if length <= longest]
    for name, stream in streams(longest).items():
        for kind in KINDS:
            index = make(kind)
            done = 0
            for length in lengths:
                index.extend(stream[done : length - 600])
                grown = asked = 0.0
                for at in range(length - 600, length - 100, 5):
                    begun = time.thread_time()
                    index.extend(stream[at : at + 5])
                    grown += time.thread_time() - begun
                    begun = time.thread_time()
                    index.lookup(stream[at + 5 : at + 37], DRAFT)
                    asked += time.thread_time() - begun
                done = length - 100
                yield {
                    "part": "growth",
                    "stream": name,
                    "kind": kind,
                    "context": length,
                    "us_per_token": grown / 500 * 1e6,
                    "us_per_query": asked / 100 * 1e6,
                }


def make(kind: Literal["suffix", "cache"]) -> Index:
    return (SuffixIndex if kind == "suffix" else CacheIndex)(NgramConfig(kind))


def memory(length: int) -> Iterator[dict[str, Any]]:
    for name, stream in streams(length).items():
        for kind in KINDS:
            tracemalloc.start()
            index = make(kind)
            index.extend(stream)
            held = tracemalloc.get_traced_memory()[0]
            tracemalloc.stop()
            yield {
                "part": "memory",
                "stream": name,
                "kind": kind,
                "context": length,
                "bytes_per_token": held / length,
            }


def by_match(kind: Literal["suffix", "cache"]) -> Iterator[dict[str, Any]]:
    """Walks every text token by token and asks at each position for 16 guesses."""
    seen: dict[tuple[str, str], list[tuple[int, int]]] = {}
    config = NgramConfig(kind, min_n=1, max_n=8, min_match=1)
    for text in texts.load():
        proposer = NgramProposer(config)
        tokens = text["tokens"]
        proposer.extend(tokens[: text["prompt"]])
        for at in range(text["prompt"], len(tokens)):
            draft = proposer.propose((), DRAFT)
            if draft.match:
                bucket = str(draft.match) if draft.match < 8 else "8-15" if draft.match < 16 else "16+"
                seen.setdefault((text["kind"], bucket), []).append(agreeing(draft.tokens, tokens[at:]))
            proposer.extend(tokens[at : at + 1])
    for (of, bucket), runs in sorted(seen.items()):
        yield {
            "part": "match",
            "kind": kind,
            "text": of,
            "match": bucket,
            "asked": len(runs),
            "first": sum(run > 0 for run, _ in runs) / len(runs),
            "run": sum(run for run, _ in runs) / len(runs),
        }


def agreeing(guesses: Sequence[int], truth: Sequence[int]) -> tuple[int, int]:
    run = 0
    for guess, token in zip(guesses, truth, strict=False):
        if guess != token:
            break
        run += 1
    return run, min(len(guesses), len(truth))


def gates(kind: Literal["suffix", "cache"]) -> Iterator[dict[str, Any]]:
    for of in ("novel", "greedy", "copy"):
        chosen = [text for text in texts.load() if text["kind"] == of]
        seconds = 0.0
        for text in chosen:
            pace = Pace(FAR.pipe(), width=1, depth=1)
            outcome = simulate(FAR, text["tokens"], text["prompt"], pace)
            seconds += outcome.times[-1] - outcome.times[0]
        for gate in (1, 2, 3, 4, 5, 6, 8):
            config = NgramConfig(kind, min_n=1, max_n=8, min_match=gate)
            tokens = rows = stale = 0
            spent = 0.0
            for text in chosen:
                pace = Pace(FAR.pipe())
                outcome = simulate(FAR, text["tokens"], text["prompt"], pace, NgramProposer(config))
                spent += outcome.times[-1] - outcome.times[0]
                tokens += len(outcome.times)
                rows += outcome.rows
                stale += outcome.stale_rows
            yield {
                "part": "gate",
                "kind": kind,
                "text": of,
                "min_match": gate,
                "speedup": seconds / spent,
                "stale_per_token": stale / tokens,
            }


def plot(rows: Sequence[report.Row], folder: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True)
    for axis, kind in zip(axes, KINDS, strict=True):
        part = [row for row in rows if row["part"] == "growth" and row["kind"] == kind]
        for name in dict.fromkeys(row["stream"] for row in part):
            line = [row for row in part if row["stream"] == name]
            axis.plot(
                [row["context"] for row in line], [row["us_per_token"] for row in line], "o-", label=name
            )
        axis.set(title=f"{kind} index", xlabel="committed tokens", xscale="log", yscale="log")
    axes[0].set_ylabel("µs per committed token")
    axes[0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(folder / "ngram-growth.svg", metadata={"Date": None})
    plt.close(figure)

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4))
    part = [row for row in rows if row["part"] == "gate" and row["kind"] == "suffix"]
    for of in dict.fromkeys(row["text"] for row in part):
        line = [row for row in part if row["text"] == of]
        gate = [row["min_match"] for row in line]
        axes[0].plot(gate, [row["speedup"] for row in line], "o-", label=of)
        axes[1].plot(gate, [row["stale_per_token"] for row in line], "o-", label=of)
    axes[0].set(xlabel="min_match", ylabel="speed over no speculation", yscale="log")
    axes[1].set(xlabel="min_match", ylabel="stale rows per token")
    axes[0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(folder / "ngram-gate.svg", metadata={"Date": None})
    plt.close(figure)


def main(arguments: list[str]) -> None:
    options = report.parser("ngram", __doc__).parse_args(arguments)
    longest = 10_000 if options.quick else 100_000
    parts = [list(growth(longest)), list(memory(longest))]
    for kind in KINDS:
        parts += [list(by_match(kind)), list(gates(kind))]
    for part in parts:
        print(report.table(part) + "\n", flush=True)
    rows = [row for part in parts for row in part]
    report.finish(options, rows)
    if options.plot:
        plot(rows, options.plot)
