"""What a trained model says of every node, as tables under the ids that the user knows."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from dglx_dist.cluster.collectives import barrier
from dglx_dist.graph import DistGraph, DistTensor
from dglx_dist.graph.opening import together
from dglx_dist.graph.owners import RowOwners
from dglx_dist.run.plan import TrainPlan
from dglx_dist.strategies.base import WrappedModel
from dglx_dist.training.export import check_target, write_embeddings
from dglx_dist.training.inference import layerwise_inference

PREDICTION, EMBEDDING = "prediction", "embedding"


def check_outputs(plan: TrainPlan, g: DistGraph) -> None:
    """Find out before training whether its results can be written; every rank must call it.

    Raises:
        StorageError: a folder holds something other than an earlier run's results.
    """
    folders = [Path(name).absolute() for name in (plan.predictions, plan.save_embeddings) if name]

    def check() -> None:
        for folder in folders:
            check_target(folder, overwrite=True)

    together(g.session, lambda: check() if g.session.topology.rank == 0 else None)


def write_outputs(plan: TrainPlan, model: WrappedModel, g: DistGraph) -> None:
    """Write what ``plan`` asks for, in place of an earlier run's; every rank must call it.

    Predictions are the class of the highest score, column ``prediction``; embeddings what the last layer
    but one gives, column ``embedding``. Both are exact: over all neighbours.

    Raises:
        StorageError: on all ranks, when on one something cannot be written.
    """
    module: nn.Module = model.module
    if plan.save_embeddings is not None:
        layers = module.inference_layers()  # type: ignore[operator]  # all models of build_model have it
        rows = _one(layerwise_inference(module, g, layers=layers[:-1]))
        write_embeddings(rows, g, plan.save_embeddings, name=EMBEDDING, overwrite=True)
        rows.delete()
    if plan.predictions is not None:
        scores = _one(layerwise_inference(module, g))
        classes = _highest(scores, g)
        scores.delete()
        write_embeddings(classes, g, plan.predictions, name=PREDICTION, overwrite=True)
        classes.delete()


def _one(rows: object) -> DistTensor:
    assert isinstance(rows, DistTensor), "models of build_model have one output for one node type"
    return rows


def _highest(scores: DistTensor, g: DistGraph) -> DistTensor:
    """Return (N,) int64: the column of the highest score; collective."""
    policy = scores.part_policy
    classes = DistTensor((len(scores),), torch.int64, part_policy=policy, is_gdata=False, graph=g)
    first, last = RowOwners(policy.bounds, g.session.topology).range_of(g.session.topology.rank)
    step = 1 << 16
    for start in range(first, last, step):
        ids = torch.arange(start, min(start + step, last))
        classes[ids] = scores[ids].argmax(1)
    barrier(g.session, "the classes of all nodes")
    return classes
