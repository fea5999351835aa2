from __future__ import annotations

import pytest

from dglx_dist.comm.session import start_session
from dglx_dist.comm.topology import Topology
from dglx_dist.errors import PeerError
from dglx_dist.graph.sparse_gradient_exchange import Inbox, StepMessage


def message(step: int) -> StepMessage:
    return StepMessage(sender=0, step=step, used=(True,), parcels=())


def test_messages_wait_for_their_step_and_are_given_once() -> None:
    with start_session(topology=Topology(0, 1, (0,)), timeout_s=0.05) as session:
        inbox = Inbox(session)
        # A fast rank may be a step ahead.
        inbox.put(message(2))
        inbox.put(message(1))
        assert [found.step for found in inbox.take(1, "step 1")] == [1]
        assert [found.step for found in inbox.take(2, "step 2")] == [2]
        with pytest.raises(PeerError, match=r"rank 0 on .* sent nothing for 'step 1' within 0\.05 s"):
            inbox.take(1, "step 1")
