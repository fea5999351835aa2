"""The records of the planner: what is known, what is predicted, what is chosen. All frozen, all JSON."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

from dglx_dist.errors import ConfigError

Unit: TypeAlias = Literal["mini_batch", "full_graph"]
"""What one step trains on."""

Moves: TypeAlias = Literal["rows", "columns", "plans", "intervals"]
"""Which formula is its: pulled feature rows, sums of columns, plans of whole graphs, or intervals of them."""

Way: TypeAlias = tuple[int, str, int]

_UNITS = {"gbit": 10**9, "mbit": 10**6, "kbit": 10**3, "bit": 1}
_LEAST_RATE, _MOST_RATE = 8_000, 10**12
"""More than the kernel counts is refused by tc, in words that name no remedy."""
_USUAL_BURST_BYTES = 256 * 1024
_USUAL_S = 20e-3
"""A rate at which the usual bucket would last longer gets a smaller one, so that rates hold for short too."""
_BUNDLE_BYTES = 72 * 1024
"""Segments leave a virtual card in bundles of up to 64 KiB and their headers; a smaller bucket tears them."""
_TORN_BITS_PER_S = 50_000_000
"""Below it one bundle lasts more than 12 ms, which would be free after each pause of a short epoch: it is
torn, and each segment has its headers."""
_TORN_S = 5e-3
_LEAST_BURST_BYTES = 16 * 1024
_LATE_S = 2e-3
"""The kernel may be so late in refilling a bucket; fast links need one that lasts as long."""


@dataclass(frozen=True, order=True)
class Rate:
    """Of a link, in bits per second; written as tc writes it."""

    bits_per_s: int

    @classmethod
    def parse(cls, text: str, *, most: int = _MOST_RATE) -> Rate:
        """Read e.g. "1gbit", "2.5gbit", "100mbit", "800kbit".

        Args:
            text: A number and its unit.
            most: Bits per second that are allowed; usually what the kernel counts.

        Raises:
            ConfigError: it is no rate, below 8 kbit or above ``most``.
        """
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(gbit|mbit|kbit|bit)\s*", text.lower())
        bits = float(found[1]) * _UNITS[found[2]] if found else 0.0
        if not _LEAST_RATE <= bits <= most:
            raise ConfigError(
                f"rate {text!r} must be a number and gbit, mbit or kbit, from 8kbit to {cls(most)}; "
                "e.g. 100mbit"
            )
        return cls(int(bits))

    def burst_bytes(self, *, may_tear: bool = True) -> int:
        """Return what an emulated card at this rate lets pass at once after a pause.

        Args:
            may_tear: Whether packets of the device are small by themselves; one that is larger than the
                bucket, as on a loopback device, would never leave.
        """
        bytes_per_s = self.bits_per_s / 8
        if may_tear and self.bits_per_s < _TORN_BITS_PER_S:
            return max(round(bytes_per_s * _TORN_S), _LEAST_BURST_BYTES)
        usual = min(max(round(bytes_per_s * _USUAL_S), _BUNDLE_BYTES), _USUAL_BURST_BYTES)
        return max(usual, round(bytes_per_s * _LATE_S))

    def __str__(self) -> str:
        for unit, size in _UNITS.items():
            if self.bits_per_s >= size:
                return f"{self.bits_per_s / size:g}{unit}"
        return f"{self.bits_per_s}bit"


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
