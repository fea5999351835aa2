"""Records of a training run beside its metrics: trace file, bytes by pair, TensorBoard, live table."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import Any, final
from urllib.parse import urlsplit

from dglx_dist.comm.collectives import Clock, broadcast_json, gather_json, measure_clock, run_on_all_ranks
from dglx_dist.comm.ledger import LedgerRow
from dglx_dist.comm.session import Session
from dglx_dist.comm.trace import (
    RankSpans,
    Span,
    TraceFile,
    check_replaceable,
    remove_trace,
    shifted_by,
    write_trace,
)
from dglx_dist.data.storage.files import readable_bytes, resident
from dglx_dist.errors import StorageError
from dglx_dist.records import EpochRecord

log = logging.getLogger(__name__)

SENT = "sent "
"""Prefix of the names of :func:`bytes_by_pair`."""


def check_trace(path: Path, session: Session) -> None:
    """Raise StorageError before training, on all ranks, if the trace cannot be written. Collective."""
    run_on_all_ranks(session, lambda: check_replaceable(path) if session.topology.rank == 0 else None)


def path_of_rank(path: Path, rank: int) -> Path:
    """Return the path of the trace of one ``rank`` after a failure: ``trace.rank-2.json``."""
    return path.with_name(f"{path.stem}.rank-{rank}{path.suffix}")


@contextmanager
def recording(file: str | Path | None, num_steps: int, session: Session) -> Iterator[Callable[[], None]]:
    """Record the first steps of the block, and write the trace at its end. Collective.

    Rank 0 writes it, replacing an earlier one; after a failure each rank writes its own part on its own
    machine, see :func:`path_of_rank`.

    Yields a function to call after each step. Nothing is recorded without ``file``, or while another
    recording is active. StorageError: the trace cannot be written; before the block if possible.
    """
    if file is None or session.timeline.on:
        yield lambda: None
        return
    path = Path(file).absolute()
    check_trace(path, session)
    # The trace of an earlier run that failed would mislead beside the new one.
    run_on_all_ranks(session, lambda: remove_trace(path_of_rank(path, session.topology.rank)))
    recorder = _Recorder(path, num_steps, session, measure_clock(session))
    session.timeline.start()
    try:
        yield recorder.step
        session.timeline.on = False
        trace = recorder.gather()
    except BaseException:
        session.timeline.on = False
        recorder.write_own()
        raise
    run_on_all_ranks(session, lambda: write_trace(path, trace) if trace is not None else None)


@final
class _Recorder:
    """Counts steps and gathers the timelines of all ranks."""

    def __init__(self, path: Path, num_steps: int, session: Session, clock: Clock) -> None:
        self._path, self._num_steps, self._session, self._clock = path, num_steps, session, clock
        self._steps = 0

    def step(self) -> None:
        self._steps += 1
        if self._steps == self._num_steps:
            self._session.timeline.on = False

    def gather(self) -> TraceFile | None:
        """Return the trace of all ranks on rank 0, None on the others. Collective."""
        session, own, ranks = self._session, asdict(self._own()), []
        for source in range(session.topology.world_size):
            # One after the other: the spans of a rank may have megabytes.
            one: Any = broadcast_json(own, session, source)
            if session.topology.rank == 0:
                ranks.append(RankSpans(**one | {"spans": tuple(Span(**span) for span in one["spans"])}))
        return self._trace(ranks) if ranks else None

    def write_own(self) -> None:
        # A failure is only logged, so that it does not hide the error that ended training.
        path = path_of_rank(self._path, self._session.topology.rank)
        try:
            check_replaceable(path)
            write_trace(path, self._trace([self._own()]))
        except StorageError as error:
            log.warning("%s", error)
        else:
            log.warning("training failed; the trace of this rank is in %s", path)

    def _own(self) -> RankSpans:
        rank, timeline = self._session.topology.rank, self._session.timeline
        return RankSpans(
            rank=rank,
            host=self._session.hosts[rank],
            spans=shifted_by(tuple(timeline.spans), self._clock.offset_s),
            clock_error_s=self._clock.error_s,
            dropped=timeline.dropped,
        )

    def _trace(self, ranks: Sequence[RankSpans]) -> TraceFile:
        topology = self._session.topology
        facts = {
            "strategy": self._session.strategy,
            "options": without_keys(self._session.options),
            "seed": self._session.seed,
            "ranks": topology.world_size,
            "servers": topology.num_servers,
            "steps": self._steps,
            "steps_recorded": min(self._steps, self._num_steps),
            "versions": {name: metadata.version(name) for name in ("dglx_dist", "torch", "dgl")},
        }
        return TraceFile(ranks=tuple(ranks), facts=facts)


def bytes_by_pair(rows: Iterable[LedgerRow]) -> dict[str, int]:
    """Return the bytes of ledger ``rows`` by ``sent SOURCE DESTINATION PHASE``, over all layers."""
    found: Counter[str] = Counter()
    for row in rows:
        found[f"{SENT}{row.source} {row.destination} {row.phase}"] += row.num_bytes
    return dict(found)


def traffic_of(sent: Mapping[str, float], session: Session) -> dict[str, list[list[int]]]:
    """Sum :func:`bytes_by_pair` over all ranks: phase -> [source, destination, bytes]. Collective."""
    ranks: Any = gather_json(sent, session)
    total = sum(map(Counter, ranks), Counter[str]())
    found: dict[str, list[list[int]]] = {}
    for name, num_bytes in total.items():
        source, destination, phase = name.removeprefix(SENT).split(" ", 2)
        found.setdefault(phase, []).append([int(source), int(destination), num_bytes])
    return {phase: sorted(found[phase]) for phase in sorted(found)}


def scalars_writer(folder: str | Path | None, epoch: int, session: Session) -> Callable[[EpochRecord], None]:
    """Return a callback that writes figures for TensorBoard, in place of earlier ones from ``epoch`` on.

    It does nothing without ``folder``. Collective. StorageError: it cannot be written.
    """

    def start() -> Any:
        if folder is None or session.topology.rank > 0:
            return None
        # Imported here: an extra, which takes seconds.
        from torch.utils.tensorboard import SummaryWriter

        try:
            return SummaryWriter(str(folder), purge_step=epoch)
        except OSError as error:
            raise StorageError(f"cannot write for TensorBoard to {folder}: {error}; name another") from error

    def write(record: EpochRecord) -> None:
        for name, value in record.scalars().items():
            writer.add_scalar(name, value, record.epoch)
        writer.flush()

    writer: Any = run_on_all_ranks(session, start)
    return (lambda _: None) if writer is None else write


@final
class LiveFigures:
    """Figures of a run under way, from step ``begin`` of all to ``end``, as rank 0 sees it."""

    def __init__(self, begin: int, end: int, steps: int, session: Session) -> None:
        self._step, self._end, self._steps, self._session = begin, end, steps, session
        self._times, self._samples = deque([time.monotonic()], maxlen=64), 0

    def end_step(self) -> None:
        self._times.append(time.monotonic())
        self._step += 1

    def end_epoch(self, record: EpochRecord) -> None:
        self._samples = record.num_samples

    def now(self) -> dict[str, str]:
        """Return name -> value, with the speed of the last steps; may be called from another thread."""
        times = list(self._times)
        speed = (len(times) - 1) / max(times[-1] - times[0], 1e-9)
        return {
            "epoch": str(self._step // self._steps),
            "step": f"{self._step % self._steps}/{self._steps}",
            "steps/s": f"{speed:.3g}",
            "samples/s": f"{speed * self._samples / self._steps:.0f}" if self._samples else "",
            "time left": str(timedelta(seconds=round((self._end - self._step) / speed))) if speed else "",
            "memory (rank 0)": readable_bytes(resident()),
            "bytes (rank 0)": readable_bytes(self._session.ledger.total()),
        }


def without_keys(options: Mapping[str, object]) -> dict[str, object]:
    """Return options without values that may be credentials: mappings as names, URLs as host and path.

    Headers and URLs of a functions endpoint may have keys, and traces are shared.
    """
    return {name: _without_keys(value) for name, value in options.items()}


def _without_keys(value: object) -> object:
    if isinstance(value, Mapping):
        return sorted(map(str, value))
    if isinstance(value, str) and "://" in value:
        address = urlsplit(value)
        return f"{address.scheme}://{address.netloc.rpartition('@')[2]}{address.path}"
    return value


def over_ranks(ranks: Sequence[Any], epoch: int) -> EpochRecord:
    """Sum counts and bytes; take the slowest rank's seconds, and phases as means over the ``ranks``.

    Ranks in lock-step wait and exchange at different times, so the sum of the longest phases would exceed the
    epoch. Compute is the remainder.
    """

    def total(name: str) -> Any:
        return sum(row[name] for row in ranks)

    def mean(name: str) -> float:
        return float(total(name)) / len(ranks)

    seconds = max(row["seconds"] for row in ranks)
    targets = total("targets")
    return EpochRecord(
        epoch=epoch,
        loss=total("loss") / targets if targets else math.nan,
        train_accuracy=total("correct") / targets if targets else math.nan,
        val_accuracy=None,
        seconds=seconds,
        num_samples=targets,
        sample_s=mean("sample_s"),
        fetch_s=mean("fetch_s"),
        wait_s=mean("wait_s"),
        compute_s=max(0.0, seconds - mean("wait_s") - mean("exchange_s")),
        exchange_s=mean("exchange_s"),
        bytes_inside=total("inside"),
        bytes_outside=total("outside"),
        checkpoint_s=max(row.get("checkpoint_s", 0.0) for row in ranks),
        cache_hits=sum(row.get("hits", 0) for row in ranks),
        cache_misses=sum(row.get("misses", 0) for row in ranks),
    )
