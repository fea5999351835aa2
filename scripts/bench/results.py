"""``<OUT>/<ID>.json``: what became of one experiment, as a file that can be read back whole."""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from dglx_dist.errors import StorageError
from scripts.bench.records import Outcome
from scripts.json_records import read_record
from scripts.out_files import make_folder, write_text

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
    """Return the path of the outcome of the experiment with id ``experiment``."""
    return folder / f"{experiment}.json"


def write(folder: Path, outcome: Outcome) -> Path:
    """Write ``outcome`` in the place of what was there of its experiment; makes ``folder``.

    Numbers that JSON has no word for (NaN, infinity) become null.
    """
    path = result_path(folder, outcome.experiment)
    value = plain({"format": FORMAT, "version": VERSION, **asdict(outcome)})
    make_folder(folder)
    return write_text(path, json.dumps(value, indent=1) + "\n")


def read(folder: Path) -> tuple[Outcome, ...]:
    """Return all outcomes in ``folder``, by id; StorageError: one is damaged, or of another version."""
    if not folder.is_dir():
        raise StorageError(
            f"there is no folder {folder}; results are what `python scripts/bench --out FOLDER` writes"
        )
    paths = sorted((*folder.glob("*.json"), *folder.glob("*.json.gz")))
    outcomes = (read_one(path) for path in paths if not path.name.startswith("."))
    return tuple(
        sorted(
            (outcome for outcome in outcomes if outcome is not None), key=lambda outcome: outcome.experiment
        )
    )


def read_one(path: Path) -> Outcome | None:
    """Return the outcome in ``path``, gzipped where it ends in ``.gz``; None: another kind of JSON file."""
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


def plain(value: object) -> object:
    """Return JSON values; numbers that JSON has no word for become null, what it does not know a text."""
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    return str(value)
