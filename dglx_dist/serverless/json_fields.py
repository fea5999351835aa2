"""Strict reading of untrusted JSON: every field is checked, unknown fields are rejected."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import types
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple, NoReturn, TypeAlias, TypeVar, Union, cast, final, get_args, get_origin

from dglx_dist.errors import ConfigError
from dglx_dist.registry import did_you_mean

Json: TypeAlias = bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"] | None
T = TypeVar("T")
Reader: TypeAlias = Callable[[str], object]


class Within(NamedTuple):
    """Bounds in ``Annotated[TYPE, Within(low, high)]``: of a number, or of the length of a text or list."""

    low: Any
    high: Any


@final
class Fields:
    """The fields of one mapping; call :meth:`end` after reading all of them.

    :meth:`record` reads those of a dataclass by its annotations: bool, an Enum, a dataclass, ``X | None``
    (None if missing or null), and int, float, str, ``tuple[X, ...]`` and ``Mapping[str, X]`` with
    :class:`Within`.

    Args:
        where: What it describes, for messages.
        hidden: Whether messages omit the values.

    Raises:
        ConfigError: ``given`` is not a mapping with text keys. Every method that reads a field raises it if
            the field is missing, has the wrong type or is out of bounds.
    """

    def __init__(self, given: object, where: str, *, hidden: bool = False) -> None:
        if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
            raise ConfigError(f"{where} is a {type(given).__name__}; give an object with named fields")
        self._given: Mapping[str, object] = given
        self.where, self._hidden = where, hidden
        self._read: list[str] = []

    def any(self, name: str) -> object:
        """Return the field unchecked."""
        self._read.append(name)
        if name not in self._given:
            raise ConfigError(f"{self.where} lacks the field {name!r}")
        return self._given[name]

    def maybe(self, name: str, read: Callable[[str], T], default: T) -> T:
        """Return ``read(name)``, or ``default`` if the field is missing or null."""
        self._read.append(name)
        return default if self._given.get(name) is None else read(name)

    def whole(self, name: str, low: int, high: int) -> int:
        """Return an integer in [``low``, ``high``]."""
        value = self.any(name)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self._wrong(name, value, f"a whole number from {low} to {high}")
        return value

    def number(self, name: str, low: float, high: float) -> float:
        """Return a number in [``low``, ``high``], both finite."""
        value = self.any(name)
        # Bounds before float(): NaN is within none, and a huge integer does not fit a float.
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise self._wrong(name, value, f"a number from {low} to {high}")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self.any(name)
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def text(self, name: str, longest: int, least: int = 1) -> str:
        """Return a text of ``least`` to ``longest`` printable characters."""
        value = self.any(name)
        if not isinstance(value, str) or not least <= len(value) <= longest or not value.isprintable():
            size = longest if least == longest else f"{least} to {longest}"
            raise self._wrong(name, value, f"a printable text of {size} characters")
        return value

    def choice(self, name: str, choices: Sequence[str]) -> str:
        value = self.any(name)
        if not isinstance(value, str) or value not in choices:
            hint = did_you_mean(value, choices) if isinstance(value, str) else ""
            raise self._wrong(name, value, f"one of {', '.join(choices)}{hint}")
        return value

    def items(self, name: str, most: int) -> list[object]:
        """Return a list of at most ``most`` items."""
        value = self.any(name)
        if not isinstance(value, list | tuple) or len(value) > most:
            raise self._wrong(name, value, f"a list of at most {most}")
        return list(value)

    def record(self, kind: Callable[..., T], *, defaults: bool = False, **readers: Reader) -> T:
        """Read a record of the dataclass ``kind``; messages omit all values if its ``repr`` omits one.

        Args:
            defaults: Whether fields with a default may be missing.
            readers: Functions of the name, for fields that the annotation does not describe.
        """
        declared: Sequence[dataclasses.Field[Any]] = dataclasses.fields(kind)  # type: ignore[arg-type]
        self._hidden = self._hidden or not all(one.repr for one in declared)
        hints = _hints(kind)
        values = {}
        for one in declared:
            read = readers.get(one.name) or functools.partial(self.value, hint=hints[one.name])
            optional = defaults and one.default is not dataclasses.MISSING
            values[one.name] = self.maybe(one.name, read, one.default) if optional else read(one.name)
        try:
            return kind(**values)
        except ConfigError as error:
            raise ConfigError(f"{self.where}: {error}") from None

    def value(self, name: str, hint: Any) -> Any:
        """Return the field as the type ``hint``; see the class."""
        kind, *rest = get_args(hint) or (hint,)
        if get_origin(hint) in (Union, types.UnionType):
            return self.maybe(name, lambda name: self.value(name, kind), None)
        if get_origin(kind) is tuple:
            items = {str(at): item for at, item in enumerate(self.items(name, rest[0].high))}
            return tuple(self._values(name, items, get_args(kind)[0]).values())
        if get_origin(kind) is Mapping:
            given = self.any(name)
            if not isinstance(given, Mapping) or not rest[0].low <= len(given) <= rest[0].high:
                raise self._wrong(name, given, f"an object of {rest[0].low} to {rest[0].high} fields")
            return self._values(name, given, get_args(kind)[1])
        if dataclasses.is_dataclass(kind):
            make = cast("Callable[..., Any]", kind)
            return read_record(make, self.any(name), f"{self.where} {name!r}", hidden=self._hidden)
        if issubclass(kind, Enum):
            return kind(self.choice(name, [one.value for one in kind]))
        if kind is bool:
            return self.flag(name)
        (low, high), read = rest[0], {int: self.whole, float: self.number}.get(kind)
        return self.text(name, high, low) if read is None else read(name, low, high)

    def _values(self, name: str, given: Mapping[str, object], hint: Any) -> dict[str, Any]:
        inner = Fields(given, f"{self.where} {name!r}", hidden=self._hidden)
        return {key: inner.value(key, hint) for key in given}

    def end(self) -> None:
        """Raise ConfigError if the mapping has a field that was not read."""
        for name in self._given:
            if name not in self._read:
                hint = did_you_mean(name, self._read)
                raise ConfigError(f"{self.where} has the unknown field {name[:80]!r}{hint}; leave it out")

    def refuse(self, name: str, wanted: str) -> NoReturn:
        """Raise ConfigError that asks for ``wanted`` in place of the field's value."""
        raise self._wrong(name, self._given.get(name), wanted)

    def _wrong(self, name: str, value: object, wanted: str) -> ConfigError:
        shown = "(not shown)" if self._hidden else _shown(value)
        return ConfigError(f"{self.where} has {name!r} = {shown}; give {wanted}")


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    found = {}
    for one in reversed(kind.__mro__):
        found.update(inspect.get_annotations(one, eval_str=True))
    return found


def read_record(
    kind: Callable[..., T], given: object, where: str, *, hidden: bool = False, defaults: bool = False
) -> T:
    """Return ``given`` as a record of the dataclass ``kind``; see :class:`Fields`."""
    fields = Fields(given, where, hidden=hidden)
    record = fields.record(kind, defaults=defaults)
    fields.end()
    return record


def read_json(text: bytes | str, longest: int, where: str) -> object:
    """Parse ``text``; ConfigError if it has more than ``longest`` bytes or is not valid JSON."""
    if len(text) > longest:
        raise ConfigError(f"{where} has {len(text)} bytes, more than {longest}; send it in smaller parts")
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not valid JSON: {error}") from None


def write_json(value: Json) -> bytes:
    """Return ``value`` as canonical JSON (sorted keys, no blanks): equal values give equal bytes.

    ConfigError for values that JSON cannot represent, such as NaN.
    """
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"cannot be written as JSON: {error}; use numbers, texts, lists, objects") from None


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def printable(text: str, longest: int) -> str:
    """Return at most ``longest`` characters of ``text``; replace control characters but newline."""
    return "".join(one if one.isprintable() or one == "\n" else "\ufffd" for one in text[:longest])


def _shown(value: object) -> str:
    if isinstance(value, Mapping | list | tuple):
        return f"a {type(value).__name__}"  # it may be nested deeper than can be shown
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
