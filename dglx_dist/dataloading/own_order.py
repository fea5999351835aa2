"""Detects ids and columns of the graph that a script distributed, where a partition has renumbered them."""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal
from weakref import WeakKeyDictionary

import dgl
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from dglx_dist.comm.collectives import run_on_all_ranks
from dglx_dist.comm.session import SessionField
from dglx_dist.errors import ConfigError
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.graph.sampling import by_type
from dglx_dist.records import Array

_INDEXING = (torch.Tensor.__getitem__, torch.Tensor.index_select, torch.index_select)
_UNLIKELY = math.log(1e-6)


class GivenColumns:
    """The columns of the graph that a script gave to ``dx.distribute``, in the order of its ids.

    Columns of one value for each node are kept alive, others only as long as the script does.
    """

    def __init__(self, graph: dgl.DGLGraph) -> None:
        self._kept: list[Tensor] = []
        self._columns: dict[Any, dict[str, Callable[[], Tensor | None]]] = {}
        frames: Any = (*graph._node_frames, *graph._edge_frames)
        for kind, frame in zip((*graph.ntypes, *graph.canonical_etypes), frames, strict=True):
            columns = {name: frame[name] for name in frame}
            self._columns[kind] = {name: weakref.ref(values) for name, values in columns.items()}
            self._kept += [values for values in columns.values() if values.dim() == 1]

    def check_seeds(self, g: DistGraph, seeds: Mapping[Any, Array]) -> None:
        """Raise ConfigError if ``seeds``, ids by type, are those of a mask by the script's numbering."""
        for kind, ids in seeds.items():
            for name, column in self._columns.get(kind, {}).items():
                mask = column()
                if mask is None or mask.dtype != torch.bool or mask.dim() != 1:
                    continue
                share = float(mask.double().mean())
                # By chance, ids of another order would hardly all be in the mask.
                if not 0 < share < 1 or len(ids) * math.log(share) > _UNLIKELY or not mask[ids].all():
                    continue
                nodes, what = (g.nodes, "node") if isinstance(kind, str) else (g.edges, "edge")
                if not nodes[kind].data[name][torch.from_numpy(ids)].all():
                    raise ConfigError(
                        f"the {len(ids)} {what}s to train on are those of the mask {name!r} by their ids "
                        f"before dx.distribute, which has renumbered the {what}s; take dx.{what}_split of "
                        "that column of the distributed graph, or g.new_ids(indices)"
                    )

    def name_of(self, values: Tensor) -> str | None:
        """Return the name of the given column that has these ``values``, if any."""
        for columns in self._columns.values():
            for name, column in columns.items():
                known = column()
                if known is not None and known.shape == values.shape:
                    is_same = known.data_ptr() == values.data_ptr()
                    if is_same or bool((values.detach().to(known.device, known.dtype) == known).all()):
                        return name
        return None

    def watch(self, batch: Any) -> AbstractContextManager[Any]:
        """Return a context in which a given column must not be indexed by the ids of ``batch``."""
        ids: list[Tensor] = []
        for leaf in tree_leaves(batch):
            graphs = [leaf] if isinstance(leaf, dgl.DGLGraph) else []
            ids += [leaf] if torch.is_tensor(leaf) else []
            ids += [x for graph in graphs for x in (*_ids_in(graph.srcdata), *_ids_in(graph.dstdata))]
        ids = [one for one in ids if one.dtype == torch.int64 and one.numel()]
        return _Watch(self, ids) if ids else nullcontext()


GIVEN_COLUMNS: SessionField[WeakKeyDictionary[DistGraph, GivenColumns]] = SessionField(
    lambda _: WeakKeyDictionary()
)
"""Of the graphs whose nodes are renumbered."""


def check_order(g: DistGraph, loader: Any, seeds: Any, what: Literal["node", "edge"]) -> None:
    """Check the ``seeds`` of ``loader``, and let it check what its first batch indexes; collective.

    Raises:
        ConfigError: they are the ids of a mask before ``dx.distribute``; on all ranks.
    """
    given = GIVEN_COLUMNS.of(g.session).get(g)
    if given is None:
        return

    def check() -> None:
        counts = {kind: g.num_nodes(kind) for kind in g.ntypes}
        counts_of_edges = {kind: g.num_edges(kind) for kind in g.canonical_etypes}
        given.check_seeds(g, by_type(seeds, counts if what == "node" else counts_of_edges, what))

    run_on_all_ranks(g.session, check, ConfigError)
    loader.watch = given.watch


def _ids_in(data: Any) -> Iterable[Tensor]:
    ids = data.get(dgl.NID, ())
    return ids.values() if isinstance(ids, Mapping) else [ids] if torch.is_tensor(ids) else []


def complete_call(func: Any, kwargs: dict[str, Any] | None) -> dict[str, Any]:
    """Return the keyword arguments of a call, for ``__torch_function__`` of a mode to call first.

    Torch's ``l1_loss`` does not tell a mode of its ``weight``, and would compute without it.
    """
    if func is not F.l1_loss:
        return kwargs or {}
    # The frames above are those of __torch_function__, handle_torch_function and l1_loss.
    weight = sys._getframe(3).f_locals.get("weight")
    return {**(kwargs or {}), **({} if weight is None else {"weight": weight})}


class _Watch(TorchFunctionMode):
    def __init__(self, given: GivenColumns, ids: list[Tensor]) -> None:
        super().__init__()
        self._given, self._ids = given, ids

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _INDEXING and len(args) > 1 and any(self._is_of_batch(one) for one in args[1:]):
            name = self._given.name_of(args[0])
            if name is not None:
                raise ConfigError(
                    f"the column {name!r} of the graph before dx.distribute was indexed by ids of the batch, "
                    "but the partition has renumbered them, so these are the values of others; write "
                    f"g.ndata[{name!r}][ids] with the distributed graph (g.edata for edges), or "
                    "column[g.orig_ids(ids)]"
                )
        return func(*args, **complete_call(func, kwargs))

    def _is_of_batch(self, index: Any) -> bool:
        def is_same(ids: Tensor) -> bool:
            return index.data_ptr() == ids.data_ptr() or torch.equal(index.cpu(), ids.cpu())

        return torch.is_tensor(index) and any(index.shape == ids.shape and is_same(ids) for ids in self._ids)
