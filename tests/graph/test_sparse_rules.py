"""One step of each formula, worked out by hand; longer runs are compared with torch in test_optim.py."""

from __future__ import annotations

import numpy as np
import pytest

from dglx_dist.errors import ConfigError
from dglx_dist.graph.sparse_gradient import Gradient
from dglx_dist.graph.sparse_update import AdagradRule, AdamRule, SgdRule, Touched, UpdateRule

FIRST = {
    "sgd": [1.0 - 0.5 * 2.0],
    "adagrad": [1.0 - 0.5],
    "adam": [1.0 - 0.5],
    # The root of the second moment is 1, and 2 once corrected; an eps of 1 counts in full or by half.
    "adam, eps before": [1.0 - 0.5 / (1.0 + 1.0)],
    "adam, eps behind": [1.0 - 0.5 / (1.0 + 0.5)],
}
RULES = {
    "sgd": SgdRule(0.5),
    "adagrad": AdagradRule(0.5, 0.0),
    "adam": AdamRule(0.5, (0.5, 0.75), 0.0),
    "adam, eps before": AdamRule(0.5, (0.5, 0.75), 1.0),
    "adam, eps behind": AdamRule(0.5, (0.5, 0.75), 1.0, corrected=True),
}


@pytest.mark.parametrize("kind", RULES)
def test_a_first_step_of_gradient_2(kind: str) -> None:
    rule: UpdateRule = RULES[kind]
    weight = np.ones((3, 1))
    states = tuple(np.zeros((9, 1)) for _ in rule.state_names)
    # Row 2 of the weights goes with row 7 of the states, and its gradient is half of the second row.
    gradient = Gradient(np.array([[9.0], [4.0]]), np.array([1]), 0.5)
    at, touched = np.array([2]), np.array([7 if states else 2])
    rule.update(Touched(weight=weight, at=at, states=states, touched=touched, gradient=gradient), 1)
    assert weight[2] == pytest.approx(FIRST[kind])
    assert weight[:2].tolist() == [[1.0], [1.0]]
    assert [np.flatnonzero(state).tolist() for state in states] == [[7]] * len(states)


@pytest.mark.parametrize("lr", [-1.0, float("nan"), float("inf")])
def test_a_rate_is_checked_when_it_is_set(lr: float) -> None:
    rule = SgdRule(0.5)
    with pytest.raises(ConfigError, match="must be a number, at least 0"):
        rule.lr = lr
    assert rule.lr == 0.5


def test_settings_that_make_no_sense_are_named() -> None:
    with pytest.raises(ConfigError, match=r"eps=-1\.0 must be"):
        AdagradRule(0.5, -1.0)
    with pytest.raises(ConfigError, match=r"betas=\(0\.5, 1\.0\) must be two numbers"):
        AdamRule(0.5, (0.5, 1.0), 0.0)
