"""What a DGL sampler object asks for, read once into a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from dgl.dataloading import BlockSampler, EdgePredictionSampler, NeighborSampler

from dglx_dist.errors import ConfigError
from dglx_dist.records import EdgeType

Fanout: TypeAlias = int | Mapping[str | EdgeType, int]
"""In-edges per destination and edge type, -1 for all; a dict by relation or triple names every edge type."""

Names: TypeAlias = tuple[str, ...] | Mapping[str | EdgeType, tuple[str, ...]]
"""Columns of the only type, or by type."""

_WORKS = (
    "dgl.dataloading.NeighborSampler, MultiLayerFullNeighborSampler and subclasses of BlockSampler whose "
    "sample_blocks uses g.sample_neighbors work"
)


@dataclass(frozen=True, kw_only=True)
class SamplePlan:
    """How mini-batches are sampled and what is attached to them."""

    fanouts: tuple[Fanout, ...] | None
    """Layer 1 (input-most) first. None: the sampler's own code runs."""
    replace: bool = False
    """Whether an edge may be drawn more than once."""
    weights: str | None = None
    """Name of the edge column that says how likely each edge is; None for all alike."""
    node_feats: Names = ()
    """Node columns for the sources of the first block."""
    labels: Names = ()
    """Node columns for the destinations of the last block."""
    edge_feats: Names = ()
    """Edge columns for every block."""


def read_sampler(sampler: object) -> SamplePlan:
    """Read a DGL sampler.

    Args:
        sampler: Any object; those that override how blocks are made are run as they are.

    Raises:
        ConfigError: the sampler, or an option of it, cannot be honoured; the message says what can.
    """
    if isinstance(sampler, EdgePredictionSampler):
        raise ConfigError(
            "as_edge_prediction_sampler(...) samples around edges, and this loader around nodes; pass it to "
            "dx.DataLoader or dx.DistEdgeDataLoader"
        )
    if not isinstance(sampler, BlockSampler):
        raise ConfigError(
            f"{type(sampler).__qualname__} does not make blocks for a loader of nodes; {_WORKS}"
        )
    plan = SamplePlan(
        fanouts=None,
        node_feats=_names(sampler.prefetch_node_feats, "prefetch_node_feats"),
        labels=_names(sampler.prefetch_labels, "prefetch_labels"),
        edge_feats=_names(sampler.prefetch_edge_feats, "prefetch_edge_feats"),
    )
    if not _is_stock(sampler):
        return plan
    if sampler.edge_dir != "in":
        raise ConfigError(
            f"edge_dir={sampler.edge_dir!r} needs the out-edges, and a partition holds the in-edges of its "
            "nodes; use edge_dir='in' on the reversed graph (dgl.reverse) instead"
        )
    return replace(
        plan, fanouts=_fanouts(sampler.fanouts), replace=bool(sampler.replace), weights=sampler.prob
    )


def _is_stock(sampler: BlockSampler) -> bool:
    """Whether the sampler makes its blocks with DGL's own code, so that ours can take its place."""
    kind = type(sampler)
    return (
        isinstance(sampler, NeighborSampler)
        and kind.sample_blocks is NeighborSampler.sample_blocks
        and kind.sample is BlockSampler.sample
        and kind.assign_lazy_features is BlockSampler.assign_lazy_features
    )


def _fanouts(fanouts: object) -> tuple[Fanout, ...]:
    if not isinstance(fanouts, (list, tuple, np.ndarray)) or len(fanouts) == 0:
        raise ConfigError(f"fanouts is {fanouts!r}; give one number per layer, e.g. [15, 10, 5]")
    read: list[Fanout] = []
    for layer, fanout in enumerate(fanouts):
        where = f"fanouts[{layer}]"
        if isinstance(fanout, Mapping):
            read.append({etype: _number(number, f"{where}[{etype!r}]") for etype, number in fanout.items()})
        else:
            read.append(_number(fanout, where))
    return tuple(read)


def _number(fanout: Any, where: str) -> int:
    whole = isinstance(fanout, (int, np.integer)) and not isinstance(fanout, bool)
    if not whole or not -1 <= fanout < 1 << 63:
        raise ConfigError(f"{where} is {fanout!r}; give a number of in-edges, 0 or more, or -1 for all")
    return int(fanout)


def _names(asked: object, option: str) -> Names:
    """Column names out of a list of names or DGL's {type: list of names}."""
    if not asked:
        return ()
    if isinstance(asked, Mapping):
        return {
            kind: _listed([names] if isinstance(names, str) else names, f"{option}[{kind!r}]")
            for kind, names in asked.items()
        }
    return _listed(asked, option)


def _listed(asked: object, option: str) -> tuple[str, ...]:
    if isinstance(asked, str):
        raise ConfigError(f"{option} is the string {asked!r}; give a list: [{asked!r}]")
    if not isinstance(asked, (list, tuple)) or not all(isinstance(name, str) for name in asked):
        raise ConfigError(f"{option} is {asked!r}; give a list of column names")
    return tuple(asked)
