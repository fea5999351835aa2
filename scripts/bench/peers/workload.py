"""What every system is asked to train: one graph, one model, one kind of batch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from dglx_dist.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One comparison; the same for all systems."""

    nodes: int
    degree: int = 25
    features: int = 100
    classes: int = 47
    train_rate: float = 0.1
    hidden: int = 16
    fanouts: tuple[int, ...] = (25, 10)
    """As DGL has them: the last is the hop at the seeds."""
    batch_size: int = 1000
    """Seeds per trainer and step."""
    embedding: int = 0
    """Width of trainable rows that take the place of the features; 0: none."""
    lr: float = 0.003
    seed: int = 0
    """Of the graph and of its partition."""

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Workload:
        """Return what :meth:`to_json` told.

        Raises:
            ConfigError: a name is none of the fields.
        """
        unknown = sorted(set(values) - {field.name for field in fields(cls)})
        if unknown:
            raise ConfigError(
                f"workload has no {', '.join(unknown)}; it has {', '.join(f.name for f in fields(cls))}"
            )
        return cls(**{**values, "fanouts": tuple(values.get("fanouts", cls.fanouts))})

    def to_json(self) -> dict[str, Any]:
        """Return JSON values."""
        return json.loads(json.dumps(asdict(self)))

    def graph_key(self) -> dict[str, Any]:
        """Return what the graph and its partition depend on, JSON values."""
        names = ("nodes", "degree", "features", "classes", "train_rate", "seed")
        return {name: getattr(self, name) for name in names}
