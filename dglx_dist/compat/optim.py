"""``dgl.distributed.optim``: DGL's sparse optimizers around ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from os import PathLike, fsdecode
from typing import Any, final

from dglx_dist.compat.dist_tensor import DistEmbedding
from dglx_dist.graph.optim import SparseOptimizer, UpdateOptions
from dglx_dist.graph.sparse_state import SparseState
from dglx_dist.graph.sparse_update import AdagradRule, AdamRule, UpdateRule

__all__ = ["SparseAdagrad", "SparseAdam"]


class _Optimizer(SparseOptimizer):
    """A sparse optimizer with DGL's arguments."""

    def __init__(self, params: Sequence[DistEmbedding], rule: Callable[[], UpdateRule]) -> None:
        inner: Any = [param.inner if isinstance(param, DistEmbedding) else param for param in params]
        super().__init__(inner, lambda: (rule(), UpdateOptions()))

    def load_local_state_dict(self, local_state_dict: Mapping[str, Any]) -> None:
        """Load the result of :meth:`local_state_dict` of any rank; call a barrier afterwards."""
        super().load_local_state_dict(local_state_dict)

    def save(self, f: str | bytes | PathLike[str]) -> None:
        """Write embeddings and state to the folder ``f`` on a shared disk; every rank must call it.

        DGL writes one pickle per rank, with the state alone.
        """
        super().save(fsdecode(f))

    def load(self, f: str | bytes | PathLike[str]) -> None:
        """Load what :meth:`save` wrote, on any number of ranks; every rank must call it."""
        super().load(fsdecode(f))


@final
class SparseAdagrad(_Optimizer):
    """Adagrad on the rows used in a step; see ``dglx_dist.optim.SparseAdagrad``."""

    def __init__(self, params: Sequence[DistEmbedding], lr: float, eps: float = 1e-10) -> None:
        super().__init__(params, lambda: AdagradRule(lr, eps))


@final
class SparseAdam(_Optimizer):
    """Adam on the rows used in a step, with one step count per embedding; ``eps`` as in DGL."""

    def __init__(
        self,
        params: Sequence[DistEmbedding],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        super().__init__(params, lambda: AdamRule(lr, betas, eps, corrected=True))

    @property
    def saved_state(self) -> SparseState:
        # Its eps is not that of dglx_dist.optim.SparseAdam, whose states must not load here.
        return replace(super().saved_state, kind="AdamAsDgl")
