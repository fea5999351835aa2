"""Reads the times of the seeds of a loader, and the rule by which their trees are drawn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from dglx_dist.data.times import NEVER, TimeDtype, to_keys
from dglx_dist.dataloading.sampler_spec import SamplePlan
from dglx_dist.dataloading.step_loader import Items, LoaderOptions, read_items
from dglx_dist.dataloading.trees import TreeRule
from dglx_dist.errors import ConfigError
from dglx_dist.graph.partition_book import as_array
from dglx_dist.graph.row_kernels import view_as_numpy
from dglx_dist.graph.time_order import TimeColumns, find_time_columns
from dglx_dist.records import SEED_ID, TIME, Array

if TYPE_CHECKING:
    from dglx_dist.graph.dist_graph import DistGraph


def read_tree_rule(
    g: DistGraph, plan: SamplePlan, options: LoaderOptions
) -> tuple[TreeRule, TimeColumns | None] | None:
    """Return the rule of a loader with a tree for each seed, and its columns of times. None: no trees.

    Raises ConfigError if the options do not fit.
    """
    temporal = plan.temporal
    if temporal is None and not options.disjoint:
        return None
    by_type = plan.node_feats.values() if isinstance(plan.node_feats, Mapping) else [plan.node_feats]
    for name in {SEED_ID, TIME} & {name for names in by_type for name in names}:
        raise ConfigError(
            f"prefetch_node_feats names {name!r}, which blocks with a tree for each seed have "
            "already. Rename the column, or read it from the graph by the ids of the nodes."
        )

    if temporal is None:
        if plan.fanouts is None or plan.weights is not None or plan.by_source is not None:
            raise ConfigError(
                "disjoint=True draws uniformly for each tree. Use "
                "dgl.dataloading.NeighborSampler without prob= and mask=, or leave disjoint= "
                "out."
            )
        return TreeRule(replace=plan.replace), None

    columns = find_time_columns(g.dataset.manifest, temporal.edge_time, temporal.node_time)
    if columns.dtype == "int64" and temporal.window is not None and temporal.window != int(temporal.window):
        raise ConfigError(f"window={temporal.window}, but times are integers. Use a whole number.")
    takes_last = temporal.strategy == "last"
    return TreeRule(takes_last=takes_last, window=temporal.window, dtype=columns.dtype), columns


def read_timed_items(
    g: DistGraph, indices: Any, plan: SamplePlan, options: LoaderOptions, item: Literal["node", "edge"]
) -> Items[Any]:
    """Return the nodes or edges of a loader, with the keys of their times if the sampler needs times.

    Raises ConfigError if a time is missing or has the wrong dtype, or an item occurs twice at one time, and
    IndexError if an item does not exist.
    """
    counts: dict[Any, int] = {kind: g.num_nodes(kind) for kind in g.ntypes}
    if item == "edge":
        counts = {etype: g.num_edges(etype) for etype in g.canonical_etypes}
    temporal = plan.temporal
    if temporal is None:
        if options.seed_time is not None:
            raise ConfigError(
                "seed_time= needs dx.TemporalNeighborSampler. Use this sampler, or leave it out."
            )
        return read_items(indices, counts, item)

    dtype = find_time_columns(g.dataset.manifest, temporal.edge_time, temporal.node_time).dtype
    default = temporal.node_time if item == "node" else temporal.edge_time
    seed_time: Any = default if options.seed_time is None else options.seed_time
    if isinstance(seed_time, Mapping) and item == "edge":
        seed_time = {g.to_canonical_etype(key): times for key, times in seed_time.items()}
    items = read_items(indices, counts, item, is_distinct=False)
    times = {}
    for kind, ids in items.ids.items():
        of_kind = seed_time.get(kind) if isinstance(seed_time, Mapping) else seed_time
        keys = times[kind] = _read_keys(g, kind, ids, of_kind, dtype, item)
        order = np.lexsort((keys, ids))
        is_repeated = (np.diff(ids[order]) == 0) & (np.diff(keys[order]) == 0)
        if is_repeated.any():
            raise ConfigError(
                f"indices of type {kind!r} contain a {item} more than once at one time, but "
                f"an epoch uses each pair of {item} and time once. Pass distinct pairs."
            )

    return Items(ids=items.ids, times=times)


def _read_keys(
    g: DistGraph, kind: Any, ids: Array, seed_time: Any, dtype: TimeDtype, item: Literal["node", "edge"]
) -> Array:
    """Return the (n,) keys of the times of the (n,) ``ids`` of one type. ``seed_time`` is a name or times."""
    if not len(ids):
        return np.empty(0, np.int64)
    data = (g.nodes if item == "node" else g.edges)[kind].data
    if seed_time is None or (isinstance(seed_time, str) and seed_time not in data):
        problem = "are not named" if seed_time is None else f"have no column {seed_time!r}"
        raise ConfigError(
            f"times of the seed {item}s {kind!r} {problem} (known: "
            f"{', '.join(data) or 'none'}). Pass the loader seed_time=: one time per {item}, "
            "a number for all, or the name of a column."
        )

    if isinstance(seed_time, str):
        times = view_as_numpy(data[seed_time][torch.from_numpy(ids)])
    else:
        times = np.asarray(as_array(seed_time) if np.ndim(seed_time) else np.full(len(ids), seed_time))

    is_valid = times.dtype.kind in ("iu" if dtype == "int64" else "iuf") and times.dtype != np.uint64
    if times.shape != (len(ids),) or not is_valid:
        raise ConfigError(
            f"seed_time of {kind!r} has shape {times.shape} and dtype {times.dtype}, but "
            f"there are {len(ids)} {item}s and the times of the graph are {dtype}. Pass one "
            f"{dtype} number per {item}."
        )

    keys = to_keys(times.astype(dtype))
    if (keys == NEVER).any():
        position = int(np.argmax(keys == NEVER))
        raise ConfigError(
            f"the {item} {ids[position]} of type {kind!r} has no time ({times[position]}). "
            "Leave it out of the seeds, or pass seed_time=."
        )

    return keys
