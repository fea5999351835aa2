"""Structure that nobody sends: every part draws every owner's blocks itself (algorithms 2.4, 0 bytes)."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from dglx_dist.cluster.session import Session
from dglx_dist.errors import ConfigError
from dglx_dist.graph.opening import together
from dglx_dist.records import Array
from dglx_dist.sampling.blocks import BlockBuilder
from dglx_dist.sampling.items import Items
from dglx_dist.sampling.opening import check_alike
from dglx_dist.sampling.stepping import StepLoader
from dglx_dist.strategies.push_pull.group import Group
from dglx_dist.strategies.push_pull.structure import Brought, OwnersBlock, Place, StructureSource

SEEDS = "seeds"
"""The ledger's name of these bytes: 8 per seed of every other member, once."""


@final
class ResampledStructure(StructureSource):
    """Draws what the other owners draw: draws belong to (seed, epoch, hop, node), so they are the same bits.

    Args:
        loader: This rank's.
        make: What makes any rank's batches: ``loader.alone()``.
        items: Rank to what it visits, of the other members.
        group: Who they are.
        builder: Of the blocks.
    """

    def __init__(
        self,
        loader: StepLoader[Any, Any, Any],
        make: Callable[[Mapping[Any, Any], int], Any],
        items: Mapping[int, Items[Any]],
        group: Group,
        builder: BlockBuilder,
    ) -> None:
        self._loader, self._make, self._items = loader, make, dict(items)
        self._group, self._builder = group, builder
        self._epoch = -1
        self._visits: dict[int, Callable[[int], dict[Any, Array]]] = {}
        self._lock = threading.Lock()

    def begin(self, visit: int) -> None:
        """See :meth:`StructureSource.begin`."""

    def of_others(self, place: Place, own: OwnersBlock) -> Brought:
        """See :meth:`StructureSource.of_others`; waits for nobody."""
        began = time.perf_counter()
        visits = self._of_epoch(place.epoch)
        blocks = {
            part: self._drawn(visits[rank](place.step), place.epoch) for part, rank in self._group.others
        }
        return Brought(blocks=blocks, seconds=time.perf_counter() - began)

    def leave(self, visit: int, reason: BaseException | None = None) -> None:
        """See :meth:`StructureSource.leave`."""

    def _drawn(self, items: Mapping[Any, Array], epoch: int) -> OwnersBlock:
        batch = self._make(items, epoch)
        indptr, indices, _ = batch.blocks[0].adj_tensors("csc")
        block = self._builder.bare(indptr, indices, len(batch.input_nodes))
        return OwnersBlock(block=block, nodes=batch.input_nodes)

    def _of_epoch(self, epoch: int) -> dict[int, Callable[[int], dict[Any, Array]]]:
        # Sorting the seeds of an epoch is for once, not for every batch.
        with self._lock:
            if epoch != self._epoch:
                self._visits = {
                    rank: self._loader.visits(epoch, items, rank) for rank, items in self._items.items()
                }
                self._epoch = epoch
            return self._visits


def open_resampled(
    loader: StepLoader[Any, Any, Any], session: Session, group: Group, op: str, builder: BlockBuilder
) -> ResampledStructure:
    """Exchange the seeds of a group; every rank must call it.

    Args:
        loader: Of nodes or edges, of one type.
        session: The run.
        group: Whose seeds are needed.
        op: Name of the remote call, the same on all ranks and of nobody else.
        builder: Of the blocks.

    Raises:
        ConfigError: on all ranks, when the draws of one cannot be done by others; the message has the reason.
        PeerError: a rank is dead or did not take part within the time-out.
    """
    make = together(session, loader.alone, ConfigError)
    # Servers with the whole structure may each leave out other edges, or draw by another seed.
    check_alike(session, "draws", loader.drawn_by())
    items, kinds = loader.items, list(loader.items.ids)
    served = _serve(session, op, items)
    found = {
        rank: Items(ids=dict(zip(kinds, session.rpc.call(rank, op, "", [], phase=SEEDS), strict=True)))
        for _, rank in group.others
    }
    made = ResampledStructure(loader, make, found, group, builder)
    weakref.finalize(made, served)
    return made


def _serve(session: Session, op: str, items: Items[Any]) -> Callable[[], None]:
    """Tell others this rank's items from now on, all ranks at once; return what ends it. Collective."""

    def tell(_name: str, _arrays: Sequence[Array]) -> list[Array]:
        return list(items.ids.values())

    together(session, lambda: session.rpc.register(op, tell))
    return lambda: session.rpc.unregister(op)
