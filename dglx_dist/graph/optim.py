"""Optimisers of :class:`~dglx_dist.graph.embedding.DistEmbedding`; public as ``dglx_dist.optim``.

Their formulas are torch's: in mode "sync" the rows are, step by step, those of
``torch.nn.Embedding(sparse=True)`` trained in one process on the batches of all ranks together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from dglx_dist.graph.embedding import DistEmbedding
from dglx_dist.graph.sparse_gradient import Reduction
from dglx_dist.graph.sparse_optimizer import Mode, SparseOptimizer, UpdateOptions
from dglx_dist.graph.sparse_rules import AdagradRule, AdamRule, SgdRule

__all__ = ["SparseAdagrad", "SparseAdam", "SparseSGD"]


@final
class SparseSGD(SparseOptimizer):
    """``torch.optim.SGD`` without momentum, for embeddings.

    Args:
        params: The embeddings.
        lr: The learning rate.
        mode: "sync" or "async", see :class:`~dglx_dist.graph.sparse_optimizer.UpdateOptions`.
        staleness: For "async".
        reduction: What the loss is over a rank's own targets: "mean" or "sum".

    Raises:
        ConfigError: see :class:`~dglx_dist.graph.sparse_optimizer.SparseOptimizer`.
    """

    def __init__(
        self,
        params: Sequence[DistEmbedding],
        lr: float,
        *,
        mode: Mode = "sync",
        staleness: int = 1,
        reduction: Reduction = "mean",
    ) -> None:
        def told() -> tuple[SgdRule, UpdateOptions]:
            return SgdRule(lr), UpdateOptions(mode=mode, staleness=staleness, reduction=reduction)

        super().__init__(params, told)


@final
class SparseAdagrad(SparseOptimizer):
    """``torch.optim.Adagrad`` for embeddings; keeps one row of squares beside each row.

    Args:
        params: The embeddings.
        lr: The learning rate.
        eps: Added to the root of the sum of squares.
        mode: As for :class:`SparseSGD`.
        staleness: Likewise.
        reduction: Likewise.

    Raises:
        ConfigError: see :class:`~dglx_dist.graph.sparse_optimizer.SparseOptimizer`.
    """

    def __init__(
        self,
        params: Sequence[DistEmbedding],
        lr: float,
        eps: float = 1e-10,
        *,
        mode: Mode = "sync",
        staleness: int = 1,
        reduction: Reduction = "mean",
    ) -> None:
        def told() -> tuple[AdagradRule, UpdateOptions]:
            return AdagradRule(lr, eps), UpdateOptions(mode=mode, staleness=staleness, reduction=reduction)

        super().__init__(params, told)


@final
class SparseAdam(SparseOptimizer):
    """``torch.optim.SparseAdam`` for embeddings; keeps two rows of moments beside each row.

    In mode "async" the step that corrects the moments is the number of pushes that the owner has applied.

    Args:
        params: The embeddings.
        lr: The learning rate.
        betas: How fast the moments forget.
        eps: Added to the root of the second moment.
        mode: As for :class:`SparseSGD`.
        staleness: Likewise.
        reduction: Likewise.

    Raises:
        ConfigError: see :class:`~dglx_dist.graph.sparse_optimizer.SparseOptimizer`.
    """

    def __init__(
        self,
        params: Sequence[DistEmbedding],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        *,
        mode: Mode = "sync",
        staleness: int = 1,
        reduction: Reduction = "mean",
    ) -> None:
        def told() -> tuple[AdamRule, UpdateOptions]:
            return AdamRule(lr, betas, eps), UpdateOptions(
                mode=mode, staleness=staleness, reduction=reduction
            )

        super().__init__(params, told)
