"""What single keywords of a JSON schema say, for `gbnf`: types, listed values, bounds; and the errors that name them.

A schema here is a mapping, `path` says where it stands in the whole (a JSON pointer, empty for the root), and what is
wrong raises UsageError with the keyword and that place.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from decimal import Decimal
from typing import Any

from meshpipe.errors import UsageError
from meshpipe.llama import bounds

MAX_REPEATS = 500
"""For minItems, maxItems, minLength and maxLength."""
TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
SILENT = {
    "title", "description", "default", "examples", "$schema", "$id", "$comment", "$defs", "definitions",
    "deprecated", "readOnly", "writeOnly", "strict",
}  # fmt: skip
"""Keywords that say nothing about the value."""
OF_TYPE = {
    "object": {"properties", "required", "additionalProperties"},
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "string": {"minLength", "maxLength", "format", "pattern"},
    "integer": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
}


def referred(root: Any, target: str) -> Any:
    """What a reference `#/…` names, None if there is nothing."""
    for part in target.split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(root, Mapping) or part not in root:
            return None
        root = root[part]
    return root


def types_of(schema: Mapping[str, Any], path: str) -> list[Any]:
    """The types that `type` names, one at least."""
    types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    for kind in types or [[]]:
        if kind not in TYPES:
            raise UsageError(f"type at {path or '/'} is {brief(kind)}: it must be one of {', '.join(TYPES)}")
    return types


def is_a(value: Any, kind: str) -> bool:
    """Whether a value is of a type, as JSON schema has it: true is no number, 1.0 is an integer."""
    if kind in ("integer", "number"):
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return False
        return kind == "number" or isinstance(value, int) or value.is_integer()
    classes = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}
    return isinstance(value, classes[kind])


def kinds(schema: Mapping[str, Any]) -> set[str]:
    """The types that values of a schema may have; integers count as numbers."""
    values = listed(schema)
    if values is not None:
        found = {kind for kind in TYPES if any(is_a(value, kind) for value in values)}
    else:
        types = schema.get("type", list(TYPES))
        found = {str(kind) for kind in (types if isinstance(types, list) else [types])}
    return {"number" if kind == "integer" else kind for kind in found}


def listed(schema: Mapping[str, Any]) -> list[Any] | None:
    """The values of a schema that lists them."""
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


def _hashable(value: Any) -> Any:
    """What is equal where JSON values are."""
    if isinstance(value, dict):
        return frozenset((name, _hashable(inner)) for name, inner in value.items())
    return tuple(map(_hashable, value)) if isinstance(value, list) else value


def disjoint(some: list[Any], others: list[Any]) -> bool:
    """Whether no value is in both lists; 1, 1.0 and true count as one."""
    return {_hashable(value) for value in some}.isdisjoint(map(_hashable, others))


def required(schema: Mapping[str, Any]) -> list[str]:
    """The names of `required`; what is wrong there is said where the object is visited."""
    names = schema.get("required")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def property_named(schema: Mapping[str, Any], name: str) -> Any:
    """The schema of a property, None if there is none of that name."""
    properties = schema.get("properties")
    return properties.get(name) if isinstance(properties, Mapping) else None


@contextmanager
def named(word: str, path: str) -> Iterator[None]:
    """An error inside says which keyword is meant and where it stands."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{word} at {path or '/'}: {error}") from None


def ends(schema: Mapping[str, Any], path: str) -> tuple[bounds.Bound | None, bounds.Bound | None]:
    """The narrower of minimum and exclusiveMinimum, and of their counterparts."""
    found: dict[str, bounds.Bound] = {}
    for word in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
        if word not in schema:
            continue
        value = schema[word]
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not abs(value) <= bounds.MOST:  # nor NaN
            raise UsageError(
                f"{word} at {path or '/'} is {brief(value)}: it must be a number of at most {bounds.DIGITS} digits "
                "before the point"
            )
        found[word] = bounds.Bound(Decimal(repr(value)), word.startswith("exclusive"))
    lows = [found[word] for word in ("minimum", "exclusiveMinimum") if word in found]
    highs = [found[word] for word in ("maximum", "exclusiveMaximum") if word in found]
    low = max(lows, key=lambda bound: (bound.value, bound.open), default=None)
    high = min(highs, key=lambda bound: (bound.value, not bound.open), default=None)
    return low, high


def written(value: Any, path: str) -> str:
    """A listed value as the JSON that the output has to be."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError):
        raise UsageError(f"the value {brief(value)} at {path or '/'} is no JSON") from None


def counts(schema: Mapping[str, Any], low: str, high: str, path: str) -> tuple[int, int | None]:
    """The least and the most that two keywords allow, as minItems and maxItems do; None: any number."""
    least, most = schema.get(low, 0), schema.get(high)
    for word, value in ((low, least), (high, most)):
        if value is not None and (type(value) is not int or not 0 <= value <= MAX_REPEATS):
            raise UsageError(
                f"{word} at {path or '/'} is {brief(value)}: it must be an integer from 0 to {MAX_REPEATS}"
            )
    if most is not None and most < least:
        raise UsageError(f"{high} at {path or '/'} is {most}, below {low}, {least}")
    return least, most


def implied_type(words: set[str]) -> str | None:
    """The type that the keywords speak of."""
    return next((kind for kind, known in OF_TYPE.items() if words & known), None)


def only(words: set[str], supported: set[str], path: str) -> None:
    """Refuses the first of `words` that is not supported beside the others."""
    for word in sorted(words - supported):
        raise UsageError(f"the schema's keyword {brief(word)} at {path or '/'} is not supported here")


def brief(value: object) -> str:
    """A value as an error quotes it."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
