"""Structure that every owner sends to the parts of its group, one-sided and from the loader's threads."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from typing import final

from dglx_dist.cluster.session import Session
from dglx_dist.records import Array
from dglx_dist.sampling.blocks import BlockBuilder
from dglx_dist.strategies.push_pull.group import Group
from dglx_dist.strategies.push_pull.structure import (
    STRUCTURE,
    Brought,
    OwnersBlock,
    Place,
    StructureSource,
    packed,
    unpacked,
)
from dglx_dist.strategies.push_pull.structure_inbox import StructureInbox


@final
class PushedStructure(StructureSource):
    """Sends each batch's layer-1 block to the other members, and waits for theirs (algorithms 2.2).

    All ranks must have made theirs before one iterates.

    Args:
        session: The run.
        group: Who sends to whom.
        op: Name of the remote call, the same on all ranks and of nobody else.
        builder: Of the blocks.
        wide: Whether ids of nodes need 8 bytes.
    """

    def __init__(self, session: Session, group: Group, op: str, builder: BlockBuilder, *, wide: bool) -> None:
        self._session, self._group, self._op = session, group, op
        self._builder, self._wide = builder, wide
        self.inbox = inbox = StructureInbox(session, group)

        def receive(name: str, arrays: Sequence[Array]) -> list[Array]:
            visit, step, part = map(int, name.split())
            _check(arrays)
            inbox.put(visit, step, part, arrays)
            return []

        # Not a method: the loader would live as long as the session.
        session.rpc.register(op, receive)
        weakref.finalize(self, session.rpc.unregister, op)

    def begin(self, visit: int) -> None:
        """See :meth:`StructureSource.begin`."""
        self.inbox.begin(visit)

    def of_others(self, place: Place, own: OwnersBlock) -> Brought:
        """See :meth:`StructureSource.of_others`; returns when the others have this rank's block, too."""
        began = time.perf_counter()
        arrays, name = packed(own, wide=self._wide), f"{place.visit} {place.step} {self._group.part}"
        size = self._group.size
        # Beginning with the next part, so that not all ranks send to the same one first.
        others = sorted(self._group.others, key=lambda other: (other[0] - self._group.part) % size)
        sent = [
            self._session.rpc.submit(rank, self._op, name, arrays, phase=STRUCTURE, layer=1)
            for _, rank in others
        ]
        for call in sent:
            call.result()
        pushed = time.perf_counter()
        received = self.inbox.take(place)
        arrived = time.perf_counter()
        idtype = own.block.idtype
        blocks = {part: unpacked(found, self._builder, idtype) for part, found in received.items()}
        return Brought(blocks=blocks, seconds=(pushed - began) + (time.perf_counter() - arrived))

    def leave(self, visit: int, reason: BaseException | None = None) -> None:
        """See :meth:`StructureSource.leave`."""
        self.inbox.leave(visit, reason)


def _check(arrays: Sequence[Array]) -> None:
    """Raise ValueError, which the sender is told, unless this is a block."""
    if len(arrays) != 3 or not len(arrays[1]) or int(arrays[1][-1]) != len(arrays[2]):
        raise ValueError(f"{len(arrays)} arrays of {[len(array) for array in arrays]} values are no block")
