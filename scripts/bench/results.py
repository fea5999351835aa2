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
from dataclasses import asdict
from pathlib import Path

from dglx_dist.errors import StorageError
from scripts.bench.records import Outcome
from scripts.json_records import read_record

FORMAT, VERSION = "dglx bench result", 1
_DAMAGES = (
    OSError,
    EOFError,
    zlib.error,
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    RecursionError,
)


def result_path(folder: Path, experiment: str) -> Path:
    """Where the outcome of ``experiment`` (its id) is kept."""
    return folder / f"{experiment}.json"


def write(folder: Path, outcome: Outcome) -> Path:
    """Write ``outcome`` in the place of what was there of its experiment; makes ``folder``.

    Numbers that JSON has no word for (NaN, infinity) become null.
    """
    path = result_path(folder, outcome.experiment)
    value = _plain({"format": FORMAT, "version": VERSION, **asdict(outcome)})
    make_folder(folder)
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
            outcome: Outcome = read_record(Outcome, value)
            return outcome
    except _DAMAGES as error:
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
