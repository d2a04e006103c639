"""All benchmarks one after the other, into one page: `docs/benchmarks.md`, with plots in `docs/img`.

Each runs as a process of its own. One that fails, or takes three times as long as it should, is named at the end, and
the others go on; so does the page when it is interrupted: it is made of what has been measured, this time or before
(`docs/img/bench-NAME.json`). `--only NAME` runs that one alone. With `--quick` everything goes to `build/benchmarks`.
"""

from __future__ import annotations

import importlib
import json
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench import report

MINUTES = {
    "latency": 14,
    "overhead": 2,
    "tracing": 2,
    "topology": 3,
    "concurrency": 4,
    "workloads": 16,
    "frontier": 9,
    "draft": 2,
    "serving": 2,
}
"""What each takes on two cores, about."""
QUICK_MINUTES = 2
GRACE = 20.0  # seconds that one has to end its children
ROOT = Path(__file__).parent.parent


def section(name: str, result: dict[str, Any], quick: bool) -> str:
    """One benchmark: what it says of itself, its figures, its plot, its rows."""
    module = importlib.import_module(f"bench.{name}")
    machine = result["machine"]
    parts = [f"## {name}", (module.__doc__ or "").strip()]
    if result.get("figures"):
        parts.append(report.table(result["figures"]))
    if hasattr(module, "plot"):
        parts.append(f"![{name}](img/bench-{name}.png)")
    parts.append(report.table(result["rows"], module.COLUMNS))
    parts.append(
        f"`python -m bench {name}{' --quick' if quick else ''}` on {machine['cores']} cores of {machine['cpu']}, "
        f"{machine['system']}, Python {machine['python']}; {measured_load(result)}."
    )
    return "\n\n".join(parts)


def measured_load(result: dict[str, Any]) -> str:
    """Whether other work disturbed the run."""
    loads = [row["load"] for row in result["rows"] if row.get("load") is not None]
    loads = loads or [result["machine"]["load"]]
    return f"load average {min(loads):.1f} to {max(loads):.1f} while it ran, the benchmark's own processes included"


def page(results: dict[str, dict[str, Any]], quick: bool) -> str:
    """The whole page, the figures first."""
    figures = [
        {"benchmark": name} | figure
        for name, result in results.items()
        for figure in result.get("figures", [])
    ]
    exact = all(row.get("exact", True) for result in results.values() for row in result["rows"])
    head = [
        "# Benchmarks",
        "Written by `python -m bench all`; `python -m bench NAME` runs one of them, with `--quick` in a minute, and "
        "`python -m bench` lists all. SmolLM2-135M-Instruct (Q4_1); where native MTP is measured, the same with a "
        "NextN block of our own ([mtp_model.md](mtp_model.md)). Real processes on one host, one thread a stage; "
        "proxies delay every link between neighbouring stages and the return, the coordinator shares stage 0's host.",
        "Contenders take turns inside one run, behind the same kind of proxy; numbers are medians, `_low` and `_high` "
        "the range over the repetitions. A ratio is taken repetition by repetition, of runs that follow each other; "
        "its `low` and `high` are the range, unless a benchmark says otherwise. `exact` compares a row's tokens with "
        "those of the unsplit model (raw llama.cpp calls, one thread, flash attention on, prompts in decodes of at "
        "most 63 rows, then one row at a time): "
        + ("in every row they are equal." if exact else "**not in every row they are equal.**"),
        report.table(figures),
    ]
    return "\n\n".join(head + [section(name, result, quick) for name, result in results.items()]) + "\n"


def run(name: str, images: Path, quick: bool) -> str:
    """Runs one; what went wrong, or ""."""
    command = [sys.executable, "-m", "bench", name, "--json", str(images / f"bench-{name}.json")]
    command += ["--plot", str(images)] + (["--quick"] if quick else [])
    limit = 3 * 60 * (QUICK_MINUTES if quick else MINUTES[name])
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        status = process.wait(limit)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # so that it ends its children
        return f"{name} was ended after {limit / 60:.0f} minutes"
    finally:
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
        process.kill()
        process.wait()
    return f"{name} ended with status {status}" if status else ""


def main(arguments: list[str]) -> None:
    """Runs what is asked for and writes the page. Exits with a message if one failed."""
    parser = report.parser("all", __doc__)
    parser.add_argument("--only", choices=MINUTES, action="append", help="run only this one; may be repeated")
    options = parser.parse_args(arguments)
    docs = ROOT / ("build/benchmarks" if options.quick else "docs")
    images = docs / "img"
    images.mkdir(parents=True, exist_ok=True)
    failures: list[str] = []
    began = time.monotonic()
    try:
        for name in options.only or MINUTES:
            print(f"== {name}", file=sys.stderr, flush=True)
            since = time.monotonic()
            failures += filter(None, [run(name, images, options.quick)])
            now = time.monotonic()
            print(f"== {name}: {now - since:.0f} s, {now - began:.0f} s in all", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        failures.append("interrupted")
    results = {
        name: json.loads(file.read_text())
        for name in MINUTES
        if (file := images / f"bench-{name}.json").exists()
    }
    (docs / "benchmarks.md").write_text(page(results, options.quick))
    if options.json:
        rows = [row for result in results.values() for row in result["rows"]]
        options.json.write_text(json.dumps({"machine": report.machine(), "rows": rows}, indent=1) + "\n")
    print(docs / "benchmarks.md")
    if failures:
        sys.exit("; ".join(failures))
