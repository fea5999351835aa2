"""The loader of push-pull: the batches of data parallel training, with columns in place of rows."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, final

from torch import Tensor

from dglx_dist.cluster.session import Session
from dglx_dist.errors import ConfigError
from dglx_dist.sampling.loader import Batch, DataLoader
from dglx_dist.sampling.stepping import LoaderTimes
from dglx_dist.strategies.push_pull.first_block import share_blocks
from dglx_dist.strategies.push_pull.first_layer import OwnersInput

if TYPE_CHECKING:
    from dglx_dist.graph import DistGraph


@final
class PushPullLoader:
    """Iterates over ``(input_nodes, output_nodes, blocks)``; iterating is collective.

    ``blocks[0].srcdata`` has this rank's columns of the feature, (L0, F_p), under its name.

    Args:
        g: The distributed graph.
        indices: This rank's seeds.
        sampler: A sampler of ``dgl.dataloading``.
        feature: Name of what goes into the first layer.
        rows: (V, F_p), this rank's columns of it for all nodes.
        loader_options: What ``dglx_dist.DataLoader`` takes.
    """

    def __init__(
        self, g: DistGraph, indices: Any, sampler: Any, feature: str, rows: Tensor, **loader_options: Any
    ) -> None:
        without = copy.copy(sampler)
        without.prefetch_node_feats = []
        self._inner = DataLoader(g, indices, without, **loader_options)
        self._feature, self._rows = feature, rows
        self._session: Session = g.session

    def __len__(self) -> int:
        """Steps of an epoch, the same on every rank."""
        return len(self._inner)

    def __iter__(self) -> Iterator[Batch]:
        rank = self._session.topology.rank
        for input_nodes, output_nodes, blocks in self._inner:
            if not isinstance(input_nodes, Tensor):
                raise ConfigError("push_pull trains on graphs of one node type; use strategy='data_parallel'")
            owners = share_blocks(blocks[0], input_nodes, self._session)
            inputs = [OwnersInput(owners=one, x=self._rows[one.nodes]) for one in owners]
            blocks[0].srcdata[self._feature] = inputs[rank].x
            blocks[0].push_pull = inputs
            yield input_nodes, output_nodes, blocks

    def times(self, *, reset: bool = False) -> LoaderTimes:
        """Seconds since the last reset."""
        return self._inner.times(reset=reset)

    def state_dict(self) -> dict[str, int]:
        """Position, JSON values."""
        return self._inner.state_dict()

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on at a position."""
        self._inner.load_state_dict(state)
