"""G1 to G5: full-graph training and what avoids its exchanges, with the bytes predicted by phase."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dglx_dist.data.partition.base import PartitionPlan
from dglx_dist.data.storage.reader import open_dataset, open_structure
from dglx_dist.data.synthetic import SyntheticConfig
from dglx_dist.graph.partition_book import Placement
from dglx_dist.graph.structure import ReplicatedStructure
from dglx_dist.planner.costs.base import ID_BYTES, ring_split
from dglx_dist.planner.costs.full_graph import count_exchanged_bytes, decode_work, pack_sizes
from dglx_dist.planner.model_shape import build_topology, infer_shape
from dglx_dist.planner.records import ModelShape, Rate
from dglx_dist.records import EDGE_TYPE, NODE_TYPE
from dglx_dist.strategies.full_graph.expansion import EasOptions, compose_batches, make_selection
from dglx_dist.strategies.full_graph.plan_builder import PartitionContext, make_all_plans, split_by_server
from scripts.bench import data
from scripts.bench.experiments.common import (
    GIGABIT,
    builds,
    clustered_graph,
    predicted_time,
    quotient,
    training_variant,
)
from scripts.bench.peers.data import launch_of, launch_variant
from scripts.bench.records import (
    KAPPA,
    PREDICTED_BYTES,
    PREDICTED_ONCE,
    BenchPlan,
    ExperimentPlan,
    MatchedPhi,
    Ratio,
    Shape,
    Variant,
)

SERVERS, RANKS_PER_SERVER = 2, 2
SHAPE = Shape(servers=SERVERS, ranks_per_server=RANKS_PER_SERVER)
RAW = (GIGABIT, Rate.parse("10gbit"))
"""Rates that are not chosen for phi."""
BASE, BASE_PP = "full_graph", "full_graph + pp"
PRELOAD, PRELOAD_PP = "shared_preload", "shared_preload + pp"
EAS, COOPERATIVE = "EAS", "cooperative"
STOCK = "stock DistDGL, mini-batches"
BATCHES = 2
"""Cooperative batches of an epoch."""
LEARNING = (BASE_PP, PRELOAD_PP, EAS, COOPERATIVE)
"""Variants with accuracy curves. Without pp, the same accuracies come later."""
_CLASSES = SyntheticConfig().classes
EVERY = 5
"""Epochs from one evaluation to the next."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large, by suite."""

    nodes: int = 8_000
    """Number of nodes of a setting with ``scale`` 1."""
    train_rate: float = 0.5
    epochs: int = 2
    curve_epochs: int = 30
    deep_layers: int = 28


SIZES: Mapping[str, Size] = {
    "quick": Size(nodes=3_000, epochs=1, curve_epochs=5, deep_layers=7),
    "papers": Size(),
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Graph, model and links that all variants of one comparison share."""

    phi: float
    """Share of time that the paper's baseline spent on the network."""
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
    bounded: bool = True
    """Whether the claim's bounds are of it."""
    label: str = ""
    """Suffix of the names of its variants. Empty if the experiment has only one setting."""

    def variant_name(self, name: str) -> str:
        """Return the name of a variant."""
        return f"{name}, {self.label}" if self.label else name

    @property
    def rate(self) -> MatchedPhi:
        """Rate at which the baseline reaches ``phi``."""
        return MatchedPhi(phi=self.phi, baseline=self.variant_name(BASE))


SCHEMES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    BASE: ("full_graph", {"use_pp": False}),
    BASE_PP: ("full_graph", {"use_pp": True}),
    PRELOAD: ("shared_preload", {"use_pp": False}),
    PRELOAD_PP: ("shared_preload", {"use_pp": True}),
    EAS: ("shared_preload", {"external_hops": 1, "external_fanout": 15}),
    COOPERATIVE: ("cooperative", {"batches": BATCHES}),
}
"""Those that are compared: name -> strategy, and its options."""


def _settings(name: str, size: Size) -> list[Setting]:
    if name == "G4":
        # The paper does not say phi of deep models; that of its arxiv and products lies on both sides.
        deep = Setting(
            phi=0.8, features=128, scale=1.25, degree=10.0, layers=size.deep_layers, model="resgcn",
            curve=False, raw=(GIGABIT,), epochs=1, label=f"{size.deep_layers} layers",
        )  # fmt: skip
        # What deep ones cost differs by their bytes and work alone, and each takes long on two cores.
        return [replace(deep, layers=3, curve=True, raw=(), bounded=False, label="3 layers"), deep]
    if name == "G5":
        setting = Setting(phi=0.87, features=100, layers=3, raw=(), curve=False)
        return [replace(setting, cut=cut, label=cut) for cut in ("random", "metis")]
    flat = {
        "G1": Setting(phi=0.94, features=602, scale=0.5, degree=50.0),
        "G2": Setting(phi=0.87, features=100),
        "G3": Setting(phi=0.64, features=128, degree=14.0),
    }
    return [flat[name]]


_REST = ((BASE_PP, PRELOAD, None), (BASE_PP, PRELOAD_PP, 2.0), (BASE_PP, COOPERATIVE, None))
_BOUNDS: Mapping[str, tuple[tuple[str, str, float | None], ...]] = {
    "G1": ((BASE, PRELOAD, 3.0), (BASE, EAS, 3.0), *_REST),
    "G2": ((BASE, PRELOAD, 2.5), (BASE, EAS, 2.5), *_REST),
    "G3": (
        *((BASE, PRELOAD, 1.6), (BASE, EAS, 1.3), (BASE_PP, PRELOAD, None)),
        *((BASE_PP, PRELOAD_PP, None), (BASE_PP, COOPERATIVE, None)),
    ),
    "G4": ((BASE, PRELOAD, None), (BASE_PP, PRELOAD_PP, 2.0), (BASE_PP, EAS, None), _REST[-1]),
    "G5": ((BASE, EAS, 1.65), (BASE, PRELOAD, None), (BASE_PP, PRELOAD_PP, None)),
}
"""Id -> schemes over and under the line, and the least ratio of the claim."""


def plan_at(name: str, plan: BenchPlan, size: Size) -> ExperimentPlan:
    """Return the experiment ``name`` at ``size``; makes datasets and counts bytes, which takes seconds."""
    settings = _settings(name, size)
    made = plan_of(
        plan, size, settings, [Ratio(name="", over=a, under=b, low=low) for a, b, low in _BOUNDS[name]]
    )
    if name != "G2":
        return made
    (setting,) = settings
    launch = launch_of(
        "stock",
        _graph_of(plan, size, setting),
        PartitionPlan(num_parts=SERVERS, method=setting.cut),
        plan.work,
        {"hidden": setting.hidden, "fanouts": (15, 10), "batch_size": 128, "lr": 0.01},
        epochs=size.epochs,
    )
    # An epoch has many steps, so fewer of them reach an accuracy.
    drawn = {"epochs": max(size.curve_epochs // EVERY, 1), "options": {"accuracy_every": 1}}
    stock = launch_variant(STOCK, launch, shape=SHAPE, rate=setting.rate, curve=drawn)
    return replace(
        made, variants=(*made.variants, stock), ratios=(*made.ratios, quotient(over=STOCK, under=EAS))
    )


def plan_of(
    plan: BenchPlan,
    size: Size,
    settings: Sequence[Setting],
    bounds: Sequence[Ratio],
    schemes: Sequence[str] = tuple(SCHEMES),
) -> ExperimentPlan:
    """Return the experiment that compares ``schemes`` in each setting; makes datasets and counts bytes.

    ``bounds``: ratios of schemes, compared in every setting.
    """
    counted = {setting.label: count_setting(plan, size, setting) for setting in settings}
    pairs = [(setting, scheme) for setting in settings for scheme in schemes]

    def of_all(value: Callable[[str, Counted], Any]) -> dict[str, Any]:
        return {
            setting.variant_name(scheme): value(scheme, counted[setting.label]) for setting, scheme in pairs
        }

    def facts_of(value: Callable[[Counted], Any]) -> dict[str, Any]:
        return {setting.label or setting.cut: value(counted[setting.label]) for setting in settings}

    phases = of_all(lambda name, found: dict(found.phases[name]))
    kappas = of_all(lambda name, found: found.kappa(name))
    variants = [_variant(plan, size, setting, scheme, counted[setting.label]) for setting, scheme in pairs]
    fast = [scheme for scheme in schemes if scheme in (BASE_PP, PRELOAD_PP)]
    ratios: list[Ratio] = []
    for setting in settings:
        base = sum(phases[setting.variant_name(BASE)].values())
        took = {
            scheme: predicted_time(setting.phi, kappas[name], sum(phases[name].values()) / base)
            for scheme in schemes
            if (name := setting.variant_name(scheme))
        }
        ratios += [
            quotient(
                over=setting.variant_name(bound.over),
                under=setting.variant_name(bound.under),
                predicted=took[bound.over] / took[bound.under],
                low=bound.low if setting.bounded else None,
            )
            for bound in bounds
        ]
        for rate in setting.raw:
            variants += [
                _variant(plan, size, setting, scheme, counted[setting.label], rate) for scheme in fast
            ]
            names = [f"{setting.variant_name(scheme)}, {rate}" for scheme in fast]
            ratios += [quotient(over=names[0], under=names[1])] if len(names) > 1 else []
    return ExperimentPlan(
        variants=tuple(variants),
        ratios=tuple(ratios),
        facts={
            "datasets": facts_of(lambda setting: data.facts(setting.folder)),
            "halo pairs between servers, by layer": facts_of(lambda setting: list(setting.pairs)),
            "expansion factor of the servers": facts_of(lambda setting: setting.expansion),
            KAPPA: kappas,
            PREDICTED_BYTES: phases,
            # Features of co-batches are fetched by the run that makes them, here the one that warms up.
            PREDICTED_ONCE: {
                setting.variant_name(scheme): counted[setting.label].once[scheme]
                for setting, scheme in pairs
                if scheme != COOPERATIVE
            },
        },
    )


@dataclass(frozen=True, kw_only=True)
class Counted:
    """Counts for the graph, partition and model of one setting, by scheme."""

    folder: Path
    """Folder of the dataset."""
    pairs: tuple[int, ...]
    """By layer, halo rows between servers."""
    expansion: list[float]
    """(S,) feature rows that a server holds after preloading, relative to its own nodes: D_i."""
    edges: Mapping[str, tuple[int, ...]]
    """(S,) aggregated in an epoch."""
    phases: Mapping[str, Mapping[str, int]]
    """Bytes of an epoch by ledger phase; of co-batches when they are on disk."""
    once: Mapping[str, int]
    """Bytes of features that are sent once, ids included; of co-batches when none are on disk."""

    def kappa(self, scheme: str) -> float:
        """Return the work of the server with most by that of the baseline's."""
        return round(max(self.edges[scheme]) / max(*self.edges[BASE], 1), 3)


def count_setting(plan: BenchPlan, size: Size, setting: Setting) -> Counted:
    """Make the dataset of a setting and count work and bytes on it; seconds per million edges."""
    config = _graph_of(plan, size, setting)
    cut = PartitionPlan(num_parts=SERVERS, method=setting.cut)
    folder = data.prepare(config, {setting.cut: cut}, plan.work)[setting.cut]
    dataset, topology, shape = (
        open_dataset(folder),
        build_topology(SERVERS, RANKS_PER_SERVER),
        _shape(setting),
    )
    manifest, csc = dataset.manifest, open_structure(dataset, EDGE_TYPE)
    bounds = Placement(manifest.num_parts, topology).server_offsets(manifest.node_offsets[NODE_TYPE])
    structure = ReplicatedStructure(EDGE_TYPE, int(bounds[-1]), csc.indptr, csc.indices)
    context = PartitionContext(structure=structure, bounds=bounds, topology=topology, seed=plan.seed)
    masks = [dataset.part(part).node_data(NODE_TYPE, "train_mask") for part in range(manifest.num_parts)]
    own = split_by_server(context, np.flatnonzero(np.concatenate(masks)))
    pieces = zip(
        *(compose_batches(part_nodes, BATCHES, "random", seed=plan.seed) for part_nodes in own), strict=True
    )

    layers, eas = setting.layers, make_selection(EasOptions(hops=1, fanout=15), seed=plan.seed)
    exchanging, preloading = ([make_all_plans(context, own, layers, hops)] for hops in (0, layers))
    steps = {
        **dict.fromkeys((BASE, BASE_PP), exchanging),
        **dict.fromkeys((PRELOAD, PRELOAD_PP), preloading),
        EAS: [make_all_plans(context, own, layers, layers, eas=eas)],
        COOPERATIVE: [make_all_plans(context, piece, layers, layers) for piece in pieces],
    }
    ranks = [topology.ranks_of_server(server) for server in range(SERVERS)]
    work = {
        name: decode_work(
            np.array([[pack_sizes(piece, topology.world_size) for piece in step] for step in made]), topology
        )
        for name, made in steps.items()
    }
    pairs, row = work[BASE].outside, setting.features * shape.itemsize
    gradients, _ = ring_split(shape.gradient_bytes, topology.server_of_rank, 1)
    sums = {"gradients": gradients}
    plain, kept = (count_exchanged_bytes(pairs, shape, use_pp=use_pp) for use_pp in (False, True))
    return Counted(
        folder=folder,
        pairs=pairs,
        expansion=[
            round(1 + preloading[0][of[0]].external_nodes / max(int(size), 1), 3)
            for of, size in zip(ranks, np.diff(bounds), strict=True)
        ],
        edges={
            name: tuple(
                sum(len(layer.indices) for step in made for rank in of for layer in step[rank].layers)
                for of in ranks
            )
            for name, made in steps.items()
        },
        phases={
            BASE: {**plain, **sums},
            BASE_PP: {**kept, **sums},
            **dict.fromkeys((PRELOAD, PRELOAD_PP, EAS), sums),
            COOPERATIVE: {"gradients": BATCHES * gradients},
        },
        once={
            **{name: total.external_rows * (ID_BYTES + row) for name, total in work.items()},
            **{BASE: 0, BASE_PP: pairs[0] * row},
        },
    )


def _graph_of(plan: BenchPlan, size: Size, setting: Setting) -> SyntheticConfig:
    nodes = int(size.nodes * setting.scale)
    graph = {"nodes": nodes, "degree": setting.degree, "features": setting.features}
    return clustered_graph(plan, **graph, train_rate=size.train_rate)


def _shape(setting: Setting) -> ModelShape:
    # Only here: models need DGL, which takes seconds to import, also where experiments are only listed.
    from dglx_dist.training.models import build_model

    model = build_model(setting.model, setting.features, setting.hidden, _CLASSES, setting.layers, 0.0)
    return infer_shape(model, setting.features, _CLASSES, setting.layers, kind=setting.model)


def _variant(
    plan: BenchPlan, size: Size, setting: Setting, scheme: str, counted: Counted, rate: Rate | None = None
) -> Variant:
    strategy, options = SCHEMES[scheme]
    params = {
        "strategy": strategy,
        "options": dict(options),
        "model": setting.model,
        "hidden": setting.hidden,
        "fanouts": [-1] * setting.layers,
        "lr": 0.01,
        "epochs": setting.epochs or size.epochs,
        "seed": plan.seed,
    }
    has_curve = setting.curve and rate is None and scheme in LEARNING
    drawn = {"warmup": 0, "epochs": size.curve_epochs, "accuracy_every": EVERY}
    return training_variant(
        setting.variant_name(scheme) + ("" if rate is None else f", {rate}"),
        counted.folder,
        params,
        shape=SHAPE,
        rate=rate or setting.rate,
        curve=drawn if has_curve else None,
    )


BUILDS = builds(_BOUNDS, plan_at, SIZES)
