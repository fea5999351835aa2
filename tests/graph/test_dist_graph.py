"""Opening a dataset as a DistGraph: counts, types, ids, views, refusals."""

import os
import shutil
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import dgl
import numpy as np
import pytest
import torch

from dglx_dist.comm.collectives import gather_json
from dglx_dist.comm.session import start_session
from dglx_dist.data.storage.dgl_format import write_dgl_format
from dglx_dist.data.storage.reader import StoredPart
from dglx_dist.data.storage.writer import write_dataset
from dglx_dist.errors import ConfigError, DglxError, StorageError
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.graph.split import edge_split, node_split
from dglx_dist.records import NODE_TYPE, Array, Assignment, EdgeType, RawGraph
from tests.data.storage.graphs import put_value
from tests.graph.small import NUM_NODES, build, edges, features, part_of
from tests.helpers import refusal, wide
from tests.helpers.ranks import RankError, run_ranks

LAYOUTS = [(1, None), (2, 1), (4, 2), *wide((2, 2), (3, 1))]
MODES = ["replicated", "partitioned"]


def look(folder: Path, mode: Any) -> None:
    """Every rank sees the graph that was written, here in the ids of the source."""
    with start_session() as session:
        g = DistGraph(folder, structure=mode)
        old = g.orig_ids(slice(None))
        new, (given_source, given_destination) = old.argsort(), edges()
        assert old[new].tolist() == list(range(NUM_NODES))
        source, destination = g.find_edges(torch.arange(g.num_edges()))
        result = zip(old[source].tolist(), old[destination].tolist(), strict=True)
        assert sorted(result) == sorted(zip(given_source.tolist(), given_destination.tolist(), strict=True))
        block = g.sample_neighbors(torch.arange(NUM_NODES), -1)
        assert block.num_edges() == g.num_edges()
        for ends, known in zip(block.edges(), (source, destination), strict=True):
            assert torch.equal(ends, known[block.edata[dgl.EID]])
        assert (g.ndata["feat"][:].numpy() == features()[old]).all()
        assert g.in_degrees()[new].tolist() == np.bincount(given_destination, minlength=NUM_NODES).tolist()
        degrees = g.out_degrees(torch.arange(NUM_NODES))[new]
        assert degrees.tolist() == np.bincount(given_source, minlength=NUM_NODES).tolist()
        assert g.user_ids([0, 39]).tolist() == (1000 + old[[0, 39]]).tolist()
        assert g.new_ids(g.user_ids([0, 39]), from_user_ids=True).tolist() == [0, 39]
        with pytest.raises(IndexError, match="no node of type '_N' has the id 999"):
            g.new_ids([1000, 999], from_user_ids=True)
        _, _, blocks = dgl.dataloading.NeighborSampler([2, 2]).sample(g, torch.tensor([1, 5, 30]))
        assert (blocks[-1].num_dst_nodes(), g.num_classes()) == (3, 4)
        shares = gather_json(old[node_split(g.ndata["train_mask"])].tolist(), session)
        assert sorted(chain(*shares)) == list(range(0, NUM_NODES, 3))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        of_edges = edge_split(np.arange(g.num_edges()), g.get_partition_book())
        assert sorted(chain(*gather_json(of_edges.tolist(), session))) == list(range(g.num_edges()))
        of_servers = {tuple(nodes) for nodes in gather_json(g.local_nodes().tolist(), session)}
        assert sorted(chain(*of_servers)) == list(range(NUM_NODES))


@pytest.mark.parametrize(("ranks", "per_server"), LAYOUTS)
@pytest.mark.parametrize("mode", MODES)
def test_every_rank_sees_the_graph_that_was_written(
    small_dataset: Path, ranks: int, per_server: int | None, mode: str
) -> None:
    run_ranks(look, ranks, args=(small_dataset, mode), ranks_per_server=per_server)


def test_fanout_draws_distinct_edges_up_to_the_degree_or_with_replacement_all(graph: DistGraph) -> None:
    sampled = graph.sample_neighbors(torch.arange(NUM_NODES), 3)
    assert torch.equal(sampled.in_degrees(), graph.in_degrees().clamp(max=3))
    assert len(set(sampled.edata[dgl.EID].tolist())) == sampled.num_edges()
    sampled = graph.sample_neighbors(torch.arange(NUM_NODES), 4, replace=True)
    assert torch.equal(sampled.in_degrees(), 4 * (graph.in_degrees() > 0))


@pytest.mark.parametrize("replace", [False, True])
def test_edges_of_weight_zero_and_excluded_ones_are_never_drawn(graph: DistGraph, replace: bool) -> None:
    weight = graph.edata["weight"].to_local()
    excluded = weight.nonzero().flatten()[:3]
    allowed = set(weight.nonzero().flatten()[3:].tolist())
    drawn: set[int] = set()
    for _ in range(20):
        sampled = graph.sample_neighbors(
            torch.arange(NUM_NODES), 2, prob="weight", exclude_edges=excluded, replace=replace
        )
        drawn |= set(sampled.edata[dgl.EID].tolist())
    assert drawn == allowed


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda g: g.sample_neighbors([0], 2, edge_dir="out"), "edge_dir is 'out'"),
        (lambda g: g.sample_neighbors([0], 2, prob="w"), "no tensor 'edge~_N:_E:_N~w'"),
        (lambda g: g.sample_neighbors([40], 2), "id 40 at position 0"),
        (lambda g: g.ndata["features"], "known: 'feat', 'label', 'train_mask'"),
        (lambda g: g.nodes["user"], "no node type 'user'"),
        (lambda g: DistGraph(g.dataset.folder / "nowhere"), "nowhere"),
        (lambda g: DistGraph(g.dataset.folder, structure="cut"), "structure is 'cut'"),
        (lambda _: DistGraph(), "pass DistGraph the folder"),
        (lambda g: DistGraph(part_config=g.dataset.folder / "x.json"), r"x\.json"),
    ],
)
def test_mistakes_are_named(graph: DistGraph, ask: Callable[[DistGraph], object], message: str) -> None:
    with pytest.raises((ConfigError, StorageError, IndexError, KeyError), match=message):
        ask(graph)


def test_two_graphs_may_be_open(graph: DistGraph, small_dataset: Path) -> None:
    second = DistGraph(small_dataset, structure="partitioned")
    assert torch.equal(second.ndata["feat"][[5]], graph.ndata["feat"][[5]])
    second.close()
    assert graph.in_degrees().sum() == 45


def open_only(folder: Path) -> None:
    with start_session():
        DistGraph(folder)


def test_fewer_parts_than_servers_is_refused(small_dataset: Path) -> None:
    with pytest.raises(RankError, match="dglx partition DATA --parts 4"):
        run_ranks(open_only, 4, args=(small_dataset,), ranks_per_server=1)


def test_no_session_is_refused(small_dataset: Path) -> None:
    with pytest.raises(ConfigError, match=r"no session is open"):
        DistGraph(small_dataset)


RATES, KNOWS = ("user", "rates", "item"), ("user", "knows", "user")


def write(folder: Path) -> None:
    graph = RawGraph(
        name="shop",
        num_nodes={"user": 2, "item": 3},
        edges={RATES: (np.array([0, 1, 1]), np.array([0, 1, 2])), KNOWS: (np.array([0]), np.array([1]))},
        node_data={"user": {"feat": np.eye(2, dtype=np.float32)}, "item": {"price": np.array([5, 6, 7])}},
        user_ids={"user": np.array(["ann", "bob"])},
    )
    parts = {"user": np.array([0, 1], np.int32), "item": np.zeros(3, np.int32)}
    write_dataset(graph, Assignment(num_parts=2, part_of=parts, method="hand", seed=0), folder)


def look_at_types(folder: Path, mode: Any) -> None:
    with start_session():
        g = DistGraph(folder, structure=mode)
        assert (g.ntypes, g.canonical_etypes) == (["user", "item"], [RATES, KNOWS])
        assert (g.num_nodes(), g.num_edges("rates")) == (5, 3)
        with pytest.raises(ConfigError, match="node types"):
            _ = g.ndata
        sampled = g.sample_neighbors({"item": [0, 1, 2], "user": [1]}, -1)
        assert [sampled.num_edges(etype) for etype in (RATES, KNOWS)] == [3, 1]
        assert sorted(sampled.edges["rates"].data[dgl.EID].tolist()) == [0, 1, 2]
        assert g.sample_neighbors({"item": [0]}, {"rates": 1, "knows": 0}).num_edges("rates") == 1
        source, destination = g.find_edges([0, 1, 2], "rates")
        assert sorted(zip(source.tolist(), destination.tolist(), strict=True)) == [(0, 0), (1, 1), (1, 2)]
        assert g.in_degrees(etype="knows").tolist() == [0, 1]
        assert g.nodes["item"].data["price"][torch.tensor([2, 0])].tolist() == [7, 5]
        assert g.user_ids([1, 0], "user").tolist() == ["bob", "ann"]
        assert g.new_ids(["bob", "ann"], "user").tolist() == [1, 0]
        with pytest.raises(IndexError, match="no node of type 'user' has the id 'zoe'"):
            g.new_ids(["ann", "zoe"], "user")


@pytest.mark.parametrize("mode", MODES)
def test_every_rank_sees_all_types(tmp_path: Path, mode: str) -> None:
    write(tmp_path / "shop")
    run_ranks(look_at_types, 2, args=(tmp_path / "shop", mode), ranks_per_server=1)


def open_dgl_format_and_own_copy(part_config: Path, folders: list[Path]) -> None:
    with start_session() as session:
        g = DistGraph(part_config=part_config)
        assert DistGraph(part_config=part_config).dataset.folder == g.dataset.folder
        rows = g.ndata["feat"][:]
        assert (rows[rows[:, 0].argsort()].numpy() == features()).all()
        assert g.num_edges() == DistGraph(folders[session.topology.rank]).num_edges() == 45
        manifest = g.dataset.folder / "manifest.json"
        before = manifest.stat().st_ino
        g.barrier()
        if session.topology.rank == 0:
            # Written anew by a machine whose clock is an hour behind.
            an_hour_ago = manifest.stat().st_mtime - 3600
            os.utime(part_config.parent / "part0" / "node_feat.dgl", (an_hour_ago, an_hour_ago))
        g.barrier()
        DistGraph(part_config=part_config)
        assert manifest.stat().st_ino != before


def _two_parts() -> Assignment:
    parts = np.where(part_of() == 2, 1, 0).astype(np.int32)
    return Assignment(num_parts=2, part_of={NODE_TYPE: parts}, method="hand", seed=0)


def test_dgls_own_files_are_imported_once_and_a_dataset_may_be_in_a_folder_of_each_machine(
    small_dataset: Path, tmp_path: Path
) -> None:
    part_config = write_dgl_format(build(), _two_parts(), tmp_path / "dgl")
    copy = shutil.copytree(small_dataset, tmp_path / "elsewhere")
    args = (part_config, [small_dataset, copy])
    run_ranks(open_dgl_format_and_own_copy, 2, args=args, ranks_per_server=1)
    assert [path.name for path in part_config.parent.glob("*.dglx")] == [f"{part_config.stem}.dglx"]


def wrong_for_one_rank(dataset: Path, wrong: Path, part_config: Path) -> list[str]:
    with start_session(timeout_s=20) as session:
        opened, item = StoredPart.indptr, session.topology.rank == 1

        def read(part: StoredPart, etype: EdgeType) -> Array:
            if item:
                raise StorageError("indptr is damaged")
            return opened(part, etype)

        StoredPart.indptr = read  # type: ignore[method-assign]
        messages = [refusal(partial(DistGraph, dataset, structure=mode), StorageError) for mode in MODES]
        StoredPart.indptr = opened  # type: ignore[method-assign]
        messages.append(refusal(partial(DistGraph, wrong), DglxError))
        config = part_config.with_name("elsewhere.json") if item else part_config
        return [*messages, refusal(lambda: DistGraph(part_config=config), StorageError)]


def test_damaged_or_missing_file_of_one_rank_is_an_error_on_all(small_dataset: Path, tmp_path: Path) -> None:
    part_config = write_dgl_format(build(), _two_parts(), tmp_path / "dgl")
    wrong = tmp_path / "wrong"
    shutil.copytree(small_dataset, wrong)
    put_value(wrong, "part0/edges/_N._E._N/indices.arrow", 2, 10**6)
    args = (small_dataset, wrong, part_config)
    zero, item = run_ranks(wrong_for_one_rank, 2, args=args, ranks_per_server=1)
    text = f"{wrong}: part 0 is wrong: in part0/edges/_N._E._N/indices.arrow, indices[2] is 1000000, "
    assert item[1] == "indptr is damaged"
    assert zero[2].startswith(text)
    assert text in item[2]
    assert "elsewhere.json does not exist" in item[3]
    for line, own in ((zero[1], item[1]), (zero[3], item[3])):
        assert line.startswith("rank 1 on ")
        assert line.endswith(f": {own}")
