"""A pipeline in a thread of its own, which runs trio, for callers that do not: what `aio` and `blocking` share.

Callers never wait for the thread to take something, and it never waits for them: work goes in by
`run_sync_soon`, results come out as `concurrent.futures.Future`s, and pieces are handed to a function that only
puts them into the caller's own queue. anyio's portal is not used because its cancelling waits for the other loop.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import AbstractAsyncContextManager, suppress
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar

import trio

from meshpipe.errors import StageLostError, UsageError
from meshpipe.pipeline.coordinator import Coordinator, Generation
from meshpipe.pipeline.local import open_local
from meshpipe.pipeline.remote import open_remote, open_spawned
from meshpipe.pipeline.report import Report
from meshpipe.pipeline.request import Piece

T = TypeVar("T")
F = TypeVar("F", bound="Facade")
Delivered = Piece | BaseException | None
"""A piece; at the very end None, or the failure."""
NOT_OPEN = "the pipeline is not open: enter it first (with, async with, or open())"
Opener = Callable[[], AbstractAsyncContextManager[Coordinator]]


class Portal:
    """Opens a pipeline in a new thread, and closes it there. Its methods may be called from any other thread.

    `opened` is done when the pipeline is open, or could not be opened; `closed` when the thread has nothing left
    to do: its result is the error that ended the pipeline, if one did. The thread is a daemon: a program that
    forgets to close the pipeline can end.
    """

    def __init__(self, opener: Opener) -> None:
        self.opened: Future[Coordinator] = Future()
        self.closed: Future[BaseException | None] = Future()
        self._started = False
        self._opener = opener
        self._lock = threading.Lock()
        self._token: trio.lowlevel.TrioToken | None = None
        self._nursery: trio.Nursery | None = None
        self._scope = trio.CancelScope()
        self._closing = False

    def start(self) -> None:
        """Begins to open the pipeline."""
        if self._started:
            raise UsageError("this pipeline was opened before: make another one")
        self._started = True
        context = copy_context()  # whoever watches progress here, watches it there
        threading.Thread(target=context.run, args=(self._run,), name="meshpipe", daemon=True).start()

    def close(self) -> None:
        """Ends every request, closes the pipeline and ends the thread; `closed` says when."""
        with self._lock:
            self._closing = True
            token = self._token
        if not self._started:
            self._started = True
            self.closed.set_result(None)
        if token is not None:
            with suppress(trio.RunFinishedError):
                token.run_sync_soon(self._end)

    def submit(
        self, function: Callable[[Coordinator], Awaitable[T]], future: Future[T] | None = None
    ) -> Future[T]:
        """Runs an async function in the pipeline's thread. Cancelling the future cancels it.

        The future fails with what the function raises, and with StageLostError if the pipeline is closed first. Who
        may be interrupted meanwhile (Ctrl-C) brings one along, to cancel it whenever that happens. Raises UsageError
        before the pipeline is open.
        """
        self.opened_token()  # before anything hangs on the future
        future = Future() if future is None else future
        scope = trio.CancelScope()

        async def work() -> None:
            try:
                with scope:
                    future.set_result(await function(self.opened.result()))
            except Exception as error:
                with suppress(InvalidStateError):  # the caller cancelled in the same moment
                    future.set_exception(error)
            finally:
                _fail(future)

        def cancelled(done: Future[T]) -> None:
            if done.cancelled():
                self.soon(scope.cancel)

        def begin() -> None:
            if self._nursery is None:
                _fail(future)
            else:
                self._nursery.start_soon(work)

        future.add_done_callback(cancelled)
        if not self.soon(begin):
            _fail(future)
        return future

    def opened_token(self) -> trio.lowlevel.TrioToken:
        """The way into the pipeline's thread. Raises UsageError before it is open."""
        if self._token is None:
            raise UsageError(NOT_OPEN)
        return self._token

    def soon(self, function: Callable[[], object]) -> bool:
        """Calls a function in the pipeline's thread, if that still runs. Raises UsageError if it never did."""
        try:
            self.opened_token().run_sync_soon(function)
        except trio.RunFinishedError:
            return False
        return True

    def _end(self) -> None:
        if self._nursery is not None:
            self._nursery.cancel_scope.cancel()  # what is under way; then the pipeline closes as it should
        elif not self.opened.done():
            self._scope.cancel()

    def _run(self) -> None:
        try:
            trio.run(self._main)
        except BaseException as error:
            with suppress(InvalidStateError):
                self.opened.set_exception(error)
            self.closed.set_result(error)
        else:
            with suppress(InvalidStateError):
                self.opened.set_exception(StageLostError("the pipeline was closed before it was open"))
            self.closed.set_result(None)

    async def _main(self) -> None:
        with self._lock:
            self._token = trio.lowlevel.current_trio_token()
            if self._closing:
                self._scope.cancel()
        with self._scope:
            async with self._opener() as coordinator:
                try:
                    async with trio.open_nursery() as self._nursery:
                        self.opened.set_result(coordinator)
                        await trio.sleep_forever()
                finally:
                    self._nursery = None


class Facade:
    """What the pipelines of `aio` and `blocking` have in common.

    Made by `local`, `spawn` and `connect`, whose arguments are those of `meshpipe.Pipeline`'s.
    """

    def __init__(self, opener: Opener) -> None:
        self._portal = Portal(opener)

    @classmethod
    def local(cls: type[F], *arguments: Any, **options: Any) -> F:
        """All stages in this process."""
        return cls(partial(open_local, *arguments, **options))

    @classmethod
    def spawn(cls: type[F], *arguments: Any, **options: Any) -> F:
        """A child process for each stage."""
        return cls(partial(open_spawned, *arguments, **options))

    @classmethod
    def connect(cls: type[F], *arguments: Any, **options: Any) -> F:
        """Stages that run already."""
        return cls(partial(open_remote, *arguments, **options))

    @property
    def coordinator(self) -> Coordinator:
        """The pipeline itself, to look at: `context`, `descriptors`, `exact`, `active`. Act on it by `run`."""
        if not self._portal.opened.done():
            raise UsageError(NOT_OPEN)
        return self._portal.opened.result()


class Feed:
    """One request: its pieces, and at last how it ended, are handed to `deliver` in the pipeline's thread.

    `start` begins it; `started` has the prompt's tokens once the request is under way. Raises UsageError if the
    pipeline is not open.
    """

    def __init__(self, portal: Portal, options: dict[str, Any], deliver: Callable[[Delivered], None]) -> None:
        portal.opened_token()
        self.started: Future[tuple[int, ...]] = Future()
        self._portal = portal
        self._options = options
        self._deliver = deliver
        self._generation: Generation | None = None
        self._ended: Future[None] = Future()
        self._ended.add_done_callback(self._end)

    def start(self) -> None:
        """Begins the request; once."""
        self._portal.submit(self._pump, self._ended)

    def cancel(self) -> None:
        """Ends the request; what was committed before is still delivered."""
        self._portal.soon(self._cancel)

    def _cancel(self) -> None:
        if self._generation is not None:
            self._generation.cancel()
        else:
            self._ended.cancel()

    async def _pump(self, coordinator: Coordinator) -> None:
        options = dict(self._options)
        tokens = await coordinator.tokenize(options.pop("prompt", None), options.pop("messages", None))
        async with coordinator.generate(tokens, **options) as self._generation:
            self.started.set_result(self._generation.prompt_tokens)
            async for piece in self._generation:
                self._deliver(piece)

    def _end(self, ended: Future[None]) -> None:
        error = None if ended.cancelled() else ended.exception()
        with suppress(InvalidStateError):
            self.started.set_exception(error or StageLostError("the request was cancelled before it began"))
        self._deliver(error)


class Stream:
    """What the generations of `aio` and `blocking` have in common; they make `_feed`."""

    _feed: Feed

    def __init__(self) -> None:
        self.report: Report | None = None

    def _taken(self, piece: Delivered, again: Callable[[Delivered], None]) -> Piece | None:
        """A piece that was delivered; None at the end of the output, and raises its failure.

        The end is put back by `again`, for whoever asks once more.
        """
        if isinstance(piece, Piece):
            self.report = piece.report or self.report
            return piece
        again(piece)
        if piece is not None:
            raise piece
        return None

    def cancel(self) -> None:
        """Ends the request; what was committed already can still be read."""
        self._feed.cancel()

    def __del__(self) -> None:
        if "_feed" in vars(self):
            self.cancel()


def _fail(future: Future[Any]) -> None:
    """Nobody will finish this any more."""
    with suppress(InvalidStateError):
        future.set_exception(StageLostError("the pipeline was closed before this was done"))
