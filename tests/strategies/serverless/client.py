"""A client that calls a rank as a worker does: by sockets, with a worker's secret."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from dglx_dist.comm.endpoints import ClientAccess
from dglx_dist.errors import RemoteError
from dglx_dist.records import Array
from dglx_dist.serverless.tasks import Address, Secrets
from dglx_dist.serverless.worker import RemoteCaller


class WorkerClient:
    """Asks one rank of a job.

    Args:
        access: Addresses of the ranks, and the workers' credentials.
        secret: Replaces the right one.
        rank: The rank to call.
    """

    def __init__(self, access: ClientAccess, secret: str = "", rank: int = 0) -> None:
        peer, shown = access.addresses[rank], access.credentials
        self.address = Address(
            rank=rank, host=peer.host, endpoint=peer.endpoint, public_key=_text(peer.public_key)
        )
        self.secrets = Secrets(
            secret=secret or shown.secret.decode(),
            public_key=_text(shown.public_key),
            secret_key=_text(shown.secret_key),
        )
        self.caller = RemoteCaller()

    def ask(self, op: str, name: str, arrays: Sequence[Array] = ()) -> list[Array]:
        return self.caller.send(self.address, self.secrets, op, name, arrays)(20.0)

    def is_refused(self, op: str, name: str, arrays: Sequence[Array] = (), *, match: str) -> None:
        with pytest.raises(RemoteError, match=match):
            self.ask(op, name, arrays)


def _text(key: bytes | None) -> str | None:
    return None if key is None else key.decode()
