"""How far long work is: told to whoever watches, as a log would be, from wherever the work is done.

with watching(lambda what, done, total: print(what, done, "of", total)):
    ...  # slicing and loading, also in threads and tasks that begin here
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Watch = Callable[[str, int, int], None]
"""Is told what is being done, how much of it is done, and how much there is; in any thread, must be quick."""

_watch: ContextVar[Watch | None] = ContextVar("meshpipe_progress", default=None)


@contextmanager
def watching(watch: Watch) -> Iterator[None]:
    """Lets `watch` be told of the work that begins inside."""
    token = _watch.set(watch)
    try:
        yield
    finally:
        _watch.reset(token)


def watched() -> bool:
    """Whether anybody wants to know."""
    return _watch.get() is not None


def report(what: str, done: int, total: int) -> None:
    """Tells whoever watches."""
    watch = _watch.get()
    if watch is not None:
        watch(what, done, total)
