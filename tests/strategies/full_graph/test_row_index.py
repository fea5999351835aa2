import numpy as np

from dglx_dist.strategies.full_graph.halo_plan import RowIndex


def test_places_of_rows_and_of_others() -> None:
    for num_ids in (10, 1 << 40):
        index = RowIndex(np.array([7, 2, 9]), num_ids)
        assert index.places(np.array([9, 7, 2, 7, 3])).tolist() == [2, 0, 1, 0, -1]
        assert index.places(np.empty(0, np.int64)).tolist() == []


def test_no_rows() -> None:
    assert RowIndex(np.empty(0, np.int64), 5).places(np.array([0, 4])).tolist() == [-1, -1]
    assert RowIndex(np.empty(0, np.int64), 0).places(np.empty(0, np.int64)).tolist() == []
