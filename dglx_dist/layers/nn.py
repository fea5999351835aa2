"""Modules for users' models: batch norm with statistics over the rows on all ranks."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, cast, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from dglx_dist.comm.collectives import gather_rows, report_failed_peers, sum_over_ranks
from dglx_dist.comm.session import Session, SessionField, warn_user
from dglx_dist.dataloading.step_loader import WRAPPED_MODELS
from dglx_dist.errors import ConfigError, shorten_list
from dglx_dist.internals.pytorch import AnyBatchNorm, NormWithStatistics
from dglx_dist.layers.dropout import NodeDropouts

PHASE = "batch_norm"
"""Ledger phase for the summed statistics, and for the node ids that they cover."""


def _open_group(session: Session) -> dist.ProcessGroup:
    with report_failed_peers(session, "the group of batch norms"):
        group: dist.ProcessGroup = dist.new_group(timeout=timedelta(seconds=session.timeout_s))
        return group


_GROUP: SessionField[dist.ProcessGroup] = SessionField(_open_group)
"""Process group for batch norms, because gradient sums may be under way in the other group."""


@final
class StatisticsExchange:
    """Sums batch norm statistics over the ranks, for one wrapped model.

    ``rows`` knows which nodes a module's rows belong to during a pass.
    """

    def __init__(self, session: Session, rows: NodeDropouts) -> None:
        self._session, self._rows = session, rows
        self.weight = 1.0
        """This rank's weight. The wrapped model multiplies parameter gradients by it afterwards."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        # Copied models compute alone until they are wrapped.
        return type(None), ()

    def sum(self, values: Tensor) -> Tensor:
        """Sum ``values`` over the ranks, in place, and return them. Every rank must call this."""
        group = _GROUP.get(self._session)
        return sum_over_ranks(values, self._session, phase=PHASE, in_place=True, group=group)

    def compute_shares(self, x: Tensor) -> Tensor:
        """Return (n, 1) float64: for each row in ``x``, 1 / the number of ranks with that node.

        It is 1 if a rank does not know its rows' nodes. Every rank must call this.
        """
        ones = torch.ones(len(x), 1, dtype=torch.float64, device=x.device)
        ids = self._rows.find_ids(x)
        count = torch.tensor([-1 if ids is None else len(ids)]).to(x.device)
        sizes: list[int] = self._gather(count)[:, 0].tolist()
        if ids is None or min(sizes) < 0:
            return ones
        padded = functional.pad(ids, (0, max(sizes) - len(ids)))
        all_ids = torch.cat([row[:size] for row, size in zip(self._gather(padded), sizes, strict=True)])
        distinct, counts = torch.unique(all_ids, return_counts=True)
        return ones / counts[torch.searchsorted(distinct, ids)].unsqueeze(1)

    def _gather(self, values: Tensor) -> Tensor:
        return gather_rows(values, self._session, phase=PHASE, group=_GROUP.get(self._session))


@final
class BatchNorm(NormWithStatistics):
    """``nn.BatchNorm1d`` over the rows on all ranks in training, with the same result as one process.

    If the model is called with blocks that have one node type, the rows' nodes are known. A node that several
    ranks compute then counts once. Elsewhere each of its rows counts, as in ``nn.SyncBatchNorm``. Outside a
    wrapped model and on one rank this is ``nn.BatchNorm1d``.

    Arguments and state are as in ``nn.BatchNorm1d``. Each call in training sends 16 bytes for each column and
    rank, as much in backward, and 8 bytes for each row to every other rank.
    """

    exchange: StatisticsExchange | None = None
    """The wrapped model's exchange, if there are several ranks."""
    num_batches_tracked: Tensor

    def __init__(
        self, num_features: int, eps: float = 1e-5, momentum: float | None = 0.1, *, affine: bool = True
    ) -> None:
        super().__init__(num_features, eps, momentum, affine)

    @classmethod
    def convert(cls, model: nn.Module) -> nn.Module:
        """Turn every ``BatchNorm1d`` and ``SyncBatchNorm`` in ``model`` into this class. Return ``model``.

        The modules change in place and keep parameters, buffers and hooks. Call this before
        :func:`dglx_dist.wrap`. Other batch norms stay unchanged, with a warning. Raises ConfigError if
        ``model`` is not a module, or contains a batch norm that is in a wrapped model.
        """
        if not isinstance(model, nn.Module):
            raise ConfigError(f"convert takes a torch.nn.Module, not a {type(model).__name__}")
        norms = _find_torch_norms(model)
        wrapped = {module for wrapped in WRAPPED_MODELS for module in wrapped.modules()}
        if late := [name for name, norm in norms.items() if norm in wrapped]:
            raise ConfigError(
                f"the batch norms {shorten_list(late)} are in a wrapped model, which would continue without "
                "the converted ones. Call model = dx.nn.BatchNorm.convert(model) before dx.wrap."
            )

        for norm in filter(_can_convert, norms.values()):
            norm.__class__ = cls
        if unchanged := _find_torch_norms(model):
            warn_user(
                f"BatchNorm.convert leaves the batch norms {shorten_list(unchanged)} unchanged, because it "
                "converts only BatchNorm1d and SyncBatchNorm with running statistics over all ranks, not "
                f"{next(iter(unchanged.values()))!r}. Use nn.LayerNorm or nn.GroupNorm, which are exact."
            )

        return model

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized (n, C) rows of ``x``. In training after ``wrap``, every rank must call this.

        Raises ConfigError in training, if all ranks have one row together, or if ``x`` is not a matrix.
        """
        factor = self.momentum or 0.0
        if self.training:
            self.num_batches_tracked.add_(1)
            factor = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        if self.exchange is None or not self.training:
            state = self.running_mean, self.running_var, self.weight, self.bias
            return functional.batch_norm(x, *state, self.training, factor, self.eps)
        normalized: Tensor = _Normalize.apply(x, self, self.exchange, factor)  # type: ignore[no-untyped-call]  # torch does not annotate this
        scaled = normalized if self.weight is None else normalized * self.weight
        return scaled if self.bias is None else scaled + self.bias


class _Normalize(torch.autograd.Function):
    """Normalizes rows by moments over all ranks, and updates the running statistics."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, norm: BatchNorm, exchange: StatisticsExchange, factor: float) -> Tensor:
        width = norm.num_features
        if x.dim() != 2 or x.shape[1] != width:
            raise ConfigError(
                f"dx.nn.BatchNorm({width}) takes rows of {width} columns, but its input has the shape "
                f"{tuple(x.shape)}. Reshape it to (rows, {width}) before, and back afterwards."
            )

        # Moments about a value near the mean keep their digits.
        running_mean = cast("Tensor", norm.running_mean)
        running_var = cast("Tensor", norm.running_var)
        origin = running_mean.double()
        rows = x.detach().double() - origin
        shares = exchange.compute_shares(x)
        weighted = rows * shares
        total = exchange.sum(torch.cat([shares.sum(0), weighted.sum(0), (weighted * rows).sum(0)]))
        count = float(total[0])
        mean = total[1 : 1 + width] / total[0]

        if round(count) == 1:
            raise ConfigError(
                f"a batch norm of {width} columns needs more than 1 row in training, but all ranks together "
                "have 1. Use larger batches, drop_last=True, or model.eval()."
            )

        variance = (total[1 + width :] / count - mean**2).clamp_(min=0)
        scale = (variance + norm.eps).rsqrt()
        normalized = ((rows - mean) * scale).to(x.dtype)
        ctx.exchange = exchange
        ctx.weight = exchange.weight
        ctx.dtype = x.dtype
        ctx.save_for_backward(normalized, scale, shares / count)
        if count:
            running_mean.lerp_((mean + origin).to(running_mean.dtype), factor)
            running_var.lerp_((variance * count / (count - 1)).to(running_var.dtype), factor)
        return normalized

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        normalized, scale, shares = ctx.saved_tensors
        # The parameter gradients are weighted afterwards, but these sums need the weights now.
        weighted = gradient.double() * ctx.weight
        total = ctx.exchange.sum(torch.cat([weighted.sum(0), (weighted * normalized).sum(0)]))
        mean_gradient, scale_gradient = total.tensor_split(2)
        row_gradient = scale * (weighted - shares * (mean_gradient + normalized * scale_gradient))
        # A rank without weight has no rows.
        return (row_gradient / (ctx.weight or 1.0)).to(ctx.dtype), None, None, None


def _find_torch_norms(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if isinstance(module, AnyBatchNorm)}


def _can_convert(norm: Any) -> bool:
    # Only exact classes: a subclass may do something else, and a process group may lack ranks.
    is_over_all = type(norm) is nn.SyncBatchNorm and norm.process_group is None
    return (is_over_all or type(norm) is nn.BatchNorm1d) and bool(norm.track_running_stats)


def install_batch_norms(model: nn.Module, session: Session, rows: NodeDropouts) -> StatisticsExchange:
    """Let every :class:`BatchNorm` in ``model`` compute over all ranks. ``rows`` knows the rows' nodes.

    Warns about torch's own batch norms, which use only this rank's rows.
    """
    exchange = StatisticsExchange(session, rows)
    is_alone = session.topology.world_size == 1
    for norm in [module for module in model.modules() if isinstance(module, BatchNorm)]:
        norm.exchange = None if is_alone else exchange
        if not is_alone:
            rows.track(model)

    if not is_alone and (local := _find_torch_norms(model)):
        warn_user(
            f"the batch norms {shorten_list(local)} use the mean and variance of the rows of each rank, or "
            "count a node once for each rank that computes it, so training differs from one process. Call "
            "dx.nn.BatchNorm.convert(model) before dx.wrap, or use nn.LayerNorm."
        )

    return exchange
