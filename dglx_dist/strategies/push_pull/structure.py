"""The layer-1 block of every owner, on every part of a group (P3: structure is pushed, features are not)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from dgl.heterograph import DGLBlock
from torch import Tensor

from dglx_dist.records import Array
from dglx_dist.sampling.blocks import BlockBuilder

STRUCTURE = "structure"
"""The ledger's name of these bytes: (N_f - 1) 4 [(D1 + 1) + E1 + L0] per owner and batch (algorithms 2.4)."""

SMALL_NODES = 1 << 31
"""Graphs of fewer nodes have ids that fit into 4 bytes."""


@dataclass(frozen=True, kw_only=True)
class OwnersBlock:
    """The layer-1 block of one owner."""

    block: DGLBlock
    nodes: Tensor
    """(L0,) int64 global ids of its sources."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """A batch, alike on all ranks."""

    visit: int
    """How many iterations of this loader began before."""
    epoch: int
    step: int


@dataclass(frozen=True, kw_only=True)
class Brought:
    """The blocks of a batch's other owners."""

    blocks: Mapping[int, OwnersBlock]
    """By owner's part."""
    seconds: float
    """What it cost, without waiting for ranks that were late."""


class StructureSource(ABC):
    """Brings the blocks of the other owners; called on the loader's threads."""

    @abstractmethod
    def begin(self, visit: int) -> None:
        """Forget earlier iterations; on the consumer's thread, before a batch of this one is asked for."""

    @abstractmethod
    def of_others(self, place: Place, own: OwnersBlock) -> Brought:
        """Bring the blocks of a batch; every member of the group must call it.

        Raises:
            PeerError: a member is dead, or did not come to this batch within the time-out.
        """

    @abstractmethod
    def leave(self, visit: int, reason: BaseException | None = None) -> None:
        """Let threads that wait for the others end, with ``reason`` if there is one; any thread."""


def packed(own: OwnersBlock, *, wide: bool) -> list[Array]:
    """Return source ids (L0,), indptr (D1 + 1,) and indices (E1,): int32, the ids int64 where ``wide``."""
    indptr, indices, _ = own.block.adj_tensors("csc")
    nodes = own.nodes if wide else own.nodes.to(torch.int32)
    return [nodes.numpy(), indptr.to(torch.int32).numpy(), indices.to(torch.int32).numpy()]


def unpacked(arrays: list[Array], builder: BlockBuilder, idtype: torch.dtype) -> OwnersBlock:
    """Return the block of what :func:`packed` made, its edges numbered as the columns have them.

    Args:
        arrays: Copied, where they are not converted.
        builder: Makes it.
        idtype: Of the owner's block, so that all parts run the same kernels.
    """
    nodes, indptr, indices = (torch.tensor(array) for array in arrays)
    block = builder.bare(indptr.to(idtype), indices.to(idtype), len(nodes))
    return OwnersBlock(block=block, nodes=nodes.to(torch.int64))
