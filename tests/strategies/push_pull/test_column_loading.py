"""Columns arrive whole on every rank, whoever has a file already and whatever the disk says."""

import logging
import resource
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dglx_dist.comm.session import Session, start_session
from dglx_dist.data.storage.files import STAMP
from dglx_dist.errors import RemoteError, StorageError
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.layers.dropout import Columns
from dglx_dist.prepare import PartitionPlan, partition_to_disk
from dglx_dist.records import NODE_TYPE, ColumnInfo
from dglx_dist.strategies.push_pull import feature_columns as column_loading
from dglx_dist.strategies.push_pull.feature_columns import (
    OPENED,
    PHASE,
    VALUES,
    ColumnRequest,
    ColumnStore,
    load_columns,
    open_columns,
    slice_folder,
)
from dglx_dist.strategies.push_pull.options import make_group
from tests.data.storage.graphs import random_homogeneous
from tests.helpers.ranks import run_ranks

NUM_NODES, WIDTH = 4000, 6


def write(folder: Path, method: str = "hash", num_parts: int = 4) -> Path:
    graph = random_homogeneous(0, num_nodes=NUM_NODES, width=WIDTH)
    partition_to_disk(graph, folder, PartitionPlan(num_parts=num_parts, method=method))
    return folder


class Counted:
    """Opens a graph and its columns, and tells what moved."""

    def __init__(self, session: Session, folder: str, size: int = 0, *, cache: bool = True) -> None:
        self.g = DistGraph(folder)
        before = session.ledger.snapshot()
        group = make_group(session, size or session.topology.world_size)
        self.store = open_columns(self.g, ["feat"], group, cache=cache)
        mine = session.topology.rank
        self.received = sum(
            row.num_bytes
            for row in session.ledger.since(before)
            if row.phase == PHASE and row.destination == mine
        )
        first, last = self.g.ndata["feat"].local_range
        self.full = (NUM_NODES - last + first) * len(self.store.cut("feat")) * 4
        check(self.g, self.store)
        self.g.close()


def check(g: DistGraph, store: ColumnStore) -> None:
    every = torch.arange(g.num_nodes())
    assert torch.equal(store.rows("feat", every), g.ndata["feat"][every][:, store.cut("feat").cut])


def files_of(folder: str) -> list[Path]:
    return sorted(Path(folder).rglob(VALUES))


def with_faults(folder: str, ready: str) -> list[str]:
    """One rank's file is damaged, the disk is full, machines race, and files come with the partition."""
    with start_session(timeout_s=60) as session:
        rank, done = session.topology.rank, []
        made = Counted(session, folder)
        assert made.received == made.full > 0
        session.hosts = ("a", "b")
        if rank == 0:
            files_of(folder)[1].write_bytes(b"damaged")
        again = Counted(session, folder)
        # Rank 0 has its file and only answers.
        assert again.received == (again.full if rank == 1 else 0)
        done.append("damage")

        # No lower rank of the own machine wants the same: both load and one file stays.
        both = Counted(session, folder, size=1)
        assert both.received == both.full == (NUM_NODES - rows_here(session, folder)) * WIDTH * 4
        assert len([path for path in files_of(folder) if path.parent.name == f"0-{WIDTH}"]) == 1
        assert not list(Path(folder).rglob("*.partial"))
        done.append("race")

        assert Counted(session, ready).received == 0
        assert len(files_of(ready)) == 2
        done.append("partitioned")

        session.hosts = ("a", "a")
        full_disk(session, ready)
        done.append("full disk")
        return done


def rows_here(session: Session, folder: str) -> int:
    g = DistGraph(folder)
    first, last = g.ndata["feat"].local_range
    g.close()
    return int(last - first)


def full_disk(session: Session, ready: str) -> None:
    """The file grows until the system says no; what it holds then is not asked for again."""
    rank = session.topology.rank
    g = DistGraph(ready)
    g.barrier()
    if rank == 0:
        for path in files_of(ready):
            path.with_name(STAMP).unlink()
    g.barrier()
    before, limits = session.ledger.snapshot(), resource.getrlimit(resource.RLIMIT_FSIZE)
    column_loading.rows_per_message = lambda row_bytes: 100  # type: ignore[assignment]
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, limits[1]))
    store = open_columns(g, ["feat"], make_group(session, 2))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    check(g, store)
    first, last = g.ndata["feat"].local_range
    received = [
        row.num_bytes
        for row in session.ledger.since(before)
        if row.phase == PHASE and row.destination == rank
    ]
    assert sum(received) == (NUM_NODES - last + first) * len(store.cut("feat")) * 4
    assert not list(Path(ready).rglob("*.partial"))


def test_ranks_help_each_other_whatever_their_files_are(tmp_path: Path) -> None:
    ready = write(tmp_path / "ready", "feature", num_parts=2)
    found = run_ranks(with_faults, 2, args=(str(write(tmp_path / "d")), str(ready)), ranks_per_server=1)
    assert found == [["damage", "race", "partitioned", "full disk"]] * 2


@pytest.fixture
def session() -> Any:
    with start_session(timeout_s=30) as opened:
        yield opened


def test_one_part_of_one_rank_is_mapped_as_it_is(tmp_path: Path, session: Session) -> None:
    Counted(session, str(write(tmp_path / "d", num_parts=1)))
    assert not list((tmp_path / "d").rglob(VALUES))


def test_where_no_file_can_be_made_columns_stay_in_memory(
    tmp_path: Path, session: Session, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write(tmp_path / "d")
    g = DistGraph(folder)
    (folder / "cache" / f"columns-{g.dataset.manifest.checksum}").write_text("in the way")
    with caplog.at_level(logging.WARNING):
        check(g, open_columns(g, ["feat"], make_group(session, 1)))
    assert [record.message for record in caplog.records if "keep columns in memory" in record.message]
    assert len(caplog.records) == 1
    g.close()
    assert not OPENED.of(session).stores


def test_a_kept_copy_needs_no_more_memory_than_some_messages(
    tmp_path: Path, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = 2000
    monkeypatch.setattr(column_loading, "rows_per_message", lambda row_bytes: message // row_bytes)
    monkeypatch.setattr(column_loading, "ROUND_BYTES", 10 * message)
    write(tmp_path / "d")
    group, num_bytes = make_group(session, 1), NUM_NODES * WIDTH * 4
    for cache in (True, False):
        g = DistGraph(tmp_path / "d")
        tracemalloc.start()
        store = open_columns(g, ["feat"], group, cache=cache)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        beside = peak - (0 if cache else num_bytes)
        assert beside < num_bytes / 2, (cache, peak, num_bytes)
        check(g, store)
        g.close()


def test_who_cannot_answer_is_named_and_leaves_nothing_behind(tmp_path: Path, session: Session) -> None:
    g = DistGraph(write(tmp_path / "d"))
    wanted = everything(g)

    def broken(key: str) -> Any:
        raise StorageError("part 1 is damaged; copy it again")

    g.kvstore.shards = broken  # type: ignore[method-assign]
    with pytest.raises(RemoteError, match=r"rank 0 failed at .*part 1 is damaged"):
        load_columns(g.kvstore, [wanted], session)
    assert not list((tmp_path / "d").rglob("*.partial"))
    del g.kvstore.shards
    # The failed attempt left nothing behind that is in the way of the next.
    found = load_columns(g.kvstore, [wanted], session)["feat"]
    assert np.array_equal(found.rows, g.ndata["feat"][torch.arange(NUM_NODES)].numpy())
    g.close()


def everything(g: DistGraph) -> ColumnRequest:
    columns = Columns(first=0, last=WIDTH, width=WIDTH)
    return ColumnRequest(
        name="feat",
        key=g.ndata["feat"].kvstore_key,
        columns=columns,
        info=ColumnInfo(dtype="float32", row_shape=(WIDTH,)),
        num_rows=NUM_NODES,
        folder=slice_folder(g.dataset, NODE_TYPE, "feat", columns),
        is_leader=True,
    )
