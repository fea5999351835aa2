"""One batch as all parts of a group see it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from dgl.heterograph import DGLBlock
from torch import Tensor

PIPELINES = "push_pull"
"""Where ``session.attached`` lists the pipelines, weak references, for loaders to drain at an epoch's end."""


@dataclass(frozen=True, kw_only=True)
class OwnersInput:
    """What this part has of one owner's batch."""

    block: DGLBlock
    """The owner's layer-1 block; of another owner without any data."""
    nodes: Tensor
    """(L0,) int64 global ids of its sources, the destinations first."""
    columns: Mapping[str, Tensor]
    """Feature name to (L0, F_p), this part's columns of the sources' rows."""
    number: int
    """Of the batch, equal on all ranks: steps since the loader's first epoch."""


class Visit(ABC):
    """A batch on its way through the pipeline; the loader sets it as ``blocks[0].push_pull``."""

    number: int
    """Steps since the loader's first epoch, equal on all ranks."""
    inputs: tuple[OwnersInput, ...]
    """(N_f,) by owner, in the order of the group's members; the own block is a view of the user's, without
    what is set on that later."""

    @abstractmethod
    def following(self) -> Visit | None:
        """Return the next batch of the epoch, of which only layer 1 may be computed yet.

        None after the last one, and always when the loader was told not to look ahead.
        """
