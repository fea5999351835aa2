"""Private parts of PyTorch, where a version may change them."""

from __future__ import annotations

import torch

from dglx_dist.internals.pytorch import watch_steps


class Owner:
    """Notes the steps of optimizers, and frees another owner in the first one."""

    def __init__(self, *others: Owner) -> None:
        self.others, self.steps = [*others], 0

    def note(self, _: torch.optim.Optimizer) -> None:
        self.steps += 1
        self.others.clear()


def test_an_owner_may_be_freed_while_torch_goes_over_the_hooks_of_a_step() -> None:
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    parameter.grad = torch.ones(1)
    first = Owner()
    end = watch_steps(Owner.note, first)
    first.others.append(Owner())
    watch_steps(Owner.note, first.others[0], after=Owner.note)
    optimizer.step()
    optimizer.step()
    assert first.steps == 2
    end()
    optimizer.step()
    assert first.steps == 2
