"""Reads the traces of a command's ranks, and compares the ledger with the counters of network cards.

All bytes of a server's card are compared with all payload that the ledger has between this server and
others, both directions together, as acknowledgements go the other way. docs/development/netlab.md,
"Validation", says what the card has beside; traffic on a server's loopback goes through no card, nor does
the ledger count it as outside.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Literal

from dglx_dist.comm.ledger import WORKER, LedgerRow
from dglx_dist.comm.trace import UNFINISHED, Pass
from dglx_dist.errors import ConfigError, StorageError
from dglx_dist.records import EpochRecord
from scripts.json_records import read_record
from scripts.netlab.base import Card, Lab
from scripts.netlab.launch import LabRun
from scripts.out_files import make_folder, write_text, writing_to

_NAME = re.compile(r"rank-(\d+)(?:\.(\d+))?\.json")


@dataclass(frozen=True, kw_only=True)
class RankTrace:
    """Trace of one rank for one session."""

    job: str
    """Equal on all ranks of the session."""
    rank: int
    world_size: int
    server_of_rank: tuple[int, ...]
    failed: bool
    ledger: tuple[LedgerRow, ...]
    """Rows that this rank counted: data sent in collectives, and both directions of one-sided calls."""
    passes: tuple[Pass, ...]
    epochs: tuple[EpochRecord, ...]


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Traces of all ranks of a command, by session."""

    sessions: tuple[tuple[RankTrace, ...], ...]
    """In their order on rank 0; each has all its ranks, by rank. None: the command opened no session."""

    @property
    def num_servers(self) -> int:
        """S of the largest session; 0 without one."""
        return max((ranks[0].server_of_rank[-1] + 1 for ranks in self.sessions), default=0)

    def ledger_outside_by_server(self) -> dict[int, tuple[int, int]]:
        """Return {server: (sent, received)}: payload bytes to and from others, workers too, all sessions."""
        sent = dict.fromkeys(range(self.num_servers), 0)
        received = dict(sent)
        for ranks in self.sessions:
            server = ranks[0].server_of_rank
            for row in (row for rank in ranks for row in rank.ledger if not row.inside):
                if row.source != WORKER:
                    sent[server[row.source]] += row.num_bytes
                if row.destination != WORKER:
                    received[server[row.destination]] += row.num_bytes
        return {server: (sent[server], received[server]) for server in sent}

    def epoch_seconds(self) -> list[float]:
        """Return the wall clock of each epoch, in order, the slowest rank's.

        Epochs of ``fit``; where a session has a loop of its own, whole passes of its first loader.
        """
        return [seconds for ranks in self.sessions for seconds in _epoch_seconds(ranks)]


def read_trace(folder: str | Path) -> Trace:
    """Read the files of ``folder``; no session where there is no folder or nothing in it.

    Raises:
        StorageError: a file is damaged, or a rank is missing or did not end; the message names it.
    """
    ranks: dict[tuple[int, int], RankTrace] = {}
    for path in sorted(Path(folder).glob("rank-*")):
        if path.name.endswith(UNFINISHED):
            raise StorageError(
                f"{str(path).removesuffix(UNFINISHED)} was never written: its rank still runs, or it was "
                "killed; look at its output"
            )
        name = _NAME.fullmatch(path.name)
        if name is not None:
            ranks[int(name[2] or 0), int(name[1])] = _read_rank(path, int(name[1]))
    jobs = dict.fromkeys(ranks[key].job for key in sorted(ranks))
    return Trace(sessions=tuple(_complete(folder, job, list(ranks.values())) for job in jobs))


def _complete(folder: str | Path, job: str, found: Sequence[RankTrace]) -> tuple[RankTrace, ...]:
    ranks = tuple(sorted((rank for rank in found if rank.job == job), key=lambda rank: rank.rank))
    first = ranks[0]
    missing = sorted(set(range(first.world_size)) - {rank.rank for rank in ranks})
    if missing:
        raise StorageError(
            f"{folder} has no trace of rank {', '.join(map(str, missing))} of {first.world_size}; do all "
            "servers see this folder, and did the rank end?"
        )
    if len(ranks) > first.world_size or any(rank.server_of_rank != first.server_of_rank for rank in ranks):
        raise StorageError(f"{folder}: the ranks of session {job} do not fit together; use an empty folder")
    return ranks


def _epoch_seconds(ranks: Sequence[RankTrace]) -> list[float]:
    if ranks[0].epochs:
        return [record.seconds for record in ranks[0].epochs]
    loader = min((done.loader for done in ranks[0].passes), default=0)
    by_rank = [[done.seconds for done in rank.passes if done.loader == loader] for rank in ranks]
    # A rank that was interrupted in a pass has not noted it.
    return [max(seconds) for seconds in zip(*by_rank, strict=False)]


def _read_rank(path: Path, rank: int) -> RankTrace:
    try:
        trace: RankTrace = read_record(RankTrace, json.loads(path.read_text(encoding="utf-8")))
        ranks = (WORKER, *range(trace.world_size))
        if trace.rank != rank or len(trace.server_of_rank) != trace.world_size or not ranks[1:]:
            raise ValueError(f"rank {trace.rank} of {trace.world_size} on servers {trace.server_of_rank}")
        if any(row.source not in ranks or row.destination not in ranks for row in trace.ledger):
            raise ValueError("its ledger has a rank that there is not")
    except (OSError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise StorageError(f"{path} is damaged ({error}); run the command again") from error
    return trace


TOLERANCE = 0.08
MIN_BYTES = 4_000_000
"""Below it, meeting each other and keeping in touch are too much of the traffic."""

Verdict = Literal["agrees", "differs", "too little traffic to compare"]


@dataclass(frozen=True, kw_only=True)
class Witness:
    """Bytes of one server by its network card and by the ledger."""

    server: int | None
    """None: the sum over all servers."""
    card: Card
    """Bytes between the two readings, headers included."""
    ledger: Card
    """Payload to and from other servers."""

    @property
    def ratio(self) -> float | None:
        """Card over ledger, both directions together; None where the ledger has nothing."""
        payload = self.ledger.sent + self.ledger.received
        return (self.card.sent + self.card.received) / payload if payload else None

    @property
    def verdict(self) -> Verdict:
        """Whether both say the same, within 8 %."""
        if self.ledger.sent + self.ledger.received < MIN_BYTES or self.ratio is None:
            return "too little traffic to compare"
        return "agrees" if abs(self.ratio - 1) <= TOLERANCE else "differs"


def compare(cards_before: Sequence[Card], cards_after: Sequence[Card], trace: Trace) -> tuple[Witness, ...]:
    """Hold each card against the ledger: (S + 1,), one for each server, then their sum; none without cards.

    ConfigError: the cards, (S,) read before and after the command, are not those of the trace's servers.
    """
    if not cards_before and not cards_after:
        return ()
    if not len(cards_before) == len(cards_after) >= trace.num_servers:
        raise ConfigError(
            f"{len(cards_before)} and {len(cards_after)} cards cannot be held against the ledger of "
            f"{trace.num_servers} servers; is DGLX_RANKS_PER_SERVER set inside the lab? unset it"
        )
    # Sent and received, by the card and by the ledger, of each server and of all.
    payload, rows = trace.ledger_outside_by_server(), list[tuple[int, ...]]()
    for server, (before, after) in enumerate(zip(cards_before, cards_after, strict=True)):
        counted = after.sent - before.sent, after.received - before.received
        rows.append((*counted, *payload.get(server, (0, 0))))
    servers = [*range(len(rows)), None]
    rows.append(tuple(map(sum, zip(*rows, strict=True))))
    return tuple(
        Witness(server=server, card=Card(sent=a, received=b), ledger=Card(sent=c, received=d))
        for server, (a, b, c, d) in zip(servers, rows, strict=True)
    )


@dataclass(frozen=True, kw_only=True)
class LabOutcome:
    """One command on one lab."""

    lab: dict[str, object]
    """Result of :meth:`Lab.describe`. Its ``label`` is for headings."""
    command: tuple[str, ...]
    ranks_per_server: int
    run: LabRun
    trace: Trace
    """Traces of the sessions. Empty if the command opened none or failed."""
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
        done = asdict(self.run)
        done.pop("trace_folder")
        witnesses = [
            {**asdict(witness), "ratio": witness.ratio, "verdict": witness.verdict}
            for witness in self.witnesses
        ]
        return {
            "label": self.lab["label"],
            "lab": self.lab,
            "command": list(self.command),
            "ranks_per_server": self.ranks_per_server,
            **done,
            "epoch_seconds": self.trace.epoch_seconds(),
            "trace_missing": self.trace_missing,
            "servers": witnesses[:-1],
            "sum": witnesses[-1] if witnesses else None,
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
            trace = read_trace(run.trace_folder)
        except StorageError as error:
            missing = str(error)
    return LabOutcome(
        lab=lab.describe(),
        command=tuple(command),
        ranks_per_server=ranks_per_server,
        run=run,
        trace=trace,
        trace_missing=missing,
        witnesses=compare(run.cards_before, run.cards_after, trace),
    )


def make_out(out: Path) -> None:
    """Make ``out`` and what is below it, without the traces and logs of an earlier command."""
    make_folder(out)
    make_folder(out / "trace")
    with writing_to(out):
        # Earlier traces would be taken for further sessions of this one.
        for earlier in (*out.glob("trace/rank-*"), *out.glob("server-*.log")):
            earlier.unlink()


def write_outcome(outcome: LabOutcome, folder: Path) -> Path:
    """Write ``outcome`` to ``folder``/lab.json, which is replaced at once or not at all."""
    return write_text(folder / "lab.json", json.dumps(outcome.to_json(), indent=2) + "\n")
