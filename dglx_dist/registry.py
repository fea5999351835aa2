"""Register plugin classes by name, and import them on first use."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Generic, TypeVar

from dglx_dist.errors import ConfigError, UnknownNameError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


T = TypeVar("T")
AUTO = "auto"
"""Pass this name as the strategy to let the planner choose by graph, model and network (``planner/``)."""


def suggest_name(name: str, known: Iterable[str]) -> str:
    """Return ``; did you mean 'NEAREST'?`` for a message, or "" if no known name is similar."""
    known_by_lower = {candidate.lower(): candidate for candidate in known}
    similar = difflib.get_close_matches(name.lower(), known_by_lower, n=1)
    if not similar and len(name) > 1:
        similar = [lower for lower in known_by_lower if lower.startswith(name.lower())]
    if not similar:
        return ""
    return f"; did you mean {known_by_lower[similar[0]]!r}?"


class Registry(Generic[T]):
    """Holds one kind of plugin: built in, from other packages' entry points, or added by a decorator.

    Args:
        kind: Word for messages, like ``"partitioner"``.
        base: Base class for all plugins.
        builtin: Name to ``"module:Class"``. The module is imported on first use.
        aliases: Other names for built-in plugins.
        group: Entry-point group for plugins from other packages.
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
        self._name_of: dict[type[T], str] = {}

    def names(self) -> tuple[str, ...]:
        """Return all names without aliases, sorted."""
        external = {point.name for point in _entry_points(self._group)}
        return tuple(sorted({*self._paths, *self._added, *external}))

    def resolve(self, name: str, *, also: Iterable[str] = ()) -> str:
        """Return the plugin name for ``name``, which may be an alias.

        Args:
            also: More names that the caller accepts, for the message.

        Raises:
            UnknownNameError: no plugin has that name. The message lists the known names.
        """
        resolved = self._aliases.get(name, name)
        # Entry points come last, because finding them reads every installed package's metadata.
        if resolved in self._added or resolved in self._paths:
            return resolved
        known = self.names()
        if resolved in known:
            return resolved

        accepted = sorted({*known, *also})
        hint = suggest_name(name, [*accepted, *self._aliases])
        choices = ", ".join(accepted)
        if self._aliases:
            choices += f"; aliases: {', '.join(sorted(self._aliases))}"
        raise UnknownNameError(
            f"there is no {self._kind} {name!r}{hint} (known: {choices}). A class of your own needs a "
            f"decorator in the running script, or an entry point {self._group!r} of an installed package."
        )

    def get(self, name: str) -> type[T]:
        """Import and return the class behind ``name``.

        Raises UnknownNameError if no plugin has that name, and ConfigError if the plugin does not derive from
        the base class.
        """
        resolved = self.resolve(name)
        if resolved in self._added:
            return self._added[resolved]

        if resolved in self._paths:
            module, _, attribute = self._paths[resolved].partition(":")
            plugin = getattr(importlib.import_module(module), attribute)
        else:
            points = [point for point in _entry_points(self._group) if point.name == resolved]
            plugin = points[0].load()
        return self._check(resolved, plugin)

    def register(self, name: str) -> Callable[[type[T]], type[T]]:
        """Return a class decorator that registers ``name``.

        Raises ConfigError if the name is taken, or the class does not derive from the base class.
        """

        def add(plugin: type[T]) -> type[T]:
            # A package may have an entry point for the same class that its module registers here.
            own_value = f"{plugin.__module__}:{plugin.__qualname__}"
            points = [point for point in _entry_points(self._group) if point.name == name]
            is_taken = name in self._paths or name in self._added or name in self._aliases
            if is_taken or any(point.value != own_value for point in points):
                raise ConfigError(f"the {self._kind} name {name!r} is taken. Choose another one.")
            self._added[name] = self._check(name, plugin)
            return plugin

        return add

    def name_of(self, plugin: type[T]) -> str:
        """Return the name that ``plugin`` is registered under, or else its class name in lower case."""
        return self._name_of.get(plugin, plugin.__name__.lower())

    def _check(self, name: str, plugin: object) -> type[T]:
        if isinstance(plugin, type) and issubclass(plugin, self._base):
            self._name_of[plugin] = name
            return plugin
        raise ConfigError(
            f"the {self._kind} {name!r} is {plugin!r}, which is not a subclass of "
            f"{self._base.__module__}.{self._base.__qualname__}"
        )


def _entry_points(group: str) -> Iterable[EntryPoint]:
    return _read_entry_points(group, tuple(sys.path))


@cache
def _read_entry_points(group: str, _: tuple[str, ...]) -> Iterable[EntryPoint]:
    """Read the metadata of all packages in ``sys.path``. The result is cached, because this takes 40 ms."""
    # This import is slow, and built-in names do not need it.
    from importlib.metadata import entry_points

    return entry_points(group=group)
