"""The zip package of a worker: its modules of dglx_dist, numpy, pyzmq and a user's stages."""

import ast
import importlib.util
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from modulefinder import ModuleFinder
from pathlib import Path, PurePosixPath
from types import CodeType
from typing import Any

import dglx_dist
from dglx_dist.data.json_fields import write_json
from dglx_dist.data.storage.files import replace_atomically
from dglx_dist.errors import ConfigError
from dglx_dist.strategies.serverless.program import ProgramStep, stage_names
from dglx_dist.strategies.serverless.stages.base import STAGES
from dglx_dist.strategies.serverless.worker import STAGES_FILE

LIBRARIES = {"numpy": "numpy", "zmq": "pyzmq"}
"""Package folder to project name, which is part of ``NAME.libs`` and ``NAME-*.dist-info``."""
_UNUSED_FOLDERS = {"tests", "__pycache__", "include", "f2py", "_examples", "distutils"}
_UNUSED_ENDINGS = (".pyi", ".pyc", ".pxd", ".pyx", ".h", ".c", ".a", ".lib")
_MAX_OUTPUT = 2000
ENTRIES = (
    *("dglx_dist.strategies.serverless.aws.function", "dglx_dist.strategies.serverless.worker_process"),
    "dglx_dist.internals.dgl_import",  # the package's own __init__ imports it
)
_STAGES = "dglx_dist/strategies/serverless/stages"
"""The registry names these modules in strings, so no import leads to them."""
_DATE = (1980, 1, 1, 0, 0, 0)
_MODE = 0o100644 << 16
_LEVEL = 6


def library_folder(name: str) -> Path:
    """Return the folder of an installed library; ConfigError if it is not installed as a folder."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"{name} is not installed as a package folder; pip install {LIBRARIES[name]}")
    return Path(next(iter(spec.submodule_search_locations)))


def installed_files() -> Iterator[tuple[str, Path]]:
    """Yield (name in the package, file) of the libraries installed here, licences included."""
    for name, project in LIBRARIES.items():
        library = library_folder(name)
        site = library.parent
        folders = [library, site / f"{project}.libs", *site.glob(f"{project}-*.dist-info")]
        for file in (file for folder in folders if folder.is_dir() for file in folder.rglob("*")):
            inside = file.relative_to(site)
            if _is_needed(PurePosixPath(inside.as_posix())) and file.is_file():
                yield inside.as_posix(), file


def wheel_files(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Yield (name in the package, content) of the wheels in ``folder``, one per library, with licences."""
    for project in LIBRARIES.values():
        wheels = sorted(folder.glob(f"{project}-*.whl"))
        if len(wheels) != 1:
            raise ConfigError(
                f"{folder} has {len(wheels)} wheels of {project}; provide one for the service's Python"
            )
        with zipfile.ZipFile(wheels[0]) as wheel:
            for name in wheel.namelist():
                if not name.endswith("/") and _is_needed(PurePosixPath(name)):
                    yield name, wheel.read(name)


def download_wheels(folder: Path, *, python: str, architecture: str) -> None:
    """Download wheels of the versions installed here with pip, for "3.12" and "x86_64" or "aarch64", say."""
    modules = {project: importlib.import_module(name) for name, project in LIBRARIES.items()}
    versions = [f"{project}=={module.__version__}" for project, module in modules.items()]
    platforms = [f"--platform=manylinux{kind}_{architecture}" for kind in ("2014", "_2_28")]
    platform_options = [*platforms, f"--python-version={python}", "--only-binary=:all:", "--no-deps"]
    command = [sys.executable, "-m", "pip", "download", *platform_options, f"--dest={folder}", *versions]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(
            f"pip download of {', '.join(versions)} for Python {python} on {architecture} failed; put "
            f"wheels of both into {folder} by other means. pip says: {done.stderr.strip()[-_MAX_OUTPUT:]}"
        )


def _is_needed(path: PurePosixPath) -> bool:
    if path.parts[0].endswith(".dist-info"):
        # The licences of numpy and pyzmq must be distributed with them.
        return "licenses" in path.parts or path.name.upper().startswith("LICENSE")
    return not _UNUSED_FOLDERS.intersection(path.parts) and not path.name.endswith(_UNUSED_ENDINGS)


def stages_of(steps: Iterable[ProgramStep]) -> dict[str, str]:
    """Return the user's own stages in ``steps``: name to ``module:Class``."""
    names = sorted({name for step in steps for name in stage_names(step)})
    classes = {name: STAGES.get(name) for name in names}
    return {
        name: f"{stage.__module__}:{stage.__qualname__}"
        for name, stage in classes.items()
        if stage.__module__.partition(".")[0] != "dglx_dist"
    }


def stage_paths(stages: Mapping[str, str]) -> tuple[Path, ...]:
    """Return the files and package folders that contain ``stages`` (name to ``module:Class``), sorted."""
    return tuple(sorted({_path_of(name, path) for name, path in stages.items()}))


def check_imports(stages: Mapping[str, str], executor: str) -> None:
    """Raise ConfigError if a stage's module imports a library that worker processes lack.

    Checks the top-level imports of the imported modules and of their parent packages. Indirect imports, and
    imports inside a function or ``try``, fail in the worker.
    """
    for name, path in stages.items():
        module = path.partition(":")[0]
        parts = module.split(".")
        known = {parts[0], "dglx_dist", *LIBRARIES, *sys.stdlib_module_names}
        for number in range(1, len(parts) + 1):
            for library in _imported_by(".".join(parts[:number])):
                if library not in known:
                    raise ConfigError(
                        f"stage {name!r} is in module {module!r}, which imports {library}, and workers of "
                        f"executor {executor!r} have {' and '.join(LIBRARIES)} only; write the stage with "
                        "numpy, or use executor='inline', which runs workers in this process"
                    )


def _imported_by(module: str) -> Iterator[str]:
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        return
    for node in ast.parse(Path(file).read_bytes(), file).body:
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            yield node.module.partition(".")[0]


def _path_of(name: str, path: str) -> Path:
    module, _, cls = path.partition(":")
    if "." in cls:
        raise ConfigError(
            f"stage {name!r} is {cls!r}, a nested class, which workers cannot import; move it to the top "
            f"level of {module!r}"
        )
    if module == "__main__":
        raise ConfigError(
            f"stage {name!r} is defined in the running script, which workers cannot import; move its class "
            "to a module and import it"
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


def package_root() -> Path:
    """Return the folder that contains ``dglx_dist``."""
    return Path(dglx_dist.__file__).parent.parent


class _Finder(ModuleFinder):
    def find_module(self, name: str, path: Any, parent: Any = None) -> Any:
        # Where this package is installed, others are in the same folder.
        if path is None and name != "dglx_dist":
            raise ImportError(name)
        return super().find_module(name, path, parent)

    def scan_code(self, co: CodeType, m: Any) -> None:
        # The package's own __init__ imports nearly everything lazily, and a worker uses none of its names.
        if m.__name__ != "dglx_dist":
            super().scan_code(co, m)


def worker_files(root: Path) -> tuple[str, ...]:
    """Return the sorted paths below ``root``, the folder of ``dglx_dist``, of all modules of a worker."""
    finder = _Finder([str(root)])
    stages = sorted(path.stem for path in (root / _STAGES).glob("[!_]*.py"))
    for name in (*ENTRIES, *(f"{_STAGES.replace('/', '.')}.{stage}" for stage in stages)):
        try:
            finder.import_hook(name)
        except ImportError:
            raise ConfigError(f"{root} has no module {name}; install dglx_dist completely") from None
    files = [vars(module)["__file__"] for module in finder.modules.values()]
    return tuple(sorted(Path(file).relative_to(root).as_posix() for file in files if file))


def write_zip(path: Path, stages: Mapping[str, str] | None = None, *, wheels: Path | None = None) -> None:
    """Write the zip package of a worker to ``path``, atomically; equal contents give equal files.

    Args:
        stages: The user's own: name to ``module:Class``. Their whole package is included, except hidden
            files.
        wheels: Folder with wheels of numpy and pyzmq for the service's Python and processor (see
            :func:`download_wheels`); None: the libraries installed here, which must be of that kind.
    """
    root, stages = package_root(), stages or {}
    contents: dict[str, Path | bytes] = {file: root / file for file in worker_files(root)}
    for own in stage_paths(stages):
        contents.update(_code(own))
    contents[STAGES_FILE] = write_json(dict(stages))
    contents.update(installed_files() if wheels is None else wheel_files(wheels))
    with (
        replace_atomically(path) as part,
        zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED, compresslevel=_LEVEL) as archive,
    ):
        for name, content in sorted(contents.items()):
            entry = zipfile.ZipInfo(name, _DATE)
            entry.external_attr, entry.compress_type = _MODE, zipfile.ZIP_DEFLATED
            archive.writestr(entry, content if isinstance(content, bytes) else content.read_bytes())


def _code(path: Path) -> Iterator[tuple[str, Path]]:
    if path.is_file():
        yield path.name, path
        return
    for file in path.rglob("*"):
        inside = file.relative_to(path)
        # Hidden files, such as .env, may contain secrets.
        is_hidden = any(part.startswith(".") for part in inside.parts)
        if file.is_file() and not is_hidden and "__pycache__" not in inside.parts:
            yield f"{path.name}/{inside.as_posix()}", file
