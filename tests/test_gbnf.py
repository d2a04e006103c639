"""JSON schemas as grammars: what the grammar lets through is what the schema allows."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Iterator
from datetime import date
from itertools import product
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshpipe.errors import UsageError
from meshpipe.llama import intersection as intersecting
from meshpipe.llama.gbnf import json_object, json_schema, tool_calls
from meshpipe.llama.grammar import Grammar, check_bounds
from meshpipe.llama.vocabulary import Vocabulary


@pytest.fixture(scope="module")
def vocabulary(smollm2: Path) -> Iterator[Vocabulary]:
    vocabulary = Vocabulary(smollm2)
    yield vocabulary
    vocabulary.close()


HERE = {"$ref": "#/$defs/n"}
TEXT = {"type": "string"}


def matches(vocabulary: Vocabulary, grammar: str, text: str) -> bool:
    """Whether the whole text is what the grammar describes."""
    check_bounds(grammar)
    state = Grammar(grammar, vocabulary.pointer, 0)
    try:
        tokens = [token for one in text for token in vocabulary.tokenize(one, start=False, special=False)]
        return state.advance(tokens, len(tokens)) and state.allows(max(vocabulary.end_tokens))
    finally:
        state.close()


scalars = st.sampled_from(
    [
        {"type": "string"}, {"type": "integer"}, {"type": "number"}, {"type": "boolean"}, {"type": "null"},
        {"enum": ["a", 2, None, "q\"u\\"]}, {"const": {"k": [1]}}, {"type": ["string", "null"]}, {"type": "object"},
        {"type": "string", "minLength": 2, "maxLength": 3}, {"type": "string", "format": "date-time"}, {},
        {"type": "integer", "minimum": -12, "exclusiveMaximum": 40}, {"type": "number", "maximum": 0.5},
        {"type": "string", "pattern": "^[a-z]{2}\\d?"}, {"type": "integer", "multipleOf": 4},
    ]
)  # fmt: skip
names = st.sampled_from(["a", "b c", 'quote"d', "ünï", "d"])


def objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def build(properties: dict[str, Any], dice: random.Random) -> dict[str, Any]:
        required = [name for name in properties if dice.random() < 0.5]
        return {"type": "object", "properties": properties, "required": required}

    return st.builds(build, st.dictionaries(names, inner, min_size=1, max_size=4), st.randoms())


schemas = st.recursive(
    scalars,
    lambda inner: (
        objects(inner)
        | st.builds(lambda items: {"type": "array", "items": items, "minItems": 1, "maxItems": 3}, inner)
        | st.builds(lambda items: {"type": "array", "items": items}, inner)
        | st.builds(lambda items: {"type": "object", "additionalProperties": items}, inner)
        | st.builds(lambda one, two: {"anyOf": [one, two]}, inner, inner)
    ),
    max_leaves=5,
)


def example(schema: dict[str, Any], dice: random.Random) -> Any:
    """A value of the schema, properties in its order."""
    if "anyOf" in schema:
        return example(dice.choice(schema["anyOf"]), dice)
    if "enum" in schema:
        return dice.choice(schema["enum"])
    if "const" in schema:
        return schema["const"]
    kind = schema.get("type", "array")
    kind = dice.choice(kind) if isinstance(kind, list) else kind
    if kind == "object" and "properties" in schema:
        chosen = {
            n: s for n, s in schema["properties"].items() if n in schema["required"] or dice.random() < 0.5
        }
        return {name: example(inner, dice) for name, inner in chosen.items()}
    if kind == "object":
        inner = schema.get("additionalProperties", {})
        return {name: example(inner, dice) for name in dice.sample(["x", "y", "z"], dice.randrange(3))}
    if kind == "array":
        count = dice.randrange(schema.get("minItems", 0), 4) if schema else 0
        return [example(schema.get("items", {}), dice) for _ in range(count)]
    if "format" in schema:
        return "2024-02-28T23:59:59.5Z"
    if "pattern" in schema:
        return dice.choice(["ab", "ab7", "abcdé"])
    if "minLength" in schema:
        return dice.choice(["ab", "a\nb"])
    return {
        "string": 'text "x" ü', "integer": -12, "number": 0.25 if "maximum" in schema else 1.5e-7,
        "boolean": True, "null": None,
    }[kind]  # fmt: skip


def broken(text: str, dice: random.Random) -> str:
    """The text with one character changed, left out or doubled."""
    at = dice.randrange(len(text))
    return text[:at] + dice.choice(["", text[at] * 2, dice.choice('{}[]",:0a ')]) + text[at + 1 :]


@settings(max_examples=30)
@given(schemas, st.randoms(use_true_random=False), st.sampled_from([(",", ":"), (", ", ": ")]))
def test_a_grammar_is_its_schema(
    vocabulary: Vocabulary, schema: dict[str, Any], dice: random.Random, separators: tuple[str, str]
) -> None:
    """Values of the schema match; and what matches, mutants included, is valid."""
    grammar = json_schema(schema)
    value = example(schema, dice)
    jsonschema.validate(value, schema)
    text = json.dumps(value, ensure_ascii=False, separators=separators)
    if "const" not in str(schema) and "enum" not in str(schema):
        assert matches(vocabulary, grammar, text), (schema, text)
    for _ in range(4):
        mutant = broken(text, dice)
        if matches(vocabulary, grammar, mutant):
            jsonschema.validate(json.loads(mutant), schema)


def test_references_and_tuples(vocabulary: Vocabulary) -> None:
    tree = {
        "$defs": {"node": {"type": "object", "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}},
                           "required": ["v"]}},
        "type": "array", "prefixItems": [{"$ref": "#/$defs/node"}, {"type": "boolean"}], "items": False,
        "minItems": 2, "maxItems": 2,
    }  # fmt: skip
    grammar = json_schema(tree)
    assert matches(vocabulary, grammar, '[{"v":1,"next":{"v":2,"next":{"v":3}}},true]')
    assert not matches(vocabulary, grammar, '[{"v":1,"next":{"next":{"v":3}}},true]')
    assert not matches(vocabulary, grammar, '[{"v":1}]')
    assert matches(vocabulary, json_object(), '{"a": [1, {"b": null}]}')
    assert not matches(vocabulary, json_object(), "[1]")


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "string", "pattern": "(?=a)"}, r"pattern at /: of the groups with (? only"),
        ({"type": "string", "pattern": r"(a)\1"}, r"\1 is not supported"),
        ({"type": "string", "pattern": "a|(b"}, "the group does not end"),
        ({"type": "string", "pattern": "a$b"}, "anchors are supported at the ends only"),
        ({"type": "string", "pattern": "^(a*)*$"}, "repeated without end"),
        ({"type": "string", "pattern": "(a{400}){400}"}, "too large"),
        ({"type": "string", "pattern": "a{2,1}"}, "the lower bound first"),
        ({"type": "string", "pattern": "[z-a]"}, "a range goes from"),
        ({"type": "string", "pattern": "\\x01"}, "only characters that are not written here"),
        ({"type": "string", "pattern": "^(ab)+$", "maxLength": 9}, "a length beside such a pattern"),
        ({"type": "string", "pattern": 7}, "it must be a text"),
        ({"type": "integer", "minimum": 1, "maximum": 0}, "no integer lies between"),
        ({"type": "number", "exclusiveMinimum": 1, "maximum": 1}, "lies between the bounds"),
        ({"type": "integer", "minimum": 10**400}, "at most 15 digits"),
        ({"type": "integer", "exclusiveMinimum": True}, "exclusiveMinimum at / is True"),
        ({"type": "number", "multipleOf": 0.1}, "multipleOf at / is 0.1"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf at /: a value may fit both"),
        ({"type": "string", "enum": [1]}, "no value of the type"),
        ({"type": []}, "type at / is []"),
        ({"properties": {"a": {"not": {}}}}, "'not' at /properties/a"),
        ({"type": "text"}, "type at / is 'text'"),
        ({"type": "array", "minItems": 10**9}, "minItems at / is 1000000000"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "maxLength at / is 2, below"),
        ({"type": "string", "format": "uri"}, "format at / is 'uri'"),
        ({"$ref": "#/nowhere"}, "there is no '#/nowhere'"),
        ({"$ref": "http://example.com"}, "only references into the schema"),
        ({"$ref": "#"}, "refers to itself"),
        ({"properties": {"a": {}}, "required": ["b"]}, "names 'b'"),
        ({"properties": [1]}, "must be an object"),
        ({"enum": []}, "must list 1 to"),
        ({"const": float("nan")}, "is no JSON"),
        ({"allOf": [TEXT, {"type": "integer"}]}, "allOf at /: no type is that of all its schemas"),
        ({"allOf": [{"pattern": "a"}, {"pattern": "b"}]}, "allOf at /: pattern differs between its schemas"),
        ({"allOf": [{"enum": [1]}, {"const": True}]}, "allOf at /: no value is in the enum or const"),
        ({"allOf": [{"prefixItems": [{}]}, {"items": TEXT}]}, "items of one schema beside prefixItems of another"),
        ({"allOf": [{"type": "string"}, {"anyOf": [{}]}]}, "'type' at / is not supported"),
        ({"allOf": [{"$ref": "#"}, {}]}, "leads to more than 50 schemas, or to itself"),
        ({"allOf": [{}, 7]}, "allOf at / lists 7"),
        ({"allOf": [{"properties": {"a": {}}, "required": ["a"]}, {"additionalProperties": False}]}, "names 'a'"),
        ({"allOf": [{"type": "object", "additionalProperties": TEXT}, {"properties": {"x": False}}]},
         "allOf at /: the property 'x' is forbidden"),
        ({"allOf": [{"properties": {"x": TEXT}}, {"properties": {"x": False}}]}, "the property 'x' is forbidden"),
        ({"allOf": [{"properties": {"x": TEXT, "y": TEXT}, "required": ["x"]}, {"properties": {"x": False}}]},
         "required at / names 'x'"),
        (7, "is 7: it must be an object"),
    ],
)  # fmt: skip
def test_what_cannot_be_held_is_refused_by_name(schema: Any, words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        json_schema(schema)


def test_schemas_are_bounded() -> None:
    deep: Any = {}
    for _ in range(50):
        deep = {"type": "array", "items": deep}
    with pytest.raises(UsageError, match="deeper than"):
        json_schema(deep)
    began = time.thread_time()
    with pytest.raises(UsageError, match="may fit both schema 48 and schema 49"):
        json_schema({"oneOf": [{"enum": [[min(k, 48), n] for n in range(500)]} for k in range(50)]})
    with pytest.raises(UsageError, match="too large"):
        json_schema({"type": "string", "pattern": "x" * 500_000})
    with pytest.raises(UsageError, match="more than 524288 values and characters"):
        json_schema({"type": "object", "default": [[0] * 1000] * 1000})
    assert time.thread_time() - began < 5
    with pytest.raises(UsageError, match="too large"):
        json_schema({"properties": {f"p{n}": {"type": "string"} for n in range(2000)}})


def chain(length: int, width: int) -> dict[str, Any]:
    """Each schema is `width` times the next."""
    defs: dict[str, Any] = {
        f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * width} for n in range(length)
    }
    return {**defs, f"d{length}": {}}


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"$defs": chain(15, 10), "$ref": "#/$defs/d0", "title": "t", "type": "object"}, "led to too many others"),
        ({"$defs": chain(15, 10), "oneOf": [{"$ref": "#/$defs/d0"}, {"type": "null"}]}, "led to too many others"),
        ({"allOf": [{"properties": {"a": {"allOf": [{"minLength": n} for n in range(k, k + 40)]}}}
                    for k in range(0, 2000, 40)]}, "has to fit more than 50 schemas"),
        ({"allOf": [{"items": {"maxLength": n}} for n in range(51)]}, "has to fit more than 50 schemas"),
        ({"$defs": {"u": {"anyOf": [{"enum": [f"{k} {n}" for n in range(500)]} for k in range(50)]}},
          "anyOf": [{"$ref": "#/$defs/u"}, *[{"anyOf": [{"$ref": "#/$defs/u"}]} for _ in range(100)]]},
         "members and values, written out"),
        ({"anyOf": [{"enum": [f"{k} {n}" for n in range(500)]} for k in range(100)]}, "and listed values"),
        ({"anyOf": [{"properties": {f"{k} {n}": TEXT for n in range(2001)}} for k in range(2)]},
         "properties at /anyOf/0 names 2001"),
        ({"$defs": {"wide": {"properties": {f"p{n}": TEXT for n in range(1000)}}},
          "properties": {f"q{n}": {"$ref": "#/$defs/wide", "properties": {f"q{n}": TEXT}} for n in range(1000)}},
         "properties, branches and listed values"),
    ],
)  # fmt: skip
def test_a_small_schema_that_leads_to_much_is_refused_early(schema: dict[str, Any], words: str) -> None:
    began = time.thread_time()
    with pytest.raises(UsageError, match=words):
        json_schema(schema)
    assert time.thread_time() - began < 5


def test_parts_of_allof_are_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = []
    dumped = intersecting._dumped
    monkeypatch.setattr(intersecting, "_dumped", lambda value: texts.append(value) or dumped(value))
    shared = {"type": "string", "maxLength": 9}
    many = {"properties": {f"p{n}": {"minLength": n} for n in range(50)}, "additionalProperties": shared}
    others = [{"additionalProperties": {"maxLength": n}} for n in range(40)]
    joiner = intersecting.Intersections()
    for _ in range(2):
        assert len(joiner.of([many, *others])["properties"]["p7"]["allOf"]) == 41
    assert len(texts) == 50 + 41


def nested(*branches: Any) -> dict[str, Any]:
    """Any of the branches; `HERE` in them is the whole."""
    return {"$defs": {"n": {"anyOf": list(branches)}}, "$ref": "#/$defs/n"}


def record(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


@pytest.mark.parametrize(
    ("schema", "begun", "end"),
    [
        (nested(*[{"type": "array", "items": HERE, "title": str(n)} for n in range(40)]), "[" * 12, "]" * 12),
        (nested(*[{"type": "array", "items": HERE, "maxItems": n} for n in range(1, 40)]), "[[" * 6, "]" * 12),
        (
            nested(TEXT, *[record(left=HERE, right=HERE, op={"const": op}) for op in "abcdefgh"]),
            '{"left":' * 12 + '"x"',
            ',"right":"y","op":"g"}' * 12,
        ),
        (
            nested(TEXT, *[record(op={"const": op}, **{op: HERE}) for op in "abcdefgh"]),
            '{"op":"c","c":' * 12 + '"x"',
            "}" * 12,
        ),
        (
            nested(TEXT, *[
                {"type": "array", "prefixItems": [HERE, {"const": op}, HERE], "minItems": 3, "maxItems": 3}
                for op in "+-*/"
            ]),
            "[" * 12 + '"x"',
            ',"*","y"]' * 12,
        ),
        ({"enum": [f"value {n}" for n in range(500)]}, '"value 4', '99"'),
        ({"anyOf": [{"const": n, "title": str(n)} for n in range(300)]}, "2", "99"),
        (nested(HERE, TEXT), '"', 'x"'),
    ],
)  # fmt: skip
def test_what_begins_alike_is_one_way(
    vocabulary: Vocabulary, schema: dict[str, Any], begun: str, end: str
) -> None:
    """One stack for each branch at each bracket would be 8^12 and more."""
    state = Grammar(json_schema(schema), vocabulary.pointer, 0)
    tokens = [token for one in begun + end for token in vocabulary.tokenize(one, start=False, special=False)]
    middle = len(begun)
    assert len(tokens) == len(begun + end)
    assert state.advance(tokens, middle)
    assert np.isfinite(state.mask(np.zeros(vocabulary.size, np.float32))).any()
    assert state.advance(tokens, len(tokens))
    assert state.allows(max(vocabulary.end_tokens))
    assert state._ask(time.thread_time) < 2  # of the thread in which llama.cpp works
    state.close()


@pytest.mark.parametrize(
    "schema",
    [
        nested(*[{"type": "array", "items": {"anyOf": [HERE, {"const": n}]}} for n in range(2)]),
        nested(record(a=HERE, b={"type": "integer"}), record(a={"anyOf": [HERE, TEXT]}, c=TEXT)),
        nested(record(a=HERE), *[{"type": "object", "additionalProperties": {"anyOf": [HERE, one]}}
                                 for one in ({"type": "null"}, {"type": "boolean"})]),
        {"anyOf": [{"type": "array", "items": {"type": "string", "minLength": n}} for n in range(400)]},
        {"$defs": {f"n{n}": {"anyOf": [{"type": "array", "items": {"anyOf": [{"$ref": f"#/$defs/n{n + 1}"}, one]}}
                                       for one in ({"const": n}, {"type": "null"})]}
                   for n in range(7)} | {"n7": TEXT}, "$ref": "#/$defs/n0"},
    ],
)  # fmt: skip
def test_too_many_ways_are_refused_by_name(schema: dict[str, Any]) -> None:
    with pytest.raises(
        UsageError, match=r"^anyOf at .*may begin alike, so that the grammar would have to follow"
    ):
        json_schema(schema)


keys = st.sampled_from(["a", "b"])
leaves = st.sampled_from(
    [TEXT, {"type": "integer"}, {"const": "x"}, {"enum": ["x", "y", 1]}, {"type": "array", "items": TEXT}]
)


def mappings(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def build(properties: dict[str, Any], required: set[str]) -> dict[str, Any]:
        return {"type": "object", "properties": properties, "required": sorted(required & set(properties))}

    return st.builds(build, st.dictionaries(keys, inner, min_size=1), st.sets(keys))


branches = st.recursive(
    leaves,
    lambda inner: (
        mappings(inner)
        | st.builds(
            lambda items, least: {"type": "array", "items": items, "minItems": least, "maxItems": least + 1},
            inner,
            st.integers(0, 1),
        )
        | st.builds(
            lambda items: {"type": "array", "prefixItems": items}, st.lists(inner, min_size=1, max_size=2)
        )
        | st.builds(lambda items: {"type": "object", "additionalProperties": items}, inner)
    ),
    max_leaves=4,
)


@settings(max_examples=25)
@given(st.lists(branches, min_size=2, max_size=4), st.randoms(use_true_random=False))
def test_a_union_is_its_branches(
    vocabulary: Vocabulary, schemas: list[dict[str, Any]], dice: random.Random
) -> None:
    """However they are read together: what one lets through, the union does, and nothing else."""
    union = json_schema({"anyOf": schemas})
    alone = [json_schema(schema) for schema in schemas]
    for _ in range(5):
        text = json.dumps(value_of(dice.choice(schemas), dice), separators=(",", ":"))
        for said in (text, broken(text, dice)):
            expected = any(matches(vocabulary, grammar, said) for grammar in alone)
            assert matches(vocabulary, union, said) == expected, said


def value_of(schema: dict[str, Any], dice: random.Random) -> Any:
    """As `example`, and with tuples."""
    if "prefixItems" in schema:
        return [value_of(one, dice) for one in schema["prefixItems"]]
    if "items" in schema:
        count = dice.randint(schema.get("minItems", 0), schema.get("maxItems", 2))
        return [value_of(schema["items"], dice) for _ in range(count)]
    if "properties" in schema:
        kept = [n for n in schema["properties"] if n in schema["required"] or dice.random() < 0.5]
        return {name: value_of(schema["properties"][name], dice) for name in kept}
    if "additionalProperties" in schema:
        return {name: value_of(schema["additionalProperties"], dice) for name in dice.sample("abc", 1)}
    return example(schema, dice)


parts = st.builds(
    lambda properties, required, more: {
        "type": "object", "properties": properties, "required": sorted(required & set(properties)), **more
    },
    st.dictionaries(keys, st.sampled_from(
        [TEXT, {"type": "integer", "minimum": 3}, {"type": "number", "maximum": 5}, {"type": ["integer", "null"]},
         {"const": 4}, {"enum": ["x", 4, None]}, {}, {"type": "string", "maxLength": 1}, record(c=TEXT)]
    )),
    st.sets(keys),
    st.sampled_from([{}, {}, {"additionalProperties": False}, {"additionalProperties": TEXT},
                     {"additionalProperties": {"type": "integer"}}]),
)  # fmt: skip


@settings(max_examples=25)
@given(st.lists(parts, min_size=1, max_size=2), parts, st.booleans())
def test_all_of_several_is_what_each_allows(
    vocabulary: Vocabulary, inner: list[dict[str, Any]], beside: dict[str, Any], refers: bool
) -> None:
    one = {"$ref": "#/$defs/one"} if refers else inner[0]
    schema = {**beside, "allOf": [one, *inner[1:]], "$defs": {"one": inner[0]}, "title": "t"}
    if not any(part["properties"] for part in (beside, *inner)):
        return
    try:
        grammar = json_schema(schema)
    except UsageError as error:
        assert re.search("no type|no value|which is no property|not supported", str(error))  # noqa: PT017
        return
    validator = jsonschema.Draft202012Validator(schema)
    names = list(dict.fromkeys(name for part in (beside, *inner) for name in part["properties"]))
    for values in product(*[("x", "xy", 4, 9, None, {"c": "d"}, ...)] * len(names)):
        value = {name: given for name, given in zip(names, values, strict=True) if given is not ...}
        text = json.dumps(value, separators=(",", ":"))
        if any(given == {"c": "d"} for given in value.values()) and value != {names[0]: {"c": "d"}}:
            continue
        assert matches(vocabulary, grammar, text) == validator.is_valid(value), (schema, value)


def test_a_model_that_inherits(vocabulary: Vocabulary) -> None:
    """As generators of OpenAPI write it; the whole may be inside itself."""
    animal = record(name={"allOf": [TEXT, {"minLength": 2}], "description": "d"})
    cat = {
        "allOf": [{"$ref": "#/$defs/animal"}, {"properties": {"kind": {"const": "cat"}, "kittens": {
            "type": "array", "items": {"$ref": "#/$defs/cat", "required": ["kind"]}}}, "required": ["kind"]}],
    }  # fmt: skip
    dog = {"$ref": "#/$defs/animal", "properties": {"kind": {"const": "dog"}}, "required": ["kind"]}
    schema = {
        "$defs": {"animal": animal, "cat": cat},
        "oneOf": [{"$ref": "#/$defs/cat"}, {"allOf": [dog]}, {"type": "null"}],
    }
    grammar = json_schema(schema)
    assert matches(vocabulary, grammar, '{"name":"Tom","kind":"cat","kittens":[{"name":"Jo","kind":"cat"}]}')
    assert not matches(
        vocabulary, grammar, '{"name":"Tom","kind":"cat","kittens":[{"name":"J","kind":"cat"}]}'
    )
    assert not matches(vocabulary, grammar, '{"kind":"cat"}')


def test_a_forbidden_property_stays_forbidden(vocabulary: Vocabulary) -> None:
    open_, shut = {"properties": {"x": TEXT}}, {"properties": {"x": False}}
    for schema in (
        {"allOf": [open_, {"properties": {"y": TEXT}}, shut]},
        {"allOf": [shut, {"additionalProperties": TEXT}, {"properties": {"y": TEXT}, "type": "object"}]},
        {"allOf": [shut, {"additionalProperties": False}]},
    ):
        grammar = json_schema(schema)
        for value in ({}, {"x": "a"}, {"x": "a", "y": "b"}):
            said = matches(vocabulary, grammar, json.dumps(value))
            assert said == jsonschema.Draft202012Validator(schema).is_valid(value), (schema, value)


def test_tool_calls(vocabulary: Vocabulary) -> None:
    tools = [
        ("look", {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}),
        ("stop", None),
    ]
    free = tool_calls(tools, "<tool_call>", "</tool_call>", required=False, several=True)
    bound = tool_calls(tools, "<tool_call>", "</tool_call>", required=True, several=False)
    one = '<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call>'
    for grammar in (free, bound):
        assert matches(vocabulary, grammar, one)
        assert not matches(vocabulary, grammar, one.replace("look", "leap"))
        assert not matches(vocabulary, grammar, one.replace('"x"', "1"))
    assert matches(vocabulary, free, one + one)
    assert not matches(vocabulary, bound, one + one)
    assert matches(vocabulary, free, "Just text.\n")
    assert not matches(vocabulary, bound, "Just text.")


texts = st.text('aAzé_0579-+.\\"/ \n☃\U0001f600', max_size=9)
atoms = st.sampled_from(
    [
        "a",
        "é",
        ".",
        r"\d",
        r"\w",
        r"\S",
        r"\s",
        "[a-c0]",
        "[^a-z]",
        r"[^\w ]",
        r"\D",
        r"\.",
        r"\\",
        '"',
        r"[\]\-]",
    ]
)
expressions = st.recursive(
    atoms,
    lambda inner: (
        st.tuples(inner, st.sampled_from(["+", "?", "{2}", "{1,3}", "{0,2}?"])).map(
            lambda p: f"(?:{p[0]}){p[1]}"
        )
        | st.lists(inner, min_size=2, max_size=3).map("".join)
        | st.lists(inner, min_size=2, max_size=3).map(lambda parts: f"({'|'.join(parts)})")
    ),
    max_leaves=5,
)


@settings(max_examples=40)
@given(expressions, st.booleans(), st.booleans(), texts, st.randoms(use_true_random=False))
def test_a_pattern_lets_through_what_it_matches(
    vocabulary: Vocabulary, inner: str, begins: bool, ends: bool, text: str, dice: random.Random
) -> None:
    """Whatever passes matches; and of what matches, all that readers agree on passes: in ASCII, everything."""
    pattern = "^" * begins + inner + "$" * ends
    try:
        grammar = json_schema({"type": "string", "pattern": pattern})
    except UsageError as error:  # (a?)+ and its like
        assert "what may be empty is repeated without end" in str(error)  # noqa: PT017
        return
    state = Grammar(grammar, vocabulary.pointer, 0)
    state.close()
    whole = re.compile(f"(?:{pattern.replace('$', chr(92) + 'Z')})")
    for _ in range(4):
        said = matches(vocabulary, grammar, json.dumps(text, ensure_ascii=False))
        assert not said or whole.search(text), (pattern, text)
        if text.isascii() and whole.search(text):
            assert said, (pattern, text)
        text = "".join(dice.choice([one, "a", "0", ""]) for one in text) + dice.choice(["", "a", "."])


def test_a_pattern_that_can_be_read_in_many_ways_has_one(vocabulary: Vocabulary) -> None:
    """llama.cpp would follow all of them: 2^60 here."""
    for pattern in ("^([a-z]?){60}$", "^((a|b|ab)?(a|ba)?){20}$", "^" + "[a-z]*" * 60 + "$"):
        grammar = Grammar(json_schema({"type": "string", "pattern": pattern}), vocabulary.pointer, 0)
        said = vocabulary.tokenize('"abab', start=False, special=False)
        assert grammar.advance(said, len(said))
        assert grammar.allows(vocabulary.tokenize("a", start=False)[0])
        grammar.mask(np.zeros(vocabulary.size, np.float32))
        grammar.close()
    with pytest.raises(UsageError, match="too many ways"):
        json_schema({"type": "string", "pattern": "(a|b)*a(a|b){12}"})


@pytest.mark.parametrize("pattern", ["^(|a)$", "^a{0}$", "^$", "^(?:)a?$"])
def test_a_pattern_may_have_nothing_in_it(vocabulary: Vocabulary, pattern: str) -> None:
    grammar = json_schema({"type": "string", "pattern": pattern})
    for text in ("", "a", "b"):
        assert matches(vocabulary, grammar, json.dumps(text)) == bool(re.search(pattern, text))


numbers = (
    st.integers(-200, 200) | st.decimals(-20, 20, places=2).map(float) | st.sampled_from([1e-9, 0.1 + 0.2])
)


@settings(max_examples=40)
@given(
    st.sampled_from(["integer", "number"]), numbers, numbers,
    st.sampled_from(["minimum", "exclusiveMinimum"]), st.sampled_from(["maximum", "exclusiveMaximum"]),
    st.lists(st.decimals(-25, 25, places=3).map(str) | st.integers(-220, 220).map(str), max_size=12),
)  # fmt: skip
def test_bounds_are_held_digit_by_digit(
    vocabulary: Vocabulary, kind: str, one: float, other: float, low: str, high: str, said: list[str]
) -> None:
    schema = {"type": kind, low: min(one, other), high: max(one, other)}
    try:
        grammar = json_schema(schema)
    except UsageError as error:
        assert "lies between" in str(error)  # noqa: PT017
        return
    edges = [str(edge) for edge in (one, other) if "e" not in str(edge)]
    for text in {*said, *edges, *(str(round(float(edge))) for edge in edges)}:
        valid = jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))
        if matches(vocabulary, grammar, text):
            assert valid, (schema, text)
        elif valid:  # but for what is not written: minus zero, more digits, an integer as 1.0
            assert float(text) == 0 or len(text) > 15 or (kind == "integer" and "." in text), (schema, text)


def test_only_one_of_oneof(vocabulary: Vocabulary) -> None:
    cat, dog = (
        {
            "type": "object",
            "properties": {"kind": {"const": kind}, "n": {"type": "integer"}},
            "required": ["kind"],
        }
        for kind in ("cat", "dog")
    )
    grammar = json_schema({"$defs": {"dog": dog}, "oneOf": [cat, {"$ref": "#/$defs/dog"}, {"type": "null"}]})
    for text in ('{"kind": "cat"}', '{"kind": "dog", "n": 3}', "null"):
        assert matches(vocabulary, grammar, text)
    with pytest.raises(UsageError, match="schema 0 and schema 1"):
        json_schema({"oneOf": [cat, {**dog, "required": []}]})


def test_oneof_sees_a_discriminator_that_stands_in_a_base_too(vocabulary: Vocabulary) -> None:
    base = {"type": "object", "properties": {"kind": TEXT}, "required": ["kind"]}
    pets = [
        {"allOf": [{"$ref": "#/$defs/base"}, {"properties": {"kind": {"const": "cat"}}}]},
        {"$ref": "#/$defs/base", "properties": {"kind": {"enum": ["dog", "wolf"]}}},
        {"$ref": "#/$defs/bird"},
    ]
    bird = {"$ref": "#/$defs/base", "properties": {"kind": {"$ref": "#/$defs/name", "const": "bird"}}}
    grammar = json_schema({"$defs": {"base": base, "bird": bird, "name": {"type": "string"}}, "oneOf": pets})
    for kind in ("cat", "dog", "wolf", "bird"):
        assert matches(vocabulary, grammar, json.dumps({"kind": kind}))
    assert not matches(vocabulary, grammar, '{"kind":"cow"}')
    with pytest.raises(UsageError, match="schema 0 and schema 1"):
        json_schema({"$defs": {"base": base}, "oneOf": [pets[0], {"$ref": "#/$defs/base"}]})


def test_formats(vocabulary: Vocabulary) -> None:
    for form, right, wrong in [
        ("date", "2024-05-31", "2024-06-31"), ("ipv4", "127.0.0.1", "1.2.3.256"), ("email", "a.b@c-d.org", "a@b"),
        ("hostname", "a-b.example", "-a.example"), ("uuid", "0" * 8 + "-0000" * 3 + "-" + "0" * 12, "0"),
    ]:  # fmt: skip
        grammar = json_schema({"type": "string", "format": form})
        assert matches(vocabulary, grammar, json.dumps(right)), form
        assert not matches(vocabulary, grammar, json.dumps(wrong)), form
    grammar = json_schema({"type": "string", "format": "date"})
    for year in (*range(12), *range(90, 112), *range(896, 1012), *range(1890, 2110)):
        for day in ("01-31", "02-29", "12-30"):
            text = f"{year:04}-{day}"
            assert matches(vocabulary, grammar, json.dumps(text)) == _is_date(text), text


def _is_date(text: str) -> bool:
    try:
        return bool(date.fromisoformat(text))
    except ValueError:
        return False
