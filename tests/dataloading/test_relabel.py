import numpy as np
import pytest

from dglx_dist.dataloading.kernels import Table, enlarged, grown_table, insert, number

DIRECT = Table(np.zeros(100, np.uint32), np.empty(0, np.int64), 1)


def hashed(capacity: int) -> Table:
    return Table(np.zeros(capacity, np.uint32), np.empty(capacity, np.int64), 1)


@pytest.mark.parametrize("table", [DIRECT, hashed(16)], ids=["direct", "hashed"])
def test_numbers_in_order_of_first_sight(table: Table) -> None:
    nodes, local = np.empty(8, np.int64), np.empty(6, np.int64)
    count = number(table, np.array([7, 3, 7, 99, 3, 0]), nodes, 0, local)
    assert count == 4
    assert local.tolist() == [0, 1, 0, 2, 1, 3]
    assert nodes[:4].tolist() == [7, 3, 99, 0]


def test_growing_keeps_the_numbers() -> None:
    small = hashed(8)
    nodes, local = np.empty(40, np.int64), np.empty(3, np.int64)
    count = number(small, np.array([10**12, 5, 77]), nodes, 0, local)
    large = grown_table(small, nodes, count, 30)
    assert len(large.keys) >= 2 * 33
    more = np.empty(32, np.int64)
    count = number(large, np.arange(70, 102), nodes, count, more)
    assert count == 3 + 32 - 1
    assert more[7] == 2
    assert number(large, np.array([5, 10**12]), nodes, count, local) == count
    assert local[:2].tolist() == [1, 0]


def test_enough_room_is_left_as_it_is() -> None:
    table = hashed(16)
    assert len(grown_table(table, np.empty(0, np.int64), 0, 8).keys) == 16


def test_an_enlarged_table_is_empty_until_nodes_are_inserted() -> None:
    table = enlarged(hashed(8), 50)
    assert len(table.keys) == 64
    insert(table, np.array([10**12, 5, 77]), 2)
    nodes, local = np.array([10**12, 5, 0, 0, 0]), np.empty(3, np.int64)
    assert number(table, np.array([5, 77, 10**12]), nodes, 2, local) == 3
    assert local.tolist() == [1, 2, 0]
