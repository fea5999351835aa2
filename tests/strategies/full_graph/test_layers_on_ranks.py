"""Every layer of the table on four real ranks, on blocks and on local graphs, against one process."""

from __future__ import annotations

from typing import Any

import dgl
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dglx_dist as dx
from dglx_dist.comm.session import start_session
from dglx_dist.data.storage.writer import write_dataset
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.records import EDGE_TYPE, NODE_TYPE, Assignment, RawGraph
from dglx_dist.strategies.full_graph.halo_block import EmptyPartition, HaloBlock, halo_block
from dglx_dist.strategies.full_graph.halo_exchange import HaloExchange
from dglx_dist.strategies.full_graph.model import install
from dglx_dist.strategies.full_graph.plan_builder import make_plans
from tests.helpers.ranks import run_ranks
from tests.strategies.full_graph.layers_of_dgl import LAYERS, ON_GRAPHS, RECOMPUTED, Jumping, Stack
from tests.strategies.full_graph.threads import gradients_of

NUM_NODES, RANKS = 40, 4
PART_OF = np.random.default_rng(4).choice(RANKS, size=NUM_NODES, p=[0.4, 0.3, 0.2, 0.1]).astype(np.int32)
SEEDS = np.flatnonzero((PART_OF < 3) & (np.arange(NUM_NODES) % 3 > 0))
"""Original ids; the last rank has none of them."""

# An LSTM reads neighbours in the order of the edges, and parts have an order of their own.
MODELS: dict[str, Any] = (
    {
        name: lambda make=make: Stack(make)
        for name, make in {**LAYERS, **ON_GRAPHS, **RECOMPUTED}.items()
        if name != "sage lstm"
    }
    | {"appnp": lambda: Stack(lambda: dgl.nn.APPNPConv(3, 0.2))}
    | {"jumping": lambda: Jumping(NUM_NODES)}
)
ON_BLOCKS = (*LAYERS.keys() - {"sage lstm"}, "jumping")


def raw_graph() -> RawGraph:
    """A directed random graph with self-loops."""
    random = np.random.default_rng(3)
    loops = np.stack([np.arange(NUM_NODES)] * 2)
    ends = np.unique(np.concatenate([random.integers(NUM_NODES, size=(2, 120)), loops], 1), axis=1)
    return RawGraph(
        name="layers",
        num_nodes={NODE_TYPE: NUM_NODES},
        edges={EDGE_TYPE: (ends[0].copy(), ends[1].copy())},
        node_data={NODE_TYPE: {"feat": random.standard_normal((NUM_NODES, 4))}},
    )


def loss_weights() -> Tensor:
    return torch.randn(NUM_NODES, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(7))


def on_rank(folder: str) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)  # APPNPConv makes weights of it
    session = start_session(strategy="full_graph", timeout_s=60)
    g = DistGraph(folder)
    everyone = g.orig_ids(torch.arange(NUM_NODES), NODE_TYPE)
    seeds = np.flatnonzero(np.isin(everyone.numpy(), SEEDS))
    plan = make_plans(g, seeds, 2, 0)
    exchanges = [HaloExchange(session, layer, n) for n, layer in enumerate(plan.layers, start=1)]
    ids = torch.from_numpy(plan.nodes)
    blocks = [
        _with_original_ids(g, halo_block(layer, ids, exchange, out_degrees=g.out_degrees))
        for layer, exchange in zip(plan.layers, exchanges, strict=True)
    ]
    lg = _with_original_ids(g, dx.local_graph(g, targets=None))
    results: dict[str, Any] = {
        "targets": len(plan.rows(2)),
        "halo": lg._block.halo_rows,
    }
    for name, make in MODELS.items():
        model = make()
        install(model)
        for kind, graphs, nodes in (("blocks", blocks, everyone[ids]), ("graph", lg, lg.ndata[dgl.NID])):
            if kind == "blocks" and name not in ON_BLOCKS:
                continue
            x = _features()[nodes].requires_grad_()
            with EmptyPartition():  # as in HaloModel
                out = model(graphs, x)
            # Reversible layers take the memory of their output in backward.
            last, scores = nodes[: len(out)], out.detach().clone().numpy()
            of_x, of_weights = _gradients((out * loss_weights()[last]).sum(), x, model)
            results[f"{name}/{kind}"] = (last.numpy(), scores, nodes.numpy(), of_x, of_weights)
    g.close()
    return results


def _gradients(loss: Tensor, x: Tensor, model: nn.Module) -> tuple[np.ndarray, list[np.ndarray]]:
    """Go backward; return those of ``x`` and of the parameters, zeros where there are none."""
    loss.backward()
    found = [one.numpy() for one in gradients_of([x, *model.parameters()])]
    return found[0], found[1:]


def _features() -> Tensor:
    return torch.from_numpy(np.asarray(raw_graph().node_data[NODE_TYPE]["feat"]))


def _with_original_ids(g: DistGraph, graph: Any) -> Any:
    """Name nodes and edges as the one process does."""
    graph.srcdata[dgl.NID] = g.orig_ids(graph.srcdata[dgl.NID], NODE_TYPE)
    graph.edata[dgl.EID] = g.orig_edge_ids(graph.edata[dgl.EID])
    if isinstance(graph, HaloBlock):
        graph.dstdata[dgl.NID] = g.orig_ids(graph.dstdata[dgl.NID], NODE_TYPE)
    return graph


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("layers") / "parts"
    assignment = Assignment(num_parts=RANKS, part_of={NODE_TYPE: PART_OF}, method="test", seed=4)
    write_dataset(raw_graph(), assignment, folder)
    return run_ranks(on_rank, RANKS, args=(str(folder),), ranks_per_server=2)


@pytest.fixture
def _doubles() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("_doubles")
@pytest.mark.parametrize("name", MODELS)
def test_layers_compute_on_ranks_what_they_compute_in_one_process(
    results: list[dict[str, Any]], name: str
) -> None:
    graph, model = dgl.graph(raw_graph().edges[EDGE_TYPE], num_nodes=NUM_NODES), MODELS[name]()
    graph.ndata[dgl.NID] = torch.arange(NUM_NODES)
    for kind, seeds in (("blocks", SEEDS), ("graph", np.arange(NUM_NODES))):
        if kind == "blocks" and name not in ON_BLOCKS:
            continue
        x = _features().requires_grad_()
        out = model(graph, x)
        expected = out.detach().clone().numpy()
        of_x, of_weights = _gradients((out[seeds] * loss_weights()[seeds]).sum(), x, model)
        found = [one[f"{name}/{kind}"] for one in results]
        assert sorted(node for last, *_ in found for node in last.tolist()) == seeds.tolist()
        moved = np.zeros_like(of_x)
        for last, rows, nodes, of_own, _ in found:
            np.testing.assert_allclose(rows, expected[last], rtol=0, atol=1e-10)
            moved[nodes] += of_own
        np.testing.assert_allclose(moved, of_x, rtol=0, atol=1e-10)
        for mine, theirs in zip(zip(*(one[4] for one in found), strict=True), of_weights, strict=True):
            np.testing.assert_allclose(sum(mine), theirs, rtol=0, atol=1e-10)


def test_one_rank_has_no_target_and_all_have_rows_of_others(results: list[dict[str, Any]]) -> None:
    assert [one["targets"] > 0 for one in results].count(False) == 1
    assert all(one["halo"] > 0 for one in results)
