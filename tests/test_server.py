"""The server, by real clients and by raw HTTP; without a model where none is needed."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import re
import resource
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest
import trio
import trio.testing
from pydantic import ValidationError
from serving import MODEL, Both, Words, events, post, served, served_simulated
from simulated import VOCABULARY, Target, mixed, novel, periodic, serial, simulated

from meshpipe import Pipeline, Speculation
from meshpipe.pipeline.runner import Job, Result, SimulatedRunner
from meshpipe.serving.app import Service, _parsed, application
from meshpipe.serving.errors import ApiError
from meshpipe.serving.schemas import CompletionRequest
from meshpipe.serving.server import open_listener
from meshpipe.serving.tools import calls_in

ASK: dict[str, Any] = {"model": MODEL, "prompt": "1 2 3", "max_tokens": 8, "temperature": 0}
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "5 6"}], "max_tokens": 8}


@pytest.fixture
async def both() -> AsyncIterator[Both]:
    async with served_simulated(mixed) as both:
        yield both


def text_of(tokens: list[int]) -> str:
    return "".join(f"{token} " for token in tokens)


# ---- raw HTTP -----------------------------------------------------------------------------------------


async def test_completions_whole_and_streamed() -> None:
    async with served_simulated(periodic()) as both, both.served.client() as client:
        whole = (await client.post("/v1/completions", json=ASK | {"max_tokens": 50})).json()
        expected = serial(periodic(), [1, 2, 3], 50)
        assert whole["choices"] == [
            {"index": 0, "text": text_of(expected), "logprobs": None, "finish_reason": "length"}
        ]
        usage = whole["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (3, 50, 53)
        options = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 50}
        answer = await client.post("/v1/completions", json=ASK | options)
        assert answer.headers["content-type"].startswith("text/event-stream")
        *chunks, last, done = events(answer.text)
        assert done == "[DONE]"
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text_of(expected)
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-2:] == [None, "length"]
        assert all(chunk["usage"] is None and chunk["id"] == last["id"] for chunk in chunks)
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 50
        acceptance = last["metrics"]["speculative_decoding"]
        assert sum(acceptance["acceptance_histogram"]) == acceptance["num_spec_steps"]
        weighted = sum(n * steps for n, steps in enumerate(acceptance["acceptance_histogram"]))
        assert weighted == acceptance["num_accepted_draft_tokens"] > 0
        assert len(acceptance["acceptance_histogram"]) == acceptance["num_spec_tokens"] + 1
        # AIPerf's adapter for vLLM checks these, and takes the numbers from here.
        assert set(acceptance) == {
            "mean_acceptance_length", "draft_acceptance_rate", "acceptance_histogram", "num_spec_steps",
            "num_accepted_draft_tokens", "num_draft_tokens", "num_spec_tokens",
        }  # fmt: skip
        assert all(type(steps) is int for steps in acceptance["acceptance_histogram"])
        assert acceptance["mean_acceptance_length"] == 1 + weighted / acceptance["num_spec_steps"]
        assert acceptance["draft_acceptance_rate"] == weighted / acceptance["num_draft_tokens"]
        # One token came with the prompt's last window, one with every step, the rest were drafts.
        assert 1 + acceptance["num_spec_steps"] + weighted == 50
        await all_ended(both)
        both.sim.assert_nothing_is_left()


async def test_several_prompts_and_choices(both: Both) -> None:
    async with both.served.client() as client:
        ask = ASK | {"prompt": [[1, 2], [3]], "n": 2, "speculation": {"mode": "off"}}
        whole = (await client.post("/v1/completions", json=ask)).json()
        first, second = (text_of(serial(mixed, prompt, 8)) for prompt in ([1, 2], [3]))
        assert [choice["text"] for choice in whole["choices"]] == [first, first, second, second]
        assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
        assert whole["usage"]["prompt_tokens"] == 3
        assert whole["usage"]["completion_tokens"] == 32
        assert whole["usage"]["speculation"]["drafted"] == 0
        assert whole["metrics"] is None
        chunks = events((await client.post("/v1/completions", json=ask | {"stream": True})).text)[:-1]
        for index, text in enumerate([first, first, second, second]):
            of = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
            assert "".join(choice["text"] for choice in of) == text


async def test_stop_strings_end_across_tokens(both: Both) -> None:
    tokens = serial(mixed, [1, 2, 3], 8)
    stop = f"{tokens[3]} {tokens[4]}"
    async with both.served.client() as client:
        for options in ({}, {"stream": True}):
            answer = await client.post("/v1/completions", json=ASK | {"stop": ["zz", stop]} | options)
            got = events(answer.text)[:-1] if options else [answer.json()]
            assert "".join(one["choices"][0]["text"] for one in got) == text_of(tokens[:3])
            assert got[-1]["choices"][0]["finish_reason"] == "stop"


WRONG: list[tuple[str, dict[str, Any], int, str | None, str | None]] = [
    ("completions", {"prompt": None}, 400, "prompt", "invalid_type"),
    ("completions", {"prompt": []}, 400, "prompt", "invalid_value"),
    ("completions", {"prompt": ""}, 400, "prompt", None),
    ("completions", {"prompt": [[1], [VOCABULARY]]}, 400, "prompt", None),
    ("completions", {"best_of": 4}, 400, "best_of", "invalid_value"),
    ("completions", {"temperature": "hot"}, 400, "temperature", "invalid_type"),
    ("completions", {"temperature": -1}, 400, "temperature", "invalid_value"),
    ("completions", {"temprature": 1}, 400, "temprature", "unknown_parameter"),
    ("completions", {"max_tokens": 0}, 400, "max_tokens", "invalid_value"),
    ("completions", {"max_tokens": 5000}, 400, "max_tokens", "context_length_exceeded"),
    ("completions", {"prompt": [1] * 4096}, 400, "prompt", "context_length_exceeded"),
    ("completions", {"stop": ["a", ""]}, 400, "stop[1]", "invalid_value"),
    ("completions", {"logit_bias": {"x": 1}}, 400, "logit_bias.x", "invalid_value"),
    ("completions", {"logit_bias": {"99999": 1}}, 400, "logit_bias", None),
    ("completions", {"speculation": {"mode": "magic"}}, 400, "speculation", "invalid_value"),
    ("completions", {"speculation": {"depth": 0}}, 400, "speculation.depth", "invalid_value"),
    ("completions", {"speculation": {"dept": 1}}, 400, "speculation.dept", "unknown_parameter"),
    ("completions", {"model": "gpt-9"}, 404, "model", "model_not_found"),
    ("completions", {"n": 17}, 400, "n", "invalid_value"),
    ("chat/completions", {"messages": []}, 400, "messages", "invalid_value"),
    ("chat/completions", {"messages": [{"role": "king", "content": ""}]}, 400, "messages[0]", "invalid_value"),
    ("chat/completions", {"messages": [{"role": "user"}]}, 400, "messages[0].content", "missing_required_parameter"),
    ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400,
     "messages[0].content[0].type", "invalid_value"),
    ("chat/completions", {"top_logprobs": 3}, 400, "top_logprobs", None),
    ("chat/completions", {"max_completion_tokens": 3}, 400, "max_tokens", None),
    ("chat/completions", {"response_format": {"type": "json_schema",
      "json_schema": {"name": "a", "schema": {"not": {}}}}}, 400,
     "response_format.json_schema.schema", "invalid_value"),
    ("chat/completions", {"response_format": {"type": "json_schema",
      "json_schema": {"name": "a", "schema": {"properties": {"a": {}}, "required": [[1]]}}}}, 400,
     "response_format.json_schema.schema", "invalid_value"),
    ("chat/completions", {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {
      "anyOf": [{"type": "array", "items": {"anyOf": [{"$ref": "#"}, {"const": n}]}} for n in range(2)]}}}}, 400,
     "response_format.json_schema.schema", "invalid_value"),
    ("chat/completions", {"messages": [{"role": "user", "content": "\ud800"}]}, 400, None, "invalid_json"),
    ("completions", {"seed": 2**64}, 400, "seed", "invalid_value"),
    ("chat/completions", {"tool_choice": "required"}, 400, "tool_choice", None),
    ("chat/completions", {"tools": [{"type": "function", "function": {"name": "a b"}}]}, 400,
     "tools[0].function.name", "invalid_value"),
    ("chat/completions", {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "x"}}}]}, 400,
     "tools", "invalid_value"),
]  # fmt: skip


async def test_what_is_wrong_is_named(both: Both) -> None:
    async with both.served.client() as client:
        for path, change, status, param, code in WRONG:
            base = ASK if path == "completions" else CHAT
            answer = await client.post(f"/v1/{path}", content=json.dumps(base | change))
            error = answer.json()["error"]
            assert (answer.status_code, error["param"], error["code"]) == (status, param, code), (
                change,
                error,
            )
            assert error["type"] == "invalid_request_error"
            assert error["message"]
        deep = b'{"prompt": ' + b"[" * 60_000
        for body, code in ((b"", "json"), (b"{", "json"), (b"[]", "type"), (b"\xff", "json"), (deep, "json")):
            answer = await client.post("/v1/completions", content=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, f"invalid_{code}")
        missing = await client.post("/v1/completions", json={"prompt": "1"})
        assert missing.json()["error"]["param"] == "model"
        assert (await client.get("/v1/completions")).status_code == 405
        assert (await client.get("/v2")).json()["error"]["type"] == "invalid_request_error"
        assert (await client.get("/v1/models/other")).json()["error"]["code"] == "model_not_found"
    both.sim.assert_nothing_is_left()


async def test_a_body_may_not_be_endless(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    assert both.served.service.longest_body == (1 << 20) + 32 * 4096
    monkeypatch.setattr("meshpipe.serving.app.MAX_BODY", 1000)
    monkeypatch.setattr("meshpipe.serving.app.BODY_DEADLINE", 0.05)
    async with both.served.client() as client:
        assert (await client.post("/v1/completions", content=b" " * 2000)).status_code == 413
    stream = await trio.open_tcp_stream("127.0.0.1", int(both.served.url.rpartition(":")[2]))
    async with stream:
        await stream.send_all(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{")
        with trio.fail_after(5):
            assert b"".join([part async for part in stream]).startswith(b"HTTP/1.1 408")
    monkeypatch.setattr("meshpipe.serving.app.BODY_DEADLINE", 60)
    stream = await trio.open_tcp_stream("127.0.0.1", int(both.served.url.rpartition(":")[2]))
    async with stream:  # what says that it is too long is not waited for
        await stream.send_all(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n{"
        )
        with trio.fail_after(5):
            assert (await stream.receive_some()).startswith(b"HTTP/1.1 413")


async def test_a_body_of_nothing_but_lists_is_not_parsed(both: Both) -> None:
    """A text may have as many brackets as there is room for, and one more is one too many, wherever it is."""
    fits = (1 << 16) + both.sim.coordinator.context - 1  # and that of the body itself
    refused = "the body has more than 69632 opening brackets."
    async with both.served.client() as client:
        answer = await client.post("/v1/completions", json=ASK | {"prompt": "[" * fits})
        assert answer.status_code == 200
        for much in ("{" * (fits + 1), [[]] * fits):
            answer = await client.post("/v1/completions", json=ASK | {"prompt": much})
            assert (answer.status_code, answer.json()["error"]["message"]) == (413, refused)


@pytest.mark.parametrize("prompt", [[0.5] * 20_000, [[0.5] * 20_000], ["x", *[1] * 20_000]])
def test_of_many_wrong_tokens_one_is_named(prompt: list[Any]) -> None:
    """Each mistake takes memory, and time in which nothing else is done: a body of 4 MiB once took 20 s and 1 GB."""
    body = json.dumps({"model": MODEL, "prompt": prompt}).encode()
    with pytest.raises(ValidationError) as caught:
        CompletionRequest.model_validate_json(body)
    assert caught.value.error_count() < 10
    with pytest.raises(ApiError, match=r"Invalid value for 'prompt\[[01]\]"):
        _parsed(CompletionRequest, body)


async def test_a_thousand_mistakes_are_too_many_to_name(both: Both) -> None:
    async with both.served.client() as client:
        for count, param in ((3, "0"), (2000, None)):
            answer = await client.post("/v1/completions", json={str(at): 1 for at in range(count)} | ASK)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_connections_are_kept_or_closed_as_asked(both: Both) -> None:
    for stream in (True, False):
        with trio.fail_after(5):  # `post` reads until the connection is closed
            status, text = await post(both.served.url, "/v1/completions", ASK | {"stream": stream})
        assert status == 200
        got = events(text)[:-1] if stream else [json.loads(text)]
        assert "".join(one["choices"][0]["text"] for one in got) == text_of(serial(mixed, [1, 2, 3], 8))
    async with both.served.client(limits=httpx.Limits(max_connections=1)) as client:
        ports = set()
        for stream in (True, False, True):
            answer = await client.post("/v1/completions", json=ASK | {"stream": stream})
            ports.add(answer.extensions["network_stream"].get_extra_info("client_addr"))
        assert len(ports) == 1


async def test_keys() -> None:
    async with served_simulated(periodic(), keys=("one", "two")) as both, both.served.client() as client:
        right = ("Authorization", "Bearer one")
        for headers in (
            {},
            {"Authorization": "Bearer three"},
            {"Authorization": "Basic one"},
            [right, right],
        ):
            for answer in (
                await client.get("/v1/models", headers=headers),
                await client.get("/v1/topology", headers=headers),
                await client.post("/v1/completions", json=ASK, headers=headers),
            ):
                assert answer.status_code == 401
                assert answer.json()["error"]["code"] == "invalid_api_key"
        right = await client.post("/v1/completions", json=ASK, headers={"Authorization": "Bearer two"})
        assert right.status_code == 200
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/openapi.json")).json()["components"]["securitySchemes"]


async def test_what_the_server_says_of_itself(both: Both) -> None:
    async with both.served.client() as client:
        assert (await client.get("/ready")).json() == {"status": "ready"}
        await client.post("/v1/completions", json=ASK)
        await client.post("/v1/completions", json={})
        topology = (await client.get("/v1/topology")).json()
        assert [stage["layers"] for stage in topology["stages"]] == [[0, 1], [1, 2]]
        assert topology["lanes"] == {"total": 4, "free": 4}
        metrics = (await client.get("/metrics")).text
        assert 'meshpipe_requests_total{endpoint="completions",status="200"} 1.0' in metrics
        assert 'meshpipe_requests_total{endpoint="completions",status="400"} 1.0' in metrics
        assert "meshpipe_completion_tokens_total 8.0" in metrics
        assert "meshpipe_lanes_free 4.0" in metrics


async def test_overload_is_told_when_to_come_back() -> None:
    async with served_simulated(novel, lanes=1, queue=1, cost=((1, 0.01), (63, 0.01))) as both:
        async with both.served.client() as client, trio.open_nursery() as nursery:
            statuses: list[int] = []

            async def ask() -> None:
                answer = await client.post("/v1/completions", json=ASK | {"max_tokens": 10})
                statuses.append(answer.status_code)
                if answer.status_code == 429:
                    assert 1 <= int(answer.headers["retry-after"]) <= 60
                    assert answer.json()["error"]["type"] == "rate_limit_error"

            for _ in range(5):
                nursery.start_soon(ask)
        assert sorted(statuses) == [200, 200, 429, 429, 429]
        async with both.served.client() as client:
            answer = await client.post("/v1/completions", json=ASK | {"n": 3})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")
        both.sim.assert_nothing_is_left()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_its_lane(stream: bool) -> None:
    async with served_simulated(novel, lanes=1, cost=((1, 0.005), (63, 0.01))) as both:
        async with both.served.client() as client, trio.open_nursery() as nursery:
            ask = ASK | {"max_tokens": 4000, "stream": stream}
            nursery.start_soon(partial(client.post, "/v1/completions", json=ask))
            with trio.fail_after(5):
                while not both.sim.stages[1].lanes_busy:
                    await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        with trio.fail_after(1):
            await both.wait_free()
            await all_ended(both)
        both.sim.assert_nothing_is_left()
        if not stream:
            assert b"meshpipe_disconnects_total 1.0" in both.served.service.metrics.text()


@pytest.mark.parametrize("delay", [None, 0.1])
@pytest.mark.parametrize("target", [periodic(), novel])
async def test_when_a_client_leaves_no_stage_begins_another_window(
    target: Target,
    delay: float | None,
    autojump_clock: trio.testing.MockClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On the virtual clock: the decode that is under way at a stage ends, nothing else begins, the lane is free."""
    begun: list[tuple[float, int]] = []
    ended: dict[int, float] = {}
    run = SimulatedRunner.run

    async def noted(self: SimulatedRunner, jobs: Sequence[Job]) -> list[Result]:
        begun.append((trio.current_time(), self.descriptor.layers[0]))
        results = await run(self, jobs)
        ended[self.descriptor.layers[0]] = trio.current_time()
        return results

    monkeypatch.setattr(SimulatedRunner, "run", noted)
    ask = ASK | {"max_tokens": 4000, "stream": True, "speculation": {"depth": 8, "width": 4}}
    left, gone = trio.Event(), 0.0
    said: list[Any] = [{"type": "http.request", "body": json.dumps(ask).encode(), "more_body": False}]

    async def receive() -> Any:
        if said:
            return said.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        nonlocal gone
        if message["type"] == "http.response.body" and len(begun) > 40 and not left.is_set():
            gone = trio.current_time()
            left.set()

    async with simulated(target, vocabulary=Words(), delay=delay, lanes=1) as sim:
        app = application(Service(sim.coordinator, MODEL))
        path = {"path": "/v1/completions", "raw_path": b"/v1/completions", "query_string": b""}
        scope = {"type": "http", "method": "POST", "headers": [], "http_version": "1.1", **path}
        await app(scope, receive, send)
        assert trio.current_time() == gone
        free = gone
        for index, stage in enumerate(sim.stages):
            heard = gone + (delay or 0) * index  # the first stage is where the coordinator is
            await stage.wait_idle()
            # The close of a session waits for the decode under way at the stage that it passes.
            free = max(heard, free + (delay or 0) * (index > 0), ended[index])
            assert trio.current_time() <= free + 1e-6
            assert [at for at, layer in begun if layer == index and at > heard + 1e-6] == []
        await trio.sleep(5)
        assert all(at <= gone + (delay or 0) + 1e-6 for at, _ in begun)
        sim.assert_nothing_is_left()


@asynccontextmanager
async def unread(send_deadline: float) -> AsyncIterator[tuple[Both, socket.socket]]:
    """A server with one lane and no queue; a client that asked for more than its socket holds, and reads nothing."""
    listener = open_listener("127.0.0.1", 0, send_deadline=send_deadline)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    async with (
        simulated(periodic(), vocabulary=Words(), delay=None, lanes=1, cost=((1, 0.001), (63, 0.002))) as sim,
        served(sim.coordinator, listener=listener, queue=0) as server,
    ):
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
            # Without speculation each token is an event of its own: 60 kB together.
            alone = {"max_tokens": 500, "stream": True, "speculation": {"mode": "off"}}
            body = json.dumps(ASK | alone).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            deaf.sendall(head.encode() + body)
            with trio.fail_after(30):
                while not sim.coordinator.active:
                    await trio.testing.wait_all_tasks_blocked()
                yield Both(server, sim), deaf


async def test_a_client_that_reads_nothing_holds_no_lane() -> None:
    """Its answer waits, and counts as a request; its generation has ended; when it hangs up, the next is served."""
    async with unread(send_deadline=60) as (both, deaf), both.served.client() as client:
        while both.sim.coordinator.active:
            await trio.testing.wait_all_tasks_blocked()
        assert (await client.post("/v1/completions", json=ASK)).status_code == 429
        deaf.close()
        await all_ended(both)
        assert (await client.post("/v1/completions", json=ASK)).status_code == 200


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="Linux's")
async def test_a_client_that_reads_nothing_is_cut_off() -> None:
    """It stays connected, and is never sent the end of its answer; the next is served."""
    async with unread(send_deadline=1) as (both, deaf), both.served.client() as client:
        await all_ended(both)
        assert (await client.post("/v1/completions", json=ASK)).status_code == 200
        answer = b""
        with suppress(ConnectionResetError):
            while part := await trio.to_thread.run_sync(deaf.recv, 4096):
                answer += part
        assert answer.startswith(b"HTTP/1.1 200")
        assert b"[DONE]" not in answer


async def all_ended(both: Both) -> None:
    while both.served.service.generations or both.sim.coordinator.active:
        await trio.testing.wait_all_tasks_blocked()


async def test_a_lost_stage_is_an_error_event_and_then_503() -> None:
    deadlines = {"resume_deadline": 0.1, "queue_deadline": 0.1}
    async with served_simulated(novel, cost=((1, 0.005), (63, 0.01)), **deadlines) as both:  # noqa: SIM117
        async with both.served.client() as client:
            ask = ASK | {"max_tokens": 4000, "stream": True}
            async with client.stream("POST", "/v1/completions", json=ask) as answer:
                assert answer.status_code == 200
                text = ""
                async for part in answer.aiter_text():
                    if not text:
                        both.sim.coordinator.way.broke("its machine burns")
                    text += part
            last = events(text)[-1]
            assert last["error"]["code"] == "stage_lost"
            assert "its machine burns" in last["error"]["message"]
            for path, status in (("/health", 200), ("/ready", 503)):
                assert (await client.get(path)).status_code == status
            answer = await client.post("/v1/completions", json=ASK)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "stage_lost")
            assert answer.headers["retry-after"] == "2"
            message = answer.json()["error"]["message"]
            assert re.search(r"its machine burns; no route to the stages for 0\.\d+ s", message)


@pytest.mark.slow
async def test_load_with_cancellations_leaks_nothing() -> None:
    """200 requests, 16 at a time, a third of whose clients leave whenever they like."""
    dice = random.Random(7)
    finished: list[int] = []

    async def one(both: Both, number: int, limit: trio.CapacityLimiter) -> None:
        async with limit:
            prompt = [dice.randrange(900) for _ in range(dice.randrange(1, 80))]
            count = dice.randrange(1, 60)
            patience = dice.uniform(0, 0.3) if dice.random() < 0.35 else 60
            ask = ASK | {"prompt": prompt, "max_tokens": count, "stream": dice.random() < 0.6}
            with trio.move_on_after(patience):
                status, text = await post(both.served.url, "/v1/completions", ask)
                assert status == 200, text
                got = events(text)[:-1] if ask["stream"] else [json.loads(text)]
                said = "".join(one["choices"][0]["text"] for one in got)
                assert said == text_of(serial(mixed, prompt, count))
                finished.append(number)

    async with served_simulated(mixed, stages=3, lanes=8, queue=16) as both:
        memory = []
        for _ in range(2):
            limit = trio.CapacityLimiter(16)
            async with trio.open_nursery() as nursery:
                for number in range(100):
                    nursery.start_soon(one, both, number, limit)
            with trio.fail_after(10):
                await both.wait_free()
                await all_ended(both)
            gc.collect()
            memory.append(resident())
        both.sim.assert_nothing_is_left()
        assert both.served.service.metrics.text().count(b"meshpipe_lanes_free 8.0") == 1
    assert 100 < len(finished) < 195
    assert memory[1] - memory[0] < 4 << 20, memory


def resident() -> int:
    """Bytes of memory that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_calls_are_read_from_text() -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {"a": "</tool_call>"}}\n</tool_call>'
    calls, rest = calls_in(call + call)
    assert [json.loads(one["function"]["arguments"]) for one in calls] == [{"a": "</tool_call>"}] * 2
    assert rest == ""
    calls, rest = calls_in(call + '<tool_call>{"name": "f", "argum')
    assert len(calls) == 1
    assert rest.startswith("<tool_call>{")
    assert calls_in("text") == ([], "text")


# ---- the openai package -------------------------------------------------------------------------------


async def test_the_synchronous_client(both: Both) -> None:
    def talk() -> tuple[str, str, Any]:
        with openai.OpenAI(base_url=f"{both.served.url}/v1", api_key="x", max_retries=0) as client:
            whole = client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "5 6"}], max_tokens=12, temperature=0
            )
            stream = client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": "5 6"}],
                max_completion_tokens=12,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"speculation": {"depth": 3}, "min_p": 0.1},
            )
            chunks = list(stream)
            with pytest.raises(openai.BadRequestError) as caught:
                client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "5"}], n=0)
            assert caught.value.param == "n"
            with pytest.raises(openai.NotFoundError):
                client.models.retrieve("other")
            assert [model.id for model in client.models.list()] == [MODEL]
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
            return whole.choices[0].message.content or "", text, chunks[-1].usage

    whole, streamed, usage = await trio.to_thread.run_sync(talk)
    assert whole == streamed
    assert len(whole.split()) == 12
    assert usage.completion_tokens == 12
    assert usage.prompt_tokens_details.cached_tokens > 0


async def test_the_asynchronous_client(both: Both) -> None:
    """On asyncio, in a thread of its own."""

    async def talk() -> None:
        async with openai.AsyncOpenAI(base_url=f"{both.served.url}/v1", api_key="x", max_retries=0) as client:
            stream = await client.completions.create(model=MODEL, prompt="1 2 3", max_tokens=8, stream=True)
            text = "".join([chunk.choices[0].text async for chunk in stream])
            assert text == text_of(serial(mixed, [1, 2, 3], 8))
            with pytest.raises(openai.BadRequestError, match="maximum context length"):
                await client.completions.create(model=MODEL, prompt="1", max_tokens=10_000)

    await trio.to_thread.run_sync(lambda: asyncio.run(talk()))


# ---- the real model -----------------------------------------------------------------------------------

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,12}( [A-Z][a-z]{1,12})?$"},
        "age": {"type": "integer", "minimum": 18, "maximum": 120},
        "height": {"type": "number", "exclusiveMinimum": 0.5, "maximum": 2.5},
        "tags": {"type": "array", "items": {"enum": ["kind", "tall"]}, "maxItems": 2},
    },
    "required": ["name", "age", "height", "tags"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
        },
    },
}


@pytest.mark.slow
async def test_the_real_model_through_the_openai_package(smollm2: Path) -> None:
    async with (
        Pipeline.local(smollm2, 2, context=512, lanes=2) as pipeline,
        served(pipeline, speculation=Speculation()) as server,
    ):
        await trio.to_thread.run_sync(lambda: asyncio.run(talk_about(server.url)))
        assert pipeline.lanes.free == 2


async def talk_about(url: str) -> None:
    """Schemas, tools and biases, on asyncio."""
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
        create = partial(client.chat.completions.create, model=MODEL, temperature=0.8, seed=3)
        describe: Any = [{"role": "user", "content": "Describe Anna as JSON."}]
        schema: Any = {
            "type": "json_schema",
            "json_schema": {"name": "person", "schema": PERSON, "strict": True},
        }
        texts = []
        for mode in ("off", "auto"):
            answer = await create(
                messages=describe,
                response_format=schema,
                max_tokens=70,
                extra_body={"speculation": {"mode": mode}},
                logprobs=True,
                top_logprobs=2,
            )
            choice = answer.choices[0]
            assert choice.finish_reason == "stop"
            jsonschema.validate(json.loads(choice.message.content or ""), PERSON)
            assert choice.logprobs is not None
            assert "".join(entry.token for entry in choice.logprobs.content or []) == choice.message.content
            assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content or [])
            texts.append((choice.message.content, choice.logprobs.to_json()))
        assert texts[0] == texts[1]

        ask: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
        tools: Any = [WEATHER]
        named: Any = {"type": "function", "function": {"name": "get_weather"}}
        answer = await create(messages=ask, tools=tools, tool_choice=named, max_tokens=60)
        (call,) = answer.choices[0].message.tool_calls or []
        assert answer.choices[0].finish_reason == "tool_calls"
        assert call.function.name == "get_weather"
        assert set(json.loads(call.function.arguments)) == {"city"}
        follow = [*ask, answer.choices[0].message.model_dump(exclude_none=True),
                  {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]  # fmt: skip
        spoken = await create(messages=follow, tools=tools, tool_choice="none", max_tokens=8)
        assert spoken.choices[0].message.content
        stream = await create(messages=ask, tools=tools, tool_choice="required", max_tokens=60, stream=True,
                              parallel_tool_calls=False)  # fmt: skip
        deltas = [chunk.choices[0] async for chunk in stream]
        streamed = [one for delta in deltas for one in delta.delta.tool_calls or []]
        assert [one.function.name for one in streamed if one.function] == ["get_weather"]
        assert deltas[-1].finish_reason == "tool_calls"
        free = await create(messages=ask, tools=tools, max_tokens=8)
        assert free.choices[0].message.content or free.choices[0].message.tool_calls
        biased = await client.completions.create(
            model=MODEL, prompt="One two", max_tokens=3, temperature=0, logprobs=1, logit_bias={"198": 100}
        )
        assert biased.choices[0].text == "\n\n\n"
        assert biased.choices[0].logprobs is not None
        assert biased.choices[0].logprobs.text_offset == [0, 1, 2]
