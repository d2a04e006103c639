"""`meshpipe chat`: a conversation in the terminal, with the speed of every answer while it comes."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Protocol

from attrs import define, frozen
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from meshpipe.blocking import Generation, Pipeline
from meshpipe.cli.arguments import Commands, add_settings, checked, command, configured
from meshpipe.cli.pipelines import pipeline_of
from meshpipe.cli.progress import shown
from meshpipe.cli.trace import add_trace, recorded
from meshpipe.configuration.kinds import Integer
from meshpipe.errors import CapacityError, UsageError
from meshpipe.pipeline.coordinator import Coordinator
from meshpipe.pipeline.report import Report
from meshpipe.pipeline.request import Piece
from meshpipe.wording import counted

HELP = "/new begins a new conversation; Ctrl-C ends an answer, Ctrl-D the chat."


def add_commands(commands: Commands) -> None:
    """Adds `chat`."""
    parser = command(
        commands,
        "chat",
        "Talk to a model in the terminal. " + HELP,
        "meshpipe chat --model M.gguf --split 2 --spawn",
        'meshpipe chat --topology mesh.toml --system "Answer in one sentence." --temperature 0.7',
        "meshpipe chat --model M.gguf < questions.txt",
        "meshpipe chat --model M.gguf --json < questions.txt",
    )
    what = parser.add_argument_group("what")
    what.add_argument("--system", help="what the model is told before the conversation")
    what.add_argument(
        "--max-tokens",
        metavar="N",
        type=checked(Integer(1, 2**31 - 1)),
        default=512,
        help="tokens of an answer (default 512)",
    )
    add_settings(parser, "pipeline", "engine", "speculation", "sampling", "links", "security")
    parser.add_argument(
        "--json", action="store_true", help="print one object for each answer instead of streaming text"
    )
    add_trace(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Answers what is typed, or each line of standard input, until it ends."""
    found = configured(options)
    how = {
        "max_tokens": options.max_tokens,
        "sampling": found.settings.sampling(),
        "speculation": found.settings.speculation_settings(),
    }
    asking = sys.stdin.isatty() and not options.json
    console = Console(highlight=False)
    display = Objects() if options.json else Screens(console)
    with Pipeline(shown(recorded(pipeline_of(found), options.trace))) as pipeline:
        pipeline.run(_require_template)
        if asking:
            console.print(HELP, style="dim")
        talk(pipeline, display, questions(asking), options.system, how)
    return 0


async def _require_template(coordinator: Coordinator) -> None:
    if coordinator.vocabulary.chat_template is None:
        raise UsageError("this model carries no chat template: use `meshpipe generate`")


def questions(asking: bool) -> Iterator[str]:
    """Lines with something in them: `asking`, typed behind a prompt, else those of standard input."""
    if not asking:
        yield from filter(None, map(str.strip, sys.stdin))
        return
    with suppress(ImportError):
        import readline  # noqa: F401  gives `input` its editing
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            print()
            return
        if line:
            yield line


class Display(Protocol):
    """Where answers go."""

    def answer(self, generation: Generation) -> str:
        """Reads an answer to its end, shows it, and returns its text."""

    def refuse(self, error: CapacityError) -> None:
        """A conversation has become too long."""


def talk(
    pipeline: Pipeline, display: Display, lines: Iterator[str], system: str | None, how: dict[str, Any]
) -> None:
    """The conversation. All of it goes to the model each time; the lane still holds what was there before."""
    beginning = [{"role": "system", "content": system}] if system else []
    messages = list(beginning)
    for line in lines:
        if line == "/new":
            messages = list(beginning)
            continue
        messages.append({"role": "user", "content": line})
        try:
            with pipeline.generate(messages=messages, **how) as generation:
                text = display.answer(generation)
        except CapacityError as error:
            messages.pop()
            display.refuse(error)
            continue
        messages.append({"role": "assistant", "content": text})


@frozen
class Screens:
    """For people: text as it comes, and a line on how fast that was."""

    console: Console

    def answer(self, generation: Generation) -> str:
        """See `Display`."""
        text, meter = show(generation, self.console)
        report = generation.report
        if report is not None:
            notes = self.console if self.console.is_terminal else Console(stderr=True, highlight=False)
            notes.print(f"[{conclude(report, meter)}]", style="dim", markup=False, soft_wrap=True)
        return text

    def refuse(self, error: CapacityError) -> None:
        """See `Display`."""
        self.console.print(f"{error} (/new begins a new conversation)", style="red")


class Objects:
    """For machines: a line for each answer, an object with prompt_tokens, tokens, text and report, or with error."""

    def answer(self, generation: Generation) -> str:
        """See `Display`."""
        pieces = list(generation)
        text = "".join(piece.text for piece in pieces)
        said = {
            "prompt_tokens": list(generation.prompt_tokens),
            "tokens": [token for piece in pieces for token in piece.tokens],
            "text": text,
            "report": generation.report.to_dict() if generation.report is not None else None,
        }
        print(json.dumps(said), flush=True)
        return text

    def refuse(self, error: CapacityError) -> None:
        """See `Display`."""
        print(json.dumps({"error": str(error)}), flush=True)


def show(generation: Generation, console: Console) -> tuple[str, Meter]:
    """Prints an answer as it comes; on a terminal, a line below says how fast. Ctrl-C ends the answer."""
    text: list[str] = []
    meter = Meter()
    cancelled = False
    with Screen(console) as screen:
        pieces = iter(generation)
        while True:
            try:
                piece = next(pieces, None)
                if piece is None:
                    return "".join(text), meter
                meter.count(piece, time.monotonic())
                text.append(piece.text)
                screen.write(piece.text, meter.status())
            except KeyboardInterrupt:
                if cancelled:
                    raise
                cancelled = True
                generation.cancel()  # and go on to what was committed before


@define
class Meter:
    """How fast an answer comes, and how much of what ran ahead was right."""

    tokens: int = 0
    right: int = 0
    wrong: int = 0
    _first: float | None = None
    _last: float = 0.0
    _later: int = 0  # tokens behind the first commit

    def count(self, piece: Piece, now: float) -> None:
        """One more piece, at `now` (seconds)."""
        if not piece.tokens:
            return
        if self._first is None:
            self._first = now
        else:
            self._later += len(piece.tokens)
        self._last = now
        self.tokens += len(piece.tokens)
        self.right += sum(source is not None for source in piece.sources)
        self.wrong += piece.diverged

    @property
    def rate(self) -> float | None:
        """Tokens per second behind the first commit."""
        if self._first is None or self._last <= self._first:
            return None
        return self._later / (self._last - self._first)

    @property
    def acceptance(self) -> float | None:
        """Of the guesses that were sent and judged, the share that was right."""
        judged = self.right + self.wrong
        return self.right / judged if judged else None

    def status(self) -> str:
        """All in one line."""
        parts = [counted(self.tokens, "token")]
        if self.rate is not None:
            parts.append(f"{self.rate:.1f} tokens/s")
        if self.acceptance is not None:
            parts.append(f"acceptance {self.acceptance:.0%}")
        return ", ".join(parts)


def conclude(report: Report, meter: Meter) -> str:
    """The last word on an answer."""
    parts = [meter.status(), f"{report.cached_tokens} of {report.prompt_tokens} prompt tokens were cached"]
    if report.finish_reason not in ("end", "stop"):
        parts.append(report.finish_reason)
    return ", ".join(parts)


class Screen:
    """Text as it comes. On a terminal its last line, and the status below it, are drawn over until complete.

    `below` gives the status for so many columns whenever it is drawn, in place of what `write` says.
    """

    def __init__(self, console: Console, below: Callable[[int], str] | None = None) -> None:
        self._console = console
        self._below = below
        self._line = ""
        self._status = ""
        self._live: Live | None = None
        if console.is_terminal:
            self._live = Live(
                console=console, get_renderable=self._render, transient=True, refresh_per_second=12
            )

    def __enter__(self) -> Screen:
        drawing: AbstractContextManager[Any] = self._live or nullcontext()
        drawing.__enter__()
        return self

    def write(self, text: str, status: str) -> None:
        """Adds text."""
        if self._live is None:
            self._console.file.write(text)
            self._console.file.flush()
            return
        *lines, self._line = (self._line + text).split("\n")
        self._status = status
        for line in lines:
            self._console.print(Text(line), soft_wrap=True)

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._console.print(Text(self._line), soft_wrap=True)
        else:
            self._console.file.write("\n")

    def _render(self) -> Group:
        status = self._below(self._console.width) if self._below is not None else self._status
        return Group(Text(self._line), Text(status, style="dim"))
