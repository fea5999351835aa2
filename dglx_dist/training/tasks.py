"""Tasks: what labels mean, the loss in a step, and exact metrics."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dglx_dist.comm.collectives import gather_int64, run_on_all_ranks, sum_over_ranks
from dglx_dist.comm.session import Session
from dglx_dist.dataloading.edge_loader import merge_pairs
from dglx_dist.errors import ConfigError
from dglx_dist.graph.dist_tensor import DistTensor
from dglx_dist.graph.split import node_split
from dglx_dist.records import FEATURE, LABEL, SPLITS, TRAIN
from dglx_dist.strategies.base import STRATEGIES, WrappedModel, find_float_parameter
from dglx_dist.training import metrics
from dglx_dist.training.config import AUTO_TASK, CLASSIFICATION, LESS_IS_BETTER, MULTILABEL, REGRESSION
from dglx_dist.training.relational import EntityInputs

if TYPE_CHECKING:
    from dglx_dist.graph.dist_graph import DistGraph

log = logging.getLogger(__name__)

LossFunction: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Maps (B, C) scores and (B,) or (B, C) labels to the mean loss over the B rows. Ignored if B is 0."""
_MAX_CLASSES_BEYOND_NODES, _MAX_GUESSED_CLASSES = 1000, 100
"""Class counts that are accepted for any number of nodes, and for any number of training nodes."""
_ROWS_AT_ONCE = 1 << 16
"""Rows of scores and labels that a rank reads at a time."""


def read_task(g: DistGraph, ntype: str, label: str, requested: str = AUTO_TASK) -> tuple[str, int]:
    """Find the task that ``ntype`` labels are for, and the width of a model's scores. All ranks call this.

    The width is 0 for classification, because ``g.num_classes`` has it. ConfigError if the labels do not fit
    the task.
    """
    data = g.nodes[ntype].data
    if label not in data:
        return (CLASSIFICATION if requested == AUTO_TASK else requested), 0

    column = data[label]
    shape = tuple(column.shape[1:])
    is_real = column.dtype.is_floating_point
    width = math.prod(shape)
    is_row = len(shape) <= 1

    # A single column with real numbers is a regression by default, even if all are 0 or 1.
    can_be_binary = len(shape) == 1 and not (is_real and width == 1)
    if requested != AUTO_TASK:
        can_be_binary = len(shape) == 1 and requested == MULTILABEL
    is_binary = can_be_binary and _is_binary(column, g, ntype)
    fits = {
        CLASSIFICATION: shape == () and not is_real,
        MULTILABEL: is_binary,
        REGRESSION: is_row and (is_real or requested == REGRESSION),
    }
    candidates = [name for name, is_fit in fits.items() if is_fit and requested in (AUTO_TASK, name)]
    if not candidates:
        raise ConfigError(
            f"the labels {label!r} are {column.dtype} of shape {tuple(column.shape)}, which do not fit "
            f"--task {requested}: classification needs one whole number per node, multilabel (N, C) values "
            "of 0 and 1, regression numbers. Choose another task, or partition with other labels."
        )

    task = candidates[0]
    if task == REGRESSION and g.dataset.manifest.class_names.get(ntype):
        raise ConfigError(
            f"the labels {label!r} are classes with names, which do not fit --task regression. Remove it, "
            "or partition with numbers as labels, written with a decimal point like 7.0."
        )

    if task == CLASSIFICATION:
        _check_classes(g, ntype, label, is_guess=requested == AUTO_TASK)
    return task, 0 if task == CLASSIFICATION else width


def _check_classes(g: DistGraph, ntype: str, label: str, *, is_guess: bool) -> None:
    """Raise ConfigError if there are too many classes.

    There may be as many classes as nodes. If the task was guessed and classes have no names, there may only
    be as many as training nodes, because the labels could be numbers such as prices.
    """
    manifest = g.dataset.manifest
    num_classes = manifest.num_classes.get(ntype, 0)
    num_nodes = g.num_nodes(ntype)
    max_classes = max(num_nodes, _MAX_CLASSES_BEYOND_NODES)
    description = "nodes"
    remedy = ""

    has_names = bool(manifest.class_names.get(ntype))
    is_doubtful = is_guess and not has_names and _MAX_GUESSED_CLASSES < num_classes <= max_classes
    if is_doubtful and TRAIN in g.nodes[ntype].data:
        train_labels = _read_labels(g, ntype, label, TRAIN)
        num_nodes = int(sum_over_ranks(torch.tensor([len(train_labels)]), g.session, phase=metrics.PHASE))
        max_classes = max(num_nodes, _MAX_GUESSED_CLASSES)
        description = "training nodes"
        remedy = ", or use --task classification"

    if num_classes > max_classes:
        raise ConfigError(
            f"the largest label in {label!r} is {num_classes - 1}, so there would be {num_classes} classes "
            f"for {num_nodes} {description}. If the labels are numbers such as prices, use --task regression "
            "(in Python task='regression'). If they are codes, partition with "
            f"np.unique(labels, return_inverse=True)[1] as labels{remedy}."
        )


def split_owned_rows(g: DistGraph, ntype: str) -> Iterator[slice]:
    """Yield slices over this rank's rows, each with at most ``_ROWS_AT_ONCE`` rows."""
    first, last = g.get_node_partition_policy(ntype).owned_range
    for begin in range(first, last, _ROWS_AT_ONCE):
        yield slice(begin, min(begin + _ROWS_AT_ONCE, last))


def _is_binary(column: DistTensor, g: DistGraph, ntype: str) -> bool:
    """Return whether all labels on all ranks are 0 or 1. Every rank must call this."""

    def count_other_values() -> int:
        count = 0
        for rows in split_owned_rows(g, ntype):
            labels = column[rows]
            count += int(((labels != 0) & (labels != 1)).sum())
        return count

    count = torch.tensor([run_on_all_ranks(g.session, count_other_values)])
    return int(sum_over_ranks(count, g.session, phase=metrics.PHASE)) == 0


def choose_loss(task: str, weights: Tensor | None = None) -> LossFunction:
    """Return the loss function for ``task``.

    A weighted loss is divided by the number of rows, not by the sum of the weights. Otherwise the mean over
    the ranks' means would not be the mean over all rows.

    Args:
        task: Name of the task.
        weights: Result from :func:`compute_class_weights`. For a regression, (K,) standard deviations that
            divide the error.
    """
    if task == CLASSIFICATION:
        return F.cross_entropy if weights is None else partial(_weighted_cross_entropy, weights)
    return partial(_squared_error if task == REGRESSION else _binary_loss, weights)


def _squared_error(deviation: Tensor | None, scores: Tensor, labels: Tensor) -> Tensor:
    error = scores - _match_scores(labels, scores)
    if deviation is not None:
        error = error / deviation.to(error)
    return error.square().mean()


def _check_columns(labels: Tensor | DistTensor, scores: Tensor | DistTensor) -> None:
    if math.prod(labels.shape[1:]) != math.prod(scores.shape[1:]):
        raise ConfigError(
            f"the model returns scores of shape {tuple(scores.shape)} for labels of shape "
            f"{tuple(labels.shape)}. Its last layer must have a column for each of the labels."
        )


def _match_scores(labels: Tensor, scores: Tensor) -> Tensor:
    """Return labels in the scores' shape and dtype. ConfigError if the columns do not match."""
    _check_columns(labels, scores)
    # Autocast computes these losses in float32.
    dtype = torch.float32 if scores.dtype == torch.bfloat16 else scores.dtype
    return labels.to(dtype).reshape(scores.shape)


def _binary_loss(weights: Tensor | None, scores: Tensor, labels: Tensor) -> Tensor:
    weights = None if weights is None else weights.to(scores)
    return F.binary_cross_entropy_with_logits(scores, _match_scores(labels, scores), pos_weight=weights)


def _weighted_cross_entropy(weights: Tensor, scores: Tensor, labels: Tensor) -> Tensor:
    losses = F.cross_entropy(scores, labels, reduction="none")
    return (losses * weights.to(scores.device)[labels]).mean()


def compute_class_weights(g: DistGraph, ntype: str, label: str, task: str) -> Tensor:
    """Compute ``balanced`` class weights, (C,) float32. Every rank must call this.

    For classification, class c has the weight n / (C * n_c) if n_c of all n training nodes have it. A class
    without training nodes has the weight 0.

    For multilabel, a column's weight is the number of its zeros divided by the number of its ones. A column
    without zeros or ones has the weight 1.

    Raises ConfigError on all ranks if a training node has no class.
    """
    if task == REGRESSION:
        raise ConfigError("class weights need classes, but the task is regression. Remove the class weights.")
    is_class = task == CLASSIFICATION

    def read() -> Tensor:
        labels = _read_labels(g, ntype, label, SPLITS[0])
        if is_class and bool((labels < 0).any()):
            raise ConfigError("a training node has no class (-1). Remove the node from train_mask.")
        return labels

    labels = run_on_all_ranks(g.session, read, ConfigError)
    # The dataset knows the number of classes only for its own label column.
    largest_here = int(labels.max()) if is_class and len(labels) else 0
    largest = int(gather_int64([largest_here], g.session).max())
    classes = max(g.dataset.manifest.num_classes.get(ntype, 0), largest + 1)
    counts = torch.bincount(labels, minlength=classes) if is_class else labels.double().sum(0).long()

    # This rank's number of rows is appended, so that one sum over the ranks is enough.
    counts = torch.cat([counts, torch.tensor([len(labels)])])
    counts = sum_over_ranks(counts, g.session, phase=metrics.PHASE)
    ones = counts[:-1].float()
    num_rows = float(counts[-1])
    if is_class:
        return torch.where(ones > 0, num_rows / (classes * ones), torch.tensor(0.0))
    return torch.where((ones > 0) & (ones < num_rows), (num_rows - ones) / ones, torch.tensor(1.0))


def compute_moments(g: DistGraph, ntype: str, label: str, mask: str) -> tuple[Tensor, Tensor]:
    """Return means and standard deviations, (K,) float64, of the target columns in ``mask``.

    Every rank must call this. The deviation is 0 if the targets are equal in float32 or there are none.
    """
    targets = _read_labels(g, ntype, label, mask).double()
    targets = targets.reshape(len(targets), math.prod(targets.shape[1:]))
    count = max(1, int(sum_over_ranks(torch.tensor([len(targets)]), g.session, phase=metrics.PHASE)))
    mean = sum_over_ranks(targets.sum(0), g.session, phase=metrics.PHASE) / count
    squares = sum_over_ranks((targets - mean).square().sum(0), g.session, phase=metrics.PHASE)
    deviation = (squares / count).sqrt()
    return mean, torch.where(deviation > torch.finfo(torch.float32).eps * mean.abs(), deviation, 0.0)


def to_probabilities(task: str, scores: Tensor) -> Tensor:
    """Convert (B, C) scores for classes or labels to probabilities. Return other scores unchanged."""
    if task == CLASSIFICATION:
        return scores.softmax(1)
    return scores.sigmoid() if task == MULTILABEL else scores


def to_predictions(task: str, scores: Tensor) -> Tensor:
    """Return predictions for (B, C) scores: (B,) int64 classes, (B, C) bool, or numbers."""
    if task == CLASSIFICATION:
        return scores.argmax(1)
    if task == MULTILABEL:
        return scores > 0
    return scores.squeeze(1) if scores.dim() == 2 else scores


def measure(
    scores: DistTensor, g: DistGraph, ntype: str, label: str, mask: str, task: str, names: Sequence[str]
) -> dict[str, float]:
    """Compute the metrics ``names`` for (N, C) scores in a mask, NaN if it is empty. All ranks call this."""
    if not names:
        return {}
    mask_scores, labels, _ = collect_targets(scores, g, ntype, label, mask, task)
    return {name: compute_metric(name, mask_scores, labels, g.session, task) for name in names}


def collect_targets(
    scores: DistTensor,
    g: DistGraph,
    ntype: str,
    label: str,
    mask: str,
    task: str,
    select: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the scores, labels and (n,) ids of the nodes that this rank owns in a mask.

    ``select`` returns for (n,) ids whether they count. By default all do.
    """
    data = g.nodes[ntype].data
    if task != CLASSIFICATION:
        _check_columns(data[label], scores)  # on all ranks, because some may have no rows
    empty = slice(0, 0)
    pieces = [(scores[empty], data[label][empty], torch.arange(0))]
    for rows in split_owned_rows(g, ntype):
        labels = data[label][rows]
        ids = torch.arange(rows.start, rows.stop)
        is_counted = data[mask][rows].bool()
        if task == CLASSIFICATION:
            is_counted = is_counted & (labels >= 0)
        if select is not None:
            is_counted = is_counted & select(ids)
        pieces.append((scores[rows][is_counted], labels[is_counted], ids[is_counted]))
    mask_scores, mask_labels, mask_ids = (torch.cat(list(column)) for column in zip(*pieces, strict=True))
    return mask_scores, mask_labels, mask_ids


def compute_metric(name: str, scores: Tensor, labels: Tensor, session: Session, task: str) -> float:
    """Compute one metric over all ranks' rows. Every rank must call it, also without rows."""
    if task == REGRESSION:
        metric = metrics.mae if name == "mae" else metrics.rmse
        return metric(scores, _match_scores(labels, scores), session)
    predictions = to_predictions(task, scores)
    classes = scores.shape[1]
    if name == "accuracy" and task == CLASSIFICATION:
        return metrics.accuracy(predictions, labels, session)
    if name == "accuracy":
        is_correct = (predictions == labels.bool()).all(1).long()
        return metrics.accuracy(is_correct, torch.ones_like(is_correct), session)
    if name in ("f1_micro", "f1_macro"):
        average: Literal["micro", "macro"] = "micro" if name == "f1_micro" else "macro"
        return metrics.f1(predictions, labels, classes, session, average=average)
    probabilities = to_probabilities(task, scores.double())
    truth = labels
    if task == CLASSIFICATION:
        truth = (labels[:, None] == torch.arange(classes)).long()
        if classes == 2:
            # The second class is the positive one. The first would count the same pairs again.
            probabilities = probabilities[:, 1:]
            truth = truth[:, 1:]

    score_metric = metrics.roc_auc if name == "roc_auc" else metrics.average_precision
    return score_metric(probabilities, truth, session)


def warn_of_guesses(task: str, values: Mapping[str, float], g: DistGraph, ntype: str, label: str) -> None:
    """Warn on rank 0 if the test metrics in ``values`` are hardly better than guesses. All ranks call it."""
    name = "auc" if "test_auc" in values else "roc_auc"
    guess = 0.5
    is_poor = values.get(f"test_{name}", 1.0) < 0.55
    reason = (
        "that of guesses. Train longer, or with another --lr or --embeddings, or for links another --loss"
    )
    if task == CLASSIFICATION and "test_accuracy" in values:
        guess = _majority_share(g, ntype, label)
        name = "accuracy"
        is_poor = values["test_accuracy"] <= guess
        reason = "the share of the largest class. See --metric f1_macro and --class-weight balanced"
        reason = "because all test targets have one class" if guess == 1 else reason
    elif task == REGRESSION and "test_rmse" in values:
        guess = float(compute_moments(g, ntype, label, SPLITS[2])[1].square().mean().sqrt())
        name = "rmse"
        is_poor = values["test_rmse"] > 0.9 * guess > 0
        reason = "the standard deviation of the labels. Train longer, or with another --lr"

    if is_poor and g.session.topology.rank == 0:
        value = values[f"test_{name}"]
        is_better = value < guess if name in LESS_IS_BETTER else value > guess
        degree = "hardly" if is_better else "not"
        log.warning("the test %s of %.4g is %s better than %.4g, %s", name, value, degree, guess, reason)


def training_nodes(g: DistGraph, ntype: str) -> Tensor:
    """Return this rank's share of one type's ``train_mask``. Every rank must call this.

    Raises ConfigError on all ranks if the mask marks no node.
    """
    nodes = node_split(g.nodes[ntype].data["train_mask"], g.get_partition_book(), ntype)
    if not gather_int64([len(nodes)], g.session).any():
        raise ConfigError(
            f"train_mask of {g.dataset.folder} marks no node of type {ntype!r}, so there is nothing to train "
            "on. Partition again with training nodes, for instance with --split 0.8,0.1,0.1."
        )
    return nodes


def _read_labels(g: DistGraph, ntype: str, label: str, mask: str) -> Tensor:
    data = g.nodes[ntype].data
    pieces = (slice(0, 0), *split_owned_rows(g, ntype))
    return torch.cat([data[label][rows][data[mask][rows].bool()] for rows in pieces])


def _majority_share(g: DistGraph, ntype: str, label: str) -> float:
    """Return the largest class's share among test targets, -1 without classes. All ranks call this."""
    classes = g.dataset.manifest.num_classes.get(ntype, 0)
    if classes == 0:
        return -1.0
    labels = _read_labels(g, ntype, label, SPLITS[2])
    counts = torch.bincount(labels[(labels >= 0) & (labels < classes)], minlength=classes)
    counts = sum_over_ranks(counts, g.session, phase=metrics.PHASE)
    return float(counts.max()) / max(1, int(counts.sum()))


@dataclass(frozen=True, kw_only=True)
class StepLoss:
    """The loss on one batch on this rank."""

    loss: Tensor
    """() mean over this rank's targets, with a gradient even without targets."""
    num_targets: int
    """Targets as the loader counts them: destinations, or positive edges."""
    num_correct: int | Tensor
    """Correct targets, for the train accuracy. A () tensor avoids waiting for the device."""


Task: TypeAlias = Callable[[WrappedModel, Any], StepLoss]
"""Maps (wrapped model, batch from the loader) to its loss. It calls the model once and no collective."""


@final
@dataclass(frozen=True, kw_only=True)
class NodeClassification:
    """Node classification on batches ``(input_nodes, output_nodes, blocks)``, or another node task."""

    loss: LossFunction = F.cross_entropy
    feature: str = FEATURE
    label: str = LABEL
    ntype: str | None = None
    """Node type to classify. Required with several node types."""
    inputs: EntityInputs | None = None
    """Input rows by node type. None: the only type's ``feature``."""

    def __call__(self, model: WrappedModel, batch: Any) -> StepLoss:
        _, _, blocks = batch
        input_rows = gather_input_rows(model, blocks[0], self.feature, self.inputs)
        scores = model(blocks, input_rows)
        ntype = self.ntype or blocks[-1].dsttypes[0]
        if isinstance(scores, dict):
            scores = scores[ntype]
        labels = blocks[-1].dstnodes[ntype].data[self.label]

        num_correct: Tensor | int = 0
        if len(labels) and labels.dim() == 1 and not labels.dtype.is_floating_point:
            num_correct = (scores.detach().argmax(1) == labels).sum()
        return StepLoss(loss=self.loss(scores, labels), num_targets=len(labels), num_correct=num_correct)


@final
@dataclass(frozen=True, kw_only=True)
class LinkPrediction:
    """Link prediction on batches ``(input_nodes, pair_graph, negative_pair_graph, blocks)``.

    The model is called with (blocks, input rows, pair graph, negative pair graph) and returns scores for the
    edges in both graphs, (P,) and (Q,), over all edge types. An edge with a score above 0 is correct.
    """

    loss: LossFunction = F.binary_cross_entropy_with_logits
    """Loss on (P + Q,) scores and as many float labels: 1 for an edge, 0 for a negative."""
    pair_loss: Callable[[Tensor, Tensor], Tensor] | None = None
    """Loss that replaces ``loss``, on (P,) scores and (P, Q / P) scores for each edge's negatives, such as
    :func:`dglx_dist.training.link.bpr_loss`. An edge above all its negatives is correct.
    """
    feature: str = FEATURE
    inputs: EntityInputs | None = None
    """Input rows by node type, see :class:`NodeClassification`."""

    def __call__(self, model: WrappedModel, batch: Any) -> StepLoss:
        _, pairs, negative_pairs, blocks = batch
        rows = gather_input_rows(model, blocks[0], self.feature, self.inputs)
        positive, negative = model(blocks, rows, pairs, negative_pairs)
        if self.pair_loss is None:
            labels = torch.cat([torch.ones_like(positive), torch.zeros_like(negative)])
            loss = self.loss(torch.cat([positive, negative]), labels)
            is_correct = positive > 0
        else:
            negatives = _group_negatives(negative, pairs, negative_pairs)
            loss = self.pair_loss(positive, negatives)
            is_correct = (positive[:, None] > negatives).all(1)

        return StepLoss(loss=loss, num_targets=len(positive), num_correct=is_correct.sum())


def _group_negatives(negative: Tensor, pairs: Any, negative_pairs: Any) -> Tensor:
    """Reshape the negatives' (Q,) scores to (P, Q / P), one row for each positive pair.

    Raises ConfigError unless every edge has equally many negatives.
    """
    merged = merge_pairs(pairs)
    sizes = merge_pairs(negative_pairs).sizes
    total = sum(merged.sizes)
    per_edge = len(negative) // max(1, total)
    for etype, num_edges, num_negatives in zip(merged.etypes, merged.sizes, sizes, strict=True):
        if num_negatives != per_edge * num_edges:
            raise ConfigError(
                f"there are {num_negatives} negatives for {num_edges} edges of {etype}, and {sum(sizes)} for "
                f"{total} in total, but pair_loss needs as many for each edge. Use dx.negative.Uniform(k) "
                "or InBatch(k) with batches of more than k edges of each type."
            )

    return negative.view(total, per_edge)


def check_inputs(g: DistGraph, inputs: EntityInputs | None, strategy: str) -> None:
    """Raise ConfigError if ``strategy`` does not fetch the embeddings in ``inputs``."""
    # With several types, those without features keep whole rows.
    if inputs is None or STRATEGIES.get(strategy).traits.features == "rows" or len(g.ntypes) > 1:
        return
    embedded = [ntype for ntype in g.ntypes if ntype not in inputs.feature_widths]
    if embedded:
        raise ConfigError(
            f"config.inputs has a DistEmbedding of the nodes {embedded[0]!r}, but strategy "
            f"{strategy!r} does not fetch its rows. Put nn.Embedding(g.num_nodes(), width, "
            "sparse=True) into the model, which is cut by column, or use strategy='data_parallel'."
        )


def gather_input_rows(model: nn.Module, block: Any, feature: str, inputs: EntityInputs | None) -> Any:
    """Return a block's input rows, or rows by node type, in the dtype of the model's weights.

    Without ``inputs``, they are the column ``feature`` on the block's sources.
    """
    weight = find_float_parameter(model)

    def convert(rows: Tensor) -> Tensor:
        # Autocast uses bfloat16 directly, so a conversion would be undone.
        is_bfloat16 = rows.dtype == torch.bfloat16 and torch.is_autocast_enabled(weight.device.type)
        return rows if is_bfloat16 else rows.to(weight.dtype)

    if inputs is None:
        return convert(block.srcdata[feature])
    input_rows = inputs(block)
    if isinstance(input_rows, Tensor):
        return convert(input_rows)
    return {ntype: convert(rows) for ntype, rows in input_rows.items()}
