"""``dgl.distributed.optim``: DGL's sparse optimizers around ours."""

from collections.abc import Callable, Sequence
from typing import Any, final

from dglx_dist.compat.dist_tensor import DistEmbedding
from dglx_dist.graph.optim import SparseOptimizer
from dglx_dist.graph.sparse_update import UpdateRule, adagrad_rule, adam_rule

__all__ = ["SparseAdagrad", "SparseAdam"]


class _Optimizer(SparseOptimizer):
    """A sparse optimizer with DGL's arguments.

    :meth:`save` writes embeddings and state to a folder on a shared disk, where DGL writes one pickle per
    rank, with the state alone; every rank must call it, and :meth:`load`, on any number of ranks.
    """

    def __init__(self, params: Sequence[DistEmbedding], rule: Callable[[], UpdateRule]) -> None:
        inner: Any = [param.inner if isinstance(param, DistEmbedding) else param for param in params]
        super().__init__(inner, rule)


@final
class SparseAdagrad(_Optimizer):
    """Adagrad on the rows used in a step; see ``dglx_dist.optim.SparseAdagrad``."""

    def __init__(self, params: Sequence[DistEmbedding], lr: float, eps: float = 1e-10) -> None:
        super().__init__(params, lambda: adagrad_rule(lr, eps))


@final
class SparseAdam(_Optimizer):
    """Adam on the rows used in a step, with one step count per embedding; ``eps`` as in DGL."""

    saved_as = "AdamAsDgl"  # states of dglx_dist.optim.SparseAdam, which has another eps, must not load here

    def __init__(
        self,
        params: Sequence[DistEmbedding],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        super().__init__(params, lambda: adam_rule(lr, betas, eps, corrected=True))
