"""A pick depends on the row, the tokens before it and the seed, and on nothing else."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshpipe.errors import UsageError
from meshpipe.llama.sampling import Sampler, position_seed
from meshpipe.messages import Sampling

SIZE = 500
ROWS = np.random.default_rng(3).normal(0, 3, (40, SIZE)).astype(np.float32)
TOKENS = [int(t) for t in np.random.default_rng(4).integers(0, SIZE, 100)]


def picks(sampling: Sampling, order: list[int]) -> dict[int, int]:
    with Sampler(sampling, SIZE) as sampler:
        return {at: sampler.pick(ROWS[at], TOKENS, at + 20) for at in order}


def test_greedy_is_the_first_of_the_largest() -> None:
    row = np.zeros(SIZE, np.float32)
    row[[7, 9]] = 5.0
    with Sampler(Sampling(), SIZE) as sampler:
        assert sampler.pick(row, TOKENS, 3) == 7


@given(
    order=st.permutations(range(40)),
    temperature=st.sampled_from([0.0, 0.5, 1.5]),
    seed=st.integers(0, 2**63 - 1),
    penalty=st.sampled_from([1.0, 1.3]),
)
def test_order_of_picking_does_not_matter(
    order: list[int], temperature: float, seed: int, penalty: float
) -> None:
    sampling = Sampling(temperature=temperature, seed=seed, repeat_penalty=penalty)
    assert picks(sampling, order) == picks(sampling, list(range(40)))


def test_positions_have_streams_of_their_own() -> None:
    row = np.zeros(SIZE, np.float32)
    sampling = Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=1)
    with Sampler(sampling, SIZE) as sampler:
        drawn = [sampler.pick(row, TOKENS, at) for at in range(20, 100)]
    assert len(set(drawn)) > 50
    with Sampler(Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=2), SIZE) as sampler:
        assert [sampler.pick(row, TOKENS, at) for at in range(20, 100)] != drawn


def test_draws_follow_the_distribution() -> None:
    """Three tokens of known odds, 2,000 positions: within four standard deviations."""
    row = np.full(SIZE, -1e9, np.float32)
    row[[1, 2, 3]] = np.log([0.5, 0.3, 0.2])
    with Sampler(Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0), SIZE) as sampler:
        counts = Counter(sampler.pick(row, TOKENS * 30, at) for at in range(2000))
    for token, odds in ((1, 0.5), (2, 0.3), (3, 0.2)):
        assert abs(counts[token] - 2000 * odds) < 4 * (2000 * odds * (1 - odds)) ** 0.5
    assert sum(counts.values()) == 2000


def test_penalties_see_only_what_comes_before() -> None:
    row = np.zeros(SIZE, np.float32)
    row[5], row[6] = 2.0, 1.9
    with Sampler(Sampling(repeat_penalty=2.0, penalty_last_n=4), SIZE) as sampler:
        assert sampler.pick(row, [1, 2, 3, 4, 5], 4) == 5  # position 4 itself is not looked at
        assert sampler.pick(row, [1, 2, 3, 5, 9], 4) == 6
        assert sampler.pick(row, [5, 1, 2, 3, 4, 9], 5) == 5  # too long ago
        assert sampler.pick(row, [1, 2, 3, 4, 5], 4) == 5  # and nothing is remembered


def test_truncation() -> None:
    with Sampler(Sampling(temperature=5.0, top_k=1), SIZE) as sampler:
        assert [sampler.pick(row, TOKENS, 30) for row in ROWS] == [int(row.argmax()) for row in ROWS]


def test_seeds() -> None:
    seeds = {position_seed(seed, position) for seed in range(50) for position in range(50)}
    assert len(seeds) == 2500
    assert all(0 <= seed < 0xFFFFFFFF for seed in seeds)


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", -0.1), ("top_p", 1.1), ("min_p", -1.0), ("repeat_penalty", 0.0), ("seed", -1),
     ("presence_penalty", 3.0), ("penalty_last_n", -1), ("temperature", float("nan"))],
)  # fmt: skip
def test_settings_out_of_bounds_are_named(name: str, value: float) -> None:
    with pytest.raises(UsageError, match=f"{name} must be from"):
        Sampler(Sampling(**{name: value}), SIZE)
