"""Layer-1 blocks of owners, as the arrays that other parts get and rebuild them from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar, final

import torch
from dgl.heterograph import DGLBlock
from torch import Tensor

from dglx_dist.internals.graphs import BlockTypes
from dglx_dist.records import Array, EdgeType


class OwnerBlock(NamedTuple):
    """The layer-1 block of one owner."""

    block: DGLBlock
    nodes: Mapping[str, Tensor]
    """(L0,) int64 global ids of its sources by node type."""


T = TypeVar("T")
OwnerBlocks: TypeAlias = dict[int, OwnerBlock]
"""Blocks of the other owners, by part."""


@final
class BlockSchema:
    """Node and edge types of blocks, and the arrays of a block of these types.

    The arrays are the source ids (L0,) of each node type, and indptr (D1 + 1,) and indices (E1,) of each edge
    type. Several node types need their numbers of destinations too, because edges may not reach all of them.
    """

    def __init__(self, ntypes: Sequence[str], etypes: Sequence[EdgeType]) -> None:
        self._ntypes, self._etypes = tuple(ntypes), tuple(etypes)
        self._sources = [self._ntypes.index(source) for source, _, _ in etypes]
        self._targets = [self._ntypes.index(target) for _, _, target in etypes]
        relations = [relation for _, relation, _ in etypes]
        self._types = BlockTypes(self._ntypes, relations, self._sources, self._targets)

    def key_by_type(self, nodes: Tensor | Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return ids by node type. Loaders yield a tensor if there is only one."""
        return {self._ntypes[0]: nodes} if isinstance(nodes, Tensor) else nodes

    def pack(self, own: OwnerBlock, *, wide: bool) -> list[Array]:
        """Return the arrays as int32. With ``wide``, ids are int64."""
        ids = [own.nodes[ntype] for ntype in self._ntypes]
        arrays = [(nodes if wide else nodes.to(torch.int32)).numpy() for nodes in ids]
        for etype in self._etypes:
            indptr, indices, _ = own.block.adj_tensors("csc", etype)
            arrays += [indptr.to(torch.int32).numpy(), indices.to(torch.int32).numpy()]
        if len(self._ntypes) > 1:
            counts = [own.block.num_dst_nodes(ntype) for ntype in self._ntypes]
            arrays.append(torch.tensor(counts, dtype=torch.int32).numpy())
        return arrays

    def unpack(self, arrays: Sequence[Array], idtype: torch.dtype) -> OwnerBlock:
        """Rebuild the block from the arrays of :meth:`pack`. Its edges are numbered in CSC order.

        ``idtype`` is the id type of the owner's block, so that all parts run the same kernels.
        """
        tensors = [torch.tensor(array) for array in arrays]
        nodes = [ids.to(torch.int64) for ids in tensors[: len(self._ntypes)]]
        edges = [values.to(idtype) for values in tensors[len(nodes) : len(nodes) + 2 * len(self._etypes)]]
        counts = tensors[-1].tolist() if len(nodes) > 1 else [len(edges[0]) - 1]
        return self._build(nodes, counts, edges)

    def rebuild(self, block: DGLBlock, nodes: Mapping[str, Tensor]) -> OwnerBlock:
        """Return the block as :meth:`unpack` returns it, without other data."""
        edges = [values for etype in self._etypes for values in block.adj_tensors("csc", etype)[:2]]
        counts = [block.num_dst_nodes(ntype) for ntype in self._ntypes]
        return self._build([nodes[ntype].to(torch.int64) for ntype in self._ntypes], counts, edges)

    def check(self, arrays: Sequence[Array]) -> None:
        """Raise ValueError, which the sender gets, if kernels would read outside of the arrays."""
        num_types, num_arrays = len(self._ntypes), len(self._ntypes) + 2 * len(self._etypes)
        has_counts = num_types > 1
        if len(arrays) != num_arrays + has_counts or any(a.ndim != 1 or a.dtype.kind != "i" for a in arrays):
            descriptions = [f"{array.dtype} {array.shape}" for array in arrays]
            raise ValueError(
                f"arrays {descriptions} are no block; it has {num_arrays + has_counts} one-dimensional "
                "integer arrays"
            )
        num_sources = [len(ids) for ids in arrays[:num_types]]
        counts = arrays[-1].tolist() if has_counts else [len(arrays[1]) - 1]
        for source, target, (indptr, indices) in self._pair_edges(arrays[num_types:num_arrays]):
            if (
                not len(indptr)
                or (int(indptr[0]), int(indptr[-1])) != (0, len(indices))
                or len(indptr) - 1 != counts[target]
                or (indptr[1:] < indptr[:-1]).any()
                or (len(indices) and not 0 <= indices.min() <= indices.max() < num_sources[source])
            ):
                raise ValueError(
                    f"{[len(array) for array in arrays]} source ids, bounds and indices of in-edges are no "
                    "block: bounds rise from 0 to the number of edges, and indices are positions of source "
                    "ids"
                )
        if len(counts) != num_types or any(not 0 <= n <= m for n, m in zip(counts, num_sources, strict=True)):
            raise ValueError(f"{counts} destinations of {num_sources} sources are no block")

    def _pair_edges(self, arrays: Sequence[T]) -> Iterator[tuple[int, int, tuple[T, T]]]:
        pairs = zip(arrays[::2], arrays[1::2], strict=True)
        return zip(self._sources, self._targets, pairs, strict=True)

    def _build(self, nodes: Sequence[Tensor], counts: list[int], arrays: Sequence[Tensor]) -> OwnerBlock:
        num_sources = [len(ids) for ids in nodes]
        edges: list[Any] = [
            (num_sources[source], counts[target], indptr, indices, {})
            for source, target, (indptr, indices) in self._pair_edges(arrays)
        ]
        block = self._types.block(edges, None, (num_sources, counts))
        return OwnerBlock(block, dict(zip(self._ntypes, nodes, strict=True)))
