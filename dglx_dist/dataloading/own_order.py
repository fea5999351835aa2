"""Detects ids and columns that use a graph's numbering from before ``dx.distribute``."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any, Literal

import dgl
import torch
from torch import Tensor

from dglx_dist.comm.collectives import run_on_all_ranks
from dglx_dist.errors import ConfigError
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.graph.sampling import group_by_type
from dglx_dist.internals.graphs import frames_by_type
from dglx_dist.internals.pytorch import plain_tensors, tree_leaves, tree_map_only

_INDEXING = (
    *(torch.Tensor.__getitem__, torch.Tensor.index_select, torch.index_select),
    *(torch.Tensor.take, torch.take, torch.nn.functional.embedding),
)
_MAX_LOG_CHANCE = math.log(1e-6)


class UserColumns:
    """Columns from the graph that a script passed to ``dx.distribute``, in the graph's id order.

    One-dimensional columns, such as labels, are kept alive. Other columns live while the script keeps them.
    """

    def __init__(self, graph: dgl.DGLGraph) -> None:
        self._references: dict[Any, dict[str, weakref.ref[Tensor]]] = {}
        """References to columns by node or edge type and name. They keep no column alive."""
        self._kept: list[Tensor] = []
        for type_name, frame in frames_by_type(graph):
            values_by_name = {name: frame[name] for name in frame}
            self._references[type_name] = {name: weakref.ref(v) for name, v in values_by_name.items()}
            self._kept += [values for values in values_by_name.values() if values.dim() == 1]

    def check_seeds(self, g: DistGraph, seeds: Any, item: Literal["node", "edge"]) -> None:
        """Raise ConfigError if ``seeds`` are ids from before ``dx.distribute``, which renumbers the graph.

        That is certain if one of the script's masks holds for all seeds, but the same mask in the distributed
        graph does not.
        """
        counts: dict[Any, int]
        frames: Any
        if item == "edge":
            counts = {etype: g.num_edges(etype) for etype in g.canonical_etypes}
            frames = g.edges
        else:
            counts = {ntype: g.num_nodes(ntype) for ntype in g.ntypes}
            frames = g.nodes

        for type_name, ids in group_by_type(seeds, counts, item).items():
            for name, reference in self._references.get(type_name, {}).items():
                script_mask = reference()
                if script_mask is None or not _is_mask_of(script_mask, ids):
                    continue
                renumbered_mask = frames[type_name].data[name]
                if not renumbered_mask[torch.from_numpy(ids)].all():
                    raise ConfigError(
                        f"the {len(ids)} {item}s to train on are the ids of the mask {name!r} before "
                        f"dx.distribute, but dx.distribute renumbers the {item}s. Pass dx.{item}_split(mask) "
                        f"with the mask {name!r} of the distributed graph, or g.new_ids(indices)."
                    )

    def find_name(self, values: Tensor) -> str | None:
        """Return the name of the column that has the same rows as ``values``, or None."""
        for columns in self._references.values():
            for name, reference in columns.items():
                column = reference()
                if column is not None and _is_same_column(column, values):
                    return name
        return None

    def mark(self, batch: Any) -> Any:
        """Mark the ids in the tuple ``batch``. They raise ConfigError if they index a script's column."""
        *id_fields, blocks = batch
        return (*(tree_map_only(Tensor, self._mark_ids, ids) for ids in id_fields), blocks)

    def _mark_ids(self, ids: Tensor) -> Tensor:
        batch_ids = ids.as_subclass(_BatchIds)
        batch_ids.user_columns = self
        return batch_ids


def _is_mask_of(mask: Tensor, ids: Any) -> bool:
    """Return whether ``mask`` is a mask that holds for all ``ids``, which is hardly by chance."""
    if mask.dtype != torch.bool or mask.dim() != 1:
        return False
    share = float(mask.double().mean())
    if not 0 < share < 1:
        return False
    # Logarithm of the probability that randomly ordered ids are all in the mask.
    log_probability = len(ids) * math.log(share)
    return log_probability <= _MAX_LOG_CHANCE and bool(mask[ids].all())


class _BatchIds(Tensor):
    """Ids in a batch. They act like plain tensors, but refuse to index a script's column."""

    user_columns: UserColumns | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call torch's ``func`` on plain tensors.

        Raises ConfigError if ``func`` indexes a column in the script's graph by a batch's ids.
        """
        if func in _INDEXING:
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            _refuse_indexed_columns(tensors)
        with plain_tensors():
            return func(*args, **(kwargs or {}))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]  # torch does not annotate this


def _refuse_indexed_columns(tensors: Sequence[Tensor]) -> None:
    """Raise ConfigError if ``tensors`` contain both a batch's ids and a column from the script's graph."""
    columns = None
    for tensor in tensors:
        if isinstance(tensor, _BatchIds):
            columns = tensor.user_columns
    if columns is None:
        return
    for tensor in tensors:
        name = None if isinstance(tensor, _BatchIds) else columns.find_name(tensor)
        if name is not None:
            raise ConfigError(
                f"the column {name!r} of the graph before dx.distribute was indexed by ids of "
                "a batch. dx.distribute has renumbered the graph, so the values belong to "
                f"other nodes or edges. Use g.ndata[{name!r}][ids] of the distributed graph, "
                "or column[g.orig_ids(ids)]."
            )


def _is_same_column(column: Tensor, values: Tensor) -> bool:
    """Return whether ``values`` are the column or a copy of it.

    Values that are all equal, and row numbers, do not prove a copy.
    """
    if values.dim() == 0 or len(column) != len(values):
        return False
    if column.data_ptr() == values.data_ptr():
        return True
    rows = column.reshape(len(column), -1)
    value_rows = values.detach().reshape(len(values), -1).to(rows.device, rows.dtype)
    if rows.dtype == torch.bool or rows.shape != value_rows.shape:
        return False
    if not bool((value_rows == rows).all()):
        return False
    row_numbers = torch.arange(len(rows), device=rows.device).unsqueeze(1)
    has_equal_rows = bool((rows == rows[:1]).all())
    has_row_numbers = bool((rows == row_numbers).all())
    return not has_equal_rows and not has_row_numbers


def check_order(g: DistGraph, loader: Any, seeds: Any, item: Literal["node", "edge"]) -> None:
    """Detect ids in the graph's order from before ``dx.distribute``. Every rank must call this.

    The seeds are checked here. Later, the ids in the loader's first batch raise ConfigError if they index a
    column in the script's graph. Nothing is checked with one part, because ids do not change.

    Args:
        loader: Loader that will use the seeds.
        seeds: Its node or edge ids.
        item: What the ids belong to.

    Raises:
        ConfigError: on all ranks, if the seeds come from a mask.
    """
    if g.dataset.manifest.num_parts == 1:
        return
    # Ranks that passed no graph to ``dx.distribute`` have no columns.
    columns: UserColumns | None = g.user_columns

    def check_seeds() -> None:
        if columns is not None:
            columns.check_seeds(g, seeds, item)

    run_on_all_ranks(g.session, check_seeds, ConfigError)
    if columns is not None:
        loader.mark = columns.mark
