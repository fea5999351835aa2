"""Pages of Markdown on disk."""

from __future__ import annotations

import os
from pathlib import Path

from dglx_dist.errors import StorageError


def write_page(path: Path, text: str) -> Path:
    """Write ``text`` to ``path``, in the place of what was there and at once; return ``path``.

    Raises:
        StorageError: it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}; choose another place") from error
    return path
