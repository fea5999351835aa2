"""List the strategies' candidates, predict their bytes and memory, and choose one with reasons. No I/O."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from dglx_dist.memory import format_bytes
from dglx_dist.planner.costs.base import COSTS, Cost, EpochCounts, Work
from dglx_dist.planner.records import Choice, ChoiceOptions, Prediction
from dglx_dist.strategies.base import STRATEGIES
from dglx_dist.strategies.candidate import Candidate, CandidateContext

TIE_FACTOR = 1.03
"""Candidates within this factor of the fastest are tied with it. The earlier, simpler one wins."""


def enumerate_candidates(context: CandidateContext) -> tuple[Candidate, ...]:
    """List the candidates that all strategies offer: mini-batches first, and the simplest first."""
    candidates: list[Candidate] = []
    for name in STRATEGIES.names():
        for candidate in STRATEGIES.get(name).candidates(context):
            candidates.append(replace(candidate, strategy=name))

    def get_sort_key(candidate: Candidate) -> tuple[bool, int]:
        complexity = STRATEGIES.get(candidate.strategy).traits.complexity
        return candidate.unit != "mini_batch", complexity

    return tuple(sorted(candidates, key=get_sort_key))


def has_costs(candidate: Candidate) -> bool:
    """Return whether the strategy has a cost model."""
    return candidate.strategy in COSTS.names()


def list_works(candidates: Iterable[Candidate], context: CandidateContext) -> tuple[Work, ...]:
    """List what must be counted for ``candidates``, without duplicates."""
    works: list[Work] = []
    for candidate in candidates:
        if has_costs(candidate):
            works += COSTS.get(candidate.strategy).works(candidate, context)
    return tuple(dict.fromkeys(works))


def list_choosable() -> Mapping[str, frozenset[str]]:
    """List every strategy that may be chosen, with the names of its options."""
    # In this context every strategy has candidates.
    context = CandidateContext(ranks=4, servers=2, num_layers=3, steps=3)
    names: dict[str, frozenset[str]] = {}
    for candidate in enumerate_candidates(context):
        known_names = names.get(candidate.strategy, frozenset())
        names[candidate.strategy] = known_names | candidate.options.keys()
    return names


def predict(candidate: Candidate, counts: EpochCounts) -> Prediction:
    """Predict bytes and memory for an epoch with ``candidate``, or say why no epoch can run."""
    cluster = counts.cluster
    why_not = _find_refusal(candidate, counts)
    cost = Cost()
    if not why_not and counts.shape.has_widths and has_costs(candidate):
        cost = COSTS.get(candidate.strategy).cost(candidate, counts)

    device_bytes = 0
    if cluster.device_memory_bytes:
        device_bytes = cost.memory - cost.on_host
    why_not = why_not or cost.why_not or _find_shortage(cost, device_bytes, counts)

    notes = [cost.note] if cost.note else []
    if candidate.epochs_factor != 1.0:
        notes.append(f"about {candidate.epochs_factor:g} x the epochs")
    return Prediction(
        candidate=candidate,
        network_s=cost.traffic.seconds(cluster),
        outside=cost.traffic.outside,
        inside=cost.traffic.inside,
        bytes_exact=cost.traffic.exact,
        once_bytes=cost.traffic.once,
        memory_bytes=cost.memory,
        device_memory_bytes=device_bytes,
        why_not=why_not,
        note="; ".join(notes),
    )


def _find_shortage(cost: Cost, device_bytes: int, counts: EpochCounts) -> str:
    """Say which memory is too small for a rank, or return "".

    ``device_bytes`` is how much of ``cost.memory`` is on a GPU.
    """
    cluster = counts.cluster
    # The ranks on a server map the shared bytes together, so each rank pays for its share.
    host_bytes = cost.memory - device_bytes - cost.shared + cost.shared // cluster.ranks_per_server
    host_limit = cluster.memory_bytes
    if host_bytes > host_limit:
        return f"needs {host_bytes / 1e9:.1f} GB a rank, but there are {host_limit / 1e9:.1f}"

    device_limit = cluster.device_memory_bytes
    if device_bytes > device_limit:
        return f"needs {device_bytes / 1e9:.1f} GB a rank on its GPU, but there are {device_limit / 1e9:.1f}"
    return ""


def _find_refusal(candidate: Candidate, counts: EpochCounts) -> str:
    """Return why ``candidate`` cannot train the model or was not counted, or ""."""
    shape = counts.shape
    strategy = STRATEGIES.get(candidate.strategy)
    if counts.cluster.device_memory_bytes and not strategy.traits.on_gpus:
        return "computes on CPUs only"
    if not shape.has_widths:
        # Without widths nothing is counted. Only trials show whether the candidate can train the model.
        return ""
    if candidate.strategy in shape.refusals:
        return shape.refusals[candidate.strategy]

    if candidate.unit == "mini_batch" and counts.batches is None:
        return "no mini-batches were requested"
    for work in list_works([candidate], counts.context):
        if counts.works.get(work) is None:
            return "its plans are too large to be counted; name the strategy"
    if candidate.cache is not None and counts.find_cache(candidate) is None:
        return "its cache was not counted"
    return ""


def find_bar(candidate: Candidate, constraints: ChoiceOptions) -> str:
    """Return the options that would allow ``candidate``, or "" if it is allowed."""
    options = []
    if constraints.unit not in ("any", candidate.unit):
        options.append(f"--unit {candidate.unit}")
    if not candidate.exact and not constraints.allow_estimators:
        options.append("--allow-estimators")
    return " ".join(options)


def choose(
    predictions: Iterable[Prediction],
    counts: EpochCounts,
    constraints: ChoiceOptions,
    *,
    finalists: Collection[str] | None = None,
) -> Choice:
    """Choose the fastest candidate that is allowed and feasible.

    Args:
        predictions: Candidates to choose from, in order of simplicity.
        counts: What was counted for them.
        constraints: Which candidates the user allows.
        finalists: Names of the candidates that were equally fast in trials. The choice is among them. None:
            there were no trials.
    """
    candidates = [replace(p, barred=find_bar(p.candidate, constraints)) for p in predictions]
    undecided = []
    for prediction in candidates:
        is_finalist = finalists is None or prediction.candidate.name in finalists
        if _is_choosable(prediction) and is_finalist:
            undecided.append(prediction)

    def get_sort_key(prediction: Prediction) -> tuple[bool, bool, bool, float]:
        return *_list_obstacles(prediction), constraints.comparable_seconds(prediction)

    ranked = sorted(candidates, key=get_sort_key)
    picked = _pick(undecided, constraints)
    picked_index = -1
    if picked is not None:
        picked_index = ranked.index(picked)

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
        picked=picked_index,
        why=tuple(_explain(picked, undecided, candidates, constraints)),
        assumptions=tuple(assumptions),
        epoch=counts.epoch,
    )


def _list_obstacles(prediction: Prediction) -> tuple[bool, bool, bool]:
    """Return whether the candidate is not feasible, is barred, and was left out of the trials."""
    return not prediction.feasible, bool(prediction.barred), bool(prediction.not_tried)


def _is_choosable(prediction: Prediction) -> bool:
    return not any(_list_obstacles(prediction))


def _pick(undecided: Sequence[Prediction], constraints: ChoiceOptions) -> Prediction | None:
    """Return the simplest among the fastest predictions. ``undecided`` begins with the simplest."""
    fastest = min(undecided, key=constraints.comparable_seconds, default=None)
    if fastest is None:
        return None
    limit = TIE_FACTOR * constraints.comparable_seconds(fastest)
    return next(p for p in undecided if constraints.comparable_seconds(p) <= limit)


def _explain(
    picked: Prediction | None,
    undecided: Sequence[Prediction],
    candidates: Sequence[Prediction],
    constraints: ChoiceOptions,
) -> list[str]:
    """Explain why ``picked`` was chosen among ``candidates``, one sentence per reason."""
    if picked is None:
        return [_find_nearest([p for p in candidates if not p.barred])]
    reasons = [_describe(picked)]
    fastest = min(undecided, key=constraints.comparable_seconds)
    if fastest is not picked:
        reasons.append(
            f"{fastest.candidate.name} takes {_ratio(fastest, picked, constraints):.2f} x as long, "
            f"but among candidates within {100 * (TIE_FACTOR - 1):.0f} % of the fastest the simplest is taken"
        )

    # Two candidates from other strategies show how much slower the alternatives are.
    alternatives = []
    for prediction in candidates:
        is_mentioned = prediction == fastest or prediction.candidate.strategy == picked.candidate.strategy
        if _is_choosable(prediction) and prediction.epoch_seconds and not is_mentioned:
            alternatives.append(prediction)
    alternatives.sort(key=constraints.comparable_seconds)
    for prediction in alternatives[:2]:
        reasons.append(_compare(prediction, picked, constraints))

    barred = _find_faster_barred(candidates, picked, constraints)
    if barred is not None and picked.trial is None:
        reasons.append(
            f"{barred.candidate.name} would take {_format_seconds(barred.epoch_seconds)}, but is another "
            f"estimator, only with {barred.barred}"
        )
    too_large = [p.candidate.name for p in candidates if "GB a rank" in p.why_not]
    if too_large:
        reasons.append(f"these do not fit the memory: {', '.join(too_large)}")
    return reasons


def _find_faster_barred(
    candidates: Sequence[Prediction], picked: Prediction, constraints: ChoiceOptions
) -> Prediction | None:
    """Return the fastest barred candidate with the same unit as ``picked``, or None if none is faster."""
    barred = []
    # Epochs of different units are different work, so their seconds are not comparable.
    for prediction in candidates:
        is_same_unit = prediction.candidate.unit == picked.candidate.unit
        if prediction.feasible and prediction.barred and is_same_unit and prediction.epoch_seconds:
            barred.append(prediction)

    fastest = min(barred, key=constraints.comparable_seconds, default=picked)
    if constraints.comparable_seconds(fastest) < constraints.comparable_seconds(picked):
        return fastest
    return None


def _find_nearest(allowed: Sequence[Prediction]) -> str:
    """Explain why none of the ``allowed`` candidates is feasible, and what the user can do."""
    too_large = [p for p in allowed if p.memory_bytes and p.why_not]
    if too_large:
        nearest = min(too_large, key=lambda p: p.memory_bytes)
        return (
            f"no allowed candidate fits; nearest is {nearest.candidate.name}, which {nearest.why_not}. Use "
            "smaller batches or fan-outs, more servers, or ranks with more memory (--memory, "
            "--device-memory)."
        )

    reasons = "there is none"
    if allowed:
        reasons = "; ".join(f"{p.candidate.name}: {p.why_not}" for p in allowed[:3])
    return f"no requested strategy can train this ({reasons}). Try --unit any."


def _ratio(prediction: Prediction, picked: Prediction, constraints: ChoiceOptions) -> float:
    picked_seconds = max(constraints.comparable_seconds(picked), 1e-12)
    return constraints.comparable_seconds(prediction) / picked_seconds


def _describe(prediction: Prediction) -> str:
    """Say in a sentence how long the chosen candidate takes per epoch, and how many bytes it sends."""
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
    # The format .3g would write 999.5 as 1e+03.
    if seconds >= 999.5:
        return f"{seconds:.0f} s"
    return f"{seconds:.3g} s"


def _compare(prediction: Prediction, picked: Prediction, constraints: ChoiceOptions) -> str:
    """Compare an alternative with the chosen candidate in a sentence."""
    ratio = _ratio(prediction, picked, constraints)
    sentence = f"{prediction.candidate.name} takes {ratio:.2f} x as long"
    if prediction.candidate.unit != picked.candidate.unit:
        # Epochs with different units are different work, so their bytes are not comparable.
        return f"{sentence} to learn as much"

    extra_bytes = prediction.inter_server_bytes - picked.inter_server_bytes
    if prediction.has_costs and picked.has_costs and extra_bytes > 0:
        return f"{sentence}, and moves {format_bytes(extra_bytes)} more between servers"
    return sentence
