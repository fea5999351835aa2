"""A door of their own for those who are no ranks, such as stateless workers.

A visitor's secret may lie where the job's must not, as in the events of a functions service. So visitors have
a secret, a port and handlers of their own: with theirs nobody gets through the ranks' door, and behind theirs
nothing is answered but what was registered for visitors (see :meth:`Rpc.register`).
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, final

from dglx_dist.comm.auth import Credentials, make_credentials_keys
from dglx_dist.comm.collectives import gather_json
from dglx_dist.comm.rpc import PeerAddress
from dglx_dist.comm.session import Session, SessionField
from dglx_dist.comm.topology import interface_address, read_settings

_ACCESS: SessionField[ClientAccess | None] = SessionField(lambda: None)
_LOOPBACK = "127.0.0.1"


@final
@dataclass(frozen=True, kw_only=True)
class ClientAccess:
    """What a visitor needs."""

    addresses: Mapping[int, PeerAddress]
    """Where ranks answer visitors, by rank."""
    credentials: Credentials
    """What visitors of this rank show: a secret of the job for visitors alone, and with ``DGLX_CURVE`` a key
    pair that opens the door of visitors alone."""


def open_client_access(session: Session, interface: str = "") -> ClientAccess:
    """Return where the ranks answer visitors; the first time collective, then kept as long as the session.

    Args:
        session: The run.
        interface: On which network interface a session that runs alone listens; "": visitors are on this
            machine. Several ranks listen where they listen to each other.

    Raises:
        ConfigError: there is no such interface.
        PeerError: a rank did not take part.
    """
    kept = _ACCESS.of(session)
    if kept is not None:
        return kept
    address = session.rpc.address or (
        interface_address(interface, "option interface") if interface else _LOOPBACK
    )
    encrypted = read_settings().curve
    authenticator, ticket = _keys(encrypted=encrypted), _keys(encrypted=encrypted)
    # That of rank 0 is taken; with key pairs it opens nothing, else it is told as the job's own is.
    said: list[Any] = gather_json(
        [secrets.token_hex(32), _text(authenticator.public), _text(ticket.public)], session
    )
    secret = said[0][0].encode()
    accepted = frozenset(client.encode() for _, _, client in said if client)
    endpoint = session.rpc.listen_to_clients(
        address,
        Credentials(
            secret=secret,
            public_key=authenticator.public,
            secret_key=authenticator.secret,
            accepted_keys=accepted,
        ),
    )
    endpoints = gather_json(endpoint, session)
    access = ClientAccess(
        addresses={
            rank: PeerAddress(
                rank=rank,
                host=session.hosts[rank],
                endpoint=str(endpoints[rank]),
                public_key=None if key is None else key.encode(),
            )
            for rank, (_, key, _) in enumerate(said)
        },
        credentials=Credentials(secret=secret, public_key=ticket.public, secret_key=ticket.secret),
    )
    _ACCESS.set(session, access)
    return access


class _Keys(NamedTuple):
    public: bytes | None
    secret: bytes | None


def _keys(*, encrypted: bool) -> _Keys:
    return _Keys(*make_credentials_keys()) if encrypted else _Keys(None, None)


def _text(key: bytes | None) -> str | None:
    return None if key is None else key.decode()
