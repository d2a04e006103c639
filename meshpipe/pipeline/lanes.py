"""Which lane a new session gets, and what its cache already holds."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import trio
from attrs import define

Tokens = npt.NDArray[np.int32]


def prefix_digest(tokens: Sequence[int]) -> bytes:
    """What an OpenSession says of the prefix that it wants kept, 16 bytes; none for no prefix."""
    if not tokens:
        return b""
    return hashlib.blake2b(np.asarray(tokens, "<i8").tobytes(), digest_size=16).digest()


def alike_digest(fingerprints: Sequence[str]) -> bytes:
    """What an OpenSession says of how all stages compute, 16 bytes; none if nothing is known of them."""
    if not fingerprints:
        return b""
    return hashlib.blake2b("\n".join(fingerprints).encode(), digest_size=16).digest()


@define
class Lease:
    """A lane, and how many leading positions of the prompt every stage's cache of it holds."""

    lane: int
    cached: int


class Lanes:
    """The lanes of a pipeline, and the tokens that their caches are known to hold.

    A session that waits gets its turn in order of asking.
    """

    def __init__(self, count: int) -> None:
        # Least recently used first: the prefix that is longest unused is overwritten.
        self._free: OrderedDict[int, Tokens] = OrderedDict(
            (lane, np.empty(0, np.int32)) for lane in range(count)
        )
        self._count = count
        self._turns = trio.Semaphore(count)

    @property
    def free(self) -> int:
        """Lanes that no session has."""
        return len(self._free)

    @property
    def count(self) -> int:
        """All lanes."""
        return self._count

    async def lease(self, prompt: Sequence[int], *, reuse: bool = True) -> Lease:
        """The free lane whose cache shares the longest prefix with the prompt; waits for a free one.

        The last token of a prompt is never counted as cached: it has to be run for its prediction.
        """
        await self._turns.acquire()
        wanted = np.asarray(prompt[:-1], np.int32)
        best, best_length = next(iter(self._free)), 0
        if reuse:
            for lane, held in self._free.items():
                length = _common_prefix(wanted, held)
                if length > best_length:
                    best, best_length = lane, length
        del self._free[best]
        return Lease(best, best_length)

    def swap(self, lease: Lease) -> None:
        """The lane is taken by another coordinator: changes the lease to the next one that is free, if any is.

        Nothing is known about what the caches hold there.
        """
        lease.cached = 0
        if self._free:
            lane, _ = self._free.popitem(last=False)
            self._free[lease.lane] = np.empty(0, np.int32)
            lease.lane = lane

    def forget(self) -> None:
        """The caches of the free lanes are lost."""
        for lane in self._free:
            self._free[lane] = np.empty(0, np.int32)

    def release(self, lane: int, held: Sequence[int]) -> None:
        """The session has ended; every stage's cache of the lane holds (at least) the tokens `held`."""
        self._free[lane] = np.asarray(held, np.int32)
        self._turns.release()


def _common_prefix(a: Tokens, b: Tokens) -> int:
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length
