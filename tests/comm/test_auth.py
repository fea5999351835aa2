"""External clients: their endpoint, their credentials, and the operations registered for them."""

from __future__ import annotations

import numpy as np
import pytest
import zmq

from dglx_dist.comm.auth import Credentials, make_credentials_keys
from dglx_dist.comm.endpoints import ClientAccess, open_client_access
from dglx_dist.comm.rpc import Client
from dglx_dist.comm.session import Session, start_session
from dglx_dist.errors import ConfigError, PeerError, RemoteError


def ask(access: ClientAccess, credentials: Credentials, op: str = "double") -> list[int]:
    with zmq.Context() as context:
        client = Client(context, access.addresses, credentials)
        try:
            (answer,) = client.send(0, op, "", [np.array([21])]).result(2.0)
        finally:
            client.close()
    return [int(value) for value in answer]


def register(session: Session) -> None:
    session.rpc.register("double", lambda _name, arrays: [2 * arrays[0]], for_clients=True)
    session.rpc.register("rows", lambda _name, _arrays: pytest.fail("a client was served like a rank"))


def test_a_session_of_one_rank_listens_when_access_is_opened() -> None:
    with start_session(timeout_s=20.0) as session:
        register(session)
        access = open_client_access(session)
        assert session.rpc.credentials is None  # no rank is expected
        assert open_client_access(session) is access
        assert access.addresses[0].endpoint.startswith("tcp://127.0.0.1:")
        assert ask(access, access.credentials) == [42]
        for op in ("rows", "cluster.ping"):
            with pytest.raises(RemoteError, match=rf"no operation '{op}' .*\(there are: double\)"):
                ask(access, access.credentials, op)
        session.rpc.unregister("double")
        with pytest.raises(RemoteError, match="no operation 'double'"):
            ask(access, access.credentials)
        with pytest.raises(PeerError):
            ask(access, Credentials(secret=b"open sesame"))


def test_a_session_of_one_rank_encrypts_with_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DGLX_CURVE", "1")
    with start_session(timeout_s=20.0) as session:
        register(session)
        access = open_client_access(session)
        # The key pair of clients is not that of the endpoint.
        assert access.addresses[0].public_key not in (None, access.credentials.public_key)
        assert ask(access, access.credentials) == [42]
        public, secret = make_credentials_keys()
        stranger = Credentials(secret=access.credentials.secret, public_key=public, secret_key=secret)
        for other in (stranger, Credentials(secret=access.credentials.secret)):
            with pytest.raises(PeerError, match="refused"):
                ask(access, other)


def test_large_arrays_of_a_refused_call_are_dropped() -> None:
    with start_session(timeout_s=20.0) as session:
        register(session)
        access = open_client_access(session)
        with zmq.Context() as context:
            client = Client(context, access.addresses, access.credentials)
            with pytest.raises(RemoteError, match="no operation 'rows'"):
                client.send(0, "rows", "", [np.zeros(1 << 18)]).result(20.0)
            assert client.send(0, "double", "", [np.arange(1 << 18)]).result(20.0)[0][-1] == 2 * (
                (1 << 18) - 1
            )
            client.close()


def test_on_an_interface() -> None:
    with start_session(timeout_s=20.0) as session:
        with pytest.raises(ConfigError, match="option interface='nowhere0' is no network interface"):
            open_client_access(session, "nowhere0")
        assert open_client_access(session, "lo").addresses[0].endpoint.startswith("tcp://127.0.0.1:")
