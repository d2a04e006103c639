"""What all benchmarks share: their arguments, and rows as a table, as JSON and as plots.

A row is a flat dict of numbers and short strings. The JSON file is {"machine": {...}, "rows": [...]}, with
"figures" for the ratios that a benchmark is about.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]


def parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """The arguments that every benchmark takes; add your own."""
    made = argparse.ArgumentParser(prog=f"python -m bench {name}", description=description)
    made.add_argument("--quick", action="store_true", help="a smaller run, to see that it works")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    made.add_argument("--plot", type=Path, metavar="DIR", help="write plots there (needs matplotlib)")
    return made


def machine() -> dict[str, Any]:
    """What the numbers were measured on, and how busy it is."""
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "system": platform.system(),
        "python": platform.python_version(),
        "load": os.getloadavg()[0],
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown"
    )


def table(rows: Sequence[Row], columns: Sequence[str] | None = None) -> str:
    """Rows as a Markdown table; without `columns`, all of them, in the order in which they first come."""
    columns = columns or list(dict.fromkeys(column for row in rows for column in row))
    lines = [list(columns), ["---"] * len(columns)]
    lines += [[_shown(row.get(column, "")) for column in columns] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _shown(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "**no**"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def finish(
    arguments: argparse.Namespace,
    rows: Sequence[Row],
    figures: Sequence[Row] | None = None,
    columns: Sequence[str] | None = None,
    plot: Callable[[list[dict[str, Any]], Path], None] | None = None,
) -> None:
    """Write the JSON file and the plots if they were asked for; with `figures`, print them and the table."""
    if figures is not None:
        print(table(rows, columns))
        if figures:
            print("\n" + table(figures))
    if arguments.json:
        written = {"machine": machine(), "rows": list(rows)}
        written |= {} if figures is None else {"figures": list(figures)}
        arguments.json.write_text(json.dumps(written, indent=1) + "\n")
    if plot is not None and arguments.plot:
        arguments.plot.mkdir(parents=True, exist_ok=True)
        plot([dict(row) for row in rows], arguments.plot)


def panels(count: int, shared: bool = True) -> tuple[Any, list[Any]]:
    """A figure of panels side by side, with a common y axis if `shared`, and its axes."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, count, figsize=(4.4 * count, 3.6), sharey=shared, squeeze=False)
    return figure, list(axes[0])


def save(figure: Any, folder: Path, name: str) -> None:
    """Writes `bench-NAME.png`."""
    figure.tight_layout()
    figure.savefig(folder / f"bench-{name}.png", dpi=110, metadata={"Software": None})
