"""Estimates from hand-made plans, and the search for a number of cooperative batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from dglx_dist.errors import ConfigError
from dglx_dist.records import Array
from dglx_dist.strategies.full_graph.memory_estimate import (
    MemoryTrace,
    choose_num_batches,
    counts_of,
    estimate,
    evenly_spaced,
    structure_bytes,
)
from tests.strategies.full_graph.test_plan_files import a_plan


def a_memory_trace() -> MemoryTrace:
    """10 bytes for each row of level 1 are kept, 6 for each source of layer 1 pass; then 4 for each seed."""
    kinds = [5, 2, 5, 3, 0, 2, 3, 0]
    row_bytes = [6, 10, -6, 4, 100, -10, -4, -100]
    return MemoryTrace(
        num_layers=2,
        kinds=np.array(kinds),
        row_bytes=np.array(row_bytes),
        backward_at=4,
        exchanged=np.array([8, 0]),
        parameter_bytes=100,
    )


def test_numbers_of_a_plan() -> None:
    # Rank 0 of the plan receives at layer 1, so no row stands there twice.
    assert counts_of(a_plan()).tolist() == [1, 3, 2, 1, 4, 2, 3, 0]


def test_allocations_of_a_step() -> None:
    memory_trace, counts = a_memory_trace(), np.array([1, 3, 2, 1, 9, 4, 3, 0])
    assert memory_trace.running(counts).tolist() == [0, 24, 44, 20, 24, 124, 104, 100, 0]
    assert memory_trace.kept(counts).tolist() == [0, 20, 4]


def test_layers_and_their_sum() -> None:
    plan, memory_trace = a_plan(), a_memory_trace()
    found = estimate(plan, memory_trace, 40, ahead=1)
    assert [layer.features for layer in found.layers] == [120, 0]
    # The sources of layer 2, of which the hand-made allocations have 6 bytes each, are freed in forward.
    assert [layer.activations for layer in found.layers] == [20, 4]
    assert [layer.halo for layer in found.layers] == [2 * 3 * 8, 0]
    structure = [structure_bytes(layer) for layer in plan.layers]
    assert [layer.structure for layer in found.layers] == structure
    assert structure[0] == 44 * 3 + 16 * 4 + 8 * (2 + 3)
    assert found.gradients == 100
    assert found.ahead == 120 + sum(structure)
    assert found.optimizer == 200
    assert found.total == 120 + 24 + sum(structure) + 48 + 100 + 200 + found.ahead
    assert len(found.lines()) == 4


def test_layers_on_one_structure_need_it_once() -> None:
    one, other = a_plan().layers
    memory_trace = a_memory_trace()
    alike = replace(a_plan(), layers=(one, one))
    found = [layer.structure for layer in estimate(alike, memory_trace, 40, ahead=0).layers]
    assert found == [structure_bytes(one), 0]
    apart = replace(a_plan(), layers=(one, other))
    assert estimate(apart, memory_trace, 40, ahead=0).layers[1].structure == structure_bytes(other) > 0


def needs(total: int) -> tuple[list[int], Callable[[int, Array], int]]:
    """Bytes of a cooperative batch are the total over their number, and which numbers were asked for."""
    asked: list[int] = []

    def worst(number: int, steps: Array) -> int:
        asked.append(number)
        assert steps.min() >= 0
        assert steps.max() < number
        return -(-total // number)

    return asked, worst


@pytest.mark.parametrize("total", [1, 99, 100, 101, 250, 1000, 3100, 3201, 7777, 50000])
def test_the_fewest_that_fit(total: int) -> None:
    asked, worst = needs(total)
    number = choose_num_batches(worst, 100, 1000)
    fewest = -(-total // 100)
    assert fewest <= number <= fewest + max(1, fewest // 7)
    assert len(asked) < 16
    # No more than one number of cooperative batches is planned that needs twice the memory.
    assert sum(worst(one, np.array([0])) > 200 for one in set(asked)) <= (0 if number <= 32 else 6)


def test_one_batch_that_is_larger_than_the_probes_counts() -> None:
    def worst(number: int, steps: Array) -> int:
        return 1000 // number + (30 if 1 in steps and number > 4 else 0)

    number = choose_num_batches(worst, 100, 1000)
    assert worst(number, np.arange(number)) <= 100


def test_no_room_is_refused_with_the_way_out() -> None:
    _, worst = needs(10**6)
    with pytest.raises(ConfigError, match=r"do not hold even one of 50 cooperative batches.*raise memory"):
        choose_num_batches(worst, 100, 50)


def test_a_batch_that_is_never_small_enough_is_found_behind_the_probes() -> None:
    def worst(_number: int, steps: Array) -> int:
        return 60 if 1 in steps else 1

    with pytest.raises(ConfigError, match="do not hold even one of 5 cooperative batches, which needs 60"):
        choose_num_batches(worst, 50, 5)


def test_spread_numbers() -> None:
    assert evenly_spaced(1, 3).tolist() == [0]
    assert evenly_spaced(2, 3).tolist() == [0, 1]
    assert evenly_spaced(9, 3).tolist() == [0, 4, 8]
