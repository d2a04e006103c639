"""Frames: what one message is on a byte stream.

    bytes   0-1     2         3      4-7      8-11            12-15
            "mp"    version   kind   number   header length   payload length      (little-endian)
    then the header (CBOR) and the payload (raw), see `meshpipe.wire.codec`

`number` ties an answer to its question and is 0 elsewhere. Both lengths are checked against `Limits` before a
byte is allocated for them.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Any

import numpy as np
from attrs import frozen

from meshpipe.errors import ProtocolError
from meshpipe.messages import Progress, Reply, Rows, Window

from .codec import decode, encode

_PREFIX = struct.Struct("<2sBBIII")
_MAGIC = b"mp"
_VERSION = 1  # of the prefix; of messages: PROTOCOL_VERSION

PREFIX_SIZE = _PREFIX.size


class Kind(IntEnum):
    """What a frame is for."""

    MESSAGE = 0
    ASK = 1
    """A message whose sender waits for the answer with the same number."""
    ANSWER = 2
    FAILURE = 3
    """The answer is that it failed: a `Refusal`."""
    END = 4
    """No more frames in this direction: tells an orderly end from a lost peer."""


_KINDS = tuple(Kind)

WINDOW_HEADER, WINDOW_TOKEN = 200, 3
"""Bytes of a window's frame, about: without its tokens and rows, and for each token."""


@frozen
class Frame:
    """One frame. `message` is None for END and for an empty answer."""

    message: Any = None
    kind: Kind = Kind.MESSAGE
    number: int = 0

    @property
    def size(self) -> int:
        """Bytes on the wire, about, with rows as float32: what it counts for before, or without, being encoded."""
        message, rows = self.message, rows_of(self.message)
        payload = 0 if rows is None else rows.nbytes
        if isinstance(message, Window):
            return WINDOW_HEADER + WINDOW_TOKEN * len(message.tokens) + payload
        return 100 + payload


def rows_of(message: object) -> Rows | None:
    """The rows that travel as a message's payload."""
    if isinstance(message, Window):
        return message.rows
    return message.hidden if isinstance(message, (Reply, Progress)) else None


@frozen
class Limits:
    """The most that a peer's frame may announce, in bytes, and the row width that every message's rows must have."""

    header: int = 1 << 20
    payload: int = 64 << 20
    columns: int | None = None


HANDSHAKE_LIMITS = Limits(header=16 << 10, payload=0)
"""Before a peer is known to be one."""


@frozen
class Prefix:
    """The parsed start of a frame."""

    kind: Kind
    number: int
    header: int
    payload: int


def pack(frame: Frame, encoding: str = "float32") -> tuple[bytes, memoryview]:
    """The frame as two buffers: prefix with header, and payload (a view of the rows if they are float32)."""
    header, payload = (b"", memoryview(b"")) if frame.message is None else encode(frame.message, encoding)
    prefix = _PREFIX.pack(_MAGIC, _VERSION, frame.kind, frame.number, len(header), len(payload))
    return prefix + header, payload


def parse_prefix(data: bytes | bytearray | memoryview, limits: Limits) -> Prefix:
    """Checks the first `PREFIX_SIZE` bytes of a frame. Raises `ProtocolError`."""
    magic, version, kind, number, header, payload = _PREFIX.unpack(data)
    if magic != _MAGIC:
        raise ProtocolError(
            f"the peer does not speak meshpipe: a frame begins with {magic!r}, not {_MAGIC!r}"
        )
    if version != _VERSION:
        raise ProtocolError(
            f"the peer sends frames of version {version}, this side of {_VERSION}; run the same meshpipe"
        )
    if kind >= len(_KINDS):
        raise ProtocolError(f"unknown kind of frame: {kind}")
    if header > limits.header:
        raise ProtocolError(
            f"a frame announces a header of {header} bytes; at most {limits.header} are allowed"
        )
    if payload > limits.payload:
        raise ProtocolError(
            f"a frame announces {payload} bytes of payload; at most {limits.payload} are allowed"
        )
    if header == 0 and payload > 0:
        raise ProtocolError(f"a frame announces {payload} bytes of payload without a header")
    return Prefix(_KINDS[kind], number, header, payload)


def unpack(prefix: Prefix, header: bytes, payload: np.ndarray[Any, Any], limits: Limits) -> Frame:
    """The frame whose parts these are; float32 rows share the payload's memory. Raises `ProtocolError`."""
    if prefix.header == 0:
        if prefix.kind not in (Kind.END, Kind.ANSWER):
            raise ProtocolError(f"a frame of kind {prefix.kind.name} has no header")
        return Frame(None, prefix.kind, prefix.number)
    message = decode(header, payload)
    rows = rows_of(message)
    if limits.columns is not None and rows is not None and rows.shape[1] != limits.columns:
        raise ProtocolError(
            f"the rows of a {type(message).__name__} are {rows.shape[1]} wide; this link carries rows of "
            f"{limits.columns}"
        )
    return Frame(message, prefix.kind, prefix.number)
