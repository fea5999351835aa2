"""Caches of remote rows over real ranks: the same bits, fewer bytes, and errors on every rank."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import dgl
import numpy as np
import pytest
import torch

from dglx_dist.comm.session import start_session
from dglx_dist.comm.topology import Topology
from dglx_dist.dataloading.loader import DataLoader
from dglx_dist.errors import ConfigError, DglxError
from dglx_dist.graph.cache import select_top_rows
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.records import NODE_TYPE
from tests.graph.small import NUM_NODES, edges
from tests.helpers.ranks import run_ranks

ROW = 4 * 5


def own_range(g: DistGraph) -> tuple[int, int]:
    bounds, server = g.get_node_partition_policy(NODE_TYPE).bounds, g.session.topology.server
    return int(bounds[server]), int(bounds[server + 1])


def pulls(g: DistGraph) -> tuple[bytes, int]:
    """All sorts of pulls: their bits, and the bytes they moved."""
    random, key = np.random.default_rng(7), g.ndata["feat"].kvstore_key
    before = g.session.ledger.total(phase="features")
    request = [random.integers(0, NUM_NODES, 60), np.arange(NUM_NODES), np.empty(0, np.int64)]
    rows = b"".join(g.kvstore.pull(key, ids).numpy().tobytes() for ids in request)
    shuffled = random.permutation(NUM_NODES)[:25]
    rows += g.kvstore.pull(key, shuffled, distinct=True).numpy().tobytes()
    return rows, g.session.ledger.total(phase="features") - before


def batches(g: DistGraph) -> list[bytes]:
    sampler = dgl.dataloading.NeighborSampler([2, 2], prefetch_node_feats=["feat"], prefetch_labels=["label"])
    seeds = torch.arange(g.rank(), NUM_NODES, g.session.topology.world_size)
    loader = DataLoader(g, seeds, sampler, batch_size=4, shuffle=True, seed=3)
    loader.set_epoch(0)
    return [
        nodes.numpy().tobytes() + blocks[0].srcdata["feat"].numpy().tobytes() for nodes, _, blocks in loader
    ]


def check_cached(folder: Path, structure: Any) -> None:
    with start_session() as session:
        g = DistGraph(folder, structure=structure)
        key, (first, end) = g.ndata["feat"].kvstore_key, own_range(g)
        plain, plain_bytes = pulls(g)
        plain_batches = batches(g)
        for policy in ("degree", "halo", *(["vip"] if structure == "replicated" else [])):
            how = {"fanouts": [2, 2], "batch_size": 4} if policy == "vip" else {}
            plan = g.cache_rows("feat", alpha=0.4, policy=policy, **how)
            assert plan.rows <= int(0.4 * (end - first))
            assert plan.bytes >= plan.rows * ROW
            same, fewer_bytes = pulls(g)
            assert same == plain
            assert fewer_bytes < plain_bytes if plan.rows else fewer_bytes == plain_bytes
            assert batches(g) == plain_batches
        g.cache_rows("feat", alpha=0, policy="degree")
        assert not g.kvstore.has_cache
        assert pulls(g) == (plain, plain_bytes)
        # More than there is, but for a server without rows: everything that is a source comes from here.
        plan = g.cache_rows("feat", alpha=100.0, policy="degree")
        source, _ = edges()
        remote = set(g.orig_ids(np.setdiff1d(np.arange(NUM_NODES), np.arange(first, end))).tolist())
        assert plan.rows == (len(remote & set(source.tolist())) if end > first else 0)
        before, counted = session.ledger.total(phase="features"), g.kvstore.cache_counts(key)
        g.kvstore.pull(key, np.arange(NUM_NODES).repeat(2))
        misses = NUM_NODES - (end - first) - plan.rows
        assert session.ledger.total(phase="features") - before == (8 + ROW) * misses
        counts = g.kvstore.cache_counts(key) - counted
        assert (counts.local, counts.hits, counts.misses) == (2 * (end - first), 2 * plan.rows, 2 * misses)
        g.close()


@pytest.mark.parametrize(
    ("ranks", "per_server", "structure"), [(2, 1, "replicated"), (3, 1, "partitioned"), (4, 2, "replicated")]
)
def test_the_same_rows_for_fewer_bytes(
    small_dataset: Path, ranks: int, per_server: int, structure: str
) -> None:
    run_ranks(check_cached, ranks, args=(small_dataset, structure), ranks_per_server=per_server)


def chosen_by(folder: Path) -> None:
    """A policy keeps the remote rows that cost nothing to read."""
    with start_session() as session:
        g = DistGraph(folder, structure="replicated")
        key, (first, end) = g.ndata["feat"].kvstore_key, own_range(g)
        results = []
        for policy in ("degree", "halo"):
            # What an earlier cache has would not be asked for again.
            g.cache_rows("feat", alpha=0, policy="halo")
            before = session.ledger.total(phase="cache")
            plan = g.cache_rows("feat", alpha=0.3, policy=policy)
            filled = session.ledger.total(phase="cache") - before
            assert filled == plan.rows * (8 + ROW)
            assert plan.expected_hit_rate is None
            kept = []
            for node in range(NUM_NODES):
                cost = session.ledger.total(phase="features")
                g.kvstore.pull(key, np.array([node]))
                if session.ledger.total(phase="features") == cost and not first <= node < end:
                    kept.append(node)
            assert plan.rows == len(kept) > 0
            results.append(kept)
        source, destination = edges()
        # Ids of the dataset in the source's order: new_of[original] = new.
        new_of = np.argsort(g.orig_ids(np.arange(NUM_NODES)).numpy())
        degrees = np.bincount(new_of[source], minlength=NUM_NODES)
        inside = (new_of[destination] >= first) & (new_of[destination] < end)
        halo = np.bincount(new_of[source[inside]], minlength=NUM_NODES)
        budget = int(0.3 * (end - first))
        assert results == [
            select_top_rows(scores, (first, end), budget).tolist() for scores in (degrees, halo)
        ]
        with pytest.raises(ConfigError, match="same arguments on all ranks"):
            g.cache_rows("feat", alpha=0.25 * (1 + g.rank()), policy="degree")
        g.close()


def test_degree_and_halo_keep_the_documented_rows(small_dataset: Path) -> None:
    run_ranks(chosen_by, 2, args=(small_dataset,), ranks_per_server=1)


@pytest.mark.parametrize(
    ("how", "part"),
    [
        ({"name": "hidden"}, "can be written to"),
        ({"name": "feet"}, "no tensor 'feet'"),
        ({"policy": "best"}, "'vip', 'degree', 'halo'"),
        ({"alpha": -1.0}, "alpha=-1.0"),
        ({"alpha": float("nan")}, "alpha=nan"),
        ({"alpha": "0.5"}, "alpha='0.5'"),
        ({"policy": "vip"}, "Pass the loader's fanouts="),
        ({"policy": "vip", "fanouts": [5]}, "Pass the loader's batch_size="),
        ({"policy": "vip", "fanouts": [5], "batch_size": 0}, "batch_size=0"),
        ({"policy": "vip", "fanouts": [5], "batch_size": 10}, "structure='replicated'"),
        ({"batch_size": 10}, "are for policy='vip'"),
        ({"policy": "lookahead", "fanouts": [5]}, "are for policy='vip'"),
    ],
)
def test_unsupported_caches_are_refused(small_dataset: Path, how: dict[str, Any], part: str) -> None:
    with start_session(topology=Topology(0, 1, (0,))):
        g = DistGraph(small_dataset, structure="partitioned")
        g.new_tensor((NUM_NODES, 2), torch.float32, "hidden")
        with pytest.raises(DglxError, match=re.escape(part)):
            g.cache_rows(**{"name": "feat", "alpha": 0.1, "policy": "degree", **how})


def test_one_server_has_nothing_to_cache(small_dataset: Path) -> None:
    with start_session(topology=Topology(0, 1, (0,))):
        g = DistGraph(small_dataset)
        plan = g.cache_rows("feat", alpha=1.0, policy="vip", fanouts=[-1], batch_size=3)
        assert (plan.rows, plan.expected_hit_rate) == (0, None)
        ahead = g.cache_rows("feat", alpha=1.0, policy="lookahead")
        assert (ahead.rows, ahead.bytes, g.kvstore.has_cache) == (0, 0, False)
        with pytest.raises(ConfigError, match="seeds: id 99"):
            g.cache_rows("feat", alpha=1.0, fanouts=[-1], batch_size=3, seeds=np.array([99]))
        with pytest.raises(dataclasses.FrozenInstanceError):
            plan.rows = 3  # type: ignore[misc]
