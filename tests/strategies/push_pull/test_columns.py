"""A rank's columns are those of the rows, whatever their dtype and however many ranks there are."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dglx_dist.cluster.session import Session, start_session
from dglx_dist.errors import ConfigError
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.layers.columns import deal_out_columns
from dglx_dist.records import EDGE_TYPE, NODE_TYPE, Assignment, RawGraph, SparseRows
from dglx_dist.storage.writer import write_dataset
from dglx_dist.strategies.push_pull.columns import PHASE, ColumnStore, open_columns
from dglx_dist.strategies.push_pull.group import Group, make_group
from tests.helpers.ranks import run_ranks

NUM_NODES, NUM_PARTS = 60, 4
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
        bits = dtype == "bfloat16"
        values = (
            random.integers(0, 100, (NUM_NODES, 5)) if not bits else random.integers(16256, 16300, (60, 5))
        )
        data[dtype] = values.astype("uint16" if bits else dtype)
    dense = np.where(random.random((NUM_NODES, 7)) < 0.2, random.random((NUM_NODES, 7)), 0)
    rows, columns = np.nonzero(dense)
    indptr = np.searchsorted(rows, np.arange(NUM_NODES + 1))
    data["sparse"] = SparseRows(
        indptr=indptr, indices=columns.astype(np.int32), values=dense[rows, columns], num_columns=7
    )
    data["vector"] = random.random(NUM_NODES)
    data["cube"] = random.random((NUM_NODES, 2, 2))
    ends = random.integers(0, NUM_NODES, (2, 100))
    return RawGraph(
        name="columns",
        num_nodes={NODE_TYPE: NUM_NODES},
        edges={EDGE_TYPE: (ends[0], ends[1])},
        node_data={NODE_TYPE: data},
    )


def write(folder: Path, *, num_parts: int = NUM_PARTS, last_is_empty: bool = False) -> Path:
    """Unequal parts of random nodes; the last one has none if so told."""
    shares = np.array([0.4, 0.3, 0.2, 0.1][:num_parts])
    if last_is_empty:
        shares[-1] = 0
    part_of = np.random.default_rng(2).choice(num_parts, NUM_NODES, p=shares / shares.sum())
    owners = Assignment(
        num_parts=num_parts, part_of={NODE_TYPE: part_of.astype(np.int32)}, method="test", seed=0
    )
    write_dataset(raw_graph(), owners, folder / "data", bfloat16={(NODE_TYPE, "bfloat16")})
    return folder / "data"


def moved(session: Session, before: Any) -> int:
    """Bytes that this rank received as columns since then; what it asked with is 32 bytes a message."""
    mine = session.topology.rank
    rows = [row for row in session.ledger.since(before) if row.phase == PHASE]
    asked = sum(row.num_bytes for row in rows if row.source == mine)
    assert asked % 32 == 0
    assert asked <= 32 * NUM_PARTS * len(NAMES)
    return sum(row.num_bytes for row in rows if row.destination == mine)


def rows_elsewhere(g: DistGraph) -> int:
    first, last = g.ndata["one"].local_range
    return g.num_nodes() - (last - first)


def check_rows(g: DistGraph, store: ColumnStore, name: str, part: int, parts: int) -> None:
    nodes = torch.randint(0, g.num_nodes(), (200,), generator=torch.Generator().manual_seed(part))
    whole = g.ndata[name][nodes]
    width = whole.shape[1]
    expected = whole[:, deal_out_columns(width, parts)[part].cut]
    found = store.rows(name, nodes)
    halves = (torch.float16, torch.bfloat16)
    assert found.dtype == (torch.float32 if whole.dtype in halves else whole.dtype) == store.dtype(name)
    assert torch.equal(found, expected.to(found.dtype))
    assert (store.widths[name], len(store.cut(name))) == (width, expected.shape[1])
    assert store.rows(name, nodes[:0]).shape == (0, expected.shape[1])


def check_moments(g: DistGraph, store: ColumnStore, names: tuple[str, ...]) -> None:
    every = torch.arange(g.num_nodes())
    rows = torch.cat([g.ndata[name][every].double() for name in names], 1)
    mean, variance = store.moments(names)
    assert mean.dtype == variance.dtype == torch.float64
    torch.testing.assert_close(mean, rows.mean(1), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(variance, rows.var(1, correction=0), rtol=1e-13, atol=1e-13)
    assert store.moments(names)[0] is mean


def everything(folder: str, size: int) -> None:
    """Open all features in memory, then with files to be made, then with files that are there."""
    with start_session(timeout_s=60) as session:
        group = make_group(session, size or session.topology.world_size)
        for cache, found in ((False, False), (True, False), (True, True)):
            g = DistGraph(folder)
            before = session.ledger.snapshot()
            store = open_columns(g, NAMES, group, cache=cache)
            row_bytes = {name: len(store.cut(name)) * g.ndata[name].dtype.itemsize for name in NAMES}
            # Ranks of one machine that hold the same columns make one file.
            loads = not found and (not cache or group.rank == min(group.replicas))
            assert moved(session, before) == loads * sum(row_bytes.values()) * rows_elsewhere(g)
            assert store.num_bytes == sum(row_bytes.values()) * NUM_NODES
            for name in NAMES:
                check_rows(g, store, name, group.part, group.size)
            check_moments(g, store, ("odd", "float16", "int32"))
            check_sharing(g, store, make_group(session, group.size))
            g.close()
            with pytest.raises(ConfigError, match="closed"):
                store.rows("one", torch.tensor([0]))


def check_sharing(g: DistGraph, store: ColumnStore, group: Group) -> None:
    """What is open is not opened again, also where it is asked for together with something else."""
    before = g.session.ledger.snapshot()
    assert open_columns(g, list(NAMES), group) is store
    other = open_columns(g, ["three"], group)
    assert other.num_bytes == NUM_NODES * 4 * len(other.cut("three"))
    assert moved(g.session, before) == 0


@pytest.mark.parametrize(
    ("ranks", "ranks_per_server", "size"), [(1, 1, 0), (2, 1, 0), (3, 2, 0), (4, 1, 0), (4, 2, 2)]
)
def test_rows_are_those_of_the_dataset(tmp_path: Path, ranks: int, ranks_per_server: int, size: int) -> None:
    folder = write(tmp_path, last_is_empty=ranks == 4)
    run_ranks(everything, ranks, args=(str(folder), size), ranks_per_server=ranks_per_server)
