"""Tensors in dictionaries and tuples, as what a layer takes and gives, by the path that leads to each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias, TypeVar

from dglx_dist.errors import ConfigError

Path: TypeAlias = tuple[str | int, ...]
"""Keys of dictionaries and places in tuples, outermost first; () for what is not nested."""
T = TypeVar("T")


def flatten(value: Any, path: Path = ()) -> dict[Path, Any]:
    """Return what ``value`` holds by its path; dictionaries, tuples and lists are opened.

    Raises:
        ConfigError: a dictionary has a key that is not text.
    """
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ConfigError(f"a layer gave a dictionary with the key {key!r}; name outputs by text")
        items: list[tuple[str | int, Any]] = list(value.items())
    elif isinstance(value, tuple | list):
        items = list(enumerate(value))
    else:
        return {path: value}
    return {where: leaf for key, inner in items for where, leaf in flatten(inner, (*path, key)).items()}


def nest(leaves: Mapping[Path, T]) -> Any:
    """Undo :func:`flatten`; lists come back as tuples.

    Raises:
        ConfigError: a tuple lacks a place.
    """
    if list(leaves) == [()]:
        return leaves[()]
    inner: dict[str | int, dict[Path, T]] = {}
    for (key, *rest), leaf in leaves.items():
        inner.setdefault(key, {})[tuple(rest)] = leaf
    if inner and all(isinstance(key, int) for key in inner):
        if set(inner) != set(range(len(inner))):
            raise ConfigError(
                f"of a tuple of outputs only the places {sorted(inner, key=str)} belong to the node types "
                "that are asked for; name outputs by a dictionary, or ask for all types"
            )
        return tuple(nest(inner[place]) for place in range(len(inner)))
    return {key: nest(below) for key, below in inner.items()}
