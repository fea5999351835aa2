"""A client that calls a rank as a worker does: by sockets, with a worker's secret."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from dglx_dist.comm.endpoints import ClientAccess
from dglx_dist.errors import RemoteError
from dglx_dist.records import Array
from dglx_dist.serverless.worker import RemoteCaller
from dglx_dist.strategies.serverless.scheduler import addresses_of


class WorkerClient:
    """Asks one rank of a job.

    Args:
        access: Addresses of the ranks, and the workers' credentials.
        secret: Replaces the right one.
        rank: The rank to call.
    """

    def __init__(self, access: ClientAccess, secret: str = "", rank: int = 0) -> None:
        addresses, self.secrets = addresses_of(access)
        self.address = addresses[rank]
        if secret:
            self.secrets = replace(self.secrets, secret=secret)
        self.caller = RemoteCaller()

    def ask(self, op: str, name: str, arrays: Sequence[Array] = ()) -> list[Array]:
        return self.caller.send(self.address, self.secrets, op, name, arrays)(20.0)

    def is_refused(self, op: str, name: str, arrays: Sequence[Array] = (), *, match: str) -> None:
        with pytest.raises(RemoteError, match=match):
            self.ask(op, name, arrays)
