"""What is known of a command once it has ended on a lab: cards, ledger, seconds, and what was emulated."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from dglx_dist.errors import StorageError
from scripts.netlab.base import Lab, label
from scripts.netlab.launch import LabRun
from scripts.netlab.traces import Trace, read
from scripts.netlab.witness import Witness, compare

FILE = "lab.json"


@dataclass(frozen=True, kw_only=True)
class LabOutcome:
    """One command on one lab."""

    label: str
    """What was emulated, for a heading: "namespaces, 100mbit between servers" or "loopback, ..."."""
    lab: dict[str, object]
    """What :meth:`Lab.describe` said."""
    command: tuple[str, ...]
    ranks_per_server: int
    run: LabRun
    trace: Trace
    """Of no session when the command opened none or did not end well."""
    trace_missing: str | None
    """Why the ranks' own counts are not there; None: they are, or no session was opened."""
    witnesses: tuple[Witness, ...]
    """(S + 1,) each server and their sum; empty on plain loopback."""

    @property
    def epoch_seconds(self) -> float | None:
        """Median over the epochs without the first, which warms up; of a single one itself, of none None."""
        seconds = self.trace.epoch_seconds()
        return median(seconds[1:] or seconds) if seconds else None

    def to_json(self) -> dict[str, object]:
        """Return JSON values."""
        return {
            "label": self.label,
            "lab": self.lab,
            "command": list(self.command),
            "ranks_per_server": self.ranks_per_server,
            "exit_code": self.run.exit_code,
            "failure": self.run.failure,
            "seconds": self.run.seconds,
            "epoch_seconds": self.trace.epoch_seconds(),
            "trace_missing": self.trace_missing,
            "cards_before": [asdict(card) for card in self.run.cards_before],
            "cards_after": [asdict(card) for card in self.run.cards_after],
            "servers": [_witness(one) for one in self.witnesses if one.server is not None],
            "sum": next((_witness(one) for one in self.witnesses if one.server is None), None),
            "ledger_outside": {
                str(server): {"sent": sent, "received": received}
                for server, (sent, received) in self.trace.ledger_outside_by_server().items()
            },
        }


def find_outcome(lab: Lab, command: Sequence[str], ranks_per_server: int, run: LabRun) -> LabOutcome:
    """Put together what is known of ``run``; a trace that cannot be read is told, not raised."""
    trace, missing = Trace(sessions=()), None
    if run.trace_folder is not None:
        try:
            trace = read(run.trace_folder)
        except StorageError as error:
            missing = str(error)
    return LabOutcome(
        label=label(lab),
        lab=lab.describe(),
        command=tuple(command),
        ranks_per_server=ranks_per_server,
        run=run,
        trace=trace,
        trace_missing=missing,
        witnesses=compare(run.cards_before, run.cards_after, trace),
    )


def write(outcome: LabOutcome, folder: Path) -> Path:
    """Write ``outcome`` to ``folder``/lab.json, which is replaced at once or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f"{FILE}.part"
    unfinished.write_text(json.dumps(outcome.to_json(), indent=2) + "\n")
    return unfinished.replace(folder / FILE)


def _witness(one: Witness) -> dict[str, object]:
    return {
        "server": one.server,
        "card": asdict(one.card),
        "ledger": asdict(one.ledger),
        "ratio": one.ratio,
        "verdict": one.verdict,
    }
