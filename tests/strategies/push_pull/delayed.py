"""SGD whose gradients come late, in one process: what a pipeline must leave, given the versions it logged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from dglx_dist.strategies.push_pull.pipeline import Side, Version

LossOf = Callable[[nn.Module, int], Tensor]
"""A model and the number of a batch to the mean loss over all targets of all ranks."""

MakeOptimizer = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]
SIDES: tuple[Side, Side] = ("M", "D")


def delayed_sgd(
    model: nn.Module, part_names: Sequence[str], log: Sequence[Version], loss_of: LossOf, make: MakeOptimizer
) -> dict[str, Tensor]:
    """Train ``model`` as ``log`` tells and return its weights.

    The weights of a side after n of its steps are its version n. The gradient of a batch is taken where M has
    the version that M read and D the one that D read; it is applied to make version ``written`` + 1.

    Args:
        model: With the first weights; both sides' gradients come from one backward through it.
        part_names: Parameters of the side M; all others are D's.
        log: Every batch once on each side.
        loss_of: The loss.
        make: Each side gets an optimizer of its own.
    """
    named = dict(model.named_parameters())
    names = {"M": [n for n in named if n in part_names], "D": [n for n in named if n not in part_names]}
    history: dict[str, list[dict[str, Tensor]]] = {
        side: [{n: named[n].detach().clone() for n in names[side]}] for side in SIDES
    }
    live = {side: {n: nn.Parameter(named[n].detach().clone()) for n in names[side]} for side in SIDES}
    optimizers = {side: make(list(live[side].values())) for side in SIDES}
    reads = {side: {one.batch: one.read for one in log if one.side == side} for side in SIDES}
    gradients: dict[int, dict[str, Tensor | None]] = {}

    def gradients_of(batch: int) -> Mapping[str, Tensor | None]:
        if batch not in gradients:
            for side in SIDES:
                for name, value in history[side][reads[side][batch]].items():
                    named[name].data = value.clone()
            model.zero_grad()
            loss_of(model, batch).backward()  # type: ignore[no-untyped-call]  # torch leaves it bare
            gradients[batch] = {n: None if p.grad is None else p.grad.clone() for n, p in named.items()}
        return gradients[batch]

    due = {side: _by_written(log, side) for side in SIDES}
    while any(due.values()):
        # The side whose next step needs only versions that are there.
        side = next(
            s for s in SIDES
            if due[s] and all(reads[o][b] < len(history[o]) for b in due[s][0] for o in SIDES)
        )  # fmt: skip
        for name, parameter in live[side].items():
            parameter.grad = None
            for batch in due[side][0]:
                found = gradients_of(batch)[name]
                if found is not None:
                    parameter.grad = found.clone() if parameter.grad is None else parameter.grad + found
        due[side].pop(0)
        optimizers[side].step()
        history[side].append({n: p.detach().clone() for n, p in live[side].items()})
    return {n: value for side in SIDES for n, value in history[side][-1].items()}


def _by_written(log: Sequence[Version], side: Side) -> list[list[int]]:
    """Return the batches of each step of a side; the log must leave out no step and no batch."""
    mine = [one for one in log if one.side == side]
    assert sorted(one.batch for one in mine) == list(range(len(mine)))
    steps = [[one.batch for one in mine if one.written == step] for step in range(len(mine))]
    while steps and not steps[-1]:
        steps.pop()
    assert all(steps)
    return steps
