"""Schemas of `allOf` as one schema that says the same, where one can."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import Any

from meshpipe.errors import UsageError

MAX_PARTS = 50
"""Schemas that one property or the items of an array come to."""

_OBJECT = ("properties", "additionalProperties")


class Intersections:
    """Joins schemas. They are compared by their texts, which are remembered: a schema may be joined with many."""

    def __init__(self) -> None:
        self._texts: dict[int, tuple[str, Any]] = {}  # by id, with what has it, so that it stays that

    def of(self, schemas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """What all of the schemas allow; they refer to no others at their top.

        Raises UsageError that names a keyword which cannot be joined. What is wrong with other keywords, or not
        supported, is for who reads the result to say.
        """
        bare = any("items" in schema and "prefixItems" not in schema for schema in schemas)
        if bare and any("prefixItems" in schema for schema in schemas):
            raise UsageError("items of one schema beside prefixItems of another is not supported")
        said: dict[str, list[Any]] = {}
        for schema in schemas:
            for word, value in schema.items():
                one = ("enum", [value]) if word == "const" else (word, value)
                said.setdefault(one[0], []).append(one[1])
        joined = {word: self._word(word, values) for word, values in said.items() if word not in _OBJECT}
        return joined | self._members(schemas)

    def _word(self, word: str, values: Sequence[Any]) -> Any:
        """What a keyword says in all of the schemas that have it."""
        if word == "items":
            return self._all(values)
        return reduce(self._values if word == "enum" else partial(self._both, word), values)

    def _both(self, word: str, mine: Any, theirs: Any) -> Any:
        if self._text(mine) == self._text(theirs):
            return mine
        if word not in _JOINED:
            raise UsageError(f"{word} differs between its schemas, which is not supported")
        return _JOINED[word](mine, theirs)

    def _members(self, schemas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """`properties` and `additionalProperties`: to what only some name, what the others say of unnamed ones."""
        sides = [(_mapping(schema), schema.get("additionalProperties", True)) for schema in schemas]
        found = {
            name: self._all([named.get(name, unnamed) for named, unnamed in sides])
            for name in dict.fromkeys(name for named, _ in sides for name in named)
        }
        rest = self._all([unnamed for _, unnamed in sides])
        kept = {name: value for name, value in found.items() if value is not False}
        if rest is not False and found and not kept:  # where some are named, others are not written anyway
            raise UsageError(
                f"the property {next(iter(found))!r} is forbidden, and others that are not named are not, which is "
                "not supported"
            )
        joined: dict[str, Any] = {}
        if any("properties" in schema for schema in schemas):
            joined["properties"] = kept
        if any("additionalProperties" in schema for schema in schemas):
            joined["additionalProperties"] = rest
        return joined

    def _all(self, schemas: Sequence[Any]) -> Any:
        """A schema that says what all of these say."""
        if any(schema is False for schema in schemas):
            return False
        said: dict[str, Any] = {}
        for schema in schemas:
            parts = _parts(schema)
            if len(parts) <= MAX_PARTS:
                said |= {self._text(part): part for part in parts if part is not True and part != {}}
            if max(len(parts), len(said)) > MAX_PARTS:
                raise UsageError(f"one value has to fit more than {MAX_PARTS} schemas")
        if not said:
            return True
        return next(iter(said.values())) if len(said) == 1 else {"allOf": list(said.values())}

    def _values(self, mine: Any, theirs: Any) -> list[Any]:
        if not isinstance(mine, list) or not isinstance(theirs, list):
            raise UsageError("enum must list values")
        others = set(map(self._text, theirs))
        kept = [value for value in mine if self._text(value) in others]
        if not kept:
            raise UsageError("no value is in the enum or const of all its schemas")
        return kept

    def _text(self, value: Any) -> str:
        """What is equal for equal JSON values: 1.0 is 1, true is not."""
        if not isinstance(value, (Mapping, list)):
            return _dumped(value)
        if id(value) not in self._texts:
            self._texts[id(value)] = _dumped(value), value
        return self._texts[id(value)][0]


def _dumped(value: Any) -> str:
    return json.dumps(_plain(value), sort_keys=True, default=repr)


def _mapping(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    properties = schema.get("properties", {})
    if not isinstance(properties, Mapping):
        raise UsageError("properties must be an object")
    return properties


def _parts(schema: Any) -> list[Any]:
    """Those of an `allOf` with nothing beside it."""
    if isinstance(schema, Mapping) and schema.keys() == {"allOf"} and isinstance(schema["allOf"], list):
        return schema["allOf"] or [schema]
    return [schema]


def _types(mine: Any, theirs: Any) -> list[Any]:
    some, others = (value if isinstance(value, list) else [value] for value in (mine, theirs))
    if max(len(some), len(others)) > MAX_PARTS:
        raise UsageError("type lists more than there are")
    kept = [kind for kind in some if kind in others or (kind == "integer" and "number" in others)]
    kept += [kind for kind in others if kind == "integer" and "number" in some and kind not in kept]
    if not kept:
        raise UsageError("no type is that of all its schemas")
    return kept


def _names(mine: Any, theirs: Any) -> list[Any]:
    if not isinstance(mine, list) or not isinstance(theirs, list):
        raise UsageError("required must be a list")
    known = {name for name in mine if isinstance(name, str)}
    return [*mine, *(name for name in theirs if not isinstance(name, str) or name not in known)]


def _end(pick: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def joined(mine: Any, theirs: Any) -> Any:
        for value in (mine, theirs):
            if not isinstance(value, (int, float)) or isinstance(value, bool):
                raise UsageError("a bound must be a number")
        return pick(mine, theirs)

    return joined


_JOINED: dict[str, Callable[[Any, Any], Any]] = {
    "type": _types,
    "required": _names,
    **dict.fromkeys(("minimum", "exclusiveMinimum", "minItems", "minLength"), _end(max)),
    **dict.fromkeys(("maximum", "exclusiveMaximum", "maxItems", "maxLength"), _end(min)),
}


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list) else value
