"""Places in a worker's course at which a throttle rests, and a test's fault strikes."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import TypeAlias


class Place(str, Enum):
    """How far a worker has come with its task."""

    BEFORE_PULL = "before_pull"
    """Nothing was asked for."""
    HALF = "half"
    """One half is computed."""
    COMPUTED = "computed"
    """Both are; nothing was pushed, and of a backward task nothing given."""
    PUSHED = "pushed"
    """The parameter server has the gradients, the graph server lacks rows."""
    END = "end"
    """Everything is given."""


At: TypeAlias = Callable[[Place], None]
"""Called at each place; what it raises ends the task."""


def go_on(_place: Place) -> None:
    """Do nothing."""
