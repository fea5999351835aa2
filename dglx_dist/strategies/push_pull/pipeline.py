"""P3's pipeline: several mini-batches in flight, each with the weights that it began with.

Let b be the batch of the user's current iteration. With two batches in flight, one iteration runs fM(b+1),
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
from dglx_dist.strategies.push_pull.split_model import InputSpec, Origin, SplitModel, read_input_spec

Side: TypeAlias = Literal["M", "D"]
"""Names of the sides in P3: the part side M (layer 1 up to the sum) and the owner side D (the rest)."""

Leaves: TypeAlias = dict[str, Tensor]
"""Autograd leaves with parameter values, by parameter name."""

log = logging.getLogger(__name__)


_WHOLE_TENSORS = frozenset(
    {"Adafactor", "DistributedShampoo", "GaLoreAdamW", "LBFGS", "Muon", "Shampoo", "SM3", "SOAP"}
    | {"Lamb", "LAMB", "Lars", "LARS"}
)
"""Optimizer classes that use norms, rows or factors of a parameter, and not only single elements."""

_ELEMENTWISE = "SGD, Adam, AdamW, NAdam, RAdam, Adamax, Adagrad, Adadelta, RMSprop, Rprop, ASGD, SparseAdam"


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise ConfigError if ``optimizer`` cannot step parameters that are cut by columns.

    An optimizer must step each element by that element's gradients alone. Exceptions and their subclasses are
    recognised by class name. Unknown classes are accepted.
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
    """Versions of the weights of one side that a batch read and wrote, counted in optimizer steps."""

    batch: int
    side: Side
    read: int
    """Number of steps of the side when the batch read its weights."""
    written: int
    """Number of steps of the side before the batch's own step. The lag is ``written - read``."""


@final
class VersionLog:
    """Records the versions of the weights that batches read and wrote on both sides.

    torch calls global hooks at every optimizer step, so the user does not have to register optimizers.
    """

    def __init__(self, part: Iterable[nn.Parameter], owner: Iterable[nn.Parameter]) -> None:
        self.versions: deque[Version] = deque(maxlen=1 << 16)
        """The latest versions, in the order of the steps."""
        self.waiting: list[tuple[int, Side, int]] = []
        """(batch, side, read) of gradients that wait for a step."""
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

    @contextmanager
    def step_known_optimizers(self) -> Iterator[None]:
        """Step the known optimizers with the gradients that the block adds. Restore the user's gradients."""
        optimizers = [optimizer_or_none for ref in self._known if (optimizer_or_none := ref()) is not None]
        parameters = [parameter for optimizer in optimizers for parameter in _list_parameters(optimizer)]
        user_gradients = [parameter.grad for parameter in parameters]
        held_back = self.held_back
        self.held_back = ()
        waiting = self.waiting
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
        """Prepare a step of ``optimizer``, as a hook of torch.

        Zero gradients of sides that are held back are removed. An optimizer of the model's parameters is
        remembered, and replaces earlier ones of the same parameters. Raises ConfigError if it cannot step cut
        parameters.
        """
        for parameter in _list_parameters(optimizer) if self.held_back else ():
            if self._side.get(id(parameter)) in self.held_back and _is_zero(parameter.grad):
                parameter.grad = None
        own_parameters = self._find_stepped(optimizer)
        if not own_parameters:
            return
        if not any(ref() is optimizer for ref in self._known):
            check_optimizer(optimizer)
            self._known.append(weakref.ref(optimizer))

        # A replaced optimizer may still exist, so a parameter belongs to the last one that stepped it.
        self._known = [
            ref
            for ref in self._known
            if (known_optimizer := ref()) is optimizer
            or (known_optimizer is not None and not own_parameters & self._find_stepped(known_optimizer))
        ]

    def _after_step(self, optimizer: Optimizer) -> None:
        """Record the versions that a step of ``optimizer`` has written, as a hook of torch.

        Warn once if no optimizer steps the part side.
        """
        sides = {self._side[key] for key in self._find_stepped(optimizer)}
        if not sides:
            return

        # If the model was called twice on a batch, there is one gradient, the sum of both.
        entries = dict.fromkeys(key for key in self.waiting if key[1] in sides)
        self.waiting = [key for key in self.waiting if key not in entries]
        self.versions.extend(Version(*key, self.steps[key[1]]) for key in entries)
        for side in {side for _, side, _ in entries}:
            self.steps[side] += 1

        # If an optimizer steps twice while the part side's gradients wait, no optimizer has them.
        if not any(side == "M" for _, side, _ in self.waiting):
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
    """The trained replicated parameters of an owner, which are used after the sum."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self._live: list[Tensor] | None = None

    def copy_values(self) -> list[Tensor]:
        """Return copies of the live values, even while :meth:`place` has replaced them."""
        values = self._live or [parameter.data for parameter in self.parameters]
        return [value.clone() for value in values]

    def place(self, values: Sequence[Tensor]) -> None:
        """Make the model compute with ``values`` until :meth:`restore`."""
        self.restore()
        self._live = [parameter.data for parameter in self.parameters]
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.data = value

    def restore(self) -> None:
        """Restore the live values if :meth:`place` has replaced them."""
        if self._live is None:
            return
        for parameter, value in zip(self.parameters, self._live, strict=True):
            parameter.data = value
        self._live = None


@final
@dataclass(kw_only=True)
class InFlightBatch:
    """The state of a batch from its first phase to its last."""

    number: int
    inputs: tuple[PartInput, ...]
    """(N_f,) inputs by owner."""
    origins: Mapping[str, Origin]
    """Origins of the input rows by node type."""
    leaves: Leaves
    """Stashed weights of the part side at fM."""
    read: Mapping[Side, int]
    """Number of steps of each side at fM."""
    values: list[Tensor] | None
    """Weights of the owner side at fM, or None if they need not be the same."""
    own_rows: Leaves = field(default_factory=dict)
    """Leaves with the rows of the own block that are not cut, by node type."""
    sources: list[Leaves] = field(default_factory=list)
    """(N_f,) tensors from which the inputs of the first layer are computed, (L0, F_p) by node type."""
    shares: list[list[Tensor]] = field(default_factory=list)
    """This part's shares by gathered tensor, then by owner, with their autograd graph."""
    pulls: list[Transfer] = field(default_factory=list)
    """Transfers of the shares for this owner, by gathered tensor."""
    pushes: list[Transfer] = field(default_factory=list)
    """Transfers of the owners' gradients of the sums, by gathered tensor."""
    gradients: Mapping[str, Tensor | None] = field(default_factory=dict)
    """Gradients of the trained parameters over all owners (bM)."""
    source_gradients: Sequence[Tensor | None] = ()
    """(N_f,) gradients of the sources, if they are trained (bM)."""
    row_gradients: Sequence[Tensor | None] = ()
    """Gradients of :attr:`own_rows`, times :attr:`weight` (bM)."""
    weight: float = 1.0
    """Weight of this rank's gradient in the step (the gradient rule, docs/development/contracts.md)."""

    def sums(self) -> PartialSums:
        """Wait for the parts' shares and return their sums, without a gradient."""
        return tuple(add_in_order(pull()) for pull in self.pulls)

    def unweigh_row_gradients(self) -> list[Tensor | None]:
        """Return the gradients of this rank's loss by :attr:`own_rows`. The step weighs them itself."""
        weight = self.weight or 1.0
        return [None if gradient is None else gradient / weight for gradient in self.row_gradients]


def compute_shares(
    layer: SplittableConv, inputs: Sequence[StageInput], group: Group, exchange: AsyncExchange
) -> list[list[Tensor]]:
    """Compute this part's stages of the first layer, up to the sum over parts (P3's partial forward).

    Collective within ``group`` if the layer scatters. ``inputs`` has one entry for each owner of a batch.
    Return this part's summands by gathered tensor, then by owner.
    """
    transformed = [layer.transform(stage_input) for stage_input in inputs]
    shares = [layer.scatter(stage_input, rows) for stage_input, rows in zip(inputs, transformed, strict=True)]
    summed = [sum_over_parts(owner_shares, exchange) for owner_shares in zip(*shares, strict=True)]
    scattered: list[PartialSums] = list(zip(*summed, strict=True)) if summed else [()] * group.size
    gathered = [
        layer.gather(stage_input, rows, sums)
        for stage_input, rows, sums in zip(inputs, transformed, scattered, strict=True)
    ]
    return [list(owner_shares) for owner_shares in zip(*gathered, strict=True)]


@final
class PartSide:
    """The parameters that a part uses before the sum. Some are cut, and some are shared by all parts.

    They are stepped after the backward of a batch, while later batches are in flight. So each batch computes
    with its own leaves. The gradient of a cut parameter is the sum over the owners of the group, which the
    part computes locally, and over its replicas. The gradient of a shared parameter is summed over all ranks.
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
        places = {name: name.rpartition(".") for name in split.stashed}
        self._pieces = [model.get_parameter(name) for name in split.cuts]
        self._places = {name: (model.get_submodule(inner), last) for name, (inner, _, last) in places.items()}
        trained = [name for name, parameter in self.parameters.items() if parameter.requires_grad]
        self._cut = [name for name in trained if name not in split.shared]
        self._shared = [name for name in trained if name in split.shared]
        same_columns = Group(rank=group.rank, members=group.replicas, replicas=(group.rank,))
        self._between_replicas = AsyncExchange(session, same_columns)

    def make_leaves(self, *, copy: bool) -> Leaves:
        """Return a leaf for each parameter. Without ``copy`` it is valid until the next step."""
        return {
            name: (p.detach().clone() if copy else p.detach()).requires_grad_(p.requires_grad)
            for name, p in self.parameters.items()
        }

    @contextmanager
    def place(self, leaves: Mapping[str, Tensor]) -> Iterator[None]:
        """Replace the parameters of the modules by ``leaves`` (leaf tensors of autograd) inside the block."""
        try:
            for name, (module, attribute) in self._places.items():
                module._parameters[attribute] = leaves[name]  # type: ignore[assignment]  # not a Parameter, but modules compute with any tensor
            yield
        finally:
            for name, (module, attribute) in self._places.items():
                module._parameters[attribute] = self.parameters[name]

    def compute(self, batch: InFlightBatch) -> None:
        """Run the backward of a batch through this part (bM). Collective if the layer scatters."""
        sources = [source for by_type in batch.sources for source in by_type.values() if source.requires_grad]
        # Parameters that the user has frozen meanwhile have no gradient.
        trained = [name for name in (*self._cut, *self._shared) if batch.leaves[name].requires_grad]
        own_rows = [rows for rows in batch.own_rows.values() if rows.requires_grad]
        inputs = [*(batch.leaves[name] for name in trained), *sources, *own_rows]
        shares = []
        received = []
        for push, owner_shares in zip(batch.pushes, batch.shares, strict=True):
            for share, gradient in zip(owner_shares, push(), strict=True):
                if share.requires_grad:
                    shares.append(share)
                    received.append(gradient)

        gradients: Sequence[Tensor | None] = [None] * len(inputs)
        if shares and inputs:
            gradients = torch.autograd.grad(shares, inputs, received, allow_unused=True)
        batch.gradients = dict(zip(trained, gradients, strict=False))
        first_row = len(trained) + len(sources)
        batch.source_gradients = gradients[len(trained) : first_row]
        row_gradients = iter(gradients[first_row:])
        batch.row_gradients = [
            next(row_gradients) if rows.requires_grad else None for rows in batch.own_rows.values()
        ]

    def add_gradients(self, batch: InFlightBatch) -> None:
        """Add the gradients to ``.grad``. Collective if a parameter is shared or replicated."""
        gradients = {name: batch.gradients.get(name) for name in self._cut}
        if len(self._group.replicas) > 1:
            gradients = self._sum_gradients(batch, self._cut, self._sum_over_replicas)
        gradients |= self._sum_gradients(batch, self._shared, self._sum_over_all)
        for name, gradient in gradients.items():
            if batch.leaves[name].requires_grad and gradient is not None:
                parameter = self.parameters[name]
                addend = gradient.detach()
                parameter.grad = addend if parameter.grad is None else parameter.grad + addend

        for ntype, origin in batch.origins.items():
            if not batch.source_gradients or origin.embedding is None:
                continue
            nodes = [part_input.nodes[ntype] for part_input in batch.inputs]
            rows = list(zip(nodes, batch.source_gradients, strict=True))
            if len(self._group.replicas) > 1:
                rows = self._gather_replicas(rows, [by_type[ntype] for by_type in batch.sources])
            origin.embedding.add_gradients(rows)

        mark_pieces(self._pieces, self._session, self._group.size)

    def _sum_gradients(
        self, batch: InFlightBatch, names: Sequence[str], all_reduce: Callable[[Tensor], Tensor]
    ) -> dict[str, Tensor | None]:
        """Return the sums of the gradients of ``names`` over the ranks that ``all_reduce`` spans.

        They are summed in one message. A rank without a gradient contributes zeros.
        """
        if not names:
            return {}
        leaves = [batch.leaves[name] for name in names]
        gradients = [batch.gradients.get(name) for name in names]
        flat_gradients = torch.cat(
            [
                (torch.zeros_like(leaf) if gradient is None else gradient).reshape(-1)
                for gradient, leaf in zip(gradients, leaves, strict=True)
            ]
        )
        pieces = torch.split(all_reduce(flat_gradients), [leaf.numel() for leaf in leaves])

        # Concatenation has promoted several dtypes to the widest.
        pairs = zip(names, pieces, leaves, strict=True)
        return {name: piece.view_as(leaf).to(leaf.dtype) for name, piece, leaf in pairs}

    def _sum_over_replicas(self, flat: Tensor) -> Tensor:
        rank, replicas = self._group.rank, self._group.replicas
        index = replicas.index(rank)
        with report_failed_peers(self._session, "the sum of gradients over replicas"):
            dist.all_reduce(flat, group=self._replicas)
        sent = ring_bytes(flat.nbytes, len(replicas), index)
        self._session.ledger.add(PHASE, 1, rank, replicas[(index + 1) % len(replicas)], sent)
        return flat

    def _sum_over_all(self, flat: Tensor) -> Tensor:
        return sum_over_ranks(flat, self._session, phase=PHASE, layer=1, in_place=True)

    def _gather_replicas(
        self, row_gradients: Sequence[tuple[Tensor, Tensor | None]], sources: Sequence[Tensor]
    ) -> list[tuple[Tensor, Tensor | None]]:
        """Return nodes and gradients of all replicas by rank, so that all ranks add in the same order."""
        nodes = torch.cat([ids for ids, _ in row_gradients])
        values = torch.cat(
            [
                torch.zeros_like(row) if gradient is None else gradient
                for (_, gradient), row in zip(row_gradients, sources, strict=True)
            ]
        )
        sizes = gather_int64([len(nodes)], self._session)[list(self._group.replicas), 0].tolist()
        pushed = [
            self._between_replicas.push(
                rows, [rows.new_empty(size, *rows.shape[1:]) for size in sizes], PHASE
            )
            for rows in (nodes, values)
        ]
        return list(zip(*(gradient() for gradient in pushed), strict=True))


def make_replica_group(session: Session, group: Group) -> dist.ProcessGroup | None:
    """Make the process group of the replicas, or None if there are no others. Every rank must call it."""
    if len(group.replicas) == 1:
        return None
    limit = timedelta(seconds=session.timeout_s)
    with report_failed_peers(session, "groups of replicas"):
        # Every rank must make every group, in the same order.
        groups = [
            dist.new_group(list(range(part, session.topology.world_size, group.size)), timeout=limit)
            for part in range(group.size)
        ]

    return groups[group.part]


@final
class Pipeline(Shared):
    """Runs batches through the first layer of one model, in lock-step with the other ranks.

    The phases of a batch are called fM, fD, bD and bM. They are forward (f) and backward (b), on the part
    side (M, before the sum over parts) and on the owner side (D, after it).

    Args:
        replicas: Process group of the ranks with the same columns. None if this rank is the only one.
        split: The model with its first layer cut by columns.
        buffers: Buffers of the model, which are averaged after each backward.
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
        self._provenance, self._buffers = split.provenance, buffers
        part_names = {*split.cuts, *split.shared}
        owner_parameters = [
            (name, parameter)
            for name, parameter in module.named_parameters()
            if parameter.requires_grad and name not in part_names
        ]
        self._part = part = PartSide(session, group, replicas, module, split)
        self._owner = owner = OwnerSide([parameter for _, parameter in owner_parameters])
        self.exchange = GradientExchange(owner_parameters, session, options.bucket_bytes)
        self._activations = AsyncExchange(session, group, options.wire_dtype)
        self._depth = options.depth
        self._delay = options.delay
        self._looks_ahead = options.depth > 1
        self._one_version = options.weights == "whole" and self._looks_ahead
        self.exchange.delay = options.delay if self._one_version else 0
        self.exchange.after = self._after_backward

        # Embeddings get their gradients by rows, so batches have no leaves of them.
        embeddings = [module.get_parameter(name) for name in split.cuts if name not in split.stashed]
        self.log = VersionLog([*part.parameters.values(), *embeddings], owner.parameters)
        self._spec: InputSpec | None = None
        self._edge_kinds: dict[str, str] | None = None
        """Kinds of per-edge values by name that all ranks agreed on last."""
        self._begun: InFlightBatch | None = None
        """Batch that has begun but was not yet reached by the user's loop."""
        self._pushed: list[InFlightBatch] = []
        """Batches whose gradients of the sums were pushed, and which wait for bM."""
        self._ready: list[InFlightBatch] = []
        """Batches that finished bM in the running backward."""
        self._current: InFlightBatch | None = None
        self._last_called: Callable[[], GroupBatch | None] = lambda: None
        """Weak reference to the batch of the model's last call."""
        self.weight = 1.0
        """Weight of this rank's gradient in the step. It is set before each forward call."""

    def begin(self, group_batch: GroupBatch | None) -> None:
        """Prepare for the model's call on a batch. It is None if the blocks come from elsewhere."""
        self._owner.restore()
        self._provenance.begin(group_batch, self._group.part)
        if group_batch is None:
            return
        for features in self._split.features:
            self._provenance.add(features.read_source(group_batch.inputs[self._group.part]), features)
        batch = self._get_begun(group_batch)
        if batch is not None and batch.values is not None:
            self._owner.place(batch.values)

    def resume(self) -> None:
        """Return to the batch that waits for its backward, after a call without gradients."""
        if self._current is not None and self._current.values is not None:
            self._owner.place(self._current.values)

    def __call__(self, layer: SplittableConv, stage_input: StageInput) -> PartialSums:
        """Return the sums of all parts for this rank's block. Forward and backward are collective.

        Raises ConfigError if the block does not come from the strategy's loader, or the rows are not its own,
        and PeerError if a rank is dead or did not take part within the time-out.
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
            # A second call would replace the weights of the first before its backward.
            if self._last_called() is group_batch:
                raise ConfigError(
                    "the model was called twice for one batch, but a batch has one version of the weights "
                    f"with depth={self._depth}; call it once for each batch, or use depth=1"
                )
            self._last_called = weakref.ref(group_batch)

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
        batch.weight, self._current = self.weight, batch
        anchor = torch.zeros((), requires_grad=True, device=sums[0].device)
        inputs = (*own_rows.values(), *sums)
        return cast("PartialSums", PullBackward.apply(anchor, self, batch, *inputs))  # type: ignore[no-untyped-call]  # torch does not annotate this

    def drain(self) -> None:
        """Finish and step every batch whose backward has begun. Every rank must call it.

        A batch that only ran fM is started again when the user's loop reaches it.
        """
        self._owner.restore()
        if self._begun is not None:
            self._begun.sums()
            self._begun = None
        while self._pushed:
            with self.log.step_known_optimizers():
                self.exchange.add_delayed()
                self._add(self._backward_part(self._pushed.pop(0)))

    def close(self) -> None:
        """Forget all batches, and remove the hooks from the optimizers."""
        self._owner.restore()
        self._begun = self._current = None
        self._pushed = []
        self._ready = []
        self.log.close()
        self.exchange.close()

    def complete(self, batch: InFlightBatch | None, gradients: Sequence[Tensor]) -> None:
        """Push the gradients of the sums, and run the part's backward of the batches that are due.

        Raises ConfigError if the batch is None, because it was completed before.
        """
        if batch is None:
            raise ConfigError(
                "backward went through the first layer twice for one batch; call the model once for each "
                "backward (retain_graph is not supported here)"
            )

        for gradient, shares in zip(gradients, batch.shares, strict=True):
            # A mean over no targets is NaN, and NaN times a weight of 0 is NaN.
            weighted_gradient = gradient * batch.weight if batch.weight else torch.zeros_like(gradient)
            batch.pushes.append(self._activations.push(weighted_gradient, shares, BACKWARD, batch.number))

        self._pushed.append(batch)
        while len(self._pushed) > self._delay:
            self._ready.append(self._backward_part(self._pushed.pop(0)))

    def _read_own_rows(self, layer: SplittableConv, stage_input: StageInput) -> dict[str, Tensor]:
        if layer.own_types and self._looks_ahead:
            raise ConfigError(
                f"the first layer reads rows of {', '.join(layer.own_types)}, which are not features "
                "of the dataset, so no batch can begin before the model is called; use depth=1"
            )
        return {ntype: stage_input.by_type[ntype].x for ntype in layer.own_types}

    def _agree_on_edges(self, edges: Mapping[str, Tensor]) -> None:
        # If one rank had no edge values, the others would wait for them.
        kinds = {name: f"{list(values.shape[1:])} {values.dtype}" for name, values in sorted(edges.items())}
        if kinds != self._edge_kinds:
            remedy = "pass the first layer the same arguments on every rank"
            check_equal(self._session, "the values of edges of the first layer", kinds, remedy)
            self._edge_kinds = kinds

    def _get_begun(self, group_batch: GroupBatch) -> InFlightBatch | None:
        batch = self._begun if torch.is_grad_enabled() else None
        return batch if batch is not None and batch.inputs is group_batch.inputs else None

    def _begin_following(self, layer: SplittableConv, group_batch: GroupBatch, spec: InputSpec) -> None:
        """Run fM of the next batch if it has not begun. Its messages travel while this batch computes."""
        following = group_batch.following
        if following is None or self._get_begun(following) is not None:
            return
        # A loop that was left may have begun a batch that is not needed any more.
        self._begun, self._spec = None, spec
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
        """Run fM of a batch: compute this part's shares, and begin to pull the shares for this rank.

        Collective within the group. ``own_edges`` are the edge values of the own block, which are sent to the
        other parts. ``own_rows`` are rows of the own block that are not cut, by node type.
        """
        with self._record_span("forward M", group_batch.number):
            batch = InFlightBatch(
                number=group_batch.number,
                inputs=group_batch.inputs,
                origins=spec.origins,
                leaves=self._part.make_leaves(copy=self._looks_ahead and torch.is_grad_enabled()),
                read=dict(self.log.steps),
                values=self._owner.copy_values() if self._one_version and torch.is_grad_enabled() else None,
            )
            batch.own_rows = {
                ntype: rows.detach().requires_grad_(rows.requires_grad) for ntype, rows in own_rows.items()
            }
            by_column = {name: runs for runs in self._split.runs.values() for name in layer.edges_by_column}
            inputs = group_batch.inputs
            edges = share_edge_values(own_edges, inputs, by_column, self._group, self._activations)
            with self._part.place(batch.leaves):
                batch.sources = [
                    {ntype: origin.read_source(part_input) for ntype, origin in spec.origins.items()}
                    for part_input in inputs
                ]
                stage_inputs = [
                    layer.make_input(part_input.block, self._compute_inputs(layer, batch, part), values)
                    for part, (part_input, values) in enumerate(zip(inputs, edges, strict=True))
                ]
                batch.shares = compute_shares(layer, stage_inputs, self._group, self._activations)

            batch.pulls = [self._activations.pull(part, FORWARD, batch.number) for part in batch.shares]
        return batch

    def _compute_inputs(
        self, layer: SplittableConv, batch: InFlightBatch, part: int
    ) -> dict[str, StageInput]:
        """Return the inputs of the first layer for the block of one owner, by node type."""
        part_input = batch.inputs[part]
        is_own = part == self._group.part

        def make_input(ntype: str, rows: Tensor, runs: tuple[ColumnRange, ...]) -> StageInput:
            keys = part_input.keys(ntype)
            seed = self._session.seed
            draws = DropDraws(seed=seed, number=part_input.number, nodes=keys, runs=runs)
            return StageInput(block=part_input.block, x=rows, edges={}, draws=draws, is_own=is_own)

        inputs = {
            ntype: make_input(ntype, origin.compute_rows(batch.sources[part][ntype], part_input), origin.runs)
            for ntype, origin in batch.origins.items()
        }
        for ntype, own_rows in batch.own_rows.items():
            width = own_rows.shape[1] if is_own else 0
            rows = own_rows if is_own else own_rows.new_zeros(len(part_input.nodes[ntype]), 0)
            runs = (ColumnRange(first=0, last=width, width=width),)
            inputs[ntype] = make_input(ntype, rows, runs)

        return inputs

    def _backward_part(self, batch: InFlightBatch) -> InFlightBatch:
        for push in batch.pushes:
            self._wait_timed(push, f"{WAIT} for the push", batch.number)
        with self._record_span("backward M", batch.number):
            self._part.compute(batch)
        return batch

    def _add(self, batch: InFlightBatch) -> None:
        self._part.add_gradients(batch)
        # If all leaves are frozen, the side is never stepped.
        if batch.source_gradients or any(leaf.requires_grad for leaf in batch.leaves.values()):
            self.log.waiting.append((batch.number, "M", batch.read["M"]))
        if self._one_version:
            self.log.waiting.append((batch.number, "D", batch.read["D"]))

    def _after_backward(self, weight: float) -> None:
        """Finish a backward, after the gradients of the owner side are summed.

        Add the gradients of the batches that are ready, and note the sides without a gradient in the next
        step.
        """
        # Gradients of the part side are added here, because all ranks must sum them after the owner side's.
        self._owner.restore()
        self._buffers.average(weight)
        waiting: tuple[Side, ...] = ("M", "D") if self._one_version else ("M",)
        self.log.held_back = waiting if self._pushed and not self._ready else ()
        while self._ready:
            self._add(self._ready.pop(0))
        if self._current is not None and not self._one_version:
            self.log.waiting.append((self._current.number, "D", self.log.steps["D"]))
        self._current = None

    def _record_span(self, name: str, number: int) -> AbstractContextManager[None]:
        timeline = self._session.timeline
        return timeline.span(name, COMPUTE, number) if timeline.on else nullcontext()

    def _wait_timed(self, wait: Any, name: str, number: int) -> Any:
        begin = time.perf_counter()
        with self._record_span(name, number):
            result = wait()
        self.exchange.waited_s += time.perf_counter() - begin
        return result


class PullBackward(torch.autograd.Function):
    """Makes the sums inputs of the owner's graph. Backward sends their gradients to the parts."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, pipeline: Pipeline, batch: InFlightBatch, *inputs: Tensor) -> Any:
        ctx.pipeline, ctx.batch = pipeline, batch
        sums = inputs[len(batch.own_rows) :]
        return tuple(total.view_as(total) for total in sums)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        # The graph lives as long as the user keeps the loss, but the batch should be freed.
        batch, ctx.batch = ctx.batch, None
        ctx.pipeline.complete(batch, gradients)
        anchor_gradient = gradients[0].new_zeros(())
        return anchor_gradient, None, None, *batch.unweigh_row_gradients(), *[None] * len(gradients)
