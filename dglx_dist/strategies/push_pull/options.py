"""Options of push-pull, and the records that its modules exchange."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal, Protocol, TypeAlias, final, get_args

from dgl.heterograph import DGLBlock
from torch import Tensor

from dglx_dist.comm.session import Session, SessionField
from dglx_dist.data.storage.files import read_size
from dglx_dist.errors import ConfigError
from dglx_dist.layers.convolutions import Sync
from dglx_dist.records import FEATURE
from dglx_dist.strategies.base import check_options
from dglx_dist.strategies.gradient_sync import BUCKET_BYTES


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
    def place(self) -> int:
        """The own position among the replicas."""
        return self.replicas.index(self.rank)

    @property
    def next_replica(self) -> int:
        """The replica to which a ring sends; the own rank if there is no other."""
        return self.replicas[(self.place + 1) % len(self.replicas)]

    @property
    def others(self) -> tuple[tuple[int, int], ...]:
        """(part, rank) of the other members."""
        return tuple((part, rank) for part, rank in enumerate(self.members) if rank != self.rank)


def make_group(session: Session, size: int) -> Group:
    """Return the own group when all ranks are cut into groups of ``size``.

    Raises:
        ConfigError: ``size`` does not divide the number of ranks.
    """
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


Side: TypeAlias = Literal["M", "D"]
"""P3's names: the part side (layer 1 up to the sum) and the owner side (everything after it)."""

Weights: TypeAlias = Literal["whole", "split"]
Order: TypeAlias = Literal["forward_first", "backward_first"]
StructureChoice: TypeAlias = Literal["auto", "push", "resample"]


@final
@dataclass(frozen=True, kw_only=True)
class PushPullOptions:
    """The strategy's options, checked."""

    depth: int = 1
    """Mini-batches in flight: 1 is exact, 3 the paper's."""
    weights: Weights = "whole"
    """Whether both sides of a batch use one version of the weights (as in the paper), or only M lags."""
    order: Order = "forward_first"
    group_size: int = 0
    """Ranks that hold all columns together; 0: the fewest that ``memory`` allows, all without it."""
    memory: str = ""
    """Bytes of features that a rank may hold, as "4GB"."""
    structure: StructureChoice = "auto"
    sync: Sync = "columns"
    features: str = FEATURE
    """Names, comma-separated, in the order in which the model concatenates them."""
    cache_columns: bool = True
    bucket_bytes: int = BUCKET_BYTES

    def __post_init__(self) -> None:
        if not 1 <= self.depth <= 3:
            raise ConfigError(f"option depth={self.depth} must be 1, 2 or 3 mini-batches in flight")
        for name, kind in (
            ("weights", Weights),
            ("order", Order),
            ("structure", StructureChoice),
            ("sync", Sync),
        ):
            if getattr(self, name) not in get_args(kind):
                known = " or ".join(map(repr, get_args(kind)))
                raise ConfigError(f"option {name}={getattr(self, name)!r} must be {known}")
        if self.group_size < 0 or self.bucket_bytes < 1:
            raise ConfigError(
                f"options group_size={self.group_size} and bucket_bytes={self.bucket_bytes} must be at least "
                "0 and 1"
            )
        if self.memory:
            read_size(self.memory)
        if not all(self.names):
            raise ConfigError(f"option features={self.features!r} has an empty name; as 'feat,extra'")
        if len(set(self.names)) < len(self.names):
            raise ConfigError(f"option features={self.features!r} has a name twice")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name.strip() for name in self.features.split(","))

    @property
    def in_flight(self) -> int:
        """Mini-batches in flight in the order in which they run.

        With ``backward_first`` nothing runs between a batch's gradient and its step, which is the sequence of
        one batch less in flight.
        """
        return max(self.depth - 1, 1) if self.order == "backward_first" else self.depth

    @property
    def delay(self) -> int:
        """Iterations of the user's loop between a batch's loss and the step of its part side."""
        return max(self.in_flight - 2, 0)


def read_push_pull_options(options: Mapping[str, object]) -> PushPullOptions:
    """Return the checked options.

    Raises:
        ConfigError: one is unknown, of another type, or has a value that cannot be honoured.
    """
    types = {field.name: type(field.default) for field in fields(PushPullOptions)}
    return PushPullOptions(**check_options("push_pull", options, types))


def smallest_group(world_size: int, feature_bytes: int, memory_bytes: int) -> int:
    """Return the fewest ranks that hold ``feature_bytes`` together with ``memory_bytes`` each.

    See P3, section 3.5.

    Raises:
        ConfigError: not even all of them can hold them.
    """
    for size in range(1, world_size + 1):
        if world_size % size == 0 and -(-feature_bytes // size) <= memory_bytes:
            return size
    raise ConfigError(
        f"the features take {feature_bytes} bytes, and {world_size} ranks of {memory_bytes} bytes (option "
        "memory) cannot hold them; grant more memory, or use more ranks"
    )


class Drainable(Protocol):
    """A pipeline that may have work left at the end of an epoch."""

    def drain(self) -> None:
        """Finish the work that is left; every rank must call it."""


PIPELINES: SessionField[list[weakref.ref[Drainable]]] = SessionField(lambda _: [])
"""Pipelines that loaders drain at the end of an epoch."""


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


class GroupBatch(ABC):
    """One mini-batch of every owner; the loader sets it as ``blocks[0].push_pull``."""

    number: int
    """Steps since the loader's first epoch, equal on all ranks."""
    inputs: tuple[PartInput, ...]
    """(N_f,) by owner, in the order of the group's members; the own block is a view of the user's, without
    data that is set on that later."""

    @abstractmethod
    def following(self) -> GroupBatch | None:
        """Return the next batch of the epoch, of which only layer 1 may be computed yet.

        None after the last one, and always when the loader does not look ahead.
        """
