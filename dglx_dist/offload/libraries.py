"""Files of numpy and pyzmq as a worker needs them: from what is installed, or from wheels for elsewhere."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from dglx_dist.errors import ConfigError

LIBRARIES = {"numpy": "numpy", "zmq": "pyzmq"}
"""Name of the package folder to that on an index, by which ``NAME.libs`` and ``NAME-*.dist-info`` go."""
_UNUSED_FOLDERS = {"tests", "__pycache__", "include", "f2py", "_examples", "distutils"}
_UNUSED_ENDINGS = (".pyi", ".pyc", ".pxd", ".pyx", ".h", ".c", ".a", ".lib")
_LAST_WORDS = 2000


def library_place(name: str) -> Path:
    """Return the folder of an installed package.

    Raises:
        ConfigError: it is not installed as a folder.
    """
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"{name} is not installed as a package folder; pip install {LIBRARIES[name]}")
    return Path(next(iter(spec.submodule_search_locations)))


def installed_files() -> Iterator[tuple[str, Path]]:
    """Yield (name in a package, file) of what is installed here, licences included.

    Raises:
        ConfigError: a library is not installed as a folder.
    """
    for name, project in LIBRARIES.items():
        place = library_place(name)
        folders = [place, place.parent / f"{project}.libs", *place.parent.glob(f"{project}-*.dist-info")]
        for file in (file for folder in folders if folder.is_dir() for file in folder.rglob("*")):
            inside = file.relative_to(place.parent)
            if _is_needed(PurePosixPath(inside.as_posix())) and file.is_file():
                yield inside.as_posix(), file


def wheel_files(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Yield (name in a package, content) of the wheels in ``folder``, licences included.

    Raises:
        ConfigError: there is not exactly one wheel of each library.
    """
    for project in LIBRARIES.values():
        wheels = sorted(folder.glob(f"{project}-*.whl"))
        if len(wheels) != 1:
            raise ConfigError(
                f"{folder} has {len(wheels)} wheels of {project}; put one there for the service's Python"
            )
        with zipfile.ZipFile(wheels[0]) as wheel:
            for name in wheel.namelist():
                if not name.endswith("/") and _is_needed(PurePosixPath(name)):
                    yield name, wheel.read(name)


def download_wheels(folder: Path, *, python: str, architecture: str) -> None:
    """Fetch wheels of the versions installed here with pip, from the index that pip is set up for.

    Args:
        folder: Where they go.
        python: Of the service, such as ``"3.12"``.
        architecture: ``"x86_64"`` or ``"aarch64"``.

    Raises:
        ConfigError: pip does not find them; its words are in the message.
    """
    versions = [f"{project}=={_version(name)}" for name, project in LIBRARIES.items()]
    platforms = [f"--platform=manylinux{kind}_{architecture}" for kind in ("2014", "_2_28")]
    wanted = [*platforms, f"--python-version={python}", "--only-binary=:all:", "--no-deps"]
    command = [sys.executable, "-m", "pip", "download", *wanted, f"--dest={folder}", *versions]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(
            f"pip download of {', '.join(versions)} for Python {python} on {architecture} failed; put "
            f"wheels of both into {folder} by other means. It said: {done.stderr.strip()[-_LAST_WORDS:]}"
        )


def _is_needed(path: PurePosixPath) -> bool:
    if path.parts[0].endswith(".dist-info"):
        # numpy and pyzmq ask that their licences go with them.
        return "licenses" in path.parts or path.name.upper().startswith("LICENSE")
    return not _UNUSED_FOLDERS.intersection(path.parts) and not path.name.endswith(_UNUSED_ENDINGS)


def _version(name: str) -> str:
    return str(importlib.import_module(name).__version__)
