"""Candidates of all strategies, their predictions, and the choice of the fastest, with reasons. No I/O."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product

import numpy as np

from dglx_dist.memory import readable_bytes
from dglx_dist.planner.records import Choice, ChoiceOptions, Prediction
from dglx_dist.records import Array
from dglx_dist.strategies.base import STRATEGIES
from dglx_dist.strategies.cost import Candidate, Cost, Measured, PlanContext, Work

_NEAR = 1.05
"""A prediction within this factor of the fastest is a tie, which the earlier, simpler candidate wins."""
_CERTAIN = 0.05
"""Relative half-width of an interval up to which a rate counts as known."""


def enumerate_candidates(context: PlanContext) -> tuple[Candidate, ...]:
    """Return the candidates of all strategies: mini-batches first, the simplest first."""
    found: list[tuple[bool, int, Candidate]] = []
    for name in STRATEGIES.names():
        strategy = STRATEGIES.get(name)
        for one in strategy.candidates(context):
            place = one.unit != "mini_batch", strategy.traits.complexity
            found.append((*place, replace(one, strategy=name)))
    return tuple(one for *_, one in sorted(found, key=lambda entry: entry[:2]))


def works_of(candidates: Iterable[Candidate]) -> tuple[Work, ...]:
    """Return what is to be counted for ``candidates``, each once."""
    return tuple(dict.fromkeys(work for one in candidates for work in one.works))


def choosable() -> Mapping[str, frozenset[str]]:
    """Return every strategy that may be chosen, with its option names."""
    found: dict[str, frozenset[str]] = {}
    for one in enumerate_candidates(PlanContext(ranks=4, servers=2, num_layers=3, steps=3)):
        found[one.strategy] = found.get(one.strategy, frozenset()) | one.options.keys()
    return found


def predict(candidate: Candidate, known: Measured) -> Prediction:
    """Return the predicted epoch of ``candidate``; if it is not feasible, the reason and zeros."""
    cluster, strategy = known.cluster, STRATEGIES.get(candidate.strategy)
    why_not = known.shape.refused.get(candidate.strategy) or _uncounted(candidate, known)
    if cluster.device_memory_bytes and not strategy.traits.on_gpus:
        why_not = "computes on CPUs only"
    found = Cost() if why_not else strategy.cost(candidate, known)
    why_not = why_not or found.why_not
    on_device = found.memory - found.on_host if cluster.device_memory_bytes else 0
    needed = found.memory - on_device - found.shared + found.shared // cluster.ranks_per_server
    if not why_not and needed > cluster.memory_bytes:
        why_not = f"needs {needed / 1e9:.1f} GB a rank, of {cluster.memory_bytes / 1e9:.1f}"
    elif not why_not and on_device > cluster.device_memory_bytes:
        limit = cluster.device_memory_bytes
        why_not = f"needs {on_device / 1e9:.1f} GB a rank on its GPU, of {limit / 1e9:.1f}"
    notes = [found.note] if found.note else []
    if candidate.epochs_factor != 1.0:
        notes.append(f"about {candidate.epochs_factor:g} x the epochs")
    return Prediction(
        candidate=candidate,
        seconds=found.seconds,
        outside=found.traffic.outside,
        inside=found.traffic.inside,
        bytes_exact=found.traffic.exact,
        once_bytes=found.traffic.once,
        memory_bytes=found.memory,
        device_memory_bytes=on_device,
        why_not=why_not,
        note="; ".join(notes),
    )


def _uncounted(candidate: Candidate, known: Measured) -> str:
    if candidate.unit == "mini_batch" and known.batches is None:
        return "no mini-batches were requested"
    if any(known.works.get(work) is None for work in candidate.works):
        return "its plans are too large to be counted; name the strategy"
    if candidate.cache is not None and known.cache_of(candidate) is None:
        return "its cache was not counted"
    return ""


def choose(candidates: Iterable[Candidate], known: Measured, constraints: ChoiceOptions) -> Choice:
    """Predict every candidate and choose the fastest one that is allowed and feasible."""
    predictions = [replace(predict(one, known), barred=_barred(one, constraints)) for one in candidates]
    allowed = [one for one in predictions if one.feasible and not one.barred]
    others = ([predict(one.candidate, corner) for one in allowed] for corner in _interval_corners(known))
    seconds = np.array([[constraints.worth(one) for one in found] for found in (allowed, *others)])
    # How many times as long as the fastest each one takes.
    ratios = seconds / np.maximum(seconds.min(axis=1, keepdims=True, initial=np.inf), 1e-12)
    most = ratios.max(axis=0)
    at = next((at for at, one in enumerate(most) if one <= _NEAR * most.min()), None)
    taken = None if at is None else allowed[at]
    ranked = sorted(predictions, key=lambda one: (not one.feasible, bool(one.barred), constraints.worth(one)))
    assumptions = [*known.cluster.assumptions, *known.assumptions]
    if constraints.unit == "any":
        assumptions.append(
            f"{constraints.full_graph_epochs:g} epochs of whole graphs, a step each, "
            "are worth one of mini-batches"
        )
    return Choice(
        graph=known.graph,
        trained=known.trained,
        cluster=known.cluster,
        predictions=tuple(ranked),
        picked=-1 if taken is None else ranked.index(taken),
        why=(
            *_reasons(taken, allowed, predictions, constraints),
            *_uncertainty(known, taken, ratios, allowed),
        ),
        assumptions=tuple(assumptions),
        epoch=known.epoch,
    )


def _interval_corners(known: Measured) -> list[Measured]:
    """Return what else ``known`` may be: both ends of the intervals of links, and of computing on
    mini-batches and on whole graphs, which are timed apart; nothing if they are narrow.
    """
    found, cluster = list[Measured](), known.cluster
    if max(known.spread, cluster.link_spread) <= _CERTAIN:
        return found
    ends = [[1 - min(width, 0.9), 1 + width] for width in (known.spread, known.spread, cluster.link_spread)]
    for batches, graphs, faster in product(*ends):
        links = replace(
            cluster,
            external_bytes_per_s=faster * cluster.external_bytes_per_s,
            internal_bytes_per_s=faster * cluster.internal_bytes_per_s,
        )
        plans = (known.plan_rates or known.rates).slowed(graphs)
        found.append(replace(known, cluster=links, rates=known.rates.slowed(batches), plan_rates=plans))
    return found


def _uncertainty(
    known: Measured, taken: Prediction | None, ratios: Array, allowed: Sequence[Prediction]
) -> list[str]:
    """Return a sentence if another candidate may be faster within the intervals of what was timed."""
    of_taken = ratios[:, [one is taken for one in allowed]]
    if taken is None or of_taken.max() <= _NEAR:
        return []
    fastest = {int(one) for one in ratios.argmin(axis=1)}
    return [
        f"uncertain: repeated steps differ by +-{100 * known.spread:.0f} % and rounds of the links by "
        f"+-{100 * known.cluster.link_spread:.0f} %; within that "
        f"{' or '.join(allowed[at].candidate.name for at in sorted(fastest))} is the fastest, and this one "
        f"takes {of_taken.min():.2f} to {of_taken.max():.2f} x as long"
    ]


def _barred(candidate: Candidate, constraints: ChoiceOptions) -> str:
    # What would allow the candidate; empty: it is allowed.
    if candidate.labor:
        return "LaborSampler(fanouts) passed to dx.DataLoader"
    wanted = f"--unit {candidate.unit}" if constraints.unit not in ("any", candidate.unit) else ""
    allowed = candidate.exact or constraints.allow_estimators
    return " ".join(one for one in (wanted, "" if allowed else "--allow-estimators") if one)


def _reasons(
    taken: Prediction | None,
    allowed: Sequence[Prediction],
    every: Sequence[Prediction],
    constraints: ChoiceOptions,
) -> list[str]:
    if taken is None:
        return [_nearest([one for one in every if not one.barred])]
    reasons = [_biggest(taken)]
    fastest = min(allowed, key=constraints.worth)
    if fastest is not taken and constraints.worth(taken) <= _NEAR * constraints.worth(fastest):
        reasons.append(
            f"{fastest.candidate.name} takes {_ratio(fastest, taken, constraints):.2f} x as long, "
            f"but of candidates within {100 * (_NEAR - 1):.0f} % of the fastest the simplest is taken"
        )
    strategy = taken.candidate.strategy
    others = [one for one in allowed if one != fastest and one.candidate.strategy != strategy]
    others.sort(key=constraints.worth)
    reasons += [_compared(one, taken, constraints) for one in others[:2]]
    better = [
        one
        for one in every
        if one.feasible and one.barred and one.candidate.unit == taken.candidate.unit
        if constraints.worth(one) < constraints.worth(taken)
    ]
    if better:
        other = min(better, key=constraints.worth)
        reasons.append(
            f"{other.candidate.name} would take {_seconds(other.epoch_seconds)}, but is another estimator, "
            f"only with {other.barred}"
        )
    too_large = [one.candidate.name for one in every if "GB a rank" in one.why_not]
    if too_large:
        reasons.append(f"does not fit the memory: {', '.join(too_large)}")
    return reasons


def _nearest(allowed: Sequence[Prediction]) -> str:
    large = [one for one in allowed if one.memory_bytes]
    if large:
        one = min(large, key=lambda one: one.memory_bytes)
        return (
            f"no allowed candidate fits; nearest is {one.candidate.name}, which {one.why_not}: take "
            "smaller batches or fan-outs, more servers, or ranks with more memory (--memory, "
            "--device-memory)"
        )
    refused = "; ".join(f"{one.candidate.name}: {one.why_not}" for one in allowed[:3])
    return f"no requested strategy can train this ({refused or 'there is none'}); try --unit any"


def _ratio(one: Prediction, taken: Prediction, constraints: ChoiceOptions) -> float:
    return constraints.worth(one) / max(constraints.worth(taken), 1e-12)


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
        f"{one.candidate.name} takes {_seconds(one.epoch_seconds)} an epoch, most of it {name} "
        f"({_seconds(parts[name])}), and moves {readable_bytes(one.inter_server_bytes)} between servers"
    )


def _seconds(seconds: float) -> str:
    # 999.5 would be written as 1e+03.
    return f"{seconds:.3g} s" if seconds < 999.5 else f"{seconds:.0f} s"


def _compared(other: Prediction, taken: Prediction, constraints: ChoiceOptions) -> str:
    ratio = _ratio(other, taken, constraints)
    if other.candidate.unit != taken.candidate.unit:
        # Their epochs are different work, so their bytes and seconds are not comparable.
        return f"{other.candidate.name} takes {ratio:.2f} x as long to learn as much"
    more = other.inter_server_bytes - taken.inter_server_bytes
    slower = {
        f"moves {readable_bytes(more)} more between servers" if more > 0 else "waits longer for servers": (
            other.seconds.outside - taken.seconds.outside
        ),
        "computes longer": other.seconds.compute - taken.seconds.compute,
        "draws longer": other.seconds.sampling - taken.seconds.sampling,
        "exchanges longer within servers": other.seconds.inside - taken.seconds.inside,
        "sums gradients longer": other.seconds.all_reduce - taken.seconds.all_reduce,
    }
    longest = max(slower.values())
    # What takes less than a tenth of the longest explains nothing.
    why = [f"it {what} ({_seconds(by)})" for what, by in slower.items() if by > longest / 10 > 0]
    return f"{other.candidate.name} takes {ratio:.2f} x as long" + (f": {', '.join(why)}" if why else "")
