import numpy as np

from dglx_dist.data.partition.graph_views import symmetrise
from dglx_dist.data.partition.streaming import stream_order
from tests.data.partition.graphs import communities, homogeneous


def test_every_node_once_and_by_seed() -> None:
    graph = symmetrise(communities(num_nodes=400))
    order = stream_order(graph, 1)
    assert sorted(order.tolist()) == list(range(400))
    assert stream_order(graph, 1).tolist() == order.tolist()
    assert stream_order(graph, 2).tolist() != order.tolist()


def test_nearer_nodes_come_first() -> None:
    # A path 0-1-...-9 and one apart: along the path the distance from the start never shrinks.
    graph = symmetrise(homogeneous(11, [(i, i + 1) for i in range(9)]))
    for seed in range(5):
        path = [u for u in stream_order(graph, seed).tolist() if u != 10]
        assert (np.diff([abs(u - path[0]) for u in path]) >= 0).all()
