"""Partitions written with DGL's arguments: stock DGL reads them, and they are what was asked for."""

from pathlib import Path
from typing import Any

import dgl
import dgl.distributed
import pytest
import torch

import dglx_dist as dx
from dglx_dist.compat.partition import load_partition, load_partition_book, partition_graph
from dglx_dist.errors import ConfigError
from tests.compat.graphs import paper_graph, typed_graph


def whole(config: Path, parts: int, ntype: str, name: str) -> torch.Tensor:
    """A column of all parts, as stock DGL reads it."""
    read = [dgl.distributed.load_partition_feats(str(config), part)[0] for part in range(parts)]
    return torch.cat([item[f"{ntype}/{name}"] for item in read])


@pytest.mark.parametrize("formats", [None, ["csc", "coo"]])
def test_stock_dgl_loads_what_was_cut(tmp_path: Path, formats: Any) -> None:
    graph = paper_graph()
    with pytest.warns(UserWarning, match="num_hops=2: parts store 1 hop"):
        nodes, edges = partition_graph(
            graph, "mine", 2, tmp_path, 2, balance_edges=True, return_mapping=True, graph_formats=formats
        )
    structures = []
    for part in range(2):
        local, _, edge_data, book, name, ntypes, _ = dgl.distributed.load_partition(
            str(tmp_path / "mine.json"), part
        )
        assert (name, ntypes, book.num_partitions()) == ("mine", ["_N"], 2)
        source, destination = local.edges()
        inner = local.edata["inner_edge"].bool()
        ends = [nodes[local.ndata[dgl.NID][case[inner]]] for case in (source, destination)]
        assert (graph.edge_ids(*ends) == edge_data["_N:_E:_N/mark"]).all()
        structures.append(local.edata[dgl.EID][inner])
    assert sorted(torch.cat(structures).tolist()) == list(range(graph.num_edges()))
    assert (whole(tmp_path / "mine.json", 2, "_N", "labels") == graph.ndata["labels"][nodes]).all()
    assert sorted(edges.tolist()) == list(range(graph.num_edges()))


def test_edges_of_dgls_parts_have_new_ids_that_lead_back(tmp_path: Path) -> None:
    graph = paper_graph()
    nodes, edges = dgl.distributed.partition_graph(
        graph, "theirs", 2, str(tmp_path), part_method="random", return_mapping=True
    )
    every = torch.arange(graph.num_edges())
    with dx.init():
        g = dx.DistGraph(part_config=tmp_path / "theirs.json")
        reference = g.orig_edge_ids(every)
        assert not torch.equal(reference, every)
        assert torch.equal(g.orig_edge_ids(reference.argsort()[every]), every)
        loader = dx.DataLoader(g, torch.arange(60), dgl.dataloading.NeighborSampler([-1]), batch_size=60)
        ((_, _, (block,)),) = loader
        drawn = block.edata[dgl.EID]
        assert len(drawn) == len(every)
        ends = [
            nodes[ids[end]]
            for ids, end in zip((block.srcdata[dgl.NID], block.dstdata[dgl.NID]), block.edges(), strict=True)
        ]
        # DGL's ids are what orig_edge_ids says, and its mapping leads from these to the graph's.
        assert torch.equal(graph.edge_ids(*ends), edges[reference[drawn]])
        assert torch.equal(g.edata["mark"][drawn], edges[reference[drawn]])
        for part in range(2):
            local, *_ = dgl.distributed.load_partition(str(tmp_path / "theirs.json"), part)
            inner = local.edata["inner_edge"].bool()
            result = g.find_edges(reference.argsort()[local.edata[dgl.EID][inner]])
            for own_rows, own in zip(result, local.edges(), strict=True):
                assert torch.equal(own_rows, local.ndata[dgl.NID][own[inner]])


@pytest.mark.parametrize("graph", [paper_graph(), typed_graph()], ids=["one type", "typed"])
def test_one_part_keeps_the_ids_of_nodes_and_edges(tmp_path: Path, graph: dgl.DGLGraph) -> None:
    for write in (dgl.distributed.partition_graph, partition_graph):
        mapped = write(graph, "whole", 1, str(tmp_path / write.__module__), return_mapping=True)
        for ids in mapped:
            for first in ids.values() if isinstance(ids, dict) else [ids]:
                assert torch.equal(first, torch.arange(len(first)))
    stock, ours = (
        tmp_path / write.__module__ / "whole.json"
        for write in (dgl.distributed.partition_graph, partition_graph)
    )
    # Stock DGL reads the same from both.
    (graph_1, nodes_1, edges_1, *_), (graph_2, nodes_2, edges_2, *_) = (
        dgl.distributed.load_partition(str(case), 0) for case in (stock, ours)
    )
    for first, second in ((nodes_1, nodes_2), (edges_1, edges_2), (graph_1.edata, graph_2.edata)):
        # Of one type DGL writes its number, too.
        assert second.keys() <= first.keys() <= {*second.keys(), dgl.ETYPE}
        assert {name: rows.tolist() for name, rows in second.items()} == {
            name: first[name].tolist() for name in second
        }
    assert all(
        torch.equal(edge, second) for edge, second in zip(graph_1.edges(), graph_2.edges(), strict=True)
    )


def test_types_are_balanced_each_by_itself_and_trainers_are_told(tmp_path: Path) -> None:
    graph = typed_graph()
    kinds = {"paper": graph.nodes["paper"].data["train_mask"].long()}
    mapped = partition_graph(
        graph, "typed", 2, tmp_path, balance_ntypes=kinds, num_trainers_per_machine=2, return_mapping=True
    )
    nodes, edges = mapped
    assert nodes.keys() == {"paper", "author"}
    assert edges.keys() == set(graph.canonical_etypes)
    trained = graph.nodes["paper"].data["train_mask"][nodes["paper"]]
    owners = whole(tmp_path / "typed.json", 2, "paper", "trainer_id") // 2
    assert [int(trained[owners == part].sum()) for part in range(2)] == [9, 9]
    # As DGL does, also where an earlier cut left its own.
    assert (graph.nodes["paper"].data["trainer_id"][nodes["paper"]] // 2 == owners).all()
    of_edges = graph.edges["cites"].data["trainer_id"]
    assert (of_edges == graph.nodes["paper"].data["trainer_id"][graph.edges(etype="cites")[1]]).all()
    partition_graph(graph, "typed", 2, tmp_path, part_method="random", num_trainers_per_machine=3)
    assert int(of_edges.max()) < 4 <= int(graph.edges["cites"].data["trainer_id"].max())


def test_structure_in_csc_alone_and_graphbolts_options(tmp_path: Path) -> None:
    kept = paper_graph().formats("csc")
    with pytest.warns(UserWarning, match="use_graphbolt, store_eids: not used"):
        partition_graph(kept, "mine", 1, tmp_path, use_graphbolt=True, store_eids=True)
    local, *_ = load_partition(tmp_path / "mine.json", 0)
    for edge, inputs in zip(local.edges(order="eid"), paper_graph().edges(order="eid"), strict=True):
        assert edge.equal(inputs)


def test_files_of_an_earlier_partition_are_replaced(tmp_path: Path) -> None:
    partition_graph(paper_graph(), "again", 3, tmp_path, part_method="random")
    partition_graph(paper_graph(), "again", 2, tmp_path, part_method="random", seed=1)
    local, *_ = load_partition(tmp_path / "again.json", 1)
    assert int(local.ndata["inner_node"].sum()) == 30
    with pytest.raises(ConfigError, match="there are 2 parts"):
        load_partition(tmp_path / "again.json", 2)
    with pytest.raises(ConfigError, match="part_metadata is not supported"):
        load_partition_book(tmp_path / "again.json", 0, {})  # type: ignore[arg-type]  # what is wrong
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"store_ids": True}, "partition_graph has no argument store_ids"),
        ({"num_parts": 0}, "num_parts=0 must be a whole number of at least 1"),
        ({"num_trainers_per_machine": 0}, "num_trainers_per_machine=0 must be a whole number of at least 1"),
        ({"seed": -1}, "seed=-1 must be a whole number of at least 0"),
        ({"balance_ntypes": {"paper": torch.zeros(60)}}, r"has \['paper'\], but node types are _N"),
        ({"balance_ntypes": torch.zeros(7)}, r"has shape \(7,\) for the 60 nodes of '_N'"),
        ({"part_method": "hash", "balance_edges": True}, "Hash does not support balance="),
        ({"part_method": "nothing"}, "there is no partitioner 'nothing'"),
        ({"objtype": "both"}, "objective is both"),
    ],
)
def test_what_cannot_be_honoured_is_refused(tmp_path: Path, arguments: Any, reason: str) -> None:
    inputs: dict[str, Any] = {"num_parts": 2, "out_path": tmp_path, **arguments}
    with pytest.raises(ConfigError, match=reason):
        partition_graph(paper_graph(), "mine", **inputs)


def test_a_method_that_does_not_balance_is_accepted_with_a_warning_as_by_dgl(tmp_path: Path) -> None:
    g = dgl.rand_graph(20, 60)
    mask = torch.arange(20) % 2 == 0
    with pytest.warns(UserWarning, match="no effect with part_method='random'"):
        partition_graph(g, "g", 2, tmp_path, part_method="random", balance_ntypes=mask, balance_edges=True)
    assert (tmp_path / "g.json").is_file()
