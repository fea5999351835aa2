"""Which files of dglx_dist a worker needs: those that its entry points import, found by reading them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import dglx_dist
from dglx_dist.errors import ConfigError

ENTRIES = ("dglx_dist.offload.worker.function", "dglx_dist.offload.worker.main")
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
