"""The command line: one line for what is wrong, exit codes, examples in every help, a chat on a terminal."""

from __future__ import annotations

import argparse
import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console
from simulated import periodic, serial
from test_facades import QUICK, pipe

from meshpipe import blocking
from meshpipe.cli import chat, main
from meshpipe.cli.commands import parser
from meshpipe.errors import StageLostError
from meshpipe.pipeline.request import Piece


def subcommands() -> dict[str, argparse.ArgumentParser]:
    (action,) = [a for a in parser()._actions if isinstance(a, argparse._SubParsersAction)]
    return dict(action.choices)


def test_every_command_has_examples_that_parse() -> None:
    for name, command in subcommands().items():
        assert command.epilog is not None
        examples = re.findall(
            r"^  (?:.*&& )?(?:MESHPIPE_\w+=\S+ )?meshpipe (.*)$", command.epilog, re.MULTILINE
        )
        assert examples, name
        for example in examples:
            words = [word.strip("'\"") for word in re.findall(r"\"[^\"]*\"|'[^']*'|\S+", example)]
            arguments = words[: words.index("<") if "<" in words else None]
            arguments = arguments[: arguments.index(">") if ">" in arguments else None]
            assert parser().parse_args(arguments).run


def test_every_command_is_documented() -> None:
    page = (Path(__file__).parent.parent / "docs" / "cli.md").read_text()
    for name in subcommands():
        assert f"`meshpipe {name}" in page
    assert "exit codes" in parser().format_help()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "COMMAND"),
        (["generat"], "invalid choice: 'generat'"),
        (
            ["generate", "--lane", "2"],
            "arguments: --lane 2; did you mean --lanes? (see meshpipe generate --help)",
        ),
        (["serve", "--zzz"], "unrecognized arguments: --zzz (see meshpipe serve --help)"),
        (["generate", "--prompt", "x", "--model", "M", "--max-tokens", "0"], "must be an integer from 1"),
        (["demo", "--max-tokens", "3.5"], "'3.5' is not allowed: it must be an integer from 1 to 2048"),
        (["demo", "--max-tokens", "2000"], "--max-tokens is 2000: behind a prompt of "),
        (["demo", "--prompt", ""], "--prompt has 0 tokens: 1 to 2047 fit"),
        (["demo", "--delay-ms", "-5"], "'-5' is not allowed: it must be a number from 0 to 100000"),
        (["--log", "loud", "demo"], "'loud' is not allowed: it must be one of debug"),
        (["stage", "--model", "M.gguf"], "--layers 15:30"),
        (["generate", "--model", "M.gguf", "--prompt", "x", "--n-gpu-layers", "99999999999"], "n_gpu_layers"),
        (["chat"], "name the model with --model, or the stages with --topology"),
    ],
)
def test_wrong_arguments_are_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_exit_codes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(error: BaseException) -> None:
        def run(_: argparse.Namespace) -> int:
            raise error

        monkeypatch.setattr("meshpipe.cli.config.run", run)

    fails(StageLostError("stage 1 is gone"))
    assert main(["config"]) == 3
    assert capsys.readouterr().err == "meshpipe: stage 1 is gone\n"
    fails(KeyboardInterrupt())
    assert main(["config"]) == 130
    assert capsys.readouterr().err == ""


def test_a_stage_that_is_not_there_is_worth_another_try(tmp_path: Path, smollm2: Path) -> None:
    file = tmp_path / "mesh.toml"
    file.write_text(f'model = "{smollm2}"\n[[stages]]\naddress = "127.0.0.1:1"\n')
    assert main(["generate", "--topology", str(file), "--prompt", "x"]) == 3


# ---------------------------------------------------------------- chat


def test_meter() -> None:
    meter = chat.Meter()
    assert meter.status() == "0 tokens"
    meter.count(Piece("", (1, 2), sources=(None, None)), 10.0)
    assert meter.status() == "2 tokens"
    meter.count(Piece("", (3, 4, 5), sources=("ngram", "ngram", None), diverged=True), 10.5)
    assert meter.status() == "5 tokens, 6.0 tokens/s, acceptance 67%"
    meter.count(Piece("", ()), 99.0)
    assert meter.rate == 6.0


def test_chat_sends_the_whole_conversation_and_says_how_fast() -> None:
    asked: list[list[dict[str, str]]] = []
    out = io.StringIO()
    with blocking.Pipeline(pipe(periodic(), cost=QUICK)) as pipeline:
        generate = pipeline.generate

        def by_messages(messages: list[dict[str, str]], **how: object) -> blocking.Generation:
            asked.append(list(messages))
            return generate([1] * len(messages), **how)

        pipeline.generate = by_messages  # type: ignore[method-assign, assignment]
        chat.talk(
            pipeline,
            chat.Screens(Console(file=out, force_terminal=True, width=100, highlight=False)),
            iter(["one", "two", "/new", "three"]),
            "be brief",
            {"max_tokens": 50},
        )
    answers = [" ".join(map(str, serial(periodic(), [1] * count, 50))) for count in (2, 4)]
    system = {"role": "system", "content": "be brief"}
    assert [[message["content"].strip() for message in messages] for messages in asked] == [
        ["be brief", "one"],
        ["be brief", "one", answers[0], "two"],
        ["be brief", "three"],
    ]
    assert all(messages[0] == system for messages in asked)
    shown = re.sub(r"\x1b\[[^A-Za-z]*[A-Za-z]", "", out.getvalue())
    assert answers[1] in re.sub(r"\s+", " ", shown)
    assert "of 4 prompt tokens were cached, length]" in shown
    assert "tokens/s, acceptance 1" in shown


def test_chat_for_machines(capsys: pytest.CaptureFixture[str]) -> None:
    with blocking.Pipeline(pipe(periodic(), cost=QUICK, context=60)) as pipeline:
        generate = pipeline.generate

        def by_messages(messages: list[dict[str, str]], **how: object) -> blocking.Generation:
            return generate([1] * 30 * len(messages), **how)

        pipeline.generate = by_messages  # type: ignore[method-assign, assignment]
        chat.talk(pipeline, chat.Objects(), iter(["one", "two"]), None, {"max_tokens": 8})
    said, refused = map(json.loads, capsys.readouterr().out.splitlines())
    assert said["tokens"] == serial(periodic(), [1] * 30, 8)
    assert said["text"].split() == list(map(str, said["tokens"]))
    assert said["report"]["completion_tokens"] == 8
    assert "context" in refused["error"]


class Terminal:
    """A child process whose terminal this is."""

    def __init__(self, *command: str) -> None:
        self._fd, theirs = pty.openpty()
        self.child = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
        )
        os.close(theirs)
        self._seen = b""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.child.kill()
        self.child.wait()
        os.close(self._fd)

    def type(self, text: bytes) -> None:
        os.write(self._fd, text)

    def read_until(self, wanted: str, deadline: float = 60.0) -> str:
        """What came since the last call, up to the first `wanted`."""
        end = time.monotonic() + deadline
        while (at := self._seen.find(wanted.encode())) < 0:
            ready, _, _ = select.select([self._fd], [], [], max(0.0, end - time.monotonic()))
            assert ready, self._seen.decode(errors="replace")
            self._seen += os.read(self._fd, 65536)
        text, self._seen = self._seen[:at], self._seen[at + len(wanted) :]
        return text.decode(errors="replace")


@pytest.mark.slow
def test_chat_on_a_terminal(smollm2: Path) -> None:
    with Terminal(
        sys.executable, "-m", "meshpipe", "chat", "--model", str(smollm2), "--split", "2", "--spawn",
        "--context", "1024", "--max-tokens", "600",
    ) as tty:  # fmt: skip
        tty.read_until("> ")
        tty.type(b"Name a river.\n")
        assert "river" in tty.read_until("0 of ").replace("Name a river.", "")
        tty.read_until("> ")
        tty.type(b"Write a very long story.\n")
        tty.read_until(" tokens/s")
        tty.child.send_signal(signal.SIGINT)
        said = tty.read_until("cancelled]")
        assert int(re.findall(r"(\d+) of \d+ prompt tokens were cached", said)[-1]) > 20
        tty.read_until("> ")
        tty.type(b"\x04")
        assert tty.child.wait(30) == 0


@pytest.mark.slow
def test_ctrl_c_ends_everything_without_a_word(smollm2: Path) -> None:
    child = subprocess.Popen(
        [
            sys.executable, "-m", "meshpipe", "generate", "--model", str(smollm2), "--split", "2", "--spawn",
            "--prompt", "1 2 3 4", "--max-tokens", "4000", "--ignore-end",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdout.read(1)
    stages = json.loads(
        "[" + ",".join(Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()) + "]"
    )
    child.send_signal(signal.SIGINT)
    assert child.wait(30) == 130
    assert child.stderr.read() == b""
    child.stdout.close()
    child.stderr.close()
    assert not [stage for stage in stages if os.path.exists(f"/proc/{stage}")]
