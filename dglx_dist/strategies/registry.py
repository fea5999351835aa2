"""The strategies by name."""

from __future__ import annotations

from dglx_dist.registry import Registry
from dglx_dist.strategies.base import Strategy

AUTO = "auto"
"""In the place of a strategy's name: whichever suits graph, model and network (``planner/``)."""

STRATEGIES: Registry[Strategy] = Registry(
    "strategy",
    Strategy,  # type: ignore[type-abstract]  # the registry only asks for subclasses of it
    builtin={
        "cooperative": "dglx_dist.strategies.granndis.cooperative:Cooperative",
        "data_parallel": "dglx_dist.strategies.data_parallel:DataParallel",
        "full_graph": "dglx_dist.strategies.granndis.full_graph:FullGraph",
        "lambda": "dglx_dist.strategies.bounded.strategy:Lambda",
        "push_pull": "dglx_dist.strategies.push_pull.strategy:PushPull",
        "shared_preload": "dglx_dist.strategies.granndis.shared_preload:SharedPreload",
    },
    aliases={
        "cob": "cooperative",
        "distdgl": "data_parallel",
        "dorylus": "lambda",
        "dp": "data_parallel",
        "fb": "full_graph",
        "flx": "shared_preload",
        "granndis": "shared_preload",
        "p3": "push_pull",
    },
    group="dglx_dist.strategies",
)
