"""What the width and depth policies reach on a simulated pipe: no model, no clock, the same numbers each time.

Parts, told apart by the column `part`:
- *fixed*: predictable text at fixed width and depth, beside min(depth × width / latency, width / slowest).
- *auto*: predictable text at automatic width and depth, beside the slowest stage's best rate.
- *unsure*: text that is not predictable, or proposals that are wrong, beside not speculating.
- *recorded*: what the demo model wrote (`bench/data/texts.json`), with the n-gram proposer.

Speeds in tokens per second; delays are one way, in milliseconds, on every link. Stages cost what half a 135M
model costs on one thread of a small machine.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench import report, texts
from meshpipe.speculation.ngram import NgramConfig, NgramProposer
from meshpipe.speculation.policy import CostCurve, Pace
from meshpipe.speculation.simulate import Oracle, Outcome, Topology, simulate

FIRST = CostCurve(((1, 0.0043), (2, 0.0080), (4, 0.0153), (8, 0.0280), (16, 0.0528)))
LAST = CostCurve(((1, 0.0090), (2, 0.0141), (4, 0.0219), (8, 0.0367), (16, 0.0660)))
PROMPT = 32
PLACES = [(1, 0), (2, 0), (2, 10), (2, 25), (2, 100), (3, 50), (4, 0), (4, 100)]


def topology(stages: int, delay: int) -> Topology:
    return Topology((FIRST,) * (stages - 1) + (LAST,), (delay / 1000,) * stages)


def novel(length: int) -> list[int]:
    """Even numbers at random, so that a lie (the last bit turned) is no token of the text."""
    rng = random.Random(1)
    return [2 * rng.randrange(50_000) for _ in range(length)]


def serial(place: Topology, text: list[int], prompt: int = PROMPT) -> Outcome:
    return simulate(place, text, prompt, Pace(place.pipe(), width=1, depth=1))


def fixed(rounds: int) -> Iterator[dict[str, Any]]:
    for stages, delay in ((2, 25), (2, 100), (4, 100)):
        place = topology(stages, delay)
        pipe = place.pipe()
        for width in (1, 4, 16):
            for depth in sorted({1, 2, 4, 8, 16, 32, pipe.depth(width)}):
                text = novel(PROMPT + depth * width * (rounds + 2))
                outcome = simulate(
                    place, text, PROMPT, Pace(place.pipe(), width=width, depth=depth), Oracle(text)
                )
                first = depth * width
                rate = outcome.rate(first, first + rounds * depth * width)
                formula = min(depth * width / pipe.latency(width), width / pipe.slowest(width))
                yield {
                    "part": "fixed",
                    "stages": stages,
                    "delay_ms": delay,
                    "width": width,
                    "depth": depth,
                    "tps": rate,
                    "formula": formula,
                    "ratio": rate / formula,
                }


def auto(length: int) -> Iterator[dict[str, Any]]:
    text = novel(length)
    for stages, delay in PLACES:
        place = topology(stages, delay)
        outcome = simulate(place, text, PROMPT, Pace(place.pipe()), Oracle(text))
        best = max(width / place.pipe().slowest(width) for width in range(1, 17))
        rate = outcome.rate(length // 3)
        yield {
            "part": "auto",
            "stages": stages,
            "delay_ms": delay,
            "tps": rate,
            "formula": best,
            "ratio": rate / best,
            "no_speculation": 1 / place.pipe().latency(1),
        }


def unsure(length: int) -> Iterator[dict[str, Any]]:
    rng = random.Random(2)
    text = novel(length)
    lies = [rng.random() for _ in text]
    bits = [rng.randrange(4) for _ in text]
    cases = {
        "storm: every proposal wrong": (text, lambda: Oracle(text, lie=lambda at: True)),
        "90% of tokens wrong": (text, lambda: Oracle(text, lie=lambda at: lies[at] < 0.9)),
        "30% of tokens wrong": (text, lambda: Oracle(text, lie=lambda at: lies[at] < 0.3)),
        "storms of 100, calms of 100": (text, lambda: Oracle(text, lie=lambda at: at // 100 % 2 == 0)),
        "random, n-gram": (text, NgramProposer),
        "random of 4, n-gram of 1": (bits, lambda: NgramProposer(NgramConfig(min_match=1))),
    }
    for name, (tokens, proposer) in cases.items():
        for stages, delay in PLACES:
            place = topology(stages, delay)
            base = serial(place, tokens)
            outcome = simulate(place, tokens, PROMPT, Pace(place.pipe()), proposer())
            yield {
                "part": "unsure",
                "case": name,
                "stages": stages,
                "delay_ms": delay,
                "tps": outcome.rate(),
                "no_speculation": base.rate(),
                "ratio": outcome.rate() / base.rate(),
                "stale_per_token": outcome.stale_rows / len(outcome.times),
            }


def recorded(quick: bool) -> Iterator[dict[str, Any]]:
    for of in ("novel", "greedy", "copy"):
        chosen = [text for text in texts.load() if text["kind"] == of][: 2 if quick else None]
        for stages, delay in PLACES:
            place = topology(stages, delay)
            before = after = 0.0
            tokens = stale = 0
            for text in chosen:
                base = serial(place, text["tokens"], text["prompt"])
                outcome = simulate(place, text["tokens"], text["prompt"], Pace(place.pipe()), NgramProposer())
                before += base.times[-1] - base.times[0]
                after += outcome.times[-1] - outcome.times[0]
                tokens += len(outcome.times) - 1
                stale += outcome.stale_rows
            yield {
                "part": "recorded",
                "text": of,
                "stages": stages,
                "delay_ms": delay,
                "tps": tokens / after,
                "no_speculation": tokens / before,
                "ratio": before / after,
                "stale_per_token": stale / tokens,
            }


def plot(rows: list[dict[str, Any]], folder: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(11, 3.4), sharey=True)
    for axis, (stages, delay) in zip(axes, ((2, 25), (2, 100), (4, 100)), strict=True):
        for width, colour in ((1, "C0"), (4, "C1"), (16, "C2")):
            line = [
                row
                for row in rows
                if row["part"] == "fixed"
                and (row["stages"], row["delay_ms"], row["width"]) == (stages, delay, width)
            ]
            depths = [row["depth"] for row in line]
            axis.plot(depths, [row["formula"] for row in line], "-", color=colour, alpha=0.4)
            axis.plot(depths, [row["tps"] for row in line], "o", color=colour, label=f"width {width}")
        axis.set(title=f"{stages} stages, {delay} ms", xlabel="depth (windows)", xscale="log", yscale="log")
    axes[0].set_ylabel("tokens/s (line: formula)")
    axes[0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(folder / "simulate-predictable.svg", metadata={"Date": None})
    plt.close(figure)

    figure, axis = plt.subplots(figsize=(9, 3.6))
    part = [row for row in rows if row["part"] == "unsure"]
    places = [f"{stages} × {delay} ms" for stages, delay in PLACES]
    for name in dict.fromkeys(row["case"] for row in part):
        axis.plot(places, [row["ratio"] for row in part if row["case"] == name], "o-", label=name)
    axis.axhline(0.98, color="grey", linestyle=":")
    axis.set(ylabel="speed over no speculation", xlabel="stages × one-way delay", yscale="log")
    axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(folder / "simulate-unpredictable.svg", metadata={"Date": None})
    plt.close(figure)


def main(arguments: list[str]) -> None:
    options = report.parser("simulate", __doc__).parse_args(arguments)
    quick = options.quick
    rows: list[dict[str, Any]] = []
    for part in (
        fixed(4 if quick else 10),
        auto(600 if quick else 2_000),
        unsure(200 if quick else 1_000),
        recorded(quick),
    ):
        found = list(part)
        print(report.table(found) + "\n", flush=True)
        rows += found
    report.finish(options, rows)
    if options.plot:
        plot(rows, options.plot)
