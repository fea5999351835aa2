"""Define the training options for ``dx.fit``, ready-made models, ``dglx train`` and ``dglx plan``.

This module does not import torch, so that ``dglx --help`` is fast.
"""

import hashlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from importlib.util import find_spec
from itertools import chain, permutations
from pathlib import Path
from typing import Any, Literal, TypeAlias

from dglx_dist.errors import ConfigError
from dglx_dist.options import (
    ABOVE_ZERO,
    Check,
    at_least,
    between,
    check_ranges,
    check_values,
    list_names,
    named_values,
    one_of,
    option,
    parse_integers,
    parse_names,
    parse_times,
    path_option,
    refuse_addresses,
    refuse_signed,
)
from dglx_dist.registry import AUTO, suggest_name
from dglx_dist.training.model_kinds import KINDS, LAYER_OPTIONS, WEIGHTED, check_kind, has_option, list_kinds

PRECISIONS = ("float32", "bf16")
"""Precisions for forward passes in training. Weights, gradients and evaluation keep the model's dtype."""

FLOAT32, BF16 = PRECISIONS

_INIT_ARGUMENTS = ("strategy", "timeout", "seed", "backend", "device")
TASKS = ("auto", "classification", "multilabel", "regression", "link")
AUTO_TASK, CLASSIFICATION, MULTILABEL, REGRESSION, LINK = TASKS
_CLASS_METRICS = ("f1_micro", "f1_macro", "roc_auc", "average_precision")
METRICS_BY_TASK: Mapping[str, tuple[str, ...]] = {
    CLASSIFICATION: ("accuracy", *_CLASS_METRICS),
    MULTILABEL: (*_CLASS_METRICS, "accuracy"),
    REGRESSION: ("mae", "rmse"),
    LINK: ("mrr", "hits@1", "hits@3", "hits@10", "auc", "roc_auc", "average_precision"),
}
"""Task to its metrics, defaults first: five for link, one for classification, two for the other tasks."""
LESS_IS_BETTER = ("mae", "rmse")
EXPORT_INDEX = "_index.json"
"""Index file for exported rows. Parquet readers ignore names that begin with ``_``."""
NO_ENCODER = "none"
"""Stands for a model that scores trainable rows directly."""
DECODER_NAMES = ("dot", "distmult", "transe", "complex", "rotate")
_METRICS = tuple(dict.fromkeys(chain(*METRICS_BY_TASK.values())))


def list_metrics(task: str, metrics: Sequence[str]) -> tuple[str, ...]:
    """Return ``metrics``, or the task's defaults. Raise ConfigError for another task's metric."""
    allowed = METRICS_BY_TASK.get(task, ())
    metrics = list_names(metrics)
    for name in metrics:
        if name not in allowed:
            raise ConfigError(
                f"metric {name} is not one of {task}{suggest_name(name, allowed)}. Choose some of "
                f"{', '.join(allowed)}, or another --task."
            )
    if metrics:
        return metrics
    num_defaults = {CLASSIFICATION: 1, LINK: 5}.get(task, 2)
    return allowed[:num_defaults]


_MODELS = (
    "sage, gcn, gat, gatv2, gin (needs all neighbours, because it sums them), mlp, sgc, appnp or resgcn "
    "(deep). For graphs of several types: rgcn or hgt."
)
OWN_ARGUMENTS = ("in_dim", "hidden", "classes", "layers", "dropout", "heads", "graph")
_of_task = partial(option, panel="Task")
_of_model = partial(option, panel="Model")
_of_optimizer = partial(option, panel="Optimizer")
_of_link = partial(option, panel="Link prediction (--task link)")
_of_loading = partial(option, panel="Loading")
_of_run = partial(option, panel="Run folder, evaluation, checkpoints")
_path_of_run = partial(path_option, panel="Run folder, evaluation, checkpoints")
_of_servers = partial(option, panel="Servers")


Every: TypeAlias = int | str
"""Interval between checkpoints: a number counts epochs, and a text like ``"200steps"`` counts steps."""
_EVERY = re.compile(r"([0-9]{1,12})( ?steps?)?")


def count_steps_between(every: Every, steps_of_epoch: int) -> int:
    """Return the steps between checkpoints, 0 for none. Raise ValueError for an invalid ``every``."""
    match = _EVERY.fullmatch(str(every))
    if match is None:
        raise ValueError(f"{every!r} is not a number of epochs or steps")
    count = int(match[1])
    has_unit = match[2] is not None
    return count if has_unit else count * steps_of_epoch


def _make_every_check(min_epochs: int) -> Check:
    def is_allowed(every: Any) -> bool:
        # Steps have to be positive, even where 0 epochs are allowed.
        minimum = max(1, min_epochs) if isinstance(every, str) else min_epochs
        try:
            return count_steps_between(every, 1) >= minimum
        except ValueError:
            return False

    allowed = f"a number of epochs, at least {min_epochs}, or a number of steps, like 200steps"
    return Check(is_allowed, allowed)


EVERY = _make_every_check(1)


def _every(text: str, _flag: str) -> Every:
    return int(text) if text.isdecimal() else text


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Task, epochs, evaluation, checkpoints and trace of a training run."""

    task: Any = _of_task(
        AUTO_TASK,
        "Task: classification (one class per node), multilabel (columns of 0 and 1, binary cross-entropy for "
        "each), regression (numbers, squared error of standardised values) or link (edges of --target). auto "
        "chooses by the labels: (N,) whole numbers, (N, C) values of 0 and 1, or other numbers.",
        check=one_of(*TASKS),
        kind=str,
    )
    metric: tuple[str, ...] = _of_task(
        (),
        f"Exact metrics of validation and test targets, separated by commas: {', '.join(_METRICS)}. The "
        "first one decides which epoch is the best. Defaults by task: accuracy; f1_micro,f1_macro; mae,rmse; "
        "mrr up to auc. roc_auc and average_precision are means over the classes. For links they use the "
        "pairs of auc. The accuracy of several labels is the share of rows without an error.",
        metavar="NAME,NAME",
        kind=str,
        parse=parse_names,
    )
    class_weight: Literal["none", "balanced"] = _of_task(
        "none", "balanced weighs each class in the loss by the inverse of its share of the training nodes."
    )
    """For multilabel, the ones of each column are weighed by zeros / ones."""
    epochs: int = _of_optimizer(
        10, "Number of training epochs, including those before a resume.", check=at_least(1)
    )
    schedule: Literal["constant", "cosine", "step"] = _of_optimizer(
        "constant",
        "Learning-rate schedule over all epochs. cosine decays to 0. step decays to a tenth after half of "
        "the epochs and to a hundredth after three quarters.",
    )
    warmup: int = _of_optimizer(
        0, "Number of epochs at the start over which the learning rate rises from 0.", check=at_least(0)
    )
    """The rate changes with every step. A resume does not affect it."""
    clip_norm: float | None = _of_optimizer(
        None, "Maximum norm of all gradients, which are clipped before each step.", check=ABOVE_ZERO
    )
    """The norm is that of the uncut model."""
    accumulate: int = _of_optimizer(
        1,
        "Number of batches per step. The result equals a step on all of them together.",
        check=at_least(1),
    )
    """The last step of an epoch has the remaining batches."""
    precision: str | None = _of_optimizer(
        None,
        "bf16 runs the forward passes of training in bfloat16 with torch's autocast. Default: float32, or "
        "the precision of a resumed run.",
        check=one_of(*PRECISIONS),
    )
    eval_every: int = _of_run(1, "Epochs between exact evaluations. 0: only at the end.", check=at_least(0))
    """The last epoch is always evaluated."""
    eval_sample: float | None = _of_run(
        None,
        "Share of the targets from which evaluations before the last one estimate the metrics, with their "
        "standard errors, like 0.01. The last evaluation is exact. Estimates choose the "
        "best epoch for model.safetensors. With --early-stop, it is then evaluated exactly.",
        metavar="FRACTION",
        check=Check(lambda fraction: 0 < fraction < 1, "above 0 and below 1"),
    )
    eval_activations: Literal["float16", "bfloat16"] | None = _of_run(
        None,
        "float16 or bfloat16 keeps the rows between the layers of evaluations in half of the memory. Then "
        "metrics are not exact.",
        check=one_of("float16", "bfloat16"),
    )
    patience: int | None = _of_run(
        None,
        "Number of evaluations without improvement after which training stops. The first --metric on the "
        "validation targets counts. Results and predictions are then those of the best epoch.",
        flag="--early-stop",
        check=at_least(1),
    )
    """None: training does not stop early, and results are those of the last epoch."""
    min_delta: float = _of_run(
        0.0,
        "Change of the metric below which an evaluation counts as no improvement for --early-stop.",
        flag="--early-stop-delta",
        check=at_least(0),
    )
    checkpoint_every: Every = _of_run(
        1,
        "Epochs between checkpoints, or 200steps.",
        check=_make_every_check(0),
        kind=str,
        parse=_every,
    )
    """The last epoch is saved too. 0: a checkpoint is saved only when training receives a signal to stop."""
    keep: int | None = _of_run(
        None,
        "Number of newest checkpoints to keep. Older ones are removed after a save.",
        check=at_least(1),
    )
    resume: bool = _of_run(
        False, "Resume from the newest checkpoint in RUNDIR, even if other options have changed."
    )
    """Without this option, a run is only resumed if its configuration is the same."""
    overwrite: bool = _of_run(False, "Start over and delete the checkpoints in RUNDIR.")
    """A restart by torchrun still resumes from checkpoints of the same start of torchrun."""
    goes_on: bool = False
    """Whether checkpoints were found although ``resume`` was not set."""
    trace: str | Path | None = _path_of_run(
        None, "File for a timeline of all ranks, for Perfetto. `dglx report FILE` draws it.", metavar="FILE"
    )
    trace_steps: int = _of_run(200, "Number of steps to record, from the first one.", check=at_least(1))
    tensorboard: str | Path | None = _path_of_run(
        None, "Folder for a TensorBoard log of the figures in metrics.jsonl.", metavar="DIR"
    )
    watch: bool = _of_run(False, "Show a live table of throughput, memory and bytes on a terminal.")


def compute_rate_factor(config: RunOptions, step: int, steps_of_epoch: int) -> float:
    """Return the factor that scales the learning rate in a step. Steps count from the start of the run."""
    num_warmup_steps = config.warmup * steps_of_epoch
    num_steps = config.epochs * steps_of_epoch
    if step < num_warmup_steps:
        # The first step's factor is above 0, and the last warmup step's factor is 1.
        return (step + 1) / num_warmup_steps
    if config.schedule == "cosine":
        share = (step - num_warmup_steps) / max(1, num_steps - num_warmup_steps)
        return 0.5 * (1 + math.cos(math.pi * share))
    if config.schedule == "step" and 4 * step >= 3 * num_steps:
        return 0.01
    if config.schedule == "step" and 2 * step >= num_steps:
        return 0.1
    return 1.0


def check_run(config: RunOptions) -> None:
    """Raise ConfigError if two options contradict each other, or TensorBoard is needed but not installed."""
    refuse_addresses(config, ("trace", "tensorboard"))
    refuse_signed(
        config, ("data", "out", "predictions", "save_embeddings", "checkpoint_folder", "weights_folder")
    )
    if isinstance(config.metric, str):
        raise ConfigError(f"metric is the string {config.metric!r}, not a tuple: ({config.metric!r},)")
    if config.patience is not None and config.eval_every == 0:
        raise ConfigError(
            f"--early-stop {config.patience} counts evaluations, but --eval-every is 0. Set it to at least 1."
        )
    if config.eval_sample is not None and config.eval_every == 0:
        raise ConfigError(
            f"--eval-sample {config.eval_sample} is for evaluations before the last one, but --eval-every "
            "is 0. Set it to at least 1, or remove --eval-sample."
        )

    # The user's evaluation function takes no sample. FitConfig also has one for links.
    has_own_evaluation = getattr(config, "evaluate", None) is not None or not isinstance(config.task, str)
    for flag, value in (("sample", config.eval_sample), ("activations", config.eval_activations)):
        if value is not None and (config.task == LINK or has_own_evaluation):
            raise ConfigError(
                f"--eval-{flag} {value} is for metrics of nodes, but this run evaluates "
                f"{'links' if config.task == LINK else 'with a function of its own'}. Remove it, or raise "
                "--eval-every."
            )

    if config.warmup >= config.epochs and config.warmup:
        raise ConfigError(
            f"a warmup of {config.warmup} epochs does not fit in {config.epochs} epochs. Make it shorter."
        )

    if config.tensorboard is not None and find_spec("tensorboard") is None:
        raise ConfigError(
            f"tensorboard {config.tensorboard}: TensorBoard is not installed. Run `pip install "
            "'dglx_dist[tensorboard]'`, or leave it out, because metrics.jsonl has the same figures."
        )

    if config.resume and config.overwrite:
        raise ConfigError("resume needs the checkpoints that overwrite deletes. Use one of the two.")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Options for a ready-made model and its mini-batches. A wrong value raises ConfigError."""

    model: str = _of_model("sage", _MODELS)
    layers: int = _of_model(2, "Number of convolutions.", check=at_least(1))
    hidden: int = _of_model(64, "Width of the hidden layers.", check=at_least(1))
    heads: int = _of_model(4, "Number of attention heads of gat, gatv2 and hgt.")
    norm: str = _of_model(
        "none",
        f"Norm between the layers of {list_kinds('jk')} and rgcn: none, or layer for LayerNorm.",
        check=Check(
            ("none", "layer").__contains__, "none or layer; means of batch norm would depend on the ranks"
        ),
    )
    residual: bool = _of_model(
        False, "Add a layer's input to its result, from the second layer on (models as for --norm)."
    )
    jk: str = _of_model(
        "none",
        "Jumping knowledge of these models except rgcn: scores are a linear map of the results of all "
        "layers, concatenated (cat) or their maximum (max).",
        check=one_of("none", "cat", "max"),
    )
    teleport: float = _of_model(0.1, "Weight of a node's initial scores in appnp.", check=between(0, 1))
    device: str = _of_model(
        "auto",
        "Device of the model: cpu, cuda, cuda:N, or auto for a GPU if there is one. Never tested on a GPU.",
    )
    """Ranks on one machine use its GPUs in turn. More ranks than GPUs share them."""
    fanouts: tuple[int, ...] | None = _of_loading(
        None,
        "Number of sampled neighbours per node and layer, input-most layer first. -1 means all. Default: 25, "
        "then 10 for each other layer. Full-graph strategies use all neighbours.",
        flag="--fanout",
        metavar="K,K",
        parse=parse_integers,
    )
    """None: the default of the strategy."""
    batch_size: int | None = _of_loading(
        None,
        "Targets per rank and step. Default: 512. Not for full-graph strategies.",
        check=at_least(1),
    )
    structure: Literal["auto", "replicated", "partitioned"] = _of_loading(
        "auto", "Storage of the graph structure: auto, replicated on each server, or partitioned."
    )

    def __post_init__(self) -> None:
        check_ranges(self)
        missing_names = [name for name in LAYER_OPTIONS if not has_option(self.model, name)]
        if any(self.between[name] not in ("none", False) for name in missing_names):
            raise ConfigError(
                f"--model {self.model} has no --{' and --'.join(missing_names)}. {list_kinds('jk')} have "
                "--norm, --residual and --jk, and rgcn has --norm and --residual."
            )
        check_values(self, self._model_checks())
        if self.fanouts is not None and len(self.fanouts) != self.layers:
            raise ConfigError(
                f"--fanout {','.join(map(str, self.fanouts))} is for {len(self.fanouts)} layers, but "
                f"--layers is {self.layers}. Use one fan-out per layer, input-most first."
            )

    def _model_checks(self) -> Iterator[tuple[str, bool, str]]:
        """Yield (option, whether its value is wrong, allowed values) for options that the model restricts."""
        if has_option(self.model, "heads"):
            is_divisor = self.heads >= 1 and self.hidden % self.heads == 0
            yield "heads", not is_divisor, f"a divisor of --hidden {self.hidden}"
        if not has_option(self.model, "teleport"):
            remedy = f"left out with --model {self.model}: only appnp has it"
            yield "teleport", self.teleport != type(self).teleport, remedy

        # The first layer has no residual connection. The last layer of rgcn has none either.
        min_layers = 3 if self.model == "rgcn" else 2
        is_shallow = self.layers < min_layers
        yield "residual", self.residual and is_shallow, f"with --layers {min_layers} or more"

    @property
    def between(self) -> dict[str, Any]:
        """Arguments for ``build_model``."""
        return {name: getattr(self, name) for name in LAYER_OPTIONS}


@dataclass(frozen=True, kw_only=True)
class TrainConfig(RunOptions, ModelConfig):
    """Options for ``dglx train``, which trains a ready-made model. A wrong value raises ConfigError."""

    data: str = path_option(..., "Folder or address that `dglx partition` wrote.", metavar="DIR")
    strategy: str = option(
        "data_parallel",
        "Way in which the ranks share the work. auto chooses by timing. An unknown name lists all.",
    )
    ranks: int | None = option(
        None, "Number of processes to start on this machine. Leave it out under torchrun. Default: one."
    )
    servers: int | None = option(
        None, "Number of machines to emulate: ranks are treated as if they were on them. Default: one."
    )
    strategy_options: Mapping[str, object] = named_values("Option of the strategy. Repeatable.")
    timeout_s: float = option(
        300.0,
        "Seconds without an answer of a rank until the run stops.",
        flag="--timeout",
        check=ABOVE_ZERO,
    )
    seed: int = option(
        0,
        "Seed of weights, shuffling and sampling, the same on any number of ranks.",
        check=at_least(0),
    )
    seeds: tuple[int, ...] = option(
        (),
        "Seeds like 0,1,2. Train once with each seed, in RUNDIR/seed-N, and show mean and standard deviation "
        "of the metrics.",
        metavar="N,N",
        kind=str,
        parse=partial(parse_integers, like="0,1,2"),
    )
    dropout: float = _of_model(
        0.5,
        "Dropout probability after each layer except the last.",
        check=Check(lambda value: 0 <= value < 1, "at least 0 and below 1"),
    )
    recompute: Literal["none", "exchange", "keep"] = _of_model(
        "none",
        "Recomputation of layers of resgcn in the backward pass, which saves memory. Rows of other ranks are "
        "exchanged again (exchange) or kept (keep).",
    )
    model: str = _of_model(
        "sage",
        f"Name of a ready-made model: {_MODELS} With --task link also none, which scores trainable rows "
        "directly, for knowledge graphs.",
    )
    model_file: str | None = _of_model(
        None,
        "Your own model: MODEL in a Python file, which every rank runs. It is called with those of "
        f"{', '.join(OWN_ARGUMENTS)} that it names, and returns an nn.Module with forward(blocks, h).",
        metavar="FILE.py:MODEL",
    )
    """It is never read from a checkpoint. A resumed run needs the option again, with the same file."""
    edge_weight: str | None = _of_model(
        None,
        "Edge column that multiplies messages, like edge_weight= of DGL's layers, for "
        f"{list_kinds(WEIGHTED)}. Your own model reads it from the blocks.",
        metavar="COLUMN",
    )
    model_sha256: str = ""
    """SHA-256 of the model file, in hexadecimal."""
    embeddings: int | None = _of_model(
        None,
        "Width of learned embeddings of nodes without features. rgcn and hgt always learn --hidden columns.",
        check=at_least(1),
    )
    target: tuple[str, ...] = _of_link(
        (),
        "Edge types to predict, by name or as source:name:destination. Default: the only type, or all types "
        "of a graph with one node type. Types with the name of a reverse (NAME-rev) are left out.",
        metavar="NAME,NAME",
        kind=str,
        parse=parse_names,
    )
    decoder: str | None = _of_link(
        None,
        "Function that scores an edge by the rows of its ends: dot, distmult, transe, complex or rotate. All "
        "except dot learn parameters per edge type. Default: dot, or distmult for several targets.",
        check=one_of(*DECODER_NAMES),
    )
    negatives: int = _of_link(
        4,
        "Number of random negatives per edge with another destination. If both ends have the same node type, "
        "the same number with another source is added.",
        check=at_least(1),
    )
    loss: Literal["bce", "bpr", "softmax"] = _of_link(
        "softmax",
        "Loss of an edge and its negatives. softmax: cross-entropy of the edge among them. bpr: the edge is "
        "ranked above each of them. bce: each is classified alone, which may not learn.",
    )
    time: str | None = _of_link(
        None,
        "Edge column of times. Models then see only edges before the scored edge (data_parallel). Each later "
        "edge is ranked among 50 random destinations. Needs --split-time.",
        metavar="COLUMN",
    )
    split_time: tuple[float, ...] | None = _of_link(
        None,
        "Last time of the training edges and of the validation edges: numbers, or dates like 2024-05-31.",
        metavar="T1,T2",
        parse=parse_times,
    )
    epochs: int = _of_optimizer(
        20, "Number of training epochs, including those before a resume.", check=at_least(1)
    )
    optimizer: Literal["adam", "adamw", "sgd", "adagrad", "rmsprop"] = _of_optimizer(
        "adam",
        "Optimizer of torch.optim, with its defaults. Learned embeddings (--embeddings) always use Adam.",
    )
    lr: float = _of_optimizer(0.01, "Learning rate.", check=ABOVE_ZERO)
    momentum: float = _of_optimizer(0.0, "Momentum of the optimizers sgd and rmsprop.", check=at_least(0))
    weight_decay: float = _of_optimizer(0.0, "Weight decay of the optimizer.", check=at_least(0))
    cache: str | None = _of_loading(
        None,
        "Policy of a cache for features of other servers: lookahead (used again soonest), vip (most needed "
        "by batches), degree or halo.",
        metavar="POLICY",
        check=one_of("lookahead", "vip", "degree", "halo"),
    )
    cache_alpha: float = _of_loading(0.2, "Size of the cache as a fraction of own nodes.", check=at_least(0))
    depth: int | None = _of_loading(None, "Number of batches prepared ahead. Default: 1.", check=at_least(1))
    loader_threads: int | None = _of_loading(
        None,
        "Threads that prepare batches. 0: the training loop does it. Default: 1.",
        check=at_least(0),
    )
    verify: Literal["auto", "full", "never"] = _of_loading(
        "auto", "Verification of dataset files: auto for new files, full for all files, or never."
    )
    out: str = _path_of_run(
        "",
        "Run folder or address. A run with the same configuration resumes from its newest checkpoint. A run "
        "without checkpoints is replaced. Default: runs/NAME-STRATEGY with the NAME of DIR.",
        metavar="RUNDIR",
    )
    checkpoint_every: Every = _of_run(
        0,
        "Epochs between checkpoints in RUNDIR/checkpoints, or steps like 200steps. With 0, a checkpoint is "
        "saved only when the run receives a signal to stop, or with --early-stop.",
        check=_make_every_check(0),
        kind=str,
        parse=_every,
    )
    predictions: str | None = _path_of_run(
        None,
        "Folder for predictions as Parquet files: the class (and its name), labels or number of every node. "
        "With --task link: the test edges with score, rank and the ten best new destinations. With --seeds, "
        "they go to DIR/seed-N.",
        metavar="DIR",
    )
    scores: bool = _of_run(
        False,
        "Add the probabilities of all classes or labels to --predictions. For links, add the scores of the "
        "ten destinations.",
    )
    save_embeddings: str | None = _path_of_run(
        None,
        "Folder for the last hidden layer as Parquet. With --task link: the scored rows.",
        metavar="DIR",
    )

    def __post_init__(self) -> None:
        if self.model_file is not None:
            self._read_model_file(self.model_file)
        else:
            check_kind(self.model, (*KINDS, NO_ENCODER))

        # With ``auto``, the labels decide the task, so metrics are checked once the labels are read.
        if self.task != AUTO_TASK:
            list_metrics(self.task, self.metric)
        for name in _INIT_ARGUMENTS:
            if name in self.strategy_options:
                raise ConfigError(f"--option {name} is not an option of a strategy. See `dglx train --help`.")
        super().__post_init__()
        check_run(self)
        check_values(self, (*self._checks(), *self._export_checks(), *self._link_checks()))
        if not self.out:
            folder = Path("runs") / f"{Path(self.data).absolute().name}-{self.strategy}"
            object.__setattr__(self, "out", str(folder))

    def _read_model_file(self, model_file: str) -> None:
        """Set ``model`` to ``file:class``, and ``model_sha256``. Raise ConfigError if they are invalid."""
        path, _, name = model_file.rpartition(":")
        model = f"{Path(path).name}:{name}"
        if not path or not name.isidentifier():
            raise ConfigError(f"--model-file {model_file} must be FILE.py:NAME, like my_model.py:Model")
        # In a copy of this record, ``model`` names the file already.
        if self.model not in ("sage", model):
            raise ConfigError(f"--model-file {model_file} replaces --model {self.model}. Use one of the two.")
        try:
            digest = hashlib.sha256(Path(path).read_bytes()).hexdigest()
        except OSError as error:
            raise ConfigError(f"--model-file {path} cannot be read: {error.strerror}") from None
        object.__setattr__(self, "model", model)
        # Copies of the record belong to one run, so they keep the first record's checksum.
        if not self.model_sha256:
            object.__setattr__(self, "model_sha256", digest)

    def _checks(self) -> Iterator[tuple[str, bool, str]]:
        """Yield (option, whether its value is wrong, allowed values) for options that depend on others."""
        recomputes = self.recompute != "none"
        remedy = f"left out with --model {self.model}: only resgcn recomputes layers"
        yield "recompute", recomputes and not has_option(self.model, "recompute"), remedy

        is_auto = self.strategy == AUTO
        remedy = "left out with --strategy auto, which chooses caches itself (--option caches=false: none)"
        yield "cache", self.cache is not None and is_auto, remedy

        has_momentum = self.optimizer in ("sgd", "rmsprop")
        remedy = f"left out with --optimizer {self.optimizer}: only sgd and rmsprop have it"
        yield "momentum", self.momentum > 0 and not has_momentum, remedy

        if self.edge_weight is not None:
            ignores_weight = self.model_file is None and not has_option(self.model, WEIGHTED)
            remedy = "left out with {}, which does not read it"
            yield "edge-weight", ignores_weight, remedy.format(f"--model {self.model}")
            yield "edge-weight", self.task == LINK, remedy.format(f"--task {self.task}")
            yield "edge-weight", is_auto, remedy.format(f"--strategy {self.strategy}")

        for name in self.metric:
            remedy = f"some of {', '.join(_METRICS)}{suggest_name(name, _METRICS)}"
            yield "metric", name not in _METRICS, remedy

        has_repeated_seed = len(set(self.seeds)) < len(self.seeds)
        is_wrong = has_repeated_seed or min(self.seeds, default=0) < 0
        yield "seeds", is_wrong, "different numbers of at least 0"
        if self.seeds:
            yield "seed", self.seed != 0, "left out with --seeds"
            yield "trace", bool(self.trace), "left out with --seeds: each run would replace it"

    def _export_checks(self) -> Iterator[tuple[str, bool, str]]:
        """Yield checks like :meth:`_checks` for options about predictions and embeddings."""
        if self.save_embeddings is not None:
            is_shallow = self.layers < 2 and self.task != LINK
            remedy = "left out with --layers 1, whose only layer gives the scores"
            yield "save-embeddings", is_shallow, remedy
        yield "scores", self.scores and not self.predictions, "combined with --predictions DIR"
        folders = [Path(path).absolute() for path in (self.predictions, self.save_embeddings) if path]
        is_nested = any(inner.is_relative_to(outer) for inner, outer in permutations(folders, 2))
        yield "save-embeddings", is_nested, "another folder than --predictions, and neither in the other"

        # Files that an earlier run with a single seed left behind would look like part of this run.
        for folder in folders if self.seeds else ():
            is_used = (folder / EXPORT_INDEX).is_file()
            yield "seeds", is_used, f"left out, or {folder} removed: its files would stay beside seed-N"

    def _link_checks(self) -> Iterator[tuple[str, bool, str]]:
        """Yield checks like :meth:`_checks` for options about links."""
        is_auto = self.strategy == AUTO
        if self.task != LINK:
            yield "embeddings", self.embeddings is not None and is_auto, "left out with --strategy auto"
            for name in ("target", "decoder", "negatives", "loss", "time", "split_time"):
                is_set = getattr(self, name) != getattr(type(self), name)
                yield name.replace("_", "-"), is_set, "left out without --task link, which trains on edges"
            yield "model", self.model == NO_ENCODER, "another model without --task link: it has no layers"
            return

        yield "class-weight", self.class_weight != "none", "none with --task link, which has no classes"
        yield "time", is_auto and self.time is not None, "combined with --strategy data_parallel"
        yield from self._time_checks()
        if self.decoder in ("complex", "rotate"):
            width_option = "embeddings" if self.model == NO_ENCODER else "hidden"
            width = getattr(self, width_option)
            remedy = f"even with --decoder {self.decoder}, whose rows have real and imaginary halves"
            yield width_option, width is not None and width % 2 == 1, remedy
        if self.model == NO_ENCODER:
            remedy = "combined with --embeddings, the width of the rows that it scores, like 64"
            yield "model", self.embeddings is None, remedy

    def _time_checks(self) -> Iterator[tuple[str, bool, str]]:
        """Yield checks like :meth:`_checks` for options about links over time."""
        if self.split_time is not None:
            # A comparison with NaN is false, so NaN is rejected, too.
            is_rising = len(self.split_time) == 2 and self.split_time[0] < self.split_time[1]
            is_wrong = self.time is None or not is_rising
            yield "split-time", is_wrong, "two rising times, combined with --time COLUMN"
        if self.time is None:
            return
        remedy = "combined with --split-time T1,T2, the ends of training and validation edges"
        yield "time", self.split_time is None, remedy
        remedy = "left out with --time, because rows of a node differ from time to time"
        yield "predictions", self.predictions is not None, remedy
        yield "save-embeddings", self.save_embeddings is not None, remedy
        yield "model", self.model == NO_ENCODER, "another model with --time: none reads no edges"


_NOT_TRAINED = (
    *("epochs", "eval_every", "eval_sample", "eval_activations", "patience", "min_delta", "metric"),
    *("checkpoint_every", "keep", "resume", "overwrite"),
    *("goes_on", "trace", "trace_steps", "tensorboard", "watch", "device", "structure", "data", "ranks"),
    *("servers", "timeout_s", "recompute", "seeds", "cache", "cache_alpha", "depth", "loader_threads"),
    *("verify", "out", "predictions", "scores", "save_embeddings", "model_file", "optimizer"),
)
"""TrainConfig fields that a resumed run may change.

Most of them do not change the trained model. A few are compared elsewhere: the optimizer's kind and settings
with its saved groups, and the dataset by its content. Another number of ranks can resume too, but not with
the same bits.
"""


def collect_configuration(plan: TrainConfig, dataset: str) -> dict[str, object]:
    """Return the JSON values that must be equal in a resumed run. ``dataset`` is a checksum."""
    configuration: dict[str, object] = {"dataset": dataset}
    for field in fields(plan):
        if field.name not in _NOT_TRAINED:
            configuration[field.name] = getattr(plan, field.name)
    return configuration


def count_ranks_per_server(ranks: int, servers: int | None) -> int | None:
    """Return the ranks per server, or None without servers. Raise ConfigError if they cannot be equal."""
    if ranks < 1:
        raise ConfigError(f"--ranks {ranks} must be at least 1")
    if servers is None:
        return None
    if servers < 1 or ranks % servers:
        raise ConfigError(
            f"--ranks {ranks} cannot be divided among --servers {servers}. "
            "Make the ranks a multiple of the servers."
        )
    return ranks // servers


@dataclass(frozen=True, kw_only=True)
class PredictConfig:
    """Options for ``dglx predict``. A wrong value raises ConfigError."""

    run: str = path_option(..., "Run folder of `dglx train`.", metavar="RUNDIR")
    out: Path = option(..., "File of the answers, .parquet or .csv.", flag="--out", metavar="FILE")
    nodes: Path | None = option(
        None,
        "File of the nodes by your ids: .csv or .parquet with a column `id`, or .txt with an id per line. "
        "Default: all nodes.",
        metavar="FILE",
    )
    scores: bool = option(
        False,
        "Also write scores: probabilities of the classes or labels, as a column `scores`. Not for .csv.",
    )
    weights: Literal["best", "final"] = option("best", "Epoch of the weights: best by validation, or final.")
    data: str | None = path_option(
        None, "Folder of the dataset, if it has moved since the training.", metavar="DIR"
    )
    device: str = option("auto", "Device of the model: cpu, cuda, cuda:N, or auto for a GPU if there is one.")
    overwrite: bool = option(False, "Replace FILE.")

    def __post_init__(self) -> None:
        check_ranges(self)
        refuse_signed(self, ("run", "out", "data"))
        if self.out.suffix not in (".parquet", ".csv"):
            raise ConfigError(f"--out {self.out} must end with .parquet or .csv")
        if self.scores and self.out.suffix == ".csv":
            raise ConfigError(f"--scores writes lists, which --out {self.out} cannot hold. Use .parquet.")
        if self.out.exists() and not self.overwrite:
            raise ConfigError(f"--out {self.out} exists. Choose another file, or add --overwrite.")
