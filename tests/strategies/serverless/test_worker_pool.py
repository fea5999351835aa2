"""Checks of a worker pool before a worker is paid for."""

import pytest

from dglx_dist.errors import ConfigError
from dglx_dist.strategies.serverless.engine import check_reachable


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_functions_of_a_cloud_cannot_call_a_loopback_address(host: str) -> None:
    with pytest.raises(ConfigError, match=r"interface=NAME.*GLOO_SOCKET_IFNAME"):
        check_reachable(host, paid=True)
    check_reachable(host, paid=False)
    check_reachable("10.0.0.5", paid=True)
