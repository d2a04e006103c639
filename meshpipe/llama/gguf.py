"""Reading and writing the header of a GGUF file: metadata and tensor table, never tensor data.

A header of our own making rather than ggml's C reader, for three reasons. A corrupt count or length must end
in a `ModelError`, and the C reader takes them on trust as far as the file is long: one bad string-array count
in a sparse 40 GB file makes it write 32 GiB of empty strings. Values are kept as the bytes they had in the
file, so that what a slice copies is copied exactly, vocabularies of any size included, without being decoded.
And inspecting a model needs nothing loaded. Format: the GGUF specification, version 2 and 3, little-endian.

Shapes are in ggml's order: the length of a row comes first.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from attrs import field, frozen

from meshpipe.errors import ModelError

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_FORMATS = {
    U8: "B",
    I8: "b",
    U16: "H",
    I16: "h",
    U32: "I",
    I32: "i",
    F32: "f",
    BOOL: "?",
    U64: "Q",
    I64: "q",
    F64: "d",
}
_SIZES = {kind: struct.calcsize("<" + code) for kind, code in _FORMATS.items()}
INTEGERS = frozenset({U8, I8, U16, I16, U32, I32, U64, I64})

MAX_HEADER = 1 << 30
"""Bytes that a header may have; a vocabulary of a million tokens takes about 40 MB."""
MAX_NAME = 63
"""Bytes of a tensor's name, as in ggml."""

TOKENIZATION = (
    "model", "pre", "tokens", "token_type", "scores", "merges", "precompiled_charsmap", "normalizer.lowercase",
    "normalizer.strip_accents", "add_space_prefix", "remove_extra_whitespaces", "add_bos_token", "bos_token_id",
    "unknown_token_id",
)  # fmt: skip
"""The metadata `tokenizer.ggml.*` on which it depends which tokens a prompt becomes. Where an answer ends is not
among it: that is often mended in a quantization."""

# ggml type id: (name, elements per block, bytes per block), as ggml of llama-cpp-python 0.3.36 has them; the
# tests compare the table with the library's own. A type that is not here is refused by name of its number.
TENSOR_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("f32", 1, 4),
    1: ("f16", 1, 2),
    2: ("q4_0", 32, 18),
    3: ("q4_1", 32, 20),
    6: ("q5_0", 32, 22),
    7: ("q5_1", 32, 24),
    8: ("q8_0", 32, 34),
    9: ("q8_1", 32, 36),
    10: ("q2_K", 256, 84),
    11: ("q3_K", 256, 110),
    12: ("q4_K", 256, 144),
    13: ("q5_K", 256, 176),
    14: ("q6_K", 256, 210),
    15: ("q8_K", 256, 292),
    16: ("iq2_xxs", 256, 66),
    17: ("iq2_xs", 256, 74),
    18: ("iq3_xxs", 256, 98),
    19: ("iq1_s", 256, 50),
    20: ("iq4_nl", 32, 18),
    21: ("iq3_s", 256, 110),
    22: ("iq2_s", 256, 82),
    23: ("iq4_xs", 256, 136),
    24: ("i8", 1, 1),
    25: ("i16", 1, 2),
    26: ("i32", 1, 4),
    27: ("i64", 1, 8),
    28: ("f64", 1, 8),
    29: ("iq1_m", 256, 56),
    30: ("bf16", 1, 2),
    34: ("tq1_0", 256, 54),
    35: ("tq2_0", 256, 66),
    39: ("mxfp4", 32, 17),
    40: ("nvfp4", 64, 36),
    41: ("q1_0", 128, 18),
    42: ("q2_0", 64, 18),
}


@frozen
class Value:
    """One metadata value: its type, and for an array its elements' type and count; `raw` as in the file."""

    kind: int
    raw: bytes = field(repr=False)
    element: int | None = None
    count: int = 1

    @property
    def is_array(self) -> bool:
        """Whether the value is an array."""
        return self.kind == ARRAY

    def decode(self) -> Any:
        """The value as int, float, bool, str, or a list of these. Bytes that are no UTF-8 are replaced."""
        kind = self.kind if self.element is None else self.element
        if kind == STRING:
            texts = []
            position = 0
            for _ in range(self.count):
                (length,) = struct.unpack_from("<Q", self.raw, position)
                position += 8 + length
                texts.append(self.raw[position - length : position].decode("utf-8", "replace"))
            return texts if self.is_array else texts[0]
        numbers = struct.unpack(f"<{self.count}{_FORMATS[kind]}", self.raw)
        return list(numbers) if self.is_array else numbers[0]


def value(kind: int, content: Any) -> Value:
    """A scalar of type `kind`, or a string."""
    return Value(kind, _encode(kind, [content]))


def array(element: int, content: Iterable[Any]) -> Value:
    """An array of elements of type `element`."""
    items = list(content)
    return Value(ARRAY, _encode(element, items), element, len(items))


def _encode(kind: int, items: list[Any]) -> bytes:
    if kind == STRING:
        texts = [item.encode() for item in items]
        return b"".join(struct.pack("<Q", len(text)) + text for text in texts)
    return struct.pack(f"<{len(items)}{_FORMATS[kind]}", *items)


@frozen
class Tensor:
    """One tensor: its shape in ggml's order, its ggml type, and where its bytes lie."""

    name: str
    shape: tuple[int, ...]
    kind: int
    path: Path
    offset: int
    """Bytes from the beginning of the file `path`."""

    @property
    def size(self) -> int:
        """Bytes of its data."""
        return tensor_size(self.kind, self.shape)

    @property
    def layer(self) -> int | None:
        """The layer that it belongs to, or None."""
        match = re.match(r"blk\.(\d+)\.", self.name)
        return int(match.group(1)) if match else None


def tensor_size(kind: int, shape: Iterable[int]) -> int:
    """Bytes of a tensor of ggml type `kind` and shape `shape`."""
    _, elements, size = TENSOR_TYPES[kind]
    total = size
    for number, length in enumerate(shape):
        total *= length // elements if number == 0 else length
    return total


@frozen(eq=False)
class Header:
    """Metadata and tensors of a model, which may lie in several files (`-00001-of-00003.gguf`)."""

    path: Path
    metadata: Mapping[str, Value] = field(repr=False)
    tensors: Mapping[str, Tensor] = field(repr=False)
    digest: str
    """SHA-256, in hex, of the headers of all its files."""

    def get(self, key: str, default: Any = None) -> Any:
        """The decoded value of `key`, or of `{architecture}.key` where `key` begins with a dot."""
        found = self.metadata.get(self.architecture + key if key.startswith(".") else key)
        return default if found is None else found.decode()

    @property
    def vocabulary(self) -> str:
        """A digest, in hex, of all that makes tokens of text, equal for all quantizations; "" without a vocabulary."""
        if "tokenizer.ggml.tokens" not in self.metadata:
            return ""
        digest = hashlib.blake2b(digest_size=16)
        for key in TOKENIZATION:
            found = self.metadata.get(f"tokenizer.ggml.{key}")
            if found is not None:
                digest.update(f"{key} {len(found.raw)} ".encode())
                digest.update(found.raw)
        return digest.hexdigest()

    def integer(self, key: str, default: int | None = None) -> int:
        """Like `get`, for what must be one integer of at least 0. Raises ModelError."""
        full = self.architecture + key if key.startswith(".") else key
        found = self.metadata.get(full)
        if found is None and default is not None:
            return default
        if found is None:
            raise ModelError(f"{self.path}: the metadata has no {full!r}; it is no complete language model")
        number = found.decode()
        if found.kind not in INTEGERS or number < 0:
            raise ModelError(f"{self.path}: {full!r} should be an integer of at least 0, not {number!r:.60}")
        return int(number)

    @property
    def architecture(self) -> str:
        """The name that llama.cpp knows the architecture by."""
        return str(self.metadata["general.architecture"].decode())

    @functools.cached_property
    def alignment(self) -> int:
        """Bytes that every tensor's data is aligned to."""
        return self.integer("general.alignment", 32)


class _Cursor:
    """Takes bytes from a file, never more than are there, and remembers all it took."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self.file = file
        self.length = os.fstat(file.fileno()).st_size
        self.buffer = bytearray()
        self.position = 0

    def need(self, count: int) -> None:
        """Makes sure that `count` more bytes are in the buffer."""
        end = self.position + count
        if end <= len(self.buffer):
            return
        if end > self.length:
            raise ModelError(
                f"{self.path}: truncated or corrupt: the header asks for {count:,} bytes at {self.position:,}, "
                f"but the file has {self.length:,} in all; copy or download it again"
            )
        if end > MAX_HEADER:
            raise ModelError(f"{self.path}: corrupt: a header of more than {MAX_HEADER:,} bytes")
        wanted = max(end - len(self.buffer), 1 << 18)
        self.buffer += self.file.read(wanted)
        if end > len(self.buffer):
            raise ModelError(f"{self.path}: became shorter while it was being read")

    def take(self, count: int) -> bytes:
        self.need(count)
        start = self.position
        self.position += count
        return bytes(self.buffer[start : self.position])

    def number(self, code: str) -> int:
        (result,) = struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))
        return int(result)

    def text(self) -> str:
        raw = self.take(self.number("Q"))
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise ModelError(
                f"{self.path}: corrupt: {raw[:40]!r} at {self.position:,} is not a name"
            ) from None

    def strings(self, count: int) -> bytes:
        """The bytes of `count` strings, each with its length before it."""
        start = self.position
        position = start
        buffer = self.buffer
        unpack = struct.Struct("<Q").unpack_from
        for _ in range(count):
            if position + 8 > len(buffer):
                self.position = position
                self.need(8)
            position += 8 + unpack(buffer, position)[0]
        self.position = start
        return self.take(position - start)


def read_header(path: str | os.PathLike[str]) -> Header:
    """Reads metadata and tensor table of the model at `path`, all files of a split one (name any of them).

    Every tensor's data is checked to lie within its file. Raises ModelError for whatever is not a readable,
    complete, little-endian GGUF file of version 2 or 3.
    """
    first = Path(path)
    digest = hashlib.sha256()
    metadata, tensors = _read_file(first, digest)
    parts = metadata["split.count"].decode() if "split.count" in metadata else 0
    if isinstance(parts, int) and parts > 1:
        metadata, tensors, first = _read_parts(first, parts, digest := hashlib.sha256())
    if "general.architecture" not in metadata:
        raise ModelError(f"{first}: does not say which architecture it has; it is no language model")
    header = Header(first, metadata, {t.name: t for t in tensors}, digest.hexdigest())
    if len(header.tensors) != len(tensors):
        raise ModelError(f"{first}: corrupt: two tensors have the same name")
    return header


def _read_parts(path: Path, parts: int, digest: Any) -> tuple[dict[str, Value], list[Tensor], Path]:
    match = re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})\.gguf", path.name)
    if match is None or int(match.group(3)) != parts:
        raise ModelError(
            f"{path}: is one of {parts} files and should be named like model-00001-of-{parts:05}.gguf"
        )
    names = [
        path.with_name(f"{match.group(1)}-{number + 1:05}-of-{parts:05}.gguf") for number in range(parts)
    ]
    metadata: dict[str, Value] = {}
    tensors: list[Tensor] = []
    for number, name in enumerate(names):
        some, more = _read_file(name, digest)
        if "split.no" not in some or some["split.no"].decode() != number:
            raise ModelError(f"{name}: should be number {number} of its split, as its name says")
        # The first file has the metadata; the others repeat the architecture at most.
        metadata = metadata or some
        tensors += more
    return metadata, tensors, names[0]


def _read_file(path: Path, digest: Any) -> tuple[dict[str, Value], list[Tensor]]:
    try:
        with path.open("rb") as file:
            cursor = _Cursor(path, file)
            result = _parse(cursor)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from error
    digest.update(memoryview(cursor.buffer)[: cursor.position])
    return result


def _parse(cursor: _Cursor) -> tuple[dict[str, Value], list[Tensor]]:
    path = cursor.path
    if cursor.length < 24 or (magic := cursor.take(4)) != b"GGUF":
        begins = "" if cursor.length < 24 else f" (it begins with {magic!r})"
        raise ModelError(f"{path}: not a GGUF file{begins}; a model in GGUF format is needed")
    version = cursor.number("I")
    if version and version & 0xFFFF == 0:
        raise ModelError(
            f"{path}: a big-endian GGUF file; convert it to little-endian (gguf's gguf_convert_endian)"
        )
    if version not in (2, 3):
        raise ModelError(f"{path}: GGUF version {version}; versions 2 and 3 can be read")
    tensor_count, value_count = cursor.number("Q"), cursor.number("Q")
    # Each value takes at least 13 bytes and each tensor at least 24.
    if value_count * 13 + tensor_count * 24 > cursor.length:
        raise ModelError(
            f"{path}: truncated or corrupt: {value_count:,} values and {tensor_count:,} tensors cannot be in "
            f"{cursor.length:,} bytes"
        )
    metadata: dict[str, Value] = {}
    for _ in range(value_count):
        key = cursor.text()
        if not key or key in metadata:
            raise ModelError(f"{path}: corrupt: the metadata key {key!r} is empty or occurs twice")
        metadata[key] = _parse_value(cursor, key)
    architecture = metadata.get("general.architecture")
    if architecture is not None and architecture.kind != STRING:
        raise ModelError(f"{path}: 'general.architecture' should be a string")
    alignment = metadata.get("general.alignment", value(U32, 32))
    align = alignment.decode() if alignment.kind == U32 else 0
    if align < 1 or align & (align - 1):
        raise ModelError(f"{path}: 'general.alignment' should be a power of 2, as an unsigned 32-bit integer")
    entries = [_parse_tensor(cursor) for _ in range(tensor_count)]
    start = _padded(cursor.position, align)
    tensors = []
    expected = 0
    for name, shape, kind, offset in entries:
        tensor = Tensor(name, shape, kind, path, start + offset)
        if offset != expected:
            raise ModelError(f"{path}: corrupt: tensor {name!r} is at {offset:,}, expected at {expected:,}")
        if tensor.offset + tensor.size > cursor.length:
            raise ModelError(
                f"{path}: truncated: tensor {name!r} ends at byte {tensor.offset + tensor.size:,}, the file has "
                f"{cursor.length:,}; copy or download it again"
            )
        expected = _padded(offset + tensor.size, align)
        tensors.append(tensor)
    return metadata, tensors


def _parse_value(cursor: _Cursor, key: str) -> Value:
    kind = cursor.number("I")
    if kind in _SIZES:
        return Value(kind, cursor.take(_SIZES[kind]))
    if kind == STRING:
        return Value(kind, cursor.strings(1))
    if kind != ARRAY:
        raise ModelError(f"{cursor.path}: corrupt: the metadata value {key!r} has the unknown type {kind}")
    element, count = cursor.number("I"), cursor.number("Q")
    # Checked before the loop: every string takes at least the 8 bytes of its length.
    if element in _SIZES:
        return Value(kind, cursor.take(count * _SIZES[element]), element, count)
    if element != STRING:
        raise ModelError(f"{cursor.path}: the array {key!r} has elements of the unsupported type {element}")
    if count * 8 > cursor.length - cursor.position:
        raise ModelError(f"{cursor.path}: truncated or corrupt: {key!r} cannot have {count:,} strings")
    return Value(kind, cursor.strings(count), element, count)


def _parse_tensor(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    path = cursor.path
    name = cursor.text()
    if not name or len(name.encode()) > MAX_NAME:
        raise ModelError(f"{path}: corrupt: the tensor name {name[:80]!r} should have 1 to {MAX_NAME} bytes")
    dimensions = cursor.number("I")
    if dimensions > 4:
        raise ModelError(
            f"{path}: corrupt: tensor {name!r} has {dimensions} dimensions; at most 4 are possible"
        )
    shape = tuple(cursor.number("Q") for _ in range(dimensions))
    kind = cursor.number("I")
    if kind not in TENSOR_TYPES:
        raise ModelError(
            f"{path}: tensor {name!r} has type {kind}, which the installed llama.cpp does not know"
        )
    if shape and shape[0] % TENSOR_TYPES[kind][1]:
        raise ModelError(
            f"{path}: corrupt: rows of tensor {name!r} have {shape[0]} elements; blocks of "
            f"{TENSOR_TYPES[kind][0]} have {TENSOR_TYPES[kind][1]}"
        )
    return name, shape, kind, cursor.number("Q")


def _padded(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


def encode_header(
    metadata: Mapping[str, Value], tensors: Iterable[tuple[str, tuple[int, ...], int]], alignment: int = 32
) -> tuple[bytes, list[int], int]:
    """The header of a GGUF file of version 3 with these tensors (name, shape, ggml type) in this order.

    Returns its bytes (padded: data follows at once), each tensor's absolute offset, and the file's length.
    """
    table = list(tensors)
    out = bytearray(b"GGUF" + struct.pack("<IQQ", 3, len(table), len(metadata)))
    for key, entry in metadata.items():
        out += _encode(STRING, [key]) + struct.pack("<I", entry.kind)
        if entry.element is not None:
            out += struct.pack("<IQ", entry.element, entry.count)
        out += entry.raw
    offsets = []
    offset = 0
    for name, shape, kind in table:
        out += _encode(STRING, [name]) + struct.pack("<I", len(shape))
        out += struct.pack(f"<{len(shape)}Q", *shape) + struct.pack("<IQ", kind, offset)
        offsets.append(offset)
        offset = _padded(offset + tensor_size(kind, shape), alignment)
    out += bytes(_padded(len(out), alignment) - len(out))
    return bytes(out), [len(out) + offset for offset in offsets], len(out) + offset
