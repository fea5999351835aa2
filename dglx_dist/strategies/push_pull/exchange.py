"""Groups of ranks that together hold all columns, and how they exchange activations and gradient norms.

Every rank is both a part, which holds some columns and their rows in the layer-1 weights, and an owner, which
has its own batches. All members must post the same transfers in the same order.
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
"""Ledger phases for the forward pull and the backward push."""

STRUCTURE = "structure"
"""Ledger phase for blocks: (N_f - 1) 4 [(D1 + 1) + E1 + L0] bytes per owner and batch."""

Received: TypeAlias = list[Tensor]
"""One tensor from each member of the group, in part order. This rank's own tensor is included."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Ranks that push and pull among each other.

    The world is cut into groups of consecutive ranks. Each group holds every column once. Pushing and pulling
    stay inside the group. A part's gradients are summed with its replicas in the other groups.
    """

    rank: int
    """Rank of this process."""
    members: tuple[int, ...]
    """The group's ranks by part. There are N_f, including ``rank``."""
    replicas: tuple[int, ...]
    """Ranks with the same columns as ``rank``, one in each group. There are W / N_f, including ``rank``."""

    @property
    def part(self) -> int:
        """This rank's position among the members. It numbers this rank both as a part and as an owner."""
        return self.members.index(self.rank)

    @property
    def size(self) -> int:
        """N_f, the number of parts."""
        return len(self.members)

    @property
    def peers(self) -> tuple[tuple[int, int], ...]:
        """Pairs (part, rank) for the other members."""
        return tuple((part, rank) for part, rank in enumerate(self.members) if rank != self.rank)


def make_group(session: Session, size: int) -> Group:
    """Return this rank's group. Raise ConfigError if ``size`` does not divide the world size."""
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
    """The owner's layer-1 block. A block from another owner has no data."""
    nodes: Mapping[str, Tensor]
    """(L0,) int64 global ids for the block's source nodes, by node type. Destinations come first."""
    columns: Mapping[str, Mapping[str, Tensor]]
    """(L0, F_p) features for the source nodes, only this part's columns, by node type and feature name."""
    number: int
    """Batch number, counted from the loader's first epoch. It is equal on all ranks."""

    def keys(self, ntype: str) -> Tensor:
        """Return (L0,) int64 keys for a type's source nodes. Nodes of different types have different keys."""
        types = list(self.nodes)
        if len(types) == 1:
            return self.nodes[ntype]
        return self.nodes[ntype] * len(types) + types.index(ntype)


@final
@dataclass(eq=False)
class GroupBatch:
    """One mini-batch from every owner. The loader sets it as ``blocks[0].push_pull``."""

    number: int
    """Batch number, counted from the loader's first epoch. It is equal on all ranks."""
    inputs: tuple[PartInput, ...]
    """Inputs by owner, in the order of the group's members.

    This rank's input has a view of the user's block. The view lacks data that is set on the user's block
    later.
    """
    following: GroupBatch | None = None
    """The epoch's next batch. None after the last batch, or if the loader does not look ahead.

    Layer 1 may compute the next batch while the user has this one.
    """


Transfer: TypeAlias = Callable[[], Received]
"""Waits for the tensors from all members and returns them. Raises PeerError if a rank is dead or late."""


@final
class AsyncExchange:
    """Exchanges tensors between a group's members without blocking the caller.

    Tensors that belong to a batch are sent in the format ``wire``. Formats other than "same" go through host
    memory. Other tensors stay on accelerators if every rank has its own. Otherwise the caller waits for their
    copies in host memory. Construction is collective.
    """

    def __init__(self, session: Session, group: Group, wire: WireDtype = "same") -> None:
        self._group = group
        self._devices = DEVICES.get(session)
        self._wire = wire
        # Pulls and pushes may overtake each other on the wire.
        self._pulls = CallExchange(session, "pull")
        self._pushes = CallExchange(session, "push gradient")

    def pull(self, shares: Sequence[Tensor], phase: str, batch: int | None = None) -> Transfer:
        """Send each owner what this part computed for it, and receive all parts' shares for the own block.

        Args:
            shares: N_f tensors by owner, in the shapes that the owners expect.
        """
        templates = [shares[self._group.part]] * self._group.size
        return self._post(self._pulls, shares, templates, phase, batch)

    def push(
        self,
        values: Tensor | Sequence[Tensor],
        templates: Sequence[Tensor],
        phase: str,
        batch: int | None = None,
    ) -> Transfer:
        """Send ``values`` to the parts, and receive one tensor from each owner.

        Args:
            values: A tensor that goes to every part, or a sequence with one tensor per part.
            templates: N_f tensors with the shapes and dtypes that the owners send.
        """
        if isinstance(values, Tensor):
            values = [values] * self._group.size
        return self._post(self._pushes, values, templates, phase, batch)

    def _post(
        self,
        exchange: Exchange,
        tensors: Sequence[Tensor],
        templates: Sequence[Tensor],
        phase: str,
        batch: int | None,
    ) -> Transfer:
        """Send ``tensors[p]`` to part p, and receive one tensor from each part. Return at once.

        Args:
            tensors: One tensor for each part. The tensor for this rank is returned without its gradient.
            templates: Tensors with the shapes and dtypes to receive, one for each part.
            batch: Batch number. None for tensors that are never compressed.

        Returns:
            Function that waits, and returns the received tensors by part on the device that ``tensors`` are
            on.
        """
        own_tensor = tensors[self._group.part].detach()
        peers = self._group.peers
        if not peers:
            return lambda: [own_tensor]

        codec = None
        if self._wire != "same" and batch is not None:
            rounding_key = exchange.session.seed, batch, int(phase == BACKWARD)
            codec = row_codec(self._wire, own_tensor, rounding_key)

        # A tensor that goes to several members is copied once, so rows are found by the tensor's identity.
        rows = {id(tensors[part]): tensors[part].detach().contiguous() for part, _ in peers}
        received = {part: templates[part].new_empty(templates[part].shape) for part, _ in peers}
        if self._devices is not None and codec is None and not is_on_host(own_tensor):
            exchange = self._devices
        elif not is_on_host(own_tensor):
            rows = dict(zip(rows, copy_to_host([*rows.values()]), strict=True))
            received = {part: allocate_host_memory(like.shape, like) for part, like in received.items()}

        outgoing = [Outgoing(rank=rank, rows=rows[id(tensors[part])]) for part, rank in peers]
        incoming = [Incoming(rank=rank, rows=received[part]) for part, rank in peers]
        name = phase if batch is None else f"{phase} of batch {batch}"
        wait = exchange.post(outgoing, incoming, name, phase=phase, layer=1, batch=batch, codec=codec)

        @cache
        def receive() -> Received:
            wait()
            device = own_tensor.device
            on_device = {part: rows.to(device, non_blocking=True) for part, rows in received.items()}
            return [on_device.get(part, own_tensor) for part in range(self._group.size)]

        return receive


def add_in_order(received: Received) -> Tensor:
    """Sum the tensors in part order, so that the order in which they arrive does not change the bits.

    Half precision is summed in float32.
    """
    first_share, *later_shares = received
    dtype = first_share.dtype
    # The sum starts in a copy, because the caller may still use the first share.
    total = first_share.to(torch.float32 if dtype in HALVES else dtype, copy=True)
    for share in later_shares:
        total += share
    return total.to(dtype)


def share_edge_values(
    values: Mapping[str, Tensor],
    inputs: Sequence[PartInput],
    by_column: Mapping[str, Sequence[Sequence[ColumnRange]]],
    group: Group,
    exchange: AsyncExchange,
) -> list[dict[str, Tensor]]:
    """Return each owner's edge values by name. Every member must call it.

    Args:
        values: (E1, ...) values without gradients, for the own block's edges in their order.
        by_column: Each part's columns, for those (E1, F) values that are cut by columns.

    Raises:
        ConfigError: a value in ``by_column`` has another width. Ranks have agreed on shapes, so all raise it.
    """
    values_by_owner: list[dict[str, Tensor]] = [{} for _ in inputs]
    for name, uncut_values in values.items():
        values_of_part = _cut_edge_values(name, uncut_values, by_column.get(name), group.size)
        own_values = values_of_part[group.part]
        shape = own_values.shape[1:]
        templates = [own_values.new_empty((owner.block.num_edges(), *shape)) for owner in inputs]

        # Other parts number the edges by their position in the CSC.
        _, _, edge_ids = inputs[group.part].block.adj_tensors("csc")
        sent_values = values_of_part
        if len(edge_ids):
            sent_values = [part_values[edge_ids.long()] for part_values in values_of_part]

        received = exchange.push(sent_values, templates, STRUCTURE)()
        for owner_values, received_values in zip(values_by_owner, received, strict=True):
            owner_values[name] = received_values
        # The own block keeps its edge order.
        values_by_owner[group.part][name] = own_values
    return values_by_owner


def _cut_edge_values(
    name: str, values: Tensor, runs_of_part: Sequence[Sequence[ColumnRange]] | None, num_parts: int
) -> list[Tensor]:
    """Cut ``values`` into each part's columns. Without ``runs_of_part``, each part gets all columns.

    Raises ConfigError if the parts' columns together are not the columns in ``values``.
    """
    if runs_of_part is None:
        return [values] * num_parts

    width = sum(len(run) for runs in runs_of_part for run in runs)
    if values.shape[1:] != (width,):
        raise ConfigError(
            f"the first layer's {name!r} has shape {list(values.shape)}, but each part needs its own "
            f"columns of it; give one value for each of the {width} input columns, or use data_parallel"
        )
    return [cut_out(values, runs, 1) for runs in runs_of_part]


def sum_over_parts(shares: Sequence[Tensor], exchange: AsyncExchange) -> tuple[Tensor, ...]:
    """Return N_f sums over the parts, one for every owner's block. Every member must call it.

    ``shares`` has one (n_owner, ...) tensor for each owner's block. Each owner adds the shares for its block
    and sends the sum to the parts.
    """
    return cast("tuple[Tensor, ...]", _SumOverParts.apply(exchange, *shares))  # type: ignore[no-untyped-call]  # torch does not annotate this


class _SumOverParts(torch.autograd.Function):
    # Every part uses the sum, so a share's gradient is the sum over the parts' gradients.

    @staticmethod
    def forward(ctx: Any, exchange: AsyncExchange, *shares: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        return tuple(_sum_parts(shares, exchange, FORWARD))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, *_sum_parts(gradients, ctx.exchange, BACKWARD)


def _sum_parts(shares: Sequence[Tensor], exchange: AsyncExchange, phase: str) -> Received:
    """Add the shares for the own block, and return every owner's sum."""
    own_sum = add_in_order(exchange.pull(shares, phase)())
    return exchange.push(own_sum, shares, phase)()


_PIECE_FUNCTIONS = frozenset(
    {"detach", "__get__", "coalesce", "_values", "abs", "pow", "square", "float", "double"}
    | {"isfinite", "isinf", "isnan"}
)
"""Functions that can be applied to each piece, because the results are pieces of the uncut result."""

_JOIN_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "sum": torch.sum,
    "max": torch.amax,
    "amax": torch.amax,
    "all": torch.all,
    "any": torch.any,
}
"""Functions that join the parts' reductions into the reduction over the uncut gradient."""


@final
class CutGradient(Tensor):
    """A gradient that is cut over the parts. Its norms and sums cover the uncut gradient and are collective.

    So all ranks clip equally with torch's functions, and skip the same steps with GradScaler. Other functions
    compute with the piece and return a plain tensor.
    """

    _session: Session
    _num_parts: int

    @classmethod
    def wrap(cls, piece: Tensor, session: Session, num_parts: int) -> CutGradient:
        """Wrap this rank's ``piece`` without a copy. The first ``num_parts`` ranks hold all pieces."""
        gradient = retype(piece, cls)
        gradient._session = session
        gradient._num_parts = num_parts
        return gradient

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return retype(self, Tensor).clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return retype(self, Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]  # torch does not annotate this

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call ``func`` on this rank's piece. Norms and other reductions are joined over the ranks.

        So functions that clip or unscale gradients see the uncut gradient. Every rank must then call them.
        """
        kwargs = kwargs or {}
        name = func.__name__
        with plain_tensors():
            if args and isinstance(args[0], cls):
                return args[0]._call(func, args[1:], kwargs)
            if name == "_foreach_norm":
                return cls._compute_norms(func, args, kwargs)

            result = func(*args, **kwargs)
            if name == "_amp_foreach_non_finite_check_and_unscale_":
                # If one rank's piece has an infinity, all ranks skip the step.
                gradients, found_infinity = args[:2]
                piece = next(gradient for gradient in gradients if isinstance(gradient, cls))
                found_infinity.copy_(gather_rows(found_infinity, piece._session).amax(0))
            return result

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call ``func`` on this piece and ``args``.

        A norm or another reduction to a single number returns the uncut gradient's number. Functions that map
        a piece to a piece return a cut gradient. All others return the result for this piece.
        """
        name = func.__name__
        is_norm = name.endswith("norm")
        values: Tensor = self
        if is_norm:
            values = _get_values(self, 0.0)
        elif name in ("max", "amax"):
            values = _get_values(self, -torch.inf)

        result = func(values, *args, **kwargs)
        if type(result) is not Tensor:
            return result
        if name in _PIECE_FUNCTIONS:
            return CutGradient.wrap(result, self._session, self._num_parts)
        if result.dim() == 0 and is_norm:
            return self._join_norms(result, _read_norm_order(args, kwargs))
        if result.dim() == 0 and name in _JOIN_FUNCTIONS:
            return _JOIN_FUNCTIONS[name](self._gather(result), 0)
        return result

    @classmethod
    def _compute_norms(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        """Call ``func``, which returns a norm per gradient in ``args[0]``. Join the norms over the pieces."""
        gradients = args[0]
        values = []
        for gradient in gradients:
            values.append(_get_values(gradient, 0.0) if isinstance(gradient, cls) else gradient)

        norms = list(func(values, *args[1:], **kwargs))
        order = _read_norm_order(args[1:], kwargs)
        for index, gradient in enumerate(gradients):
            if isinstance(gradient, cls):
                norms[index] = gradient._join_norms(norms[index], order)
        return norms

    def _gather(self, value: Tensor) -> Tensor:
        # Every rank uses the first group's values, so that all get the same bits.
        return gather_rows(value, self._session)[: self._num_parts]

    def _join_norms(self, norm: Tensor, order: float) -> Tensor:
        return torch.linalg.vector_norm(self._gather(norm), order)


def mark_pieces(parameters: Iterable[nn.Parameter], session: Session, num_parts: int) -> None:
    """Wrap the gradients as :class:`CutGradient` for parameters that are cut over ``num_parts`` ranks."""
    if num_parts == 1:
        return
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad = CutGradient.wrap(parameter.grad, session, num_parts)


def _get_values(piece: Tensor, fill: float) -> Tensor:
    """Return dense values for a norm or maximum. A part without columns returns a single ``fill``."""
    values = piece.coalesce().values() if piece.is_sparse else piece
    return values if values.numel() else values.new_full((1,), fill)


def _read_norm_order(args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """Read a norm's order from the arguments after the tensor. The default is 2.

    Raises ConfigError if the order is not above 0, because such norms cannot be joined over pieces.
    """
    order = kwargs.get("p", kwargs.get("ord", args[0] if args else None))
    if order is None or order == "fro":
        return 2.0
    if not float(order) > 0:
        raise ConfigError(f"the order of a gradient's norm is {float(order)}; it must be above 0, or inf")
    return float(order)
