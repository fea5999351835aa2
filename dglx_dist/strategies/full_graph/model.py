"""Replicated models on halo blocks. Layers exchange halo rows, and parameter gradients are summed."""

import inspect
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, final

import torch
from dgl.nn.pytorch import glob
from dgl.nn.pytorch.conv.graphconv import EdgeWeightNorm
from dgl.nn.pytorch.conv.hgtconv import HGTConv
from dgl.nn.pytorch.hetero import HeteroGraphConv
from torch import Tensor, nn
from torch.utils.checkpoint import set_checkpoint_early_stop

from dglx_dist.comm.exchange import row_exchanges
from dglx_dist.errors import ConfigError
from dglx_dist.internals.graphs import raise_for_reverse
from dglx_dist.internals.pytorch import AnyBatchNorm, get_version, tree_leaves
from dglx_dist.layers.convolutions import CONVOLUTIONS, sums_sources
from dglx_dist.layers.dropout import find_pass_ids, install_node_dropouts
from dglx_dist.layers.nn import BatchNorm, install_batch_norms
from dglx_dist.layers.tracer import GraphCall, named_arguments, read_call
from dglx_dist.records import StepShare
from dglx_dist.strategies.base import find_share, flatten_arguments, gradient_weight
from dglx_dist.strategies.full_graph.halo_block import EmptyPartition, HaloBlock, tie_gradient
from dglx_dist.strategies.full_graph.halo_exchange import StaleHalos
from dglx_dist.strategies.full_graph.local_graphs import LocalGraph
from dglx_dist.strategies.full_graph.pair_rows import PairRows, WeighGradients, weigh_gradients
from dglx_dist.strategies.full_graph.typed_block import AnyHaloBlock, TypedHaloBlock
from dglx_dist.strategies.gradient_sync import check_frozen
from dglx_dist.strategies.replicated import ReplicatedModel

_NO_BLOCKS = tuple(kind for kind, known in CONVOLUTIONS.items() if not known.on_blocks)


def install(model: nn.Module) -> None:
    """Install hooks that exchange halo rows before modules called with a ``HaloBlock`` and node rows.

    :func:`dglx_dist.layers.tracer.read_call` finds the argument with the rows. They are exchanged once, in
    the outermost module that receives them. Tensors with a row for each source are not exchanged. Other
    own-row tensors, including one-dimensional ones, are exchanged when they are set on the block's sources.

    Edge data must be passed under an argument name for edges. Otherwise it would be exchanged if there are as
    many edges as own rows. Modules called without such a block are unaffected. Model copies keep the hooks,
    and modules that already have them are skipped.
    """
    for module in model.modules():
        # A module with one argument cannot get both a block and rows. Scripted modules do not support hooks
        # with keyword arguments.
        if isinstance(module, torch.jit.ScriptModule) or not _accepts_two_arguments(module.forward):
            continue
        if _exchange_inputs in module._forward_pre_hooks.values():
            continue
        module.register_forward_pre_hook(_exchange_inputs, with_kwargs=True)
        module.register_forward_hook(_tie_output, with_kwargs=True)
        module.register_forward_hook(_leave_empty_partition, with_kwargs=True, always_call=True)


def _exchange_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the arguments for ``module`` with halo rows, or None without a block. torch calls this hook."""
    values = (*args, *kwargs.values())
    is_distributed = any(isinstance(value, AnyHaloBlock | LocalGraph) for value in values)
    if is_distributed and isinstance(module, EdgeWeightNorm) and module._norm == "both":
        raise_for_reverse("EdgeWeightNorm('both')")
    blocks = _find_blocks(args, kwargs)
    if not blocks:
        return None
    if isinstance(module, _NO_BLOCKS):
        raise ConfigError(
            f"{type(module).__name__} got a block, but DGL supports it on whole graphs only, because it "
            "writes rows where it reads them (like layers of several hops); call the model as model(g, x) "
            "with g = dx.local_graph(...)"
        )

    call = _find_rows(module, args, kwargs)
    if call is not None and isinstance(call.graph, TypedHaloBlock):
        args, kwargs = _complete_types(module, call, args, kwargs)
    elif call is not None and len(call.sources) == call.graph.own_rows:
        args, kwargs = _complete_sources(module, call, args, kwargs)
    if not all(map(_has_rows, blocks)):
        EmptyPartition(module).turn_on()
    return args, kwargs


def _complete_sources(
    module: nn.Module, call: GraphCall, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments for ``module``, with rows for all sources in place of this rank's own rows."""
    block: HaloBlock = call.graph
    if block.has_cover and sums_sources(module):
        # Sums have their own exchange, so the module gets a block with own rows only.
        own_block = block.of_own_rows()
        args = tuple(own_block if argument is block else argument for argument in args)
        return args, {name: own_block if value is block else value for name, value in kwargs.items()}

    sources = block.all_rows(call.sources)
    rows = sources if torch.is_tensor(call.rows) else (sources, call.rows[1])
    args, kwargs = _replace_argument(args, kwargs, call.key, rows)
    if isinstance(module, HGTConv):
        for key, name, value in named_arguments(module.forward, args, kwargs):
            if name == "ntype" and len(value) == block.own_rows:
                args, kwargs = _replace_argument(args, kwargs, key, block.all_rows(value))
    return args, kwargs


def _complete_types(
    module: nn.Module, call: GraphCall, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments for ``module``, with rows for all sources in place of this rank's own rows."""
    block: TypedHaloBlock = call.graph
    if block.has_cover and isinstance(module, HeteroGraphConv):
        # The convolutions in this module exchange sums, or else rows, when they are called.
        return args, kwargs

    sources: Any
    if torch.is_tensor(call.sources):
        (sources,) = block.all_rows({block.srctypes[0]: call.sources}).values()
    else:
        sources = block.all_rows(call.sources)
    rows = (sources, call.rows[1]) if isinstance(call.rows, tuple) else sources
    return _replace_argument(args, kwargs, call.key, rows)


def _has_rows(block: AnyHaloBlock) -> bool:
    """Return whether the block has sources and destinations in each type."""
    ntypes = block.dsttypes if isinstance(block, TypedHaloBlock) else [None]
    return all(block.num_src_nodes(ntype) and block.num_dst_nodes(ntype) for ntype in ntypes)


def _replace_argument(
    args: tuple[Any, ...], kwargs: dict[str, Any], key: int | str, value: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(key, str):
        return args, {**kwargs, key: value}
    return (*args[:key], value, *args[key + 1 :]), kwargs


def _leave_empty_partition(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> None:
    # This hook also runs after forward has raised. If the exchange raised, the mode is not on, and an active
    # mode belongs to an outer module.
    if not all(map(_has_rows, _find_blocks(args, kwargs))):
        EmptyPartition.turn_off(module)


def _tie_output(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Connect ``output`` to the sources on a rank without edges, as a hook after forward.

    Such a rank must still reach its exchange in backward.
    """
    if not _find_blocks(args, kwargs):
        return None
    call = _find_rows(module, args, kwargs)
    if call is None or int(call.graph.num_edges()):
        return None

    sources = [call.sources] if torch.is_tensor(call.sources) else list(call.sources.values())
    # Through one type's exchange, backward reaches all types' exchanges.
    return tie_gradient(output, max(sources, key=lambda rows: rows.requires_grad))


def _find_rows(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> GraphCall | None:
    """Return the argument with a block's source rows, or None if there is none."""
    call = read_call(module, args, kwargs, (HaloBlock, TypedHaloBlock))
    if call is None:
        return None
    if isinstance(call.sources, dict) and isinstance(call.graph, HaloBlock):
        raise ConfigError(
            f"{type(module).__name__} got a dict of rows for a block of one node and one edge type; pass the "
            "rows as a tensor"
        )
    if not isinstance(call.sources, dict) and len(call.graph.srctypes) > 1:
        return None  # A tensor cannot have rows for several types.
    return call


def _find_blocks(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[AnyHaloBlock]:
    return [argument for argument in (*args, *kwargs.values()) if isinstance(argument, AnyHaloBlock)]


def _accepts_two_arguments(forward: Callable[..., Any]) -> bool:
    kinds = [parameter.kind for parameter in inspect.signature(forward).parameters.values()]
    has_var_arguments = inspect.Parameter.VAR_POSITIONAL in kinds or inspect.Parameter.VAR_KEYWORD in kinds
    return len(kinds) > 1 or has_var_arguments


def check_rows_stay_apart(model: nn.Module, features: Any = 0) -> None:
    """Raise ConfigError if a module in ``model`` mixes rows whose nodes are not neighbours."""
    for name, module in model.named_modules():
        where = f"{name!r} is a {type(module).__name__}" if name else f"the model is {type(module).__name__}"
        if isinstance(module, AnyBatchNorm):
            raise ConfigError(
                f"{where}: its statistics would cover this rank's rows only, and rows on several ranks would "
                "count twice; call dx.nn.BatchNorm.convert(model) before dx.wrap, or use torch.nn.LayerNorm"
            )
        # Readouts have no common base class, so the defining module is compared.
        if type(module).__module__ == glob.__name__:
            raise ConfigError(
                f"{where}, which reads all nodes of a graph at once, but a rank has only some of them; "
                "remove it from the wrapped model, and apply it to the rows of all nodes, as returned by "
                "dx.layerwise_inference"
            )


def check_norms_know_rows(model: nn.Module) -> None:
    """Raise ConfigError if ``model`` has a batch norm, which is not exact if there are several types."""
    for name, module in model.named_modules():
        if isinstance(module, BatchNorm):
            raise ConfigError(
                f"{name!r} is a dx.nn.BatchNorm, which does not know the nodes of its rows on a graph of "
                "several types, so rows on several ranks would count twice; use torch.nn.LayerNorm"
            )


def check_rows_out(output: Any, blocks: list[AnyHaloBlock]) -> None:
    """Raise ConfigError if ``output`` has rows for an earlier level instead of the seeds."""
    if not torch.is_tensor(output) or output.dim() < 2 or isinstance(blocks[-1], TypedHaloBlock):
        return
    targets = blocks[-1].num_dst_nodes()
    earlier_rows = {block.own_rows for block in blocks} - {targets}
    if len(output) != targets and len(output) in earlier_rows:
        raise ConfigError(
            f"the model returned {len(output)} rows for {targets} seeds, so it seems to have fewer layers "
            f"than the {len(blocks)} blocks passed to it; use one block after the other, and give the "
            "sampler as many layers as the model has convolutions"
        )


@final
class HaloModel(ReplicatedModel):
    """The user's model on halo blocks or a local graph. Every rank gets the gradients of a single process.

    On halo blocks and local graphs, forward and backward are collective. Every rank must run both in every
    step, even without targets, and call its layers in the same order. On other blocks forward does not
    communicate.

    The loss is the mean or the sum over this rank's targets. Layers send halo row gradients to other ranks,
    so the weight n_local / n_global is already applied to the gradient at the model's output. ``nn.Dropout``
    drops by (seed, step, node, column), so results do not depend on the number of ranks.

    The user's model is changed in place. It gets hooks and dropouts that act on halo blocks only. Raises
    ConfigError if a module mixes rows whose nodes are not neighbours, such as a batch norm, or data_parallel
    could not train the model either.
    """

    def _check(self, model: nn.Module) -> None:
        check_rows_stay_apart(model)

    def _attach(self, model: nn.Module) -> None:
        super()._attach(model)
        session = self._session
        install(model)
        self._stale = StaleHalos(session) if self._options.staleness else None
        self._dropouts = install_node_dropouts(model, session.seed)
        install_batch_norms(model, session, self._dropouts)
        self._rows = row_exchanges(session)

    def exchange_seconds(self, *, reset: bool = False) -> float:
        return super().exchange_seconds(reset=reset) + self._rows.seconds(reset=reset)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the user's module. The step comes from the blocks among the arguments.

        Raises ConfigError in training if the blocks are not from the strategy's loader, a parameter was
        unfrozen after wrapping, the model has fewer layers than blocks, or an input was computed by another
        wrapped model.
        """
        arguments = flatten_arguments((*args, *kwargs.values()))
        graphs = [graph for graph in arguments if isinstance(graph, AnyHaloBlock | LocalGraph)]
        if not graphs:
            return self._call_without_halo(args, kwargs)

        _check_not_weighted((args, kwargs))
        if self.training:
            self._begin_step(graphs[0])
        pairs: PairRows | None = getattr(graphs[-1], "pair_rows", None)
        num_gathers = 0 if pairs is None else pairs.num_calls
        with ExitStack() as stack:
            if pairs is not None:
                stack.enter_context(pairs.in_model(self._dropouts.continue_with))
            if self._stale is not None and self.training and torch.is_grad_enabled():
                # The weights' versions identify an epoch, which lasts until the optimizer's step.
                versions = [get_version(parameter) or 0 for parameter in self.module.parameters()]
                stack.enter_context(self._stale.active(sum(versions)))

            # Recomputation in backward must not stop early. Otherwise one rank could stop before an exchange
            # and another rank after it.
            stack.enter_context(set_checkpoint_early_stop(False))
            if not all(map(_has_rows, graphs)):
                stack.enter_context(EmptyPartition())
            output = self.module(*args, **kwargs)
        if not torch.is_grad_enabled() or not self._trained:
            return output

        blocks = [graph for graph in graphs if isinstance(graph, AnyHaloBlock)]
        if blocks and pairs is None:
            check_rows_out(output, blocks)
        check_frozen(self.module, self._trained)
        gathers_later = pairs is not None and pairs.num_calls == num_gathers
        return self._mark_output(output, graphs, pairs if gathers_later else None)

    def _begin_step(self, graph: Any) -> None:
        """Prepare exchanges and dropouts for the training step that ``graph`` carries."""
        self._rows.step = graph.step_number
        self._dropouts.begin(graph.step_number, find_pass_ids(graph))
        if isinstance(graph, LocalGraph):
            # A loader numbers its blocks, but one local graph serves all steps.
            graph.step_number += 1

    def _mark_output(self, output: Any, graphs: list[Any], pairs: PairRows | None) -> Any:
        """Weigh the gradients at ``output``, or at the rows that ``pairs`` gather from it later."""
        if self._reduction == "sum":
            if pairs is not None:
                pairs.expect(output, 1.0)
            return self._exchange.mark(output, 1.0)

        world_size = self._session.topology.world_size
        share = find_share((graphs,), self._session)
        weight = world_size * gradient_weight(share, self._reduction)
        # Blocks before the last one have no share, because their rows are inputs to another model.
        is_even = share == StepShare(num_local=1, num_global=world_size)
        if pairs is not None:
            # Ranks add up the gradients of gathered rows, so each rank weighs its own before they are sent.
            pairs.expect(output, weight)
        elif not is_even:
            output = weigh_gradients(output, weight)

        # The factors W and 1 / W cancel, except for a penalty on the parameters. It bypasses the model's
        # output and must count once in total.
        return self._exchange.mark(output, 1.0 / world_size)

    def rank_state(self) -> dict[str, Tensor]:
        return {} if self._stale is None else self._stale.state()

    def load_rank_state(self, state: Mapping[str, Tensor]) -> None:
        if self._stale is not None:
            self._stale.load(state)

    def _call_without_halo(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.training and torch.is_grad_enabled() and self._trained:
            raise ConfigError(
                "the wrapped model was called without blocks of the strategy's loader or "
                "dx.local_graph(g), which know the rows that other ranks need; use dx.DataLoader, or "
                "evaluate model.whole() under torch.no_grad()"
            )
        return self.module(*args, **kwargs)


def _check_not_weighted(arguments: Any) -> None:
    """Raise ConfigError if an input was computed by a wrapped model, which weighs gradients already."""
    nodes = [leaf.grad_fn for leaf in tree_leaves(arguments) if torch.is_tensor(leaf)]
    visited_nodes: set[Any] = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in visited_nodes:
            continue
        visited_nodes.add(node)
        if getattr(node, "_forward_cls", None) is WeighGradients:
            raise ConfigError(
                "the input of a wrapped model is the output of a wrapped model, so gradients would be "
                "weighted twice by this rank's share of the targets; put both into one nn.Module and wrap "
                "that, or wrap both with reduction='sum'"
            )
        nodes += [next_node for next_node, _ in node.next_functions]
