"""What all parameter servers agree on before the first weight moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dglx_dist.errors import ConfigError
from dglx_dist.offload.program import Program
from dglx_dist.records import Array


@dataclass(frozen=True, kw_only=True, eq=False)
class ParameterPlan:
    """Weights, who uses them, and which server answers for which interval; equal on all ranks."""

    shapes: Mapping[str, tuple[int, ...]]
    """By name, in the order in which weights are kept, summed and sent."""
    dtype: np.dtype[np.floating]
    """float32 or float64, of all of them."""
    steps: Mapping[int, tuple[str, ...]]
    """Index in the program of each Vertex step -> the names of its weights; those without any are ignored."""
    server_of_interval: Array
    """(K,) int64; see :func:`~dglx_dist.offload.parameters.assign.assign`."""
    num_servers: int = 1
    staleness: int = 0
    """S: an interval may begin epoch e once e - S updates were made."""
    first_epoch: int = 0
    """The epoch that comes next; above 0 when training goes on from a checkpoint."""

    def __post_init__(self) -> None:
        if self.dtype not in (np.dtype(np.float32), np.dtype(np.float64)):
            raise ConfigError(
                f"weights of dtype {self.dtype} cannot be trained here; take float32 or float64"
            )
        used = [name for names in self.steps.values() for name in names]
        if unknown := set(used) - set(self.shapes):
            raise ConfigError(
                f"steps use {', '.join(sorted(unknown))}, but weights are {', '.join(self.shapes)}"
            )
        if unused := set(self.shapes) - set(used):
            raise ConfigError(f"no step uses {', '.join(sorted(unused))}; take it out of the model")
        if self.staleness < 0:
            raise ConfigError(f"staleness={self.staleness} must be at least 0")
        if set(self.server_of_interval.tolist()) != set(range(self.num_servers)):
            raise ConfigError(
                f"not each of {self.num_servers} parameter servers has an interval; use assign()"
            )

    @classmethod
    def of(
        cls,
        program: Program,
        server_of_interval: Array,
        *,
        num_servers: int = 1,
        staleness: int = 0,
        first_epoch: int = 0,
    ) -> ParameterPlan:
        """Return the plan for the weights of ``program``; see the fields."""
        return cls(
            shapes=program.weight_shapes,
            dtype=np.dtype(program.dtype),
            steps={index: tuple(program.weights_of(index)) for index in program.vertex_steps},
            server_of_interval=server_of_interval,
            num_servers=num_servers,
            staleness=staleness,
            first_epoch=first_epoch,
        )

    @property
    def num_intervals(self) -> int:
        """K, over all graph servers."""
        return len(self.server_of_interval)

    @property
    def size(self) -> int:
        """Numbers in all weights together, |theta|."""
        return sum(int(np.prod(shape)) for shape in self.shapes.values())

    @property
    def reporting(self) -> dict[int, tuple[str, ...]]:
        """The steps whose gradients are waited for: those with weights."""
        return {step: names for step, names in self.steps.items() if names}

    def intervals_of(self, server: int) -> list[int]:
        """Return the intervals of ``server``, ascending."""
        return [int(interval) for interval in np.flatnonzero(self.server_of_interval == server)]

    def unflatten(self, vector: Array) -> list[Array]:
        """Cut (|theta|,) into one array per weight; views."""
        ends = np.cumsum([int(np.prod(shape)) for shape in self.shapes.values()])[:-1]
        return [
            part.reshape(shape)
            for part, shape in zip(np.split(vector, ends), self.shapes.values(), strict=True)
        ]

    def check_weights(self, names: Sequence[str], arrays: Sequence[Array], what: str) -> None:
        """Raise ConfigError unless ``arrays`` have shape and dtype of the weights ``names``."""
        if len(arrays) != len(names):
            raise ConfigError(f"{what}: {len(arrays)} arrays for {len(names)} weights ({', '.join(names)})")
        for name, array in zip(names, arrays, strict=True):
            if array.shape != self.shapes[name] or array.dtype != self.dtype:
                raise ConfigError(
                    f"{what}: {name!r} is {array.dtype} of shape {array.shape}, not {self.dtype} of shape "
                    f"{self.shapes[name]}"
                )
