"""``<OUT>/<ID>.json``: what became of one experiment, as a file that can be read back whole."""

from __future__ import annotations

import gzip
import json
import math
import os
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from dglx_dist.errors import StorageError
from dglx_dist.planner.records import Rate
from dglx_dist.records import EpochRecord
from scripts.bench.records import (
    Cell,
    ExperimentPlan,
    Job,
    MatchedPhi,
    Measurement,
    Outcome,
    Ratio,
    Shape,
    Variant,
)

FORMAT, VERSION = "dglx bench result", 1


def result_path(folder: Path, experiment: str) -> Path:
    """Where the outcome of ``experiment`` (its id) is kept."""
    return folder / f"{experiment}.json"


def write(folder: Path, outcome: Outcome) -> Path:
    """Write ``outcome`` in the place of what was there of its experiment; makes ``folder``.

    Numbers that JSON has no word for (NaN, infinity) become null.

    Raises:
        StorageError: it cannot be written.
    """
    path = result_path(folder, outcome.experiment)
    value = _plain({"format": FORMAT, "version": VERSION, **asdict(outcome)})
    with _named(path):
        folder.mkdir(parents=True, exist_ok=True)
    return write_text(path, json.dumps(value, indent=1) + "\n")


def write_text(path: Path, text: str) -> Path:
    """Write ``text`` to ``path``, in the place of what was there and at once; return ``path``.

    Raises:
        StorageError: it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with _named(path):
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    return path


def make_folder(folder: Path) -> None:
    """Make ``folder`` and see that files can be written to it, before anybody waits for what goes there.

    Raises:
        StorageError: they cannot.
    """
    with _named(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass


def read(folder: Path) -> tuple[Outcome, ...]:
    """Return all outcomes in ``folder``, by id; other files are left alone.

    Raises:
        StorageError: no such folder, or a result in it, which is named, is damaged or of another version.
    """
    if not folder.is_dir():
        raise StorageError(
            f"there is no folder {folder}; results are what `python scripts/bench --out FOLDER` writes"
        )
    paths = sorted((*folder.glob("*.json"), *folder.glob("*.json.gz")))
    found = (read_one(path) for path in paths if not path.name.startswith("."))
    return tuple(sorted((one for one in found if one is not None), key=lambda one: one.experiment))


def read_one(path: Path) -> Outcome | None:
    """Return the outcome in ``path``, gzipped where it ends in ``.gz``; None: another kind of JSON file.

    Raises:
        StorageError: it is damaged, or of another version.
    """
    try:
        data = path.read_bytes()
        value = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            return None
        if value["version"] == VERSION:
            return _outcome(value)
    except (
        OSError,
        EOFError,
        zlib.error,
        ValueError,
        TypeError,
        LookupError,
        ArithmeticError,
        RecursionError,
    ) as error:
        raise StorageError(
            f"{path} is damaged ({type(error).__name__}: {error}); remove it, or measure again"
        ) from error
    raise StorageError(
        f"{path} has version {value['version']}, this release reads {VERSION}; measure again, or use the "
        "release that wrote it"
    )


@contextmanager
def _named(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"cannot write {path}: {error.strerror}; choose another folder with --out"
        ) from error


def _outcome(value: Mapping[str, Any]) -> Outcome:
    for key in ("machine", "network"):
        if not isinstance(value.get(key, {}), Mapping):
            raise TypeError(f"{key} is no record")
    plan = value["plan"]
    measurements = tuple(_measurement(one) for one in value["measurements"])
    return Outcome(
        **_known(Outcome, value)
        | {"plan": None if plan is None else _plan(plan), "measurements": measurements}
    )


def _plan(value: Mapping[str, Any]) -> ExperimentPlan:
    return ExperimentPlan(
        variants=tuple(_variant(one) for one in value["variants"]),
        ratios=tuple(_ratio(one) for one in value["ratios"]),
        facts=value["facts"],
    )


def _ratio(value: Mapping[str, Any]) -> Ratio:
    # Results of earlier releases have no cells.
    cells = (Cell(**_known(Cell, one) | {"ways": tuple(one["ways"])}) for one in value.get("cells", ()))
    return Ratio(**_known(Ratio, value) | {"cells": tuple(cells)})


def _variant(value: Mapping[str, Any]) -> Variant:
    curve, shape = value["curve"], value["shape"]
    return Variant(
        **_known(Variant, value)
        | {
            "shape": Shape(**_known(Shape, shape) | {"internal": _rate(shape["internal"])}),
            "job": _job(value["job"]),
            "curve": None if curve is None else _job(curve),
            "rate": _rate_or_phi(value["rate"]),
        }
    )


def _job(value: Mapping[str, Any]) -> Job:
    # Results of earlier releases have no turns.
    return Job(**_known(Job, value) | {"turns": tuple(value.get("turns", ()))})


def _measurement(value: Mapping[str, Any]) -> Measurement:
    return Measurement(
        **_known(Measurement, value)
        | {
            "epochs": tuple(read_epoch(one) for one in value["epochs"]),
            "accuracy": tuple((_number(seconds), _number(share)) for seconds, share in value["accuracy"]),
        }
    )


def read_epoch(value: Mapping[str, Any]) -> EpochRecord:
    """Return the record of an epoch from its JSON values, as ``dataclasses.asdict`` gives them.

    Raises:
        TypeError: a field is missing.
    """
    known = _known(EpochRecord, value)
    # These were no numbers when they were written.
    return EpochRecord(**known | {name: _number(known[name]) for name in ("loss", "train_accuracy")})


def _rate(value: Mapping[str, int] | None) -> Rate | None:
    return None if value is None else Rate(int(value["bits_per_s"]))


def _rate_or_phi(value: Mapping[str, Any] | None) -> Rate | MatchedPhi | None:
    return MatchedPhi(**value) if value and "phi" in value else _rate(value)


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _known(record: type, value: Mapping[str, Any]) -> dict[str, Any]:
    return {field.name: value[field.name] for field in fields(record) if field.name in value}


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    return str(value)
