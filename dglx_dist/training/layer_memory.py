"""Memory that a layer takes for each edge and each node of a batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, final

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_EDGE_COPIES = 3
"""Tensors with a row for each edge that a layer holds at once. GATv2 has these in its attention."""


@final
class LayerMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not annotate this
    """Records the widest row for an edge and for a node while a layer runs on ``block`` inside the block."""

    def __init__(self, block: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate this
        self._edge_counts = {block.num_edges(etype) for etype in block.canonical_etypes}
        self._node_counts = {block.num_src_nodes(ntype) for ntype in block.srctypes}
        self._node_counts |= {block.num_dst_nodes(ntype) for ntype in block.dsttypes}
        self._widest_edge_bytes = 0
        self.node_bytes = 0
        """Bytes of the widest row for a node."""

    @property
    def edge_bytes(self) -> int:
        """Bytes for an edge."""
        return _EDGE_COPIES * self._widest_edge_bytes

    def __torch_dispatch__(
        self, function: Any, _types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        output = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if not isinstance(tensor, Tensor) or tensor.dim() == 0:
                continue
            row_bytes = math.prod(tensor.shape[1:]) * tensor.itemsize
            if len(tensor) in self._edge_counts:
                self._widest_edge_bytes = max(self._widest_edge_bytes, row_bytes)
            elif len(tensor) in self._node_counts:
                self.node_bytes = max(self.node_bytes, row_bytes)
        return output
