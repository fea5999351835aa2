"""Activations with the derivatives that torch uses, also where there is a kink."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import final

import numpy as np

from dglx_dist.offload.fields import Fields
from dglx_dist.offload.stages.erf import erf
from dglx_dist.records import Array

_INNER, _CUBIC = math.sqrt(2.0 / math.pi), 0.044715
"""GELU's tanh form: z/2 (1 + tanh(_INNER (z + _CUBIC z^3)))."""


class Activation(ABC):
    """A function of single numbers. Arrays of any shape; what is given is never written to."""

    @abstractmethod
    def apply(self, z: Array) -> Array:
        """Return the function's values, of the shape and dtype of ``z``; may be ``z`` itself."""

    @abstractmethod
    def pull_back(self, z: Array, gradient: Array) -> Array:
        """Return ``gradient`` times the derivative at ``z``; may be ``gradient`` itself."""


@final
class Identity(Activation):
    """h = z."""

    def apply(self, z: Array) -> Array:
        """Return ``z``."""
        return z

    def pull_back(self, z: Array, gradient: Array) -> Array:
        """Return ``gradient``."""
        return gradient


@final
class Relu(Activation):
    """h = max(z, 0)."""

    def apply(self, z: Array) -> Array:
        """Return max(z, 0)."""
        return np.maximum(z, 0)

    def pull_back(self, z: Array, gradient: Array) -> Array:
        """Return the gradient where z > 0, else 0."""
        return np.multiply(gradient, z > 0)


@final
class LeakyRelu(Activation):
    """h = z where z > 0, else slope z."""

    def __init__(self, slope: float) -> None:
        self._slope = slope

    def apply(self, z: Array) -> Array:
        """Return z where z > 0, else slope z."""
        out = np.multiply(z, self._slope)
        # The larger one is z where z > 0, for slopes up to 1; faster than to look at each.
        return np.maximum(out, z, out=out) if self._slope <= 1 else np.minimum(out, z, out=out)

    def pull_back(self, z: Array, gradient: Array) -> Array:
        """Return the gradient where z > 0, else slope times the gradient."""
        return np.where(z > 0, gradient, np.multiply(gradient, self._slope))


@final
class Elu(Activation):
    """h = z where z > 0, else alpha (exp(z) - 1)."""

    def __init__(self, alpha: float) -> None:
        self._alpha = alpha

    def apply(self, z: Array) -> Array:
        """Return z where z > 0, else alpha (exp(z) - 1)."""
        out = np.minimum(z, 0)
        np.expm1(out, out=out)
        out *= self._alpha
        out += np.maximum(z, 0)  # one of the two is 0
        return out

    def pull_back(self, z: Array, gradient: Array) -> Array:
        """Return the gradient where z > 0, else alpha exp(z) times the gradient."""
        out = np.minimum(z, 0)
        np.exp(out, out=out)
        if self._alpha != 1:
            out = np.where(z > 0, z.dtype.type(1), np.multiply(out, self._alpha, out=out))
        out *= gradient
        return out


@final
class Tanh(Activation):
    """h = tanh(z)."""

    def apply(self, z: Array) -> Array:
        """Return tanh(z)."""
        return np.tanh(z)

    def pull_back(self, z: Array, gradient: Array) -> Array:
        """Return the gradient times 1 - tanh(z)^2."""
        out = np.tanh(z)
        np.multiply(out, out, out=out)
        np.subtract(1, out, out=out)
        out *= gradient
        return out


@final
class Sigmoid(Activation):
    """h = 1 / (1 + exp(-z)), by the exponential of -|z|, which overflows nowhere and keeps small values."""

    def apply(self, z: Array) -> Array:
        """Return 1 / (1 + exp(-z))."""
        small = np.exp(-np.abs(z))
        out = np.where(z >= 0, z.dtype.type(1), small)
        small += 1
        out /= small
        return out

    def pull_back(self, z: Array, gradient: Array) -> Array:
        """Return the gradient times h (1 - h)."""
        out = self.apply(z)
        out *= 1 - out
        out *= gradient
        return out


@final
class GeluTanh(Activation):
    """GELU in its tanh form, ``approximate="tanh"``."""

    def apply(self, z: Array) -> Array:
        """Return z/2 (1 + tanh(...))."""
        out = self._tanh(z)
        out += 1
        out *= z
        out *= 0.5
        return out

    def pull_back(self, z: Array, gradient: Array) -> Array:
        """Return the gradient times the derivative of the tanh form."""
        tanh = self._tanh(z)
        inner = np.multiply(z, z)
        inner *= 3 * _CUBIC * _INNER
        inner += _INNER
        inner *= z
        inner *= 1 - tanh * tanh
        inner += tanh
        inner += 1
        inner *= 0.5
        inner *= gradient
        return inner

    def _tanh(self, z: Array) -> Array:
        out = np.multiply(z, z)
        out *= _CUBIC
        out += 1
        out *= z
        out *= _INNER
        return np.tanh(out, out=out)


@final
class Gelu(Activation):
    """GELU, z Phi(z) with the normal distribution Phi."""

    def apply(self, z: Array) -> Array:
        """Return z Phi(z)."""
        out = self._phi(z)
        out *= z
        return out

    def pull_back(self, z: Array, gradient: Array) -> Array:
        """Return the gradient times Phi(z) + z phi(z)."""
        out = np.multiply(z, z)
        out *= -0.5
        np.exp(out, out=out)
        out *= z
        out *= 1 / math.sqrt(2 * math.pi)
        out += self._phi(z)
        out *= gradient
        return out

    def _phi(self, z: Array) -> Array:
        out = erf(np.multiply(z, math.sqrt(0.5)))
        out += 1
        out *= 0.5
        return out


_LARGE = 1e6
_MAKERS: Mapping[str, Callable[[Fields], Activation]] = {
    "identity": lambda fields: Identity(),
    "relu": lambda fields: Relu(),
    "leaky_relu": lambda fields: LeakyRelu(fields.number("slope", -_LARGE, _LARGE)),
    "elu": lambda fields: Elu(fields.number("alpha", -_LARGE, _LARGE)),
    "tanh": lambda fields: Tanh(),
    "sigmoid": lambda fields: Sigmoid(),
    "gelu": lambda fields: Gelu(),
    "gelu_tanh": lambda fields: GeluTanh(),
}
ACTIVATIONS = tuple(_MAKERS)
"""Names that :func:`read_activation` knows."""


def read_activation(fields: Fields, name: str = "activation") -> Activation:
    """Make the activation that the field ``name`` describes; a missing field is the identity.

    Written ``{"name": "relu"}``, ``{"name": "leaky_relu", "slope": 0.2}``, ``{"name": "elu", "alpha": 1.0}``.

    Raises:
        ConfigError: no activation is so described.
    """
    identity: object = {"name": "identity"}
    given = fields.maybe(name, fields.any, identity)
    inner = Fields(given, f"{fields.where} {name!r}")
    activation = _MAKERS[inner.choice("name", ACTIVATIONS)](inner)
    inner.end()
    return activation
