"""Compute a trained model's results for single nodes on demand."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, final

import dgl
import numpy as np
import torch
from torch import Tensor, nn

from dglx_dist.dataloading.loader import open_neighborhood_maker
from dglx_dist.errors import ConfigError
from dglx_dist.graph.partition_book import Ids, as_ids
from dglx_dist.internals.pytorch import get_version
from dglx_dist.options import check_integer
from dglx_dist.records import FEATURE, Array
from dglx_dist.strategies.base import find_float_parameter
from dglx_dist.training.inference import (
    EdgeNames,
    Path,
    evaluating,
    gather_module,
    list_layers,
    load_batch,
    make_pass,
    nest,
    read_first_rows,
    run_batch,
)
from dglx_dist.training.models import InferenceLayer

if TYPE_CHECKING:
    from dglx_dist.graph.dist_graph import DistGraph

_Rows: TypeAlias = dict[Path, Tensor]
"""Node rows by their path in a layer's result, which may be a nested structure of tensors."""


@final
class Predictor:
    """Computes a trained model's results for some nodes, exactly and in milliseconds.

    For the requested nodes, a call computes each layer over all neighbors that the next layer needs. This is
    what :func:`layerwise_inference` does for all nodes. Each layer's rows are kept for later calls, for up to
    ``cache_rows`` nodes. Beyond that, the least recently used rows are dropped. Any thread may call a
    predictor. Calls wait for each other.

    The constructor is collective, but calls are not. The graph has one node type and one edge type.

    Args:
        model: Wrapped or plain model. It is in evaluation mode during a call. If its weights change, kept
            rows are computed again. If the strategy cuts the weights, the predictor uses a copy from the
            time when it was created.
        g: The distributed graph.
        feature: Name of the node data that the first layer reads.
        layers, between, edge_feats: As for :func:`layerwise_inference`.
        cache_rows: Maximum number of nodes that keep their rows, per layer. 0 keeps none.
        batch_size: Maximum number of nodes that a layer computes at once. Use :func:`layerwise_inference`
            for all nodes.

    Raises:
        ConfigError: the graph has several types, or the model does not define its layers.
    """

    def __init__(
        self,
        model: nn.Module,
        g: DistGraph,
        *,
        feature: str = FEATURE,
        layers: Sequence[InferenceLayer] | str | None = None,
        between: Callable[[Tensor], Tensor] | None = None,
        edge_feats: EdgeNames = (),
        cache_rows: int = 100_000,
        batch_size: int = 1024,
    ) -> None:
        if not g.is_homogeneous:
            raise ConfigError(
                f"a Predictor needs a graph with one node type and one edge type, but {g.name} has "
                f"{len(g.ntypes)} and {len(g.canonical_etypes)}. Use dx.layerwise_inference."
            )
        self._g = g
        self._feature = feature
        self._module = gather_module(model)
        self._passes = [make_pass(layer) for layer in list_layers(self._module, layers, between)]
        self._input_rows = read_first_rows(g, feature, None)[()]
        dtype = find_float_parameter(self._module).dtype
        self._changed_rows = torch.empty((0, *self._input_rows.shape[1:]), dtype=dtype)
        self._slot_of_node = np.full(g.num_nodes(), -1)
        """Position of each node's row in ``_changed_rows``, or -1."""
        self._maker = open_neighborhood_maker(g, 1, edge_feats=edge_feats)
        capacity = min(check_integer("cache_rows", cache_rows, least=0), g.num_nodes())
        self._caches = [_RowCache(g.num_nodes(), capacity) for _ in self._passes]
        self._batch_size = check_integer("batch_size", batch_size, least=1)
        self._versions: list[int | None] = []
        """Weight versions that the kept rows were computed with."""
        self._lock = threading.Lock()

    def __call__(self, ids: Ids) -> Any:
        """Return the results for the nodes ``ids`` on the model's device.

        Args:
            ids: (K,) node ids in the distributed graph, in any order, possibly repeated. For your own ids,
                pass ``g.new_ids(user_ids)``.

        Returns:
            A (K, ...) tensor, or several of them in the same structure as the last layer's result.

        Raises:
            IndexError: an id does not exist.
            ConfigError: a layer does not return one row per destination.
        """
        distinct, positions = np.unique(as_ids(ids, self._g.num_nodes(), "node"), return_inverse=True)
        with self._lock, evaluating(self._module):
            self._forget_old_weights()
            results = self._compute(len(self._passes), distinct)
        order = torch.from_numpy(positions)
        return nest({path: rows[order] for path, rows in results.items()})

    def _forget_old_weights(self) -> None:
        """Forget all kept rows if a weight has changed since the last call."""
        versions = [get_version(tensor) for tensor in self._module.state_dict(keep_vars=True).values()]
        if versions != self._versions:
            self._caches = [cache.copy_empty() for cache in self._caches]
            self._versions = versions

    def update(self, name: str, ids: Ids, rows: Any) -> None:
        """Replace the nodes' values in the column ``name`` from now on, in this predictor only.

        The dataset and the predictors on other ranks do not change. Layer by layer, the predictor forgets the
        rows that it kept for these nodes and for all nodes that their messages reach.

        Args:
            name: Column that the model reads.
            ids: (K,) node ids. If one is repeated, its last row counts.
            rows: (K, ...) new values.

        Raises:
            ConfigError: the model does not read the column, ``rows`` have another shape or do not fit the
                model's dtype, or this server has only a part of the structure.
        """
        if name != self._feature:
            raise ConfigError(f"update changes {self._feature!r}, which the model reads, and not {name!r}.")
        nodes = as_ids(ids, self._g.num_nodes(), "node")
        new_rows = torch.as_tensor(rows)
        if new_rows.shape != (len(nodes), *self._input_rows.shape[1:]):
            raise ConfigError(
                f"update got rows of shape {tuple(new_rows.shape)} for {len(nodes)} nodes, but {name!r} has "
                f"rows of shape {tuple(self._input_rows.shape[1:])}."
            )
        converted_rows = new_rows.detach().to("cpu", self._changed_rows.dtype)
        if (converted_rows.isfinite().cpu() != new_rows.isfinite().cpu()).any():
            raise ConfigError(
                f"update got a value of {float(new_rows.abs().max()):g}, which is too large for the model's "
                f"{self._changed_rows.dtype}."
            )
        structure = self._g.structure()
        if not structure.is_replicated:
            raise ConfigError(
                "this server has only a part of the graph's structure, so it cannot find the nodes that an "
                "update changes. Open the graph with structure='replicated'."
            )
        (shard,) = structure.shards
        with self._lock:
            self._keep_changed(nodes, converted_rows)
            is_changed = np.zeros(self._g.num_nodes(), bool)
            is_changed[nodes] = True
            for cache in self._caches:
                # Changed nodes stay marked, because most layers also read a node's own row.
                edges = np.flatnonzero(is_changed[shard.indices])
                is_changed[np.searchsorted(shard.indptr, edges, side="right") - 1] = True
                cache.drop(is_changed)

    def _keep_changed(self, nodes: Array, rows: Tensor) -> None:
        """Keep the (K, ...) ``rows``. If a node is repeated, its last row counts."""
        distinct, reversed_positions = np.unique(nodes[::-1], return_index=True)
        last_positions = len(nodes) - 1 - reversed_positions
        slots = self._slot_of_node[distinct]
        is_added = slots < 0
        num_added = int(is_added.sum())
        slots[is_added] = len(self._changed_rows) + np.arange(num_added)

        added_rows = self._changed_rows.new_empty((num_added, *rows.shape[1:]))
        self._changed_rows = torch.cat([self._changed_rows, added_rows])
        self._changed_rows[torch.from_numpy(slots)] = rows[torch.from_numpy(last_positions)]
        self._slot_of_node[distinct] = slots

    def _compute(self, depth: int, ids: Array) -> _Rows:
        """Return the (n, ...) rows of distinct ``ids`` after layer ``depth``. Layer 0 has the features."""
        if depth == 0:
            return {(): self._read_inputs(ids)}
        cache = self._caches[depth - 1]
        is_kept, kept_rows = cache.read(ids)
        missing = ids[~is_kept]
        if kept_rows and not len(missing):
            return kept_rows

        num_pieces = max(-(-len(missing) // self._batch_size), 1)
        pieces = [self._compute_missing(depth, piece) for piece in np.array_split(missing, num_pieces)]
        computed_rows = {path: torch.cat([piece[path] for piece in pieces]) for path in pieces[0]}
        if not kept_rows:
            return computed_rows

        rows = {}
        for path, computed in computed_rows.items():
            rows[path] = computed.new_empty((len(ids), *computed.shape[1:]))
            rows[path][torch.from_numpy(is_kept)] = kept_rows[path]
            rows[path][torch.from_numpy(~is_kept)] = computed
        return rows

    def _compute_missing(self, depth: int, ids: Array) -> _Rows:
        """Compute and keep the rows of ``ids`` after layer ``depth``, when none are kept yet."""

        def compute_sources(block: Any) -> _Rows:
            return self._compute(depth - 1, block.srcdata[dgl.NID].numpy())

        device = find_float_parameter(self._module).device
        run_pass = self._passes[depth - 1]
        ntype = self._g.ntypes[0]
        batch = load_batch(self._maker, ntype, ids, compute_sources)
        rows = run_batch(run_pass, self._g, batch, device)
        self._caches[depth - 1].write(ids, rows)
        return rows

    def _read_inputs(self, ids: Array) -> Tensor:
        """Return the (n, ...) features for ``ids``, including updates."""
        parameter = find_float_parameter(self._module)
        rows = self._input_rows[torch.from_numpy(ids)].to(parameter.dtype)
        slots = self._slot_of_node[ids]
        is_updated = slots >= 0
        if is_updated.any():
            rows[torch.from_numpy(is_updated)] = self._changed_rows[torch.from_numpy(slots[is_updated])]
        return rows.to(parameter.device)


@final
class _RowCache:
    """Keeps rows for up to ``capacity`` of ``num_nodes`` nodes, and drops the least recently used ones."""

    def __init__(self, num_nodes: int, capacity: int) -> None:
        self._slot_of_node = np.full(num_nodes, -1, np.int32)
        self._node_of_slot = np.full(capacity, -1, np.int64)
        self._last_use = np.zeros(capacity, np.int64)
        self._free_slots = np.arange(capacity)
        self._num_uses = 0
        self._rows: _Rows = {}

    def copy_empty(self) -> _RowCache:
        return _RowCache(len(self._slot_of_node), len(self._node_of_slot))

    def read(self, ids: Array) -> tuple[Array, _Rows]:
        """Return a (n,) bool mask that marks the ``ids`` with kept rows, and these rows, empty if none."""
        slots = self._slot_of_node[ids]
        is_kept = slots >= 0
        if not is_kept.any():
            return is_kept, {}

        kept_slots = slots[is_kept].astype(np.int64)
        self._num_uses += 1
        self._last_use[kept_slots] = self._num_uses
        positions = torch.from_numpy(kept_slots)
        return is_kept, {path: rows[positions] for path, rows in self._rows.items()}

    def write(self, ids: Array, rows: _Rows) -> None:
        """Keep the (n, ...) ``rows`` for nodes that have none yet, or for as many nodes as fit."""
        capacity = len(self._node_of_slot)
        count = min(len(ids), capacity)
        if count == 0:
            return
        if not self._rows:
            for path, leaf in rows.items():
                self._rows[path] = leaf.new_empty((capacity, *leaf.shape[1:]))

        num_missing = count - len(self._free_slots)
        if num_missing > 0:
            # Drop at least an eighth of all rows, because finding the oldest ones takes time.
            is_used = np.flatnonzero(self._node_of_slot >= 0)
            num_dropped = min(max(num_missing, capacity // 8), len(is_used))
            oldest = np.argpartition(self._last_use[is_used], num_dropped - 1)[:num_dropped]
            self._forget(is_used[oldest])

        slots = self._free_slots[:count]
        self._free_slots = self._free_slots[count:]
        self._num_uses += 1
        self._last_use[slots] = self._num_uses
        self._node_of_slot[slots] = ids[:count]
        self._slot_of_node[ids[:count]] = slots
        for path, leaf in rows.items():
            self._rows[path][torch.from_numpy(slots)] = leaf[:count]

    def drop(self, is_changed: Array) -> None:
        """Forget the rows for all nodes marked in the (N,) bool array."""
        is_kept = self._node_of_slot >= 0
        self._forget(np.flatnonzero(is_kept & is_changed[self._node_of_slot]))

    def _forget(self, slots: Array) -> None:
        self._slot_of_node[self._node_of_slot[slots]] = -1
        self._node_of_slot[slots] = -1
        self._free_slots = np.concatenate([self._free_slots, slots])
