"""Optimizers that step each element by itself pass, the others are refused with a remedy."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dglx_dist.errors import ConfigError
from dglx_dist.strategies.push_pull.weight_versions import check_optimizer

ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
    torch.optim.SparseAdam,
)


def matrix() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(4, 6, dtype=torch.float64))]


@pytest.mark.parametrize("kind", ELEMENTWISE)
def test_what_passes_steps_columns_as_it_steps_the_whole(kind: Any) -> None:
    """The claim itself: two pieces, stepped apart, are the columns of the whole."""
    (whole,) = matrix()
    pieces = [nn.Parameter(whole.detach()[:, :2].clone()), nn.Parameter(whole.detach()[:, 2:].clone())]
    optimizers = [kind([one], lr=0.1) for one in (whole, *pieces)]
    for optimizer in optimizers:
        check_optimizer(optimizer)
    sparse = kind is torch.optim.SparseAdam
    for step in range(3):
        gradient = torch.randn(4, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        for one, part in zip((whole, *pieces), (gradient, gradient[:, :2], gradient[:, 2:]), strict=True):
            one.grad = part.clone().to_sparse(1) if sparse else part.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert whole.abs().sum() > 0
    assert torch.equal(whole, torch.cat([piece.detach() for piece in pieces], dim=1))


class NeedsClosure(torch.optim.SGD):
    def step(self, closure: Callable[[], float]) -> Any:  # type: ignore[override]
        closure()


class MyAdafactor(torch.optim.Adafactor):
    pass


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: torch.optim.LBFGS(matrix()), "LBFGS looks at whole parameters"),
        (lambda: torch.optim.Adafactor(matrix()), "Adafactor looks at whole parameters"),
        (lambda: torch.optim.Muon(matrix()), "Muon looks at whole parameters"),
        (lambda: MyAdafactor(matrix()), "MyAdafactor looks at whole parameters"),
        (lambda: NeedsClosure(matrix(), lr=0.1), "needs a closure"),
    ],
)
def test_what_does_not_is_refused_and_told_what_works(
    make: Callable[[], torch.optim.Optimizer], words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        check_optimizer(make())
    assert "Adagrad" in str(error.value)
    assert "data_parallel" in str(error.value)


def test_a_scheduler_changes_nothing() -> None:
    optimizer = torch.optim.SGD(matrix(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    check_optimizer(optimizer)
