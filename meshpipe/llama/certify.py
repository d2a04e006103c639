"""Shows that a split of a model gives what the whole model gives, without running the model.

A wrong slice runs happily and is wrong: layer numbers and layer counts leak into what llama.cpp does. So a
miniature twin of the model (`meshpipe.llama.twin`) is run whole and split, over decodes of several widths and
trims in between, and every logit must have the same bits. That takes seconds for a model of any size. The twin
runs in a child process, since metadata that llama.cpp does not expect can abort it. What was shown is
remembered, by the model's header, the boundaries and the version of llama.cpp.

What a certificate cannot show is that kernels give the same bits at the model's own widths; the same code runs
at all of them, on one machine, and so far it always has.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from attrs import frozen

from meshpipe.errors import CapacityError, MeshpipeError, ModelError, SplitError
from meshpipe.files import write_whole
from meshpipe.llama import architectures
from meshpipe.llama.gguf import Header, read_header
from meshpipe.llama.slicing import FORMAT, cache_directory, slice_model
from meshpipe.topology.split import Boundaries, check_split

# Widths of successive decodes. Before those marked True, rows are run past the end and trimmed away again.
DECODES = ((17, False), (1, False), (1, True), (5, True), (2, False), (1, True), (8, True))
_NO_ROOM = 75  # exit status of a child that says nothing about the split
_DEADLINE = 600.0  # seconds; a twin of 100 layers takes about 10


@frozen
class Certificate:
    """What came of certifying a split. `failure` is empty if every logit was equal."""

    architecture: str
    boundaries: Boundaries
    failure: str = ""
    cut: int | None = None
    """The first boundary at which rows differ from the whole model's (the number of layers: the logits)."""
    layer: int | None = None
    """The first layer that gives other rows in its slice than in the whole model, from equal rows."""
    rows: int = 0
    """Logit rows compared."""

    @property
    def passed(self) -> bool:
        """Whether the split may be used."""
        return not self.failure

    def describe(self) -> str:
        """One line for people."""
        split = ",".join(map(str, self.boundaries))
        if self.passed:
            return f"split {split} ({self.architecture}): {self.rows} rows of logits equal, bit for bit"
        return f"split {split} ({self.architecture}) is not what the whole model is: {self.failure}"


def certify(
    path: str | os.PathLike[str], boundaries: Sequence[int], *, seed: int = 0, cache: Path | None = None
) -> Certificate:
    """Runs the model's miniature twin whole and split, or remembers that it did.

    `cache` is where certificates are kept, by default beside the slices. Raises ModelError and SplitError for
    what is refused from metadata, and CapacityError where the twin finds no room or no time to run in; what fails
    while running is in the certificate.
    """
    header = read_header(path)
    split = check_split(boundaries, architectures.trunk_layers(header))
    for start, stop in itertools.pairwise(split):
        architectures.check_range(header, start, stop)
    cache = cache or cache_directory().parent / "certificates"
    remembered = cache / f"{_key(header, split, seed)}.json"
    try:
        return _from_json(json.loads(remembered.read_text()))
    except (OSError, ValueError, KeyError, TypeError):
        pass  # not there, or written by another version: certify again
    certificate = _in_child(header, split, seed)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        write_whole(remembered, json.dumps(attrs.asdict(certificate)))
    except OSError:
        pass  # not remembered, and so done again next time
    return certificate


def ensure_certified(path: str | os.PathLike[str], boundaries: Sequence[int]) -> Certificate | None:
    """Certifies a split unless the architecture is one that this project's tests cover (None then).

    Raises ModelError when the split fails, and what `certify` raises.
    """
    header = read_header(path)
    if architectures.row(header).tested or len(boundaries) == 2:
        return None
    certificate = certify(path, boundaries)
    if not certificate.passed:
        raise ModelError(f"{Path(path).name}: {certificate.describe()}")
    return certificate


def _key(header: Header, boundaries: Boundaries, seed: int) -> str:
    import llama_cpp

    # With the library's own name, since two builds of one version may differ.
    library = Path(llama_cpp.__file__).parent / "lib"
    builds = sorted(f"{entry.name} {entry.stat().st_size}" for entry in library.iterdir() if entry.is_file())
    parts = (header.digest, boundaries, seed, DECODES, FORMAT, llama_cpp.__version__, builds)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _from_json(content: dict[str, Any]) -> Certificate:
    return Certificate(**{**content, "boundaries": tuple(content["boundaries"])})


def _in_child(header: Header, boundaries: Boundaries, seed: int) -> Certificate:
    task = json.dumps({"path": str(header.path), "boundaries": boundaries, "seed": seed})
    command = [sys.executable, "-m", "meshpipe.llama.certify"]
    try:
        child = subprocess.run(command, input=task, capture_output=True, text=True, timeout=_DEADLINE)
    except subprocess.TimeoutExpired:
        raise CapacityError(
            f"{header.path.name} is not certified: its miniature twin ran longer than {_DEADLINE:.0f} s; try again "
            "while this machine is less busy"
        ) from None
    if child.returncode == _NO_ROOM:
        raise CapacityError(f"{header.path.name} is not certified: {child.stderr.strip()}")
    if child.returncode == 0:
        return _from_json(json.loads(child.stdout.splitlines()[-1]))
    # An abort prints its reason first and a stack trace after it.
    lines = [line for line in child.stderr.splitlines() if line.strip()]
    reason = next(
        (line for line in lines if "GGML_ASSERT" in line or "GGML_ABORT" in line), (lines or [""])[0]
    )
    return Certificate(
        header.architecture,
        boundaries,
        f"its miniature twin ended llama.cpp with exit status {child.returncode}: {reason.strip()[:300]}",
    )


def _run_twin(header: Header, boundaries: Boundaries, seed: int, directory: Path) -> Certificate:
    """What the child does: writes the twin, runs it whole and split, and finds where they part."""
    from meshpipe.llama.twin import write_twin

    arch, layers = header.architecture, boundaries[-1]
    twin = directory / "twin.gguf"
    write_twin(header, twin, seed)
    stages = [
        slice_model(twin, start, stop, cache=directory) for start, stop in itertools.pairwise(boundaries)
    ]
    (whole,) = _rows([twin], seed)
    got = _rows(stages, seed)
    count = len(got[-1])
    if not np.isfinite(whole).all() or np.ptp(whole, axis=0).min() == 0:
        return Certificate(arch, boundaries, "its miniature twin gives no usable logits", rows=count)
    if np.array_equal(whole, got[-1]):
        return Certificate(arch, boundaries, rows=count)
    # The whole twin's rows at a cut: a copy that declares to end there.
    tapped = directory / "tapped.gguf"
    for number, cut in enumerate(boundaries[1:]):
        expected = whole
        if cut < layers:
            write_twin(header, tapped, seed, tapped=cut)
            (expected,) = _rows([tapped], seed)
        if not np.array_equal(expected, got[number]):
            break
    layer = _first_layer(header, boundaries[: number + 1], cut, seed, directory)
    place = f"the rows after layer {cut - 1}" if cut < layers else "the logits"
    where = f"; the first layer to differ is {layer}" if layer is not None else ""
    return Certificate(arch, boundaries, f"{place} differ{where}", cut, layer, count)


def _first_layer(header: Header, before: Boundaries, cut: int, seed: int, directory: Path) -> int | None:
    """The first layer of the stage `[before[-1], cut)` that gives other rows than in the whole model.

    None if all layers agree (then the head differs), or if their slices cannot be cut so short.
    """
    from meshpipe.llama.twin import write_twin

    twin, tapped = directory / "twin.gguf", directory / "tapped.gguf"
    earlier = [slice_model(twin, a, b, cache=directory) for a, b in itertools.pairwise(before)]
    for stop in range(before[-1] + 1, min(cut + 1, architectures.trunk_layers(header))):
        try:
            architectures.check_stage(header, before[-1], stop)
        except SplitError:
            continue
        write_twin(header, tapped, seed, tapped=stop)
        (expected,) = _rows([tapped], seed)
        got = _rows([*earlier, slice_model(twin, before[-1], stop, cache=directory)], seed)[-1]
        if not np.array_equal(expected, got):
            return stop - 1
    return None


def _rows(stages: Sequence[Path], seed: int) -> list[np.ndarray[Any, Any]]:
    """What leaves each stage of a chain over all `DECODES`: activations, and logits from the last."""
    from meshpipe.llama.decodes import Span
    from meshpipe.llama.engine import StageEngine
    from meshpipe.llama.twin import VOCABULARY

    rng = np.random.default_rng(seed)
    engines = [StageEngine(path, context=128) for path in stages]
    left: list[list[Any]] = [[] for _ in stages]

    def run(start: int, tokens: list[int], keep: bool) -> None:
        rows = None
        for engine, collected in zip(engines, left, strict=True):
            given = tokens if rows is None else ()
            (rows,) = engine.run([Span(0, start, given, rows, wanted=len(tokens))])
            if keep:
                collected.append(rows)

    start = 0
    try:
        for width, trims in DECODES:
            tokens = [int(token) for token in rng.integers(0, VOCABULARY, width + 3)]
            if trims:
                run(start, tokens[width:], keep=False)
            run(start, tokens[:width], keep=True)
            start += width
    finally:
        for engine in engines:
            engine.close()
    return [np.concatenate(collected) for collected in left]


def _main() -> None:
    task = json.load(sys.stdin)
    boundaries = tuple(task["boundaries"])
    header = read_header(task["path"])
    try:
        with tempfile.TemporaryDirectory(prefix="meshpipe-twin-") as directory:
            certificate = _run_twin(header, boundaries, task["seed"], Path(directory))
    except CapacityError as error:
        sys.exit(_no_room(str(error)))
    except OSError as error:
        sys.exit(
            _no_room(
                f"its miniature twin could not be written ({error}): free space, or set TMPDIR to a larger disk"
            )
        )
    except MeshpipeError as error:
        certificate = Certificate(header.architecture, boundaries, str(error))
    print(json.dumps(attrs.asdict(certificate)))


def _no_room(reason: str) -> int:
    print(reason, file=sys.stderr)
    return _NO_ROOM


if __name__ == "__main__":
    _main()
