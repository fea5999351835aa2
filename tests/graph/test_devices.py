"""Tensors and embeddings whose ids, values and gradients lie on a device."""

import numpy as np
import pytest
import torch

from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.graph.embedding import DistEmbedding
from dglx_dist.graph.split import node_split
from tests.graph.small import NUM_NODES, zeros
from tests.graph.sparse_cases import KINDS, STEPS, batch, choose_loss, embeddings, make_optimizer, train
from tests.helpers.elsewhere import DEVICE, Elsewhere


@pytest.mark.parametrize("kind", KINDS)
def test_embeddings_train_on_a_device_to_the_same_bits(graph: DistGraph, kind: str) -> None:
    here, there = embeddings(graph, kind), embeddings(graph, f"{kind} there")
    for own, reference in zip(here, there, strict=True):
        own.weight[:] = reference.weight.to_local()
    train(graph, here, make_optimizer(kind, here), range(STEPS))
    optimizer = make_optimizer(kind, there)
    with Elsewhere():
        for step in range(STEPS):
            ids = batch(step, 0, 1).to(DEVICE)
            loss = choose_loss(there, ids, step)
            assert loss.device == DEVICE
            loss.backward()
            optimizer.step()
    for own, reference in zip(here, there, strict=True):
        assert torch.equal(own.weight.to_local(), reference.weight.to_local())


def mask_of(g: DistGraph) -> torch.Tensor:
    return g.ndata["train_mask"][:]


def test_rows_are_read_and_written_where_the_ids_are(graph: DistGraph) -> None:
    ids, tensor = torch.tensor([7, 3, 7]), graph.new_tensor((NUM_NODES, 2), torch.float32)
    rows = torch.arange(6.0).view(3, 2)
    with Elsewhere():
        there = ids.to(DEVICE)
        tensor[there] = rows.to(DEVICE)
        tensor.push(ids, rows.to(DEVICE), accumulate=True)
        result = tensor[there]
        assert result.device == tensor.to(DEVICE)[[3]].device == DEVICE
        assert result.cpu().tolist() == [[8.0, 11.0], [4.0, 6.0], [8.0, 11.0]]
        mask = (torch.arange(NUM_NODES) == 3).to(DEVICE)
        assert tensor[mask].cpu().tolist() == [[4.0, 6.0]]
        train = graph.ndata["train_mask"].to(DEVICE)
        assert torch.equal(node_split(train), node_split(mask_of(graph)))
        assert np.array_equal(train, mask_of(graph).numpy())
        assert (train | train).count_nonzero() == int(mask_of(graph).sum())


def test_rows_go_where_they_are_asked_for(graph: DistGraph) -> None:
    embedding = DistEmbedding(NUM_NODES, 2, "e", init_func=zeros, dtype=torch.bfloat16)
    rows = embedding([3, 3], device="meta")
    assert (rows.device.type, rows.dtype, rows.shape, rows.requires_grad) == (
        "meta",
        torch.float32,
        (2, 2),
        True,
    )
    with torch.no_grad():
        assert embedding([3], "meta").is_meta
