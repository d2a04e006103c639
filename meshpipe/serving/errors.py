"""Errors as OpenAI's clients expect them: a status, and {"error": {message, type, param, code}}."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from meshpipe.errors import MeshpipeError, OverloadedError, StageLostError, UsageError
from meshpipe.pipeline.failover import PAUSES

MANY = 1000
"""Mistakes in one request of which none is told any more: a peer that made a million would be waited for by all."""


class ApiError(Exception):
    """What a request is answered with when it fails; `param` names the field that is wrong."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The JSON of the answer."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        if self.status == 429:
            kind = "rate_limit_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def of_failure(error: Exception) -> ApiError:
    """A generation's failure."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, StageLostError):
        headers = {"Retry-After": f"{PAUSES[1]:.0f}"}  # a lost stage is looked for as often, at least
        return ApiError(503, f"the pipeline is not available: {error}", code="stage_lost", headers=headers)
    if isinstance(error, OverloadedError):
        return ApiError(429, str(error), code="rate_limit_exceeded", headers={"Retry-After": "1"})
    if isinstance(error, UsageError):
        return ApiError(400, str(error), code="invalid_value")
    if isinstance(error, MeshpipeError):
        return ApiError(500, str(error), code="engine_error")
    return ApiError(500, "internal error; the server's log says more", code="internal_error")


def of_validation(error: ValidationError, sent: Any) -> ApiError:
    """One thing that is wrong with a request, by the name of its field. `sent` is the parsed body."""
    if error.error_count() > MANY:
        return ApiError(400, f"the body has more than {MANY} mistakes.", code="invalid_value")
    found = error.errors(include_url=False, include_context=False, include_input=False)
    # Of a union every branch complains: the one that fits best got furthest, or found its type right.
    first = max(
        found, key=lambda one: (len(_path(one["loc"], sent, one["type"])), not _is_of_type(one["type"]))
    )
    kind = first["type"]
    if kind == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {first['msg']}", code="invalid_json")
    param = _path(first["loc"], sent, kind)
    if kind == "extra_forbidden":
        return ApiError(400, f"Unknown parameter: '{param}'.", param=param, code="unknown_parameter")
    if kind == "missing":
        return ApiError(
            400, f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter"
        )
    code = "invalid_type" if _is_of_type(kind) else "invalid_value"
    return ApiError(
        400, f"Invalid value for '{param or 'body'}': {first['msg']}.", param=param or None, code=code
    )


def _is_of_type(kind: str) -> bool:
    return kind.endswith("_type")


def _path(location: tuple[int | str, ...], sent: Any, kind: str) -> str:
    """`messages[0].content`: pydantic's location without the names of the union's branches."""
    path = ""
    for number, part in enumerate(location):
        last = number == len(location) - 1
        if isinstance(part, int):
            inside = isinstance(sent, list) and part < len(sent)
            sent = sent[part] if inside else None
            path += f"[{part}]" if inside else ""
        elif isinstance(sent, Mapping) and (part in sent or (last and kind == "missing")):
            sent = sent.get(part)
            path += f".{part}" if path else part
    return path
