"""The structure of any number of edge types as one record of addresses, which compiled code can loop over.

A list of arrays would be compiled anew for every process, and a tuple of them for every number of types.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numba import carray, njit, types
from numba.extending import intrinsic

from dglx_dist.draws.pick import Csc
from dglx_dist.records import Array, EdgeType


@dataclass(frozen=True, kw_only=True)
class Schema:
    """The types of a graph and their numbers: positions in these lists."""

    ntypes: tuple[str, ...]
    num_nodes: tuple[int, ...]
    """Nodes of each type."""
    etypes: tuple[EdgeType, ...]

    @property
    def offsets(self) -> Array:
        """(T + 1,) int64: node i of type t has the key ``offsets[t] + i``, and keys are distinct."""
        return np.cumsum([0, *self.num_nodes])

    @property
    def source_types(self) -> Array:
        """(R,) int64 numbers of the source types."""
        return np.array([self.ntypes.index(source) for source, _, _ in self.etypes], np.int64)

    @property
    def destination_types(self) -> Array:
        """(R,) int64 numbers of the destination types."""
        return np.array([self.ntypes.index(destination) for _, _, destination in self.etypes], np.int64)


class Relations(NamedTuple):
    """In-edges of R edge types over T node types; what it points to must outlive it."""

    offsets: Array
    """(T + 1,) int64 first key of each node type."""
    source_types: Array
    """(R,) int64."""
    destination_types: Array
    """(R,) int64."""
    indptr: Array
    """(R,) int64 addresses of (N + 1,) int64."""
    indices: Array
    """(R,) int64 addresses of (E,) int32, or int64 where ``wide``."""
    weights: Array
    """(R,) int64 addresses of ``num_weights`` float32."""
    num_destinations: Array
    """(R,) int64 N."""
    num_edges: Array
    """(R,) int64 E."""
    num_weights: Array
    """(R,) int64: E, or 0 where all edges are alike."""
    wide: Array
    """(R,) bool."""


def relations_of(schema: Schema, cscs: Sequence[Csc]) -> Relations:
    """Return the record of ``cscs``, one whole structure per edge type, to be kept alive beside it."""
    return Relations(
        schema.offsets,
        schema.source_types,
        schema.destination_types,
        _addresses([csc.indptr for csc in cscs], (np.int64,)),
        _addresses([csc.indices for csc in cscs], (np.int32, np.int64)),
        _addresses([csc.weights for csc in cscs], (np.float32,)),
        np.array([len(csc.indptr) - 1 for csc in cscs], np.int64),
        np.array([len(csc.indices) for csc in cscs], np.int64),
        np.array([len(csc.weights) for csc in cscs], np.int64),
        np.array([csc.indices.dtype == np.int64 for csc in cscs], np.bool_),
    )


def _addresses(arrays: Sequence[Array], dtypes: tuple[Any, ...]) -> Array:
    for array in arrays:
        assert array.dtype in dtypes
        assert array.flags.c_contiguous
        assert array.flags.aligned
    return np.array([array.ctypes.data for array in arrays], np.int64)


@intrinsic
def _pointer(_context: Any, address: Any) -> Any:
    """Return the address as a pointer."""

    def generate(_compiler: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], _compiler.get_value_type(signature.return_type))

    return types.voidptr(types.int64), generate


@njit(cache=True, nogil=True)
def csc_at(relations: Relations, number: int) -> Csc:
    """Return edge type ``number`` as :mod:`pick` reads it, with no indices: drawing needs none."""
    rows = np.int64(relations.num_destinations[number])
    indptr = carray(_pointer(relations.indptr[number]), rows + 1, dtype=np.int64)
    weights = carray(
        _pointer(relations.weights[number]), np.int64(relations.num_weights[number]), dtype=np.float32
    )
    return Csc(indptr, np.empty(0, np.int64), weights, 0, 0)


@njit(cache=True, nogil=True)
def read_sources(relations: Relations, number: int, edges: Array, out: Array) -> None:
    """Write the keys of the sources of ``edges`` ((k,) ids of edge type ``number``) to ``out`` (int64)."""
    first = relations.offsets[relations.source_types[number]]
    length = np.int64(relations.num_edges[number])
    # Two loops: the width is known before the first edge, and a branch inside would be asked for each.
    if relations.wide[number]:
        wide = carray(_pointer(relations.indices[number]), length, dtype=np.int64)
        for i in range(len(edges)):
            out[i] = first + wide[np.uint64(edges[i])]
    else:
        narrow = carray(_pointer(relations.indices[number]), length, dtype=np.int32)
        for i in range(len(edges)):
            out[i] = first + narrow[np.uint64(edges[i])]
