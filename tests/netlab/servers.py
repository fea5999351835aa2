"""What tests do on emulated servers."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from scripts.netlab.base import LabSpec
from scripts.netlab.labs import NamespaceLab, open_lab
from scripts.netlab.servers import NamespaceServer

LIMIT_S = 60


def lab_of(servers: int, **more: Any) -> NamespaceLab:
    lab = open_lab(LabSpec(servers=servers, **more))
    assert isinstance(lab, NamespaceLab)
    return lab


def output(server: NamespaceServer, *command: str, **more: Any) -> str:
    """Run ``command`` on ``server``; it must succeed."""
    done = subprocess.run(
        server.inside(command), capture_output=True, text=True, timeout=LIMIT_S, check=False, **more
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def python(server: NamespaceServer, code: str) -> str:
    return output(server, sys.executable, "-I", "-S", "-c", code)


def reaches(server: NamespaceServer, address: str) -> bool:
    """Whether a connection to a port that nobody holds is refused by ``address``, rather than lost."""
    code = (
        "import socket\ntry:\n    socket.create_connection(('%s', 9), timeout=2)\n"
        "except ConnectionRefusedError:\n    print('there')\nexcept OSError as error:\n    print(error)"
    )
    return python(server, code % address) == "there"
