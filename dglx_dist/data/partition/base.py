"""The contract of a partitioner."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from os import PathLike
from typing import ClassVar, Literal

from dglx_dist.errors import ConfigError
from dglx_dist.records import Array, Assignment, RawGraph
from dglx_dist.registry import Registry

DEFAULT_TOLERANCE = 0.05
"""The heaviest part may weigh 5 % more than its share."""


@dataclass(frozen=True, kw_only=True)
class PartitionOptions:
    """What to balance, what to minimise and how hard to try.

    A partitioner refuses every field that it cannot honour and that differs from its default.

    Raises:
        ConfigError: a value is out of its range, named twice, or belongs to nothing.
    """

    balance: tuple[str, ...] = ()
    """Weights that all parts share evenly: ``nodes``, ``degree`` (in-degree), ``train``, ``val``, ``test``,
    ``ntype`` (each node type by itself), ``etype`` (the in-edges of each edge type by itself) or the name of
    a node column of non-negative numbers."""
    tolerance: float | Mapping[str, float] = field(default_factory=dict)
    """How much the heaviest part may exceed its share, 0.05 = 5 %; one for all, or by constraint."""
    target_weights: tuple[float, ...] | None = None
    """(P,) positive share of each part, for unequal machines; they need not sum to 1. None: equal."""
    objective: Literal["cut", "vol"] = "cut"
    """Minimise cut edges, or the number of (node, foreign part) pairs that must be communicated."""
    fast: bool = False
    """The cheap variant: kaminpar is faster; metis is DistDGL's, less memory and a worse cut."""
    servers: int | None = None
    """Number of servers for ``hierarchical``; P must be a multiple of it."""
    workers: int | None = None
    """Number of workers in each server for ``hierarchical``; P = servers x workers."""
    inner: str | None = None
    """Name of the partitioner that ``hierarchical`` applies at both levels; None: the default one."""
    file: str | PathLike[str] | None = None
    """For ``file``: .npy, .txt or .csv with one part id per node, node types one after the other."""
    vector: Array | Mapping[str, Array] | None = field(default=None, compare=False)
    """For ``file``: the part ids themselves, (N,) integers over all node types, or by node type."""
    threads: int = 1
    """Compute threads, where the partitioner has any; more than 1 may cost reproducibility."""

    def __post_init__(self) -> None:
        _check_balance(self.balance)
        object.__setattr__(self, "balance", tuple(self.balance))
        _check_tolerance(self.tolerance, self.constraints)
        if self.objective not in ("cut", "vol"):
            raise ConfigError(f"objective is {self.objective!r}; it is 'cut' or 'vol'")
        if self.target_weights is not None:
            object.__setattr__(self, "target_weights", tuple(float(w) for w in self.target_weights))
            for part, weight in enumerate(self.target_weights):
                if not (weight > 0 and math.isfinite(weight)):
                    raise ConfigError(f"target_weights[{part}] is {weight}; every share must be above 0")
        for name, value in (("servers", self.servers), ("workers", self.workers), ("threads", self.threads)):
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1")

    @property
    def constraints(self) -> tuple[str, ...]:
        """Return what is balanced: ``balance``, with ``nodes`` before it when nothing in it covers all nodes.

        Balancing only the few training nodes would leave the size of the parts to chance.
        """
        sparse = {"train", "val", "test"}
        if set(self.balance) <= sparse:
            return ("nodes", *self.balance)
        return self.balance

    def tolerance_of(self, constraint: str) -> float:
        """Return the tolerance of ``constraint``, 0.05 where none was given."""
        if isinstance(self.tolerance, Mapping):
            return float(self.tolerance.get(constraint, DEFAULT_TOLERANCE))
        return float(self.tolerance)


def _check_balance(balance: tuple[str, ...]) -> None:
    if isinstance(balance, str):
        raise ConfigError(f"balance is the text {balance!r}; it must be a tuple of names: ({balance!r},)")
    for name in balance:
        if balance.count(name) > 1:
            raise ConfigError(f"balance names {name!r} twice; name each constraint once")


def _check_tolerance(tolerance: float | Mapping[str, float], constraints: tuple[str, ...]) -> None:
    given = tolerance if isinstance(tolerance, Mapping) else {"every constraint": tolerance}
    for name, value in given.items():
        if not (value > 0 and math.isfinite(value)):
            raise ConfigError(
                f"the tolerance of {name} is {value}; it must be above 0, 0.05 allows 5 % more than the share"
            )
        if isinstance(tolerance, Mapping) and name not in constraints:
            raise ConfigError(
                f"there is a tolerance for {name!r}, which is not balanced; balanced are "
                f"{', '.join(constraints)}: add it to balance or drop its tolerance"
            )


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


PARTITIONERS: Registry[Partitioner] = Registry(
    "partitioner",
    Partitioner,  # type: ignore[type-abstract]  # the registry only asks issubclass of it
    builtin={
        "random": "dglx_dist.data.partition.simple:Random",
        "hash": "dglx_dist.data.partition.simple:Hash",
        "contiguous": "dglx_dist.data.partition.simple:Contiguous",
        "metis": "dglx_dist.data.partition.metis:Metis",
        "kaminpar": "dglx_dist.data.partition.kaminpar:Kaminpar",
        "ldg": "dglx_dist.data.partition.streaming:Ldg",
        "fennel": "dglx_dist.data.partition.streaming:Fennel",
        "hierarchical": "dglx_dist.data.partition.hierarchical:Hierarchical",
        "feature": "dglx_dist.data.partition.simple:Feature",
        "file": "dglx_dist.data.partition.simple:File",
    },
    group="dglx_dist.partitioners",
)

partitioner = PARTITIONERS.register
"""Decorator that makes one's own partitioner known by a name: ``@partitioner("mine")``."""


def default_partitioner(options: PartitionOptions) -> str:
    """Return ``kaminpar`` where one balance weight is enough, ``metis`` where more is asked.

    KaMinPar needs a quarter of the memory for the same cut and runs on several threads; only METIS
    balances several weights at once and minimises communication volume.
    """
    one_weight = len(options.constraints) == 1 and not {"ntype", "etype"} & set(options.constraints)
    return "kaminpar" if one_weight and options.objective == "cut" else "metis"
