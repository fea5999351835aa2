"""All experiments by id, and all programs by name, imported when asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any, TypeAlias, cast, get_args

from dglx_dist.errors import UnknownNameError
from dglx_dist.registry import suggest_name
from dglx_dist.strategies.base import STRATEGIES
from scripts.bench.notes import read_notes
from scripts.bench.records import BenchPlan, Claim, Experiment, ExperimentPlan, Suite

Build: TypeAlias = Callable[[BenchPlan], ExperimentPlan]

FAMILIES = ("data_parallel", "push_pull", "full_graph", "serverless", "fewer_bytes", "choice", "peers")
"""Modules in ``experiments``; each has BUILDS: id -> what makes or finds datasets and says what to run."""
PROGRAMS: Mapping[str, tuple[str, str]] = {
    "performance": ("performance:main", "puts docs/results/index.md together from docs/results"),
    "same_bits": ("micro.same_bits:main", "digests of weights, losses, bytes: equal in two checkouts?"),
    "message_passing": ("micro.message_passing:main", "DGL's kernels beside the torch path, on the CPU"),
    "inference": ("micro.inference:main", "exact inference of all nodes beside plain DGL, edges per second"),
    "sampling": ("micro.sampling:main", "neighbour sampling beside stock DGL"),
    "labor": (
        "micro.labor:main",
        "LABOR beside neighbour sampling: rows, bytes with a look-ahead cache, time",
    ),
    "temporal": ("micro.temporal:main", "sampling by time: edges per second, and links of the future"),
    "subgraphs": ("micro.subgraphs:main", "accuracy of ShaDow and Cluster-GCN beside DGL's samplers"),
    "halo": ("micro.halo:main", "how much of a link the halo exchange uses; under netlab"),
    "regret": ("micro.regret:main", "the choice of auto on real graphs beside every exact way"),
    "tasks": ("micro.tasks:main", "every task on real graphs beside a plain loop of DGL"),
    "real_data": ("micro.real_data:main", "accuracy on real graphs, one process beside two ranks"),
    "typed_epochs": ("micro.typed_epochs:main", "epochs of R-GCN on several types under slow links"),
    "several_types": (
        "micro.several_types:main",
        "R-GCN on real graphs of several relations, under every strategy beside plain DGL",
    ),
    "large": ("large:main", "graphs larger than memory: partitioned, then trained on"),
    "worker": ("worker:serve", ""),
}
"""Name to "module:function" in this folder and what it is; without that, only the bench itself starts it."""


def everything() -> list[Experiment]:
    """Return all experiments, in the order of docs/results/notes.md, which says what they are."""
    builds: dict[str, Build] = {}
    for name in FAMILIES:
        builds |= importlib.import_module(f"scripts.bench.experiments.{name}").BUILDS
    return [experiment_of(name, note, builds.get(name)) for name, note in read_notes().experiments.items()]


def experiment_of(name: str, note: Mapping[str, str], build: Build | None) -> Experiment:
    """Return the experiment ``name`` from its fields in the notes."""

    def names(field: str, default: str = "") -> Any:
        return tuple(name.strip() for name in note.get(field, default).split(",") if name.strip())

    return Experiment(
        id=name,
        title=note["Title"],
        suites=names("Suites"),
        claim=Claim(paper=note["Paper"], says=note["Claim"], setting=note["Setting"]),
        prediction=note["Predicted"],
        strategies=names("Strategies", "data_parallel"),
        needs=names("Needs"),
        build=build,
    )


def suite(name: str) -> list[Experiment]:
    """Return the experiments of a suite; UnknownNameError if there is none."""
    known = get_args(Suite)
    if name not in known:
        raise UnknownNameError(
            f"there is no suite {name!r}{suggest_name(name, known)} (known: {', '.join(known)})"
        )
    return [experiment for experiment in everything() if name in experiment.suites]


def find(name: str) -> Experiment:
    """Return the experiment with this id, in capitals or not; UnknownNameError has the nearest one."""
    known = {experiment.id: experiment for experiment in everything()}
    if name.upper() not in known:
        raise UnknownNameError(
            f"there is no experiment {name!r}{suggest_name(name.upper(), known)}; "
            f"`python scripts/bench --list` shows all {len(known)}"
        )
    return known[name.upper()]


def program(name: str) -> Callable[[list[str]], int | None]:
    """Return the program of that name: called with its arguments, it returns its exit code."""
    module, _, function = PROGRAMS[name][0].partition(":")
    main = getattr(importlib.import_module(f"scripts.bench.{module}"), function)
    return cast("Callable[[list[str]], int | None]", main)


def why_absent(experiment: Experiment, *, installed: bool = True) -> str:
    """Return why this release cannot run ``experiment``; empty: it can. ``installed``: do its needs count?"""
    known = STRATEGIES.names()
    lacking = [name for name in experiment.strategies if name not in known]
    if lacking:
        return f"this release has no strategy {' or '.join(lacking)}"
    if experiment.build is None:
        return "how it is measured is not written yet"
    needs = experiment.needs if installed else ()
    missing = [name.replace("|", " or ") for name in needs if not any(map(find_spec, name.split("|")))]
    return f"not installed here: {', '.join(missing)}" if missing else ""


def find_versions(packages: Sequence[str]) -> dict[str, str]:
    """Return name to version of those that are installed."""
    versions = {}
    for name in packages:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions
