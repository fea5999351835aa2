"""What a rank leaves of a run for whoever measures it: its ledger, its epochs, its passes over the data.

With DGLX_TRACE=FOLDER in the environment every session writes ``FOLDER/rank-<r>.json`` when it ends, also
when it failed; a second session of the same rank ``rank-<r>.1.json``, and so on: nothing is overwritten.
Without it no session has a :class:`TraceWriter`. ``scripts/netlab/traces.py`` reads the folder.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import final

from dglx_dist.cluster.ledger import Ledger
from dglx_dist.cluster.topology import Topology
from dglx_dist.errors import ConfigError
from dglx_dist.records import EpochRecord

log = logging.getLogger(__name__)

UNFINISHED = ".part"
"""End of the name of a file whose session has not ended: it still runs, or was killed."""


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One whole pass of a loader over its items."""

    loader: int
    """0 for the first loader that the session made, and so on."""
    steps: int
    seconds: float
    """Wall clock from the first batch asked for to the last one used."""
    wait_s: float
    """What of it the consumer waited for the loader."""


@final
class TraceWriter:
    """Collects what one rank notes in one session; :meth:`write` once at the end.

    Args:
        folder: Made if need be. The file is reserved there at once, so that one that cannot be written is
            known before the work, not after it.
        rank: Of this process.

    Raises:
        ConfigError: the folder cannot be made or written.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._rank = rank
        self._path = _reserved(folder, rank)
        self._epochs: list[Mapping[str, object]] = []
        self._passes: list[Pass] = []
        self._num_loaders = 0

    def new_loader(self) -> int:
        """Return the number of a loader that was just made."""
        self._num_loaders += 1
        return self._num_loaders - 1

    def note_pass(self, done: Pass) -> None:
        """Keep one whole pass of a loader."""
        self._passes.append(done)

    def note_epoch(self, record: EpochRecord) -> None:
        """Keep one epoch of training."""
        values = asdict(record)
        # JSON has no word for a loss that is not a number.
        self._epochs.append(values | {"loss": record.loss if math.isfinite(record.loss) else None})

    def write(self, job: str, topology: Topology, ledger: Ledger, *, failed: bool) -> None:
        """Write the file; what goes wrong is logged, because the work that it tells of is done.

        Args:
            job: Equal on all ranks of a session, and on no other session.
            topology: This rank's.
            ledger: What this rank counted.
            failed: Whether the session ended as one that failed.
        """
        values = {
            "job": job,
            "rank": self._rank,
            "server": topology.server,
            "world_size": topology.world_size,
            "server_of_rank": topology.server_of_rank,
            "failed": failed,
            "ledger": [asdict(row) for row in ledger.rows()],
            "passes": [asdict(done) for done in self._passes],
            "epochs": self._epochs,
        }
        part = _part_of(self._path)
        try:
            part.write_text(json.dumps(values) + "\n", encoding="utf-8")
            part.replace(self._path)
        except OSError as error:
            log.warning("the trace %s of rank %d could not be written: %s", self._path, self._rank, error)


def open_trace(folder: Path | None, rank: int) -> tuple[TraceWriter | None, str]:
    """Return the writer, None without ``folder``; or why there is none, which all ranks must hear."""
    if folder is None:
        return None, ""
    try:
        return TraceWriter(folder, rank), ""
    except ConfigError as error:
        return None, str(error)


def _reserved(folder: Path, rank: int) -> Path:
    """Return the name of a new file of ``rank``, kept free by an empty file beside it."""
    number = 0
    try:
        folder.mkdir(parents=True, exist_ok=True)
        while True:
            path = folder / (f"rank-{rank}.{number}.json" if number else f"rank-{rank}.json")
            number += 1
            with contextlib.suppress(FileExistsError):
                os.close(os.open(_part_of(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
                # Looked at last: another session may have given its reserved file the final name meanwhile.
                if not path.exists():
                    return path
                _part_of(path).unlink()
    except OSError as error:
        raise ConfigError(
            f"DGLX_TRACE={str(folder)!r}: rank {rank} cannot write its trace there ({error}); name a folder "
            "that every rank can write, or unset it"
        ) from error


def _part_of(path: Path) -> Path:
    return path.with_name(path.name + UNFINISHED)
