"""What a loader of whole graphs was told, in the words of a loader of mini-batches."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from dgl.dataloading import NeighborSampler

from dglx_dist.errors import ConfigError
from dglx_dist.graph.opening import together
from dglx_dist.records import Array
from dglx_dist.sampling.attach import Columns
from dglx_dist.sampling.columns import find_columns
from dglx_dist.sampling.items import read_items
from dglx_dist.sampling.neighbor import Fanout, SamplePlan, read_sampler
from dglx_dist.sampling.opening import check_alike
from dglx_dist.sampling.options import read_options
from dglx_dist.sampling.precision import Precision
from dglx_dist.sampling.stepping import seed_of
from dglx_dist.strategies.granndis.planning import check_one_type

if TYPE_CHECKING:
    from dglx_dist.graph import DistGraph

_ALIVE = 2
"""Batches beside those made ahead: the one the training loop holds, and the one its backward pass holds."""

_OF_MINI_BATCHES = ("batch_size", "shuffle", "drop_last")
"""Options of a loader that have no meaning here."""


@final
@dataclass(frozen=True, kw_only=True)
class Request:
    """What is trained on, and how it is handed over."""

    seeds: Array
    """(B,) int64 distinct ids of this rank; other ranks may have some of them too."""
    num_layers: int
    """L >= 1, equal on all ranks."""
    columns: Columns
    """What is attached to the blocks."""
    seed: int
    """Of everything that is drawn, equal on all ranks."""
    depth: int
    """Batches made ahead, where an epoch has several."""
    device: torch.device
    """Where blocks shall be."""


def read_request(
    strategy: str, g: DistGraph, indices: Any, sampler: Any, loader_options: Mapping[str, Any]
) -> Request:
    """Return what the loader shall do; every rank must call it.

    The batch size has no meaning where all seeds are trained together, and fan-outs have none where every
    neighbour is taken: rank 0 warns of a batch size, and of fan-outs that would draw.

    Args:
        strategy: Name for messages.
        g: A graph of one node and one edge type.
        indices: This rank's seeds, as ``dglx_dist.DataLoader`` takes them.
        sampler: Of ``dgl.dataloading``; its number of layers and what it prefetches count.
        loader_options: What ``dglx_dist.DataLoader`` takes.

    Raises:
        ConfigError: on all ranks: there are several types, a column does not exist, the sampler or an option
            cannot be honoured, or the ranks were given other layers.
        IndexError: a seed is no node; ConfigError on the other ranks.
    """
    given = dict(loader_options)
    idle = {name: given.pop(name) for name in _OF_MINI_BATCHES if name in given}
    request, fanouts = together(g.session, lambda: _read(strategy, g, indices, sampler, given), ConfigError)
    columns = request.columns
    told = (
        f"{request.num_layers} layers, seed={request.seed}, depth={request.depth}, "
        f"inputs={columns.inputs}, targets={columns.targets}, edges={columns.edges}"
    )
    check_alike(g.session, "loaders with", told)
    if g.session.topology.rank == 0:
        _warn_of_idle(strategy, fanouts, idle.get("batch_size"))
    return request


def _warn_of_idle(strategy: str, fanouts: Sequence[Fanout], batch_size: Any) -> None:
    idle = []
    if any(one != -1 for fanout in fanouts for one in _numbers(fanout)):
        idle.append(f"the fan-outs {list(fanouts)} (give -1 for each layer)")
    if batch_size is not None:
        idle.append(f"batch_size={batch_size} (leave it out)")
    if idle:
        warnings.warn(
            f"{strategy} takes all neighbours of whole sets of seeds, so there is no effect of "
            f"{' and '.join(idle)}; strategy='data_parallel' draws mini-batches",
            stacklevel=5,
        )


def _read(
    strategy: str, g: DistGraph, indices: Any, sampler: Any, given: dict[str, Any]
) -> tuple[Request, Sequence[Fanout]]:
    check_one_type(strategy, g)
    options = read_options(given)
    if options.exclude is not None:
        raise ConfigError(
            f"exclude= leaves edges out of mini-batches, and {strategy} trains on the whole graph; partition "
            "a graph without these edges"
        )
    plan = read_sampler(sampler)
    fanouts = _fanouts(strategy, sampler, plan)
    seeds = read_items(indices, {ntype: g.num_nodes(ntype) for ntype in g.ntypes}, "node")
    (ids,) = seeds.ids.values()
    request = Request(
        seeds=np.asarray(ids, np.int64),
        num_layers=len(fanouts),
        columns=find_columns(g, plan, Precision(options.feature_dtype, options.depth + _ALIVE)),
        seed=seed_of(options, g.session),
        depth=options.depth,
        device=torch.device(g.session.device if options.device is None else options.device),
    )
    return request, fanouts


def _fanouts(strategy: str, sampler: object, plan: SamplePlan) -> Sequence[Fanout]:
    """Return one fan-out per layer.

    Raises:
        ConfigError: the sampler chooses edges in a way that the whole graph knows nothing of.
    """
    if plan.fanouts is None:
        raise ConfigError(
            f"{type(sampler).__qualname__} makes blocks by its own code, and {strategy} takes all neighbours "
            "of all seeds; give dgl.dataloading.MultiLayerFullNeighborSampler(number of layers) or "
            f"{NeighborSampler.__name__}, or use strategy='data_parallel'"
        )
    if plan.weights is not None:
        raise ConfigError(
            f"the sampler draws edges by {plan.weights!r}, and {strategy} takes all of them; leave prob= and "
            "mask= out, or use strategy='data_parallel'"
        )
    return plan.fanouts


def _numbers(fanout: Fanout) -> list[int]:
    return list(fanout.values()) if isinstance(fanout, Mapping) else [fanout]
