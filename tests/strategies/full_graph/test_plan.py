import numpy as np

from dglx_dist.strategies.full_graph.halo_plan import HaloLayer, RankPlan


def test_rows_of_a_level_are_the_first_ones() -> None:
    """4 and 3 are computed at layer 1, 4 at layer 2; row 2 is another rank's."""
    first = HaloLayer(
        own_rows=3,
        targets=2,
        indptr=np.array([0, 1, 3]),
        indices=np.array([1, 3, 2]),
        edge_ids=np.array([4, 2, 3]),
        halo_nodes=np.array([2]),
        receive=((1, 1),),
        send=(),
    )
    last = HaloLayer(
        own_rows=2,
        targets=1,
        indptr=np.array([0, 1]),
        indices=np.array([1]),
        edge_ids=np.array([4]),
        halo_nodes=np.empty(0, np.int64),
        receive=(),
        send=(),
    )
    plan = RankPlan(
        nodes=np.array([4, 3, 5]),
        layers=(first, last),
        hops=2,
        server_nodes=4,
        inner_nodes=2,
        external_nodes=2,
    )
    assert [plan.rows(level).tolist() for level in range(3)] == [[4, 3, 5], [4, 3], [4]]
    assert plan.seeds == 1
    assert (first.num_sources, last.num_sources) == (4, 2)
