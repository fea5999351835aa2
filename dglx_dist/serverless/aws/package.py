"""The zip of a worker for a functions service: its files of dglx_dist, numpy, pyzmq, a user's stages."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import final

import dglx_dist
from dglx_dist.errors import ConfigError
from dglx_dist.serverless.json_fields import write_json
from dglx_dist.serverless.program import Edge, Step, Vertex
from dglx_dist.serverless.stages.base import STAGES
from dglx_dist.serverless.worker import STAGES_FILE

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


def stages_of(steps: Iterable[Step]) -> dict[str, str]:
    """Return the stages of ``steps`` that dglx_dist does not have itself: name to ``module:Class``."""
    names = sorted({step.stage for step in steps if isinstance(step, Vertex | Edge)})
    found = {name: STAGES.get(name) for name in names}
    return {
        name: f"{stage.__module__}:{stage.__qualname__}"
        for name, stage in found.items()
        if stage.__module__.partition(".")[0] != "dglx_dist"
    }


def code_of(stages: Mapping[str, str]) -> tuple[Path, ...]:
    """Return the files and package folders in which ``stages`` (name to ``module:Class``) are, sorted.

    Raises:
        ConfigError: a stage is in a script or a notebook, or inside a function or class, or its module is
            not found.
    """
    return tuple(sorted({_place_of(name, path) for name, path in stages.items()}))


def check_imports(stages: Mapping[str, str], executor: str) -> None:
    """Refuse stages whose modules import what workers in processes of their own do not have.

    Read are the statements of the modules and of the packages around them; what those import in turn, or
    inside a function or a ``try``, a worker finds out.

    Args:
        stages: Name to ``module:Class``, of classes that are imported here.
        executor: Name, for the message.

    Raises:
        ConfigError: one does; the message says which, and what to do.
    """
    for name, path in stages.items():
        module = path.partition(":")[0]
        parts = module.split(".")
        known = {parts[0], "dglx_dist", *LIBRARIES, *sys.stdlib_module_names}
        for number in range(1, len(parts) + 1):
            for found in _imported_by(".".join(parts[:number])):
                if found not in known:
                    raise ConfigError(
                        f"stage {name!r} is in module {module!r}, which imports {found}, and workers of "
                        f"executor {executor!r} have {' and '.join(LIBRARIES)} only; write the stage with "
                        "numpy, or use executor='inline', whose workers are threads of this process"
                    )


def _imported_by(module: str) -> Iterator[str]:
    """Yield the packages that ``module`` cannot be imported without."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        return
    for node in ast.parse(Path(file).read_bytes(), file).body:
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            yield node.module.partition(".")[0]


def _place_of(name: str, path: str) -> Path:
    module, _, cls = path.partition(":")
    if "." in cls:
        raise ConfigError(
            f"stage {name!r} is {cls!r}, defined inside of something, where workers cannot find it; move its "
            f"class to the top of {module!r}"
        )
    if module == "__main__":
        raise ConfigError(
            f"stage {name!r} is defined in the script that runs, which workers cannot import; move its class "
            "to a module of its own and import it"
        )
    top = module.partition(".")[0]
    spec = importlib.util.find_spec(top)
    if spec is None or not (spec.origin or spec.submodule_search_locations):
        raise ConfigError(
            f"stage {name!r} is in module {module!r}, which is not found; install it, or fix the name"
        )
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))
    return Path(str(spec.origin))


ENTRIES = ("dglx_dist.serverless.aws.function", "dglx_dist.serverless.worker_process")
_STAGES = "dglx_dist/offload/stages"
"""The registry names these as texts, so no import leads to them."""


def package_root() -> Path:
    """Return the folder in which ``dglx_dist`` lies."""
    return Path(dglx_dist.__file__).parent.parent


def worker_files(root: Path) -> tuple[str, ...]:
    """Return the paths below ``root``, sorted, of all modules that a worker can import.

    Args:
        root: The folder in which ``dglx_dist`` lies.

    Raises:
        ConfigError: a module that is imported is not there.
    """
    stages = [f"{_STAGES}/{path.name}" for path in (root / _STAGES).glob("*.py")]
    waiting = [*stages, *(_file_of(root, name) or _missing(root, name) for name in ENTRIES)]
    found: set[str] = set()
    while waiting:
        file = waiting.pop()
        if file in found:
            continue
        found.add(file)
        waiting += _packages_around(file)
        # The package's own __init__ finds its names when they are first used, and a worker uses none.
        waiting += [] if file == "dglx_dist/__init__.py" else _imports_of(root, file)
    return tuple(sorted(found))


def _imports_of(root: Path, file: str) -> Iterator[str]:
    for node in ast.walk(ast.parse((root / file).read_bytes(), file)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            # What is imported from a package may be a module of it, or a name in it.
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in names:
            if name.partition(".")[0] == "dglx_dist" and (path := _file_of(root, name)) is not None:
                yield path


def _file_of(root: Path, name: str) -> str | None:
    path = name.replace(".", "/")
    for candidate in (f"{path}.py", f"{path}/__init__.py"):
        if (root / candidate).is_file():
            return candidate
    return None


def _packages_around(file: str) -> list[str]:
    parents = [parent.as_posix() for parent in Path(file).parents if parent.name]
    return [f"{parent}/__init__.py" for parent in parents]


def _missing(root: Path, name: str) -> str:
    raise ConfigError(f"{root} has no module {name}; install dglx_dist whole")


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
