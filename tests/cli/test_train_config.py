from typing import Any

import pytest

from dglx_dist.errors import ConfigError
from dglx_dist.graph.cache import POLICIES
from dglx_dist.training.config import TrainConfig


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"layers": 0, "fanouts": ()}, "--layers 0"),
        ({"model": "gat", "hidden": 10, "heads": 4}, "--heads 4 must be a divisor of --hidden 10"),
        ({"lr": float("inf")}, "--lr inf"),
        ({"timeout_s": float("inf")}, "--timeout inf"),
        ({"seed": -1}, "--seed -1"),
        ({"eval_every": -1}, "--eval-every -1"),
        ({"patience": 0}, "--patience 0"),
        ({"patience": 2, "eval_every": 0}, "--eval-every 0 must be at least 1 with --patience"),
        ({"depth": 0}, "--depth 0"),
        ({"model": "resgcn", "recompute": "all"}, "--recompute all must be none, exchange or keep"),
        ({"recompute": "keep"}, "--recompute keep must be left out with --model sage"),
        ({"loader_threads": -1}, "--loader-threads -1"),
        ({"strategy_options": {"seed": 1}}, "--option seed"),
        ({"strategy_options": {"backend": "nccl"}}, "--option backend"),
    ],
)
def test_what_cannot_run_is_refused_before_a_run_folder_is_touched(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        TrainConfig(data="data", out="run", **asked)


def test_heads_matter_to_gat_only() -> None:
    assert TrainConfig(data="data", out="run", hidden=10, heads=4).heads == 4


def test_the_cache_is_one_that_the_graph_knows() -> None:
    for policy in POLICIES:
        assert TrainConfig(data="d", out="o", cache=policy).cache == policy
    with pytest.raises(ConfigError, match="--cache best must be vip, degree or halo"):
        TrainConfig(data="d", out="o", cache="best")
    with pytest.raises(ConfigError, match=r"--cache-alpha -0\.1 must be at least 0"):
        TrainConfig(data="d", out="o", cache="vip", cache_alpha=-0.1)
