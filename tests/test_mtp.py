"""Native MTP: drafts of the last stage are those of an unsplit model whose drafter computes everything anew."""

from __future__ import annotations

import itertools
from contextlib import closing
from pathlib import Path

import gguf
import numpy as np
import pytest
import reference
import tiny

from meshpipe.errors import EngineError, ModelError
from meshpipe.llama import mtp as mtp_module
from meshpipe.llama.decodes import Span
from meshpipe.llama.engine import StageEngine
from meshpipe.llama.gguf import read_header
from meshpipe.llama.mtp import Mtp, load_mtp
from meshpipe.llama.slicing import slice_model, slice_nextn
from meshpipe.messages import Sampling, Window
from meshpipe.pipeline import runner as runner_module
from meshpipe.pipeline.runner import Job, LlamaRunner, Picks

DRAFTS = 4
SPLIT = (0, 2, 4, 6)

# With the number of their NextN heads.
CASES = [
    ("mimo2", 1),
    ("hy_v3", 2),
    ("glm4moe", 1),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in [("mimo2", 3), ("hy_v3", 1), ("deepseek2", 1), ("step35", 2), ("cohere2moe", 1)]
    ),
]


class Split:
    """A chain of engines, the last of which drafts; rows go through by hand."""

    def __init__(self, path: Path, boundaries: tuple[int, ...]) -> None:
        cache = path.parent / "slices"
        slices = [slice_model(path, a, b, mtp=True, cache=cache) for a, b in itertools.pairwise(boundaries)]
        self.engines = [StageEngine(path, context=200, mtp=True) for path in slices]
        last = self.engines[-1].mtp
        assert last is not None
        self.mtp: Mtp = last
        assert all(engine.mtp is None for engine in self.engines[:-1])
        self.tokens: list[int] = []

    def run(self, start: int, tokens: list[int], *, keep: bool = True) -> reference.Floats:
        """A window at `start`; its logits."""
        rows = None
        self.tokens[start:] = tokens
        for engine in self.engines:
            given = tokens if rows is None else ()
            hidden = keep and engine is self.engines[-1]
            (rows,) = engine.run([Span(0, start, given, rows, wanted=len(tokens), hidden=hidden)])
        self.mtp.trim(0, start)
        if keep:
            (hidden_rows,) = self.engines[-1].hidden_rows()
            assert hidden_rows is not None
            self.mtp.keep(0, start, hidden_rows)
        assert rows is not None
        return rows

    def close(self) -> None:
        for engine in self.engines:
            engine.close()


def write(arch: str, directory: Path, nextn: int = 1) -> Path:
    """Quantized, so that how rows are grouped into decodes changes no bits."""
    keys = tiny.metadata(arch, nextn=nextn)
    return tiny.write(directory / f"{arch}.gguf", arch, keys, quantization=gguf.GGMLQuantizationType.Q8_0)


def assert_same(got: list[tuple[int, float]], expected: list[tuple[int, float]]) -> None:
    assert [token for token, _ in got] == [token for token, _ in expected]
    np.testing.assert_allclose([p for _, p in got], [p for _, p in expected], rtol=1e-6)


@pytest.mark.parametrize(("arch", "heads"), CASES)
def test_drafts_through_divergences_and_trims(arch: str, heads: int, tmp_path: Path) -> None:
    path = write(arch, tmp_path, heads)
    with closing(Split(path, SPLIT)) as split, reference.Raw(path, context=256, mtp=True) as raw:
        start = 0
        # (rows of the window, rows of it that turn out right); nobody asks for drafts after some.
        windows = [(17, 17), (1, 1), (4, 2), (5, 1), (3, 3), (2, 1), (63, 63)]
        for number, (width, right) in enumerate(windows):
            split.run(start, tiny.tokens(width, seed=number))
            start += right
            split.mtp.trim(0, start)
            line = [*split.tokens[:start], tiny.tokens(8, seed=99)[number]]
            if number not in (1, 4):
                assert_same(split.mtp.draft(0, line, DRAFTS), raw.mtp_drafts(line, DRAFTS, heads))


def test_a_draft_can_be_had_again_with_another_token_or_longer(tmp_path: Path) -> None:
    path = write("mimo2", tmp_path)
    with closing(Split(path, (0, 6))) as split, reference.Raw(path, context=256, mtp=True) as raw:
        split.run(0, tiny.tokens(9))
        for token in (5, 6, 5):
            line = [*split.tokens, token]
            expected = raw.mtp_drafts(line, 6)
            assert_same(split.mtp.draft(0, line, 2), expected[:2])
            assert_same(split.mtp.draft(0, line, 6), expected)


@pytest.mark.parametrize(("arch", "heads"), [("mimo2", 1), ("hy_v3", 2)])
def test_a_draft_goes_along_a_line_whose_rows_are_not_known(arch: str, heads: int, tmp_path: Path) -> None:
    """As if its tokens had been its own; and again from the last known row once enough of them have become known."""
    path = write(arch, tmp_path, heads)
    with closing(Split(path, (0, 6))) as split, reference.Raw(path, context=256, mtp=True) as raw:
        split.run(0, tiny.tokens(9))
        line = [*split.tokens, 5]
        alone = raw.mtp_drafts(line, 12, heads)
        for known in (2, 1, 5, 8):  # told tokens that it would have drafted: back and forth
            told = [token for token, _ in alone[:known]]
            assert_same(split.mtp.draft(0, [*line, *told], 3), alone[known : known + 3])
        others = tiny.tokens(6, seed=5)
        assert split.mtp.draft(0, [*line, *others], 2, until=0.0) == [], "one step of seven"
        assert len(split.mtp.draft(0, [*line, *others], 2)) == 2
        # Now all but two are known, and these are run again from there.
        split.run(9, [5, *others[:4]])
        again = split.mtp.draft(0, [*line, *others], 2)
        with load_mtp(path, context=200) as fresh:
            split.run(0, split.tokens)
            (rows,) = split.engines[-1].hidden_rows()
            assert rows is not None
            fresh.keep(0, 0, rows)
            assert_same(fresh.draft(0, [*line, *others], 2), again)
        split.mtp.trim(0, 9)
        assert_same(split.mtp.draft(0, line, 3), alone[:3])


def test_a_chain_ends_when_it_has_become_improbable(tmp_path: Path) -> None:
    path = write("mimo2", tmp_path)
    with closing(Split(path, (0, 6))) as split:
        split.run(0, tiny.tokens(9))
        line = [*split.tokens, 1]
        every = split.mtp.draft(0, line, 4)
        sure = np.cumprod([p for _, p in every])
        assert_same(split.mtp.draft(0, line, 4, least=float(sure[2]) * 1.01), every[:2])
        assert split.mtp.draft(0, line, 4, least=1.0) == []


def test_missing_rows_are_a_gap_after_which_the_cache_begins_again(tmp_path: Path) -> None:
    """Nothing was kept of positions 9 to 11: what comes after them drafts from the later rows alone."""
    path = write("mimo2", tmp_path)
    with closing(Split(path, (0, 6))) as split:
        split.run(0, tiny.tokens(9))
        before = split.mtp.draft(0, [*split.tokens, 1], DRAFTS)
        split.run(9, tiny.tokens(3, seed=1), keep=False)
        assert len(split.mtp.draft(0, [*split.tokens, 1], DRAFTS)) == DRAFTS, "along those three"
        split.run(12, tiny.tokens(4, seed=2))
        line = [*split.tokens, 1]
        late = split.mtp.draft(0, line, DRAFTS)
        assert len(late) == DRAFTS
        # The same rows without a past, at the same positions.
        (rows,) = split.engines[-1].hidden_rows()
        assert rows is not None
        split.mtp.trim(0, 0)
        split.mtp.keep(0, 12, rows)
        assert_same(split.mtp.draft(0, line, DRAFTS), late)
        # Back before the gap, and everything is known again.
        split.run(0, split.tokens[:9])
        assert_same(split.mtp.draft(0, [*split.tokens, 1], DRAFTS), before)


def test_feeding_may_lag_behind_by_as_many_rows_as_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mtp_module, "KEPT", 20)
    path = write("mimo2", tmp_path)
    with closing(Split(path, (0, 6))) as split, reference.Raw(path, context=256, mtp=True) as raw:
        split.run(0, tiny.tokens(9))
        split.run(9, tiny.tokens(11, seed=1))
        line = [*split.tokens, 3]
        assert_same(split.mtp.draft(0, line, DRAFTS), raw.mtp_drafts(line, DRAFTS))
        for start in range(20, 60, 8):
            split.run(start, tiny.tokens(8, seed=start))
            if start < 44:
                split.mtp.feed(0, split.tokens)
                assert split.mtp.length(0) == start + 8
        line = [*split.tokens, 3]
        assert_same(split.mtp.draft(0, line, DRAFTS), raw.mtp_drafts(line, DRAFTS))
        split.run(60, tiny.tokens(21, seed=60))  # more than is kept, and nothing was fed
        assert len(split.mtp.draft(0, [*split.tokens, 3], DRAFTS)) == DRAFTS


def test_a_cache_that_lags_far_behind_begins_again_with_the_last_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mtp_module, "AGAIN", 8)
    path = write("mimo2", tmp_path)
    with closing(Split(path, (0, 6))) as split:
        split.run(0, tiny.tokens(20))
        split.mtp.draft(0, [*split.tokens, 3], 1)
        assert split.mtp._lanes[0].base == 1, "an empty one takes all there is"
        split.run(20, tiny.tokens(9, seed=1))
        late = split.mtp.draft(0, [*split.tokens, 3], DRAFTS)
        assert split.mtp._lanes[0].base == 22
        (rows,) = split.engines[-1].hidden_rows()
        assert rows is not None
        with load_mtp(path, context=200) as fresh:
            fresh.keep(0, 21, rows[1:])
            assert_same(fresh.draft(0, [*split.tokens, 3], DRAFTS), late)


def test_lanes_do_not_disturb_each_other(tmp_path: Path) -> None:
    path = slice_model(write("mimo2", tmp_path), 0, 6, mtp=True, cache=tmp_path / "slices")
    with StageEngine(path, lanes=3, context=100, mtp=True) as engine:
        assert engine.mtp is not None
        lines = {lane: tiny.tokens(10 + lane, seed=lane) for lane in range(3)}

        def draft(lane: int) -> list[tuple[int, float]]:
            assert engine.mtp is not None
            return engine.mtp.draft(lane, [*lines[lane], 7], DRAFTS)

        alone = {}
        for together in (False, True):
            for group in [[0, 1, 2]] if together else [[0], [1], [2]]:
                engine.run([Span(lane, 0, lines[lane], wanted=1, hidden=True) for lane in group])
                for lane, rows in zip(group, engine.hidden_rows(), strict=True):
                    assert rows is not None
                    engine.mtp.keep(lane, 0, rows)
            for lane in range(3):
                assert_same(draft(lane), alone.setdefault(lane, draft(lane)))


@pytest.mark.parametrize(("arch", "heads"), CASES)
def test_a_file_of_the_nextn_layers_alone_drafts_the_same(arch: str, heads: int, tmp_path: Path) -> None:
    path = write(arch, tmp_path, heads)
    alone = slice_nextn(path, cache=tmp_path / "slices")
    assert not any(name.startswith("blk.0.") for name in read_header(alone).tensors)
    assert alone.stat().st_size < path.stat().st_size
    with closing(Split(path, SPLIT)) as split, load_mtp(alone, context=200) as far:
        last = slice_model(path, 4, 6, mtp=True, cache=tmp_path / "slices")
        assert slice_nextn(last, cache=tmp_path / "slices") == slice_nextn(alone) == alone
        split.run(0, tiny.tokens(12))
        (rows,) = split.engines[-1].hidden_rows()
        assert rows is not None
        far.keep(0, 0, rows)
        line = [*split.tokens, 3]
        assert far.draft(0, line, DRAFTS) == split.mtp.draft(0, line, DRAFTS)


def test_without_nextn_layers_there_is_nothing_to_draft_with(tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "m.gguf", "llama")
    for ask in (slice_nextn, load_mtp):
        with pytest.raises(ModelError, match=r"no NextN layers with which llama\.cpp could draft"):
            ask(path)
    with StageEngine(path, context=100, mtp=True) as engine:
        assert engine.mtp is None
        with pytest.raises(EngineError, match="give no hidden rows"):
            engine.run([Span(0, 0, [1, 2], hidden=True)])
    # llama.cpp's graph for this one takes a single NextN layer, and would abort.
    two = write("glm4moe", tmp_path, 2)
    with pytest.raises(ModelError, match="no NextN layers"):
        load_mtp(two)


def test_hidden_rows_change_no_logits(tmp_path: Path) -> None:
    path = write("mimo2", tmp_path)
    with StageEngine(path, context=100) as engine:
        plain = [engine.run([Span(0, 0, tiny.tokens(30), wanted=wanted)])[0] for wanted in (1, 3, 30)]
        hidden = [
            engine.run([Span(0, 0, tiny.tokens(30), wanted=wanted, hidden=True)])[0] for wanted in (1, 3, 30)
        ]
        for one, other in zip(plain, hidden, strict=True):
            np.testing.assert_array_equal(one, other)


async def test_replies_and_progress_carry_the_hidden_rows_that_were_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And drafts are those of the lane's tokens up to the pick, of windows that share a decode too."""
    monkeypatch.setattr(runner_module, "LEAST_DRAFT", 0.0)
    path = write("mimo2", tmp_path)
    tokens = tiny.tokens(12)
    with StageEngine(path, context=100) as engine:
        engine.run([Span(0, 0, tokens, wanted=1, hidden=True)])
        (every,) = engine.hidden_rows()
        assert every is not None
    whole = slice_model(path, 0, 6, mtp=True, cache=tmp_path / "slices")
    with StageEngine(whole, context=100, mtp=True) as engine, reference.Raw(path, 256, mtp=True) as raw:
        runner = LlamaRunner(engine)
        assert runner.descriptor.mtp == 1
        runner.open(0, Sampling())
        line: list[int] = []

        def job(start: int, given: list[int], wanted: int, follows: int | None = None) -> Job:
            line[start:] = given
            window = Window(1, 0, start, start, tuple(given), wanted, drafts=3)
            return Job(0, window, line, mtp=True, hidden_from=5, follows=follows)

        (first,) = await runner.run([job(0, tokens[:4], 0)])
        assert isinstance(first, Picks)
        assert first.hidden is not None
        assert (len(first.hidden), first.drafts) == (0, ())
        (second,) = await runner.run([job(4, tokens[4:], 1)])
        assert isinstance(second, Picks)
        assert second.hidden is not None
        np.testing.assert_array_equal(second.hidden, every[5:])
        pick = second.tokens[0]
        assert_same(list(second.drafts), raw.mtp_drafts([*tokens, pick], 3))
        # The window after it is right so far, and its own pick is not foreseen.
        wrong = (pick + 1) % tiny.VOCABULARY
        (third,) = await runner.run([job(12, [pick], 1)])
        assert isinstance(third, Picks)
        after = third.tokens[0]
        both = [job(12, [pick], 1, follows=after), job(13, [after, wrong], 2)]
        leading, ending = await runner.run(both)
        assert isinstance(leading, Picks)
        assert isinstance(ending, Picks)
        assert (leading.tokens, leading.drafts) == ((after,), ())
        confirmed = [*tokens, pick, after][: 13 + len(ending.tokens)]
        expected = raw.mtp_drafts(
            [*confirmed, *([wrong] if len(ending.tokens) > 1 else []), ending.tokens[-1]], 3
        )
        assert_same(list(ending.drafts), expected)
        runner.close(0)
