"""The full-graph loader: steps of an epoch, resuming, shared preloading, external nodes chosen anew."""

from pathlib import Path
from typing import Any

import dgl
import numpy as np
import pytest
import torch

from dglx_dist.comm.session import start_session
from dglx_dist.errors import CheckpointError
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.records import NODE_TYPE
from dglx_dist.strategies.base import STRATEGIES
from dglx_dist.strategies.full_graph.halo_block import HaloBlock
from tests.helpers.ranks import run_ranks
from tests.strategies import equality
from tests.strategies.full_graph import plan_cases, runs

WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("full_graph", {}),
    "anew": ("full_graph", {"use_pp": False}),
    "closed": ("shared_preload", {}),
}


def on_rank(folder: str) -> dict[str, Any]:
    with start_session(timeout_s=60) as session:
        g = DistGraph(folder)
        results: dict[str, Any] = {}
        for name, (strategy, options) in WAYS.items():
            _, loader = runs.open_loader(g, strategy, options)
            results[name] = look_at(g, loader, use_pp=options.get("use_pp", True))
        check_positions(g)
        # Ranks that name the same seeds, or none, train on each once.
        everyone = equality.new_ids_of_training(g)
        full_graph = STRATEGIES.get("full_graph")(session, {}).open(g)
        for seeds in (everyone, everyone if session.topology.rank == 0 else everyone[:0]):
            ((_, _, blocks),) = full_graph.loader(seeds, runs.sampler())
            share = blocks[-1].step_share
            assert (share.num_local, share.num_global) == results["full"]["targets"]
        g.barrier()
        return results


def look_at(g: DistGraph, loader: Any, *, use_pp: bool) -> dict[str, Any]:
    """Check one rank's blocks against the whole graph."""
    raw = equality.raw_graph()
    features = torch.from_numpy(raw.node_data[NODE_TYPE]["feat"])
    labels = torch.from_numpy(raw.node_data[NODE_TYPE]["label"])
    assert len(loader) == 1
    assert g.session.step_share is None
    batches = []
    for epoch in range(2):
        assert loader.epoch == epoch
        for inputs, outputs, blocks in loader:
            assert loader.state_dict() == {"epoch": epoch, "step": 1, "seed": g.session.seed}
            share = blocks[-1].step_share
            assert len(outputs) == share.num_local
            assert [block.step_number for block in blocks] == [epoch, epoch]
            assert all(isinstance(block, HaloBlock) for block in blocks)
            assert torch.equal(blocks[0].srcdata["feat"], features[g.orig_ids(inputs)])
            assert torch.equal(blocks[-1].dstdata["label"], labels[g.orig_ids(outputs)])
            if use_pp:
                assert torch.equal(inputs, blocks[0].srcdata[dgl.NID])
            else:
                assert len(inputs) == blocks[0].own_rows
            # What a model writes into blocks is gone in the next epoch.
            assert "h" not in blocks[1].dstdata
            blocks[1].dstdata["h"] = torch.ones(len(outputs))
            batches.append((inputs, outputs))
        assert g.session.step_share is None
    assert all(torch.equal(first, second) for first, second in zip(*batches, strict=True))
    times = loader.times()
    assert times.fetch_s == times.sample_s == 0.0
    return {
        "seeds": g.orig_ids(outputs).tolist(),
        "targets": (share.num_local, share.num_global),
        "owned": g.get_partition_book().nid2partid(outputs).tolist(),
        "server": g.session.topology.server,
    }


def check_positions(g: DistGraph) -> None:
    _, loader = runs.open_loader(g, "full_graph", seed=7)
    for _ in loader:
        position = loader.state_dict()
    assert position == {"epoch": 0, "step": 1, "seed": 7}
    loader.load_state_dict(position)
    assert len(list(loader)) == 0
    assert loader.epoch == 1
    loader.set_epoch(5)
    assert [blocks[0].step_number for _, _, blocks in loader] == [5]
    # Left early: it counts as an epoch.
    next(iter(loader))
    assert [blocks[0].step_number for _, _, blocks in loader] == [7]
    with pytest.raises(CheckpointError, match="Pass seed=8"):
        loader.load_state_dict({"epoch": 0, "step": 0, "seed": 8})
    with pytest.raises(CheckpointError, match="is step 2"):
        loader.load_state_dict({"epoch": 0, "step": 2, "seed": 7})


@pytest.mark.parametrize(("ranks", "ranks_per_server"), [(1, 1), (3, 2)])
def test_every_seed_is_computed_once_where_it_lies(folder: Path, ranks: int, ranks_per_server: int) -> None:
    results = run_ranks(on_rank, ranks, args=(str(folder),), ranks_per_server=ranks_per_server)
    expected = [node for node in range(equality.NUM_NODES) if node % 3 == 0]
    for name in WAYS:
        seeds = [seed for result in results for seed in result[name]["seeds"]]
        assert sorted(seeds) == expected
        assert {result[name]["targets"][1] for result in results} == {len(expected)}
        for result in results:
            assert set(result[name]["owned"]) <= {result[name]["server"]}


def preload_on_rank(folder: str, strategy: str) -> int:
    """Return how many edges of the closure end at nodes of the other server."""
    with start_session(timeout_s=60) as session:
        g = DistGraph(folder)
        topology = session.topology
        sampler = dgl.dataloading.MultiLayerFullNeighborSampler(3, prefetch_edge_feats=["weight"])
        seeds = torch.from_numpy(np.flatnonzero(g.ndata["train_mask"][:].numpy()))
        own_seeds = seeds[topology.rank :: topology.world_size]
        loader = STRATEGIES.get(strategy)(session, {}).open(g).loader(own_seeds, sampler)
        ((_, _, blocks),) = loader
        weights = g.edata["weight"]
        for block in blocks:
            assert torch.equal(block.edata["weight"], weights[block.edata[dgl.EID]])
        own = set(g.local_nodes().tolist())
        first = blocks[0]
        ends = first.dstdata[dgl.NID][first.edges()[1].long()].tolist()
        remote = sum(node not in own for node in ends)
        received = sum(
            row.num_bytes
            for row in session.ledger.rows()
            if row.phase == "preload" and row.destination == topology.rank and row.source != topology.rank
        )
        g.barrier()
        assert received == 2 * 8 * remote
        return remote


@pytest.mark.parametrize("strategy", ["full_graph", "shared_preload"])
def test_values_of_edges_come_once_for_all_layers(tmp_path: Path, strategy: str) -> None:
    folder = str(plan_cases.write_chains(tmp_path))
    remote = run_ranks(preload_on_rank, 2, args=(folder, strategy), ranks_per_server=1)
    assert (sum(remote) > 0) == (strategy == "shared_preload")
