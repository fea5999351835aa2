"""What the experiments with full-graph training share: who is compared, on what, and the bytes foretold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dglx_dist.bench import data
from dglx_dist.bench.halo_bytes import HaloPairs, Widths, count_pairs, outside_bytes, topology_of
from dglx_dist.bench.phase_table import PREDICTED_BYTES
from dglx_dist.bench.records import BenchPlan, ExperimentPlan, Job, MatchedPhi, Ratio, Shape, Variant
from dglx_dist.datasets.synthetic import SyntheticConfig
from dglx_dist.graph.expansion import Expansion, measure_expansion
from dglx_dist.lab.rates import Rate
from dglx_dist.run.prepare import PartitionPlan
from dglx_dist.storage.reader import open_dataset

SERVERS, RANKS_PER_SERVER = 2, 2
GIGABIT = Rate.parse("1gbit")

BASE, BASE_PP = "full_graph", "full_graph + pp"
PRELOAD, PRELOAD_PP = "shared_preload", "shared_preload + pp"
EAS, COOPERATIVE = "EAS", "cooperative"

HOW = (
    "2 servers of 2 ranks, each server with half of this machine's cores; the link between servers is "
    "limited, the one inside is not. One clustered graph, one step an epoch. full_graph exchanges the "
    "border's rows in every layer; with pp the features of the border are sent once, its cheap "
    "optimisation, which shared_preload has too between the ranks of a server. EAS takes 1 hop of at most"
    " 15 foreign in-neighbours. The rate is chosen so that full_graph without pp spends the share phi of "
    "its time on the network, and is the same for all; the two with pp again at 1 Gbit/s."
)
NOTE = (
    "All ranks share this machine's cores, so replicated work is paid in full, and phi is reached at a "
    "lower rate than on a cluster. EAS trains on another graph than the others: its accuracy stands "
    "beside its time."
)


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large, by suite."""

    nodes: int = 20_000
    degree: float = 25.0
    train_rate: float = 0.5
    epochs: int = 3
    curve_epochs: int = 30


SIZES: Mapping[str, Size] = {"quick": Size(nodes=6_000, epochs=1, curve_epochs=5), "papers": Size()}


def size_of(plan: BenchPlan) -> Size:
    """Return the size that the suite asks for."""
    return SIZES.get(plan.suite, SIZES["papers"])


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all variants of one comparison train."""

    phi: float
    """Of the baseline: the share of its time that the paper's spent on the network."""
    features: int
    layers: int = 2
    hidden: int = 64
    model: str = "sage"
    cut: str = "metis"
    """How the graph is cut into servers."""
    curve: bool = True
    """Whether accuracy is measured beside time."""
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
    Way(name=COOPERATIVE, strategy="cooperative", options={"batches": 2}, preloaded=True),
)


@dataclass(frozen=True, kw_only=True)
class Bound:
    """What a claim says of two ways: the least ratio of their times with which it is reproduced."""

    over: str
    under: str
    low: float | None = None


@dataclass(frozen=True, kw_only=True)
class _Counted:
    """A graph and its cut, counted before anything is trained."""

    folder: Path
    pairs: HaloPairs
    expansion: Expansion
    widths: Widths

    @property
    def kappa(self) -> float:
        """Work of a preloaded model by the one without replicas, of the server with most."""
        return float(self.expansion.work[-1].max())


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
    phases = {one.named(way.name): dict(_phases(way, counted[one.label])) for one in settings for way in ways}
    variants = [_variant(plan, size, one, way, counted[one.label]) for one in settings for way in ways]
    fast = [way for way in ways if way.name in (BASE_PP, PRELOAD_PP)]
    for one in settings:
        variants += [_variant(plan, size, one, way, counted[one.label], rate=GIGABIT) for way in fast]
    return ExperimentPlan(
        variants=tuple(variants),
        ratios=tuple(
            ratio for one in settings for ratio in _ratios(one, bounds, counted[one.label], phases, fast)
        ),
        facts={
            "datasets": {one.label or one.cut: data.facts(counted[one.label].folder) for one in settings},
            "halo pairs between servers, by layer": _by_label(settings, counted, lambda c: c.pairs.outside),
            "expansion factor of the servers, by hop": _by_label(
                settings, counted, lambda c: c.expansion.factors.round(3).tolist()
            ),
            "kappa": _by_label(settings, counted, lambda c: round(c.kappa, 3)),
            PREDICTED_BYTES: phases,
        },
    )


def _by_label(settings: Sequence[Setting], counted: Mapping[str, _Counted], value: Any) -> dict[str, Any]:
    return {one.label or one.cut: value(counted[one.label]) for one in settings}


def _count(plan: BenchPlan, size: Size, setting: Setting) -> _Counted:
    graph = SyntheticConfig(
        nodes=size.nodes,
        degree=size.degree,
        features=setting.features,
        homophily=0.95,
        locality=0.98,
        train_rate=size.train_rate,
        seed=plan.seed + 1,
    )
    cut = PartitionPlan(num_parts=SERVERS, method=setting.cut)
    folder = data.prepare(graph, {setting.cut: cut}, plan.work)[setting.cut]
    dataset = open_dataset(folder)
    return _Counted(
        folder=folder,
        pairs=count_pairs(dataset, topology_of(SERVERS, RANKS_PER_SERVER), setting.layers),
        expansion=measure_expansion(dataset, SERVERS, setting.layers),
        widths=_widths(setting, graph.classes),
    )


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


def _phases(way: Way, counted: _Counted) -> Mapping[str, int]:
    found = outside_bytes(
        counted.pairs,
        counted.widths,
        topology_of(SERVERS, RANKS_PER_SERVER),
        preloaded=way.preloaded,
        use_pp=bool(way.options.get("use_pp", True)),
    )
    # Every co-batch has a step.
    steps = int(way.options.get("batches", 1))
    return {phase: count * (steps if phase == "gradients" else 1) for phase, count in found.items()}


def _variant(
    plan: BenchPlan, size: Size, setting: Setting, way: Way, counted: _Counted, rate: Rate | None = None
) -> Variant:
    params = {
        "data": str(counted.folder),
        "strategy": way.strategy,
        "options": dict(way.options),
        "model": setting.model,
        "hidden": setting.hidden,
        "fanouts": [-1] * setting.layers,
        "lr": 0.01,
        "epochs": size.epochs,
        "seed": plan.seed,
    }
    name = setting.named(way.name)
    curve = Job(kind="train", params=params | {"warmup": 0, "epochs": size.curve_epochs, "accuracy": True})
    return Variant(
        name=name if rate is None else f"{name}, {rate}",
        shape=Shape(servers=SERVERS, ranks_per_server=RANKS_PER_SERVER),
        job=Job(kind="train", params=params, warm={"warmup": 0, "epochs": 1}),
        rate=MatchedPhi(phi=setting.phi, baseline=setting.named(BASE)) if rate is None else rate,
        curve=curve if setting.curve and rate is None else None,
    )


def _ratios(
    setting: Setting,
    bounds: Sequence[Bound],
    counted: _Counted,
    phases: Mapping[str, Mapping[str, int]],
    fast: Sequence[Way],
) -> list[Ratio]:
    made = []
    for bound in bounds:
        over, under = setting.named(bound.over), setting.named(bound.under)
        made.append(
            Ratio(
                name=f"{over} / {under}",
                over=over,
                under=under,
                predicted=_predicted(setting, bound, counted, phases),
                low=bound.low,
            )
        )
    names = [f"{setting.named(way.name)}, {GIGABIT}" for way in fast]
    if len(names) > 1:
        made.append(Ratio(name=f"{names[0]} / {names[1]}", over=names[0], under=names[1]))
    return made


def _predicted(
    setting: Setting, bound: Bound, counted: _Counted, phases: Mapping[str, Mapping[str, int]]
) -> float:
    """Return the quotient of (1 - phi) kappa + phi beta, with beta the bytes by the baseline's.

    Nothing is overlapped: a layer waits for its rows. What crosses inside a server is taken as free.
    """
    base = sum(phases[setting.named(BASE)].values())
    exact = {PRELOAD, PRELOAD_PP, COOPERATIVE}
    times = []
    for name in (bound.over, bound.under):
        # Of EAS the replicas are few, and not counted here.
        kappa = counted.kappa if name in exact else 1.0
        beta = sum(phases[setting.named(name)].values()) / base if base else 0.0
        times.append((1.0 - setting.phi) * kappa + setting.phi * beta)
    return times[0] / times[1]
