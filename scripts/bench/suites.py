"""All experiments by id, and all programs by name, imported when asked for; a new one has a line here."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from types import MappingProxyType
from typing import cast, get_args

from dglx_dist.errors import ConfigError, UnknownNameError
from dglx_dist.registry import did_you_mean
from dglx_dist.strategies.base import STRATEGIES
from scripts.bench.records import Experiment, Suite

FAMILIES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "data_parallel": ("D1", "D2", "D3"),
        "push_pull": ("P1", "P2", "P4", "P5", "P6", "P7", "P8", "P9"),
        "full_graph": ("G1", "G2", "G3", "G4", "G5"),
        "serverless": ("Y1", "Y2", "Y3", "Y4", "Y5"),
        "choice": ("A1",),
        "peers": ("PEER1", "PEER2", "PEER3", "PEER4"),
    }
)
"""Module in ``experiments`` -> ids in its EXPERIMENTS, in the order in which they run and are listed."""
EXPERIMENTS: Mapping[str, str] = {name: family for family, names in FAMILIES.items() for name in names}
"""Id -> its module."""
PROGRAMS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "performance": ("performance:main", "puts docs/performance.md together from docs/results"),
        "same_bits": ("micro.same_bits:main", "digests of weights, losses, bytes: equal in two checkouts?"),
        "sampling": ("micro.sampling:main", "neighbour sampling beside stock DGL"),
        "rpc": ("micro.rpc:main", "one-sided calls beside bare pyzmq"),
        "halo": ("micro.halo:main", "how much of a link the halo exchange uses; under netlab"),
        "gradients": ("micro.gradients:main", "our gradient exchange beside DDP's; under torchrun"),
        "expansion": ("micro.expansion:main", "what preloading neighbourhoods costs, by hop and cut"),
        "real_data": ("micro.real_data:main", "accuracy on real graphs, one process beside two ranks"),
        "alone": ("worker:start_alone", ""),
        "worker": ("worker:start_worker", ""),
    }
)
"""Name to "module:function" in this folder and what it is; without that, only the bench itself starts it."""


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
            f"there is no experiment {name!r}{hint}; "
            f"`python scripts/bench --list` shows all {len(EXPERIMENTS)}"
        )
    return _load(ids[name.lower()])


def program(name: str) -> Callable[[list[str]], int | None]:
    """Return the program of that name: called with its arguments, it returns its exit code."""
    module, _, function = PROGRAMS[name][0].partition(":")
    found = getattr(importlib.import_module(f"scripts.bench.{module}"), function)
    return cast("Callable[[list[str]], int | None]", found)


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
    module = importlib.import_module(f"scripts.bench.experiments.{EXPERIMENTS[experiment]}")
    found = {one.id: one for one in module.EXPERIMENTS}
    if experiment not in found:
        raise ConfigError(f"{module.__name__} has no experiment {experiment!r}; correct suites.FAMILIES")
    return found[experiment]
