"""Writes over real ranks: overwriting, adding, handlers; bytes at zero tolerance."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import numpy as np
import pytest
import torch

from dglx_dist.comm.collectives import barrier
from dglx_dist.comm.session import Session, start_session
from dglx_dist.comm.topology import Topology
from dglx_dist.errors import ConfigError, PeerError, RemoteError
from dglx_dist.graph import partition_book as row_requests
from dglx_dist.graph.column import Column, Shard
from dglx_dist.graph.kvstore import KVStore
from dglx_dist.graph.partition_book import Placement, RowOwners
from dglx_dist.graph.row_kernels import numpy_view
from dglx_dist.graph.shared_memory import shared_rows
from dglx_dist.records import Array, ColumnInfo
from tests.helpers import wide
from tests.helpers.ranks import run_ranks, start_ranks

NUM_ROWS = 31
OFFSETS = np.array([0, 7, 7, 20, NUM_ROWS])
"""Four parts, of which the second is empty."""

CASES = [(1, None), (2, 1), (3, 2), *wide((2, None), (3, 1))]
"""(ranks, ranks per server)."""

KINDS = {"f": ("float32", (5,)), "d": ("float64", ()), "i": ("int64", (2,)), "h": ("bfloat16", (4,))}


def open_store(session: Session) -> KVStore:
    store = KVStore(session, Placement(4, session.topology))
    bounds, server = store.placement.server_offsets(OFFSETS), session.topology.server
    first, last = int(bounds[server]), int(bounds[server + 1])
    for name, (dtype, shape) in KINDS.items():
        info = ColumnInfo(dtype=dtype, row_shape=shape)
        rows = shared_rows(session, f"rows-{name}", last - first, info)
        column = Column(
            name=name, info=info, bounds=bounds, shards=(Shard(first=first, rows=rows),), writable=True
        )
        store.add_column(column)
    barrier(session, "adding")
    return store


def pushed(rank: int, name: str) -> tuple[Array, torch.Tensor]:
    """What ``rank`` adds: whole numbers, so that no order of the sum makes a difference."""
    dtype, shape = KINDS[name]
    random = np.random.default_rng(rank)
    ids = random.integers(0, NUM_ROWS, 40)
    values = random.integers(-3, 4, (40, *shape)).astype(np.float64)
    return ids, torch.from_numpy(values).to(getattr(torch, dtype))


def add_together() -> dict[str, Any]:
    with start_session() as session:
        row_requests.MAX_MESSAGE_BYTES = 100
        store = open_store(session)
        topology = session.topology
        owners = RowOwners(store.placement.server_offsets(OFFSETS), topology)
        seen = {}
        for name in KINDS:
            ids, rows = pushed(topology.rank, name)
            values = numpy_view(rows)
            before = session.ledger.snapshot()
            store.push(name, ids, values, accumulate=True)
            sent = session.ledger.since(before)
            distinct = np.unique(ids)
            owner = owners.rank_of(distinct)
            servers = np.array(topology.server_of_rank)[owner]
            row_bytes = 8 + values[0].nbytes
            away, near = servers != topology.server, (servers == topology.server) & (owner != topology.rank)
            counted = {
                outside: sum(
                    row.num_bytes
                    for row in sent
                    if (not topology.same_server(row.source, row.destination)) is outside
                    and row.phase == "push"
                )
                for outside in (True, False)
            }
            assert counted == {True: row_bytes * int(away.sum()), False: row_bytes * int(near.sum())}
            store.push(name, ids[:7], values[:7], accumulate=True, wait=False)
            store.fence()
        barrier(session, "adding")
        for name in KINDS:
            seen[name] = store.pull(name, np.arange(NUM_ROWS)).double().tolist()
        return seen


@pytest.mark.parametrize(("ranks", "per_server"), CASES)
def test_no_sum_is_lost_and_bytes_are_what_the_formula_says(ranks: int, per_server: int | None) -> None:
    expected = {}
    for name, (_, shape) in KINDS.items():
        total = torch.zeros((NUM_ROWS, *shape), dtype=torch.float64)
        for rank in range(ranks):
            ids, rows = pushed(rank, name)
            for count in (40, 7):
                total.index_add_(0, torch.from_numpy(ids[:count]), rows[:count].double())
        expected[name] = total.tolist()
    for seen in run_ranks(add_together, ranks, ranks_per_server=per_server):
        assert seen == expected


def add_from_threads() -> list[float]:
    with start_session() as session:
        store = open_store(session)
        ids = np.arange(NUM_ROWS)

        def work() -> None:
            for _ in range(25):
                store.push("d", ids, np.ones(NUM_ROWS), accumulate=True, wait=False)
            store.push("d", ids, np.ones(NUM_ROWS), accumulate=True)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        store.fence()
        barrier(session, "adding")
        return store.pull("d", ids).tolist()


def test_threads_of_all_ranks_add_to_the_same_rows() -> None:
    assert run_ranks(add_from_threads, 3, ranks_per_server=2) == [[3 * 4 * 26.0] * NUM_ROWS] * 3


def write_without_waiting() -> list[Any]:
    with start_session() as session:
        store = open_store(session)
        rank = session.topology.rank
        ids = np.arange(NUM_ROWS)[ids_of(rank, session)]
        rows = np.full((len(ids), 5), rank, np.float32)
        store.push("f", ids, rows, wait=False)
        rows[:] = -1  # the caller's again at once
        store.fence()
        barrier(session, "writing")
        first = store.pull("f", np.arange(NUM_ROWS))[:, 4].tolist()
        barrier(session, "reading")
        repeated = np.array([30, 3, 30, 3])
        if rank == 0:
            store.push("f", repeated, np.arange(20, dtype=np.float32).reshape(4, 5))
        barrier(session, "writing once more")
        return [first, store.pull("f", np.array([3, 30]))[:, 0].tolist()]


def ids_of(rank: int, session: Session) -> Array:
    return np.arange(NUM_ROWS) % session.topology.world_size == rank


@pytest.mark.parametrize(("ranks", "per_server"), [(2, 1), (3, 2)])
def test_after_a_fence_every_rank_sees_what_was_written(ranks: int, per_server: int) -> None:
    first = [float(row % ranks) for row in range(NUM_ROWS)]
    for seen in run_ranks(write_without_waiting, ranks, ranks_per_server=per_server):
        assert seen == [first, [15.0, 10.0]]


def use_handlers() -> list[Any]:
    with start_session() as session:
        store = open_store(session)
        rank, calls = session.topology.rank, []

        def keep_largest(rows: torch.Tensor, local_ids: torch.Tensor, values: torch.Tensor) -> None:
            calls.append(len(local_ids))
            for row, value in zip(local_ids.tolist(), values, strict=True):
                rows[row] = torch.maximum(rows[row], value)

        def negated(rows: torch.Tensor, local_ids: torch.Tensor) -> torch.Tensor:
            return -rows[local_ids]

        store.register_push_handler("i", keep_largest)
        ids = np.array([3, 30, 3, 15])
        rows = (np.arange(8).reshape(4, 2) * (rank + 1)).astype(np.int64)
        store.push("i", ids, rows)
        barrier(session, "pushing")
        largest = store.pull("i", np.array([3, 15, 30])).tolist()
        store.register_pull_handler("i", negated)
        asked_for = store.pull("i", np.array([30, 3, 0, 30])).tolist()
        store.register_pull_handler("i", None)
        store.register_push_handler("i", None)
        barrier(session, "handlers are gone")
        if rank == 0:
            store.push("i", ids, rows * 0)
        barrier(session, "overwriting")
        number_of_calls = len(calls)
        return [largest, asked_for, store.pull("i", np.arange(NUM_ROWS)).abs().sum().item(), number_of_calls]


@pytest.mark.parametrize(("ranks", "per_server"), [(1, None), (2, 1), (3, 2)])
def test_handlers_do_what_is_pushed_and_pulled_on_the_owner(ranks: int, per_server: int | None) -> None:
    outcomes = run_ranks(use_handlers, ranks, ranks_per_server=per_server)
    rows = np.arange(8).reshape(4, 2) * ranks
    for largest, asked_for, left, _ in outcomes:
        assert largest == [rows[2].tolist(), rows[3].tolist(), rows[1].tolist()]
        assert asked_for == [(-rows[1]).tolist(), (-rows[2]).tolist(), [0, 0], (-rows[1]).tolist()]
        assert left == 0
    owners = RowOwners(
        Placement(4, topology_of(ranks, per_server)).server_offsets(OFFSETS), topology_of(ranks, per_server)
    )
    owning = len({int(rank) for rank in owners.rank_of(np.array([3, 15, 30]))})
    assert sum(number for *_, number in outcomes) == owning * ranks


def push_one_row_often() -> list[list[Any]]:
    with start_session() as session:
        row_requests.MAX_MESSAGE_BYTES = 100
        store = open_store(session)
        calls: list[list[Any]] = []

        def note(_rows: torch.Tensor, local_ids: torch.Tensor, values: torch.Tensor) -> None:
            calls.append([local_ids.tolist(), values.tolist()])

        store.register_push_handler("d", note)
        if session.topology.rank == 0:
            ids = np.tile([30, 29], 40)
            store.push("d", ids, np.arange(80.0))
        barrier(session, "pushing")
        return calls


def test_rows_of_one_id_reach_the_handler_in_their_order_however_large_the_push() -> None:
    none, calls = run_ranks(push_one_row_often, 2, ranks_per_server=1)
    assert none == []
    first, second = sorted(calls)  # requests may overtake each other
    local = 29 - 7  # rank 1 has the rows from 7 on
    assert first == [[local] * 40, [float(k) for k in range(1, 80, 2)]]
    assert second == [[local + 1] * 40, [float(k) for k in range(0, 80, 2)]]


def topology_of(ranks: int, per_server: int | None) -> Topology:
    return Topology(0, ranks, tuple(rank // (per_server or ranks) for rank in range(ranks)))


def fail_on_one_rank() -> list[str]:
    with start_session() as session:
        store = open_store(session)
        rank, said = session.topology.rank, []

        def refuse(rows: torch.Tensor, local_ids: torch.Tensor, values: torch.Tensor) -> None:
            raise ValueError(f"rank {rank} takes no {int(local_ids[0])}")

        store.register_push_handler("d", refuse)
        last, one = np.array([30]), np.ones(1)
        if rank == 0:
            try:
                store.push("d", last, one)
            except RemoteError as error:
                said.append(str(error))
            store.push("d", last, one, wait=False)
            try:
                store.fence()
            except RemoteError as error:
                said.append(str(error))
            store.fence()
            for ids, rows in (
                (np.array([31]), one),
                (last, np.ones(2)),
                (last, np.ones(1, np.float32)),
                (last.astype(np.int32), one),
                (last.reshape(1, 1), one),
            ):
                try:
                    store.push("d", ids, rows, wait=False)
                except (ConfigError, IndexError) as error:
                    said.append(str(error))
        barrier(session, "the others do not hang")
        try:
            store.register_push_handler("d" if rank else "nothing", None)
        except ConfigError as error:
            said.append(str(error))
        try:
            store.register_push_handler("d", None if rank else refuse)
        except ConfigError as error:
            said.append(str(error))
        return said


def test_errors_reach_the_rank_that_pushed_and_nobody_else() -> None:
    zero, one = run_ranks(fail_on_one_rank, 2, ranks_per_server=1)
    assert "rank 1 takes no 23" in zero[0]
    assert "rank 1 takes no 23" in zero[1]
    for text, part in zip(
        zero[2:7],
        ["id 31 at position 0", "shape (1,), not", "float64", "must be (K,) int64", "shape (1, 1)"],
        strict=True,
    ):
        assert part in text
    assert "no tensor 'nothing'" in zero[7]
    assert "rank 0 on" in one[0]
    assert "no tensor 'nothing'" in one[0]
    assert "rank 1 registers ['push', 'd', False] while rank 0" in zero[8]
    assert "every rank must register the same" in one[1]
    assert (len(zero), len(one)) == (9, 2)


def leave_an_error_behind() -> None:
    with start_session(timeout_s=60) as session:
        store = open_store(session)

        def refuse(rows: torch.Tensor, local_ids: torch.Tensor, values: torch.Tensor) -> None:
            raise ValueError("not today")

        store.register_push_handler("d", refuse)
        if session.topology.rank == 0:
            store.push("d", np.array([30]), np.ones(1), wait=False)


def test_an_error_that_nobody_fetched_is_raised_when_the_session_is_closed() -> None:
    first, _ = start_ranks(leave_an_error_behind, 2, ranks_per_server=1)
    assert "RemoteError" in first.error
    assert "not today" in first.error


def push_to_the_dead() -> list[str]:
    with start_session(timeout_s=60) as session:
        store = open_store(session)

        def die(rows: torch.Tensor, local_ids: torch.Tensor, values: torch.Tensor) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        store.register_push_handler("d", die)
        if session.topology.rank == 0:
            store.push("d", np.array([30]), np.ones(1), wait=False)
            with pytest.raises(PeerError) as caught:
                store.fence()
            store.fence()  # told once; nothing is left to wait for
            session.close(failed=True)
            return [str(caught.value)]
        barrier(session, "never reached")
        return []


def test_a_fence_after_a_push_to_a_rank_that_dies_names_it_and_does_not_hang() -> None:
    first, second = start_ranks(push_to_the_dead, 2, ranks_per_server=1)
    assert second.exitcode == -signal.SIGKILL
    assert "rank 1" in first.result[0]


@pytest.fixture
def store() -> Any:
    with start_session(topology=Topology(0, 1, (0,))) as session:
        yield open_store(session)


def test_what_does_not_fit_changes_nothing(store: KVStore) -> None:
    with pytest.raises(IndexError, match="id 31 at position 1"):
        store.push("d", np.array([0, 31]), np.ones(2), accumulate=True)
    with pytest.raises(ConfigError, match=r"takes rows of float32 and shape \(1, 5\)"):
        store.push("f", np.array([0]), np.ones((1, 4), np.float32), accumulate=True)
    assert store.pull("d", np.arange(NUM_ROWS)).abs().sum() == 0


def test_rows_need_not_be_contiguous_and_may_be_none(store: KVStore) -> None:
    rows = np.arange(20, dtype=np.float32).reshape(5, 4).T
    for accumulate in (False, True):
        store.push("f", np.array([4, 2, 9, 1]), rows, accumulate=accumulate)
        store.push("f", np.empty(0, np.int64), np.empty((0, 5), np.float32), accumulate=accumulate)
    assert store.pull("f", np.array([1, 2, 9])).tolist() == (2 * rows[[3, 1, 2]]).tolist()


def test_with_a_handler_repeats_are_summed_only_when_accumulating(store: KVStore) -> None:
    seen = []
    store.register_push_handler("d", lambda rows, ids, values: seen.append((ids.tolist(), values.tolist())))
    for accumulate in (False, True):
        store.push("d", np.array([5, 3, 5]), np.array([1.0, 2, 3]), accumulate=accumulate)
    assert seen == [([3, 5, 5], [2, 1, 3]), ([5, 3], [4, 2])]


def test_what_a_pull_handler_returns_is_checked(store: KVStore) -> None:
    store.register_pull_handler("d", lambda rows, ids: rows[ids].float())
    with pytest.raises(ConfigError, match=r"returned torch.float32 .* must be torch.float64 of shape \(1,\)"):
        store.pull("d", np.array([2]))
