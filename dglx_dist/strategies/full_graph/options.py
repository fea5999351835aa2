"""Options of the full-graph strategies and their loaders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, final, get_args

import numpy as np
import torch
from dgl.dataloading import NeighborSampler

from dglx_dist.comm.codec import WireDtype
from dglx_dist.comm.collectives import check_equal, run_on_all_ranks
from dglx_dist.comm.devices import resolve_device
from dglx_dist.comm.session import warn_user
from dglx_dist.dataloading.feature_fetch import Columns, RowMemory
from dglx_dist.dataloading.sampler_spec import Fanout, find_columns, read_sampler
from dglx_dist.dataloading.step_loader import read_items, read_loader_options, resolve_seed
from dglx_dist.errors import ConfigError
from dglx_dist.options import Check, at_least, between, check_ranges, one_of, option
from dglx_dist.records import Array
from dglx_dist.strategies.base import check_one_type
from dglx_dist.strategies.full_graph.expansion import ALL, Composition, EasOptions, EasPolicy, Inner

if TYPE_CHECKING:
    from dglx_dist.graph.dist_graph import DistGraph


Aggregate: TypeAlias = Literal["sources", "cover"]

COMMON = ("use_pp", "bucket_bytes", "wire_dtype")
"""Options of every full-graph strategy."""
EXCHANGING = (*COMMON, "aggregate", "staleness")
"""Options of full_graph."""
PRELOADING = (*COMMON, "aggregate", "hops", "external_hops", "external_fanout", "external_policy")
"""Options of shared_preload."""
COOPERATIVE = (
    *(name for name in PRELOADING if name not in ("hops", "aggregate")),
    *("external_inner", "batches", "composition"),
)

_FANOUT = Check(
    lambda value: value == ALL or value >= 1,
    "at least 1 (15 in the paper), or -1 for all; for no external nodes give external_hops=0",
)


@final
@dataclass(frozen=True, kw_only=True)
class FullGraphOptions:
    """Options of full_graph, shared_preload and cooperative, each of which takes some of them.

    Raises:
        ConfigError: a value is invalid, or does not fit another one.
    """

    use_pp: bool = True
    """Whether halo features are fetched once and kept, or exchanged in each epoch; no effect with several
    batches."""
    bucket_bytes: int = option(4 * 2**20, "Parameter gradients that are sent together.", check=at_least(1))
    aggregate: Aggregate = option(
        "sources",
        "What is sent for sums and means over in-edges: source rows, or the fewest rows, some of which are "
        "partial sums (cover).",
    )
    staleness: int = option(0, "Epochs that halo rows and their gradients are late.", check=between(0, 1))
    wire_dtype: WireDtype = option(
        "same",
        "What activations and their gradients are sent as: the same, or fewer bits, rounded at random "
        "without bias, which does not train exactly.",
    )
    hops: int | None = option(
        None,
        "k: layers, from the first one on, that a server computes alone; 0: full_graph, None: all.",
        check=at_least(0),
    )
    external_hops: int | None = option(None, "m of expansion-aware sampling.", check=at_least(0))
    external_fanout: int | None = option(None, "k of expansion-aware sampling.", check=_FANOUT)
    external_policy: EasPolicy | None = option(
        None, "How external nodes are chosen.", check=one_of(*get_args(EasPolicy))
    )
    external_inner: Inner = option("server", "What the expansion starts from.")
    batches: int = option(1, "R: cooperative batches per epoch.", check=at_least(1))
    composition: Composition = option("random", "Which seeds are in one batch.")

    def __post_init__(self) -> None:
        check_ranges(self, "option {name}={value!r}")
        if self.staleness and self.wire_dtype != "same":
            raise ConfigError(
                f"options staleness=1 and wire_dtype={self.wire_dtype!r}: late rows are sent in their own "
                "type; leave one of the two out"
            )
        if self.external_fanout is None and self.external_hops:
            raise ConfigError(
                f"external_hops={self.external_hops} without external_fanout does not say how many external "
                "neighbours a node may take; give external_fanout=15 (the paper's value) or -1 for all"
            )
        if self.eas is None and self.external_inner != "server":
            raise ConfigError(
                f"option external_inner={self.external_inner!r} belongs to expansion-aware sampling; give "
                "external_hops=1 and external_fanout=15 with it"
            )
        if self.eas is not None and self.hops is not None:
            raise ConfigError(
                f"option hops={self.hops} means that layers above exchange rows with other servers, but with "
                f"external_hops={self.eas.hops} none does; leave one of them out"
            )

    @property
    def eas(self) -> EasOptions | None:
        """Expansion-aware sampling; None: the full neighbourhood. By default one hop of fan-out 15."""
        if (self.external_hops, self.external_fanout, self.external_policy) == (None, None, None):
            return None
        return EasOptions(
            hops=1 if self.external_hops is None else self.external_hops,
            fanout=15 if self.external_fanout is None else self.external_fanout,
            policy=self.external_policy or "uniform_external",
            inner=self.external_inner,
        )

    def resolve_hops(self, num_layers: int) -> int:
        if self.hops is not None and self.hops > num_layers:
            raise ConfigError(
                f"option hops={self.hops}, but the sampler has {num_layers} layers: give at most "
                f"{num_layers}, or leave it out to use all layers"
            )
        return num_layers if self.hops is None else self.hops


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
    wire: WireDtype = "same"
    """Form of exchanged rows."""


def read_request(
    strategy: str, g: DistGraph, indices: Any, sampler: Any, loader_options: Mapping[str, Any]
) -> LoaderRequest:
    """Check the arguments of a loader of the strategy's name; every rank must call it.

    Full-graph training uses all seeds and all neighbours, so rank 0 warns of a batch size and of fan-outs.

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
    numbers = [list(one.values()) if isinstance(one, Mapping) else [one] for one in fanouts]
    if any(number != ALL for layer in numbers for number in layer):
        idle.append(f"the fan-outs {list(fanouts)} (give -1 for each layer)")
    if batch_size is not None:
        idle.append(f"batch_size={batch_size} (leave it out)")
    if idle:
        warn_user(
            f"{strategy} takes all neighbours of all seeds, so there is no effect of {' and '.join(idle)}; "
            "strategy='data_parallel' samples mini-batches"
        )


def _read(
    strategy: str, g: DistGraph, indices: Any, sampler: Any, given: dict[str, Any]
) -> tuple[LoaderRequest, Sequence[Fanout]]:
    check_one_type(strategy, g)
    options = read_loader_options(given)
    if options.exclude is not None:
        raise ConfigError(
            f"exclude= removes edges from mini-batches, but {strategy} trains on the whole graph; partition "
            "a graph without these edges"
        )
    plan = read_sampler(sampler)
    if plan.fanouts is None:
        raise ConfigError(
            f"{type(sampler).__qualname__} makes blocks by its own code, but {strategy} takes all neighbours "
            "of all seeds; give dgl.dataloading.MultiLayerFullNeighborSampler(number of layers) or "
            f"{NeighborSampler.__name__}, or use strategy='data_parallel'"
        )
    plan.check_takes_all(strategy)
    if not plan.fanouts:
        raise ConfigError("the sampler has 0 layers; give it one for each convolution of the model")
    (ids,) = read_items(indices, {ntype: g.num_nodes(ntype) for ntype in g.ntypes}, "node").ids.values()
    request = LoaderRequest(
        seeds=np.asarray(ids, np.int64),
        num_layers=len(plan.fanouts),
        columns=find_columns(g, plan, RowMemory(options.depth + _BATCHES_IN_USE, options.feature_dtype)),
        seed=resolve_seed(options, g.session),
        depth=options.depth,
        device=resolve_device(options.device, g.session.device),
    )
    return request, plan.fanouts
