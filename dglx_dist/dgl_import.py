"""Import of DGL where its GraphBolt cannot be loaded: ``dgl.graphbolt`` is then an empty module.

DGL 2.0 to 2.3 import GraphBolt with ``import dgl``, and its library is built for a few versions of torch.
Nothing else in DGL's graphs, kernels, layers and single-machine loaders uses it, nor does this package.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import final

NAME = "dgl.graphbolt"


@final
class GraphBoltFinder:
    """Finds ``dgl.graphbolt`` where Python does; if its import fails, it is empty, with an ImportWarning."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname == NAME else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module
            spec.loader.exec_module = lambda module: _try(execute, module)  # type: ignore[method-assign]
        return spec


def _try(execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    bare = dict(vars(module))
    try:
        execute(module)
    except (ImportError, OSError, AttributeError, RuntimeError) as error:
        reason = f"{type(error).__name__}: {error}"
    else:
        return
    for name in [name for name in sys.modules if name.startswith(f"{NAME}.")]:
        del sys.modules[name]
    message = f"{NAME} is empty, because it cannot be imported ({reason}); dgl.dataloading works without it"

    def refuse(name: str) -> object:
        raise AttributeError(f"there is no {name!r}: {message}")

    vars(module).clear()
    # Without a path, the import of a submodule fails, too.
    vars(module).update(bare, __path__=[], __getattr__=refuse)
    warnings.warn(message, ImportWarning, stacklevel=2)


def install() -> None:
    """Add the finder once; ``import dgl`` of an earlier time is not changed by it."""
    if not any(isinstance(finder, GraphBoltFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, GraphBoltFinder())
