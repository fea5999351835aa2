"""Base of the classes that show our objects with DGL's names."""

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
    """The attribute ``name`` of a wrapper's ``inner`` object. Objects of ours become DGL's views.

    The wrapper's class shows the attribute of ``owner``, the class of ``inner``, with its signature and
    docstring.
    """

    def __init__(self, owner: type[Any], name: str) -> None:
        self._owner, self._name = owner, name

    def __get__(self, wrapper: Any, _: type[Any]) -> Any:
        if wrapper is None:
            return getattr(self._owner, self._name, self)
        return view(getattr(wrapper.inner, self._name))


class Wrapper(Shared):
    """Base of DGL's views. A view shows an object of ours, ``inner``, under DGL's names.

    A subclass passes the class of ``inner`` as ``of``. It then shows the public methods and properties of
    that class. All other attributes are those of ``inner``.
    """

    views: ClassVar[dict[type[Any], type[Wrapper]]] = {}
    """Class of ours to the class of its view."""
    inner: Any

    def __init_subclass__(cls, of: type[Any] = object) -> None:
        if of is not object:
            Wrapper.views[of] = cls
        for name in dir(of):
            if not name.startswith("_") and not hasattr(cls, name):
                setattr(cls, name, InnerAttribute(of, name))

    @classmethod
    def over(cls: type[W], inner: Any) -> W:
        """Return DGL's view of one of our objects."""
        wrapper = cls.__new__(cls)
        wrapper.inner = inner
        return wrapper

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "inner":
            raise AttributeError(name)
        return view(getattr(self.inner, name))


def view(value: Any) -> Any:
    """Return DGL's view of one or several of our objects or of a method's result. Keep other values."""
    if type(value) in Wrapper.views:
        return Wrapper.views[type(value)].over(value)
    if type(value) is tuple:
        return tuple(map(view, value))
    if not inspect.ismethod(value):
        return value

    @functools.wraps(value)
    def call(*args: Any, **kwargs: Any) -> Any:
        return view(value(*args, **kwargs))

    return call


class UnknownTypeError(ConfigError, dgl.DGLError):
    """There is no such node or edge type. Scripts expect a DGLError."""
