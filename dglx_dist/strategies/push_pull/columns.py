"""The features as push-pull holds them: this rank's columns, for all nodes (P3, section 3.2)."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from dglx_dist.cluster.collectives import gather_json
from dglx_dist.cluster.session import Session
from dglx_dist.errors import ConfigError
from dglx_dist.graph.dtypes import column_info, numpy_view, tensor_view, torch_dtype
from dglx_dist.graph.gather import take_rows
from dglx_dist.graph.ids import check_ids
from dglx_dist.graph.opening import together
from dglx_dist.layers.columns import Columns, deal_out_columns
from dglx_dist.records import Array, ColumnInfo
from dglx_dist.sampling.precision import Precision
from dglx_dist.sampling.row_memory import RowMemory
from dglx_dist.strategies.push_pull.column_files import slice_folder
from dglx_dist.strategies.push_pull.column_loading import PHASE, Wanted, obtain
from dglx_dist.strategies.push_pull.group import Group
from dglx_dist.strategies.push_pull.moments import Moments, moments_of_rows

if TYPE_CHECKING:
    from dglx_dist.graph import DistGraph

__all__ = ["ATTACHED", "PHASE", "ColumnStore", "open_columns"]

ATTACHED = "push_pull.columns"
"""Where the session keeps what is open."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class _Slice:
    """The own columns of one feature."""

    columns: Columns
    info: ColumnInfo
    """Stored dtype, and (F_p,)."""
    rows: Array
    """(V, F_p), C-contiguous, by id."""


@final
class ColumnStore:
    """This rank's columns of some features, for all nodes. Made by :func:`open_columns`."""

    def __init__(self, slices: Mapping[str, _Slice], group: Group, session: Session) -> None:
        self._slices, self._group, self._session = dict(slices), group, session
        self._moments: dict[tuple[str, ...], Moments] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The features, in the order in which they were asked for."""
        return tuple(self._slices)

    @property
    def widths(self) -> Mapping[str, int]:
        """Feature name to F, its columns on all parts together."""
        return {name: one.columns.width for name, one in self._slices.items()}

    @property
    def num_bytes(self) -> int:
        """What the own columns of all nodes take, in memory or in mapped files."""
        return sum(one.rows.nbytes for one in self._slices.values())

    def cut(self, name: str) -> Columns:
        """Return which columns of the feature are here.

        Raises:
            ConfigError: it was not opened; the message lists those that were.
        """
        return self._slice(name).columns

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of :meth:`rows`.

        Raises:
            ConfigError: as :meth:`cut`.
        """
        return Precision().target(torch_dtype(self._slice(name).info.dtype))

    def rows(self, name: str, nodes: Tensor, memory: RowMemory | None = None) -> Tensor:
        """Return the own columns of nodes; any thread may call it, and no other rank is asked.

        Args:
            name: Of the feature.
            nodes: (K,) int64 on the CPU, any order, repeats allowed.
            memory: Where the copy lies; None: in fresh memory.

        Returns:
            (K, F_p), a copy: what ``g.ndata[name][nodes][:, cut]`` holds, with float16 and bfloat16 as
            float32, as the batches of data parallel training have them.

        Raises:
            ConfigError: the feature was not opened, or ``nodes`` are no ids.
            IndexError: an id is out of range.
        """
        one = self._slice(name)
        if nodes.dtype != torch.int64 or nodes.dim() != 1:
            raise ConfigError(f"nodes are {nodes.dtype} of shape {tuple(nodes.shape)}; give (K,) int64 ids")
        ids = nodes.numpy()
        check_ids(ids, len(one.rows), repr(name))
        dtype = self.dtype(name)
        if memory is None:
            return tensor_view(take_rows(one.rows, ids), one.info).to(dtype)
        found = memory.rows(name, len(ids), one.info)
        take_rows(one.rows, ids, numpy_view(found))
        if found.dtype == dtype:
            return found
        return memory.rows(name, len(ids), column_info(dtype, one.info.row_shape)).copy_(found)

    def moments(self, names: Sequence[str]) -> Moments:
        """Return mean and variance of each node's row, of all columns of ``names`` side by side.

        Every rank must call it; the first call sums twice over the ranks, 8 bytes per node each, under the
        phase ``columns``, and its result is kept.

        Args:
            names: Of features that were opened.

        Returns:
            (mean, variance): (V,) float64 each; the variance is the biased one, as LayerNorm has it.

        Raises:
            ConfigError: as :meth:`cut`.
            PeerError: a rank is dead or did not take part within the time-out.
        """
        key = tuple(names)
        if key not in self._moments:
            parts = [self._slice(name) for name in key]
            # Other groups hold the same columns: they add nothing, and get the same bits.
            counted = parts if min(self._group.replicas) == self._group.rank else []
            width = sum(one.columns.width for one in parts)
            num_rows = len(parts[0].rows) if parts else 0
            self._moments[key] = moments_of_rows(
                [(one.rows, one.info) for one in counted], num_rows, width, self._session, PHASE
            )
        return self._moments[key]

    def close(self) -> None:
        """Let go of the columns; ``g.close()`` does it."""
        self._slices.clear()
        self._moments.clear()

    def _slice(self, name: str) -> _Slice:
        if name not in self._slices:
            known = ", ".join(map(repr, self._slices)) or "none: the graph is closed"
            raise ConfigError(
                f"the columns of {name!r} are not open (open: {known}); name it in the option `features`"
            )
        return self._slices[name]


def open_columns(g: DistGraph, names: Sequence[str], group: Group, *, cache: bool = True) -> ColumnStore:
    """Return this rank's columns of node features for all nodes; every rank must call it, for the same ones.

    Rank ``p`` of a group of N_f holds the p-th of N_f runs of columns as even as they go, also when there
    are more ranks than columns: it then holds (V, 0). What is not in a file yet moves once, under the phase
    ``columns``: the own columns of the rows of other servers, and 32 bytes to ask for 8 MiB of them. They
    are streamed into a file beside the dataset, or into memory, with a few such messages at a time beside
    that. The file is mapped; later openings with the same number of parts, also of other jobs, move nothing.
    ``dglx partition --method feature`` writes files for as many ranks as parts.

    A dataset stores sparse features dense, so their columns are dense too. Tensors that the program made
    (``g.ndata["x"] = DistTensor(...)``) are copied as they are now, into memory. Where no file can be made
    columns stay in memory, and rank 0 logs why.

    Args:
        g: A graph of one node type.
        names: Of matrices, (V, F) with F of 1 or more; none where the input is an embedding.
        group: Which ranks hold all columns together.
        cache: False: in memory, without looking for files.

    Returns:
        The same object when the same was asked for before, until ``g.close()``.

    Raises:
        ConfigError: on all ranks: a name is unknown, given twice or of no matrix, the graph has several node
            types, or ranks ask for different things.
        RemoteError: a rank that holds rows could not read them; StorageError on those that did not ask it.
        PeerError: a rank is dead or did not take part within the time-out.
    """
    opened = g.session.attached.setdefault(ATTACHED, _Opened())
    assert isinstance(opened, _Opened), "the name is ours"
    key = (g.kvstore.label, group.members, tuple(names))
    if key not in opened.stores:
        wanted = together(g.session, lambda: _wanted(g, names, group, cache), ConfigError)
        _check_agreement(g.session, [list(names), group.size, cache])
        if not opened.of_graph(g.kvstore.label):
            g.on_close.append(lambda: opened.forget(g.kvstore.label))
        opened.stores[key] = ColumnStore(_obtained(g, wanted, opened, group), group, g.session)
    return opened.stores[key]


@dataclass(frozen=True)
class _Opened:
    """What a session has open; a feature that several stores have is there once."""

    stores: dict[tuple[str, tuple[int, ...], tuple[str, ...]], ColumnStore] = field(default_factory=dict)
    slices: dict[tuple[str, tuple[int, ...], str], _Slice] = field(default_factory=dict)

    def of_graph(self, label: str) -> list[ColumnStore]:
        """Return what is open of the graph of that label."""
        return [store for key, store in self.stores.items() if key[0] == label]

    def forget(self, label: str) -> None:
        """Let go of what belongs to the graph of that label."""
        for store in self.of_graph(label):
            store.close()
        for key in [key for key in self.stores if key[0] == label]:
            del self.stores[key]
        for kept in [kept for kept in self.slices if kept[0] == label]:
            del self.slices[kept]


def _wanted(g: DistGraph, names: Sequence[str], group: Group, cache: bool) -> list[Wanted]:
    if len(g.ntypes) != 1:
        raise ConfigError(
            f"the graph has the node types {', '.join(g.ntypes)}; push_pull trains on graphs of one: use "
            "strategy='data_parallel'"
        )
    if len(set(names)) != len(names):
        raise ConfigError(f"features={list(names)}: name each once")
    return [_wanted_of(g, name, group, cache) for name in names]


def _wanted_of(g: DistGraph, name: str, group: Group, cache: bool) -> Wanted:
    if name not in g.ndata:
        raise ConfigError(f"g.ndata has no feature {name!r} (known: {', '.join(sorted(g.ndata))})")
    key = g.ndata[name].kvstore_key
    column = g.kvstore.column(key)
    shape = column.info.row_shape
    if len(shape) != 1 or not shape[0]:
        raise ConfigError(
            f"{name!r} has rows of shape {tuple(shape)}; push_pull splits matrices by column: store it as "
            "one row of numbers per node, (V, 1) where there is a single one"
        )
    if column.on_read is not None:
        raise ConfigError(f"what is read from {name!r} is computed by a handler; write it to a tensor first")
    (ntype,) = g.ntypes
    columns = deal_out_columns(shape[0], group.size)[group.part]
    hosts = g.session.hosts
    return Wanted(
        name=name,
        key=key,
        columns=columns,
        info=ColumnInfo(dtype=column.info.dtype, row_shape=(len(columns),)),
        num_rows=column.num_rows,
        folder=slice_folder(g.dataset, ntype, name, columns) if cache and not column.writable else None,
        leads=all(hosts[rank] != hosts[group.rank] for rank in group.replicas if rank < group.rank),
    )


def _check_agreement(session: Session, asked: list[object]) -> None:
    """Raise ConfigError, on all ranks, unless all ask for the same."""
    for rank, other in enumerate(gather_json(asked, session)):
        if other != asked:
            raise ConfigError(
                f"rank {rank} opens the columns of [features, parts, cache] = {other}, rank "
                f"{session.topology.rank} of {asked}; every rank must ask for the same"
            )


def _obtained(g: DistGraph, wanted: Sequence[Wanted], opened: _Opened, group: Group) -> dict[str, _Slice]:
    keys = {one.name: (g.kvstore.label, group.members, one.name) for one in wanted}
    found = obtain(g.kvstore, [one for one in wanted if keys[one.name] not in opened.slices], g.session)
    for one in wanted:
        if one.name in found:
            rows = found[one.name].rows
            opened.slices[keys[one.name]] = _Slice(columns=one.columns, info=one.info, rows=rows)
    problem = next((one.problem for one in found.values() if one.problem), "")
    problems = [said for said in gather_json(problem, g.session) if said]
    if problems and g.session.topology.rank == 0:
        log.warning(
            "%d of %d ranks keep columns in memory, and load them again next time: %s",
            len(problems),
            g.session.topology.world_size,
            problems[0],
        )
    return {name: opened.slices[key] for name, key in keys.items()}
