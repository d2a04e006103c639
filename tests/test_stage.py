"""Which windows a stage runs together."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshpipe.llama.decodes import Piece, Span, group_rows, share_decode
from meshpipe.pipeline.merging import merged_count
from meshpipe.pipeline.stage import _Queued, companions
from meshpipe.speculation.policy import CostCurve

STEEP = CostCurve(((1, 0.009), (2, 0.014), (4, 0.022), (8, 0.037), (16, 0.066), (63, 0.25)))
FLAT = CostCurve(((1, 0.0100), (63, 0.0101)))


def queue(*windows: tuple[int, int]) -> list[_Queued]:
    """(lane, width) of queued windows, a session a lane."""
    sessions = {lane: SimpleNamespace(lane=lane) for lane, _ in windows}
    return [_Queued(sessions[lane], SimpleNamespace(width=width), 0.0) for lane, width in windows]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("windows", "expected"),
    [
        ([(3, 1)], [3]),
        ([(3, 1), (4, 1), (2, 1)], [3, 4, 2]),
        ([(3, 1), (5, 1), (4, 1)], [3, 4, 5]),
        ([(3, 1), (5, 1)], [3]),
        ([(3, 1), (4, 2), (2, 1)], [3, 2]),
        ([(3, 4), (4, 4), (3, 4), (3, 2)], [3, 3, 3]),
        ([(3, 4), (4, 4), (4, 4), (5, 4)], [3, 4, 5]),
    ],
)
def test_companions(windows: list[tuple[int, int]], expected: list[int]) -> None:
    family = companions(queue(*windows))
    assert [queued.session.lane for queued in family] == expected


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 3)), min_size=1, max_size=20))
def test_every_head_of_a_family_can_share_a_decode(windows: list[tuple[int, int]]) -> None:
    family = companions(queue(*windows))
    for count in range(1, len(family) + 1):
        head = family[:count]
        lanes = sorted({queued.session.lane for queued in head})
        assert len(lanes) == 1 or share_decode(lanes, [queued.window.width for queued in head])


def test_an_idle_stage_does_not_keep_clumps() -> None:
    """Halves leave earlier than all together, so that a clump spreads over the stages."""
    assert merged_count([1], STEEP, 63, backlogged=False) == 1
    assert 1 < merged_count([1] * 8, STEEP, 63, backlogged=False) < 8
    assert merged_count([1] * 8, FLAT, 63, backlogged=False) == 8  # rows that cost nothing
    assert merged_count([16] * 8, FLAT, 63, backlogged=False) == 3  # what fits
    assert merged_count([100], STEEP, 63, backlogged=False) == 1  # never nothing


def test_a_backlogged_stage_merges_as_far_as_it_gains() -> None:
    assert 8 <= merged_count([1] * 32, STEEP, 63, backlogged=True) < 32
    assert merged_count([16] * 3, STEEP, 63, backlogged=True) == 1  # nothing to gain
    assert merged_count([1] * 8, FLAT, 63, backlogged=True) == 8
    assert merged_count([16] * 8, FLAT, 63, backlogged=True) == 3
    assert merged_count([100, 1], STEEP, 63, backlogged=True) == 1


@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(1, 90)), min_size=1, max_size=12),
    st.integers(1, 63),
)
def test_decodes_cover_every_row_once_in_order(runs: list[tuple[int, int]], most: int) -> None:
    lengths: dict[int, int] = {}
    spans = []
    for lane, count in runs:
        start = lengths.get(lane, 0)
        spans.append(Span(lane, start, [0] * count))
        lengths[lane] = start + count
    done: dict[int, int] = dict.fromkeys(lengths, 0)
    covered: list[Piece] = []
    for decode in group_rows(spans, most):
        assert 0 < sum(piece.high - piece.low for piece in decode) <= most
        rows: dict[int, int] = {}
        for piece in decode:
            span = spans[piece.index]
            assert span.start + piece.low == done[span.lane]  # in order
            done[span.lane] += piece.high - piece.low
            rows[span.lane] = rows.get(span.lane, 0) + piece.high - piece.low
        assert share_decode(list(rows), list(rows.values()))
        covered += decode
    assert done == lengths
    assert sum(piece.high - piece.low for piece in covered) == sum(count for _, count in runs)
