"""The loader of nodes: mini-batches of this rank's seeds, in step with the other ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, final

import torch
from dgl.heterograph import DGLBlock
from torch import Tensor

from dglx_dist.errors import ConfigError
from dglx_dist.graph.ids import Ids
from dglx_dist.graph.opening import together
from dglx_dist.records import StepShare
from dglx_dist.sampling.items import read_items
from dglx_dist.sampling.maker import MiniBatch, NodeIds
from dglx_dist.sampling.neighbor import read_sampler
from dglx_dist.sampling.opening import open_maker
from dglx_dist.sampling.options import read_options
from dglx_dist.sampling.stepping import LoaderTimes as LoaderTimes
from dglx_dist.sampling.stepping import Pace, StepLoader, seed_of

if TYPE_CHECKING:
    from dglx_dist.graph import DistGraph

Batch: TypeAlias = tuple[NodeIds, NodeIds, list[DGLBlock]]
"""(input node ids, output node ids, blocks with the input-most first); the ids as a dict by node type when
there are several."""


@final
class DataLoader(StepLoader[str, MiniBatch, Batch]):
    """Iterates over ``(input_nodes, output_nodes, blocks)``, like DGL's loader of nodes.

    Every rank must make it and iterate over it alike: all ranks have the same number of steps, and a rank
    that has run out of seeds gets blocks with no destination. Each iteration is the next epoch. The same
    seed draws the same neighbours on any number of ranks. Iterating calls no collective.

    Args:
        g: The distributed graph.
        indices: This rank's seeds: (K,) ids, a mask over all nodes, or {node type: either}; K may be 0.
        sampler: A sampler of ``dgl.dataloading``; what it prefetches is attached to the blocks.
        batch_size: Seeds per rank and step.
        shuffle: Whether each epoch has an order of its own, keyed by seed, epoch and ids.
        drop_last: Whether a rank leaves out its last batch when it is not full.
        options: :class:`LoaderOptions`: ``seed``, ``depth``, ``num_threads``, ``device``, ``exclude``.
            Options of DGL's loader that are of no use here are accepted with a warning.

    Raises:
        ConfigError: on all ranks when an option cannot be honoured or a seed is given twice on one, or the
            ranks were given another ``batch_size`` or ``drop_last``.
        IndexError: a seed is no node; ConfigError on the other ranks.
        PeerError: a rank did not take part.
    """

    def __init__(
        self,
        g: DistGraph,
        indices: Ids | Mapping[str, Ids],
        sampler: Any,
        *,
        batch_size: int = 1,
        shuffle: bool = False,
        drop_last: bool = False,
        **options: Any,
    ) -> None:
        counts = {ntype: g.num_nodes(ntype) for ntype in g.ntypes}
        read, plan, pace, seeds = together(
            g.session,
            lambda: (
                read_options(options),
                read_sampler(sampler),
                Pace(batch_size=batch_size, shuffle=bool(shuffle), drop_last=bool(drop_last)),
                read_items(indices, counts, "node"),
            ),
            ConfigError,
        )
        self._maker = open_maker(g, sampler, plan, read, seed_of(read, g.session))
        super().__init__(g.session, seeds, pace, read)

    def alone(self) -> Callable[[Mapping[str, Any], int], MiniBatch]:
        """See :meth:`StepLoader.alone`."""
        return self._maker.alone().make

    def drawn_by(self) -> str:
        """See :meth:`StepLoader.drawn_by`."""
        return f"{super().drawn_by()}, {self._maker.drawn_by()}"

    def _make(self, items: Mapping[str, Any], epoch: int) -> MiniBatch:
        return self._maker.make(items, epoch)

    def _hand_over(self, batch: MiniBatch, share: StepShare) -> Batch:
        blocks, nodes, seeds = batch.blocks, batch.input_nodes, batch.output_nodes
        if self._device.type != "cpu":
            blocks = [block.to(self._device) for block in blocks]
            nodes, seeds = moved(nodes, self._device), moved(seeds, self._device)
        blocks[-1].step_share = share
        return nodes, seeds, blocks


def moved(nodes: NodeIds, device: torch.device) -> NodeIds:
    """Return ``nodes`` on ``device``."""
    if isinstance(nodes, Tensor):
        return nodes.to(device)
    return {ntype: ids.to(device) for ntype, ids in nodes.items()}
