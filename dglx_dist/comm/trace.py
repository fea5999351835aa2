"""Traces: a timeline with spans, records from each rank's session, and trace files for a browser.

With DGLX_TRACE=FOLDER in the environment, every session writes ``FOLDER/rank-<r>.json`` when it ends, also
after a failure. A second session on the same rank writes ``rank-<r>.1.json``, and so on, without overwriting.
Otherwise sessions have no :class:`TraceWriter`. ``scripts/netlab/traces.py`` reads the folder.
"""

import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import chain, count
from pathlib import Path
from typing import Any, final

from dglx_dist.comm.ledger import Ledger
from dglx_dist.comm.topology import Topology
from dglx_dist.data.json_fields import Fields
from dglx_dist.data.storage.files import partial_folder, read_small_file, replace_atomically
from dglx_dist.errors import ConfigError, StorageError
from dglx_dist.records import EpochRecord

COMPUTE = "compute"
"""Trace row for the training loop."""
NETWORK = "network"
"""Row for data in transit."""
LOADER = "loader"
"""Row for the loader's threads."""
GRAPH_SERVER = "graph server"
"""Row for a graph server's tasks, if training runs in intervals."""
WORKER = "worker"
"""Row for workers' tasks."""
PARAMETER_SERVER = "parameter server"
"""Row for weight updates."""
WAIT = "wait"
"""Prefix for the names of spans in which a row waits."""
MAX_SPANS = 50_000


@dataclass(frozen=True, kw_only=True)
class Span:
    """A timed activity."""

    name: str
    """Name such as "forward M", "pull" or "wait for the pull"."""
    row: str
    """The drawing's row, such as "compute", "network" or "loader"."""
    begin_s: float
    """Begin in this process's ``time.perf_counter()``."""
    end_s: float
    batch: int | None
    """Number of the mini-batch, if any. If all nodes are one batch, the epoch."""
    interval: int | None = None
    """Number of the node interval over all graph servers, if any."""


@final
class Timeline:
    """Collects up to ``max_spans`` spans on this rank while it is on, and counts the others. Thread-safe."""

    def __init__(self, max_spans: int = MAX_SPANS) -> None:
        self.on = False
        self.spans: list[Span] = []
        self.dropped = 0
        self._max_spans = max_spans
        self._lock = threading.Lock()

    def start(self) -> None:
        with self._lock:
            self.spans = []
            self.dropped = 0
        self.on = True

    @contextmanager
    def span(
        self, name: str, row: str, batch: int | None = None, interval: int | None = None
    ) -> Iterator[None]:
        """Record how long a ``with`` block takes as a span, if the timeline is on."""
        if not self.on:
            yield
            return

        begin_s = time.perf_counter()
        try:
            yield
        finally:
            self.note(
                Span(
                    name=name,
                    row=row,
                    begin_s=begin_s,
                    end_s=time.perf_counter(),
                    batch=batch,
                    interval=interval,
                )
            )

    def add(self, name: str, row: str, begin_s: float, end_s: float, batch: int | None = None) -> None:
        self.note(Span(name=name, row=row, begin_s=begin_s, end_s=end_s, batch=batch))

    def note(self, span: Span) -> None:
        if not self.on:
            return
        with self._lock:
            if len(self.spans) < self._max_spans:
                self.spans.append(span)
            else:
                self.dropped += 1


log = logging.getLogger(__name__)

UNFINISHED = ".part"
"""File suffix while a session runs, or if it was killed."""


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One complete pass that a loader makes over its items."""

    loader: int
    """The loader's number in its session, from 0."""
    steps: int
    seconds: float
    """Wall-clock seconds from requesting the first batch until the last batch has been used."""
    wait_s: float
    """Seconds within ``seconds`` in which the consumer waited for the loader."""


@final
class TraceWriter:
    """Collects one rank's records in one session. Call :meth:`write` once at the end.

    The constructor reserves the file in ``folder``, so that a ConfigError is raised before the work.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._rank = rank
        self._path = _reserve_file(folder, rank)
        self._epochs: list[Mapping[str, object]] = []
        self._passes: list[Pass] = []
        self.new_loader: Callable[[], int] = count().__next__

    def note_pass(self, loader_pass: Pass) -> None:
        self._passes.append(loader_pass)

    def note_epoch(self, record: EpochRecord) -> None:
        values = asdict(record)
        if not math.isfinite(record.loss):
            values["loss"] = None  # JSON has neither NaN nor infinity.
        self._epochs.append(values)

    def write(self, job: str, topology: Topology, ledger: Ledger, *, failed: bool) -> None:
        """Write the file. An error is only logged, because the traced work is done."""
        values = {
            "job": job,
            "rank": self._rank,
            "server": topology.server,
            "world_size": topology.world_size,
            "server_of_rank": topology.server_of_rank,
            "failed": failed,
            "ledger": [asdict(row) for row in ledger.rows()],
            "passes": [asdict(loader_pass) for loader_pass in self._passes],
            "epochs": self._epochs,
        }

        try:
            part_path = _get_part_path(self._path)
            part_path.write_text(json.dumps(values) + "\n", encoding="utf-8")
            part_path.replace(self._path)
        except OSError as error:
            log.warning("the trace %s of rank %d could not be written: %s", self._path, self._rank, error)


def open_trace(folder: Path | None, rank: int) -> tuple[TraceWriter | None, str]:
    """Return a trace writer and an error message. Without ``folder`` there is no writer.

    The message is empty if there is no error. The caller sends it to all ranks, so that they all stop.
    """
    if folder is None:
        return None, ""
    try:
        return TraceWriter(folder, rank), ""
    except ConfigError as error:
        return None, str(error)


def _reserve_file(folder: Path, rank: int) -> Path:
    """Create an empty file for this rank's trace and return its path. No other session uses the path.

    Raises ConfigError if files cannot be created in ``folder``.
    """
    path = folder / f"rank-{rank}.json"
    num_taken = 0
    try:
        folder.mkdir(parents=True, exist_ok=True)
        while not _try_to_reserve(path):
            num_taken += 1
            path = folder / f"rank-{rank}.{num_taken}.json"
    except OSError as error:
        raise ConfigError(
            f"DGLX_TRACE={str(folder)!r}: rank {rank} cannot write its trace there ({error}). Use a folder "
            "to which every rank can write, or unset DGLX_TRACE."
        ) from error
    return path


def _try_to_reserve(path: Path) -> bool:
    """Create the unfinished file for ``path``. Return False if another session uses ``path``."""
    part_path = _get_part_path(path)
    try:
        os.close(os.open(part_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
    except FileExistsError:
        return False
    # This check is the last one, because another session may have renamed its unfinished file to ``path``.
    if path.exists():
        part_path.unlink()
        return False
    return True


def _get_part_path(path: Path) -> Path:
    return path.with_name(path.name + UNFINISHED)


_FORMAT = "dglx_dist trace 1"
_MAX_FILE_BYTES = 1 << 30
_MAX_US = 1e18
_HEAD = f'{{"otherData": {{"format": "{_FORMAT}"'
_NUMBERS = ("batch", "interval")
_ROWS = (COMPUTE, GRAPH_SERVER, WORKER, PARAMETER_SERVER, NETWORK, LOADER)


@dataclass(frozen=True, kw_only=True)
class RankSpans:
    """One rank's spans."""

    rank: int
    host: str
    spans: tuple[Span, ...]
    """Spans by begin, in a shared clock's seconds. In a file they count from the first span."""
    clock_error_s: float = 0.0
    """Largest error in these times relative to rank 0."""
    dropped: int = 0
    """Spans that were dropped because of the limit."""


@dataclass(frozen=True, kw_only=True)
class TraceFile:
    """Content of a trace file."""

    ranks: tuple[RankSpans, ...]
    """Spans by rank."""
    facts: Mapping[str, Any]
    """Strategy, options, versions and recorded epochs."""


def check_replaceable(path: Path) -> None:
    """Raise StorageError unless :func:`write_trace` may write ``path``. Makes its folder if needed."""
    try:
        if path.is_dir():
            raise StorageError(f"the trace {path} is a folder. Use a file, such as {path / 'trace.json'}.")
        if path.exists() and not _is_trace(path):
            raise StorageError(
                f"{path} holds something other than a trace and is not overwritten. Choose another file, or "
                "remove it yourself."
            )

        path.parent.mkdir(parents=True, exist_ok=True)
        # Check whether the folder can be made.
        with partial_folder(path):
            pass
    except OSError as error:
        raise StorageError(f"cannot write the trace {path}: {error}. Choose another place.") from error


def remove_trace(path: Path) -> None:
    """Remove ``path`` if it is a trace. Anything else stays."""
    try:
        if path.is_file() and _is_trace(path):
            path.unlink()
    except OSError as error:
        raise StorageError(f"cannot remove the earlier trace {path}: {error}. Remove it yourself.") from error


def write_trace(path: Path, trace: TraceFile) -> None:
    """Write ``path`` atomically over an earlier trace. Raise StorageError if that fails."""
    origin_s = min((span.begin_s for rank in trace.ranks for span in rank.spans), default=0.0)
    ranks = [
        {
            "rank": rank.rank,
            "host": rank.host,
            "clock_error_us": 1e6 * rank.clock_error_s,
            "dropped": rank.dropped,
        }
        for rank in trace.ranks
    ]
    run_json = json.dumps({"run": trace.facts, "ranks": ranks}, default=str)

    try:
        with replace_atomically(path) as partial, partial.open("w", encoding="utf-8") as file:
            # The head comes first, so that a trace is recognized without reading the whole file.
            file.write(_HEAD + ", " + run_json[1:])
            file.write(', "displayTimeUnit": "ms", "traceEvents": [\n')

            events = chain.from_iterable(_make_events(rank, origin_s) for rank in trace.ranks)
            file.write(",\n".join(map(json.dumps, events)))
            file.write("\n]}\n")
    except OSError as error:
        raise StorageError(f"cannot write the trace {path}: {error}. Free some space.") from error


def read_trace(path: str | Path) -> TraceFile:
    """Read a file that :func:`write_trace` wrote. Raise StorageError if it is missing or not such a file."""
    try:
        values = json.loads(read_small_file(Path(path), _MAX_FILE_BYTES))
        fields = Fields(values, str(path), error=StorageError)
    except FileNotFoundError as error:
        raise StorageError(f"there is no file {path}. `dglx train --trace FILE` writes traces.") from error
    except (OSError, ValueError, RecursionError) as error:
        raise StorageError(f"{path} is no trace, or damaged ({error}). Record it again.") from error

    facts = fields.nested_fields("otherData")
    facts.choice("format", [_FORMAT])
    spans: dict[int, list[Span]] = {}
    for event in fields.nested_list("traceEvents"):
        if event.text("ph") == "X":
            spans.setdefault(event.integer("pid", 0), []).append(_read_span(event))

    ranks = []
    for record in facts.nested_list("ranks"):
        rank = record.integer("rank", 0)
        sorted_spans = sorted(spans.get(rank, ()), key=lambda span: span.begin_s)
        rank_spans = RankSpans(
            rank=rank,
            host=record.text("host"),
            spans=tuple(sorted_spans),
            clock_error_s=record.number("clock_error_us", 0, _MAX_US) / 1e6,
            dropped=record.integer("dropped", 0),
        )
        ranks.append(rank_spans)
    return TraceFile(ranks=tuple(ranks), facts=facts.nested_fields("run").mapping)


def _is_trace(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_HEAD)) == _HEAD.encode()


def _make_events(rank_spans: RankSpans, origin_s: float) -> Iterator[dict[str, Any]]:
    """Yield one rank's trace events: the names of its threads, and its spans.

    Spans in one row that overlap without being nested need several threads in the drawing.
    """

    def make_metadata(name: str, thread: int, args: Mapping[str, object]) -> dict[str, Any]:
        return {"name": name, "ph": "M", "pid": rank_spans.rank, "tid": thread, "args": args}

    title = f"rank {rank_spans.rank} on {rank_spans.host}"
    yield make_metadata("process_name", 0, {"name": title})
    yield make_metadata("process_sort_index", 0, {"sort_index": rank_spans.rank})

    spans_of_row: dict[str, list[Span]] = {row: [] for row in _ROWS}
    for span in rank_spans.spans:
        spans_of_row.setdefault(span.row, []).append(span)
    other_rows = sorted(spans_of_row.keys() - set(_ROWS))

    thread = 0
    for row in [*_ROWS, *other_rows]:
        for track_index, track in enumerate(assign_tracks(spans_of_row[row])):
            thread += 1
            name = row if track_index == 0 else f"{row} {track_index + 1}"
            yield make_metadata("thread_name", thread, {"name": name})
            yield make_metadata("thread_sort_index", thread, {"sort_index": thread})
            for span in track:
                yield _make_event(span, rank_spans.rank, thread, origin_s)


def _make_event(span: Span, rank: int, thread: int, origin_s: float) -> dict[str, Any]:
    # Round both ends. A rounded duration may reach beyond the span around this span.
    begin_ns = round(1e9 * (span.begin_s - origin_s))
    end_ns = round(1e9 * (span.end_s - origin_s))
    numbers = {"batch": span.batch, "interval": span.interval}
    return {
        "name": span.name,
        "cat": span.row,
        "ph": "X",
        "ts": begin_ns / 1e3,
        "dur": (end_ns - begin_ns) / 1e3,
        "pid": rank,
        "tid": thread,
        "args": {name: value for name, value in numbers.items() if value is not None},
    }


def assign_tracks(spans: Iterable[Span], *, nested: bool = True) -> list[list[Span]]:
    """Distribute spans over as few tracks as possible, so that they do not overlap on a track.

    With ``nested``, a span may lie inside another one on the same track.
    """
    tracks: list[list[Span]] = []
    open_until: list[list[float]] = []

    # Put each span on the first track where it fits. Each track has a stack with the ends of its open spans.
    for span in sorted(spans, key=lambda span: (span.begin_s, -span.end_s)):
        for track, ends in zip(tracks, open_until, strict=True):
            while ends and ends[-1] <= span.begin_s:
                ends.pop()
            if not ends or (nested and span.end_s <= ends[-1]):
                track.append(span)
                ends.append(span.end_s)
                break
        else:
            tracks.append([span])
            open_until.append([span.end_s])
    return tracks


def _read_span(event: Fields) -> Span:
    begin_us = event.number("ts", 0, _MAX_US)
    end_us = begin_us + event.number("dur", 0, _MAX_US)
    args = event.nested_fields("args")
    batch, interval = (args.integer(name) if name in args.mapping else None for name in _NUMBERS)
    return Span(
        name=event.text("name"),
        row=event.text("cat"),
        begin_s=begin_us / 1e6,
        end_s=end_us / 1e6,
        batch=batch,
        interval=interval,
    )


def shift_spans(spans: Iterable[Span], offset_s: float) -> tuple[Span, ...]:
    shifted = [replace(span, begin_s=span.begin_s + offset_s, end_s=span.end_s + offset_s) for span in spans]
    return tuple(sorted(shifted, key=lambda span: span.begin_s))
