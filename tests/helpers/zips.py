"""Small zips, as packages of functions."""

import zipfile
from pathlib import Path


def write_zip(folder: Path, text: str = "first", *, name: str = "code.py") -> Path:
    path = folder / "worker.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name, text)
    return path
