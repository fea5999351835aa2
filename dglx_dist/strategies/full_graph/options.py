"""Options of the full-graph strategies and their loaders."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, final, get_args

import numpy as np
import torch
from dgl.dataloading import NeighborSampler

from dglx_dist.comm.collectives import check_equal, run_on_all_ranks
from dglx_dist.data.storage.files import read_size
from dglx_dist.dataloading.feature_fetch import Columns
from dglx_dist.dataloading.row_buffers import Precision
from dglx_dist.dataloading.sampler_spec import Fanout, SamplePlan, find_columns, read_sampler
from dglx_dist.dataloading.step_loader import read_items, read_options, seed_of
from dglx_dist.errors import ConfigError
from dglx_dist.records import Array
from dglx_dist.strategies.base import check_options
from dglx_dist.strategies.full_graph.expansion import (
    AUTO,
    Composition,
    EasOptions,
    check_composition,
    check_split,
    read_eas_options,
)
from dglx_dist.strategies.full_graph.plan_builder import check_one_type

if TYPE_CHECKING:
    from dglx_dist.graph.dist_graph import DistGraph


BUCKET_BYTES = 4 * 2**20

COMMON: Mapping[str, type] = {"use_pp": bool, "bucket_bytes": int}
"""Options of every full-graph strategy."""
EXTERNAL: Mapping[str, type] = {
    "external_hops": int,
    "external_fanout": int,
    "external_policy": str,
    "resample_every": int,
}
"""Options of expansion-aware sampling."""
PRELOADING: Mapping[str, type] = {**COMMON, **EXTERNAL, "hops": int, "split": str}
"""Options of shared_preload."""


@final
@dataclass(frozen=True, kw_only=True)
class FullGraphOptions:
    """Options of full_graph and shared_preload.

    Raises:
        ConfigError: a value is invalid.
    """

    hops: int | None = None
    """k: number of layers that a server computes alone (docs/strategies/shared_preload.md); None: all."""
    use_pp: bool = True
    """Whether halo features are fetched once and kept, or exchanged in each epoch."""
    split: str = AUTO
    """Partitioner that splits the rows of a server among its ranks."""
    eas: EasOptions | None = None
    """Expansion-aware sampling; None: the full neighbourhood."""
    bucket_bytes: int = BUCKET_BYTES
    """Gradients of parameters that are sent together."""

    def __post_init__(self) -> None:
        if self.bucket_bytes < 1:
            raise ConfigError(f"option bucket_bytes={self.bucket_bytes} must be at least 1")
        if self.hops is not None and self.hops < 0:
            raise ConfigError(
                f"option hops={self.hops} must be at least 0: it is the number of layers, from the first one "
                "on, that a server computes alone; 0 is full_graph, and the default is all layers"
            )
        if self.eas is not None and self.hops is not None:
            raise ConfigError(
                f"option hops={self.hops} means that layers above exchange rows with other servers, but with "
                f"external_hops={self.eas.hops} none does; leave one of them out"
            )
        check_split(self.split)


def read_full_graph_options(
    strategy: str, options: Mapping[str, object], known: Mapping[str, type], **fixed: Any
) -> FullGraphOptions:
    """Check and return ``options`` of the types ``known``; ``fixed`` has fields set by the strategy.

    Raises:
        ConfigError: an option is unknown, has another type, or has an invalid value.
    """
    options = check_options(strategy, options, known)
    external: dict[str, Any] = {name: value for name, value in options.items() if name in EXTERNAL}
    others: dict[str, Any] = {name: value for name, value in options.items() if name not in EXTERNAL}
    eas = read_eas_options(**{"external_hops": None, "external_fanout": None, **external})
    return FullGraphOptions(**others, **fixed, eas=eas)


def hops_of(options: FullGraphOptions, num_layers: int) -> int:
    if options.hops is None:
        return num_layers
    if options.hops > num_layers:
        raise ConfigError(
            f"option hops={options.hops}, but the sampler has {num_layers} layers: give at most "
            f"{num_layers}, or leave it out to use all layers"
        )
    return options.hops


Keep: TypeAlias = Literal["disk", "rebuild"]

_COOPERATIVE_ONLY: Mapping[str, type] = {
    "batches": int,
    "memory": str,
    "composition": str,
    "keep": str,
    "external_inner": str,
}
COOPERATIVE: Mapping[str, type] = {**COMMON, **EXTERNAL, **_COOPERATIVE_ONLY, "split": str}


@final
@dataclass(frozen=True, kw_only=True)
class CooperativeOptions:
    """Options of cooperative.

    Raises:
        ConfigError: a value is invalid.
    """

    batches: int = 1
    """R: cooperative batches per epoch; 1 is shared_preload. 0: as few as ``memory`` allows."""
    memory: int = 0
    """Memory limit of a rank for training, in bytes; 0: not given."""
    composition: Composition = "random"
    keep: Keep = "disk"
    """Whether plans and fetched rows are stored beside the dataset, or made and fetched again in each epoch.
    No effect if epochs have different batches."""
    eas: EasOptions | None = None
    split: str = "auto"
    use_pp: bool = True
    """As for full_graph; no effect with several batches."""
    bucket_bytes: int = BUCKET_BYTES
    """Gradients of parameters that are sent together."""

    def __post_init__(self) -> None:
        if self.batches < 0 or (self.batches == 0) != (self.memory > 0):
            raise ConfigError(
                f"options batches={self.batches} and memory={self.memory}: give the number of cooperative "
                "batches per epoch, at least 1, or the memory limit of a rank ('4GB'), and not both"
            )
        check_composition(self.composition)
        if self.keep not in get_args(Keep):
            raise ConfigError(f"option keep={self.keep!r} must be {' or '.join(map(repr, get_args(Keep)))}")


def read_cooperative_options(strategy: str, options: Mapping[str, object]) -> CooperativeOptions:
    """Check and return the options of cooperative; see :func:`read_full_graph_options`."""
    options = check_options(strategy, options, COOPERATIVE)
    read = read_full_graph_options(
        strategy,
        {name: value for name, value in options.items() if name not in _COOPERATIVE_ONLY},
        COOPERATIVE,
    )
    own = {name: options[name] for name in ("batches", "composition", "keep") if name in options}
    granted = read_size(str(options["memory"])) if "memory" in options else 0
    if granted:
        own = {"batches": 0, **own}
    return CooperativeOptions(
        **own,
        memory=granted,
        eas=_with_inner(read.eas, options.get("external_inner")),
        split=read.split,
        use_pp=read.use_pp,
        bucket_bytes=read.bucket_bytes,
    )


def _with_inner(eas: EasOptions | None, inner: object) -> EasOptions | None:
    if inner is None:
        return eas
    if eas is None:
        raise ConfigError(
            f"option external_inner={inner!r} belongs to expansion-aware sampling; give external_hops=1 and "
            "external_fanout=15 with it"
        )
    return replace(eas, inner=inner)  # type: ignore[arg-type]  # checked by EasOptions


_BATCHES_IN_USE = 2
"""Batches besides those made ahead: one held by the training loop, and one by its backward pass."""

_MINI_BATCH_OPTIONS = ("batch_size", "shuffle", "drop_last")
"""Loader options without effect on full-graph training."""


@final
@dataclass(frozen=True, kw_only=True)
class LoaderRequest:
    """Checked arguments of a full-graph loader."""

    seeds: Array
    """(B,) int64 distinct ids given by this rank; may overlap with those of other ranks."""
    num_layers: int
    """L >= 1, equal on all ranks."""
    columns: Columns
    """Columns of the blocks."""
    seed: int
    """Of all random numbers, equal on all ranks."""
    depth: int
    """Batches made ahead if an epoch has several."""
    device: torch.device
    """Device of the blocks."""


def read_request(
    strategy: str, g: DistGraph, indices: Any, sampler: Any, loader_options: Mapping[str, Any]
) -> LoaderRequest:
    """Check the arguments of a loader; every rank must call it.

    Full-graph training uses all seeds and all neighbours, so rank 0 warns of a batch size and of fan-outs.

    Args:
        strategy: Name for messages.
        g: A graph of one node and one edge type.
        indices: This rank's seeds, as for ``dglx_dist.DataLoader``.
        sampler: Of ``dgl.dataloading``; gives the number of layers and the columns to prefetch.
        loader_options: As for ``dglx_dist.DataLoader``.

    Raises:
        ConfigError: on all ranks: there are several types, a column does not exist, the sampler or an option
            is not supported, or the arguments differ between ranks.
        IndexError: a seed is no node; ConfigError on the other ranks.
    """
    given = dict(loader_options)
    idle = {name: given.pop(name) for name in _MINI_BATCH_OPTIONS if name in given}
    request, fanouts = run_on_all_ranks(
        g.session, lambda: _read(strategy, g, indices, sampler, given), ConfigError
    )
    columns = request.columns
    arguments = (
        f"{request.num_layers} layers, seed={request.seed}, depth={request.depth}, "
        f"inputs={columns.inputs}, targets={columns.targets}, edges={columns.edges}"
    )
    check_equal(g.session, "a loader", arguments)
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
            f"{strategy} takes all neighbours of all seeds, so there is no effect of {' and '.join(idle)}; "
            "strategy='data_parallel' samples mini-batches",
            stacklevel=5,
        )


def _read(
    strategy: str, g: DistGraph, indices: Any, sampler: Any, given: dict[str, Any]
) -> tuple[LoaderRequest, Sequence[Fanout]]:
    check_one_type(strategy, g)
    options = read_options(given)
    if options.exclude is not None:
        raise ConfigError(
            f"exclude= removes edges from mini-batches, but {strategy} trains on the whole graph; partition "
            "a graph without these edges"
        )
    plan = read_sampler(sampler)
    fanouts = _fanouts(strategy, sampler, plan)
    seeds = read_items(indices, {ntype: g.num_nodes(ntype) for ntype in g.ntypes}, "node")
    (ids,) = seeds.ids.values()
    request = LoaderRequest(
        seeds=np.asarray(ids, np.int64),
        num_layers=len(fanouts),
        columns=find_columns(g, plan, Precision(options.feature_dtype, options.depth + _BATCHES_IN_USE)),
        seed=seed_of(options, g.session),
        depth=options.depth,
        device=torch.device(g.session.device if options.device is None else options.device),
    )
    return request, fanouts


def _fanouts(strategy: str, sampler: object, plan: SamplePlan) -> Sequence[Fanout]:
    """Return one fan-out per layer, or raise ConfigError if the sampler selects edges by its own rule."""
    if plan.fanouts is None:
        raise ConfigError(
            f"{type(sampler).__qualname__} makes blocks by its own code, but {strategy} takes all neighbours "
            "of all seeds; give dgl.dataloading.MultiLayerFullNeighborSampler(number of layers) or "
            f"{NeighborSampler.__name__}, or use strategy='data_parallel'"
        )
    if plan.weights is not None:
        raise ConfigError(
            f"the sampler draws edges by {plan.weights!r}, but {strategy} takes all of them; leave prob= and "
            "mask= out, or use strategy='data_parallel'"
        )
    return plan.fanouts


def _numbers(fanout: Fanout) -> list[int]:
    return list(fanout.values()) if isinstance(fanout, Mapping) else [fanout]
