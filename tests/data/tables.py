"""Tables in files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet


def write(folder: Path, files: Mapping[str, str | Mapping[str, Any]]) -> Path:
    """Write texts, and Parquet tables by column, below ``folder``; return it."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            path.write_text(content)
        else:
            pyarrow.parquet.write_table(pa.table(content), path)
    return folder
