import numpy as np
import pytest
import torch

from dglx_dist.dataloading.sampler_spec import all_weights, check_every_type_has, shard_weights
from dglx_dist.errors import ConfigError
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.graph.dist_tensor import DistTensor
from tests.dataloading.shop import BUYS, KNOWS


def test_weights_are_those_of_the_column(shop_graph: DistGraph) -> None:
    expected = shop_graph.edges[BUYS].data["weight"][torch.arange(shop_graph.num_edges(BUYS))].numpy()
    assert all_weights(shop_graph, BUYS, "weight").tolist() == expected.tolist()
    (shard,) = shard_weights(shop_graph, shop_graph.structure(BUYS), "weight").values()
    assert shard.tolist() == expected.tolist()
    assert shard.dtype == np.float32


def test_weights_in_half_precision_have_their_values(graph: DistGraph) -> None:
    (etype,) = graph.canonical_etypes
    halves = torch.arange(graph.num_edges()) % 7 / 4
    policy = graph.get_edge_partition_policy(etype)
    half = DistTensor((len(halves),), torch.bfloat16, "half", part_policy=policy)
    half[torch.arange(len(halves))] = halves.bfloat16()
    assert all_weights(graph, etype, "half").tolist() == halves.tolist()
    (shard,) = shard_weights(graph, graph.structure(etype), "half").values()
    assert shard.tolist() == halves.tolist()


def test_edge_types_without_the_column_are_named(shop_graph: DistGraph) -> None:
    check_every_type_has(shop_graph, "weight")
    policy = shop_graph.get_edge_partition_policy(KNOWS)
    DistTensor((shop_graph.num_edges(KNOWS),), torch.float32, "odd", part_policy=policy)
    with pytest.raises(
        ConfigError, match=r"'odd', but 5 of 6 edge types have no such column: \('user', 'buys'"
    ):
        check_every_type_has(shop_graph, "odd")


@pytest.mark.parametrize(
    ("name", "message"), [("negative", "finite weights of at least 0"), ("pair", "one number per edge")]
)
def test_what_is_no_weight_is_refused(graph: DistGraph, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        all_weights(graph, graph.canonical_etypes[0], name)


def test_a_tensor_of_one_rank_is_no_column(graph: DistGraph) -> None:
    with pytest.raises(ConfigError, match="'ones' would be a Tensor of this rank alone; make a DistTensor"):
        graph.edata["ones"] = torch.ones(graph.num_edges())
    assert "ones" not in graph.edata
