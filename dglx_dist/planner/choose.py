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
"""Candidates within this factor of the fastest are tied with it. The earlier, simpler one wins."""


def enumerate_candidates(context: CandidateContext) -> tuple[Candidate, ...]:
    """Return the candidates of all strategies: mini-batches first, and the simplest first."""
    ordered: list[tuple[bool, int, Candidate]] = []
    for name in STRATEGIES.names():
        strategy = STRATEGIES.get(name)
        for candidate in strategy.candidates(context):
            sort_key = candidate.unit != "mini_batch", strategy.traits.complexity
            ordered.append((*sort_key, replace(candidate, strategy=name)))
    return tuple(candidate for *_, candidate in sorted(ordered, key=lambda entry: entry[:2]))


def has_costs(candidate: Candidate) -> bool:
    """Return whether the strategy of ``candidate`` has a cost model."""
    return candidate.strategy in COSTS.names()


def list_works(candidates: Iterable[Candidate], context: CandidateContext) -> tuple[Work, ...]:
    """Return the works to count for ``candidates``, each once."""
    works: list[Work] = []
    for candidate in candidates:
        if has_costs(candidate):
            works += COSTS.get(candidate.strategy).works(candidate, context)
    return tuple(dict.fromkeys(works))


def list_choosable() -> Mapping[str, frozenset[str]]:
    """Return every strategy that may be chosen, with the names of its options."""
    names: dict[str, frozenset[str]] = {}
    for candidate in enumerate_candidates(CandidateContext(ranks=4, servers=2, num_layers=3, steps=3)):
        names[candidate.strategy] = names.get(candidate.strategy, frozenset()) | candidate.options.keys()
    return names


def predict(candidate: Candidate, counts: EpochCounts) -> Prediction:
    """Return bytes and memory of an epoch of ``candidate``, or the reason why it is not feasible."""
    cluster = counts.cluster
    strategy = STRATEGIES.get(candidate.strategy)
    why_not = ""
    if counts.shape.has_widths:
        why_not = counts.shape.refusals.get(candidate.strategy) or _find_uncounted(candidate, counts)
    if cluster.device_memory_bytes and not strategy.traits.on_gpus:
        why_not = "computes on CPUs only"
    if why_not or not counts.shape.has_widths or not has_costs(candidate):
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
        return f"needs {needed / 1e9:.1f} GB a rank, but there are {cluster.memory_bytes / 1e9:.1f}"
    if on_device > cluster.device_memory_bytes:
        limit = cluster.device_memory_bytes
        return f"needs {on_device / 1e9:.1f} GB a rank on its GPU, but there are {limit / 1e9:.1f}"
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
    """Return the options that would allow ``candidate``, or "" if it is allowed."""
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
    """Choose the fastest candidate that is allowed and feasible.

    ``constraints`` says which candidates the user allows. ``finalists`` has the names of the candidates that
    were equally fast in trials, and the choice is one of them. None: there were no trials.
    """
    candidates = [replace(p, barred=find_bar(p.candidate, constraints)) for p in predictions]
    allowed = [p for p in candidates if not any(_rank(p))]
    ranked = sorted(candidates, key=lambda p: (*_rank(p), constraints.comparable_seconds(p)))
    undecided = [p for p in allowed if finalists is None or p.candidate.name in finalists]
    picked = _pick(undecided, constraints)
    assumptions = [*counts.cluster.assumptions, *counts.assumptions]
    if constraints.unit == "any":
        assumptions.append(
            f"{constraints.full_graph_epochs:g} epochs of whole graphs, with one step each, "
            "are worth one epoch of mini-batches"
        )

    return Choice(
        graph=counts.graph,
        trained=counts.description,
        cluster=counts.cluster,
        predictions=tuple(ranked),
        picked=-1 if picked is None else ranked.index(picked),
        why=tuple(_explain(picked, undecided, candidates, constraints)),
        assumptions=tuple(assumptions),
        epoch=counts.epoch,
    )


def _rank(prediction: Prediction) -> tuple[bool, bool, bool]:
    return not prediction.feasible, bool(prediction.barred), bool(prediction.not_tried)


def _pick(allowed: Sequence[Prediction], constraints: ChoiceOptions) -> Prediction | None:
    fastest = min(allowed, key=constraints.comparable_seconds, default=None)
    if fastest is None:
        return None
    limit = NEAR * constraints.comparable_seconds(fastest)
    return next(p for p in allowed if constraints.comparable_seconds(p) <= limit)


def _explain(
    picked: Prediction | None,
    finalists: Sequence[Prediction],
    candidates: Sequence[Prediction],
    constraints: ChoiceOptions,
) -> list[str]:
    if picked is None:
        return [_find_nearest([p for p in candidates if not p.barred])]
    reasons = [_describe(picked)]
    fastest = min(finalists, key=constraints.comparable_seconds)
    if fastest is not picked:
        reasons.append(
            f"{fastest.candidate.name} takes {_ratio(fastest, picked, constraints):.2f} x as long, "
            f"but among candidates within {100 * (NEAR - 1):.0f} % of the fastest the simplest is taken"
        )

    strategy = picked.candidate.strategy
    allowed = [p for p in candidates if not any(_rank(p)) and p.epoch_seconds]
    alternatives = [p for p in allowed if p != fastest and p.candidate.strategy != strategy]
    alternatives.sort(key=constraints.comparable_seconds)
    reasons += [_compare(p, picked, constraints) for p in alternatives[:2]]
    faster = [
        p
        for p in candidates
        if p.feasible and p.barred and p.candidate.unit == picked.candidate.unit and p.epoch_seconds
        if constraints.comparable_seconds(p) < constraints.comparable_seconds(picked)
    ]
    if faster and picked.trial is None:
        barred = min(faster, key=constraints.comparable_seconds)
        reasons.append(
            f"{barred.candidate.name} would take {_format_seconds(barred.epoch_seconds)}, but is another "
            f"estimator, only with {barred.barred}"
        )

    too_large = [p.candidate.name for p in candidates if "GB a rank" in p.why_not]
    if too_large:
        reasons.append(f"these do not fit the memory: {', '.join(too_large)}")
    return reasons


def _find_nearest(allowed: Sequence[Prediction]) -> str:
    too_large = [p for p in allowed if p.memory_bytes and p.why_not]
    if too_large:
        nearest = min(too_large, key=lambda p: p.memory_bytes)
        return (
            f"no allowed candidate fits; nearest is {nearest.candidate.name}, which {nearest.why_not}. Use "
            "smaller batches or fan-outs, more servers, or ranks with more memory (--memory, "
            "--device-memory)."
        )

    reasons = "; ".join(f"{p.candidate.name}: {p.why_not}" for p in allowed[:3])
    return f"no requested strategy can train this ({reasons or 'there is none'}). Try --unit any."


def _ratio(prediction: Prediction, picked: Prediction, constraints: ChoiceOptions) -> float:
    return constraints.comparable_seconds(prediction) / max(constraints.comparable_seconds(picked), 1e-12)


def _describe(prediction: Prediction) -> str:
    name = prediction.candidate.name
    traffic = "an unknown number of bytes"
    if prediction.has_costs:
        traffic = format_bytes(prediction.inter_server_bytes)
    if prediction.trial is not None:
        seconds = _format_seconds(prediction.epoch_seconds)
        return f"{name} took {seconds} an epoch here, and moves {traffic} between servers"
    return (
        f"{name} computes for {_format_seconds(prediction.compute_s)} an epoch, as measured here, and moves "
        f"{traffic} between servers, {_format_seconds(prediction.network_s)} at the given bandwidth"
    )


def _format_seconds(seconds: float) -> str:
    # 999.5 would be written as 1e+03.
    return f"{seconds:.3g} s" if seconds < 999.5 else f"{seconds:.0f} s"


def _compare(prediction: Prediction, picked: Prediction, constraints: ChoiceOptions) -> str:
    name = prediction.candidate.name
    ratio = _ratio(prediction, picked, constraints)
    if prediction.candidate.unit != picked.candidate.unit:
        # Their epochs are different work, so their bytes are not comparable.
        return f"{name} takes {ratio:.2f} x as long to learn as much"
    extra = prediction.inter_server_bytes - picked.inter_server_bytes
    is_known = prediction.has_costs and picked.has_costs
    traffic = f", and moves {format_bytes(extra)} more between servers" if is_known and extra > 0 else ""
    return f"{name} takes {ratio:.2f} x as long{traffic}"
