"""What a trained model says of every node, as tables under the ids that the user knows."""

from __future__ import annotations

from pathlib import Path

import torch

from dglx_dist.cluster.collectives import barrier
from dglx_dist.graph import DistGraph, DistTensor
from dglx_dist.graph.opening import together
from dglx_dist.graph.owners import RowOwners
from dglx_dist.run.models import Built
from dglx_dist.run.plan import TrainPlan
from dglx_dist.strategies.base import WrappedModel
from dglx_dist.training.export import check_target, write_embeddings
from dglx_dist.training.inference import layerwise_inference
from dglx_dist.training.nested import flatten

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


def write_outputs(plan: TrainPlan, wrapped: WrappedModel, built: Built, g: DistGraph, ntype: str) -> None:
    """Write what ``plan`` asks for, in place of an earlier run's; every rank must call it.

    Predictions are the class of the highest score of each node of ``ntype``, column ``prediction``;
    embeddings what the last layer but one gives, column ``embedding``, with several node types in a folder
    for each. Both are exact: over all neighbours.

    Args:
        plan: What was asked for.
        wrapped: The trained model.
        built: What goes into it.
        g: The graph.
        ntype: Whose classes are predicted.

    Raises:
        StorageError: on all ranks, when on one something cannot be written.
    """
    if plan.save_embeddings is None and plan.predictions is None:
        return
    module = wrapped.whole()
    inputs = None if built.inputs is None else built.inputs.tensors
    if plan.save_embeddings is not None:
        layers = module.inference_layers()  # type: ignore[operator]  # all models of build() have it
        rows = layerwise_inference(module, g, inputs=inputs, layers=layers[:-1])
        write_embeddings(
            _only(rows) if len(g.ntypes) == 1 else rows,
            g,
            plan.save_embeddings,
            name=EMBEDDING,
            overwrite=True,
        )
        for tensor in flatten(rows).values():
            tensor.delete()
    if plan.predictions is not None:
        scores = _only(layerwise_inference(module, g, inputs=inputs, ntypes=[ntype]))
        classes = _highest(scores, g)
        scores.delete()
        write_embeddings(classes, g, plan.predictions, name=PREDICTION, overwrite=True)
        classes.delete()


def _only(rows: object) -> DistTensor:
    """Return the rows of the only node type, which a relational model gives by its name."""
    (tensor,) = flatten(rows).values()
    assert isinstance(tensor, DistTensor)
    return tensor


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
