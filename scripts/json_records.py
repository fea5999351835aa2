"""JSON values as the dataclasses that they were written from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


def read_record(hint: Any, value: Any, name: str = "it") -> Any:
    """Return JSON values, as ``dataclasses.asdict`` gives them, as the type ``hint``.

    Fields of records that are not there have their default, fields that a record does not have are left out,
    a float that is null was no number when it was written, and of a union the record is taken that has all
    the fields.

    Raises:
        TypeError: a field without default is missing, or a value has another type; it is named.
    """
    kind, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if kind in (Union, UnionType):
        return None if value is None else read_record(_fitting(inner, value), value, name)
    if kind is Literal:
        if value not in inner:
            raise TypeError(f"{name} is {value!r}, none of {', '.join(map(str, inner))}")
        return value
    if is_dataclass(hint):
        hints, fields_by_name = get_type_hints(hint), _check(value, Mapping, name)
        values = {
            field.name: read_record(hints[field.name], fields_by_name[field.name], field.name)
            for field in fields(hint)
            if field.name in fields_by_name
        }
        return hint(**values)  # type: ignore[operator]  # the class, no instance of it
    if kind is tuple:
        items = _check(value, list | tuple, name)
        of = inner[:1] * len(items) if inner[-1] is Ellipsis else inner
        return tuple(read_record(field, each, name) for field, each in zip(of, items, strict=True))
    if hint is float:
        return math.nan if value is None else float(_check(value, int | float, name))
    if hint is int and isinstance(value, bool):
        raise TypeError(f"{name} is no whole number")
    return _check(value, kind or hint, name)


def _fitting(kinds: tuple[Any, ...], value: Any) -> Any:
    kinds = tuple(option for option in kinds if option is not NoneType)
    for kind in filter(is_dataclass, kinds):
        if isinstance(value, Mapping) and set(value) <= {option.name for option in fields(kind)}:
            return kind
    return kinds[0]


def _check(value: Any, kind: Any, name: str) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{name} is a {type(value).__name__}, not what is expected")
    return value
