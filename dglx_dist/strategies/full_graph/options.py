"""Options for the full-graph strategies and their loaders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, final, get_args

import torch
from dgl.dataloading import NeighborSampler

from dglx_dist.comm.codec import WireDtype
from dglx_dist.comm.collectives import check_equal, run_on_all_ranks
from dglx_dist.comm.devices import resolve_device
from dglx_dist.comm.session import warn_user
from dglx_dist.dataloading.feature_fetch import Columns, RowMemory
from dglx_dist.dataloading.sampler_spec import (
    Fanout,
    SamplePlan,
    check_edge_column,
    find_columns,
    read_sampler,
)
from dglx_dist.dataloading.step_loader import read_items, read_loader_options, resolve_seed
from dglx_dist.errors import ConfigError
from dglx_dist.options import Check, at_least, between, check_ranges, one_of, option
from dglx_dist.records import Array
from dglx_dist.strategies.full_graph.expansion import ALL, Composition, EasOptions, EasPolicy, Inner
from dglx_dist.strategies.full_graph.graph_types import unify_nodes

if TYPE_CHECKING:
    from dglx_dist.graph.dist_graph import DistGraph


Aggregate: TypeAlias = Literal["sources", "cover"]

COMMON = ("use_pp", "bucket_bytes", "wire_dtype", "edge_batches_per_step")
"""Options that every full-graph strategy takes."""
EXCHANGING = (*COMMON, "aggregate", "staleness")
"""Options for full_graph."""
PRELOADING = (*COMMON, "aggregate", "hops", "external_hops", "external_fanout", "external_policy")
"""Options for shared_preload."""
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
    """Options of full_graph, shared_preload and cooperative. Each strategy takes some of them.

    Raises ConfigError if a value is invalid, or does not fit another one.
    """

    use_pp: bool = True
    """Whether halo features are fetched once instead of in each epoch. No effect with several batches."""
    bucket_bytes: int = option(4 * 2**20, "Bytes of gradients that are sent together.", check=at_least(1))
    aggregate: Aggregate = option(
        "sources",
        "Rows to send for sums and means over in-edges: source rows (sources), or the fewest rows, some of "
        "which are partial sums (cover).",
    )
    staleness: int = option(0, "Number of epochs that halo rows and gradients are late.", check=between(0, 1))
    wire_dtype: WireDtype = option(
        "same",
        "Type of sent activations and gradients: the same, or one with fewer bits. Values are rounded at "
        "random without bias, so training is not exact.",
    )
    hops: int | None = option(
        None,
        "Number of first layers that a server computes alone. 0 is full_graph, and None means all layers.",
        check=at_least(0),
    )
    external_hops: int | None = option(None, "Rounds of expansion-aware sampling (m).", check=at_least(0))
    external_fanout: int | None = option(None, "Fan-out of expansion-aware sampling (k).", check=_FANOUT)
    external_policy: EasPolicy | None = option(
        None, "How external nodes are chosen.", check=one_of(*get_args(EasPolicy))
    )
    external_inner: Inner = option("server", "Nodes from which the expansion starts.")
    batches: int = option(1, "Number of cooperative batches per epoch.", check=at_least(1))
    composition: Composition = option("random", "How seeds are grouped into batches.")
    edge_batches_per_step: int = option(
        1,
        "Number of batches of edges in a step, which share a pass of the encoder.",
        check=at_least(1),
    )

    def __post_init__(self) -> None:
        check_ranges(self, "option {name}={value!r}")
        if self.staleness and self.wire_dtype != "same":
            raise ConfigError(
                f"options staleness=1 and wire_dtype={self.wire_dtype!r} cannot be combined, because late "
                "rows are sent in their own type; leave one of the two out"
            )

        if self.external_fanout is None and self.external_hops:
            raise ConfigError(
                f"external_hops={self.external_hops} needs external_fanout, the number of external "
                "neighbours that a node may take; give external_fanout=15 (the paper's value) or -1 for all"
            )

        if self.eas is None and self.external_inner != "server":
            raise ConfigError(
                f"option external_inner={self.external_inner!r} needs expansion-aware sampling; leave it "
                "out, or add external_hops=1 and external_fanout=15 (the paper's values)"
            )

        if self.eas is not None and self.hops is not None:
            raise ConfigError(
                f"option hops={self.hops} means that later layers exchange rows with other servers, but with "
                f"external_hops={self.eas.hops} no layer does; leave one of them out"
            )

    @property
    def eas(self) -> EasOptions | None:
        """Options for expansion-aware sampling. None uses all external neighbours."""
        if self.external_hops is None and self.external_fanout is None and self.external_policy is None:
            return None
        defaults = EasOptions()
        return EasOptions(
            hops=defaults.hops if self.external_hops is None else self.external_hops,
            fanout=defaults.fanout if self.external_fanout is None else self.external_fanout,
            policy=self.external_policy or defaults.policy,
            inner=self.external_inner,
        )

    def resolve_hops(self, num_layers: int) -> int:
        if self.hops is not None and self.hops > num_layers:
            raise ConfigError(
                f"option hops={self.hops} is more than the {num_layers} layers of the sampler; give at most "
                f"{num_layers}, or leave it out to use all layers"
            )
        return num_layers if self.hops is None else self.hops


_BATCHES_IN_USE = 2
"""Number of batches in use besides those made ahead: one in the training loop, and one in backward."""

_MINI_BATCH_OPTIONS = ("batch_size", "shuffle", "drop_last")
"""Loader options without effect on full-graph training."""


@final
@dataclass(frozen=True, kw_only=True)
class LoaderRequest:
    """Checked arguments of a full-graph loader."""

    seeds: Array
    """(B,) int64 distinct unified ids on this rank. They may overlap with other ranks' ids."""
    num_layers: int
    """L >= 1, equal on all ranks."""
    columns: Columns
    """Columns that the blocks get."""
    seed: int
    """Random seed, equal on all ranks."""
    depth: int
    """Number of batches to make ahead if an epoch has several."""
    device: torch.device
    """Device for the blocks."""
    mask: str | None = None
    """Column that marks the edges along which messages run. None for all edges."""
    wire: WireDtype = "same"
    """Format for exchanged rows."""


def read_request(
    strategy: str, g: DistGraph, indices: Any, sampler: Any, loader_options: Mapping[str, Any]
) -> LoaderRequest:
    """Check the arguments for a ``strategy`` loader. Every rank must call it.

    Full-graph training uses all seeds and all neighbours, so rank 0 warns about a batch size and fan-outs.

    Raises:
        ConfigError: a column does not exist, the sampler or an option is not supported, or the arguments
            differ between ranks. It is raised on all ranks.
        IndexError: a seed is no node. The other ranks raise ConfigError.
    """
    options = dict(loader_options)
    ignored = {name: options.pop(name) for name in _MINI_BATCH_OPTIONS if name in options}
    request, fanouts = run_on_all_ranks(
        g.session, lambda: _read_arguments(strategy, g, indices, sampler, options), ConfigError
    )
    columns = request.columns
    arguments = (
        f"{request.num_layers} layers, seed={request.seed}, depth={request.depth}, "
        f"inputs={columns.inputs}, targets={columns.targets}, edges={columns.edges}, mask={request.mask}"
    )
    check_equal(g.session, "a loader", arguments)
    if g.session.topology.rank == 0:
        _warn_of_ignored(strategy, fanouts, ignored.get("batch_size"))
    return request


def _warn_of_ignored(strategy: str, fanouts: Sequence[Fanout], batch_size: Any) -> None:
    """Warn the user about arguments that only apply to mini-batches."""
    ignored = []
    for fanout in fanouts:
        sizes = list(fanout.values()) if isinstance(fanout, Mapping) else [fanout]
        if any(size != ALL for size in sizes):
            ignored.append(f"the fan-outs {list(fanouts)} (give -1 for each layer)")
            break
    if batch_size is not None:
        ignored.append(f"batch_size={batch_size} (leave it out)")

    if ignored:
        warn_user(
            f"{strategy} takes all neighbours of all seeds and ignores {' and '.join(ignored)}; "
            "strategy='data_parallel' samples mini-batches"
        )


def _read_arguments(
    strategy: str, g: DistGraph, indices: Any, sampler: Any, loader_options: dict[str, Any]
) -> tuple[LoaderRequest, Sequence[Fanout]]:
    options = read_loader_options(loader_options)
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
    plan.refuse_trees(strategy, options.disjoint or options.seed_time is not None)

    mask = plan.weights if _is_mask(g, plan) else None
    if mask is None:
        plan.check_takes_all(strategy)
    if not plan.fanouts:
        raise ConfigError("the sampler has 0 layers; give it one for each convolution of the model")
    num_nodes = {ntype: g.num_nodes(ntype) for ntype in g.ntypes}
    items = read_items(indices, num_nodes, "node")
    memory = RowMemory(options.depth + _BATCHES_IN_USE, options.feature_dtype)
    request = LoaderRequest(
        seeds=unify_nodes(g, items.ids),
        num_layers=len(plan.fanouts),
        columns=find_columns(g, plan, memory),
        seed=resolve_seed(options, g.session),
        depth=options.depth,
        device=resolve_device(options.device, g.session.device),
        mask=mask,
    )
    return request, plan.fanouts


def _is_mask(g: DistGraph, plan: SamplePlan) -> bool:
    """Return whether the sampler draws by a column that marks edges. Then it takes all marked edges.

    Raises ConfigError if the column exists in some edge types only.
    """
    if plan.weights is None or plan.has_edge_weights:
        return False
    num_masks = 0
    for etype in g.canonical_etypes:
        column = g.edges[etype].data.get(plan.weights)
        if column is not None and column.dtype is torch.bool and column.ndim == 1:
            num_masks += 1
    if num_masks:
        check_edge_column(g, plan.weights)
    return num_masks == len(g.canonical_etypes)
