"""Options of ``dglx train``, validated before any process is started."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from dglx_dist.cli.common import check_fanouts, check_values
from dglx_dist.errors import ConfigError
from dglx_dist.strategies.base import AUTO
from dglx_dist.training.models import MODEL_KINDS, RECOMPUTE, RELATIONAL_KINDS, check_kind

_CACHE_POLICIES = ("vip", "degree", "halo")
_INIT_ARGUMENTS = ("strategy", "timeout", "seed", "backend")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Configuration of one run of a ready-made model.

    Raises:
        UnknownNameError: there is no such model.
        ConfigError: there is not one fan-out per layer, a value is out of range, or a strategy option is an
            argument of ``init``.
    """

    data: str
    out: str
    strategy: str = "data_parallel"
    strategy_options: Mapping[str, object] = field(default_factory=dict)
    model: str = "sage"
    layers: int = 2
    hidden: int = 64
    heads: int = 4
    dropout: float = 0.5
    recompute: str = "none"
    """What backward computes again, for deep models: one of ``training.models.RECOMPUTE``."""
    fanouts: tuple[int, ...] | None = None
    """One for each layer; None: the strategy's own."""
    batch_size: int | None = None
    """Targets per rank and step; None: the strategy's own, where it has mini-batches."""
    epochs: int = 20
    lr: float = 0.01
    weight_decay: float = 0.0
    seed: int = 0
    eval_every: int = 1
    patience: int | None = None
    checkpoint_every: int = 0
    """0: no checkpoints."""
    resume: bool = False
    structure: Literal["auto", "replicated", "partitioned"] = "auto"
    verify: Literal["auto", "full", "never"] = "auto"
    cache: str | None = None
    """Policy of the cache of remote features; None: no cache."""
    cache_alpha: float = 0.2
    """Size of the cache, as a fraction of the server's own nodes."""
    depth: int | None = None
    """None: 1; unused where there are no mini-batches."""
    loader_threads: int | None = None
    """As ``depth``."""
    timeout_s: float = 300.0
    predictions: str | None = None
    """Folder for the class of every node, as Parquet; None: not written."""
    save_embeddings: str | None = None
    """Folder for every node's last hidden layer, as Parquet; None: not written."""
    trace: str | None = None
    """File for a trace of all ranks; None: nothing is recorded."""
    trace_steps: int = 200

    def __post_init__(self) -> None:
        check_kind(self.model, MODEL_KINDS + RELATIONAL_KINDS)
        for name in _INIT_ARGUMENTS:
            if name in self.strategy_options:
                raise ConfigError(f"--option {name} is no option of a strategy; see `dglx train --help`")
        checks = (
            ("layers", self.layers < 1, "at least 1"),
            ("hidden", self.hidden < 1, "at least 1"),
            ("batch-size", self.batch_size is not None and self.batch_size < 1, "at least 1"),
            ("epochs", self.epochs < 1, "at least 1"),
            ("dropout", not 0 <= self.dropout < 1, "at least 0 and below 1"),
            (
                "heads",
                self.model in ("gat", "hgt") and (self.heads < 1 or self.hidden % self.heads > 0),
                f"a divisor of --hidden {self.hidden}",
            ),
            (
                "recompute",
                self.recompute not in RECOMPUTE,
                ", ".join(RECOMPUTE[:-1]) + " or " + RECOMPUTE[-1],
            ),
            (
                "recompute",
                self.recompute != "none" and self.model != "resgcn",
                f"left out with --model {self.model}: only layers of resgcn are computed again",
            ),
            ("lr", not 0 < self.lr < math.inf, "above 0"),
            ("weight-decay", not 0 <= self.weight_decay < math.inf, "at least 0"),
            ("seed", self.seed < 0, "at least 0"),
            ("eval-every", self.eval_every < 0, "at least 0"),
            ("patience", self.patience is not None and self.patience < 1, "at least 1"),
            (
                "eval-every",
                self.patience is not None and self.eval_every == 0,
                "at least 1 with --patience, which counts evaluations",
            ),
            ("cache", self.cache not in (None, *_CACHE_POLICIES), "vip, degree or halo"),
            (
                "cache",
                self.cache is not None and self.strategy == AUTO,
                "left out with --strategy auto, which weighs caches itself (--option caches=false: none)",
            ),
            ("cache-alpha", not 0 <= self.cache_alpha < math.inf, "at least 0"),
            ("depth", self.depth is not None and self.depth < 1, "at least 1"),
            (
                "loader-threads",
                self.loader_threads is not None and self.loader_threads < 0,
                "at least 0",
            ),
            ("checkpoint-every", self.checkpoint_every < 0, "at least 0"),
            ("trace-steps", self.trace_steps < 1, "at least 1"),
            (
                "structure",
                self.structure not in ("auto", "replicated", "partitioned"),
                "auto, replicated or partitioned",
            ),
            (
                "save-embeddings",
                self.save_embeddings is not None and self.layers < 2,
                "left out with --layers 1, whose only layer gives the scores",
            ),
            ("verify", self.verify not in ("auto", "full", "never"), "auto, full or never"),
        )
        check_values(self, checks)
        if not 0 < self.timeout_s < math.inf:
            raise ConfigError(f"--timeout {self.timeout_s} must be above 0")
        check_fanouts(self.fanouts, self.layers)
