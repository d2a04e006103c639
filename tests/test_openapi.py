"""The OpenAPI document is true: requests made from it never break the server, and its answers are as it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import schemathesis
import trio
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from serving import MODEL, served_simulated
from simulated import periodic

from meshpipe.llama.vocabulary import Vocabulary

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


def fuzz(url: str, examples: int) -> dict[str, set[int]]:
    """The statuses that came, by operation."""
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    seen: dict[str, set[int]] = {}
    for found in schema.get_all_operations():
        operation = found.ok()
        seen[operation.label] = statuses_of(operation, examples)
    return seen


def statuses_of(operation: Any, examples: int) -> set[int]:
    statuses: set[int] = set()

    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy())
    def check(case: Any) -> None:
        if isinstance(case.body, dict):  # further than "there is no such model"
            case.body |= {"model": MODEL, "max_tokens": 4}
            case.body.pop("max_completion_tokens", None)
        answer = case.call()
        statuses.add(answer.status_code)
        case.validate_response(answer, checks=CHECKS)

    check()
    return statuses


@pytest.mark.slow
async def test_no_request_from_the_document_breaks_the_server(smollm2: Path) -> None:
    vocabulary = Vocabulary(smollm2)
    try:
        async with served_simulated(periodic(), vocabulary=vocabulary) as both:
            seen = await trio.to_thread.run_sync(fuzz, both.served.url, 25)
            await both.wait_free()
            both.sim.assert_nothing_is_left()
    finally:
        vocabulary.close()
    assert len(seen) == 8, seen  # all but the document itself
    assert all(200 in statuses for label, statuses in seen.items() if label != "GET /v1/models/{model}"), seen
    assert {200, 400} <= seen["POST /v1/chat/completions"] & seen["POST /v1/completions"]
