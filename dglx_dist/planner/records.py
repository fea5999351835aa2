"""The planner's records: cluster, graph, model, options for a choice, predictions, and the choice.

All are frozen. A choice can be written as JSON.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from dglx_dist.errors import ConfigError
from dglx_dist.options import ABOVE_ZERO, at_least, option
from dglx_dist.strategies.candidate import Candidate

if TYPE_CHECKING:
    from dglx_dist.layers.base import LayerWidths

_choice_option = partial(option, panel="Choice")
_UNITS = {"gbit": 10**9, "mbit": 10**6, "kbit": 10**3, "bit": 1}
# tc rejects rates above the kernel's limit with an unhelpful message.
_MIN_RATE = 8_000
_MAX_RATE = 10**12


@dataclass(frozen=True, order=True)
class Rate:
    """A link's rate in bits per second, in the notation that tc uses."""

    bits_per_s: int

    @classmethod
    def parse(cls, text: str, *, most: int = _MAX_RATE) -> Rate:
        """Parse a rate like "1gbit", "2.5gbit", "100mbit" or "800kbit".

        Args:
            text: A number and its unit, in upper or lower case.
            most: Largest rate in bits per second. The default is the kernel's limit.

        Raises:
            ConfigError: If ``text`` is no rate, or the rate is below 8 kbit or above ``most``.
        """
        bits_per_s = 0.0
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(gbit|mbit|kbit|bit)\s*", text.lower())
        if match is not None:
            value, unit = match.groups()
            bits_per_s = float(value) * _UNITS[unit]

        # A text that is no rate counts as 0, and 0 is too small.
        if not _MIN_RATE <= bits_per_s <= most:
            raise ConfigError(
                f"rate {text!r} must be a number and gbit, mbit or kbit, from 8kbit to {cls(most)}, "
                "e.g. 100mbit"
            )
        return cls(int(bits_per_s))

    def __str__(self) -> str:
        for unit, size in _UNITS.items():
            if self.bits_per_s >= size:
                return f"{self.bits_per_s / size:g}{unit}"
        return f"{self.bits_per_s}bit"


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The servers that a run uses: configured, probed or assumed, see :attr:`assumptions`."""

    servers: int
    ranks_per_server: int
    external_bytes_per_s: float
    """Payload per second that a server's card sends. It receives as much at the same time."""
    internal_bytes_per_s: float
    """Total payload per second between a server's ranks."""
    cores: float
    """Cores per rank. May be fractional."""
    memory_bytes: int
    device_memory_bytes: int = 0
    """GPU memory per rank. 0: ranks compute on CPUs."""
    assumptions: tuple[str, ...] = ()
    """Values that were neither configured nor measured, one sentence each."""

    @property
    def ranks(self) -> int:
        return self.servers * self.ranks_per_server

    @property
    def server_of_rank(self) -> tuple[int, ...]:
        """(W,) server by rank. Consecutive ranks share a server."""
        return tuple(rank // self.ranks_per_server for rank in range(self.ranks))


@dataclass(frozen=True, kw_only=True)
class GraphStats:
    """Sizes of a graph, summed over its types."""

    name: str
    nodes: int
    edges: int
    features: int
    """Number of feature columns F."""
    feature_bytes: int
    """Stored feature bytes per node. With several types, their sum over one node of each type."""
    all_feature_bytes: int
    """Feature bytes for all nodes."""
    classes: int
    train_nodes: int
    edge_cut: float
    """Fraction of edges that connect different servers."""
    method: str

    @property
    def structure_bytes(self) -> int:
        """Bytes to map all in-edges."""
        # An edge stores its source id. Ids in small graphs fit in 32 bits.
        bytes_per_edge = 8
        if self.nodes < 2**31:
            bytes_per_edge = 4
        return 8 * self.nodes + bytes_per_edge * self.edges


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a model: its layers, input-most first, and its parameters."""

    kind: str
    layers: tuple[LayerWidths, ...]
    features: int
    hidden: int
    """Width between the layers. 0: unknown."""
    classes: int
    parameters: int
    """Scalars in all parameters."""
    tensors: int
    inspected: Mapping[str, Any] = field(default_factory=dict)
    """By strategy, what ``CostModel.inspect`` returned."""
    refusals: Mapping[str, str] = field(default_factory=dict)
    """By strategy, why it cannot train the model."""
    first_learns: bool = False
    """Whether the rows that enter layer 1 have a gradient, as after an encoder."""
    itemsize: int = 4
    is_guessed: bool = False
    """Whether the layers are guessed from the most similar ready-made model."""
    feature_widths: Mapping[str, int] | None = None
    """Number of feature columns by node type, for a model with several types. Missing node types have
    trainable rows. None: the model has one type.
    """
    trained_row_bytes: int = 0
    """Bytes per trainable row."""
    has_widths: bool = True
    """Whether :attr:`layers` has the widths. They are unknown for user models on several types."""

    @property
    def summary(self) -> str:
        text = f"{self.kind} of {len(self.layers)} layers"
        if self.hidden:
            text += f", hidden width {self.hidden}"
        return text

    @property
    def gradient_bytes(self) -> int:
        """Bytes to sum in each step: every gradient, and a flag with one element for each tensor."""
        return (self.parameters + self.tensors) * self.itemsize


@dataclass(frozen=True, kw_only=True)
class Draws:
    """Parameters by which the counted mini-batches are drawn."""

    fanouts: tuple[int, ...]
    """Fan-outs, input-most first. -1 means all."""
    batch_size: int
    """Seeds per rank and step."""
    epoch: int = 1
    force_even: bool = True
    most_seeds: int | None = None
    """Maximum number of seeds per rank. The rest is left out."""
    most_batches: int | None = None
    """Maximum number of batches per rank. None: all batches in the epoch."""


@dataclass(frozen=True, kw_only=True)
class ChoiceOptions:
    """Options of ``dglx plan`` and of strategy ``auto`` that decide which candidates may be chosen."""

    unit: Literal["mini_batch", "full_graph", "any"] = _choice_option(
        "mini_batch", "Kind of training: mini_batch, full_graph or any. Their epochs are not comparable."
    )
    full_graph_epochs: float = _choice_option(
        5.0,
        "Epochs on whole graphs that are worth one of mini-batches, for --unit any.",
        check=ABOVE_ZERO,
    )
    allow_estimators: bool = _choice_option(False, "Also allow strategies that do not train exactly.")
    dry_batches: int = option(20, "Batches to count per rank. 0: all of an epoch.", check=at_least(0))

    def comparable_seconds(self, prediction: Prediction) -> float:
        """Return the seconds for as many epochs as are worth an exact epoch with mini-batches."""
        return prediction.epoch_seconds * self.weight(prediction.candidate)

    def weight(self, candidate: Candidate) -> float:
        """Return how many epochs with ``candidate`` are worth an exact epoch with mini-batches."""
        if candidate.unit == "full_graph" and self.unit == "any":
            return candidate.epochs_factor * self.full_graph_epochs
        return candidate.epochs_factor


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Seconds that an epoch with a candidate takes, measured in the running job."""

    seconds: float
    """Median over the candidate's turns."""
    low: float
    """Fastest turn."""
    high: float
    """Slowest turn."""
    steps: int
    """Number of timed steps."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Costs that an epoch with a candidate has: counted bytes, a memory formula, and measured seconds."""

    candidate: Candidate
    compute_s: float = 0.0
    """Seconds of computation, measured in one process. 0 in a running job, which times whole steps."""
    network_s: float = 0.0
    """Bytes per epoch divided by the links' bandwidth."""
    trial: Trial | None = None
    """Measurement in a running job. None: the candidate was not tried."""
    outside: Mapping[str, int] = field(default_factory=dict)
    """Payload that all ranks send between servers in one epoch, by ledger phase."""
    inside: Mapping[str, int] = field(default_factory=dict)
    """Payload within servers in one epoch, by ledger phase."""
    bytes_exact: bool = False
    """Whether the bytes are exactly those that ``Choice.epoch`` will send. False: the bytes are estimates."""
    once_bytes: int = 0
    """Bytes between servers before the first epoch: preloaded features and structure, columns, caches."""
    memory_bytes: int = 0
    """Peak memory per rank, including the program, on host and GPU together. 0: unknown."""
    device_memory_bytes: int = 0
    """Bytes within ``memory_bytes`` that lie on the GPU. 0 if ranks compute on CPUs."""
    why_not: str = ""
    """Reason if the candidate is not feasible, or empty."""
    not_tried: str = ""
    """Reason if a running job did not try the candidate. Empty if it did, or if there were no trials."""
    barred: str = ""
    """Option or sampler that would allow the candidate. Empty if the candidate is allowed."""
    note: str = ""

    @property
    def feasible(self) -> bool:
        return not self.why_not

    @property
    def has_costs(self) -> bool:
        """Whether the strategy has a cost model, which counts bytes and memory."""
        return self.memory_bytes > 0

    @property
    def inter_server_bytes(self) -> int:
        return sum(self.outside.values())

    @property
    def intra_server_bytes(self) -> int:
        return sum(self.inside.values())

    @property
    def epoch_seconds(self) -> float:
        """Measured seconds per epoch. Without a trial: computing time here, plus the bytes on the wire."""
        if self.trial is not None:
            return self.trial.seconds
        return self.compute_s + self.network_s


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Measurements from the chosen run, to compare with the prediction."""

    epoch: int
    epoch_seconds: float
    """Median over the warm epochs."""
    bytes_outside: int
    bytes_inside: int
    peak_memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class Choice:
    """All predictions, the chosen one, and the reasons."""

    graph: GraphStats
    trained: str
    """Model and mini-batches, in words."""
    cluster: Cluster
    predictions: tuple[Prediction, ...]
    """Predictions, fastest first among those that may be chosen. Barred and infeasible ones follow."""
    picked: int
    """Index of the chosen prediction. -1: none is feasible."""
    why: tuple[str, ...]
    """Reasons, one sentence each."""
    assumptions: tuple[str, ...]
    """Assumptions behind the numbers that were neither counted nor measured."""
    epoch: int
    took_s: float = 0.0
    """Seconds that the choice took."""
    outcome: Outcome | None = None

    @property
    def chosen_prediction(self) -> Prediction | None:
        """The chosen prediction, or None if no candidate is feasible."""
        if self.picked < 0:
            return None
        return self.predictions[self.picked]

    def lines(self) -> Sequence[str]:
        """Describe the choice, its reasons and its assumptions, one line each."""
        title = "nothing can be chosen"
        if self.chosen_prediction is not None:
            title = f"chosen: {self.chosen_prediction.candidate.name}"
        if self.took_s:
            title += f" ({self.took_s:.1f} s)"

        lines = [title]
        for reason in self.why:
            lines.append(f"  - {reason}")
        if self.assumptions:
            lines.append("assumed:")
        for assumption in self.assumptions:
            lines.append(f"  - {assumption}")
        return lines

    def to_json(self) -> dict[str, Any]:
        """Convert the fields to JSON values, and add the properties that readers of the file need."""
        value = asdict(self)
        for entry, prediction in zip(value["predictions"], self.predictions, strict=True):
            entry["name"] = prediction.candidate.name
            entry["feasible"] = prediction.feasible
            entry["epoch_seconds"] = prediction.epoch_seconds
            entry["bytes_outside"] = prediction.inter_server_bytes
            entry["bytes_inside"] = prediction.intra_server_bytes

        value["chosen"] = None
        if self.chosen_prediction is not None:
            value["chosen"] = self.chosen_prediction.candidate.name
        return value
