"""`meshpipe generate`: text from a split model, in this process, in child processes or on other machines."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import nullcontext
from typing import Any

from rich.console import Console

from meshpipe.blocking import Pipeline
from meshpipe.cli.arguments import Commands, add_settings, checked, command, configured
from meshpipe.cli.chat import Screen
from meshpipe.cli.pipelines import pipeline_of
from meshpipe.cli.progress import shown
from meshpipe.cli.trace import add_trace, recorded
from meshpipe.configuration.kinds import Integer
from meshpipe.errors import UsageError
from meshpipe.telemetry.live import LiveView

TOKENS = Integer(1, 2**31 - 1)


def add_commands(commands: Commands) -> None:
    """Adds `generate`."""
    parser = command(
        commands,
        "generate",
        "Generate text with a split model.",
        'meshpipe generate --model M.gguf --split 0,15,30 --prompt "Once upon a time" --max-tokens 64',
        'meshpipe generate --model M.gguf --split 2 --spawn --chat --prompt "Why is the sky blue?" --json',
        'meshpipe generate --model M.gguf --split 2 --speculation draft --draft small.gguf --prompt "Once"',
        "meshpipe generate --topology mesh.toml --prompt-file question.txt --temperature 0.8 --seed 7",
    )
    what = parser.add_argument_group("what")
    what.add_argument("--prompt", help="the text to continue")
    what.add_argument(
        "--prompt-file", metavar="FILE", help="the text to continue, from a file, - for standard input"
    )
    what.add_argument("--chat", action="store_true", help="put the prompt through the model's chat template")
    what.add_argument(
        "--max-tokens",
        metavar="N",
        type=checked(TOKENS),
        default=128,
        help="tokens to generate (default 128)",
    )
    what.add_argument("--stop", action="append", default=[], help="text before which to end (several times)")
    what.add_argument("--ignore-end", action="store_true", help="go on past the model's end tokens")
    add_settings(parser, "pipeline", "engine", "speculation", "sampling", "links", "security")
    parser.add_argument("--json", action="store_true", help="print one object instead of streaming text")
    add_trace(parser)
    parser.add_argument(
        "--live", action="store_true", help="show stages and windows below the text, on a terminal"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Streams the text, or prints one JSON object with prompt_tokens, tokens, text and report."""
    prompt = _prompt(options)
    found = configured(options)
    chosen = found.settings
    what: dict[str, Any] = {
        "max_tokens": options.max_tokens,
        "sampling": chosen.sampling(),
        "speculation": chosen.speculation_settings(),
        "stop": options.stop,
        "ignore_end": options.ignore_end,
    }
    if options.chat:
        what["messages"] = [{"role": "user", "content": prompt}]
    else:
        what["prompt"] = prompt
    views: list[LiveView] | None = [] if options.live and sys.stdout.isatty() and not options.json else None
    with (
        Pipeline(shown(recorded(pipeline_of(found), options.trace, views))) as pipeline,
        pipeline.generate(**what) as generation,
        Screen(Console(highlight=False), views[0].text) if views else nullcontext() as screen,
    ):
        tokens: list[int] = []
        text: list[str] = []
        for piece in generation:
            tokens += piece.tokens
            text.append(piece.text)
            if screen is not None:
                screen.write(piece.text, "")
            elif not options.json:
                print(piece.text, end="", flush=True)
        report = generation.report
        assert report is not None
        if options.json:
            answer = {
                "prompt_tokens": list(generation.prompt_tokens),
                "tokens": tokens,
                "text": "".join(text),
                "report": report.to_dict() | {"return_route": pipeline.coordinator.return_route()},
            }
            print(json.dumps(answer))
        elif screen is None:
            print()
    return 0


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
