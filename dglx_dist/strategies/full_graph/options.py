"""The options of full-graph training, read and checked."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, final, get_args

import numpy as np
import torch
from dgl.dataloading import NeighborSampler

from dglx_dist.data.storage.files import read_size
from dglx_dist.dataloading.feature_fetch import Columns
from dglx_dist.dataloading.loader import check_alike
from dglx_dist.dataloading.row_buffers import Precision
from dglx_dist.dataloading.sampler_spec import Fanout, SamplePlan, find_columns, read_sampler
from dglx_dist.dataloading.step_loader import read_items, read_options, seed_of
from dglx_dist.errors import ConfigError
from dglx_dist.graph.opening import together
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
"""What every strategy of full-graph training knows."""
EXTERNAL: Mapping[str, type] = {
    "external_hops": int,
    "external_fanout": int,
    "external_policy": str,
    "resample_every": int,
}
"""Of expansion-aware sampling."""
PRELOADING: Mapping[str, type] = {**COMMON, **EXTERNAL, "hops": int, "split": str}
"""What those know that preload the neighbourhood of a server."""


@final
@dataclass(frozen=True, kw_only=True)
class FullGraphOptions:
    """What the user said of what is exchanged between ranks.

    Raises:
        ConfigError: a value cannot be honoured.
    """

    hops: int | None = None
    """k: layers that a server computes without others (algorithms 3.2); None: all of them."""
    use_pp: bool = True
    """Whether the features of the halo are kept from the start on, or sent anew in each epoch."""
    split: str = AUTO
    """The partitioner that gives the rows of a server to its ranks."""
    eas: EasOptions | None = None
    """How far a server reaches into the others, where it is not the whole neighbourhood."""
    bucket_bytes: int = BUCKET_BYTES
    """Gradients of parameters that are sent together."""

    def __post_init__(self) -> None:
        if self.bucket_bytes < 1:
            raise ConfigError(f"option bucket_bytes={self.bucket_bytes} must be at least 1")
        if self.hops is not None and self.hops < 0:
            raise ConfigError(
                f"option hops={self.hops} must be at least 0: it is the number of layers, from the first one "
                "on, that a server computes without others; 0 is full_graph, and left out it is all layers"
            )
        if self.eas is not None and self.hops is not None:
            raise ConfigError(
                f"option hops={self.hops} says that layers above exchange rows with other servers, and with "
                f"external_hops={self.eas.hops} none does; leave one of them out"
            )
        check_split(self.split)


def read_full_graph_options(
    strategy: str, options: Mapping[str, object], known: Mapping[str, type], **fixed: Any
) -> FullGraphOptions:
    """Return the options of the session.

    Args:
        strategy: Name for messages.
        options: What the user gave.
        known: Option name to the type of its value.
        fixed: Fields that the strategy sets itself.

    Raises:
        ConfigError: one is unknown, of another type, or has a value that cannot be honoured.
    """
    check_options(strategy, options, known)
    external: dict[str, Any] = {name: value for name, value in options.items() if name in EXTERNAL}
    others: dict[str, Any] = {name: value for name, value in options.items() if name not in EXTERNAL}
    asked = {"external_hops": None, "external_fanout": None, **external}
    return FullGraphOptions(**others, **fixed, eas=read_eas_options(**asked))


def hops_of(options: FullGraphOptions, num_layers: int) -> int:
    """Return how many of ``num_layers`` layers are computed without other servers.

    Raises:
        ConfigError: there are not so many.
    """
    if options.hops is None:
        return num_layers
    if options.hops > num_layers:
        raise ConfigError(
            f"option hops={options.hops}, and the sampler has {num_layers} layers: give at most "
            f"{num_layers}, or leave it out, which is all of them"
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
    """What the user said.

    Raises:
        ConfigError: a value cannot be honoured.
    """

    batches: int = 1
    """R: co-batches of an epoch; 1 is shared_preload. 0: as few as ``memory`` allows."""
    memory: int = 0
    """Bytes that a rank may need for training; 0: nobody said."""
    composition: Composition = "random"
    keep: Keep = "disk"
    """Whether plans and what is fetched for them are kept beside the dataset, or made and fetched again in
    each epoch. Of no meaning where all epochs have other co-batches."""
    eas: EasOptions | None = None
    split: str = "auto"
    use_pp: bool = True
    """Of use with one co-batch only; see ``full_graph``."""
    bucket_bytes: int = BUCKET_BYTES
    """Gradients of parameters that are sent together."""

    def __post_init__(self) -> None:
        """Check the values."""
        if self.batches < 0 or (self.batches == 0) != (self.memory > 0):
            raise ConfigError(
                f"options batches={self.batches} and memory={self.memory}: give the number of co-batches of "
                "an epoch, at least 1, or the memory that a rank may need ('4GB'), and not both"
            )
        check_composition(self.composition)
        if self.keep not in get_args(Keep):
            raise ConfigError(f"option keep={self.keep!r} must be {' or '.join(map(repr, get_args(Keep)))}")


def read_cooperative_options(strategy: str, options: Mapping[str, object]) -> CooperativeOptions:
    """Return the options of the session.

    Raises:
        ConfigError: one is unknown, of another type, or has a value that cannot be honoured.
    """
    memory = options.get("memory")
    if isinstance(memory, int) and not isinstance(memory, bool):
        # The command line reads memory=1000 as a number.
        options = {**options, "memory": str(memory)}
    check_options(strategy, options, COOPERATIVE)
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
        **own,  # type: ignore[arg-type]  # checked above
        memory=granted,
        eas=_with_inner(read.eas, options.get("external_inner")),
        split=read.split,
        use_pp=read.use_pp,
        bucket_bytes=read.bucket_bytes,
    )


def _with_inner(eas: EasOptions | None, inner: object) -> EasOptions | None:
    """Return ``eas`` with what the expansion starts from."""
    if inner is None:
        return eas
    if eas is None:
        raise ConfigError(
            f"option external_inner={inner!r} belongs to expansion-aware sampling; give external_hops=1 and "
            "external_fanout=15 with it"
        )
    return replace(eas, inner=inner)  # type: ignore[arg-type]  # checked by EasOptions


_BATCHES_IN_USE = 2
"""Batches beside those made ahead: the one the training loop holds, and the one its backward pass holds."""

_MINI_BATCH_OPTIONS = ("batch_size", "shuffle", "drop_last")
"""Options of a loader that have no meaning here."""


@final
@dataclass(frozen=True, kw_only=True)
class LoaderRequest:
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
) -> LoaderRequest:
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
    idle = {name: given.pop(name) for name in _MINI_BATCH_OPTIONS if name in given}
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
) -> tuple[LoaderRequest, Sequence[Fanout]]:
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
