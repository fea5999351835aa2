"""All experiments by id, imported when asked for; a new one is a file in ``experiments`` and a line here."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from importlib.util import find_spec
from types import MappingProxyType
from typing import get_args

from dglx_dist.errors import ConfigError, UnknownNameError
from dglx_dist.registry import did_you_mean
from dglx_dist.strategies.registry import STRATEGIES
from scripts.bench.records import Experiment, Suite

EXPERIMENTS: Mapping[str, str] = MappingProxyType(
    {
        "D1": "scripts.bench.experiments.d1:EXPERIMENT",
        "D2": "scripts.bench.experiments.d2:EXPERIMENT",
        "D3": "scripts.bench.experiments.d3:EXPERIMENT",
        "P1": "scripts.bench.experiments.p1:EXPERIMENT",
        "P2": "scripts.bench.experiments.p2:EXPERIMENT",
        "P4": "scripts.bench.experiments.p4:EXPERIMENT",
        "P5": "scripts.bench.experiments.p5:EXPERIMENT",
        "P6": "scripts.bench.experiments.p6:EXPERIMENT",
        "P7": "scripts.bench.experiments.p7:EXPERIMENT",
        "P8": "scripts.bench.experiments.p8:EXPERIMENT",
        "P9": "scripts.bench.experiments.p9:EXPERIMENT",
        "G1": "scripts.bench.experiments.g1:EXPERIMENT",
        "G2": "scripts.bench.experiments.g2:EXPERIMENT",
        "G3": "scripts.bench.experiments.g3:EXPERIMENT",
        "G4": "scripts.bench.experiments.g4:EXPERIMENT",
        "G5": "scripts.bench.experiments.g5:EXPERIMENT",
        "Y1": "scripts.bench.experiments.y1:EXPERIMENT",
        "Y2": "scripts.bench.experiments.y2:EXPERIMENT",
        "Y3": "scripts.bench.experiments.y3:EXPERIMENT",
        "Y4": "scripts.bench.experiments.y4:EXPERIMENT",
        "Y5": "scripts.bench.experiments.y5:EXPERIMENT",
        "A1": "scripts.bench.experiments.a1:EXPERIMENT",
        "PEER1": "scripts.bench.experiments.peer_small:EXPERIMENT",
        "PEER2": "scripts.bench.experiments.peer_large:EXPERIMENT",
        "PEER3": "scripts.bench.experiments.peer_embedding:EXPERIMENT",
        "PEER4": "scripts.bench.experiments.peer_pyg:EXPERIMENT",
    }
)
"""Id to "module:name", in the order in which they run and are listed."""


def everything() -> list[Experiment]:
    """Return all experiments."""
    return [_load(name) for name in EXPERIMENTS]


def suite(name: str) -> list[Experiment]:
    """Return the experiments of a suite.

    Raises:
        UnknownNameError: there is no such suite.
    """
    known = get_args(Suite)
    if name not in known:
        raise UnknownNameError(
            f"there is no suite {name!r}{did_you_mean(name, known)} (known: {', '.join(known)})"
        )
    return [one for one in everything() if name in one.suites]


def find(name: str) -> Experiment:
    """Return the experiment with this id, in capitals or not.

    Raises:
        UnknownNameError: there is none; the message has the nearest id.
    """
    ids = {known.lower(): known for known in EXPERIMENTS}
    if name.lower() not in ids:
        hint = did_you_mean(name.upper(), EXPERIMENTS)
        raise UnknownNameError(
            f"there is no experiment {name!r}{hint}; `python scripts/bench --list` shows all {len(EXPERIMENTS)}"
        )
    return _load(ids[name.lower()])


def why_absent(experiment: Experiment) -> str:
    """Return why this release, as it is installed here, cannot run ``experiment``; empty: it can."""
    known = STRATEGIES.names()
    lacking = [name for name in experiment.strategies if name not in known]
    if lacking:
        return f"this release has no strategy {' or '.join(lacking)}"
    if experiment.build is None:
        return "how it is measured is not written yet"
    missing = [
        name.replace("|", " or ") for name in experiment.needs if not any(map(find_spec, name.split("|")))
    ]
    if missing:
        return f"not installed here: {', '.join(missing)}"
    return ""


def _load(experiment: str) -> Experiment:
    module, _, name = EXPERIMENTS[experiment].partition(":")
    found = getattr(importlib.import_module(module), name)
    if not isinstance(found, Experiment) or found.id != experiment:
        raise ConfigError(
            f"{EXPERIMENTS[experiment]} is no Experiment with the id {experiment!r}; correct it"
        )
    return found
