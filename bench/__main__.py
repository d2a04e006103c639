"""`python -m bench NAME [arguments]`: runs one benchmark."""

from __future__ import annotations

import importlib
import pkgutil
import sys

import bench

SUPPORT = {"__main__", "models", "measure", "peers", "prompts", "report", "rig", "trace"}


def main() -> None:
    names = sorted(
        module.name for module in pkgutil.iter_modules(bench.__path__) if module.name not in SUPPORT
    )
    if len(sys.argv) < 2 or sys.argv[1] not in names:
        sys.exit(f"usage: python -m bench NAME [--help]\nNAME is one of: {', '.join(names)}")
    importlib.import_module(f"bench.{sys.argv[1]}").main(sys.argv[2:])


if __name__ == "__main__":
    main()
