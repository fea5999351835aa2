"""Where those who are no ranks, such as stateless workers, reach the ranks, and what they must show."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from dglx_dist.cluster.auth import Credentials, make_credentials_keys
from dglx_dist.cluster.client import PeerAddress
from dglx_dist.cluster.network import interface_address
from dglx_dist.cluster.session import Session
from dglx_dist.cluster.topology import read_settings

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class Visiting:
    """What a visitor needs."""

    addresses: Mapping[int, PeerAddress]
    """By rank."""
    credentials: Credentials
    """Of this rank, which its visitors show as well: secret, and with ``DGLX_CURVE`` both halves of its key
    pair."""


def open_to_visitors(session: Session, interface: str = "") -> Visiting:
    """Return where the ranks answer; a session that runs alone begins to listen now.

    Args:
        session: The run.
        interface: On which network interface a session that runs alone listens; "": visitors are on this
            machine. Several ranks listen where they listen to each other.

    Raises:
        ConfigError: there is no such interface.
    """
    rpc = session.rpc
    if rpc.credentials is None:
        credentials = _credentials(encrypted=read_settings().curve)
        endpoint = rpc.listen(interface_address(interface) if interface else _LOOPBACK, credentials)
        own = PeerAddress(rank=0, host=session.hosts[0], endpoint=endpoint, public_key=credentials.public_key)
        rpc.connect({0: own})
    assert rpc.credentials is not None
    return Visiting(addresses=rpc.addresses, credentials=rpc.credentials)


def _credentials(*, encrypted: bool) -> Credentials:
    secret = secrets.token_hex(32).encode()
    if not encrypted:
        return Credentials(secret=secret)
    public, private = make_credentials_keys()
    return Credentials(
        secret=secret, public_key=public, secret_key=private, accepted_keys=frozenset([public])
    )
