"""Record a training run beside its metrics: trace file, bytes by pair of ranks, TensorBoard."""

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
from dglx_dist.records import STANDARD_ERROR, EpochRecord

log = logging.getLogger(__name__)

Pair: TypeAlias = tuple[str, int, int]
"""(phase, source rank, destination rank)."""


def check_trace(path: Path, session: Session) -> None:
    """Raise StorageError on all ranks before training if the trace cannot be written. All ranks call this."""
    run_on_all_ranks(session, lambda: check_replaceable(path) if session.topology.rank == 0 else None)


def rank_path(path: Path, rank: int) -> Path:
    """Return the path for one rank's trace after a failure: ``trace.rank-2.json``."""
    return path.with_name(f"{path.stem}.rank-{rank}{path.suffix}")


@contextmanager
def record_steps(file: str | Path | None, num_steps: int, session: Session) -> Iterator[Callable[[], None]]:
    """Record the block's first steps and write the trace at its end. Every rank must call this.

    Rank 0 writes the trace and replaces an earlier one. After a failure each rank writes its own part on its
    own machine, see :func:`rank_path`.

    Yield a function to call after each step. Nothing is recorded without ``file``, or while the session's
    timeline records already. StorageError if the trace cannot be written, before the block if possible.
    """
    if file is None or session.timeline.on:
        yield lambda: None
        return

    path = Path(file).absolute()
    timeline = session.timeline
    num_completed = 0
    check_trace(path, session)
    # The traces from an earlier failed run would be misleading beside the new one.
    run_on_all_ranks(session, lambda: remove_trace(rank_path(path, session.topology.rank)))

    def count_step() -> None:
        nonlocal num_completed
        num_completed += 1
        if num_completed == num_steps:
            timeline.on = False

    clock = measure_clock(session)
    timeline.start()
    try:
        yield count_step
        timeline.on = False
        all_spans = _gather_spans(_collect_spans(session, clock), session)
    except BaseException:
        timeline.on = False
        own_spans = _collect_spans(session, clock)
        _write_part(path, _build_trace([own_spans], num_completed, num_steps, session), session)
        raise

    def write_merged_trace() -> None:
        if session.topology.rank == 0:
            write_trace(path, _build_trace(all_spans, num_completed, num_steps, session))

    run_on_all_ranks(session, write_merged_trace)


def _collect_spans(session: Session, clock: Clock) -> RankSpans:
    """Return this rank's spans, with times on rank 0's clock."""
    rank = session.topology.rank
    timeline = session.timeline
    return RankSpans(
        rank=rank,
        host=session.hosts[rank],
        spans=shift_spans(tuple(timeline.spans), clock.offset_s),
        clock_error_s=clock.error_s,
        dropped=timeline.dropped,
    )


def _gather_spans(own_spans: RankSpans, session: Session) -> list[RankSpans]:
    """Return all ranks' spans on rank 0, and an empty list on other ranks. All ranks call this."""
    all_spans = []
    own_values = asdict(own_spans)
    # The ranks send in turn, because a rank's spans may have megabytes.
    for source in range(session.topology.world_size):
        values = broadcast_json(own_values, session, source)
        if session.topology.rank == 0:
            spans = tuple(Span(**span) for span in values["spans"])
            all_spans.append(RankSpans(**values | {"spans": spans}))
    return all_spans


def _write_part(path: Path, trace: TraceFile, session: Session) -> None:
    """Write this rank's trace. A failure is only logged, so that it hides no training error."""
    path = rank_path(path, session.topology.rank)
    try:
        check_replaceable(path)
        write_trace(path, trace)
    except StorageError as error:
        log.warning("%s", error)
    else:
        log.warning("Training failed. The trace of this rank was written to %s", path)


def _build_trace(
    spans: Sequence[RankSpans], num_completed: int, num_steps: int, session: Session
) -> TraceFile:
    """Build the trace for some ranks after ``num_completed`` steps. At most ``num_steps`` are recorded."""
    facts = {
        "strategy": session.strategy,
        "options": hide_credentials(session.options),
        "seed": session.seed,
        "ranks": session.topology.world_size,
        "servers": session.topology.num_servers,
        "steps": num_completed,
        "steps_recorded": min(num_completed, num_steps),
        "versions": {name: metadata.version(name) for name in ("dglx_dist", "torch", "dgl")},
    }
    return TraceFile(ranks=tuple(spans), facts=facts)


def list_traffic(sent: Counter[Pair], session: Session) -> dict[str, list[list[int]]]:
    """Sum the bytes over all ranks, by phase, as [source, destination, bytes]. Every rank must call this."""
    own_entries = [[*pair, num_bytes] for pair, num_bytes in sent.items()]
    totals = Counter[Pair]()
    for phase, source, destination, num_bytes in chain.from_iterable(gather_json(own_entries, session)):
        totals[phase, source, destination] += num_bytes
    traffic: dict[str, list[list[int]]] = {}
    for (phase, source, destination), num_bytes in sorted(totals.items()):
        traffic.setdefault(phase, []).append([source, destination, num_bytes])
    return traffic


@contextmanager
def open_scalars_writer(
    folder: str | Path | None, epoch: int, session: Session
) -> Iterator[Callable[[EpochRecord], None]]:
    """Yield a callback that writes figures for TensorBoard. Every rank must call this.

    Figures from earlier runs are replaced from ``epoch`` on. The callback does nothing without ``folder``. If
    a write fails, the callback logs a warning and stops writing. StorageError if the folder cannot be
    written.
    """

    def open_writer() -> Any:
        if folder is None or session.topology.rank > 0:
            return None
        # TensorBoard is an optional dependency, and importing it takes seconds.
        from torch.utils.tensorboard import SummaryWriter

        try:
            return SummaryWriter(str(folder), purge_step=epoch)
        except OSError as error:
            raise StorageError(f"cannot write for TensorBoard to {folder}: {error}; use another") from error

    writer: Any = run_on_all_ranks(session, open_writer)
    is_writing = writer is not None

    def write(record: EpochRecord) -> None:
        nonlocal is_writing
        if not is_writing:
            return
        try:
            for name, value in record.scalars().items():
                writer.add_scalar(name, value, record.epoch)
            writer.flush()
        except OSError as error:
            is_writing = False
            log.warning("TensorBoard in %s has no figures from epoch %d on: %s", folder, record.epoch, error)

    try:
        yield write
    finally:
        if writer is not None:
            # ``write`` has flushed all figures, or logged a warning.
            with suppress(OSError):
                writer.close()


def format_live_figures(
    step: int, total: int, of_epoch: int, speed: float, epochs: Sequence[EpochRecord], session: Session
) -> dict[str, str]:
    """Return a run's figures on rank 0 after ``step`` of ``total`` steps, at ``speed`` steps/s."""
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

    A functions endpoint may have keys in its headers and URLs, and traces are shared.
    """
    shown_options: dict[str, object] = {}
    for name, value in options.items():
        shown_options[name] = value
        if isinstance(value, Mapping):
            shown_options[name] = sorted(map(str, value))
        elif isinstance(value, str) and "://" in value:
            address = urlsplit(value)
            _, _, host = address.netloc.rpartition("@")
            shown_options[name] = f"{address.scheme}://{host}{address.path}"
    return shown_options


def gather_figures(ranks: Sequence[Any], epoch: int) -> EpochRecord:
    """Combine all ranks' figures to an epoch's record.

    Counts and bytes are summed over the ranks, and the seconds are those on the slowest rank. Phases are
    means. Ranks in lock-step wait and exchange at different times, so the sum over the longest phases would
    exceed the epoch. The compute time is the remainder.
    """

    def add(name: str) -> Any:
        return sum(figures[name] for figures in ranks)

    phases = ("sample_s", "fetch_s", "wait_s", "exchange_s")
    means: dict[str, Any] = {name: float(add(name)) / len(ranks) for name in phases}
    seconds = max(figures["seconds"] for figures in ranks)
    num_targets = add("targets")
    return EpochRecord(
        epoch=epoch,
        loss=add("loss") / num_targets if num_targets else math.nan,
        train_accuracy=add("correct") / num_targets if num_targets else math.nan,
        val_accuracy=None,
        seconds=seconds,
        num_samples=num_targets,
        compute_s=max(0.0, seconds - means["wait_s"] - means["exchange_s"]),
        **means,
        bytes_inside=add("inside"),
        bytes_outside=add("outside"),
        checkpoint_s=max(figures.get("checkpoint_s", 0.0) for figures in ranks),
        cache_hits=sum(figures.get("hits", 0) for figures in ranks),
        cache_misses=sum(figures.get("misses", 0) for figures in ranks),
    )


def format_epoch(record: EpochRecord) -> str:
    """Return ``epoch 3: loss 1.2345, val 84.1 %, 0.15 s``. There is no val if the epoch was not evaluated."""
    figures = [f"loss {record.loss:.4f}"]
    errors = {}
    for name, value in record.metrics.items():
        if name.endswith(STANDARD_ERROR):
            errors[name.removesuffix(STANDARD_ERROR)] = value
    if record.val_accuracy is not None:
        error_text = f" ± {100 * errors['val_accuracy']:.1f}" if "val_accuracy" in errors else ""
        figures.append(f"val {100 * record.val_accuracy:.1f} %{error_text}")
    for name, value in record.metrics.items():
        if name.startswith("val_") and name != "val_accuracy" and not name.endswith(STANDARD_ERROR):
            error_text = f" ± {errors[name]:.4f}" if name in errors else ""
            figures.append(f"{name.replace('_', ' ', 1)} {value:.4f}{error_text}")
    figures.append(f"{record.seconds:.2f} s")
    return f"epoch {record.epoch}: {', '.join(figures)}"
