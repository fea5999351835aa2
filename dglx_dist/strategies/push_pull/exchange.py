"""Groups of ranks that together hold all columns, and their exchange of activations and gradient norms.

Every rank is both a part, with its columns and its rows of the layer-1 weights, and an owner of its batches.
All members of a group must post the same transfers in the same order.
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
from dglx_dist.layers.masks import ColumnRange

FORWARD, BACKWARD = "activations", "activation_gradients"
"""Ledger phases of the forward pull and the backward push."""

STRUCTURE = "structure"
"""Ledger phase of blocks: (N_f - 1) 4 [(D1 + 1) + E1 + L0] bytes per owner and batch."""

Received: TypeAlias = list[Tensor]
"""(N_f,) tensors of all members, including the own one, in the order of the parts."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """The ranks that push and pull among each other.

    The world is cut into groups of consecutive ranks. Each group holds every column once. Pushing and pulling
    stay inside the group. A part's gradients are summed with its replicas in the other groups.
    """

    rank: int
    """The own rank."""
    members: tuple[int, ...]
    """(N_f,) ranks by part, including the own rank."""
    replicas: tuple[int, ...]
    """(W / N_f,) ranks with the own columns, one for each group."""

    @property
    def part(self) -> int:
        """Position of the own rank among the parts, and among the owners, of the group."""
        return self.members.index(self.rank)

    @property
    def size(self) -> int:
        """N_f, the number of parts."""
        return len(self.members)

    @property
    def peers(self) -> tuple[tuple[int, int], ...]:
        """Pairs (part, rank) of the other members."""
        return tuple((part, rank) for part, rank in enumerate(self.members) if rank != self.rank)


def make_group(session: Session, size: int) -> Group:
    """Return the own group of ``size`` ranks. Raise ConfigError if it does not divide the number of ranks."""
    rank, world_size = session.topology.rank, session.topology.world_size
    if size < 1 or world_size % size:
        divisors = [str(n) for n in range(1, world_size + 1) if world_size % n == 0]
        raise ConfigError(
            f"group_size={size} does not divide the {world_size} ranks; choose one of {', '.join(divisors)}"
        )

    first_rank = rank // size * size
    return Group(
        rank=rank,
        members=tuple(range(first_rank, first_rank + size)),
        replicas=tuple(range(rank % size, world_size, size)),
    )


@dataclass(frozen=True, kw_only=True)
class PartInput:
    """One owner's batch as this part sees it."""

    block: DGLBlock
    """The owner's layer-1 block. Blocks of other owners have no data."""
    nodes: Mapping[str, Tensor]
    """(L0,) int64 global ids of its sources by node type, the destinations first."""
    columns: Mapping[str, Mapping[str, Tensor]]
    """This part's (L0, F_p) columns of the sources' rows, by node type and feature name."""
    number: int
    """Number of the batch since the loader's first epoch, equal on all ranks."""

    def keys(self, ntype: str) -> Tensor:
        """Return (L0,) int64 keys of the sources of a type. Nodes of different types have different keys."""
        types = list(self.nodes)
        nodes = self.nodes[ntype]
        return nodes if len(types) == 1 else nodes * len(types) + types.index(ntype)


@final
@dataclass(eq=False)
class GroupBatch:
    """One mini-batch of every owner; the loader sets it as ``blocks[0].push_pull``."""

    number: int
    """Number of the batch since the loader's first epoch, equal on all ranks."""
    inputs: tuple[PartInput, ...]
    """(N_f,) inputs by owner, in the order of the group's members. The own block is a view of the user's
    block. It does not see data that is set on that later."""
    following: GroupBatch | None = None
    """The next batch of the epoch. Its layer 1 may be computed while the user has this batch. It is None
    after the last batch, and if the loader does not look ahead."""


Transfer: TypeAlias = Callable[[], Received]
"""Function that waits for and returns the tensors of all members. Raises PeerError if a rank is dead or
late."""


@final
class AsyncExchange:
    """Exchanges tensors between the members of a group without blocking the caller.

    Tensors of a batch are sent in the format ``wire``. Formats other than "same" go through host memory.
    Other tensors stay on accelerators if every rank has its own. Otherwise the caller waits for their copies
    in host memory. Construction is collective.
    """

    def __init__(self, session: Session, group: Group, wire: WireDtype = "same") -> None:
        self._group = group
        self._devices = DEVICES.get(session)
        self._wire = wire
        # Pulls and pushes may overtake each other on the wire.
        self._pulls = CallExchange(session, "pull")
        self._pushes = CallExchange(session, "push gradient")

    def pull(self, shares: Sequence[Tensor], phase: str, batch: int | None = None) -> Transfer:
        """Send each owner its share of this part, and receive the shares of all parts for the own block.

        ``shares`` are N_f tensors by owner, in the shapes that the owners expect.
        """
        like = [shares[self._group.part]] * self._group.size
        return self._post(self._pulls, shares, like, phase, batch)

    def push(
        self, own: Tensor | Sequence[Tensor], like: Sequence[Tensor], phase: str, batch: int | None = None
    ) -> Transfer:
        """Send ``own`` to every part, or one of N_f tensors to each, and receive the tensors of all owners.

        ``like`` are N_f tensors with the shapes and dtypes of the owners' tensors.
        """
        sent = [own] * self._group.size if isinstance(own, Tensor) else own
        return self._post(self._pushes, sent, like, phase, batch)

    def _post(
        self,
        exchange: Exchange,
        tensors: Sequence[Tensor],
        like: Sequence[Tensor],
        phase: str,
        batch: int | None,
    ) -> Transfer:
        """Send ``tensors[p]`` to part p of the group, and receive one tensor from each. Return at once.

        Args:
            tensors: One tensor for each part. The own one is not sent, but returned without its gradient.
            like: Tensors with the shapes and dtypes to receive, one for each part.
            phase: Phase of the traffic ledger.
            batch: Number of the batch. None for tensors that are never compressed.

        Returns:
            Function that waits, and returns the received tensors by part on the device of ``tensors``.
        """
        own_part = tensors[self._group.part].detach()
        peers = self._group.peers
        parts = range(self._group.size)
        if not peers:
            return lambda: [own_part]

        # One tensor may go to several members.
        rows = {id(tensors[part]): tensors[part].detach().contiguous() for part, _ in peers}
        received = {part: like[part].new_empty(like[part].shape) for part, _ in peers}
        codec = None
        if self._wire != "same" and batch is not None:
            codec = row_codec(self._wire, own_part, (exchange.session.seed, batch, int(phase == BACKWARD)))
        if self._devices is not None and codec is None and not is_on_host(own_part):
            exchange = self._devices
        elif not is_on_host(own_part):
            rows = dict(zip(rows, copy_to_host([*rows.values()]), strict=True))
            received = {part: allocate_host_memory(like[part].shape, like[part]) for part, _ in peers}

        outgoing = [Outgoing(rank=rank, rows=rows[id(tensors[part])]) for part, rank in peers]
        incoming = [Incoming(rank=rank, rows=received[part]) for part, rank in peers]
        name = phase if batch is None else f"{phase} of batch {batch}"
        wait = exchange.post(outgoing, incoming, name, phase=phase, layer=1, batch=batch, codec=codec)

        @cache
        def receive() -> Received:
            wait()
            on_device = {part: rows.to(own_part.device, non_blocking=True) for part, rows in received.items()}
            return [on_device.get(part, own_part) for part in parts]

        return receive


def add_in_order(received: Received) -> Tensor:
    """Sum the tensors in the order of the parts, so that the order of arrival does not change the bits.

    Half precision is summed in float32.
    """
    first, *shares = received
    total = first.to(torch.float32) if first.dtype in HALVES else first.clone()
    for share in shares:
        total += share
    return total.to(first.dtype)


def share_edge_values(
    values: Mapping[str, Tensor],
    inputs: Sequence[PartInput],
    by_column: Mapping[str, Sequence[Sequence[ColumnRange]]],
    group: Group,
    exchange: AsyncExchange,
) -> list[dict[str, Tensor]]:
    """Return every owner's edge values by name. Every member must call it.

    Args:
        values: (E1, ...) values of the own block, in the order of its edges, without gradients.
        by_column: Columns of each part, for (E1, F) values that are cut by columns.

    Raises:
        ConfigError: a value in ``by_column`` has another width. Ranks have agreed on shapes, so all raise it.
    """
    by_owner: list[dict[str, Tensor]] = [{} for _ in inputs]
    for name, uncut in values.items():
        cuts = by_column.get(name)
        width = sum(len(run) for runs in cuts or () for run in runs)
        if cuts is not None and uncut.shape[1:] != (width,):
            raise ConfigError(
                f"the first layer's {name!r} has shape {list(uncut.shape)}, but each part needs its own "
                f"columns of it; give one value for each of the {width} input columns, or use data_parallel"
            )

        pieces = [uncut] * group.size if cuts is None else [cut_out(uncut, columns, 1) for columns in cuts]
        piece = pieces[group.part]
        like = [piece.new_empty((part.block.num_edges(), *piece.shape[1:])) for part in inputs]

        # Other parts number the edges by their position in the CSC.
        *_, edge_ids = inputs[group.part].block.adj_tensors("csc")
        tensors = [part_columns[edge_ids.long()] for part_columns in pieces] if len(edge_ids) else pieces
        for owner_values, received in zip(by_owner, exchange.push(tensors, like, STRUCTURE)(), strict=True):
            owner_values[name] = received
        by_owner[group.part][name] = piece
    return by_owner


def sum_over_parts(shares: Sequence[Tensor], exchange: AsyncExchange) -> tuple[Tensor, ...]:
    """Return the N_f sums over the parts, one for every owner's block. Every member must call it.

    ``shares`` has this part's (n_owner, ...) tensor for each owner's block. Each owner adds the shares for
    its block and sends the sum to the parts.
    """
    return cast("tuple[Tensor, ...]", _SumOverParts.apply(exchange, *shares))  # type: ignore[no-untyped-call]  # torch does not annotate this


class _SumOverParts(torch.autograd.Function):
    # The sum is used by every part, so the gradient of a share is the sum of the parts' gradients.

    @staticmethod
    def forward(ctx: Any, exchange: AsyncExchange, *shares: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        return tuple(_sum_parts(shares, exchange, FORWARD))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, *_sum_parts(gradients, ctx.exchange, BACKWARD)


def _sum_parts(shares: Sequence[Tensor], exchange: AsyncExchange, phase: str) -> Received:
    return exchange.push(add_in_order(exchange.pull(shares, phase)()), shares, phase)()


_PIECE_FUNCTIONS = frozenset(
    {"detach", "__get__", "coalesce", "_values", "abs", "pow", "square", "float", "double"}
    | {"isfinite", "isinf", "isnan"}
)
"""Functions with a result that is a piece too."""

_JOINS: dict[str, Callable[..., Tensor]] = {
    "sum": torch.sum,
    "max": torch.amax,
    "amax": torch.amax,
    "all": torch.all,
    "any": torch.any,
}
"""Functions that join the parts' results of a reduction to the result for the uncut gradient."""


@final
class CutGradient(Tensor):
    """A gradient that is cut over the parts. Its norms and sums are collective and cover the uncut gradient.

    So all ranks clip equally with torch's functions, and skip the same steps with GradScaler. Other functions
    compute with the piece and return a plain tensor.
    """

    _session: Session
    _num_parts: int

    @classmethod
    def wrap(cls, piece: Tensor, session: Session, num_parts: int) -> CutGradient:
        """Wrap this rank's ``piece`` without a copy. The first ``num_parts`` ranks hold all pieces."""
        gradient = retype(piece, cls)
        gradient._session, gradient._num_parts = session, num_parts
        return gradient

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return retype(self, Tensor).clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return retype(self, Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]  # torch does not annotate this

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call ``func`` on this rank's piece, and join the results of norms and reductions over the ranks.

        So functions that clip or unscale gradients see the uncut gradient. Every rank must then call them.
        """
        kwargs = kwargs or {}
        name = func.__name__
        first: Any = args[0] if args else None
        with plain_tensors():
            if isinstance(first, cls) and (name.endswith("norm") or name in ("max", "amax")):
                args = (_get_values(first, 0.0 if name.endswith("norm") else -torch.inf), *args[1:])
            elif name == "_foreach_norm":
                args = (
                    [
                        _get_values(gradient, 0.0) if isinstance(gradient, cls) else gradient
                        for gradient in first
                    ],
                    *args[1:],
                )
            result = func(*args, **kwargs)
            if name == "_amp_foreach_non_finite_check_and_unscale_":
                # An infinity in the piece of one rank makes all ranks skip the step.
                piece = next(gradient for gradient in args[0] if isinstance(gradient, cls))
                args[1].copy_(gather_rows(args[1], piece._session).amax(0))
            elif name == "_foreach_norm":
                pairs = zip(first, result, strict=True)
                order = _order(args, kwargs)
                return [
                    gradient._join_norms(norm, order) if isinstance(gradient, cls) else norm
                    for gradient, norm in pairs
                ]
            elif isinstance(first, cls) and type(result) is Tensor:
                if name in _PIECE_FUNCTIONS:
                    return cls.wrap(result, first._session, first._num_parts)
                if name.endswith("norm") and result.dim() == 0:
                    return first._join_norms(result, _order(args, kwargs))
                if name in _JOINS and result.dim() == 0:
                    return _JOINS[name](first._gather(result), 0)

        return result

    def _gather(self, value: Tensor) -> Tensor:
        # Every rank uses the values of the first group, so that all get the same bits.
        return gather_rows(value, self._session)[: self._num_parts]

    def _join_norms(self, norm: Tensor, order: float) -> Tensor:
        return torch.linalg.vector_norm(self._gather(norm), order)


def mark_pieces(parameters: Iterable[nn.Parameter], session: Session, num_parts: int) -> None:
    """Wrap gradients of parameters that are cut over ``num_parts`` ranks as :class:`CutGradient`."""
    for parameter in parameters if num_parts > 1 else ():
        if parameter.grad is not None:
            parameter.grad = CutGradient.wrap(parameter.grad, session, num_parts)


def _get_values(piece: Tensor, fill: float) -> Tensor:
    """Return dense values for a norm or maximum. A part without columns returns a single ``fill``."""
    values = piece.coalesce().values() if piece.is_sparse else piece
    return values if values.numel() else values.new_full((1,), fill)


def _order(args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    order = kwargs.get("p", kwargs.get("ord", args[1] if len(args) > 1 else None))
    order = 2.0 if order in (None, "fro") else float(order)
    if not order > 0:
        raise ConfigError(f"the order of a gradient's norm is {order}; it must be above 0, or inf")
    return order
