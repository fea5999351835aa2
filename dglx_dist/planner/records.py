"""Rates of links, options of a choice, predictions, and the choice. Frozen and JSON-serialisable."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass
from functools import partial
from typing import Any, Literal

from dglx_dist.errors import ConfigError
from dglx_dist.options import ABOVE_ZERO, at_least, option
from dglx_dist.strategies.cost import Candidate, Cluster, GraphStats, Seconds

_of_choice = partial(option, panel="Choice")
_UNITS = {"gbit": 10**9, "mbit": 10**6, "kbit": 10**3, "bit": 1}
_LEAST_RATE, _MOST_RATE = 8_000, 10**12
"""tc rejects rates above what the kernel counts, with an unhelpful message."""
_USUAL_BURST_BYTES = 256 * 1024
_USUAL_S = 20e-3
"""A rate at which the usual bucket would last longer gets a smaller one, so that short rates hold too."""
_BUNDLE_BYTES = 72 * 1024
"""A virtual card sends segments in bundles of up to 64 KiB plus headers; a smaller bucket splits them."""
_TORN_BITS_PER_S = 50_000_000
"""Below this rate one bundle lasts more than 12 ms, which would be free after each pause of a short epoch. It
is split, and each segment has its own headers."""
_TORN_S = 5e-3
_LEAST_BURST_BYTES = 16 * 1024
_LATE_S = 2e-3
"""The kernel may refill a bucket this late; buckets of fast links must last as long."""


@dataclass(frozen=True, order=True)
class Rate:
    """Rate of a link in bits per second, in the notation of tc."""

    bits_per_s: int

    @classmethod
    def parse(cls, text: str, *, most: int = _MOST_RATE) -> Rate:
        """Parse e.g. "1gbit", "2.5gbit", "100mbit", "800kbit".

        Args:
            most: Largest rate in bits per second; by default what the kernel counts.

        Raises:
            ConfigError: it is not a rate, or not from 8 kbit to ``most``.
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
        """Return the bytes that an emulated card at this rate sends at once after a pause.

        Args:
            may_tear: Whether packets of the device are small. A packet larger than the bucket, as on a
                loopback device, would never leave.
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
class ChoiceOptions:
    """Which candidates may be chosen: options of ``dglx plan``, and of strategy ``auto``."""

    unit: Literal["mini_batch", "full_graph", "any"] = _of_choice(
        "mini_batch", "mini_batch, full_graph, or any: an epoch of one is not an epoch of the other."
    )
    full_graph_epochs: float = _of_choice(
        5.0, "With --unit any: epochs of whole graphs equivalent to one of mini-batches.", check=ABOVE_ZERO
    )
    allow_estimators: bool = _of_choice(False, "Also choose among strategies that do not train exactly.")
    dry_batches: int = option(
        20, "Counted batches of each rank; 0: all of an epoch, exactly.", check=at_least(0)
    )

    def worth(self, one: Prediction) -> float:
        """Return the seconds to compare: of as many epochs as are worth an exact one of mini-batches."""
        whole = one.candidate.unit == "full_graph" and self.unit == "any"
        return one.epoch_seconds * one.candidate.epochs_factor * (self.full_graph_epochs if whole else 1.0)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Predicted epoch of a candidate."""

    candidate: Candidate
    seconds: Seconds
    outside: Mapping[str, int]
    """Payload between servers in one epoch, by ledger phase, of all ranks."""
    inside: Mapping[str, int]
    """The same within servers."""
    bytes_exact: bool
    """Whether bytes are counted exactly, for ``Choice.epoch``; False: estimated."""
    once_bytes: int
    """Bytes between servers before the first epoch: preloaded features and structure, columns, caches."""
    memory_bytes: int
    """Peak memory of one rank, including the program, of the host and of its GPU together."""
    device_memory_bytes: int = 0
    """Part of it on the GPU; 0 where ranks compute on CPUs."""
    why_not: str = ""
    """Why it is not feasible; empty: it is."""
    barred: str = ""
    """What would allow it, an option or another sampler; empty: it is allowed."""
    note: str = ""

    @property
    def feasible(self) -> bool:
        return not self.why_not

    @property
    def inter_server_bytes(self) -> int:
        return sum(self.outside.values())

    @property
    def intra_server_bytes(self) -> int:
        return sum(self.inside.values())

    @property
    def epoch_seconds(self) -> float:
        return self.seconds.total


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Measured result of the chosen run, beside the prediction."""

    epoch: int
    epoch_seconds: float
    """Median of the warm epochs."""
    bytes_outside: int
    bytes_inside: int
    peak_memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class Choice:
    """All predictions, the one that is chosen, and the reasons."""

    graph: GraphStats
    trained: str
    """Description of model and mini-batches."""
    cluster: Cluster
    predictions: tuple[Prediction, ...]
    """Fastest first among those that may be chosen; then those not requested; then infeasible ones."""
    picked: int
    """Index of the chosen prediction; -1: none is feasible."""
    why: tuple[str, ...]
    """Reasons, a sentence each."""
    assumptions: tuple[str, ...]
    """Assumptions behind the numbers that were neither counted nor measured."""
    epoch: int
    outcome: Outcome | None = None

    @property
    def taken(self) -> Prediction | None:
        return None if self.picked < 0 else self.predictions[self.picked]

    def to_json(self) -> dict[str, Any]:
        """Return JSON values, including derived ones."""
        value = asdict(self)
        for written, one in zip(value["predictions"], self.predictions, strict=True):
            written["name"], written["feasible"] = one.candidate.name, one.feasible
            written["epoch_seconds"] = one.epoch_seconds
            written["bytes_outside"] = one.inter_server_bytes
            written["bytes_inside"] = one.intra_server_bytes
            works = one.candidate.works
            del written["candidate"]["works"]
            written["candidate"]["way"] = astuple(works[0]) if works else None
        value["chosen"] = None if self.taken is None else self.taken.candidate.name
        return value
