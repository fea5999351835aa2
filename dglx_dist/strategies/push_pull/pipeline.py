"""P3's pipeline: several mini-batches in flight, each with the weights that it began with.

Let b be the batch in the user's current iteration. With two batches in flight, one iteration runs fM(b+1),
fD(b), bD(b), bM(b) and the user's optimizer step. With three it runs bM(b-1) instead of bM(b). See "What a
step does" in docs/strategies/push_pull.md.
"""

from __future__ import annotations

import inspect
import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias, cast, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from dglx_dist.comm.collectives import check_equal, gather_int64, report_failed_peers, sum_over_ranks
from dglx_dist.comm.ledger import ring_bytes
from dglx_dist.comm.session import Session, Shared
from dglx_dist.comm.trace import COMPUTE, WAIT
from dglx_dist.errors import ConfigError
from dglx_dist.internals.pytorch import watch_steps
from dglx_dist.layers.base import PartialSums, SplittableConv, StageInput
from dglx_dist.layers.dropout import DropDraws
from dglx_dist.layers.masks import ColumnRange
from dglx_dist.strategies.gradient_sync import PHASE, BufferMeans, GradientExchange
from dglx_dist.strategies.push_pull.exchange import (
    BACKWARD,
    FORWARD,
    AsyncExchange,
    Group,
    GroupBatch,
    PartInput,
    Transfer,
    add_in_order,
    mark_pieces,
    share_edge_values,
    sum_over_parts,
)
from dglx_dist.strategies.push_pull.options import PushPullOptions
from dglx_dist.strategies.push_pull.split_model import InputSpec, Origin, Runs, SplitModel, read_input_spec

Side: TypeAlias = Literal["M", "D"]
"""The two sides in P3: the part side M (layer 1 up to the sum) and the owner side D (the rest)."""

Leaves: TypeAlias = dict[str, Tensor]
"""Autograd leaves with parameter values, by parameter name."""

log = logging.getLogger(__name__)


_WHOLE_TENSORS = frozenset(
    {"Adafactor", "DistributedShampoo", "GaLoreAdamW", "LBFGS", "Muon", "Shampoo", "SM3", "SOAP"}
    | {"Lamb", "LAMB", "Lars", "LARS"}
)
"""Optimizer classes that use a parameter's norms, rows or factors, and not only its single elements."""

_ELEMENTWISE = "SGD, Adam, AdamW, NAdam, RAdam, Adamax, Adagrad, Adadelta, RMSprop, Rprop, ASGD, SparseAdam"


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise ConfigError if ``optimizer`` cannot step parameters that are cut by columns.

    Each element's update may depend on that element's gradients only. Optimizers that break this rule are
    recognised by class name, with their subclasses. Unknown classes are accepted.
    """
    cls = type(optimizer)
    remedy = f"use one that steps each element by itself ({_ELEMENTWISE}), or strategy='data_parallel'"
    if _WHOLE_TENSORS.intersection(base.__name__ for base in cls.__mro__):
        raise ConfigError(
            f"{cls.__name__} uses uncut parameters, but this rank only has some of their columns, so its "
            f"steps would differ from those of one process; {remedy}"
        )

    closure = inspect.signature(cls.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"{cls.__name__} calls the model again within a step (its step() needs a closure), but a "
            f"pipeline does not support that; {remedy}"
        )


class Version(NamedTuple):
    """Versions of one side's weights that a batch read and wrote, counted in optimizer steps."""

    batch: int
    side: Side
    read: int
    """Number of steps that the side had made when the batch read its weights."""
    written: int
    """Number of steps that the side had made before the batch's own step. The lag is ``written - read``."""


class WaitingGradient(NamedTuple):
    """One side's gradient from a batch, waiting for a step. See :class:`Version` for the versions."""

    batch: int
    side: Side
    read: int


@final
class VersionLog:
    """Records which weight versions batches read and wrote on both sides.

    torch calls global hooks at every optimizer step, so the user does not have to register optimizers.
    """

    def __init__(self, part: Iterable[nn.Parameter], owner: Iterable[nn.Parameter]) -> None:
        self.versions: deque[Version] = deque(maxlen=1 << 16)
        """The latest versions, in step order."""
        self.waiting: list[WaitingGradient] = []
        self.steps: dict[Side, int] = {"M": 0, "D": 0}
        self._side: dict[int, Side] = {id(parameter): "M" for parameter in part}
        self._side |= {id(parameter): "D" for parameter in owner}
        self._known: list[weakref.ref[Optimizer]] = []
        self.held_back: tuple[Side, ...] = ()
        """Sides without a gradient in the next step, because all their batches are still in flight.

        The user's ``zero_grad(set_to_none=False)`` leaves zeros, and Adam, momentum and weight decay would
        step with them. So gradients that are all zero are removed.
        """
        self._stepped_without_part: set[int] = set()
        """Ids of optimizers that have stepped while the part side's gradients wait."""
        self._warned = False
        self.close = watch_steps(VersionLog._before_step, self, after=VersionLog._after_step)
        """Function that removes the hooks."""

    def _list_known(self) -> list[Optimizer]:
        """Return the known optimizers that still exist."""
        optimizers = [reference() for reference in self._known]
        return [optimizer for optimizer in optimizers if optimizer is not None]

    @contextmanager
    def step_known_optimizers(self) -> Iterator[None]:
        """Step the known optimizers with what the ``with`` block adds. Then restore the user's gradients."""
        optimizers = self._list_known()
        parameters = []
        for optimizer in optimizers:
            parameters += _list_parameters(optimizer)
        user_gradients = [parameter.grad for parameter in parameters]
        held_back = self.held_back
        waiting = self.waiting
        self.held_back = ()
        self.waiting = []
        for parameter in parameters:
            parameter.grad = None

        yield
        for optimizer in optimizers:
            optimizer.step()

        self.held_back = held_back
        self.waiting = waiting + self.waiting
        for parameter, gradient in zip(parameters, user_gradients, strict=True):
            parameter.grad = gradient

    def _before_step(self, optimizer: Optimizer) -> None:
        """Prepare a step with ``optimizer``. torch calls this as a hook.

        Zero gradients are removed from sides that are held back. If the optimizer has parameters from the
        model, it is remembered, and replaces earlier optimizers for the same parameters. Raises ConfigError
        if it cannot step cut parameters.
        """
        for parameter in _list_parameters(optimizer) if self.held_back else ():
            if self._side.get(id(parameter)) in self.held_back and _is_zero(parameter.grad):
                parameter.grad = None

        stepped_parameters = self._find_stepped(optimizer)
        if not stepped_parameters:
            return
        known_optimizers = self._list_known()
        if optimizer not in known_optimizers:
            check_optimizer(optimizer)
            known_optimizers.append(optimizer)

        # A replaced optimizer may still exist, so a parameter belongs to the last one that stepped it.
        self._known = []
        for known_optimizer in known_optimizers:
            is_replaced = bool(stepped_parameters & self._find_stepped(known_optimizer))
            if known_optimizer is optimizer or not is_replaced:
                self._known.append(weakref.ref(known_optimizer))

    def _after_step(self, optimizer: Optimizer) -> None:
        """Record the versions that ``optimizer`` has written in a step. torch calls this as a hook.

        Warn once if no optimizer steps the part side.
        """
        sides = {self._side[key] for key in self._find_stepped(optimizer)}
        if not sides:
            return

        # If the model was called twice on a batch, there is one gradient for both calls, their sum.
        stepped = dict.fromkeys(gradient for gradient in self.waiting if gradient.side in sides)
        self.waiting = [gradient for gradient in self.waiting if gradient.side not in sides]
        for gradient in stepped:
            self.versions.append(Version(*gradient, written=self.steps[gradient.side]))
        for side in {gradient.side for gradient in stepped}:
            self.steps[side] += 1

        # If an optimizer steps twice while the part side's gradients wait, no optimizer has them.
        if not any(gradient.side == "M" for gradient in self.waiting):
            self._stepped_without_part = set()
        elif id(optimizer) not in self._stepped_without_part:
            self._stepped_without_part.add(id(optimizer))
        elif not self._warned:
            self._warned = True
            log.warning(
                "no optimizer steps the first layer's weights, which push_pull cut by columns; build the "
                "optimizer after wrap(), from the parameters of the wrapped model"
            )

    def _find_stepped(self, optimizer: Optimizer) -> set[int]:
        """Return the ids of model parameters that ``optimizer`` steps."""
        return {id(parameter) for parameter in _list_parameters(optimizer)} & self._side.keys()


def _list_parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _is_zero(gradient: Tensor | None) -> bool:
    if gradient is None:
        return False
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return not bool(values.any())


@final
class OwnerSide:
    """An owner's replicated parameters that are trained. They are used after the sum."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self._live: list[Tensor] | None = None

    def copy_values(self) -> list[Tensor]:
        """Return copies of the live values, even while :meth:`place` has replaced them."""
        if self._live is not None:
            return [value.clone() for value in self._live]
        return [parameter.data.clone() for parameter in self.parameters]

    def place(self, values: Sequence[Tensor]) -> None:
        """Make the model compute with ``values`` until :meth:`restore`."""
        self.restore()
        self._live = [parameter.data for parameter in self.parameters]
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.data = value

    def restore(self) -> None:
        """Restore the live values, if :meth:`place` has replaced them."""
        if self._live is None:
            return
        for parameter, value in zip(self.parameters, self._live, strict=True):
            parameter.data = value
        self._live = None


@final
@dataclass(kw_only=True)
class InFlightBatch:
    """A batch's state from its first phase to its last."""

    number: int
    inputs: tuple[PartInput, ...]
    """Inputs by owner."""
    origins: Mapping[str, Origin]
    """Origins of the input rows by node type."""
    leaves: Leaves
    """The part side's weights, copied at fM."""
    read: Mapping[Side, int]
    """Number of steps that each side had made at fM."""
    values: list[Tensor] | None
    """The owner side's weights at fM. None if fD and bD use whatever weights are current when they run."""
    own_rows: Leaves = field(default_factory=dict)
    """Leaves with those rows of the own block that are not cut, by node type."""
    sources: list[Leaves] = field(default_factory=list)
    """(L0, F_p) tensors by owner, then by node type. The first layer's inputs are computed from them."""
    shares: list[list[Tensor]] = field(default_factory=list)
    """This part's shares by gathered tensor, then by owner, with their autograd graph."""
    pulls: list[Transfer] = field(default_factory=list)
    """Transfers that bring the shares for this owner, by gathered tensor."""
    pushes: list[Transfer] = field(default_factory=list)
    """Transfers that bring each owner's gradient for its sum, by gathered tensor."""
    gradients: Mapping[str, Tensor | None] = field(default_factory=dict)
    """Gradients for the trained parameters, summed over all owners (bM)."""
    source_gradients: Sequence[Tensor | None] = ()
    """Gradients for :attr:`sources` by owner. Empty if they are not trained (bM)."""
    row_gradients: Sequence[Tensor | None] = ()
    """Gradients for :attr:`own_rows`, times :attr:`weight` (bM)."""
    weight: float = 1.0
    """This rank's gradient weight in the step (the gradient rule, docs/development/contracts.md)."""

    def sums(self) -> PartialSums:
        """Wait for the parts' shares and return their sums, without a gradient."""
        return tuple(add_in_order(pull()) for pull in self.pulls)

    def unweigh_row_gradients(self) -> list[Tensor | None]:
        """Return this rank's gradients for :attr:`own_rows` before weighting. The step weighs them itself."""
        if self.weight == 0:
            return list(self.row_gradients)  # These gradients are 0, too.
        return [None if gradient is None else gradient / self.weight for gradient in self.row_gradients]


def compute_shares(
    layer: SplittableConv, inputs: Sequence[StageInput], exchange: AsyncExchange
) -> list[list[Tensor]]:
    """Compute this part's stages in the first layer, up to the sum over parts (P3's partial forward).

    Collective within the group if the layer scatters. ``inputs`` has one entry per owner.

    Returns:
        This part's summands by gathered tensor, then by owner.
    """
    transformed = [layer.transform(owner_input) for owner_input in inputs]
    pairs = list(zip(inputs, transformed, strict=True))
    scattered = [layer.scatter(owner_input, rows) for owner_input, rows in pairs]

    # A sum needs one tensor's shares for all owners, but the layer works on one owner at a time.
    sums = [sum_over_parts(shares, exchange) for shares in zip(*scattered, strict=True)]
    sums_by_owner: list[PartialSums] = [()] * len(inputs)
    if sums:
        sums_by_owner = list(zip(*sums, strict=True))

    gathered = []
    for (owner_input, rows), owner_sums in zip(pairs, sums_by_owner, strict=True):
        gathered.append(layer.gather(owner_input, rows, owner_sums))
    return [list(shares) for shares in zip(*gathered, strict=True)]


@final
class PartSide:
    """The parameters that a part uses before the sum. Some are cut, and some are shared by all parts.

    They are stepped after a batch's backward, while later batches are in flight. So each batch computes with
    its own leaves. A cut parameter's gradient is summed over the group's owners, which the part does locally,
    and over its replicas. A shared parameter's gradient is summed over all ranks.
    """

    def __init__(
        self,
        session: Session,
        group: Group,
        replicas: dist.ProcessGroup | None,
        model: nn.Module,
        split: SplitModel,
    ) -> None:
        self._session = session
        self._group = group
        self._replicas = replicas
        self.parameters: dict[str, nn.Parameter] = {name: model.get_parameter(name) for name in split.stashed}
        self._pieces = [model.get_parameter(name) for name in split.cuts]
        self._places: dict[str, tuple[nn.Module, str]] = {}
        """Module and attribute where each parameter is stored."""
        for name in split.stashed:
            module_name, _, attribute = name.rpartition(".")
            self._places[name] = model.get_submodule(module_name), attribute

        trained = [name for name, parameter in self.parameters.items() if parameter.requires_grad]
        self._cut = [name for name in trained if name not in split.shared]
        self._shared = [name for name in trained if name in split.shared]
        same_columns = Group(rank=group.rank, members=group.replicas, replicas=(group.rank,))
        self._between_replicas = AsyncExchange(session, same_columns)

    def make_leaves(self, *, copy: bool) -> Leaves:
        """Return a leaf for each parameter. Without ``copy`` it is valid until the next step."""
        leaves = {}
        for name, parameter in self.parameters.items():
            value = parameter.detach().clone() if copy else parameter.detach()
            leaves[name] = value.requires_grad_(parameter.requires_grad)
        return leaves

    @contextmanager
    def place(self, leaves: Mapping[str, Tensor]) -> Iterator[None]:
        """Replace the modules' parameters by ``leaves`` (autograd leaf tensors) inside the ``with`` block."""
        try:
            for name, (module, attribute) in self._places.items():
                module._parameters[attribute] = leaves[name]  # type: ignore[assignment]  # not a Parameter, but modules compute with any tensor
            yield
        finally:
            for name, (module, attribute) in self._places.items():
                module._parameters[attribute] = self.parameters[name]

    def compute(self, batch: InFlightBatch) -> None:
        """Run a batch's backward through this part (bM). Collective if the layer scatters."""
        # Parameters that the user has frozen meanwhile have no gradient.
        trained = [name for name in (*self._cut, *self._shared) if batch.leaves[name].requires_grad]
        leaves = [batch.leaves[name] for name in trained]
        sources = [source for by_type in batch.sources for source in by_type.values() if source.requires_grad]
        own_rows = [rows for rows in batch.own_rows.values() if rows.requires_grad]
        inputs = [*leaves, *sources, *own_rows]

        shares = []
        share_gradients = []
        for push, owner_shares in zip(batch.pushes, batch.shares, strict=True):
            for share, gradient in zip(owner_shares, push(), strict=True):
                if share.requires_grad:
                    shares.append(share)
                    share_gradients.append(gradient)

        gradients: Sequence[Tensor | None] = [None] * len(inputs)
        if shares and inputs:
            gradients = torch.autograd.grad(shares, inputs, share_gradients, allow_unused=True)

        # The gradients come in the same order as the inputs.
        remaining = iter(gradients)
        batch.gradients = {name: next(remaining) for name in trained}
        batch.source_gradients = [next(remaining) for _ in sources]
        batch.row_gradients = [
            next(remaining) if rows.requires_grad else None for rows in batch.own_rows.values()
        ]

    def add_gradients(self, batch: InFlightBatch) -> None:
        """Add this batch's gradients to the ``.grad`` of all parameters and embeddings.

        Ranks that hold the same columns, and parameters that all ranks hold, need sums over ranks. In both
        cases every rank must call this.
        """
        has_replicas = len(self._group.replicas) > 1
        gradients: dict[str, Tensor | None]
        if has_replicas:
            gradients = self._sum_gradients(batch, self._cut, self._sum_over_replicas)
        else:
            gradients = {name: batch.gradients.get(name) for name in self._cut}
        gradients |= self._sum_gradients(batch, self._shared, self._sum_over_all)

        for name, gradient in gradients.items():
            if batch.leaves[name].requires_grad and gradient is not None:
                parameter = self.parameters[name]
                batch_gradient = gradient.detach()
                if parameter.grad is None:
                    parameter.grad = batch_gradient
                else:
                    parameter.grad = parameter.grad + batch_gradient

        # The input rows have gradients only if they come from an embedding, which has one node type.
        for ntype, origin in batch.origins.items():
            if not batch.source_gradients or origin.embedding is None:
                continue
            nodes = [part_input.nodes[ntype] for part_input in batch.inputs]
            row_gradients = list(zip(nodes, batch.source_gradients, strict=True))
            if has_replicas:
                sources = [sources_by_type[ntype] for sources_by_type in batch.sources]
                row_gradients = self._gather_replicas(row_gradients, sources)
            origin.embedding.add_gradients(row_gradients)

        # Clipping must know which gradients are pieces.
        mark_pieces(self._pieces, self._session, self._group.size)

    def _sum_gradients(
        self, batch: InFlightBatch, names: Sequence[str], all_reduce: Callable[[Tensor], Tensor]
    ) -> dict[str, Tensor | None]:
        """Sum the gradients for ``names`` over the ranks that ``all_reduce`` spans, in one message.

        A rank without a gradient contributes zeros.
        """
        if not names:
            return {}

        addends = []
        for name in names:
            gradient = batch.gradients.get(name)
            addend = torch.zeros_like(batch.leaves[name]) if gradient is None else gradient
            addends.append(addend.reshape(-1))
        flat_sums = torch.split(all_reduce(torch.cat(addends)), [len(addend) for addend in addends])

        # Concatenation has promoted several dtypes to the widest.
        sums: dict[str, Tensor | None] = {}
        for name, flat_sum in zip(names, flat_sums, strict=True):
            leaf = batch.leaves[name]
            sums[name] = flat_sum.view_as(leaf).to(leaf.dtype)
        return sums

    def _sum_over_replicas(self, flat: Tensor) -> Tensor:
        rank = self._group.rank
        replicas = self._group.replicas
        index = replicas.index(rank)
        with report_failed_peers(self._session, "the sum of gradients over replicas"):
            dist.all_reduce(flat, group=self._replicas)

        # In a ring, a rank only sends to the next one.
        next_rank = replicas[(index + 1) % len(replicas)]
        self._session.ledger.add(PHASE, 1, rank, next_rank, ring_bytes(flat.nbytes, len(replicas), index))
        return flat

    def _sum_over_all(self, flat: Tensor) -> Tensor:
        return sum_over_ranks(flat, self._session, phase=PHASE, layer=1, in_place=True)

    def _gather_replicas(
        self, row_gradients: Sequence[tuple[Tensor, Tensor | None]], sources: Sequence[Tensor]
    ) -> list[tuple[Tensor, Tensor | None]]:
        """Return every replica's nodes and gradients in rank order, so that all ranks add alike."""
        gradients = []
        for (_, gradient), source in zip(row_gradients, sources, strict=True):
            gradients.append(torch.zeros_like(source) if gradient is None else gradient)
        nodes = torch.cat([ids for ids, _ in row_gradients])
        sizes_by_rank = gather_int64([len(nodes)], self._session)
        sizes = sizes_by_rank[list(self._group.replicas), 0].tolist()

        transfers = []
        for rows in (nodes, torch.cat(gradients)):
            templates = [rows.new_empty(size, *rows.shape[1:]) for size in sizes]
            transfers.append(self._between_replicas.push(rows, templates, PHASE))
        all_nodes, all_gradients = [receive() for receive in transfers]
        return list(zip(all_nodes, all_gradients, strict=True))


def make_replica_group(session: Session, group: Group) -> dist.ProcessGroup | None:
    """Make the replicas' process group, or None if there are no others. Every rank must call it."""
    if len(group.replicas) == 1:
        return None

    groups = []
    with report_failed_peers(session, "groups of replicas"):
        # Every rank must make every group, in the same order.
        for part in range(group.size):
            ranks = list(range(part, session.topology.world_size, group.size))
            groups.append(dist.new_group(ranks, timeout=timedelta(seconds=session.timeout_s)))
    return groups[group.part]


@final
class Pipeline(Shared):
    """Runs batches through a model's first layer, in lock-step with the other ranks.

    A batch has four phases, called fM, fD, bD and bM. They are forward (f) and backward (b), on the part side
    (M, before the sum over parts) and on the owner side (D, after it).

    Args:
        replicas: Process group with the ranks that hold the same columns. None if this rank is the only one.
        split: The model with its first layer cut by columns.
        buffers: The model's buffers, which are averaged after each backward.
    """

    def __init__(
        self,
        session: Session,
        group: Group,
        replicas: dist.ProcessGroup | None,
        options: PushPullOptions,
        module: nn.Module,
        split: SplitModel,
        buffers: BufferMeans,
    ) -> None:
        self._session = session
        self._group = group
        self._split = split
        self._provenance = split.provenance
        self._buffers = buffers
        part_names = {*split.cuts, *split.shared}
        owner_parameters = []
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and name not in part_names:
                owner_parameters.append((name, parameter))

        self._part = PartSide(session, group, replicas, module, split)
        self._owner = OwnerSide([parameter for _, parameter in owner_parameters])
        self.exchange = GradientExchange(owner_parameters, session, options.bucket_bytes)
        self._activations = AsyncExchange(session, group, options.wire_dtype)
        self._depth = options.depth
        self._delay = options.delay
        self._looks_ahead = options.depth > 1
        self._one_version = options.weights == "whole" and self._looks_ahead
        self.exchange.delay = options.delay if self._one_version else 0
        self.exchange.after = self._after_backward

        # Embeddings get gradients for single rows, so batches have no leaves for them.
        embeddings = [module.get_parameter(name) for name in split.cuts if name not in split.stashed]
        self.log = VersionLog([*self._part.parameters.values(), *embeddings], self._owner.parameters)
        self._spec: InputSpec | None = None
        self._edge_formats: dict[str, str] | None = None
        """Row shape and dtype by edge value name, as all ranks last agreed on them."""
        self._begun: InFlightBatch | None = None
        """Batch that has begun, but that the user's loop has not reached yet."""
        self._pushed: list[InFlightBatch] = []
        """Batches that have pushed the gradients for their sums, and wait for bM."""
        self._ready: list[InFlightBatch] = []
        """Batches that finished bM in the running backward."""
        self._current: InFlightBatch | None = None
        self._last_called: Callable[[], GroupBatch | None] = lambda: None
        """Weak reference to the batch in the model's last call."""
        self.weight = 1.0
        """This rank's gradient weight in the step. It is set before each forward call."""

    def begin(self, group_batch: GroupBatch | None) -> None:
        """Prepare for a model call on a batch. The batch is None if the blocks come from elsewhere."""
        self._owner.restore()
        self._provenance.begin(group_batch, self._group.part)
        if group_batch is None:
            return

        own_input = group_batch.inputs[self._group.part]
        for origin in self._split.features:
            self._provenance.add(origin.read_source(own_input), origin)
        batch = self._get_begun(group_batch)
        if batch is not None and batch.values is not None:
            self._owner.place(batch.values)

    def resume(self) -> None:
        """Return to the batch that waits for its backward, after a call without gradients."""
        if self._current is not None and self._current.values is not None:
            self._owner.place(self._current.values)

    def __call__(self, layer: SplittableConv, stage_input: StageInput) -> PartialSums:
        """Return the sums over all parts for this rank's block. Forward and backward are collective.

        Raises:
            ConfigError: the block does not come from the strategy's loader, or the rows are not the block's
                own.
            PeerError: a rank is dead or did not take part within the time-out.
        """
        group_batch: GroupBatch | None = getattr(stage_input.block, "push_pull", None)
        if group_batch is None:
            raise ConfigError(
                "the first layer was given a block that does not come from the strategy's loader, so the "
                "other ranks do not know it; use the batches of dglx_dist.DataLoader, and model.whole() to "
                "compute without the other ranks"
            )
        looks_ahead = self._looks_ahead and torch.is_grad_enabled()
        if looks_ahead:
            self._refuse_second_call(group_batch)

        spec = read_input_spec(layer, stage_input, self._provenance)
        own_rows = self._read_own_rows(layer, stage_input)
        self._agree_on_edges(stage_input.edges)
        batch = self._get_begun(group_batch)
        if batch is None:
            batch = self._start(layer, group_batch, spec, stage_input.edges, own_rows)
        else:
            self._begun = None
            if self._spec != spec:
                raise ConfigError(
                    "the inputs of the model's first layer are computed in another way than for the previous "
                    "batch, which several batches at once do not support; use depth=1"
                )

        if looks_ahead:
            self._begin_following(layer, group_batch, spec)
        sums = self._wait_timed(batch.sums, f"{WAIT} for the pull", batch.number)
        if not torch.is_grad_enabled():
            return sums

        batch.weight = self.weight
        self._current = batch
        # The sums have no gradient. The anchor makes autograd call the backward anyway.
        anchor = torch.zeros((), requires_grad=True, device=sums[0].device)
        inputs = (*own_rows.values(), *sums)
        return cast("PartialSums", PullBackward.apply(anchor, self, batch, *inputs))  # type: ignore[no-untyped-call]  # torch does not annotate this

    def _refuse_second_call(self, group_batch: GroupBatch) -> None:
        """Raise ConfigError at a second call on a batch. It would replace the first call's weights."""
        if self._last_called() is group_batch:
            raise ConfigError(
                "the model was called twice for one batch, but a batch has one version of the weights "
                f"with depth={self._depth}; call it once for each batch, or use depth=1"
            )
        self._last_called = weakref.ref(group_batch)

    def drain(self) -> None:
        """Finish and step every batch whose backward has begun. Every rank must call it.

        A batch that has only run fM is started again when the user's loop reaches it.
        """
        self._owner.restore()
        if self._begun is not None:
            self._begun.sums()
            self._begun = None
        while self._pushed:
            with self.log.step_known_optimizers():
                self.exchange.add_delayed()
                batch = self._pushed.pop(0)
                self._compute_part_gradients(batch)
                self._add_part_gradients(batch)

    def close(self) -> None:
        """Forget all batches, and remove the hooks from the optimizers."""
        self._owner.restore()
        self._begun = self._current = None
        self._pushed = []
        self._ready = []
        self.log.close()
        self.exchange.close()

    def complete(self, batch: InFlightBatch | None, gradients: Sequence[Tensor]) -> None:
        """Push the gradients for the sums, and run the part's backward for the batches that are due.

        Raises ConfigError if the batch is None, because it was completed before.
        """
        if batch is None:
            raise ConfigError(
                "backward went through the first layer twice for one batch; call the model once for each "
                "backward (retain_graph is not supported here)"
            )

        for gradient, shares in zip(gradients, batch.shares, strict=True):
            # The gradient is NaN in a mean over no targets, and NaN times a weight 0 is NaN.
            weighted = gradient * batch.weight if batch.weight else torch.zeros_like(gradient)
            batch.pushes.append(self._activations.push(weighted, shares, BACKWARD, batch.number))

        self._pushed.append(batch)
        while len(self._pushed) > self._delay:
            due_batch = self._pushed.pop(0)
            self._compute_part_gradients(due_batch)
            self._ready.append(due_batch)

    def _read_own_rows(self, layer: SplittableConv, stage_input: StageInput) -> dict[str, Tensor]:
        """Return those rows in the own block that are not cut, by node type."""
        if layer.own_types and self._looks_ahead:
            raise ConfigError(
                f"the first layer reads rows of {', '.join(layer.own_types)}, which are not features "
                "of the dataset, so no batch can begin before the model is called; use depth=1"
            )
        return {ntype: stage_input.by_type[ntype].x for ntype in layer.own_types}

    def _agree_on_edges(self, edges: Mapping[str, Tensor]) -> None:
        """Raise ConfigError if edge values differ. A rank without values would make the others wait."""
        formats = {name: f"{list(values.shape[1:])} {values.dtype}" for name, values in sorted(edges.items())}
        if formats != self._edge_formats:
            remedy = "pass the first layer the same arguments on every rank"
            check_equal(self._session, "the values of edges of the first layer", formats, remedy)
            self._edge_formats = formats

    def _get_begun(self, group_batch: GroupBatch) -> InFlightBatch | None:
        """Return the state for ``group_batch`` if its fM has run. Calls without gradients begin anew."""
        if self._begun is None or not torch.is_grad_enabled():
            return None
        return self._begun if self._begun.inputs is group_batch.inputs else None

    def _begin_following(self, layer: SplittableConv, group_batch: GroupBatch, spec: InputSpec) -> None:
        """Run fM for the next batch if it has not begun. Its messages travel while this batch computes."""
        following = group_batch.following
        if following is None or self._get_begun(following) is not None:
            return

        # A loop that was left early may have begun a batch that is no longer needed.
        self._begun = None
        self._spec = spec
        edges = spec.edges(layer, following.inputs[self._group.part].block)
        self._begun = self._start(layer, following, spec, edges)

    def _start(
        self,
        layer: SplittableConv,
        group_batch: GroupBatch,
        spec: InputSpec,
        own_edges: Mapping[str, Tensor],
        own_rows: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> InFlightBatch:
        """Run a batch's fM: compute this part's shares, and begin to pull the shares for this rank.

        Collective within the group.

        Args:
            own_edges: Edge values in the own block, which are sent to the other parts.
            own_rows: Rows in the own block that are not cut, by node type.
        """
        inputs = group_batch.inputs
        is_training = torch.is_grad_enabled()
        with self._record_span("forward M", group_batch.number):
            batch = InFlightBatch(
                number=group_batch.number,
                inputs=inputs,
                origins=spec.origins,
                leaves=self._part.make_leaves(copy=self._looks_ahead and is_training),
                read=dict(self.log.steps),
                values=self._owner.copy_values() if self._one_version and is_training else None,
            )
            for ntype, rows in own_rows.items():
                batch.own_rows[ntype] = rows.detach().requires_grad_(rows.requires_grad)

            by_column: dict[str, Runs] = {}
            for runs in self._split.runs.values():
                by_column |= dict.fromkeys(layer.edges_by_column, runs)
            edges = share_edge_values(own_edges, inputs, by_column, self._group, self._activations)
            stage_inputs = []
            with self._part.place(batch.leaves):
                for part, owner in enumerate(inputs):
                    sources = {ntype: origin.read_source(owner) for ntype, origin in spec.origins.items()}
                    batch.sources.append(sources)
                    rows_by_type = self._compute_inputs(batch, part)
                    stage_inputs.append(layer.make_input(owner.block, rows_by_type, edges[part]))
                batch.shares = compute_shares(layer, stage_inputs, self._activations)

            pull = self._activations.pull
            batch.pulls = [pull(shares, FORWARD, batch.number) for shares in batch.shares]
        return batch

    def _compute_inputs(self, batch: InFlightBatch, part: int) -> dict[str, StageInput]:
        """Return the first layer's inputs for one owner's block, by node type."""
        part_input = batch.inputs[part]
        is_own = part == self._group.part

        def make_input(ntype: str, rows: Tensor, runs: tuple[ColumnRange, ...]) -> StageInput:
            keys = part_input.keys(ntype)
            seed = self._session.seed
            draws = DropDraws(seed=seed, number=part_input.number, nodes=keys, runs=runs)
            return StageInput(block=part_input.block, x=rows, edges={}, draws=draws, is_own=is_own)

        inputs = {}
        for ntype, origin in batch.origins.items():
            rows = origin.compute_rows(batch.sources[part][ntype], part_input)
            inputs[ntype] = make_input(ntype, rows, origin.runs)

        for ntype, rows in batch.own_rows.items():
            if not is_own:
                # Rows that are not cut stay with their owner, so other parts have no columns for them.
                rows = rows.new_zeros(len(part_input.nodes[ntype]), 0)
            width = rows.shape[1]
            runs = (ColumnRange(first=0, last=width, width=width),)
            inputs[ntype] = make_input(ntype, rows, runs)
        return inputs

    def _compute_part_gradients(self, batch: InFlightBatch) -> None:
        """Run a batch's bM, after the gradients for its sums have arrived."""
        for push in batch.pushes:
            self._wait_timed(push, f"{WAIT} for the push", batch.number)
        with self._record_span("backward M", batch.number):
            self._part.compute(batch)

    def _add_part_gradients(self, batch: InFlightBatch) -> None:
        """Add the gradients from bM to the parameters, and log the batch's sides that wait for a step."""
        self._part.add_gradients(batch)
        # If all leaves are frozen, the side is never stepped.
        if batch.source_gradients or any(leaf.requires_grad for leaf in batch.leaves.values()):
            self.log.waiting.append(WaitingGradient(batch.number, "M", batch.read["M"]))
        if self._one_version:
            self.log.waiting.append(WaitingGradient(batch.number, "D", batch.read["D"]))

    def _after_backward(self, weight: float) -> None:
        """Finish a backward, after the owner side's gradients are summed.

        Add the gradients from batches that are ready, and note which sides have no gradient in the next step.
        """
        self._owner.restore()
        self._buffers.average(weight)
        self.log.held_back = ()
        if self._pushed and not self._ready:
            self.log.held_back = ("M", "D") if self._one_version else ("M",)

        # The part side's gradients are added here, because all ranks must sum them after the owner side's.
        while self._ready:
            self._add_part_gradients(self._ready.pop(0))
        if self._current is not None and not self._one_version:
            self.log.waiting.append(WaitingGradient(self._current.number, "D", self.log.steps["D"]))
        self._current = None

    def _record_span(self, name: str, number: int) -> AbstractContextManager[None]:
        timeline = self._session.timeline
        return timeline.span(name, COMPUTE, number) if timeline.on else nullcontext()

    def _wait_timed(self, wait: Any, name: str, number: int) -> Any:
        """Call ``wait`` in a span of the trace, and count its seconds as waiting. Return its result."""
        begin_s = time.perf_counter()
        with self._record_span(name, number):
            result = wait()
        self.exchange.waited_s += time.perf_counter() - begin_s
        return result


class PullBackward(torch.autograd.Function):
    """Makes the sums inputs to the owner's graph. Backward sends their gradients to the parts."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, pipeline: Pipeline, batch: InFlightBatch, *inputs: Tensor) -> Any:
        ctx.pipeline = pipeline
        ctx.batch = batch
        # The own block's rows are inputs only because they get gradients.
        sums = inputs[len(batch.own_rows) :]
        return tuple(total.view_as(total) for total in sums)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        # The graph lives as long as the user keeps the loss, but the batch should be freed.
        batch = ctx.batch
        ctx.batch = None
        ctx.pipeline.complete(batch, gradients)
        anchor_gradient = gradients[0].new_zeros(())
        return anchor_gradient, None, None, *batch.unweigh_row_gradients(), *[None] * len(gradients)
