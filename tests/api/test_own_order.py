"""Ids and columns of before dx.distribute are refused where the partition has renumbered the graph."""

import pickle
from typing import Any

import dgl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import dglx_dist as dx
from tests.helpers.ranks import run_ranks

NUM_NODES = 200


def plain_graph() -> dgl.DGLGraph:
    random = torch.Generator().manual_seed(0)
    ends = torch.randint(NUM_NODES, (2, 700), generator=random)
    g = dgl.graph((ends[0], ends[1]), num_nodes=NUM_NODES)
    g.ndata["feat"] = torch.rand(NUM_NODES, 5, generator=random)
    g.ndata["label"] = torch.randint(3, (NUM_NODES,), generator=random)
    g.ndata["train_mask"] = torch.rand(NUM_NODES, generator=random) < 0.4
    g.ndata["number"], g.ndata["one"] = torch.arange(NUM_NODES), torch.ones(NUM_NODES)
    g.edata["train_mask"] = torch.rand(700, generator=random) < 0.2
    return g


def labels_of(habit: str, g: Any, plain: dgl.DGLGraph, inputs: Tensor, nodes: Tensor) -> Tensor:
    labels = plain.ndata["label"]
    if habit == "taken before":
        return labels[nodes]
    if habit == "converted":
        return labels.float().unsqueeze(1)[nodes, 0]
    if habit == "index_select":
        return torch.index_select(labels, 0, nodes)
    if habit == "features":
        return torch.nn.functional.embedding(inputs, plain.ndata["feat"])
    if habit == "a constant":
        return torch.ones(NUM_NODES)[nodes]
    if habit == "own ids":
        return labels[g.orig_ids(nodes)]
    if habit == "another tensor":
        return torch.arange(NUM_NODES)[nodes]
    return g.ndata["label"][nodes]


def outcomes(habits: tuple[str, ...], parts: int) -> dict[str, str]:
    plain, result = plain_graph(), {}
    with dx.init(seed=0) as session:
        dx.distribute(plain if session.topology.rank == 0 else None, parts=parts)
        g = dx.distribute(plain, parts=parts)
        seeds = dx.node_split(g.ndata["train_mask"])
        for habit in habits:
            loader = dx.DataLoader(g, seeds, dgl.dataloading.NeighborSampler([3, 3]), batch_size=16)
            try:
                for inputs, nodes, blocks in loader:
                    values = labels_of(habit, g, plain, inputs, nodes)
                    assert type(pickle.loads(pickle.dumps((nodes, blocks[0].edata[dgl.EID])))[0]) is Tensor
                    if habit in ("own ids", "the distributed graph"):
                        assert torch.equal(values, plain.ndata["label"][g.orig_ids(nodes)])
                result[habit] = "passes"
            except dx.ConfigError as error:
                result[habit] = str(error)
    return result


WRONG = ("taken before", "converted", "index_select", "features")
RIGHT = ("own ids", "a constant", "another tensor", "the distributed graph")


def test_columns_in_the_order_of_before_are_refused_and_others_are_not() -> None:
    for of_rank in run_ranks(outcomes, 2, args=((*WRONG, *RIGHT), 2)):
        for habit in WRONG:
            name = "feat" if habit == "features" else "label"
            assert f"{name!r}" in of_rank[habit]
            assert "g.orig_ids" in of_rank[habit]
        assert {of_rank[habit] for habit in RIGHT} == {"passes"}


def test_one_part_keeps_the_order() -> None:
    assert set(run_ranks(outcomes, 1, args=((*WRONG, *RIGHT), 1))[0].values()) == {"passes"}


def seeds_outcomes() -> dict[str, str]:
    plain, result = plain_graph(), {}
    with dx.init(seed=0):
        g = dx.distribute(plain, parts=2)
        rank = g.session.topology.rank
        nodes = plain.ndata["train_mask"].nonzero()[:, 0]
        edges = plain.edata["train_mask"].nonzero()[:, 0]
        node_sampler = dgl.dataloading.NeighborSampler([3])
        edge_sampler = dgl.dataloading.as_edge_prediction_sampler(node_sampler)
        cases = {
            "nodes": (nodes[rank::2], node_sampler),
            "edges": (edges[rank::2], edge_sampler),
            "new nodes": (g.new_ids(nodes)[rank::2], node_sampler),
            "split": (dx.node_split(g.ndata["train_mask"]), node_sampler),
            "split edges": (dx.edge_split(g.edata["train_mask"]), edge_sampler),
        }
        for name, (ids, sampler) in cases.items():
            try:
                dx.DataLoader(g, ids, sampler, batch_size=16)
                result[name] = "passes"
            except dx.ConfigError as error:
                result[name] = str(error)
    return result


@pytest.mark.parametrize("ranks", [1, 2])
def test_ids_of_before_are_refused_as_seeds(ranks: int) -> None:
    for of_rank in run_ranks(seeds_outcomes, ranks):
        assert "'train_mask'" in of_rank.pop("nodes")
        assert "dx.edge_split" in of_rank.pop("edges")
        assert set(of_rank.values()) == {"passes"}


def losses_of_first_batch() -> list[tuple[float, float]]:
    plain, losses = plain_graph(), []
    with dx.init(seed=0):
        g = dx.distribute(plain, parts=2)
        seeds = dx.node_split(g.ndata["train_mask"])
        for _, nodes, _ in dx.DataLoader(g, seeds, dgl.dataloading.NeighborSampler([3, 3]), batch_size=16):
            scores, weight = torch.linspace(0, 1, len(nodes)), torch.arange(len(nodes)) + 1.0
            for name in ("l1_loss", "mse_loss", "huber_loss"):
                loss = getattr(F, name)
                terms = loss(scores, 1 - scores**2, reduction="none") * weight
                losses.append(
                    (float(loss(scores, 1 - scores**2, reduction="sum", weight=weight)), float(terms.sum()))
                )
            break
    return losses


def test_losses_of_the_first_batch_keep_their_weights() -> None:
    for losses in run_ranks(losses_of_first_batch, 2):
        assert [loss for loss, _ in losses] == pytest.approx([expected for _, expected in losses])


def test_loaders_number_their_steps_apart_from_each_other() -> None:
    with dx.init(strategy="data_parallel", seed=0):
        g = dx.distribute(plain_graph())
        sampler = dgl.dataloading.NeighborSampler([3])
        loaders: list[Any] = [dx.DataLoader(g, torch.arange(8), sampler) for _ in range(2)]
        loaders.append(dx.DistEdgeDataLoader(g, torch.arange(8), sampler))
        assert [loader.first_number for loader in loaders] == [0, 1 << 32, 2 << 32]
