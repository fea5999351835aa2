"""P1 to P9: push-pull beside data parallelism on one graph and its cuts, with bytes predicted by phase.

The setting is the worked example of P3 (docs/strategies/push_pull.md) made small: fan-out 10 at the input
and 25 at the seeds, so that a batch has about 7 input rows (L0) for each row of layer 1 (D1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from dglx_dist.data.partition.base import PartitionPlan
from dglx_dist.data.synthetic import SyntheticConfig
from dglx_dist.planner.costs.base import Survey
from dglx_dist.planner.costs.data_parallel import count_row_bytes
from dglx_dist.planner.costs.push_pull import column_bytes, structure_bytes
from dglx_dist.planner.records import Rate
from scripts.bench import data
from scripts.bench.data import survey
from scripts.bench.experiments.common import (
    GIGABIT,
    builds,
    bytes_quotient,
    clustered_graph,
    quotient,
    training_variant,
)
from scripts.bench.peers.data import launch_of, launch_variant
from scripts.bench.records import (
    PREDICTED_BYTES,
    BenchPlan,
    ExperimentPlan,
    MatchedPhi,
    Ratio,
    Shape,
    Variant,
)

PHI = 0.8
"""Share of time that P3's baseline, hashed data parallelism, spent on the network."""
SERVERS = 4
WIDTHS = (16, 32, 64, 100)
"""Hidden widths of P1."""
STOCK = "stock DistDGL, hash, 16"


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large, by suite."""

    nodes: int = 40_000
    degree: float = 25.0
    batch_size: int = 64
    steps: int = 8
    """Number of steps of an epoch."""
    epochs: int = 1


SIZES: Mapping[str, Size] = {"quick": Size(steps=4), "papers": Size()}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One of those that are compared: what is trained on which cut, by which strategy, at which rate."""

    name: str
    rate: Rate | MatchedPhi
    cut: str = "hash"
    """How the graph is partitioned."""
    features: int = 100
    hidden: int = 16
    model: str = "sage"
    heads: int = 4
    fanouts: tuple[int, ...] = (10, 25)
    """Input-most first; -1: all."""
    batch_size: int = 0
    """Seeds per rank and step; 0: as the size says."""
    servers: int = SERVERS
    structure: str = "replicated"
    """Placement of the graph's structure: "replicated" on every server, or "partitioned"."""
    strategy: str = "data_parallel"
    options: Mapping[str, Any] = field(default_factory=dict)
    """The strategy's own."""

    @property
    def params(self) -> dict[str, Any]:
        """Parameters of the job that the case determines."""
        names = ("strategy", "options", "model", "hidden", "heads", "fanouts", "structure")
        return {name: getattr(self, name) for name in names} | {"fanouts": list(self.fanouts)}


Table: TypeAlias = tuple[list[Case], list[Ratio]]


def push_pull(depth: int = 1, *, structure: str = "push", **more: Any) -> dict[str, Any]:
    """Return what makes a case one of push-pull: strategy and options, the structure's way stated."""
    return {"strategy": "push_pull", "options": {"depth": depth, "structure": structure, **more}}


def matched_rate(name: str) -> MatchedPhi:
    """Return the rate at which the case ``name`` has phi 0.8."""
    return MatchedPhi(phi=PHI, baseline=name)


def _p1(size: Size) -> Table:
    # Of the ratio of times at each width: 2.4 to 3.0, 1.8 to 2.1, 1.2 to 1.4 and 0.9 are predicted.
    bounds = {16: (2.4, None), 32: (1.8, None), 64: (1.2, None), 100: (None, 1.0)}
    cases: list[Case] = []
    compared: list[Ratio] = []
    for width, (low, high) in bounds.items():
        hashed, ours = f"hash, {width}", f"push_pull, {width}"
        cases += _pair(hashed, ours, width)
        compared += [quotient(over=hashed, under=ours, low=low, high=high), bytes_quotient(ours, hashed)]
    resampled = "push_pull, 16, resampled"
    cases.append(Case(name=resampled, rate=matched_rate("hash, 16"), **push_pull(structure="resample")))
    compared.append(quotient(over="hash, 16", under=resampled))
    more: tuple[tuple[int, str, dict[str, Any]], ...] = (
        *((width, str(GIGABIT), {"rate": GIGABIT}) for width in (WIDTHS[0], WIDTHS[-1])),
        (16, "structure apart", {"structure": "partitioned"}),
        (16, "2 servers", {"servers": 2}),
    )
    for width, label, fields in more:
        hashed, ours = f"hash, {width}, {label}", f"push_pull, {width}, {label}"
        cases += _pair(hashed, ours, width, **fields)
        compared.append(quotient(over=hashed, under=ours))
    return cases, compared


def _pair(hashed: str, ours: str, width: int, **fields: Any) -> list[Case]:
    shared = {"rate": matched_rate(hashed), "hidden": width, **fields}
    return [Case(name=hashed, **shared), Case(name=ours, **shared, **push_pull())]


def _p2(size: Size) -> Table:
    cases: list[Case] = []
    compared: list[Ratio] = []
    # First where push-pull itself waits half its time: there is most to hide.
    for width, own in ((16, True), (16, False), (64, False)):
        after = f"{width}, own phi 0.5" if own else str(width)
        depth_1, depth_3, depth_3_split = (
            f"{name}, {after}" for name in ("depth 1", "depth 3", "depth 3, split")
        )
        hashed = f"hash, {width}"
        rate = MatchedPhi(phi=0.5, baseline=depth_1) if own else matched_rate(hashed)
        cases += [] if own else [Case(name=hashed, rate=rate, hidden=width)]
        cases += [
            Case(name=depth_1, rate=rate, hidden=width, **push_pull()),
            Case(name=depth_3, rate=rate, hidden=width, **push_pull(3)),
            Case(name=depth_3_split, rate=rate, hidden=width, **push_pull(3, weights="split")),
        ]
        compared += [quotient(over=depth_1, under=name, low=1.25) for name in (depth_3, depth_3_split)]
        if not own:
            label = f"bytes, depth 3 / depth 1, {width}"
            compared += [
                quotient(over=hashed, under=depth_3),
                bytes_quotient(depth_3, depth_1, label, low=0.999, high=1.001),
            ]
    return cases, compared


def _p4(size: Size) -> Table:
    columns = (16, 64, 128, 512)
    # The columns at which the baseline has phi 0.8; the rate is the same for all.
    rate = matched_rate("hash, F 128")
    cases: list[Case] = []
    compared: list[Ratio] = []
    for number in columns:
        hashed, ours = f"hash, F {number}", f"push_pull, F {number}"
        cases += _pair(hashed, ours, 32, rate=rate, features=number)
        compared.append(quotient(over=hashed, under=ours, low=2.0 if number == 512 else None))
    most, least = "push_pull, F 512", "push_pull, F 16"
    compared += [
        quotient(over=most, under=least, high=2.0),
        quotient(over="hash, F 512", under="hash, F 16"),
        bytes_quotient(most, least, "bytes, push_pull, F 512 / F 16", high=1.001),
    ]
    return cases, compared


def _p5(size: Size) -> Table:
    rate = matched_rate("hash")
    cases = [Case(name="hash", rate=rate)]
    cases += [Case(name=f"groups of {size}", rate=rate, **push_pull(group_size=size)) for size in (4, 2, 1)]
    compared = [
        quotient(over="groups of 4", under="groups of 2", low=1.3),
        quotient(over="groups of 4", under="groups of 1"),
        quotient(over="hash", under="groups of 4"),
        quotient(over="hash", under="groups of 2"),
        bytes_quotient("groups of 2", "groups of 4", "bytes, groups of 2 / 4"),
    ]
    return cases, compared


def _p6(size: Size) -> Table:
    cases: list[Case] = []
    compared: list[Ratio] = []
    for width in (16, 32):
        hashed, metis = f"hash, {width}", f"metis, {width}"
        depth_1, depth_3 = f"push_pull, {width}", f"push_pull, depth 3, {width}"
        rate = matched_rate(hashed)
        cases += [
            Case(name=hashed, rate=rate, hidden=width),
            Case(name=metis, rate=rate, hidden=width, cut="metis"),
            Case(name=depth_1, rate=rate, hidden=width, **push_pull()),
            Case(name=depth_3, rate=rate, hidden=width, **push_pull(3)),
        ]
        compared += [
            quotient(over=metis, under=depth_1, low=1.0 if width == 16 else None),
            quotient(over=metis, under=depth_3),
            quotient(over=hashed, under=metis),
            bytes_quotient(depth_1, metis),
        ]
    return cases, compared


def trios(named: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return data parallelism and push-pull at depths 1 and 3, at the rate that suits the first.

    ``named``: what names say -> fields of all three cases, and ``low``, the bound of depth 1.
    """
    cases: list[Case] = []
    compared: list[Ratio] = []
    for name, fields in named.items():
        shared = dict(fields)
        low = shared.pop("low", None)
        hashed, ours, deep = f"hash, {name}", f"push_pull, {name}", f"push_pull, depth 3, {name}"
        cases += [
            *_pair(hashed, ours, 32, **shared),
            Case(name=deep, rate=matched_rate(hashed), hidden=32, **push_pull(3), **shared),
        ]
        compared += [
            quotient(over=hashed, under=ours, low=low),
            quotient(over=hashed, under=deep),
            bytes_quotient(ours, hashed),
        ]
    return cases, compared


def _p7(size: Size) -> Table:
    fanouts = {2: (10, 25), 3: (10, 5, 5), 4: (10, 5, 3, 2)}
    return trios({f"{layers} layers": {"fanouts": of} for layers, of in fanouts.items()})


def _p8(size: Size) -> Table:
    seeds = max(size.batch_size // 8, 1)
    return trios({"sampled": {}, "all": {"fanouts": (-1, -1), "batch_size": seeds, "low": 2.0}})


def _p9(size: Size) -> Table:
    one_head = {name: {"model": name, "heads": 1} for name in ("sage", "gcn", "sgc")}
    return trios(
        {**one_head, **{f"gat, {heads} heads": {"model": "gat", "heads": heads} for heads in (8, 2)}}
    )


_TABLES: Mapping[str, tuple[Callable[[Size], Table], float]] = {
    "P1": (_p1, 1),
    # Filling and emptying a pipeline of 3 costs two steps of every epoch.
    "P2": (_p2, 3),
    "P4": (_p4, 0.5),
    "P5": (_p5, 1),
    "P6": (_p6, 1),
    "P7": (_p7, 0.5),
    "P8": (_p8, 1),
    "P9": (_p9, 0.5),
}
"""Id -> cases and what is compared of them; steps of an epoch by those of the size."""


def plan_at(name: str, plan: BenchPlan, size: Size) -> ExperimentPlan:
    """Return the experiment ``name`` at ``size``; makes datasets and counts bytes, which takes seconds."""
    table, longer = _TABLES[name]
    size = replace(size, steps=max(int(longer * size.steps), 1))
    made = plan_of(plan, size, *table(size))
    if name != "P1":
        return made
    launch = launch_of(
        "stock",
        graph_of(plan, size, 100),
        PartitionPlan(num_parts=SERVERS, method="hash"),
        plan.work,
        {"hidden": 16, "fanouts": (10, 25), "batch_size": size.batch_size},
        epochs=size.epochs,
    )
    stock = launch_variant(STOCK, launch, shape=Shape(servers=SERVERS), rate=matched_rate("hash, 16"))
    beside = Ratio(name="stock DistDGL, hash, 16 / push_pull, 16", over=STOCK, under="push_pull, 16")
    return replace(made, variants=(*made.variants, stock), ratios=(*made.ratios, beside))


def plan_of(plan: BenchPlan, size: Size, cases: Sequence[Case], compared: Sequence[Ratio]) -> ExperimentPlan:
    """Return the experiment that compares ``cases``; makes datasets and counts bytes, which takes seconds."""
    folders = _folders(plan, size, cases)
    variants = {case.name: _variant(plan, size, case, folders) for case in cases}
    # Counted from the draws of data parallelism: push-pull trains on the same blocks.
    params = {name: item.job.params for name, item in variants.items()}
    surveys = survey(params, {case.name: case.servers for case in cases})
    phases = {case.name: _phases(case, surveys[case.name]) for case in cases}
    by_name = {case.name: case for case in cases}
    first = {(case.cut, case.servers): surveys[case.name] for case in reversed(cases) if case.model == "sage"}

    def by_blocks(value: Callable[[Survey], float]) -> dict[str, float]:
        return {
            f"{item.cut}, fan-out {','.join(map(str, item.fanouts))}, {item.servers} servers": round(
                value(surveys[item.name]), 3
            )
            for item in cases
        }

    return ExperimentPlan(
        variants=tuple(variants.values()),
        ratios=tuple(_with_prediction(item, by_name, phases) for item in compared),
        facts={
            "datasets": {
                f"{cut}, {width} columns": data.facts(item) for (cut, width, _), item in folders.items()
            },
            "input rows for each row of layer 1": by_blocks(
                lambda item: item.input_rows / max(item.first_targets, 1)
            ),
            "remote share of input rows": by_blocks(lambda item: item.remote_rows / max(item.input_rows, 1)),
            "break-even width, by the formula": {
                f"{cut}, {servers} servers": {
                    "structure pushed": round(break_even_width(item, structure_bytes(item)), 1),
                    "no structure": round(break_even_width(item, 0), 1),
                }
                for (cut, servers), item in first.items()
            },
            PREDICTED_BYTES: phases,
        },
    )


def break_even_width(survey: Survey, structure: int) -> float:
    """Return the hidden width at which push-pull moves as much as data parallelism; on 2 or more ranks.

    From feature rows, the bytes of ``structure`` that each rank is sent by every other, and sums alone;
    gradients and what both move are left out. See docs/strategies/push_pull.md, "When it pays".
    """
    peers = survey.ranks - 1
    return (survey.feature_bytes - peers * structure) / (2 * peers * survey.first_targets * 4)


def graph_of(plan: BenchPlan, size: Size, features: int) -> SyntheticConfig:
    """Return the graph of all experiments with push-pull, with this many columns of features."""
    rate = SERVERS * size.steps * size.batch_size / size.nodes
    return clustered_graph(plan, nodes=size.nodes, degree=size.degree, features=features, train_rate=rate)


def _folders(plan: BenchPlan, size: Size, cases: Sequence[Case]) -> dict[tuple[str, int, int], Path]:
    folders: dict[tuple[str, int, int], Path] = {}
    for features in dict.fromkeys(case.features for case in cases):
        needed = sorted({(case.cut, case.servers) for case in cases if case.features == features})
        cuts = {f"{cut} {parts}": PartitionPlan(num_parts=parts, method=cut) for cut, parts in needed}
        made = data.prepare(graph_of(plan, size, features), cuts, plan.work)
        folders |= {(cut, features, parts): made[f"{cut} {parts}"] for cut, parts in needed}
    return folders


def _variant(
    plan: BenchPlan, size: Size, case: Case, folders: Mapping[tuple[str, int, int], Path]
) -> Variant:
    params = {
        **case.params,
        "norm": "block",
        "batch_size": case.batch_size or size.batch_size,
        "epochs": size.epochs,
        "max_steps": size.steps,
        "seed": plan.seed,
    }
    folder = folders[case.cut, case.features, case.servers]
    return training_variant(case.name, folder, params, shape=Shape(servers=case.servers), rate=case.rate)


def _phases(case: Case, found: Survey) -> dict[str, int]:
    if case.strategy != "push_pull":
        return count_row_bytes(found)
    # Only here: models need DGL, which takes seconds to import, also where experiments are only listed.
    from dglx_dist.planner.costs.push_pull import inspect
    from dglx_dist.training.models import build_model

    classes = SyntheticConfig().classes
    model = build_model(case.model, case.features, case.hidden, classes, len(case.fanouts), 0.0, case.heads)
    return column_bytes(
        found,
        inspect(model, case.features),
        group_size=int(case.options.get("group_size", 0)),
        pushed=case.options.get("structure") == "push",
    )


def _with_prediction(
    ratio: Ratio, cases: Mapping[str, Case], phases: Mapping[str, Mapping[str, int]]
) -> Ratio:
    total = {name: sum(phases[name].values()) for name in phases}
    over, under = (
        float(total[name]) if ratio.quantity == "bytes_outside" else _predicted_time(cases[name], total)
        for name in (ratio.over, ratio.under)
    )
    return replace(ratio, predicted=over / under if over and under else None)


def _predicted_time(case: Case, total: Mapping[str, int]) -> float:
    """Return its time by that of the baseline of its rate, for equal computing; 0 without a prediction."""
    # (1 - phi) + phi beta, beta its bytes by the baseline's; the larger of both where several are in flight.
    if not isinstance(case.rate, MatchedPhi):
        return 0.0
    network = PHI * total[case.name] / total[case.rate.baseline]
    return max(1.0 - PHI, network) if int(case.options.get("depth", 1)) > 1 else 1.0 - PHI + network


BUILDS = builds(_TABLES, plan_at, SIZES)
