"""The gradient rule on plain tensors: a small network over 6 rows, cut unevenly over the ranks.

Every case runs in each rank and returns its gradients; the answer is one process over all rows.
"""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dglx_dist.comm.session import Session, start_session
from dglx_dist.errors import ConfigError
from dglx_dist.records import StepShare
from dglx_dist.strategies.base import STRATEGIES, count_targets, find_share, gradient_weight
from dglx_dist.strategies.gradient_sync import make_buckets
from tests.helpers import wide
from tests.helpers.ranks import run_ranks
from tests.strategies.equality import moved_since

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
        # A buffer of the first call is no running average of the ranks.
        self.register_buffer("called", torch.ones(1))
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


# Each case: (model, x, y): runs backward once or more. Alone it gets all rows.
def mean(model: nn.Module, x: Tensor, y: Tensor) -> None:
    F.cross_entropy(model(x), y).backward()


def penalty_of(model: nn.Module) -> Any:
    return 0.1 * sum(p.pow(2).sum() for name, p in model.named_parameters() if "never" not in name)


def with_penalty(model: nn.Module, x: Tensor, y: Tensor) -> None:
    (F.cross_entropy(model(x), y) + penalty_of(model)).backward()


def accumulate(model: nn.Module, x: Tensor, y: Tensor) -> None:
    for factor in (1.0, 2.0, 3.0):
        F.cross_entropy(model(factor * x), y).backward()


def two_forwards(model: nn.Module, x: Tensor, y: Tensor) -> None:
    (F.cross_entropy(model(x), y) + F.cross_entropy(model(2 * x), y)).backward()


def of_some(model: nn.Module, x: Tensor) -> Tensor:
    """Scores; only rows 0 to 3, which are rank 0's, go through ``side``: other ranks do not use it."""
    scores: Tensor = model(x, use_side=len(x) >= 4)
    return torch.cat([scores[:4], model(x[4:])]) if len(x) == 6 else scores


def side_on_some(model: nn.Module, x: Tensor, y: Tensor) -> None:
    F.cross_entropy(of_some(model, x), y).backward()


def penalty_where_only_some_rows_go(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """On the ranks whose rows do not go through ``side``, its gradient comes from the penalty alone."""
    scores = of_some(model, x)
    # Made after the forward call, so backward reaches it before the model.
    (F.cross_entropy(scores, y) + penalty_of(model)).backward()


def hooked_and_unused(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """A user's hook on a parameter that nobody uses is not called."""
    handles = [p.register_hook(lambda g: 2 * g) for n, p in model.named_parameters() if "never" in n]
    mean(model, x, y)
    for handle in handles:
        handle.remove()


def sum_loss(model: nn.Module, x: Tensor, y: Tensor) -> None:
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
        accumulate,
        two_forwards,
        side_on_some,
        evaluated_between,
    )
}


def wrap(session: Session, model: nn.Module, **options: Any) -> nn.Module:
    reduction = options.pop("reduction", "mean")
    g: Any = SimpleNamespace(session=session, on_close=[])
    return STRATEGIES.get("data_parallel")(session, options).open(g).wrap(model, reduction)


def _all_cases(cut: tuple[int, ...]) -> dict[str, Any]:
    session = start_session()
    rank = session.topology.rank
    x, y = rows()
    own_rows = slice(cut[rank], cut[rank + 1])
    session.step_share = StepShare(num_local=cut[rank + 1] - cut[rank], num_global=6)
    results: dict[str, Any] = {}
    for name, case in MEAN_CASES.items():
        # A bucket of one byte sends every parameter apart, in the order of arrival.
        for bucket_bytes in (1, 1 << 20):
            torch.manual_seed(rank)  # rank 0's weights must win
            model = net() if rank == 0 else Net().double()
            wrapped = wrap(session, model, bucket_bytes=bucket_bytes)
            case(wrapped, x[own_rows], y[own_rows])
            results[f"{name}-{bucket_bytes}"] = gradients(model)
    model = net()
    sum_loss(wrap(session, model, reduction="sum"), x[own_rows], y[own_rows])
    results["sum_loss"] = gradients(model)
    before = session.ledger.snapshot()
    mean(wrap(session, model), x[own_rows], y[own_rows])
    results["bytes"] = moved_since(session, before)["gradients"]
    return results


@functools.lru_cache(maxsize=1)
def one_process() -> dict[str, dict[str, Any]]:
    answers = {}
    for name, case in [*MEAN_CASES.items(), ("sum_loss", sum_loss)]:
        model = net()
        case(model, *rows())
        answers[name] = gradients(model)
    return answers


@pytest.fixture(scope="module", params=[1, 3, *wide(2)])
def on_ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_ranks(_all_cases, request.param, args=(CUTS[request.param],))


@pytest.mark.parametrize("name", [*(f"{n}-{b}" for n in MEAN_CASES for b in (1, 1 << 20)), "sum_loss"])
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


def test_stamp_on_the_last_block_wins_over_the_session() -> None:
    ours, stale = StepShare(num_local=1, num_global=4), StepShare(num_local=9, num_global=9)
    session: Any = SimpleNamespace(step_share=stale)
    blocks = [SimpleNamespace(), SimpleNamespace(step_share=ours)]
    assert find_share((blocks, "x"), session) == ours
    assert find_share((blocks[1], "x"), session) == ours
    assert find_share((blocks[:1], [], 3.0), session) == stale
    # Without targets a loss weighs nothing, whatever it is, also where nobody has any.
    nobody = StepShare(num_local=0, num_global=0)
    assert gradient_weight(nobody, "sum") == gradient_weight(nobody, "mean") == 0.0


def test_refusals_name_the_remedy() -> None:
    x, y = rows()
    model = net()
    with start_session() as session:
        wrapped = wrap(session, model)
        with pytest.raises(ConfigError, match="count_targets"):
            wrapped(x)
        sum_loss(wrap(session, net(), reduction="sum"), x, y)
        session.step_share = StepShare(num_local=1, num_global=2)
        first = wrapped(x)
        session.step_share = StepShare(num_local=1, num_global=4)
        with pytest.raises(ConfigError, match=r"call backward\(\) once after each forward call"):
            (first.sum() + wrapped(x).sum()).backward()
        mean(wrapped, x, y)  # the failed backward must not spoil the next one
        expected = one_process()["mean"]["first.weight"] / 4
        np.testing.assert_allclose(gradients(model)["first.weight"], expected, atol=1e-12)
        model.frozen.requires_grad_(True)
        with pytest.raises(ConfigError, match="'frozen' was added or unfrozen after wrapping"):
            wrapped(x)
        table = wrap(session, nn.Embedding(4, 2, sparse=True).double())
        with pytest.raises(ConfigError, match="DistEmbedding"):
            table(torch.tensor([1, 1])).sum().backward()
        with pytest.raises(ConfigError, match="'max'"):
            wrap(session, net(), reduction="max")
        with pytest.raises(ConfigError, match="bucket_bytes=0"):
            wrap(session, net(), bucket_bytes=0)


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


def _different_models(session: Session) -> None:
    odd = session.topology.rank == 1
    partly_frozen = nn.Linear(3, 2)
    partly_frozen.bias.requires_grad_(not odd)
    for model, options, words in (
        (nn.Linear(3 if odd else 4, 2), {}, ("the wrapped model", "weight (2, 3)", "weight (2, 4)")),
        (partly_frozen, {}, ("bias (2,) float32 frozen",)),
        (nn.Linear(3, 2), {"reduction": "sum" if odd else "mean"}, ("reduction=sum",)),
        (nn.Linear(3, 2), {"bucket_bytes": 9 if odd else 8}, ("bucket_bytes=9",)),
    ):
        with pytest.raises(ConfigError, match="disagree on") as refused:
            wrap(session, model, **options)
        assert all(word in str(refused.value) for word in words), (words, str(refused.value))


def _first_weights(session: Session) -> None:
    layer, rank = nn.Linear(2, 3).double(), session.topology.rank
    layer.weight = nn.Parameter(torch.full((2, 3), float(rank), dtype=torch.float64).t())
    with torch.no_grad():
        layer.bias.fill_(rank)
    before = session.ledger.snapshot()
    wrap(session, layer)
    assert not any(p.any() for p in layer.parameters())
    # 2 * 3 + 3 numbers of 8 bytes to each of two ranks.
    assert moved_since(session, before)["weights"] == (2 * 9 * 8 if rank == 0 else 0)


def _running_statistics(session: Session) -> None:
    rank = session.topology.rank
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2)).double()
    model.register_buffer("constant", torch.tensor([1 / 3, 0.1], dtype=torch.float64))
    wrapped = wrap(session, model)
    session.step_share = StepShare(num_local=(3, 1, 0)[rank], num_global=4)
    wrapped(torch.full((4, 2), float(rank + 1), dtype=torch.float64)).sum().backward()
    state = wrapped.state_dict()
    # Momentum 0.1 of the batch means 1 and 2, weighed 3 to 1; rank 2 has no targets.
    np.testing.assert_allclose(state["0.running_mean"], 0.1 * (3 * 1 + 1 * 2) / 4, atol=1e-12)
    assert state["constant"].tolist() == [1 / 3, 0.1]
    assert state.keys() == model.state_dict().keys()


def _loaded_buffers(session: Session) -> None:
    """A run goes on after loading its own state as without, to the last bit."""
    rank, results = session.topology.rank, []
    saved: dict[str, Tensor] = {}
    for load in (False, True):
        model = nn.BatchNorm1d(5).double()
        model.register_buffer("constant", torch.full((5,), 0.1 + load, dtype=torch.float64))
        wrapped = wrap(session, model)
        session.step_share = StepShare(num_local=(2, 1, 4)[rank], num_global=7)
        for step in range(9):
            if load and step == 4:
                wrapped.load_state_dict(saved)
            if not load and step == 4:
                saved = {name: value.clone() for name, value in wrapped.state_dict().items()}
            batch = torch.randn(4, 5, generator=torch.Generator().manual_seed(9 * step + rank))
            wrapped(batch.double()).sum().backward()
        results.append([value.tolist() for value in wrapped.state_dict().values()])
    assert results[0] == results[1]


def _counted_targets(session: Session) -> None:
    rank = session.topology.rank
    assert count_targets(3 * rank, session) == StepShare(num_local=3 * rank, num_global=9)


def _on_three() -> None:
    with start_session(timeout_s=60) as session:
        for check in CHECKS:
            check(session)


CHECKS = (_different_models, _first_weights, _running_statistics, _loaded_buffers, _counted_targets)


def test_models_are_the_same_everywhere_or_refused_and_so_are_buffers() -> None:
    run_ranks(_on_three, 3)
