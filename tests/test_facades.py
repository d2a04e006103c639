"""Pipelines from asyncio and from plain threads: the same output, cancellation across, and nobody held up."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from simulated import FakeVocabulary, mixed, periodic, serial, simulated

from meshpipe import aio, blocking
from meshpipe.errors import MeshpipeError, StageLostError, UsageError
from meshpipe.messages import Sampling
from meshpipe.pipeline.coordinator import Coordinator
from meshpipe.portal import Opener
from meshpipe.speculation.settings import Speculation

QUICK = ((1, 0.0002), (63, 0.0004))
NEVER = ((1, 1e6), (63, 1e6))
PROMPT = [1, 2, 3]


def pipe(target: Any = mixed, *, cost: Any = QUICK, **options: Any) -> Opener:
    """A simulated pipeline on the real clock; once it closes, nothing may be left in it."""

    @asynccontextmanager
    async def opened() -> AsyncIterator[Coordinator]:
        async with simulated(target, delay=None, cost=cost, **options) as sim:
            yield sim.coordinator

    return opened


async def idle(coordinator: Coordinator) -> None:
    """Returns when no request is left and every lane is free."""
    with trio.fail_after(10):
        while coordinator.active or coordinator.lanes.free < coordinator.lanes.count:  # noqa: ASYNC110
            await trio.sleep(0.001)


async def busy(coordinator: Coordinator) -> None:
    with trio.fail_after(10):
        while not coordinator.active:  # noqa: ASYNC110
            await trio.sleep(0.001)


def no_thread_is_left() -> None:
    for thread in threading.enumerate():
        if thread.name == "meshpipe":
            thread.join(5)
            assert not thread.is_alive()


def with_asyncio(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    """Runs a test on asyncio, and looks for threads that stay."""

    def run() -> None:
        asyncio.run(asyncio.wait_for(test(), 30), debug=True)
        no_thread_is_left()

    run.__name__ = test.__name__
    return run


# ---------------------------------------------------------------- asyncio


@with_asyncio
async def test_asyncio_says_what_trio_says() -> None:
    async with aio.Pipeline(pipe()) as pipeline:
        tokens: list[int] = []
        async with pipeline.generate(PROMPT, max_tokens=60, sampling=Sampling()) as generation:
            assert generation.prompt_tokens == tuple(PROMPT)
            async for piece in generation:
                tokens += piece.tokens
        assert tokens == serial(mixed, PROMPT, 60)
        assert generation.report is not None
        assert generation.report.completion_tokens == 60
        done = await pipeline.complete(PROMPT, max_tokens=60, speculation=Speculation(mode="off"))
        assert list(done.tokens) == tokens
        assert await pipeline.round_trip() >= 0
        assert pipeline.coordinator.context == 4096


@with_asyncio
async def test_a_wrong_request_fails_where_it_is_awaited() -> None:
    async with aio.Pipeline(pipe()) as pipeline:
        with pytest.raises(UsageError, match="outside the vocabulary"):
            async with pipeline.generate([-1]):
                pass
        generation = pipeline.generate([1], stop="one text")
        for _ in range(2):
            with pytest.raises(UsageError, match="list of texts"):
                await generation.__anext__()
        with pytest.raises(UsageError, match="either a prompt or messages"):
            await pipeline.complete()


@with_asyncio
async def test_cancelling_an_asyncio_task_ends_its_request() -> None:
    async with aio.Pipeline(pipe(cost=NEVER, lanes=1)) as pipeline:
        for ask in (
            lambda: pipeline.complete(PROMPT, max_tokens=9),
            lambda: anext_of(pipeline.generate(PROMPT)),
            lambda: enter_and_read(pipeline.generate(PROMPT)),
        ):
            task = asyncio.ensure_future(ask())
            await pipeline.run(busy)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            del task
            gc.collect()
            await pipeline.run(idle)


async def anext_of(generation: aio.Generation) -> None:
    await generation.__anext__()


async def enter_and_read(generation: aio.Generation) -> None:
    async with generation:
        async for _ in generation:
            pass


@with_asyncio
async def test_a_read_that_is_cancelled_loses_no_piece() -> None:
    async with aio.Pipeline(pipe()) as pipeline, pipeline.generate(PROMPT, max_tokens=100) as generation:
        tokens: list[int] = []
        while True:
            read = asyncio.ensure_future(generation.__anext__())
            await asyncio.sleep(0)
            if read.cancel():
                await asyncio.wait([read])
            if read.cancelled():
                continue
            try:
                tokens += read.result().tokens
            except StopAsyncIteration:
                break
        assert tokens == serial(mixed, PROMPT, 100)


@with_asyncio
async def test_what_a_cancelled_request_had_committed_can_be_read() -> None:
    async with (
        aio.Pipeline(pipe(periodic())) as pipeline,
        pipeline.generate(PROMPT, max_tokens=4000) as generation,
    ):
        first = await generation.__anext__()
        generation.cancel()
        rest = [piece async for piece in generation]
        tokens = [token for piece in (first, *rest) for token in piece.tokens]
        assert tokens == serial(periodic(), PROMPT, len(tokens))
        assert generation.report is not None
        assert generation.report.finish_reason == "cancelled"


@with_asyncio
async def test_the_event_loop_never_waits_for_the_pipeline() -> None:
    """Its thread stands still all the while; what is called here has to return nevertheless."""
    async with aio.Pipeline(pipe(lanes=2)) as pipeline:
        standing, go = threading.Event(), threading.Event()

        async def stand_still(_: Coordinator) -> None:
            standing.set()
            assert go.wait(20)

        still = asyncio.ensure_future(pipeline.run(stand_still))
        await asyncio.get_running_loop().run_in_executor(None, standing.wait)
        generation = pipeline.generate(PROMPT, max_tokens=30)
        dropped = pipeline.generate(PROMPT, max_tokens=4000)
        dropped.cancel()
        del dropped
        reading = asyncio.ensure_future(generation.__anext__())
        completing = asyncio.ensure_future(pipeline.complete(PROMPT))
        await asyncio.sleep(0)
        for task in (reading, completing):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert not still.done()
        go.set()
        await still
        tokens = [token async for piece in generation for token in piece.tokens]
        assert tokens == serial(mixed, PROMPT, 30)
        await pipeline.run(idle)


@with_asyncio
async def test_who_does_not_read_delays_nobody() -> None:
    async with aio.Pipeline(pipe(lanes=2)) as pipeline, pipeline.generate(PROMPT, max_tokens=600) as unread:
        await pipeline.complete(PROMPT, max_tokens=50)
        await pipeline.run(idle)  # it has run to its end, unread
        assert len([token async for piece in unread for token in piece.tokens]) == len(
            serial(mixed, PROMPT, 600)
        )


@with_asyncio
async def test_a_dropped_generation_gives_its_lane_back() -> None:
    async with aio.Pipeline(pipe(cost=NEVER, lanes=1)) as pipeline:
        generation = pipeline.generate(PROMPT)
        await pipeline.run(busy)
        del generation
        gc.collect()
        await pipeline.run(idle)


@with_asyncio
async def test_a_pipeline_that_closes_ends_what_is_under_way() -> None:
    async with aio.Pipeline(pipe(cost=NEVER)) as pipeline:
        generation = pipeline.generate(PROMPT)
        completing = asyncio.ensure_future(pipeline.complete(PROMPT))
        await pipeline.run(busy)
    for waiting in (generation.__anext__(), completing, pipeline.round_trip(), pipeline.complete(PROMPT)):
        with pytest.raises(StageLostError, match="closed"):
            await waiting
    with pytest.raises(UsageError, match="opened before"):
        await pipeline.open()


@asynccontextmanager
async def unopenable() -> AsyncIterator[Coordinator]:
    raise MeshpipeError("no such model")
    yield


@asynccontextmanager
async def buggy() -> AsyncIterator[Coordinator]:
    """Crashes at the first request."""
    async with simulated(mixed, delay=None, cost=NEVER) as sim, trio.open_nursery() as nursery:

        async def crash() -> None:
            await busy(sim.coordinator)
            raise ZeroDivisionError("a bug")

        nursery.start_soon(crash)
        yield sim.coordinator


@with_asyncio
async def test_what_goes_wrong_over_there_is_raised_here() -> None:
    with pytest.raises(MeshpipeError, match="no such model"):
        async with aio.Pipeline(unopenable):
            pass
    pipeline = await aio.Pipeline(buggy).open()
    with pytest.raises(StageLostError):
        await pipeline.complete(PROMPT)
    with pytest.raises(BaseException) as caught:
        await pipeline.aclose()
    assert "a bug" in repr(caught.value)


@with_asyncio
async def test_opening_can_be_cancelled() -> None:
    begun = asyncio.Event()
    loop = asyncio.get_running_loop()

    @asynccontextmanager
    async def slow() -> AsyncIterator[Coordinator]:
        loop.call_soon_threadsafe(begun.set)
        await trio.sleep_forever()
        raise AssertionError
        yield

    opening = asyncio.ensure_future(aio.Pipeline(slow).open())
    await begun.wait()
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening


@with_asyncio
async def test_a_pipeline_that_was_never_opened_says_so() -> None:
    pipeline = aio.Pipeline(pipe())
    with pytest.raises(UsageError, match="not open"):
        pipeline.generate(PROMPT)
    with pytest.raises(UsageError, match="not open"):
        _ = pipeline.coordinator
    await pipeline.aclose()
    await pipeline.aclose()


class Patient(FakeVocabulary):
    """Tokenizes once the event loop has gone on meanwhile."""

    def __init__(self) -> None:
        self.begun, self.loop_went_on = threading.Event(), threading.Event()

    def tokenize(self, text: str, **how: Any) -> tuple[int, ...]:
        self.begun.set()
        assert self.loop_went_on.wait(20), "the event loop stood still"
        return super().tokenize(text, **how)


@with_asyncio
async def test_a_long_prompt_is_tokenized_beside_the_event_loops() -> None:
    """Neither asyncio's nor trio's, where other requests run, stands still."""
    vocabulary = Patient()
    async with aio.Pipeline(pipe(vocabulary=vocabulary)) as pipeline:
        waiting = asyncio.ensure_future(pipeline.complete("1 2 3", max_tokens=20))
        streamed = pipeline.generate("1 2 3", max_tokens=20)
        await asyncio.to_thread(vocabulary.begun.wait, 20)
        assert list((await pipeline.complete(PROMPT, max_tokens=20)).tokens) == serial(mixed, PROMPT, 20)
        vocabulary.loop_went_on.set()
        assert list((await waiting).tokens) == serial(mixed, PROMPT, 20)
        assert [token async for piece in streamed for token in piece.tokens] == serial(mixed, PROMPT, 20)


# ---------------------------------------------------------------- plain threads


def test_threads_say_what_trio_says() -> None:
    with blocking.Pipeline(pipe(lanes=3)) as pipeline:
        with pipeline.generate(PROMPT, max_tokens=60) as generation:
            assert generation.prompt_tokens == tuple(PROMPT)
            tokens = [token for piece in generation for token in piece.tokens]
        assert tokens == serial(mixed, PROMPT, 60)
        assert generation.report is not None
        with pytest.raises(StopIteration):
            next(generation)
        with ThreadPoolExecutor(8) as threads:
            prompts = [[number] for number in range(16)]
            answers = list(
                threads.map(lambda prompt: pipeline.complete(prompt, max_tokens=40).tokens, prompts)
            )
        assert [list(answer) for answer in answers] == [serial(mixed, prompt, 40) for prompt in prompts]
        with pytest.raises(UsageError, match="outside the vocabulary"):
            pipeline.generate([-1])
        assert pipeline.round_trip() >= 0
        pipeline.run(idle)
    with pytest.raises(StageLostError, match="closed"):
        pipeline.generate(PROMPT)


def test_opening_fails_and_ends_its_thread() -> None:
    with pytest.raises(MeshpipeError, match="no such model"), blocking.Pipeline(unopenable):
        pass
    no_thread_is_left()


def test_ctrl_c_ends_the_request_and_nothing_else(request: pytest.FixtureRequest) -> None:
    main = threading.main_thread().ident
    assert main is not None
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it is ignored
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    with blocking.Pipeline(pipe(cost=NEVER, lanes=1)) as pipeline:

        def interrupt() -> None:
            pipeline.run(busy)
            signal.pthread_kill(main, signal.SIGINT)

        def read() -> None:
            with pipeline.generate(PROMPT) as generation:
                next(generation)

        for wait in (read, lambda: pipeline.complete(PROMPT)):
            interrupter = threading.Thread(target=interrupt)
            interrupter.start()
            with pytest.raises(KeyboardInterrupt):
                wait()
            interrupter.join()
            gc.collect()
            pipeline.run(idle)
