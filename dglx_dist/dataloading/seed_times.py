"""Reads the seed times for a loader, and the rule by which trees are drawn."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
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
    """Return a loader's tree rule and time columns, or None if seeds have no trees.

    Raises ConfigError if the options do not fit.
    """
    temporal = plan.temporal
    if temporal is None and not options.disjoint:
        return None
    names_by_type = plan.node_feats
    if not isinstance(names_by_type, Mapping):
        names_by_type = {"": names_by_type}
    for name in chain.from_iterable(names_by_type.values()):
        if name in (SEED_ID, TIME):
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
    window = temporal.window
    if window is not None and columns.dtype == "int64" and window != int(window):
        raise ConfigError(f"window={window}, but times are integers. Use a whole number.")
    takes_last = temporal.strategy == "last"
    return TreeRule(takes_last=takes_last, window=window, dtype=columns.dtype), columns


def read_timed_items(
    g: DistGraph, indices: Any, plan: SamplePlan, options: LoaderOptions, item: Literal["node", "edge"]
) -> Items[Any]:
    """Return a loader's nodes or edges, with their time keys if the sampler needs times.

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
    seed_time: Any = options.seed_time
    if seed_time is None:
        seed_time = temporal.node_time if item == "node" else temporal.edge_time
    if isinstance(seed_time, Mapping) and item == "edge":
        seed_time = {g.to_canonical_etype(key): times for key, times in seed_time.items()}

    items = read_items(indices, counts, item, is_distinct=False)
    times = {}
    for type_name, ids in items.ids.items():
        type_time = seed_time.get(type_name) if isinstance(seed_time, Mapping) else seed_time
        keys = _read_keys(g, type_name, ids, type_time, dtype, item)
        order = np.lexsort((keys, ids))
        is_repeated = (np.diff(ids[order]) == 0) & (np.diff(keys[order]) == 0)
        if is_repeated.any():
            raise ConfigError(
                f"indices of type {type_name!r} contain a {item} more than once at one time, but "
                f"an epoch uses each pair of {item} and time once. Pass distinct pairs."
            )
        times[type_name] = keys
    return Items(ids=items.ids, times=times)


def _read_keys(
    g: DistGraph, type_name: Any, ids: Array, seed_time: Any, dtype: TimeDtype, item: Literal["node", "edge"]
) -> Array:
    """Return (n,) time keys for the (n,) ``ids``, which have the same type.

    ``seed_time`` is a column name, a time for each id, or one time for all ids. Raises ConfigError if it is
    none of these, or an id has no time.
    """
    if not len(ids):
        return np.empty(0, np.int64)
    data = (g.nodes if item == "node" else g.edges)[type_name].data
    problem = ""
    if seed_time is None:
        problem = "are not named"
    elif isinstance(seed_time, str) and seed_time not in data:
        problem = f"have no column {seed_time!r}"
    if problem:
        raise ConfigError(
            f"times of the seed {item}s {type_name!r} {problem} (known: "
            f"{', '.join(data) or 'none'}). Pass the loader seed_time=: one time per {item}, "
            "a number for all, or the name of a column."
        )

    if isinstance(seed_time, str):
        times = view_as_numpy(data[seed_time][torch.from_numpy(ids)])
    elif np.ndim(seed_time):
        times = np.asarray(as_array(seed_time))
    else:
        times = np.full(len(ids), seed_time)

    allowed_kinds = "iu" if dtype == "int64" else "iuf"
    # Large uint64 values do not fit any time dtype.
    is_number = times.dtype.kind in allowed_kinds and times.dtype != np.uint64
    if times.shape != (len(ids),) or not is_number:
        raise ConfigError(
            f"seed_time of {type_name!r} has shape {times.shape} and dtype {times.dtype}, but "
            f"there are {len(ids)} {item}s and the times of the graph are {dtype}. Pass one "
            f"{dtype} number per {item}."
        )

    keys = to_keys(times.astype(dtype))
    if (keys == NEVER).any():
        position = int(np.argmax(keys == NEVER))
        raise ConfigError(
            f"the {item} {ids[position]} of type {type_name!r} has no time ({times[position]}). "
            "Leave it out of the seeds, or pass seed_time=."
        )
    return keys
