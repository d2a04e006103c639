"""Grammars (GBNF) for JSON: any object, what a JSON schema allows, and calls of tools.

llama.cpp's converters take whatever schema comes and leave out silently what they do not know, so that the
output may break the schema. Here a keyword either binds the output or is refused by name. Everything is bounded:
schemas come from clients.

Properties come in the schema's order; properties that it does not name are not written, unless it names none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

from meshpipe.errors import UsageError
from meshpipe.llama import automata, bounds, keywords, patterns
from meshpipe.llama.intersection import Intersections
from meshpipe.llama.rules import BASE, MAX_RULES, Rules, literal
from meshpipe.llama.shapes import MAX_SIZE, Listed, Loop, Row, Shape, Text, resolved, size
from meshpipe.llama.ways import read
from meshpipe.llama.writing import Writer, times

MAX_EXTENT = 1 << 19
"""Values within the schema, and characters of its texts; the grammar may have fewer."""
MAX_NODES = 2000
"""Schemas within the schema."""
MAX_DEPTH = 32
MAX_BRANCHES = 50
"""Schemas of oneOf, and those that allOf leads to."""
MAX_LOOKS = 2_000_000
"""Schemas, properties and values that are looked at for all of `allOf` and `oneOf`: a few seconds."""
_JOIN = 20
"""What a schema that is joined counts as."""

_FORMATS = {
    "date": '"\\"" date "\\""',
    "time": '"\\"" time "\\""',
    "date-time": '"\\"" date "T" time "\\""',
    "uuid": '"\\"" uuid "\\""',
}
_PATTERNS = {
    "email": r"^[A-Za-z0-9]+([._+-][A-Za-z0-9]+){0,8}@([a-z0-9]+(-[a-z0-9]+){0,4}\.){1,4}[a-z]{2,12}$",
    "hostname": r"^[a-z0-9]{1,20}(-[a-z0-9]{1,20})?(\.[a-z0-9]{1,20}(-[a-z0-9]{1,20})?){0,4}$",
    "ipv4": r"^(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)(\.(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)){3}$",
}
"""Formats that are patterns; of email and hostname, the usual ones."""


def json_object() -> str:
    """The grammar of any JSON object."""
    return "root ::= object\n" + BASE


def json_schema(schema: Any) -> str:
    """The grammar of what a JSON schema allows (of what it allows, a part: see the top of this file).

    Raises UsageError that names the keyword which is not supported or is wrong, and where it stands.
    """
    _check_extent([schema])
    walk = _Walk(schema)
    root = walk.visit(schema, "", 0)
    return walk.rules.text(walk.write([root])[0])


def tool_calls(
    tools: Sequence[tuple[str, Any]], opening: str, closing: str, *, required: bool, several: bool
) -> str:
    """The grammar of an answer that calls tools: `opening` {"name": …, "arguments": …} `closing`, one or more.

    `tools` are names and the JSON schemas of their arguments (None: any object). Unless `required`, any text
    that does not begin with the first character of `opening` will do as well. Raises UsageError as `json_schema`.
    """
    _check_extent([schema for _, schema in tools])
    walk = _Walk(None)
    arguments: dict[str, list[Shape | str]] = {}
    for index, (name, schema) in enumerate(tools):
        walk.root = schema
        node = "object" if schema is None else walk.visit(schema, f"/tools/{index}", 0)
        arguments.setdefault(name, []).append(node)
    nodes = [walk.node(f"tool {name}", *given) for name, given in arguments.items()]
    rules, names = walk.rules, walk.write(nodes)
    heads = [literal('{"name": ' + json.dumps(name) + ', "arguments": ') for name in arguments]
    parts = [rules.add(f'{head} {name} "}}"') for head, name in zip(heads, names, strict=True)]
    call = rules.add(f"{literal(opening)} ws ({' | '.join(parts)}) ws {literal(closing)}")
    calls = f"{call} (ws {call}){{0,7}}" if several else call
    if not required:
        calls += f" | [^{opening[0]}] [\\U00000000-\\U0010FFFF]*"
    return rules.text(rules.add(calls))


_GIVEN: dict[str, list[Shape | str]] = {
    **{
        name: [Text("number" if name == "integer" else name, name)]
        for name in ("string", "number", "integer", "boolean", "null")
    },
    "object": [Loop("object", "value")],
    "array": [Loop("array", "value")],
    "value": ["object", "array", "string", "number", "boolean", "null"],
}
"""Nodes whose rules every grammar has."""


class _Walk:
    """Makes a node of each schema on a walk through it; `root` is what its references refer to."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self.rules = Rules()
        self._nodes = dict(_GIVEN)
        self._places: dict[str, str] = {}  # of nodes that name others: keyword and path
        self._known: dict[tuple[int, str], str] = {}  # nodes of references, by root and path
        self._size = self._looks = 0
        self._intersections = Intersections()
        # By the schema's id, with the schema, which is kept so as to stay that: nodes of `allOf`, and what is joined.
        self._joins: dict[int, tuple[str, Any]] = {}
        self._wholes: dict[int, tuple[Mapping[str, Any], Any]] = {}
        self._patterns: dict[tuple[str, int, int | None], str] = {}

    def node(self, place: str, *parts: Shape | str) -> str:
        """A new node's name; `parts` are its shapes, or nodes whose shapes are its own too."""
        if len(self._nodes) >= MAX_NODES:
            raise UsageError(f"the schema is too large: it has more than {MAX_NODES} schemas inside")
        self._size += sum(1 if isinstance(part, str) else size(part) for part in parts)
        if self._size > MAX_SIZE:
            raise UsageError(
                f"the schema is too large: it has more than {MAX_SIZE} properties, branches and listed values"
            )
        name = f"n{len(self._nodes)}"
        self._nodes[name] = list(dict.fromkeys(parts))
        self._places[name] = place
        return name

    def write(self, roots: Sequence[str]) -> list[str]:
        """The names of rules for these nodes. Raises UsageError if they can be read in too many ways."""
        nodes, names = resolved(self._nodes)
        for node, name in names.items():
            if not nodes[name]:
                raise UsageError(f"{self._places[node]} refers to itself")
        roots = [names[root] for root in roots]
        unions = {names[node]: place for node, place in self._places.items() if place.startswith("$ref")}
        unions |= {names[node]: place for node, place in self._places.items() if not place.startswith("$ref")}
        writer = Writer(self.rules, nodes, read(nodes, roots, unions), _GIVEN)
        found = [writer.rule(root) for root in roots]
        writer.finish()
        return found

    def _text(self, kind: str, rule: str, path: str) -> str:
        """A node for texts of a kind that match a rule."""
        return self.node(f"the schema at {path or '/'}", Text(kind, self.rules.add(rule)))

    def visit(self, schema: Any, path: str, depth: int) -> str:
        """The node of a schema."""
        if depth > MAX_DEPTH:
            raise UsageError(f"the schema nests deeper than {MAX_DEPTH}, at {path}")
        if schema is True:
            return "value"
        if not isinstance(schema, Mapping):
            raise UsageError(f"the schema at {path or '/'} is {keywords.brief(schema)}: it must be an object")
        words = {word for word in schema if word not in keywords.SILENT}
        if "allOf" in words or ("$ref" in words and not self._only_refers(schema, words)):
            return self._intersection(schema, words, path, depth)
        if "$ref" in words:
            return self._reference(schema, path, depth)
        for word, kind in (("const", self._const), ("enum", self._enum)):
            if word in words:
                keywords.only(words, {word, "type"}, path)
                return kind(schema, path, depth)
        for word in ("anyOf", "oneOf"):
            if word in words:
                keywords.only(words, {word}, path)
                return self._union(word, schema[word], path, depth)
        types = schema.get("type", keywords.implied_type(words))
        if isinstance(types, list) and types:
            keywords.only(
                words, set().union({"type"}, *(keywords.OF_TYPE.get(str(t), ()) for t in types)), path
            )
            return self.node(
                f"type at {path or '/'}", *(self._typed(schema, one, path, depth) for one in types)
            )
        keywords.only(words, {"type", *keywords.OF_TYPE.get(str(types), ())}, path)
        return self._typed(schema, types, path, depth)

    def _typed(self, schema: Mapping[str, Any], kind: Any, path: str, depth: int) -> str:
        if kind is None:
            return "value"
        keywords.types_of({"type": kind}, path)
        made: dict[str, Callable[[Mapping[str, Any], str, int], str]] = {
            "object": self._object,
            "array": self._array,
            "string": self._string,
            "integer": self._integer,
            "number": self._number,
        }
        return made[kind](schema, path, depth) if kind in made else str(kind)

    def _reference(self, schema: Mapping[str, Any], path: str, depth: int) -> str:
        target = schema["$ref"]
        found, key = self._target(target, path), (id(self.root), target)
        if key not in self._known:
            name = self._known[key] = self.node(f"$ref at {path or '/'}")
            self._nodes[name].append(self.visit(found, target, depth + 1))
        return self._known[key]

    def _target(self, target: Any, path: str) -> Any:
        """What a reference names."""
        if not isinstance(target, str) or not (target == "#" or target.startswith("#/")):
            raise UsageError(
                f"$ref at {path or '/'} is {keywords.brief(target)}: only references into the schema, #/…"
            )
        found = keywords.referred(self.root, target)
        if found is None:
            raise UsageError(f"$ref at {path or '/'}: there is no {keywords.brief(target)} in the schema")
        return found

    def _const(self, schema: Mapping[str, Any], path: str, depth: int) -> str:
        return self._values(schema, "const", [schema["const"]], path)

    def _enum(self, schema: Mapping[str, Any], path: str, depth: int) -> str:
        values = schema["enum"]
        if not isinstance(values, list) or not 0 < len(values) <= keywords.MAX_REPEATS:
            raise UsageError(f"enum at {path or '/'} must list 1 to {keywords.MAX_REPEATS} values")
        return self._values(schema, "enum", values, path)

    def _values(self, schema: Mapping[str, Any], word: str, values: list[Any], path: str) -> str:
        if "type" in schema:
            types = keywords.types_of(schema, path)
            values = [value for value in values if any(keywords.is_a(value, kind) for kind in types)]
            if not values:
                raise UsageError(f"{word} at {path or '/'} has no value of the type that stands beside it")
        texts = frozenset(keywords.written(value, path) for value in values)
        return self.node(f"{word} at {path or '/'}", Listed(texts))

    def _union(self, word: str, schemas: Any, path: str, depth: int) -> str:
        if not isinstance(schemas, list) or not schemas:
            raise UsageError(f"{word} at {path or '/'} must list schemas")
        if word == "oneOf":
            if len(schemas) > MAX_BRANCHES:
                raise UsageError(f"oneOf at {path or '/'} lists more than {MAX_BRANCHES} schemas")
            whole = [self._whole(schema, path) for schema in schemas]
            for (first, one), (second, other) in combinations(enumerate(whole), 2):
                if not self._apart(one, other, path):
                    raise UsageError(
                        f"oneOf at {path or '/'}: a value may fit both schema {first} and schema {second}, as far as "
                        "is seen here; tell them apart by type, or by a required property with a const, or use anyOf"
                    )
        return self.node(
            f"{word} at {path or '/'}",
            *(self.visit(one, f"{path}/{word}/{index}", depth + 1) for index, one in enumerate(schemas)),
        )

    def _intersection(self, schema: Mapping[str, Any], words: set[str], path: str, depth: int) -> str:
        """The schemas of `allOf` or the one that `$ref` names, and what stands beside."""
        schemas = schema.get("allOf")
        if words == {"allOf"} and isinstance(schemas, list) and len(schemas) == 1:
            return self.visit(schemas[0], f"{path}/allOf/0", depth + 1)
        if id(schema) not in self._joins:
            name = self.node(f"allOf at {path or '/'}")
            self._joins[id(schema)] = name, schema
            self._nodes[name].append(self.visit(self._whole(schema, path), path, depth + 1))
        return self._joins[id(schema)][0]

    def _only_refers(self, schema: Mapping[str, Any], words: set[str]) -> bool:
        """Whether nothing stands beside `$ref`, or only the type that is said there anyway."""
        return words == {"$ref"} or (
            words == {"$ref", "type"} and self._resolved(schema).get("type") == schema["type"]
        )

    def _look(self, count: int, path: str) -> None:
        """Counts what is looked at. Raises UsageError if it is too much."""
        self._looks += count
        if self._looks > MAX_LOOKS:
            raise UsageError(
                f"the schema is too large: at {path or '/'}, allOf and oneOf have led to too many others"
            )

    def _joined(self, schema: Mapping[str, Any], path: str) -> dict[str, Any]:
        """A schema with `allOf` or something beside `$ref` as one without."""
        plain: list[Mapping[str, Any]] = []
        left: list[tuple[Any, int]] = [(schema, 0)]
        while left:
            one, depth = left.pop()
            if depth > MAX_DEPTH or len(plain) > MAX_BRANCHES:
                raise UsageError(
                    f"allOf at {path or '/'} leads to more than {MAX_BRANCHES} schemas, or to itself"
                )
            if one is True:
                continue
            if not isinstance(one, Mapping):
                raise UsageError(f"allOf at {path or '/'} lists {keywords.brief(one)}: it must list schemas")
            own = {word: value for word, value in one.items() if word not in keywords.SILENT}
            self._look(_JOIN + sum(len(value) for value in own.values() if isinstance(value, list)), path)
            inner = own.pop("allOf", [])
            if not isinstance(inner, list) or ("allOf" in one and not inner):
                raise UsageError(f"allOf at {path or '/'} must list schemas")
            left += [(each, depth + 1) for each in reversed(inner)]
            if "$ref" in own:
                left.append((self._target(own.pop("$ref"), path), depth + 1))
            plain += [own] if own else []
        named = [one["properties"] for one in plain if isinstance(one.get("properties"), Mapping)]
        self._look(sum(map(len, named)) * len(plain), path)
        with keywords.named("allOf", path):
            return self._intersections.of(plain)

    def _apart(self, one: Mapping[str, Any], other: Mapping[str, Any], path: str) -> bool:
        """Whether no value fits both, by their types, their listed values, or those of a required property."""
        mine, theirs = keywords.listed(one), keywords.listed(other)
        self._look(1 + len(mine or ()) + len(theirs or ()), path)
        if mine is not None and theirs is not None:
            return keywords.disjoint(mine, theirs)
        kinds, others = keywords.kinds(one), keywords.kinds(other)
        if not kinds & others:
            return True
        if kinds & others != {"object"}:
            return False
        needed = [keywords.required(schema) for schema in (one, other)]
        self._look(sum(map(len, needed)), path)
        for name in set(needed[0]) & set(needed[1]):
            mine, theirs = (
                keywords.listed(self._whole(keywords.property_named(schema, name), path))
                for schema in (one, other)
            )
            self._look(len(mine or ()) + len(theirs or ()), path)
            if mine is not None and theirs is not None and keywords.disjoint(mine, theirs):
                return True
        return False

    def _resolved(self, schema: Any) -> Any:
        """The schema that a chain of references leads to; what is wrong with it is said where it is visited."""
        for _ in range(MAX_DEPTH):
            if not isinstance(schema, Mapping) or not isinstance(schema.get("$ref"), str):
                break
            schema = keywords.referred(self.root, schema["$ref"])
        return schema if isinstance(schema, Mapping) else {}

    def _whole(self, schema: Any, path: str) -> Mapping[str, Any]:
        """The same without `allOf` and `$ref`; what is no schema is refused where it is visited."""
        if not isinstance(schema, Mapping):
            return {}
        if not schema.keys() & {"allOf", "$ref"}:
            return schema
        if id(schema) not in self._wholes:
            self._wholes[id(schema)] = self._joined(schema, path), schema
        return self._wholes[id(schema)][0]

    def _object(self, schema: Mapping[str, Any], path: str, depth: int) -> str:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, Mapping) or not isinstance(required, list):
            raise UsageError(f"properties at {path or '/'} must be an object, and required a list")
        if len(properties) > MAX_RULES:  # each will be one at least
            raise UsageError(
                f"the schema is too large: properties at {path or '/'} names {len(properties)}, more than {MAX_RULES}"
            )
        missing = [name for name in required if not isinstance(name, str) or name not in properties]
        if missing:
            raise UsageError(
                f"required at {path or '/'} names {keywords.brief(missing[0])}, which is no property"
            )
        if not properties:
            return self._map(schema.get("additionalProperties", True), path, depth)
        needed = set(required)
        members = tuple(
            (name, self.visit(value, f"{path}/properties/{name}", depth + 1), name in needed)
            for name, value in properties.items()
        )
        return self.node(f"the schema at {path or '/'}", Row("object", members))

    def _map(self, value: Any, path: str, depth: int) -> str:
        if value is True or value == {}:
            return "object"
        if value is False:
            return self.node(f"the schema at {path or '/'}", Loop("object", "value", most=0))
        inner = self.visit(value, f"{path}/additionalProperties", depth + 1)
        return self.node(f"the schema at {path or '/'}", Loop("object", inner))

    def _array(self, schema: Mapping[str, Any], path: str, depth: int) -> str:
        least, most = keywords.counts(schema, "minItems", "maxItems", path)
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
            nodes = [self.visit(one, f"{path}/prefixItems/{n}", depth + 1) for n, one in enumerate(items)]
            return self.node(
                f"the schema at {path or '/'}", Row("array", tuple((None, node, True) for node in nodes))
            )
        item = self.visit(schema.get("items", True), f"{path}/items", depth + 1)
        return self.node(f"the schema at {path or '/'}", Loop("array", item, least, most))

    def _string(self, schema: Mapping[str, Any], path: str, depth: int) -> str:
        least, most = keywords.counts(schema, "minLength", "maxLength", path)
        if "format" in schema:
            form = str(schema["format"])
            if form not in _FORMATS and form not in _PATTERNS:
                known = ", ".join((*_FORMATS, *_PATTERNS))
                raise UsageError(f"format at {path or '/'} is {keywords.brief(form)}: supported are {known}")
            if (least, most) != (0, None) or "pattern" in schema:
                raise UsageError(f"format at {path or '/'} beside a length or a pattern is not supported")
            if form in _FORMATS:
                return self._text("string", _FORMATS[form], path)
            return self._pattern(_PATTERNS[form], 0, None, path)
        if "pattern" in schema:
            if not isinstance(schema["pattern"], str):
                raise UsageError(
                    f"pattern at {path or '/'} is {keywords.brief(schema['pattern'])}: it must be a text"
                )
            with keywords.named("pattern", path):
                return self._pattern(schema["pattern"], least, most, path)
        if (least, most) == (0, None):
            return "string"
        return self._text("string", f'"\\"" plain{times(least, most)} "\\""', path)

    def _pattern(self, pattern: str, least: int, most: int | None, path: str) -> str:
        key = (pattern, least, most)
        if key not in self._patterns:
            states = automata.automaton(patterns.bounded(patterns.parse(pattern), least, most))
            names = [self.rules.reserve() for _ in states]
            for name, state in zip(names, states, strict=True):
                classes = [self.rules.add(patterns.written(chars)) for chars, _ in state.moves]
                self.rules.define(name, automata.rule(state, names, classes))
            self._patterns[key] = self._text("string", f'"\\"" {names[0]} "\\""', path)
        return self._patterns[key]

    def _integer(self, schema: Mapping[str, Any], path: str, depth: int) -> str:
        return self._within(schema, path, "integer", bounds.integers)

    def _number(self, schema: Mapping[str, Any], path: str, depth: int) -> str:
        return self._within(schema, path, "number", bounds.decimals)

    def _within(
        self,
        schema: Mapping[str, Any],
        path: str,
        free: str,
        between: Callable[[bounds.Bound, bounds.Bound], str],
    ) -> str:
        """The rule for numbers that the schema bounds, or `free`, that of all of them."""
        if "multipleOf" in schema:
            return self._multiple(schema, path)
        low, high = keywords.ends(schema, path)
        if low is None and high is None:
            return free
        with keywords.named("minimum and maximum", path):
            return self._text("number", between(low or bounds.LOWEST, high or bounds.HIGHEST), path)

    def _multiple(self, schema: Mapping[str, Any], path: str) -> str:
        modulus = schema["multipleOf"]
        if (
            type(modulus) is not int
            or not 0 < modulus <= bounds.MAX_MODULUS
            or keywords.ends(schema, path) != (None,) * 2
        ):
            raise UsageError(
                f"multipleOf at {path or '/'} is {keywords.brief(modulus)}: "
                f"only an integer from 1 to {bounds.MAX_MODULUS} is supported, without bounds beside it"
            )
        names = [self.rules.reserve() for _ in range(modulus)]
        found, whole = bounds.multiples(names)
        for name, rule in zip(names, found, strict=True):
            self.rules.define(name, rule)
        return self._text("number", whole, path)


def _check_extent(schemas: Sequence[Any]) -> None:
    """Raises UsageError for schemas that are too long to be looked at more closely."""
    extent, left = 0, list(schemas)
    while left:
        one = left.pop()
        extent += 1 + (len(one) if isinstance(one, str) else 0)
        if isinstance(one, Mapping):
            left += one.keys()
            left += one.values()
        elif isinstance(one, list):
            left += one
        if extent + len(left) > MAX_EXTENT:
            raise UsageError(f"the schema is too large: more than {MAX_EXTENT} values and characters")
