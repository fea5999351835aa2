"""A run's result folder: summary.json, metrics.jsonl, config.json, plan.json, picture.png."""

import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

from dglx_dist.data.json_fields import Fields
from dglx_dist.data.storage.files import read_small_file, replace_atomically
from dglx_dist.errors import ConfigError, StorageError
from dglx_dist.records import EpochRecord

CONFIG = "config.json"
METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
PICTURE = "picture.png"
PLAN = "plan.json"
"""File with the candidates that ``auto`` compared, if it chose the strategy."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Run:
    """Content of a run folder."""

    folder: Path
    config: Mapping[str, Any]
    epochs: tuple[EpochRecord, ...]
    summary: Mapping[str, Any] | None
    """Content of ``summary.json``. None: the run did not finish."""


def start_run(
    folder: str | Path,
    config: Mapping[str, object],
    kept: Sequence[EpochRecord] | None = None,
    *,
    plan: Mapping[str, object] | None = None,
) -> Path:
    """Create and return ``folder``, write the configuration and remove an earlier run's files. For one rank.

    Args:
        folder: The run's folder. It may exist.
        config: Content for ``config.json``.
        kept: Epochs from :func:`read_epochs` if the run is resumed, otherwise None.
        plan: Candidates that ``auto`` compared. None: the strategy was named.

    Raises:
        StorageError: If the folder cannot be written.
    """
    target = Path(folder)
    with _report_write_errors(target, "choose another folder with --out"):
        target.mkdir(parents=True, exist_ok=True)
        if kept is not None:
            # The file is rewritten, so that later epochs are not appended to an incomplete line.
            _write_atomically(target / METRICS, "".join(map(_format_epoch, kept)))
        elif (target / SUMMARY).is_file():
            log.warning("replacing the finished run in %s (no checkpoints, or --overwrite)", target)

        stale_names = [SUMMARY, PICTURE]
        if not kept:
            stale_names.append(METRICS)
        if plan is None:
            stale_names.append(PLAN)
        for name in stale_names:
            (target / name).unlink(missing_ok=True)

        if plan is not None:
            write_json(target / PLAN, plan)
        write_json(target / CONFIG, config)
    return target


def append_epoch(folder: Path, record: EpochRecord) -> None:
    """Append ``record`` to ``metrics.jsonl``, so that a killed run keeps its epochs."""
    with _report_write_errors(folder), (folder / METRICS).open("a", encoding="utf-8") as file:
        file.write(_format_epoch(record))


def write_run(
    folder: str | Path,
    config: Mapping[str, object],
    epochs: Sequence[EpochRecord],
    summary: Mapping[str, object],
    *,
    plan: Mapping[str, object] | None = None,
) -> None:
    """Write a finished run like :func:`start_run`, each file atomically, the summary last. For one rank."""
    target = start_run(folder, config, epochs, plan=plan)
    with _report_write_errors(target):
        write_json(target / SUMMARY, summary)


def read_plan(folder: Path) -> dict[str, Any] | None:
    """Read the candidates that ``auto`` compared. Return None if the strategy was named."""
    path = folder / PLAN
    return _read_object(path) if path.is_file() else None


def read_run(folder: str | Path) -> Run:
    """Read a finished run, or one that was stopped after at least one epoch.

    Raises StorageError if the folder is not a run, or a file in it is damaged.
    """
    source = Path(folder)
    if not source.is_dir():
        raise StorageError(f"there is no folder {source}; `dglx train --out FOLDER` writes a run")
    for name in (CONFIG, METRICS):
        if not (source / name).is_file():
            raise StorageError(
                f"{source} has no {name}. It is not a run, or the run stopped before its first epoch ended. "
                f"Repeat `dglx train DIR --out {source}`."
            )

    config = _read_object(source / CONFIG)
    epochs = read_epochs(source)
    summary = None
    if (source / SUMMARY).is_file():
        summary = _read_object(source / SUMMARY)
    return Run(folder=source, config=config, epochs=epochs, summary=summary)


def read_spread(folder: Path) -> dict[str, Any] | None:
    """Read the summary over several seeds, or return None if ``folder`` has none."""
    if (folder / CONFIG).is_file() or not (folder / SUMMARY).is_file():
        return None
    return _read_object(folder / SUMMARY)


@contextmanager
def _report_write_errors(folder: Path, remedy: str = "free some space and repeat it") -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(f"cannot write the run to {folder}: {error}; {remedy}") from error


def _format_epoch(record: EpochRecord) -> str:
    values = asdict(record) | {"samples_per_second": record.samples_per_second}
    return json.dumps(_to_json_value(values)) + "\n"


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(read_small_file(path))
    except (OSError, ValueError, RecursionError) as error:
        raise StorageError(f"{path} is damaged ({error}); repeat the run") from error
    if not isinstance(value, dict):
        raise StorageError(f"{path} holds {type(value).__name__}, but must be an object; repeat the run")
    return value


def read_epochs(folder: Path) -> tuple[EpochRecord, ...]:
    """Read a run's epochs, finished or not. There are none if the folder does not exist.

    A resumed run repeats epochs, so a later line replaces all lines from its epoch on. If a killed run left
    an incomplete last line, it is ignored. Raises StorageError if a line is damaged. The message names the
    line.
    """
    path = folder / METRICS
    if not path.is_file():
        return ()

    epochs: list[EpochRecord] = []
    try:
        # The text after the last newline is empty, or an incomplete line.
        complete_lines = read_small_file(path).split(b"\n")[:-1]
        for number, line in enumerate(complete_lines, start=1):
            record = _read_epoch(line, f"line {number}")
            while epochs and epochs[-1].epoch >= record.epoch:
                epochs.pop()
            epochs.append(record)
    except (OSError, ConfigError) as error:
        raise StorageError(f"{path} is damaged ({error}); repeat the run") from error
    return tuple(epochs)


def _read_epoch(line: bytes, where: str) -> EpochRecord:
    """Read the record in ``line``. If the line is damaged, raise ConfigError that begins with ``where``."""
    values = Fields.parse(line, where)
    readers: dict[str, Any] = {}
    for name, value in values.mapping.items():
        # NaN is written as null. A missing validation accuracy is null, too, but stays None.
        if value is None and name != "val_accuracy":
            readers[name] = lambda _: math.nan
    readers["metrics"] = lambda name: _read_metrics(values.nested_fields(name)) if values.has(name) else {}

    record = values.record(EpochRecord, **readers)
    for value in astuple(record):
        if isinstance(value, int) and abs(value) >= 1 << 63:
            raise ConfigError(f"{where} has a count beyond 63 bits")
    return record


def _read_metrics(values: Fields) -> dict[str, float]:
    return {name: values.optional(name, values.number, math.nan) for name in values.mapping}


def _to_json_value(value: object) -> object:
    """Return ``value`` as a JSON value. NaN and infinity become null, and other objects strings."""
    if isinstance(value, Mapping):
        return {str(key): _to_json_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_json_value(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    return str(value)


def write_json(path: Path, value: Mapping[str, object]) -> None:
    """Write ``value`` as JSON to ``path`` atomically, with NaN as null. Raise OSError on failure."""
    _write_atomically(path, json.dumps(_to_json_value(value), indent=2) + "\n")


def _write_atomically(path: Path, text: str) -> None:
    with replace_atomically(path) as partial:
        partial.write_text(text, encoding="utf-8")
