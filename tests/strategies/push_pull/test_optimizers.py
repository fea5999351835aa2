"""Optimizers that may step columns of a parameter by themselves, and those that may not."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dglx_dist.errors import ConfigError
from dglx_dist.strategies.push_pull import pipeline
from dglx_dist.strategies.push_pull.pipeline import check_optimizer


def matrix() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(4, 6, dtype=torch.float64))]


@pytest.mark.parametrize("name", re.findall(r"\b[A-Z]\w+", pipeline._ELEMENTWISE))
def test_what_passes_steps_columns_as_it_steps_the_whole(name: str) -> None:
    """The claim of the message itself: two pieces, stepped apart, are the columns of the whole."""
    kind = getattr(torch.optim, name)
    (whole_matrix,) = matrix()
    pieces = [
        nn.Parameter(whole_matrix.detach()[:, :2].clone()),
        nn.Parameter(whole_matrix.detach()[:, 2:].clone()),
    ]
    optimizers = [kind([tensor], lr=0.1) for tensor in (whole_matrix, *pieces)]
    for optimizer in optimizers:
        check_optimizer(optimizer)
    sparse = kind is torch.optim.SparseAdam
    for step in range(3):
        gradient = torch.randn(4, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        for tensor, part in zip(
            (whole_matrix, *pieces), (gradient, gradient[:, :2], gradient[:, 2:]), strict=True
        ):
            tensor.grad = part.clone().to_sparse(1) if sparse else part.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert whole_matrix.abs().sum() > 0
    assert torch.equal(whole_matrix, torch.cat([piece.detach() for piece in pieces], dim=1))


class NeedsClosure(torch.optim.SGD):
    def step(self, closure: Callable[[], float]) -> Any:  # type: ignore[override]
        closure()


class MyAdafactor(torch.optim.Adafactor):
    pass


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: torch.optim.LBFGS(matrix()), "LBFGS uses uncut parameters"),
        (lambda: torch.optim.Adafactor(matrix()), "Adafactor uses uncut parameters"),
        (lambda: torch.optim.Muon(matrix()), "Muon uses uncut parameters"),
        (lambda: MyAdafactor(matrix()), "MyAdafactor uses uncut parameters"),
        (lambda: NeedsClosure(matrix(), lr=0.1), "needs a closure"),
    ],
)
def test_refuses_others_and_names_those_that_work(
    make: Callable[[], torch.optim.Optimizer], words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        check_optimizer(make())
    assert "Adagrad" in str(error.value)
    assert "data_parallel" in str(error.value)
