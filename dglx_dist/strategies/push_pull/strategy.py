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
"""Ledger phase of joined pieces of weights and optimizer state."""


@final
class PushPull(Strategy):
    """Features are cut by column and never sent. Partial activations of the first layer are sent (P3).

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

        # The sizes are one rank with all columns, the ranks of a server, and half of all ranks.
        for size in sorted({1, context.ranks // context.servers, context.ranks // 2}):
            if context.ranks % size == 0 and size < context.ranks:
                yield make(options={"structure": "push", "group_size": size})
        for late in ({"depth": 3}, {"depth": 3, "weights": "split"}):
            yield make(options={"structure": "push", **late}, exact=False)


@final
class OpenedPushPull(OpenedStrategy):
    """The columns of a graph's features, and the pipelines of the models that train on them."""

    def __init__(self, strategy: PushPull, g: DistGraph) -> None:
        super().__init__(strategy, g)
        self._names = self._find_features()
        self.group = make_group(self.session, self.options.group_size or self._choose_group_size())
        self._columns = ColumnStores(g, self.group)
        self.pipelines: list[weakref.ref[Pipeline]] = []
        """Pipelines that the loaders drain at the end of an epoch."""
        self._replicas: dist.ProcessGroup | None = None
        self.on_close += [self._columns.close, self._leave_replicas]

    def replicas(self) -> dist.ProcessGroup | None:
        """Return the process group of the ranks with the same columns, or None. Every rank must call this."""
        self._replicas = self._replicas or make_replica_group(self.session, self.group)
        return self._replicas

    def _leave_replicas(self) -> None:
        if self._replicas is not None and dist.is_initialized():
            dist.destroy_process_group(self._replicas)

    @property
    def columns(self) -> dict[str, ColumnStore]:
        """The columns of the option ``features`` by node type. Opening them is collective."""
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
        """Return a loader like ``inner_class`` with the columns of matrices that ``sampler`` prefetches."""
        stores = self.columns
        reduced_sampler, names = run_on_all_ranks(
            self.session,
            lambda: split_prefetch(self.g, sampler, self._names, loader_options.get("disjoint")),
            ConfigError,
        )
        inner_loader = inner_class(self.g, seeds, reduced_sampler, **loader_options)
        if names != self._names:
            stores = self._open_columns(names)
        dtype = loader_options.get("feature_dtype")  # The inner loader has checked it.
        return PushPullLoader(inner_loader, self.g, stores, self.group, self.options, self.pipelines, dtype)

    def make_model(self, model: nn.Module, reduction: Reduction) -> PushPullModel:
        return PushPullModel(model, self, reduction)

    def _find_features(self) -> dict[str, tuple[str, ...]]:
        names = self.options.names
        data = {ntype: self.g.nodes[ntype].data for ntype in self.g.ntypes}
        known = dict.fromkeys(name for columns in data.values() for name in columns)
        missing_names = [name for name in names if name not in known]

        # If the option has its default, the input may be an embedding.
        if missing_names and names != (FEATURE,):
            columns = ", ".join(map(repr, known)) or "none"
            raise ConfigError(f"option features: the nodes have no {missing_names[0]!r} (known: {columns})")
        return {ntype: tuple(name for name in names if name in data[ntype]) for ntype in data}

    def _choose_group_size(self) -> int:
        """Return the fewest ranks that can hold the features with ``memory`` bytes each (P3, 3.5)."""
        world_size, nodes = self.session.topology.world_size, self.g.nodes
        tensors = [nodes[ntype].data[name] for ntype, names in self._names.items() for name in names]
        if not self.options.memory or not tensors:
            # The size of an embedding is not known before there is a model.
            return world_size
        num_bytes = sum(int(np.prod(tensor.shape)) * tensor.dtype.itemsize for tensor in tensors)
        memory_bytes = read_size(self.options.memory)
        for size in range(1, world_size + 1):
            if world_size % size == 0 and -(-num_bytes // size) <= memory_bytes:
                return size
        raise ConfigError(
            f"the features take {num_bytes} bytes, and {world_size} ranks of {memory_bytes} bytes (option "
            "memory) cannot hold them; grant more memory, or use more ranks"
        )


@final
class PushPullModel(WrappedModel):
    """The user's model with its first convolution split. The user's module is modified.

    Forward and backward are collective. Every rank must run both in every step, even without targets. With
    several mini-batches in flight, a step of the user's optimizer applies the gradients of the batch that is
    due. The last batches are stepped when the pipeline is drained. Raises ConfigError if no layer of the
    model takes the input's columns and can be split, or data_parallel could not train the model either.
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

        # This comes before the cut, so that the user's model stays uncut if another rank fails.
        replicas = opened.replicas()
        schema = TypeSchema({ntype: opened.g.num_nodes(ntype) for ntype in stores}, opened.g.canonical_etypes)
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
        self._first = type(split.layer).__name__
        modules = set(split.layer.modules())
        cut = {model.get_parameter(name) for name in split.cuts}
        self._uncut_inputs = {
            id(submodule): name
            for name, submodule in model.named_modules()
            if submodule not in modules and (owned := set(submodule.parameters())) and owned.isdisjoint(cut)
        }
        """Names of modules with weights that are not split. They must not be called on a part's columns."""

    @property
    def parts(self) -> Parts:
        names = [name for name, _ in self.module.named_parameters()]
        return Parts(
            replicated=tuple(name for name in names if name not in self._cuts),
            local=tuple(name for name in names if name in self._cuts),
        )

    @property
    def versions(self) -> Sequence[Version]:
        """Versions of the weights that the latest batches read and wrote, in the order of their steps."""
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
        """Call the user's module on blocks of the strategy's loader. Other blocks raise ConfigError."""
        arguments = flatten_arguments((*args, *kwargs.values()))
        batches = (getattr(argument, "push_pull", None) for argument in arguments)
        self._pipeline.begin(next((batch for batch in batches if isinstance(batch, GroupBatch)), None))
        if self._provenance.dropouts.in_use:
            self._provenance.dropouts.set_row_counts((*args, *kwargs.values()))

        if not torch.is_grad_enabled():
            output = self._compute(args, kwargs)
            self._pipeline.resume()
            return output

        check_frozen(self.module, self._trained)
        share = find_share((*args, *kwargs.values()), self._session)
        weight = gradient_weight(share, self._reduction)
        self._pipeline.weight = self._statistics.weight = weight
        return self._pipeline.exchange.mark(self._compute(args, kwargs), weight)

    def _compute(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._group.size == 1 or self._provenance.own is None:
            return self.module(*args, **kwargs)
        # The hook is registered only during the call, so that the user's modules stay unchanged.
        handle = register_module_forward_pre_hook(self._check_input)
        try:
            return self.module(*args, **kwargs)
        finally:
            handle.remove()

    def _check_input(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        """Raise ConfigError if an uncut module with weights is called on this part's columns of the input."""
        name = self._uncut_inputs.get(id(module))
        if name is None:
            return
        tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]
        columns = next((tensor for tensor in tensors if self._provenance.shares_memory(tensor)), None)
        if columns is None and isinstance(module, nn.Linear) and tensors:
            # The columns may be concatenated to other values, as in torch.cat([h, x], 1).
            columns = None if tensors[0].shape[-1] == module.in_features else tensors[0]
        if columns is not None:
            raise ConfigError(
                f"{name!r} ({type(module).__name__}) was given {columns.shape[-1]} columns, but this rank "
                f"has only its share of the input's columns, and only the first layer ({self._first}) is "
                "split. No other module with weights may use the input (no skip connection around the "
                "first layer, no second layer on the same rows); change the model, or use "
                "strategy='data_parallel'"
            )

    def whole(self) -> nn.Module:
        self.drain()
        pieces = {name: self.module.get_parameter(name).detach() for name in self._cuts}
        return uncut_copy(self.module, {name: self.join_state(name, piece) for name, piece in pieces.items()})

    def join_state(self, name: str, piece: Tensor) -> Tensor:
        cut = self._cuts.get(name)
        if cut is None:
            return piece

        # State such as a count of steps is no piece. A single value may have the shape of a piece with one
        # column, but not on all parts.
        is_piece = tuple(piece.shape) == cut.piece_shape(self._group.part)
        if not gather_int64([is_piece], self._session).all():
            return piece
        like = [piece.new_empty(cut.piece_shape(part)) for part in range(self._group.size)]
        return join_parts(self._exchange.push(piece, like, PHASE)(), cut.runs, cut.dimension)

    def cut_state(self, name: str, uncut: Tensor) -> Tensor:
        cut = self._cuts.get(name)
        if cut is None or tuple(uncut.shape) != cut.shape:
            return uncut
        return cut_out(uncut, cut.runs[self._group.part], cut.dimension)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip as described in the base class. Pieces count once for each part, not for its replicas.

        Raises ConfigError if ``norm_type`` is not above 0.
        """
        if not norm_type > 0:
            raise ConfigError(f"norm_type={norm_type} must be above 0, or inf for the largest gradient")
        mark_pieces(map(self.module.get_parameter, self._cuts), self._session, self._group.size)
        # torch's function cannot combine norms of sparse gradients with those of pieces.
        norms = [p.grad.norm(norm_type) for p in self.module.parameters() if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack(norms or [torch.zeros(())]), norm_type)
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
