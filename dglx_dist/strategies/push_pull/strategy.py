"""Push-pull parallelism (P3). Layer 1 is split by input columns, and the later layers are data parallel."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from dglx_dist.comm.collectives import gather_int64, run_on_all_ranks
from dglx_dist.comm.session import Session
from dglx_dist.dataloading.edge_loader import DistEdgeDataLoader
from dglx_dist.dataloading.loader import DataLoader
from dglx_dist.errors import ConfigError
from dglx_dist.internals.pytorch import tree_leaves
from dglx_dist.layers.base import cut_out, join_parts
from dglx_dist.layers.nn import install_batch_norms
from dglx_dist.memory import read_size
from dglx_dist.records import FEATURE
from dglx_dist.strategies.base import (
    OpenedStrategy,
    Parts,
    Reduction,
    Strategy,
    Traits,
    WrappedModel,
    find_share,
    flatten_arguments,
    gradient_weight,
)
from dglx_dist.strategies.candidate import Candidate, CandidateContext
from dglx_dist.strategies.gradient_sync import BufferMeans, check_frozen
from dglx_dist.strategies.push_pull.exchange import AsyncExchange, GroupBatch, make_group, mark_pieces
from dglx_dist.strategies.push_pull.feature_columns import ColumnStore, ColumnStores
from dglx_dist.strategies.push_pull.loader import PushPullLoader, split_prefetch
from dglx_dist.strategies.push_pull.options import read_push_pull_options
from dglx_dist.strategies.push_pull.pipeline import Pipeline, Version, make_replica_group
from dglx_dist.strategies.push_pull.split_model import TypeSchema, split_model, uncut_copy
from dglx_dist.strategies.replicated import broadcast_state, check_same_model

if TYPE_CHECKING:
    from dglx_dist.graph.dist_graph import DistGraph

PHASE = "weights"
"""Ledger phase for pieces of weights and optimizer state that are joined."""


@final
class PushPull(Strategy):
    """Features are cut by column and never sent. The first layer's partial activations are sent (P3).

    See :class:`PushPullOptions` for the options, and docs/strategies/push_pull.md.
    """

    traits = Traits(
        unit="mini_batch",
        features="columns",
        on_edges=True,
        summary="partial activations of layer 1 and their gradients; structure of layer 1; other gradients",
        complexity=10,
    )

    read_options = staticmethod(read_push_pull_options)

    def __init__(self, session: Session, options: Mapping[str, object]) -> None:
        super().__init__(session, options)
        if self.options.group_size:
            make_group(session, self.options.group_size)

    def open(self, g: DistGraph) -> OpenedPushPull:
        return OpenedPushPull(self, g)

    @classmethod
    def candidates(cls, context: CandidateContext) -> Iterator[Candidate]:
        """Yield candidates with both ways to share structure, group sizes, and pipelines."""
        if context.ranks == 1 or not context.steps:
            return
        make = partial(Candidate, unit="mini_batch")
        yield make(options={"structure": "push"})
        yield make(options={"structure": "resample"})

        # The sizes are one rank with all columns, a server's ranks, and half of all ranks.
        for size in sorted({1, context.ranks // context.servers, context.ranks // 2}):
            if context.ranks % size == 0 and size < context.ranks:
                yield make(options={"structure": "push", "group_size": size})
        for late in ({"depth": 3}, {"depth": 3, "weights": "split"}):
            yield make(options={"structure": "push", **late}, exact=False)


@final
class OpenedPushPull(OpenedStrategy):
    """A graph's feature columns, and the pipelines for models that train on them."""

    def __init__(self, strategy: PushPull, g: DistGraph) -> None:
        super().__init__(strategy, g)
        self._names = self._find_features()
        group_size = self.options.group_size
        if not group_size:
            group_size = self._choose_group_size()
        self.group = make_group(self.session, group_size)
        self._columns = ColumnStores(g, self.group)
        self.pipelines: list[weakref.ref[Pipeline]] = []
        """Pipelines that the loaders drain when an epoch ends."""
        self._replicas: dist.ProcessGroup | None = None
        self.on_close += [self._columns.close, self._leave_replicas]

    def replicas(self) -> dist.ProcessGroup | None:
        """Return the group whose ranks hold the same columns, or None. Every rank must call this."""
        if self._replicas is None:
            self._replicas = make_replica_group(self.session, self.group)
        return self._replicas

    def _leave_replicas(self) -> None:
        if self._replicas is not None and dist.is_initialized():
            dist.destroy_process_group(self._replicas)

    @property
    def columns(self) -> dict[str, ColumnStore]:
        """The columns that the option ``features`` names, by node type. Opening them is collective."""
        return self._open_columns(self._names)

    def _open_columns(self, names_by_type: Mapping[str, Sequence[str]]) -> dict[str, ColumnStore]:
        no_columns = ColumnStore([], self.group, self.session)
        return {
            ntype: self._columns.open(ntype, names) if names else no_columns
            for ntype, names in names_by_type.items()
        }

    def make_loader(self, indices: Tensor, sampler: Any, **loader_options: Any) -> PushPullLoader:
        return self._make_loader(DataLoader, indices, sampler, loader_options)

    def make_edge_loader(self, eids: Any, sampler: Any, **loader_options: Any) -> PushPullLoader:
        return self._make_loader(DistEdgeDataLoader, eids, sampler, loader_options)

    def _make_loader(
        self,
        inner_class: type[DataLoader] | type[DistEdgeDataLoader],
        seeds: Any,
        sampler: Any,
        loader_options: Mapping[str, Any],
    ) -> PushPullLoader:
        """Return a loader like ``inner_class``, plus columns for the matrices that ``sampler`` prefetches."""
        stores = self.columns
        disjoint = loader_options.get("disjoint")
        reduced_sampler, names = run_on_all_ranks(
            self.session, lambda: split_prefetch(self.g, sampler, self._names, disjoint), ConfigError
        )
        inner_loader = inner_class(self.g, seeds, reduced_sampler, **loader_options)
        if names != self._names:
            stores = self._open_columns(names)
        dtype = loader_options.get("feature_dtype")  # The inner loader has checked it.
        return PushPullLoader(inner_loader, self.g, stores, self.group, self.options, self.pipelines, dtype)

    def make_model(self, model: nn.Module, reduction: Reduction) -> PushPullModel:
        return PushPullModel(model, self, reduction)

    def _find_features(self) -> dict[str, tuple[str, ...]]:
        """Return the names in the option ``features`` that exist for each node type."""
        names = self.options.names
        names_of_type = {ntype: list(self.g.nodes[ntype].data) for ntype in self.g.ntypes}
        known_names = dict.fromkeys(name for columns in names_of_type.values() for name in columns)
        missing_names = [name for name in names if name not in known_names]

        # If the option has its default, the input may be an embedding.
        if missing_names and names != (FEATURE,):
            columns = ", ".join(map(repr, known_names)) or "none"
            raise ConfigError(f"option features: the nodes have no {missing_names[0]!r} (known: {columns})")

        features = {}
        for ntype, columns_of_type in names_of_type.items():
            features[ntype] = tuple(name for name in names if name in columns_of_type)
        return features

    def _choose_group_size(self) -> int:
        """Return the fewest ranks that can hold the features with ``memory`` bytes each (P3, 3.5)."""
        world_size = self.session.topology.world_size
        if not self.options.memory or not any(self._names.values()):
            # An embedding's size is not known before there is a model.
            return world_size

        num_bytes = 0
        for ntype, names in self._names.items():
            for name in names:
                tensor = self.g.nodes[ntype].data[name]
                num_bytes += int(np.prod(tensor.shape)) * tensor.dtype.itemsize
        memory_bytes = read_size(self.options.memory)
        for size in range(1, world_size + 1):
            if world_size % size == 0 and num_bytes <= size * memory_bytes:
                return size
        raise ConfigError(
            f"the features take {num_bytes} bytes, and {world_size} ranks of {memory_bytes} bytes (option "
            "memory) cannot hold them; grant more memory, or use more ranks"
        )


@final
class PushPullModel(WrappedModel):
    """The user's model with its first convolution split. The user's module is modified.

    Forward and backward are collective. Every rank must run both in every step, even without targets. With
    several mini-batches in flight, a step of the user's optimizer applies the gradients from the batch that
    is due. The last batches are stepped when the pipeline is drained.

    Raises ConfigError if no layer that takes the input's columns can be split, or if data_parallel could not
    train the model either.
    """

    def __init__(self, model: nn.Module, opened: OpenedPushPull, reduction: Reduction) -> None:
        super().__init__()
        stores = opened.columns
        session = opened.session
        group = opened.group
        options = opened.options
        self._opened = opened
        check_same_model(model, session, str(options), reduction)
        broadcast_state(model, session)

        self._session = session
        self._reduction = reduction
        self._group = group

        # The process group comes before the cut, so that the user's model stays uncut if another rank fails.
        replicas = opened.replicas()
        num_nodes = {ntype: opened.g.num_nodes(ntype) for ntype in stores}
        schema = TypeSchema(num_nodes, opened.g.canonical_etypes)
        split = split_model(model, stores, group, schema, seed=session.seed)
        self.module = model
        self._cuts = split.cuts
        self._depth = options.depth
        self._exchange = AsyncExchange(session, group)
        self._buffer_means = BufferMeans(self.module, session, reduction)
        self._trained = {id(p) for p in self.module.parameters() if p.requires_grad}
        self._pipeline = Pipeline(session, group, replicas, options, model, split, self._buffer_means)
        self._pipeline.exchange.warns_of_gaps = reduction == "mean"
        opened.pipelines.append(weakref.ref(self._pipeline))
        split.layer.run_parts = self._pipeline
        self._statistics = install_batch_norms(model, session, split.provenance.dropouts)
        self._provenance = split.provenance
        self._first_layer = type(split.layer).__name__
        self._uncut_modules: dict[int, str] = {}
        """Names of modules whose weights are not split, by module id. They must not get a part's columns."""
        cut_parameters = {model.get_parameter(name) for name in split.cuts}
        split_modules = set(split.layer.modules())
        for name, submodule in model.named_modules():
            parameters = set(submodule.parameters())
            is_uncut = bool(parameters) and parameters.isdisjoint(cut_parameters)
            if is_uncut and submodule not in split_modules:
                self._uncut_modules[id(submodule)] = name

    @property
    def parts(self) -> Parts:
        names = [name for name, _ in self.module.named_parameters()]
        return Parts(
            replicated=tuple(name for name in names if name not in self._cuts),
            local=tuple(name for name in names if name in self._cuts),
        )

    @property
    def versions(self) -> Sequence[Version]:
        """Weight versions that the latest batches read and wrote, in step order."""
        return tuple(self._pipeline.log.versions)

    @property
    def overlaps_steps(self) -> bool:
        return self._depth > 1

    def __deepcopy__(self, memo: dict[int, Any]) -> PushPullModel:
        """Return an independent copy that trains with the other ranks. Every rank must copy the model."""
        result = memo[id(self)] = PushPullModel(self.whole(), self._opened, self._reduction)
        return result.train(self.training)

    def exchange_seconds(self, *, reset: bool = False) -> float:
        return self._pipeline.exchange.seconds(reset=reset)

    def no_sync(self) -> AbstractContextManager[None]:
        return self._pipeline.exchange.hold_gradients()

    def drain(self) -> None:
        """Finish every mini-batch in flight and step it. Every rank must call it.

        The loader calls it at the end of an epoch, and :meth:`state_dict` and :meth:`whole` call it first.
        """
        self._pipeline.drain()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the user's module on blocks from the strategy's loader. Other blocks raise ConfigError."""
        arguments = (*args, *kwargs.values())
        flat_arguments = flatten_arguments(arguments)
        values = [getattr(argument, "push_pull", None) for argument in flat_arguments]
        group_batches = [value for value in values if isinstance(value, GroupBatch)]
        self._pipeline.begin(group_batches[0] if group_batches else None)
        if self._provenance.dropouts.in_use:
            self._provenance.dropouts.set_row_counts(arguments)

        if not torch.is_grad_enabled():
            output = self._compute(args, kwargs)
            self._pipeline.resume()
            return output

        check_frozen(self.module, self._trained)
        weight = gradient_weight(find_share(arguments, self._session), self._reduction)
        self._pipeline.weight = weight
        self._statistics.weight = weight
        return self._pipeline.exchange.mark(self._compute(args, kwargs), weight)

    def _compute(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._group.size == 1 or self._provenance.own_input is None:
            return self.module(*args, **kwargs)
        # The hook is registered only during the call, so that the user's modules stay unchanged.
        handle = register_module_forward_pre_hook(self._check_input)
        try:
            return self.module(*args, **kwargs)
        finally:
            handle.remove()

    def _check_input(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        """Raise ConfigError if an uncut module with weights is called on this part's input columns."""
        name = self._uncut_modules.get(id(module))
        if name is None:
            return

        tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]
        columns = [tensor for tensor in tensors if self._provenance.shares_memory(tensor)]
        if not columns and tensors and isinstance(module, nn.Linear):
            # The columns may be concatenated to other values, as in torch.cat([h, x], 1).
            columns = [] if tensors[0].shape[-1] == module.in_features else tensors[:1]
        if columns:
            raise ConfigError(
                f"{name!r} ({type(module).__name__}) was given {columns[0].shape[-1]} columns, but this rank "
                f"has only its share of the input's columns, and only the first layer ({self._first_layer}) "
                "is split. No other module with weights may use the input (no skip connection around the "
                "first layer, no second layer on the same rows); change the model, or use "
                "strategy='data_parallel'"
            )

    def whole(self) -> nn.Module:
        self.drain()
        uncut = {}
        for name in self._cuts:
            piece = self.module.get_parameter(name).detach()
            uncut[name] = self.join_state(name, piece)
        return uncut_copy(self.module, uncut)

    def join_state(self, name: str, piece: Tensor) -> Tensor:
        cut = self._cuts.get(name)
        if cut is None:
            return piece

        # State such as a step count is no piece. A single value may look like a piece with one column, but
        # not on all parts.
        is_piece = tuple(piece.shape) == cut.piece_shape(self._group.part)
        if not gather_int64([is_piece], self._session).all():
            return piece
        templates = [piece.new_empty(cut.piece_shape(part)) for part in range(self._group.size)]
        pieces = self._exchange.push(piece, templates, PHASE)()
        return join_parts(pieces, cut.runs, cut.dimension)

    def cut_state(self, name: str, uncut: Tensor) -> Tensor:
        cut = self._cuts.get(name)
        if cut is None or tuple(uncut.shape) != cut.shape:
            return uncut
        return cut_out(uncut, cut.runs[self._group.part], cut.dimension)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip as described in the base class. Pieces count once, although replicas hold them too.

        Raises ConfigError if ``norm_type`` is not above 0.
        """
        if not norm_type > 0:
            raise ConfigError(f"norm_type={norm_type} must be above 0, or inf for the largest gradient")
        cut_parameters = [self.module.get_parameter(name) for name in self._cuts]
        mark_pieces(cut_parameters, self._session, self._group.size)

        # torch's function cannot combine norms from sparse gradients with those from pieces.
        gradients = [parameter.grad for parameter in self.module.parameters()]
        norms = [gradient.norm(norm_type) for gradient in gradients if gradient is not None]
        if not norms:
            norms = [torch.zeros(())]
        norm = torch.linalg.vector_norm(torch.stack(norms), norm_type)
        nn.utils.clip_grads_with_norm_(self.module.parameters(), max_norm, norm)
        return norm

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self.drain()
        state = self.module.state_dict(*args, **kwargs)
        prefix = kwargs.get("prefix", "")
        for name in self._cuts:
            state[prefix + name] = self.join_state(name, state[prefix + name].detach())
        return state

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        self.drain()
        for name, cut in self._cuts.items():
            if name in state_dict and tuple(state_dict[name].shape) != cut.shape:
                raise RuntimeError(
                    f"size mismatch for {name}: copying a param with shape {tuple(state_dict[name].shape)}, "
                    f"the uncut shape in the current model is {cut.shape}; load a state_dict() of the "
                    "wrapped model"
                )

        pieces = {name: self.cut_state(name, value) for name, value in state_dict.items()}
        return super().load_state_dict(pieces, strict, assign)

    def note_buffers(self) -> None:
        self._buffer_means.note()

    def close(self) -> None:
        super().close()
        self._pipeline.close()
