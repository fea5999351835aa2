"""The strategies by name."""

from __future__ import annotations

from dglx_dist.registry import Registry
from dglx_dist.strategies.base import Strategy

STRATEGIES: Registry[Strategy] = Registry(
    "strategy",
    Strategy,  # type: ignore[type-abstract]  # the registry only asks for subclasses of it
    builtin={
        "data_parallel": "dglx_dist.strategies.data_parallel:DataParallel",
        "lambda": "dglx_dist.strategies.bounded.strategy:Lambda",
        "push_pull": "dglx_dist.strategies.push_pull.strategy:PushPull",
    },
    aliases={
        "distdgl": "data_parallel",
        "dorylus": "lambda",
        "dp": "data_parallel",
        "p3": "push_pull",
    },
    group="dglx_dist.strategies",
)
