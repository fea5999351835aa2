"""Detects ids and columns of the graph that a script distributed, where a partition has renumbered them."""

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
    """The columns of the graph that a script gave to ``dx.distribute``, in the order of its ids.

    Columns of one value for each node, such as labels, are kept alive, others as long as the script does.
    """

    def __init__(self, graph: dgl.DGLGraph) -> None:
        columns = {kind: {name: frame[name] for name in frame} for kind, frame in frames_by_type(graph)}
        self._kept = [one for of_type in columns.values() for one in of_type.values() if one.dim() == 1]
        self._columns = {
            kind: {name: weakref.ref(values) for name, values in of_type.items()}
            for kind, of_type in columns.items()
        }

    def check_seeds(self, g: DistGraph, seeds: Any, what: Literal["node", "edge"]) -> None:
        """Raise ConfigError if ``seeds`` are the ids of a mask by the script's numbering."""
        is_node = what == "node"
        counts: dict[Any, int] = {kind: g.num_nodes(kind) for kind in g.ntypes if is_node}
        counts |= {kind: g.num_edges(kind) for kind in g.canonical_etypes if not is_node}
        for kind, ids in group_by_type(seeds, counts, what).items():
            for name, column in self._columns.get(kind, {}).items():
                mask = column()
                if mask is None or mask.dtype != torch.bool or mask.dim() != 1:
                    continue
                share = float(mask.double().mean())
                # By chance, ids of another order would hardly all be in the mask.
                if not 0 < share < 1 or len(ids) * math.log(share) > _UNLIKELY or not mask[ids].all():
                    continue
                if not (g.nodes if is_node else g.edges)[kind].data[name][torch.from_numpy(ids)].all():
                    raise ConfigError(
                        f"the {len(ids)} {what}s to train on are those of the mask {name!r} by their ids "
                        f"before dx.distribute, which has renumbered the {what}s; take dx.{what}_split of "
                        "that column of the distributed graph, or g.new_ids(indices)"
                    )

    def name_of(self, values: Tensor) -> str | None:
        """Return the name of the given column that is ``values``, or has the same ones, if any."""
        columns = ((name, ref()) for of_type in self._columns.values() for name, ref in of_type.items())
        return next((name for name, column in columns if column is not None and _is(column, values)), None)

    def mark(self, batch: Any) -> Any:
        """Return ``batch``, a tuple, with ids that raise ConfigError where they index a given column."""
        nodes = [tree_map_only(Tensor, self._marked, part) for part in batch[:-1]]
        return (*nodes, batch[-1])

    def _marked(self, ids: Tensor) -> Tensor:
        marked = ids.as_subclass(_BatchIds)
        marked.given = self
        return marked


class _BatchIds(Tensor):
    """Ids of a batch, plain for everything but a look whether a given column is indexed by them."""

    given: UserColumns | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        given = next((leaf.given for leaf in leaves if isinstance(leaf, cls)), None)
        name = None
        if given is not None and func in _INDEXING:
            names = (given.name_of(leaf) for leaf in leaves if not isinstance(leaf, cls))
            name = next((name for name in names if name is not None), None)
        if name is not None:
            raise ConfigError(
                f"the column {name!r} of the graph before dx.distribute was indexed by ids of the batch, but "
                "the partition has renumbered them, so these are the values of others; write "
                f"g.ndata[{name!r}][ids] with the distributed graph, or column[g.orig_ids(ids)]"
            )
        with plain_tensors():
            return func(*args, **(kwargs or {}))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]  # torch leaves it bare


def _is(column: Tensor, values: Tensor) -> bool:
    """Whether ``values`` are the ``column`` or equal, but neither all the same nor the rows' own numbers."""
    if values.dim() == 0 or len(column) != len(values):
        return False
    if column.data_ptr() == values.data_ptr():
        return True
    known = column.reshape(len(column), -1)
    flat = values.detach().reshape(len(values), -1).to(known.device, known.dtype)
    if known.shape != flat.shape or known.dtype == torch.bool or not bool((flat == known).all()):
        return False
    numbers = torch.arange(len(known), device=known.device).unsqueeze(1)
    return not bool((known == known[:1]).all()) and not bool((known == numbers).all())


def check_order(g: DistGraph, loader: Any, seeds: Any, what: Literal["node", "edge"]) -> None:
    """Check the ``seeds`` of ``loader``, and let it check what its first batch indexes; collective.

    Raises:
        ConfigError: they are the ids of a mask before ``dx.distribute``; on all ranks.
    """
    if g.dataset.manifest.num_parts == 1:
        return
    given: UserColumns | None = g.user_columns  # None on ranks that gave no graph
    check = (lambda: None) if given is None else partial(given.check_seeds, g, seeds, what)
    run_on_all_ranks(g.session, check, ConfigError)
    if given is not None:
        loader.mark = given.mark
