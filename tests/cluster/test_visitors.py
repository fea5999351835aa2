"""Who is no rank reaches one that runs alone, with the secret only."""

from __future__ import annotations

import numpy as np
import pytest
import zmq

from dglx_dist.cluster.auth import Credentials, make_credentials_keys
from dglx_dist.cluster.client import Client
from dglx_dist.cluster.serve import ServeConfig
from dglx_dist.cluster.session import start_session
from dglx_dist.cluster.visitors import Visiting, open_to_visitors
from dglx_dist.errors import ConfigError, PeerError


def ask(visiting: Visiting, credentials: Credentials) -> list[int]:
    with zmq.Context() as context:
        client = Client(context, visiting.addresses, credentials, ServeConfig())
        try:
            (answer,) = client.send(0, "double", "", [np.array([21])]).wait(2.0)
        finally:
            client.close()
    return [int(value) for value in answer]


def test_a_session_that_runs_alone_listens_when_visitors_come() -> None:
    with start_session(timeout_s=20.0) as session:
        assert session.rpc.credentials is None
        session.rpc.register("double", lambda _name, arrays: [2 * arrays[0]])
        visiting = open_to_visitors(session)
        assert open_to_visitors(session) == visiting
        assert visiting.addresses[0].endpoint.startswith("tcp://127.0.0.1:")
        assert ask(visiting, visiting.credentials) == [42]
        with pytest.raises(PeerError):
            ask(visiting, Credentials(secret=b"open sesame"))


def test_a_session_that_runs_alone_encrypts_where_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DGLX_CURVE", "1")
    with start_session(timeout_s=20.0) as session:
        session.rpc.register("double", lambda _name, arrays: [2 * arrays[0]])
        visiting = open_to_visitors(session)
        assert visiting.addresses[0].public_key == visiting.credentials.public_key is not None
        assert ask(visiting, visiting.credentials) == [42]
        public, secret = make_credentials_keys()
        stranger = Credentials(secret=visiting.credentials.secret, public_key=public, secret_key=secret)
        for other in (stranger, Credentials(secret=visiting.credentials.secret)):
            with pytest.raises(PeerError, match="refused"):
                ask(visiting, other)


def test_on_an_interface() -> None:
    with start_session(timeout_s=20.0) as session:
        with pytest.raises(ConfigError, match="no network interface"):
            open_to_visitors(session, "nowhere0")
        assert open_to_visitors(session, "lo").addresses[0].endpoint.startswith("tcp://127.0.0.1:")
