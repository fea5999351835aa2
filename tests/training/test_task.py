"""Losses of hand-made batches, without any loader or process."""

from __future__ import annotations

from typing import Any, cast

import dgl
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from dglx_dist.training.fit import LinkPrediction, NodeClassification


def block_of(label: list[int]) -> Any:
    """Three sources, of which the first are destinations; node 2 sends to each of them."""
    count = len(label)
    block = dgl.create_block(
        (torch.full((count,), 2), torch.arange(count)), num_src_nodes=3, num_dst_nodes=count
    )
    block.srcdata["feat"] = torch.tensor([[1, 0], [0, 1], [2, 2]])
    block.dstdata["label"] = torch.tensor(label, dtype=torch.int64)
    return block


class Scores(nn.Module):
    """Gives the destinations their own rows; for pairs, the first columns of their ends added."""

    def __init__(self, typed: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.typed = typed

    def forward(self, blocks: list[Any], x: Tensor, *graphs: Any) -> Any:
        assert x.dtype == torch.float64
        h = self.scale * x[: blocks[-1].num_dst_nodes()]
        if graphs:
            return tuple(h[graph.edges()[0], 0] + h[graph.edges()[1], 0] - 1 for graph in graphs)
        return {"_N": h} if self.typed else h


@pytest.mark.parametrize("typed", [False, True])
def test_classes_of_nodes(typed: bool) -> None:
    model = cast("Any", Scores(typed))
    found = NodeClassification()(model, (None, None, [block_of([0, 0])]))
    expected = cross_entropy(torch.eye(2).double(), torch.tensor([0, 0]))
    assert float(found.loss.detach()) == pytest.approx(float(expected))
    assert (found.num_targets, found.num_correct) == (2, 1)


def test_no_node_is_no_target_but_leads_back() -> None:
    model = Scores(typed=False)
    found = NodeClassification()(cast("Any", model), (None, None, [block_of([])]))
    assert (found.num_targets, found.num_correct) == (0, 0)
    found.loss.backward()
    assert model.scale.grad is not None


def test_edges_against_negatives() -> None:
    pairs = dgl.graph(([0, 1], [0, 1]), num_nodes=2)
    negatives = dgl.graph(([0, 1, 1, 0], [1, 1, 0, 0]), num_nodes=2)
    batch = (None, pairs, negatives, [block_of([0, 0])])
    found = LinkPrediction()(cast("Any", Scores(typed=False)), batch)
    scores = torch.tensor([1.0, -1.0, 0.0, -1.0, 0.0, 1.0]).double()
    truth = torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0, 0.0]).double()
    assert float(found.loss.detach()) == pytest.approx(float(binary_cross_entropy_with_logits(scores, truth)))
    assert (found.num_targets, found.num_correct) == (2, 1)
