"""Models whose rows meet elsewhere than along edges are refused."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import dgl
import pytest
import torch
from torch import nn

from dglx_dist.errors import ConfigError
from dglx_dist.strategies.full_graph.model import check_rows_out, check_rows_stay_apart


@pytest.mark.parametrize("module", [nn.LazyBatchNorm1d(), nn.SyncBatchNorm(3), dgl.nn.SumPooling()])
def test_modules_that_mix_rows_are_named(module: nn.Module) -> None:
    with pytest.raises(ConfigError, match=f"'1' is a {type(module).__name__}"):
        check_rows_stay_apart(nn.Sequential(nn.LayerNorm(3), module))
    with pytest.raises(ConfigError, match=f"the model is a {type(module).__name__}"):
        check_rows_stay_apart(module)


def test_norms_of_a_row_and_convolutions_pass() -> None:
    check_rows_stay_apart(nn.Sequential(nn.LayerNorm(3), nn.Dropout(), dgl.nn.GATConv(3, 2, 2)))


def blocks(*rows: int) -> list[Any]:
    """Blocks of so many own rows, the last number being the seeds."""
    return [
        SimpleNamespace(own_rows=own, num_dst_nodes=lambda count=targets: count)
        for own, targets in pairwise(rows)
    ]


def test_rows_of_an_earlier_level_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"returned 5 rows for 3 seeds.*the 2 blocks"):
        check_rows_out(torch.zeros(5, 2), blocks(9, 5, 3))
    # As many rows at every level: nothing is known; and what is no tensor of rows is the user's.
    for output in (torch.zeros(3, 2), torch.zeros(()), torch.zeros(5), torch.zeros(4, 3), None):
        check_rows_out(output, blocks(9, 5, 3))
    check_rows_out(torch.zeros(3, 2), blocks(3, 3, 3))
