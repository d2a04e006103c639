"""Whether what a stage keeps in main memory fits it: its weights, a cache for every lane, rows that it has sent."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

from attrs import frozen

from meshpipe.errors import CapacityError
from meshpipe.llama import architectures
from meshpipe.llama.gguf import read_header

log = logging.getLogger("meshpipe.memory")

# Bytes of an element, by llama.cpp's name of the type (of blocks of 32 elements, their scales included).
_ELEMENT = {
    "f32": 4, "f16": 2, "bf16": 2, "q8_0": 34 / 32, "q4_0": 18 / 32, "q4_1": 20 / 32, "q5_0": 22 / 32,
    "q5_1": 24 / 32, "iq4_nl": 18 / 32,
}  # fmt: skip


@frozen
class Need:
    """Bytes that a stage keeps: what its file takes on the disk, the caches of all lanes, rows that it has sent."""

    weights: int
    cache: int
    rows: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.cache + self.rows


def kept_positions(lanes: int, context: int, n_embd: int, budget: int) -> int:
    """Positions of each lane whose rows (float32) a budget in bytes has room for."""
    return min(context, budget // (4 * lanes * n_embd))


def need(
    path: Path, *, lanes: int, cells: int, keys: str = "f16", values: str = "f16", keep: int = 0
) -> Need:
    """What a stage of this file takes with so many lanes of `cells` positions, and these types of cache.

    `keep`: bytes that it may take for rows that it has sent.
    """
    header = read_header(path)
    elements = [
        architectures.cache_elements(header, layer) for layer in range(architectures.trunk_layers(header))
    ]
    position = sum(k * _ELEMENT[keys] + v * _ELEMENT[values] for k, v in elements)
    files = {tensor.path for tensor in header.tensors.values()}
    stored = sum(min(_stored(file), file.stat().st_size) for file in files)
    n_embd = header.integer(".embedding_length")
    rows = 4 * n_embd * lanes * kept_positions(lanes, cells, n_embd, keep)
    return Need(stored, int(lanes * cells * position), rows)


def check_fits(need: Need, budget: int | None, what: str, *, evictable: bool) -> None:
    """Raises CapacityError if `what` needs more than the budget in bytes (None: nothing is known).

    `evictable`: its weights are pages of a file, which the system may let go and read again. Then only the rest
    has to fit; weights beside it that do not are slow, and a warning in the log.
    """
    if budget is None or need.total <= budget:
        return
    rows = f" and {_gib(need.rows)} for rows that are kept (keep_rows)" if need.rows else ""
    said = f"{what} needs {_gib(need.weights)} for weights and {_gib(need.cache)} for caches{rows}"
    if evictable and need.cache + need.rows <= budget:
        log.warning(
            "%s, and %s of memory are there: what does not fit is read from the disk for every token, which is slow; "
            "fewer layers, lanes or less context would fit",
            said,
            _gib(budget),
        )
        return
    raise CapacityError(
        f"{said}, and {_gib(budget)} of memory are there: take fewer lanes, less context, a smaller cache type or "
        "fewer layers, or say with memory_limit how much may be used"
    )


def available(root: Path = Path("/")) -> int | None:
    """Bytes of main memory that can be had now: of this machine, and of its control groups. None: not known.

    Where only the size of the memory can be found out, that.
    """
    found: list[int] = []
    with suppress(OSError, ValueError):
        lines = (root / "proc/meminfo").read_text().splitlines()
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    if not found:
        with suppress(OSError, ValueError, AttributeError):  # no such call on Windows
            found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    with suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            found += _left_by_groups(root / "sys/fs/cgroup", *line.split(":", 2)[1:])
    return min(found, default=None)


def _left_by_groups(mounted: Path, controllers: str, path: str) -> Iterator[int]:
    """What this process's group leaves it, and each one above: of version 2 (no controllers named), or 1.

    Pages of files count as free, since the system lets them go. In a container the path may be the host's, where
    nothing is found here but the container's own group, at the root.
    """
    if controllers == "":
        limit, kinds = "memory.max", ("anon", "shmem")
    elif controllers == "memory":
        mounted, limit, kinds = mounted / "memory", "memory.limit_in_bytes", ("total_rss", "total_shmem")
    else:
        return
    own = PurePosixPath(path.lstrip("/"))
    for group in (own, *own.parents):
        with suppress(OSError, ValueError, KeyError):  # "max", or a kernel that does not say what is used
            most = int((mounted / group / limit).read_text())
            lines = (mounted / group / "memory.stat").read_text().splitlines()
            used = {name: int(size) for name, size in map(str.split, lines)}
            yield max(0, most - sum(used[kind] for kind in kinds))


def _stored(file: Path) -> int:
    """Slices are sparse files: what was cut away takes nothing."""
    blocks: int | None = getattr(file.stat(), "st_blocks", None)
    return file.stat().st_size if blocks is None else 512 * blocks


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**24 else f"{size / 2**20:.1f} MiB"
