"""Versions of the weights: hooks on the user's optimizers, and a log of what each batch read and wrote."""

from __future__ import annotations

import inspect
import logging
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from dglx_dist.errors import ConfigError
from dglx_dist.strategies.push_pull.options import Side

_WHOLE_TENSORS = frozenset(
    {
        "Adafactor",
        "DistributedShampoo",
        "GaLoreAdamW",
        "Lamb",
        "LAMB",
        "Lars",
        "LARS",
        "LBFGS",
        "Muon",
        "Shampoo",
        "SM3",
        "SOAP",
    }
)
"""Classes that use more of a parameter than the element they step: its norm, its rows, its factors."""

_ELEMENTWISE = (
    "SGD, Adam, AdamW, NAdam, RAdam, Adamax, Adagrad, Adadelta, RMSprop, Rprop, ASGD and SparseAdam"
)


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Check that ``optimizer`` may step parameters of which each rank has some columns.

    It may if it steps each element by that element's gradients alone, as nearly all do. Exceptions are known
    by class name, with their subclasses; unknown classes pass.

    Raises:
        ConfigError: it uses whole tensors, or calls the model again within a step, in which other ranks would
            have to take part.
    """
    kind = type(optimizer)
    remedy = f"take one that steps each element by itself ({_ELEMENTWISE}), or strategy='data_parallel'"
    known = sorted(_WHOLE_TENSORS.intersection(base.__name__ for base in kind.__mro__))
    if known:
        raise ConfigError(
            f"{kind.__name__} looks at whole parameters, of which this rank holds some columns only, so its "
            f"steps would differ from those of one process; {remedy}"
        )
    closure = inspect.signature(kind.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"{kind.__name__} calls the model again within a step (its step() needs a closure), which a "
            f"pipeline cannot follow; {remedy}"
        )


_KEPT = 1 << 16


@final
@dataclass(frozen=True, kw_only=True)
class Version:
    """The step of one batch on one side."""

    batch: int
    side: Side
    read: int
    """Steps that had been taken when the batch read its weights."""
    written: int
    """Steps that had been taken before its own; the lag is ``written - read``."""


@final
class VersionLog:
    """Counts the optimizer's steps on both sides and records the versions of each batch."""

    def __init__(self) -> None:
        self.steps: dict[Side, int] = {"M": 0, "D": 0}
        self.done: deque[Version] = deque(maxlen=_KEPT)
        """The latest, oldest first."""
        self._pending: list[tuple[int, Side, int]] = []

    def waits(self, side: Side) -> bool:
        """Whether gradients of ``side`` wait for a step."""
        return any(one[1] == side for one in self._pending)

    def computed(self, batch: int, side: Side, read: int) -> None:
        """Record that the gradients of ``batch`` on one side wait for a step."""
        self._pending.append((batch, side, read))

    @contextmanager
    def put_aside(self) -> Iterator[None]:
        """Ignore the gradients that wait, inside the block."""
        pending, self._pending = self._pending, []
        yield
        self._pending = pending + self._pending

    def stepped(self, sides: tuple[Side, ...]) -> None:
        """Record an optimizer's step that writes ``sides``; it counts where a gradient waited."""
        # A batch on which the model was called twice has one gradient, their sum.
        taken = list(dict.fromkeys(one for one in self._pending if one[1] in sides))
        self._pending = [one for one in self._pending if one[1] not in sides]
        for batch, side, read in taken:
            self.done.append(Version(batch=batch, side=side, read=read, written=self.steps[side]))
        for side in {side for _, side, _ in taken}:
            self.steps[side] += 1


log = logging.getLogger(__name__)


@final
class OptimizerHooks:
    """Records every step of an optimizer that has parameters of the pipeline.

    torch calls global hooks at every optimizer's steps, so the user's loop does not have to register its own.
    """

    def __init__(self, part: Iterable[nn.Parameter], owner: Iterable[nn.Parameter], log: VersionLog) -> None:
        self._side: dict[int, Side] = {id(parameter): "M" for parameter in part}
        self._side |= {id(parameter): "D" for parameter in owner}
        self._log = log
        self._known: list[weakref.ref[Optimizer]] = []
        self._held_back: tuple[Side, ...] = ()
        self._stepped_without_part: set[int] = set()
        """Optimizers that have stepped since the part side's gradients wait."""
        self._warned = False
        handles = [
            register_optimizer_step_pre_hook(_weak_hook(weakref.WeakMethod(self._before))),
            register_optimizer_step_post_hook(_weak_hook(weakref.WeakMethod(self._after))),
        ]
        for handle in handles:
            weakref.finalize(self, handle.remove)

    def hold_back(self, sides: tuple[Side, ...]) -> None:
        """Set the sides that have no gradient in the coming step, as all their batches are still in flight.

        Zeros that the user's ``zero_grad(set_to_none=False)`` left would count as one: to Adam, momentum and
        weight decay a step without a batch. So gradients of nothing but zeros are removed.
        """
        self._held_back = sides

    @contextmanager
    def own_step(self) -> Iterator[None]:
        """Step the known optimizers with the gradients that the block leaves, and no others.

        Gradients from before are restored afterwards.
        """
        optimizers = [found for ref in self._known if (found := ref()) is not None]
        parameters = [parameter for one in optimizers for parameter in _parameters(one)]
        before = [parameter.grad for parameter in parameters]
        held_back, self._held_back = self._held_back, ()
        for parameter in parameters:
            parameter.grad = None
        with self._log.put_aside():
            yield
            for one in optimizers:
                one.step()
        self._held_back = held_back
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient

    def _before(self, optimizer: Optimizer) -> None:
        for parameter in _parameters(optimizer) if self._held_back else ():
            if self._side.get(id(parameter)) in self._held_back and _is_zero(parameter.grad):
                parameter.grad = None
        stepped = self._stepped_by(optimizer)
        if not stepped:
            return
        if not any(ref() is optimizer for ref in self._known):
            check_optimizer(optimizer)
            self._known.append(weakref.ref(optimizer))
        # A parameter's optimizer is the last one that stepped it: a replaced one may still exist.
        self._known = [
            ref
            for ref in self._known
            if (other := ref()) is optimizer or (other is not None and not stepped & self._stepped_by(other))
        ]

    def _after(self, optimizer: Optimizer) -> None:
        sides = self._sides(optimizer)
        if sides:
            self._log.stepped(sides)
            self._warn_if_part_is_left_out(optimizer)

    def _warn_if_part_is_left_out(self, optimizer: Optimizer) -> None:
        # The part side's gradients wait while another optimizer steps for the second time.
        if not self._log.waits("M"):
            self._stepped_without_part = set()
        elif id(optimizer) not in self._stepped_without_part:
            self._stepped_without_part.add(id(optimizer))
        elif not self._warned:
            self._warned = True
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


def _weak_hook(method: weakref.WeakMethod[Any]) -> Any:
    def hook(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        call = method()
        if call is not None:
            call(optimizer)

    return hook
