"""Modules for the models of users: batch norm whose statistics cover the rows of all ranks."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from dglx_dist.comm.collectives import gather_rows, peers_named, sum_over_ranks
from dglx_dist.comm.session import Session, SessionField, warn_user
from dglx_dist.layers.dropout import NodeDropouts

PHASE = "batch_norm"
"""Phase of the ledger for sums of statistics, and for the ids of the nodes that they cover."""


def _open_group(session: Session) -> dist.ProcessGroup | None:
    if session.topology.world_size == 1:
        return None
    with peers_named(session, "the group of batch norms"):
        made: dist.ProcessGroup = dist.new_group(timeout=timedelta(seconds=session.timeout_s))
        return made


_GROUP: SessionField[dist.ProcessGroup | None] = SessionField(_open_group)
"""A process group of their own, because sums of gradients may be under way in the other one."""


@final
class StatisticsExchange:
    """Sums the statistics of one wrapped model's batch norms over the ranks.

    ``rows`` knows the nodes of a module's rows during a pass.
    """

    def __init__(self, session: Session, rows: NodeDropouts) -> None:
        self._session, self._rows = session, rows
        self.weight = 1.0
        """This rank's weight, by which the wrapped model multiplies gradients of parameters afterwards."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        # Copies of a model compute by themselves until they are wrapped.
        return type(None), ()

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of ``values`` over the ranks, in place; every rank must call it."""
        group = _GROUP.of(self._session)
        return sum_over_ranks(values, self._session, phase=PHASE, in_place=True, group=group)

    def shares(self, x: Tensor) -> Tensor:
        """Return for each row of ``x`` one over the number of ranks with that node, (n, 1) float64.

        It is 1 where a rank does not know the nodes of its rows. Every rank must call it.
        """
        ones = torch.ones(len(x), 1, dtype=torch.float64, device=x.device)
        if self._session.topology.world_size == 1:
            return ones
        ids = self._rows.ids_of_rows(x)
        count = torch.tensor([-1 if ids is None else len(ids)]).to(x.device)
        sizes: list[int] = self._gather(count)[:, 0].tolist()
        if ids is None or min(sizes) < 0:
            return ones
        padded = functional.pad(ids, (0, max(sizes) - len(ids)))
        everywhere = torch.cat([row[:size] for row, size in zip(self._gather(padded), sizes, strict=True)])
        distinct, counts = torch.unique(everywhere, return_counts=True)
        return ones / counts[torch.searchsorted(distinct, ids)].unsqueeze(1)

    def _gather(self, values: Tensor) -> Tensor:
        return gather_rows(values, self._session, phase=PHASE, group=_GROUP.of(self._session))


@final
class BatchNorm(nn.Module):
    """``nn.BatchNorm1d`` over the rows of all ranks in training, as one process would compute it.

    A node that several ranks compute counts once where the wrapped model knows the nodes of the rows: in
    models called with blocks of one node type. Elsewhere each of its rows counts, as in
    ``nn.SyncBatchNorm``. Outside of a wrapped model it is ``nn.BatchNorm1d``.

    Args and state are those of ``nn.BatchNorm1d``. Each call in training sends 16 bytes for each column and
    rank, as much in backward, and 8 bytes for each row to every other rank.
    """

    def __init__(
        self, num_features: int, eps: float = 1e-5, momentum: float | None = 0.1, *, affine: bool = True
    ) -> None:
        super().__init__()
        self.exchange: StatisticsExchange | None = None
        # Holds parameters and running statistics under the names of torch.
        inner = nn.BatchNorm1d(num_features, eps, momentum, affine)
        self.num_features, self.eps, self.momentum = num_features, eps, momentum
        self.weight, self.bias = inner.weight, inner.bias
        for name, buffer in inner.named_buffers():
            self.register_buffer(name, buffer)

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    @classmethod
    def convert(cls, model: nn.Module) -> nn.Module:
        """Replace every ``nn.BatchNorm1d`` of ``model`` with running statistics in place, and return it.

        Parameters and buffers are kept; so call it before the optimizer is built or after.
        """
        converted = {one: cls._of(one) for one in model.modules() if _can_convert(one)}
        for module in list(model.modules()):
            for name, child in module._modules.items():
                if child in converted:
                    module.register_module(name, converted[child])
        return converted.get(model, model)

    @classmethod
    def _of(cls, norm: Any) -> BatchNorm:
        converted = cls(norm.num_features, norm.eps, norm.momentum, affine=norm.affine)
        converted.weight, converted.bias = norm.weight, norm.bias
        converted._buffers.update(norm._buffers)
        return converted.train(norm.training)

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized rows of ``x``, (n, C); collective in training within a wrapped model."""
        if not self.training:
            statistics = self.running_mean, self.running_var
            return functional.batch_norm(x, *statistics, self.weight, self.bias, False, 0.0, self.eps)
        self.num_batches_tracked.add_(1)
        factor = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        if self.exchange is None:
            statistics = self.running_mean, self.running_var
            return functional.batch_norm(x, *statistics, self.weight, self.bias, True, factor, self.eps)
        normalized, mean, variance = _Normalize.apply(x, self.running_mean, self.eps, self.exchange)  # type: ignore[no-untyped-call]  # torch leaves it bare
        with torch.no_grad():
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
            self.running_var.lerp_(variance.to(self.running_var.dtype), factor)
        return normalized if self.weight is None else normalized * self.weight + self.bias


class _Normalize(torch.autograd.Function):
    """Rows with mean 0 and variance 1 over all ranks, in float64; also returns mean and unbiased variance."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, near_mean: Tensor, eps: float, exchange: StatisticsExchange
    ) -> tuple[Tensor, Tensor, Tensor]:
        # Moments about a value near the mean keep their digits.
        origin = near_mean.double()
        rows, shares = x.detach().double() - origin, exchange.shares(x)
        weighted = rows * shares
        total = exchange.sum(torch.cat([shares.sum(0), weighted.sum(0), (weighted * rows).sum(0)]))
        width = x.shape[1]
        count, mean = total[0], total[1 : 1 + width] / total[0]
        variance = (total[1 + width :] / count - mean**2).clamp_(min=0)
        scale = (variance + eps).rsqrt()
        normalized = (rows - mean) * scale
        ctx.exchange, ctx.weight, ctx.dtype = exchange, exchange.weight, x.dtype
        ctx.save_for_backward(normalized.to(x.dtype), scale, shares / count)
        unbiased = variance * count / (count - 1).clamp(min=1)
        return normalized.to(x.dtype), mean + origin, unbiased

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor, None, None, None]:
        normalized, scale, shares = ctx.saved_tensors
        # The parameters' gradients are weighted afterwards, but these sums need the weights now.
        weighted = gradient.double() * ctx.weight
        total = ctx.exchange.sum(torch.cat([weighted.sum(0), (weighted * normalized).sum(0)]))
        of_mean, of_scale = total.tensor_split(2)
        found = scale * (weighted - shares * (of_mean + normalized * of_scale))
        # A rank without weight has no rows.
        return (found / (ctx.weight or 1.0)).to(ctx.dtype), None, None, None


def _can_convert(module: nn.Module | None) -> bool:
    # Of exactly this class: a subclass does something else.
    return type(module) is nn.BatchNorm1d and module.track_running_stats


def install_batch_norms(model: nn.Module, session: Session, rows: NodeDropouts) -> StatisticsExchange:
    """Let every :class:`BatchNorm` of ``model`` compute over all ranks; ``rows`` knows the nodes."""
    exchange = StatisticsExchange(session, rows)
    norms = [module for module in model.modules() if isinstance(module, BatchNorm)]
    for norm in norms:
        norm.exchange = exchange
    if norms:
        rows.track(model)
    return exchange


def warn_of_local_statistics(model: nn.Module, session: Session) -> None:
    """Warn if a batch norm of ``model`` takes its mean and variance over this rank's rows alone."""
    local = {name: one for name, one in model.named_modules() if isinstance(one, _BatchNorm)}
    if not local or session.topology.world_size == 1:
        return
    name = next((name for name, one in local.items() if _can_convert(one)), None)
    remedy = "use dx.nn.BatchNorm, or nn.LayerNorm"
    if name is not None:
        remedy = "call dx.nn.BatchNorm.convert(model) before dx.wrap, which takes them over all ranks"
    warn_user(
        f"the batch norm {name or next(iter(local))!r} takes its mean and variance over the rows of each "
        "rank, or counts a node once for each rank that computes it, so training differs from that of one "
        f"process; {remedy}"
    )
