"""Data parallel training (DistDGL). Each rank trains on its own mini-batches and fetches feature rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, final

import dgl
import torch
from torch import Tensor, nn

from dglx_dist.comm.collectives import check_equal
from dglx_dist.dataloading.edge_loader import DistEdgeDataLoader
from dglx_dist.dataloading.loader import DataLoader
from dglx_dist.dataloading.subgraphs import SubgraphLoader, SubgraphSampler
from dglx_dist.errors import ConfigError
from dglx_dist.graph.cache import LOOK_AHEAD
from dglx_dist.layers.dropout import NodeDropouts, find_pass_ids, has_rows, install_node_dropouts
from dglx_dist.layers.nn import BatchNorm, install_batch_norms
from dglx_dist.options import at_least, check_ranges, option, read_options
from dglx_dist.records import StepShare
from dglx_dist.strategies.base import (
    OpenedStrategy,
    Reduction,
    Strategy,
    Traits,
    find_share,
    flatten_arguments,
    gradient_weight,
)
from dglx_dist.strategies.candidate import Candidate, CandidateContext
from dglx_dist.strategies.gradient_sync import BUCKET_BYTES, check_frozen
from dglx_dist.strategies.replicated import ReplicatedModel

if TYPE_CHECKING:
    from dglx_dist.graph.dist_graph import DistGraph


@final
@dataclass(frozen=True, kw_only=True)
class DataParallelOptions:
    """Options for data_parallel."""

    bucket_bytes: int = option(BUCKET_BYTES, "Bytes of gradients that are sent together.", check=at_least(1))

    def __post_init__(self) -> None:
        check_ranges(self, "option {name}={value!r}")


@final
class OpenedDataParallel(OpenedStrategy):
    """Data parallel training on one graph."""

    def make_loader(
        self, indices: Tensor, sampler: Any, **loader_options: Any
    ) -> DataLoader | SubgraphLoader:
        is_subgraph = isinstance(sampler, SubgraphSampler)
        sampler_name = type(sampler).__name__ if is_subgraph else "blocks"
        # The loaders communicate differently, so no rank may open another one.
        check_equal(self.session, "the kind of sampler", sampler_name)
        loader_type = SubgraphLoader if is_subgraph else DataLoader
        return loader_type(self.g, indices, sampler, **loader_options)

    def make_edge_loader(self, eids: Any, sampler: Any, **loader_options: Any) -> DistEdgeDataLoader:
        return DistEdgeDataLoader(self.g, eids, sampler, **loader_options)

    def make_model(self, model: nn.Module, reduction: Reduction) -> DataParallelModel:
        return DataParallelModel(model, self.session, self.options, reduction=reduction)


@final
class DataParallel(Strategy):
    """Every rank holds a model replica and trains on its own seeds. Gradients are summed.

    See :class:`DataParallelOptions` for the options.
    """

    traits = Traits(
        unit="mini_batch",
        summary="feature rows of remote input nodes, on demand; all gradients",
        on_edges=True,
        any_layers=True,
        complexity=0,
    )

    read_options = staticmethod(partial(read_options, "strategy 'data_parallel'", DataParallelOptions))

    def open(self, g: DistGraph) -> OpenedDataParallel:
        return OpenedDataParallel(self, g)

    @classmethod
    def candidates(cls, context: CandidateContext) -> Iterator[Candidate]:
        if not context.steps:
            return
        yield Candidate(unit="mini_batch")

        # On a single server no rows are fetched, so a cache would have nothing to keep.
        if context.servers > 1:
            for policy in ("vip", LOOK_AHEAD):
                for alpha in context.caches:
                    yield Candidate(unit="mini_batch", cache=policy, cache_alpha=alpha)


@final
class DataParallelModel(ReplicatedModel):
    """A replicated model in which every rank gets the gradient that a single process would compute.

    Forward never communicates, so one rank may evaluate alone. Backward is collective. Every rank must run it
    in every step, even without targets. The loader yields empty blocks for that.

    Several forward calls before one backward, and several backward calls before one optimizer step, give the
    same result as in a single process. Penalties on the weights belong in the loss if it is a mean. With
    ``reduction="sum"`` they would be added once per rank.

    After each backward, floating-point buffers (running statistics) become their weighted mean over the
    ranks. Batch statistics stay local, except in ``dx.nn.BatchNorm``.
    """

    def _attach(self, model: nn.Module) -> None:
        super()._attach(model)
        self._dropouts = install_node_dropouts(model, self._session.seed)
        self._statistics = install_batch_norms(model, self._session, self._dropouts)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the user's module. The step's share comes from the blocks among the arguments.

        Raises ConfigError if a training step's target count is unknown, or if a parameter was unfrozen after
        wrapping.
        """
        if not torch.is_grad_enabled() or not self._trained:
            begin_dropouts(self._dropouts, None, ())
            return self.module(*args, **kwargs)

        arguments = (*args, *kwargs.values())
        share = find_share(arguments, self._session)
        if share is None and self._reduction == "mean" and not self.training:
            # Evaluation without no_grad is harmless as long as nobody calls backward.
            return self.module(*args, **kwargs)

        begin_dropouts(self._dropouts, share, flatten_arguments(arguments))
        if share is not None:
            self._statistics.weight = gradient_weight(share, self._reduction)
            self._check_batch_norm(share, args)
        output = self.module(*args, **kwargs)
        check_frozen(self.module, self._trained)
        return self._exchange.mark(output, gradient_weight(share, self._reduction))

    def _check_batch_norm(self, share: StepShare, args: tuple[Any, ...]) -> None:
        """Raise ConfigError if batch norms sum over all ranks and this rank has nodes but no targets.

        Without targets this rank's gradient is dropped, but the other ranks' gradients depend on it through
        the statistics.
        """
        if share.num_local > 0:
            return
        has_nodes = any(getattr(graph, "has_layer_rows", False) and graph.num_nodes() for graph in args)
        has_batch_norm = any(isinstance(module, BatchNorm) for module in self.module.modules())
        if has_nodes and has_batch_norm:
            raise ConfigError(
                "this rank's clusters have no node of train_mask in this step, but "
                "dx.nn.BatchNorm needs the gradients of its nodes. Use more clusters per "
                "batch, or LayerNorm."
            )


def begin_dropouts(dropouts: NodeDropouts, share: StepShare | None, arguments: Iterable[object]) -> None:
    """Key the dropouts in this pass by ``share``'s step and the first graph in ``arguments``, if known."""
    if not dropouts.in_use:
        return
    blocks = [argument for argument in arguments if isinstance(argument, dgl.DGLGraph) and has_rows(argument)]
    if not blocks or share is None or share.step_number is None:
        dropouts.end()
    else:
        dropouts.begin(share.step_number, find_pass_ids(blocks[0]))
        dropouts.set_row_counts(blocks)
