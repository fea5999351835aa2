"""The base of the classes that give our objects DGL's names."""

from __future__ import annotations

import functools
import inspect
from typing import Any, ClassVar, TypeVar, final

import dgl

from dglx_dist.comm.session import Shared
from dglx_dist.errors import ConfigError

W = TypeVar("W", bound="Wrapper")


@final
class InnerAttribute:
    """The attribute ``name`` of a wrapper's ``inner`` object; objects of ours that it has become DGL's views.

    The wrapper's class shows that of ``owner``, the class of ``inner``, with its signature and docstring.
    """

    def __init__(self, owner: type[Any], name: str) -> None:
        self._owner, self._name = owner, name

    def __get__(self, wrapper: Any, _: type[Any]) -> Any:
        if wrapper is None:
            return getattr(self._owner, self._name, self)
        return view(getattr(wrapper.inner, self._name))


class Wrapper(Shared):
    """An object of ours, ``inner``, under DGL's names; its other attributes are those of ``inner``.

    A subclass gives the class of ``inner`` as ``of``, whose public methods and properties it then shows.
    """

    views: ClassVar[dict[type[Any], type[Wrapper]]] = {}
    """Class of ours to DGL's."""
    inner: Any

    def __init_subclass__(cls, of: type[Any] = object) -> None:
        Wrapper.views |= {} if of is object else {of: cls}
        for name in dir(of):
            if not (name.startswith("_") or hasattr(cls, name)):
                setattr(cls, name, InnerAttribute(of, name))

    @classmethod
    def over(cls: type[W], inner: Any) -> W:
        """Return DGL's view of one of our objects."""
        made = cls.__new__(cls)
        made.inner = inner
        return made

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "inner":
            raise AttributeError(name)
        return view(getattr(self.inner, name))


def view(value: Any) -> Any:
    """Return DGL's view of an object of ours, of several, or of what a method returns; others as they are."""
    if type(value) in Wrapper.views:
        return Wrapper.views[type(value)].over(value)
    if type(value) is tuple:
        return tuple(map(view, value))
    if inspect.ismethod(value):
        return functools.wraps(value)(lambda *args, **kwargs: view(value(*args, **kwargs)))
    return value


class UnknownTypeError(ConfigError, dgl.DGLError):
    """There is no such node or edge type; scripts expect a DGLError."""
