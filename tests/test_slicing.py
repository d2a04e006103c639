"""Slices of model files: what they hold, how they reach the cache, and every bad input."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import resource
import shutil
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import reference
import tiny
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from meshpipe.errors import CapacityError, MeshpipeError, ModelError, SplitError
from meshpipe.llama import bindings, gguf, slicing
from meshpipe.llama.gguf import STRING, read_header, value
from meshpipe.llama.identity import model_digest
from meshpipe.llama.inspection import inspect_model, plan_split
from meshpipe.llama.slicing import read_slice, slice_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama of 6 layers with a head of its own."""
    return tiny.write(tmp_path_factory.mktemp("model") / "model.gguf", "llama")


def disk(path: Path) -> int:
    """Bytes that a file takes on disk."""
    return path.stat().st_blocks * 512


def leftovers(cache: Path) -> list[Path]:
    return [entry for entry in cache.rglob("*") if entry.is_file() and entry.suffix != ".gguf"]


# ------------------------------------------------------------------ the format


def test_tensor_types_are_those_of_the_installed_library() -> None:
    import ctypes

    name = bindings.function("ggml_type_name", ctypes.c_char_p, ctypes.c_int)
    block = bindings.function("ggml_blck_size", ctypes.c_int64, ctypes.c_int)
    size = bindings.function("ggml_type_size", ctypes.c_size_t, ctypes.c_int)
    for kind, (known, elements, length) in gguf.TENSOR_TYPES.items():
        assert (name(kind).decode(), block(kind), size(kind)) == (known, elements, length)


_NUMBERS = {
    gguf.U8: st.integers(0, 2**8 - 1),
    gguf.I8: st.integers(-(2**7), 2**7 - 1),
    gguf.U16: st.integers(0, 2**16 - 1),
    gguf.I16: st.integers(-(2**15), 2**15 - 1),
    gguf.U32: st.integers(0, 2**32 - 1),
    gguf.I32: st.integers(-(2**31), 2**31 - 1),
    gguf.F32: st.floats(width=32, allow_nan=False),
    gguf.BOOL: st.booleans(),
    gguf.STRING: st.text(max_size=40).filter(lambda text: "\0" not in text),
    gguf.U64: st.integers(0, 2**64 - 1),
    gguf.I64: st.integers(-(2**63), 2**63 - 1),
    gguf.F64: st.floats(allow_nan=False),
}
_VALUES = st.one_of(
    *[content.map(lambda item, kind=kind: gguf.value(kind, item)) for kind, content in _NUMBERS.items()],
    *[
        st.lists(content, max_size=20).map(lambda items, kind=kind: gguf.array(kind, items))
        for kind, content in _NUMBERS.items()
    ],
)
_KEYS = st.text("abcdefgh._", min_size=1, max_size=20).filter(
    lambda key: not key.startswith(("general", "split."))
)
_TENSORS = st.dictionaries(
    st.text("abc.", min_size=1, max_size=gguf.MAX_NAME),
    st.tuples(st.lists(st.integers(1, 4), max_size=3), st.sampled_from([0, 1, 2, 8, 12])),
    max_size=6,
)


@settings(max_examples=60, deadline=None)
@given(metadata=st.dictionaries(_KEYS, _VALUES, max_size=8), tensors=_TENSORS)
def test_headers_survive_a_round_trip(
    metadata: dict[str, gguf.Value],
    tensors: dict[str, tuple[list[int], int]],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    metadata["general.architecture"] = gguf.value(gguf.STRING, "llama")
    table = [
        (name, (gguf.TENSOR_TYPES[kind][1], *rest), kind) for name, (rest, kind) in tensors.items()
    ]  # rows of one block
    encoded, offsets, length = gguf.encode_header(metadata, table)
    path = tmp_path_factory.mktemp("trip") / "m.gguf"
    path.write_bytes(encoded + bytes(length - len(encoded)))
    header = read_header(path)
    assert dict(header.metadata) == metadata
    for key, entry in metadata.items():
        assert header.metadata[key].decode() == entry.decode()
    got = [(tensor.name, tensor.shape, tensor.kind, tensor.offset) for tensor in header.tensors.values()]
    assert got == [(*entry, offset) for entry, offset in zip(table, offsets, strict=True)]


def test_reads_what_the_gguf_package_writes(model: Path) -> None:
    import gguf as package

    reader = package.GGUFReader(model)
    header = read_header(model)
    assert [tensor.name for tensor in reader.tensors] == list(header.tensors)
    for tensor in reader.tensors:
        ours = header.tensors[tensor.name]
        assert (list(ours.shape), ours.kind, ours.offset, ours.size) == (
            tensor.shape.tolist(), tensor.tensor_type, tensor.data_offset, tensor.n_bytes,
        )  # fmt: skip
    assert header.get(".embedding_length") == 128


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_corrupt_headers_are_errors_of_ours(
    data: st.DataObject, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Bytes of the header overwritten, at random or with telling numbers, and the file cut at random."""
    content = bytearray(model.read_bytes())
    header_size = min(tensor.offset for tensor in read_header(model).tensors.values())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, header_size - 8))
        piece = data.draw(
            st.one_of(
                st.binary(min_size=1, max_size=8),
                st.sampled_from([2**64 - 1, 2**63, 2**40, 2**31, 2**20, 0, 8, 9]).map(
                    lambda n: struct.pack("<Q", n)
                ),
            )
        )
        content[at : at + len(piece)] = piece
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content))) :]
    path = tmp_path_factory.mktemp("corrupt") / "m.gguf"
    path.write_bytes(content)
    with contextlib.suppress(MeshpipeError):
        header = read_header(path)
        assert all(tensor.offset + tensor.size <= len(content) for tensor in header.tensors.values())
        inspect_model(path)
        slice_model(path, 0, 2, cache=path.parent)


# ------------------------------------------------------------------ what a slice holds


def test_the_parts_of_a_slice(model: Path, tmp_path: Path) -> None:
    source = read_header(model)
    first, middle, last = (slice_model(model, a, b, cache=tmp_path) for a, b in ((0, 2), (2, 5), (5, 6)))
    headers = [read_header(path) for path in (first, middle, last)]
    assert [header.get(".block_count") for header in headers] == [2, 3, 1]
    assert [header.get(".vocab_size") for header in headers] == [96, 1, 96]
    for header, start in zip(headers, (0, 2, 5), strict=True):
        for name, tensor in header.tensors.items():
            if tensor.layer is None:
                continue
            original = source.tensors[name.replace(f"blk.{tensor.layer}.", f"blk.{tensor.layer + start}.")]
            assert content(tensor) == content(original), name
    assert content(headers[0].tensors["token_embd.weight"]) == content(source.tensors["token_embd.weight"])
    assert content(headers[2].tensors["output.weight"]) == content(source.tensors["output.weight"])
    assert headers[1].tensors["token_embd.weight"].shape == (128, 1)
    assert headers[2].tensors["token_embd.weight"].shape == (128, 96)
    assert not any(content(headers[2].tensors["token_embd.weight"])), "a placeholder is a hole"
    described = read_slice(middle)
    assert (described.start, described.stop, described.layer_count) == (2, 5, 6)
    assert not described.is_first
    assert not described.is_last
    assert described.tapped_tensor == "l_out-2"
    assert described.model_digest == model_digest(model)


def content(tensor: gguf.Tensor) -> bytes:
    with tensor.path.open("rb") as file:
        file.seek(tensor.offset)
        return file.read(tensor.size)


def test_a_whole_model_is_a_slice_of_all_its_layers(model: Path) -> None:
    described = read_slice(model)
    assert described.is_first
    assert described.is_last
    assert (described.start, described.stop) == (0, 6)


def test_placeholders_take_no_disk(tmp_path: Path) -> None:
    """The head of the first stage and the embedding of the last are 32 MiB each in the whole model."""
    keys = tiny.metadata("llama", embedding_length=256, vocab_size=1 << 15, rope__dimension_count=64)
    path = tiny.write(tmp_path / "m.gguf", "llama", keys)
    whole = reference.unsplit_logits(path, tiny.tokens(8), context=256)
    stages = [slice_model(path, a, b, cache=tmp_path / "slices") for a, b in ((0, 2), (2, 4), (4, 6))]
    np.testing.assert_array_equal(
        reference.split_logits(stages, [2, 2, 2], tiny.tokens(8), context=256), whole
    )
    layers = disk(path) - 2 * (1 << 15) * 256 * 4
    assert disk(stages[0]) < layers + (33 << 20)
    assert disk(stages[1]) < layers
    assert disk(stages[2]) < layers + (33 << 20)


def test_first_and_last_keep_the_vocabulary(smollm2: Path, tmp_path: Path) -> None:
    without = read_header(slice_model(smollm2, 28, 29, cache=tmp_path))
    kept = read_header(slice_model(smollm2, 29, 30, cache=tmp_path))
    source = read_header(smollm2)
    assert without.get("tokenizer.ggml.model") == "no_vocab"
    assert without.get("tokenizer.ggml.tokens") is None
    assert source.vocabulary
    assert (without.vocabulary, kept.vocabulary) == ("", source.vocabulary)
    tokenizer = {key: entry for key, entry in source.metadata.items() if key.startswith("tokenizer.")}
    assert tokenizer == {key: entry for key, entry in kept.metadata.items() if key.startswith("tokenizer.")}


@pytest.mark.parametrize("key", ["tokens", "merges", "token_type", "pre", "add_bos_token"])
def test_vocabularies_are_the_same_if_they_make_the_same_tokens_of_text(key: str, smollm2: Path) -> None:
    header = read_header(smollm2)
    key = f"tokenizer.ggml.{key}"
    there = header.metadata[key]
    other = evolve(there, raw=there.raw[:-1] + bytes([there.raw[-1] ^ 1]))
    for changed in ({key: other}, {key: value(STRING, "")}):
        assert evolve(header, metadata={**header.metadata, **changed}).vocabulary != header.vocabulary
    unread = {"tokenizer.chat_template": value(STRING, "another"), "general.name": value(STRING, "another")}
    assert evolve(header, metadata={**header.metadata, **unread}).vocabulary == header.vocabulary


@pytest.mark.slow
def test_the_real_model_split_in_three(smollm2: Path, tmp_path: Path) -> None:
    tokens = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28]
    whole = reference.unsplit_logits(smollm2, tokens, (9, 1, 4), context=256)
    stages = [slice_model(smollm2, a, b, cache=tmp_path) for a, b in ((0, 11), (11, 19), (19, 30))]
    split = reference.split_logits(stages, [11, 8, 11], tokens, (9, 1, 4), context=256, trims=True)
    np.testing.assert_array_equal(split, whole)


def test_slicing_takes_little_time_and_memory(smollm2: Path, tmp_path: Path) -> None:
    """Under 3 s and 300 MiB, in a process of its own."""
    code = (
        "import sys, time; from meshpipe.llama.slicing import slice_model; from pathlib import Path\n"
        "began = time.perf_counter(); slice_model(sys.argv[1], 0, 15, cache=Path(sys.argv[2]))\n"
        "slice_model(sys.argv[1], 15, 30, cache=Path(sys.argv[2]))\n"
        # getrusage would count what the parent held before exec
        "peak = next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM'))\n"
        "print(time.perf_counter() - began, peak)"
    )
    command = [sys.executable, "-c", code, str(smollm2), str(tmp_path)]
    seconds, kib = map(
        float, subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    )
    assert seconds < 3
    assert kib < 300 * 1024


def test_split_files_are_one_model(model: Path, tmp_path: Path) -> None:
    """A model in three files gives the same layers as in one, whichever of them is named."""
    parts = split_file(model, tmp_path, 3)
    assert list(read_header(parts[0]).tensors) == list(read_header(model).tensors)
    a = read_header(slice_model(parts[0], 1, 4, cache=tmp_path / "a"))
    b = read_header(slice_model(model, 1, 4, cache=tmp_path / "b"))
    assert [content(tensor) for tensor in a.tensors.values()] == [
        content(tensor) for tensor in b.tensors.values()
    ]
    assert not any(key.startswith("split.") for key in a.metadata)
    assert model_digest(parts[1]) == model_digest(parts[0])
    assert inspect_model(parts[2]).files == 3
    parts[1].unlink()
    with pytest.raises(ModelError, match="00002-of-00003"):
        read_header(parts[0])


def split_file(model: Path, directory: Path, count: int) -> list[Path]:
    header = read_header(model)
    tensors = list(header.tensors.values())
    paths = []
    for number in range(count):
        metadata = dict(header.metadata) if number == 0 else {}
        metadata["general.architecture"] = header.metadata["general.architecture"]
        metadata["split.no"] = gguf.value(gguf.U16, number)
        metadata["split.count"] = gguf.value(gguf.U16, count)
        metadata["split.tensors.count"] = gguf.value(gguf.I32, len(tensors))
        mine = tensors[number * len(tensors) // count : (number + 1) * len(tensors) // count]
        encoded, offsets, length = gguf.encode_header(metadata, [(t.name, t.shape, t.kind) for t in mine])
        path = directory / f"model-{number + 1:05}-of-{count:05}.gguf"
        with path.open("wb") as file:
            file.write(encoded)
            for tensor, offset in zip(mine, offsets, strict=True):
                file.seek(offset)
                file.write(content(tensor))
            file.truncate(length)
        paths.append(path)
    return paths


# ------------------------------------------------------------------ identity


def test_the_digest_tells_models_apart_that_share_a_header(model: Path, tmp_path: Path) -> None:
    other = tiny.write(tmp_path / "other.gguf", "llama", seed=2)
    assert read_header(other).digest == read_header(model).digest
    assert model_digest(other) != model_digest(model)
    moved = shutil.copy(model, tmp_path / "moved.gguf")
    assert model_digest(moved) == model_digest(model)


# ------------------------------------------------------------------ the cache


def test_the_cache_is_reused_and_told_apart_by_what_was_asked(model: Path, tmp_path: Path) -> None:
    first = slice_model(model, 0, 2, cache=tmp_path)
    written = first.stat().st_mtime_ns
    assert slice_model(model, 0, 2, cache=tmp_path) == first
    assert first.stat().st_mtime_ns == written
    others = {
        slice_model(model, 0, 3, cache=tmp_path),
        slice_model(model, 2, 6, cache=tmp_path),
    }
    assert len(others | {first}) == 3
    assert leftovers(tmp_path) == []


def test_the_default_cache_follows_xdg(model: Path, cache: Path) -> None:
    assert slice_model(model, 0, 1).parent == cache / "slices"


def test_a_full_disk_is_seen_before_writing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    with pytest.raises(CapacityError, match="1,000 free"):
        slice_model(model, 0, 2, cache=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize("in_kernel", [True, False])
def test_a_disk_that_becomes_full_leaves_the_cache_clean(
    in_kernel: bool, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if in_kernel and not hasattr(os, "copy_file_range"):
        pytest.skip("this platform copies in user space")
    if not in_kernel:
        monkeypatch.delattr(os, "copy_file_range", raising=False)
    monkeypatch.setattr(os, "copy_file_range" if in_kernel else "pwrite", full)
    with pytest.raises(CapacityError, match="became full"):
        slice_model(model, 0, 2, cache=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
    monkeypatch.undo()
    assert slice_model(model, 0, 2, cache=tmp_path / "cache").exists()


def test_a_file_size_limit_leaves_the_cache_clean(model: Path, tmp_path: Path) -> None:
    """The real thing, a limit of the kernel's: the process is told EFBIG while it writes."""
    code = (
        "import resource, signal, sys; from pathlib import Path; from meshpipe.llama.slicing import slice_model\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))\n"
        "slice_model(sys.argv[1], 0, 2, cache=Path(sys.argv[2]))"
    )
    command = [sys.executable, "-c", code, str(model), str(tmp_path / "cache")]
    child = subprocess.run(command, capture_output=True, text=True)
    assert "ModelError: cannot write the slice" in child.stderr
    assert list((tmp_path / "cache").iterdir()) == []


def test_copying_without_help_from_the_kernel_gives_the_same_file(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_help = slice_model(model, 0, 3, cache=tmp_path / "a").read_bytes()
    monkeypatch.delattr(os, "copy_file_range", raising=False)
    assert slice_model(model, 0, 3, cache=tmp_path / "b").read_bytes() == with_help


def test_what_a_crash_left_is_overwritten(model: Path, tmp_path: Path) -> None:
    target = slice_model(model, 0, 2, cache=tmp_path)
    content = target.read_bytes()
    target.unlink()
    target.with_suffix(".part").write_bytes(b"x" * (2 * len(content)))
    assert slice_model(model, 0, 2, cache=tmp_path).read_bytes() == content
    assert leftovers(tmp_path) == []


@pytest.mark.slow
def test_several_processes_slice_the_same_range_at_once(smollm2: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from meshpipe.llama.slicing import slice_model\n"
        "sys.stdin.read(1); print(slice_model(sys.argv[1], 0, 15, cache=Path(sys.argv[2])))"
    )
    command = [sys.executable, "-c", code, str(smollm2), str(tmp_path)]
    children = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    for child in children:
        assert child.stdin is not None
        child.stdin.write("x")
        child.stdin.flush()
    outputs = {child.communicate()[0].strip() for child in children}
    assert [child.returncode for child in children] == [0, 0, 0]
    (path,) = outputs
    assert read_slice(path).stop == 15
    assert leftovers(tmp_path) == []


def test_one_writes_and_the_others_wait(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one thread is in the middle of writing, a second one waits, and then takes what the first wrote."""
    writing, go_on, writes = threading.Event(), threading.Event(), []
    original = slicing._Plan.write

    def slow(self: slicing._Plan, file: int, what: str) -> None:
        writes.append(file)
        writing.set()
        assert go_on.wait(30)
        original(self, file, what)

    monkeypatch.setattr(slicing._Plan, "write", slow)
    results: list[Path] = []
    threads = [
        threading.Thread(target=lambda: results.append(slice_model(model, 0, 2, cache=tmp_path)))
        for _ in range(2)
    ]
    threads[0].start()
    assert writing.wait(30)
    threads[1].start()
    threads[1].join(0.2)
    assert threads[1].is_alive()
    go_on.set()
    for thread in threads:
        thread.join(30)
    assert len(writes) == 1
    assert results[0] == results[1]
    assert leftovers(tmp_path) == []


def test_a_stalled_writer_is_not_waited_for_for_ever(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    target = slice_model(model, 0, 2, cache=tmp_path)
    target.unlink()
    monkeypatch.setattr(slicing, "_STALLED", 0.2)
    with target.with_suffix(".part").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(CapacityError, match="written nothing for"):
            slice_model(model, 0, 2, cache=tmp_path)


# ------------------------------------------------------------------ bad input


def rewritten(path: Path, target: Path, change: Callable[[dict[str, gguf.Value]], None]) -> Path:
    """The model with other metadata."""
    header = read_header(path)
    metadata = dict(header.metadata)
    change(metadata)
    tensors = list(header.tensors.values())
    encoded, offsets, length = gguf.encode_header(metadata, [(t.name, t.shape, t.kind) for t in tensors])
    with target.open("wb") as file:
        file.write(encoded)
        for tensor, offset in zip(tensors, offsets, strict=True):
            file.seek(offset)
            file.write(content(tensor))
        file.truncate(length)
    return target


@pytest.mark.parametrize(("start", "stop"), [(0, 7), (-1, 3), (6, 7), (3, 3), (4, 2), (0, 0), (100, 200)])
def test_a_range_outside_the_model(start: int, stop: int, model: Path, tmp_path: Path) -> None:
    with pytest.raises(SplitError, match=r"has layers 0:6"):
        slice_model(model, start, stop, cache=tmp_path)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="No such file"):
        slice_model(tmp_path / "none.gguf", 0, 1, cache=tmp_path)


def test_a_directory(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be read"):
        slice_model(tmp_path, 0, 1, cache=tmp_path)


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\3\4" + bytes(100), b"GGUF"])
def test_not_a_gguf_file(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match="not a GGUF file"):
        slice_model(path, 0, 1, cache=tmp_path)


@pytest.mark.parametrize("version", [0, 1, 4, 77])
def test_another_version(version: int, model: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<I", version) + model.read_bytes()[8:])
    with pytest.raises(ModelError, match=f"version {version}"):
        slice_model(path, 0, 1, cache=tmp_path)


def test_a_big_endian_file(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 1, 1) + bytes(100))
    with pytest.raises(ModelError, match="big-endian"):
        slice_model(path, 0, 1, cache=tmp_path)


@pytest.mark.parametrize("share", [0.001, 0.01, 0.3, 0.999])
def test_a_truncated_file(share: float, smollm2: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    with smollm2.open("rb") as file:
        path.write_bytes(file.read(int(smollm2.stat().st_size * share)))
    with pytest.raises(ModelError, match="truncated"):
        slice_model(path, 0, 1, cache=tmp_path)


def test_counts_that_the_file_cannot_hold(tmp_path: Path) -> None:
    """Sparse, so that there is room for the numbers: nothing is allocated on their word."""
    path = tmp_path / "m.gguf"
    key = struct.pack("<Q", 1) + b"k"
    with path.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key + struct.pack("<IIQ", 9, 8, 1 << 30))
        file.truncate(1 << 40)
    # The strings are all empty as far as the hole goes, and go past what a header may have.
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    monkey = pytest.MonkeyPatch()
    monkey.setattr(gguf, "MAX_HEADER", 1 << 22)
    with pytest.raises(ModelError, match="a header of more than"):
        read_header(path)
    monkey.undo()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024


def test_a_vocabulary_only_file(smollm2: Path, tmp_path: Path) -> None:
    header = read_header(smollm2)
    path = tmp_path / "vocabulary.gguf"
    path.write_bytes(gguf.encode_header(header.metadata, [])[0])
    for action in (inspect_model, lambda path: slice_model(path, 0, 15, cache=tmp_path)):
        with pytest.raises(ModelError, match="vocabulary-only"):
            action(path)


def test_an_encoder(model: Path, tmp_path: Path) -> None:
    def encoder(metadata: dict[str, gguf.Value]) -> None:
        metadata["llama.attention.causal"] = gguf.value(gguf.BOOL, False)

    path = rewritten(model, tmp_path / "m.gguf", encoder)
    for stop in (3, 6):
        with pytest.raises(ModelError, match="it is an encoder"):
            slice_model(path, 0, stop, cache=tmp_path)
    assert "encoder" in inspect_model(path).refusal


def test_a_recurrent_model(model: Path, tmp_path: Path) -> None:
    def recurrent(metadata: dict[str, gguf.Value]) -> None:
        for key in [key for key in metadata if key.startswith("llama.")]:
            metadata[key.replace("llama.", "mamba.")] = metadata.pop(key)
        metadata["general.architecture"] = gguf.value(gguf.STRING, "mamba")

    path = rewritten(model, tmp_path / "m.gguf", recurrent)
    with pytest.raises(ModelError, match="recurrent state"):
        slice_model(path, 0, 3, cache=tmp_path)


def test_a_slice_of_a_slice(model: Path, tmp_path: Path) -> None:
    with pytest.raises(SplitError, match="holds layers"):
        slice_model(slice_model(model, 0, 4, cache=tmp_path), 0, 2, cache=tmp_path)


def test_a_machine_needs_no_more_than_its_slice(model: Path, tmp_path: Path) -> None:
    made = slice_model(model, 2, 4, cache=tmp_path / "here")
    carried = tmp_path / "there" / "part.gguf"
    carried.parent.mkdir()
    made.rename(carried)
    assert slice_model(carried, 2, 4, cache=tmp_path) == carried
    assert read_slice(carried).model_digest == model_digest(model)


def test_no_architecture(model: Path, tmp_path: Path) -> None:
    path = rewritten(
        model, tmp_path / "m.gguf", lambda metadata: metadata.pop("general.architecture") and None
    )
    with pytest.raises(ModelError, match="which architecture"):
        inspect_model(path)


@pytest.mark.parametrize("count", [0, 7, 1 << 31])
def test_more_or_fewer_layers_than_there_are(count: int, model: Path, tmp_path: Path) -> None:
    def change(metadata: dict[str, gguf.Value]) -> None:
        metadata["llama.block_count"] = gguf.value(gguf.U32, count)

    path = rewritten(model, tmp_path / "m.gguf", change)
    with pytest.raises(ModelError, match=r"no tensors of layer 6|1 to 512 layers"):
        slice_model(path, 0, max(count, 1), cache=tmp_path)


def test_an_unwritable_cache(model: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_bytes(b"")
    with pytest.raises(ModelError, match="cannot write the slice"):
        slice_model(model, 0, 2, cache=tmp_path / "cache")


# ------------------------------------------------------------------ inspect


def test_inspecting_the_real_model(smollm2: Path) -> None:
    info = inspect_model(smollm2)
    assert (info.architecture, info.layers, info.vocabulary, info.tied_head) == ("llama", 30, 49152, True)
    assert info.refusal == ""
    assert info.tested
    assert sum(info.layer_bytes) + info.embedding_bytes == pytest.approx(info.total_bytes, rel=1e-3)
    assert set(info.layer_cache_bytes) == {3 * 128 * 2}
    plain = info.as_dict()
    assert plain["path"] == str(smollm2)
    table = info.table()
    for expected in ("llama", "30", "49152 tokens", "at any layer"):
        assert expected in table


def test_splits_of_the_real_model_are_even_by_cost(smollm2: Path) -> None:
    """The head costs about as much as 13 layers, so that the last stage gets fewer."""
    info = inspect_model(smollm2)
    for stages in (2, 3):
        boundaries = plan_split(smollm2, str(stages), context=256)
        costs = [
            sum(info.layer_bytes[a:b]) + (info.head_bytes if b == 30 else 0)
            for a, b in itertools.pairwise(boundaries)
        ]
        assert len(costs) == stages
        assert max(costs) - min(costs) <= 2 * info.layer_bytes[0]
    assert plan_split(smollm2, "0,15,30") == (0, 15, 30)
    with pytest.raises(SplitError, match="should begin with 0 and end with 30"):
        plan_split(smollm2, "0,15")


def test_planned_splits_keep_to_the_rules_of_the_architecture(tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "m.gguf", "smollm3", tiny.metadata("smollm3", 12))
    assert all(boundary % 4 == 0 for boundary in plan_split(path, "2"))
    with pytest.raises(SplitError, match="cannot be split into 4 stages"):
        plan_split(path, "4")
    windows = tiny.write(tmp_path / "w.gguf", "cohere2", tiny.metadata("cohere2", 8))
    assert 0 < plan_split(windows, "2")[1] < 8
