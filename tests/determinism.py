"""Runs trio so that the same seed gives the same trace: virtual time, and the scheduler's dice loaded.

trio shuffles the tasks that are ready, so that nobody comes to rely on their order. It has a switch for tests
that want it reproducible: with it on, a batch is sorted by the age of its tasks before a seeded shuffle. What is
run may start no threads and touch no sockets, whose timing no seed fixes.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar
from unittest import mock

import trio
from trio._core import _run as scheduler

T = TypeVar("T")


def run(main: Callable[..., Awaitable[T]], *args: Any, seed: int = 0) -> T:
    """`trio.run(main, *args)` on an autojump clock, in an order that `seed` alone decides."""
    with (
        mock.patch.object(scheduler, "_ALLOW_DETERMINISTIC_SCHEDULING", True),
        mock.patch.object(scheduler, "_r", random.Random(seed)),
    ):
        return trio.run(main, *args, clock=trio.testing.MockClock(autojump_threshold=0))
