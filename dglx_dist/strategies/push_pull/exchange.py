"""Groups of ranks that hold all columns together, and what they exchange: activations and norms of gradients.

Every rank is at once a part (it holds its columns and its rows of the layer-1 weights) and an owner (of its
own batches). All members of a group must post the same transfers in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias, cast, final

import torch
from dgl.heterograph import DGLBlock
from torch import Tensor, nn

from dglx_dist.comm.codec import WireDtype, row_codec
from dglx_dist.comm.collectives import gather_rows
from dglx_dist.comm.devices import allocate_host_memory, copy_to_host, is_on_host
from dglx_dist.comm.exchange import DEVICES, CallExchange, Exchange, Incoming, Outgoing
from dglx_dist.comm.session import Session
from dglx_dist.dataloading.feature_fetch import HALVES
from dglx_dist.errors import ConfigError
from dglx_dist.internals.pytorch import plain_tensors, retype
from dglx_dist.layers.base import cut_out
from dglx_dist.layers.dropout import ColumnRange

FORWARD, BACKWARD = "activations", "activation_gradients"
"""Ledger phases (forward pull, backward push)."""

STRUCTURE = "structure"
"""Ledger phase: (N_f - 1) 4 [(D1 + 1) + E1 + L0] bytes per owner and batch; docs/strategies/push_pull.md."""

Received: TypeAlias = list[Tensor]
"""(N_f,) tensors of all members, the own one among them, in the order of the parts."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """The ranks that push and pull among each other.

    The world is cut into groups of consecutive ranks, each of which holds every column once. Pushing and
    pulling stay inside the own group; a part's gradients are summed with its replicas in the other groups.
    """

    rank: int
    """The own rank."""
    members: tuple[int, ...]
    """(N_f,) ranks by part, the own one among them."""
    replicas: tuple[int, ...]
    """(W / N_f,) ranks that hold the own columns, one for each group, in their order."""

    @property
    def part(self) -> int:
        """The own rank's position among the parts, and among the owners, of the group."""
        return self.members.index(self.rank)

    @property
    def size(self) -> int:
        """N_f, the number of parts."""
        return len(self.members)

    @property
    def others(self) -> tuple[tuple[int, int], ...]:
        """(part, rank) of the other members."""
        return tuple((part, rank) for part, rank in enumerate(self.members) if rank != self.rank)


def make_group(session: Session, size: int) -> Group:
    """Return the own group of ``size`` ranks; ConfigError if that does not divide the number of ranks."""
    rank, world_size = session.topology.rank, session.topology.world_size
    if size < 1 or world_size % size:
        divisors = [str(n) for n in range(1, world_size + 1) if world_size % n == 0]
        raise ConfigError(
            f"group_size={size} does not divide the {world_size} ranks; choose one of {', '.join(divisors)}"
        )
    first = rank // size * size
    return Group(
        rank=rank,
        members=tuple(range(first, first + size)),
        replicas=tuple(range(rank % size, world_size, size)),
    )


@dataclass(frozen=True, kw_only=True)
class PartInput:
    """One owner's batch as this part sees it."""

    block: DGLBlock
    """The owner's layer-1 block; blocks of other owners have no data."""
    nodes: Tensor
    """(L0,) int64 global ids of its sources, the destinations first."""
    columns: Mapping[str, Tensor]
    """Feature name to (L0, F_p), this part's columns of the sources' rows."""
    number: int
    """Of the batch, equal on all ranks: steps since the loader's first epoch."""


@final
@dataclass(eq=False)
class GroupBatch:
    """One mini-batch of every owner; the loader sets it as ``blocks[0].push_pull``."""

    number: int
    """Steps since the loader's first epoch, equal on all ranks."""
    inputs: tuple[PartInput, ...]
    """(N_f,) by owner, in the order of the group's members; the own block is a view of the user's, without
    data that is set on that later."""
    following: GroupBatch | None = None
    """The next batch of the epoch, of which only layer 1 may be computed yet, while the user has this one;
    None after the last one, and always when the loader does not look ahead."""


Transfer: TypeAlias = Callable[[], Received]
"""Waits and returns what all members sent; PeerError if a rank is dead or late."""


@final
class AsyncExchange:
    """Exchanges tensors between the members of a group without blocking the caller.

    Those of a batch travel as ``wire``, through host memory unless that is "same". Others on accelerators
    stay there if every rank has its own; else the caller waits for their copies in host memory. Construction
    is collective.
    """

    def __init__(self, session: Session, group: Group, wire: WireDtype = "same") -> None:
        self._group, self._devices, self._wire = group, DEVICES.get(session), wire
        # Pulls and pushes may overtake each other on the wire.
        self._pulls = CallExchange(session, "pull")
        self._pushes = CallExchange(session, "push gradient")

    def pull(self, shares: Sequence[Tensor], phase: str, batch: int | None = None) -> Transfer:
        """Send each owner its share of this part; receive the shares of all parts for the own block.

        ``shares`` are N_f tensors by owner, of the shapes that owner expects.
        """
        like = [shares[self._group.part]] * self._group.size
        return self._post(self._pulls, shares, like, phase, batch)

    def push(
        self, own: Tensor | Sequence[Tensor], like: Sequence[Tensor], phase: str, batch: int | None = None
    ) -> Transfer:
        """Send ``own`` to every part, or each part its own of N_f; receive the tensors of all owners.

        ``like`` are N_f tensors of the shapes and dtypes that come from the owners.
        """
        sent = [own] * self._group.size if isinstance(own, Tensor) else own
        return self._post(self._pushes, sent, like, phase, batch)

    def _post(
        self,
        exchange: Exchange,
        sent: Sequence[Tensor],
        like: Sequence[Tensor],
        phase: str,
        batch: int | None,
    ) -> Transfer:
        own, others, parts = sent[self._group.part].detach(), self._group.others, range(self._group.size)
        if not others:
            return lambda: [own]
        # One tensor may go to several members.
        rows = {id(sent[part]): sent[part].detach().contiguous() for part, _ in others}
        received = {part: like[part].new_empty(like[part].shape) for part, _ in others}
        codec = None
        if self._wire != "same" and batch is not None:
            codec = row_codec(self._wire, own, (exchange.session.seed, batch, int(phase == BACKWARD)))
        if self._devices is not None and codec is None and not is_on_host(own):
            exchange = self._devices
        elif not is_on_host(own):
            rows = dict(zip(rows, copy_to_host([*rows.values()]), strict=True))
            received = {part: allocate_host_memory(like[part].shape, like[part]) for part, _ in others}
        outgoing = [Outgoing(rank=rank, rows=rows[id(sent[part])]) for part, rank in others]
        incoming = [Incoming(rank=rank, rows=received[part]) for part, rank in others]
        name = phase if batch is None else f"{phase} of batch {batch}"
        wait = exchange.post(outgoing, incoming, name, phase=phase, layer=1, batch=batch, codec=codec)

        @cache
        def arrived() -> Received:
            wait()
            found = {part: rows.to(own.device, non_blocking=True) for part, rows in received.items()}
            return [found.get(part, own) for part in parts]

        return arrived


def add_in_order(received: Received) -> Tensor:
    """Return the sum over the parts, added in their order, so that the bits do not depend on arrival.

    Half precision is summed in float32.
    """
    first, *rest = received
    total = first.to(torch.float32) if first.dtype in HALVES else first.clone()
    for share in rest:
        total += share
    return total.to(first.dtype)


def share_edge_values(
    values: Mapping[str, Tensor],
    inputs: Sequence[PartInput],
    by_column: Mapping[str, Sequence[Sequence[ColumnRange]]],
    group: Group,
    exchange: AsyncExchange,
) -> list[dict[str, Tensor]]:
    """Return every owner's values by name, like ``values`` of the own block; every member must call it.

    ``values`` are (E1, ...) in the order of the own block's edges, without gradients. Of those named in
    ``by_column``, (E1, F), each part gets its columns, which are given by part. Raises ConfigError for
    another width; ranks have agreed on shapes, so all raise it.
    """
    by_owner: list[dict[str, Tensor]] = [{} for _ in inputs]
    for name, uncut in values.items():
        cuts = by_column.get(name)
        width = sum(len(run) for runs in cuts or () for run in runs)
        if cuts is not None and uncut.shape[1:] != (width,):
            raise ConfigError(
                f"the first layer's {name!r} has shape {list(uncut.shape)}, and each part gets its own "
                f"columns of it: give one value for each of the {width} input columns, or use data_parallel"
            )
        pieces = [uncut] * group.size if cuts is None else [cut_out(uncut, one, 1) for one in cuts]
        own = pieces[group.part]
        like = [own.new_empty((one.block.num_edges(), *own.shape[1:])) for one in inputs]
        # Other parts number the edges by their position in the CSC.
        *_, edge_ids = inputs[group.part].block.adj_tensors("csc")
        sent = [one[edge_ids.long()] for one in pieces] if len(edge_ids) else pieces
        for of_owner, received in zip(by_owner, exchange.push(sent, like, STRUCTURE)(), strict=True):
            of_owner[name] = received
        by_owner[group.part][name] = own
    return by_owner


def sum_over_parts(shares: Sequence[Tensor], exchange: AsyncExchange) -> tuple[Tensor, ...]:
    """Return the sums over the parts for every owner's block, N_f of them; every member must call it.

    ``shares`` are this part's for each owner's block: N_f tensors, (n of that owner, ...). Each owner adds
    its own and sends the sum to the parts.
    """
    return cast("tuple[Tensor, ...]", _SumOverParts.apply(exchange, *shares))  # type: ignore[no-untyped-call]  # torch leaves it bare


class _SumOverParts(torch.autograd.Function):
    # A share goes into the sum of every part, so its gradient is the sum over the parts of theirs.

    @staticmethod
    def forward(ctx: Any, exchange: AsyncExchange, *shares: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        return tuple(_summed(shares, exchange, FORWARD))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, *_summed(gradients, ctx.exchange, BACKWARD)


def _summed(shares: Sequence[Tensor], exchange: AsyncExchange, phase: str) -> Received:
    return exchange.push(add_in_order(exchange.pull(shares, phase)()), shares, phase)()


_OF_PIECE = frozenset(
    {"detach", "__get__", "coalesce", "_values", "abs", "pow", "square", "float", "double"}
    | {"isfinite", "isinf", "isnan"}
)
"""Functions whose result is of the piece, too."""

_JOINS: dict[str, Callable[..., Tensor]] = {
    "sum": torch.sum,
    "max": torch.amax,
    "amax": torch.amax,
    "all": torch.all,
    "any": torch.any,
}
"""Reductions of a gradient to one value, and how the values of the parts become that of the uncut one."""


@final
class CutGradient(Tensor):
    """A gradient that is cut over the parts. Its norm and its sum are collective, and those of the uncut one.

    So ranks that clip with torch's functions, or skip a step as GradScaler does, do so alike. Everything else
    computes with the piece and returns a plain tensor.
    """

    _session: Session
    _num_parts: int

    @classmethod
    def over(cls, piece: Tensor, session: Session, num_parts: int) -> CutGradient:
        """Return this rank's ``piece``, in the same memory; the first ``num_parts`` ranks hold all pieces."""
        gradient = retype(piece, cls)
        gradient._session, gradient._num_parts = session, num_parts
        return gradient

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return retype(self, Tensor).clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return retype(self, Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]  # torch leaves it bare

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, func.__name__
        first: Any = args[0] if args else None
        with plain_tensors():
            if isinstance(first, cls) and (name.endswith("norm") or name in ("max", "amax")):
                args = (_values_of(first, 0.0 if name.endswith("norm") else -torch.inf), *args[1:])
            elif name == "_foreach_norm":
                args = ([_values_of(one, 0.0) if isinstance(one, cls) else one for one in first], *args[1:])
            result = func(*args, **kwargs)
            if name == "_amp_foreach_non_finite_check_and_unscale_":
                # An infinity in the piece of one rank makes all ranks skip the step.
                piece = next(one for one in args[0] if isinstance(one, cls))
                args[1].copy_(gather_rows(args[1], piece._session).amax(0))
            elif name == "_foreach_norm":
                pairs = zip(first, result, strict=True)
                order = _order(args, kwargs)
                return [one._join_norms(norm, order) if isinstance(one, cls) else norm for one, norm in pairs]
            elif isinstance(first, cls) and type(result) is Tensor:
                if name in _OF_PIECE:
                    return cls.over(result, first._session, first._num_parts)
                if name.endswith("norm") and result.dim() == 0:
                    return first._join_norms(result, _order(args, kwargs))
                if name in _JOINS and result.dim() == 0:
                    return _JOINS[name](first._gather(result), 0)
        return result

    def _gather(self, value: Tensor) -> Tensor:
        # Every rank uses those of the first group, so that all get the same bits.
        return gather_rows(value, self._session)[: self._num_parts]

    def _join_norms(self, norm: Tensor, order: float) -> Tensor:
        return torch.linalg.vector_norm(self._gather(norm), order)


def mark_pieces(parameters: Iterable[nn.Parameter], session: Session, num_parts: int) -> None:
    """Let the gradients of ``parameters``, which are cut over ``num_parts`` ranks, know the other parts."""
    for parameter in parameters if num_parts > 1 else ():
        if parameter.grad is not None:
            parameter.grad = CutGradient.over(parameter.grad, session, num_parts)


def _values_of(piece: Tensor, fill: float) -> Tensor:
    """Return what torch takes a norm or maximum of: not sparse, and ``fill`` for a part without columns."""
    values = piece.coalesce().values() if piece.is_sparse else piece
    return values if values.numel() else values.new_full((1,), fill)


def _order(args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    order = kwargs.get("p", kwargs.get("ord", args[1] if len(args) > 1 else None))
    order = 2.0 if order in (None, "fro") else float(order)
    if not order > 0:
        raise ConfigError(f"the order of a gradient's norm is {order}; it must be above 0, or inf")
    return order
