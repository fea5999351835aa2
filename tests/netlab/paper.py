"""A lab that is only written down, and ranks that leave what they would on its links."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from dglx_dist.comm.ledger import Ledger
from dglx_dist.comm.topology import Topology
from dglx_dist.comm.trace import TraceWriter
from dglx_dist.planner.records import Rate
from scripts.netlab.base import Card, Lab, LabSpec, Server
from scripts.netlab.launch import LabRun
from tests.netlab.traces import epoch

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
        return ended(0, None)

    return run


def ended(code: int, failure: str | None) -> LabRun:
    return LabRun(
        exit_code=code, seconds=1.0, cards_before=(), cards_after=(), trace_folder=None, failure=failure
    )
