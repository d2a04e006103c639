"""Which model a file holds, told without reading all of it."""

from __future__ import annotations

import hashlib
import os

from meshpipe.errors import ModelError
from meshpipe.llama.gguf import Header, read_header

_SAMPLE = 64


def model_digest(path: str | os.PathLike[str]) -> str:
    """SHA-256, in hex, of a model's header, its tensor table and 64 bytes from the middle of every tensor.

    What two ends of a connection compare. Fine-tunes often share a header to the byte; the samples tell them
    apart. Takes one small read per tensor, whatever the model's size. Raises ModelError.
    """
    return digest_of(read_header(path))


def digest_of(header: Header) -> str:
    """The digest of the model whose header has been read already; the slice of a model keeps its model's."""
    digest = hashlib.sha256(header.digest.encode())
    try:
        for path in dict.fromkeys(tensor.path for tensor in header.tensors.values()):
            with path.open("rb") as file:
                for tensor in header.tensors.values():
                    if tensor.path == path:
                        file.seek(tensor.offset + tensor.size // 2)
                        digest.update(file.read(min(_SAMPLE, tensor.size - tensor.size // 2)))
    except OSError as error:
        raise ModelError(f"{header.path}: cannot be read: {error.strerror or error}") from error
    return digest.hexdigest()
