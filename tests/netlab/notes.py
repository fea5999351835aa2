"""Notes of labs that were never made."""

from __future__ import annotations

import os
from typing import Any

from scripts.netlab import state
from scripts.netlab.base import LabSpec
from scripts.netlab.servers import Process, find_process
from scripts.netlab.state import LabState

NOBODY = Process(pid=2**22 - 1, started=1)


def noted(name: str, **more: Any) -> LabState:
    """Notes of a lab of this process, without a server."""
    values: dict[str, Any] = {
        "spec": LabSpec(servers=1),
        "held": "process",
        "owner": find_process(os.getpid()),
        "boot": state.boot_id(),
        "created": "2026-01-01T00:00:00+00:00",
        **more,
    }
    return LabState(name=name, **values)
