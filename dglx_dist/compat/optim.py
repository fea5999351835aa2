"""``dgl.distributed.optim``, over ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike, fsdecode
from typing import Any, cast, final

from dglx_dist.compat.dist_tensor import DistEmbedding, inner_embedding
from dglx_dist.graph import optim
from dglx_dist.graph.embedding import DistEmbedding as InnerEmbedding
from dglx_dist.graph.optim import SparseOptimizer, UpdateOptions
from dglx_dist.graph.sparse_update import AdamRule

__all__ = ["SparseAdagrad", "SparseAdam"]


class _Optimizer:
    """What both share: DGL's methods, by way of one of ours."""

    def __init__(self, inner: SparseOptimizer) -> None:
        self.inner = inner

    def step(self) -> None:
        """Apply the gradients of all ranks; every rank must call it."""
        self.inner.step()

    def zero_grad(self) -> None:
        """Forget the gradients that earlier backward passes left."""
        self.inner.zero_grad()

    def local_state_dict(self) -> dict[str, Any]:
        """Return the settings, and the state of the rows that this rank owns."""
        return self.inner.local_state_dict()

    def load_local_state_dict(self, local_state_dict: Mapping[str, Any]) -> None:
        """Take over what :meth:`local_state_dict` gave on some rank; a barrier belongs behind it."""
        self.inner.load_local_state_dict(local_state_dict)

    def save(self, f: str | bytes | PathLike[str]) -> None:
        """Write embeddings and state as the folder ``f``, which all ranks see; every rank must call it.

        DGL writes one pickle per rank, and the state alone.
        """
        self.inner.save(fsdecode(f))

    def load(self, f: str | bytes | PathLike[str]) -> None:
        """Go on with what :meth:`save` wrote, on any number of ranks; every rank must call it."""
        self.inner.load(fsdecode(f))


@final
class SparseAdagrad(_Optimizer):
    """Adagrad of the rows that were used; see ``dglx_dist.optim.SparseAdagrad``."""

    def __init__(self, params: Sequence[DistEmbedding], lr: float, eps: float = 1e-10) -> None:
        super().__init__(optim.SparseAdagrad(_inner(params), lr, eps))


@final
class AdamAsDgl(SparseOptimizer):
    """``dglx_dist.optim.SparseAdam`` with ``eps`` where DGL adds it."""

    def __init__(
        self, params: Sequence[InnerEmbedding], lr: float, betas: tuple[float, float], eps: float
    ) -> None:
        super().__init__(params, lambda: (AdamRule(lr, betas, eps, corrected=True), UpdateOptions()))


@final
class SparseAdam(_Optimizer):
    """Adam of the rows that were used, with one step count for each embedding."""

    def __init__(
        self,
        params: Sequence[DistEmbedding],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        super().__init__(AdamAsDgl(_inner(params), lr, betas, eps))


def _inner(params: Sequence[DistEmbedding]) -> list[InnerEmbedding]:
    return [cast("InnerEmbedding", inner_embedding(param)) for param in params]
