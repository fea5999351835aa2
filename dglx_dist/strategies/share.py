"""How much one rank's loss counts in a step: the only place that turns targets into a weight."""

from __future__ import annotations

from collections.abc import Iterable

from dglx_dist.cluster.collectives import gather_int64
from dglx_dist.cluster.session import Session
from dglx_dist.errors import ConfigError
from dglx_dist.records import StepShare
from dglx_dist.strategies.base import Reduction


def count_targets(num_local: int, session: Session) -> StepShare:
    """Return the share of a rank with ``num_local`` targets; every rank must call it.

    For loops without ``dglx_dist.DataLoader``: set ``session.step_share`` to the result.
    """
    counts = gather_int64([num_local], session)
    return StepShare(num_local=num_local, num_global=int(counts.sum()))


def find_share(arguments: Iterable[object], session: Session) -> StepShare | None:
    """Return the share stamped on the blocks among ``arguments``, else the session's, else None."""
    for argument in arguments:
        last = argument[-1] if isinstance(argument, list | tuple) and argument else argument
        stamped = getattr(last, "step_share", None)
        if isinstance(stamped, StepShare):
            return stamped
    return session.step_share


def gradient_weight(share: StepShare | None, reduction: Reduction) -> float:
    """Return what this rank's gradient is multiplied by before the sum over ranks.

    With a mean it is n_local / n_global, so the sum is the mean over all targets (algorithms 0.1);
    with a sum it is 1, so the sum is the one that one process would have computed. It is 0 on a
    rank without targets, whatever its loss is.

    Raises:
        ConfigError: the loss is a mean and nobody said over how many targets.
    """
    if share is not None and share.num_local == 0:
        return 0.0
    if reduction == "sum":
        return 1.0
    if share is None:
        raise ConfigError(
            "the wrapped model does not know how many targets this step has, so it cannot weigh this rank's "
            "mean loss; feed it from dglx_dist.DataLoader, set session.step_share = dglx_dist.strategies."
            "share.count_targets(len(targets), session) before the forward call, or wrap with reduction='sum'"
        )
    return share.num_local / share.num_global
