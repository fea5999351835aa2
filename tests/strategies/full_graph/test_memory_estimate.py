"""The memory of a step, estimated from a traced small step."""

from __future__ import annotations

from dataclasses import replace

import dgl
import numpy as np
import pytest
import torch
from torch import nn

from dglx_dist.errors import ConfigError
from dglx_dist.records import EDGE_TYPE, Array
from dglx_dist.strategies.cost import MemoryTrace
from dglx_dist.strategies.full_graph import memory_estimate
from dglx_dist.strategies.full_graph.halo_block import halo_block
from dglx_dist.strategies.full_graph.halo_plan import RankPlan
from dglx_dist.strategies.full_graph.memory_estimate import (
    choose_num_batches,
    estimate,
    step_sizes,
    trace_memory,
)
from dglx_dist.strategies.full_graph.model import install
from dglx_dist.training.models import build_model
from tests.strategies.full_graph.test_halo_plan import a_plan


def a_memory_trace() -> MemoryTrace:
    """10 bytes for each row of level 1 are kept, 6 for each source of layer 1 pass; then 4 for each seed."""
    kinds = [5, 2, 5, 3, 0, 2, 3, 0]
    row_bytes = [6, 10, -6, 4, 100, -10, -4, -100]
    return MemoryTrace(
        kinds=np.array(kinds),
        row_bytes=np.array(row_bytes),
        backward_at=4,
        exchanged=np.array([[16, 8], [0, 8]]),
        parameter_bytes=100,
    )


def test_layers_and_their_sum() -> None:
    plan, memory_trace = a_plan(), a_memory_trace()
    found = estimate(step_sizes(plan), memory_trace, 40, ahead=1)
    assert found.features == 120
    # The sources of layer 2, of which the hand-made allocations have 6 bytes each, are freed in forward.
    assert found.activations == (20, 4)
    # Rows of layer 1 are sent without a gradient; buffers of each way hold the largest layer.
    assert found.halo == ((3 * 16, 0), (0, 0))
    both = estimate(replace(step_sizes(plan), sent=(3, 2)), memory_trace, 40, ahead=1)
    assert both.halo == ((3 * 16, 2 * 8), (0, 2 * 8))
    assert both.held == 200 + 48 + 16
    structure = found.structure
    assert structure[0] == 44 * 3 + 16 * 4 + 8 * (2 + 3)
    # The second layer has a structure of its own, unless it is that of the first.
    alike = replace(plan, layers=plan.layers[:1] * 2)
    assert structure[1] > 0 == estimate(step_sizes(alike), memory_trace, 40, ahead=0).structure[1]
    assert found.gradients == 100
    assert found.ahead == 120 + sum(structure)
    assert found.optimizer == 200
    assert found.total == 120 + 24 + sum(structure) + 48 + 100 + 200 + found.ahead
    assert len(found.lines()) == 4


@pytest.mark.parametrize("total", [1, 99, 100, 101, 250, 1000, 3100, 3201, 7777, 50000])
def test_the_fewest_that_fit(total: int) -> None:
    """Bytes of a cooperative batch are the total over their number."""
    asked: list[int] = []

    def worst(number: int, steps: Array) -> int:
        asked.append(number)
        assert 0 <= steps.min() <= steps.max() < number
        return -(-total // number)

    number = choose_num_batches(worst, 100, 1000)
    fewest = -(-total // 100)
    assert fewest <= number <= fewest + max(1, fewest // 7)
    assert len(asked) < 16
    # No more than one number of cooperative batches is planned that needs twice the memory.
    assert sum(worst(one, np.array([0])) > 200 for one in set(asked)) <= (0 if number <= 32 else 6)


def test_a_large_batch_between_the_probes_counts() -> None:
    def worst(number: int, steps: Array) -> int:
        return 1000 // number + (30 if 1 in steps and number > 4 else 0)

    number = choose_num_batches(worst, 100, 1000)
    assert worst(number, np.arange(number)) <= 100
    with pytest.raises(
        ConfigError, match=r"even one of 5 cooperative batches, which needs 230; raise memory"
    ):
        choose_num_batches(worst, 220, 5)


WIDTH, HIDDEN, CLASSES = 12, 20, 5


def model_of(kind: str, width: int = WIDTH) -> nn.Module:
    torch.manual_seed(0)
    return build_model(kind, width, HIDDEN, CLASSES, 2, dropout=0.5, heads=2)


def random_plan(levels: list[int], halos: list[int], edges: list[int]) -> RankPlan:
    sources = [own + halo for own, halo in zip(levels, halos, strict=False)]
    counts = np.array([1, *levels, *sources, *edges])
    layers = tuple(memory_estimate._layer(counts, number, len(edges)) for number in (1, 2))
    return RankPlan(nodes=np.arange(levels[0]), layers=layers, external_nodes=0)


def allocated(model: nn.Module, plan: RankPlan) -> tuple[int, int]:
    """Return the peak of a real step on ``plan``, and what forward leaves, in bytes."""
    install(model)
    dropouts = memory_estimate.install_node_dropouts(model, 0)
    exchanges = [memory_estimate.LocalExchange(len(layer.halo_nodes)) for layer in plan.layers]
    blocks = [
        halo_block(layer, torch.arange(layer.own_rows), exchange, etype=EDGE_TYPE)
        for layer, exchange in zip(plan.layers, exchanges, strict=True)
    ]
    rows = torch.zeros(len(plan.nodes), WIDTH)
    dropouts.begin(0, blocks[0].srcdata[dgl.NID])
    memory_estimate._step(model, blocks, rows)
    events = memory_estimate._recorded(model, [block.local_var() for block in blocks], rows)
    held: set[int] = set()
    running, peak, kept = 0, 0, 0
    for _, address, num_bytes in events:
        if num_bytes == 0:
            kept = running
        elif num_bytes > 0 or address in held:
            running += num_bytes
            held = held | {address} if num_bytes > 0 else held - {address}
        peak = max(peak, running)
    return peak, kept


@pytest.mark.parametrize("kind", ["sage", "gcn", "gat", "resgcn"])
@pytest.mark.parametrize("halos", [[0, 0], [900, 500]])
def test_the_peak_of_a_step_follows_from_a_tiny_one(kind: str, halos: list[int]) -> None:
    model = model_of(kind)
    plan = random_plan([7000, 3000, 1500], halos, [40000, 9000])
    found = trace_memory(model, 2, torch.zeros(1, WIDTH), with_halo=halos[0] > 0, etype=EDGE_TYPE)
    peak, kept = allocated(model, plan)
    predicted = estimate(step_sizes(plan), found, 0, ahead=0)
    assert sum(predicted.activations) == pytest.approx(kept, rel=0.02)
    assert sum(predicted.activations) + predicted.gradients == pytest.approx(peak, rel=0.02)
    # Rows of layer 1 have no gradient, unless an encoder makes them.
    first = [HIDDEN, HIDDEN] if kind == "resgcn" else [WIDTH, 0]
    expected = [[4 * each, 4 * HIDDEN] if halos[0] else [0, 0] for each in first]
    assert found.exchanged.tolist() == expected
    assert found.parameter_bytes == sum(p.numel() * 4 for p in model.parameters())


def test_widths_are_not_taken_for_numbers_of_rows() -> None:
    """446 = 2 x 223, and the gradients of two weights of 446 x 20 would else be those of 223 rows."""
    found = trace_memory(model_of("sage", 446), 2, torch.zeros(1, 446), with_halo=False, etype=EDGE_TYPE)
    assert (found.row_bytes[found.kinds == 0] == 446 * HIDDEN * 4).sum() == 2


def test_the_model_is_as_before() -> None:
    model = model_of("sage")
    state = {name: value.clone() for name, value in model.state_dict().items()}
    trace_memory(model, 2, torch.zeros(1, WIDTH), with_halo=True, etype=EDGE_TYPE)
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert any(type(module) is nn.Dropout for module in model.modules())


def test_a_model_that_cannot_be_traced_is_told_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"failed on a tiny graph.*batches=R"):
        trace_memory(model_of("sage"), 2, torch.zeros(1, WIDTH + 1), with_halo=False, etype=EDGE_TYPE)
    # A torch whose profiler has other names.
    monkeypatch.delattr(torch._C._profiler, "_EventType")
    with pytest.raises(ConfigError, match=r"_EventType.*batches=R"):
        trace_memory(model_of("sage"), 2, torch.zeros(1, WIDTH), with_halo=False, etype=EDGE_TYPE)
