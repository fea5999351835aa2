"""The bytes of push-pull by phase, from counts of its blocks: P3 (algorithms 2.3, 2.4, 2.6)."""

from __future__ import annotations

from collections.abc import Mapping

from dglx_dist.errors import ConfigError
from dglx_dist.planner.first_layer import FirstLayer
from dglx_dist.planner.survey import Survey

_ID_BYTES = 4
"""Of an id in what is pushed of the structure."""


def row_bytes(found: Survey) -> dict[str, int]:
    """Return data-parallel bytes by the ledger's phases, over all ranks; phases without any left out."""
    return _present(
        features=found.feature_bytes,
        sampling=found.sampling_bytes,
        labels=found.label_bytes,
        gradients=found.gradient_bytes,
    )


def column_bytes(
    found: Survey, first: FirstLayer, *, group_size: int = 0, pushed: bool = True
) -> dict[str, int]:
    """Return push-pull's bytes by the ledger's phases, over all ranks; phases without any left out.

    For each batch, with N_f parts in a group (all ranks W when not told otherwise)::

        structure             (N_f - 1) 4 (D1 + 1 + E1 + L0)       nothing when every part samples for itself
        activations           (N_f - 1) s (D1 H + 2 (L0 + D1) K)   K only where layer 1 attends
        activation_gradients  the same, the other way
        gradients             2 (W - 1) (|theta_D| + flags) s, and for W / N_f > 1 groups the cut weights too

    Depth, order and versions of weights change none of it.

    Args:
        found: Counted on the same cut, seeds and fan-outs, one rank per server.
        first: Of the model.
        group_size: Parts that hold all columns together; 0: all ranks.
        pushed: Whether owners send the structure of their first blocks.

    Raises:
        ConfigError: ``group_size`` does not divide the ranks.
    """
    ranks = found.ranks
    size = group_size or ranks
    if size < 1 or ranks % size:
        raise ConfigError(f"group_size={group_size} does not divide {ranks} ranks; give a divisor of it")
    batches, groups = found.steps * ranks, ranks // size
    pulled = found.first_targets * first.sum_width
    pulled += 2 * (found.input_rows + found.first_targets) * first.logit_width
    indices = found.first_targets + batches + found.first_edges + found.input_rows
    # Each part's pieces, summed over the groups that have the same.
    cut = 2 * (groups - 1) * first.cut_bytes
    return _present(
        structure=(size - 1) * _ID_BYTES * indices if pushed else 0,
        activations=(size - 1) * first.itemsize * pulled,
        activation_gradients=(size - 1) * first.itemsize * pulled,
        sampling=found.sampling_bytes,
        labels=found.label_bytes,
        gradients=found.steps * (2 * (ranks - 1) * first.replicated_bytes + cut),
    )


def break_even_width(found: Survey, *, pushed: bool = True) -> float:
    """Return H*, the hidden width at which push-pull moves as much as data parallelism (algorithms 2.4).

    From feature rows, pushed structure and sums alone; gradients and what both move are left out.

    Raises:
        ConfigError: there are no batches, or one rank.
    """
    ranks = found.ranks
    moved_per_column = 2 * (ranks - 1) * found.first_targets * 4
    if not moved_per_column:
        raise ConfigError("a break-even width needs batches on 2 ranks at least")
    indices = found.first_targets + found.steps * ranks + found.first_edges + found.input_rows
    structure = (ranks - 1) * _ID_BYTES * indices if pushed else 0
    return (found.feature_bytes - structure) / moved_per_column


def total(phases: Mapping[str, int]) -> int:
    """Return the sum over the phases."""
    return sum(phases.values())


def _present(**phases: int) -> dict[str, int]:
    return {name: count for name, count in sorted(phases.items()) if count}
