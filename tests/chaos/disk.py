"""Stages whose disk may be full: whether it is, a file decides whenever one is started."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

_START = """
[ -e "$0/full" ] || exec "$@"
unshare -rm true 2>/dev/null && exec unshare -rm sh -c '
    mount -t tmpfs -o size=16k none "$0" && exec env XDG_CACHE_HOME="$0" TMPDIR="$0" "$@"
' "$0" "$@"
ulimit -f 8
exec env XDG_CACHE_HOME="$0" TMPDIR="$0" "$@"
"""


def on_a_disk(disk: Path, command: Sequence[str]) -> list[str]:
    """The command; as long as there is a file `full` in the directory, it starts with 16 KiB of disk, all empty.

    They are a tmpfs, in a mount namespace that ends with the process. Where that is not to be had, the process may
    write no file beyond 4 KiB.
    """
    return ["sh", "-c", _START, str(disk), *command]
