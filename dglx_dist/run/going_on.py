"""``strategy="auto"`` where a run goes on: what its checkpoint was trained with is not chosen anew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dglx_dist.errors import ConfigError
from dglx_dist.graph import DistGraph
from dglx_dist.graph.caching import check_budget
from dglx_dist.planner.candidates import choosable
from dglx_dist.progress import progress
from dglx_dist.records import FEATURE
from dglx_dist.run.session import default_batch_size, default_fanouts
from dglx_dist.run.usual_draws import USUAL
from dglx_dist.strategies.opening import strategy_of
from dglx_dist.strategies.registry import AUTO
from dglx_dist.training import checkpoint
from dglx_dist.training.fit import TRAINED_WITH


@dataclass(frozen=True, kw_only=True)
class Earlier:
    """What a checkpoint was trained with."""

    strategy: str
    options: Mapping[str, Any]
    cache: str | None = None
    """Policy of the cache that ``auto`` chose."""
    cache_alpha: float = 0.0


def adopt_earlier(
    g: DistGraph, folder: str | Path, fanouts: Sequence[int] | None, batch_size: int | None
) -> Earlier | None:
    """Let the session go on with what the newest checkpoint in ``folder`` was trained with. Collective.

    Another strategy may be another estimator, and have another number of steps.

    Args:
        g: Of a session that was opened with ``auto``.
        folder: Of checkpoints.
        fanouts: Of the batches that are trained on; None: the usual ones of two layers.
        batch_size: The same.

    Returns:
        None: there is no checkpoint, and one may choose.

    Raises:
        ConfigError: the checkpoint does not say, or says what ``auto`` does not choose; or these ranks cannot
            have the strategy.
        CheckpointError: it is damaged.
        PeerError: a rank is dead or silent.
    """
    extra = checkpoint.read_extra(folder)
    if extra is None:
        return None
    found = _checked(extra.get(TRAINED_WITH), folder)
    g.session.adopt(found.strategy, found.options)
    strategy_of(g.session)
    if found.cache is not None:
        fanouts = default_fanouts(USUAL, 2) if fanouts is None else fanouts
        fill_cache(g, found.cache, found.cache_alpha, fanouts, batch_size or default_batch_size(USUAL))
    name = " ".join([found.strategy, *(f"{option}={value}" for option, value in found.options.items())])
    with progress("choosing a strategy", 1, enabled=g.session.topology.rank == 0) as advance:
        advance(1)
        advance.say(f"going on with {name}, which the checkpoint was trained with")
    return found


def fill_cache(
    g: DistGraph, policy: str, alpha: float, fanouts: Sequence[int], batch_size: int | None
) -> None:
    """Fill the cache that was chosen, and note it for checkpoints; collective."""
    g.cache_rows(FEATURE, alpha=alpha, policy=policy, fanouts=list(fanouts), batch_size=batch_size)
    g.session.attached[AUTO] = {"policy": policy, "alpha": alpha}


def _checked(told: object, folder: str | Path) -> Earlier:
    """Return what a checkpoint tells of its strategy, as far as ``auto`` could have chosen it.

    A checkpoint is read like any file that somebody else may have written: options that lead to files or
    addresses are not taken from it.
    """
    values: Mapping[str, Any] = told if isinstance(told, dict) else {}
    name, options, cache = values.get("name"), values.get("options"), values.get("cache")
    known = choosable().get(str(name))
    if known is None or not isinstance(options, dict) or not options.keys() <= known:
        raise ConfigError(
            f"the checkpoint in {folder} does not say that it was trained with what strategy 'auto' chooses "
            f"(found: {name!r}); name the strategy that it was trained with, and its options"
        )
    if not isinstance(cache, dict):
        return Earlier(strategy=str(name), options=options)
    policy, alpha = cache.get("policy"), cache.get("alpha")
    check_budget(policy, alpha)  # type: ignore[arg-type]  # which is what is checked
    return Earlier(strategy=str(name), options=options, cache=policy, cache_alpha=alpha or 0.0)
