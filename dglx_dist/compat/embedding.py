"""DGL's ``DistEmbedding``, over ours."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from dglx_dist.cluster.shared import Shared
from dglx_dist.compat.kvstore import KVClient
from dglx_dist.compat.opened import graph_of_store
from dglx_dist.compat.policy import PartitionPolicy, inner_policy, outer_policy
from dglx_dist.compat.tensor import DistTensor
from dglx_dist.graph.dist_tensor import opened_graph
from dglx_dist.graph.embedding import DistEmbedding as Inner
from dglx_dist.graph.ids import Ids
from dglx_dist.graph.shared_rows import InitRows


@final
class DistEmbedding(Shared):
    """Trainable rows with DGL's arguments; ``.inner`` is ours. Creating one is collective.

    Args:
        num_embeddings: Rows.
        embedding_dim: Columns.
        name: Attaches to what exists of that name.
        init_func: (shape, dtype) to the first rows; zeros when None, as with DGL.
        part_policy: Needed where several types have so many nodes or edges.

    Raises:
        ConfigError: as for ``dglx_dist.DistEmbedding``.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        name: str | None = None,
        init_func: InitRows | None = None,
        part_policy: PartitionPolicy | None = None,
    ) -> None:
        policy = inner_policy(part_policy)
        first = init_func or _zeros
        graph = opened_graph() if policy is None else graph_of_store(policy.store)
        self.inner = Inner(num_embeddings, embedding_dim, name, first, policy, graph=graph)

    def __call__(self, idx: Ids, device: torch.device | str = "cpu") -> Tensor:
        """Return rows, whose gradients an optimizer of ``dgl.distributed.optim`` will take."""
        return self.inner(idx, device)

    def reset_trace(self) -> None:
        """Forget the gradients that are there."""
        self.inner.reset_trace()

    @property
    def weight(self) -> DistTensor:
        """The rows."""
        return DistTensor.over(self.inner.weight)

    @property
    def name(self) -> str:
        """The name given at creation."""
        return self.inner.name

    @property
    def data_name(self) -> str:
        """Under which the store knows the rows."""
        return self.inner.weight.kvstore_key

    @property
    def kvstore(self) -> KVClient:
        """The store that holds the rows."""
        return KVClient.over(self.inner.kvstore)

    @property
    def num_embeddings(self) -> int:
        """Rows."""
        return self.inner.num_embeddings

    @property
    def embedding_dim(self) -> int:
        """Columns."""
        return self.inner.embedding_dim

    @property
    def part_policy(self) -> PartitionPolicy:
        """How the rows are laid over the partitions."""
        return outer_policy(self.inner.part_policy)

    @property
    def optm_state(self) -> tuple[DistTensor, ...]:
        """The optimizer's tensors, once there is one."""
        return tuple(DistTensor.over(state) for state in self.inner.optm_state)


def inner_embedding(embedding: object) -> object:
    """Return ours where ``embedding`` is DGL's view of it, else ``embedding``."""
    return embedding.inner if isinstance(embedding, DistEmbedding) else embedding


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.zeros(shape, dtype=dtype)
