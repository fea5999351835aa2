"""Pulls and pushes over real ranks, with the byte ledger at zero tolerance."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from dglx_dist.comm.collectives import barrier
from dglx_dist.comm.session import Session, start_session
from dglx_dist.comm.topology import Topology
from dglx_dist.errors import ConfigError
from dglx_dist.graph import partition_book as row_requests
from dglx_dist.graph.column import Column, Shard
from dglx_dist.graph.kvstore import KVStore
from dglx_dist.graph.partition_book import Placement
from dglx_dist.records import Array, ColumnInfo
from tests.helpers import wide
from tests.helpers.ranks import run_ranks

OFFSETS = np.array([0, 7, 7, 20, 31])
"""Four parts, of which the second is empty."""

CASES = [(1, None), (2, 1), (3, 2), *wide((2, None), (3, 1), (4, 2))]
"""(ranks, ranks per server)."""


def table(dtype: str, shape: tuple[int, ...]) -> Array:
    count = int(OFFSETS[-1])
    values = np.random.default_rng(1).integers(0, 2, size=(count, *shape)) if dtype == "bool" else None
    size = count * int(np.prod(shape, dtype=int))
    return (np.arange(size).reshape(count, *shape) if values is None else values).astype(dtype)


def open_store(session: Session) -> KVStore:
    store = KVStore(session, Placement(4, session.topology))
    for name, dtype, shape in (("feat", "float32", (5,)), ("label", "int64", ()), ("mask", "bool", ())):
        rows = table(dtype, shape)
        shards = {part: rows[OFFSETS[part] : OFFSETS[part + 1]] for part in store.placement.local_parts}
        store.add(name, OFFSETS, shards, ColumnInfo(dtype=dtype, row_shape=shape))
    barrier(session, "adding")
    return store


def some_ids(rank: int) -> list[Array]:
    random = np.random.default_rng(rank)
    return [random.integers(0, 31, 50), np.empty(0, np.int64), np.array([30, 0, 0, 30, 7, 6]), np.arange(31)]


def pull_all() -> list[tuple[int, int]]:
    with start_session() as session:
        store = open_store(session)
        bounds = store.placement.server_offsets(OFFSETS)
        server = session.topology.server
        counted = []
        for name, dtype, shape in (("feat", "float32", (5,)), ("label", "int64", ()), ("mask", "bool", ())):
            rows = table(dtype, shape)
            for ids in some_ids(session.topology.rank):
                before = session.ledger.total(phase="features")
                assert store.pull(name, ids).numpy().tobytes() == rows[ids].tobytes()
                sent = session.ledger.total(phase="features") - before
                remote = np.unique(ids[(ids < bounds[server]) | (ids >= bounds[server + 1])])
                row_bytes = rows.itemsize * int(np.prod(shape, dtype=int))
                counted.append((sent, (8 + row_bytes) * len(remote)))
        assert session.ledger.total(phase="features", outside=False) == 0
        return counted


@pytest.mark.parametrize(("ranks", "per_server"), CASES)
def test_pull_equals_indexing_and_costs_what_the_formula_says(ranks: int, per_server: int | None) -> None:
    for counted in run_ranks(pull_all, ranks, ranks_per_server=per_server):
        assert [sent for sent, _ in counted] == [formula for _, formula in counted]
        assert per_server is None or ranks == 1 or any(sent for sent, _ in counted)


def pull_in_pieces() -> tuple[int, bool]:
    with start_session() as session:
        row_requests.MAX_MESSAGE_BYTES = 3 * 20
        store = open_store(session)
        ids = np.arange(31)[::-1].copy()
        rows = store.pull("feat", ids)
        return session.ledger.total(phase="features"), bool(
            (rows.numpy() == table("float32", (5,))[ids]).all()
        )


def test_large_pulls_are_cut_and_cost_the_same() -> None:
    (first, equal_0), (second, equal_1) = run_ranks(pull_in_pieces, 2, ranks_per_server=1)
    assert (equal_0, equal_1) == (True, True)
    assert (first, second) == (24 * 28, 7 * 28)


def pull_alone() -> Any:
    with start_session() as session:
        store = open_store(session)
        rows = None
        if session.topology.rank == 1:
            rows = [store.pull("label", np.array([0, 30, 6])).tolist() for _ in range(3)]
        barrier(session, "waiting for the rank that pulls")
        return rows


def test_one_rank_pulls_while_the_others_wait() -> None:
    assert run_ranks(pull_alone, 3, ranks_per_server=1) == [None, [[0, 30, 6]] * 3, None]


def pull_from_threads() -> list[bool]:
    with start_session() as session:
        store = open_store(session)
        rows, equal = table("float32", (5,)), [False] * 6

        def work(thread: int) -> None:
            random = np.random.default_rng(thread)
            asked = [random.integers(0, 31, 40) for _ in range(20)]
            equal[thread] = all((store.pull("feat", ids).numpy() == rows[ids]).all() for ids in asked)

        threads = [threading.Thread(target=work, args=(thread,)) for thread in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return equal


def test_threads_pull_at_once() -> None:
    assert run_ranks(pull_from_threads, 2, ranks_per_server=1) == [[True] * 6] * 2


def push_to_everyone() -> tuple[int, list[float]]:
    with start_session() as session:
        store = open_store(session)
        bounds, server = store.placement.server_offsets(OFFSETS), session.topology.server
        mine = np.zeros((int(bounds[server + 1] - bounds[server]), 2), np.float32)
        info = ColumnInfo(dtype="float32", row_shape=(2,))
        shard = Shard(first=int(bounds[server]), rows=mine)
        store.add_column(Column(name="out", info=info, bounds=bounds, shards=(shard,), writable=True))
        barrier(session, "adding")
        if session.topology.rank == 0:
            ids = np.array([30, 2, 25, 30])
            store.push("out", ids, np.array([[1, 1], [2, 2], [3, 3], [4, 4]], np.float32))
        barrier(session, "pushing")
        return session.ledger.total(phase="push"), store.pull("out", np.arange(31))[:, 1].tolist()


def test_push_reaches_the_owner_and_the_last_of_repeated_ids_stays() -> None:
    expected = [0.0] * 31
    expected[2], expected[25], expected[30] = 2.0, 3.0, 4.0
    assert run_ranks(push_to_everyone, 2, ranks_per_server=1) == [(2 * (8 + 8), expected), (0, expected)]


@pytest.fixture
def store() -> Any:
    with start_session(topology=Topology(0, 1, (0,))) as session:
        yield open_store(session)


def test_what_cannot_be_asked_for_is_refused(store: KVStore) -> None:
    with pytest.raises(IndexError, match="id 31 at position 2 is outside 'feat'"):
        store.pull("feat", np.array([0, 30, 31]))
    with pytest.raises(IndexError, match="id -1 at position 0"):
        store.pull("feat", np.array([-1]))
    with pytest.raises(ConfigError, match=r"no tensor 'feature' \(known: 'feat', 'label', 'mask'\)"):
        store.pull("feature", np.array([0]))
    with pytest.raises(ConfigError, match="read-only"):
        store.push("feat", np.array([0]), np.zeros((1, 5), np.float32))
    with pytest.raises(ConfigError, match="already"):
        store.add("feat", OFFSETS, {}, ColumnInfo(dtype="float32", row_shape=(5,)))
    with pytest.raises(ConfigError, match="1 rows for 7 ids"):
        store.add("x", OFFSETS, {0: np.zeros(1)}, ColumnInfo(dtype="float64", row_shape=()))


def test_out_is_filled_or_refused(store: KVStore) -> None:
    import torch

    out = torch.empty(2, 5)
    assert store.pull("feat", np.array([3, 1]), out=out) is out
    assert out.numpy().tolist() == table("float32", (5,))[[3, 1]].tolist()
    with pytest.raises(ConfigError, match=r"shape \(3, 5\)"):
        store.pull("feat", np.array([3, 1, 2]), out=out)


def test_shards_are_the_memory_itself(store: KVStore) -> None:
    assert [(first, len(rows)) for first, rows in store.shards("label")] == [
        (0, 7),
        (7, 0),
        (7, 13),
        (20, 11),
    ]
