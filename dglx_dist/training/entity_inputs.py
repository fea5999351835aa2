"""What goes into the first layer, per node type: stored features, or the rows of a trainable embedding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, final

import dgl
import torch
from torch import Tensor

from dglx_dist.errors import ConfigError
from dglx_dist.graph.dist_tensor import DistTensor
from dglx_dist.records import FEATURE
from dglx_dist.sampling.precision import HALVES

if TYPE_CHECKING:
    from dglx_dist.graph import DistGraph


class Embedding(Protocol):
    """What is asked of a ``dglx_dist.DistEmbedding``."""

    @property
    def weight(self) -> DistTensor:
        """(N, d) rows of all nodes."""
        ...

    def __call__(self, ids: Tensor, device: torch.device | None = None) -> Tensor:
        """Return the (K, d) rows of ``ids``, recorded for the sparse optimizer."""
        ...


@final
class EntityInputs:
    """Gathers the input rows of every node type of a batch; any rank alone.

    Args:
        g: The graph.
        feature: Node data of the types that have it.
        embeddings: Node type to its embedding, which goes before features. For a graph of one node type that
            type's name is ``g.ntypes[0]``.

    Raises:
        ConfigError: a type has neither, or features that are not (N, F), or an embedding is given for a type
            that does not exist or has another number of rows than the type has nodes.
    """

    def __init__(
        self, g: DistGraph, *, feature: str = FEATURE, embeddings: Mapping[str, Embedding] | None = None
    ) -> None:
        self._g, self.feature = g, feature
        """Name of the node data."""
        self._embeddings = dict(embeddings or {})
        for ntype, embedding in self._embeddings.items():
            if len(embedding.weight) != g.get_node_partition_policy(ntype).get_size():
                raise ConfigError(
                    f"the embedding of {ntype!r} has {len(embedding.weight)} rows for {g.num_nodes(ntype)} "
                    "nodes; make it with num_embeddings=g.num_nodes(ntype)"
                )
        without = [
            ntype
            for ntype in g.ntypes
            if ntype not in self._embeddings and feature not in g.nodes[ntype].data
        ]
        if without:
            raise ConfigError(
                f"nodes of type {without[0]!r} have no tensor {feature!r}; give them a DistEmbedding with "
                f"embeddings={{{without[0]!r}: ...}}"
            )

        for ntype, tensor in self.tensors.items():
            if len(tensor.shape) != 2:
                raise ConfigError(
                    f"{feature!r} of nodes of type {ntype!r} has shape {tuple(tensor.shape)}; "
                    "it must be (N, F)"
                )

    @property
    def feature_widths(self) -> dict[str, int]:
        """Columns of the features, for the types that have no embedding."""
        return {
            ntype: self._g.nodes[ntype].data[self.feature].shape[1]
            for ntype in self._g.ntypes
            if ntype not in self._embeddings
        }

    @property
    def tensors(self) -> dict[str, DistTensor]:
        """All rows of every type: the ``inputs`` of :func:`layerwise_inference`."""
        return {
            ntype: self._embeddings[ntype].weight
            if ntype in self._embeddings
            else self._g.nodes[ntype].data[self.feature]
            for ntype in self._g.ntypes
        }

    def __call__(self, block: Any) -> dict[str, Tensor]:
        """Return {node type: (num_src, width)} for the sources of the input-most block.

        Features that the loader did not attach are fetched now.
        """
        return {ntype: self._rows(block, ntype) for ntype in block.srctypes}

    def _rows(self, block: Any, ntype: str) -> Tensor:
        data = block.srcnodes[ntype].data
        if ntype in self._embeddings:
            return self._embeddings[ntype](data[dgl.NID], block.device)
        if self.feature in data:
            rows = data[self.feature]
            assert isinstance(rows, Tensor)
            return rows
        rows = self._g.nodes[ntype].data[self.feature][data[dgl.NID]]
        # As a loader hands them out.
        return rows.float() if rows.dtype in HALVES else rows
