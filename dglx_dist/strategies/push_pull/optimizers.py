"""Which optimizers step the pieces of a parameter as they would step the whole."""

from __future__ import annotations

import inspect

import torch

from dglx_dist.errors import ConfigError

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
"""Classes that look at more of a parameter than the element they step: its norm, its rows, its factors."""

_GOOD = "SGD, Adam, AdamW, NAdam, RAdam, Adamax, Adagrad, Adadelta, RMSprop, Rprop, ASGD and SparseAdam"


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Look whether ``optimizer`` may step parameters of which each rank has some columns.

    It may if it steps each element by that element's gradients alone, as nearly all do. Classes are known by
    name, their subclasses with them; one that nobody knows is taken to be such.

    Raises:
        ConfigError: it looks at whole tensors, or calls the model again within a step, in which other ranks
            would have to take part.
    """
    kind = type(optimizer)
    remedy = f"take one that steps each element by itself ({_GOOD}), or strategy='data_parallel'"
    known = sorted(_WHOLE_TENSORS.intersection(base.__name__ for base in kind.__mro__))
    if known:
        raise ConfigError(
            f"{kind.__name__} looks at whole parameters, of which this rank holds some columns only, so its "
            f"steps would be others than in one process; {remedy}"
        )
    closure = inspect.signature(kind.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"{kind.__name__} calls the model again within a step (its step() needs a closure), which a "
            f"pipeline cannot follow; {remedy}"
        )
