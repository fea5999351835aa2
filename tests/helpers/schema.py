"""Changes of a JSON value, one at a time, that a strict reader must notice or keep."""

import copy
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from dglx_dist.errors import DglxError

_ODD: tuple[Any, ...] = (None, True, -1, 1.5, 10**30, "", "?", [], [None], {}, {"?": 1})


def check_every_field(value: Any, read: Callable[[Any], Any], error: type[DglxError], message: str) -> None:
    """Check that ``read`` refuses every changed ``value`` or loses nothing of it.

    Args:
        value: What ``read`` accepts; JSON.
        read: Parses its argument, and returns it as JSON again.
        error: Raised for what is refused.
        message: Regular expression that each of its messages matches.
    """
    assert _text(read(value)) == _text(value)
    refused = []
    for place, changed in _changes(value):
        try:
            result = read(changed)
        except error as caught:
            refused.append(str(caught))
        else:
            assert _text(result) == _text(changed), place
    assert refused
    assert [text for text in refused if not re.search(message, text)] == []


def _changes(value: Any) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    for place in list(_places(value)):
        for odd in _ODD:
            changed = copy.deepcopy(value)
            _holder(changed, place)[place[-1]] = odd
            yield place, changed
        changed = copy.deepcopy(value)
        del _holder(changed, place)[place[-1]]
        yield place, changed


def _places(value: Any) -> Iterator[tuple[str | int, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (key,)
        yield from ((key, *place) for place in _places(inner))


def _holder(value: Any, place: tuple[str | int, ...]) -> Any:
    for key in place[:-1]:
        value = value[key]
    return value


def _text(value: Any) -> str:
    return json.dumps(_without_nulls(value), sort_keys=True)


def _without_nulls(value: Any) -> Any:
    """A field that is absent is null."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value
