"""A checkpoint of a model that is cut over the ranks loads uncut, and the other way round, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dglx_dist.comm.session import Session, start_session
from dglx_dist.layers.base import cut_out
from dglx_dist.layers.dropout import deal_out_concatenated
from dglx_dist.strategies.base import Parts, WrappedModel
from dglx_dist.strategies.push_pull.options import make_group
from dglx_dist.strategies.push_pull.split_model import Cut, CutState
from dglx_dist.training import checkpoint
from tests.helpers.ranks import run_ranks

WIDTH, HIDDEN, STEPS, SAVE_AT = 3, 4, 5, 3
OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.01, amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.5),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
}


class Net(nn.Module):
    """As a user would have it; what goes first differs from the order in which parts list them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.bias = nn.Parameter(torch.randn(HIDDEN, dtype=torch.float64))
        self.weight = nn.Parameter(torch.randn(HIDDEN, WIDTH, dtype=torch.float64))


class Pieces(nn.Module):
    """One part of :class:`Net`, under its names."""

    def __init__(self, net: Net, piece: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(piece)
        self.bias = net.bias


class Cutting(WrappedModel):
    """A wrapped model whose weight is cut by columns; whoever trains it gives the gradients."""

    def __init__(self, net: Net, session: Session, size: int) -> None:
        super().__init__()
        group, runs = make_group(session, size), deal_out_concatenated([WIDTH], size)
        cut = Cut(shape=(HIDDEN, WIDTH), dimension=1, runs=runs)
        self._state = CutState(session, group, {"weight": cut}, {})
        self.module = Pieces(net, cut_out(net.weight.detach(), runs[group.part], 1))

    @property
    def parts(self) -> Parts:
        return Parts(replicated=("bias",), local=("weight",))

    def exchange_seconds(self, *, reset: bool = False) -> float:
        return 0.0

    def join_state(self, name: str, mine: Tensor) -> Tensor:
        return self._state.join(name, mine)

    def cut_state(self, name: str, uncut: Tensor) -> Tensor:
        return self._state.cut(name, uncut)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = self.module.state_dict(*args, **kwargs)
        self._state.join_all(state)
        return state

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        return self.module.load_state_dict(self._state.cut_all(state_dict), strict=strict)


def advance(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Gradients that depend on the step only; a piece of no columns gets none."""
    module = model.module if isinstance(model, WrappedModel) else model
    for step in steps:
        random = torch.Generator().manual_seed(step)
        for name, shape in (("weight", (HIDDEN, WIDTH)), ("bias", (HIDDEN,))):
            gradient = torch.randn(shape, generator=random, dtype=torch.float64)
            own = model.cut_state(name, gradient) if isinstance(model, WrappedModel) else gradient
            module.get_parameter(name).grad = own if own.numel() else None
        optimizer.step()


def on_rank(folder: str, size: int, resume: bool) -> dict[str, Any]:
    """Train, save on the way or go on from there; the final state by optimizer. ``size`` 0: uncut."""
    found = {}
    with start_session(timeout_s=30) as session:
        for name, make in OPTIMIZERS.items():
            model: nn.Module = Net() if size == 0 else Cutting(Net(), session, size)
            optimizer = make(model.parameters())
            place = f"{folder}/{name}"
            if resume:
                checkpoint.load(place, model=model, optimizer=optimizer, random_state=False)
            else:
                advance(model, optimizer, range(SAVE_AT))
                checkpoint.save(place, model=model, optimizer=optimizer)
            advance(model, optimizer, range(SAVE_AT, STEPS))
            found[name] = {key: value.tolist() for key, value in model.state_dict().items()}
    return found


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    """The final weights of a run of one process that saves nothing."""
    found = {}
    for name, make in OPTIMIZERS.items():
        net = Net()
        advance(net, make(net.parameters()), range(STEPS))
        found[name] = {key: value.tolist() for key, value in net.state_dict().items()}
    return found


def on_four(by_parts: str, uncut: str) -> list[dict[str, Any]]:
    """Save by four parts; load by two parts, each of which has two replicas."""
    return [on_rank(by_parts, 4, False), on_rank(uncut, 2, True)]


def test_what_is_saved_by_parts_or_uncut_is_loaded_uncut_or_by_parts(tmp_path: Any, plain: Any) -> None:
    by_parts, uncut = str(tmp_path / "parts"), str(tmp_path / "uncut")
    assert on_rank(uncut, 0, False) == plain
    # The fourth part has no columns, hence no gradient and no optimizer state of its own.
    assert run_ranks(on_four, 4, args=(by_parts, uncut)) == [[plain] * 2] * 4
    assert on_rank(by_parts, 0, True) == plain
    assert run_ranks(on_rank, 2, args=(by_parts, 2, True)) == [plain] * 2
