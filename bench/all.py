"""All benchmarks one after the other, into one page: `docs/benchmarks.md`, with plots in `docs/img`.

Each runs as a process of its own. `--only NAME` runs that one again and keeps the page's other sections; the rows
are kept in `docs/img/bench-NAME.json`. A full run takes more than an hour, with `--quick` a few minutes (its page
goes to `build/` so that it does not replace the real one).
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench import report

NAMES = ("latency", "frontier", "topology", "concurrency", "workloads", "serving", "overhead")
ROOT = Path(__file__).parent.parent


def section(name: str, result: dict[str, Any], quick: bool) -> str:
    """One benchmark: what it says of itself, its figures, its plot, its rows."""
    module = importlib.import_module(f"bench.{name}")
    machine = result["machine"]
    parts = [f"## {name}", (module.__doc__ or "").strip()]
    if result.get("figures"):
        parts.append(report.table(result["figures"]))
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
        "Written by `python -m bench all`. SmolLM2-135M-Instruct (Q4_1), real processes on one host, one thread a "
        "stage; proxies delay every link between neighbouring stages and the return, the coordinator shares stage "
        "0's host. Contenders take turns inside one run, behind the same kind of proxy; numbers are medians, `_low` "
        "and `_high` the range over the repetitions. A ratio is taken repetition by repetition. `exact` compares "
        "a row's tokens with those of the unsplit model (raw llama.cpp calls, one thread, flash attention on, "
        "prompts in decodes of at most 63 rows, then one row at a time): "
        + ("in every row they are equal." if exact else "**not in every row they are equal.**"),
        report.table(figures),
    ]
    return "\n\n".join(head + [section(name, result, quick) for name, result in results.items()]) + "\n"


def main(arguments: list[str]) -> None:
    """Runs what is asked for and writes the page."""
    parser = report.parser("all", __doc__)
    parser.add_argument("--only", choices=NAMES, action="append", help="run only this one; may be repeated")
    options = parser.parse_args(arguments)
    docs = ROOT / ("build/benchmarks" if options.quick else "docs")
    images = docs / "img"
    images.mkdir(parents=True, exist_ok=True)
    for name in options.only or NAMES:
        print(f"== {name}", file=sys.stderr, flush=True)
        command = [sys.executable, "-m", "bench", name, "--json", str(images / f"bench-{name}.json")]
        command += ["--plot", str(images)] + (["--quick"] if options.quick else [])
        subprocess.run(command, cwd=ROOT, check=True)
    results = {
        name: json.loads(file.read_text())
        for name in NAMES
        if (file := images / f"bench-{name}.json").exists()
    }
    (docs / "benchmarks.md").write_text(page(results, options.quick))
    if options.json:
        rows = [row for result in results.values() for row in result["rows"]]
        options.json.write_text(json.dumps({"machine": report.machine(), "rows": rows}, indent=1) + "\n")
    print(docs / "benchmarks.md")
