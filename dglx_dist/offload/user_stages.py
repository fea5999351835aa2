"""Finds the code of a user's own stages, which workers need beside that of dglx_dist."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path

from dglx_dist.errors import ConfigError
from dglx_dist.offload.program import Program
from dglx_dist.offload.stages.registry import STAGES
from dglx_dist.offload.steps import Edge, Vertex


def stages_of(program: Program) -> dict[str, str]:
    """Return the stages of ``program`` that dglx_dist does not have itself: name to ``module:Class``."""
    names = sorted({step.stage for step in program.steps if isinstance(step, Vertex | Edge)})
    found = {name: STAGES.get(name) for name in names}
    return {
        name: f"{stage.__module__}:{stage.__qualname__}"
        for name, stage in found.items()
        if stage.__module__.partition(".")[0] != "dglx_dist"
    }


def code_of(stages: Mapping[str, str]) -> tuple[Path, ...]:
    """Return the files and package folders in which ``stages`` (name to ``module:Class``) are, sorted.

    Raises:
        ConfigError: a stage is in a script or a notebook, or its module is not found.
    """
    return tuple(sorted({_place_of(name, path) for name, path in stages.items()}))


def _place_of(name: str, path: str) -> Path:
    module = path.partition(":")[0]
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
