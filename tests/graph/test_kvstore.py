"""Pulls and pushes over real ranks, with the byte ledger at zero tolerance."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dglx_dist.comm.collectives import barrier, gather_int64
from dglx_dist.comm.rpc import Rpc
from dglx_dist.comm.session import Session, start_session
from dglx_dist.comm.topology import Topology
from dglx_dist.errors import ConfigError, PeerError, RemoteError
from dglx_dist.graph import kvstore, shared_memory
from dglx_dist.graph import partition_book as row_requests
from dglx_dist.graph.column import Column, RowCache, Shard
from dglx_dist.graph.kvstore import KVStore
from dglx_dist.graph.partition_book import Placement, RowOwners
from dglx_dist.graph.row_kernels import (
    NO_SLOTS,
    SlotTable,
    compute_table_sizes,
    fill_table,
    find_slot,
    view_as_numpy,
)
from dglx_dist.graph.shared_memory import map_shared_rows
from dglx_dist.records import Array, ColumnInfo
from tests.helpers import wide
from tests.helpers.ranks import run_ranks, start_ranks

NUM_ROWS = 31
FIRST, INFO = np.array([0]), ColumnInfo(dtype="float32", row_shape=(5,))
OFFSETS = np.array([0, 7, 7, 20, NUM_ROWS])
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


def each(*functions: Callable[[], None]) -> None:
    for function in functions:
        function()


@pytest.mark.parametrize(("ranks", "per_server"), CASES)
def test_stores_agree_on_ranks_and_servers(ranks: int, per_server: int | None) -> None:
    # The last one makes messages small, also for those that followed it.
    request = (pull_all, pull_with_private_cache, add_from_threads, write_without_waiting, use_handlers)
    run_ranks(each, ranks, args=(*request, add_together), ranks_per_server=per_server)


def test_errors_and_repeated_pushes_reach_the_other_server() -> None:
    run_ranks(each, 2, args=(fail_on_one_rank, push_one_row_often), ranks_per_server=1)


def some_ids(rank: int) -> list[Array]:
    random = np.random.default_rng(rank)
    return [random.integers(0, 31, 50), np.empty(0, np.int64), np.array([30, 0, 0, 30, 7, 6]), np.arange(31)]


def pull_all() -> None:
    """A pull equals indexing, and costs what the formula says."""
    with start_session() as session:
        store, topology = open_store(session), session.topology
        bounds, total = store.placement.server_offsets(OFFSETS), 0
        for name, dtype, shape in (("feat", "float32", (5,)), ("label", "int64", ()), ("mask", "bool", ())):
            rows = table(dtype, shape)
            for ids in some_ids(topology.rank):
                before = session.ledger.total(phase="features")
                assert store.pull(name, ids).numpy().tobytes() == rows[ids].tobytes()
                sent = session.ledger.total(phase="features") - before
                remote = np.unique(
                    ids[(ids < bounds[topology.server]) | (ids >= bounds[topology.server + 1])]
                )
                assert sent == (8 + rows[0].nbytes) * len(remote)
                total += sent
        assert session.ledger.total(phase="features", outside=False) == 0
        assert (total > 0) == (topology.num_servers > 1)


@pytest.fixture
def store(alone: Session) -> KVStore:
    return open_store(alone)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda kv: kv.pull("feat", np.array([0, 30, 31])), "id 31 at position 2 is outside 'feat'"),
        (lambda kv: kv.pull("feat", np.array([-1])), "id -1 at position 0"),
        (lambda kv: kv.pull("feature", FIRST), r"no tensor 'feature' \(known: 'feat', 'label', 'mask'\)"),
        (lambda kv: kv.push("feat", FIRST, np.zeros((1, 5), np.float32)), "read-only"),
        (lambda kv: kv.add("feat", OFFSETS, {}, INFO), "already"),
        (
            lambda kv: kv.add("x", OFFSETS, {0: np.zeros(1)}, ColumnInfo(dtype="float64", row_shape=())),
            "1 rows for 7 ids",
        ),
        (lambda kv: kv.cache_counts("feet"), "no tensor 'feet'"),
        (lambda kv: kv.pull("feat", FIRST, out=torch.empty(2, 5)), r"shape \(1, 5\)"),
    ],
)
def test_refuses_wrong_pulls_pushes(store: KVStore, ask: Callable[[KVStore], object], message: str) -> None:
    with pytest.raises((IndexError, ConfigError), match=message):
        ask(store)


def test_out_is_filled(store: KVStore) -> None:
    out = torch.empty(2, 5)
    assert store.pull("feat", np.array([3, 1]), out=out) is out
    assert out.numpy().tolist() == table("float32", (5,))[[3, 1]].tolist()


class FakeRpc:
    """Answers calls when ``gate`` is open; those to a name that begins with "bad" fail."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.sent: list[str] = []
        self.waited: list[str] = []

    def submit(self, rank: int, op: str, name: str, arrays: Any, *, phase: str) -> Any:
        self.sent.append(name)

        def result(timeout_s: float) -> list[Any]:
            self.waited.append(name)
            if not self.gate.wait(timeout_s):
                raise PeerError(f"rank {rank} did not answer {name}")
            if name.startswith("bad"):
                raise RemoteError(f"rank {rank} failed at {name}")
            return []

        return SimpleNamespace(result=result, is_ready=self.gate.is_set, age_s=0.0)


@pytest.fixture
def rpc(monkeypatch: pytest.MonkeyPatch) -> FakeRpc:
    fake = FakeRpc()
    monkeypatch.setattr(Rpc, "submit", lambda _, *args, **options: fake.submit(*args, **options))
    return fake


@pytest.fixture
def remote(alone: Session, rpc: FakeRpc) -> Iterator[KVStore]:
    """A store of which another server owns all rows."""
    alone.topology = Topology(0, 2, (0, 1))
    store = KVStore(alone, Placement(2, alone.topology))
    info, bounds = ColumnInfo(dtype="int64", row_shape=()), np.array([0, 0, 9])
    for name in ("a", "b", "bad a", "bad b"):
        store.add_column(Column(name=name, info=info, bounds=bounds, shards=(), writable=True))
    yield store
    rpc.gate.set()


def push(store: KVStore, *names: str) -> None:
    for name in names:
        store.push(name, np.array([1]), np.array([5]), wait=False)


def test_a_fence_that_waits_in_vain_names_the_missing_and_repeats(remote: KVStore, rpc: FakeRpc) -> None:
    push(remote, "a", "b")
    for _ in range(2):
        with pytest.raises(
            PeerError, match=r"rank 1 did not answer a. Number of unanswered pushes: rank 1 \(2\)"
        ):
            remote.fence(0.01)
    rpc.gate.set()
    remote.fence()


def test_errors_are_raised_at_the_fence_once_and_counted(remote: KVStore, rpc: FakeRpc) -> None:
    push(remote, "a", "bad a")
    rpc.gate.set()
    push(remote, "bad b", "bad a", "b")
    with pytest.raises(RemoteError, match="failed at bad a") as caught:
        remote.fence()
    assert caught.value.__notes__ == ["2 more pushes with wait=False failed too"]
    remote.fence()
    assert rpc.sent == ["a", "bad a", "bad b", "bad a", "b"]


def test_a_push_waits_for_room(remote: KVStore, rpc: FakeRpc, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvstore, "MAX_BYTES", 32)
    push(remote, "a", "b")  # 16 bytes each
    assert rpc.waited == []
    remote.session.timeout_s = 0.01
    with pytest.raises(PeerError, match="did not answer a"):
        push(remote, "a")
    assert rpc.sent == ["a", "b"]
    rpc.gate.set()
    push(remote, "a")
    remote.fence()
    assert rpc.sent == ["a", "b", "a"]


def make_table(ids: Array, num_ids: int, direct_limit: int = 1 << 20) -> SlotTable:
    num_slots, num_keys = compute_table_sizes(len(ids), num_ids, direct_limit)
    made = SlotTable(np.empty(num_slots, np.int32), np.empty(num_keys, np.int64))
    fill_table(made, ids)
    return made


@pytest.mark.parametrize("direct_limit", [1 << 20, 0], ids=["direct", "hashed"])
def test_every_cached_id_has_its_slot_and_no_other_has_one(direct_limit: int) -> None:
    random = np.random.default_rng(0)
    ids = np.sort(random.permutation(100_000)[:700])
    made = make_table(ids, 100_000, direct_limit)
    assert (len(made.keys) == 0) == (direct_limit > 0)
    assert [find_slot(made, int(key)) for key in ids] == list(range(700))
    remaining = np.setdiff1d(random.integers(0, 100_000, 2000), ids)
    assert {find_slot(made, int(key)) for key in remaining} == {-1}
    assert find_slot(NO_SLOTS, 5) == -1


def test_a_large_graph_is_hashed_where_that_is_smaller() -> None:
    assert compute_table_sizes(1000, 1 << 20) == (1 << 20, 0)
    assert compute_table_sizes(1000, 1 << 30) == (2048, 2048)
    # 12 bytes x 2**28 would be more than 4 bytes x 2**27 ids.
    assert compute_table_sizes(1 << 26, 1 << 27) == (1 << 27, 0)


def pull_with_private_cache() -> None:
    """Rank 0 caches for itself, which changes bytes and counts only; the others ask as before."""
    with start_session() as session:
        store, rows = open_store(session), table("float32", (5,))
        bounds = store.column("feat").bounds
        server, everything = session.topology.server, np.arange(31)
        remote = everything[(everything < bounds[server]) | (everything >= bounds[server + 1])]
        cached = remote[::2] if session.topology.rank == 0 else remote[:0]
        if len(cached):
            store.set_cache("feat", cache=RowCache(table=make_table(cached, 31), rows=rows[cached]))
        ids = np.random.default_rng(session.topology.rank).integers(0, 31, 80)
        for request, distinct in ((ids, False), (np.unique(ids)[::-1].copy(), True)):
            sent, counts = session.ledger.total(phase="features"), store.cache_counts("feat")
            assert (store.pull("feat", request, distinct=distinct).numpy() == rows[request]).all()
            missed = np.setdiff1d(np.intersect1d(request, remote), cached)
            assert session.ledger.total(phase="features") - sent == (8 + 20) * len(missed)
            counts = store.cache_counts("feat") - counts
            assert counts.hits == np.isin(request, cached).sum()
            assert counts.local + counts.hits + counts.misses == len(request)
        barrier(session, "pulling")


KINDS = {
    "f": ("float32", (5,)),
    "d": ("float64", ()),
    "i": ("int64", (2,)),
    "h": ("bfloat16", (4,)),
    "e": ("float16", ()),
    "b": ("int8", (3,)),
}


def open_to_push(session: Session) -> KVStore:
    store = KVStore(session, Placement(4, session.topology))
    bounds, server = store.placement.server_offsets(OFFSETS), session.topology.server
    first, last = int(bounds[server]), int(bounds[server + 1])
    for name, (dtype, shape) in KINDS.items():
        info = ColumnInfo(dtype=dtype, row_shape=shape)
        rows = map_shared_rows(session, f"rows-{name}", last - first, info)
        column = Column(
            name=name, info=info, bounds=bounds, shards=(Shard(first=first, rows=rows),), writable=True
        )
        store.add_column(column)
    barrier(session, "adding")
    return store


def make_push(rank: int, name: str) -> tuple[Array, torch.Tensor]:
    """Return ids and values that ``rank`` adds. Values are whole numbers, so every order has the same sum."""
    dtype, shape = KINDS[name]
    random = np.random.default_rng(rank)
    ids = random.integers(0, NUM_ROWS, 40)
    values = random.integers(-3, 4, (40, *shape)).astype(np.float64)
    return ids, torch.from_numpy(values).to(getattr(torch, dtype))


def add_together() -> None:
    """No sum is lost, and bytes are what the formula says."""
    with start_session() as session:
        row_requests.MAX_MESSAGE_BYTES = 100
        store, topology = open_to_push(session), session.topology
        owners = RowOwners(store.placement.server_offsets(OFFSETS), topology)
        for name in KINDS:
            ids, rows = make_push(topology.rank, name)
            values = view_as_numpy(rows)
            before = session.ledger.snapshot()
            store.push(name, ids, values, accumulate=True)
            sent = session.ledger.since(before)
            owner = owners.find_rank(np.unique(ids))
            servers = np.array(topology.server_of_rank)[owner]
            row_bytes = 8 + values[0].nbytes
            away, near = servers != topology.server, (servers == topology.server) & (owner != topology.rank)
            counted = [
                sum(row.num_bytes for row in sent if row.phase == "push" and row.inside is inside)
                for inside in (False, True)
            ]
            assert counted == [row_bytes * int(away.sum()), row_bytes * int(near.sum())]
            store.push(name, ids[:7], values[:7], accumulate=True, wait=False)
            store.fence()
        barrier(session, "adding")
        for name, (_, shape) in KINDS.items():
            total = torch.zeros((NUM_ROWS, *shape), dtype=torch.float64)
            for rank in range(topology.world_size):
                ids, rows = make_push(rank, name)
                for count in (40, 7):
                    total.index_add_(0, torch.from_numpy(ids[:count]), rows[:count].double())
            assert torch.equal(store.pull(name, np.arange(NUM_ROWS)).double(), total)


def add_from_threads() -> None:
    with start_session() as session:
        store = open_to_push(session)
        ids = np.arange(NUM_ROWS)

        def work(_thread: int) -> None:
            for _ in range(25):
                store.push("d", ids, np.ones(NUM_ROWS), accumulate=True, wait=False)
            store.push("d", ids, np.ones(NUM_ROWS), accumulate=True)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))
        store.fence()
        barrier(session, "adding")
        assert (store.pull("d", ids) == session.topology.world_size * 4 * 26.0).all()


def write_without_waiting() -> None:
    with start_session() as session:
        store = open_to_push(session)
        rank, every = session.topology.rank, np.arange(NUM_ROWS)
        writer = every % session.topology.world_size
        ids = every[writer == rank]
        rows = np.full((len(ids), 5), rank, np.float32)
        store.push("f", ids, rows, wait=False)
        rows[:] = -1  # the caller's again at once
        store.fence()
        barrier(session, "writing")
        assert store.pull("f", every)[:, 4].tolist() == writer.tolist()
        barrier(session, "reading")
        repeated, before = np.array([30, 3, 30, 3]), session.ledger.total(phase="push")
        if rank == 0:
            store.push("f", repeated, np.arange(20, dtype=np.float32).reshape(4, 5))
        sent = session.ledger.total(phase="push") - before
        barrier(session, "writing once more")
        # Of a repeated id the last row stays, and only that is sent: row 30, where it is another server's.
        assert store.pull("f", np.array([3, 30]))[:, 0].tolist() == [15, 10]
        assert sent == (8 + 20) * (rank == 0 and session.topology.num_servers > 1)


def use_handlers() -> None:
    with start_session() as session:
        store, topology, calls = open_to_push(session), session.topology, []

        def keep_largest(rows: torch.Tensor, local_ids: torch.Tensor, values: torch.Tensor) -> None:
            calls.append(len(local_ids))
            for row, value in zip(local_ids.tolist(), values, strict=True):
                rows[row] = torch.maximum(rows[row], value)

        def negate(rows: torch.Tensor, local_ids: torch.Tensor) -> torch.Tensor:
            return -rows[local_ids]

        store.register_push_handler("i", keep_largest)
        ids, rows = np.array([3, 30, 3, 15]), np.arange(8).reshape(4, 2)
        store.push("i", ids, rows * (topology.rank + 1))
        barrier(session, "pushing")
        largest = torch.from_numpy(rows * topology.world_size)
        assert torch.equal(store.pull("i", np.array([15, 3, 30])), largest[[3, 2, 1]])
        store.register_pull_handler("i", negate)
        assert torch.equal(store.pull("i", np.array([30, 3, 30])), -largest[[1, 2, 1]])
        store.register_pull_handler("i", None)
        store.register_push_handler("i", None)
        barrier(session, "handlers are gone")
        if topology.rank == 0:
            store.push("i", ids, rows * 0)
        barrier(session, "overwriting")
        assert store.pull("i", np.arange(NUM_ROWS)).abs().sum() == 0
        owners = RowOwners(store.placement.server_offsets(OFFSETS), topology)
        owning = len(np.unique(owners.find_rank(np.array([3, 15, 30]))))
        assert gather_int64([len(calls)], session).sum() == owning * topology.world_size


def push_one_row_often() -> None:
    """Rows of one id reach the handler in their order, however large the push."""
    with start_session() as session:
        row_requests.MAX_MESSAGE_BYTES = 100
        store = open_to_push(session)
        calls: list[list[Any]] = []

        def note(_rows: torch.Tensor, local_ids: torch.Tensor, values: torch.Tensor) -> None:
            calls.append([local_ids.tolist(), values.tolist()])

        store.register_push_handler("d", note)
        if session.topology.rank == 0:
            store.push("d", np.tile([30, 29], 40), np.arange(80.0))
        barrier(session, "pushing")
        # Rank 1 has the rows from 7 on; requests may overtake each other.
        expected = [[[22] * 40, [*range(1, 80, 2)]], [[23] * 40, [*range(0, 80, 2)]]]
        assert sorted(calls) == (expected if session.topology.rank else [])


NOT_TO_PUSH: list[tuple[Any, Any, str]] = [
    ([31], np.ones(1), "id 31 at position 0"),
    ([30], np.ones(2), r"\(1,\), not"),
    ([30], np.ones(1, np.float32), "float64"),
    (np.array([30], np.int32), np.ones(1), r"must be \(K,\) int64"),
    ([[30]], np.ones(1), r"shape \(1, 1\)"),
]


def fail_on_one_rank() -> None:
    """Errors reach the rank that pushed and nobody else; a wrong handler is an error on all."""
    with start_session() as session:
        store, rank = open_to_push(session), session.topology.rank

        def refuse(rows: torch.Tensor, local_ids: torch.Tensor, values: torch.Tensor) -> None:
            raise ValueError(f"rank {rank} takes no {int(local_ids[0])}")

        store.register_push_handler("d", refuse)
        if rank == 0:
            with pytest.raises(RemoteError, match="rank 1 takes no 23"):
                store.push("d", np.array([30]), np.ones(1))
            store.push("d", np.array([30]), np.ones(1), wait=False)
            with pytest.raises(RemoteError, match="rank 1 takes no 23"):
                store.fence()
            store.fence()
            for ids, rows, message in NOT_TO_PUSH:
                with pytest.raises((IndexError, ConfigError), match=message):
                    store.push("d", np.asarray(ids), rows, wait=False)
        barrier(session, "the others do not hang")
        with pytest.raises(ConfigError, match="no tensor 'nothing'"):
            store.register_push_handler("d" if rank else "nothing", None)
        with pytest.raises(ConfigError, match=r"disagree on a handler: .*every rank must register the same"):
            store.register_push_handler("d", None if rank else refuse)


def leave_an_error_behind() -> None:
    with start_session(timeout_s=60) as session:
        store = open_to_push(session)

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
        store = open_to_push(session)

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
def target(alone: Session) -> KVStore:
    return open_to_push(alone)


def test_writable_columns_are_not_cached_and_wrong_rows_change_nothing(target: KVStore) -> None:
    with pytest.raises(ConfigError, match="'d' can be written to"):
        target.set_cache("d", cache=RowCache(table=NO_SLOTS, rows=np.empty(0)))
    with pytest.raises(IndexError, match="id 31 at position 1"):
        target.push("d", np.array([0, 31]), np.ones(2), accumulate=True)
    with pytest.raises(ConfigError, match=r"takes float32 \(1, 5\)"):
        target.push("f", np.array([0]), np.ones((1, 4), np.float32), accumulate=True)
    assert target.pull("d", np.arange(NUM_ROWS)).abs().sum() == 0


def test_rows_need_not_be_contiguous_and_may_be_none(target: KVStore) -> None:
    rows = np.arange(20, dtype=np.float32).reshape(5, 4).T
    for accumulate in (False, True):
        target.push("f", np.array([4, 2, 9, 1]), rows, accumulate=accumulate)
        target.push("f", np.empty(0, np.int64), np.empty((0, 5), np.float32), accumulate=accumulate)
    assert target.pull("f", np.array([1, 2, 9])).tolist() == (2 * rows[[3, 1, 2]]).tolist()


def test_with_a_handler_repeats_are_summed_only_when_accumulating(target: KVStore) -> None:
    seen = []
    target.register_push_handler("d", lambda rows, ids, values: seen.append((ids.tolist(), values.tolist())))
    for accumulate in (False, True):
        target.push("d", np.array([5, 3, 5]), np.array([1.0, 2, 3]), accumulate=accumulate)
    assert seen == [([3, 5, 5], [2, 1, 3]), ([5, 3], [4, 2])]


def test_results_of_pull_handlers_are_checked(target: KVStore) -> None:
    target.register_pull_handler("d", lambda rows, ids: rows[ids].float())
    with pytest.raises(
        ConfigError, match=r"returned torch.float32 .* must return torch.float64 of shape \(1,\)"
    ):
        target.pull("d", np.array([2]))


def test_memory_limit_is_exact_to_the_byte(alone: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "machine_memory", lambda: (10**9, 1000))
    shared_memory.check_memory(alone, np.array([0, 10]), 100, "it", "use less")
    with pytest.raises(ConfigError, match=r"it needs 0\.000 GB for 10 rows of 101 bytes on .*; use less"):
        shared_memory.check_memory(alone, np.array([0, 10]), 101, "it", "use less")
