"""Which mini-batches are counted for a choice, where the user says all, something or nothing of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dglx_dist.planner.survey import Draws
from dglx_dist.run.session import default_batch_size, default_fanouts

USUAL = "data_parallel"
"""The strategy whose fan-outs and batch size are meant by who names none."""
_DEEP = 4
"""Layers from which on nobody draws mini-batches unless fan-outs are given."""
NO_BATCHES = (
    f"nobody draws mini-batches for {_DEEP} layers and more unless fan-outs are given, so ways to train "
    "on whole graphs are compared (--fanout, --unit)"
)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What was said."""

    unit: str
    """``mini_batch``, ``full_graph`` or ``any``."""
    num_layers: int
    fanouts: Sequence[int] | None
    """Input-most first; None: nothing was said."""
    batch_size: int | None
    epoch: int
    """That is counted."""
    dry_batches: int
    """Of each rank; 0: all of the epoch."""

    @property
    def is_deep(self) -> bool:
        """Whether there are no mini-batches though nobody asked for whole graphs alone."""
        return self.unit != "full_graph" and self.fanouts is None and self.num_layers >= _DEEP


def steps_of(draws: Draws | None, seeds: int, ranks: int) -> int:
    """Return the steps of an epoch on ``seeds`` training nodes of all ranks; 0 without mini-batches."""
    if draws is None:
        return 0
    of_rank = -(-seeds // ranks)
    return -(-of_rank // draws.batch_size)


def draws_of(asked: Asked) -> Draws | None:
    """Return the mini-batches that are counted; None: there are none."""
    if asked.unit == "full_graph" or asked.is_deep:
        return None
    fanouts = default_fanouts(USUAL, asked.num_layers) if asked.fanouts is None else tuple(asked.fanouts)
    size = asked.batch_size or default_batch_size(USUAL)
    assert size is not None
    return Draws(fanouts=fanouts, batch_size=size, epoch=asked.epoch, most_batches=asked.dry_batches or None)
