import numpy as np
import pytest

from dglx_dist.data.partition.balance import measure
from dglx_dist.data.partition.base import PartitionOptions
from dglx_dist.data.partition.streaming import Ldg
from tests.data.partition.graphs import communities, flat, homogeneous


def test_two_cliques_stay_whole() -> None:
    cliques = [(a + s, b + s) for s in (0, 10) for a in range(10) for b in range(a)]
    for seed in range(5):
        parts = flat(Ldg(PartitionOptions()).assign(homogeneous(20, cliques), 2, seed).part_of)
        assert (len(set(parts[:10])), len(set(parts[10:]))) == (1, 1)
        assert parts[0] != parts[10]


@pytest.mark.parametrize("balance", ["nodes", "degree"])
@pytest.mark.parametrize("tolerance", [0.01, 0.2])
def test_the_tolerance_holds(balance: str, tolerance: float) -> None:
    graph = communities()
    options = PartitionOptions(balance=(balance,), tolerance=tolerance)
    quality = measure(graph, Ldg(options).assign(graph, 4, 0))
    assert quality.balance[balance] <= 1 + tolerance + 0.01  # a part may end one node of 20 in-edges above


def test_unequal_machines() -> None:
    graph = communities()
    options = PartitionOptions(target_weights=(3, 1), tolerance=0.02)
    sizes = np.array(measure(graph, Ldg(options).assign(graph, 2, 0)).num_nodes)
    assert (sizes <= np.array([1530, 510])).all()
