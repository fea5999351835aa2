"""Which files make one table, and how they are written."""

from __future__ import annotations

from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import Literal

from dglx_dist.errors import ConfigError
from dglx_dist.ingest.entries import Entry

FORMATS = ("csv", "parquet")


@dataclass(frozen=True, kw_only=True)
class FileSet:
    """The files of one table, in the order of their rows."""

    paths: tuple[Path, ...]
    format: Literal["csv", "parquet"]
    separator: str = ","


def read_files(entry: Entry) -> FileSet:
    """Return the files that an entry names under ``files``, as its ``format`` says or their suffix tells.

    Raises:
        ConfigError: there are none, one is named twice, or their format is not known.
    """
    stated = entry.get("format")
    if stated is None:
        return named_files(entry, "files")
    paths = _paths(entry, "files")
    form = Entry(stated, ("name", "separator"), entry.path, f"{entry.what}.format")
    name, separator = form.one_of("name", FORMATS), form.optional_text("separator")
    if separator is not None and name != "csv":
        raise form.wrong("separator", f"left out for {name}")
    if separator is not None and not _can_separate(separator):
        raise form.wrong("separator", "one character of ASCII, and neither a quote nor an end of line")
    return FileSet(paths=paths, format="csv" if name == "csv" else "parquet", separator=separator or ",")


def named_files(entry: Entry, key: str) -> FileSet:
    """Return the files that a key names, whose suffix tells the format; see :func:`read_files`."""
    paths = _paths(entry, key)
    names = {path.suffix[1:] for path in paths}
    for name in FORMATS:
        if names == {name}:
            return FileSet(paths=paths, format="csv" if name == "csv" else "parquet")
    odd = next((path.name for path in paths if path.suffix[1:] not in FORMATS), "")
    if not odd:
        raise entry.wrong(key, f"files of one format ({', '.join(FORMATS)})")
    raise ConfigError(
        f"{entry.path}: {entry.what}: {odd} is of no known format; name it *.csv or *.parquet, or, where it "
        'is a table of nodes or edges, give format: {"name": ...}, one of csv, parquet'
    )


def line_files(entry: Entry, key: str) -> FileSet:
    """Return the files that a key names, with one id a line; see :func:`read_files`."""
    return FileSet(paths=_paths(entry, key), format="csv")


def _paths(entry: Entry, key: str) -> tuple[Path, ...]:
    """Return the files that a key names; the rows of one that is named twice would count twice."""
    paths = tuple(path for pattern in entry.texts(key) for path in _matches(pattern, entry))
    if len({path.resolve() for path in paths}) < len(paths):
        raise entry.wrong(key, "files of which none is named twice")
    return paths


def _can_separate(text: str) -> bool:
    return len(text) == 1 and text.isascii() and text not in '"\r\n\0'


def _matches(pattern: str, entry: Entry) -> list[Path]:
    """Return the files of one pattern, sorted, beside the description or below the current folder."""
    for folder in (entry.path.absolute().parent, Path.cwd()):
        names = [pattern] if (folder / pattern).is_file() else glob(pattern, root_dir=folder, recursive=True)
        found = sorted(folder / name for name in names if (folder / name).is_file())
        if found:
            return found
    raise ConfigError(
        f"{entry.path}: {entry.what}: there is no file {pattern!r}, neither in "
        f"{entry.path.absolute().parent} nor in {Path.cwd()}"
    )
