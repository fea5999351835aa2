"""Strict reading of JSON objects; errors name the file, the key and the value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard, TypeVar

from dglx_dist.errors import DglxError, StorageError
from dglx_dist.registry import did_you_mean

T = TypeVar("T")


class Fields:
    """One JSON object; accessors raise ``error`` for a value of another kind.

    Args:
        value: Parsed JSON.
        where: The file.
        key: Path of this object inside the file; empty for the whole.
        known: The supported keys; None: any, see :meth:`finish`.
        error: Raised, also by the objects inside.
    """

    def __init__(
        self,
        value: object,
        where: str,
        key: str = "",
        *,
        known: Sequence[str] | None = None,
        error: type[DglxError] = StorageError,
    ) -> None:
        self.where, self._key, self._error = where, key, error
        if not isinstance(value, dict):
            names = f" with {', '.join(known)}" if known else ""
            raise error(f"{where}: {_shown(key, value)}, expected an object{names}")
        self._value: dict[str, Any] = value
        self._seen: set[str] = set()
        for name in value:
            if known is not None and name not in known:
                hint = f"{did_you_mean(name, known)} (supported: {', '.join(known)})"
                raise error(f"{where}: key {self._path(name)!r} is not supported{hint}")

    def keys(self) -> Sequence[str]:
        return list(self._value)

    def items(self, known: Sequence[str] | None = None) -> list[tuple[str, Fields]]:
        """Return all keys with the objects that they hold; ``known`` as for the object itself."""
        return [(key, self.record(key, known)) for key in self._value]

    def has(self, key: str) -> bool:
        """Return whether ``key`` has a value other than null."""
        self._seen.add(key)
        return self._value.get(key) is not None

    def wrong(self, key: str, expected: str) -> DglxError:
        """Return the error that ``key`` must be ``expected``."""
        if key not in self._value:
            return self._error(f"{self.where}: key {self._path(key)!r} is missing, expected {expected}")
        return self._error(f"{self.where}: {_shown(self._path(key), self._value[key])}, expected {expected}")

    def failure(self, problem: str) -> DglxError:
        """Return the error that this object has ``problem``."""
        return self._error(": ".join(filter(None, (self.where, self._key, problem))))

    def value(self, key: str) -> Any:
        if key not in self._value:
            raise self.wrong(key, "a value")
        self._seen.add(key)
        return self._value[key]

    def text(self, key: str) -> str:
        value = self.value(key)
        if not isinstance(value, str):
            raise self.wrong(key, "a string")
        return value

    def word(self, key: str) -> str:
        """Return a text that is not empty."""
        if not self._value.get(key) or not self.text(key):
            raise self.wrong(key, "a text that is not empty")
        return self.text(key)

    def optional_word(self, key: str) -> str | None:
        return self.word(key) if self.has(key) else None

    def words(self, key: str) -> tuple[str, ...]:
        """Return one text or a list of texts, none of them empty."""
        value = self._value.get(key)
        self._seen.add(key)
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, list) or not values or not all(isinstance(v, str) and v for v in values):
            raise self.wrong(key, "a text, or a list of texts")
        return tuple(values)

    def integer(self, key: str, *, at_least: int | None = None) -> int:
        value = self.value(key)
        expected = "a whole number" + ("" if at_least is None else f" of at least {at_least}")
        if not _is_integer(value) or (at_least is not None and value < at_least):
            raise self.wrong(key, expected)
        return value

    def choice(self, key: str, known: Sequence[T]) -> T:
        """Return the one of ``known`` that the value equals."""
        value = self.value(key)
        for one in known:
            if value == one and type(value) is type(one):
                return one
        hint = (
            did_you_mean(value, [one for one in known if isinstance(one, str)])
            if isinstance(value, str)
            else ""
        )
        raise self.wrong(key, f"one of {', '.join(map(repr, known))}{hint}")

    def integers(self, key: str, *, count: int | None = None) -> list[int]:
        """Return a list of whole numbers of at least 0, ``count`` of them."""
        values = self._list(key)
        if not all(_is_integer(item) and item >= 0 for item in values) or count not in (None, len(values)):
            raise self.wrong(key, f"{'' if count is None else f'{count} '}whole numbers of at least 0")
        return values

    def texts(self, key: str, *, count: int | None = None) -> list[str]:
        """Return a list of strings, ``count`` of them."""
        values = self._list(key)
        if not all(isinstance(item, str) for item in values) or count not in (None, len(values)):
            raise self.wrong(key, f"{'a list of' if count is None else count} strings")
        return values

    def mapping(self, key: str) -> dict[str, Any]:
        value = self.value(key)
        if not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return value

    def record(self, key: str, known: Sequence[str] | None = None) -> Fields:
        return Fields(self.value(key), self.where, self._path(key), known=known, error=self._error)

    def records(self, key: str, known: Sequence[str] | None = None) -> list[Fields]:
        return [
            Fields(item, self.where, f"{self._path(key)}[{index}]", known=known, error=self._error)
            for index, item in enumerate(self._list(key))
        ]

    def filled_records(self, key: str, known: Sequence[str]) -> list[Fields]:
        """Return the objects of a list that is not empty."""
        if not isinstance(self._value.get(key), list) or not self._value[key]:
            raise self.wrong(key, "a list that is not empty")
        return self.records(key, known)

    def finish(self) -> None:
        """Raise the error if there is a key that was not read."""
        for key in self._value:
            if key not in self._seen:
                raise self._error(f"{self.where}: key {self._path(key)!r} is unknown in this format version")

    def _list(self, key: str) -> list[Any]:
        value = self.value(key)
        if not isinstance(value, list):
            raise self.wrong(key, "a list")
        return value

    def _path(self, key: str) -> str:
        return f"{self._key}.{key}" if self._key else key


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(key: str, value: object) -> str:
    text = repr(value)
    shown = text if len(text) <= 60 else f"{text[:57]}..."
    return f"key {key!r} is {shown}" if key else f"the file holds {shown}"
