"""Which peers are installed here, and in which versions."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("torch", "dgl", "torch_geometric", "pyg_lib", "torch_sparse")


def versions() -> dict[str, str]:
    """Return name to version of the packages that the peers are made of, as far as they are installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
