"""Functions of rows between the layers of a model, identified by values and gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from dglx_dist.data.json_fields import Json

Merge: TypeAlias = Literal["none", "flatten", "mean"]
"""How the heads of (n, K, H) rows are merged."""


@dataclass(frozen=True)
class Activation:
    """An elementwise function that stages know."""

    name: str
    parameter: str = ""
    """``slope`` or ``alpha``, for those that have one."""
    value: float = 0.0

    def json(self) -> dict[str, Json]:
        """Return it in the format of stages: ``{"name": "leaky_relu", "slope": 0.2}``."""
        return {"name": self.name} | ({self.parameter: self.value} if self.parameter else {})

    def __call__(self, z: Tensor) -> Tensor:
        if self.name == "leaky_relu":
            return functional.leaky_relu(z, self.value)
        return functional.elu(z, self.value) if self.name == "elu" else _PLAIN[self.name](z)


IDENTITY = Activation("identity")
KNOWN = "identity, relu, leaky_relu, elu, tanh, sigmoid, gelu, each alone; heads flattened or averaged"

_PLAIN: Mapping[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda z: z,
    "relu": torch.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "gelu": functional.gelu,
    "gelu_tanh": lambda z: functional.gelu(z, approximate="tanh"),
}
_MERGES: Mapping[Merge, Callable[[Tensor], Tensor]] = {
    "none": lambda z: z,
    "flatten": lambda z: z.flatten(1),
    "mean": lambda z: z.mean(1),
}


@dataclass(frozen=True, kw_only=True)
class RowFunction:
    """after(merge(inside(z)))."""

    inside: Activation = IDENTITY
    merge: Merge = "none"
    after: Activation = IDENTITY

    def __call__(self, z: Tensor) -> Tensor:
        """Apply to (n, H), or to (n, K, H) if heads are merged."""
        return self.after(_MERGES[self.merge](self.inside(z)))


def find_function(
    z: Tensor, rows: Tensor, own: Callable[[Tensor], Tensor] | None = None
) -> RowFunction | None:
    """Return the known function that computed ``rows`` from ``z``, by values alone; None: there is none.

    ``z``, (n, H) or (n, K, H), are random; ``own`` is what the layer applied to each head before a merge.
    """
    merges: tuple[Merge, ...] = ("flatten", "mean") if z.dim() == 3 else ("none",)
    with torch.no_grad():
        for merge in merges:
            for function in _candidates(z, rows, merge, own):
                if equal(function(z), rows):
                    return function
    return None


def same_gradient(z: Tensor, rows: Tensor, function: RowFunction, generator: torch.Generator) -> bool:
    """Return True if gradients flow from ``rows`` back to the leaf ``z`` as through ``function``."""
    if not rows.requires_grad:
        return False
    cotangent = torch.randn(rows.shape, dtype=rows.dtype, generator=generator)
    (found,) = torch.autograd.grad(rows, z, cotangent, allow_unused=True, retain_graph=True)
    (wanted,) = torch.autograd.grad(function(z), z, cotangent)
    return found is not None and equal(found, wanted)


def equal(left: Tensor, right: Tensor) -> bool:
    """Return True if two tensors are equal up to rounding."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    scale = torch.clamp(left.abs(), min=1.0)
    return bool(((left - right).abs() <= 16 * torch.finfo(left.dtype).eps * scale).all())


def _candidates(
    z: Tensor, rows: Tensor, merge: Merge, own: Callable[[Tensor], Tensor] | None
) -> Iterator[RowFunction]:
    for inside in _activations(z, rows, _MERGES[merge]):
        yield RowFunction(inside=inside, merge=merge)
    if merge != "mean":
        return
    first = None if own is None else find_function(z, own(z).flatten(1))
    inside = IDENTITY if first is None else first.inside
    merged = _MERGES[merge](inside(z))
    for after in _activations(merged, rows, _MERGES["none"]):
        yield RowFunction(inside=inside, merge=merge, after=after)


def _activations(z: Tensor, rows: Tensor, merge: Callable[[Tensor], Tensor]) -> Iterator[Activation]:
    # All activations; those with a parameter with the value that fits.
    yield from (Activation(name) for name in _PLAIN)
    if merge(z).shape != rows.shape:
        return
    rest = rows - merge(torch.relu(z))
    for name, key, low in (
        ("leaky_relu", "slope", z.clamp(max=0)),
        ("elu", "alpha", torch.expm1(z.clamp(max=0))),
    ):
        basis = merge(low)
        fitted = float((rest * basis).sum() / (basis * basis).sum())
        # The user's value is a short decimal; the fit has rounding errors in its last digits.
        for digits in (2, 4, 7, 16):
            yield Activation(name, key, round(fitted, digits))
