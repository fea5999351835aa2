"""Where the structure lies that batches are sampled from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, final

from dglx_dist.draws.pick import Csc
from dglx_dist.records import Array
from dglx_dist.sampling.kernel import Ask, RawBatch, sample_and_slice, sample_batch
from dglx_dist.sampling.workspace import Workspace, check_seeds


class BatchSource(ABC):
    """Samples whole batches; any thread may call it, each with a workspace of its own."""

    is_whole: ClassVar[bool]
    """Whether it asks nobody."""

    @abstractmethod
    def sample(self, ask: Ask, workspace: Workspace) -> RawBatch:
        """Sample a batch; the draws depend on ``ask`` alone, not on where the structure lies.

        Raises:
            ConfigError: the seeds have an id twice.
        """


@final
class WholeSource(BatchSource):
    """Samples from a structure that this server has whole.

    Args:
        csc: In-edges of all nodes, from node 0 and edge 0.
    """

    is_whole = True

    def __init__(self, csc: Csc) -> None:
        self._csc = csc

    def sample(self, ask: Ask, workspace: Workspace) -> RawBatch:
        """Sample in one compiled call; see :class:`BatchSource`."""
        batch, table = sample_batch(self._csc, ask, workspace.table)
        workspace.keep(table)
        check_seeds(ask.seeds, int(batch.node_ends[0]))
        return batch

    def sample_and_slice(
        self, ask: Ask, workspace: Workspace, rows: Array, out: Array
    ) -> tuple[RawBatch, Array]:
        """Sample and copy the features of the batch's nodes, in one compiled call.

        Args:
            ask: What to sample.
            workspace: The calling thread's own.
            rows: (N, words) features of all nodes as words of one unsigned dtype.
            out: (any, words) memory to use if it is long enough.

        Returns:
            The batch and the memory used, whose first rows are the features.

        Raises:
            ConfigError: the seeds have an id twice.
        """
        batch, table, out = sample_and_slice(self._csc, ask, workspace.table, rows, out)
        workspace.keep(table)
        check_seeds(ask.seeds, int(batch.node_ends[0]))
        return batch, out
