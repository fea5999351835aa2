"""The interface and registry for partitioners, their options, and the options for a partitioning."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from os import PathLike
from pathlib import Path
from typing import ClassVar, Literal

from dglx_dist.data.external_memory import Workspace
from dglx_dist.errors import ConfigError
from dglx_dist.memory import format_bytes, read_size
from dglx_dist.options import (
    at_least,
    check_ranges,
    option,
    parse_by_name,
    parse_fractions,
    parse_names,
    parse_tolerances,
    refuse_addresses,
)
from dglx_dist.records import Assignment, RawGraph
from dglx_dist.registry import Registry

DEFAULT_TOLERANCE = 0.05
"""Default tolerance. The heaviest part may exceed its share by 5 %."""


@dataclass(frozen=True, kw_only=True)
class PartitionOptions:
    """Options of partitioners. A partitioner rejects the options that it does not support.

    Raises:
        ConfigError: a value is out of range, a constraint is named twice, or a tolerance has no constraint.
    """

    balance: tuple[str, ...] = option(
        tuple,
        "Weights to balance: nodes, degree, train, val, test, ntype, etype, or a column.",
        metavar="A,B",
        parse=parse_names,
    )
    """Constraints to balance. ``degree`` is the in-degree, ``ntype`` each node type, and ``etype`` the
    in-edges of each edge type. Other names are node columns of non-negative numbers."""
    tolerance: float | Mapping[str, float] = option(
        dict,
        "Allowed excess of a part: 0.05, or train=0.1,degree=0.02.",
        metavar="T",
        parse=parse_tolerances,
    )
    """Allowed excess of a part over its share, where 0.05 is 5 %. One value, or by constraint."""
    target_weights: tuple[float, ...] | None = option(
        None, "Share of each part, for unequal machines: 1,1,2.", metavar="W,W", parse=parse_fractions
    )
    """(P,) positive relative shares of the parts, or None for equal shares."""
    objective: Literal["cut", "vol"] = option("cut", "Minimise cut edges (cut) or communicated nodes (vol).")
    """Minimise the cut edges, or with ``vol`` the (node, remote part) pairs that must be communicated."""
    fast: bool = option(False, "Use less time (kaminpar) or memory (metis), with a worse cut.")
    """Whether to use the fast mode of kaminpar, or DistDGL's mode of metis."""
    servers: int | None = option(
        None, "Number of servers for hierarchical. Parts = servers x workers.", check=at_least(1)
    )
    workers: int | None = option(
        None, "Number of workers in each server, for hierarchical.", check=at_least(1)
    )
    inner: str | None = None
    """Name of the partitioner of both levels of ``hierarchical``. None chooses it by the constraints."""
    file: str | PathLike[str] | None = option(
        None, "A .npy file with one part id per node, for file.", kind=Path
    )
    """File of part ids, one node type after the other."""
    passes: int = option(
        1, "Passes of ldg and fennel. More passes take time and cut fewer edges.", check=at_least(1)
    )
    """Number of passes. Each pass assigns every node again."""
    threads: int = option(1, "Threads of the partitioner, if it supports them.", check=at_least(1))
    """Threads of ``kaminpar``. With more than 1, results may not be reproducible."""

    def __post_init__(self) -> None:
        if isinstance(self.balance, str):
            raise ConfigError(
                f"balance is the text {self.balance!r}; it must be a tuple of names: ({self.balance!r},)"
            )

        for name in self.balance:
            if self.balance.count(name) > 1:
                raise ConfigError(f"balance names {name!r} twice; name each constraint once")

        object.__setattr__(self, "balance", tuple(self.balance))
        _check_tolerance(self.tolerance, self.constraints)
        check_ranges(self, "{name} is {value}; it")

        if self.target_weights is not None:
            weights = tuple(float(weight) for weight in self.target_weights)
            object.__setattr__(self, "target_weights", weights)
            for part, weight in enumerate(weights):
                if not (weight > 0 and math.isfinite(weight)):
                    raise ConfigError(f"target_weights[{part}] is {weight}; every share must be above 0")

    @property
    def constraints(self) -> tuple[str, ...]:
        """Constraints to balance. ``nodes`` is added if no constraint covers all nodes.

        Balancing only the few training nodes would not limit how large the parts are.
        """
        if set(self.balance) <= {"train", "val", "test"}:
            return ("nodes", *self.balance)
        return self.balance

    def tolerance_of(self, constraint: str) -> float:
        """Return the tolerance for ``constraint``."""
        if isinstance(self.tolerance, Mapping):
            return float(self.tolerance.get(constraint, DEFAULT_TOLERANCE))
        return float(self.tolerance)


def _check_tolerance(tolerance: float | Mapping[str, float], constraints: tuple[str, ...]) -> None:
    """Raise ConfigError if a tolerance is not above 0, or is set for a constraint that is not balanced."""
    tolerances = tolerance if isinstance(tolerance, Mapping) else {"every constraint": tolerance}
    for name, value in tolerances.items():
        if not (value > 0 and math.isfinite(value)):
            raise ConfigError(
                f"the tolerance of {name} is {value}; it must be above 0, and 0.05 allows 5 % over the share"
            )

        if isinstance(tolerance, Mapping) and name not in constraints:
            raise ConfigError(
                f"there is a tolerance for {name!r}, which is not balanced (balanced: "
                f"{', '.join(constraints)}); add it to balance, or drop its tolerance"
            )


class Partitioner(ABC):
    """Assigns every node to one owner.

    Raises ConfigError if ``options`` sets a field that is not in :attr:`honours`.
    """

    honours: ClassVar[frozenset[str]] = frozenset()
    """Supported PartitionOptions fields. All others must have their default value."""

    max_constraints: ClassVar[int | None] = 1
    """Maximum number of balance weights, or None for any number."""

    external: ClassVar[bool] = False
    """Whether :attr:`workspace` is used, so that a graph may be larger than the granted memory."""

    workspace: Workspace | None = None
    """Workspace for limited memory. It is set before :meth:`assign`."""

    def __init__(self, options: PartitionOptions) -> None:
        self.options = options
        default = PartitionOptions()
        for option_field in sorted(fields(options), key=lambda item: item.name):
            name = option_field.name
            value = getattr(options, name)
            if value == getattr(default, name) or name in self.honours:
                continue
            # All partitioners balance the node count, so this request changes nothing.
            if name == "balance" and options.constraints == default.constraints:
                continue
            raise ConfigError(
                f"{type(self).__name__} does not support {name}={value!r}; leave it out or choose another "
                "method (metis honours balance, tolerance, target_weights, objective and fast)"
            )

    def within(self, workspace: Workspace | None, graph: RawGraph) -> Partitioner:
        """Set the ``workspace`` and return this partitioner.

        Raises ConfigError if the method only works in memory, and the edges in ``graph`` do not fit.
        """
        num_bytes = 32 * graph.total_edges
        if workspace is not None and not self.external and not workspace.fits(num_bytes):
            alternatives = [name for name in PARTITIONERS.names() if PARTITIONERS.get(name).external]
            raise ConfigError(
                f"{type(self).__name__} only works in memory, and {graph.total_edges} edges "
                f"take about {format_bytes(num_bytes)}; grant more --memory, or choose "
                f"{', '.join(alternatives)}"
            )

        self.workspace = workspace
        return self

    @abstractmethod
    def assign(self, graph: RawGraph, num_parts: int, seed: int) -> Assignment:
        """Assign every node to a part. One process calls this method.

        The result must be deterministic, and the graph must not be changed. A method must support a single
        part, more parts than nodes (some are empty), graphs without edges, and several node types.
        ``Assignment.parameters["tolerance"]`` has the promised balance by constraint. Raises ConfigError if
        the options do not match ``graph`` or ``num_parts``.
        """


_BUILTIN = {
    "random": "dglx_dist.data.partition.one_pass:Random",
    "hash": "dglx_dist.data.partition.one_pass:Hash",
    "contiguous": "dglx_dist.data.partition.one_pass:Contiguous",
    "metis": "dglx_dist.data.partition.multilevel:Metis",
    "kaminpar": "dglx_dist.data.partition.multilevel:Kaminpar",
    "ldg": "dglx_dist.data.partition.one_pass:Ldg",
    "fennel": "dglx_dist.data.partition.one_pass:Fennel",
    "hierarchical": "dglx_dist.data.partition.hierarchical:Hierarchical",
    "feature": "dglx_dist.data.partition.one_pass:Feature",
    "file": "dglx_dist.data.partition.one_pass:File",
}
PARTITIONERS: Registry[Partitioner] = Registry(
    "partitioner",
    Partitioner,  # type: ignore[type-abstract]  # the registry only asks issubclass of it
    builtin=_BUILTIN,
    group="dglx_dist.partitioners",
)


def default_partitioner(options: PartitionOptions) -> str:
    """Choose ``kaminpar`` for one balance weight, otherwise ``metis``.

    KaMinPar needs a quarter of the memory for the same cut, and has threads. Only METIS balances several
    weights and minimises communication volume.
    """
    constraints = options.constraints
    # These two constraints have one weight for each type.
    has_weight_per_type = "ntype" in constraints or "etype" in constraints
    if len(constraints) > 1 or has_weight_per_type or options.objective != "cut":
        return "metis"
    return "kaminpar"


@dataclass(frozen=True, kw_only=True)
class PartitionPlan:
    """Partitioning method, its options, and the format of the dataset.

    Raises ConfigError if a value is wrong.
    """

    num_parts: int
    method: str | None = option(
        None,
        # Plugins are not listed, because importing this module would have to load them.
        f"How to place nodes: {', '.join(sorted(_BUILTIN))}, or a plugin. Default: kaminpar "
        "for one balance weight, metis for more.",
    )
    trainers_per_part: int = option(
        1,
        "Number of pieces into which each part is split again. Each node's trainer_id is stored.",
        flag="--trainers-per-server",
        metavar="T",
    )
    """Number of trainers t. If it is above 1, nodes and edges get a ``trainer_id`` in [0, P x t)."""
    feature_dtype: str | Mapping[str, str] | None = option(
        None,
        "Storage type of features: float16, bfloat16 or float32, or by name as feat=float16,x=bfloat16.",
        metavar="TYPE",
        parse=parse_by_name,
    )
    memory: str | None = option(
        None, "Memory limit of each process, such as 4GB. Larger data is processed in files.", metavar="SIZE"
    )
    """Memory limit, or None to keep everything in memory."""
    scratch: Path | None = option(
        None, "Folder on a disk for these files. Default: beside --out.", metavar="DIR"
    )
    """Folder of the files of a process with limited memory."""
    add_reverse_edges: bool = option(
        False,
        "Store an opposite edge for each edge that has none. With several edge types, store "
        "opposite edges as types RELATION-rev.",
    )
    """Whether to add opposite edges. In a graph with one edge type, an opposite edge has the columns of its
    edge but no masks. In a graph with several edge types, opposite edges have no columns."""
    add_self_loops: bool = option(False, "Store an edge from each node to itself.")
    """Whether to add missing self-loops to graphs with one edge type. Columns are 1, and masks False."""
    normalize_features: Literal["row"] | None = option(
        None, "With row, divide each row of feat by the sum of its absolute values.", metavar="row", kind=str
    )
    seed: int = option(0, "Random seed. The same seed gives the same parts.")
    format: Literal["dglx", "dgl"] = option("dglx", "Format of the files: dglx, or dgl for load_partition.")
    overwrite: bool = option(False, "Replace what is in DIR.")
    options: PartitionOptions = field(default_factory=PartitionOptions)

    def __post_init__(self) -> None:
        # This module imports Numba, which is slow.
        from dglx_dist.data.storage.writer import check_feature_dtype

        refuse_addresses(self, ("scratch",))
        if self.num_parts < 1:
            raise ConfigError(f"the number of parts is {self.num_parts}; it must be at least 1")
        if self.format not in ("dglx", "dgl"):
            raise ConfigError(f"format is {self.format!r}; it is 'dglx' or 'dgl'")
        if self.normalize_features not in (None, "row"):
            raise ConfigError(f"normalize_features is {self.normalize_features!r}; it is 'row' or nothing")
        if self.seed < 0:
            raise ConfigError(f"the seed is {self.seed}; it must be at least 0")
        if self.trainers_per_part < 1:
            raise ConfigError(f"{self.trainers_per_part} trainers per part; there must be at least 1")

        check_feature_dtype(self.feature_dtype)

        if self.memory is not None:
            read_size(self.memory)
            if self.format == "dgl":
                raise ConfigError("DGL's files are written from memory; leave out memory, or format 'dgl'")
        elif self.scratch is not None:
            raise ConfigError(f"scratch {self.scratch} needs a memory limit; add memory, e.g. 4GB")

        dtype = self.feature_dtype
        dtypes = [dtype]
        if isinstance(dtype, Mapping):
            dtypes = list(dtype.values())
        if self.format == "dgl" and "bfloat16" in dtypes:
            raise ConfigError("DGL's files cannot hold bfloat16; use float16, or format 'dglx'")

    @property
    def partitioner(self) -> str:
        """Resolved name of the partitioner. Raises UnknownNameError if there is no such partitioner."""
        return PARTITIONERS.resolve(self.method or default_partitioner(self.options))
