"""Detects ids and columns that refer to the numbering of a graph before ``dx.distribute``."""

from __future__ import annotations

import math
import weakref
from functools import partial
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
_UNLIKELY = math.log(1e-6)


class UserColumns:
    """The columns of the graph that a script passed to ``dx.distribute``, in the order of its ids.

    One-dimensional columns, such as labels, are kept alive. Other columns live while the script keeps them.
    """

    def __init__(self, graph: dgl.DGLGraph) -> None:
        columns = {kind: {name: frame[name] for name in frame} for kind, frame in frames_by_type(graph)}
        self._kept = [values for frame in columns.values() for values in frame.values() if values.dim() == 1]
        self._columns = {
            kind: {name: weakref.ref(values) for name, values in frame.items()}
            for kind, frame in columns.items()
        }

    def check_seeds(self, g: DistGraph, seeds: Any, item: Literal["node", "edge"]) -> None:
        """Raise ConfigError if ``seeds`` are the ids of a mask in the numbering of the script."""
        is_node = item == "node"
        counts: dict[Any, int] = {kind: g.num_nodes(kind) for kind in g.ntypes if is_node}
        counts |= {kind: g.num_edges(kind) for kind in g.canonical_etypes if not is_node}
        for kind, ids in group_by_type(seeds, counts, item).items():
            for name, column in self._columns.get(kind, {}).items():
                mask = column()
                if mask is None or mask.dtype != torch.bool or mask.dim() != 1:
                    continue
                share = float(mask.double().mean())

                # Ids in another order would hardly all be in the mask by chance.
                if not 0 < share < 1 or len(ids) * math.log(share) > _UNLIKELY or not mask[ids].all():
                    continue
                if not (g.nodes if is_node else g.edges)[kind].data[name][torch.from_numpy(ids)].all():
                    raise ConfigError(
                        f"the {len(ids)} {item}s to train on are the ids of the mask {name!r} "
                        f"before dx.distribute, but dx.distribute renumbers the {item}s. Pass "
                        f"dx.{item}_split of that column of the distributed graph, or "
                        "g.new_ids(indices)."
                    )

    def find_name(self, values: Tensor) -> str | None:
        """Return the name of the column that ``values`` are, or have the same rows as. Otherwise None."""
        for columns in self._columns.values():
            for name, reference in columns.items():
                column = reference()
                if column is not None and _is_same_column(column, values):
                    return name
        return None

    def mark(self, batch: Any) -> Any:
        """Return the tuple ``batch`` with ids that raise ConfigError if they index a column of the script."""
        nodes = [tree_map_only(Tensor, self._mark_ids, part) for part in batch[:-1]]
        return (*nodes, batch[-1])

    def _mark_ids(self, ids: Tensor) -> Tensor:
        batch_ids = ids.as_subclass(_BatchIds)
        batch_ids.user_columns = self
        return batch_ids


class _BatchIds(Tensor):
    """Ids of a batch. They act like plain tensors, but refuse to index a column of the script."""

    user_columns: UserColumns | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call ``func`` of torch on plain tensors.

        Raises ConfigError if ``func`` indexes a column of the script's graph by ids of a batch.
        """
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        columns = next((tensor.user_columns for tensor in tensors if isinstance(tensor, cls)), None)
        name = None
        if columns is not None and func in _INDEXING:
            names = (columns.find_name(tensor) for tensor in tensors if not isinstance(tensor, cls))
            name = next((name for name in names if name is not None), None)
        if name is not None:
            raise ConfigError(
                f"the column {name!r} of the graph before dx.distribute was indexed by ids of "
                "a batch. dx.distribute has renumbered the graph, so the values belong to "
                f"other nodes or edges. Use g.ndata[{name!r}][ids] of the distributed graph, "
                "or column[g.orig_ids(ids)]."
            )

        with plain_tensors():
            return func(*args, **(kwargs or {}))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]  # torch does not annotate this


def _is_same_column(column: Tensor, values: Tensor) -> bool:
    """Return whether ``values`` are the column or a copy of it.

    Values that are all equal, and row numbers, are no proof of a copy.
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
    is_ambiguous = bool((rows == rows[:1]).all()) or bool((rows == row_numbers).all())
    return not is_ambiguous


def check_order(g: DistGraph, loader: Any, seeds: Any, item: Literal["node", "edge"]) -> None:
    """Detect ids in the order of the graph before ``dx.distribute``. Every rank must call this.

    The ``seeds`` of ``loader``, which are ids of nodes or edges (``item``), are checked here. Later, the ids
    of its first batch raise ConfigError if they index a column of the script's graph. Nothing is checked with
    one part, because ids do not change. Raises ConfigError on all ranks if the seeds are the ids of a mask.
    """
    if g.dataset.manifest.num_parts == 1:
        return
    columns: UserColumns | None = g.user_columns  # None on ranks that passed no graph
    check = (lambda: None) if columns is None else partial(columns.check_seeds, g, seeds, item)
    run_on_all_ranks(g.session, check, ConfigError)
    if columns is not None:
        loader.mark = columns.mark
