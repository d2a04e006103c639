"""Splits: parsing, checking, and planning against brute force."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshpipe.errors import SplitError
from meshpipe.topology.split import check_split, even_split, parse_split


def test_parsing() -> None:
    assert parse_split("0,15,30") == (0, 15, 30)
    assert parse_split(" 0, 15 ,30") == (0, 15, 30)
    assert parse_split("3") == 3


@pytest.mark.parametrize("text", ["", "a", "0,b", "1.5", "0,,3", "0;3"])
def test_what_is_no_split(text: str) -> None:
    with pytest.raises(SplitError, match=r"0,15,30"):
        parse_split(text)


@pytest.mark.parametrize("text", ["0", "-2"])
def test_too_few_stages(text: str) -> None:
    with pytest.raises(SplitError, match="at least 1 stage"):
        parse_split(text)


@pytest.mark.parametrize(
    ("boundaries", "reason"),
    [
        ((0,), "should begin with 0 and end with 30"),
        ((), "should begin with 0"),
        ((0, 15), "end with 30"),
        ((1, 30), "begin with 0"),
        ((0, 31), "end with 30"),
        ((0, 20, 10, 30), "20 before 10"),
        ((0, 15, 15, 30), "15 before 15"),
        ((0, 0, 30), "0 before 0"),
        ((0, -5, 30), "0 before -5"),
        ((0, 40, 30), "40 before 30"),
    ],
)
def test_boundaries_that_do_not_divide_30_layers(boundaries: tuple[int, ...], reason: str) -> None:
    with pytest.raises(SplitError, match=reason):
        check_split(boundaries, 30)


@given(st.sets(st.integers(1, 99)))
def test_every_ascending_split_is_accepted(inner: set[int]) -> None:
    boundaries = (0, *sorted(inner), 100)
    assert check_split(boundaries, 100) == boundaries
    assert parse_split(",".join(map(str, boundaries))) == boundaries


def dearest(costs: list[int], tail: int, boundaries: tuple[int, ...]) -> int:
    stages = [sum(costs[a:b]) for a, b in itertools.pairwise(boundaries)]
    stages[-1] += tail
    return max(stages)


@given(
    costs=st.lists(st.integers(0, 20), min_size=1, max_size=9),
    tail=st.integers(0, 60),
    period=st.integers(1, 3),
    data=st.data(),
)
def test_no_split_is_more_even(costs: list[int], tail: int, period: int, data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(costs)))

    def allowed(start: int, stop: int) -> bool:
        return start % period == 0 and (stop % period == 0 or stop == len(costs))

    every = [
        (0, *inner, len(costs))
        for inner in itertools.combinations(range(1, len(costs)), stages - 1)
        if all(number % period == 0 for number in inner)
    ]
    if not every:
        with pytest.raises(SplitError, match=f"cannot be split into {stages} stages"):
            even_split(costs, stages, tail=tail, allowed=allowed)
        return
    boundaries = even_split(costs, stages, tail=tail, allowed=allowed)
    assert boundaries in every
    assert dearest(costs, tail, boundaries) == min(dearest(costs, tail, other) for other in every)


def test_equal_layers_are_split_evenly() -> None:
    assert even_split([1.0] * 30, 2) == (0, 15, 30)
    assert even_split([1.0] * 30, 6) == (0, 5, 10, 15, 20, 25, 30)
    assert even_split([1.0] * 30, 2, tail=10.0) == (0, 20, 30)


@pytest.mark.parametrize("stages", [0, 31, -1])
def test_more_stages_than_layers(stages: int) -> None:
    with pytest.raises(SplitError, match="1 to 30 stages"):
        even_split([1.0] * 30, stages)
