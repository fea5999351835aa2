"""Candidates of all strategies, their bytes and memory, and the choice with its reasons. No I/O."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from dglx_dist.memory import format_bytes
from dglx_dist.planner.costs.base import COSTS, Cost, EpochCounts, Work
from dglx_dist.planner.records import Choice, ChoiceOptions, Prediction
from dglx_dist.strategies.base import STRATEGIES
from dglx_dist.strategies.candidate import Candidate, CandidateContext

NEAR = 1.03
"""A candidate within this factor of the fastest is a tie, which the earlier, simpler candidate wins."""


def enumerate_candidates(context: CandidateContext) -> tuple[Candidate, ...]:
    """Return the candidates of all strategies: mini-batches first, the simplest first."""
    ordered: list[tuple[bool, int, Candidate]] = []
    for name in STRATEGIES.names():
        strategy = STRATEGIES.get(name)
        for candidate in strategy.candidates(context):
            place = candidate.unit != "mini_batch", strategy.traits.complexity
            ordered.append((*place, replace(candidate, strategy=name)))
    return tuple(candidate for *_, candidate in sorted(ordered, key=lambda entry: entry[:2]))


def has_costs(candidate: Candidate) -> bool:
    """Return whether the strategy of ``candidate`` has a cost model."""
    return candidate.strategy in COSTS.names()


def list_works(candidates: Iterable[Candidate], context: CandidateContext) -> tuple[Work, ...]:
    """Return what is to be counted for ``candidates``, each once."""
    costs = (COSTS.get(one.strategy).works(one, context) for one in candidates if has_costs(one))
    return tuple(dict.fromkeys(work for works in costs for work in works))


def list_choosable() -> Mapping[str, frozenset[str]]:
    """Return every strategy that may be chosen, with its option names."""
    names: dict[str, frozenset[str]] = {}
    for candidate in enumerate_candidates(CandidateContext(ranks=4, servers=2, num_layers=3, steps=3)):
        names[candidate.strategy] = names.get(candidate.strategy, frozenset()) | candidate.options.keys()
    return names


def predict(candidate: Candidate, counts: EpochCounts) -> Prediction:
    """Return bytes and memory of an epoch of ``candidate``. If it is not feasible, the reason and zeros."""
    cluster, strategy = counts.cluster, STRATEGIES.get(candidate.strategy)
    why_not = counts.shape.refusals.get(candidate.strategy) or _find_uncounted(candidate, counts)
    if cluster.device_memory_bytes and not strategy.traits.on_gpus:
        why_not = "computes on CPUs only"
    if why_not or not has_costs(candidate):
        cost = Cost()
    else:
        cost = COSTS.get(candidate.strategy).cost(candidate, counts)
    notes = [cost.note] if cost.note else []
    if candidate.epochs_factor != 1.0:
        notes.append(f"about {candidate.epochs_factor:g} x the epochs")
    on_device = cost.memory - cost.on_host if cluster.device_memory_bytes else 0
    return Prediction(
        candidate=candidate,
        network_s=cost.traffic.seconds(cluster),
        outside=cost.traffic.outside,
        inside=cost.traffic.inside,
        bytes_exact=cost.traffic.exact,
        once_bytes=cost.traffic.once,
        memory_bytes=cost.memory,
        device_memory_bytes=on_device,
        why_not=why_not or cost.why_not or _find_shortage(cost, on_device, counts),
        note="; ".join(notes),
    )


def _find_shortage(cost: Cost, on_device: int, counts: EpochCounts) -> str:
    cluster = counts.cluster
    needed = cost.memory - on_device - cost.shared + cost.shared // cluster.ranks_per_server
    if needed > cluster.memory_bytes:
        return f"needs {needed / 1e9:.1f} GB a rank, of {cluster.memory_bytes / 1e9:.1f}"
    if on_device > cluster.device_memory_bytes:
        limit = cluster.device_memory_bytes
        return f"needs {on_device / 1e9:.1f} GB a rank on its GPU, of {limit / 1e9:.1f}"
    return ""


def _find_uncounted(candidate: Candidate, counts: EpochCounts) -> str:
    if candidate.unit == "mini_batch" and counts.batches is None:
        return "no mini-batches were requested"
    if any(counts.works.get(work) is None for work in list_works([candidate], counts.context)):
        return "its plans are too large to be counted; name the strategy"
    if candidate.cache is not None and counts.find_cache(candidate) is None:
        return "its cache was not counted"
    return ""


def find_bar(candidate: Candidate, constraints: ChoiceOptions) -> str:
    """Return what would allow ``candidate``, such as an option. Empty: it is allowed."""
    unit = f"--unit {candidate.unit}" if constraints.unit not in ("any", candidate.unit) else ""
    is_allowed = candidate.exact or constraints.allow_estimators
    return " ".join(option for option in (unit, "" if is_allowed else "--allow-estimators") if option)


def choose(
    predictions: Iterable[Prediction],
    counts: EpochCounts,
    constraints: ChoiceOptions,
    *,
    finalists: Collection[str] | None = None,
) -> Choice:
    """Choose the fastest prediction that is allowed and feasible.

    ``finalists`` are the names of the candidates among which trials did not decide. None: there were none.
    """
    every = [replace(one, barred=find_bar(one.candidate, constraints)) for one in predictions]
    allowed = [one for one in every if one.feasible and not one.barred and not one.not_tried]
    ranked = sorted(every, key=lambda one: (*_rank(one), constraints.comparable_seconds(one)))
    finalist = [one for one in allowed if finalists is None or one.candidate.name in finalists]
    picked = _pick(finalist, constraints)
    assumptions = [*counts.cluster.assumptions, *counts.assumptions]
    if constraints.unit == "any":
        assumptions.append(
            f"{constraints.full_graph_epochs:g} epochs of whole graphs, a step each, "
            "are worth one of mini-batches"
        )
    return Choice(
        graph=counts.graph,
        trained=counts.description,
        cluster=counts.cluster,
        predictions=tuple(ranked),
        picked=-1 if picked is None else ranked.index(picked),
        why=tuple(_explain(picked, finalist, every, constraints)),
        assumptions=tuple(assumptions),
        epoch=counts.epoch,
    )


def _rank(one: Prediction) -> tuple[bool, bool, bool]:
    return not one.feasible, bool(one.barred), bool(one.not_tried)


def _pick(allowed: Sequence[Prediction], constraints: ChoiceOptions) -> Prediction | None:
    fastest = min(allowed, key=constraints.comparable_seconds, default=None)
    if fastest is None:
        return None
    limit = NEAR * constraints.comparable_seconds(fastest)
    return next(one for one in allowed if constraints.comparable_seconds(one) <= limit)


def _explain(
    picked: Prediction | None,
    finalists: Sequence[Prediction],
    every: Sequence[Prediction],
    constraints: ChoiceOptions,
) -> list[str]:
    if picked is None:
        return [_find_nearest([one for one in every if not one.barred])]
    reasons = [_describe(picked)]
    fastest = min(finalists, key=constraints.comparable_seconds)
    if fastest is not picked:
        reasons.append(
            f"{fastest.candidate.name} takes {_ratio(fastest, picked, constraints):.2f} x as long, "
            f"but of candidates within {100 * (NEAR - 1):.0f} % of the fastest the simplest is taken"
        )
    strategy = picked.candidate.strategy
    allowed = [one for one in every if not any(_rank(one)) and one.epoch_seconds]
    others = [one for one in allowed if one != fastest and one.candidate.strategy != strategy]
    others.sort(key=constraints.comparable_seconds)
    reasons += [_compare(one, picked, constraints) for one in others[:2]]
    better = [
        one
        for one in every
        if one.feasible and one.barred and one.candidate.unit == picked.candidate.unit and one.epoch_seconds
        if constraints.comparable_seconds(one) < constraints.comparable_seconds(picked)
    ]
    if better and picked.trial is None:
        other = min(better, key=constraints.comparable_seconds)
        reasons.append(
            f"{other.candidate.name} would take {_seconds(other.epoch_seconds)}, but is another estimator, "
            f"only with {other.barred}"
        )
    too_large = [one.candidate.name for one in every if "GB a rank" in one.why_not]
    if too_large:
        reasons.append(f"does not fit the memory: {', '.join(too_large)}")
    return reasons


def _find_nearest(allowed: Sequence[Prediction]) -> str:
    large = [one for one in allowed if one.memory_bytes and one.why_not]
    if large:
        one = min(large, key=lambda one: one.memory_bytes)
        return (
            f"no allowed candidate fits; nearest is {one.candidate.name}, which {one.why_not}: take "
            "smaller batches or fan-outs, more servers, or ranks with more memory (--memory, "
            "--device-memory)"
        )
    refused = "; ".join(f"{one.candidate.name}: {one.why_not}" for one in allowed[:3])
    return f"no requested strategy can train this ({refused or 'there is none'}); try --unit any"


def _ratio(one: Prediction, picked: Prediction, constraints: ChoiceOptions) -> float:
    return constraints.comparable_seconds(one) / max(constraints.comparable_seconds(picked), 1e-12)


def _describe(one: Prediction) -> str:
    moved = f"moves {format_bytes(one.inter_server_bytes)} between servers"
    if one.trial is not None:
        return f"{one.candidate.name} took {_seconds(one.epoch_seconds)} an epoch here, and {moved}"
    return (
        f"{one.candidate.name} computes {_seconds(one.compute_s)} an epoch, as measured here, and {moved}, "
        f"{_seconds(one.network_s)} at the given bandwidth"
    )


def _seconds(seconds: float) -> str:
    # 999.5 would be written as 1e+03.
    return f"{seconds:.3g} s" if seconds < 999.5 else f"{seconds:.0f} s"


def _compare(other: Prediction, picked: Prediction, constraints: ChoiceOptions) -> str:
    ratio = _ratio(other, picked, constraints)
    if other.candidate.unit != picked.candidate.unit:
        # Their epochs are different work, so their bytes are not comparable.
        return f"{other.candidate.name} takes {ratio:.2f} x as long to learn as much"
    more = other.inter_server_bytes - picked.inter_server_bytes
    moved = f", and moves {format_bytes(more)} more between servers" if more > 0 else ""
    return f"{other.candidate.name} takes {ratio:.2f} x as long{moved}"
