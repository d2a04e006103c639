"""Width and depth: cost curves, Little's law, and what is worth sending."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshpipe.errors import UsageError
from meshpipe.messages import Timing
from meshpipe.speculation.policy import AdaptiveWidth, CostCurve, Pace, Pipe, Verdict

FIRST = CostCurve(((1, 0.0043), (2, 0.0080), (4, 0.0153), (8, 0.0280), (16, 0.0528)))
LAST = CostCurve(((1, 0.0090), (2, 0.0141), (4, 0.0219), (8, 0.0367), (16, 0.0660)))


def far() -> Pipe:
    """Two stages, 100 ms apart."""
    return Pipe((FIRST, LAST), 0.2)


def survival(rate: float, length: int, first: float | None = None) -> list[float]:
    """Of a run of guesses that are each right with probability `rate`; after the input if first is 1."""
    start = rate if first is None else first
    return [start * rate**at for at in range(length)]


def fill(pace: Pace, sure: list[float]) -> list[int]:
    """Send windows until the pace says stop; their widths."""
    widths: list[int] = []
    while width := pace.next_width(sure):
        pace.sent(len(widths), sure[:width])
        widths.append(width)
        sure = sure[width:]
    return widths


def test_a_curve_is_exact_where_measured_and_linear_between_and_above() -> None:
    assert FIRST(1) == 0.0043
    assert FIRST(16) == 0.0528
    assert FIRST(3) == pytest.approx((0.0080 + 0.0153) / 2)
    assert FIRST(32) == pytest.approx(0.0528 + 2 * (0.0528 - 0.0280))
    assert CostCurve(((4, 0.02),))(8) == pytest.approx(0.04)
    assert CostCurve(((4, 0.02), (8, 0.03)))(1) == 0.02


@given(st.lists(st.tuples(st.integers(1, 9), st.floats(1e-4, 1e-2)), min_size=1, max_size=6))
def test_a_curve_that_was_measured_ascending_never_falls(steps: list[tuple[int, float]]) -> None:
    rows, seconds, points = 0, 0.0, []
    for more_rows, more_seconds in steps:
        rows, seconds = rows + more_rows, seconds + more_seconds
        points.append((rows, seconds))
    costs = [CostCurve(tuple(points))(rows) for rows in range(1, 80)]
    assert all(low <= high + 1e-12 for low, high in pairwise(costs))
    assert min(costs) > 0


@pytest.mark.parametrize("points", [(), ((0, 0.1),), ((2, 0.1), (2, 0.2)), ((4, 0.1), (2, 0.2)), ((1, 0.0),)])
def test_a_curve_that_cannot_be_is_refused(points: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(UsageError, match="cost curve"):
        CostCurve(points)


def test_depth_is_littles_law_and_some_slack() -> None:
    pipe = far()
    assert pipe.latency(16) == pytest.approx(0.2 + 0.0528 + 0.0660)
    assert pipe.slowest(16) == 0.0660
    assert pipe.depth(16) == math.ceil(0.3188 / 0.0660) + Pipe.SLACK
    assert pipe.depth(1) == math.ceil(0.2133 / 0.0090) + Pipe.SLACK
    assert Pipe((LAST,), 0.0).depth(8) == 1


def test_a_pipe_learns_its_links_and_its_stages_from_replies() -> None:
    pipe = far()
    for _ in range(200):
        timings = [Timing(0, 0.5, 2 * FIRST(4), 4), Timing(1, 0.1, LAST(4), 4)]
        pipe.observe(0.3 + 0.6 + 2 * FIRST(4) + LAST(4), timings)
    assert pipe.link == pytest.approx(0.3, rel=1e-3)
    assert pipe.services(8) == pytest.approx([2 * FIRST(8), LAST(8)], rel=1e-3)


def test_adaptive_width_shrinks_to_what_was_accepted_and_grows_by_doubling() -> None:
    width = AdaptiveWidth(16)
    assert width.limit == 16
    width.observe(3, rejected=True)
    assert width.limit == 3
    width.observe(3, rejected=False)
    assert width.limit == 6
    width.observe(0, rejected=False)  # nothing was guessed: nothing is learnt
    assert width.limit == 6
    width.observe(2, rejected=True)  # a run of 3 and 2
    assert width.limit == 5
    width.observe(0, rejected=True)
    assert width.limit == 1
    for limit in (2, 4, 8, 16, 16):
        width.observe(1, rejected=False)
        assert width.limit == limit


@given(st.lists(st.tuples(st.integers(0, 40), st.booleans())), st.integers(1, 64))
def test_adaptive_width_stays_within_1_and_the_maximum(seen: list[tuple[int, bool]], maximum: int) -> None:
    width = AdaptiveWidth(maximum)
    for accepted, rejected in seen:
        width.observe(accepted, rejected)
        assert 1 <= width.limit <= maximum


def test_sure_text_goes_out_at_full_depth_and_width_at_once() -> None:
    pace = Pace(far())
    widths = fill(pace, survival(0.999, 400, first=1.0))
    assert widths == [16] * far().depth(16)


def test_improbable_guesses_cost_no_wide_mandatory_window_and_little_else() -> None:
    pace = Pace(far())
    assert fill(pace, survival(0.02, 60, first=1.0)) == [1]
    # A coin's toss: nothing but the input in the first window, since every row would delay its news, and
    # some guesses behind it.
    widths = fill(Pace(far()), survival(0.5, 60, first=1.0))
    assert widths[0] == 1
    assert 2 <= sum(widths) <= 6


def test_without_links_and_stages_to_overlap_there_is_one_window_and_its_width_is_the_best_rate() -> None:
    pipe = Pipe((LAST,), 0.0)
    for rate in (0.3, 0.7, 0.9, 0.99):
        sure = survival(rate, 16, first=1.0)
        best = max(range(1, 17), key=lambda width, sure=sure: sum(sure[:width]) / LAST(width))  # type: ignore[misc]
        assert fill(Pace(pipe), sure) == [best]


def test_fixed_numbers_are_kept() -> None:
    assert fill(Pace(far(), width=4, depth=3), survival(0.5, 100, first=1.0)) == [4, 4, 4]
    assert fill(Pace(far(), width=1, depth=1), survival(0.9, 100, first=1.0)) == [1]
    assert fill(Pace(far(), width=8, depth=9), [1.0] * 10) == [8, 2]
    assert fill(Pace(far(), depth=2), survival(0.999, 400, first=1.0)) == [16, 16]
    assert fill(Pace(far(), max_depth=3), survival(0.999, 400, first=1.0)) == [16, 16, 16]


@given(st.floats(0, 1), st.integers(0, 80), st.floats(0, 1), st.booleans())
def test_the_mandatory_window_always_goes_if_there_is_a_token_and_never_more_than_there_are(
    rate: float, length: int, first: float, fixed: bool
) -> None:
    pace = Pace(far(), width=4 if fixed else "auto")
    sure = survival(rate, length, first)
    width = pace.next_width(sure)
    assert (1 if length else 0) <= width <= min(length, 16)


def test_little_is_sent_where_the_last_guesses_were_wrong_and_all_again_when_they_are_right() -> None:
    pace = Pace(far())
    sure = survival(0.999, 400, first=1.0)
    pace.retired(0, Verdict(0, rejected=True))
    pace.restart()
    widths = fill(pace, sure)
    assert max(widths) == 1  # narrow, but as deep as the latency has room for
    assert len(widths) == far().depth(1)
    for number in range(4):
        pace.retired(number, Verdict(1, rejected=False))
    assert fill(pace, sure)[0] == 16


def test_retiring_makes_room_for_as_much_work() -> None:
    pace = Pace(far())
    sure = survival(0.999, 400, first=1.0)
    depth = len(fill(pace, sure))
    assert pace.next_width(sure) == 0
    pace.retired(1, Verdict(32, rejected=False))
    assert pace.in_flight == depth - 2
    assert pace.next_width(sure) == 16
    pace.restart()
    assert pace.in_flight == 0


@pytest.mark.parametrize(
    "changes",
    [{"width": 0}, {"width": 65}, {"depth": 0}, {"depth": 257}, {"max_width": 0}, {"width": "wide"}],
)
def test_numbers_out_of_range_are_refused_with_the_range(changes: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=r"integer from 1 to (64|256)"):
        Pace(far(), **changes)  # type: ignore[arg-type]


def test_a_pipe_without_stages_is_refused() -> None:
    with pytest.raises(UsageError, match="a stage"):
        Pipe((), 0.1)
