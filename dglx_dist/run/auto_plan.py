"""What ``dglx train --strategy auto`` trains with: chosen, or what the run that goes on was trained with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from dglx_dist.cluster.collectives import broadcast_json
from dglx_dist.errors import StorageError
from dglx_dist.graph import DistGraph
from dglx_dist.graph.opening import together
from dglx_dist.planner.records import Candidate
from dglx_dist.run.auto import choose_in_job
from dglx_dist.run.auto_options import Training
from dglx_dist.run.auto_outcome import earlier_plan
from dglx_dist.run.going_on import Earlier, adopt_earlier
from dglx_dist.run.plan import TrainPlan
from dglx_dist.run.session import default_batch_size, default_fanouts
from dglx_dist.run.usual_draws import USUAL

CHECKPOINTS = "checkpoints"
"""In the folder of a run."""


def settle_strategy(
    plan: TrainPlan, g: DistGraph, module: nn.Module
) -> tuple[TrainPlan, dict[str, Any] | None]:
    """Return ``plan`` with a strategy in place of ``auto``, which the session has from now on; collective.

    Args:
        plan: With strategy ``auto``.
        g: Of a session that was opened with it.
        module: The model; not changed.

    Returns:
        The plan, and what was chosen among as ``Choice.to_json()``; None where a run goes on that was told
        its strategy.

    Raises:
        ConfigError: see :func:`choose_in_job` and :func:`adopt_earlier`.
        CheckpointError, StorageError: what the run left is damaged.
    """
    folder = Path(plan.out)
    taken: Earlier | Candidate | None = None
    if plan.resume:
        fanouts = default_fanouts(USUAL, plan.layers) if plan.fanouts is None else plan.fanouts
        taken = adopt_earlier(g, folder / CHECKPOINTS, fanouts, plan.batch_size)
    if taken is not None:
        choice = _of_run(g, folder)
    else:
        chosen = choose_in_job(module, g, _training_of(plan))
        taken, choice = chosen.predictions[chosen.picked].candidate, chosen.to_json()
    plan = replace(plan, strategy=taken.strategy, strategy_options=dict(taken.options))
    if taken.cache is not None:
        plan = replace(plan, cache=taken.cache, cache_alpha=taken.cache_alpha)
    if default_batch_size(taken.strategy) is None:
        # They say which mini-batches were weighed against what is trained now.
        plan = replace(plan, fanouts=None, batch_size=None)
    return plan, choice


def _training_of(plan: TrainPlan) -> Training:
    return Training(
        fanouts=plan.fanouts,
        batch_size=plan.batch_size,
        epochs=plan.epochs,
        num_layers=plan.layers,
        kind=plan.model,
        heads=plan.heads,
        hidden=plan.hidden,
    )


def _of_run(g: DistGraph, folder: Path) -> dict[str, Any] | None:
    """Return what rank 0 finds in the folder of the run; collective."""
    leads = g.session.topology.rank == 0
    mine = together(g.session, lambda: earlier_plan(folder) if leads else None, StorageError)
    found = broadcast_json(mine, g.session)
    return found if isinstance(found, dict) else None
