"""`meshpipe generate`: text from a split model, in this process, in child processes or on other machines."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import trio

from meshpipe.cli.arguments import (
    Commands,
    add_engine,
    command,
    engine_arguments,
    engine_flags,
    parse_conditions,
)
from meshpipe.cli.security import add_security, security_of
from meshpipe.errors import UsageError
from meshpipe.messages import Sampling
from meshpipe.pipeline.coordinator import Coordinator
from meshpipe.pipeline.local import open_local
from meshpipe.pipeline.remote import open_remote, open_spawned
from meshpipe.speculation.settings import MODES, Speculation
from meshpipe.topology.layout import ACTIVATIONS, read_topology


def add_commands(commands: Commands) -> None:
    """Adds `generate`."""
    parser = command(
        commands,
        "generate",
        "Generate text with a split model.",
        'meshpipe generate --model M.gguf --split 0,15,30 --prompt "Once upon a time" --max-tokens 64',
        'meshpipe generate --model M.gguf --split 2 --spawn --chat --prompt "Why is the sky blue?" --json',
        "meshpipe generate --topology mesh.toml --prompt-file question.txt --temperature 0.8 --seed 7",
    )
    where = parser.add_argument_group("where")
    where.add_argument("--model", help="GGUF file (of a model in several files, the first)")
    where.add_argument("--split", help="boundaries, 0,15,30, or a number of stages, 2 (default 1)")
    where.add_argument("--spawn", action="store_true", help="a child process for each stage")
    where.add_argument("--topology", metavar="FILE", help="stages that run already (TOML or JSON)")
    where.add_argument(
        "--delay-ms",
        type=float,
        default=0.0,
        help="with --spawn: one-way delay put on every link, for trying",
    )
    where.add_argument("--activation", choices=ACTIVATIONS, default="float32", help="how activations travel")
    what = parser.add_argument_group("what")
    what.add_argument("--prompt", help="the text to continue")
    what.add_argument(
        "--prompt-file", metavar="FILE", help="the text to continue, from a file, - for standard input"
    )
    what.add_argument("--chat", action="store_true", help="put the prompt through the model's chat template")
    what.add_argument("--max-tokens", type=int, default=128)
    what.add_argument("--stop", action="append", default=[], help="text before which to end (several times)")
    what.add_argument("--ignore-end", action="store_true", help="go on past the model's end tokens")
    how = parser.add_argument_group("sampling")
    for name, kind in (
        ("temperature", float), ("top_k", int), ("top_p", float), ("min_p", float), ("seed", int),
        ("repeat_penalty", float), ("frequency_penalty", float), ("presence_penalty", float),
    ):  # fmt: skip
        how.add_argument(f"--{name.replace('_', '-')}", type=kind)
    ahead = parser.add_argument_group("speculation")
    ahead.add_argument("--speculation", choices=MODES, default="auto")
    ahead.add_argument("--depth", default="auto", help="windows in flight: a number, or auto")
    ahead.add_argument("--width", default="auto", help="tokens of a window: a number, or auto")
    add_engine(parser)
    add_security(parser)
    parser.add_argument("--json", action="store_true", help="print one object instead of streaming text")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Streams the text, or prints one JSON object with prompt_tokens, tokens, text and report."""
    prompt = _prompt(options)
    sampling = Sampling(
        **{
            name: getattr(options, name)
            for name in (
                "temperature", "top_k", "top_p", "min_p", "seed",
                "repeat_penalty", "frequency_penalty", "presence_penalty",
            )
            if getattr(options, name) is not None
        }
    )  # fmt: skip
    speculation = Speculation(
        mode=options.speculation, depth=_auto(options, "depth"), width=_auto(options, "width")
    )
    what: dict[str, Any] = {
        "max_tokens": options.max_tokens,
        "sampling": sampling,
        "speculation": speculation,
        "stop": options.stop,
        "ignore_end": options.ignore_end,
    }
    if options.chat:
        what["messages"] = [{"role": "user", "content": prompt}]
    else:
        what["prompt"] = prompt
    trio.run(_generate, pipeline_of(options), what, options.json)
    return 0


async def _generate(
    open_pipeline: Callable[[], AbstractAsyncContextManager[Coordinator]], what: dict[str, Any], as_json: bool
) -> None:
    async with open_pipeline() as pipeline, pipeline.generate(**what) as generation:
        tokens: list[int] = []
        text: list[str] = []
        async for piece in generation:
            tokens += piece.tokens
            text.append(piece.text)
            if not as_json:
                print(piece.text, end="", flush=True)
        report = generation.report
        assert report is not None
        if as_json:
            answer = {
                "prompt_tokens": list(generation.prompt_tokens),
                "tokens": tokens,
                "text": "".join(text),
                "report": report.to_dict() | {"return_route": pipeline.return_route()},
            }
            print(json.dumps(answer))
        else:
            print()


def pipeline_of(options: argparse.Namespace) -> Callable[[], AbstractAsyncContextManager[Coordinator]]:
    """The pipeline that the arguments ask for, not opened yet. Raises UsageError and what planning raises."""
    if options.topology is not None:
        if options.spawn or options.split:
            raise UsageError("--topology names the stages: leave out --split and --spawn")
        topology = read_topology(options.topology)
        security = security_of(options)
        return lambda: open_remote(topology, options.model, security=security)
    if options.model is None:
        raise UsageError("name the model with --model, or the stages with --topology")
    split = options.split or "1"
    engine = engine_arguments(options)
    if not options.spawn:
        if options.delay_ms or options.activation != "float32":
            raise UsageError("--delay-ms and --activation concern links: use --spawn or --topology")
        return lambda: open_local(options.model, split, **engine)
    delay = parse_conditions(f"delay={options.delay_ms / 1000}") if options.delay_ms else None
    return lambda: open_spawned(
        options.model,
        split,
        stage_arguments=engine_flags(options),
        conditions=delay,
        activation=options.activation,
        lanes=options.lanes,
        context=options.context,
        threads=options.threads,
    )


def _prompt(options: argparse.Namespace) -> str:
    if (options.prompt is None) == (options.prompt_file is None):
        raise UsageError("give one of --prompt and --prompt-file")
    if options.prompt is not None:
        return str(options.prompt)
    try:
        if options.prompt_file == "-":
            return sys.stdin.read()
        with open(options.prompt_file, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the prompt from {options.prompt_file}: {error}") from None


def _auto(options: argparse.Namespace, name: str) -> Any:
    value = getattr(options, name)
    if value == "auto":
        return value
    try:
        return int(value)
    except ValueError:
        raise UsageError(f"--{name} is {value!r}: it must be a number or auto") from None
