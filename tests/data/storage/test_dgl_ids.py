"""DGL numbers part by part, and type by type inside a part."""

import numpy as np

from dglx_dist.data.storage.dgl_format import IdRanges

# Two parts: users 0..2 | 3, items 0 | 1..2. The ranges: u0 u1 u2 i0 | u3 i1 i2.
RANGES = IdRanges.of_offsets([np.array([0, 3, 4]), np.array([0, 1, 3])])


def test_where_everything_lies() -> None:
    assert RANGES.starts.tolist() == [[0, 4], [3, 5]]
    assert RANGES.offsets.tolist() == [[0, 3, 4], [0, 1, 3]]
    assert (RANGES.part_range(0), RANGES.part_range(1)) == ((0, 4), (4, 7))


def test_there_and_back() -> None:
    assert RANGES.from_typed(0, np.arange(4)).tolist() == [0, 1, 2, 4]
    assert RANGES.from_typed(1, np.arange(3)).tolist() == [3, 5, 6]
    kinds, ids = RANGES.to_typed(np.arange(7))
    assert kinds.tolist() == [0, 0, 0, 1, 0, 1, 1]
    assert ids.tolist() == [0, 1, 2, 0, 3, 1, 2]
    assert RANGES.locate(np.arange(7))[1].tolist() == [0, 0, 0, 0, 1, 1, 1]


def test_a_type_without_nodes_in_a_part_takes_no_room() -> None:
    ranges = IdRanges.of_offsets([np.array([0, 0, 2, 2]), np.array([0, 1, 1, 1])])
    assert ranges.starts.tolist() == [[0, 1, 3], [0, 3, 3]]
    kinds, ids = ranges.to_typed(np.arange(3))
    assert kinds.tolist() == [1, 0, 0]
    assert ids.tolist() == [0, 0, 1]
