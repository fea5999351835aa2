"""First weights from names and shapes: the same on any number of servers, in any order (section 7)."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping
from typing import Literal, TypeAlias, get_args

import numpy as np

from dglx_dist.errors import ConfigError
from dglx_dist.records import Array
from dglx_dist.registry import did_you_mean

Scheme: TypeAlias = Literal["xavier_uniform", "xavier_normal", "he_uniform", "he_normal"]


def check_scheme(name: str) -> None:
    """Raise ConfigError unless ``name`` is a scheme."""
    known = get_args(Scheme)
    if name not in known:
        raise ConfigError(
            f"there is no initialisation {name!r}{did_you_mean(name, known)} (there are: {', '.join(known)})"
        )


def initialise(
    shapes: Mapping[str, tuple[int, ...]],
    scheme: Scheme,
    seed: int,
    dtype: np.dtype[np.floating],
    *,
    inputs_first: Collection[str] = (),
) -> dict[str, Array]:
    """Draw weights; each depends on its own name, its shape and the seed alone.

    Xavier keeps the variance over both directions (Glorot and Bengio, 2010), He that of the forward pass
    under rectifiers (He et al., 2015), with gain sqrt(2). Vectors and numbers, which are biases, are zero.

    Args:
        shapes: By name; (outputs, inputs, ...) as torch counts them.
        scheme: Which.
        seed: Equal on all ranks.
        dtype: float32 or float64; float32 is float64 rounded.
        inputs_first: Names of weights of shape (inputs, outputs), as those of DGL's GraphConv.

    Raises:
        ConfigError: there is no such scheme.
    """
    check_scheme(scheme)
    return {
        name: _draw(name, shape, scheme, seed, name in inputs_first).astype(dtype)
        for name, shape in shapes.items()
    }


def _draw(name: str, shape: tuple[int, ...], scheme: Scheme, seed: int, inputs_first: bool) -> Array:
    if len(shape) < 2 or 0 in shape:
        return np.zeros(shape)
    field = math.prod(shape[2:])
    outputs, inputs = shape[0] * field, shape[1] * field
    if inputs_first:
        outputs, inputs = inputs, outputs
    spread = math.sqrt(2 / (inputs + outputs) if scheme.startswith("xavier") else 2 / inputs)
    key = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = np.random.Generator(np.random.Philox(key=np.frombuffer(key[:16], np.uint64)))
    if scheme.endswith("uniform"):
        return generator.uniform(-1.0, 1.0, shape) * (spread * math.sqrt(3))
    return generator.standard_normal(shape) * spread
