"""Time orders for a graph's structures, see :mod:`dglx_dist.data.times`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dglx_dist.comm.collectives import run_on_all_ranks
from dglx_dist.data.storage.columns import edge_type_name, safe_name
from dglx_dist.data.storage.manifest import Manifest
from dglx_dist.data.storage.reader import StoredDataset
from dglx_dist.data.times import (
    TimeDtype,
    TimeOrder,
    find_or_make_order,
    find_time_dtype,
    sort_by_time,
    to_keys,
)
from dglx_dist.errors import ConfigError
from dglx_dist.graph.row_kernels import view_as_numpy
from dglx_dist.records import Array, ColumnInfo, EdgeType

if TYPE_CHECKING:
    from dglx_dist.graph.dist_graph import DistGraph

log = logging.getLogger(__name__)

_EDGES_AT_ONCE = 1 << 22
"""Number of edges whose source times are read at once."""


@dataclass(frozen=True, kw_only=True)
class TimeColumns:
    """The columns in a dataset that hold times."""

    edges: Mapping[EdgeType, str]
    """Edge type to its time column. Types without the column are left out."""
    nodes: Mapping[str, str]
    """Node type to its time column. Types without the column are left out."""
    dtype: TimeDtype
    """Dtype in which all times are compared."""


def find_time_columns(manifest: Manifest, edge_time: str | None, node_time: str | None) -> TimeColumns:
    """Find the time columns with the names ``edge_time`` and ``node_time``.

    Raises ConfigError if no type has a named column, a column has no times, or integers and floats are mixed.
    """
    columns: dict[str, Mapping[Any, Mapping[str, ColumnInfo]]] = {
        "edges": manifest.edge_columns,
        "nodes": manifest.node_columns,
    }
    names: dict[str, dict[Any, str]] = {"edges": {}, "nodes": {}}
    dtypes: dict[str, TimeDtype] = {}
    for kind, name in (("edges", edge_time), ("nodes", node_time)):
        if name is None:
            continue
        for key, infos in columns[kind].items():
            if name in infos:
                description = f"the column {name!r} of the {kind} {key}"
                dtypes[description] = find_time_dtype(infos[name].dtype, infos[name].row_shape, description)
                names[kind][key] = name
        if not names[kind]:
            known = sorted({column for infos in columns[kind].values() for column in infos})
            raise ConfigError(
                f"no {kind} of {manifest.name} have the column {name!r} of times (known: "
                f"{', '.join(known) or 'none'}). Name another column, or partition a graph that has it."
            )
    if not dtypes:
        raise ConfigError("edge_time and node_time are both None. Name a column of times.")
    if len(set(dtypes.values())) > 1:
        listed = ", ".join(f"{description} is {dtype}" for description, dtype in dtypes.items())
        raise ConfigError(f"times are integers and floats: {listed}. Store one dtype.")
    edges = {etype: names["edges"][etype] for etype in manifest.edge_types if etype in names["edges"]}
    nodes = {ntype: names["nodes"][ntype] for ntype in manifest.node_types if ntype in names["nodes"]}
    return TimeColumns(edges=edges, nodes=nodes, dtype=next(iter(dtypes.values())))


ReadSourceTimes = Callable[[EdgeType, Array], Array]
"""Function from an edge type and (k,) ids of its sources to their (k,) times."""


def open_part_order(
    dataset: StoredDataset, columns: TimeColumns, etype: EdgeType, part: int, read: ReadSourceTimes | None
) -> TimeOrder:
    """Return the time order for one part's edges, from the dataset's cache if it is there.

    Args:
        columns: Time columns. The type has times for edges, for its sources, or both.
        read: Function that reads source times. It may be None if the type's sources have no times.
    """
    edge_name = columns.edges.get(etype)
    node_name = columns.nodes.get(etype[0])
    stored = dataset.part(part)
    indices = stored.indices(etype)

    def make() -> TimeOrder:
        log.info("sorting the %d edges %s of part %d by time", len(indices), ":".join(etype), part)
        keys = np.full(len(indices), np.iinfo(np.int64).min)
        if edge_name is not None:
            keys = to_keys(np.asarray(stored.edge_data(etype, edge_name)))
        for first in range(0, len(indices) if node_name is not None else 0, _EDGES_AT_ONCE):
            assert read is not None, "times of sources are read from the graph"
            piece = slice(first, first + _EDGES_AT_ONCE)
            source_keys = to_keys(read(etype, indices[piece].astype(np.int64)))
            np.maximum(keys[piece], source_keys, out=keys[piece])
        return sort_by_time(stored.indptr(etype), keys)

    return _open_order(dataset, columns, etype, f"part{part}", len(indices), make)


def _open_order(
    dataset: StoredDataset,
    columns: TimeColumns,
    etype: EdgeType,
    scope: str,
    num_edges: int,
    make: Callable[[], TimeOrder],
) -> TimeOrder:
    names = {"edge_time": columns.edges.get(etype, ""), "node_time": columns.nodes.get(etype[0], "")}
    name = ".".join(safe_name(column) for column in names.values())
    folder = dataset.cache.entry("time", f"{edge_type_name(etype)}-{name}-{scope}")
    return find_or_make_order(folder, num_edges, {**names, "edges": num_edges}, make)


def open_time_orders(g: DistGraph, columns: TimeColumns) -> dict[EdgeType, dict[int, TimeOrder]]:
    """Return the time orders for the shards in this server's memory, by the shard's first node.

    Types without times are left out. The first run sorts the edges. Every rank must call this. Raises
    StorageError on all ranks if a part is missing, or the disk fails, and ConfigError if the program has
    given a column's name to another tensor.
    """
    run_on_all_ranks(g.session, partial(_check_names, g, columns))
    is_first = g.session.topology.local_rank == 0
    orders = {}
    for etype in g.canonical_etypes:
        if etype in columns.edges or etype[0] in columns.nodes:
            open_orders = partial(_open_shard_orders, g, columns, etype)
            # A server's first rank sorts, and the others find the result.
            run_on_all_ranks(g.session, open_orders if is_first else dict)
            orders[etype] = run_on_all_ranks(g.session, open_orders)
    return orders


def _check_names(g: DistGraph, columns: TimeColumns) -> None:
    """Raise ConfigError if this rank has given a time column's name to another tensor."""
    named = []
    for ntype, name in columns.nodes.items():
        named.append((g.nodes[ntype], g.get_node_partition_policy(ntype), name))
    for etype, name in columns.edges.items():
        named.append((g.edges[etype], g.get_edge_partition_policy(etype), name))

    for view, policy, name in named:
        if view.data[name].kvstore_key != policy.key(name):
            raise ConfigError(
                f"the program has assigned another tensor to the column {name!r} of {policy.policy_str}, but "
                "edges are sorted by the times of the dataset. Give the tensor another name, or partition a "
                "graph that has it."
            )


def _open_shard_orders(g: DistGraph, columns: TimeColumns, etype: EdgeType) -> dict[int, TimeOrder]:
    """Return one edge type's time orders by first node, for this server's shards that have edges."""

    def read_source_times(etype: EdgeType, sources: Array) -> Array:
        key = g.nodes[etype[0]].data[columns.nodes[etype[0]]].kvstore_key
        return view_as_numpy(g.kvstore.pull(key, sources, phase="structure"))

    dataset, structure = g.dataset, g.structure(etype)
    open_part = partial(open_part_order, dataset, columns, etype, read=read_source_times)
    if not structure.is_replicated:
        parts = zip(structure.shards, g.placement.local_parts, strict=True)
        return {shard.first_node: open_part(part) for shard, part in parts if len(shard.indices)}
    num_parts = dataset.manifest.num_parts
    if num_parts == 1:
        return {0: open_part(0)}

    def join() -> TimeOrder:
        offsets = dataset.manifest.edge_offsets[etype]
        return _join_orders([open_part(part) for part in range(num_parts)], offsets)

    return {0: _open_order(dataset, columns, etype, "all", structure.num_edges, join)}


def _join_orders(orders: Sequence[TimeOrder], offsets: Array) -> TimeOrder:
    """Concatenate the parts' orders. Edge positions then count through all parts."""
    dtype = np.int32 if offsets[-1] <= np.iinfo(np.int32).max else np.int64

    def shift() -> Iterator[Array]:
        for order, offset in zip(orders, offsets, strict=False):
            yield (order.positions + offset).astype(dtype)

    return TimeOrder(
        positions=np.concatenate([*shift()]), keys=np.concatenate([order.keys for order in orders])
    )
