"""A rank's columns are those of the rows: any dtype, any number of ranks, from files and from peers."""

import resource
import shutil
import tracemalloc
from collections import namedtuple
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from dglx_dist.comm.session import Session, start_session
from dglx_dist.data.partition.base import PartitionPlan
from dglx_dist.data.partition.prepare import partition_to_disk
from dglx_dist.data.storage.arrays import STAMP
from dglx_dist.data.storage.reader import open_dataset
from dglx_dist.data.storage.writer import write_dataset
from dglx_dist.dataloading.feature_fetch import RowMemory
from dglx_dist.errors import ConfigError, RemoteError, StorageError
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.layers.dropout import ColumnRange, deal_out_columns
from dglx_dist.records import EDGE_TYPE, NODE_TYPE, Assignment, RawGraph, SparseRows
from dglx_dist.strategies.push_pull import feature_columns
from dglx_dist.strategies.push_pull.exchange import Group, make_group
from dglx_dist.strategies.push_pull.feature_columns import (
    PHASE,
    VALUES,
    ColumnSlice,
    ColumnStore,
    ColumnStores,
    load_columns,
    stored_slice,
    write_slices,
)
from tests.data.storage.graphs import random_heterogeneous, random_homogeneous
from tests.helpers import wide
from tests.helpers.ranks import run_ranks

NUM_NODES, NUM_PARTS = 60, 4
FILE = f"{VALUES}.npy"
WIDTHS = {"one": 1, "three": 3, "hundred": 100, "odd": 101}
DTYPES = ("bool", "uint8", "int32", "int64", "float16", "bfloat16", "float32", "float64")
NAMES = (*WIDTHS, *DTYPES, "sparse")


def raw_graph() -> RawGraph:
    """Features of all widths, which node 0's tell apart, of all dtypes, and mostly zero ones."""
    random = np.random.default_rng(1)
    data: dict[str, Any] = {
        name: random.standard_normal((NUM_NODES, width)).astype(np.float32) for name, width in WIDTHS.items()
    }
    for dtype in DTYPES:
        first, stored = (16256, "uint16") if dtype == "bfloat16" else (0, dtype)
        data[dtype] = random.integers(first, first + 44, (NUM_NODES, 5)).astype(stored)
    dense = np.where(random.random((NUM_NODES, 7)) < 0.2, random.random((NUM_NODES, 7)), 0)
    rows, columns = np.nonzero(dense)
    indptr = np.searchsorted(rows, np.arange(NUM_NODES + 1))
    data["sparse"] = SparseRows(
        indptr=indptr, indices=columns.astype(np.int32), values=dense[rows, columns], num_columns=7
    )
    # Sums of squares would lose the variance.
    data["large"] = 1e9 + np.tile([-1.0, 1.0], (NUM_NODES, 4))
    data["vector"] = random.random(NUM_NODES)
    ends = random.integers(0, NUM_NODES, (2, 100))
    return RawGraph(
        name="columns",
        num_nodes={NODE_TYPE: NUM_NODES},
        edges={EDGE_TYPE: (ends[0], ends[1])},
        node_data={NODE_TYPE: data},
    )


def write(folder: Path, *, num_parts: int = NUM_PARTS, last_is_empty: bool = False) -> Path:
    """Unequal parts of random nodes; the last one has none if ``last_is_empty``."""
    shares = np.array([0.4, 0.3, 0.2, 0.1][:num_parts])
    if last_is_empty:
        shares[-1] = 0
    part_of = np.random.default_rng(2).choice(num_parts, NUM_NODES, p=shares / shares.sum())
    owners = Assignment(
        num_parts=num_parts, part_of={NODE_TYPE: part_of.astype(np.int32)}, method="test", seed=0
    )
    write_dataset(raw_graph(), owners, folder / "data", bfloat16={(NODE_TYPE, "bfloat16")})
    return folder / "data"


def count_received_bytes(session: Session, before: Any) -> int:
    """Bytes that this rank received as columns since then; what it asked with is 32 bytes a message."""
    own_rank = session.topology.rank
    rows = [row for row in session.ledger.since(before) if row.phase == PHASE]
    requested = sum(row.num_bytes for row in rows if row.source == own_rank)
    assert requested % 32 == 0
    assert requested <= 32 * NUM_PARTS * len(NAMES)
    return sum(row.num_bytes for row in rows if row.destination == own_rank)


STORES: dict[tuple[str, Group], ColumnStores] = {}


def open_columns(g: DistGraph, names: Sequence[str], group: Group) -> ColumnStore:
    """Open columns of a graph and a group, until the graph is closed."""
    key = g.kvstore.label, group
    if key not in STORES:
        STORES[key] = ColumnStores(g, group)
        g.on_close.append(STORES[key].close)
    return STORES[key].open(NODE_TYPE, names)


@contextmanager
def without_files() -> Iterator[None]:
    """Keep columns in memory, as those of tensors that the program made."""

    def slice_in_memory(*args: Any) -> ColumnSlice:
        return replace(stored_slice(*args), folder=None)

    with mock.patch.object(feature_columns, "stored_slice", slice_in_memory):
        yield


def rows_elsewhere(g: DistGraph, name: str = "one") -> int:
    first, last = g.ndata[name].local_range
    return g.num_nodes() - (last - first)


def check_rows(g: DistGraph, store: ColumnStore, name: str, part: int, parts: int) -> None:
    nodes = torch.randint(0, g.num_nodes(), (200,), generator=torch.Generator().manual_seed(part))
    all_rows = g.ndata[name][nodes]
    width = all_rows.shape[1]
    expected = all_rows[:, deal_out_columns(width, parts)[part].cut]
    rows = store.rows(name, nodes)
    halves = (torch.float16, torch.bfloat16)
    assert rows.dtype == (torch.float32 if all_rows.dtype in halves else all_rows.dtype)
    assert store.dtype(name) == all_rows.dtype
    assert torch.equal(rows, expected.to(rows.dtype))
    memory = RowMemory()
    for _ in range(2):
        assert torch.equal(store.rows(name, nodes, memory), rows)
        assert store.rows(name, nodes[:0], memory).dtype == rows.dtype
    assert (store.widths[name], len(store.slices[name].columns)) == (width, expected.shape[1])
    assert store.rows(name, nodes[:0]).shape == (0, expected.shape[1])


def check_moments(g: DistGraph, names: tuple[str, ...], group: Group) -> None:
    every, store = torch.arange(g.num_nodes()), open_columns(g, names, group)
    rows = torch.cat([g.ndata[name][every].double() for name in names], 1)
    mean, variance = store.moments()
    assert mean.dtype == variance.dtype == torch.float64
    torch.testing.assert_close(mean, rows.mean(1), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(variance, rows.var(1, correction=0), rtol=1e-13, atol=1e-13)
    assert store.moments()[0] is mean


def everything(folder: str, size: int) -> None:
    """Open all features in memory, then with files to be made, then with files that are there."""
    with start_session(timeout_s=60) as session:
        group = make_group(session, size or session.topology.world_size)
        for cache, is_found in ((False, False), (True, False), (True, True)):
            g = DistGraph(folder)
            before = session.ledger.snapshot()
            with nullcontext() if cache else without_files():
                store = open_columns(g, NAMES, group)
            row_bytes = {
                name: len(store.slices[name].columns) * g.ndata[name].dtype.itemsize for name in NAMES
            }
            # Ranks of one machine that hold the same columns make one file.
            loads = not is_found and (not cache or group.rank == min(group.replicas))
            assert count_received_bytes(session, before) == loads * sum(row_bytes.values()) * rows_elsewhere(
                g
            )
            assert (
                sum(slice_.rows.nbytes for slice_ in store.slices.values())
                == sum(row_bytes.values()) * NUM_NODES
            )
            for name in NAMES:
                check_rows(g, store, name, group.part, group.size)
            check_sharing(g, store, make_group(session, group.size))
            for names in (("odd", "float16", "bfloat16", "int32"), ("one",), ("large",)):
                check_moments(g, names, group)
            check_disagreement(g, group)
            g.close()
            with pytest.raises(ConfigError, match="closed"):
                store.rows("one", torch.tensor([0]))


def check_sharing(g: DistGraph, store: ColumnStore, group: Group) -> None:
    """Open columns are not opened again, even if they are requested together with others."""
    before = g.session.ledger.snapshot()
    assert open_columns(g, list(NAMES), group) is store
    second_store = open_columns(g, ["three"], group)
    assert second_store.slices["three"] is store.slices["three"]
    assert count_received_bytes(g.session, before) == 0


def check_disagreement(g: DistGraph, group: Group) -> None:
    """Ranks that request different columns get an error on every rank, and can continue."""
    if g.session.topology.world_size == 1:
        return
    names = ["one", "three"] if g.session.topology.rank else ["three", "one"]
    with pytest.raises(ConfigError, match="every rank must ask for the same") as caught:
        open_columns(g, names, group)
    assert "['one', 'three']" in str(caught.value)
    assert "['three', 'one']" in str(caught.value)
    with pytest.raises(ConfigError, match=r"rows of shape \(\).* \(V, 1\)"):
        open_columns(g, ["vector", "odd"] if g.session.topology.rank else ["odd", "one"], group)


# The last has two parts, in two groups.
@pytest.mark.parametrize(
    ("ranks", "ranks_per_server", "size"), [(1, 1, 0), (4, 2, 2), *wide((3, 2, 0), (4, 1, 0))]
)
def test_rows_are_those_of_the_dataset(tmp_path: Path, ranks: int, ranks_per_server: int, size: int) -> None:
    folder = write(tmp_path, last_is_empty=ranks == 4)
    if ranks == 1:
        everything(str(folder), size)
    else:
        run_ranks(everything, ranks, args=(str(folder), size), ranks_per_server=ranks_per_server)


@pytest.fixture
def session() -> Any:
    with start_session(timeout_s=30) as opened:
        yield opened


def test_rows_that_do_not_exist_are_refused(tmp_path: Path, session: Session) -> None:
    g = DistGraph(write(tmp_path))
    store = open_columns(g, ["three", "one"], make_group(session, 1))
    assert (store.names, store.widths) == (("three", "one"), {"three": 3, "one": 1})
    for wrong in ([NUM_NODES], [-1]):
        with pytest.raises(IndexError, match=f"id {wrong[0]} at position 0"):
            store.rows("three", torch.tensor(wrong))
    for nodes in (torch.tensor([1.0]), torch.tensor([[1]]), torch.tensor([1], dtype=torch.int32)):
        with pytest.raises(ConfigError, match="int64"):
            store.rows("three", nodes)
    with pytest.raises(ConfigError, match=r"'odd' are not open .open: 'three', 'one'"):
        store.dtype("odd")
    g.close()


def test_tensors_of_the_program_are_copied_and_never_kept_on_disk(tmp_path: Path, session: Session) -> None:
    g = DistGraph(write(tmp_path, num_parts=1))
    made = g.new_tensor((NUM_NODES, 2), torch.float64, "made")
    made[torch.arange(NUM_NODES)] = torch.ones(NUM_NODES, 2, dtype=torch.float64)
    store = open_columns(g, ["made"], make_group(session, 1))
    made[torch.arange(NUM_NODES)] = torch.zeros(NUM_NODES, 2, dtype=torch.float64)
    assert torch.equal(store.rows("made", torch.tensor([3, 0])), torch.ones(2, 2, dtype=torch.float64))
    assert not list(tmp_path.rglob("columns-*"))
    g.close()


@pytest.mark.parametrize("width", [1, 3, 7])
def test_feature_partitioning_writes_the_columns_of_each_part(
    tmp_path: Path, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Chunks of two rows: what is in memory at a time does not depend on how many there are.
    monkeypatch.setattr(feature_columns, "CHUNK_BYTES", 2 * 4 * width)
    partition_to_disk(
        random_homogeneous(0, width=width),
        tmp_path / "d",
        PartitionPlan(num_parts=3, method="feature"),
        write_columns=write_slices,
    )
    dataset = open_dataset(tmp_path / "d")
    all_rows = np.concatenate([dataset.part(part).node_data(NODE_TYPE, "feat") for part in range(3)])
    for columns in deal_out_columns(width, 3):
        rows = stored_slice(dataset, NODE_TYPE, "feat", columns).read()
        assert (rows is not None) == (len(columns) > 0)
        assert rows is None or np.array_equal(rows, all_rows[:, columns.cut])
    base = tmp_path / "d" / "cache" / f"columns-{dataset.manifest.checksum}" / NODE_TYPE
    assert [path.name for path in base.iterdir()] == ["feat"]
    assert len(list(base.rglob(FILE))) == min(width, 3)


def test_other_partitions_have_no_columns(tmp_path: Path) -> None:
    partition_to_disk(
        random_homogeneous(0),
        tmp_path / "d",
        PartitionPlan(num_parts=3, method="hash"),
        write_columns=write_slices,
    )
    partition_to_disk(
        random_homogeneous(0),
        tmp_path / "e",
        PartitionPlan(num_parts=1, method="feature"),
        write_columns=write_slices,
    )
    assert not list(tmp_path.glob("*/cache/columns-*"))


def test_each_node_type_has_columns_of_its_matrices(tmp_path: Path) -> None:
    graph = random_heterogeneous(0)
    plan = PartitionPlan(num_parts=2, method="feature")
    partition_to_disk(graph, tmp_path / "f", plan, write_columns=write_slices)
    dataset = open_dataset(tmp_path / "f")
    for columns in deal_out_columns(4, 2):
        rows = stored_slice(dataset, "user", "feat", columns).read()
        assert rows is not None
        uncut = np.concatenate([dataset.part(part).node_data("user", "feat") for part in range(2)])
        assert np.array_equal(rows, uncut[:, columns.cut])
    assert [path.name for path in tmp_path.glob("f/cache/columns-*/*")] == ["user"]


def test_a_dataset_whose_columns_find_no_room_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    usage = namedtuple("usage", ["free"])
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(0))
    partition_to_disk(
        random_homogeneous(0),
        tmp_path / "d",
        PartitionPlan(num_parts=2, method="feature"),
        write_columns=write_slices,
    )
    assert "is complete without them" in caplog.text
    dataset = open_dataset(tmp_path / "d", verify="full")
    assert not [path for path in (tmp_path / "d").rglob("*") if path.name.endswith((".partial", FILE))]
    monkeypatch.undo()
    write_slices(dataset, 2)
    assert len(list((tmp_path / "d").rglob(FILE))) == 2


LOADED_NODES, WIDTH = 16_000, 6


def write_large(folder: Path, method: str = "hash", num_parts: int = 4) -> Path:
    graph = random_homogeneous(0, num_nodes=LOADED_NODES, width=WIDTH)
    partition_to_disk(
        graph, folder, PartitionPlan(num_parts=num_parts, method=method), write_columns=write_slices
    )
    return folder


def opened_bytes(session: Session, folder: Path, size: int = 0) -> tuple[int, int]:
    g, before = DistGraph(folder), session.ledger.snapshot()
    store = open_columns(g, ["feat"], make_group(session, size or session.topology.world_size))
    num_bytes = count_received_bytes(session, before)
    check(g, store)
    full = rows_elsewhere(g, "feat") * len(store.slices["feat"].columns) * 4
    g.close()
    return num_bytes, full


def check(g: DistGraph, store: ColumnStore) -> None:
    every = torch.arange(g.num_nodes())
    assert torch.equal(store.rows("feat", every), g.ndata["feat"][every][:, store.slices["feat"].columns.cut])


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.rglob(FILE))


def with_faults(folder: Path, ready: Path) -> None:
    """One rank's file is damaged, the disk is full, machines race, and files come with the partition."""
    with start_session(timeout_s=60) as session:
        rank = session.topology.rank
        moved, full = opened_bytes(session, folder)
        assert moved == full > 0
        session.hosts = ("a", "b")
        if rank == 0:
            files_of(folder)[1].write_bytes(b"damaged")
        # Rank 0 has its file and only answers.
        assert opened_bytes(session, folder)[0] == (full if rank == 1 else 0)
        # No lower rank of the own machine wants the same: both load and one file stays.
        moved, full = opened_bytes(session, folder, size=1)
        assert moved == full
        assert len([path for path in files_of(folder) if path.parent.name == f"0-{WIDTH}"]) == 1
        assert not list(folder.rglob("*.partial"))
        assert opened_bytes(session, ready)[0] == 0
        assert len(files_of(ready)) == 2
        session.hosts = ("a", "a")
        full_disk(session, ready)


def full_disk(session: Session, ready: Path) -> None:
    """The file grows until the system says no: the columns are loaded into memory."""
    g, rank = DistGraph(ready), session.topology.rank
    g.barrier()
    if rank == 0:
        for path in files_of(ready):
            path.with_name(STAMP).unlink()
    g.barrier()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    feature_columns.rows_per_message = lambda row_bytes: 100  # type: ignore[assignment]
    with mock.patch.object(feature_columns.log, "warning") as warning:
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, limits[1]))
        store = open_columns(g, ["feat"], make_group(session, 2))
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert ["keep columns in memory" in call.args[0] for call in warning.call_args_list] == [True][rank:]
    check(g, store)
    assert not list(ready.rglob("*.partial"))
    g.close()
    assert not store.slices


def test_ranks_help_each_other_whatever_their_files_are(tmp_path: Path) -> None:
    ready = write_large(tmp_path / "ready", "feature", num_parts=2)
    run_ranks(with_faults, 2, args=(write_large(tmp_path / "d"), ready), ranks_per_server=1)


def test_one_part_of_one_rank_is_mapped_as_it_is(tmp_path: Path, session: Session) -> None:
    opened_bytes(session, write_large(tmp_path / "d", num_parts=1))
    assert not files_of(tmp_path)


def test_a_kept_copy_needs_no_more_memory_than_some_messages(
    tmp_path: Path, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = 2000
    monkeypatch.setattr(feature_columns, "rows_per_message", lambda row_bytes: message // row_bytes)
    monkeypatch.setattr(feature_columns, "ROUND_BYTES", 10 * message)
    write_large(tmp_path / "d")
    group, num_bytes = make_group(session, 1), LOADED_NODES * WIDTH * 4
    for cache in (True, False):
        g = DistGraph(tmp_path / "d")
        tracemalloc.start()
        with nullcontext() if cache else without_files():
            store = open_columns(g, ["feat"], group)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        beside = peak - (0 if cache else num_bytes)
        assert beside < num_bytes / 2, (cache, peak, num_bytes)
        check(g, store)
        g.close()


def test_who_cannot_answer_is_named_and_leaves_nothing_behind(
    tmp_path: Path, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    g = DistGraph(write_large(tmp_path / "d"))
    columns = ColumnRange(first=0, last=WIDTH, width=WIDTH)
    expected = replace(stored_slice(g.dataset, NODE_TYPE, "feat", columns), key=g.ndata["feat"].kvstore_key)

    def broken(*_arguments: object) -> Any:
        raise StorageError("part 1 is damaged; copy it again")

    with monkeypatch.context() as patched:
        patched.setattr(feature_columns, "_serve_columns", broken)
        with pytest.raises(RemoteError, match=r"rank 0 failed at .*part 1 is damaged"):
            load_columns(g.kvstore, [expected], session)
    assert not list((tmp_path / "d").rglob("*.partial"))
    # The failed attempt left nothing behind that is in the way of the next.
    load_columns(g.kvstore, [expected], session)
    assert np.array_equal(expected.rows, g.ndata["feat"][torch.arange(LOADED_NODES)].numpy())
    g.close()
