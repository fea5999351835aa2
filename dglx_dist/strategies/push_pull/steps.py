"""Who steps a pipeline's parameters: the user's optimizers, watched, and stepped once more to drain."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, final

from torch import Tensor, nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from dglx_dist.strategies.push_pull.optimizers import check_optimizer
from dglx_dist.strategies.push_pull.options import Side
from dglx_dist.strategies.push_pull.versions import VersionLog

log = logging.getLogger(__name__)


@final
class StepWatch:
    """Notes every step of an optimizer that has parameters of the pipeline.

    torch tells of every optimizer's steps, so the user's loop need not name its own.

    Args:
        part: Parameters before the sum.
        owner: The others that are trained.
        log: Where steps are counted.
    """

    def __init__(self, part: Iterable[nn.Parameter], owner: Iterable[nn.Parameter], log: VersionLog) -> None:
        self._side: dict[int, Side] = {id(parameter): "M" for parameter in part}
        self._side |= {id(parameter): "D" for parameter in owner}
        self._log = log
        self._known: list[weakref.ref[Optimizer]] = []
        self._held_back: tuple[Side, ...] = ()
        self._meanwhile: set[int] = set()
        """Optimizers that have stepped since the part side's gradients wait."""
        self._told = False
        handles = [
            register_optimizer_step_pre_hook(_forwarded(weakref.WeakMethod(self._before))),
            register_optimizer_step_post_hook(_forwarded(weakref.WeakMethod(self._after))),
        ]
        for handle in handles:
            weakref.finalize(self, handle.remove)

    def hold_back(self, sides: tuple[Side, ...]) -> None:
        """Say for which sides no gradient is due in the coming step, as all of them wait.

        Zeros that the user's ``zero_grad(set_to_none=False)`` left would be one: to Adam, momentum and weight
        decay a step without a batch. So they are taken away, and nothing but zeros.
        """
        self._held_back = sides

    @contextmanager
    def own_step(self) -> Iterator[None]:
        """Step the known optimizers with the gradients that the block leaves, and no others.

        Gradients that were there before are there again afterwards.
        """
        optimizers = [found for ref in self._known if (found := ref()) is not None]
        parameters = [parameter for one in optimizers for parameter in _parameters(one)]
        before = [parameter.grad for parameter in parameters]
        pending, held_back = self._log.put_aside(), self._held_back
        self._held_back = ()
        for parameter in parameters:
            parameter.grad = None
        yield
        for one in optimizers:
            one.step()
        self._log.put_back(pending)
        self._held_back = held_back
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient

    def _before(self, optimizer: Optimizer) -> None:
        for parameter in _parameters(optimizer) if self._held_back else ():
            if self._side.get(id(parameter)) in self._held_back and _is_zero(parameter.grad):
                parameter.grad = None
        mine = self._stepped_by(optimizer)
        if not mine:
            return
        if not any(ref() is optimizer for ref in self._known):
            check_optimizer(optimizer)
            self._known.append(weakref.ref(optimizer))
        # A parameter's optimizer is the last one that stepped it: one that was replaced may live on.
        self._known = [
            ref
            for ref in self._known
            if (other := ref()) is optimizer or (other is not None and not mine & self._stepped_by(other))
        ]

    def _after(self, optimizer: Optimizer) -> None:
        sides = self._sides(optimizer)
        if sides:
            self._log.stepped(sides)
            self._notice_left_out(optimizer)

    def _notice_left_out(self, optimizer: Optimizer) -> None:
        """Say so if the part side's gradients wait while another optimizer steps for the second time."""
        if not self._log.waits("M"):
            self._meanwhile = set()
        elif id(optimizer) not in self._meanwhile:
            self._meanwhile.add(id(optimizer))
        elif not self._told:
            self._told = True
            log.warning(
                "no optimizer steps the first layer's weights, which push_pull cut by columns: was the "
                "optimizer built before wrap()? Build it from the parameters of what wrap() returned"
            )

    def _sides(self, optimizer: Optimizer) -> tuple[Side, ...]:
        return tuple(sorted({self._side[one] for one in self._stepped_by(optimizer)}))

    def _stepped_by(self, optimizer: Optimizer) -> set[int]:
        return {id(parameter) for parameter in _parameters(optimizer)} & self._side.keys()


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _is_zero(gradient: Tensor | None) -> bool:
    if gradient is None:
        return False
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return not bool(values.any())


def _forwarded(method: weakref.WeakMethod[Any]) -> Any:
    def hook(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        call = method()
        if call is not None:
            call(optimizer)

    return hook
