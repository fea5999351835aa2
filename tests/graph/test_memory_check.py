from __future__ import annotations

import numpy as np
import pytest

from dglx_dist.comm.session import start_session
from dglx_dist.comm.topology import Topology
from dglx_dist.errors import ConfigError
from dglx_dist.graph import shared_memory


def test_what_fits_passes_and_one_byte_more_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with start_session(topology=Topology(0, 1, (0,))) as session:
        monkeypatch.setattr(shared_memory.psutil, "virtual_memory", lambda: Free(1000))
        shared_memory.check_memory(session, np.array([0, 10]), 100, "it", "use less")
        with pytest.raises(ConfigError, match=r"it needs 0\.000 GB for 10 rows of 101 bytes on .*; use less"):
            shared_memory.check_memory(session, np.array([0, 10]), 101, "it", "use less")


class Free:
    def __init__(self, available: int) -> None:
        self.available = available
