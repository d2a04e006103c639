"""Schemas of `allOf` as one schema that says the same, where one can."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

from meshpipe.errors import UsageError

_OBJECT = ("properties", "additionalProperties")


def intersection(schemas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What all of the schemas allow; they refer to no others at their top.

    Raises UsageError that names a keyword which cannot be joined. What is wrong with other keywords, or not
    supported, is for who reads the result to say.
    """
    return reduce(_both, schemas, {})


def _both(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    one, other = _listed(one), _listed(other)
    for some, rest in ((one, other), (other, one)):
        if "prefixItems" in some and "items" in rest and "prefixItems" not in rest:
            raise UsageError("items of one schema beside prefixItems of another is not supported")
    joined = {word: value for word, value in (*one.items(), *other.items()) if word not in _OBJECT}
    for word in (one.keys() & other.keys()) - set(_OBJECT):
        mine, theirs = one[word], other[word]
        if not _same(mine, theirs):
            if word not in _JOINED:
                raise UsageError(f"{word} differs between its schemas, which is not supported")
            joined[word] = _JOINED[word](mine, theirs)
    return joined | _members(one, other)


def _members(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """`properties` and `additionalProperties`: to a property that only one names, what the other says of unnamed."""
    sides = [(_mapping(schema), schema.get("additionalProperties", True)) for schema in (one, other)]
    found: dict[str, Any] = {}
    for name in dict.fromkeys(name for named, _ in sides for name in named):
        found[name] = _all([named.get(name, unnamed) for named, unnamed in sides])
    joined: dict[str, Any] = {}
    if any("properties" in schema for schema in (one, other)):
        joined["properties"] = {name: value for name, value in found.items() if value is not False}
    if any("additionalProperties" in schema for schema in (one, other)):
        joined["additionalProperties"] = _all([unnamed for _, unnamed in sides])
    return joined


def _mapping(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    properties = schema.get("properties", {})
    if not isinstance(properties, Mapping):
        raise UsageError("properties must be an object")
    return properties


def _all(schemas: Sequence[Any]) -> Any:
    """A schema that says what all of these say."""
    if any(schema is False for schema in schemas):
        return False
    said: list[Any] = []
    parts = [part for schema in schemas for part in _parts(schema)]
    for schema in parts:
        if schema is not True and schema != {} and not any(_same(schema, known) for known in said):
            said.append(schema)
    if not said:
        return True
    return said[0] if len(said) == 1 else {"allOf": said}


def _parts(schema: Any) -> list[Any]:
    """Those of an `allOf` with nothing beside it."""
    if isinstance(schema, Mapping) and schema.keys() == {"allOf"} and isinstance(schema["allOf"], list):
        return schema["allOf"] or [schema]
    return [schema]


def _listed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same with a const as an enum."""
    if "const" not in schema:
        return schema
    rest = {word: value for word, value in schema.items() if word != "const"}
    return _both(rest, {"enum": [schema["const"]]})


def _values(mine: Any, theirs: Any) -> list[Any]:
    if not isinstance(mine, list) or not isinstance(theirs, list):
        raise UsageError("enum must list values")
    others = {_text(value) for value in theirs}
    kept = [value for value in mine if _text(value) in others]
    if not kept:
        raise UsageError("no value is in the enum or const of all its schemas")
    return kept


def _types(mine: Any, theirs: Any) -> list[Any]:
    some, others = (value if isinstance(value, list) else [value] for value in (mine, theirs))
    kept = [kind for kind in some if kind in others or (kind == "integer" and "number" in others)]
    kept += [kind for kind in others if kind == "integer" and "number" in some and kind not in kept]
    if not kept:
        raise UsageError("no type is that of all its schemas")
    return kept


def _names(mine: Any, theirs: Any) -> list[Any]:
    if not isinstance(mine, list) or not isinstance(theirs, list):
        raise UsageError("required must be a list")
    return [*mine, *(name for name in theirs if name not in mine)]


def _end(pick: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def joined(mine: Any, theirs: Any) -> Any:
        for value in (mine, theirs):
            if not isinstance(value, (int, float)) or isinstance(value, bool):
                raise UsageError("a bound must be a number")
        return pick(mine, theirs)

    return joined


_JOINED: dict[str, Callable[[Any, Any], Any]] = {
    "type": _types,
    "enum": _values,
    "required": _names,
    "items": lambda mine, theirs: _all([mine, theirs]),
    **dict.fromkeys(("minimum", "exclusiveMinimum", "minItems", "minLength"), _end(max)),
    **dict.fromkeys(("maximum", "exclusiveMaximum", "maxItems", "maxLength"), _end(min)),
}


def _same(one: Any, other: Any) -> bool:
    return _text(one) == _text(other)


def _text(value: Any) -> str:
    """What is equal for equal JSON values: 1.0 is 1, true is not."""
    return json.dumps(_plain(value), sort_keys=True, default=repr)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list) else value
