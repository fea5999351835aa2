"""JSON objects whose keys are known: whatever else is in them is refused by name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

from dglx_dist.errors import ConfigError
from dglx_dist.registry import did_you_mean


def read_json(path: Path) -> object:
    """Read a file in which no object has a key twice, for JSON would pass over all but the last.

    Raises:
        ConfigError: it is missing, or no such JSON.
    """
    try:
        found: object = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_once)
        # Neither NaN nor half of a character, which Python lets pass, can be written down again.
        json.dumps(found, ensure_ascii=False, allow_nan=False).encode()
    except OSError as problem:
        raise ConfigError(
            f"{path.absolute()} cannot be read: {problem.strerror}; name the description"
        ) from None
    except (ValueError, RecursionError) as problem:
        raise ConfigError(f"{path}: no valid JSON: {problem}") from None
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    for key in found if len(found) < len(pairs) else ():
        if sum(key == one for one, _ in pairs) > 1:
            raise ValueError(f"the key {key!r} stands twice in one object")
    return found


@final
class Entry:
    """One JSON object.

    Args:
        value: What was read.
        known: Its keys.
        path: The file, and
        what: where in it, as messages begin.

    Raises:
        ConfigError: it is no object, or has another key.
    """

    def __init__(self, value: object, known: Sequence[str], path: Path, what: str) -> None:
        if not isinstance(value, dict):
            raise ConfigError(f"{path}: {what} must be a JSON object with {', '.join(known)}, not {value!r}")
        for key in value:
            if key not in known:
                raise ConfigError(
                    f"{path}: {what} has the key {key!r}, which is not supported"
                    f"{did_you_mean(key, known)} (supported: {', '.join(known)})"
                )
        self.value: dict[str, Any] = value
        self.path = path
        self.what = what

    def wrong(self, key: str, expected: str) -> ConfigError:
        """Return the error that says what a key must be."""
        shown = f"is {self.value[key]!r}" if key in self.value else "is missing"
        return ConfigError(f"{self.path}: {self.what}: {key!r} {shown}; it must be {expected}")

    def get(self, key: str) -> Any:
        """Return what a key has; None where it has nothing."""
        return self.value.get(key)

    def text(self, key: str) -> str:
        """Return the text of a key.

        Raises:
            ConfigError: it is missing, no text, or empty.
        """
        value = self.get(key)
        if not isinstance(value, str) or not value:
            raise self.wrong(key, "a text that is not empty")
        return value

    def optional_text(self, key: str) -> str | None:
        """Return the text of a key, or None where it is missing."""
        return None if self.get(key) is None else self.text(key)

    def texts(self, key: str) -> tuple[str, ...]:
        """Return the texts of a key: one, or a list of them."""
        value = self.get(key)
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, list) or not values or not all(isinstance(v, str) and v for v in values):
            raise self.wrong(key, "a text, or a list of texts")
        return tuple(values)

    def one_of(self, key: str, known: Sequence[str]) -> str:
        """Return the text of a key, which is one of ``known``."""
        value = self.text(key)
        if value not in known:
            raise self.wrong(key, f"one of {', '.join(known)}{did_you_mean(value, known)}")
        return value

    def list_of(self, key: str) -> list[Any]:
        """Return the list of a key, which must not be empty."""
        value = self.get(key)
        if not isinstance(value, list) or not value:
            raise self.wrong(key, "a list that is not empty")
        return value
