"""The contract of a partitioner."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import fields
from typing import ClassVar

from dglx_dist.errors import ConfigError
from dglx_dist.partition.options import PartitionOptions
from dglx_dist.records import Assignment, RawGraph


class Partitioner(ABC):
    """Gives every node one owner.

    Args:
        options: What to balance and how; kept as :attr:`options`.

    Raises:
        ConfigError: ``options`` sets a field that the class does not name in :attr:`honours`.
    """

    honours: ClassVar[frozenset[str]] = frozenset()
    """Fields of PartitionOptions that this class reads. Any other one that is set is refused at start."""

    max_constraints: ClassVar[int | None] = 1
    """How many weights it balances at once; None: any number."""

    def __init__(self, options: PartitionOptions) -> None:
        self.options = options
        default = PartitionOptions()
        # Balancing the number of nodes is what everybody does (or approximates) when nothing is said.
        spoken = {"balance"} if options.constraints != default.constraints else set()
        if options.vector is not None:
            spoken.add("vector")
        for name in {option.name for option in fields(options)} - {"balance", "vector"}:
            if getattr(options, name) != getattr(default, name):
                spoken.add(name)
        for name in sorted(spoken - self.honours):
            raise ConfigError(
                f"{type(self).__name__} cannot honour {name}={getattr(options, name)!r}; leave it out or "
                "choose another method (metis honours balance, tolerance, target_weights, objective and fast)"
            )

    @abstractmethod
    def assign(self, graph: RawGraph, num_parts: int, seed: int) -> Assignment:
        """Return the owner of every node; called alone, in one process.

        The same graph, options, number of parts and seed give the same answer. Works for 1 part, for
        more parts than nodes (some stay empty), without edges and with several node types. What it
        promises about balance stands in ``Assignment.parameters["tolerance"]``, by constraint.

        Args:
            graph: The graph; it is not changed.
            num_parts: P, at least 1.
            seed: At least 0.

        Raises:
            ConfigError: the options do not fit ``graph`` or ``num_parts``.
        """
