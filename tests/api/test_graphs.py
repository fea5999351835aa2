import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dgl
import numpy as np
import pytest
import torch

import dglx_dist as dx
from dglx_dist import api as graphs
from dglx_dist.comm.topology import Topology
from tests.api.graphs import as_dgl
from tests.helpers.ranks import run_ranks


def test_the_mapping_leads_back_to_nodes_and_edges(tmp_path: Path) -> None:
    g = as_dgl()
    nodes, edges = dx.partition_graph(g, "t", 2, tmp_path, return_mapping=True)
    assert sorted(nodes.tolist()) == list(range(6))
    with dx.init():
        d = dx.DistGraph(tmp_path / "t")
        assert torch.equal(d.ndata["feat"][torch.arange(6)], g.ndata["feat"][nodes])
        source, destination = d.find_edges(torch.arange(14))
        before = g.find_edges(edges)
        assert torch.equal(nodes[source], before[0])
        assert torch.equal(nodes[destination], before[1])


def test_each_value_of_balance_ntypes_is_balanced(tmp_path: Path) -> None:
    kinds = torch.tensor([0, 0, 0, 1, 1, 1])
    nodes, _ = dx.partition_graph(as_dgl(), "t", 3, tmp_path, balance_ntypes=kinds, return_mapping=True)
    # Three parts with one node of each kind: two in each.
    assert kinds[nodes].reshape(3, 2).sum(1).tolist() == [1, 1, 1]


@pytest.mark.parametrize("asked", [{"num_hops": 2}, {"graph_formats": "coo"}, {"use_graphbolt": True}])
def test_what_cannot_be_honoured_is_refused(asked: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(dx.ConfigError, match=next(iter(asked))):
        dx.partition_graph(as_dgl(), "t", 2, tmp_path, **asked)
    assert not list(tmp_path.iterdir())


def _distribute(cache: str) -> list[Any]:
    with dx.init() as session:
        # Only rank 0's graph counts.
        g = dx.distribute(as_dgl() if session.topology.rank == 0 else dgl.graph([]), parts=2, cache=cache)
        mean = dx.reduce_mean(float(session.topology.rank), session.topology.rank)
        return [g.num_nodes(), g.ndata["feat"][torch.arange(6)].sum().item(), mean]


@pytest.mark.parametrize("world_size", [1, 3])
def test_all_ranks_get_rank_zeros_graph(world_size: int, tmp_path: Path) -> None:
    results = run_ranks(_distribute, world_size, args=(str(tmp_path),))
    for nodes, total, mean in results:
        assert (nodes, total) == (6, 66.0)
        # Weights 0, 1, 2 of the values 0, 1, 2; nothing to weigh on one rank.
        assert mean != mean if world_size == 1 else mean == pytest.approx(5 / 3)
    assert len(list(tmp_path.iterdir())) == 1


def _distribute_nothing(folder: str) -> list[str]:
    with dx.init(timeout=20) as session:
        with pytest.raises(dx.DatasetError) as missing:
            dx.distribute("nowhere.npz", cache=folder)
        # A dataset that the other machine lacks: all go one way, and are told.
        os.chdir(folder if session.topology.rank == 0 else "/")
        with pytest.raises(dx.StorageError) as elsewhere:
            dx.distribute("mine")
        return [str(missing.value), str(elsewhere.value)]


def test_what_a_rank_cannot_load_is_an_error_everywhere(tmp_path: Path) -> None:
    dx.partition_graph(as_dgl(), "mine", 2, tmp_path)
    for missing, elsewhere in run_ranks(_distribute_nothing, 2, args=(str(tmp_path),)):
        assert "nowhere.npz" in missing
        assert "/mine" in elsewhere


def test_a_time_out_while_rank_0_partitions_names_the_remedy() -> None:
    for rank, message in (
        (0, "^rank 1 is silent$"),
        (1, r"^waiting for rank 0.* rank 0 is silent\. .*dglx partition"),
    ):
        session: Any = SimpleNamespace(topology=Topology(rank, 2, (0, 1)))
        with pytest.raises(dx.PeerError, match=message), graphs._explain_timeout(session):
            raise dx.PeerError(f"rank {1 - rank} is silent")


def test_a_wrong_strategy_costs_no_rendezvous() -> None:
    with pytest.raises(dx.UnknownNameError, match="data_parallel"):
        dx.init("data_paralel")
    with pytest.raises(dx.ConfigError, match=r"dglx_dist\.init"):
        dx.local_device()


def test_distributing_joins_the_ranks_and_keeps_the_names_of_columns(tmp_path: Path) -> None:
    g = as_dgl()
    g.ndata["features"] = g.ndata.pop("feat")
    g.ndata["labels"] = torch.arange(6, dtype=torch.int32)
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    d = dx.distribute(g, strategy="full_graph", cache=tmp_path)
    with d.session as session:
        assert session.strategy == "full_graph"
        assert torch.equal(torch.rand(1), expected)
        assert set(d.ndata) == {"features", "labels", "train_mask"}
        assert d.to("cpu") is d
        with pytest.raises(dx.ConfigError, match=r"Leave out \.to\(cuda\)"):
            d.to("cuda")
        assert not hasattr(d, "update_all")
        assert d.to_canonical_etype(None) == ("_N", "_E", "_N")
        with pytest.raises(AttributeError, match=r"no 'int'\. .* before dx\.distribute.*dataloading"):
            d.int()
        with pytest.raises(
            AttributeError, match=r"no 'max'\. .* t\[:\] returns all .*dx\.node_split\(mask\)"
        ):
            d.ndata["labels"].max()
        with pytest.raises(TypeError, match=r"sum takes no DistTensor\. .*dx\.node_split\(mask\)"):
            torch.sum(d.ndata["train_mask"])  # type: ignore[arg-type]
        for compared in (1, np.int64(1), torch.ones(6)):
            with pytest.raises(TypeError, match=r"not compared by value.* t\[:\] returns all"):
                d.ndata["labels"] == compared  # noqa: B015 - what is wrong
        assert d.ndata["labels"] != None and len({d.ndata["labels"]}) == 1  # noqa: E711, PT018
        with pytest.raises(IndexError, match=r"For a column write t\[ids\]\[:, column\]"):
            d.ndata["features"][:, 0]
        with pytest.raises(dx.ConfigError, match=r"arange\(g\.num_nodes\(\)\).* before dx\.distribute"):
            dgl.add_self_loop(d)
        assert d.ndata["labels"][d.ndata["train_mask"]].tolist() == [0, 3]
        assert torch.equal(d.ndata["labels"][:].long(), d.orig_ids(torch.arange(6)))
        with pytest.raises(
            dx.ConfigError, match="differs from 'full_graph', the strategy of the open session"
        ):
            dx.distribute(g, strategy="push_pull", cache=tmp_path)
        assert torch.equal(dx.distribute(g, cache=tmp_path).ndata["labels"][:], d.ndata["labels"][:])


class _OneGraph:
    num_classes = 7

    def __getitem__(self, index: int) -> dgl.DGLGraph:
        return as_dgl()

    def __len__(self) -> int:
        return 1


class _Pair(_OneGraph):
    def __getitem__(self, index: int) -> Any:
        return as_dgl(), torch.zeros(6)


def _shares(cache: str) -> list[Any]:
    dataset = dx.distribute_dataset(_OneGraph(), cache=cache)
    with dataset[0].session:
        with pytest.raises(AttributeError, match="nodes have new ids"):
            _ = dataset.train_mask
        with pytest.raises(dx.ConfigError, match="'val_mask' are none"):
            _ = dataset.val_idx
        with pytest.raises(dx.ConfigError, match=r"Use dx\.distribute"):
            dx.distribute_dataset(as_dgl(), cache=cache)
        with pytest.raises(dx.ConfigError, match=r"_Pair.*AsNodePredDataset"):
            dx.distribute_dataset(_Pair(), cache=cache)
        return [dataset.num_classes, dataset[0].orig_ids(dataset.train_idx).tolist()]


def test_a_dataset_gives_each_rank_its_share_of_a_split(tmp_path: Path) -> None:
    results = run_ranks(_shares, 2, args=(str(tmp_path),))
    assert [classes for classes, _ in results] == [7, 7]
    assert sorted(ids for _, ids in results) == [[0], [3]]


def test_partitioning_options_are_never_ignored(tmp_path: Path) -> None:
    dx.partition_graph(as_dgl(), "t", 2, tmp_path)
    with dx.init():
        for how in ({"parts": 3}, {"method": "hash"}, {"balance": ["train"]}, {"seed": 0}):
            with pytest.raises(dx.ConfigError, match=f"is partitioned already, so {next(iter(how))} would"):
                dx.distribute(tmp_path / "t", **how)  # type: ignore[arg-type]
        for wrong, named in (({"parts": 0}, "number of parts is 0"), ({"seed": -1}, "seed is -1")):
            with pytest.raises(dx.ConfigError, match=named):
                dx.distribute(as_dgl(), cache=tmp_path / "cache", **wrong)  # type: ignore[arg-type]


def two_circles() -> Any:
    """Eight communities of 50 nodes in a row, with a relation of its own back to users."""
    rng = np.random.default_rng(0)
    home = np.arange(400) // 50
    src = rng.integers(0, 400, 4000)
    near = home[src] * 50 + rng.integers(0, 50, 4000)
    dst = np.where(rng.random(4000) < 0.95, near, rng.integers(0, 400, 4000))
    g = dgl.heterograph(
        {
            ("paper", "cites", "paper"): (torch.from_numpy(src), torch.from_numpy(dst)),
            ("author", "writes", "paper"): (torch.arange(400) // 4, torch.arange(400)),
        }
    )
    g.nodes["paper"].data["feat"] = torch.randn(400, 6, generator=torch.Generator().manual_seed(0))
    g.nodes["paper"].data["train_mask"] = torch.from_numpy(rng.random(400) < 0.4)
    g.edges["cites"].data["train_mask"] = torch.from_numpy(rng.random(4000) < 0.3)
    return g


def _split_by_trainer(folder: str, num_trainers: int) -> None:
    with dx.init() as session:
        g = dx.DistGraph(folder)
        book, rank, paper = g.get_partition_book(), session.topology.rank, g.nodes["paper"].data
        trainers, mask, cites = paper["trainer_id"], paper["train_mask"], g.edges["cites"].data
        seeds = dx.node_split(mask, book, ntype="paper", node_trainer_ids=trainers)
        own = dx.node_split(mask, book, ntype="paper", force_even=False, node_trainer_ids=trainers)
        of_edge = cites["trainer_id"]
        edges = dx.edge_split(cites["train_mask"], book, etype="cites", edge_trainer_ids=of_edge)
        assert book.num_trainers == 2 * num_trainers
        # Trainers fold onto the ranks where there are more of them.
        rank_of = 4 / book.num_trainers
        assert ((trainers[seeds] * rank_of).long() == rank).float().mean() > 0.85
        assert ((of_edge[edges] * rank_of).long() == rank).float().mean() > 0.85
        assert ((trainers[own] * rank_of).long() == rank).all()
        _, destinations = g.find_edges(torch.arange(g.num_edges("cites")), "cites")
        assert torch.equal(of_edge[:], trainers[destinations])
        before = session.ledger.snapshot()
        first, last = book.node_bounds("paper")[1 - session.topology.server :][:2]
        remote = torch.arange(first, last)[:7]
        rows = paper["feat"][torch.cat([remote, remote])]
        assert (rows.dtype, g.nodes["author"].data["trainer_id"].dtype) == (torch.bfloat16, torch.int32)
        # Half precision on the wire: an id and six values of two bytes for each distinct remote row.
        assert sum(row.num_bytes for row in session.ledger.since(before)) == (8 + 6 * 2) * 7


@pytest.mark.wide
@pytest.mark.parametrize("num_trainers", [2, 4])
def test_ranks_work_on_the_nodes_of_their_trainer(num_trainers: int, tmp_path: Path) -> None:
    dx.partition_graph(
        two_circles(), "t", 2, tmp_path, num_trainers_per_machine=num_trainers, feature_dtype=torch.bfloat16,
        balance=("train", "ntype"), balance_edges=True, tolerance=0.1,
    )  # fmt: skip
    run_ranks(_split_by_trainer, 4, args=(str(tmp_path / "t"), num_trainers), ranks_per_server=2)


def _authors(folder: str) -> tuple[int, list[int]]:
    with dx.init():
        g = dx.DistGraph(folder)
        trainers = g.nodes["author"].data["trainer_id"]
        everybody = torch.ones(100, dtype=torch.bool)
        own = dx.node_split(everybody, ntype="author", force_even=False, node_trainer_ids=trainers)
        return len(own), sorted(set(trainers[:].tolist()))


def test_trainers_without_a_node_of_a_type_count_all_the_same(tmp_path: Path) -> None:
    # Eight trainers on four ranks. The authors come first, so all lie with the trainers 0 and 1: of rank 0.
    dx.partition_graph(two_circles(), "t", 2, tmp_path, part_method="contiguous", num_trainers_per_machine=4)
    results = run_ranks(_authors, 4, args=(str(tmp_path / "t"),), ranks_per_server=2)
    assert results == [(100, [0, 1]), (0, [0, 1]), (0, [0, 1]), (0, [0, 1])]


def test_dgls_files_hold_trainers_and_half_precision(tmp_path: Path) -> None:
    dx.partition_graph(
        two_circles(), "t", 2, tmp_path, num_trainers_per_machine=2, format="dgl", feature_dtype="float16"
    )
    with dx.init():
        g = dx.DistGraph(part_config=tmp_path / "t.json")
        assert g.nodes["paper"].data["feat"].dtype == torch.float16
        trainers = g.nodes["paper"].data["trainer_id"][:]
        part = g.get_partition_book()
        assert set(trainers.tolist()) == {0, 1, 2, 3}
        _, destinations = g.find_edges(torch.arange(g.num_edges("cites")), "cites")
        assert torch.equal(g.edges["cites"].data["trainer_id"][:], trainers[destinations])
        assert part.num_trainers is None
    with pytest.raises(dx.ConfigError, match="DGL's files cannot hold bfloat16"):
        dx.partition_graph(two_circles(), "x", 2, tmp_path, format="dgl", feature_dtype=torch.bfloat16)
