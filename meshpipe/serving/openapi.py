"""The OpenAPI document, made of the same classes that check requests."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import models_json_schema

import meshpipe
from meshpipe.serving import schemas

_JSON = "application/json"
_STATUS = {
    400: "A field is wrong; `param` names it",
    401: "No API key, or a wrong one",
    404: "There is no such model",
    408: "The body did not come in time",
    413: "The body is too large",
    429: "Too many requests wait; `Retry-After` says for how many seconds to hold back",
    500: "The engine failed",
    503: "A stage is lost",
}
_ANSWERS = (
    schemas.ErrorAnswer, schemas.ChatAnswer, schemas.ChatChunk, schemas.CompletionAnswer, schemas.ModelAnswer,
    schemas.ModelList, schemas.TopologyAnswer, schemas.StatusAnswer,
)  # fmt: skip


def document(model: str, *, keyed: bool) -> dict[str, Any]:
    """OpenAPI 3.1. `keyed`: API keys are asked for."""
    template = "#/components/schemas/{model}"
    requests = [(schemas.ChatRequest, "validation"), (schemas.CompletionRequest, "validation")]
    _, made = models_json_schema(requests, ref_template=template)  # type: ignore[arg-type]
    components: dict[str, Any] = dict(made["$defs"])
    for answer in _ANSWERS:
        schema = TypeAdapter(answer).json_schema(ref_template=template)
        components |= schema.pop("$defs", {})
        components[answer.__name__] = schema
    guarded = [401] if keyed else []
    generating = [400, *guarded, 404, 408, 413, 429, 500, 503]
    status = _content("StatusAnswer")
    parameter = {
        "name": "model", "in": "path", "required": True, "schema": {"type": "string"}, "example": model,
    }  # fmt: skip
    paths = {
        "/health": {"get": _operation("health", "The process lives", status)},
        "/ready": {"get": _operation("ready", "The pipeline takes requests", status, [503])},
        "/metrics": {
            "get": _operation("metrics", "For Prometheus", {"text/plain": {"schema": {"type": "string"}}})
        },
        "/openapi.json": {
            "get": _operation("openapi", "This document", {_JSON: {"schema": {"type": "object"}}})
        },
        "/v1/models": {"get": _operation("models", "The model served", _content("ModelList"), guarded)},
        "/v1/models/{model}": {
            "get": _operation("model", "The model by name", _content("ModelAnswer"), [*guarded, 404])
            | {"parameters": [parameter]}
        },
        "/v1/topology": {
            "get": _operation("topology", "Stages, links and lanes", _content("TopologyAnswer"), guarded)
        },
        "/v1/completions": {
            "post": _generating(
                "completions", "Continues a text", "Completion", "CompletionAnswer", generating
            )
        },
        "/v1/chat/completions": {
            "post": _generating("chat", "Answers in a conversation", "Chat", "ChatChunk", generating)
        },
    }
    described: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "meshpipe", "version": meshpipe.__version__},
        "paths": paths,
        "components": {"schemas": components},
    }
    if keyed:
        described["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        for path, operations in paths.items():
            if path.startswith("/v1/"):
                for operation in operations.values():
                    operation["security"] = [{"key": []}]
    return described


def _content(name: str) -> dict[str, Any]:
    return {_JSON: {"schema": {"$ref": f"#/components/schemas/{name}"}}}


def _operation(
    name: str, words: str, content: dict[str, Any], errors: list[int] | None = None
) -> dict[str, Any]:
    responses: dict[str, Any] = {"200": {"description": words, "content": content}}
    for status in errors or ():
        responses[str(status)] = {"description": _STATUS[status], "content": _content("ErrorAnswer")}
    for later in responses.keys() & {"429", "503"}:
        responses[later]["headers"] = {"Retry-After": {"schema": {"type": "integer"}}}
    return {"operationId": name, "summary": words, "responses": responses}


def _generating(name: str, words: str, prefix: str, event: str, errors: list[int]) -> dict[str, Any]:
    content = _content(f"{prefix}Answer") | {
        "text/event-stream": {
            "schema": {
                "type": "object",
                "description": "With `stream`, each event",
                "required": ["data"],
                "properties": {
                    "data": {
                        "type": "string",
                        "description": f"JSON: a {event}, or an ErrorAnswer; at the end [DONE]",
                    }
                },
            }
        }
    }
    body = {"required": True, "content": _content(f"{prefix}Request")}
    return _operation(name, words, content, errors) | {"requestBody": body}
