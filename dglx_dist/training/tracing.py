"""Recording of a trace file of all ranks during training."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any, final
from urllib.parse import urlsplit

from dglx_dist.comm.collectives import Clock, broadcast_json, measure_clock, run_on_all_ranks
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
from dglx_dist.errors import StorageError

log = logging.getLogger(__name__)


def check_trace(path: Path, session: Session) -> None:
    """Raise StorageError before training, on all ranks, if the trace cannot be written. Collective."""
    run_on_all_ranks(session, lambda: check_replaceable(path) if session.topology.rank == 0 else None)


def path_of_rank(path: Path, rank: int) -> Path:
    """Return the path of the trace of one ``rank`` after a failure: ``trace.rank-2.json``."""
    return path.with_name(f"{path.stem}.rank-{rank}{path.suffix}")


@contextmanager
def recording(path: Path | None, num_steps: int, session: Session) -> Iterator[Callable[[], None]]:
    """Record the first steps of the block, and write the trace at its end. Collective.

    Rank 0 writes it, replacing an earlier one; after a failure each rank writes its own part on its own
    machine, see :func:`path_of_rank`.

    Yields a function to call after each step. Nothing is recorded without ``path``, or while another
    recording is active. StorageError: the trace cannot be written; before the block if possible.
    """
    if path is None or session.timeline.on:
        yield lambda: None
        return
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
