"""A warning for loops of the user: a mean loss over fewer targets than seeds is not exact over the ranks."""

from __future__ import annotations

import logging
from typing import Any

import dgl
import torch

from dglx_dist.comm.session import Session, SessionField, warn_user

log = logging.getLogger(__name__)

IS_EXACT: SessionField[bool] = SessionField(lambda _: False)
"""Whether losses are means over all ranks, or the user has been warned that they are not."""
_REMEDY = "the mean is exact over all ranks as dx.global_mean(sum of the losses, number of targets)"


def warn_of_gaps(batch: Any, optimizer: torch.optim.Optimizer, number: int, session: Session) -> None:
    """Warn once if a step was over seeds without targets, or its gradients are NaN.

    On a GPU, where looking waits for it, and for NaN, only some of the steps are looked at.
    """
    blocks = batch[-1] if isinstance(batch, list | tuple) else None
    last = blocks[-1] if isinstance(blocks, list | tuple) and blocks else None
    if IS_EXACT.of(session) or last is None:
        return
    is_looked_at, message = number & (number - 1) == 0, ""
    columns = [(name, c) for t in last.dsttypes for name, c in last.dstnodes[t].data.items() if c.dim() == 1]
    for name, column in columns:
        if name == dgl.NID or (column.is_cuda and not is_looked_at):
            continue
        gaps = int((column.isnan() if column.is_floating_point() else column < 0).sum())
        if gaps:
            message = f"{gaps} of {len(column)} seeds have no target in {name!r} (NaN or below 0)"
    gradients = (p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
    if not message and is_looked_at and any(bool(one.isnan().any()) for one in gradients):
        message = "the gradients of a step are NaN, as of a mean over no targets on one rank"
    if not message:
        return
    IS_EXACT.set(session, True)
    if session.topology.rank == 0:
        warn_user(f"{message}; {_REMEDY}")
    else:
        log.warning("rank %d: %s; %s", session.topology.rank, message, _REMEDY)
