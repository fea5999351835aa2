"""Shared pieces of the classes that give our objects DGL's names."""

from __future__ import annotations

from typing import Any, TypeVar, final

from dglx_dist.comm.session import Shared
from dglx_dist.errors import ConfigError

W = TypeVar("W", bound="Wrapper")


@final
class Forward:
    """The attribute ``name`` of a wrapper's ``inner`` object.

    The wrapper's class shows that of ``owner``, the class of ``inner``, with its signature and docstring.
    """

    def __init__(self, owner: type[Any], name: str) -> None:
        self._owner, self._name = owner, name

    def __get__(self, wrapper: Any, _: type[Any]) -> Any:
        return getattr(self._owner if wrapper is None else wrapper.inner, self._name)


class Wrapper(Shared):
    """An object of ours, ``inner``, under DGL's names; its other attributes are those of ``inner``.

    A subclass gives the class of ``inner`` as ``of``, whose public methods and properties it then shows.
    """

    inner: Any

    def __init_subclass__(cls, of: type[Any] = object) -> None:
        for name in dir(of):
            if not (name.startswith("_") or hasattr(cls, name)):
                setattr(cls, name, Forward(of, name))

    @classmethod
    def over(cls: type[W], inner: Any) -> W:
        """Return DGL's view of one of our objects."""
        made = cls.__new__(cls)
        made.inner = inner
        return made

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)


def refuse_graphbolt(use_graphbolt: bool) -> None:
    """Raise ConfigError where DGL would write or read GraphBolt's format."""
    if use_graphbolt:
        raise ConfigError("use_graphbolt=True cannot be honoured: there is one format; leave it out")
