"""Options of ``dglx train``, and those of the model, which ``dglx plan`` has too."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dglx_dist.cli.common import literals, whole_numbers
from dglx_dist.cli.options import Check, at_least, check_ranges, check_values, one_of, option, path_option
from dglx_dist.errors import ConfigError

_INIT_ARGUMENTS = ("strategy", "timeout", "seed", "backend")
_ABOVE_ZERO = Check(lambda value: 0 < value < math.inf, "above 0")
_MODEL, _OPTIMIZER, _LOADER = "Model", "Optimizer", "Loading"
_RUN = "Run folder, evaluation, checkpoints"


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Options of a ready-made model and its mini-batches.

    Raises:
        ConfigError: a value is out of range, or there is not one fan-out per layer.
    """

    model: str = option("sage", "sage, gcn, sgc, gat, mlp or resgcn (deep).", panel=_MODEL)
    layers: int = option(2, "Convolutions.", panel=_MODEL, check=at_least(1))
    hidden: int = option(64, "Width between them.", panel=_MODEL, check=at_least(1))
    heads: int = option(4, "Attention heads of gat.", panel=_MODEL)
    fanouts: tuple[int, ...] | None = option(
        None,
        "Neighbours sampled per node and layer, input-most first; -1: all. Default: 25, then 10 "
        "for each other layer; all where the strategy takes the whole graph.",
        flag="--fanout",
        metavar="K,K",
        panel=_LOADER,
        parse=whole_numbers,
    )
    """One for each layer; None: the strategy's own."""
    batch_size: int | None = option(
        None,
        "Targets per rank and step. Default: 512; all where the strategy takes the whole graph.",
        panel=_LOADER,
        check=at_least(1),
    )
    """None: the strategy's own, where it has mini-batches."""
    structure: Literal["auto", "replicated", "partitioned"] = option(
        "auto", "auto, replicated on each server, or partitioned.", panel=_LOADER
    )

    def __post_init__(self) -> None:
        check_ranges(self)
        has_heads = self.model in ("gat", "hgt")
        wrong = has_heads and (self.heads < 1 or self.hidden % self.heads > 0)
        check_values(self, [("heads", wrong, f"a divisor of --hidden {self.hidden}")])
        if self.fanouts is not None and len(self.fanouts) != self.layers:
            raise ConfigError(
                f"--fanout {','.join(map(str, self.fanouts))} is for {len(self.fanouts)} layers, but "
                f"--layers is {self.layers}; give one fan-out for each layer, input-most first"
            )


@dataclass(frozen=True, kw_only=True)
class TrainConfig(ModelConfig):
    """Options of ``dglx train``: one run of a ready-made model.

    Raises:
        UnknownNameError: there is no such model.
        ConfigError: there is not one fan-out per layer, a value is out of range, or a strategy option is an
            argument of ``init``.
    """

    data: str = path_option(..., "What `dglx partition` wrote.", metavar="DIR")
    strategy: str = option("data_parallel", "A wrong name lists all strategies; auto chooses one.")
    ranks: int | None = option(
        None, "Processes to start here, with torchrun. Default: one, or those of torchrun."
    )
    servers: int | None = option(
        None, "Treat the ranks as if they were on this number of machines. Default: one."
    )
    strategy_options: Mapping[str, object] = option(
        dict,
        "Option of the strategy; repeatable.",
        flag="--option",
        metavar="NAME=VALUE",
        kind=list[str],
        parse=literals,
    )
    timeout_s: float = option(
        300.0, "Seconds that a rank may be silent.", flag="--timeout", check=_ABOVE_ZERO
    )
    seed: int = option(
        0, "Of weights, order and samples, which are equal on any number of ranks.", check=at_least(0)
    )
    model: str = option(
        "sage", "sage, gcn, sgc, gat, mlp or resgcn (deep); for several types rgcn or hgt.", panel=_MODEL
    )
    heads: int = option(4, "Attention heads of gat and hgt.", panel=_MODEL)
    dropout: float = option(
        0.5,
        "Probability, after each layer but the last.",
        panel=_MODEL,
        check=Check(lambda value: 0 <= value < 1, "at least 0 and below 1"),
    )
    recompute: str = option(
        "none",
        "Save memory in resgcn: backward recomputes each layer, and either exchanges rows of "
        "other ranks again (exchange) or keeps them (keep).",
        panel=_MODEL,
    )
    epochs: int = option(20, "Of the whole run.", panel=_OPTIMIZER, check=at_least(1))
    lr: float = option(0.01, "Learning rate of Adam.", panel=_OPTIMIZER, check=_ABOVE_ZERO)
    weight_decay: float = option(0.0, "Of Adam.", panel=_OPTIMIZER, check=at_least(0))
    cache: str | None = option(
        None,
        "Cache features of other servers: vip (most needed by batches), degree or halo.",
        metavar="POLICY",
        panel=_LOADER,
        check=one_of("vip", "degree", "halo"),
    )
    cache_alpha: float = option(
        0.2, "Size of the cache, as a fraction of the server's own nodes.", panel=_LOADER, check=at_least(0)
    )
    depth: int | None = option(None, "Batches prepared ahead. Default: 1.", panel=_LOADER, check=at_least(1))
    loader_threads: int | None = option(
        None, "Threads that prepare them; 0: the training loop. Default: 1.", panel=_LOADER, check=at_least(0)
    )
    verify: Literal["auto", "full", "never"] = option(
        "auto", "auto: read new files, full: all, never.", panel=_LOADER
    )
    out: str = path_option(
        "",
        "An earlier run there is replaced. Default: runs/NAME-STRATEGY, NAME of DIR.",
        metavar="RUNDIR",
        panel=_RUN,
    )
    eval_every: int = option(
        1, "Epochs between exact evaluations; 0: at the end.", panel=_RUN, check=at_least(0)
    )
    patience: int | None = option(
        None, "Stop after this number of evaluations without a better one.", panel=_RUN, check=at_least(1)
    )
    checkpoint_every: int = option(
        0, "Epochs between checkpoints in RUNDIR/checkpoints; 0: none.", panel=_RUN, check=at_least(0)
    )
    resume: bool = option(
        False, "Resume from the newest checkpoint in RUNDIR; from the start if there is none.", panel=_RUN
    )
    predictions: str | None = path_option(
        None, "Write the class of every node, as Parquet.", metavar="DIR", panel=_RUN
    )
    save_embeddings: str | None = path_option(
        None, "Write every node's last hidden layer, as Parquet.", metavar="DIR", panel=_RUN
    )
    trace: str | None = path_option(
        None,
        "Write a timeline of all ranks, for Perfetto; `dglx report FILE` draws it.",
        metavar="FILE",
        panel=_RUN,
    )
    trace_steps: int = option(200, "Number of first steps in the trace.", panel=_RUN, check=at_least(1))

    def __post_init__(self) -> None:
        # Imported here: they load torch, and `dglx --help` stays quick.
        from dglx_dist.strategies.base import AUTO
        from dglx_dist.training.models import MODEL_KINDS, RECOMPUTE, RELATIONAL_KINDS, check_kind

        check_kind(self.model, MODEL_KINDS + RELATIONAL_KINDS)
        for name in _INIT_ARGUMENTS:
            if name in self.strategy_options:
                raise ConfigError(f"--option {name} is no option of a strategy; see `dglx train --help`")
        super().__post_init__()
        checks = (
            ("recompute", self.recompute not in RECOMPUTE, one_of(*RECOMPUTE).allowed),
            (
                "recompute",
                self.recompute != "none" and self.model != "resgcn",
                f"left out with --model {self.model}: only layers of resgcn are computed again",
            ),
            (
                "eval-every",
                self.patience is not None and self.eval_every == 0,
                "at least 1 with --patience, which counts evaluations",
            ),
            (
                "cache",
                self.cache is not None and self.strategy == AUTO,
                "left out with --strategy auto, which weighs caches itself (--option caches=false: none)",
            ),
            (
                "save-embeddings",
                self.save_embeddings is not None and self.layers < 2,
                "left out with --layers 1, whose only layer gives the scores",
            ),
        )
        check_values(self, checks)
        if not self.out:
            folder = Path("runs") / f"{Path(self.data).absolute().name}-{self.strategy}"
            object.__setattr__(self, "out", str(folder))
