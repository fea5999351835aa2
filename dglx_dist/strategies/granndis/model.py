"""A replicated model that trains on halo blocks: its layers exchange rows, its gradients are summed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any, final

import dgl
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import set_checkpoint_early_stop

from dglx_dist.cluster.session import Session
from dglx_dist.errors import ConfigError
from dglx_dist.layers.node_dropout import install_node_dropouts
from dglx_dist.records import StepShare
from dglx_dist.strategies.base import Parts, Reduction, WrappedModel
from dglx_dist.strategies.buffers import BufferMeans
from dglx_dist.strategies.data_parallel import broadcast_state, check_frozen, check_same_model
from dglx_dist.strategies.gradients import GradientExchange, mark_output
from dglx_dist.strategies.granndis.empty_share import NoRows
from dglx_dist.strategies.granndis.halo_block import HaloBlock
from dglx_dist.strategies.granndis.hooks import install
from dglx_dist.strategies.granndis.layerwise import check_rows_out, check_rows_stay_apart
from dglx_dist.strategies.granndis.local_graph import LocalGraph
from dglx_dist.strategies.granndis.wire import wire_of
from dglx_dist.strategies.share import find_share, gradient_weight


@final
class HaloModel(WrappedModel):
    """The user's model on halo blocks, or on a local graph, with the gradients of one process on every rank.

    Forward and backward are collective on these: every rank must run both in every step, also without
    targets, and call its layers in the same order. On other blocks forward never communicates.

    The loss is the mean over (or the sum of) this rank's own targets. Its weight n_local / n_global is
    applied where the gradient enters the model, at its output: layers hand gradients of halo rows to the
    ranks that computed these, where they must count as what they are of the whole. ``nn.Dropout`` anywhere
    in the model drops by (seed, step, node, column), so that results do not depend on the number of ranks.

    Args:
        model: The user's model; changed in place: hooks and dropouts that act on halo blocks only.
        session: The run.
        reduction: What the user's loss is over its own targets.
        bucket_bytes: Gradients that are sent together.

    Raises:
        ConfigError: the model has a module that mixes rows of nodes that are no neighbours, as a batch norm
            does, whose statistics would count rows of several ranks twice; or as for data parallel models.
    """

    def __init__(
        self, model: nn.Module, session: Session, *, reduction: Reduction, bucket_bytes: int
    ) -> None:
        super().__init__()
        if reduction not in ("mean", "sum"):
            raise ConfigError(f"reduction={reduction!r} must be 'mean' or 'sum'")
        check_same_model(model, session, f"reduction={reduction}, bucket_bytes={bucket_bytes}")
        check_rows_stay_apart(model)
        self.module = model
        self._session, self._reduction = session, reduction
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self._trained = {id(parameter) for _, parameter in trained}
        broadcast_state(model, session)
        install(model)
        self._dropouts = install_node_dropouts(model, session.seed)
        self._exchange = GradientExchange(trained, session, bucket_bytes)
        self._buffer_means = BufferMeans(model, session, reduction)
        if self._buffer_means.needed:
            self._exchange.finally_do(self._buffer_means.average)
        self._wire = wire_of(session)

    @property
    def parts(self) -> Parts:
        """All parameters are replicated."""
        return Parts(replicated=tuple(name for name, _ in self.module.named_parameters()), local=())

    def exchange_seconds(self, *, reset: bool = False) -> float:
        """Seconds that this rank stood waiting for halo rows, their gradients and those of parameters."""
        return self._exchange.seconds(reset=reset) + self._wire.seconds(reset=reset)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the user's module; what is special about a step is read from the blocks among the arguments.

        Raises:
            ConfigError: in training, the blocks are not those of the strategy's loader, a parameter was
                unfrozen after wrapping, the model has fewer layers than there are blocks, or it is given
                what another wrapped model returned for the targets.
        """
        graphs = list(_exchanging((*args, *kwargs.values())))
        if not graphs:
            return self._on_other_blocks(args, kwargs)
        _check_not_weighed((args, kwargs))
        if self.training:
            self._dropouts.begin(graphs[0].step_number, graphs[0].srcdata[dgl.NID])
            if isinstance(graphs[0], LocalGraph):
                # One and the same for all steps, while a loader numbers its blocks.
                graphs[0].step_number += 1
        has_targets = all(one.num_dst_nodes() for one in graphs)
        # What backward computes again goes to its end: else torch stops where a rank has all it needs, which
        # may lie before an exchange on one and behind it on another.
        with set_checkpoint_early_stop(False), nullcontext() if has_targets else NoRows():
            output = self.module(*args, **kwargs)
        if not torch.is_grad_enabled() or not self._trained:
            return output
        blocks = [one for one in graphs if isinstance(one, HaloBlock)]
        if blocks:
            check_rows_out(output, blocks)
        check_frozen(self.module, self._trained)
        world_size = self._session.topology.world_size
        if self._reduction == "sum":
            return mark_output(output, (self._exchange, 1.0))
        share = find_share((graphs,), self._session)
        weight = gradient_weight(share, self._reduction)
        # Of a block that is not the last one nothing is weighed: its rows go on to another model.
        is_even = share == StepShare(num_local=1, num_global=world_size)
        weighed = output if is_even else weigh_gradients(output, world_size * weight)
        # 1 / W of what was multiplied by W: a penalty on the weights, which goes past the model's output,
        # counts once in all, not once per rank.
        return mark_output(weighed, (self._exchange, 1.0 / world_size))

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """See :meth:`WrappedModel.load_state_dict`."""
        result = super().load_state_dict(state_dict, strict, assign)
        self._buffer_means.note()
        return result

    def _on_other_blocks(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.training and torch.is_grad_enabled() and self._trained:
            raise ConfigError(
                "the wrapped model was given neither blocks of the strategy's loader nor dx.local_graph(g), "
                "which know what the other ranks need; feed it from dx.DataLoader, or evaluate model.whole() "
                "under torch.no_grad()"
            )
        return self.module(*args, **kwargs)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # What .to(), .double() and the like call: the buffers to compare with must come along.
        result = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch leaves it bare
        self._buffer_means.note()
        return result


def weigh_gradients(output: Any, weight: float) -> Any:
    """Return what a model returned, such that gradients of its tensors arrive ``weight`` times.

    Args:
        output: A tensor, or tuples, lists and dicts that hold some.
        weight: A gradient that is not finite stays so, also with weight 0.
    """

    def weighed(leaf: Any) -> Any:
        if not torch.is_tensor(leaf) or not leaf.is_floating_point():
            return leaf
        return _Weighed.apply(leaf, weight)  # type: ignore[no-untyped-call]  # torch leaves it bare

    return tree_map(weighed, output)


class _Weighed(torch.autograd.Function):
    """The identity, whose gradient is multiplied."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, weight: float) -> Tensor:
        ctx.weight = weight
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.weight, None


def _check_not_weighed(arguments: Any) -> None:
    """Raise ConfigError if a tensor was computed from what a wrapped model returned for its targets."""
    waiting = [leaf.grad_fn for leaf in tree_leaves(arguments) if torch.is_tensor(leaf)]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if getattr(node, "_forward_cls", None) is _Weighed:
            raise ConfigError(
                "a wrapped model was given what a wrapped model returned, so gradients would be weighed by "
                "this rank's share of the targets twice; put both into one nn.Module and wrap that, or wrap "
                "both with reduction='sum'"
            )
        waiting += [following for following, _ in node.next_functions]


def _exchanging(arguments: tuple[Any, ...]) -> Iterator[HaloBlock | LocalGraph]:
    """Yield the graphs among a model's arguments whose rows lie on several ranks."""
    for argument in arguments:
        for one in argument if isinstance(argument, list | tuple) else (argument,):
            if isinstance(one, HaloBlock | LocalGraph):
                yield one
