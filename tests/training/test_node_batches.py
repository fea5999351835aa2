"""Passes over all nodes: ranks of a server share them by work, and the next batch is loaded ahead."""

import threading
from functools import partial
from pathlib import Path
from typing import Any

import dgl
import numpy as np
import pytest
import torch

from dglx_dist.comm.session import start_session
from dglx_dist.data.storage.writer import write_dataset
from dglx_dist.errors import ConfigError
from dglx_dist.graph import cache
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.records import EDGE_TYPE, NODE_TYPE, Assignment, RawGraph
from dglx_dist.training import inference, node_batches
from dglx_dist.training.inference import evaluate, layerwise_inference
from dglx_dist.training.node_batches import BatchLimits, ServerNodes
from tests.helpers.ranks import run_ranks
from tests.strategies import equality

NODES = 100


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Node 0 has 200 in-edges and each other node has 1. Both parts are on one server."""
    folder = tmp_path_factory.mktemp("batches") / "star"
    destinations = np.concatenate([np.zeros(199, np.int64), np.arange(NODES)])
    number = np.arange(NODES)
    write_dataset(
        RawGraph(
            name="star",
            num_nodes={NODE_TYPE: NODES},
            edges={EDGE_TYPE: (np.arange(299) % NODES, destinations)},
            node_data={NODE_TYPE: {"feat": np.ones((NODES, 2), np.float32)}},
            num_classes={NODE_TYPE: 1},
        ),
        Assignment(num_parts=2, part_of={NODE_TYPE: (number // 50).astype(np.int32)}, method="hash", seed=0),
        folder,
    )
    return str(folder)


def get_shares(folder: str) -> list[Any]:
    with start_session():
        g = DistGraph(folder)
        degrees = layerwise_inference(torch.nn.Identity(), g, layers=[lambda block, _: block.in_degrees()])
        return [ServerNodes(g, NODE_TYPE).get_share(), degrees[:].tolist()]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_of_a_server_get_equal_work(folder: str, ranks: int) -> None:
    results = run_ranks(get_shares, ranks, args=(folder,), ranks_per_server=ranks)
    # The work is 299 in-edges and 8 for each node: 208 for node 0, and 9 for each other node.
    shares = {1: [(0, 100)], 2: [(0, 39), (39, 100)], 3: [(0, 19), (19, 60), (60, 100)]}[ranks]
    assert [tuple(share) for share, _ in results] == shares
    assert all(degrees == [200] + [1] * 99 for _, degrees in results)


def test_next_batch_is_loaded_while_a_batch_is_computed(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    load, loaded, condition = inference.load_batch, set(), threading.Condition()

    def load_and_note(maker: Any, ntype: str, ids: Any, read_sources: Any) -> Any:
        batch = load(maker, ntype, ids, read_sources)
        with condition:
            loaded.add(int(ids[0]))
            condition.notify()
        return batch

    def wait_for_next(block: Any, rows: Any) -> Any:
        ids = block.dstdata[dgl.NID].tolist()
        # The first batch is computed before the rows are allocated, and the last one has no next batch.
        is_inner = ids[0] > 0 and ids[-1] < NODES - 1
        with condition:
            assert not is_inner or condition.wait_for(lambda: ids[-1] + 1 in loaded, timeout=30)
        return rows[: block.num_dst_nodes()]

    monkeypatch.setattr(inference, "load_batch", load_and_note)
    with start_session():
        g = DistGraph(folder)
        rows = layerwise_inference(torch.nn.Identity(), g, layers=[wait_for_next], batch_size=10)
        assert rows[:].tolist() == [[1.0, 1.0]] * NODES


def count_pulled(folder: str, free_bytes: int | None) -> Any:
    if free_bytes is not None:
        cache.machine_memory = lambda: (free_bytes, free_bytes)  # type: ignore[assignment]
    counted = []
    count_edges = cache._count_halo_edges
    cache._count_halo_edges = lambda g, ntype: counted.append(ntype) or count_edges(g, ntype)
    with start_session() as session:
        g = DistGraph(folder, structure="partitioned")
        features = g.ndata["feat"]
        own = torch.arange(*features.local_range)
        sources = g.sample_neighbors(own, -1).edges()[0].unique()
        halo = int((~torch.isin(sources, own)).sum())
        before = session.ledger.snapshot()
        identity = [lambda block, rows: rows[: block.num_dst_nodes()]] * 2
        model = torch.nn.Linear(1, 1).to(features.dtype)
        rows = layerwise_inference(model, g, layers=identity, batch_size=10)
        traffic = session.ledger.since(before)
        assert torch.equal(rows[:], features[:])
        assert counted == (["_N"] if session.topology.local_rank == 0 else [])
        pulled = {"features": 0, "cache": 0}
        for row in traffic:
            if row.phase in pulled:
                pulled[row.phase] += row.num_bytes
        assert not g.kvstore.has_cache
        return halo, features[:1].nbytes, pulled


def infer_rows_of_another_graph(folder: str) -> None:
    with start_session():
        g, second_graph = DistGraph(folder), DistGraph(folder)
        rows = second_graph.new_tensor((g.num_nodes(), 2), torch.float32, "rows")
        identity = [lambda block, rows: rows[: block.num_dst_nodes()]]
        own = g.local_nodes()
        rows[own] = own.float()[:, None].expand(-1, 2)
        g.barrier()
        results = layerwise_inference(torch.nn.Linear(1, 1), g, layers=identity, inputs=rows)
        assert torch.equal(results[:], rows[:])


def test_inputs_may_be_rows_of_another_graph(tmp_path: Path) -> None:
    folder = str(equality.write_parts(tmp_path))
    run_ranks(infer_rows_of_another_graph, 2, args=(folder,), ranks_per_server=1)


def count_cached(folder: str, free_rows: int) -> int:
    with start_session():
        g = DistGraph(folder)
        row_bytes = g.ndata["feat"][:1].nbytes
        cache.machine_memory = lambda: (0, free_rows * row_bytes)  # type: ignore[assignment]
        key = g.ndata["feat"].kvstore_key
        with cache.hold_halo(g, {"_N": [key]}, lambda _: np.arange(10)):
            return int(g.kvstore.has_cache)


@pytest.mark.parametrize(("free_rows", "is_kept"), [(80, 1), (79, 0)])
def test_servers_of_a_machine_share_its_memory_for_halos(
    tmp_path: Path, free_rows: int, is_kept: int
) -> None:
    folder = str(equality.write_parts(tmp_path))
    assert run_ranks(count_cached, 2, args=(folder, free_rows), ranks_per_server=1) == [is_kept] * 2


@pytest.mark.parametrize("is_kept", [True, False])
def test_rows_of_another_server_arrive_once(tmp_path: Path, is_kept: bool) -> None:
    folder = str(equality.write_parts(tmp_path))
    results = run_ranks(count_pulled, 2, args=(folder, None if is_kept else 1000), ranks_per_server=1)
    for halo, row_bytes, pulled in results:
        # A rank counts the ids that it sends and the rows that it receives, once for each layer.
        once = 2 * halo * (8 + row_bytes)
        if is_kept:
            assert pulled == {"features": 0, "cache": once}
        else:
            assert pulled["cache"] == 0
            assert pulled["features"] > 2 * once


def test_hidden_rows_are_kept_in_half_precision(folder: str) -> None:
    kept_dtypes = []

    def add_third(block: Any, rows: Any) -> Any:
        kept_dtypes.append(rows.dtype)
        total = rows[: block.num_dst_nodes()] + 1 / 3
        return total, torch.full((block.num_dst_nodes(),), 70_000)

    def double(block: Any, rows: Any) -> Any:
        total, counts = rows
        assert counts.tolist() == [70_000] * block.num_src_nodes()
        kept_dtypes.append(total.dtype)
        return 2 * total[: block.num_dst_nodes()]

    model = torch.nn.Linear(1, 1)
    with start_session():
        g = DistGraph(folder)
        infer = partial(layerwise_inference, model, g)
        rows = infer(layers=[add_third, double], hidden_dtype=torch.float16)[:]
        # The row of the first layer is rounded, and the layers and the result are float32.
        assert torch.equal(rows, torch.full((NODES, 2), 4 / 3).half().float() * 2)
        assert {*kept_dtypes} == {torch.float32} == {rows.dtype}
        with pytest.raises(ConfigError, match=r"values up to 7e\+04, which do not fit torch.float16"):
            infer(layers=[lambda b, h: 7e4 * h[: b.num_dst_nodes()]] * 2, hidden_dtype=torch.float16)
        with pytest.raises(ConfigError, match=r"hidden_dtype=torch\.float16 is for rows between layers"):
            evaluate(model, g, [], num_layers=1, hidden_dtype=torch.float16, label="feat", task="regression")


@pytest.mark.parametrize(("width", "edge_width", "limit"), [(1, 0, 99), (128, 0, 25), (1, 64, 17)])
def test_memory_of_a_batch_counts_results_and_rows_of_edges(
    folder: str, monkeypatch: pytest.MonkeyPatch, width: int, edge_width: int, limit: int
) -> None:
    """A node has 8 bytes of input and its result. An edge has 64 bytes and three of its rows."""
    monkeypatch.setattr(node_batches, "_BATCH_BYTES", 15_000)
    monkeypatch.setattr(node_batches, "MIN_NODES", 1)
    monkeypatch.setattr(inference, "FIRST_BATCH", BatchLimits(nodes=1, edges=1))
    sizes = []

    def widen(block: Any, _: Any) -> Any:
        sizes.append(block.num_dst_nodes())
        torch.zeros(block.num_edges(), edge_width)
        return torch.zeros(block.num_dst_nodes(), width)

    with start_session():
        layerwise_inference(torch.nn.Linear(1, 1), DistGraph(folder), layers=[widen]).delete()
    assert (sizes[:2], sum(sizes)) == ([1, limit], NODES)


def test_limits_are_equal_in_every_run_unless_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    with start_session() as session:

        def choose(free_bytes: int, num_nodes: int = 1 << 40) -> int:
            monkeypatch.setattr(node_batches, "machine_memory", lambda: (1 << 50, free_bytes))
            return BatchLimits.from_memory(session, num_nodes, 64, 128).edges

        full = node_batches._BATCH_BYTES
        assert choose(1 << 40) == choose(4 * full) == full // 256
        assert choose(4 * full - 1) == choose(2 * full) == full // 512
        assert choose(0) == node_batches.MIN_NODES
        # All nodes fit, and other rows of the batch are those of edges.
        assert choose(1 << 40, num_nodes=1000) == (full - 64_000) // 192
