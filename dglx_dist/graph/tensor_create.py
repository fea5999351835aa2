"""Making a distributed tensor: what is asked for, whether all ranks ask alike, and the rows."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from dglx_dist.cluster.collectives import barrier, gather_json
from dglx_dist.cluster.session import Session
from dglx_dist.errors import ConfigError
from dglx_dist.graph.column import Column, Shard
from dglx_dist.graph.dtypes import column_info
from dglx_dist.graph.policy import PartitionPolicy
from dglx_dist.graph.shared_rows import InitRows, shared_rows
from dglx_dist.records import ColumnInfo

if TYPE_CHECKING:
    from dglx_dist.graph.dist_graph import DistGraph


@dataclass(frozen=True, kw_only=True)
class WantedTensor:
    """A tensor as one rank asks for it."""

    key: str
    shape: tuple[int, ...]
    info: ColumnInfo
    policy: PartitionPolicy

    def facts(self) -> list[object]:
        """What all ranks must say alike."""
        return [self.key, list(self.shape), self.info.dtype, self.policy.bounds.tolist()]

    def check_attach(self, name: str, column: Column, attach: bool) -> None:
        """Raise ConfigError when the existing tensor ``column`` is another one, or may not be taken."""
        if not attach:
            raise ConfigError(f"there is a tensor {name!r} already; choose another name")
        shape = (column.num_rows, *column.info.row_shape)
        if (column.info, shape) != (self.info, self.shape):
            raise ConfigError(
                f"the existing tensor {name!r} is {column.info.dtype} of shape {shape}, not "
                f"{self.info.dtype} of shape {self.shape}; choose another name"
            )
        if not np.array_equal(column.bounds, self.policy.bounds):
            raise ConfigError(
                f"the existing tensor {name!r} has the server bounds {column.bounds.tolist()}, not "
                f"{self.policy.bounds.tolist()}; choose another name"
            )


def wanted_tensor(
    shape: Sequence[int], dtype: torch.dtype, name: str, place: PartitionPolicy | DistGraph, is_gdata: bool
) -> WantedTensor:
    """Say what a rank asks for; ``place`` is a policy, or the graph to look for one that fits.

    Raises:
        ConfigError: the shape is none, fits no type or several, or the dtype cannot be stored.
    """
    sizes = _whole_sizes(shape)
    policy = place if isinstance(place, PartitionPolicy) else place.policy_of_length(sizes[0])
    if sizes[0] != policy.get_size():
        raise ConfigError(
            f"a tensor of {sizes[0]} rows does not go with {policy.policy_str}, of which there are "
            f"{policy.get_size()}"
        )
    key = policy.key(name) if is_gdata else policy.hidden_key(name)
    return WantedTensor(key=key, shape=sizes, info=column_info(dtype, sizes[1:]), policy=policy)


def _whole_sizes(shape: Sequence[int]) -> tuple[int, ...]:
    try:
        sizes = tuple(operator.index(size) for size in shape)
    except TypeError:
        raise ConfigError(f"shape is {shape!r}; give whole numbers, such as (g.num_nodes(), 16)") from None
    if not sizes or min(sizes) < 0:
        raise ConfigError(f"shape is {sizes}; give the number of rows first, and no size below 0")
    return sizes


def agreed(session: Session, wanted: WantedTensor | None, problem: str) -> WantedTensor:
    """Return ``wanted`` when all ranks want the same. Every rank must call it.

    Args:
        session: The run.
        wanted: None when this rank has a problem.
        problem: What is wrong on this rank, or "".

    Raises:
        ConfigError: on all ranks, when one has a problem or they differ.
    """
    mine = None if wanted is None else wanted.facts()
    said = gather_json([mine, problem], session)
    for rank, (other, text) in enumerate(cast("list[tuple[object, str]]", said)):
        if text:
            raise ConfigError(text if rank == session.topology.rank else f"rank {rank}: {text}")
        if mine is not None and other != mine:
            raise ConfigError(
                f"rank {session.topology.rank} creates the tensor {mine} while rank {rank} creates "
                f"{other}; creating one is collective: all ranks must do it alike"
            )
    assert wanted is not None, "a rank without a tensor has a problem"
    return wanted


def create(wanted: WantedTensor, init: InitRows | None) -> None:
    """Make the rows and name them in the store. Every rank must call it, with the same.

    Raises:
        ConfigError: on all ranks, when there is no room on one, or ``init`` raised there.
    """
    policy, store = wanted.policy, wanted.policy.store
    file_name = f"{store.label}-tensor-{store.next_number()}"
    rows = shared_rows(store.session, file_name, policy.get_part_size(), wanted.info, init)
    shard = Shard(first=int(policy.bounds[policy.part_id]), rows=rows)
    store.add_column(
        Column(name=wanted.key, info=wanted.info, bounds=policy.bounds, shards=(shard,), writable=True)
    )
    barrier(store.session, f"creating {wanted.key}")
