"""Stages of ``HeteroGraphConv`` read the rows that DGL reads, or refuse them."""

from typing import Any

import dgl
import pytest
import torch
from dgl.nn.pytorch import GraphConv, HeteroGraphConv, SAGEConv
from torch import Tensor

from dglx_dist.errors import ConfigError
from dglx_dist.layers.several_types import HeteroStages

GRAPH = dgl.heterograph({("user", "rel", "user"): ([0, 1, 2], [1, 0, 0]), ("tag", "rel", "user"): ([0], [1])})
USERS = [("user", "rel", "user")]
BLOCK = dgl.to_block(GRAPH, {"user": torch.tensor([0, 1])})
ROWS = {"user": torch.arange(18.0).reshape(3, 6), "tag": torch.ones(1, 6)}
PAIRS: list[tuple[Any, bool]] = [
    (lambda rows: rows[:2], True),
    (lambda rows: rows[:2].clone(), True),
    (lambda rows: rows[:2] + 1, False),
    (lambda rows: rows[1:], False),
    (lambda rows: rows, False),
]
"""Rows of the destinations, and whether they are the first sources."""


@pytest.mark.parametrize(("choose", "is_first"), PAIRS)
def test_pairs_have_the_first_sources_as_destinations(choose: Any, is_first: bool) -> None:
    conv = HeteroGraphConv({"rel": SAGEConv(6, 2, "mean")})
    stages = HeteroStages(conv, USERS, {"user": 6})
    pair = {"user": ROWS["user"]}, {"user": choose(ROWS["user"])}
    if is_first:
        torch.testing.assert_close(stages(BLOCK, pair)["user"], conv(BLOCK, pair)["user"])
    else:
        with pytest.raises(ConfigError, match=r"destinations of 'user'.*not the first 2.*Pass only the rows"):
            stages(BLOCK, pair)


def test_destinations_without_rows_are_refused() -> None:
    stages = HeteroStages(HeteroGraphConv({"rel": SAGEConv(6, 2, "mean")}), USERS, {"user": 6})
    with pytest.raises(ConfigError, match=r"destinations of 'user' were given no rows.*Pass only the rows"):
        stages(BLOCK, ({"user": ROWS["user"]}, dict[str, Tensor]()))


def test_a_module_of_a_cut_and_an_uncut_relation_is_refused() -> None:
    etypes = [*USERS, ("tag", "rel", "user")]
    for order in (etypes, etypes[::-1]):
        with pytest.raises(
            ConfigError, match=r"one module for \('user', 'rel', 'user'\) and another edge type"
        ):
            HeteroStages(HeteroGraphConv({"rel": GraphConv(6, 8)}), order, {"user": 6})
