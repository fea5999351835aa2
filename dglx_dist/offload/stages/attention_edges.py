"""ApplyEdge of graph attention: softmax of the logits over each target's in-edges."""

from __future__ import annotations

from typing import final

import numpy as np

from dglx_dist.offload.fields import Fields
from dglx_dist.offload.stages.activation import LeakyRelu
from dglx_dist.offload.stages.base import Config, EdgeStage
from dglx_dist.offload.stages.heads import MAX_HEADS
from dglx_dist.records import Array


@final
class AttentionEdges(EdgeStage):
    """a = softmax over in-edges of leaky_relu(el of the source + er of the target), by head.

    Args:
        config: ``heads`` K; ``slope`` of the leaky ReLU.

    Raises:
        ConfigError: a field is missing, unknown or wrong.
    """

    def __init__(self, config: Config) -> None:
        fields = Fields(config, "stage attention_edges")
        self._heads = fields.whole("heads", 1, MAX_HEADS)
        self._leaky = LeakyRelu(fields.number("slope", -1e6, 1e6))
        fields.end()

    @property
    def width(self) -> int:
        """K."""
        return self._heads

    def forward(self, sources: Array, targets: Array, indptr: Array) -> Array:
        """Return the attention, (E, K): it sums to 1 over each target's in-edges."""
        degrees = np.diff(indptr)
        out = self._leaky.apply(_logits(sources, targets, degrees))
        starts, lengths = _segments(indptr, degrees)
        if not len(starts):
            return out
        out -= np.repeat(np.maximum.reduceat(out, starts, axis=0), lengths, axis=0)
        np.exp(out, out=out)
        out /= np.repeat(np.add.reduceat(out, starts, axis=0), lengths, axis=0)
        return out

    def backward(
        self, sources: Array, targets: Array, indptr: Array, values: Array, gradients: Array
    ) -> Array:
        """Return the gradient of (el + er) of every edge, (E, K)."""
        degrees = np.diff(indptr)
        out = values * gradients
        starts, lengths = _segments(indptr, degrees)
        if not len(starts):
            return out
        sums = np.repeat(np.add.reduceat(out, starts, axis=0), lengths, axis=0)
        np.multiply(values, np.subtract(gradients, sums, out=sums), out=out)
        return self._leaky.pull_back(_logits(sources, targets, degrees), out)


def _logits(sources: Array, targets: Array, degrees: Array) -> Array:
    logits = np.repeat(targets, degrees, axis=0)
    logits += sources
    return logits


def _segments(indptr: Array, degrees: Array) -> tuple[Array, Array]:
    """First edge and number of edges of each target that has some: reduceat knows no empty segments."""
    some = degrees > 0
    return indptr[:-1][some], degrees[some]
