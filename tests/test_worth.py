"""Whether a proposer that runs ahead pays: by distance, acceptance and cost, and again after a rest."""

from __future__ import annotations

import pytest
from simulated import COST

from meshpipe.speculation.drafting import RESTS, TRIAL
from meshpipe.speculation.policy import CostCurve, Pipe
from meshpipe.speculation.worth import Worth


def worth(link: float, cost: float, right: float) -> Worth:
    """After 200 drafts, of which that share were right."""
    made = Worth(Pipe((CostCurve(COST),) * 2, link), cost)
    for number in range(200):
        made.acceptance.judge(number * 37 % 100 < 100 * right)
    return made


@pytest.mark.parametrize(
    ("link", "cost", "right", "pays"),
    [
        (0.2, 0.005, 0.3, True),
        (0.0, 0.005, 0.3, False),
        (0.0, 0.001, 1.0, True),
        (0.2, 0.03, 0.6, True),
        (0.2, 0.5, 1.0, False),
        (0.2, 0.005, 0.0, False),
    ],
)
def test_it_pays_over_distance_and_where_it_is_cheap(
    link: float, cost: float, right: float, pays: bool
) -> None:
    made = worth(link, cost, right)
    made.committed(-100_000)  # no trial is due
    assert made.pays() == pays


def test_a_full_pipe_has_no_use_for_drafts() -> None:
    assert worth(0.2, 0.005, 0.5).pays(sessions=1)
    full = worth(0.2, 0.005, 0.5)
    full.committed(-100_000)
    assert not full.pays(sessions=64)


def test_what_did_not_pay_is_tried_again_and_less_often_each_time() -> None:
    near = worth(0.0, 0.004, 0.0)
    asked = []
    for _ in range(1500):
        asked.append(near.pays())
        if asked[-1]:
            near.drafted(1, 0.004)
            near.acceptance.judge(False)
        near.committed(1)
    trials = [at for at in range(1, len(asked)) if asked[at] and not asked[at - 1]]
    assert sum(asked) == TRIAL * (len(trials) + asked[0])
    gaps = [later - earlier for earlier, later in zip([0, *trials], trials, strict=False)]
    assert gaps == sorted(gaps)
    assert gaps[0] >= RESTS[0]
    for _ in range(8000):  # until the next trial finds it right
        if near.pays():
            near.drafted(1, 0.0001)
            near.acceptance.judge(True)
        near.committed(1)
    assert near.pays()


def test_a_prompt_that_was_caught_up_with_is_no_draft() -> None:
    far = Worth(Pipe((CostCurve(COST),) * 2, 0.2))
    far.drafted(1, 3.0)  # a long prompt, and one token
    assert far.pays()
    far.drafted(1, 0.005)
    far.drafted(1, 2.0)
    assert far.cost < 0.006
    assert far.pays()
