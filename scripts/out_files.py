"""Folders and files of results, and the ends of logs that errors show."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from dglx_dist.data.storage.files import partial_folder, replace_atomically
from dglx_dist.errors import StorageError


def make_folder(folder: Path) -> None:
    """Make ``folder`` and see that files can be written to it, before anybody waits for what goes there.

    Raises:
        StorageError: they cannot.
    """
    with writing_to(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass


def write_text(path: Path, text: str) -> Path:
    """Write ``text`` to ``path``, in the place of what was there and at once; return ``path``.

    Raises:
        StorageError: it cannot be written.
    """
    with writing_to(path), replace_atomically(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")
    return path


@contextmanager
def writing_to(path: Path) -> Iterator[None]:
    """Raise StorageError, which names ``path``, for what the system refuses."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"cannot write to {path}: {error.strerror}; choose another folder with --out"
        ) from error


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Make a folder of this user's that is removed afterwards; remove those of processes that were killed."""
    with partial_folder(Path(tempfile.gettempdir(), "dglx-scratch")) as folder:
        folder.chmod(0o700)
        yield folder


def last_lines(logs: Iterable[Path], most: int) -> str:
    """Return the last lines of each log that there is, below each other, each behind the log's name."""
    return "".join(
        f"\n  {log.name}: {line}"
        for log in logs
        if log.is_file()
        for line in log.read_text(errors="replace").splitlines()[-most:]
    )


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table, one line per row; ``|`` and line ends in cells are escaped.

    Raises:
        ValueError: a row has another number of cells than ``head``.
    """
    lines = [_markdown_line(head), "|" + "---|" * len(head)]
    for row in rows:
        if len(row) != len(head):
            raise ValueError(f"row {list(row)} has {len(row)} cells, the head has {len(head)}")
        lines.append(_markdown_line(row))
    return "\n".join(lines)


def _markdown_line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"
