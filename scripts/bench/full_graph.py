"""What the experiments with full-graph training share: who is compared, on what, and the bytes foretold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dglx_dist.data.synthetic import SyntheticConfig
from dglx_dist.planner.model_shape import Widths
from dglx_dist.planner.records import Rate
from dglx_dist.prepare import PartitionPlan
from scripts.bench import data
from scripts.bench.closed_form import KAPPA, PREDICTED_ONCE
from scripts.bench.phase_table import PREDICTED_BYTES
from scripts.bench.records import BenchPlan, ExperimentPlan, Job, MatchedPhi, Ratio, Shape, Variant
from scripts.bench.speedup_model import Counted, count, predicted_time

SERVERS, RANKS_PER_SERVER = 2, 2
GIGABIT = Rate.parse("1gbit")
RAW = (GIGABIT, Rate.parse("10gbit"))
"""Rates that are not chosen for phi."""

BASE, BASE_PP = "full_graph", "full_graph + pp"
PRELOAD, PRELOAD_PP = "shared_preload", "shared_preload + pp"
EAS, COOPERATIVE = "EAS", "cooperative"
BATCHES = 2
"""Co-batches of an epoch."""
LEARNING = (BASE_PP, PRELOAD_PP, EAS, COOPERATIVE)
"""Whose accuracy is drawn: without pp the same numbers come later."""
EVERY = 5
"""Epochs from one evaluation to the next."""

HOW = (
    "2 servers of 2 ranks, each server with half of this machine's cores; the link between servers is "
    "limited, the one inside is not. One clustered graph, one step an epoch. full_graph exchanges the "
    "border's rows in every layer; with pp the features of the border are sent once, its cheap "
    "optimisation, which shared_preload has too between the ranks of a server. EAS takes 1 hop of at most"
    " 15 foreign in-neighbours; cooperative has 2 co-batches an epoch, whose features are fetched once and "
    "kept on disk. The rate is chosen so that full_graph without pp spends the share phi of its time on the "
    "network, and is the same for all; the two with pp again at 1 and 10 Gbit/s, where it says so. What is "
    "done once is left out of the epochs and told beside them."
)
NOTE = (
    "All ranks share this machine's cores, so replicated work is paid in full, and phi is reached at a "
    "lower rate than on a cluster. EAS trains on another graph than the others: its accuracy stands "
    "beside its time."
)


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large, by suite."""

    nodes: int = 8_000
    """Of a setting whose ``scale`` is 1."""
    train_rate: float = 0.5
    epochs: int = 2
    curve_epochs: int = 30
    deep_layers: int = 28


SIZES: Mapping[str, Size] = {
    "quick": Size(nodes=3_000, epochs=1, curve_epochs=5, deep_layers=7),
    "papers": Size(),
}


def size_of(plan: BenchPlan) -> Size:
    """Return the size that the suite asks for."""
    return SIZES.get(plan.suite, SIZES["papers"])


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all variants of one comparison train."""

    phi: float
    """Of the baseline: the share of its time that the paper's spent on the network."""
    features: int
    scale: float = 1.0
    """Nodes, by those that the size says."""
    degree: float = 25.0
    layers: int = 2
    hidden: int = 64
    model: str = "sage"
    cut: str = "metis"
    """How the graph is cut into servers."""
    curve: bool = True
    """Whether accuracy is measured beside time."""
    epochs: int | None = None
    """Measured ones of a repetition; None: as the size says."""
    raw: tuple[Rate, ...] = RAW
    """Rates at which the two with pp are measured, too."""
    label: str = ""
    """What the names of its variants end with; empty where an experiment has one setting only."""

    def named(self, name: str) -> str:
        """Return the name of a variant."""
        return f"{name}, {self.label}" if self.label else name


@dataclass(frozen=True, kw_only=True)
class Way:
    """One of those that are compared."""

    name: str
    strategy: str
    options: Mapping[str, Any] = field(default_factory=dict)
    preloaded: bool = False
    """Whether servers hold their neighbourhood, so that no activation crosses."""


WAYS = (
    Way(name=BASE, strategy="full_graph", options={"use_pp": False}),
    Way(name=BASE_PP, strategy="full_graph", options={"use_pp": True}),
    Way(name=PRELOAD, strategy="shared_preload", options={"use_pp": False}, preloaded=True),
    Way(name=PRELOAD_PP, strategy="shared_preload", options={"use_pp": True}, preloaded=True),
    Way(
        name=EAS,
        strategy="shared_preload",
        options={"external_hops": 1, "external_fanout": 15},
        preloaded=True,
    ),
    Way(name=COOPERATIVE, strategy="cooperative", options={"batches": BATCHES}, preloaded=True),
)


@dataclass(frozen=True, kw_only=True)
class Bound:
    """What a claim says of two ways: the least ratio of their times with which it is reproduced."""

    over: str
    under: str
    low: float | None = None
    only: str = ""
    """Label of the one setting that it is said of; empty: of all."""


def plan_of(
    plan: BenchPlan,
    size: Size,
    settings: Sequence[Setting],
    bounds: Sequence[Bound],
    ways: Sequence[Way] = WAYS,
) -> ExperimentPlan:
    """Return the experiment that compares ``ways`` in each setting; makes datasets and counts bytes.

    Args:
        plan: Of the bench.
        size: How large.
        settings: With different labels.
        bounds: Compared in every setting.
        ways: Who is compared; the baseline among them.
    """
    counted = {one.label: _count(plan, size, one) for one in settings}
    pairs = [(one, way) for one in settings for way in ways]
    phases = {one.named(way.name): dict(_phases(way, counted[one.label])) for one, way in pairs}
    kappas = {one.named(way.name): _kappa(way, counted[one.label]) for one, way in pairs}
    once = {one.named(way.name): _once(way, counted[one.label]) for one, way in pairs}
    variants = [_variant(plan, size, one, way, counted[one.label]) for one, way in pairs]
    fast = [way for way in ways if way.name in (BASE_PP, PRELOAD_PP)]
    for one in settings:
        for rate in one.raw:
            variants += [_variant(plan, size, one, way, counted[one.label], rate=rate) for way in fast]
    made = _Foretold(phases=phases, kappas=kappas)
    return ExperimentPlan(
        variants=tuple(variants),
        ratios=tuple(ratio for one in settings for ratio in _ratios(one, bounds, made, fast)),
        facts={
            "datasets": {one.label or one.cut: data.facts(counted[one.label].folder) for one in settings},
            "halo pairs between servers, by layer": {
                one.label or one.cut: list(counted[one.label].pairs.outside) for one in settings
            },
            "expansion factor of the servers": {
                one.label or one.cut: counted[one.label].expansion for one in settings
            },
            KAPPA: kappas,
            PREDICTED_BYTES: phases,
            PREDICTED_ONCE: {name: found for name, found in once.items() if found is not None},
        },
    )


@dataclass(frozen=True, kw_only=True)
class _Foretold:
    """Of every variant at the calibrated rate."""

    phases: Mapping[str, Mapping[str, int]]
    kappas: Mapping[str, float]


def _count(plan: BenchPlan, size: Size, setting: Setting) -> Counted:
    graph = graph_of(plan, size, setting)
    folder = data.prepare(graph, {setting.cut: cut_of(setting)}, plan.work)[setting.cut]
    return count(
        folder,
        servers=SERVERS,
        ranks_per_server=RANKS_PER_SERVER,
        layers=setting.layers,
        num_batches=BATCHES,
        seed=plan.seed,
        widths=_widths(setting, graph.classes),
    )


def graph_of(plan: BenchPlan, size: Size, setting: Setting) -> SyntheticConfig:
    """Return the graph of a setting."""
    return SyntheticConfig(
        nodes=int(size.nodes * setting.scale),
        degree=setting.degree,
        features=setting.features,
        homophily=0.95,
        locality=0.98,
        train_rate=size.train_rate,
        seed=plan.seed + 1,
    )


def cut_of(setting: Setting) -> PartitionPlan:
    """Return how it is cut into servers."""
    return PartitionPlan(num_parts=SERVERS, method=setting.cut)


def _widths(setting: Setting, classes: int) -> Widths:
    # Only here: models need DGL, which takes seconds to import, also where experiments are only listed.
    from dglx_dist.training.models import build_model

    model = build_model(setting.model, setting.features, setting.hidden, classes, setting.layers, 0.0)
    encodes = setting.model == "resgcn"
    return Widths(
        first=setting.hidden if encodes else setting.features,
        hidden=setting.hidden,
        first_learns=encodes,
        gradient_bytes=sum((one.numel() + 1) * one.element_size() for one in model.parameters()),
    )


def _phases(way: Way, counted: Counted) -> Mapping[str, int]:
    if way.name == COOPERATIVE:
        return counted.co_batch_bytes()
    return counted.epoch_bytes(preloaded=way.preloaded, use_pp=bool(way.options.get("use_pp", True)))


def _once(way: Way, counted: Counted) -> int | None:
    """Return the bytes of features that cross once; None where no formula says."""
    exact = {BASE: 0, BASE_PP: counted.halo_features, PRELOAD: counted.preloaded_features}
    return {**exact, PRELOAD_PP: counted.preloaded_features}.get(way.name)


def _kappa(way: Way, counted: Counted) -> float:
    found = {PRELOAD: counted.kappa, PRELOAD_PP: counted.kappa, EAS: counted.kappa_of_sample}
    return round({**found, COOPERATIVE: counted.kappa_of_batches}.get(way.name, 1.0), 3)


def _variant(
    plan: BenchPlan, size: Size, setting: Setting, way: Way, counted: Counted, rate: Rate | None = None
) -> Variant:
    params = {
        "data": str(counted.folder),
        "strategy": way.strategy,
        "options": dict(way.options),
        "model": setting.model,
        "hidden": setting.hidden,
        "fanouts": [-1] * setting.layers,
        "lr": 0.01,
        "epochs": setting.epochs or size.epochs,
        "seed": plan.seed,
    }
    name = setting.named(way.name)
    drawn = {"warmup": 0, "epochs": size.curve_epochs, "accuracy": True, "accuracy_every": EVERY}
    curve = Job(kind="train", params=params | drawn)
    has_curve = setting.curve and rate is None and way.name in LEARNING
    return Variant(
        name=name if rate is None else f"{name}, {rate}",
        shape=Shape(servers=SERVERS, ranks_per_server=RANKS_PER_SERVER),
        job=Job(kind="train", params=params, warm={"warmup": 0, "epochs": 1}),
        rate=MatchedPhi(phi=setting.phi, baseline=setting.named(BASE)) if rate is None else rate,
        curve=curve if has_curve else None,
    )


def _ratios(
    setting: Setting, bounds: Sequence[Bound], foretold: _Foretold, fast: Sequence[Way]
) -> list[Ratio]:
    made = []
    base = setting.named(BASE)
    for bound in bounds:
        over, under = setting.named(bound.over), setting.named(bound.under)
        low = bound.low if bound.only in ("", setting.label) else None
        times = [
            predicted_time(
                setting.phi,
                foretold.kappas[name],
                sum(foretold.phases[name].values()) / sum(foretold.phases[base].values()),
            )
            for name in (over, under)
        ]
        predicted = times[0] / times[1]
        made.append(Ratio(name=f"{over} / {under}", over=over, under=under, predicted=predicted, low=low))
    for rate in setting.raw if len(fast) > 1 else ():
        names = [f"{setting.named(way.name)}, {rate}" for way in fast]
        made.append(Ratio(name=f"{names[0]} / {names[1]}", over=names[0], under=names[1]))
    return made
