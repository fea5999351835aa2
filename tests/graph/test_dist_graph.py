"""Opening a dataset as a DistGraph: counts, types, ids, views, refusals."""

from __future__ import annotations

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


def look(folder: Path, mode: Any) -> dict[str, Any]:
    """Everything one rank can see, in the ids of the source."""
    with start_session():
        g = DistGraph(folder, structure=mode)
        old = g.orig_ids(slice(None))
        source, destination = g.find_edges(torch.arange(g.num_edges()))
        whole = g.sample_neighbors(torch.arange(NUM_NODES), -1)
        found_source, found_destination = whole.edges()
        assert torch.equal(found_source, source[whole.edata[dgl.EID]])
        assert torch.equal(found_destination, destination[whole.edata[dgl.EID]])
        _, _, blocks = dgl.dataloading.NeighborSampler([2, 2]).sample(g, torch.tensor([1, 5, 30]))
        share = node_split(g.ndata["train_mask"])
        return {
            "old": old.tolist(),
            "feat": bool((g.ndata["feat"][:].numpy() == features()[old]).all()),
            "edges": sorted(zip(old[source].tolist(), old[destination].tolist(), strict=True)),
            "sampled": whole.num_edges(),
            "in": g.in_degrees()[old.argsort()].tolist(),
            "out": g.out_degrees(torch.arange(NUM_NODES))[old.argsort()].tolist(),
            "user": g.user_ids([0, 39]).tolist(),
            "local": g.local_nodes().tolist(),
            "share": old[share].tolist(),
            "edge share": edge_split(np.arange(g.num_edges()), g.get_partition_book()).tolist(),
            "seeds": blocks[-1].num_dst_nodes(),
            "classes": g.num_classes(),
        }


@pytest.mark.parametrize(("ranks", "per_server"), LAYOUTS)
@pytest.mark.parametrize("mode", MODES)
def test_every_rank_sees_the_graph_that_was_written(
    small_dataset: Path, ranks: int, per_server: int | None, mode: str
) -> None:
    source, destination = edges()
    seen = run_ranks(look, ranks, args=(small_dataset, mode), ranks_per_server=per_server)
    for one in seen:
        assert one["feat"]
        assert sorted(one["old"]) == list(range(NUM_NODES))
        assert one["edges"] == sorted(zip(source.tolist(), destination.tolist(), strict=True))
        assert one["sampled"] == len(source)
        assert one["in"] == np.bincount(destination, minlength=NUM_NODES).tolist()
        assert one["out"] == np.bincount(source, minlength=NUM_NODES).tolist()
        assert one["user"] == [1000 + one["old"][0], 1000 + one["old"][39]]
        assert (one["seeds"], one["classes"]) == (3, 4)
    shares = [one["share"] for one in seen]
    assert sorted(chain(*shares)) == list(range(0, NUM_NODES, 3))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert sorted(chain(*(one["edge share"] for one in seen))) == list(range(len(source)))
    of_servers = {tuple(one["local"]) for one in seen}
    assert sorted(chain(*of_servers)) == list(range(NUM_NODES))


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
        (lambda _: DistGraph(), "either the folder"),
        (lambda g: DistGraph(part_config=g.dataset.folder / "x.json"), r"x\.json"),
    ],
)
def test_mistakes_are_named(graph: DistGraph, ask: Callable[[DistGraph], object], message: str) -> None:
    with pytest.raises((ConfigError, StorageError, IndexError, KeyError), match=message):
        ask(graph)


def test_two_graphs_may_be_open(graph: DistGraph, small_dataset: Path) -> None:
    other = DistGraph(small_dataset, structure="partitioned")
    assert torch.equal(other.ndata["feat"][[5]], graph.ndata["feat"][[5]])
    other.close()
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


def look_at_types(folder: Path, mode: Any) -> dict[str, Any]:
    with start_session():
        g = DistGraph(folder, structure=mode)
        sampled = g.sample_neighbors({"item": [0, 1, 2], "user": [1]}, -1)
        source, destination = g.find_edges([0, 1, 2], "rates")
        with pytest.raises(ConfigError, match="node types"):
            _ = g.ndata
        return {
            "types": (g.ntypes, g.canonical_etypes, g.num_nodes(), g.num_edges("rates")),
            "edges": [sampled.num_edges(etype) for etype in (RATES, KNOWS)],
            "ids": sorted(sampled.edges["rates"].data[dgl.EID].tolist()),
            "rates": sorted(zip(source.tolist(), destination.tolist(), strict=True)),
            "price": g.nodes["item"].data["price"][torch.tensor([2, 0])].tolist(),
            "names": g.user_ids([1, 0], "user").tolist(),
            "only rates": g.sample_neighbors({"item": [0]}, {"rates": 1, "knows": 0}).num_edges("rates"),
            "degrees": g.in_degrees(etype="knows").tolist(),
        }


@pytest.mark.parametrize("mode", MODES)
def test_every_rank_sees_all_types(tmp_path: Path, mode: str) -> None:
    write(tmp_path / "shop")
    for seen in run_ranks(look_at_types, 2, args=(tmp_path / "shop", mode), ranks_per_server=1):
        assert seen == {
            "types": (["user", "item"], [RATES, KNOWS], 5, 3),
            "edges": [3, 1],
            "ids": [0, 1, 2],
            "rates": [(0, 0), (1, 1), (1, 2)],
            "price": [7, 5],
            "names": ["bob", "ann"],
            "only rates": 1,
            "degrees": [0, 1],
        }


def open_dgl_format(part_config: Path) -> tuple[bool, int]:
    with start_session():
        g = DistGraph(part_config=part_config)
        folder = g.dataset.folder
        again = DistGraph(part_config=part_config)
        assert again.dataset.folder == folder
        order = g.ndata["feat"][:][:, 0].argsort()
        return bool((g.ndata["feat"][:].numpy()[order] == features()).all()), g.num_edges()


def _two_parts() -> Assignment:
    parts = np.where(part_of() == 2, 1, 0).astype(np.int32)
    return Assignment(num_parts=2, part_of={NODE_TYPE: parts}, method="hand", seed=0)


def test_dgls_own_files_are_imported_once_and_opened(tmp_path: Path) -> None:
    part_config = write_dgl_format(build(), _two_parts(), tmp_path / "dgl")
    assert run_ranks(open_dgl_format, 2, args=(part_config,), ranks_per_server=1) == [(True, 45)] * 2
    assert [one.name for one in part_config.parent.glob("*.dglx")] == [f"{part_config.stem}.dglx"]


def wrong_for_one_rank(dataset: Path, wrong: Path, part_config: Path) -> list[str]:
    with start_session(timeout_s=20) as session:
        opened, one = StoredPart.indptr, session.topology.rank == 1

        def read(part: StoredPart, etype: EdgeType) -> Array:
            if one:
                raise StorageError("indptr is damaged")
            return opened(part, etype)

        StoredPart.indptr = read  # type: ignore[method-assign]
        said = [refusal(partial(DistGraph, dataset, structure=mode), StorageError) for mode in MODES]
        StoredPart.indptr = opened  # type: ignore[method-assign]
        said.append(refusal(partial(DistGraph, wrong), DglxError))
        config = part_config.with_name("elsewhere.json") if one else part_config
        return [*said, refusal(lambda: DistGraph(part_config=config), StorageError)]


def test_what_one_rank_finds_damaged_or_not_at_all_is_an_error_on_all(
    small_dataset: Path, tmp_path: Path
) -> None:
    part_config = write_dgl_format(build(), _two_parts(), tmp_path / "dgl")
    wrong = tmp_path / "wrong"
    shutil.copytree(small_dataset, wrong)
    put_value(wrong, "part0/edges/_N._E._N/indices.arrow", 2, 10**6)
    args = (small_dataset, wrong, part_config)
    zero, one = run_ranks(wrong_for_one_rank, 2, args=args, ranks_per_server=1)
    text = f"{wrong}: part 0 is wrong: in part0/edges/_N._E._N/indices.arrow, indices[2] is 1000000, "
    assert one[1] == "indptr is damaged"
    assert zero[2].startswith(text)
    assert text in one[2]
    assert "elsewhere.json does not exist" in one[3]
    for said, own in ((zero[1], one[1]), (zero[3], one[3])):
        assert said.startswith("rank 1 on ")
        assert said.endswith(f": {own}")


def _open_own_copy(folders: list[Path]) -> int:
    with start_session() as session:
        g = DistGraph(folders[session.topology.rank])
        number = g.num_nodes()
        g.close()
        return number


def test_each_machine_may_have_the_dataset_in_a_folder_of_its_own(
    small_dataset: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "elsewhere"
    shutil.copytree(small_dataset, copy)
    assert run_ranks(_open_own_copy, 2, args=([small_dataset, copy],), ranks_per_server=1) == [NUM_NODES] * 2
