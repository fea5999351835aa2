"""From predictions to the one that is taken, with its reasons. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from dglx_dist.planner.measured import Measured
from dglx_dist.planner.predict import predict
from dglx_dist.planner.records import Candidate, Choice, Prediction

_NEAR = 1.05
"""Within this factor of the fastest, a prediction is a tie, and the earlier, simpler candidate wins."""
FULL_GRAPH_EPOCHS = 5.0
"""Epochs of whole graphs, one step each, that are worth one of mini-batches, where nobody says."""


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What may be chosen."""

    unit: Literal["mini_batch", "full_graph", "any"] = "mini_batch"
    estimators: bool = False
    """Whether what does not train exactly may be chosen too."""
    full_graph_epochs: float = FULL_GRAPH_EPOCHS
    """With unit ``any``: epochs of whole graphs that are worth one of mini-batches."""


def choose(candidates: Iterable[Candidate], known: Measured, wishes: Wishes) -> Choice:
    """Return what every candidate comes to, and the fastest of those that may be taken."""
    predictions = [predict(one, known) for one in candidates]
    allowed = [one for one in predictions if one.feasible and _may(one.candidate, wishes)]
    least = min((worth(one, wishes) for one in allowed), default=0.0)
    taken = next((one for one in allowed if worth(one, wishes) <= _NEAR * least), None)
    barred = [_barred(one.candidate, wishes) for one in predictions]
    place = None if taken is None else predictions.index(taken)
    order = sorted(
        range(len(predictions)),
        key=lambda at: (
            not predictions[at].feasible,
            bool(barred[at]),
            worth(predictions[at], wishes),
        ),
    )
    assumptions = [*known.cluster.assumptions, *known.assumptions]
    if wishes.unit == "any":
        assumptions.append(
            f"{wishes.full_graph_epochs:g} epochs of whole graphs, a step each, are worth one of mini-batches"
        )
    return Choice(
        graph=known.graph,
        trained=known.trained,
        cluster=known.cluster,
        predictions=tuple(replace(predictions[at], barred=barred[at]) for at in order),
        picked=-1 if place is None else order.index(place),
        why=tuple(_reasons(taken, allowed, predictions, wishes)),
        assumptions=tuple(assumptions),
        epoch=known.epoch,
    )


def _barred(candidate: Candidate, wishes: Wishes) -> str:
    """Return why a way is not what was asked for; empty: it is."""
    if wishes.unit not in ("any", candidate.unit):
        return f"--unit {candidate.unit}"
    return "" if candidate.exact or wishes.estimators else "--allow-estimators"


def _may(candidate: Candidate, wishes: Wishes) -> bool:
    return not _barred(candidate, wishes)


def worth(one: Prediction, wishes: Wishes) -> float:
    """Return what is compared: seconds of as many epochs as are worth an exact one of mini-batches."""
    whole = one.candidate.unit == "full_graph" and wishes.unit == "any"
    return one.epoch_seconds * one.candidate.epochs_factor * (wishes.full_graph_epochs if whole else 1.0)


def _reasons(
    taken: Prediction | None,
    allowed: Sequence[Prediction],
    every: Sequence[Prediction],
    wishes: Wishes,
) -> list[str]:
    if taken is None:
        return [_nearest([one for one in every if _may(one.candidate, wishes)])]
    said = [_biggest(taken)]
    fastest = min(allowed, key=lambda one: worth(one, wishes))
    if fastest is not taken:
        said.append(
            f"{fastest.candidate.name} takes {_ratio(fastest, taken, wishes):.2f} x as long, but of ways "
            f"within {100 * (_NEAR - 1):.0f} % of the fastest the simplest is taken"
        )
    others = sorted(
        (
            one
            for one in allowed
            if one not in (taken, fastest) and one.candidate.strategy != taken.candidate.strategy
        ),
        key=lambda one: worth(one, wishes),
    )
    for one in others[:2]:
        said.append(_against(one, taken, wishes))
    better = [
        one
        for one in every
        if one.feasible and not _may(one.candidate, wishes) and one.candidate.unit == taken.candidate.unit
        if worth(one, wishes) < worth(taken, wishes)
    ]
    if better:
        other = min(better, key=lambda one: worth(one, wishes))
        said.append(
            f"{other.candidate.name} would take {other.epoch_seconds:.3g} s, but is another estimator; "
            "--allow-estimators lets it be taken"
        )
    too_large = [one.candidate.name for one in every if "GB a rank" in one.why_not]
    if too_large:
        said.append(f"does not fit the memory: {', '.join(too_large)}")
    return said


def _nearest(asked: Sequence[Prediction]) -> str:
    """Say why nothing can be taken, by the way that lacks least."""
    large = [one for one in asked if one.memory_bytes]
    if large:
        one = min(large, key=lambda one: one.memory_bytes)
        return (
            f"nothing that may be taken fits; nearest is {one.candidate.name}, which {one.why_not}: take "
            "smaller batches or fan-outs, more servers, or ranks with more memory (--memory)"
        )
    refused = "; ".join(f"{one.candidate.name}: {one.why_not}" for one in asked[:3])
    return f"nothing that was asked for can train this ({refused or 'there is nothing'}); try --unit any"


def _ratio(one: Prediction, taken: Prediction, wishes: Wishes) -> float:
    return worth(one, wishes) / max(worth(taken, wishes), 1e-12)


def _biggest(one: Prediction) -> str:
    parts = {
        "computing": one.seconds.compute,
        "drawing batches": one.seconds.sampling,
        "the network between servers": one.seconds.outside,
        "exchange inside of servers": one.seconds.inside,
        "sums of gradients": one.seconds.all_reduce,
    }
    name = max(parts, key=lambda key: parts[key])
    return (
        f"{one.candidate.name} takes {one.epoch_seconds:.3g} s an epoch, most of it {name} "
        f"({parts[name]:.3g} s), and moves {one.bytes_outside / 1e6:.3g} MB between servers"
    )


def _against(other: Prediction, taken: Prediction, wishes: Wishes) -> str:
    ratio = _ratio(other, taken, wishes)
    if other.candidate.unit != taken.candidate.unit:
        # Their epochs are different work, so what they move and compute is no reason.
        return f"{other.candidate.name} takes {ratio:.2f} x as long to learn as much"
    more = other.bytes_outside - taken.bytes_outside
    work = other.seconds.compute + other.seconds.sampling - taken.seconds.compute - taken.seconds.sampling
    why = []
    if more > 0:
        why.append(f"it moves {more / 1e6:.3g} MB more between servers")
    if work > 0:
        why.append(f"it computes {work:.3g} s longer")
    if other.seconds.inside > taken.seconds.inside:
        why.append(
            f"it exchanges {other.seconds.inside - taken.seconds.inside:.3g} s longer inside of servers"
        )
    return f"{other.candidate.name} takes {ratio:.2f} x as long" + (f": {', '.join(why)}" if why else "")
