"""Grammars (GBNF) for JSON: any object, what a JSON schema allows, and calls of tools.

llama.cpp's converters take whatever schema comes and leave out silently what they do not know, so that the
output may break the schema. Here a keyword either binds the output or is refused by name. Everything is bounded:
schemas come from clients.

Properties come in the schema's order; properties that it does not name are not written, unless it names none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from meshpipe.errors import UsageError

MAX_RULES = 1000
MAX_DEPTH = 32
MAX_REPEATS = 500
"""For minItems, maxItems, minLength and maxLength."""

# How much space may stand between tokens of JSON. Unbounded, small models fill their answer with it.
_BASE = r"""ws ::= | " " | "\n" [ \t]{0,20}
plain ::= [^"\\\x7F\x00-\x1F] | "\\" ["\\/bfnrt]
char ::= plain | "\\u" ([0-9a-cA-CefEF] hex | [dD] [0-7]) hex hex
hex ::= [0-9a-fA-F]
string ::= "\"" char* "\""
digits ::= [0-9]{1,15}
integer ::= "-"? ("0" | [1-9] [0-9]{0,15})
number ::= integer ("." digits)? ([eE] [-+]? [0-9]{1,2})?
boolean ::= "true" | "false"
null ::= "null"
value ::= object | array | string | number | boolean | null
object ::= "{" ws (string ws ":" ws value ws ("," ws string ws ":" ws value ws)*)? "}"
array ::= "[" ws (value ws ("," ws value ws)*)? "]"
date ::= [0-9]{4} "-" ("0" [1-9] | "1" [0-2]) "-" ("0" [1-9] | "1" [0-9] | "2" [0-8])
time ::= ([01] [0-9] | "2" [0-3]) ":" [0-5] [0-9] ":" [0-5] [0-9] ("." [0-9]{1,6})? ("Z" | [-+] ([01] [0-9] | "2" [0-3]) ":" [0-5] [0-9])
uuid ::= [0-9a-f]{8} "-" [0-9a-f]{4} "-" [0-9a-f]{4} "-" [0-9a-f]{4} "-" [0-9a-f]{12}
"""  # noqa: E501
_FORMATS = {
    "date": '"\\"" date "\\""',
    "time": '"\\"" time "\\""',
    "date-time": '"\\"" date "T" time "\\""',
    "uuid": '"\\"" uuid "\\""',
}
_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
_SILENT = {"title", "description", "default", "examples", "$schema", "$id", "$comment", "$defs", "definitions",
           "deprecated", "readOnly", "writeOnly", "strict"}  # fmt: skip
"""Keywords that say nothing about the value."""
_OF_TYPE = {
    "object": {"properties", "required", "additionalProperties"},
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "string": {"minLength", "maxLength", "format"},
}


def json_object() -> str:
    """The grammar of any JSON object."""
    return "root ::= object\n" + _BASE


def json_schema(schema: Any) -> str:
    """The grammar of what a JSON schema allows (of what it allows, a part: see the top of this file).

    Raises UsageError that names the keyword which is not supported or is wrong, and where it stands.
    """
    rules = _Rules(schema)
    return rules.text(rules.visit(schema, "", 0))


def literal(text: str) -> str:
    """A GBNF literal."""
    escapes = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    return '"' + "".join(
        escapes.get(one, one if one.isprintable() else f"\\U{ord(one):08X}") for one in text
    ) + '"'  # fmt: skip


def tool_calls(
    tools: Sequence[tuple[str, Any]], opening: str, closing: str, *, required: bool, several: bool
) -> str:
    """The grammar of an answer that calls tools: `opening` {"name": …, "arguments": …} `closing`, one or more.

    `tools` are names and the JSON schemas of their arguments (None: any object). Unless `required`, any text
    that does not begin with the first character of `opening` will do as well. Raises UsageError as `json_schema`.
    """
    parts: list[str] = []
    rules = _Rules(None)
    for index, (name, schema) in enumerate(tools):
        arguments = "object"
        if schema is not None:
            rules.root = schema
            arguments = rules.visit(schema, f"/tools/{index}", 0)
        head = literal('{"name": ' + json.dumps(name) + ', "arguments": ')
        parts.append(rules.add(f'{head} {arguments} "}}"'))
    call = rules.add(f"{literal(opening)} ws ({' | '.join(parts)}) ws {literal(closing)}")
    calls = f"{call} (ws {call}){{0,7}}" if several else call
    if not required:
        calls += f" | [^{opening[0]}] [\\U00000000-\\U0010FFFF]*"
    return rules.text(rules.add(calls))


class _Rules:
    """Collects numbered rules while a schema is walked; `root` is what its references refer to."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self._rules: list[str] = []
        self._known: dict[tuple[int, str], str] = {}  # rules of references, by root and path

    def text(self, root: str) -> str:
        """The whole grammar."""
        lines = [f"root ::= {root}", *(f"r{number} ::= {rule}" for number, rule in enumerate(self._rules))]
        return "\n".join(lines) + "\n" + _BASE

    def add(self, rule: str) -> str:
        """A new rule's name."""
        if len(self._rules) >= MAX_RULES:
            raise UsageError(f"the schema is too large: it needs more than {MAX_RULES} grammar rules")
        self._rules.append(rule)
        return f"r{len(self._rules) - 1}"

    def visit(self, schema: Any, path: str, depth: int) -> str:
        """The name of a rule that matches the values of a schema."""
        if depth > MAX_DEPTH:
            raise UsageError(f"the schema nests deeper than {MAX_DEPTH}, at {path}")
        if schema is True:
            return "value"
        if not isinstance(schema, Mapping):
            raise UsageError(f"the schema at {path or '/'} is {_brief(schema)}: it must be an object")
        words = {word for word in schema if word not in _SILENT}
        for word, kind in (("$ref", self._reference), ("const", self._const), ("enum", self._enum)):
            if word in words:
                _only(schema, words, {word, "type"}, path)
                return kind(schema[word], path, depth)
        for word in ("anyOf", "oneOf", "allOf"):
            if word in words:
                _only(schema, words, {word}, path)
                return self._union(word, schema[word], path, depth)
        types = schema.get("type", _implied(words))
        if isinstance(types, list) and types:
            _only(schema, words, set().union({"type"}, *(_OF_TYPE.get(str(t), ()) for t in types)), path)
            return self.add(" | ".join(self._typed(schema, one, path, depth) for one in types))
        _only(schema, words, {"type", *_OF_TYPE.get(str(types), ())}, path)
        return self._typed(schema, types, path, depth)

    def _typed(self, schema: Mapping[str, Any], kind: Any, path: str, depth: int) -> str:
        if kind is None:
            return "value"
        if kind not in _TYPES:
            raise UsageError(
                f"type at {path or '/'} is {_brief(kind)}: it must be one of {', '.join(_TYPES)}"
            )
        made: dict[str, Callable[[Mapping[str, Any], str, int], str]] = {
            "object": self._object,
            "array": self._array,
            "string": self._string,
        }
        return made[kind](schema, path, depth) if kind in made else str(kind)

    def _reference(self, target: Any, path: str, depth: int) -> str:
        if not isinstance(target, str) or not (target == "#" or target.startswith("#/")):
            raise UsageError(
                f"$ref at {path or '/'} is {_brief(target)}: only references into the schema, #/…"
            )
        key = (id(self.root), target)
        if key not in self._known:
            found = self.root
            for part in target.split("/")[1:]:
                part = part.replace("~1", "/").replace("~0", "~")
                if not isinstance(found, Mapping) or part not in found:
                    raise UsageError(f"$ref at {path or '/'}: there is no {_brief(target)} in the schema")
                found = found[part]
            name = self._known[key] = self.add("")
            inner = self.visit(found, target, depth + 1)
            if inner == name:
                raise UsageError(f"$ref at {path or '/'} refers to itself")
            self._rules[int(name[1:])] = inner
        return self._known[key]

    def _const(self, value: Any, path: str, depth: int) -> str:
        return self.add(_value(value, path))

    def _enum(self, values: Any, path: str, depth: int) -> str:
        if not isinstance(values, list) or not 0 < len(values) <= MAX_REPEATS:
            raise UsageError(f"enum at {path or '/'} must list 1 to {MAX_REPEATS} values")
        return self.add(" | ".join(_value(value, path) for value in values))

    def _union(self, word: str, schemas: Any, path: str, depth: int) -> str:
        if not isinstance(schemas, list) or not schemas:
            raise UsageError(f"{word} at {path or '/'} must list schemas")
        if word == "allOf" and len(schemas) > 1:
            raise UsageError(f"allOf at {path or '/'} has {len(schemas)} schemas; only one is supported")
        return self.add(
            " | ".join(
                self.visit(one, f"{path}/{word}/{index}", depth + 1) for index, one in enumerate(schemas)
            )
        )

    def _object(self, schema: Mapping[str, Any], path: str, depth: int) -> str:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, Mapping) or not isinstance(required, list):
            raise UsageError(f"properties at {path or '/'} must be an object, and required a list")
        missing = [name for name in required if name not in properties]
        if missing:
            raise UsageError(f"required at {path or '/'} names {_brief(missing[0])}, which is no property")
        if not properties:
            return self._map(schema.get("additionalProperties", True), path, depth)
        # What follows the members so far, if there are any: built from the last property to the first.
        first, after = "", ""
        for name, value in reversed(list(properties.items())):
            rule = self.visit(value, f"{path}/properties/{name}", depth + 1)
            member = f'{literal(json.dumps(name, ensure_ascii=False))} ws ":" ws {rule} ws'
            begun = f"{member} {after}"
            if name in required:
                first, after = self.add(begun), self.add(f'"," ws {begun}')
            else:
                first = self.add(f"{begun} | {first}" if first else f"({begun})?")
                after = self.add(f'("," ws {member})? {after}')
        return self.add(f'"{{" ws {first} "}}"')

    def _map(self, value: Any, path: str, depth: int) -> str:
        if value is True or value == {}:
            return "object"
        if value is False:
            return self.add('"{" ws "}"')
        member = f'string ws ":" ws {self.visit(value, f"{path}/additionalProperties", depth + 1)} ws'
        return self.add(f'"{{" ws ({member} ("," ws {member})*)? "}}"')

    def _array(self, schema: Mapping[str, Any], path: str, depth: int) -> str:
        least, most = _bounds(schema, "minItems", "maxItems", path)
        if "prefixItems" in schema:
            items = schema["prefixItems"]
            if (
                not isinstance(items, list)
                or not items
                or (least, most) not in ((0, None), (len(items),) * 2)
            ):
                raise UsageError(
                    f"prefixItems at {path or '/'} must list schemas, as many as there are items"
                )
            if schema.get("items") not in (None, False):
                raise UsageError(
                    f"items at {path or '/'} beside prefixItems is not supported, except as false"
                )
            rules = [self.visit(one, f"{path}/prefixItems/{n}", depth + 1) for n, one in enumerate(items)]
            return self.add('"[" ws ' + ' ws "," ws '.join(rules) + ' ws "]"')
        item = self.visit(schema.get("items", True), f"{path}/items", depth + 1)
        if most == 0:
            return self.add('"[" ws "]"')
        more = f'("," ws {item} ws){_times(max(0, least - 1), None if most is None else most - 1)}'
        body = f"{item} ws {more}"
        return self.add(f'"[" ws {body if least else f"({body})?"} "]"')

    def _string(self, schema: Mapping[str, Any], path: str, depth: int) -> str:
        least, most = _bounds(schema, "minLength", "maxLength", path)
        if "format" in schema:
            known = _FORMATS.get(str(schema["format"]))
            if known is None or (least, most) != (0, None):
                raise UsageError(
                    f"format at {path or '/'} is {_brief(schema['format'])}: supported are {', '.join(_FORMATS)}, "
                    "without a length"
                )
            return self.add(known)
        if (least, most) == (0, None):
            return "string"
        return self.add(f'"\\"" plain{_times(least, most)} "\\""')


def _value(value: Any, path: str) -> str:
    try:
        return literal(json.dumps(value, ensure_ascii=False, allow_nan=False))
    except (ValueError, TypeError):
        raise UsageError(f"the value {_brief(value)} at {path or '/'} is no JSON") from None


def _times(least: int, most: int | None) -> str:
    return f"{{{least},{'' if most is None else most}}}"


def _bounds(schema: Mapping[str, Any], low: str, high: str, path: str) -> tuple[int, int | None]:
    least, most = schema.get(low, 0), schema.get(high)
    for word, value in ((low, least), (high, most)):
        if value is not None and (type(value) is not int or not 0 <= value <= MAX_REPEATS):
            raise UsageError(
                f"{word} at {path or '/'} is {_brief(value)}: it must be an integer from 0 to {MAX_REPEATS}"
            )
    if most is not None and most < least:
        raise UsageError(f"{high} at {path or '/'} is {most}, below {low}, {least}")
    return least, most


def _implied(words: set[str]) -> str | None:
    """The type that the keywords speak of."""
    return next((kind for kind, known in _OF_TYPE.items() if words & known), None)


def _only(schema: Mapping[str, Any], words: set[str], supported: set[str], path: str) -> None:
    for word in sorted(words - supported):
        raise UsageError(f"the schema's keyword {_brief(word)} at {path or '/'} is not supported here")


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
