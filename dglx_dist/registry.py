"""Names of plugins to their classes, imported only when asked for."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Generic, TypeVar

from dglx_dist.errors import ConfigError, UnknownNameError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


T = TypeVar("T")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``; did you mean 'NEAREST'?``, to follow a message; empty when nothing in ``known`` is near."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


class Registry(Generic[T]):
    """Plugins of one kind: built-in ones by path, a package's by entry point, a script's by decorator.

    Args:
        kind: What a plugin is called in messages, e.g. ``"partitioner"``.
        base: The class that every plugin must derive from.
        builtin: Name to ``"module:Class"``; the module is imported when the name is asked for.
        aliases: Other names for built-in ones.
        group: Entry-point group in which other packages announce theirs.
    """

    def __init__(
        self,
        kind: str,
        base: type[T],
        *,
        builtin: Mapping[str, str],
        aliases: Mapping[str, str] | None = None,
        group: str,
    ) -> None:
        self._kind = kind
        self._base = base
        self._paths = dict(builtin)
        self._aliases = dict(aliases or {})
        self._group = group
        self._added: dict[str, type[T]] = {}

    def names(self) -> tuple[str, ...]:
        """Return every name that :meth:`get` resolves, aliases left out, sorted."""
        announced = {point.name for point in _announced(self._group)}
        return tuple(sorted({*self._paths, *self._added, *announced}))

    def resolve(self, name: str) -> str:
        """Return the one name behind ``name``, which may be an alias.

        Raises:
            UnknownNameError: no plugin has that name.
        """
        resolved = self._aliases.get(name, name)
        # What other packages announce is looked for last: it means reading the metadata of all of them.
        if resolved in self._added or resolved in self._paths:
            return resolved
        known = self.names()
        if resolved in known:
            return resolved
        hint = did_you_mean(name, [*known, *self._aliases])
        raise UnknownNameError(f"there is no {self._kind} {name!r}{hint} (known: {', '.join(known)})")

    def get(self, name: str) -> type[T]:
        """Return the class behind ``name``, importing its module now.

        Raises:
            UnknownNameError: no plugin has that name.
            ConfigError: the plugin is not a class of the right kind.
        """
        resolved = self.resolve(name)
        if resolved in self._added:
            return self._added[resolved]
        if resolved in self._paths:
            module, _, attribute = self._paths[resolved].partition(":")
            found = getattr(importlib.import_module(module), attribute)
        else:
            found = next(point for point in _announced(self._group) if point.name == resolved).load()
        return self._checked(resolved, found)

    def register(self, name: str) -> Callable[[type[T]], type[T]]:
        """Return a decorator that makes the decorated class known as ``name``.

        Raises:
            ConfigError: the name is taken, or the class is of the wrong kind.
        """

        def add(plugin: type[T]) -> type[T]:
            if name in self.names() or name in self._aliases:
                raise ConfigError(f"the {self._kind} name {name!r} is taken; choose another one")
            self._added[name] = self._checked(name, plugin)
            return plugin

        return add

    def _checked(self, name: str, found: object) -> type[T]:
        if isinstance(found, type) and issubclass(found, self._base):
            return found
        raise ConfigError(
            f"the {self._kind} {name!r} is {found!r}, which is not a subclass of "
            f"{self._base.__module__}.{self._base.__qualname__}"
        )


def _announced(group: str) -> Iterable[EntryPoint]:
    # Imported only here: it takes as long as half of NumPy, and built-in names need none of it.
    from importlib.metadata import entry_points

    return entry_points(group=group)
