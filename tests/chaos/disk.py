"""Stages whose disk may be full: a directory that is there, or is not, decides whenever one is started."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

_START = """
[ -e "$0" ] || exec "$@"
unshare -rm true 2>/dev/null && exec unshare -rm sh -c '
    mount -t tmpfs -o size=16k none "$0" && exec env XDG_CACHE_HOME="$0" TMPDIR="$0" "$@"
' "$0" "$@"
ulimit -f 8
exec env XDG_CACHE_HOME="$0" TMPDIR="$0" "$@"
"""


def on_a_disk(full: Path, command: Sequence[str]) -> list[str]:
    """The command; as long as there is a directory `full`, it starts with an empty cache, and 16 KiB of disk.

    They are a tmpfs, in a mount namespace that ends with the process. Where that is not to be had, the process may
    write no file beyond 4 KiB.
    """
    return ["sh", "-c", _START, str(full), *command]
