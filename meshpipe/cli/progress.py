"""Progress bars, on standard error, where that is a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn

from meshpipe.blocking import Pipeline
from meshpipe.llama.progress import watching
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


@contextmanager
def opened(opener: Opener) -> Iterator[Pipeline]:
    """A pipeline, with bars while it opens."""
    pipeline = Pipeline(opener)
    with bars():
        pipeline.open()
    try:
        yield pipeline
    finally:
        pipeline.close()
