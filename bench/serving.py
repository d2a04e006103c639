"""The workloads through the OpenAI endpoint, as SPEED-Bench is run: temperature 0, streamed, at concurrency 1 and 8.

Two stages 100 ms apart; the server and its clients share the coordinator's process and talk over HTTP on loopback.
All times are the clients': `ttft_ms` from sending a request to its first text, `itl_p50_ms` and `itl_p99_ms` between
events of a stream, `tpot_ms` from the first text to the last by the tokens after the first, `decode_tps` its inverse:
of one stream. `total_tps` is what all streams gave together, prompts included. `acceptance` and `steps_tokens` (tokens
a window) are what the responses say of themselves. The first turn of each prompt of `bench/data/workloads.jsonl` is
asked; `--speed-bench PATH` reads SPEED-Bench's own files. `exact` compares each text with the unsplit model's.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import trio
from attrs import frozen

from bench import measure, report
from bench.measure import Row
from bench.rig import Rig, open_rig
from bench.workloads import DATA, DELAY, Prompt, read
from meshpipe.serving.app import Service, application
from meshpipe.serving.server import open_listener, serve

MODEL = "SmolLM2"
CONTEXT = 2048
COLUMNS = (
    "workload", "sessions", "prompts", "ttft_ms", "itl_p50_ms", "itl_p99_ms", "tpot_ms", "decode_tps", "total_tps",
    "acceptance", "steps_tokens", "tokens", "exact",
)  # fmt: skip


@frozen
class Answered:
    """One stream as its client saw it; times in seconds from when it was asked for."""

    prompt: Prompt
    text: str
    times: tuple[float, ...]  # of the events with text
    tokens: int
    acceptance: dict[str, Any] | None


async def ask(client: httpx.AsyncClient, prompt: Prompt, tokens: int) -> Answered:
    """Streams one answer."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": prompt.turns[0]}],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began = trio.current_time()
    times, text, last = [], "", {}
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            last = json.loads(line[6:])
            for choice in last["choices"]:
                if choice["delta"].get("content"):
                    times.append(trio.current_time() - began)
                    text += choice["delta"]["content"]
    return Answered(
        prompt,
        text,
        tuple(times),
        last["usage"]["completion_tokens"],
        last["metrics"] and last["metrics"]["speculative_decoding"],
    )


async def once(rig: Rig, url: str, prompts: Sequence[Prompt], sessions: int, tokens: int) -> list[Row]:
    """All prompts at one concurrency: a row for each category, and one of all."""
    answers: list[Answered] = []
    limit = trio.CapacityLimiter(sessions)

    async def one(prompt: Prompt) -> None:
        async with limit:
            answers.append(await ask(client, prompt, tokens))

    began = trio.current_time()
    async with (
        httpx.AsyncClient(base_url=url, timeout=600, verify=False) as client,
        trio.open_nursery() as nursery,
    ):
        for prompt in prompts:
            nursery.start_soon(one, prompt)
    elapsed = trio.current_time() - began
    exact = {id(answer): await is_exact(rig, answer) for answer in answers}
    rows = []
    for category in [*dict.fromkeys(prompt.category for prompt in prompts), "all"]:
        of = [answer for answer in answers if category in (answer.prompt.category, "all")]
        row = row_of(category, sessions, of) | {"exact": all(exact[id(answer)] for answer in of)}
        rows.append(row)
    rows[-1]["total_tps"] = sum(answer.tokens for answer in answers) / elapsed
    return rows


def row_of(category: str, sessions: int, answers: Sequence[Answered]) -> Row:
    """Medians over the streams; gaps and acceptance of all together."""
    gaps = sorted((later - earlier) * 1e3 for answer in answers for earlier, later in pairwise(answer.times))
    tpot = [(a.times[-1] - a.times[0]) / (a.tokens - 1) for a in answers if a.tokens > 1]
    told = [answer.acceptance for answer in answers if answer.acceptance]
    drafted = sum(one["num_draft_tokens"] for one in told)
    accepted = sum(one["num_accepted_draft_tokens"] for one in told)
    steps = sum(one["num_spec_steps"] for one in told)
    return {
        "bench": "serving",
        "contender": "server",
        "workload": category,
        "delay_ms": DELAY,
        "split": "15/15",
        "sessions": sessions,
        "prompts": len(answers),
        "tokens": sum(answer.tokens for answer in answers),
        "ttft_ms": statistics.median(answer.times[0] for answer in answers) * 1e3,
        "itl_p50_ms": gaps[len(gaps) // 2] if gaps else None,
        "itl_p99_ms": gaps[len(gaps) * 99 // 100] if gaps else None,
        "tpot_ms": statistics.median(tpot) * 1e3,
        "decode_tps": 1 / statistics.median(tpot),
        "total_tps": None,
        "acceptance": accepted / drafted if drafted else None,
        "steps_tokens": 1 + accepted / steps if steps else None,
        "load": measure.load(),
    }


async def is_exact(rig: Rig, answer: Answered) -> bool:
    """Whether the text is what the unsplit model says."""
    messages = [{"role": "user", "content": answer.prompt.turns[0]}]
    prompt = rig.vocabulary.tokenize(rig.vocabulary.render_chat(messages), start=False)
    reference = await rig.reference(prompt, answer.tokens, 0.0, 1)
    return answer.text == rig.vocabulary.text(reference[: answer.tokens])


async def run(prompts: Sequence[Prompt], tokens: int, counts: Sequence[int]) -> list[Row]:
    """The rows."""
    rows: list[Row] = []
    async with open_rig() as rig:
        stages = await rig.stages("0,15,30", lanes=max(counts), context=CONTEXT)
        pipe = await rig.pipeline(stages, DELAY)
        listener = open_listener("127.0.0.1", 0)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with trio.open_nursery() as nursery:
            await nursery.start(serve, application(Service(pipe, MODEL)), listener)
            for count in counts:
                rows += await once(rig, url, prompts, count, tokens)
            nursery.cancel_scope.cancel()
    return rows


def plot(rows: list[dict[str, Any]], folder: Path) -> None:
    """Speed of a stream and time to its first text, by category."""
    figure, axes = report.panels(2, shared=True)
    figure.set_size_inches(9, 4.4)
    names = list(dict.fromkeys(row["workload"] for row in rows))
    for axis, column, words in (
        (axes[0], "decode_tps", "tokens/s of a stream"),
        (axes[1], "ttft_ms", "ms to the first text"),
    ):
        for number, count in enumerate(dict.fromkeys(row["sessions"] for row in rows)):
            values = {row["workload"]: row[column] for row in rows if row["sessions"] == count}
            places = [place + 0.4 * number for place in range(len(names))]
            axis.barh(places, [values[name] for name in names], height=0.4, label=f"concurrency {count}")
        axis.set(xlabel=words, yticks=range(len(names)), yticklabels=names)
        axis.legend(fontsize=8)
    report.save(figure, folder, "serving")


def main(arguments: list[str]) -> None:
    """The command line."""
    parser = report.parser("serving", __doc__)
    parser.add_argument("--speed-bench", type=Path, metavar="PATH", help="a file of SPEED-Bench")
    parser.add_argument("--tokens", type=int, help="of every answer")
    parser.add_argument("--prompts", type=int, help="of every category, at most")
    options = parser.parse_args(arguments)
    most = options.prompts or 1
    chosen: dict[str, list[Prompt]] = {}
    for prompt in read(options.speed_bench or DATA):
        if len(of := chosen.setdefault(prompt.category, [])) < most:
            of.append(prompt)
    if options.quick:
        chosen = {name: of for name, of in chosen.items() if name in ("qa", "edit-this-file")} or chosen
    prompts = [prompt for of in chosen.values() for prompt in of]
    rows = trio.run(run, prompts, options.tokens or (16 if options.quick else 24), (1, 8))
    report.finish(options, rows, [], COLUMNS, plot)
