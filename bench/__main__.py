"""`python -m bench NAME [arguments]`: runs one benchmark; without a name, lists them."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import sys
from pathlib import Path

import bench
from bench.all import MINUTES

SUPPORT = {"__main__", "models", "balance", "measure", "peers", "prompts", "report", "rig"}


def summary(name: str) -> str:
    """The first line of what a benchmark says of itself."""
    source = Path(__file__).with_name(f"{name}.py").read_text()
    return (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]


def listing(names: list[str]) -> str:
    """All benchmarks: those of `all`, with the minutes that they take, and the others."""
    lines = ["usage: python -m bench NAME [--quick] [--json FILE] [--plot DIR] [...]", ""]
    lines += [f"{name:12} {minutes:3} min  {summary(name)}" for name, minutes in MINUTES.items()]
    lines += [f"{'all':12} {sum(MINUTES.values()):3} min  {summary('all')}", ""]
    lines += [f"{name:12}          {summary(name)}" for name in names if name not in (*MINUTES, "all")]
    return "\n".join(lines)


def main() -> None:
    """The command line."""
    names = sorted(
        module.name for module in pkgutil.iter_modules(bench.__path__) if module.name not in SUPPORT
    )
    if len(sys.argv) < 2:
        print(listing(names))
        return
    if sys.argv[1] not in names:
        sys.exit(f"{sys.argv[1]} is no benchmark; these are:\n\n{listing(names)}")
    importlib.import_module(f"bench.{sys.argv[1]}").main(sys.argv[2:])


if __name__ == "__main__":
    main()
