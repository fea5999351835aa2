"""Dropout of mini-batch strategies: the same entries on any number of ranks."""

import pickle
from typing import Any

import dgl
import pytest
import torch
import torch.nn.functional as F
from dgl.nn import GATConv, HeteroGraphConv, SAGEConv
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dglx_dist as dx
from dglx_dist.training.relational import HGT, RGCN
from tests.helpers.ranks import run_each, run_ranks

NUM_NODES, WIDTH, CLASSES = 40, 5, 3


def graph_of_one_type() -> dgl.DGLGraph:
    random = torch.Generator().manual_seed(0)
    ends = torch.randint(NUM_NODES, (2, 200), generator=random)
    g = dgl.add_self_loop(dgl.graph((ends[0], ends[1]), num_nodes=NUM_NODES))
    g.ndata["feat"] = torch.rand(NUM_NODES, WIDTH, generator=random, dtype=torch.float64)
    g.ndata["train_mask"] = torch.arange(NUM_NODES) % 2 == 0
    return g


def graph_of_two_types() -> dgl.DGLGraph:
    random = torch.Generator().manual_seed(0)

    def ends(sources: int, targets: int) -> tuple[Tensor, Tensor]:
        picked = torch.rand(2, 60, generator=random)
        return (picked[0] * sources).long(), (picked[1] * targets).long()

    # One relation is so rare that most batches have none of its edges.
    edges = {
        ("a", "ab", "b"): ends(30, NUM_NODES),
        ("b", "ba", "a"): ends(NUM_NODES, 30),
        ("b", "rare", "b"): (torch.tensor([3]), torch.tensor([0])),
        ("b", "bb", "b"): ends(NUM_NODES, NUM_NODES),
    }
    g = dgl.heterograph(edges, {"a": 30, "b": NUM_NODES})
    for ntype in g.ntypes:
        rows = torch.rand(g.num_nodes(ntype), WIDTH, generator=random, dtype=torch.float64)
        g.nodes[ntype].data["feat"] = rows
    g.nodes["b"].data["train_mask"] = torch.arange(NUM_NODES) % 2 == 0
    return g


class Sage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)
        self.convs = nn.ModuleList([SAGEConv(WIDTH, 8, "mean"), SAGEConv(8, CLASSES, "mean", feat_drop=0.3)])

    def forward(self, blocks: Any, x: Tensor) -> Tensor:
        hidden = torch.relu(self.convs[0](blocks[0], self.dropout(x)))
        return self.convs[1](blocks[1], self.dropout(hidden))


class Gat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            GATConv(width, CLASSES, 2, feat_drop=0.3, attn_drop=0.4) for width in (WIDTH, 2 * CLASSES)
        )

    def forward(self, blocks: Any, x: Tensor) -> Tensor:
        return self.convs[1](blocks[1], self.convs[0](blocks[0], x).flatten(1)).mean(1)


class Recomputed(Sage):
    def forward(self, blocks: Any, x: Tensor) -> Tensor:
        hidden = torch.relu(self.convs[0](blocks[0], self.dropout(x)))
        return checkpoint(lambda h: self.convs[1](blocks[1], self.dropout(h)), hidden, use_reentrant=False)


class Functional(Sage):
    def forward(self, blocks: Any, x: Tensor) -> Tensor:
        hidden = torch.relu(self.convs[0](blocks[0], x))
        return self.convs[1](blocks[1], F.dropout(hidden, 0.5, self.training))


class Typed(nn.Module):
    def __init__(self, g: Any) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            HeteroGraphConv(
                {etype: SAGEConv(width, out, "mean", feat_drop=0.3) for etype in ("ab", "ba", "bb", "rare")}
            )
            for width, out in ((WIDTH, 8), (8, CLASSES))
        )

    def forward(self, blocks: Any, x: dict[str, Tensor]) -> Tensor:
        hidden = {ntype: torch.relu(rows) for ntype, rows in self.convs[0](blocks[0], x).items()}
        return self.convs[1](blocks[1], hidden)["b"]


class ReadyMade(nn.Module):
    def __init__(self, g: Any, kind: type[nn.Module]) -> None:
        super().__init__()
        widths = dict.fromkeys(g.ntypes, WIDTH)
        self.inner = kind(g, widths, 8, CLASSES, dropout=0.4, out_types=["b"])

    def forward(self, blocks: Any, x: dict[str, Tensor]) -> Tensor:
        return self.inner(blocks, x)["b"]


ONE_TYPE = {"sage": Sage, "gat": Gat, "recomputed": Recomputed}
TWO_TYPES = {
    "typed": Typed,
    "rgcn": lambda g: ReadyMade(g, RGCN),
    "hgt": lambda g: ReadyMade(g, HGT),
}


def weights_after_two_steps(strategy: str, model_name: str, parts: int) -> dict[str, Any]:
    is_typed = model_name in TWO_TYPES
    with dx.init(strategy=strategy, seed=0):
        g = dx.distribute(graph_of_two_types() if is_typed else graph_of_one_type(), parts=parts)
        sampler = dgl.dataloading.NeighborSampler(
            [3, 3], prefetch_node_feats={key: ["feat"] for key in g.ntypes} if is_typed else ["feat"]
        )
        ntype = "b" if is_typed else g.ntypes[0]
        seeds: Any = dx.node_split(g.nodes[ntype].data["train_mask"])
        # Two epochs of one step, which has the same seeds on any number of ranks.
        loader = dx.DataLoader(g, {"b": seeds} if is_typed else seeds, sampler, batch_size=NUM_NODES)
        torch.manual_seed(0)
        one_type = {**ONE_TYPE, "functional": Functional}
        model: Any = TWO_TYPES[model_name](g) if is_typed else one_type[model_name]()
        model = dx.wrap(model.double(), g)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        # Whatever ranks drew before does not matter.
        torch.manual_seed(g.session.topology.rank)
        for _ in range(2):
            for _, _, blocks in loader:
                loss = (model(blocks, blocks[0].srcdata["feat"]) ** 2).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return {name: value.numpy().copy() for name, value in model.state_dict().items()}


def test_two_ranks_drop_the_entries_of_one_but_functional_dropout_has_no_nodes() -> None:
    cases = [(strategy, name, 2) for strategy in ("data_parallel", "push_pull") for name in ONE_TYPE]
    cases += [("data_parallel", name, 2) for name in (*TWO_TYPES, "functional")]
    alone, both = (run_each(weights_after_two_steps, cases, ranks) for ranks in (1, 2))
    for case, (first,), (second, _) in zip(cases, alone, both, strict=True):
        distance = max(abs(first[name] - second[name]).max() for name in first)
        assert distance > 1e-3 if case[1] == "functional" else distance < 1e-12, case


def error_of_a_late_probability(strategy: str) -> str:
    with dx.init(strategy=strategy, seed=0):
        g = dx.distribute(graph_of_one_type(), parts=1)
        sampler = dgl.dataloading.NeighborSampler([3, 3], prefetch_node_feats=["feat"])
        loader = dx.DataLoader(g, dx.node_split(g.ndata["train_mask"]), sampler, batch_size=NUM_NODES)
        model: Any = Sage()
        for dropout in (model.dropout, model.convs[1].feat_drop):
            dropout.p = 0.0
        model = dx.wrap(model.double(), g)
        _, _, blocks = next(iter(loader))
        model(blocks, blocks[0].srcdata["feat"])
        model.module.dropout.p = 0.5
        with pytest.raises(dx.ConfigError) as caught:
            model(blocks, blocks[0].srcdata["feat"])
        return str(caught.value)


def test_a_probability_is_set_before_wrap() -> None:
    cases = [("data_parallel",), ("push_pull",), ("full_graph",)]
    for (message,) in run_each(error_of_a_late_probability, cases, 1):
        assert "before dx.wrap" in message


class Counted(nn.Module):
    """Keeps the entries that its dropout kept."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout, self.conv, self.kept = nn.Dropout(0.5), SAGEConv(WIDTH, CLASSES, "mean"), []

    def forward(self, blocks: Any, x: Tensor) -> Tensor:
        dropped = self.dropout(torch.ones_like(x))
        self.kept.append((dropped != 0).clone())
        return self.conv(blocks[-1], x * dropped)


def masks_of_epochs(anew: bool) -> list[Any]:
    with dx.init(seed=0):
        g = dx.distribute(graph_of_one_type(), parts=1)
        sampler = dgl.dataloading.MultiLayerFullNeighborSampler(1, prefetch_node_feats=["feat"])
        inner = Counted().double()
        held, hooked = inner.dropout, []
        hook = held.register_forward_hook(lambda *_: hooked.append(1))
        model = dx.wrap(inner, g)
        loader: Any = None
        for _ in range(3):
            if anew or loader is None:
                seeds = dx.node_split(g.ndata["train_mask"])
                loader = dx.DataLoader(g, seeds, sampler, batch_size=3, shuffle=False)
            for _, _, blocks in loader:
                model(blocks, blocks[0].srcdata["feat"]).sum().backward()
        assert len(hooked) == len(inner.kept), "hooks of the user stay"
        hook.remove()
        held.p = 0.0
        model(blocks, blocks[0].srcdata["feat"])
        assert bool(inner.kept.pop().all()), "the user's own reference sets the probability"
        held.p, kept = 0.5, list(inner.kept)
        copied = pickle.loads(pickle.dumps(inner)).train()
        assert copied(blocks, blocks[0].srcdata["feat"]) is not None
        return [tensor.numpy() for tensor in kept]


def test_masks_differ_in_each_step_and_epoch_and_drop_their_share() -> None:
    for (kept,) in run_each(masks_of_epochs, [(False,), (True,)], 1):
        steps = len(kept) // 3
        assert abs(sum(tensor.sum() for tensor in kept) / sum(tensor.size for tensor in kept) - 0.5) < 0.05
        for step in range(steps):
            first, second, third = (kept[epoch * steps + step] for epoch in range(3))
            assert first.shape != second.shape or (first != second).any()
            assert second.shape != third.shape or (second != third).any()


class Linked(Sage):
    """Scores pairs of nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.score = dx.nn.BatchNorm(8), nn.Linear(CLASSES, 1)

    def forward(self, pairs: Any, blocks: Any, x: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.convs[0](blocks[0], self.dropout(x))))
        rows = self.convs[1](blocks[1], self.dropout(hidden))
        u, v = pairs.edges()
        return self.score(rows[u] * rows[v])


def weights_after_links() -> dict[str, Any]:
    with dx.init(seed=0):
        g = dx.distribute(graph_of_one_type(), parts=2)
        sampler = dgl.dataloading.NeighborSampler([3, 3], prefetch_node_feats=["feat"])
        edges = dx.edge_split(torch.arange(g.num_edges()) % 9 == 0, g.get_partition_book())
        loader = dx.DistEdgeDataLoader(
            g, edges, dgl.dataloading.as_edge_prediction_sampler(sampler), batch_size=NUM_NODES
        )
        torch.manual_seed(0)
        model: Any = dx.wrap(Linked().double(), g)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(2):
            for _, pairs, blocks in loader:
                loss = (model(pairs, blocks, blocks[0].srcdata["feat"]) ** 2).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return {name: value.numpy().copy() for name, value in model.state_dict().items()}


def test_two_ranks_drop_and_normalize_rows_of_nodes_as_one_in_models_of_pairs() -> None:
    first, second = (run_ranks(weights_after_links, ranks)[0] for ranks in (1, 2))
    assert max(abs(first[name] - second[name]).max() for name in first) < 1e-10
