"""Options of neighbour sampling: fan-outs and edge weights."""

from typing import Any

import pytest
import torch
from dgl import dataloading as dl

from dglx_dist.dataloading.sampler import SourceDraws
from dglx_dist.dataloading.sampler_spec import (
    check_edge_column,
    read_all_weights,
    read_sampler,
    read_shard_weights,
)
from dglx_dist.errors import ConfigError
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.graph.dist_tensor import DistTensor
from tests.dataloading.shop import KNOWS


class OwnLabor(dl.LaborSampler):
    def sample_blocks(self, *given):
        return super().sample_blocks(*given)


class Borrowing(dl.BlockSampler):
    sample_blocks = dl.NeighborSampler.sample_blocks


@pytest.mark.parametrize(
    ("make", "remedy"),
    [
        (lambda: dl.NeighborSampler([3], edge_dir="out"), "Use edge_dir='in'"),
        (lambda: dl.NeighborSampler([{("u", "e", "v"): -3}]), r"fanouts\[0\]\[\('u', 'e', 'v'\)\] is -3"),
        (lambda: dl.NeighborSampler([3, -2]), r"fanouts\[1\] is -2"),
        (lambda: dl.NeighborSampler([2.5]), r"fanouts\[0\] is 2.5"),
        (lambda: dl.NeighborSampler([1 << 70]), r"fanouts\[0\] is 11805"),
        (lambda: dl.NeighborSampler([]), "one number per layer"),
        (lambda: dl.NeighborSampler(5), "one number per layer"),
        (lambda: dl.NeighborSampler([3], prefetch_node_feats={"user": [3]}), r"\['user'\] is \[3\]"),
        (lambda: dl.LaborSampler([3], edge_dir="out"), "Use edge_dir='in'"),
        (lambda: OwnLabor([3]), "OwnLabor overrides methods of LaborSampler"),
        (lambda: dl.LaborSampler([3], importance_sampling=0.5), r"importance_sampling=0.5\. Use a number"),
        (lambda: dl.NeighborSampler([3], prefetch_labels="label"), r"Pass a list: \['label'\]"),
        (lambda: dl.NeighborSampler([3], prefetch_edge_feats=[3]), "list of column names"),
        (lambda: dl.as_edge_prediction_sampler(dl.NeighborSampler([3])), "DistEdgeDataLoader"),
        (lambda: object(), "NeighborSampler"),
    ],
)
def test_unsupported_samplers_are_refused_with_the_remedy(make, remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy):
        read_sampler(make())


WORK = {
    "Sampler",
    "BlockSampler",
    "NeighborSampler",
    "LaborSampler",
    "MultiLayerFullNeighborSampler",
    "EdgePredictionSampler",
}


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [
        *(
            (kind, "dgl.dataloading.NeighborSampler|strategy='cooperative'")
            for kind in dl.Sampler.__subclasses__()
            if kind.__module__.startswith("dgl.")
        ),
        (dl.DataLoader, "dx.DataLoader"),
        # GraphBolt need not be installed: its class, and one that derives from it.
        ("ItemSampler", "Pass the ids"),
        ("SubgraphSampler", "dgl.dataloading.NeighborSampler"),
        ("NegativeSampler", "negative.Uniform"),
        ("FeatureFetcher", "prefetch_node_feats"),
    ],
)
def test_other_samplers_of_dgl_are_refused_by_name(kind, remedy: str) -> None:
    if isinstance(kind, str):
        base = type(kind, (), {"__module__": "dgl.graphbolt.some_file"})
        kind = type(f"Distributed{kind}", (base,), {})
    if kind.__name__ not in WORK:
        with pytest.raises(
            ConfigError, match=rf"dgl\.\w+.*{kind.__name__.removeprefix('Distributed')}.*({remedy})"
        ):
            read_sampler(kind.__new__(kind))


def test_a_sampler_that_borrows_code_of_dgl_runs_its_own() -> None:
    assert read_sampler(Borrowing()).fanouts is None
    assert read_sampler(dl.MultiLayerFullNeighborSampler(1)).fanouts == (-1,)


@pytest.mark.parametrize("given", [{"prob": "w"}, {"importance_sampling": 1}])
def test_strategies_that_take_all_edges_refuse_weights(given: dict[str, Any]) -> None:
    plan = read_sampler(dl.LaborSampler([-1], **given))
    assert plan.has_edge_weights
    with pytest.raises(ConfigError, match=r"draws edges by .*, but lambda takes all of them"):
        plan.check_takes_all("lambda")
    read_sampler(dl.LaborSampler([-1])).check_takes_all("lambda")


def test_options_of_labor_are_read() -> None:
    plan = read_sampler(
        dl.LaborSampler([3, -1], layer_dependency=True, batch_dependency=4, prefetch_labels=["y"])
    )
    assert (plan.fanouts, plan.labels, plan.replace, plan.weights) == ((3, -1), ("y",), False, None)
    assert plan.by_source == SourceDraws(layer_dependency=True, batch_dependency=4)
    unequal = read_sampler(dl.LaborSampler([3], prob="w", importance_sampling=-5))
    assert (unequal.weights, unequal.by_source) == (
        "w",
        SourceDraws(layer_dependency=False, batch_dependency=1, rounds=-1, unequal=True),
    )
    default = read_sampler(dl.LaborSampler([3])).by_source
    assert default == SourceDraws(layer_dependency=False, batch_dependency=1)
    assert read_sampler(dl.NeighborSampler([3])).by_source is None


def test_weights_in_half_precision_have_their_values(graph: DistGraph) -> None:
    (etype,) = graph.canonical_etypes
    halves = torch.arange(graph.num_edges()) % 7 / 4
    policy = graph.get_edge_partition_policy(etype)
    half = DistTensor((len(halves),), torch.bfloat16, "half", part_policy=policy)
    half[torch.arange(len(halves))] = halves.bfloat16()
    assert read_all_weights(graph, etype, "half").tolist() == halves.tolist()
    (shard,) = read_shard_weights(graph, graph.structure(etype), "half").values()
    assert shard.tolist() == halves.tolist()


def test_edge_types_without_the_column_are_named(shop_graph: DistGraph) -> None:
    check_edge_column(shop_graph, "weight")
    policy = shop_graph.get_edge_partition_policy(KNOWS)
    DistTensor((shop_graph.num_edges(KNOWS),), torch.float32, "odd", part_policy=policy)
    with pytest.raises(
        ConfigError, match=r"'odd' was given .* 5 of 6 edge types do not have it: \('user', 'buys'"
    ):
        check_edge_column(shop_graph, "odd")


def test_a_tensor_of_one_rank_is_no_column(graph: DistGraph) -> None:
    with pytest.raises(
        ConfigError, match=r"'ones' must be a DistTensor, because other ranks cannot read a Tensor"
    ):
        graph.edata["ones"] = torch.ones(graph.num_edges())
    assert "ones" not in graph.edata
