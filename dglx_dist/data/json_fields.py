"""Read untrusted JSON strictly. Every field is checked. Errors name the file, the key and the value."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import math
import reprlib
import sys
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum
from functools import partial
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeAlias,
    TypeVar,
    Union,
    cast,
    final,
    get_args,
    get_origin,
)

from dglx_dist.errors import ConfigError, DglxError
from dglx_dist.registry import suggest_name

Json: TypeAlias = bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"] | None
T = TypeVar("T")
Reader: TypeAlias = Callable[[str], object]
_MISSING = object()
_MAX_FLOAT = sys.float_info.max


class Within(NamedTuple):
    """Bounds for a number or for a text's or list's length, for ``Annotated[TYPE, Within(low, high)]``."""

    low: Any
    high: Any = math.inf


_REPR = reprlib.Repr()  # Deep nesting and large values are cut off.
_REPR.maxlevel = 3
_REPR.maxstring = 60
_REPR.maxother = 60


def _format_value(value: object) -> str:
    text = _REPR.repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


@final
class Fields:
    """The fields in one JSON object. Call :meth:`reject_unread` after all fields were read.

    :meth:`record` reads a dataclass's fields by its annotations. It supports bool, Enum, dataclasses, ``X |
    None`` (None if missing or null), int, float, str, ``tuple[X, ...]`` and ``Mapping[str, X]``. The last
    five may be in ``Annotated`` with :class:`Within`.

    Args:
        where: Name for the file or its content, in messages.
        key: This object's path in the file. Empty for the top object.
        error: Exception class, also for nested objects.
        hidden: Whether messages omit the values.

    Raises:
        DglxError: If ``value`` is not a mapping with text keys. Methods that read a field raise it if the
            field is missing, has the wrong type or is out of bounds.
    """

    def __init__(
        self,
        value: object,
        where: str,
        key: str = "",
        *,
        error: type[DglxError] = ConfigError,
        hidden: bool = False,
    ) -> None:
        self.where = where
        self._key = key
        self._error = error
        self._hidden = hidden

        if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
            value_text = "(not shown)" if hidden else _format_value(value)
            subject = f"key {key!r} is {value_text}" if key else f"it is {value_text}"
            raise error(f"{where}: {subject}, expected an object with named fields")

        self.mapping: Mapping[str, Any] = value
        self._read: dict[str, None] = {}

    @classmethod
    def parse(
        cls, text: bytes | str, where: str, longest: float = math.inf, *, error: type[DglxError] = ConfigError
    ) -> Fields:
        """Parse the JSON object in ``text``. For the arguments see :func:`read_json`."""
        return cls(read_json(text, longest, where, error=error), where, error=error)

    def reject_unknown(self, known: Collection[str]) -> Fields:
        """Return this object. Raise the error if it has a field that is not in ``known``."""
        for name in self.mapping:
            if name not in known:
                hint = f"{suggest_name(name[:80], known)} (supported: {', '.join(known)})"
                raise self._error(f"{self.where}: key {self._format_path(name)!r} is not supported{hint}")
        return self

    def reject_unread(self) -> None:
        """Raise the error if a field was not read."""
        self.reject_unknown(self._read)

    def field_error(self, name: str, expected: str) -> DglxError:
        """Return the error for a field that should be ``expected``."""
        problem = "is missing"
        if name in self.mapping:
            problem = f"is {'(not shown)' if self._hidden else _format_value(self.mapping[name])}"
        return self._error(f"{self.where}: key {self._format_path(name)!r} {problem}, expected {expected}")

    def error(self, problem: object) -> DglxError:
        """Return an error that describes a ``problem`` with this object."""
        texts = (self.where, self._key, str(problem))
        return self._error(": ".join(text for text in texts if text))

    def has(self, name: str) -> bool:
        """Return whether the field has a value other than null."""
        self._read[name] = None
        return self.mapping.get(name) is not None

    def raw_value(self, name: str) -> Any:
        """Return the field unchecked."""
        value = self._get(name)
        if value is _MISSING:
            raise self.field_error(name, "a value")
        return value

    def _get(self, name: str) -> Any:
        # A missing field has no valid type, so the caller's error names the expected type.
        self._read[name] = None
        return self.mapping.get(name, _MISSING)

    def optional(self, name: str, read: Callable[[str], T], default: T) -> T:
        """Return ``read(name)``, or ``default`` if the field is missing or null."""
        if not self.has(name):
            return default
        return read(name)

    def integer(self, name: str, low: float = -math.inf, high: float = math.inf) -> int:
        """Return an integer in [``low``, ``high``]."""
        value = self._get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.field_error(name, f"a whole number{_format_range(low, high, 'from')}")
        return value

    def number(self, name: str, low: float = -_MAX_FLOAT, high: float = _MAX_FLOAT) -> float:
        """Return a number in [``low``, ``high``], both finite."""
        value = self._get(name)
        # Bounds are checked before float(), because huge integers do not fit a float. NaN fails every bound.
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            bounds = _format_range(low, high, "from") if high < _MAX_FLOAT else ""
            raise self.field_error(name, f"a number{bounds}")
        return float(value)

    def boolean(self, name: str) -> bool:
        value = self._get(name)
        if not isinstance(value, bool):
            raise self.field_error(name, "true or false")
        return value

    def text(self, name: str, least: int = 0, most: float = math.inf) -> str:
        """Read a text with ``least`` to ``most`` characters. With ``most``, they must be printable."""
        value = self._get(name)
        must_be_printable = most < math.inf
        is_valid = isinstance(value, str) and least <= len(value) <= most
        if not is_valid or (must_be_printable and not value.isprintable()):
            expected = "a printable text" if must_be_printable else "a text"
            size = _format_range(least, most, "of")
            if size:
                expected = f"{expected}{size} characters"
            raise self.field_error(name, expected)
        return value

    def nonempty_text(self, name: str) -> str:
        """Return a text with at least one character."""
        return self.text(name, 1)

    def choice(self, name: str, choices: Sequence[T]) -> T:
        """Return the item in ``choices`` that has the field's value and type."""
        value = self._get(name)
        for choice in choices:
            if value == choice and type(value) is type(choice):
                return choice
        texts = [choice for choice in choices if isinstance(choice, str)]
        hint = suggest_name(value[:80], texts) if isinstance(value, str) else ""
        raise self.field_error(name, f"one of {', '.join(map(repr, choices))}{hint}")

    def items(self, name: str, least: int = 0, most: float = math.inf) -> Fields:
        """Return a list's ``least`` to ``most`` items as an object with fields ``[0]``, ``[1]``, ..."""
        value = self._get(name)
        if not isinstance(value, list | tuple) or not least <= len(value) <= most:
            raise self.field_error(name, f"a list{_format_range(least, most, 'of')}")
        return self._make_fields(name, {f"[{index}]": item for index, item in enumerate(value)})

    def nested_fields(self, name: str) -> Fields:
        """Return the object in the field."""
        return self._make_fields(name, self.raw_value(name))

    def nested_list(self, name: str, least: int = 0, most: float = math.inf) -> list[Fields]:
        """Return the ``least`` to ``most`` objects in the field's list."""
        items = self.items(name, least, most)
        return [items.nested_fields(key) for key in items.mapping]

    def record(self, kind: Callable[..., T], *, defaults: bool = False, **readers: Reader) -> T:
        """Read this object as the dataclass ``kind``.

        If a field is not in the dataclass's ``repr``, messages omit all values.

        Args:
            kind: The dataclass.
            defaults: Whether fields with a default may be missing.
            readers: Functions that read a field by its name, for fields without a supported annotation.
        """
        declared_fields: Sequence[dataclasses.Field[Any]] = dataclasses.fields(kind)  # type: ignore[arg-type]  # kind is a dataclass
        self._hidden = self._hidden or _hides_values(kind)
        hints = _get_hints(kind)
        values = {}
        for declared_field in declared_fields:
            field_name = declared_field.name
            default = declared_field.default
            read = readers.get(field_name) or partial(self.value, hint=hints[field_name])
            if defaults and default is not dataclasses.MISSING:
                values[field_name] = self.optional(field_name, read, default)
            else:
                values[field_name] = read(field_name)

        try:
            return kind(**values)
        except ConfigError as error:
            raise self.error(error) from None

    def value(self, name: str, hint: Any) -> Any:
        """Return the field as the type ``hint``. See the class for supported types."""
        # Bounds are in Annotated[TYPE, Within(low, high)].
        value_type, *metadata = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        bounds = metadata[0] if metadata else ()
        if get_origin(value_type) in (Union, types.UnionType):
            return self.optional(name, partial(self.value, hint=get_args(value_type)[0]), None)
        if get_origin(value_type) is tuple:
            items = self.items(name, *bounds)
            return tuple(items.value(item_name, get_args(value_type)[0]) for item_name in items.mapping)

        if get_origin(value_type) is Mapping:
            fields = self.nested_fields(name)
            if bounds and not bounds.low <= len(fields.mapping) <= bounds.high:
                raise self.field_error(
                    name, f"an object{_format_range(bounds.low, bounds.high, 'of')} fields"
                )
            return {key: fields.value(key, get_args(value_type)[1]) for key in fields.mapping}

        if dataclasses.is_dataclass(value_type):
            fields = self._make_fields(name, self.raw_value(name), hidden=_hides_values(value_type))
            record = fields.record(cast("Callable[..., Any]", value_type))
            fields.reject_unread()
            return record

        if get_origin(value_type) is Literal:
            return self.choice(name, get_args(value_type))
        if value_type is Any:
            return self.raw_value(name)
        if issubclass(value_type, Enum):
            return value_type(self.choice(name, [member.value for member in value_type]))
        if value_type is bool:
            return self.boolean(name)
        read: Any = {int: self.integer, float: self.number, str: self.text}[value_type]
        return read(name, *bounds)

    def _make_fields(self, name: str, value: object, *, hidden: bool = False) -> Fields:
        hidden = hidden or self._hidden
        return Fields(value, self.where, self._format_path(name), error=self._error, hidden=hidden)

    def _format_path(self, name: str) -> str:
        separator = "." if self._key and not name.startswith("[") else ""
        return f"{self._key}{separator}{name[:80]}"


def _format_range(low: float, high: float, between: str) -> str:
    """Describe a value's bounds, or return an empty text without bounds.

    ``between`` is "from" for numbers, or "of" for sizes, which are at least 0.
    """
    if low == high:
        return f" of {low}"
    if high < math.inf:
        return f" {between} {low} to {high}"
    smallest = 0 if between == "of" else -math.inf
    return f" of at least {low}" if low > smallest else ""


def _hides_values(record_type: Any) -> bool:
    return not all(declared.repr for declared in dataclasses.fields(record_type))


@functools.cache
def _get_hints(record_type: Any) -> dict[str, Any]:
    hints = {}
    for base in reversed(record_type.__mro__):
        hints.update(inspect.get_annotations(base, eval_str=True))
    return hints


def read_record(
    kind: Callable[..., T], value: object, where: str, *, hidden: bool = False, defaults: bool = False
) -> T:
    """Read ``value`` as the dataclass ``kind``, and refuse fields that ``kind`` does not have.

    ``where`` names the value in messages. ``hidden`` leaves the value out. With ``defaults``, fields with a
    default may be missing.
    """
    fields = Fields(value, where, hidden=hidden)
    record = fields.record(kind, defaults=defaults)
    fields.reject_unread()
    return record


def read_json(
    text: bytes | str, longest: float, where: str, *, error: type[DglxError] = ConfigError
) -> object:
    """Parse ``text``. Raise ``error`` if it has more than ``longest`` bytes or is not valid JSON."""
    if len(text) > longest:
        raise error(f"{where} has {len(text)} bytes, more than {longest}; send it in smaller parts")
    try:
        return json.loads(text, parse_constant=_reject_constant)
    except (ValueError, RecursionError) as parse_error:
        raise error(f"{where} is not valid JSON: {parse_error}") from None


def write_json(value: Json) -> bytes:
    """Return ``value`` as canonical JSON with sorted keys and no blanks, so equal values give equal bytes.

    Raises ConfigError if JSON cannot represent a value, such as NaN.
    """
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"cannot be written as JSON: {error}; use numbers, texts, lists, objects") from None


def _reject_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def printable(text: str, longest: int) -> str:
    """Shorten ``text`` to ``longest`` characters, and replace control characters except newline."""
    characters = []
    for character in text[:longest]:
        is_shown = character.isprintable() or character == "\n"
        characters.append(character if is_shown else "\ufffd")
    return "".join(characters)
