"""The records of the planner: what is known, what is predicted, what is chosen. All frozen, all JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

Unit: TypeAlias = Literal["mini_batch", "full_graph"]
"""What one step trains on."""

Moves: TypeAlias = Literal["rows", "columns", "plans", "intervals"]
"""Which formula is its: pulled feature rows, sums of columns, plans of whole graphs, or intervals of them."""

Way: TypeAlias = tuple[int, str, int]


@dataclass(frozen=True, kw_only=True)
class GraphStats:
    """A graph in figures, of one node type and one edge type."""

    name: str
    nodes: int
    edges: int
    features: int
    """F, columns."""
    feature_bytes: int
    """Of one node's features, as they are stored."""
    classes: int
    train_nodes: int
    edge_cut: float
    """Share of the edges whose ends are on different servers: rho of an edge."""
    method: str
    """Partitioner, or what was assumed of one."""
    degree_spread: float = 2.0
    """E[d^2] / E[d]^2 of the in-degrees; 1 where all are equal."""
    counted: bool = True
    """Whether there is a dataset; False: the figures were told."""

    @property
    def mean_degree(self) -> float:
        """In-edges of a node."""
        return self.edges / max(self.nodes, 1)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """What a run has: told, probed or assumed; see :attr:`assumptions`."""

    servers: int
    ranks_per_server: int
    external_bytes_per_s: float
    """Payload that a server's card sends, and as much that it receives."""
    internal_bytes_per_s: float
    """Payload between the ranks of a server, all together."""
    latency_s: float
    """From a message's start at one server to its arrival at another one."""
    cores: float
    """Of one rank; may be a fraction."""
    memory_bytes: int
    """That one rank may use."""
    burst_bytes: int = 0
    """What a card lets pass at once after a pause, beyond its rate: emulated links are token buckets."""
    assumptions: tuple[str, ...] = ()
    """What nobody told or measured, a sentence each."""

    @property
    def ranks(self) -> int:
        """W."""
        return self.servers * self.ranks_per_server

    @property
    def server_of_rank(self) -> tuple[int, ...]:
        """(W,): consecutive ranks share a server."""
        return tuple(rank // self.ranks_per_server for rank in range(self.ranks))


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to train: a strategy with its main parameters."""

    strategy: str
    options: Mapping[str, Any] = field(default_factory=dict)
    cache: str | None = None
    """Policy of a cache of remote rows."""
    cache_alpha: float = 0.0
    """Its size, by the server's own nodes."""
    unit: Unit
    moves: Moves
    way: Way | None = None
    """Of plans: layers that a server computes alone, a limit of what it takes in ("": none), co-batches."""
    exact: bool = True
    """Whether steps give the weights of one process on the same batches; False: another estimator."""
    epochs_factor: float = 1.0
    """Epochs to the same accuracy, by those of the exact strategies of its unit; reported, assumed."""

    @property
    def name(self) -> str:
        """What tables call it, e.g. ``push_pull depth=3``."""
        options = [f"{name}={value}" for name, value in self.options.items()]
        cached = [f"cache={self.cache}:{self.cache_alpha:g}"] if self.cache else []
        return " ".join([self.strategy, *options, *cached])


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """Of one epoch on the rank or card that takes longest."""

    compute: float = 0.0
    sampling: float = 0.0
    """Drawing blocks and gathering rows; 0 where it is hidden."""
    outside: float = 0.0
    """Waiting for rows of other servers, without what is hidden behind computing."""
    inside: float = 0.0
    """The same for ranks of the own server."""
    all_reduce: float = 0.0
    """Sums of gradients."""

    @property
    def total(self) -> float:
        """Of an epoch."""
        return self.compute + self.sampling + self.outside + self.inside + self.all_reduce


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What an epoch of a candidate comes to."""

    candidate: Candidate
    seconds: Seconds
    outside: Mapping[str, int]
    """Payload between servers in one epoch, by the ledger's phases, all ranks together."""
    inside: Mapping[str, int]
    """The same inside of servers."""
    bytes_exact: bool
    """Whether these are counted to the byte, for :attr:`epoch`; False: expected."""
    once_bytes: int
    """Between servers before the first epoch: features and structure that are preloaded, columns, caches."""
    memory_bytes: int
    """Most that one rank needs at once, the program itself included."""
    why_not: str = ""
    """Why it cannot be taken; empty: it can."""
    barred: str = ""
    """What would have to be said for it to be chosen; empty: nothing, it is what was asked for."""
    note: str = ""
    """What else one should know of it, such as what it costs in money."""

    @property
    def feasible(self) -> bool:
        """Whether it fits."""
        return not self.why_not

    @property
    def bytes_outside(self) -> int:
        """Of all phases."""
        return sum(self.outside.values())

    @property
    def bytes_inside(self) -> int:
        """Of all phases."""
        return sum(self.inside.values())

    @property
    def epoch_seconds(self) -> float:
        """Of one epoch."""
        return self.seconds.total


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came out of the run that was chosen, beside what was predicted."""

    epoch: int
    """Whose bytes these are."""
    epoch_seconds: float
    """Median of the warm epochs of the run."""
    bytes_outside: int
    bytes_inside: int
    peak_memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Every candidate, the one that is taken, and why."""

    graph: GraphStats
    trained: str
    """Model and mini-batches, in words."""
    cluster: Cluster
    predictions: tuple[Prediction, ...]
    """The fastest first among those that may be chosen; then what was not asked for; then what cannot be."""
    picked: int
    """Place of the one that is taken; -1: none can be."""
    why: tuple[str, ...]
    """Sentences."""
    assumptions: tuple[str, ...]
    """What the figures rest on that was neither counted nor measured."""
    epoch: int
    """The epoch whose bytes were counted."""
    outcome: Outcome | None = None

    @property
    def taken(self) -> Prediction | None:
        """The prediction of what is taken."""
        return None if self.picked < 0 else self.predictions[self.picked]

    def to_json(self) -> dict[str, Any]:
        """Return JSON values; what follows from fields is told too."""
        value = asdict(self)
        for written, one in zip(value["predictions"], self.predictions, strict=True):
            written["name"], written["feasible"] = one.candidate.name, one.feasible
            written["epoch_seconds"] = one.epoch_seconds
            written["bytes_outside"], written["bytes_inside"] = one.bytes_outside, one.bytes_inside
        value["chosen"] = None if self.taken is None else self.taken.candidate.name
        return value
