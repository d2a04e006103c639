"""What all benchmarks share: their arguments, and rows as a table, as JSON and as plots.

A row is a flat dict of numbers and short strings. The JSON file is {"machine": {...}, "rows": [...]}.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Mapping, Sequence
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
    """What the numbers were measured on."""
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "system": platform.system(),
        "python": platform.python_version(),
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown"
    )


def table(rows: Sequence[Row]) -> str:
    """Rows as a Markdown table; columns in the order in which they first come."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = [columns, ["---"] * len(columns)]
    lines += [[_shown(row.get(column, "")) for column in columns] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def finish(arguments: argparse.Namespace, rows: Sequence[Row]) -> None:
    """Write the JSON file if one was asked for."""
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine(), "rows": list(rows)}, indent=1) + "\n")
