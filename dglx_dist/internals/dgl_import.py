"""Imports DGL without its GraphBolt, and libraries that keep caches without a home folder.

Tested on DGL 1.1.3 and 2.1.0.

DGL 2.0 to 2.3 import GraphBolt with ``import dgl``, and its library is built for only a few torch versions.
Nothing else in DGL's graphs, kernels, layers and single-machine loaders uses it, and this package does not
either. Where GraphBolt cannot be loaded, ``dgl.graphbolt`` is an empty module.

DGL writes a file to the home folder when it is imported, Numba does not compile if it cannot cache anything,
and Matplotlib complains. The settings that they read are set before they are imported.
"""

import logging
import os
import stat
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import final

NAME = "dgl.graphbolt"

log = logging.getLogger(__name__)


@final
class LibraryFinder:
    """Finds ``dgl.graphbolt`` as Python does. If its import fails, it warns and the module is empty.

    Finds nothing else, but sets the environment for the libraries above.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "dgl":
            # This package works only with this backend. Without the variable, DGL looks for a file, and
            # writes it.
            os.environ.setdefault("DGLBACKEND", "pytorch")
        elif fullname == "numba" and not _is_writable_package():
            _provide_cache("NUMBA_CACHE_DIR", "XDG_CACHE_HOME", "~/.cache", "numba")
        elif fullname == "matplotlib":
            _provide_cache("MPLCONFIGDIR", "XDG_CONFIG_HOME", "~/.config", "matplotlib")

        spec = PathFinder.find_spec(fullname, path, target) if fullname == NAME else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module
            spec.loader.exec_module = lambda module: _execute_or_empty(execute, module)  # type: ignore[method-assign]  # this loader alone is changed
        return spec


def _execute_or_empty(execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    """Execute ``module``. If this fails, empty it and warn, so that only uses of its names raise errors."""
    bare = dict(vars(module))
    try:
        execute(module)
    except (ImportError, OSError, AttributeError, RuntimeError) as error:
        reason = f"{type(error).__name__}: {error}"
    else:
        return

    for name in [name for name in sys.modules if name.startswith(f"{NAME}.")]:
        del sys.modules[name]
    message = f"{NAME} is empty, because it cannot be imported ({reason}). dgl.dataloading works without it."

    def refuse(name: str) -> object:
        raise AttributeError(f"there is no {name!r}: {message}")

    vars(module).clear()
    # Without a path, importing a submodule fails, too.
    vars(module).update(bare, __path__=[], __getattr__=refuse)
    warnings.warn(message, ImportWarning, stacklevel=2)


def _is_writable_package() -> bool:
    # Numba first tries to cache beside each module in this package.
    for folder, names, _ in os.walk(Path(__file__).parents[1]):
        names[:] = [name for name in names if name != "__pycache__"]
        cache = Path(folder, "__pycache__")
        if not os.access(cache if cache.exists() else folder, os.W_OK):
            return False
    return True


def _provide_cache(variable: str, base: str, default: str, name: str) -> None:
    """Set ``variable`` to a temporary folder if the usual cache folder cannot be made."""
    if os.environ.get(variable):
        return
    usual = Path(os.path.expanduser(os.environ.get(base) or default), name)
    try:
        if not usual.is_absolute():
            raise FileNotFoundError(2, "this user has no home folder", str(usual))
        usual.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=usual):
            return
    except OSError as error:
        os.environ[variable] = folder = str(_temporary_folder())
        # Without its cache Numba compiles for a minute. A launcher's ranks inherit the variable and its
        # warning.
        report = log.warning if name == "numba" and os.environ.get("LOCAL_RANK", "0") == "0" else log.info
        reason = f"{usual} cannot be written ({error.strerror})"
        report("%s. The cache of %s is in %s. Set %s to choose another.", reason, name, folder, variable)


def _temporary_folder() -> Path:
    # The folder must belong to this user only, because its content is trusted.
    folder = Path(tempfile.gettempdir(), f"dglx-cache-{os.getuid()}")
    try:
        folder.mkdir(0o700)
    except FileExistsError:
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
            return Path(tempfile.mkdtemp(prefix="dglx-cache-"))
    return folder


def install() -> None:
    """Add the finder once. Earlier imports are not changed."""
    if not any(isinstance(finder, LibraryFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, LibraryFinder())
