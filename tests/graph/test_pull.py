"""Which rows a pull reads where: plans worked out by hand, and tables that find cached rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dglx_dist.comm.collectives import barrier
from dglx_dist.comm.session import Session, start_session
from dglx_dist.comm.topology import Topology
from dglx_dist.errors import ConfigError
from dglx_dist.graph.column import CacheCounts, Column, RowCache, Shard
from dglx_dist.graph.kvstore import KVStore
from dglx_dist.graph.partition_book import Placement
from dglx_dist.graph.row_kernels import SlotTable, fill_table, no_slots, plan_pull, slot_of, table_sizes
from dglx_dist.records import Array, ColumnInfo
from tests.helpers import wide
from tests.helpers.ranks import run_ranks

BOUNDS = np.array([0, 10, 20, 30])


def table(ids: Array, num_ids: int, direct_limit: int = 1 << 20) -> SlotTable:
    num_slots, num_keys = table_sizes(len(ids), num_ids, direct_limit)
    made = SlotTable(np.empty(num_slots, np.int32), np.empty(num_keys, np.int64))
    fill_table(made, ids)
    return made


@pytest.mark.parametrize("direct_limit", [1 << 20, 0], ids=["direct", "hashed"])
def test_every_cached_id_has_its_slot_and_no_other_has_one(direct_limit: int) -> None:
    random = np.random.default_rng(0)
    ids = np.sort(random.permutation(100_000)[:700])
    made = table(ids, 100_000, direct_limit)
    assert (len(made.keys) == 0) == (direct_limit > 0)
    assert [slot_of(made, int(key)) for key in ids] == list(range(700))
    others = np.setdiff1d(random.integers(0, 100_000, 2000), ids)
    assert {slot_of(made, int(key)) for key in others} == {-1}
    assert slot_of(no_slots(), 5) == -1


def test_a_large_graph_is_hashed_where_that_is_smaller() -> None:
    assert table_sizes(1000, 1 << 20) == (1 << 20, 0)
    assert table_sizes(1000, 1 << 30) == (2048, 2048)
    # 12 bytes x 2**28 would be more than 4 bytes x 2**27 ids.
    assert table_sizes(1 << 26, 1 << 27) == (1 << 27, 0)


@pytest.mark.parametrize("distinct", [False, True])
def test_own_cached_and_remote_ids_part_ways(distinct: bool) -> None:
    ids = np.array([12, 3, 25, 29, 0, 15, 4])
    plan, hits = plan_pull(ids, BOUNDS, 1, table(np.array([3, 29]), 30), distinct=distinct)
    assert (hits.places.tolist(), hits.slots.tolist()) == ([1, 3], [0, 1])
    assert plan.ids.tolist() == [0, 4, 25]
    assert plan.server_starts.tolist() == [0, 2, 2, 3]
    assert plan.starts.tolist() == [0, 1, 2, 3]
    assert plan.positions.tolist() == [4, 6, 2]


def test_repeated_misses_are_asked_for_once_and_repeated_hits_count_each() -> None:
    plan, hits = plan_pull(np.array([25, 3, 25, 3, 25]), BOUNDS, 1, table(np.array([3]), 30))
    assert (plan.ids.tolist(), plan.positions.tolist()) == ([25], [0, 2, 4])
    assert (hits.places.tolist(), hits.slots.tolist()) == ([1, 3], [0, 0])


def test_nothing_asked_for() -> None:
    plan, hits = plan_pull(np.empty(0, np.int64), BOUNDS, 1, no_slots(), distinct=True)
    assert (len(plan.ids), len(plan.positions), len(hits.places)) == (0, 0, 0)
    assert plan.server_starts.tolist() == [0, 0, 0, 0]


def test_counts_add_up() -> None:
    counts = CacheCounts(local=1, hits=3, misses=2) + CacheCounts(misses=4) - CacheCounts(local=1)
    assert counts == CacheCounts(local=0, hits=3, misses=6)
    assert counts.hit_rate == pytest.approx(1 / 3)
    assert CacheCounts(local=5).hit_rate is None


def rows_of(count: int) -> Array:
    return np.arange(3 * count, dtype=np.float32).reshape(count, 3)


def store_of(session: Session) -> KVStore:
    store, offsets = KVStore(session, Placement(4, session.topology)), np.array([0, 7, 7, 20, 31])
    rows = rows_of(31)
    shards = {part: rows[offsets[part] : offsets[part + 1]] for part in store.placement.local_parts}
    store.add("feat", offsets, shards, ColumnInfo(dtype="float32", row_shape=(3,)))
    return store


def pull_with_private_cache() -> list[Any]:
    """Rank 0 caches for itself; the others ask as before."""
    with start_session() as session:
        store = store_of(session)
        bounds = store.column("feat").bounds
        server, everything = session.topology.server, np.arange(31)
        remote = everything[(everything < bounds[server]) | (everything >= bounds[server + 1])]
        if session.topology.rank == 0:
            store.set_cache("feat", RowCache(table=table(remote[::2], 31), rows=rows_of(31)[remote[::2]]))
        ids = np.random.default_rng(session.topology.rank).integers(0, 31, 80)
        found = []
        for asked, distinct in ((ids, False), (np.unique(ids)[::-1].copy(), True)):
            sent, counts = session.ledger.total(phase="features"), store.cache_counts("feat")
            equal = bool((store.pull("feat", asked, distinct=distinct).numpy() == rows_of(31)[asked]).all())
            sent = session.ledger.total(phase="features") - sent
            counts = store.cache_counts("feat") - counts
            cached = remote[::2] if session.topology.rank == 0 else remote[:0]
            missed = np.setdiff1d(np.intersect1d(asked, remote), cached)
            found.append(
                (equal, sent - (8 + 12) * len(missed), counts.hits - int(np.isin(asked, cached).sum()))
            )
            found.append(counts.local + counts.hits + counts.misses - len(asked))
        barrier(session, "pulling")
        return found


@pytest.mark.parametrize(("ranks", "per_server"), [(1, None), (2, 1), *wide((3, 1), (4, 2))])
def test_a_cache_changes_bytes_and_counts_only(ranks: int, per_server: int | None) -> None:
    for found in run_ranks(pull_with_private_cache, ranks, ranks_per_server=per_server):
        assert found == [(True, 0, 0), 0, (True, 0, 0), 0]


def test_what_can_be_written_to_is_not_cached() -> None:
    with start_session(topology=Topology(0, 1, (0,))) as session:
        store = store_of(session)
        shard, info = Shard(first=0, rows=rows_of(5)), ColumnInfo(dtype="float32", row_shape=(3,))
        store.add_column(
            Column(name="own", info=info, bounds=np.array([0, 5]), shards=(shard,), writable=True)
        )
        with pytest.raises(ConfigError, match="'own' can be written to"):
            store.set_cache("own", RowCache(table=no_slots(), rows=rows_of(0)))
        with pytest.raises(ConfigError, match="no tensor 'feet'"):
            store.cache_counts("feet")
