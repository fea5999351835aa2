import numpy as np
import pytest

from dglx_dist.data.partition.base import PartitionOptions
from dglx_dist.data.partition.graph_views import balance_weights, imbalance, in_degrees, part_shares
from dglx_dist.errors import ConfigError
from dglx_dist.records import SparseRows
from tests.data.partition.graphs import AUTHORS_AND_PAPERS, TWO_TRIANGLES, homogeneous


def test_in_degrees_count_all_edge_types_where_the_edge_ends() -> None:
    # authors 0, 1; papers 0..2, of which 0 is written once and cited once; the venue.
    assert in_degrees(AUTHORS_AND_PAPERS).tolist() == [0, 0, 2, 1, 1, 0]
    assert in_degrees(TWO_TRIANGLES).tolist() == [1, 1, 1, 2, 1, 1]
    assert in_degrees(homogeneous(2, [(0, 0), (1, 0), (1, 0)])).tolist() == [3, 0]


def test_each_node_type_is_a_constraint() -> None:
    options = PartitionOptions(balance=("ntype",), tolerance={"ntype": 0.2})
    weights = balance_weights(AUTHORS_AND_PAPERS, options, 2, None)
    assert weights.names == ("ntype:author", "ntype:paper", "ntype:venue")
    assert [c.tolist() for c in weights.columns] == [
        [1, 1, 0, 0, 0, 0],
        [0, 0, 1, 1, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]
    assert weights.tolerance.tolist() == [0.2, 0.2, 0.2]


def test_loads_capacities_and_what_is_missed() -> None:
    graph = homogeneous(4, [], cost=np.array([10, 20, 30, 40]))
    options = PartitionOptions(balance=("nodes", "cost"), tolerance=0.25, target_weights=(3, 1))
    weights = balance_weights(graph, options, 2, None)
    # nodes: shares 3 and 1, one more allowed; cost: shares 75 and 25, 25 % or one node of 40 more.
    assert weights.capacities().tolist() == [[4.0, 2.0], [115.0, 65.0]]
    parts = np.array([0, 0, 1, 1], dtype=np.int32)
    assert weights.loads(parts).tolist() == [[2.0, 2.0], [30.0, 70.0]]
    assert weights.missed(parts) == {"cost": 70 / 25}
    assert weights.missed(np.array([0, 0, 0, 1])) == {}


def test_an_empty_constraint_is_even() -> None:
    assert imbalance(np.zeros(3), part_shares(None, 3)) == 1.0


@pytest.mark.parametrize(
    ("values", "named"),
    [
        (np.array([1, -2, 3]), "node 1 of type '_N' weighs -2"),
        (np.ones((3, 2), dtype=int), r"\(3, 2\) int64"),
        (np.ones(3), "float64"),
        (
            SparseRows(indptr=np.zeros(4, int), indices=np.zeros(0, int), values=np.zeros(0), num_columns=2),
            r"\(3, 2\) float64",
        ),
    ],
)
def test_a_column_that_is_no_weight_is_refused(values: np.ndarray, named: str) -> None:
    options = PartitionOptions(balance=("nodes", "cost"))
    with pytest.raises(ConfigError, match=named):
        balance_weights(homogeneous(3, [], cost=values), options, 2, None)


def test_too_many_constraints_for_a_method() -> None:
    with pytest.raises(ConfigError, match=r"3 are asked for .*choose method metis"):
        balance_weights(AUTHORS_AND_PAPERS, PartitionOptions(balance=("ntype",)), 2, 1)


def test_a_misspelt_weight_names_the_nearest() -> None:
    for name, near in (("trian", "train"), ("degre", "degree"), ("coost", "cost")):
        graph = homogeneous(2, [(0, 1)], cost=np.ones(2, dtype=int))
        with pytest.raises(ConfigError, match=f"cannot balance '{name}'.*did you mean '{near}'"):
            balance_weights(graph, PartitionOptions(balance=(name,)), 1, None)
