"""Loaders with look-ahead caches over real ranks: the same bits, and as few rows as Belady's rule fetches."""

import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dgl
import numpy as np
import pytest
import torch

from dglx_dist.comm.collectives import barrier
from dglx_dist.comm.session import start_session
from dglx_dist.dataloading import feature_fetch
from dglx_dist.dataloading.edge_loader import DistEdgeDataLoader
from dglx_dist.dataloading.loader import DataLoader
from dglx_dist.errors import ConfigError, PeerError
from dglx_dist.graph import cache as cache_module
from dglx_dist.graph.cache import CachePlan
from dglx_dist.graph.column import LookAheadRows
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.graph.row_kernels import plan_remote
from dglx_dist.records import Array, ColumnInfo
from tests.dataloading.shop import NUM_NODES, write_shop
from tests.helpers import wide
from tests.helpers.ranks import run_ranks, start_ranks

TYPES, ROWS = ("user", "item"), {"user": 8, "item": 4}
PACES: Sequence[dict[str, Any]] = ({}, {"num_threads": 0}, {"num_threads": 3, "depth": 4})
EPOCH, NUM_STEPS = 2, 10


@pytest.fixture(scope="module")
def shops(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    return {parts: write_shop(tmp_path_factory.mktemp("look") / str(parts), parts) for parts in (2, 3)}


def sampler() -> Any:
    return dgl.dataloading.NeighborSampler([4, 3], prefetch_node_feats={ntype: ["feat"] for ntype in TYPES})


def nodes_of(g: DistGraph, **pace: Any) -> DataLoader:
    """Return a loader over the users of every rank. The last rank has none."""
    rank, last_rank = g.rank(), g.session.topology.world_size - 1
    users = torch.arange(0 if rank < last_rank else NUM_NODES["user"], NUM_NODES["user"])
    loader = DataLoader(g, {"user": users}, sampler(), batch_size=3, shuffle=True, seed=3, **pace)
    loader.set_epoch(EPOCH)
    return loader


def bits(blocks: Sequence[dgl.DGLGraph]) -> bytes:
    nodes = blocks[0].srcnodes
    arrays = [nodes[kind].data[name].numpy() for kind in TYPES for name in (dgl.NID, "feat")]
    return b"".join(array.tobytes() for array in arrays)


def edges_of(g: DistGraph, **pace: Any) -> list[bytes]:
    eids = {"buys": torch.arange(g.rank(), g.num_edges("buys"), 5)}
    options: dict[str, Any] = {"batch_size": 6, "seed": 3, "exclude": "self", **pace}
    return [bits(blocks) for _, _, blocks in DistEdgeDataLoader(g, eids, sampler(), **options)]


def inputs_of(g: DistGraph, ntype: str) -> list[Array]:
    return [blocks[0].srcnodes[ntype].data[dgl.NID].numpy() for _, _, blocks in nodes_of(g)]


def fetched_by_belady(batches: list[Array], own: tuple[int, int], capacity: int) -> int:
    remote = [{int(row) for row in batch if not own[0] <= row < own[1]} for batch in batches]
    kept: set[int] = set()
    fetched = 0
    for step, batch in enumerate(remote):
        fetched += len(batch - kept)
        later = {row: next((n for n in range(step + 1, len(remote)) if row in remote[n]), len(remote))
                 for row in kept | batch}  # fmt: skip
        kept = set(sorted(later, key=later.__getitem__)[:capacity])
    return fetched


def cache(g: DistGraph, alpha: float, policy: str = "lookahead") -> dict[str, CachePlan]:
    return {ntype: g.cache_rows("feat", alpha=alpha, policy=policy, ntype=ntype) for ntype in TYPES}


def count_requests(g: DistGraph) -> int:
    keys = [g.nodes[ntype].data["feat"].kvstore_key for ntype in TYPES]
    counts = [g.kvstore.cache_counts(key) for key in keys]
    return sum(count.local + count.hits + count.misses for count in counts)


def looked_ahead(folder: Path, structure: Any) -> None:
    with start_session(timeout_s=60) as session:
        g = DistGraph(folder, structure=structure)
        inputs = {ntype: inputs_of(g, ntype) for ntype in TYPES}
        plain, plain_edges = [bits(blocks) for _, _, blocks in nodes_of(g)], edges_of(g)
        assert len(plain) == NUM_STEPS
        ranks_here = len(session.topology.ranks_of_server(session.topology.server))
        for alpha in (0.3, 0.9):
            for pace in PACES:
                plans = cache(g, alpha)
                before, counted = session.ledger.total(phase="features"), count_requests(g)
                assert [bits(blocks) for _, _, blocks in nodes_of(g, **pace)] == plain
                sent = 0
                for ntype, plan in plans.items():
                    bounds = g.get_node_partition_policy(ntype).bounds
                    own = int(bounds[session.topology.server]), int(bounds[session.topology.server + 1])
                    budget = int(alpha * (own[1] - own[0])) // ranks_here
                    assert plan.rows == min(budget, NUM_NODES[ntype] - own[1] + own[0])
                    sent += (8 + ROWS[ntype]) * fetched_by_belady(inputs[ntype], own, plan.rows)
                assert session.ledger.total(phase="features") - before == sent
                num_inputs = sum(len(batch) for batches in inputs.values() for batch in batches)
                assert count_requests(g) - counted == num_inputs
            assert edges_of(g) == plain_edges
            assert edges_of(g, num_threads=2) == plain_edges
        check_resuming(g, plain)
        cache(g, 0)
        assert not g.kvstore.has_cache
        g.close()


def check_resuming(g: DistGraph, plain: list[bytes]) -> None:
    """Iterations that end early, one within another, and the rest of an epoch."""
    cache(g, 0.4)
    loader = nodes_of(g, depth=3)
    steps = iter(loader)
    batches = [bits(next(steps)[2]) for _ in range(3)]
    # Another loader has the rows.
    assert [bits(blocks) for _, _, blocks in nodes_of(g)] == plain
    position = loader.state_dict()
    steps.close()
    last_part = nodes_of(g)
    last_part.load_state_dict(position)
    last_part.end_at(6)
    batches += [bits(blocks) for _, _, blocks in last_part]
    assert len(batches) == 6
    # Now the rows that are kept have been chosen with the end in sight.
    assert batches + [bits(blocks) for _, _, blocks in last_part] == plain
    cache(g, 0.4, "halo")
    assert [bits(blocks) for _, _, blocks in nodes_of(g)] == plain
    cache(g, 0.4)
    # Nothing may wait: no batch is known before its turn.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feature_fetch, "WINDOW_BYTES", 0)
        assert [bits(blocks) for _, _, blocks in nodes_of(g)] == plain


@pytest.mark.parametrize(
    ("ranks", "per_server", "structure"),
    [(3, 1, "partitioned"), *wide((2, 1, "replicated"), (4, 2, "partitioned"))],
)
def test_batches_take_least_bytes(
    shops: dict[int, Path], ranks: int, per_server: int, structure: str
) -> None:
    run_ranks(looked_ahead, ranks, args=(shops[ranks // per_server], structure), ranks_per_server=per_server)


@dataclass
class Sample:
    step: int
    inputs: dict[str, Array]
    num_bytes: int = 8


def samples_of(batches: Sequence[Sequence[int]]) -> Iterator[Sample]:
    for step, ids in enumerate(map(np.array, batches)):
        yield Sample(step, {"feat": ids})
    raise ValueError("the sample of the step after")


@pytest.mark.parametrize(
    ("batches", "error"),
    [([[3, 4], [5, 6], [7, 8]], ValueError), ([[3, 4], [5, 6], [7, 8], [9, 10], [1]], IndexError)],
)
def test_the_error_of_a_draw_is_raised_in_its_turn(
    batches: Sequence[Sequence[int]], error: type[Exception]
) -> None:
    # All are drawn before the first is requested: a row that is used again is looked for.
    rows = LookAheadRows(1, ColumnInfo(dtype="int64", row_shape=()), (0, 0), 10)
    assert rows.claim()
    steps: list[int] = []

    def fetch(batch: Sample) -> None:
        ids = batch.inputs["feat"]
        rows.admit(plan_remote(ids, np.array([0, 0, 10]), 0, rows.table, distinct=True))

    with pytest.raises(error):
        steps.extend(
            sample.step for sample in feature_fetch.look_ahead(samples_of(batches), {"feat": rows}, fetch)
        )
    assert steps == [0, 1, 2]


def short_of_memory(folder: Path) -> None:
    with start_session(timeout_s=60), pytest.MonkeyPatch.context() as patch:
        g = DistGraph(folder)
        if g.rank() == 1:
            patch.setattr(cache_module, "machine_memory", lambda: (0, 0))
        with pytest.raises(ConfigError, match=r"rows of .* exceed the free memory\. Use a smaller alpha"):
            cache(g, 0.5)
        assert not g.kvstore.has_cache
        g.close()


def test_memory_that_is_short_on_one_rank_is_refused_on_all(shops: dict[int, Path]) -> None:
    run_ranks(short_of_memory, 2, args=(shops[2],), ranks_per_server=1)


def left_by_its_peer(folder: Path, structure: Any) -> str:
    with start_session(timeout_s=60) as session:
        g = DistGraph(folder, structure=structure)
        cache(g, 0.3)
        rank = g.rank()
        users = torch.arange(NUM_NODES["user"])[rank:]
        loader = DataLoader(g, {"user": users}, sampler(), batch_size=3, num_threads=2)
        barrier(session, "all loaders are open")
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerError, match="rank 1") as caught:
            go_on(loader)
        # The rows that did not arrive are in no slot.
        assert {rows.claim() and rows.table.slots.max() < 0 for rows in rows_of(g)} == {True}
        session.close(failed=True)
        return str(caught.value)


def go_on(loader: DataLoader) -> None:
    for _ in range(50):
        for _ in loader:
            time.sleep(0.01)


def rows_of(g: DistGraph) -> list[LookAheadRows]:
    rows_by_type = [g.kvstore.column(g.nodes[ntype].data["feat"].kvstore_key).ahead for ntype in TYPES]
    return [rows for rows in rows_by_type if rows is not None]


@pytest.mark.parametrize("structure", ["replicated", "partitioned"])
def test_a_dead_owner_of_rows_is_named(shops: dict[int, Path], structure: str) -> None:
    first, second = start_ranks(left_by_its_peer, 2, args=(shops[2], structure), ranks_per_server=1)
    assert second.exitcode == -signal.SIGKILL
    assert not first.error
