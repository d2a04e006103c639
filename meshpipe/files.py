"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path


def write_whole(path: str | os.PathLike[str], content: bytes | str) -> None:
    """Writes a file; half of it is never found under its name, and what was there stays if this fails.

    It keeps the permissions of what was there. What is no file, as a pipe or a device, is written to as it is. Text is
    UTF-8. Of several threads or processes that write it at once, one is the last. Raises OSError.
    """
    data = content.encode() if isinstance(content, str) else content
    target = Path(path).resolve()
    if target.exists() and not target.is_file():
        target.write_bytes(data)
        return
    partial = target.with_name(f"{target.name}.{secrets.token_hex(8)}.part")  # others may write it too
    try:
        with partial.open("xb") as file:
            if target.exists():
                partial.chmod(stat.S_IMODE(target.stat().st_mode))
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
