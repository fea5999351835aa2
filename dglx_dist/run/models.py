"""The model that ``dglx train`` was asked for, with the rows that go into it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from dglx_dist.graph import DistEmbedding, DistGraph
from dglx_dist.graph.optim import SparseAdam
from dglx_dist.graph.sparse_optimizer import SparseOptimizer
from dglx_dist.records import FEATURE
from dglx_dist.run.plan import TrainPlan
from dglx_dist.training.deep import build_resgcn
from dglx_dist.training.entity_inputs import EntityInputs
from dglx_dist.training.kinds import RELATIONAL_KINDS
from dglx_dist.training.models import build_model
from dglx_dist.training.relational import HGT, RGCN


@dataclass(frozen=True, kw_only=True)
class Built:
    """What is trained together."""

    module: nn.Module
    inputs: EntityInputs | None = None
    """None: the features of the only node type."""
    sparse: SparseOptimizer | None = None


def build(plan: TrainPlan, g: DistGraph, ntype: str, classes: int) -> Built:
    """Build ``plan.model``; node types without features get trainable rows. Every rank must call it.

    Args:
        plan: The run.
        g: Of one node and edge type unless the model is relational.
        ntype: Whose nodes are classified.
        classes: Number of classes.

    Raises:
        ConfigError: a number is out of range, or there is no room for the rows.
    """
    if plan.model not in RELATIONAL_KINDS:
        return Built(module=_of_one_type(plan, g, g.nodes[ntype].data[FEATURE].shape[1], classes))
    embeddings = {
        name: DistEmbedding(
            g.num_nodes(name),
            plan.hidden,
            f"{name}-rows",
            part_policy=g.get_node_partition_policy(name),
            graph=g,
        )
        for name in g.ntypes
        if FEATURE not in g.nodes[name].data
    }
    inputs = EntityInputs(g, embeddings=embeddings)
    widths, out = inputs.feature_widths, [ntype]
    module = (
        RGCN(g, widths, plan.hidden, classes, layers=plan.layers, dropout=plan.dropout, out_types=out)
        if plan.model == "rgcn"
        else HGT(
            g,
            widths,
            plan.hidden,
            classes,
            layers=plan.layers,
            heads=plan.heads,
            dropout=plan.dropout,
            out_types=out,
        )
    )
    sparse = SparseAdam(list(embeddings.values()), lr=plan.lr) if embeddings else None
    return Built(module=module, inputs=inputs, sparse=sparse)


def _of_one_type(plan: TrainPlan, g: DistGraph, width: int, classes: int) -> nn.Module:
    if plan.model == "resgcn":
        return build_resgcn(width, plan.hidden, classes, plan.layers, plan.dropout, recompute=plan.recompute)
    return build_model(
        plan.model, width, plan.hidden, classes, plan.layers, plan.dropout, plan.heads, graph=g
    )
