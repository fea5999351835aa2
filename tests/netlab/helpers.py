"""Helpers of the tests of labs: scripts for ranks, notes, traces, a fake lab, commands on servers."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import psutil

from dglx_dist.comm.ledger import Ledger, LedgerRow
from dglx_dist.comm.topology import Topology
from dglx_dist.comm.trace import Pass, TraceWriter
from dglx_dist.planner.records import Rate
from dglx_dist.records import EpochRecord
from scripts.netlab import state
from scripts.netlab.base import Card, Lab, LabSpec, Server
from scripts.netlab.labs import NamespaceLab, open_lab
from scripts.netlab.launch import LabRun
from scripts.netlab.servers import NamespaceServer, Process, find_process
from scripts.netlab.state import LabState
from scripts.netlab.traces import RankTrace, Trace
from tests.bench.helpers import epoch

WHO = """\
import os, sys
names = ("RANK", "WORLD_SIZE", "GROUP_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME")
words = ("who", *(os.environ[name] for name in names), str(sorted(os.sched_getaffinity(0))), *sys.argv[1:])
# In one piece: output is not buffered, and another rank writes to the same pipe.
sys.stdout.write(" ".join(words) + "\\n")
sys.stderr.write(f"error of {os.environ['RANK']}\\n")
"""
WAITS = """\
import os, time
print("waits", os.environ["RANK"], flush=True)
time.sleep(1000)
"""


def script(folder: Path, text: str) -> str:
    path = folder / "ranks.py"
    path.write_text(text)
    return str(path)


def processes_with(word: str) -> list[str]:
    lines = (" ".join(item.info["cmdline"] or ()) for item in psutil.process_iter(["cmdline"]))
    return [line for line in lines if word in line]


def wait_until_gone(word: str, timeout_s: float = 20.0) -> list[str]:
    deadline = time.monotonic() + timeout_s
    while (left := processes_with(word)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


NOBODY = Process(pid=2**22 - 1, started=1)


def make_state(name: str, **more: Any) -> LabState:
    values: dict[str, Any] = {
        "spec": LabSpec(servers=1),
        "held": "process",
        "owner": find_process(os.getpid()),
        "boot": state.boot_id(),
        "created": "2026-01-01T00:00:00+00:00",
        **more,
    }
    return LabState(name=name, **values)


def row(source: int, destination: int, num_bytes: int, *, inside: bool = False) -> LedgerRow:
    return LedgerRow(
        phase="features", layer=1, source=source, destination=destination, inside=inside, num_bytes=num_bytes
    )


def rank_trace(
    rank: int,
    server_of_rank: Sequence[int],
    *,
    job: str = "a",
    ledger: Sequence[LedgerRow] = (),
    passes: Sequence[Pass] = (),
    epochs: Sequence[EpochRecord] = (),
) -> RankTrace:
    return RankTrace(
        job=job,
        rank=rank,
        world_size=len(server_of_rank),
        server_of_rank=tuple(server_of_rank),
        failed=False,
        ledger=tuple(ledger),
        passes=tuple(passes),
        epochs=tuple(epochs),
    )


def trace_of(server_of_rank: Sequence[int], ledgers: Sequence[Sequence[LedgerRow]]) -> Trace:
    ranks = [rank_trace(rank, server_of_rank, ledger=rows) for rank, rows in enumerate(ledgers)]
    return Trace(sessions=(tuple(ranks),))


COMPUTE_S, BYTES = 2.0, 10_000_000


class PaperLab(Lab):
    """Two servers that are only written down."""

    def __init__(self, spec: LabSpec) -> None:
        self.name, self.spec, self.missing = "paper", spec, None
        self.kind: Literal["namespaces", "loopback"] = "namespaces"
        self.servers: tuple[Server, ...] = ()
        self.set: list[tuple[Rate | None, Rate | None]] = []

    def set_rates(self, external: Rate | None, internal: Rate | None) -> None:
        self.set.append((external, internal))
        self.spec = replace(self.spec, external=external, internal=internal)

    def cards(self) -> tuple[Card, ...]:
        return ()

    def describe(self) -> dict[str, object]:
        return {"kind": self.kind, "name": self.name}

    def close(self) -> None:
        pass


def ranks_that_train(epochs: int) -> Callable[..., LabRun]:
    """Stands in for ``launch.run``: leaves what two ranks would on links of the lab's rate."""

    def run(lab: Lab, command: Sequence[str], *, trace: Path, log_folder: Path, **_options: Any) -> LabRun:
        rate = lab.spec.external
        seconds = COMPUTE_S + (0.0 if rate is None else BYTES * 8 / rate.bits_per_s)
        for rank in range(2):
            writer, topology = TraceWriter(trace, rank), Topology(rank, 2, (0, 1))
            for number in range(epochs):
                # The first is slow for reasons of its own.
                took = replace(epoch(number, seconds), bytes_outside=2 * BYTES)
                writer.note_epoch(took if number else replace(took, seconds=9 * seconds, bytes_outside=1))
            writer.write("a", topology, Ledger(topology), failed=False)
        return make_run(0, None)

    return run


def make_run(code: int, failure: str | None, **more: Any) -> LabRun:
    nothing: dict[str, Any] = {"cards_before": (), "cards_after": (), "trace_folder": None}
    return LabRun(exit_code=code, seconds=1.0, failure=failure, **nothing | more)


LIMIT_S = 60


def lab_of(servers: int, **more: Any) -> NamespaceLab:
    lab = open_lab(LabSpec(servers=servers, **more))
    assert isinstance(lab, NamespaceLab)
    return lab


def output(server: NamespaceServer, *command: str, **more: Any) -> str:
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
