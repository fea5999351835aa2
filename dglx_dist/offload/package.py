"""The zip of a worker for a functions service: its files of dglx_dist, numpy, pyzmq, a user's stages."""

from __future__ import annotations

import hashlib
import sys
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from dglx_dist.errors import ConfigError
from dglx_dist.offload.fields import write_json
from dglx_dist.offload.libraries import installed_files, wheel_files
from dglx_dist.offload.user_stages import code_of
from dglx_dist.offload.worker.packaged import STAGES_FILE
from dglx_dist.offload.worker_files import package_root, worker_files

_DATE = (1980, 1, 1, 0, 0, 0)
_MODE = 0o100644 << 16
_LEVEL = 6


@final
@dataclass(frozen=True, kw_only=True)
class Package:
    """What goes into a zip."""

    stages: Mapping[str, str] = field(default_factory=dict)
    """The user's own: name to ``module:Class``. Its whole package goes along, but hidden files."""
    wheels: Path | None = None
    """Folder with wheels of numpy and pyzmq for the service's Python and processor (see
    ``libraries.download_wheels``); None: those that are installed here, which must be of the same kind."""
    libraries: bool = True
    """Whether numpy and pyzmq are in it; False where a layer of the service has them."""


@final
@dataclass(frozen=True, kw_only=True)
class Packed:
    """A zip that was written."""

    path: Path
    num_bytes: int
    sha256: str
    """Of the file, 64 hexadecimal characters; equal contents give equal files."""


def write_zip(path: Path, package: Package) -> Packed:
    """Write the zip of ``package`` to ``path``; what was there is replaced once it is whole.

    Raises:
        ConfigError: a stage, a library or a wheel is not found, or this is no Linux and there are no wheels.
    """
    contents = dict(sorted(_contents(package)))
    part = path.with_name(f"{path.name}.part")
    with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED, compresslevel=_LEVEL) as archive:
        for name, content in contents.items():
            entry = zipfile.ZipInfo(name, _DATE)
            entry.external_attr, entry.compress_type = _MODE, zipfile.ZIP_DEFLATED
            archive.writestr(entry, content if isinstance(content, bytes) else content.read_bytes())
    part.replace(path)
    with path.open("rb") as file:
        digest = hashlib.sha256(file.read()).hexdigest()
    return Packed(path=path, num_bytes=path.stat().st_size, sha256=digest)


def _contents(package: Package) -> Iterator[tuple[str, Path | bytes]]:
    root = package_root()
    for file in worker_files(root):
        yield file, root / file
    for place in code_of(package.stages):
        yield from _code(place)
    yield STAGES_FILE, write_json(dict(package.stages))
    if package.libraries:
        yield from wheel_files(package.wheels) if package.wheels is not None else _installed()


def _code(place: Path) -> Iterator[tuple[str, Path]]:
    if place.is_file():
        yield place.name, place
        return
    for file in place.rglob("*"):
        inside = file.relative_to(place)
        # What is hidden, such as .env, is nobody else's affair.
        is_hidden = any(part.startswith(".") for part in inside.parts)
        if file.is_file() and not is_hidden and "__pycache__" not in inside.parts:
            yield f"{place.name}/{inside.as_posix()}", file


def _installed() -> Iterator[tuple[str, Path]]:
    if sys.platform != "linux":
        raise ConfigError(
            f"functions run on Linux, and what is installed here is for {sys.platform}; give a folder of "
            "wheels"
        )
    return installed_files()
