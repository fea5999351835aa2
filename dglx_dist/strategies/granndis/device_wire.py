"""Moves rows between accelerators by torch.distributed (NCCL), without the host's memory in between.

Only where every rank has an accelerator to itself: NCCL refuses two ranks on one. Elsewhere rows go through
the host, see wire.py.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from dglx_dist.cluster.collectives import gather_json, peers_named
from dglx_dist.cluster.session import Session
from dglx_dist.cluster.timeline import NETWORK

Message = tuple[int, Tensor]
"""A rank, and the contiguous tensor that goes to it or comes from it."""


@final
class DeviceWire:
    """Messages of one rank to and from its peers on their accelerators.

    Args:
        session: The run; every rank must make its one.
        device: Where this rank's tensors are.
    """

    def __init__(self, session: Session, device: torch.device) -> None:
        self._session, self._device = session, device
        self._in_use = threading.Lock()
        self._seconds = 0.0
        # A communicator is made by all ranks, and later not all have messages.
        with peers_named(session, "opening of connections between accelerators"):
            dist.all_reduce(torch.zeros(1, device=device))

    def seconds(self, *, reset: bool = False) -> float:
        """Seconds spent in exchanges on the host; what the accelerator waits for is not seen."""
        spent = self._seconds
        if reset:
            self._seconds = 0.0
        return spent

    def swap(self, outgoing: Sequence[Message], incoming: Sequence[Message], name: str) -> None:
        """Send all of ``outgoing`` and receive all of ``incoming``; the peers must call it in the same order.

        Later work on this device's current stream waits for it. What has no bytes is passed over, at both
        ends; sizes are not compared.

        Raises:
            PeerError: torch.distributed failed, or ran into the time-out; who is to blame is named.
        """
        started = time.perf_counter()
        with peers_named(self._session, name), self._session.timeline.span(name, NETWORK), self._in_use:
            ops = [dist.P2POp(dist.isend, _bytes(rows), rank) for rank, rows in outgoing if rows.numel()]
            ops += [dist.P2POp(dist.irecv, _bytes(room), rank) for rank, room in incoming if room.numel()]
            for work in dist.batch_isend_irecv(ops) if ops else ():
                work.wait()
        self._seconds += time.perf_counter() - started


def make_device_wire(session: Session) -> DeviceWire | None:
    """Return the wire between the ranks' accelerators, None where they cannot talk to each other directly.

    Every rank must call it.

    Raises:
        PeerError: a rank is dead or did not come within the time-out; it is named.
    """
    device = session.device
    # One rank alone has no process group to ask.
    on_nccl = device.type == "cuda" and dist.is_initialized() and "nccl" in dist.get_backend_config()
    mine = str(torch.cuda.get_device_properties(device).uuid) if on_nccl else ""
    told = [str(one) for one in gather_json(mine, session)]
    if "" in told or len(set(told)) < len(told):
        return None
    return DeviceWire(session, device)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
