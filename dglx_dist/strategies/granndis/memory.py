"""What a rank needs for a plan, told before anything of it is allocated, and how many co-batches follow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn, final

import numpy as np

from dglx_dist.errors import ConfigError
from dglx_dist.records import Array
from dglx_dist.strategies.granndis.plan import HaloLayer, RankPlan
from dglx_dist.strategies.granndis.rehearsal import Rehearsal, counts_of

_OPTIMIZER_ROWS = 2
"""Tensors of the size of the parameters that Adam keeps."""

_PROBES = 3
"""Co-batches that a number of them is judged by, before all are."""
_MOST_CHECKED = 64
"""Co-batches of a chosen number that are checked."""
_FIRST_TRIED = 32


@final
@dataclass(frozen=True, kw_only=True)
class LayerMemory:
    """Bytes that one layer needs on one rank."""

    features: int
    """Rows of the input; of layer 1 only."""
    activations: int
    """What forward keeps for backward."""
    structure: int
    """The block, its formats and the plan."""
    halo: int
    """Rows that are sent, and their gradients that come back; buffers are shared, so layers do not add up."""


@final
@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes that training on one plan needs on one rank, beyond what the process has without it."""

    layers: tuple[LayerMemory, ...]
    gradients: int
    """What backward needs at its peak beyond what forward kept: gradients of rows and parameters."""
    optimizer: int
    ahead: int
    """Structure and features of the plan that is loaded meanwhile."""

    @property
    def features(self) -> int:
        """Of all layers."""
        return sum(layer.features for layer in self.layers)

    @property
    def activations(self) -> int:
        """Of all layers."""
        return sum(layer.activations for layer in self.layers)

    @property
    def structure(self) -> int:
        """Of all layers."""
        return sum(layer.structure for layer in self.layers)

    @property
    def halo(self) -> int:
        """The buffers of the largest layer, which all use."""
        return max(layer.halo for layer in self.layers)

    @property
    def total(self) -> int:
        """The peak."""
        kept = self.features + self.structure + self.halo + self.optimizer + self.ahead
        return kept + self.activations + self.gradients

    def lines(self) -> list[str]:
        """Return a table of it, in MB."""
        head = f"{'layer':>8} {'features':>10} {'activations':>12} {'structure':>10} {'halo':>8}   (MB)"
        rows = [
            f"{number:>8} {_mb(one.features):>10} {_mb(one.activations):>12} {_mb(one.structure):>10} "
            f"{_mb(one.halo):>8}"
            for number, one in enumerate(self.layers, start=1)
        ]
        rest = (
            f"gradients {_mb(self.gradients)}, optimizer {_mb(self.optimizer)}, next co-batch "
            f"{_mb(self.ahead)}, together {_mb(self.total)}"
        )
        return [head, *rows, rest]


def estimate(plan: RankPlan, rehearsal: Rehearsal, feature_bytes: int, *, ahead: int) -> MemoryEstimate:
    """Return what ``plan`` needs.

    Args:
        plan: Of this rank.
        rehearsal: Of the model, with as many layers, and exchanging if the plan does.
        feature_bytes: Of one row of the input, as blocks have it.
        ahead: Plans that are loaded while one is trained on, about as large.
    """
    counts = counts_of(plan)
    running, kept = rehearsal.running(counts), rehearsal.kept(counts)
    layers = tuple(
        LayerMemory(
            features=layer.own_rows * feature_bytes if number == 0 else 0,
            activations=int(kept[number + 1]) + (int(kept[0]) if number == 0 else 0),
            # Layers that are alike share one block.
            structure=0 if number and layer is plan.layers[number - 1] else structure_bytes(layer),
            halo=2 * sum(len(rows) for _, rows in layer.send) * int(rehearsal.exchanged[number]),
        )
        for number, layer in enumerate(plan.layers)
    )
    loaded = sum(layer.features + layer.structure for layer in layers)
    return MemoryEstimate(
        layers=layers,
        gradients=max(int(running.max()) - int(kept.sum()), 0),
        optimizer=_OPTIMIZER_ROWS * rehearsal.parameter_bytes,
        ahead=ahead * loaded,
    )


def structure_bytes(layer: HaloLayer) -> int:
    """Return the bytes of a layer's plan and block.

    8 bytes for each number: of an edge its source and its id, its position and half as many spare ones, and
    in the order of the sources, which backward reads, its target and its position; of a source its place and
    its id, and of a target its place.
    """
    per_edge = 8 * 2 + 12 + 8 * 2
    sent = sum(len(rows) for _, rows in layer.send)
    return per_edge * len(layer.indices) + 16 * layer.num_sources + 8 * (layer.targets + sent)


def choose_num_batches(worst: Callable[[int, Array], int], memory_bytes: int, most: int) -> int:
    """Return the fewest co-batches, to within an eighth, of which each fits into ``memory_bytes``.

    Begins with many and goes on to fewer, so that only one that is too large is ever planned, and that
    one's structure alone.

    Args:
        worst: (R, (k,) steps) to the largest total of these steps over all ranks; collective.
        memory_bytes: What a rank may need.
        most: Largest number there can be.

    Raises:
        ConfigError: not even ``most`` co-batches are small enough.
    """

    def fits(number: int, checked: int = _PROBES) -> bool:
        return worst(number, spread(number, checked)) <= memory_bytes

    def refuse(checked: int) -> NoReturn:
        needed = worst(most, spread(most, checked))
        raise ConfigError(
            f"memory={memory_bytes} bytes for each rank do not hold even one of {most} co-batches, which "
            f"needs {needed}; grant more, use more servers or ranks, or bound the neighbourhood with "
            "external_hops=1, external_fanout=15 and external_inner=batch"
        )

    few, many = 0, min(_FIRST_TRIED, most)
    while not fits(many):
        if many == most:
            refuse(_PROBES)
        few, many = many, min(2 * many, most)
    while few == 0 and many > 1:
        if fits(many // 2):
            many //= 2
        else:
            few = many // 2
    while few and many - few > max(1, many // 8):
        middle = (few + many) // 2
        few, many = (few, middle) if fits(middle) else (middle, many)
    while not fits(many, _MOST_CHECKED):
        if many == most:
            refuse(_MOST_CHECKED)
        many = min(many + max(1, many // 8), most)
    return many


def spread(count: int, chosen: int) -> Array:
    """Return up to ``chosen`` (k,) int64 distinct numbers spread over [0, count)."""
    return np.unique(np.linspace(0, count - 1, min(chosen, count)).astype(np.int64))


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f}"
