"""Options of strategy lambda: each value that cannot be honoured is refused with the way out."""

import pytest

from dglx_dist.errors import ConfigError
from dglx_dist.strategies.serverless.options import read_lambda_options


def test_what_is_given_and_what_is_not() -> None:
    found = read_lambda_options({"mode": "async", "staleness": 2, "switch_at": 1})
    assert (found.mode, found.staleness, found.switch_at) == ("async", 2, 1.0)
    policy = found.staleness_policy(4, 30)
    assert (policy.mode, policy.staleness, policy.first_epoch, policy.target) == ("async", 2, 4, 30)
    assert read_lambda_options({}).mode == "pipe"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mode": "fast"}, "mode='fast' must be 'no_pipe' or 'pipe' or 'async'"),
        ({"staleness": 1}, "add mode='async'"),
        ({"staleness": -1, "mode": "async"}, "staleness=-1 must be from 0"),
        ({"switch_at": 0.9}, "leave one out"),
        ({"switch_at": 1.5, "mode": "async"}, "accuracy from 0 to 1"),
        ({"initialise": "xavier"}, "no initialisation 'xavier'.*he_normal"),
        ({"intervals": 0}, "intervals=0 must be from 1"),
        ({"batch": 0}, "batch=0 must be from 1"),
        ({"parameter_servers": 0}, "parameter_servers=0 must be from 1"),
        ({"fusion": 1}, "must be of type bool"),
        ({"stale": 1}, "no option 'stale'"),
    ],
)
def test_what_cannot_be_honoured(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_lambda_options(given)
