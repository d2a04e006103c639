"""A nursery that belongs to a context manager: its tasks end with the block, its errors come out bare."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager

import trio

from meshpipe.errors import MeshpipeError

if sys.version_info < (3, 11):
    from exceptiongroup import BaseExceptionGroup  # which trio depends on there


@asynccontextmanager
async def owned_nursery() -> AsyncIterator[trio.Nursery]:
    """A nursery whose tasks are cancelled when the block ends.

    What the block raises is raised from here as it is, not in a group; so is the error of a task that crashed,
    if nothing else went wrong. If both did and all are MeshpipeErrors, it is the block's that counts: one cause has
    often two effects.
    """
    raised: BaseException | None = None
    try:
        async with trio.open_nursery() as nursery:
            try:
                yield nursery
            except BaseException as error:
                if _is_cancellation(error):
                    raise
                raised = error
            nursery.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        if raised is None:
            raise _only(group) from None
        if isinstance(raised, MeshpipeError) and group.split(MeshpipeError)[1] is None:
            raise raised from group
        raise
    if raised is not None:
        raise raised


class Latest:
    """Of those who come one after the other, only the latest goes on."""

    def __init__(self) -> None:
        self._scope = trio.CancelScope()

    def instead(self) -> trio.CancelScope:
        """A scope for the next one; that of the one before is cancelled."""
        self._scope.cancel()
        self._scope = trio.CancelScope()
        return self._scope


async def run_all(functions: Iterable[Callable[[], Awaitable[object]]]) -> None:
    """Runs the functions at the same time; the first error cancels the others and is raised bare."""
    try:
        async with trio.open_nursery() as nursery:
            for function in functions:
                nursery.start_soon(function)
    except BaseExceptionGroup as group:
        raise _only(group) from None


def _is_cancellation(error: BaseException) -> bool:
    """Whether it is nothing but cancellation, which the scope that was cancelled has to see."""
    if isinstance(error, BaseExceptionGroup):
        return all(_is_cancellation(part) for part in error.exceptions)
    return isinstance(error, trio.Cancelled)


def _only(error: BaseException) -> BaseException:
    """The one exception inside nested groups, or the group that holds several."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
