"""Base classes to show our objects with DGL's names."""

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
    """The attribute ``name`` on a wrapper's ``inner`` object. Our objects become DGL's views.

    The wrapper's class shows the attribute with the signature and docstring that it has in ``owner``, the
    class of ``inner``.
    """

    def __init__(self, owner: type[Any], name: str) -> None:
        self._owner, self._name = owner, name

    def __get__(self, wrapper: Any, _: type[Any]) -> Any:
        if wrapper is None:
            return getattr(self._owner, self._name, self)
        return view(getattr(wrapper.inner, self._name))


class Wrapper(Shared):
    """Base class for DGL's views. A view shows one of our objects, ``inner``, under DGL's names.

    A subclass passes the class of ``inner`` as ``of``. It then shows that class's public methods and
    properties. All other attributes are those of ``inner``.
    """

    views: ClassVar[dict[type[Any], type[Wrapper]]] = {}
    """DGL's view for each of our classes."""
    inner: Any

    def __init_subclass__(cls, of: type[Any] = object) -> None:
        if of is not object:
            Wrapper.views[of] = cls
        for name in dir(of):
            if not name.startswith("_") and not hasattr(cls, name):
                setattr(cls, name, InnerAttribute(of, name))

    @classmethod
    def over(cls: type[W], inner: Any) -> W:
        """Wrap one of our objects in DGL's view."""
        wrapper = cls.__new__(cls)
        wrapper.inner = inner
        return wrapper

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "inner":
            raise AttributeError(name)
        return view(getattr(self.inner, name))


def view(value: Any) -> Any:
    """Wrap our objects, or the objects that a method returns, in DGL's views. Keep other values."""
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
