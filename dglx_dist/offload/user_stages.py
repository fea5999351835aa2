"""Finds the code of a user's own stages, which workers need beside that of dglx_dist."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from dglx_dist.errors import ConfigError
from dglx_dist.offload.libraries import LIBRARIES
from dglx_dist.offload.stages.registry import STAGES
from dglx_dist.offload.steps import Edge, Step, Vertex


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
