"""Typed access to parsed JSON, with errors that name the file and the key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeGuard, TypeVar

from dglx_dist.errors import StorageError

T = TypeVar("T")


class Fields:
    """One JSON object; every accessor raises StorageError naming the file, the key and the value.

    Args:
        value: What the parser returned.
        where: The file.
        key: Path of this object inside the file; empty for the whole.
    """

    def __init__(self, value: object, where: str, key: str = "") -> None:
        if not isinstance(value, dict):
            raise StorageError(f"{where}: {_shown(key, value)}, expected an object")
        self._value: dict[str, object] = value
        self._key = key
        self._seen: set[str] = set()
        self.where = where

    def keys(self) -> Sequence[str]:
        """Return the keys in the order of the file."""
        return list(self._value)

    def wrong(self, key: str, expected: str) -> StorageError:
        """Return the error that ``key`` should have been ``expected``."""
        if key not in self._value:
            return StorageError(f"{self.where}: key {self._path(key)!r} is missing, expected {expected}")
        return StorageError(f"{self.where}: {_shown(self._path(key), self._value[key])}, expected {expected}")

    def value(self, key: str) -> object:
        """Return a value of any kind."""
        return self._get(key)

    def text(self, key: str) -> str:
        """Return a string."""
        value = self._get(key)
        if not isinstance(value, str):
            raise self.wrong(key, "a string")
        return value

    def integer(self, key: str, *, at_least: int | None = None) -> int:
        """Return a whole number."""
        value = self._get(key)
        expected = "a whole number" + ("" if at_least is None else f" of at least {at_least}")
        if not _is_integer(value) or (at_least is not None and value < at_least):
            raise self.wrong(key, expected)
        return value

    def optional_integer(self, key: str) -> int | None:
        """Return a whole number of at least 0, or None."""
        return None if key in self._value and self._get(key) is None else self.integer(key, at_least=0)

    def choice(self, key: str, known: Sequence[T]) -> T:
        """Return the one of ``known`` that the value equals."""
        value = self._get(key)
        for one in known:
            if value == one and type(value) is type(one):
                return one
        raise self.wrong(key, f"one of {', '.join(repr(one) for one in known)}")

    def integers(self, key: str, *, count: int | None = None) -> list[int]:
        """Return a list of whole numbers of at least 0, ``count`` of them."""
        values = [item for item in self._list(key) if _is_integer(item) and item >= 0]
        if len(values) != len(self._list(key)) or count not in (None, len(values)):
            raise self.wrong(key, f"{'' if count is None else f'{count} '}whole numbers of at least 0")
        return values

    def texts(self, key: str, *, count: int) -> list[str]:
        """Return a list of ``count`` strings."""
        values = [item for item in self._list(key) if isinstance(item, str)]
        if len(values) != len(self._list(key)) or len(values) != count:
            raise self.wrong(key, f"{count} strings")
        return values

    def mapping(self, key: str) -> Mapping[str, object]:
        """Return an object of any values."""
        value = self._get(key)
        if not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return value

    def record(self, key: str) -> Fields:
        """Return an object to be read field by field."""
        return Fields(self._get(key), self.where, self._path(key))

    def records(self, key: str) -> list[Fields]:
        """Return a list of objects."""
        return [
            Fields(item, self.where, f"{self._path(key)}[{index}]")
            for index, item in enumerate(self._list(key))
        ]

    def finish(self) -> None:
        """Raise StorageError when there is a key that nobody asked for."""
        for key in self._value:
            if key not in self._seen:
                raise StorageError(f"{self.where}: key {self._path(key)!r} is unknown in this format version")

    def _get(self, key: str) -> object:
        if key not in self._value:
            raise self.wrong(key, "a value")
        self._seen.add(key)
        return self._value[key]

    def _list(self, key: str) -> list[object]:
        value = self._get(key)
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
