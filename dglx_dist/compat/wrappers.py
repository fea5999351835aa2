"""Shared pieces of the classes that give our objects DGL's names."""

from __future__ import annotations

from typing import Any, final

from dglx_dist.errors import ConfigError


@final
class Forward:
    """A method or property that a wrapper takes unchanged from its ``inner`` object.

    Args:
        attribute: Of the class of ``inner``. The wrapper's class shows it too, with signature and docstring.
    """

    def __init__(self, attribute: Any) -> None:
        self._attribute = attribute

    def __get__(self, wrapper: Any, owner: type[Any]) -> Any:
        return self._attribute if wrapper is None else self._attribute.__get__(wrapper.inner)


def refuse_graphbolt(use_graphbolt: bool) -> None:
    """Raise ConfigError where DGL would write or read GraphBolt's format."""
    if use_graphbolt:
        raise ConfigError("use_graphbolt=True cannot be honoured: there is one format; leave it out")
