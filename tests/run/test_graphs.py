from pathlib import Path
from typing import Any

import dgl
import pytest
import torch

import dglx_dist as dx
from tests.helpers.ranks import RankError, run_ranks
from tests.run.graphs import as_dgl


def test_the_mapping_leads_back_to_nodes_and_edges(tmp_path: Path) -> None:
    g = as_dgl()
    mapping = dx.partition_graph(g, "t", 2, tmp_path, return_mapping=True)
    assert mapping is not None
    nodes, edges = mapping
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
    mapping = dx.partition_graph(as_dgl(), "t", 3, tmp_path, balance_ntypes=kinds, return_mapping=True)
    assert mapping is not None
    # Three parts with one node of each kind: two in each.
    assert kinds[mapping[0]].reshape(3, 2).sum(1).tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    "asked",
    [{"num_hops": 2}, {"num_trainers_per_machine": 2}, {"graph_formats": "coo"}, {"use_graphbolt": True}],
)
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


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_all_ranks_get_rank_zeros_graph(world_size: int, tmp_path: Path) -> None:
    results = run_ranks(_distribute, world_size, args=(str(tmp_path),))
    for nodes, total, mean in results:
        assert (nodes, total) == (6, 66.0)
        # Weights 0, 1, 2 of the values 0, 1, 2; nothing to weigh on one rank.
        assert mean != mean if world_size == 1 else mean == pytest.approx({2: 1.0, 3: 5 / 3}[world_size])
    assert len(list(tmp_path.iterdir())) == 1


def test_the_second_time_finds_the_cut_graph(tmp_path: Path) -> None:
    run_ranks(_distribute, 1, args=(str(tmp_path),))
    (folder,) = tmp_path.iterdir()
    before = (folder / "manifest.json").stat().st_mtime_ns
    run_ranks(_distribute, 1, args=(str(tmp_path),))
    assert (folder / "manifest.json").stat().st_mtime_ns == before


def _distribute_nothing(cache: str) -> None:
    with dx.init():
        dx.distribute("nowhere.npz", cache=cache)


def test_what_rank_zero_cannot_load_is_an_error_everywhere(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"nowhere\.npz"):
        run_ranks(_distribute_nothing, 2, args=(str(tmp_path),))


def test_a_wrong_strategy_costs_no_rendezvous() -> None:
    with pytest.raises(dx.UnknownNameError, match="data_parallel"):
        dx.init("data_paralel")
    with pytest.raises(dx.ConfigError, match=r"dglx_dist\.init"):
        dx.local_device()


def test_how_to_cut_is_never_ignored(tmp_path: Path) -> None:
    dx.partition_graph(as_dgl(), "t", 2, tmp_path)
    with dx.init():
        with pytest.raises(dx.ConfigError, match="is cut already"):
            dx.distribute(tmp_path / "t", parts=3)
        with pytest.raises(dx.ConfigError, match="number of parts is 0"):
            dx.distribute(as_dgl(), parts=0, cache=tmp_path / "cache")
