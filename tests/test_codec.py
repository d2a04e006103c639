"""Messages to bytes and back, for every message and every encoding of rows."""

from __future__ import annotations

import itertools
import typing
from typing import Any

import attrs
import cbor2
import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis.extra import numpy as hnp

from meshpipe import messages
from meshpipe.errors import ProtocolError, UsageError
from meshpipe.messages import Hello, OpenSession, Ping, Reply, Rows, Sampling, StageDescriptor, Timing, Window
from meshpipe.pipeline.lanes import prefix_digest
from meshpipe.wire.codec import ENCODINGS, decode, decode_rows, encode, encode_rows, payload_size
from meshpipe.wire.frames import PREFIX_SIZE, Frame, Kind, Limits, pack, parse_prefix, rows_of, unpack

KINDS = [
    cls
    for cls in vars(messages).values()
    if isinstance(cls, type) and attrs.has(cls) and cls.__module__ == messages.__name__
]

integers = st.integers(-(2**63), 2**63 - 1)
numbers = st.floats(allow_nan=False, allow_infinity=False)
floats32 = st.floats(width=32)
shapes = st.tuples(st.integers(1, 5), st.integers(1, 9))
all_rows = hnp.arrays(np.float32, shapes, elements=floats32)

PLAIN = {
    int: integers,
    float: numbers,
    bool: st.booleans(),
    str: st.text(max_size=20),
    bytes: st.binary(max_size=40),
    type(None): st.none(),
}


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Any value that the annotation of a message's field allows."""
    args = typing.get_args(hint)
    if hint == Rows:
        return all_rows
    if hint in PLAIN:
        return PLAIN[hint]
    if attrs.has(hint):
        return windows() if hint is Window else instances(hint)
    if typing.get_origin(hint) is tuple and args[-1] is ...:
        return st.lists(values(args[0]), max_size=6).map(tuple)
    if typing.get_origin(hint) is tuple:
        return st.tuples(*map(values, args))
    return st.one_of([values(arg) for arg in args])


def instances(cls: type) -> st.SearchStrategy[Any]:
    return st.builds(cls, **{name: values(hint) for name, hint in typing.get_type_hints(cls).items()})


def windows() -> st.SearchStrategy[Window]:
    """Windows whose rows, if any, are as many as their tokens."""

    def fill(rows: np.ndarray | None) -> st.SearchStrategy[Window]:
        tokens = (
            st.lists(integers, max_size=9)
            if rows is None
            else st.lists(integers, min_size=len(rows), max_size=len(rows))
        )
        timings = values(tuple[Timing, ...])
        return st.builds(
            Window, *[integers] * 4, tokens.map(tuple), integers, st.just(rows), timings, integers
        )

    return (st.none() | all_rows).flatmap(fill)


def any_message() -> st.SearchStrategy[object]:
    return st.one_of([values(kind) for kind in KINDS])


def received(payload: memoryview) -> np.ndarray:
    """The payload as a receiver has it: bytes of its own."""
    return np.frombuffer(bytearray(payload), dtype=np.uint8)


@settings(max_examples=300, deadline=None)
@given(any_message(), st.sampled_from(list(Kind)[:4]), st.integers(0, 2**32 - 1))
def test_every_message_survives_the_round_trip(message: object, kind: Kind, number: int) -> None:
    head, payload = pack(Frame(message, kind, number))
    prefix = parse_prefix(head[:PREFIX_SIZE], Limits())
    frame = unpack(prefix, head[PREFIX_SIZE:], received(payload), Limits())
    assert frame == Frame(message, kind, number)
    assert type(frame.message) is type(message)
    assert pack(frame)[0] == head, "the same bytes again"
    sent, arrived = rows_of(message), rows_of(frame.message)
    if sent is not None:
        assert arrived is not None
        assert arrived.tobytes() == sent.tobytes(), "float32 travels bit for bit"


def test_equal_messages_have_equal_bytes() -> None:
    """Also where a value equals its field's default but is another object: a proof is of these bytes."""
    bare = Hello("p")
    patience = float(str(bare.patience))
    assert patience is not bare.patience
    assert encode(attrs.evolve(bare, patience=patience)) == encode(bare)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_each_message_is_covered(kind: type) -> None:
    """The strategy above draws from all classes; this makes sure that each one alone is drawable."""

    @settings(max_examples=5, deadline=None)
    @given(values(kind))
    def check(message: object) -> None:
        header, payload = encode(message)
        assert decode(header, received(payload)) == message

    check()


def test_float32_rows_are_neither_copied_to_be_sent_nor_when_received() -> None:
    rows = np.arange(12, dtype=np.float32).reshape(3, 4)
    payload = encode_rows(rows, "float32")
    assert np.shares_memory(np.asarray(payload), rows)
    arrived = received(payload)
    assert np.shares_memory(decode_rows(arrived, "float32", 3, 4), arrived)


@settings(max_examples=200, deadline=None)
@given(all_rows, st.sampled_from(ENCODINGS))
def test_payloads_have_the_promised_size_and_shape(rows: np.ndarray, encoding: str) -> None:
    payload = encode_rows(rows, encoding)
    assert len(payload) == payload_size(encoding, *rows.shape)
    back = decode_rows(received(payload), encoding, *rows.shape)
    assert back.shape == rows.shape
    assert back.dtype == np.float32


finite_rows = hnp.arrays(np.float32, shapes, elements=st.floats(-60000, 60000, width=32))


@settings(max_examples=200, deadline=None)
@given(finite_rows)
@example(np.array([[2.55e-43]], np.float32))
@example(np.array([[5e-44, 1e-45]], np.float32))
def test_errors_of_inexact_encodings_are_bounded(rows: np.ndarray) -> None:
    def error(encoding: str) -> np.ndarray:
        back = decode_rows(received(encode_rows(rows, encoding)), encoding, *rows.shape)
        return np.abs(back.astype(np.float64) - rows.astype(np.float64))

    magnitude = np.abs(rows.astype(np.float64))
    assert (error("float16") <= np.maximum(magnitude * 2**-11, 2**-25)).all()
    assert (error("bfloat16") <= np.maximum(magnitude * 2**-8, 2**-133)).all()
    scale = magnitude.max(axis=1, keepdims=True) / 127
    assert (error("int8") <= scale * (0.5 + 1e-5) + 1e-44).all()


def test_bfloat16_rounds_to_even_and_keeps_infinities_and_nans() -> None:
    cases = np.array([1.0, 1.00390625, 1.01171875, np.inf, -np.inf, 3.4028235e38], dtype=np.float32)[None]
    back = decode_rows(received(encode_rows(cases, "bfloat16")), "bfloat16", *cases.shape)[0]
    assert back.tolist() == [1.0, 1.0, 1.015625, np.inf, -np.inf, np.inf]
    nans = np.array([0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF], dtype=np.uint32).view(np.float32)[None]
    assert np.isnan(decode_rows(received(encode_rows(nans, "bfloat16")), "bfloat16", 1, 3)).all()


def test_float16_saturates_and_int8_shows_what_it_cannot_hold() -> None:
    rows = np.array([[1e6, -1e6], [np.inf, 1.0], [0.0, 0.0], [127.0, -63.6]], dtype=np.float32)
    half = decode_rows(received(encode_rows(rows, "float16")), "float16", 4, 2)
    assert half[0].tolist() == [65504, -65504]
    eighth = decode_rows(received(encode_rows(rows, "int8")), "int8", 4, 2)
    assert np.isnan(eighth[1]).all()
    assert eighth[2].tolist() == [0, 0]
    assert eighth[3].tolist() == [127, -64]


def test_what_is_no_message_cannot_be_sent() -> None:
    with pytest.raises(UsageError, match="str is not a message"):
        encode("hello")
    with pytest.raises(UsageError, match="float8"):
        encode(Window(0, 0, 0, 0, (1,), 1, np.zeros((1, 4), np.float32)), "float8")


# ---- what a peer may not say --------------------------------------------------------------------------

NOTHING = np.empty(0, dtype=np.uint8)
WINDOW = {"session": 1, "epoch": 0, "number": 0, "start": 0, "tokens": [5, 6], "wanted": 2}


def refused(header: bytes, payload: np.ndarray = NOTHING) -> str:
    with pytest.raises(ProtocolError) as caught:
        decode(header, payload)
    return str(caught.value)


def test_wrong_fields_are_named() -> None:
    def say(**changes: object) -> str:
        return refused(cbor2.dumps(["Window", WINDOW | changes]))

    assert say(sesion=1).startswith("Window has no field 'sesion'")
    assert say(session="one") == "Window.session: expected an integer of 64 bits, got 'one'"
    assert say(session=True) == "Window.session: expected an integer of 64 bits, got True"
    assert say(session=2**63).startswith("Window.session: expected an integer of 64 bits")
    assert say(tokens=[1, 2.0]) == "Window.tokens: expected a list of integers, got [1, 2.0]"
    assert say(tokens=[1, 2**64 - 1]).startswith("Window.tokens: expected integers of 64 bits")
    assert say(tokens=None).startswith("Window.tokens: expected a list of integers")
    assert say(timings=[{"stage": 1, "rows": 1}]) == "Timing lacks its field queued, service"
    assert say(timings=[{"stag": 1}]).startswith("Timing has no field 'stag'")
    assert refused(cbor2.dumps(["Hello", {"pipeline": "p", "layers": [1, 2, 3]}])) == (
        "Hello.layers: expected a list of 2, got [1, 2, 3]"
    )
    assert say(timings=[3]) == "Window.timings: expected the fields of a Timing, got 3"
    assert say(timings=[{"stage": 0, "queued": float("nan"), "service": 0, "rows": 1}]).startswith(
        "Window.timings.queued: expected a finite number"
    )
    missing = dict(WINDOW)
    del missing["epoch"]
    assert refused(cbor2.dumps(["Window", missing])) == "Window lacks its field epoch"


def test_wrong_headers_are_named() -> None:
    assert refused(cbor2.dumps(["Widow", {}])).startswith("unknown message 'Widow'; known are ")
    assert refused(cbor2.dumps(["Window"])).startswith("expected a header [tag, fields]")
    assert refused(cbor2.dumps({"Window": {}})).startswith("expected a header [tag, fields]")
    assert refused(b"").startswith("a header of 0 bytes is not valid")
    assert refused(b"\xff").startswith("a header of 1 bytes is not valid")
    good = cbor2.dumps(["Ping", {"nonce": 1, "sent": 0.5}])
    assert decode(good, NOTHING) == Ping(1, 0.5)
    assert refused(good + b"\x00") == "1 bytes follow the message in its header"
    assert "not valid" in refused(good[:-1])
    twice = b"\x82\x64Ping\xa2\x65nonce\x01\x65nonce\x02"
    assert "duplicate" in refused(twice).lower()
    assert "not valid" in refused(b"\x82\x64Ping\xbf\x65nonce\x01\x64sent\x00\xff"), "indefinite lengths"


def test_no_cbor_tag_is_ever_followed() -> None:
    """Tags would make cbor2 build dates, big numbers, regular expressions, shared and cyclic values."""
    inners = (b"\x00", b"\x41\x01", b"\x61a", b"\x82\x00\x01", b"\x81\xd8\x1d\x00")
    tags = (*range(300), 1004, 43000, 55799, 2**32, 2**64 - 1)
    for tag, inner in itertools.product(tags, inners):
        head = b"\xdb" + tag.to_bytes(8, "big")
        assert "not valid" in refused(head + inner)


def test_deep_nesting_is_refused_and_the_deepest_message_is_not() -> None:
    descriptor = StageDescriptor("d", (0, 3), 3, 8, 16, 1, 64, cost=((1, 0.5), (2, 0.75)))
    welcome = messages.Welcome(1, (descriptor, descriptor))
    assert decode(encode(welcome)[0], NOTHING) == welcome
    for depth in (7, 100, 100_000):
        assert "not valid" in refused(b"\x81" * depth + b"\x00")


def test_payload_and_shape_must_agree() -> None:
    def say(shape: object, size: int) -> str:
        return refused(cbor2.dumps(["Window", WINDOW | {"rows": shape}]), np.zeros(size, np.uint8))

    assert say(["float32", 2, 4], 31) == "Window.rows: 2 x 4 float32 are 32 bytes, not the payload's 31"
    assert say(["float32", 3, 4], 48) == "Window has 2 tokens but 3 rows"
    assert say(["float32", -2, -4], 32) == "Window.rows: expected a shape, got -2 x -4"
    assert say(["float32", 2**30, 2**30], 32).startswith("Window.rows: 1073741824 x")
    for encoding in ENCODINGS:  # no rows need no bytes, however wide they are
        assert say([encoding, 0, 2**63], 0).startswith("Window.rows: expected a shape, got 0 x ")
    assert say(["float32", True, 8], 32).startswith("Window.rows: expected [encoding, rows, columns]")
    assert say(["float64", 2, 2], 32) == "Window.rows: unknown activation type 'float64'"
    assert say(["float32", 2], 32).startswith("Window.rows: expected [encoding, rows, columns]")
    assert say(None, 4) == "Window carries no rows, yet 4 bytes of payload came with it"


def test_a_prefix_of_any_length_opens_a_session_in_a_small_frame() -> None:
    prefix = prefix_digest(range(1_000_000))
    header, _ = encode(OpenSession(2**60, 254, Sampling(), cached=1_000_000, prefix=prefix))
    assert len(header) < 200


def test_optional_fields_may_be_left_out() -> None:
    header = cbor2.dumps(["OpenSession", {"session": 1, "lane": 2}])
    assert decode(header, NOTHING) == OpenSession(1, 2, Sampling(), 0)
    reply = Reply(1, 0, 0, 5, (9,), (Timing(0, 0.5, 0.25, 3),))
    assert decode(encode(reply)[0], NOTHING) == reply


def test_prefixes_are_checked_before_anything_is_allocated() -> None:
    def say(data: bytes) -> str:
        with pytest.raises(ProtocolError) as caught:
            parse_prefix(data, Limits(header=100, payload=1000))
        return str(caught.value)

    head, _ = pack(Frame(Ping(1, 2.0)))
    good = head[:PREFIX_SIZE]
    assert parse_prefix(good, Limits()).kind is Kind.MESSAGE
    assert say(b"GET / HTTP/1.1\r\n").startswith("the peer does not speak meshpipe")
    assert say(good[:2] + b"\x09" + good[3:]).startswith("the peer sends frames of version 9, this side of 1")
    assert say(good[:3] + b"\x05" + good[4:]) == "unknown kind of frame: 5"
    assert say(good[:8] + b"\xff\xff\xff\xff" + good[12:]).startswith(
        "a frame announces a header of 4294967295"
    )
    assert say(good[:12] + b"\xff\xff\xff\x7f").startswith("a frame announces 2147483647 bytes of payload")
    assert (
        say(good[:8] + bytes(4) + b"\x01\x00\x00\x00")
        == "a frame announces 1 bytes of payload without a header"
    )


def test_rows_of_another_width_than_agreed_are_refused() -> None:
    head, payload = pack(Frame(Window(0, 0, 0, 0, (1,), 1, np.zeros((1, 8), np.float32))))
    limits = Limits(columns=16)
    with pytest.raises(ProtocolError, match="rows of a Window are 8 wide; this link carries rows of 16"):
        unpack(parse_prefix(head[:PREFIX_SIZE], limits), head[PREFIX_SIZE:], received(payload), limits)
