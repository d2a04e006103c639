"""Progress bars, on standard error, where that is a terminal."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn

from meshpipe.llama.progress import watching
from meshpipe.pipeline.coordinator import Coordinator
from meshpipe.portal import Opener


@contextmanager
def bars(console: Console | None = None) -> Iterator[None]:
    """A bar for each piece of long work that begins inside; they are gone afterwards."""
    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        tasks: dict[str, TaskID] = {}

        def show(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(what, total=total)
            progress.update(tasks[what], completed=done)

        with watching(show):
            yield


def shown(opener: Opener) -> Opener:
    """The same pipeline, with bars while it opens."""

    @asynccontextmanager
    async def opened() -> AsyncIterator[Coordinator]:
        async with AsyncExitStack() as stack:
            with bars():
                coordinator = await stack.enter_async_context(opener())
            yield coordinator

    return opened
