"""Rates from work and seconds, work from the model."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import dgl
import numpy as np
import pytest
import torch
from torch import nn

from dglx_dist.errors import ConfigError
from dglx_dist.layers.base import StageInput
from dglx_dist.layers.convolutions import stages_of
from dglx_dist.layers.dropout import install_node_dropouts
from dglx_dist.layers.tracer import random_block
from dglx_dist.planner import profile
from dglx_dist.planner.model_shape import shape_of_module
from dglx_dist.planner.profile import fit_rates, repeated, time_batches
from dglx_dist.strategies.base import STRATEGIES
from dglx_dist.training.models import build_model
from tests.planner.hand_made import shape_of_kind


def test_factors_are_found_again() -> None:
    random = np.random.default_rng(0)
    work = np.column_stack([np.ones(6), random.uniform(1e6, 1e8, 6), random.uniform(1e7, 1e9, 6)])
    planted = np.array([2e-3, 1e-9, 3e-11])
    _, edge, product = found = fit_rates(work, work @ planted)
    assert (edge, product) == pytest.approx((1e-9, 3e-11), rel=0.15)
    assert work @ np.array(found) == pytest.approx(work @ planted, rel=0.05)


def test_what_trials_do_not_tell_apart_is_parted_as_usual() -> None:
    """Twice the same work, that takes three times what it usually does."""
    parts = np.array([2 * profile._LAYER_S, *profile._USUAL])
    work = np.array([[1.0, 2e7, 4e8]] * 2)
    assert fit_rates(work, 3 * work @ parts) == pytest.approx((3 * parts).tolist())


def test_a_new_block_takes_longer_by_its_edges() -> None:
    """Two blocks of 8 edges; the first step on each is 4 s longer, the very first warms up more than that."""
    now, blocks = 0.0, [dgl.to_block(dgl.graph((range(8), [0, 1] * 4)), [0, 1]) for _ in range(2)]
    seen: set[int] = set()
    model = build_model("sage", 3, 4, 2, 1)

    def step(_model: nn.Module, given: tuple[Any, ...]) -> None:
        nonlocal now
        block = id(given[0][0])
        now += 1.0 if block in seen else 5.0 if seen else 9.0
        seen.add(block)

    with mock.patch.object(profile.copy, "deepcopy", lambda one: one):
        model.register_forward_pre_hook(step)
        shape = shape_of_kind("sage", 3, 4, 2, 1)
        found = time_batches(model, shape, [[block] for block in blocks], clock=lambda: now)
    assert np.array(found.work).shape == (2, 3)
    assert found.seconds == [1.0, 1.0]
    assert found.fresh_edge_s == pytest.approx(4.0 / 8)
    assert found.spread == 0.0


def test_a_wrapped_model_keeps_its_dropouts_when_a_copy_is_timed() -> None:
    model, block = build_model("sage", 3, 4, 2, 1), dgl.to_block(dgl.graph(([0, 1], [0, 0])), [0])
    install_node_dropouts(model, 0)
    hooks = [len(module._forward_hooks) for module in model.modules()]
    time_batches(model, shape_of_kind("sage", 3, 4, 2, 1), [[block]])
    assert [len(module._forward_hooks) for module in model.modules()] == hooks


def test_disturbed_repetitions_are_discarded(monkeypatch: pytest.MonkeyPatch) -> None:
    now = waited = 0.0
    waits = iter([0.5, 0.0, 0.5, 0.0, 0.5, 0.04])

    def run() -> float:
        nonlocal now, waited
        now, wait = now + 0.1, next(waits)
        waited += 0.1 * wait
        return round(10 * now)

    monkeypatch.setattr(profile, "_waiting_s", lambda: waited)
    monkeypatch.setattr(profile.time, "perf_counter", lambda: now)
    # The second, fourth and sixth, whatever their seconds.
    assert repeated(run) == [2, 4, 6]
    # Where all are disturbed, the least disturbed of nine; of steps of a second, of the first three.
    waits = iter([0.9, 0.8, 0.3, 0.7, 0.1, 0.6, 0.5, 0.2, 0.4])
    now = 0.0
    assert repeated(run) == [5, 8, 3]
    waits, now = iter([0.9, 0.8, 0.7]), 0.0

    def long() -> float:
        nonlocal now
        now += 0.9
        return run()

    assert sorted(repeated(long)) == [10, 20, 30]


def test_waiting_for_a_core_is_read_from_the_kernel() -> None:
    """This thread and a busy process share one core."""
    if not Path("/proc/self/schedstat").exists():
        pytest.skip("the kernel does not count it")
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
            before, until = profile._waiting_s(), time.monotonic() + 60
            while profile._waiting_s() - before < 0.01:
                assert time.monotonic() < until
            other.kill()
    finally:
        os.sched_setaffinity(0, cores)


class Fails(nn.Module):
    def __init__(self, problem: Exception, weights: torch.Tensor) -> None:
        super().__init__()
        self.problem, self.weights = problem, weights

    def forward(self, _plan_blocks: Any, _rows: Any) -> Any:
        raise self.problem


def test_a_model_that_does_not_fit_is_refused_with_what_it_raised() -> None:
    block = dgl.to_block(dgl.graph(([0, 1], [0, 0])), [0])
    shape, weights = shape_of_kind("sage", 3, 4, 2, 1), nn.Parameter(torch.ones(1))
    for problem in (IndexError("list index"), dgl.DGLError("0-in-degree"), AttributeError("no h")):
        with pytest.raises(ConfigError, match=rf"{type(problem).__name__}: .* with 1 blocks"):
            time_batches(Fails(problem, weights), shape, [[block]])
    with pytest.raises(ConfigError, match="Fails has no parameters to train"):
        time_batches(Fails(ValueError(), torch.ones(1)), shape, [[block]])
    stuck = Fails(ValueError(), weights)
    stuck.made_of_weights = weights * 2
    with pytest.raises(ConfigError, match=r"could not be copied.*remove what"):
        time_batches(stuck, shape, [[block]])


PARTS = {
    # (inputs, outputs, summed, products of a source, products of a destination) of each of 3 layers
    "sage": [(100, 16, 16, 1600, 1600), (16, 16, 16, 0, 512), (16, 10, 10, 160, 160)],
    "gcn": [(100, 16, 16, 1600, 0), (16, 16, 16, 0, 256), (16, 10, 10, 160, 0)],
    "sgc": [(100, 10, 10, 1000, 0), (10, 10, 10, 0, 0), (10, 10, 10, 0, 0)],
    # Heads of width 4; attention adds 6 columns for each of the 4.
    "gat": [(100, 16, 40, 1600, 0), (16, 16, 40, 256, 0), (16, 40, 64, 640, 0)],
    "mlp": [(100, 16, 0, 0, 1600), (16, 16, 0, 0, 256), (16, 10, 0, 0, 160)],
    # The encoder stands before the first sum, the decoder behind the last one.
    "resgcn": [(16, 16, 16, 1600, 512), (16, 16, 16, 0, 512), (16, 16, 16, 0, 672)],
}


@pytest.mark.parametrize("kind", PARTS)
def test_layers_are_read_from_a_call_of_the_model(kind: str) -> None:
    found = shape_of_kind(kind, 100, 16, 10, 3)
    read = [(o.inputs, o.outputs, o.summed, o.per_source, o.per_target) for o in found.layers]
    assert read == PARTS[kind]
    assert found.first_learns == (kind == "resgcn")
    assert ("push_pull" in found.refused) == (kind in ("mlp", "resgcn"))


class One(nn.Module):
    """A convolution, called with ``given`` beside its block and rows."""

    def __init__(self, conv: nn.Module, **given: Any) -> None:
        super().__init__()
        self.conv, self._given = conv, given

    def forward(self, blocks: Any, x: torch.Tensor) -> Any:
        given = {name: value.expand(blocks[0].num_edges()) for name, value in self._given.items()}
        return self.conv(blocks[0], x, **given)


RELATION = torch.zeros(1, dtype=torch.int64)
MLP = nn.Sequential(nn.Linear(100, 256), nn.ReLU(), nn.Linear(256, 16))
RELATIONAL = dgl.nn.RelGraphConv(100, 16, 5, "basis", 4)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        # As PARTS. Pool: fc_pool is 100 x 100, for each source.
        (One(dgl.nn.SAGEConv(100, 16, "pool")), (100, 16, 100, 10000, 2 * 1600)),
        (One(dgl.nn.GINConv(MLP)), (100, 16, 100, 0, 100 * 256 + 256 * 16)),
        (One(RELATIONAL, etypes=RELATION), (100, 16, 16, 1600, 1600)),
    ],
)
def test_layers_with_more_than_one_product_are_counted_whole(model: One, expected: tuple[int, ...]) -> None:
    found = shape_of_module(model, 100, 16, 1)
    (layer,) = found.layers
    assert (layer.inputs, layer.outputs, layer.summed, layer.per_source, layer.per_target) == expected
    assert found.hidden == 16
    # The same where the model cannot be called.
    assert shape_of_module(Loops(model.conv), 100, 16, 1).layers == (layer,)


@pytest.mark.parametrize(
    ("conv", "width", "known"),
    [
        (dgl.nn.SAGEConv(8, 3, "mean"), 3, True),
        (dgl.nn.GINConv(nn.Linear(8, 3)), 3, True),
        (dgl.nn.GINConv(nn.Linear(8, 3), learn_eps=True), 6, True),
        (dgl.nn.RelGraphConv(8, 3, 5, "basis", 4), 3, False),
        (dgl.nn.RelGraphConv(8, 3, 5, layer_norm=True), 6, False),
        (dgl.nn.RelGraphConv(8, 3, 5, layer_norm=True, self_loop=False), 3, False),
    ],
)
def test_columns_that_push_pull_sums_are_those_of_a_call(conv: nn.Module, width: int, known: bool) -> None:
    block = random_block(4, 7, 20, torch.Generator().manual_seed(0))
    edges = {"etypes": RELATION.expand(block.num_edges())} if "Rel" in type(conv).__name__ else {}
    stages = stages_of(conv)
    sums = stages.sync(StageInput(block=block, x=torch.ones(7, 8), edges=edges))
    assert stages.sum_width == width == sum(one.shape[1] for one in sums)
    first = STRATEGIES.get("push_pull").inspect(Loops(conv), 8)
    assert (first.sum_width, first.known) == (width, known)


class Loops(nn.Module):
    """Takes what the planner does not give: its layers are those that it has registered."""

    def __init__(self, *convs: nn.Module) -> None:
        super().__init__()
        self.convs = nn.ModuleList(convs)

    def forward(self, _blocks: Any, _x: Any, _more: Any) -> None: ...


def test_layers_of_a_model_that_cannot_be_called_are_those_that_it_has() -> None:
    two = Loops(dgl.nn.GraphConv(100, 16), dgl.nn.SAGEConv(16, 10, "mean"))
    found = shape_of_module(two, 100, 10)
    assert [(one.inputs, one.outputs, one.per_source) for one in found.layers] == [
        (100, 16, 1600),
        (16, 10, 160),
    ]
    assert found.kind == "gcn"
    three = shape_of_module(two, 100, 10, 3, hidden=8)
    assert [(one.inputs, one.outputs) for one in three.layers] == [(100, 8), (8, 8), (8, 10)]


def test_work_is_counted_by_layer() -> None:
    """100 > 16: SAGE projects first, so edges carry 16 both ways; sources and targets are multiplied."""
    shape = shape_of_kind("sage", 100, 16, 10, 1)
    assert shape.work([30], [10], [200]) == (200 * 10 * 2, (30 + 10) * 100 * 10 * 2)
    wide = shape_of_kind("gcn", 8, 16, 16, 1)
    assert wide.work([30], [10], [200]) == (200 * 8, 10 * 8 * 16 * 2)


def test_a_module_tells_what_refuses_it() -> None:
    plain = shape_of_module(build_model("gcn", 100, 16, 10, 2, 0.5), 100, 10, 2)
    assert plain.refused == {}
    mixing = torch.nn.Sequential(torch.nn.BatchNorm1d(100), torch.nn.Linear(100, 10))
    found = shape_of_module(mixing, 100, 10, 1)
    assert found.refused["full_graph"] == "'0' is a BatchNorm1d"
    assert found.refused["lambda"].startswith("'0', BatchNorm1d, takes means over all nodes")
    assert "push_pull" in found.refused


def test_an_error_in_a_strategys_inspection_refuses_that_strategy_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(_model: nn.Module, _features: int) -> None:
        raise KeyError("no such layer")

    monkeypatch.setattr(STRATEGIES.get("lambda"), "inspect", fails)
    found = shape_of_module(build_model("gcn", 100, 16, 10, 2), 100, 10)
    assert found.refused == {"lambda": "its inspection of the model failed: KeyError: 'no such layer'"}
    assert "full_graph" in found.inspected
