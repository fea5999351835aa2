from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from dglx_dist.errors import ConfigError, UnknownNameError
from dglx_dist.options import read_options
from dglx_dist.strategies.base import STRATEGIES, OpenedStrategy, Traits, resolve_strategy
from dglx_dist.strategies.data_parallel import DataParallel


@pytest.mark.parametrize("name", ["data_parallel", "distdgl", "dp"])
def test_every_alias_gives_data_parallel(name: str) -> None:
    assert STRATEGIES.get(name) is DataParallel


def test_unknown_name_lists_what_exists() -> None:
    with pytest.raises(UnknownNameError, match=r"did you mean 'data_parallel'.*known: .*data_parallel"):
        STRATEGIES.get("data_paralel")


def test_auto_and_aliases_are_listed_where_they_are_known() -> None:
    with pytest.raises(UnknownNameError, match=r"did you mean 'auto'\? \(known: auto, .*; aliases: cob, "):
        resolve_strategy("atuo", auto=True)
    with pytest.raises(UnknownNameError, match=r"\(known: cooperative, "):
        resolve_strategy("atuo")


@pytest.mark.parametrize("name", STRATEGIES.names())
def test_every_strategy_refuses_unknown_options(name: str) -> None:
    with pytest.raises(ConfigError, match=r"has no option .no_such_option.*its options"):
        STRATEGIES.get(name)(None, {"no_such_option": 1})  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class SomeOptions:
    depth: int = 1
    fast: bool = False
    memory: str = ""


def test_options_are_checked_by_type() -> None:
    read = partial(read_options, "strategy 's'", SomeOptions)
    assert read({"depth": 3, "fast": True, "memory": 100}) == SomeOptions(depth=3, fast=True, memory="100")
    with pytest.raises(
        ConfigError, match=r"'dept'; did you mean 'depth'\? \(its options: depth \(int\), fast"
    ):
        read({"dept": 3})
    with pytest.raises(ConfigError, match=r"depth='3'.*must be of type int, not str"):
        read({"depth": "3"})
    with pytest.raises(ConfigError, match="depth=True"):
        read({"depth": True})


def test_a_strategy_that_knows_nodes_only_says_so() -> None:
    class NodesOnly(OpenedStrategy):
        def make_loader(self, indices: Any, sampler: Any, **loader_options: Any) -> Any: ...
        def make_model(self, model: Any, reduction: Any) -> Any: ...

    session = SimpleNamespace(strategy="nodes_only", model_share=None)
    g: Any = SimpleNamespace(session=session, on_close=[])
    traits = Traits(unit="mini_batch", summary="")
    opened = NodesOnly(SimpleNamespace(traits=traits, options={}), g)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="strategy 'nodes_only' trains on nodes, not on batches of edges"):
        opened.edge_loader([], None)
