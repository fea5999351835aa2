"""What one step learns from a batch: classes of nodes, or whether pairs are joined."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from dglx_dist.records import FEATURE, LABEL
from dglx_dist.strategies.base import WrappedModel
from dglx_dist.training.entity_inputs import EntityInputs
from dglx_dist.training.inference import float_of

LossFunction: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""(B, C) scores and (B,) labels to the mean loss over the B rows; with B = 0 it does not count."""


@dataclass(frozen=True, kw_only=True)
class StepLoss:
    """What a batch came to on this rank."""

    loss: Tensor
    """() mean over this rank's targets, with a gradient also when there is none."""
    num_targets: int
    """As the loader counts them: destinations, or positive edges."""
    num_correct: int
    """Of the targets; what "train accuracy" shows."""


Task: TypeAlias = Callable[[WrappedModel, Any], StepLoss]
"""(wrapped model, a batch as the loader yields it) to its loss; calls the model once and no collective."""


@final
@dataclass(frozen=True, kw_only=True)
class NodeClassification:
    """Classes of nodes, from batches ``(input_nodes, output_nodes, blocks)``."""

    loss: LossFunction = cross_entropy
    feature: str = FEATURE
    label: str = LABEL
    ntype: str | None = None
    """Whose nodes are classified; needed when there are several node types."""
    inputs: EntityInputs | None = None
    """Makes the input rows by node type; None: ``feature`` of the only type."""

    def __call__(self, model: WrappedModel, batch: Any) -> StepLoss:
        """See :data:`Task`."""
        blocks = batch[2]
        scores = model(blocks, _input_rows(model, blocks[0], self.feature, self.inputs))
        if isinstance(scores, dict):
            scores = scores[self.ntype or blocks[-1].dsttypes[0]]
        labels = blocks[-1].dstnodes[self.ntype or blocks[-1].dsttypes[0]].data[self.label]
        correct = int((scores.detach().argmax(1) == labels).sum()) if len(labels) else 0
        return StepLoss(loss=self.loss(scores, labels), num_targets=len(labels), num_correct=correct)


@final
@dataclass(frozen=True, kw_only=True)
class LinkPrediction:
    """Edges against negatives, from batches ``(input_nodes, pair_graph, negative_pair_graph, blocks)``.

    The model is called with (blocks, input rows, pair graph, negative pair graph) and returns the (P,) scores
    of the first's edges and the (Q,) scores of the second's, of all edge types together.
    """

    loss: LossFunction = binary_cross_entropy_with_logits
    """Of (P + Q,) scores and as many floats: 1 for an edge, 0 for a negative."""
    feature: str = FEATURE
    inputs: EntityInputs | None = None
    """As in :class:`NodeClassification`."""

    def __call__(self, model: WrappedModel, batch: Any) -> StepLoss:
        """See :data:`Task`; correct is an edge whose score is above 0."""
        _, pairs, negative_pairs, blocks = batch
        rows = _input_rows(model, blocks[0], self.feature, self.inputs)
        positive, negative = model(blocks, rows, pairs, negative_pairs)
        truth = torch.cat([torch.ones_like(positive), torch.zeros_like(negative)])
        return StepLoss(
            loss=self.loss(torch.cat([positive, negative]), truth),
            num_targets=len(positive),
            num_correct=int((positive.detach() > 0).sum()),
        )


def _input_rows(model: nn.Module, block: Any, feature: str, inputs: EntityInputs | None) -> Any:
    """Return the input rows in the dtype of the model, whatever their source stored them in."""
    dtype = float_of(model).dtype
    if inputs is None:
        return block.srcdata[feature].to(dtype)
    return {ntype: rows.to(dtype) for ntype, rows in inputs(block).items()}
