"""What a dataset source is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from dglx_dist.records import RawGraph


class DatasetSource(ABC):
    """One way of getting at a graph; made with where it is, then asked once.

    Args:
        location: What followed the source's name in the spec: a path, a dataset's name, or settings.
        options: The keyword arguments of ``load_dataset``.

    Raises:
        ConfigError: an option that this source does not have.
    """

    @abstractmethod
    def __init__(self, location: str, options: Mapping[str, object]) -> None: ...

    @abstractmethod
    def load(self) -> RawGraph:
        """Read the whole graph; nodes are 0..N-1 per type, splits are boolean masks.

        Raises:
            DatasetError: the data is missing or wrong; the text names file, column and first row.
        """
