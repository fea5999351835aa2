"""``dgl.distributed.optim``: DGL's sparse optimizers around ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike, fsdecode
from typing import Any, final

from dglx_dist.compat.dist_tensor import DistEmbedding
from dglx_dist.compat.wrappers import Forward
from dglx_dist.graph import optim
from dglx_dist.graph.embedding import DistEmbedding as InnerEmbedding
from dglx_dist.graph.optim import SparseOptimizer, UpdateOptions
from dglx_dist.graph.sparse_update import AdamRule

__all__ = ["SparseAdagrad", "SparseAdam"]


class _Optimizer:
    """DGL's methods of sparse optimizers; ``.inner`` is ours."""

    def __init__(self, inner: SparseOptimizer) -> None:
        self.inner = inner

    step = Forward(SparseOptimizer.step)
    zero_grad = Forward(SparseOptimizer.zero_grad)
    local_state_dict = Forward(SparseOptimizer.local_state_dict)

    def load_local_state_dict(self, local_state_dict: Mapping[str, Any]) -> None:
        """Load the result of :meth:`local_state_dict` of any rank; call a barrier afterwards."""
        self.inner.load_local_state_dict(local_state_dict)

    def save(self, f: str | bytes | PathLike[str]) -> None:
        """Write embeddings and state to the folder ``f`` on a shared disk; every rank must call it.

        DGL writes one pickle per rank, with the state alone.
        """
        self.inner.save(fsdecode(f))

    def load(self, f: str | bytes | PathLike[str]) -> None:
        """Load what :meth:`save` wrote, on any number of ranks; every rank must call it."""
        self.inner.load(fsdecode(f))


@final
class SparseAdagrad(_Optimizer):
    """Adagrad on the rows used in a step; see ``dglx_dist.optim.SparseAdagrad``."""

    def __init__(self, params: Sequence[DistEmbedding], lr: float, eps: float = 1e-10) -> None:
        super().__init__(optim.SparseAdagrad(_inner(params), lr, eps))


@final
class AdamAsDgl(SparseOptimizer):
    """``dglx_dist.optim.SparseAdam`` with ``eps`` added where DGL adds it."""

    # Saved states hold the name of this class.

    def __init__(
        self, params: Sequence[InnerEmbedding], lr: float, betas: tuple[float, float], eps: float
    ) -> None:
        super().__init__(params, lambda: (AdamRule(lr, betas, eps, corrected=True), UpdateOptions()))


@final
class SparseAdam(_Optimizer):
    """Adam on the rows used in a step, with one step count per embedding."""

    def __init__(
        self,
        params: Sequence[DistEmbedding],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        super().__init__(AdamAsDgl(_inner(params), lr, betas, eps))


def _inner(params: Sequence[DistEmbedding]) -> list[InnerEmbedding]:
    return [param.inner if isinstance(param, DistEmbedding) else param for param in params]
