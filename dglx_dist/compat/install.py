"""Putting this package in the place of ``dgl.distributed``, whichever way DGL loads it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, final

import dgl
import dgl.dataloading

from dglx_dist.compat import optim
from dglx_dist.compat.names import CONSTANTS, OF_LOADERS, SUPPORTED, offered
from dglx_dist.compat.submodules import replaced

NAME = "dgl.distributed"
_MARK = "__dglx_dist__"
_MISSING = object()


@final
class Installed:
    """What :func:`install` did; leaving its ``with`` block, or :meth:`undo`, takes it back."""

    def __init__(self, undo: list[Callable[[], None]]) -> None:
        self._undo = undo

    def undo(self) -> None:
        """Put back what was there before."""
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> Installed:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()


def install() -> Installed:
    """Make ``dgl.distributed`` and the distributed loaders of ``dgl.dataloading`` those of this package.

    Call it before the script imports names from there. Where ``import dgl`` has loaded DGL's own module
    already (up to DGL 2.3), its names are rebound, also where its submodules have them; else a module takes
    its place before anybody imports it, and DGL's own is never loaded. A second call does nothing.

    Returns:
        What takes it back.
    """
    undo: list[Callable[[], None]] = []
    loaded = sys.modules.get(NAME)
    if loaded is not None and _MARK in vars(loaded):
        return Installed(undo)
    if loaded is None:
        _take_place(undo)
    else:
        _rebind(loaded, undo)
    # Where DGL has loaded its own package, its loaders of one machine show DistGraph too.
    for name in OF_LOADERS if loaded else OF_LOADERS[1:]:
        _set(dgl.dataloading, name, SUPPORTED[name], undo)
    return Installed(undo)


def _rebind(package: ModuleType, undo: list[Callable[[], None]]) -> None:
    """Put our names into DGL's own package, and where its submodules and the loaders have what it had."""
    stock = dict(vars(package))
    names = {name: value for name, value in offered().items() if not isinstance(value, ModuleType)}
    for name, value in names.items():
        _set(package, name, value, undo)
    inside, outside = {**names, **_public(optim)}, {name: SUPPORTED[name] for name in OF_LOADERS}
    for path, module in list(sys.modules.items()):
        if path.startswith((f"{NAME}.", "dgl.dataloading.")):
            known = inside if path.startswith(f"{NAME}.") else outside
            # A submodule may have something else of that name.
            alike = {
                name: known[name]
                for name in known.keys() & vars(module).keys()
                if name not in stock or vars(module)[name] is stock[name]
            }
            own = replaced(module) if path.startswith(f"{NAME}.") else {}
            for name, value in {**own, **alike}.items():
                _set(module, name, value, undo)
    _set(package, _MARK, True, undo)


def _take_place(undo: list[Callable[[], None]]) -> None:
    """Put a module with its ``optim``, ``nn``, ``constants`` where ``import dgl.distributed`` looks first."""
    package = _module(NAME, "dgl.distributed as dglx_dist has it.", {**offered(), _MARK: True})
    # A package, so that importing what it does not have says so by name.
    package.__path__ = []
    optimizers = _module(f"{NAME}.optim", "Optimizers of embeddings.", _public(optim))
    nn = _module(f"{NAME}.nn", "Embeddings.", {"DistEmbedding": SUPPORTED["DistEmbedding"]})
    constants = _module(f"{NAME}.constants", "Names of types, and the like.", dict(CONSTANTS))
    vars(package).update(optim=optimizers, nn=nn, constants=constants)
    for module in (package, optimizers, nn, constants):
        _put(module, undo)
    _set(dgl, "distributed", package, undo)


def _module(name: str, doc: str, names: dict[str, Any]) -> ModuleType:
    module = ModuleType(name, doc)
    vars(module).update(names)
    return module


def _public(module: ModuleType) -> dict[str, Any]:
    return {name: getattr(module, name) for name in module.__all__}


def _put(module: ModuleType, undo: list[Callable[[], None]]) -> None:
    sys.modules[module.__name__] = module
    undo.append(lambda: _drop(module))


def _drop(module: ModuleType) -> None:
    if sys.modules.get(module.__name__) is module:
        del sys.modules[module.__name__]


def _set(owner: ModuleType, name: str, value: object, undo: list[Callable[[], None]]) -> None:
    before = getattr(owner, name, _MISSING)
    setattr(owner, name, value)
    undo.append(
        (lambda: delattr(owner, name)) if before is _MISSING else (lambda: setattr(owner, name, before))
    )
