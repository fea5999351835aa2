"""Options of training: of ``dx.fit``, ready-made models, ``dglx train`` and ``dglx plan``.

Imports no torch, so that ``dglx --help`` is fast.
"""

import hashlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from importlib.util import find_spec
from itertools import permutations
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
    path_option,
)
from dglx_dist.registry import AUTO, suggest_name
from dglx_dist.training.model_kinds import KINDS, LAYER_OPTIONS, WEIGHTED, check_kind, has_option, list_kinds

FLOAT32, BF16 = PRECISIONS = "float32", "bf16"
"""Of forward passes in training; weights, gradients, optimizer and evaluation keep the model's dtype."""

_INIT_ARGUMENTS = ("strategy", "timeout", "seed", "backend", "device")
AUTO_TASK, CLASSIFICATION, MULTILABEL, REGRESSION, LINK = TASKS = (
    *("auto", "classification", "multilabel", "regression", "link"),
)
_OF_CLASSES = ("f1_micro", "f1_macro", "roc_auc", "average_precision")
METRICS_OF: Mapping[str, tuple[str, ...]] = {
    CLASSIFICATION: ("accuracy", *_OF_CLASSES),
    MULTILABEL: (*_OF_CLASSES, "accuracy"),
    REGRESSION: ("mae", "rmse"),
    LINK: ("mrr", "hits@1", "hits@3", "hits@10", "auc", "roc_auc", "average_precision"),
}
"""Task to its metrics; the first two are the default, of classification the first, of link up to ``auc``."""
LESS_IS_BETTER = ("mae", "rmse")
EXPORT_INDEX = "_index.json"
"""Of a folder of predictions or embeddings; readers of Parquet folders skip names that begin with ``_``."""
NO_ENCODER = "none"
"""In place of a model: trainable rows are scored as they are."""
DECODER_NAMES = ("dot", "distmult", "transe", "complex", "rotate")
_METRICS = tuple(dict.fromkeys(name for known in METRICS_OF.values() for name in known))


def list_metrics(task: str, metrics: Sequence[str]) -> tuple[str, ...]:
    """Return ``metrics``, or the defaults of ``task`` if there are none; ConfigError: one is not of it."""
    known, metrics = METRICS_OF.get(task, ()), list_names(metrics)
    for name in metrics:
        if name not in known:
            raise ConfigError(
                f"metric {name} is not one of {task}; take some of {', '.join(known)}, or another "
                f"--task{suggest_name(name, known)}"
            )
    return metrics or known[: {CLASSIFICATION: 1, LINK: 5}.get(task, 2)]


_MODELS = (
    "sage, gcn, gat, gatv2, gin (sums, so give it all neighbours), mlp, sgc, appnp or resgcn (deep); to "
    "train on several types, rgcn or hgt."
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
"""Between checkpoints: a number of epochs, or ``"200steps"``."""
_EVERY = re.compile(r"([0-9]{1,12})( ?steps?)?")


def count_steps_between(every: Every, steps_of_epoch: int) -> int:
    """Return the steps between checkpoints; ValueError unless ``every`` is an :data:`Every`; 0: none."""
    match = None if isinstance(every, bool) else _EVERY.fullmatch(str(every))
    if match is None:
        raise ValueError(f"{every!r} is no number of epochs or steps")
    return int(match[1]) * (1 if match[2] else steps_of_epoch)


def _check_every_from(least: int) -> Check:
    def holds(every: Any) -> bool:
        try:
            return count_steps_between(every, 1) >= max(least, isinstance(every, str))
        except ValueError:
            return False

    return Check(holds, f"a number of epochs, at least {least}, or of steps, like 200steps")


EVERY = _check_every_from(1)


def _every(text: str, _flag: str) -> Every:
    return int(text) if text.isdecimal() else text


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Task, epochs, evaluation, checkpoints and trace of a training run."""

    task: Any = _of_task(
        AUTO_TASK,
        "classification (one class per node), multilabel (columns of 0 and 1, each with a binary "
        "cross-entropy), regression (numbers, squared error of standardised ones) or link (edges of "
        "--target). auto, by the labels: (N,) whole numbers, (N, C) of 0 and 1, or other floating-point "
        "numbers.",
        check=one_of(*TASKS),
        kind=str,
    )
    metric: tuple[str, ...] = _of_task(
        (),
        f"Exact metrics of validation and test targets, with commas: {', '.join(_METRICS)}. The first "
        "one decides which epoch is the best. Default: accuracy; f1_micro,f1_macro; mae,rmse; those from mrr "
        "on, by task. roc_auc and average_precision are means over the classes (links: of the pairs of auc); "
        "accuracy of several labels counts rows without an error.",
        metavar="NAME,NAME",
        kind=str,
        parse=parse_names,
    )
    class_weight: Literal["none", "balanced"] = _of_task(
        "none", "balanced: a class counts in the loss by the inverse of its share of the training nodes."
    )
    """Of multilabel, the ones of each column by zeros / ones."""
    epochs: int = _of_optimizer(10, "Of the whole run.", check=at_least(1))
    """Includes those before a resume."""
    schedule: Literal["constant", "cosine", "step"] = _of_optimizer(
        "constant",
        "Of the learning rate over all epochs: cosine falls to 0, step to a tenth after half of them and a "
        "hundredth after three quarters.",
    )
    warmup: int = _of_optimizer(
        0, "Epochs at the start in which the learning rate rises from 0.", check=at_least(0)
    )
    """The rate changes with every step, and is the same after a resume."""
    clip_norm: float | None = _of_optimizer(
        None, "Clip the norm of all gradients to this number before each step.", check=ABOVE_ZERO
    )
    """The norm is that of the uncut model."""
    accumulate: int = _of_optimizer(
        1,
        "Number of batches whose gradients are added before a step, which is that on their union.",
        check=at_least(1),
    )
    """The last step of an epoch has the remaining batches."""
    precision: str | None = _of_optimizer(
        None,
        "bf16: forward passes of training in bfloat16, by torch's autocast. Default: float32, or as before a "
        "resume.",
        check=one_of(*PRECISIONS),
    )
    eval_every: int = _of_run(1, "Epochs between exact evaluations; 0: at the end.", check=at_least(0))
    """The last epoch is always evaluated."""
    patience: int | None = _of_run(
        None,
        "Stop after this number of evaluations without a better one, by the first --metric on the validation "
        "targets. Results and predictions are then those of the best one.",
        flag="--early-stop",
        check=at_least(1),
    )
    """None: never, and results are those of the last epoch."""
    checkpoint_every: Every = _of_run(
        1,
        "Epochs between checkpoints, or steps: 200steps.",
        check=_check_every_from(0),
        kind=str,
        parse=_every,
    )
    """The last epoch is saved too. 0: saved only when training is told to end."""
    keep: int | None = _of_run(
        None, "Newest checkpoints to keep; an older one goes once a new one is complete.", check=at_least(1)
    )
    """None: all."""
    resume: bool = _of_run(
        False, "Resume from the newest checkpoint in RUNDIR, also with another configuration."
    )
    """From the start if there is none. Without it, only a run of the same configuration is resumed."""
    overwrite: bool = _of_run(False, "Begin anew, and remove the checkpoints in RUNDIR.")
    """A restart by torchrun is still resumed from what the same start of torchrun has saved."""
    goes_on: bool = False
    """Set where ``resume`` was not asked for, but checkpoints were found."""
    trace: str | Path | None = _path_of_run(
        None, "Write a timeline of all ranks, for Perfetto; `dglx report FILE` draws it.", metavar="FILE"
    )
    """None: nothing is recorded."""
    trace_steps: int = _of_run(200, "Number of first steps in the trace.", check=at_least(1))
    tensorboard: str | Path | None = _path_of_run(
        None, "Write the figures of metrics.jsonl there, too, for TensorBoard (an extra).", metavar="DIR"
    )
    watch: bool = _of_run(False, "Show a live table of throughput, memory and bytes, on a terminal.")
    """Below the progress bar; without a terminal, lines as always."""


def compute_rate_factor(config: RunOptions, step: int, steps_of_epoch: int) -> float:
    """Return the factor of the learning rate in a step, counted from the first of the run."""
    rising, steps = config.warmup * steps_of_epoch, config.epochs * steps_of_epoch
    if step < rising:
        return (step + 1) / rising
    share = (step - rising) / max(1, steps - rising)
    if config.schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * share))
    if config.schedule == "step":
        return 0.01 if 4 * step >= 3 * steps else 0.1 if 2 * step >= steps else 1.0
    return 1.0


def check_run(config: RunOptions) -> None:
    """Raise ConfigError unless the options agree."""
    if isinstance(config.metric, str):
        raise ConfigError(f"metric is the string {config.metric!r}; give a tuple: ({config.metric!r},)")
    if config.patience is not None and config.eval_every == 0:
        raise ConfigError(
            f"--early-stop {config.patience} counts evaluations, but --eval-every is 0; set at least 1"
        )
    if config.warmup >= config.epochs and config.warmup:
        raise ConfigError(
            f"a warmup of {config.warmup} epochs leaves none of {config.epochs}; make it shorter"
        )
    if config.tensorboard is not None and find_spec("tensorboard") is None:
        raise ConfigError(
            f"tensorboard {config.tensorboard}: TensorBoard is not installed; `pip install "
            "'dglx_dist[tensorboard]'`, or leave it out: metrics.jsonl has the same figures"
        )
    if config.resume and config.overwrite:
        raise ConfigError("resume needs the checkpoints that overwrite removes; give one of the two")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Options of a ready-made model and its mini-batches; a wrong value is a ConfigError."""

    model: str = _of_model("sage", _MODELS)
    layers: int = _of_model(2, "Convolutions.", check=at_least(1))
    hidden: int = _of_model(64, "Width between them.", check=at_least(1))
    heads: int = _of_model(4, "Attention heads of gat, gatv2 and hgt.")
    norm: str = _of_model(
        "none",
        f"layer: LayerNorm between the layers of {list_kinds('jk')} and rgcn.",
        check=Check(
            ("none", "layer").__contains__, "none or layer; means of batch norm would depend on the ranks"
        ),
    )
    residual: bool = _of_model(
        False, "Add a layer's input to its result, from the second layer of these models on."
    )
    jk: str = _of_model(
        "none",
        "Jumping knowledge of these models: scores are a linear map of the results of all layers, side by "
        "side (cat) or the largest (max); not of rgcn.",
        check=one_of("none", "cat", "max"),
    )
    teleport: float = _of_model(
        0.1, "Share of a node's first scores in each hop of appnp.", check=between(0, 1)
    )
    device: str = _of_model(
        "auto", "cuda, cuda:N (not run on a GPU yet) or cpu; auto: a GPU if there is one."
    )
    """Ranks on one machine take its GPUs in turn, and share them where there are more ranks."""
    fanouts: tuple[int, ...] | None = _of_loading(
        None,
        "Neighbours sampled per node and layer, input-most first; -1: all. Default: 25, then 10 for each "
        "other layer. Full-graph strategies use all neighbours.",
        flag="--fanout",
        metavar="K,K",
        parse=parse_integers,
    )
    """One for each layer; None: the strategy's own."""
    batch_size: int | None = _of_loading(
        None,
        "Targets per rank and step. Default: 512. Full-graph strategies have no batch size.",
        check=at_least(1),
    )
    """None: the strategy's own, where it has mini-batches."""
    structure: Literal["auto", "replicated", "partitioned"] = _of_loading(
        "auto", "auto, replicated on each server, or partitioned."
    )

    def __post_init__(self) -> None:
        check_ranges(self)
        lacks = [name for name in LAYER_OPTIONS if not has_option(self.model, name)]
        if {self.between[name] for name in lacks} - {"none", False}:
            raise ConfigError(
                f"--model {self.model} has no --{' and --'.join(lacks)}; {list_kinds('jk')} have --norm, "
                "--residual and --jk, rgcn all but --jk"
            )
        wrong = has_option(self.model, "heads") and (self.heads < 1 or self.hidden % self.heads > 0)
        useless = not has_option(self.model, "teleport") and self.teleport != type(self).teleport
        of_appnp = ("teleport", useless, f"left out with --model {self.model}: it is of appnp")
        least = 3 if self.model == "rgcn" else 2  # rgcn adds none in its last layer either
        residual = ("residual", self.residual and self.layers < least, f"with --layers {least} or more")
        check_values(self, [("heads", wrong, f"a divisor of --hidden {self.hidden}"), of_appnp, residual])
        if self.fanouts is not None and len(self.fanouts) != self.layers:
            raise ConfigError(
                f"--fanout {','.join(map(str, self.fanouts))} is for {len(self.fanouts)} layers, but "
                f"--layers is {self.layers}; give one fan-out for each layer, input-most first"
            )

    @property
    def between(self) -> dict[str, Any]:
        """Arguments of ``build_model``."""
        return {name: getattr(self, name) for name in LAYER_OPTIONS}


@dataclass(frozen=True, kw_only=True)
class TrainConfig(RunOptions, ModelConfig):
    """Options of ``dglx train``: one run of a ready-made model; a wrong value is a ConfigError."""

    data: str = path_option(..., "What `dglx partition` wrote.", metavar="DIR")
    strategy: str = option("data_parallel", "A wrong name lists all strategies; auto chooses one.")
    ranks: int | None = option(
        None, "Processes to start here, with torchrun. Default: one, or those of torchrun."
    )
    servers: int | None = option(
        None, "Treat the ranks as if they were on this number of machines. Default: one."
    )
    strategy_options: Mapping[str, object] = named_values("Option of the strategy; repeatable.")
    timeout_s: float = option(300.0, "Seconds that a rank may be silent.", flag="--timeout", check=ABOVE_ZERO)
    seed: int = option(
        0, "Of weights, order and samples, which are equal on any number of ranks.", check=at_least(0)
    )
    seeds: tuple[int, ...] = option(
        (),
        "Train once with each seed, into RUNDIR/seed-N, and show mean and standard deviation of the metrics: "
        "0,1,2.",
        metavar="N,N",
        kind=str,
        parse=partial(parse_integers, like="0,1,2"),
    )
    dropout: float = _of_model(
        0.5,
        "Probability, after each layer but the last.",
        check=Check(lambda value: 0 <= value < 1, "at least 0 and below 1"),
    )
    recompute: Literal["none", "exchange", "keep"] = _of_model(
        "none",
        "Save memory in resgcn: backward recomputes each layer, and either exchanges rows of "
        "other ranks again (exchange) or keeps them (keep).",
    )
    model: str = _of_model(
        "sage",
        f"{_MODELS} With --task link also none: trainable rows are scored as they are, for knowledge graphs.",
    )
    model_file: str | None = _of_model(
        None,
        "One's own model: MODEL of a Python file, which every rank runs. Called with those of "
        f"{', '.join(OWN_ARGUMENTS)} that it names, it returns an nn.Module with forward(blocks, h).",
        metavar="FILE.py:MODEL",
    )
    """Never read from a run or a checkpoint: a resumed run is given it again, and the same content."""
    edge_weight: str | None = _of_model(
        None,
        "Edge column that multiplies messages, as edge_weight= of DGL's layers: of "
        f"{list_kinds(WEIGHTED)}. Your own model reads it from blocks.",
        metavar="COLUMN",
    )
    model_sha256: str = ""
    """Of that file, in hexadecimal."""
    embeddings: int | None = _of_model(
        None,
        "Width of trainable rows, for nodes without features. rgcn and hgt have them, as wide as --hidden, "
        "without this option.",
        check=at_least(1),
    )
    target: tuple[str, ...] = _of_link(
        (),
        "Edge types to predict, by name or as source:name:destination. Default: the only one, or all of a "
        "graph of one node type; without those named as the reverse of another (NAME-rev).",
        metavar="NAME,NAME",
        kind=str,
        parse=parse_names,
    )
    decoder: str | None = _of_link(
        None,
        "Score of an edge, from the rows of its ends: dot, distmult, transe, complex or rotate; all but dot "
        "learn each edge type's part. Default: dot, or distmult of several targets.",
        check=one_of(*DECODER_NAMES),
    )
    negatives: int = _of_link(
        4,
        "Random edges beside each edge, with another destination; and as many with another source if both "
        "are of one node type.",
        check=at_least(1),
    )
    loss: Literal["bce", "bpr", "softmax"] = _of_link(
        "softmax",
        "softmax: an edge is the one among its negatives; bpr: it is above each of them; bce: is it an edge "
        "(may stay at guesses).",
    )
    epochs: int = _of_optimizer(20, "Of the whole run.", check=at_least(1))
    optimizer: Literal["adam", "adamw", "sgd", "adagrad", "rmsprop"] = _of_optimizer(
        "adam", "Optimizer of torch, with its defaults; trainable rows (--embeddings) always have Adam."
    )
    lr: float = _of_optimizer(0.01, "Learning rate.", check=ABOVE_ZERO)
    momentum: float = _of_optimizer(0.0, "Momentum of the optimizers sgd and rmsprop.", check=at_least(0))
    weight_decay: float = _of_optimizer(0.0, "Of the optimizer.", check=at_least(0))
    cache: str | None = _of_loading(
        None,
        "Cache features of other servers: lookahead (used again soonest), vip (most needed by batches), "
        "degree or halo.",
        metavar="POLICY",
        check=one_of("lookahead", "vip", "degree", "halo"),
    )
    cache_alpha: float = _of_loading(
        0.2, "Size of the cache, as a fraction of the server's own nodes.", check=at_least(0)
    )
    depth: int | None = _of_loading(None, "Batches prepared ahead. Default: 1.", check=at_least(1))
    loader_threads: int | None = _of_loading(
        None, "Threads that prepare them; 0: the training loop. Default: 1.", check=at_least(0)
    )
    verify: Literal["auto", "full", "never"] = _of_loading("auto", "auto: read new files, full: all, never.")
    out: str = _path_of_run(
        "",
        "A run of the same configuration is resumed from its newest checkpoint, one without checkpoints "
        "is replaced. Default: runs/NAME-STRATEGY, NAME of DIR.",
        metavar="RUNDIR",
    )
    checkpoint_every: Every = _of_run(
        0,
        "Epochs between checkpoints in RUNDIR/checkpoints, or steps: 200steps; 0: one is saved only when the "
        "run is told to end, or with --early-stop.",
        check=_check_every_from(0),
        kind=str,
        parse=_every,
    )
    predictions: str | None = _path_of_run(
        None,
        "Write every node's class (and its name), labels or number as Parquet; with --task link the test "
        "edges, with score, rank and the ten best new destinations. With --seeds: into DIR/seed-N.",
        metavar="DIR",
    )
    scores: bool = _of_run(
        False,
        "With --predictions: also the probabilities of all classes or labels; of links, scores of the ten.",
    )
    save_embeddings: str | None = _path_of_run(
        None,
        "Write every node's last hidden layer, as Parquet; with --task link, the rows that are scored.",
        metavar="DIR",
    )

    def __post_init__(self) -> None:
        if self.model_file is not None:
            self._read_model_file(self.model_file)
        else:
            check_kind(self.model, (*KINDS, NO_ENCODER))
        if self.task != AUTO_TASK:
            list_metrics(self.task, self.metric)
        for name in _INIT_ARGUMENTS:
            if name in self.strategy_options:
                raise ConfigError(f"--option {name} is no option of a strategy; see `dglx train --help`")
        super().__post_init__()
        check_run(self)
        check_values(self, (*self._checks(), *self._link_checks()))
        if not self.out:
            folder = Path("runs") / f"{Path(self.data).absolute().name}-{self.strategy}"
            object.__setattr__(self, "out", str(folder))

    def _read_model_file(self, given: str) -> None:
        path, _, name = given.rpartition(":")
        shown = f"{Path(path).name}:{name}"
        if not path or not name.isidentifier():
            raise ConfigError(f"--model-file {given} must be FILE.py:NAME, as my_model.py:Model")
        if self.model not in ("sage", shown):
            raise ConfigError(f"--model-file {given} replaces --model {self.model}; give one of the two")
        try:
            found = hashlib.sha256(Path(path).read_bytes()).hexdigest()
        except OSError as error:
            raise ConfigError(f"--model-file {path} cannot be read: {error.strerror}") from None
        object.__setattr__(self, "model", shown)
        # Once: copies of the record are those of one run.
        object.__setattr__(self, "model_sha256", self.model_sha256 or found)

    def _checks(self) -> Iterator[tuple[str, bool, str]]:
        has_no_use = self.recompute != "none" and not has_option(self.model, "recompute")
        remedy = f"left out with --model {self.model}: only layers of resgcn are computed again"
        yield "recompute", has_no_use, remedy
        remedy = "left out with --strategy auto, which weighs caches itself (--option caches=false: none)"
        yield "cache", self.cache is not None and self.strategy == AUTO, remedy
        has_momentum = self.optimizer in ("sgd", "rmsprop")
        remedy = f"left out with --optimizer {self.optimizer}: it is of sgd and rmsprop"
        yield "momentum", self.momentum > 0 and not has_momentum, remedy
        no_use = {
            f"--model {self.model}": self.model_file is None and not has_option(self.model, WEIGHTED),
            f"--task {self.task}": self.task == LINK,
            f"--strategy {self.strategy}": self.strategy == AUTO,
        }
        for option_given, is_wrong in no_use.items():
            remedy = f"left out with {option_given}, which does not read it"
            yield "edge-weight", self.edge_weight is not None and is_wrong, remedy
        is_shallow = self.layers < 2 and self.task != LINK
        remedy = "left out with --layers 1, whose only layer gives the scores"
        yield "save-embeddings", self.save_embeddings is not None and is_shallow, remedy
        yield "scores", self.scores and not self.predictions, "given with --predictions DIR"
        written = [Path(one).absolute() for one in (self.predictions, self.save_embeddings) if one]
        is_within = any(a.is_relative_to(b) for a, b in permutations(written, 2))
        yield "save-embeddings", is_within, "another folder than --predictions, and neither in the other"
        taken = next((one for one in written if self.seeds and (one / EXPORT_INDEX).is_file()), None)
        yield "seeds", bool(taken), f"left out, or {taken} removed: its files would stay beside seed-N"
        unknown = next((one for one in self.metric if one not in _METRICS), "")
        yield "metric", unknown != "", f"some of {', '.join(_METRICS)}{suggest_name(unknown, _METRICS)}"
        is_wrong = min(self.seeds, default=0) < 0 or len(set(self.seeds)) < len(self.seeds)
        yield "seeds", is_wrong, "different numbers of at least 0"
        yield "seed", bool(self.seed and self.seeds), "left out with --seeds"
        yield "trace", bool(self.trace and self.seeds), "left out with --seeds: each run would replace it"

    def _link_checks(self) -> Iterator[tuple[str, bool, str]]:
        auto = self.strategy == AUTO
        if self.task != LINK:
            yield "embeddings", self.embeddings is not None and auto, "left out with --strategy auto"
            defaults = {one.name: one.default for one in fields(self)}
            for name in ("target", "decoder", "negatives", "loss"):
                given = getattr(self, name) != defaults[name]
                yield name, given, "left out without --task link, which trains on edges"
            yield "model", self.model == NO_ENCODER, "another one without --task link: it has no layers"
            return
        yield "class-weight", self.class_weight != "none", "none with --task link, which has no classes"
        if auto:
            raise ConfigError(
                "--task link needs a named strategy, like data_parallel: auto compares batches of nodes"
            )
        width = "embeddings" if self.model == NO_ENCODER else "hidden"
        is_odd = self.decoder in ("complex", "rotate") and (getattr(self, width) or 0) % 2 == 1
        yield width, is_odd, f"even with --decoder {self.decoder}, whose rows have real and imaginary halves"
        without = self.model == NO_ENCODER and self.embeddings is None
        yield "model", without, "with --embeddings, the width of the rows that it scores, like 64"


_NOT_TRAINED = (
    *("epochs", "eval_every", "patience", "metric", "checkpoint_every", "keep", "resume", "overwrite"),
    *("goes_on", "trace", "trace_steps", "tensorboard", "watch", "device", "structure", "data", "ranks"),
    *("servers", "timeout_s", "recompute", "seeds", "cache", "cache_alpha", "depth", "loader_threads"),
    *("verify", "out", "predictions", "scores", "save_embeddings", "model_file"),
    "optimizer",
)
"""Fields of TrainConfig that do not change what is trained: a run is resumed with other values.

The kind and the settings of the optimizer are compared apart, as they are in its groups.

The dataset counts by its content. Another number of ranks can resume too, but not with the same bits.
"""


def collect_configuration(plan: TrainConfig, dataset: str) -> dict[str, object]:
    """Return what must be the same in a resumed run, JSON values; ``dataset`` names the content."""
    shared = {one.name: getattr(plan, one.name) for one in fields(plan) if one.name not in _NOT_TRAINED}
    return {"dataset": dataset, **shared}


def count_ranks_per_server(ranks: int, servers: int | None) -> int | None:
    """Return the number of ranks on each server, None without a number of servers; ConfigError if uneven."""
    if ranks < 1:
        raise ConfigError(f"--ranks {ranks} must be at least 1")
    if servers is None:
        return None
    if servers < 1 or ranks % servers:
        raise ConfigError(
            f"--ranks {ranks} cannot be divided among --servers {servers}; "
            "make the ranks a multiple of the servers"
        )
    return ranks // servers
