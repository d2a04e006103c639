"""Messages to bytes and back: a CBOR header that holds a message's fields, and its rows as a raw payload.

    header  = CBOR [tag, {field: value}]         tag: the class name; nested messages are maps, tuples arrays
    payload = the rows of the one field of type Rows; in the header that field is [encoding, rows, columns]

What comes from a peer is checked field by field against the class's annotations: an unknown tag or field, a
missing one, a value of another type, a number outside 64 bits, a CBOR tag, a repeated key, deep nesting: each
is a `ProtocolError` that names it. Nothing is ever evaluated, and no size in the header is believed before
the bytes are there.

Encodings of rows (values are little-endian, row after row):

    float32    exact, the default; the received bytes are the array
    float16    rounded to nearest, saturating at +-65504
    bfloat16   float32's upper half, rounded to nearest even
    int8       a float32 scale per row (largest magnitude / 127), then the rounded quotients; a row that holds
               an infinity or a NaN arrives as NaN throughout
"""

from __future__ import annotations

import collections.abc
import io
import math
import types
import typing
from collections.abc import Callable
from functools import partial
from typing import Any

import attrs
import cbor2
import numpy as np

from meshpipe import messages
from meshpipe.errors import ProtocolError, UsageError
from meshpipe.messages import Rows

Encode = Callable[[Any], Any]
Decode = Callable[[Any], Any]

ENCODINGS = ("float32", "float16", "bfloat16", "int8")
"""How rows can travel. Only float32 is exact."""

MAX_NESTING = 6
"""Containers within containers in a header: the message, its fields, a tuple of messages, their tuples."""


# ---- rows ---------------------------------------------------------------------------------------------


def payload_size(encoding: str, rows: int, columns: int) -> int:
    """Bytes of that many rows. Raises `UsageError` for an unknown encoding."""
    if encoding == "float32":
        return rows * columns * 4
    if encoding in ("float16", "bfloat16"):
        return rows * columns * 2
    if encoding == "int8":
        return rows * (4 + columns)
    raise UsageError(f"unknown activation type {encoding!r}; choose one of {', '.join(ENCODINGS)}")


def encode_rows(rows: Rows, encoding: str) -> memoryview:
    """The payload of `rows`, float32 (rows, columns). float32 is a view of the array itself, not a copy."""
    rows = np.ascontiguousarray(rows, dtype="<f4")
    if encoding == "float32":
        return _view(rows)
    if encoding == "float16":
        return _view(np.clip(rows, -65504.0, 65504.0).astype("<f2"))
    if encoding == "bfloat16":
        bits = rows.view("<u4")
        rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
        quiet_nan = (bits >> 16) | 0x40  # rounding could carry a NaN into an infinity
        return _view(np.where(np.isnan(rows), quiet_nan, rounded).astype("<u2"))
    if encoding == "int8":
        payload = np.empty(payload_size("int8", *rows.shape), dtype=np.uint8)
        largest = np.abs(rows).max(axis=1, initial=0.0)
        scales = np.where(np.isfinite(largest), largest / np.float32(127), np.float32(np.nan)).astype("<f4")
        # A denormal scale may be rounded down by much, and then levels would be cut off.
        rounded = (largest > 0) & (scales < np.finfo(np.float32).tiny)
        scales = np.where(rounded, np.nextafter(scales, np.float32(np.inf)), scales)
        divisors = np.where(scales > 0, scales, np.float32(np.inf))
        with np.errstate(invalid="ignore"):
            levels = np.nan_to_num(np.rint(rows / divisors[:, None]), nan=0.0)
        payload[: scales.nbytes] = scales.view(np.uint8)
        payload[scales.nbytes :] = np.clip(levels, -127, 127).astype(np.int8).view(np.uint8).ravel()
        return _view(payload)
    raise UsageError(f"unknown activation type {encoding!r}; choose one of {', '.join(ENCODINGS)}")


def decode_rows(payload: np.ndarray[Any, Any], encoding: str, rows: int, columns: int) -> Rows:
    """The rows in `payload`, uint8 of exactly `payload_size(...)` bytes. float32 shares its memory."""
    if encoding == "float32":
        exact: Rows = payload.view("<f4").reshape(rows, columns)
        return exact
    if encoding == "float16":
        return payload.view("<f2").reshape(rows, columns).astype(np.float32)
    if encoding == "bfloat16":
        bits = payload.view("<u2").astype(np.uint32) << 16
        return bits.view(np.float32).reshape(rows, columns)
    scales = payload[: rows * 4].view("<f4")
    levels = payload[rows * 4 :].view(np.int8).reshape(rows, columns)
    with np.errstate(over="ignore", invalid="ignore"):  # at the edge of float32, or a peer's idea of a scale
        scaled: Rows = levels * scales[:, None]
    return scaled


def _view(array: np.ndarray[Any, Any]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data if array.size else memoryview(b"")


# ---- messages -----------------------------------------------------------------------------------------


@attrs.frozen
class _Kind:
    """What the codec knows of one message class."""

    cls: type
    fields: dict[str, tuple[Encode | None, Decode]]
    required: frozenset[str]
    defaults: dict[str, object]  # NOTHING of those that are required
    rows: str | None  # the field that travels as payload


def encode(message: object, encoding: str = "float32") -> tuple[bytes, memoryview]:
    """The header and payload of a message. Raises `UsageError` if it is no message."""
    kind = _KINDS.get(type(message).__name__)
    if kind is None or kind.cls is not type(message):
        raise UsageError(f"{type(message).__name__} is not a message; known are {', '.join(sorted(_KINDS))}")
    fields = _fields_of(kind, message)
    payload = memoryview(b"")
    if kind.rows is not None:
        rows = getattr(message, kind.rows)
        if rows is not None:
            payload = encode_rows(rows, encoding)
            fields[kind.rows] = [encoding, *rows.shape]
    return cbor2.dumps([type(message).__name__, fields]), payload


def decode(header: bytes, payload: np.ndarray[Any, Any]) -> Any:
    """The message in a header and its payload (uint8; float32 rows go on sharing its memory).

    Raises `ProtocolError` that names what is wrong with it.
    """
    match _parse(header):
        case [str() as tag, dict() as fields]:
            pass
        case other:
            raise ProtocolError(f"expected a header [tag, fields], got {_brief(other)}")
    kind = _KINDS.get(tag)
    if kind is None:
        raise ProtocolError(f"unknown message {_brief(tag)}; known are {', '.join(sorted(_KINDS))}")
    try:
        values = _values_of(kind, fields)
    except _WrongValue as wrong:
        path, expected, value = ".".join([tag, *wrong.path]), wrong.expected, _brief(wrong.value)
        raise ProtocolError(f"{path}: expected {expected}, got {value}") from None
    shape = values.get(kind.rows) if kind.rows is not None else None
    if shape is not None and kind.rows is not None:
        values[kind.rows] = _decode_payload(f"{tag}.{kind.rows}", payload, shape)
    elif payload.size:
        raise ProtocolError(f"{tag} carries no rows, yet {payload.size} bytes of payload came with it")
    message = kind.cls(**values)
    if isinstance(message, messages.Window) and shape is not None and len(message.tokens) != shape[1]:
        raise ProtocolError(f"Window has {len(message.tokens)} tokens but {shape[1]} rows")
    return message


def _decode_payload(path: str, payload: np.ndarray[Any, Any], shape: tuple[str, int, int]) -> Rows:
    encoding, rows, columns = shape
    if encoding not in ENCODINGS:
        raise ProtocolError(f"{path}: unknown activation type {_brief(encoding)}")
    if not (0 <= rows < 2**31 and 0 <= columns < 2**31):
        raise ProtocolError(f"{path}: expected a shape, got {rows} x {columns}")
    expected = payload_size(encoding, rows, columns)
    if expected != payload.size:
        raise ProtocolError(
            f"{path}: {rows} x {columns} {encoding} are {expected} bytes, not the payload's {payload.size}"
        )
    return decode_rows(payload, encoding, rows, columns)


def _fields_of(kind: _Kind, message: Any) -> dict[str, Any]:
    """What is not simply the field's default: most replies carry no drafts, no log-probabilities and so on.

    Equal messages give equal bytes, whatever object a value happens to be: proofs of the shared key rest on it.
    """
    fields = {}
    for name, (encoder, _) in kind.fields.items():
        value, default = getattr(message, name), kind.defaults[name]
        if value is default or (type(value) is type(default) and value == default):
            continue
        fields[name] = value if encoder is None else encoder(value)
    return fields


def _values_of(kind: _Kind, fields: dict[Any, Any]) -> dict[str, Any]:
    """Checked and restored values of a message's fields."""
    values: dict[str, Any] = {}
    known = kind.fields
    name = ""
    try:
        for name, value in fields.items():
            if name not in known:
                has = ", ".join(known)
                raise ProtocolError(f"{kind.cls.__name__} has no field {_brief(name)}; it has {has}")
            values[name] = known[name][1](value)
    except _WrongValue as wrong:
        wrong.path.insert(0, name)
        raise
    if not kind.required <= values.keys():
        missing = ", ".join(sorted(kind.required - values.keys()))
        raise ProtocolError(f"{kind.cls.__name__} lacks its field {missing}")
    return values


class _WrongValue(Exception):
    """A value that its annotation does not allow; the fields that lead to it join the path on the way out."""

    def __init__(self, expected: str, value: object) -> None:
        self.expected = expected
        self.value = value
        self.path: list[str] = []


# ---- CBOR ---------------------------------------------------------------------------------------------


class _RefuseEveryTag(collections.abc.Mapping[int, Any]):
    """Stands for cbor2's decoders of tags: dates, big numbers, regular expressions, shared references."""

    def __getitem__(self, tag: int) -> Callable[[Any, bool], Any]:
        def refuse(value: Any, immutable: bool) -> Any:
            raise ValueError(f"tag {tag} is not allowed")

        return refuse

    def __iter__(self) -> typing.Iterator[int]:
        return iter(())

    def __len__(self) -> int:
        return 0


_REFUSE_EVERY_TAG = _RefuseEveryTag()


def _refuse_tag(tag: cbor2.CBORTag, immutable: bool) -> Any:
    raise ValueError(f"tag {tag.tag} is not allowed")


def _parse(header: bytes) -> Any:
    """CBOR without tags, indefinite lengths or repeated keys; at most `MAX_NESTING` deep; nothing after it.

    cbor2 takes no memory for an announced length before the bytes are there; a header can therefore never
    cost more than a small multiple of its own size.
    """
    source = io.BytesIO(header)
    decoder = cbor2.CBORDecoder(
        source,
        tag_hook=_refuse_tag,
        semantic_decoders=_REFUSE_EVERY_TAG,
        max_depth=MAX_NESTING,
        allow_indefinite=False,
        allow_duplicate_keys=False,
        strict_hashable_types=True,
    )
    try:
        value = decoder.decode()
    except (cbor2.CBORError, ValueError) as error:
        cause = f": {error.__cause__}" if error.__cause__ is not None else ""
        raise ProtocolError(f"a header of {len(header)} bytes is not valid: {error}{cause}") from None
    if source.tell() != len(header):
        raise ProtocolError(f"{len(header) - source.tell()} bytes follow the message in its header")
    return value


def _brief(value: object) -> str:
    """A peer's value as it may stand in an error message."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


# ---- one codec per annotation -------------------------------------------------------------------------


def _decode_int(value: Any) -> int:
    if type(value) is not int or not -(2**63) <= value < 2**63:
        raise _WrongValue("an integer of 64 bits", value)
    return value


def _decode_float(value: Any) -> float:
    if type(value) not in (float, int) or not math.isfinite(value):
        raise _WrongValue("a finite number", value)
    return float(value)


def _decode_ints(value: Any) -> tuple[int, ...]:
    """tuple[int, ...]: the many tokens of a prefill window are checked without a call for each."""
    if type(value) is not list or not set(map(type, value)) <= {int}:
        raise _WrongValue("a list of integers", value)
    if value and (min(value) < -(2**63) or max(value) >= 2**63):
        raise _WrongValue("integers of 64 bits", value)
    return tuple(value)


def _decode_shape(value: Any) -> tuple[str, int, int]:
    match value:
        case [str() as encoding, int() as rows, int() as columns] if type(rows) is type(columns) is int:
            return encoding, rows, columns
    raise _WrongValue("[encoding, rows, columns]", value)


def _decode_plain(kind: type, words: str) -> Decode:
    def decode_plain(value: Any) -> Any:
        if type(value) is not kind:
            raise _WrongValue(words, value)
        return value

    return decode_plain


_PLAIN: dict[Any, tuple[Encode | None, Decode]] = {
    int: (None, _decode_int),
    float: (None, _decode_float),
    bool: (None, _decode_plain(bool, "true or false")),
    str: (None, _decode_plain(str, "a text")),
    bytes: (None, _decode_plain(bytes, "a byte string")),
    tuple[int, ...]: (None, _decode_ints),
    Rows: (lambda rows: None, _decode_shape),  # the shape goes in once the payload is made
}


def _codec_of(hint: Any) -> tuple[Encode | None, Decode]:
    """How a value of this annotation goes into CBOR (None: as it is) and how it is checked and restored."""
    if hint in _PLAIN:
        return _PLAIN[hint]
    if attrs.has(hint):
        return _message_codec(hint)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType) and len(args) == 2 and type(None) in args:
        (inner,) = (arg for arg in args if arg is not type(None))
        return _optional_codec(*_codec_of(inner))
    if origin is tuple and len(args) == 2 and args[1] is Ellipsis:
        return _list_codec(*_codec_of(args[0]))
    if origin is tuple:
        return _tuple_codec([_codec_of(arg) for arg in args])
    raise TypeError(f"messages cannot have fields of type {hint!r}")


def _optional_codec(encode_one: Encode | None, decode_one: Decode) -> tuple[Encode | None, Decode]:
    def encode_optional(value: Any) -> Any:
        return None if value is None or encode_one is None else encode_one(value)

    def decode_optional(value: Any) -> Any:
        return None if value is None else decode_one(value)

    return (None if encode_one is None else encode_optional), decode_optional


def _list_codec(encode_one: Encode | None, decode_one: Decode) -> tuple[Encode | None, Decode]:
    def encode_list(values: Any) -> Any:
        return values if encode_one is None else [encode_one(value) for value in values]

    def decode_list(value: Any) -> Any:
        if type(value) is not list:
            raise _WrongValue("a list", value)
        return tuple([decode_one(item) for item in value])

    return (None if encode_one is None else encode_list), decode_list


def _tuple_codec(parts: list[tuple[Encode | None, Decode]]) -> tuple[Encode | None, Decode]:
    plain = all(encoder is None for encoder, _ in parts)

    def encode_tuple(values: Any) -> Any:
        return [
            value if encoder is None else encoder(value)
            for value, (encoder, _) in zip(values, parts, strict=True)
        ]

    def decode_tuple(value: Any) -> Any:
        if type(value) is not list or len(value) != len(parts):
            raise _WrongValue(f"a list of {len(parts)}", value)
        return tuple([decoder(item) for item, (_, decoder) in zip(value, parts, strict=True)])

    return (None if plain else encode_tuple), decode_tuple


def _message_codec(cls: type) -> tuple[Encode, Decode]:
    kind = _kind_of(cls)

    def decode_message(value: Any) -> Any:
        if type(value) is not dict:
            raise _WrongValue(f"the fields of a {cls.__name__}", value)
        return cls(**_values_of(kind, value))

    return partial(_fields_of, kind), decode_message


def _kind_of(cls: type) -> _Kind:
    hints = typing.get_type_hints(cls)
    fields = {field.name: _codec_of(hints[field.name]) for field in attrs.fields(cls)}
    defaults = {field.name: field.default for field in attrs.fields(cls)}
    required = frozenset(name for name, default in defaults.items() if default is attrs.NOTHING)
    rows = [name for name, hint in hints.items() if hint == Rows or Rows in typing.get_args(hint)]
    return _Kind(cls, fields, required, defaults, rows[0] if rows else None)


_KINDS = {
    cls.__name__: _kind_of(cls)
    for cls in vars(messages).values()
    if isinstance(cls, type) and attrs.has(cls) and cls.__module__ == messages.__name__
}
