"""The gradient rule on plain tensors: a small network over 6 rows, cut unevenly over the ranks.

Every case runs in each rank and returns its gradients; the answer is one process over all rows.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dglx_dist.comm.session import Session, start_session
from dglx_dist.errors import ConfigError
from dglx_dist.records import StepShare
from dglx_dist.strategies.base import STRATEGIES
from dglx_dist.strategies.gradient_sync import make_buckets
from tests.helpers import wide
from tests.helpers.ranks import run_ranks

CUTS = {1: (0, 6), 2: (0, 4, 6), 3: (0, 4, 6, 6)}
"""Rows of each rank; the third rank has none."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.second = nn.Linear(5, 2)
        self.side = nn.Linear(3, 2)
        self.never = nn.Linear(2, 2)
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, x: Tensor, use_side: bool = False) -> Tensor:
        scores = self.second(torch.tanh(self.first(x))) * self.frozen
        return scores + self.side(x) if use_side else scores


def net() -> Net:
    torch.manual_seed(5)
    return Net().double()


def rows(step: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(6, 3, generator=generator, dtype=torch.float64)
    return x, torch.randint(2, (6,), generator=generator)


def gradients(model: nn.Module) -> dict[str, Any]:
    return {
        name: None if p.grad is None else p.grad.numpy().copy()
        for name, p in model.named_parameters()
        if p.requires_grad
    }


# Each case: (model, x, y, scale): runs backward once or more. Alone it gets all rows.
def mean(model: nn.Module, x: Tensor, y: Tensor) -> None:
    F.cross_entropy(model(x), y).backward()


def with_penalty(model: nn.Module, x: Tensor, y: Tensor) -> None:
    penalty = sum(p.pow(2).sum() for name, p in model.named_parameters() if "never" not in name)
    (F.cross_entropy(model(x), y) + 0.1 * penalty).backward()


def accumulated(model: nn.Module, x: Tensor, y: Tensor) -> None:
    for factor in (1.0, 2.0, 3.0):
        F.cross_entropy(model(factor * x), y).backward()


def two_forwards(model: nn.Module, x: Tensor, y: Tensor) -> None:
    (F.cross_entropy(model(x), y) + F.cross_entropy(model(2 * x), y)).backward()


def side_on_some(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Only rows 0 to 3, which are rank 0's, go through ``side``: other ranks do not use it."""
    loss = x.new_zeros(())
    first_four = len(x) >= 4
    scores = model(x, use_side=first_four)
    if len(x) == 6:
        plain = model(x[4:])
        scores = torch.cat([scores[:4], plain])
    loss = F.cross_entropy(scores, y)
    loss.backward()


def penalty_where_only_some_rows_go(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """On the ranks whose rows do not go through ``side``, its gradient comes from the penalty alone."""
    scores = model(x, use_side=len(x) >= 4)
    if len(x) == 6:
        scores = torch.cat([scores[:4], model(x[4:])])
    # Made after the forward call, so backward reaches it before the model.
    penalty = sum(p.pow(2).sum() for name, p in model.named_parameters() if "never" not in name)
    (F.cross_entropy(scores, y) + 0.1 * penalty).backward()


def hooked_and_unused(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """A user's hook on a parameter that nobody uses is not called."""
    handles = [p.register_hook(lambda g: 2 * g) for n, p in model.named_parameters() if "never" in n]
    mean(model, x, y)
    for handle in handles:
        handle.remove()


def summed(model: nn.Module, x: Tensor, y: Tensor) -> None:
    for factor in (1.0, 2.0):
        F.cross_entropy(model(factor * x), y, reduction="sum").backward()


def evaluated_between(model: nn.Module, x: Tensor, y: Tensor) -> None:
    model.eval()
    if len(x) == 4:  # rank 0 alone, and with autograd on
        model(x)
        with torch.no_grad():
            model(x)
    model.train()
    F.cross_entropy(model(x), y).backward()
    before = gradients(model)
    torch.autograd.grad(model(x).sum(), next(p for p in model.parameters() if p.requires_grad))
    for name, value in gradients(model).items():
        assert (value is None) == (before[name] is None)
        assert value is None or np.array_equal(value, before[name])


MEAN_CASES: dict[str, Callable[..., None]] = {
    case.__name__: case
    for case in (
        mean,
        with_penalty,
        penalty_where_only_some_rows_go,
        hooked_and_unused,
        accumulated,
        two_forwards,
        side_on_some,
        evaluated_between,
    )
}


def wrap(session: Session, model: nn.Module, **options: Any) -> nn.Module:
    reduction = options.pop("reduction", "mean")
    return STRATEGIES.get("data_parallel")(session, options).wrap(model, None, reduction)  # type: ignore[arg-type]


def _all_cases(cut: tuple[int, ...]) -> dict[str, Any]:
    session = start_session()
    rank = session.topology.rank
    x, y = rows()
    mine = slice(cut[rank], cut[rank + 1])
    session.step_share = StepShare(num_local=cut[rank + 1] - cut[rank], num_global=6)
    results: dict[str, Any] = {}
    for name, case in MEAN_CASES.items():
        # A bucket of one byte sends every parameter apart, in the order of arrival.
        for bucket_bytes in (1, 1 << 20):
            torch.manual_seed(rank)  # rank 0's weights must win
            model = net() if rank == 0 else Net().double()
            wrapped = wrap(session, model, bucket_bytes=bucket_bytes)
            case(wrapped, x[mine], y[mine])
            results[f"{name}-{bucket_bytes}"] = gradients(model)
    model = net()
    summed(wrap(session, model, reduction="sum"), x[mine], y[mine])
    results["summed"] = gradients(model)
    before = session.ledger.snapshot()
    mean(wrap(session, model), x[mine], y[mine])
    results["bytes"] = sum(row.num_bytes for row in session.ledger.since(before) if row.phase == "gradients")
    return results


@functools.lru_cache(maxsize=1)
def one_process() -> dict[str, dict[str, Any]]:
    answers = {}
    for name, case in [*MEAN_CASES.items(), ("summed", summed)]:
        model = net()
        case(model, *rows())
        answers[name] = gradients(model)
    return answers


@pytest.fixture(scope="module", params=[1, 3, *wide(2)])
def on_ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_ranks(_all_cases, request.param, args=(CUTS[request.param],))


@pytest.mark.parametrize("name", [*(f"{n}-{b}" for n in MEAN_CASES for b in (1, 1 << 20)), "summed"])
def test_gradients_are_those_of_one_process(on_ranks: list[dict[str, Any]], name: str) -> None:
    expected = one_process()[name.split("-")[0]]
    for result in on_ranks:
        assert result[name].keys() == expected.keys()
        for parameter, value in expected.items():
            if value is None:
                # Nobody used it: an optimizer with weight decay must leave it alone, as in one process.
                assert result[name][parameter] is None
            else:
                np.testing.assert_allclose(result[name][parameter], value, rtol=0, atol=1e-12)


def test_bytes_are_those_of_a_ring(on_ranks: list[dict[str, Any]]) -> None:
    # 3*5+5 + 5*2+2 + 3*2+2 + 2*2+2 = 46 numbers in 8 parameters, each with one flag, of 8 bytes.
    world_size = len(on_ranks)
    assert sum(result["bytes"] for result in on_ranks) == 2 * (world_size - 1) * (46 + 8) * 8


def test_buckets_hold_the_last_parameters_first_and_one_dtype() -> None:
    sizes = [nn.Parameter(torch.zeros(size, dtype=torch.float64)) for size in (3, 2, 4, 1)]
    assert [bucket.indices for bucket in make_buckets(sizes, 5 * 8)] == [(3, 2), (1, 0)]
    mixed = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, dtype=torch.float64))]
    assert [bucket.indices for bucket in make_buckets(mixed, 1 << 20)] == [(1,), (0,)]
    assert make_buckets([], 1) == []


def test_uneven_shards_tell_the_rule_from_its_mistakes() -> None:
    """The mean of two ranks' means, and their unweighted sum, are not the gradient of one process."""
    x, y = rows()
    parts = []
    for mine in (slice(4), slice(4, 6)):
        model = net()
        mean(model, x[mine], y[mine])
        parts.append(gradients(model)["first.weight"])
    first, second = parts
    exact = one_process()["mean"]["first.weight"]
    for wrong in ((first + second) / 2, first + second):
        assert np.abs(wrong - exact).max() > 1e-3
    np.testing.assert_allclose((4 * first + 2 * second) / 6, exact, atol=1e-12)


def _refusals() -> list[str]:
    session = start_session()
    x, y = rows()
    model = net()
    wrapped = wrap(session, model)
    said = []

    def expect(action: Callable[[], object]) -> None:
        try:
            action()
        except ConfigError as error:
            said.append(str(error))

    expect(lambda: wrapped(x))
    session.step_share = StepShare(num_local=1, num_global=2)
    first = wrapped(x)
    session.step_share = StepShare(num_local=1, num_global=4)
    expect(lambda: (first.sum() + wrapped(x).sum()).backward())
    mean(wrapped, x, y)  # the failed backward must not spoil the next one
    said.append(json.dumps(gradients(model)["first.weight"].tolist()))
    model.frozen.requires_grad_(True)
    expect(lambda: wrapped(x))
    embedding = nn.Embedding(4, 2, sparse=True).double()
    table = wrap(session, embedding)
    expect(lambda: table(torch.tensor([1, 1])).sum().backward())
    expect(lambda: wrap(session, net(), reduction="max"))
    return said


def test_refusals_name_the_remedy() -> None:
    no_share, mixed, after, unfrozen, sparse, reduction = run_ranks(_refusals, 1)[0]
    assert "count_targets" in no_share
    assert "call backward() once after each forward call" in mixed
    np.testing.assert_allclose(json.loads(after), one_process()["mean"]["first.weight"] / 4, atol=1e-12)
    assert "'frozen' was added or unfrozen after wrapping" in unfrozen
    assert "DistEmbedding" in sparse
    assert "'max'" in reduction


def _different_models() -> list[str]:
    session = start_session()
    odd = session.topology.rank == 1
    partly_frozen = nn.Linear(3, 2)
    partly_frozen.bias.requires_grad_(not odd)
    said = []
    for model, options in (
        (nn.Linear(3 if odd else 4, 2), {}),
        (partly_frozen, {}),
        (nn.Linear(3, 2), {"reduction": "sum" if odd else "mean"}),
        (nn.Linear(3, 2), {"bucket_bytes": 9 if odd else 8}),
    ):
        try:
            wrap(session, model, **options)
        except ConfigError as error:
            said.append(str(error))
    return said


def test_different_models_are_refused_on_every_rank() -> None:
    for width, frozen, reduction, bucket in run_ranks(_different_models, 2):
        assert "disagree on the wrapped model" in width
        assert "weight (2, 3)" in width
        assert "weight (2, 4)" in width
        assert "bias (2,) float32 frozen" in frozen
        assert "reduction=sum" in reduction
        assert "bucket_bytes=9" in bucket


def _transposed() -> tuple[list[Any], int]:
    session = start_session()
    layer = nn.Linear(2, 3).double()
    rank = session.topology.rank
    layer.weight = nn.Parameter(torch.full((2, 3), float(rank), dtype=torch.float64).t())
    with torch.no_grad():
        layer.bias.fill_(rank)
    wrap(session, layer)
    sums = [float(p.detach().sum()) for p in layer.parameters()]
    return sums, session.ledger.total(phase="weights")


def test_first_weights_of_rank_0_win_in_any_layout_and_are_counted() -> None:
    # 2 * 3 + 3 numbers of 8 bytes to each of two ranks.
    assert run_ranks(_transposed, 3) == [([0, 0], 2 * 9 * 8), ([0, 0], 0), ([0, 0], 0)]


class Reentrant(nn.Module):
    """The first layer is computed again in a backward call inside the backward call."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor) -> Tensor:
        h = torch.utils.checkpoint.checkpoint(self.net.first, x, use_reentrant=True)
        return self.net.second(torch.tanh(h))


def test_reentrant_checkpointing_is_refused() -> None:
    with start_session() as session:
        session.step_share = StepShare(num_local=6, num_global=6)
        x, y = rows()
        model: Any = wrap(session, Reentrant())
        with pytest.raises(ConfigError, match=r"'net\.first\..*use_reentrant=False"):
            mean(model, x.requires_grad_(True), y)
        # What failed is over: a backward of one's own, past the wrapper, is nobody's business.
        model.module.net.side(x).sum().backward()


def _running_statistics() -> dict[str, Any]:
    session = start_session()
    rank = session.topology.rank
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2)).double()
    model.register_buffer("constant", torch.tensor([1 / 3, 0.1], dtype=torch.float64))
    wrapped = wrap(session, model)
    count = (3, 1, 0)[rank]
    session.step_share = StepShare(num_local=count, num_global=4)
    batch = torch.full((4, 2), float(rank + 1), dtype=torch.float64)
    wrapped(batch).sum().backward()
    return {name: value.numpy() for name, value in wrapped.state_dict().items()}


def _buffers_after_loading() -> list[Any]:
    """What a run has after loading its own state is what it has without."""
    session = start_session()
    rank, results = session.topology.rank, []
    saved: dict[str, Tensor] = {}
    for load in (False, True):
        model = nn.BatchNorm1d(5).double()
        model.register_buffer("constant", torch.full((5,), 0.1 + load, dtype=torch.float64))
        wrapped = wrap(session, model)
        session.step_share = StepShare(num_local=(2, 1)[rank], num_global=3)
        for step in range(9):
            if load and step == 4:
                wrapped.load_state_dict(saved)
            if not load and step == 4:
                saved = {name: value.clone() for name, value in wrapped.state_dict().items()}
            batch = torch.randn(4, 5, generator=torch.Generator().manual_seed(9 * step + rank))
            wrapped(batch.double()).sum().backward()
        results.append([value.tolist() for value in wrapped.state_dict().values()])
    return results


def test_loaded_buffers_go_on_to_the_last_bit() -> None:
    for without, loaded in run_ranks(_buffers_after_loading, 2):
        assert loaded == without


def test_buffers_become_the_weighted_mean_on_all_ranks() -> None:
    results = run_ranks(_running_statistics, 3)
    for result in results:
        # Momentum 0.1 of the batch means 1 and 2, weighed 3 to 1; rank 2 has no targets.
        np.testing.assert_allclose(result["0.running_mean"], 0.1 * (3 * 1 + 1 * 2) / 4, atol=1e-12)
        assert result["constant"].tolist() == [1 / 3, 0.1]
        assert result.keys() == results[0].keys() >= {"0.weight", "1.bias", "0.running_var"}
