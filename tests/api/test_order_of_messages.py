"""User-defined reductions see the messages of a node in the order of the source's list of edges."""

from typing import Any

import dgl
import pytest
import torch
from dgl.nn import HeteroGraphConv, SAGEConv
from torch import Tensor, nn

import dglx_dist as dx
from tests.helpers.ranks import run_each

NUM_NODES, WIDTH, CLASSES = 30, 4, 3


def plain_graph(*, is_typed: bool) -> dgl.DGLGraph:
    """The edges are in no order."""
    random = torch.Generator().manual_seed(0)
    ends = [tuple(torch.randint(NUM_NODES, (2, 120), generator=random)) for _ in range(2)]
    edges = {("n", "near", "n"): ends[0]} | ({("n", "of", "n"): ends[1]} if is_typed else {})
    g = dgl.heterograph(edges, {"n": NUM_NODES})
    g.ndata["feat"] = torch.rand(NUM_NODES, WIDTH, generator=random, dtype=torch.float64)
    g.ndata["train_mask"] = torch.arange(NUM_NODES) % 2 == 0
    return g


class Net(nn.Module):
    def __init__(self, *, is_typed: bool) -> None:
        super().__init__()
        torch.manual_seed(0)

        def conv(into: int, out: int) -> nn.Module:
            if not is_typed:
                return SAGEConv(into, out, "lstm")
            return HeteroGraphConv({name: SAGEConv(into, out, "lstm") for name in ("near", "of")})

        self.is_typed = is_typed
        self.convs = nn.ModuleList([conv(WIDTH, 5), conv(5, CLASSES)]).double()

    def layer(self, depth: int, block: Any, h: Tensor) -> Tensor:
        if not self.is_typed:
            return self.convs[depth](block, h)
        return self.convs[depth](block, {"n": h})["n"]

    def forward(self, blocks: Any, x: Tensor) -> Tensor:
        return self.layer(1, blocks[1], torch.tanh(self.layer(0, blocks[0], x)))

    def inference_layers(self) -> list[Any]:
        return [
            lambda block, h: torch.tanh(self.layer(0, block, h)),
            lambda block, h: self.layer(1, block, h),
        ]


def plain_results(*, is_typed: bool) -> tuple[dict[str, Tensor], Tensor]:
    """Weights after one step, and the rows of all nodes before it, in one process of plain DGL."""
    g, model = plain_graph(is_typed=is_typed), Net(is_typed=is_typed)
    block = dgl.to_block(g, g.nodes(), include_dst_in_src=True)
    rows = model([block, block], g.ndata["feat"])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    (rows[g.ndata["train_mask"]] ** 2).mean().backward()
    optimizer.step()
    return model.state_dict(), rows.detach()


def furthest_from_plain(strategy: str, is_typed: bool) -> tuple[float, float]:
    state, expected = plain_results(is_typed=is_typed)
    with dx.init(strategy=strategy, seed=0):
        g = dx.distribute(plain_graph(is_typed=is_typed), parts=2)
        sampler = dgl.dataloading.MultiLayerFullNeighborSampler(2, prefetch_node_feats=["feat"])
        loader = dx.DataLoader(g, dx.node_split(g.ndata["train_mask"]), sampler, batch_size=NUM_NODES)
        model = dx.wrap(Net(is_typed=is_typed), g)
        rows = dx.layerwise_inference(model, g)
        ids = torch.arange(NUM_NODES)
        of_rows = float((rows[ids] - expected[g.orig_ids(ids)]).abs().max())
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        for _, _, blocks in loader:
            (model(blocks, blocks[0].srcdata["feat"]) ** 2).mean().backward()
            optimizer.step()
        weights = model.state_dict()
        return max(float((weights[name] - state[name]).abs().max()) for name in state), of_rows


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_lstm_trains_and_predicts_as_in_one_process(ranks: int) -> None:
    cases = [("data_parallel", False), ("data_parallel", True), ("full_graph", False)]
    for case, of_ranks in zip(cases, run_each(furthest_from_plain, cases, ranks), strict=True):
        for of_weights, of_rows in of_ranks:
            assert of_weights < 1e-10, case
            assert of_rows < 1e-10, case
