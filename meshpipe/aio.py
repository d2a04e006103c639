"""The same pipelines for asyncio: `async with` and `async for` as on trio, with the same names and options.

    from meshpipe.aio import Pipeline

    async with Pipeline.spawn("M.gguf", split=2, lanes=4) as pipeline:
        async with pipeline.generate("Once upon a time", max_tokens=64) as generation:
            async for piece in generation:
                print(piece.text, end="")

The pipeline runs in a thread of its own, so that nothing of it delays the event loop. Cancelling a task that
waits here ends what it waits for over there; what goes wrong there is raised here. As on trio, a generation's
buffer holds its whole answer if need be: who reads slowly delays nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

from meshpipe.errors import UsageError
from meshpipe.pipeline.coordinator import Completion, Coordinator
from meshpipe.pipeline.request import Piece
from meshpipe.portal import Delivered, Facade, Feed, Portal, Stream

T = TypeVar("T")


class Pipeline(Facade):
    """A pipeline that is used from asyncio. `async with` opens and closes it; so do `open` and `aclose`.

    Made by `local`, `spawn` and `connect`, whose arguments are those of `meshpipe.Pipeline`'s.
    """

    async def open(self) -> Pipeline:
        """Opens it, once. Raises what opening raises."""
        self._portal.start()
        try:
            await asyncio.shield(asyncio.wrap_future(self._portal.opened))
        except BaseException:
            await self._join()
            raise
        return self

    async def aclose(self) -> None:
        """Ends every request and closes the pipeline; a cancellation is kept until that is done.

        Raises what had ended the pipeline before, if something did.
        """
        error = await self._join()
        if error is not None:
            raise error

    async def _join(self) -> BaseException | None:
        self._portal.close()
        closed = asyncio.wrap_future(self._portal.closed)
        cancelled: asyncio.CancelledError | None = None
        while not closed.done():
            try:
                await asyncio.shield(closed)
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled
        return closed.result()

    async def __aenter__(self) -> Pipeline:
        return await self.open()

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def run(self, function: Callable[[Coordinator], Awaitable[T]]) -> T:
        """Runs an async function in the pipeline's thread, on trio: for what has no method here."""
        return await asyncio.wrap_future(self._portal.submit(function))

    def generate(self, prompt: Any = None, **options: Any) -> Generation:
        """Starts a request and returns its output stream; options as of `Coordinator.generate`.

        What is wrong with the request is raised where the stream is first awaited.
        """
        return Generation(self._portal, {"prompt": prompt, **options})

    async def complete(self, prompt: Any = None, **options: Any) -> Completion:
        """Runs a request to its end."""
        return await self.run(lambda coordinator: coordinator.complete(prompt, **options))

    async def round_trip(self) -> float:
        """Seconds that an empty session takes to reach every stage and be acknowledged."""
        return await self.run(lambda coordinator: coordinator.round_trip())


class Generation(Stream):
    """One request's output: an async iterator of pieces, the last of which carries the report.

    Leaving the `async with` block, `cancel`, or dropping the object ends the request. A `__anext__` that is
    cancelled loses no piece.
    """

    def __init__(self, portal: Portal, options: dict[str, Any]) -> None:
        super().__init__()
        loop = asyncio.get_running_loop()
        pieces = self._pieces = asyncio.Queue[Delivered]()

        def deliver(piece: Delivered) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody reads
                loop.call_soon_threadsafe(pieces.put_nowait, piece)

        self._feed = Feed(portal, options, deliver)
        self._feed.start()

    @property
    def prompt_tokens(self) -> tuple[int, ...]:
        """Known inside `async with`, and from the first piece on. Raises UsageError before."""
        if not self._feed.started.done():
            raise UsageError("prompt_tokens is known once the request has begun: inside `async with`")
        return self._feed.started.result()

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> Piece:
        piece = self._taken(await self._pieces.get(), self._pieces.put_nowait)
        if piece is None:
            raise StopAsyncIteration
        return piece

    async def __aenter__(self) -> Generation:
        try:
            await asyncio.shield(asyncio.wrap_future(self._feed.started))
        except BaseException:
            self.cancel()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()
