"""Average losses over all ranks' terms, for losses that leave out seeds or weigh them."""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable
from inspect import signature
from typing import TYPE_CHECKING, Any, SupportsFloat, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from dglx_dist.comm.collectives import gather_int64, run_on_all_ranks, sum_over_ranks
from dglx_dist.comm.session import Session, SessionField, current_session
from dglx_dist.errors import ConfigError
from dglx_dist.records import LABEL
from dglx_dist.strategies.base import Reduction, gradient_weight
from dglx_dist.training.metrics import PHASE
from dglx_dist.training.tasks import LossFunction, split_owned_rows

if TYPE_CHECKING:
    from dglx_dist.graph.dist_graph import DistGraph

_CLASS_LOSSES = (F.cross_entropy, F.nll_loss)
_NUMBER_LOSSES = (
    *(F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss),
    *(F.binary_cross_entropy, F.binary_cross_entropy_with_logits),
)
_MAX_MEANS = 8
"""Maximum number of means in one loss."""
NUM_TERMS: SessionField[deque[float]] = SessionField(lambda _session: deque(maxlen=_MAX_MEANS))
"""Number of terms on all ranks, for each of the latest means."""
_Replace: TypeAlias = Callable[[Tensor, Tensor], Tensor]


def global_mean(total: Tensor, count: float | Tensor, reduction: Reduction = "mean") -> Tensor:
    """Return the mean over the loss terms on all ranks. Every rank must call it after its model.

    The wrapped model weighs a rank's mean loss by its number of seeds. A loss that leaves out seeds
    (``ignore_index``, unknown targets) or weighs them (class weights) is divided by another number. This
    function gives its exact gradient over all ranks: ``dx.global_mean(losses.sum(), number_of_terms)``.

    Args:
        total: () sum over this rank's loss terms, connected to the model's output. 0 if there are none.
        count: How many terms this rank has, or the sum of their weights, at least 0.
        reduction: The value passed to :func:`wrap`.

    Returns:
        () mean over all ranks' terms, equal on all ranks. 0 if no rank has a term. Call ``backward`` on it
            once.

    Raises:
        ConfigError: On all ranks, if a value on some rank is wrong, or if no batch from a loader went through
            the wrapped model. Then the step's number of seeds is unknown.
    """
    session = current_session()
    problem = _check_number("count", count, minimum=0.0)
    if not isinstance(total, Tensor) or total.dim() or not total.is_floating_point():
        problem = f"total={_format_value(total)} must be the sum of this rank's losses, a tensor of shape ()"
    if reduction not in ("mean", "sum"):
        problem = f"reduction={reduction!r} must be 'mean' or 'sum', as in dx.wrap"
    sums = _sum_terms(total if problem else float(total.detach()), count, problem, session)
    return _divide_sums(total, sums, session, reduction)


def reduce_mean(value: float | Tensor, count: int) -> float:
    """Return the mean over all ranks, weighted by ``count``. Every rank must call it.

    Args:
        value: This rank's mean. Ignored if ``count`` is 0.
        count: How many values this rank's mean covers, at least 0.

    Returns:
        The mean over all ranks' values. NaN if there are none.

    Raises:
        ConfigError: On all ranks, if a value on some rank is not a number or its count is below 0.
    """
    problem = _check_number("count", count, minimum=0.0)
    total = 0.0
    if not problem and count:
        problem = _check_number("value", value)
        if not problem:
            total = float(value) * float(count)
    global_total, global_count = _sum_terms(total, count, problem, current_session()).tolist()
    return global_total / global_count if global_count else math.nan


def _sum_terms(total: Any, count: Any, problem: str, session: Session) -> Tensor:
    """Return ``total`` and ``count`` summed over all ranks, (2,) float64. Every rank must call this.

    Raises ConfigError on all ranks if one has a ``problem``. An empty text means that it has none.
    """
    # NaN tells the other ranks that this rank has a wrong value.
    values = [math.nan, math.nan] if problem else [float(total), float(count)]
    sums = sum_over_ranks(torch.tensor(values, dtype=torch.float64), session, phase=PHASE)
    if sums[1].isnan():
        raise ConfigError(problem or "another rank has a wrong value for this mean. See its error.")
    return sums


def _check_number(name: str, value: Any, minimum: float | None = None) -> str:
    """Return an error message if ``value`` is not a single number, otherwise an empty text.

    With ``minimum``, the value must also be finite and at least ``minimum``.
    """
    allowed = "one number" if minimum is None else "one number, finite and at least 0"
    problem = f"{name}={_format_value(value)} must be {allowed}"
    try:
        number = float(value) if isinstance(value, SupportsFloat) else None
    except (TypeError, ValueError, RuntimeError):
        return problem
    if number is None or (minimum is not None and not minimum <= number < math.inf):
        return problem
    return ""


def _format_value(value: Any) -> str:
    """Format ``value`` for a message. Tensors with several elements show only their shape."""
    is_array = isinstance(value, Tensor) and value.dim() > 0
    return f"<{tuple(value.shape)} tensor>" if is_array else repr(value)


def _divide_sums(total: Tensor, sums: Tensor, session: Session, reduction: Reduction = "mean") -> Tensor:
    """Compute the mean from ``sums`` over all ranks, with the gradient of this rank's ``total``."""
    session.is_loss_exact = True
    weight = gradient_weight(session.model_share, reduction)
    loss_sum, num_terms = sums.tolist()
    NUM_TERMS.get(session).append(num_terms)

    # A rank without seeds has the weight 0 and no terms, so its gradient is 0.
    factor = 1 / (num_terms * weight) if num_terms and weight else 0.0
    mean = loss_sum / num_terms if num_terms else 0.0

    # The result's value is the mean over all ranks. Its gradient comes from this rank's terms.
    scaled = total * factor
    return scaled + (mean - scaled.detach())


def _complete_arguments(func: Any, kwargs: dict[str, Any] | None) -> dict[str, Any]:
    """Return a call's keyword arguments, with the ``weight`` that torch's ``l1_loss`` leaves out.

    ``__torch_function__`` must call this directly, because the weight is read from the calling frames.
    """
    arguments = dict(kwargs or {})
    if func is F.l1_loss:
        # Frame 0 is this function. Frames 1 to 3 are __torch_function__, handle_torch_function and l1_loss.
        weight = sys._getframe(3).f_locals.get("weight")
        if weight is not None:
            arguments["weight"] = weight
    return arguments


class _Means(TorchFunctionMode):
    """Calls ``replace`` for each mean that a torch loss computes, with the terms' sum and their number."""

    def __init__(self, replace: _Replace, num_seeds: int = 0) -> None:
        super().__init__()
        self._replace = replace
        self._num_seeds = num_seeds
        self.has_weighted_means = False
        """Whether a mean has weights, or does not have ``num_seeds`` terms."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """In a torch loss, replace each mean over targets by ``replace(sum of terms, number of terms)``.

        If there are class weights, the number is their sum. Other functions are called unchanged.
        """
        if func not in (*_CLASS_LOSSES, *_NUMBER_LOSSES):
            return func(*args, **(kwargs or {}))
        call = signature(func).bind(*args, **_complete_arguments(func, kwargs))
        call.apply_defaults()
        options = call.arguments
        is_legacy = options.get("size_average") is not None or options.get("reduce") is not None
        if options["reduction"] != "mean" or is_legacy:
            return func(**options)

        terms = func(**{**options, "reduction": "none"})
        # A scalar is not a mean over targets. It may be a penalty.
        if terms.dim() == 0:
            return func(**options)

        target = options["target"]
        weight = options.get("weight")
        num_terms = terms.numel()
        if func in _CLASS_LOSSES and not target.is_floating_point():
            known_targets = target[target != options["ignore_index"]]
            num_terms = known_targets.numel()
            weight = None if weight is None else weight[known_targets]
        elif func not in (F.mse_loss, F.l1_loss):
            # Torch divides such losses by the number of terms, even with weights.
            weight = None

        has_one_term_per_seed = num_terms == terms.numel() and len(terms) == self._num_seeds
        self.has_weighted_means |= weight is not None or not has_one_term_per_seed
        count = torch.tensor(float(num_terms)) if weight is None else weight.sum()
        return self._replace(terms.sum(), count)


class ExactMean:
    """A loss in which every mean that torch computes is taken over all ranks' terms.

    All ranks must call it in the same steps, after the wrapped model. If each seed is one term, the result
    equals the value that ``loss`` itself returns.

    Args:
        has_gaps: Whether any rank may leave out a label. Otherwise the first step shows whether terms are
            weighed or left out.
    """

    def __init__(self, loss: LossFunction, session: Session, *, has_gaps: bool) -> None:
        self._loss = loss
        self._session = session
        self._combines_ranks: bool | None = True if has_gaps else None
        """Whether means are combined over the ranks. None: the first step decides."""

    def __call__(self, scores: Tensor, labels: Tensor) -> Tensor:
        """Return the loss on this rank's targets, with each mean over targets taken over all ranks.

        Every rank must call it, also without targets. The user's loss runs twice if the ranks must be
        combined, and the first batch decides whether they must.
        """
        if self._combines_ranks is False:
            return self._loss(scores, labels)

        # Each entry is the sum over a mean's terms, and their number.
        sums: list[list[float]] = []

        def record_mean(total: Tensor, count: Tensor) -> Tensor:
            sums.append([float(total), float(count)])
            return total / count

        # The first pass only records each mean's sum and number of terms.
        with torch.no_grad(), _Means(record_mean, len(labels)) as means:
            self._loss(scores.detach(), labels)
        if len(sums) > _MAX_MEANS:
            raise ConfigError(f"the loss computes {len(sums)} means, but at most {_MAX_MEANS} are supported")

        if self._combines_ranks is None:
            is_weighted = gather_int64([means.has_weighted_means], self._session)
            self._combines_ranks = bool(is_weighted.any())
        if not self._combines_ranks:
            return self._loss(scores, labels)

        # Some ranks may compute fewer means, but the tensors must have the same size on all ranks.
        padded_sums = torch.zeros(_MAX_MEANS, 2, dtype=torch.float64)
        for index, (total, count) in enumerate(sums):
            padded_sums[index, 0] = total
            padded_sums[index, 1] = count
        global_sums = iter(sum_over_ranks(padded_sums, self._session, phase=PHASE))

        # The second pass computes the means in the same order as the first one.
        def replace_mean(total: Tensor, _count: Tensor) -> Tensor:
            return _divide_sums(total, next(global_sums), self._session)

        with _Means(replace_mean):
            return self._loss(scores, labels)


def make_exact(
    loss: LossFunction | None, g: DistGraph, ntype: str, label: str, *, is_own: bool
) -> LossFunction | None:
    """Return ``loss`` with exact means over the labelled nodes on all ranks. All ranks call this.

    The loss is returned unchanged if it is None or the nodes have no such label. The same holds for the
    task's own loss on the dataset's labels. The task's own cross-entropy leaves out nodes with a label below
    0, like :func:`evaluate`.
    """
    data = g.nodes[ntype].data
    if loss is None or label not in data or (label == LABEL and not is_own):
        return loss

    def count_gaps() -> int:
        num_gaps = 0
        for rows in split_owned_rows(g, ntype):
            labels = data[label][rows]
            is_gap = labels.isnan() if labels.is_floating_point() else labels < 0
            num_gaps += int(is_gap.sum())
        return num_gaps

    # All nodes are checked, because one without a label may be among a later step's seeds.
    num_gaps = run_on_all_ranks(g.session, count_gaps)
    has_gaps = bool(gather_int64([num_gaps], g.session).any())
    if has_gaps and not is_own and loss is F.cross_entropy:
        loss = _classify_known
    return ExactMean(loss, g.session, has_gaps=has_gaps)


def _classify_known(scores: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(scores, labels.clamp(min=-1), ignore_index=-1)
