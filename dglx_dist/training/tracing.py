"""Records of a training run beside its metrics: trace file, bytes by pair of ranks, TensorBoard."""

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import timedelta
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from dglx_dist.comm.collectives import Clock, broadcast_json, gather_json, measure_clock, run_on_all_ranks
from dglx_dist.comm.session import Session
from dglx_dist.comm.trace import (
    RankSpans,
    Span,
    TraceFile,
    check_replaceable,
    remove_trace,
    shift_spans,
    write_trace,
)
from dglx_dist.errors import StorageError
from dglx_dist.memory import format_bytes, resident_bytes
from dglx_dist.records import EpochRecord

log = logging.getLogger(__name__)

Pair: TypeAlias = tuple[str, int, int]
"""(phase, source rank, destination rank)."""


def check_trace(path: Path, session: Session) -> None:
    """Raise StorageError on all ranks before training if the trace cannot be written. All ranks call this."""
    run_on_all_ranks(session, lambda: check_replaceable(path) if session.topology.rank == 0 else None)


def rank_path(path: Path, rank: int) -> Path:
    """Return the path for the trace of one ``rank`` after a failure: ``trace.rank-2.json``."""
    return path.with_name(f"{path.stem}.rank-{rank}{path.suffix}")


@contextmanager
def record_steps(file: str | Path | None, num_steps: int, session: Session) -> Iterator[Callable[[], None]]:
    """Record the first steps of the block and write the trace at its end. Every rank must call this.

    Rank 0 writes the trace and replaces an earlier one. After a failure each rank writes its own part on its
    own machine, see :func:`rank_path`.

    Yield a function to call after each step. Nothing is recorded without ``file``, or while another recording
    is active. StorageError if the trace cannot be written, before the block if possible.
    """
    if file is None or session.timeline.on:
        yield lambda: None
        return
    path = Path(file).absolute()
    timeline = session.timeline
    steps = 0
    check_trace(path, session)

    # The traces of an earlier failed run would be misleading beside the new one.
    run_on_all_ranks(session, lambda: remove_trace(rank_path(path, session.topology.rank)))

    def step() -> None:
        nonlocal steps
        steps += 1
        if steps == num_steps:
            timeline.on = False

    clock = measure_clock(session)
    timeline.start()
    try:
        yield step
        timeline.on = False
        ranks = _gather_spans(_collect_spans(session, clock), session)
    except BaseException:
        timeline.on = False
        _write_part(path, _build_trace([_collect_spans(session, clock)], steps, num_steps, session), session)
        raise

    run_on_all_ranks(
        session, lambda: write_trace(path, _build_trace(ranks, steps, num_steps, session)) if ranks else None
    )


def _collect_spans(session: Session, clock: Clock) -> RankSpans:
    rank, timeline = session.topology.rank, session.timeline
    return RankSpans(
        rank=rank,
        host=session.hosts[rank],
        spans=shift_spans(tuple(timeline.spans), clock.offset_s),
        clock_error_s=clock.error_s,
        dropped=timeline.dropped,
    )


def _gather_spans(local_spans: RankSpans, session: Session) -> list[RankSpans]:
    """Return the spans of all ranks on rank 0, and an empty list on other ranks. All ranks call this."""
    ranks = []
    payload = asdict(local_spans)
    for source in range(session.topology.world_size):
        # The ranks send in turn, because the spans of a rank may have megabytes.
        rank_spans = broadcast_json(payload, session, source)
        if session.topology.rank == 0:
            spans = tuple(Span(**span) for span in rank_spans["spans"])
            ranks.append(RankSpans(**rank_spans | {"spans": spans}))

    return ranks


def _write_part(path: Path, trace: TraceFile, session: Session) -> None:
    # If writing fails, the error is only logged. It must not hide the error that ended training.
    path = rank_path(path, session.topology.rank)
    try:
        check_replaceable(path)
        write_trace(path, trace)
    except StorageError as error:
        log.warning("%s", error)
    else:
        log.warning("Training failed. The trace of this rank was written to %s", path)


def _build_trace(ranks: Sequence[RankSpans], steps: int, num_steps: int, session: Session) -> TraceFile:
    facts = {
        "strategy": session.strategy,
        "options": hide_credentials(session.options),
        "seed": session.seed,
        "ranks": session.topology.world_size,
        "servers": session.topology.num_servers,
        "steps": steps,
        "steps_recorded": min(steps, num_steps),
        "versions": {name: metadata.version(name) for name in ("dglx_dist", "torch", "dgl")},
    }
    return TraceFile(ranks=tuple(ranks), facts=facts)


def list_traffic(sent: Counter[Pair], session: Session) -> dict[str, list[list[int]]]:
    """Sum the bytes of all ranks. Return phase to [source, destination, bytes]. Every rank must call this."""
    ranks = gather_json([[*key, num_bytes] for key, num_bytes in sent.items()], session)
    totals = Counter[Pair]()
    for phase, source, destination, num_bytes in chain.from_iterable(ranks):
        totals[phase, source, destination] += num_bytes
    traffic: dict[str, list[list[int]]] = {}
    for (phase, source, destination), num_bytes in sorted(totals.items()):
        traffic.setdefault(phase, []).append([source, destination, num_bytes])
    return traffic


@contextmanager
def open_scalars_writer(
    folder: str | Path | None, epoch: int, session: Session
) -> Iterator[Callable[[EpochRecord], None]]:
    """Yield a callback that writes figures for TensorBoard. It replaces earlier figures from ``epoch`` on.
    Every rank must call this.

    The callback does nothing without ``folder``. If a write fails, it warns and stops writing.
    StorageError if the folder cannot be written.
    """

    def start() -> Any:
        if folder is None or session.topology.rank > 0:
            return None
        # TensorBoard is an optional dependency, and importing it takes seconds.
        from torch.utils.tensorboard import SummaryWriter

        try:
            return SummaryWriter(str(folder), purge_step=epoch)
        except OSError as error:
            raise StorageError(f"cannot write for TensorBoard to {folder}: {error}; use another") from error

    writer: Any = run_on_all_ranks(session, start)
    failed = writer is None

    def write(record: EpochRecord) -> None:
        nonlocal failed
        if failed:
            return
        try:
            for name, value in record.scalars().items():
                writer.add_scalar(name, value, record.epoch)
            writer.flush()
        except OSError as error:
            failed = True
            log.warning("TensorBoard in %s has no figures from epoch %d on: %s", folder, record.epoch, error)

    try:
        yield write
    finally:
        if writer is not None:
            with suppress(OSError):  # `write` has flushed everything, or warned about it.
                writer.close()


def format_live_figures(
    step: int, total: int, of_epoch: int, speed: float, epochs: Sequence[EpochRecord], session: Session
) -> dict[str, str]:
    """Return the figures of a run on rank 0 after ``step`` of ``total`` steps, at ``speed`` steps/s."""
    return {
        "epoch": str(step // of_epoch),
        "step": f"{step % of_epoch}/{of_epoch}",
        "steps/s": f"{speed:.3g}",
        "samples/s": f"{speed * epochs[-1].num_samples / of_epoch:.0f}" if epochs else "-",
        "time left": str(timedelta(seconds=round((total - step) / speed))) if speed else "-",
        "memory (rank 0)": format_bytes(resident_bytes()),
        "bytes (rank 0)": format_bytes(session.ledger.total()),
    }


def hide_credentials(options: Mapping[str, object]) -> dict[str, object]:
    """Return options without values that may be credentials. Mappings become names, URLs host and path.

    Headers and URLs of a functions endpoint may have keys, and traces are shared.
    """
    return {name: _hide_credentials(value) for name, value in options.items()}


def _hide_credentials(value: object) -> object:
    if isinstance(value, Mapping):
        return sorted(map(str, value))
    if isinstance(value, str) and "://" in value:
        address = urlsplit(value)
        return f"{address.scheme}://{address.netloc.rpartition('@')[2]}{address.path}"
    return value


def gather_figures(ranks: Sequence[Any], epoch: int) -> EpochRecord:
    """Sum counts and bytes over the ``ranks``. Return the seconds of the slowest rank and mean phases.

    Ranks in lock-step wait and exchange at different times, so the sum of the longest phases would exceed the
    epoch. Compute is the remainder.
    """

    def total(name: str) -> Any:
        return sum(row[name] for row in ranks)

    phases = ("sample_s", "fetch_s", "wait_s", "exchange_s")
    means: dict[str, Any] = {name: float(total(name)) / len(ranks) for name in phases}
    seconds = max(row["seconds"] for row in ranks)
    targets = total("targets")
    return EpochRecord(
        epoch=epoch,
        loss=total("loss") / targets if targets else math.nan,
        train_accuracy=total("correct") / targets if targets else math.nan,
        val_accuracy=None,
        seconds=seconds,
        num_samples=targets,
        compute_s=max(0.0, seconds - means["wait_s"] - means["exchange_s"]),
        **means,
        bytes_inside=total("inside"),
        bytes_outside=total("outside"),
        checkpoint_s=max(row.get("checkpoint_s", 0.0) for row in ranks),
        cache_hits=sum(row.get("hits", 0) for row in ranks),
        cache_misses=sum(row.get("misses", 0) for row in ranks),
    )


def format_epoch(record: EpochRecord) -> str:
    """Return ``epoch 3: loss 1.2345, val 84.1 %, 0.15 s``. There is no val if the epoch was not evaluated."""
    scores = [] if record.val_accuracy is None else [f"val {100 * record.val_accuracy:.1f} %"]
    for name, value in record.metrics.items():
        if name.startswith("val_") and name != "val_accuracy":
            scores.append(f"{name.replace('_', ' ', 1)} {value:.4f}")
    figures = [f"loss {record.loss:.4f}", *scores, f"{record.seconds:.2f} s"]
    return f"epoch {record.epoch}: {', '.join(figures)}"
