"""Things that a process has once, however often something that refers to them is copied."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T", bound="Shared")


class Shared:
    """A deep copy of what refers to one of these refers to the same: a model may know its graph."""

    def __deepcopy__(self: T, memo: Mapping[int, object]) -> T:
        return self
