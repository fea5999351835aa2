"""Counting bytes."""

import pytest

from dglx_dist.comm.ledger import CONTROL, WORKER, Ledger, ring_bytes
from dglx_dist.comm.topology import Topology


def test_rows_are_summed_by_phase_layer_and_ends() -> None:
    ledger = Ledger(Topology(0, 3, (0, 0, 1)))
    ledger.add("features", 0, 0, 1, 10)
    ledger.add("features", 0, 0, 1, 5)
    ledger.add("features", 0, 0, 2, 7)
    ledger.add("dense", 1, 2, 0, 1)
    before = ledger.snapshot()
    ledger.add("dense", 1, 2, 0, 4)
    ledger.add("dense", 1, 0, 0, 99)  # to oneself: no traffic
    ledger.add("dense", 1, 0, 1, 0)
    assert (ledger.total(), ledger.total(outside=True), ledger.total(outside=False)) == (27, 12, 15)
    assert ledger.total(phase="features", outside=True) == 7
    assert [(row.phase, row.num_bytes, row.inside) for row in ledger.rows()] == [
        ("dense", 5, False),
        ("features", 15, True),
        ("features", 7, False),
    ]
    ledger.add(CONTROL, 0, 0, 1, 3)
    assert [row.phase for row in ledger.since(before)] == [CONTROL, "dense"]
    (new,) = ledger.since(before, control=False)
    assert (new.phase, new.layer, new.source, new.destination, new.num_bytes) == ("dense", 1, 2, 0, 4)


def test_a_worker_is_on_no_server() -> None:
    ledger = Ledger(Topology(1, 2, (0, 0)))  # -1 as an index would be rank 1's server
    ledger.add("weights_down", 0, 1, WORKER, 8)
    ledger.add("weights_up", 0, WORKER, 1, 4)
    assert [(row.source, row.destination, row.inside) for row in ledger.rows()] == [
        (1, WORKER, False),
        (WORKER, 1, False),
    ]
    assert ledger.total(outside=True) == 12


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("num_bytes", [0, 1, 8, 1001])
def test_ring_bytes_sum_to_the_bound(world_size: int, num_bytes: int) -> None:
    shares = [ring_bytes(num_bytes, world_size, rank) for rank in range(world_size)]
    assert sum(shares) == 2 * (world_size - 1) * num_bytes
    assert max(shares) - min(shares) <= 1
