"""What the policies reach on a simulated pipe, against arithmetic and against not speculating."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshpipe.speculation.ngram import NgramConfig, NgramProposer
from meshpipe.speculation.policy import CostCurve, Pace
from meshpipe.speculation.simulate import Oracle, Outcome, Topology, simulate

# Measured on one thread of a small machine: half a small model each, the second with the head.
FIRST = CostCurve(((1, 0.0043), (2, 0.0080), (4, 0.0153), (8, 0.0280), (16, 0.0528)))
LAST = CostCurve(((1, 0.0090), (2, 0.0141), (4, 0.0219), (8, 0.0367), (16, 0.0660)))
PROMPT = 32


def pipe(stages: int, delay: float) -> Topology:
    return Topology((FIRST,) * (stages - 1) + (LAST,), (delay,) * stages)


def novel(length: int, seed: int = 1) -> list[int]:
    """Even numbers, so that a lie (the number with its last bit turned) is no token of the text."""
    rng = random.Random(seed)
    return [2 * rng.randrange(50_000) for _ in range(length)]


def serial(topology: Topology, text: list[int]) -> Outcome:
    """No speculation."""
    return simulate(topology, text, PROMPT, Pace(topology.pipe(), width=1, depth=1))


def run(topology: Topology, text: list[int], proposer: NgramProposer) -> Outcome:
    return simulate(topology, text, PROMPT, Pace(topology.pipe()), proposer)


PLACES = [(1, 0.0), (2, 0.0), (2, 0.025), (2, 0.1), (3, 0.05), (4, 0.0), (4, 0.1)]


@pytest.mark.parametrize(("stages", "delay"), PLACES)
def test_without_speculation_a_token_costs_a_round_trip(stages: int, delay: float) -> None:
    topology = pipe(stages, delay)
    assert serial(topology, novel(80)).rate() == pytest.approx(1 / topology.pipe().latency(1), rel=1e-6)


@pytest.mark.parametrize(("stages", "delay"), [(2, 0.1), (3, 0.05), (4, 0.0)])
@pytest.mark.parametrize("width", [1, 3, 8, 16])
@pytest.mark.parametrize("depth", [1, 2, 5, 30])
def test_predictable_text_at_fixed_width_and_depth(stages: int, delay: float, width: int, depth: int) -> None:
    """min(depth × width / latency, width / slowest stage), within 3%."""
    topology = pipe(stages, delay)
    cost = topology.pipe()
    rounds = max(4, 60 // depth)
    text = novel(PROMPT + depth * width * (rounds + 2))
    pace = Pace(cost, width=width, depth=depth)
    outcome = simulate(topology, text, PROMPT, pace, Oracle(text))
    expected = min(depth * width / topology.pipe().latency(width), width / topology.pipe().slowest(width))
    # Whole round trips, from the second on: the first one fills the pipe.
    first = depth * width
    assert outcome.rate(first, first + rounds * depth * width) == pytest.approx(expected, rel=0.03)
    assert outcome.stale_rows == 0


@pytest.mark.parametrize(("stages", "delay"), PLACES)
def test_predictable_text_at_automatic_width_and_depth(stages: int, delay: float) -> None:
    """As fast as the slowest stage is at its best width, within 3%."""
    topology = pipe(stages, delay)
    text = novel(1_500)
    best = max(width / topology.pipe().slowest(width) for width in range(1, 17))
    outcome = run(topology, text, Oracle(text))
    assert outcome.rate(300) == pytest.approx(best, rel=0.03)


@pytest.mark.parametrize(("stages", "delay"), PLACES)
@pytest.mark.parametrize("alphabet", [4, 40, 5_000])
def test_unpredictable_text_costs_nothing_over_not_speculating(
    stages: int, delay: float, alphabet: int
) -> None:
    """Random tokens: the n-gram proposer finds coincidences (many, in a small alphabet); at most 2%."""
    rng = random.Random(alphabet)
    topology = pipe(stages, delay)
    text = [rng.randrange(alphabet) for _ in range(300)]
    outcome = run(topology, text, NgramProposer(NgramConfig(min_match=1)))
    assert outcome.rate() >= 0.98 * serial(topology, text).rate()


@pytest.mark.parametrize(("stages", "delay"), PLACES)
def test_a_storm_of_confident_wrong_proposals_costs_at_most_2_percent(stages: int, delay: float) -> None:
    topology = pipe(stages, delay)
    text = novel(600)
    long = run(topology, text, Oracle(text, lie=lambda position: True))
    assert long.rate() >= 0.98 * serial(topology, text).rate()
    # After it has learnt, it sends nothing in vain: twice the storm makes no more stale rows.
    short = run(topology, text[:300], Oracle(text[:300], lie=lambda position: True))
    assert long.stale_rows == short.stale_rows < 250


def after(position: int) -> Callable[[int], bool]:
    return lambda at: at < position


@pytest.mark.parametrize(("stages", "delay"), PLACES)
def test_after_a_storm_speed_comes_back(stages: int, delay: float) -> None:
    topology = pipe(stages, delay)
    text = novel(1_200)
    calm = run(topology, text, Oracle(text))
    stormy = run(topology, text, Oracle(text, lie=after(300)))
    assert stormy.rate(500) >= 0.9 * calm.rate(500)


@pytest.mark.parametrize("wrong", [0.05, 0.3, 0.9])
def test_partly_wrong_proposals_gain_and_never_lose(wrong: float) -> None:
    rng = random.Random(5)
    text = novel(300)
    lies = [rng.random() < wrong for _ in text]
    for stages, delay in ((1, 0.0), (2, 0.0), (2, 0.1), (3, 0.05)):
        topology = pipe(stages, delay)
        outcome = run(topology, text, Oracle(text, lie=lies.__getitem__))
        base = serial(topology, text).rate()
        assert outcome.rate() >= 0.98 * base
        if delay and wrong < 0.5:
            assert outcome.rate() >= 1.8 * base


def test_text_that_repeats_itself_is_found_by_the_ngram_proposer() -> None:
    topology = pipe(2, 0.1)
    passage = novel(200)
    text = passage * 4
    outcome = simulate(topology, text, 200, Pace(topology.pipe()), NgramProposer())
    assert outcome.rate() >= 15 * serial(topology, text).rate()


@settings(max_examples=20, deadline=None)
@given(
    st.integers(1, 4),
    st.sampled_from([0.0, 0.003, 0.02, 0.1]),
    st.integers(2, 6),
    st.integers(0, 10_000),
    st.sampled_from(["auto", 1, 2, 7]),
    st.sampled_from(["auto", 1, 3, 20]),
)
def test_any_session_ends_and_is_deterministic(
    stages: int, delay: float, alphabet: int, seed: int, width: int, depth: int
) -> None:
    """No deadlock and no window above a stage's cache: `simulate` raises at either."""
    rng = random.Random(seed)
    topology = pipe(stages, delay)
    text = [rng.randrange(alphabet) for _ in range(90)]

    def once() -> Outcome:
        pace = Pace(topology.pipe(), width=width, depth=depth)  # type: ignore[arg-type]
        return simulate(topology, text, 20, pace, NgramProposer(NgramConfig(min_match=1)))

    outcome = once()
    assert len(outcome.times) == 70
    assert list(outcome.times) == sorted(outcome.times)
    assert outcome == once()


def test_a_topology_needs_a_link_for_each_stage() -> None:
    with pytest.raises(ValueError, match="as many links"):
        Topology((FIRST, LAST), (0.1,))
