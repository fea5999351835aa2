"""External clients: their endpoint, their credentials, and the operations registered for them."""

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import zmq

from dglx_dist.comm.auth import Credentials
from dglx_dist.comm.endpoints import ClientAccess, open_client_access
from dglx_dist.comm.rpc import Client
from dglx_dist.comm.session import Session, start_session
from dglx_dist.errors import ConfigError, PeerError, RemoteError
from dglx_dist.records import Array


@pytest.fixture
def session() -> Iterator[Session]:
    with start_session(timeout_s=20.0) as session:
        session.rpc.register("double", lambda _name, arrays: [2 * arrays[0]], for_clients=True)
        session.rpc.register("rows", lambda _name, _arrays: pytest.fail("a client was served like a rank"))
        yield session


def ask(
    access: ClientAccess, credentials: Credentials, op: str = "double", values: Sequence[int] = (21,)
) -> Array:
    with zmq.Context() as context:
        client = Client(context, access.addresses, credentials)
        try:
            return client.send(0, op, "", [np.asarray(values)]).result(5.0)[0]
        finally:
            client.close()


def test_a_session_of_one_rank_listens_when_access_is_opened(session: Session) -> None:
    with pytest.raises(ConfigError, match="option interface='nowhere0' is no network interface"):
        open_client_access(session, "nowhere0")
    access = open_client_access(session, "lo")
    assert session.rpc.credentials is None  # no rank is expected
    assert open_client_access(session) is access
    assert access.addresses[0].endpoint.startswith("tcp://127.0.0.1:")
    large = range(1 << 18)
    for op in ("rows", "cluster.ping"):
        with pytest.raises(RemoteError, match=rf"no operation '{op}' .*\(there are: double\)"):
            ask(access, access.credentials, op, large)
        # Nothing of the refused arrays is left behind for the next call.
        assert np.array_equal(ask(access, access.credentials, values=large), 2 * np.array(large))
    session.rpc.unregister("double")
    with pytest.raises(RemoteError, match="no operation 'double'"):
        ask(access, access.credentials)
    with pytest.raises(PeerError):
        ask(access, Credentials(secret=b"open sesame"))


def test_a_session_of_one_rank_encrypts_with_curve(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DGLX_CURVE", "1")
    access = open_client_access(session)
    # Without an interface, clients are on this machine. Their key pair is not that of the endpoint.
    assert access.addresses[0].endpoint.startswith("tcp://127.0.0.1:")
    assert access.addresses[0].public_key not in (None, access.credentials.public_key)
    assert ask(access, access.credentials) == [42]
    public, secret = zmq.curve_keypair()
    stranger = Credentials(secret=access.credentials.secret, public_key=public, secret_key=secret)
    for case in (stranger, Credentials(secret=access.credentials.secret)):
        with pytest.raises(PeerError, match="refused"):
            ask(access, case)
