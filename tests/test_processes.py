"""The real model in real processes: exactness with speculation, concurrency, cancellation, and clean ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import trio
import trustme
from reference import greedy

from meshpipe import Conditions, Coordinator, Pipeline, Sampling, Speculation
from meshpipe.llama.slicing import slice_model
from meshpipe.llama.vocabulary import Vocabulary
from meshpipe.wire import Security, client_context, server_context

pytestmark = pytest.mark.slow

# Text that is foretold, text that is not, and text that begins foretold and goes elsewhere.
PROMPTS = [
    "Count: 1 2 3 4 5 6 7 8 9 10 1 2 3 4 5 6 7 8 9 10 1 2 3 4 5 6 7",
    "The most surprising thing about octopuses is",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\ndef mul(a, b):\n    return",
    "<|im_start|>user\nName three rivers.<|im_end|>\n<|im_start|>assistant\n",
]
COUNT = 32


@pytest.fixture(scope="module")
def expected(smollm2: Path) -> dict[str, list[int]]:
    """The unsplit model's greedy tokens, by raw calls."""
    vocabulary = Vocabulary(smollm2)
    answers = {}
    for prompt in PROMPTS:
        tokens = greedy(smollm2, vocabulary.tokenize(prompt), COUNT)
        ends = [at for at, token in enumerate(tokens) if token in vocabulary.end_tokens]
        answers[prompt] = tokens[: ends[0] + 1] if ends else tokens
    vocabulary.close()
    return answers


async def check(pipeline: Coordinator, prompt: str, expected: dict[str, list[int]], **options: Any) -> None:
    done = await pipeline.complete(prompt, max_tokens=COUNT, **options)
    assert list(done.tokens) == expected[prompt], (prompt, options)
    assert done.report.exact


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Certificate, key and authority files for 127.0.0.1: both sides of every connection prove who they are."""
    directory = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_pem.write_to_path(directory / "key.pem")
    for blob in issued.cert_chain_pems:
        blob.write_to_path(directory / "cert.pem", append=True)
    authority.cert_pem.write_to_path(directory / "ca.pem")
    return [str(directory / name) for name in ("cert.pem", "key.pem", "ca.pem")]


def opened(kind: str, model: Path, split: str, threads: int, certificates: list[str]):  # type: ignore[no-untyped-def]
    options: dict[str, Any] = {"lanes": 4, "context": 512, "threads": threads}
    if kind == "memory":
        return Pipeline.local(model, split, **options)
    if kind == "tls":
        cert, key, ca = certificates
        options["stage_arguments"] = ["--tls-cert", cert, "--tls-key", key, "--tls-ca", ca]
        options["security"] = Security(
            server=server_context(cert, key, ca), client=client_context(ca, cert, key)
        )
    return Pipeline.spawn(model, split, **options)


@pytest.mark.parametrize(
    ("kind", "split", "threads"),
    [
        ("memory", "0,15,30", 1),
        ("memory", "0,10,20,30", 2),
        ("tcp", "0,15,30", 2),
        ("tcp", "0,10,20,30", 1),
        ("tcp", "0,3,9,15,25,30", 1),
        ("tls", "0,10,20,30", 1),
        ("tls", "0,3,9,15,25,30", 1),
    ],
)
async def test_says_what_the_unsplit_model_says(
    smollm2: Path,
    expected: dict[str, list[int]],
    certificates: list[str],
    kind: str,
    split: str,
    threads: int,
) -> None:
    """Four requests at a time, with and without speculation; one cancelled in the middle leaves its lane free."""
    async with opened(kind, smollm2, split, threads, certificates) as pipeline:
        for speculation in (Speculation(mode="off"), Speculation(), Speculation(depth=6, width=3)):
            async with trio.open_nursery() as nursery:
                for prompt in PROMPTS:
                    nursery.start_soon(partial(check, pipeline, prompt, expected, speculation=speculation))
        async with pipeline.generate(PROMPTS[0], max_tokens=400, ignore_end=True) as generation:
            await generation.__anext__()
        await check(pipeline, PROMPTS[1], expected)
        assert pipeline.return_route() == ("memory" if kind == "memory" else "direct")
        with trio.fail_after(10):
            while pipeline.lanes.free < 4:  # noqa: ASYNC110
                await trio.sleep(0.01)


async def test_over_a_slow_link_and_with_cancellations(smollm2: Path, expected: dict[str, list[int]]) -> None:
    async with Pipeline.spawn(
        smollm2, 2, lanes=3, context=512, conditions=Conditions(delay=0.03, jitter=0.01)
    ) as pipeline:
        async with trio.open_nursery() as nursery:
            for number, prompt in enumerate(PROMPTS * 2):
                if number % 3 == 1:
                    generation = pipeline.generate(prompt, max_tokens=400, ignore_end=True)
                    await generation.__anext__()
                    generation.cancel()
                else:
                    nursery.start_soon(check, pipeline, prompt, expected)
        assert pipeline.active == 0


async def test_sampled_text_is_the_same_whatever_runs_ahead(smollm2: Path) -> None:
    sampling = Sampling(temperature=0.8, seed=5, repeat_penalty=1.1)
    outputs = []
    async with Pipeline.local(smollm2, 3, context=512) as pipeline:
        for speculation in (Speculation(mode="off"), Speculation(depth=4, width=5), Speculation()):
            done = await pipeline.complete(
                PROMPTS[0], max_tokens=60, sampling=sampling, speculation=speculation, ignore_end=True
            )
            outputs.append(done.tokens)
    assert outputs[0] == outputs[1] == outputs[2]
    async with Pipeline.local(smollm2, 1, context=512) as pipeline:
        done = await pipeline.complete(PROMPTS[0], max_tokens=60, sampling=sampling, ignore_end=True)
    assert done.tokens == outputs[0]


def resident(pid: int | str) -> int:
    """Bytes that a process holds in memory."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS"))


WHOLE = """
import sys
from meshpipe.llama.decodes import Span
from meshpipe.llama.engine import StageEngine
with StageEngine(sys.argv[1], context=512, probe=True) as engine:
    engine.run([Span(0, 0, [1] * 63, wanted=1)])
    print(next(l.split()[1] for l in open("/proc/self/status") if l.startswith("VmRSS")))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads memory from /proc")
@pytest.mark.parametrize("split", ["0,15,30", "0,10,20,30"])
async def test_a_stage_holds_its_share_of_the_memory(smollm2: Path, split: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WHOLE, str(smollm2)], capture_output=True, text=True, check=True, timeout=120
    )
    unsplit = int(done.stdout) * 1024
    bounds = [int(bound) for bound in split.split(",")]
    async with Pipeline.spawn(smollm2, split, context=512) as pipeline:
        await pipeline.complete("word " * 70, max_tokens=4)
        held = [resident(pid) for pid in pipeline.processes]
    for (start, stop), memory in zip(pairwise(bounds), held, strict=True):
        share = slice_model(smollm2, start, stop).stat().st_blocks * 512 / smollm2.stat().st_size
        assert memory < unsplit * share + 120 * 2**20, (start, stop, memory, unsplit, share)


def children(of: int) -> list[int]:
    """Children that any thread of the process has started."""
    lists = Path(f"/proc/{of}/task").glob("*/children")
    return [int(pid) for found in lists for pid in found.read_text().split()]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads children from /proc")
async def test_children_end_when_the_parent_is_killed(smollm2: Path) -> None:
    script = (
        "import sys, trio\nfrom meshpipe import Pipeline\n"
        "async def main():\n"
        "    async with Pipeline.spawn(sys.argv[1], '0,1,30', context=64):\n"
        "        print('open', flush=True)\n"
        "        await trio.sleep_forever()\n"
        "trio.run(main)\n"
    )
    process = await trio.lowlevel.open_process(
        [sys.executable, "-c", script, str(smollm2)], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL
    )
    assert process.stdout is not None
    with trio.fail_after(60):
        assert (await process.stdout.receive_some()).startswith(b"open")
    try:
        stages = children(process.pid)
        assert len(stages) == 2
    finally:
        process.send_signal(signal.SIGKILL)
        await process.wait()
        await process.stdout.aclose()
    with trio.fail_after(20):
        while any(_runs(pid) for pid in stages):  # noqa: ASYNC110
            await trio.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def command(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "meshpipe", *arguments], capture_output=True, text=True, timeout=120, **options
    )


def test_stage_command_serves_drains_and_exits_clean(
    smollm2: Path, expected: dict[str, list[int]], tmp_path: Path
) -> None:
    stages, places = [], []
    try:
        for layers in ("0:15", "15:30"):
            stage = subprocess.Popen(
                [sys.executable, "-m", "meshpipe", "stage", "--model", str(smollm2), "--layers", layers,
                 "--listen", "127.0.0.1:0", "--context", "512", "--json"],
                stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            stages.append(stage)
            assert stage.stdout is not None
            ready = json.loads(stage.stdout.readline())
            assert f"{ready['layers'][0]}:{ready['layers'][1]}" == layers
            places.append(f'[[stages]]\nlayers = "{layers}"\naddress = "{ready["address"]}"\n')
        file = tmp_path / "mesh.toml"
        file.write_text(f'model = "{smollm2}"\n' + "".join(places))
        done = command(
            "generate", "--topology", str(file), "--prompt", PROMPTS[0], "--max-tokens", str(COUNT), "--json"
        )
        assert done.returncode == 0, done.stderr
        answer = json.loads(done.stdout)
        assert answer["tokens"] == expected[PROMPTS[0]]
        assert answer["report"]["return_route"] == "direct"
    finally:
        for stage in stages:
            stage.send_signal(signal.SIGTERM)
        codes = [stage.wait(timeout=20) for stage in stages]
        for stage in stages:
            assert stage.stdout is not None
            stage.stdout.close()
    assert codes == [0, 0]


def test_generate_command_json_and_text(smollm2: Path, expected: dict[str, list[int]]) -> None:
    done = command(
        "generate", "--model", str(smollm2), "--split", "0,15,30", "--context", "512",
        "--prompt", PROMPTS[1], "--max-tokens", str(COUNT), "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert set(answer) == {"prompt_tokens", "tokens", "text", "report"}
    assert answer["tokens"] == expected[PROMPTS[1]]
    plain = command(
        "generate", "--model", str(smollm2), "--split", "2", "--context", "512", "--prompt", PROMPTS[1],
        "--max-tokens", str(COUNT),
    )  # fmt: skip
    assert plain.stdout.rstrip("\n") == answer["text"].rstrip("\n")


def test_bad_input_is_one_line_and_exit_code_2(smollm2: Path, tmp_path: Path) -> None:
    model = str(smollm2)
    junk = tmp_path / "junk.gguf"
    junk.write_bytes(b"not a model" * 100)
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(smollm2.read_bytes()[: 1 << 20])
    say = ["--prompt", "x", "--max-tokens", "1"]
    for arguments, message in [
        (["generate", "--model", str(tmp_path / "none.gguf"), *say], "none.gguf"),
        (["generate", "--model", str(junk), *say], "GGUF"),
        (["generate", "--model", str(cut), *say], "truncated"),
        (["generate", "--model", model, "--split", "0,15", *say], "30"),
        (["generate", "--model", model, "--split", "0,20,10,30", *say], "ascend"),
        (["generate", "--model", model, "--split", "31", *say], "31"),
        (["generate", "--model", model, "--context", "100000", *say], "8192"),
        (["generate", "--model", model, "--lanes", "0", *say], "lanes"),
        (["generate", *say], "--model"),
        (["generate", "--model", model], "--prompt"),
        (["generate", "--model", model, "--temperature", "-1", "--prompt", "x"], "temperature"),
        (["generate", "--model", model, "--depth", "deep", *say], "--depth"),
        (["generate", "--topology", str(tmp_path / "none.toml"), *say], "none.toml"),
        (["stage", "--model", model, "--layers", "5:5"], "15:30"),
        (["stage", "--model", model, "--layers", "20:40"], "30"),
        (["stage", "--model", model, "--layers", "0:1", "--listen", "0.0.0.0:0"], "refusing to listen"),
        (["stage", "--model", model, "--layers", "0:1", "--listen", "nowhere"], "expected an address"),
        (["slice", model, "--layers", "15"], "15:30"),
        (["inspect", str(junk)], "GGUF"),
    ]:
        done = command(*arguments)
        assert done.returncode == 2, (arguments, done.stdout, done.stderr)
        assert message in done.stderr
        assert "Traceback" not in done.stderr
        assert done.stdout == ""


def test_inspect_and_slice_commands(smollm2: Path) -> None:
    table = command("inspect", str(smollm2))
    assert table.returncode == 0
    assert "llama" in table.stdout
    assert json.loads(command("inspect", str(smollm2), "--json").stdout)["layers"] == 30
    sliced = json.loads(command("slice", str(smollm2), "--layers", "15:30", "--json").stdout)
    assert os.path.exists(sliced["path"])
    again = command("certify", str(smollm2), "--split", "0,7,30")
    assert again.returncode == 0
    assert "bit for bit" in again.stdout
