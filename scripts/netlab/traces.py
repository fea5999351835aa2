"""Reading what the ranks of a command left with DGLX_TRACE (``comm/trace.py``)."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dglx_dist.comm.ledger import WORKER, LedgerRow
from dglx_dist.comm.trace import UNFINISHED, Pass
from dglx_dist.data.storage.manifest import Fields
from dglx_dist.errors import StorageError
from dglx_dist.records import EpochRecord

_NAME = re.compile(r"rank-(\d+)(?:\.(\d+))?\.json")
_WHOLE = ("epoch", "num_samples", "bytes_inside", "bytes_outside", "cache_hits", "cache_misses")


@dataclass(frozen=True, kw_only=True)
class RankTrace:
    """What one rank left of one session."""

    job: str
    """Equal on all ranks of the session."""
    rank: int
    world_size: int
    server_of_rank: tuple[int, ...]
    failed: bool
    ledger: tuple[LedgerRow, ...]
    """What this rank counted: what it sent in collectives, and both directions of its one-sided calls."""
    passes: tuple[Pass, ...]
    epochs: tuple[EpochRecord, ...]


@dataclass(frozen=True, kw_only=True)
class Trace:
    """What all ranks of a command left, session by session."""

    sessions: tuple[tuple[RankTrace, ...], ...]
    """In their order on rank 0; each has all its ranks, by rank. None: the command opened no session."""

    @property
    def num_servers(self) -> int:
        """S of the largest session; 0 without one."""
        return max((ranks[0].server_of_rank[-1] + 1 for ranks in self.sessions), default=0)

    @property
    def failed(self) -> bool:
        """Whether a rank's session ended as one that failed."""
        return any(rank.failed for ranks in self.sessions for rank in ranks)

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


def read(folder: str | Path) -> Trace:
    """Read the files of ``folder``; no session where there is no folder or nothing in it.

    Raises:
        StorageError: a file is damaged, or a rank is missing or did not end; the message names it.
    """
    found: dict[tuple[int, int], RankTrace] = {}
    for path in sorted(Path(folder).glob("rank-*")):
        if path.name.endswith(UNFINISHED):
            raise StorageError(
                f"{str(path).removesuffix(UNFINISHED)} was never written: its rank still runs, or it was "
                "killed; look at its output"
            )
        name = _NAME.fullmatch(path.name)
        if name is not None:
            found[int(name[2] or 0), int(name[1])] = _read_rank(path, int(name[1]))
    jobs = dict.fromkeys(found[key].job for key in sorted(found))
    return Trace(sessions=tuple(_complete(folder, job, list(found.values())) for job in jobs))


def _complete(folder: str | Path, job: str, found: Sequence[RankTrace]) -> tuple[RankTrace, ...]:
    ranks = tuple(sorted((rank for rank in found if rank.job == job), key=lambda one: one.rank))
    first = ranks[0]
    missing = sorted(set(range(first.world_size)) - {one.rank for one in ranks})
    if missing:
        raise StorageError(
            f"{folder} has no trace of rank {', '.join(map(str, missing))} of {first.world_size}; do all "
            "servers see this folder, and did the rank end?"
        )
    if len(ranks) > first.world_size or any(one.server_of_rank != first.server_of_rank for one in ranks):
        raise StorageError(f"{folder}: the ranks of session {job} do not fit together; use an empty folder")
    return ranks


def _epoch_seconds(ranks: Sequence[RankTrace]) -> list[float]:
    if ranks[0].epochs:
        return [record.seconds for record in ranks[0].epochs]
    loader = min((done.loader for done in ranks[0].passes), default=0)
    by_rank = [[done.seconds for done in one.passes if done.loader == loader] for one in ranks]
    # A rank that was interrupted in a pass has not noted it.
    return [max(seconds) for seconds in zip(*by_rank, strict=False)]


def _read_rank(path: Path, rank: int) -> RankTrace:
    try:
        fields = Fields(json.loads(path.read_text(encoding="utf-8")), str(path))
    except (OSError, ValueError, RecursionError) as error:
        raise StorageError(f"{path} is damaged ({error}); run the command again") from error
    world_size = fields.integer("world_size", at_least=1)
    return RankTrace(
        job=fields.text("job"),
        rank=fields.choice("rank", [rank]),
        world_size=world_size,
        server_of_rank=tuple(fields.integers("server_of_rank", count=world_size)),
        failed=fields.choice("failed", [True, False]),
        ledger=tuple(_row(row, world_size) for row in fields.records("ledger")),
        passes=tuple(_pass(done) for done in fields.records("passes")),
        epochs=tuple(_epoch(epoch) for epoch in fields.records("epochs")),
    )


def _row(fields: Fields, world_size: int) -> LedgerRow:
    return LedgerRow(
        phase=fields.text("phase"),
        layer=fields.integer("layer"),
        source=fields.choice("source", (WORKER, *range(world_size))),
        destination=fields.choice("destination", (WORKER, *range(world_size))),
        inside=fields.choice("inside", [True, False]),
        num_bytes=fields.integer("num_bytes", at_least=0),
    )


def _pass(fields: Fields) -> Pass:
    return Pass(
        loader=fields.integer("loader", at_least=0),
        steps=fields.integer("steps", at_least=0),
        seconds=_number(fields, "seconds"),
        wait_s=_number(fields, "wait_s"),
    )


def _epoch(fields: Fields) -> EpochRecord:
    values: dict[str, float | int | None] = {}
    for field in dataclasses.fields(EpochRecord):
        if field.name in _WHOLE:
            values[field.name] = fields.integer(field.name, at_least=0)
        elif field.name in ("loss", "val_accuracy") and fields.value(field.name) is None:
            values[field.name] = math.nan if field.name == "loss" else None
        else:
            values[field.name] = _number(fields, field.name)
    return EpochRecord(**values)  # type: ignore[arg-type]  # each checked above, by its name


def _number(fields: Fields, key: str) -> float:
    value = fields.value(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise fields.wrong(key, "a number")
    return float(value)
