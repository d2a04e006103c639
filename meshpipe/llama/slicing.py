"""Writes the GGUF file of one stage: a layer range of a model, as a model of its own that llama.cpp loads.

A slice has its own layers, renamed to begin at `blk.0`, and the metadata that make them behave as they do in
the whole model (`meshpipe.llama.architectures`). What a stage has to declare but never reads (the embedding
where activations come in, the head where they go out) is a hole in a sparse file: it takes neither disk nor,
mapped, memory. Slices live in a cache, named by the digest of what they were made from; data is copied file to
file and never held in memory.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from attrs import frozen

from meshpipe.errors import CapacityError, ModelError, SplitError
from meshpipe.llama import architectures, gguf
from meshpipe.llama.gguf import Header, Tensor, Value, read_header
from meshpipe.llama.identity import digest_of
from meshpipe.llama.progress import report

FORMAT = 3
"""Counts changes to what a slice holds; part of its name in the cache."""

_CHUNK = 1 << 23
_STALLED = 60.0  # seconds without progress after which another process's copy is given up

EMBEDDING = "token_embd."
HEAD = "output."
# What is added to, or looked up for, the embedding where token ids come in: zeros add nothing elsewhere.
_POSITIONS = "position_embd."
# The type of matrices that are never read: 1.6 bits a weight, since mapping a file may well touch its holes.
_PLACEHOLDER = 19


@frozen
class Slice:
    """A stage's file, as its metadata describe it. A whole model is the slice with all its layers."""

    path: Path
    architecture: str
    start: int
    stop: int
    layer_count: int
    """Layers of the whole model, NextN layers not counted."""
    draft_heads: int
    """NextN layers that the file holds and llama.cpp can draft with."""
    model_digest: str
    vocabulary: str
    """`Header.vocabulary`; "" in slices that need none."""

    @property
    def is_first(self) -> bool:
        """Whether it takes token ids."""
        return self.start == 0

    @property
    def is_last(self) -> bool:
        """Whether it gives logits."""
        return self.stop == self.layer_count

    @property
    def tapped_tensor(self) -> str:
        """The graph node whose rows are the activations that leave the stage."""
        return architectures.boundary(self.architecture, self.stop - self.start)


def read_slice(path: str | os.PathLike[str]) -> Slice:
    """Describes a slice, or a whole model as the slice of all its layers. Raises ModelError."""
    header = read_header(path)
    if _SLICE_KEYS[0] in header.metadata:
        start, stop, count = (header.integer(key) for key in _SLICE_KEYS)
        digest = str(header.get(_DIGEST_KEY, ""))
    else:
        start, stop, count = 0, architectures.trunk_layers(header), architectures.trunk_layers(header)
        digest = digest_of(header)
    heads = architectures.draft_heads(header)
    return Slice(header.path, header.architecture, start, stop, count, heads, digest, header.vocabulary)


_SLICE_KEYS = ("meshpipe.slice.start", "meshpipe.slice.stop", "meshpipe.slice.layer_count")
_DIGEST_KEY = "meshpipe.slice.model_digest"


def slice_keys(start: int, stop: int, layer_count: int, digest: str) -> dict[str, Value]:
    """The metadata by which a file says that it is the slice of layers `[start, stop)` of a model."""
    numbers = zip(_SLICE_KEYS, (start, stop, layer_count), strict=True)
    result = {key: gguf.value(gguf.U32, number) for key, number in numbers}
    result[_DIGEST_KEY] = gguf.value(gguf.STRING, digest)
    return result


def cache_directory() -> Path:
    """Where slices are kept: `$XDG_CACHE_HOME/meshpipe/slices`, by default under `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME") or ""
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "meshpipe" / "slices"


def slice_model(
    path: str | os.PathLike[str],
    start: int,
    stop: int,
    *,
    mtp: bool = False,
    cache: Path | None = None,
) -> Path:
    """Writes the slice of layers `[start, stop)` of the model at `path`, unless the cache has it already.

    The first stage keeps the vocabulary, and so does the last, whose samplers look at token pieces when a grammar
    binds them. `mtp` keeps the model's NextN layers in the last stage. Several processes may ask for the same
    slice at once: one writes, the others wait for it. Returns the slice's path in `cache`; a file that is this
    very slice is returned as it is, so that a stage's machine needs no more than its slice.
    Raises ModelError (file, or an architecture that cannot be split), SplitError (range), CapacityError (disk).
    """
    header = read_header(path)
    if _SLICE_KEYS[0] in header.metadata:
        given = read_slice(path)
        if (given.start, given.stop) != (start, stop):
            raise SplitError(
                f"{header.path} holds layers {given.start}:{given.stop} of a model, not {start}:{stop}; "
                "slice the whole model, or serve the layers that are there"
            )
        return given.path
    architectures.check_range(header, start, stop)
    last = stop == architectures.trunk_layers(header)
    vocabulary = start == 0 or last
    nextn = mtp and last and architectures.draft_heads(header) > 0
    digest = digest_of(header)
    options = "-mtp" if nextn else ""
    cache = cache or cache_directory()
    target = cache / f"{digest[:32]}-{start}-{stop}{options}-v{FORMAT}.gguf"
    if target.exists():
        return target
    _write(target, _plan(header, start, stop, vocabulary, nextn, digest), f"layers {start}:{stop}")
    return target


def slice_nextn(path: str | os.PathLike[str], *, cache: Path | None = None) -> Path:
    """Writes what a drafter away from the trunk needs: the NextN layers, the embedding, the norm and the head.

    The trunk's layers stay declared, so that the NextN layers keep their numbers and what follows from these; llama.cpp
    knows such files and runs nothing but MTP with them. `path` is a model, or the slice of its last stage with NextN
    layers. Returns the file's path in `cache`. Raises ModelError if there is nothing to draft with, and what
    `slice_model` raises.
    """
    header = read_header(path)
    given = read_slice(path)
    if not given.draft_heads:
        raise ModelError(
            f"{header.path} has no NextN layers with which llama.cpp could draft ({header.architecture}); give a "
            "model that has, or its last stage's slice"
        )
    if given.start == given.stop:
        return given.path
    target = (cache or cache_directory()) / f"{given.model_digest[:32]}-nextn-v{FORMAT}.gguf"
    if not target.exists():
        _write(target, _nextn_plan(header, given), "the NextN layers")
    return target


def _write(target: Path, plan: _Plan, what: str) -> None:
    """Writes the planned file to `target`, or waits until another process has."""
    cache = target.parent
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(target) as file:
            if file is not None:
                _check_space(cache, plan.bytes)
                plan.write(file, f"writing {what}")
                os.fsync(file)
                os.replace(_partial(target), target)
                _sync_directory(cache)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CapacityError(
                f"the disk of {cache} became full while {what} were written ({plan.bytes:,} bytes); "
                "free space there or set XDG_CACHE_HOME to a larger disk"
            ) from error
        raise ModelError(f"cannot write the slice {target}: {error.strerror or error}") from error


@frozen
class _Plan:
    """What a slice's file will hold: its header, and which bytes go where. What is not copied is a hole."""

    header: bytes
    copies: list[tuple[Tensor, int]]
    length: int

    @property
    def bytes(self) -> int:
        """Bytes on disk."""
        return len(self.header) + sum(tensor.size for tensor, _ in self.copies)

    def write(self, file: int, what: str) -> None:
        done = 0
        os.ftruncate(file, 0)
        os.ftruncate(file, self.length)
        _write_all(file, self.header, 0)
        with contextlib.ExitStack() as stack:
            sources: dict[Path, int] = {}
            for tensor, offset in self.copies:
                if tensor.path not in sources:
                    sources[tensor.path] = os.open(tensor.path, os.O_RDONLY)
                    stack.callback(os.close, sources[tensor.path])
                report(what, done, self.bytes)
                _copy(sources[tensor.path], tensor, file, offset)
                done += tensor.size
        report(what, self.bytes, self.bytes)


def _plan(header: Header, start: int, stop: int, vocabulary: bool, nextn: bool, digest: str) -> _Plan:
    arch = header.architecture
    layers = architectures.trunk_layers(header)
    last = stop == layers
    metadata = architectures.slice_metadata(header, start, stop, nextn)
    if not vocabulary:
        metadata = _without_vocabulary(arch, metadata, 1)
    metadata |= slice_keys(start, stop, layers, digest)

    tied = not any(name.startswith(HEAD) for name in header.tensors)
    one_row = not vocabulary
    table: list[tuple[str, tuple[int, ...], int]] = []
    sources: list[Tensor | None] = []
    for tensor in header.tensors.values():
        name, shape, kind, layer = tensor.name, tensor.shape, tensor.kind, tensor.layer
        source: Tensor | None = tensor
        if layer is not None:
            if not (start <= layer < stop or (nextn and layer >= layers)):
                continue
            local = layer - start if layer < layers else layer - layers + stop - start
            name = f"blk.{local}.{name.split('.', 2)[2]}"
        elif name.startswith((HEAD, EMBEDDING)):
            wanted = last if name.startswith(HEAD) else start == 0 or (last and (tied or nextn))
            if not wanted:
                source = None
                if one_row and shape:
                    shape = (shape[0], 1) if len(shape) > 1 else (1,)
                if len(shape) > 1 and shape[0] % gguf.TENSOR_TYPES[_PLACEHOLDER][1] == 0:
                    kind = _PLACEHOLDER
        elif name.startswith(_POSITIONS) and start > 0:
            source = None
        table.append((name, shape, kind))
        sources.append(source)
    return _laid_out(metadata, table, sources, header.alignment)


def _nextn_plan(header: Header, given: Slice) -> _Plan:
    metadata = {key: entry for key, entry in header.metadata.items() if not key.startswith("split.")}
    if architectures.drafts_apart(header.architecture):
        metadata.pop(f"{header.architecture}.rope.dimension_sections", None)
    metadata = _without_vocabulary(header.architecture, metadata, architectures.vocabulary_size(header))
    count = given.layer_count
    metadata |= slice_keys(count, count, count, given.model_digest)
    trunk = architectures.trunk_layers(header)
    kept = [tensor for tensor in header.tensors.values() if tensor.layer is None or tensor.layer >= trunk]
    table = [(tensor.name, tensor.shape, tensor.kind) for tensor in kept]
    return _laid_out(metadata, table, kept, header.alignment)


def _without_vocabulary(arch: str, metadata: dict[str, Value], rows: int) -> dict[str, Value]:
    """The metadata of a file whose embedding has that many rows and that has no tokenizer."""
    result = {key: entry for key, entry in metadata.items() if not key.startswith("tokenizer.")}
    result["tokenizer.ggml.model"] = gguf.value(gguf.STRING, "no_vocab")
    result[f"{arch}.vocab_size"] = gguf.value(gguf.U32, rows)
    return result


def _laid_out(
    metadata: dict[str, Value],
    table: list[tuple[str, tuple[int, ...], int]],
    sources: Sequence[Tensor | None],
    alignment: int,
) -> _Plan:
    encoded, offsets, length = gguf.encode_header(metadata, table, alignment)
    copies = [(source, offset) for source, offset in zip(sources, offsets, strict=True) if source is not None]
    return _Plan(encoded, copies, length)


def _write_all(file: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view, offset)
        offset += written
        view = view[written:]


def _copy(source: int, tensor: Tensor, target: int, offset: int) -> None:
    """Copies one tensor's bytes, in the kernel where it can, else through a buffer of 8 MiB."""
    done = 0
    in_kernel = hasattr(os, "copy_file_range")
    while done < tensor.size:
        count = min(_CHUNK, tensor.size - done)
        copied = 0
        if in_kernel:
            try:
                copied = os.copy_file_range(source, target, count, tensor.offset + done, offset + done)
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
                    raise
            in_kernel = copied > 0
        if not copied:
            data = os.pread(source, count, tensor.offset + done)
            if not data:
                raise ModelError(f"{tensor.path}: became shorter while it was being read")
            _write_all(target, data, offset + done)
            copied = len(data)
        done += copied


def _check_space(directory: Path, needed: int) -> None:
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise CapacityError(
            f"the slice needs {needed:,} bytes, the disk of {directory} has {free:,} free; free space there or "
            "set XDG_CACHE_HOME to a larger disk"
        )


def _partial(target: Path) -> Path:
    return target.with_suffix(".part")


@contextlib.contextmanager
def _locked(target: Path) -> Iterator[int | None]:
    """The locked file that will become `target`; None once another process has finished it.

    The lock is on the partial file itself, so that a crash leaves nothing that anyone would wait for, and the
    next try overwrites what it left.
    """
    partial = _partial(target)
    since, seen = time.monotonic(), -1.0
    while not target.exists():
        file = os.open(partial, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if _lock(file) and _is_at(file, partial):
                try:
                    yield file
                except BaseException:
                    with contextlib.suppress(FileNotFoundError):
                        partial.unlink()
                    raise
                return
            changed = os.fstat(file).st_mtime
        finally:
            os.close(file)
        if changed != seen:
            since, seen = time.monotonic(), changed
        elif time.monotonic() - since > _STALLED:
            raise CapacityError(
                f"another process holds {partial} and has written nothing for {_STALLED:.0f} s; end it, or remove "
                "the file"
            )
        time.sleep(0.05)  # a file lock can only be waited for without a deadline
    yield None


def _lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(file: int, path: Path) -> bool:
    """Whether `path` still names the open file (another process may have finished or removed it)."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def _sync_directory(directory: Path) -> None:
    file = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
