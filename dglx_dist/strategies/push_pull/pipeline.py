"""P3's pipeline: several mini-batches in flight, each with the weights that it began with.

With b the batch of the user's current iteration and two or more batches in flight, one iteration runs
fM(b+1), fD(b), bD(b), bM(b) (with three: bM(b-1)) and the user's optimizer step. See
docs/strategies/push_pull.md, "What a step does".
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
"""P3's names: the part side (layer 1 up to the sum) and the owner side (everything after it)."""

Leaves: TypeAlias = dict[str, Tensor]
"""Parameter name to a leaf with the values of some moment."""

log = logging.getLogger(__name__)


_WHOLE_TENSORS = frozenset(
    {"Adafactor", "DistributedShampoo", "GaLoreAdamW", "LBFGS", "Muon", "Shampoo", "SM3", "SOAP"}
    | {"Lamb", "LAMB", "Lars", "LARS"}
)
"""Classes that use more of a parameter than the element they step: its norm, its rows, its factors."""

_ELEMENTWISE = (
    "SGD, Adam, AdamW, NAdam, RAdam, Adamax, Adagrad, Adadelta, RMSprop, Rprop, ASGD and SparseAdam"
)


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise ConfigError if ``optimizer`` must not step parameters of which each rank has some columns.

    It may if it steps each element by that element's gradients alone, as nearly all do. Exceptions are known
    by class name, with their subclasses; unknown classes pass.
    """
    kind = type(optimizer)
    remedy = f"take one that steps each element by itself ({_ELEMENTWISE}), or strategy='data_parallel'"
    known = sorted(_WHOLE_TENSORS.intersection(base.__name__ for base in kind.__mro__))
    if known:
        raise ConfigError(
            f"{kind.__name__} looks at whole parameters, of which this rank holds some columns only, so its "
            f"steps would differ from those of one process; {remedy}"
        )
    closure = inspect.signature(kind.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"{kind.__name__} calls the model again within a step (its step() needs a closure), which a "
            f"pipeline cannot follow; {remedy}"
        )


class Version(NamedTuple):
    """The step of one batch on one side."""

    batch: int
    side: Side
    read: int
    """Steps that the side had taken when the batch read its weights."""
    written: int
    """Steps that it had taken before the batch's own; the lag is ``written - read``."""


@final
class VersionLog:
    """Follows the optimizers' steps on both sides, and records the versions that batches read and wrote.

    torch calls global hooks at every optimizer's steps, so the user's loop does not have to register its own.
    """

    def __init__(self, part: Iterable[nn.Parameter], owner: Iterable[nn.Parameter]) -> None:
        self.done: deque[Version] = deque(maxlen=1 << 16)
        """The latest, in the order of the steps."""
        self.waiting: list[tuple[int, Side, int]] = []
        """(batch, side, read) of gradients that wait for a step."""
        self.steps: dict[Side, int] = {"M": 0, "D": 0}
        self._side: dict[int, Side] = {id(parameter): "M" for parameter in part}
        self._side |= {id(parameter): "D" for parameter in owner}
        self._known: list[weakref.ref[Optimizer]] = []
        self.held_back: tuple[Side, ...] = ()
        """Sides that have no gradient in the coming step, as all their batches are still in flight.

        Zeros that the user's ``zero_grad(set_to_none=False)`` left would count as one: to Adam, momentum and
        weight decay a step without a batch. So gradients of nothing but zeros are removed.
        """
        self._stepped_without_part: set[int] = set()
        """Optimizers that have stepped since the part side's gradients wait."""
        self._warned = False
        self.close = watch_steps(VersionLog._before, self, after=VersionLog._after)
        """Leaves the optimizers alone."""

    @contextmanager
    def own_step(self) -> Iterator[None]:
        """Step the known optimizers with the gradients that the block leaves, and no others.

        Gradients from before are restored afterwards.
        """
        optimizers = [found for ref in self._known if (found := ref()) is not None]
        parameters = [parameter for one in optimizers for parameter in _parameters(one)]
        before = [parameter.grad for parameter in parameters]
        held_back, self.held_back = self.held_back, ()
        waiting, self.waiting = self.waiting, []
        for parameter in parameters:
            parameter.grad = None
        yield
        for one in optimizers:
            one.step()
        self.held_back, self.waiting = held_back, waiting + self.waiting
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient

    def _before(self, optimizer: Optimizer) -> None:
        for parameter in _parameters(optimizer) if self.held_back else ():
            if self._side.get(id(parameter)) in self.held_back and _is_zero(parameter.grad):
                parameter.grad = None
        stepped = self._stepped_by(optimizer)
        if not stepped:
            return
        if not any(ref() is optimizer for ref in self._known):
            check_optimizer(optimizer)
            self._known.append(weakref.ref(optimizer))
        # A parameter's optimizer is the last one that stepped it: a replaced one may still exist.
        self._known = [
            ref
            for ref in self._known
            if (other := ref()) is optimizer or (other is not None and not stepped & self._stepped_by(other))
        ]

    def _after(self, optimizer: Optimizer) -> None:
        sides = {self._side[one] for one in self._stepped_by(optimizer)}
        if not sides:
            return
        # A batch on which the model was called twice has one gradient, their sum.
        taken = dict.fromkeys(one for one in self.waiting if one[1] in sides)
        self.waiting = [one for one in self.waiting if one not in taken]
        self.done.extend(Version(*one, self.steps[one[1]]) for one in taken)
        for side in {side for _, side, _ in taken}:
            self.steps[side] += 1
        # The part side's gradients wait while another optimizer steps for the second time.
        if not any(side == "M" for _, side, _ in self.waiting):
            self._stepped_without_part = set()
        elif id(optimizer) not in self._stepped_without_part:
            self._stepped_without_part.add(id(optimizer))
        elif not self._warned:
            self._warned = True
            log.warning(
                "no optimizer steps the first layer's weights, which push_pull cut by columns: was the "
                "optimizer built before wrap()? Build it from the parameters of what wrap() returned"
            )

    def _stepped_by(self, optimizer: Optimizer) -> set[int]:
        return {id(parameter) for parameter in _parameters(optimizer)} & self._side.keys()


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _is_zero(gradient: Tensor | None) -> bool:
    if gradient is None:
        return False
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return not bool(values.any())


@final
class OwnerSide:
    """The trained replicated parameters of an owner: everything after the sum."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self._live: list[Tensor] | None = None

    def copies(self) -> list[Tensor]:
        """Return copies of the live values, also while others are placed."""
        values = self._live or [parameter.data for parameter in self.parameters]
        return [value.clone() for value in values]

    def place(self, values: Sequence[Tensor]) -> None:
        """Make the model compute with ``values`` until :meth:`restore`."""
        self.restore()
        self._live = [parameter.data for parameter in self.parameters]
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.data = value

    def restore(self) -> None:
        """Put the live values back, if others are placed."""
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
    """(N_f,) by owner."""
    origin: Origin
    """Of the input rows."""
    leaves: Leaves
    """The part side's weights at fM: the stash."""
    read: Mapping[Side, int]
    """Steps that each side's weights had seen at fM."""
    values: list[Tensor] | None
    """The owner side's weights at fM; None where they need not be the same."""
    sources: list[Tensor] = field(default_factory=list)
    """(N_f,) what the inputs of the first layer are made of, (L0, F_p) of each owner."""
    shares: list[list[Tensor]] = field(default_factory=list)
    """This part's shares by gathered tensor, then by owner, with their graph."""
    pulls: list[Transfer] = field(default_factory=list)
    """The owner's sums, by gathered tensor."""
    pushes: list[Transfer] = field(default_factory=list)
    """The owners' gradients of those sums."""
    gradients: Mapping[str, Tensor | None] = field(default_factory=dict)
    """Of the trained parameters over all owners (bM)."""
    of_sources: Sequence[Tensor | None] = ()
    """(N_f,) gradients of the sources, where they are trained (bM)."""
    weight: float = 1.0
    """Of this rank's gradient in the step (the gradient rule, docs/design/contracts.md)."""

    def sums(self) -> PartialSums:
        """Wait for the parts' shares and return their sums, without a gradient."""
        return tuple(add_in_order(pull()) for pull in self.pulls)


def compute_shares(
    layer: SplittableConv, given: Sequence[StageInput], group: Group, exchange: AsyncExchange
) -> list[list[Tensor]]:
    """Compute this part's stages up to the sum for every owner (fM); collective where the layer scatters.

    Returns shares by gathered tensor, then by owner.
    """
    transformed = [layer.transform(one) for one in given]
    shares = [layer.scatter(one, rows) for one, rows in zip(given, transformed, strict=True)]
    summed = [sum_over_parts(of_owners, exchange) for of_owners in zip(*shares, strict=True)]
    scattered: list[PartialSums] = list(zip(*summed, strict=True)) if summed else [()] * group.size
    gathered = [
        layer.gather(one, rows, sums) for one, rows, sums in zip(given, transformed, scattered, strict=True)
    ]
    return [list(of_owners) for of_owners in zip(*gathered, strict=True)]


@final
class PartSide:
    """The parameters that a part uses before the sum: the cut ones and those shared by all parts.

    They are stepped after the whole backward of a batch, while later batches are in flight, so each batch
    computes with leaves of its own. The gradient of a cut parameter is the sum over the owners of the group,
    which the part computes locally, and over its replicas. That of a shared one is summed over all ranks.
    """

    def __init__(
        self,
        session: Session,
        group: Group,
        replicas: dist.ProcessGroup | None,
        model: nn.Module,
        split: SplitModel,
    ) -> None:
        self._session, self._group, self._replicas = session, group, replicas
        self.parameters: dict[str, nn.Parameter] = {name: model.get_parameter(name) for name in split.stashed}
        places = {name: name.rpartition(".") for name in split.stashed}
        self._pieces = [model.get_parameter(name) for name in split.cuts]
        self._places = {name: (model.get_submodule(inner), last) for name, (inner, _, last) in places.items()}
        trained = [name for name, parameter in self.parameters.items() if parameter.requires_grad]
        self._cut = [name for name in trained if name not in split.shared]
        self._shared = [name for name in trained if name in split.shared]
        same_columns = Group(rank=group.rank, members=group.replicas, replicas=(group.rank,))
        self._between_replicas = AsyncExchange(session, same_columns)

    def leaves(self, *, copied: bool) -> Leaves:
        """Return a leaf for each parameter; without ``copied`` it is valid until the next step."""
        return {
            name: (p.detach().clone() if copied else p.detach()).requires_grad_(p.requires_grad)
            for name, p in self.parameters.items()
        }

    @contextmanager
    def placed(self, leaves: Mapping[str, Tensor]) -> Iterator[None]:
        """Make the modules compute with ``leaves`` inside the block."""
        try:
            for name, (module, attribute) in self._places.items():
                module._parameters[attribute] = leaves[name]  # type: ignore[assignment]  # any tensor computes
            yield
        finally:
            for name, (module, attribute) in self._places.items():
                module._parameters[attribute] = self.parameters[name]

    def compute(self, batch: InFlightBatch) -> None:
        """Run the backward of a batch through this part (bM); collective where the layer scatters."""
        sources = [one for one in batch.sources if one.requires_grad]
        # Parameters that the user has frozen meanwhile have none.
        trained = [name for name in (*self._cut, *self._shared) if batch.leaves[name].requires_grad]
        wanted = [*(batch.leaves[name] for name in trained), *sources]
        shares, received = [], []
        for push, of_owners in zip(batch.pushes, batch.shares, strict=True):
            for share, gradient in zip(of_owners, push(), strict=True):
                if share.requires_grad:
                    shares.append(share)
                    received.append(gradient)
        found: Sequence[Tensor | None] = [None] * len(wanted)
        if shares and wanted:
            found = torch.autograd.grad(shares, wanted, received, allow_unused=True)
        batch.gradients = dict(zip(trained, found, strict=False))
        batch.of_sources = found[len(trained) :]

    def add(self, batch: InFlightBatch) -> None:
        """Add to ``.grad``; collective where something is shared or replicated."""
        found = {name: batch.gradients.get(name) for name in self._cut}
        if len(self._group.replicas) > 1:
            found = self._summed(batch, self._cut, self._over_replicas)
        for name, gradient in (found | self._summed(batch, self._shared, self._over_all)).items():
            if batch.leaves[name].requires_grad and gradient is not None:
                parameter, new = self.parameters[name], gradient.detach()
                parameter.grad = new if parameter.grad is None else parameter.grad + new
        if batch.of_sources and batch.origin.embedding is not None:
            nodes = [one.nodes for one in batch.inputs]
            rows = list(zip(nodes, batch.of_sources, strict=True))
            if len(self._group.replicas) > 1:
                rows = self._of_all_replicas(rows, batch.sources)
            batch.origin.embedding.add_gradients(rows)
        mark_pieces(self._pieces, self._session, self._group.size)

    def _summed(
        self, batch: InFlightBatch, names: Sequence[str], all_reduce: Callable[[Tensor], Tensor]
    ) -> dict[str, Tensor | None]:
        if not names:
            return {}
        like = [batch.leaves[name] for name in names]
        given = [batch.gradients.get(name) for name in names]
        flat = torch.cat(
            [
                (torch.zeros_like(leaf) if one is None else one).reshape(-1)
                for one, leaf in zip(given, like, strict=True)
            ]
        )
        pieces = torch.split(all_reduce(flat), [leaf.numel() for leaf in like])
        # Concatenation of several dtypes has promoted them to the widest.
        return {
            name: piece.view_as(leaf).to(leaf.dtype)
            for name, piece, leaf in zip(names, pieces, like, strict=True)
        }

    def _over_replicas(self, flat: Tensor) -> Tensor:
        rank, ring = self._group.rank, self._group.replicas
        place = ring.index(rank)
        with report_failed_peers(self._session, "the sum of gradients over replicas"):
            dist.all_reduce(flat, group=self._replicas)
        sent = ring_bytes(flat.nbytes, len(ring), place)
        self._session.ledger.add(PHASE, 1, rank, ring[(place + 1) % len(ring)], sent)
        return flat

    def _over_all(self, flat: Tensor) -> Tensor:
        return sum_over_ranks(flat, self._session, phase=PHASE, layer=1, in_place=True)

    def _of_all_replicas(
        self, found: Sequence[tuple[Tensor, Tensor | None]], like: Sequence[Tensor]
    ) -> list[tuple[Tensor, Tensor | None]]:
        """Return nodes and gradients of all replicas, in their order, so that all ranks add alike."""
        nodes = torch.cat([ids for ids, _ in found])
        values = torch.cat(
            [torch.zeros_like(row) if one is None else one for (_, one), row in zip(found, like, strict=True)]
        )
        sizes = gather_int64([len(nodes)], self._session)[list(self._group.replicas), 0].tolist()
        pushed = [
            self._between_replicas.push(
                rows, [rows.new_empty(size, *rows.shape[1:]) for size in sizes], PHASE
            )
            for rows in (nodes, values)
        ]
        return list(zip(*(one() for one in pushed), strict=True))


def replicas_group(session: Session, group: Group) -> dist.ProcessGroup | None:
    """Return the process group of the replicas, None without others; every rank must call it."""
    if len(group.replicas) == 1:
        return None
    limit = timedelta(seconds=session.timeout_s)
    with report_failed_peers(session, "groups of replicas"):
        # Every rank must make every group, in the same order.
        made = [
            dist.new_group(list(range(part, session.topology.world_size, group.size)), timeout=limit)
            for part in range(group.size)
        ]
    return made[group.part]


@final
class Pipeline(Shared):
    """Runs batches through the first layer of one model, in lock-step with the other ranks.

    ``replicas`` is their process group; ``buffers`` are averaged after each backward.
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
        self._session, self._group, self._split = session, group, split
        self._provenance, self._buffers = split.provenance, buffers
        local = {*split.cuts, *split.shared}
        trained = [
            (name, parameter)
            for name, parameter in module.named_parameters()
            if parameter.requires_grad and name not in local
        ]
        self._part = part = PartSide(session, group, replicas, module, split)
        self._owner = owner = OwnerSide([parameter for _, parameter in trained])
        self.exchange = GradientExchange(trained, session, options.bucket_bytes)
        self._activations = AsyncExchange(session, group, options.wire_dtype)
        self._depth, self._delay, self._looks_ahead = options.depth, options.delay, options.depth > 1
        self._one_version = options.weights == "whole" and self._looks_ahead
        self.exchange.delay = options.delay if self._one_version else 0
        self.exchange.after = self._after_backward
        by_rows = [module.get_parameter(name) for name in split.cuts if name not in split.stashed]
        self.log = VersionLog([*part.parameters.values(), *by_rows], owner.parameters)
        self._spec: InputSpec | None = None
        self._edge_kinds: dict[str, str] | None = None
        """Per-edge values by name that all ranks agreed on last."""
        self._begun: InFlightBatch | None = None
        """Not yet reached by the user's loop."""
        self._pushed: list[InFlightBatch] = []
        """The gradients of their sums were pushed; bM is still to come."""
        self._ready: list[InFlightBatch] = []
        """Results of bM in the backward that is running."""
        self._current: InFlightBatch | None = None
        self._last_called: Callable[[], GroupBatch | None] = lambda: None
        """The batch that the model was called on last; a weak reference."""
        self.weight = 1.0
        """Of this rank's gradient in the step; set before each forward call."""

    def begin(self, group_batch: GroupBatch | None) -> None:
        """Prepare for the model's call on a batch; None where its blocks come from elsewhere."""
        self._owner.restore()
        self._provenance.begin(group_batch, self._group.part)
        if group_batch is None:
            return
        for features in self._split.features:
            self._provenance.add(features.source(group_batch.inputs[self._group.part]), features)
        batch = self._begun_for(group_batch)
        if batch is not None and batch.values is not None:
            self._owner.place(batch.values)

    def resume(self) -> None:
        """Return to the batch whose backward is still to come, after a call without gradients."""
        if self._current is not None and self._current.values is not None:
            self._owner.place(self._current.values)

    def __call__(self, layer: SplittableConv, given: StageInput) -> PartialSums:
        """Return the sums of all parts for this rank's block; forward and backward are collective.

        Raises:
            ConfigError: the block does not come from the strategy's loader, or the rows are not its own.
            PeerError: a rank is dead or did not take part within the time-out.
        """
        group_batch: GroupBatch | None = getattr(given.block, "push_pull", None)
        if group_batch is None:
            raise ConfigError(
                "the first layer was given a block that does not come from the strategy's loader, so the "
                "other ranks do not know it; feed the model from dglx_dist.DataLoader, and compute without "
                "the other ranks by model.whole()"
            )
        ahead = self._looks_ahead and torch.is_grad_enabled()
        if ahead:
            # A second call would replace the weights of the first before its backward.
            if self._last_called() is group_batch:
                raise ConfigError(
                    f"the model was called twice for one batch, and with depth={self._depth} every batch "
                    "has the weights that it began with; call it once for each batch, or use depth=1"
                )
            self._last_called = weakref.ref(group_batch)
        spec = read_input_spec(layer, given, self._provenance)
        self._agree_on_edges(given.edges)
        batch = self._begun_for(group_batch)
        if batch is None:
            batch = self._start(layer, group_batch, spec, given.edges)
        else:
            self._begun = None
            if self._spec != spec:
                raise ConfigError(
                    "the model gave its first layer other inputs than in the batch before, which batches in "
                    "flight do not allow; use depth=1"
                )
        if ahead:
            self._begin_following(layer, group_batch, spec)
        sums = self._timed(batch.sums, f"{WAIT} for the pull", batch.number)
        if not torch.is_grad_enabled():
            return sums
        batch.weight, self._current = self.weight, batch
        anchor = torch.zeros((), requires_grad=True, device=sums[0].device)
        return cast("PartialSums", PullBackward.apply(anchor, self, batch, *sums))  # type: ignore[no-untyped-call]  # torch leaves it bare

    def drain(self) -> None:
        """Finish and step every batch whose backward has begun; every rank must call it.

        A batch with fM only is begun anew when its turn comes.
        """
        self._owner.restore()
        if self._begun is not None:
            self._begun.sums()
            self._begun = None
        while self._pushed:
            with self.log.own_step():
                self.exchange.add_delayed()
                self._add(self._backward_part(self._pushed.pop(0)))

    def close(self) -> None:
        """Forget all batches, and leave the optimizers alone."""
        self._owner.restore()
        self._begun = self._current = None
        self._pushed, self._ready = [], []
        self.log.close()
        self.exchange.close()

    def complete(self, batch: InFlightBatch | None, gradients: Sequence[Tensor]) -> None:
        """Push the gradients of the sums, and run the part's backward of the batches that are due.

        Raises:
            ConfigError: the batch is None, as it was completed before.
        """
        if batch is None:
            raise ConfigError(
                "backward went through the first layer twice for one batch; call the model once for each "
                "backward (retain_graph cannot be honoured here)"
            )
        for gradient, shares in zip(gradients, batch.shares, strict=True):
            # A mean over no targets is nan, which a weight of 0 does not undo.
            weighed = gradient * batch.weight if batch.weight else torch.zeros_like(gradient)
            batch.pushes.append(self._activations.push(weighed, shares, BACKWARD, batch.number))
        self._pushed.append(batch)
        while len(self._pushed) > self._delay:
            self._ready.append(self._backward_part(self._pushed.pop(0)))

    def _agree_on_edges(self, edges: Mapping[str, Tensor]) -> None:
        # A rank that has none would leave the others waiting for them.
        kinds = {name: f"{list(one.shape[1:])} {one.dtype}" for name, one in sorted(edges.items())}
        if kinds != self._edge_kinds:
            remedy = "pass the first layer the same arguments on every rank"
            check_equal(self._session, "the values of edges of the first layer", kinds, remedy)
            self._edge_kinds = kinds

    def _begun_for(self, group_batch: GroupBatch) -> InFlightBatch | None:
        begun = self._begun if torch.is_grad_enabled() else None
        return begun if begun is not None and begun.inputs is group_batch.inputs else None

    def _begin_following(self, layer: SplittableConv, group_batch: GroupBatch, spec: InputSpec) -> None:
        following = group_batch.following
        if following is None or self._begun_for(following) is not None:
            return
        # A batch that was begun by a loop that was left is not needed any more.
        self._begun, self._spec = None, spec
        edges = spec.edges(layer, following.inputs[self._group.part].block)
        self._begun = self._start(layer, following, spec, edges)

    def _start(
        self, layer: SplittableConv, group_batch: GroupBatch, spec: InputSpec, own_edges: Mapping[str, Tensor]
    ) -> InFlightBatch:
        with self._span("forward M", group_batch.number):
            batch = InFlightBatch(
                number=group_batch.number,
                inputs=group_batch.inputs,
                origin=spec.origin,
                leaves=self._part.leaves(copied=self._looks_ahead and torch.is_grad_enabled()),
                read=dict(self.log.steps),
                values=self._owner.copies() if self._one_version and torch.is_grad_enabled() else None,
            )
            by_column = dict.fromkeys(layer.edges_by_column, self._split.runs)
            edges = share_edge_values(
                own_edges, group_batch.inputs, by_column, self._group, self._activations
            )
            seed, runs = self._session.seed, spec.origin.runs
            with self._part.placed(batch.leaves):
                batch.sources = [spec.origin.source(one) for one in group_batch.inputs]
                given = [
                    StageInput(
                        block=one.block,
                        x=spec.origin.rows(source, one),
                        edges=values,
                        draws=DropDraws(seed=seed, number=one.number, nodes=one.nodes, runs=runs),
                    )
                    for one, source, values in zip(group_batch.inputs, batch.sources, edges, strict=True)
                ]
                batch.shares = compute_shares(layer, given, self._group, self._activations)
            batch.pulls = [self._activations.pull(one, FORWARD, batch.number) for one in batch.shares]
        return batch

    def _backward_part(self, batch: InFlightBatch) -> InFlightBatch:
        for push in batch.pushes:
            self._timed(push, f"{WAIT} for the push", batch.number)
        with self._span("backward M", batch.number):
            self._part.compute(batch)
        return batch

    def _add(self, batch: InFlightBatch) -> None:
        self._part.add(batch)
        # A frozen side is never stepped.
        if batch.of_sources or any(leaf.requires_grad for leaf in batch.leaves.values()):
            self.log.waiting.append((batch.number, "M", batch.read["M"]))
        if self._one_version:
            self.log.waiting.append((batch.number, "D", batch.read["D"]))

    def _after_backward(self, weight: float) -> None:
        # Not where the gradients are computed: every rank sums them after those of the owner side.
        self._owner.restore()
        self._buffers.average(weight)
        waiting: tuple[Side, ...] = ("M", "D") if self._one_version else ("M",)
        self.log.held_back = waiting if self._pushed and not self._ready else ()
        while self._ready:
            self._add(self._ready.pop(0))
        if self._current is not None and not self._one_version:
            self.log.waiting.append((self._current.number, "D", self.log.steps["D"]))
        self._current = None

    def _span(self, name: str, number: int) -> AbstractContextManager[None]:
        timeline = self._session.timeline
        return timeline.span(name, COMPUTE, number) if timeline.on else nullcontext()

    def _timed(self, wait: Any, name: str, number: int) -> Any:
        begun = time.perf_counter()
        with self._span(name, number):
            found = wait()
        self.exchange.waited_s += time.perf_counter() - begun
        return found


class PullBackward(torch.autograd.Function):
    """Makes the sums inputs of the owner's graph; backward sends their gradients to the parts."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, pipeline: Pipeline, batch: InFlightBatch, *sums: Tensor) -> Any:
        ctx.pipeline, ctx.batch = pipeline, batch
        return tuple(total.view_as(total) for total in sums)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        # The graph lives as long as the user keeps the loss; the batch must not.
        batch, ctx.batch = ctx.batch, None
        ctx.pipeline.complete(batch, gradients)
        return gradients[0].new_zeros(()), None, None, *[None] * len(gradients)
