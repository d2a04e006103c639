"""The OpenAI-compatible server as an ASGI application on trio.

A request is read and checked, planned in a thread, and run; whoever asks for more than `queue` requests beyond the
pipeline's lanes is told to come back later. Answers stream as server-sent events. When a client goes away, its
generations end, which frees their lanes.
"""

from __future__ import annotations

import hmac
import json
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any

import trio
from attrs import define, field
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from meshpipe.actors.scope import owned_nursery
from meshpipe.errors import StageLostError
from meshpipe.pipeline.coordinator import Coordinator
from meshpipe.serving.answers import Answer, ChatAnswer, Choice, CompletionAnswer, Failed, running
from meshpipe.serving.errors import MANY, ApiError, of_failure, of_validation
from meshpipe.serving.metrics import CONTENT_TYPE, Metrics
from meshpipe.serving.openapi import document
from meshpipe.serving.prompts import Plan, plan_chat, plan_completion
from meshpipe.serving.schemas import ChatRequest, CompletionRequest, ModelAnswer, Sampled, TopologyAnswer
from meshpipe.speculation.settings import Speculation

log = logging.getLogger("meshpipe.serving")

MAX_BODY = 16 << 20
"""Bytes of a request, at most."""
LEAST_BODY, BODY_A_TOKEN = 1 << 20, 32
"""Bytes of a request that are always allowed, and those for each token of the context: no prompt that fits is longer,
and what does not fit costs the time of all until it is found out."""
LEAST_LISTS = 1 << 16
"""Lists and objects in a request that are always allowed, and one more for each token of the context: to check a body
of 2 MiB that is nothing else took 2 to 8 s, in which nobody is served."""
BODY_DEADLINE = 60.0
"""Seconds in which a request's body has to come."""


@define(eq=False)
class Service:
    """What the endpoints share. `name` is the model's; `queue` bounds the generations that wait for a lane."""

    pipeline: Coordinator
    name: str
    speculation: Speculation = field(factory=Speculation)
    queue: int = 64
    keys: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()
    metrics: Metrics = field(init=False)
    started: int = field(init=False, factory=lambda: int(time.time()))
    generations: int = 0  # admitted and not ended
    _seconds: float = 1.0  # that a generation takes, of late

    def __attrs_post_init__(self) -> None:
        self.metrics = Metrics(self.pipeline)

    @property
    def longest_body(self) -> int:
        """Bytes of a request."""
        return min(MAX_BODY, LEAST_BODY + BODY_A_TOKEN * self.pipeline.context)

    @property
    def most_lists(self) -> int:
        """Lists and objects in a request."""
        return LEAST_LISTS + self.pipeline.context

    async def plan(self, make: Callable[..., Plan], request: Sampled) -> Plan:
        """In a thread, one at a time: the vocabulary is shared. Raises ApiError."""
        vocabulary, context = self.pipeline.vocabulary, self.pipeline.context
        work = partial(make, request, vocabulary, context, self.speculation)
        return await trio.to_thread.run_sync(work, limiter=self.pipeline.planning)

    @contextmanager
    def admitted(self, count: int) -> Iterator[None]:
        """Room for so many generations, while the block lasts. Raises ApiError if there is none."""
        most = self.pipeline.lanes.count + self.queue
        if count > most:
            raise ApiError(
                400, f"{count} generations are asked for; this server takes at most {most}.", param="n"
            )
        if self.generations + count > most:
            wait = (
                self._seconds * (self.generations - self.pipeline.lanes.count + 1) / self.pipeline.lanes.count
            )
            raise ApiError(
                429,
                f"{self.generations} generations run or wait, and {count} more would exceed {most}: try again later.",
                code="rate_limit_exceeded",
                headers={"Retry-After": str(min(60, max(1, math.ceil(wait))))},
            )
        self.generations += count
        began = trio.current_time()
        try:
            yield
        finally:
            self.generations -= count
            self._seconds += (trio.current_time() - began - self._seconds) / 8

    def check_key(self, request: Request) -> None:
        """Raises ApiError unless the request carries one of the keys, if there are any."""
        if not self.keys:
            return
        sent = request.headers.getlist("authorization")
        kind, _, key = sent[0].partition(" ") if len(sent) == 1 else ("", "", "")
        given = key.strip().encode()
        right = [hmac.compare_digest(given, known.encode()) for known in self.keys]
        if kind.lower() != "bearer" or not any(right):
            raise ApiError(
                401,
                "Incorrect API key provided." if sent else "You didn't provide an API key.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def check_model(self, name: str) -> None:
        """Raises ApiError for another model than the one that is served."""
        if name != self.name:
            raise ApiError(
                404,
                f"The model {name[:200]!r} does not exist; this server has {self.name!r}.",
                param="model",
                code="model_not_found",
            )

    def model(self) -> ModelAnswer:
        """What `/v1/models` says."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.started,
            "owned_by": "meshpipe",
            "max_model_len": self.pipeline.context,
        }

    def topology(self) -> TopologyAnswer:
        """What `/v1/topology` says."""
        pipeline = self.pipeline
        return {
            "model": self.name,
            "layers": pipeline.descriptors[0].layer_count,
            "exact": pipeline.exact,
            "stages": [
                {
                    "index": index,
                    "layers": list(stage.layers),
                    "address": self.addresses[index] if index < len(self.addresses) else None,
                    "lanes": stage.lanes,
                    "context": stage.context,
                    "exact": stage.exact,
                    "milliseconds": {str(rows): seconds * 1e3 for rows, seconds in stage.cost},
                }
                for index, stage in enumerate(pipeline.descriptors)
            ],
            "links": {
                "return_route": pipeline.return_route(),
                "round_trip_ms": pipeline.pipe.link * 1e3,
                "window_latency_ms": pipeline.pipe.latency(1) * 1e3,
            },
            "lanes": {"total": pipeline.lanes.count, "free": pipeline.lanes.free},
            "requests": self.generations,
        }


def application(service: Service) -> ASGIApp:
    """The ASGI application."""

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(request: Request) -> Response:
        if not service.pipeline.way.up:
            raise of_failure(StageLostError(service.pipeline.way.reason))
        return JSONResponse({"status": "ready"})

    async def metrics(request: Request) -> Response:
        return Response(service.metrics.text(), media_type=CONTENT_TYPE)

    async def openapi(request: Request) -> Response:
        return JSONResponse(described)

    async def models(request: Request) -> Response:
        service.check_key(request)
        return JSONResponse({"object": "list", "data": [service.model()]})

    async def model(request: Request) -> Response:
        service.check_key(request)
        service.check_model(request.path_params["model"])
        return JSONResponse(service.model())

    async def topology(request: Request) -> Response:
        service.check_key(request)
        return JSONResponse(service.topology())

    described = document(service.name, keyed=bool(service.keys))
    return Starlette(
        routes=[
            Route("/health", health),
            Route("/ready", ready),
            Route("/metrics", metrics),
            Route("/openapi.json", openapi),
            Route("/v1/models", models),
            Route("/v1/models/{model:path}", model),
            Route("/v1/topology", topology),
            Route(
                "/v1/completions",
                Endpoint(service, "completions", CompletionRequest, plan_completion, CompletionAnswer),
                methods=["POST"],
            ),
            Route(
                "/v1/chat/completions",
                Endpoint(service, "chat", ChatRequest, plan_chat, ChatAnswer),
                methods=["POST"],
            ),
        ],
        exception_handlers={ApiError: _api_error, HTTPException: _http_error},
    )


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body(), error.status, error.headers)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    words = {
        404: f"There is nothing at {request.url.path}; /openapi.json says what there is.",
        405: f"{request.method} is not allowed here.",
    }
    made = ApiError(error.status_code, words.get(error.status_code, str(error.detail)))
    return JSONResponse(made.body(), error.status_code, error.headers)


class Endpoint:
    """One of the two endpoints that generate: reads, checks, plans, runs, answers."""

    def __init__(
        self,
        service: Service,
        name: str,
        schema: type[Sampled],
        plan: Callable[..., Plan],
        answer: Callable[..., Answer],
    ) -> None:
        self._service = service
        self._name = name
        self._schema = schema
        self._plan = plan
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI has it."""
        request = Request(scope, receive)
        status = _Status(send)
        try:
            try:
                await self._handle(request, receive, status.send)
            except (ApiError, ClientDisconnect):
                raise
            except Exception as error:
                log.exception("internal error")
                raise of_failure(error) from error
        except ApiError as error:
            if not status.sent:
                await JSONResponse(error.body(), error.status, error.headers)(scope, receive, status.send)
        except ClientDisconnect:
            pass
        finally:  # Hypercorn may cancel us when the client is gone
            if status.sent:
                self._service.metrics.requests.labels(self._name, status.sent).inc()
            else:
                self._service.metrics.disconnects.inc()

    async def _handle(self, request: Request, receive: Receive, send: Send) -> None:
        service = self._service
        service.check_key(request)
        most = service.longest_body
        if int(request.headers.get("content-length", 0)) > most:  # Hypercorn has seen that it is a number
            raise _too_large(most)
        body = await _body(receive, most)
        # Those in a text count as well: one that fits has about as many as tokens, at most.
        if body.count(b"[") + body.count(b"{") > service.most_lists:
            raise _too_large(service.most_lists, "opening brackets")
        asked = _parsed(self._schema, body)
        service.check_model(asked.model)
        prompts = getattr(asked, "prompt", "")
        several = len(prompts) if isinstance(prompts, list) and not isinstance(prompts[0], int) else 1
        # What ends the answer is sent when nobody watches the client any more: Hypercorn says that it has gone as
        # soon as the answer is complete, but still has to close its connection then.
        end: Callable[[], Awaitable[None]] | None = None
        with service.admitted(several * (asked.n or 1)):
            async with _while_connected(receive):
                plan = await service.plan(self._plan, asked)
                logprobs = asked.logprobs  # type: ignore[attr-defined]
                answer = self._answer(
                    service.name,
                    service.pipeline.vocabulary,
                    logprobs is not None and logprobs is not False,
                    asked.stream_options is not None and bool(asked.stream_options.include_usage),
                    plan,
                )
                choices = [Choice(index) for index in range(len(plan.tasks))]
                try:
                    if asked.stream:
                        await self._stream(answer, plan, choices, send)
                        end = partial(_end_events, send)
                    else:
                        whole = JSONResponse(await self._whole(answer, plan, choices))
                        end = partial(whole, request.scope, receive, send)
                finally:
                    service.metrics.answered([c.report for c in choices if c.report is not None])
        if end is not None:
            await end()

    async def _whole(self, answer: Answer, plan: Plan, choices: Sequence[Choice]) -> dict[str, Any]:
        pipeline = self._service.pipeline
        async with running(pipeline, plan) as pieces:
            async for index, piece in pieces:
                if isinstance(piece, Failed):
                    raise self._failure(piece.error)
                choices[index].take(piece, pipeline.vocabulary)
        return answer.whole(choices)

    async def _stream(self, answer: Answer, plan: Plan, choices: Sequence[Choice], send: Send) -> None:
        """Server-sent events, all but the end. What fails before the first is an HTTP error, later an event."""
        pipeline = self._service.pipeline
        begun = False
        async with running(pipeline, plan) as pieces:
            async for index, piece in pieces:
                if isinstance(piece, Failed):
                    failure = self._failure(piece.error)
                    if not begun:
                        raise failure
                    await _send_event(send, failure.body())
                    return
                if not begun:
                    begun = True
                    await _begin_events(send)
                choices[index].take(piece, pipeline.vocabulary)
                for event in answer.events(choices[index]):
                    await _send_event(send, event)
        if answer.with_usage:
            await _send_event(send, answer.usage_event(choices))
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": True})

    def _failure(self, error: Exception) -> ApiError:
        failure = of_failure(error)
        if failure.status >= 500:
            log.error("a generation failed: %s", error, exc_info=failure.code == "internal_error")
        return failure


class _Status:
    """Passes on what is sent, and remembers the status. Raises ClientDisconnect if nobody reads it."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.sent: int | None = None

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.sent = message["status"]
        try:
            await self._send(message)
        except (OSError, trio.BusyResourceError, trio.BrokenResourceError, trio.ClosedResourceError):
            raise ClientDisconnect from None  # Hypercorn was about to close the connection


async def _begin_events(send: Send) -> None:
    headers = [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def _send_event(send: Send, event: Any) -> None:
    body = b"data: " + json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def _end_events(send: Send) -> None:
    await send({"type": "http.response.body", "body": b"", "more_body": False})


@asynccontextmanager
async def _while_connected(receive: Receive) -> AsyncIterator[None]:
    """The block is cancelled when the client goes away."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        nursery.cancel_scope.cancel()

    async with owned_nursery() as nursery:
        nursery.start_soon(watch)
        yield


async def _body(receive: Receive, most: int) -> bytes:
    """Raises ApiError for one that is longer than `most` bytes or too slow, ClientDisconnect if none comes at all."""
    body = bytearray()
    with trio.move_on_after(BODY_DEADLINE):
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            body += message.get("body", b"")
            if len(body) > most:
                raise _too_large(most)
            if not message.get("more_body", False):
                return bytes(body)
    raise ApiError(408, f"the body did not come within {BODY_DEADLINE:g} s.", code="request_timeout")


def _too_large(most: int, what: str = "bytes") -> ApiError:
    return ApiError(413, f"the body has more than {most} {what}.", code="request_too_large")


def _parsed(schema: type[Sampled], body: bytes) -> Sampled:
    try:
        return schema.model_validate_json(body)
    except ValidationError as error:
        try:
            sent = json.loads(body) if error.error_count() <= MANY else None
        except (ValueError, RecursionError):
            sent = None
        raise of_validation(error, sent) from None
