"""A rank's columns are those of the rows, whatever their dtype and however many ranks there are."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import dgl
import numpy as np
import pytest
import torch
from torch import nn

from dglx_dist.comm.session import Session, start_session
from dglx_dist.data.storage.writer import write_dataset
from dglx_dist.dataloading.row_buffers import RowMemory
from dglx_dist.errors import ConfigError
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.layers.dropout import deal_out_columns
from dglx_dist.records import EDGE_TYPE, NODE_TYPE, Assignment, RawGraph, SparseRows
from dglx_dist.strategies.base import STRATEGIES
from dglx_dist.strategies.push_pull.feature_columns import PHASE, ColumnStore, open_columns
from dglx_dist.strategies.push_pull.options import Group, make_group
from tests.data.storage.graphs import random_heterogeneous, random_owners
from tests.helpers import wide
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
    memory = RowMemory()
    for _ in range(2):
        assert torch.equal(store.rows(name, nodes, memory), found)
        assert store.rows(name, nodes[:0], memory).dtype == found.dtype
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
            assert num_bytes(store) == sum(row_bytes.values()) * NUM_NODES
            for name in NAMES:
                check_rows(g, store, name, group.part, group.size)
            check_moments(g, store, ("odd", "float16", "int32"))
            check_sharing(g, store, make_group(session, group.size))
            check_disagreement(g, group)
            g.close()
            with pytest.raises(ConfigError, match="closed"):
                store.rows("one", torch.tensor([0]))


def num_bytes(store: ColumnStore) -> int:
    return sum(one.rows.nbytes for one in store._slices.values())


def check_sharing(g: DistGraph, store: ColumnStore, group: Group) -> None:
    """What is open is not opened again, also where it is asked for together with something else."""
    before = g.session.ledger.snapshot()
    assert open_columns(g, list(NAMES), group) is store
    other = open_columns(g, ["three"], group)
    assert num_bytes(other) == NUM_NODES * 4 * len(other.cut("three"))
    assert moved(g.session, before) == 0


def check_disagreement(g: DistGraph, group: Group) -> None:
    """Ranks that request different columns get an error on every rank, and can continue."""
    if g.session.topology.world_size == 1:
        return
    names = ["one", "three"] if g.session.topology.rank else ["three", "one"]
    with pytest.raises(ConfigError, match="every rank must ask for the same") as caught:
        open_columns(g, names, group)
    assert "['one', 'three']" in str(caught.value)
    assert "['three', 'one']" in str(caught.value)
    with pytest.raises(ConfigError, match="no feature 'nobody'"):
        open_columns(g, ["nobody", "odd"] if g.session.topology.rank else ["odd", "one"], group)


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


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["one", "one"], "each once"),
        (["onee"], "no feature 'onee' .known: .*one, "),
        (["vector"], r"rows of shape \(\); .*\(V, 1\)"),
        (["cube"], r"rows of shape \(2, 2\)"),
    ],
)
def test_what_is_no_matrix_of_the_graph_is_refused(
    tmp_path: Path, session: Session, names: list[str], message: str
) -> None:
    g = DistGraph(write(tmp_path))
    with pytest.raises(ConfigError, match=message):
        open_columns(g, names, make_group(session, 1))
    g.close()


class Embedded(nn.Module):
    """A layer on trained rows of all nodes."""

    def __init__(self, num_nodes: int) -> None:
        super().__init__()
        self.rows, self.conv = nn.Embedding(num_nodes, 3), dgl.nn.SAGEConv(3, 2, "mean")

    def forward(self, blocks: Any) -> torch.Tensor:
        out: torch.Tensor = self.conv(blocks[0], self.rows(blocks[0].srcdata[dgl.NID]))
        return out


def test_a_graph_without_features_trains_an_embedding(tmp_path: Path, session: Session) -> None:
    g = DistGraph(write(tmp_path))
    assert "feat" not in g.ndata
    strategy = STRATEGIES.get("push_pull")(session, {})
    model = strategy.wrap(Embedded(g.num_nodes()), g)
    sampler = dgl.dataloading.NeighborSampler([2])
    ((nodes, _, blocks),) = strategy.loader(g, torch.arange(4), sampler, batch_size=4)
    model(blocks).sum().backward()
    trained = model.module.rows.weight.grad.any(1).nonzero().flatten()
    assert torch.equal(trained, nodes.sort().values)
    g.close()


def test_graphs_of_several_node_types_are_refused(tmp_path: Path, session: Session) -> None:
    graph = random_heterogeneous(0)
    write_dataset(graph, random_owners(graph, 2, 0), tmp_path / "d")
    g = DistGraph(tmp_path / "d")
    with pytest.raises(ConfigError, match=r"node types user, item.*data_parallel"):
        open_columns(g, ["x"], make_group(session, 1))
    g.close()


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
    for ask in (store.cut, store.dtype, lambda name: store.moments([name])):
        with pytest.raises(ConfigError, match=r"'odd' are not open .open: 'three', 'one'"):
            ask("odd")
    g.close()


def test_tensors_of_the_program_are_copied_as_they_are_and_never_kept_on_disk(
    tmp_path: Path, session: Session
) -> None:
    g = DistGraph(write(tmp_path, num_parts=1))
    made = g.new_tensor((NUM_NODES, 2), torch.float64, "made")
    made[torch.arange(NUM_NODES)] = torch.ones(NUM_NODES, 2, dtype=torch.float64)
    store = open_columns(g, ["made"], make_group(session, 1))
    made[torch.arange(NUM_NODES)] = torch.zeros(NUM_NODES, 2, dtype=torch.float64)
    assert torch.equal(store.rows("made", torch.tensor([3, 0])), torch.ones(2, 2, dtype=torch.float64))
    assert not list(tmp_path.rglob("columns-*"))
    g.close()


def test_many_threads_ask_at_once(tmp_path: Path, session: Session) -> None:
    g = DistGraph(write(tmp_path))
    store = open_columns(g, ["float16"], make_group(session, 1))
    nodes = [torch.randint(0, NUM_NODES, (50,)) for _ in range(40)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda ids: store.rows("float16", ids), nodes))
    for ids, rows in zip(nodes, found, strict=True):
        assert torch.equal(rows, g.ndata["float16"][ids].float())
    g.close()
