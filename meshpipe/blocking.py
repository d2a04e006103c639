"""The same pipelines for plain threads: `with` and `for` where trio has `async with` and `async for`.

    from meshpipe.blocking import Pipeline

    with Pipeline.local("M.gguf", split=2, lanes=4) as pipeline:
        with pipeline.generate("Once upon a time", max_tokens=64) as generation:
            for piece in generation:
                print(piece.text, end="")

The pipeline runs in a thread of its own; any number of threads may use it at a time. KeyboardInterrupt, or any
other exception where a thread waits here, ends what it waits for over there. In a notebook, `open` and `close`
do what `with` does.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from meshpipe.pipeline.coordinator import Completion, Coordinator
from meshpipe.pipeline.request import Piece
from meshpipe.portal import Delivered, Facade, Feed, Portal, Stream

T = TypeVar("T")
SIGNALS = 0.5
"""Seconds after which a wait looks for signals: in Python, one that comes just before it begins does not end it."""


class Pipeline(Facade):
    """A pipeline that is used from plain threads. `with` opens and closes it; so do `open` and `close`.

    Made by `local`, `spawn` and `connect`, whose arguments are those of `meshpipe.Pipeline`'s.
    """

    def open(self) -> Pipeline:
        """Opens it, once. Raises what opening raises."""
        self._portal.start()
        try:
            _wait(self._portal.opened)
        except BaseException:
            self._join()
            raise
        return self

    def close(self) -> None:
        """Ends every request and closes the pipeline; returns when that is done.

        Raises what had ended the pipeline before, if something did.
        """
        error = self._join()
        if error is not None:
            raise error

    def _join(self) -> BaseException | None:
        self._portal.close()
        return _wait(self._portal.closed)

    def __enter__(self) -> Pipeline:
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, function: Callable[[Coordinator], Awaitable[T]]) -> T:
        """Runs an async function in the pipeline's thread, on trio: for what has no method here."""
        future: Future[T] = Future()
        try:
            self._portal.submit(function, future)
            return _wait(future)
        except BaseException:
            future.cancel()
            raise

    def generate(self, prompt: Any = None, **options: Any) -> Generation:
        """Starts a request and returns its output stream; options and errors as of `Coordinator.generate`."""
        return Generation(self._portal, {"prompt": prompt, **options})

    def complete(self, prompt: Any = None, **options: Any) -> Completion:
        """Runs a request to its end."""
        return self.run(lambda coordinator: coordinator.complete(prompt, **options))

    def round_trip(self) -> float:
        """Seconds that an empty session takes to reach every stage and be acknowledged."""
        return self.run(lambda coordinator: coordinator.round_trip())


class Generation(Stream):
    """One request's output: an iterator of pieces, the last of which carries the report.

    Leaving the `with` block, `cancel`, or dropping the object ends the request. One thread may iterate.
    """

    def __init__(self, portal: Portal, options: dict[str, Any]) -> None:
        super().__init__()
        self._pieces: SimpleQueue[Delivered] = SimpleQueue()
        self._feed = Feed(portal, options, self._pieces.put)
        try:
            self._feed.start()
            self.prompt_tokens = _wait(self._feed.started)
        except BaseException:
            self.cancel()
            raise

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        while True:
            with suppress(Empty):
                delivered = self._pieces.get(timeout=SIGNALS)
                break
        piece = self._taken(delivered, self._pieces.put)
        if piece is None:
            raise StopIteration
        return piece

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()


def _wait(future: Future[T]) -> T:
    while not wait((future,), timeout=SIGNALS).done:
        pass
    return future.result()
