"""``strategy="auto"``: measure in the running job, choose, and give the session what was chosen."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from dglx_dist.auto_options import AutoOptions, Training, read_auto_options
from dglx_dist.comm.collectives import broadcast_json, gather_json
from dglx_dist.comm.session import Session
from dglx_dist.comm.topology import Topology
from dglx_dist.data.storage.files import peak, read_size, resident
from dglx_dist.errors import ConfigError, StorageError
from dglx_dist.graph.cache import check_budget
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.planner.candidates import CACHE_SIZES, SearchSpace, choosable, enumerate_candidates, schemes_of
from dglx_dist.planner.choose import Constraints, choose
from dglx_dist.planner.dry_run import DryRunConfig, live_run
from dglx_dist.planner.model_shape import ModelShape, layers_in, shape_of_module
from dglx_dist.planner.profile import probe
from dglx_dist.planner.records import Candidate, Choice, Cluster, Outcome
from dglx_dist.planner.workload import TRAIN_MASK, Draws, check_plannable, check_train_nodes
from dglx_dist.progress import progress
from dglx_dist.records import FEATURE, EpochRecord
from dglx_dist.report.run_folder import PLAN, read_plan
from dglx_dist.report.tables import RunFacts, plan_lines, summarise
from dglx_dist.strategies.base import AUTO, CACHE_CHOICE, STRATEGIES, strategy_of
from dglx_dist.strategies.data_parallel import check_same_model
from dglx_dist.training import checkpoint
from dglx_dist.training.fit import TRAINED_WITH, FitResult

USUAL = "data_parallel"
"""The strategy whose fan-outs and batch size are meant by who names none."""
_DEEP = 4
"""Layers from which on nobody draws mini-batches unless fan-outs are given."""
NO_BATCHES = (
    f"nobody draws mini-batches for {_DEEP} layers and more unless fan-outs are given, so ways to train "
    "on whole graphs are compared (--fanout, --unit)"
)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What was said."""

    unit: str
    """``mini_batch``, ``full_graph`` or ``any``."""
    num_layers: int
    fanouts: Sequence[int] | None
    """Input-most first; None: nothing was said."""
    batch_size: int | None
    epoch: int
    """That is counted."""
    dry_batches: int
    """Of each rank; 0: all of the epoch."""

    @property
    def is_deep(self) -> bool:
        """Whether there are no mini-batches though nobody asked for whole graphs alone."""
        return self.unit != "full_graph" and self.fanouts is None and self.num_layers >= _DEEP


def steps_of(draws: Draws | None, seeds: int, ranks: int) -> int:
    """Return the steps of an epoch on ``seeds`` training nodes of all ranks; 0 without mini-batches."""
    if draws is None:
        return 0
    of_rank = -(-seeds // ranks)
    return -(-of_rank // draws.batch_size)


def draws_of(asked: Asked) -> Draws | None:
    """Return the mini-batches that are counted; None: there are none."""
    if asked.unit == "full_graph" or asked.is_deep:
        return None
    fanouts = default_fanouts(USUAL, asked.num_layers) if asked.fanouts is None else tuple(asked.fanouts)
    size = asked.batch_size or default_batch_size(USUAL)
    assert size is not None
    return Draws(fanouts=fanouts, batch_size=size, epoch=asked.epoch, most_batches=asked.dry_batches or None)


def default_fanouts(strategy: str, num_layers: int) -> tuple[int, ...]:
    """Return one fan-out per layer for who names none: 25 and 10s, or all where steps take whole graphs.

    Raises:
        UnknownNameError: there is no such strategy.
    """
    if STRATEGIES.get(strategy).traits.unit == "full_graph":
        return (-1,) * num_layers
    return (25, *[10] * (num_layers - 1))


def default_batch_size(strategy: str) -> int | None:
    """Return the targets per rank and step for who names none: 512; None where steps take whole graphs.

    Raises:
        UnknownNameError: there is no such strategy.
    """
    return None if STRATEGIES.get(strategy).traits.unit == "full_graph" else 512


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
    CACHE_CHOICE.set(g.session, {"policy": policy, "alpha": alpha})


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


def choose_in_job(model: nn.Module, g: DistGraph, told: Training) -> Choice:
    """Choose the strategy that trains ``model`` on ``g`` fastest, and let the session have it. Collective.

    Before the first loader is made and before the model is wrapped. Counts some batches and plans, times the
    model on them, and the links for two seconds; rank 0 says what is chosen and why.

    Args:
        model: As it will be wrapped; not changed.
        g: Of a session that was opened with ``auto``.
        told: Fan-outs, batch size and the like.

    Returns:
        All candidates with what an epoch of each is expected to take, on every rank the same.

    Raises:
        ConfigError: the session has a strategy, the graph has several types, or nothing fits.
        PeerError: a rank is dead or silent.
    """
    session = g.session
    if session.strategy != AUTO:
        raise ConfigError(
            f"the session was opened with strategy {session.strategy!r}, so there is nothing to choose; "
            f"open it with strategy={AUTO!r}"
        )
    options = read_auto_options(session.options)
    _check_alike(told, options, session)
    check_same_model(model, session, "a model")
    check_plannable(g.dataset.manifest, str(g.dataset.folder))
    with progress("choosing a strategy", 1, enabled=session.topology.rank == 0) as advance:
        # What follows must draw what it would have drawn under the chosen strategy.
        with torch.random.fork_rng(devices=[]):
            choice, draws = _chosen(model, g, told, options, advance.show)
        advance(1)
        for line in plan_lines(choice):
            advance.say(line)
    taken = choice.taken
    if taken is None:
        raise ConfigError(f"{choice.why[0]}, under auto the option memory=")
    _adopt(g, taken.candidate, draws)
    return choice


def _adopt(g: DistGraph, taken: Candidate, draws: Draws | None) -> None:
    """Give the session what was chosen; collective."""
    g.session.adopt(taken.strategy, taken.options)
    if taken.cache is not None and draws is not None:
        fill_cache(g, taken.cache, taken.cache_alpha, draws.fanouts, draws.batch_size)


def _chosen(
    model: nn.Module, g: DistGraph, told: Training, options: AutoOptions, tell: Callable[[str], None]
) -> tuple[Choice, Draws | None]:
    session = g.session
    shape = _shape(model, g, told)
    tell("probing the links")
    cluster = _cluster(session, options)
    asked = Asked(
        unit=options.unit,
        num_layers=len(shape.layers),
        fanouts=told.fanouts,
        batch_size=told.batch_size,
        epoch=min(1, told.epochs - 1),
        dry_batches=options.dry_batches,
    )
    draws = draws_of(asked)
    unit = "full_graph" if draws is None else options.unit
    constraints = Constraints(
        unit=unit,  # type: ignore[arg-type]  # checked by AutoOptions
        estimators=options.allow_estimators,
        full_graph_epochs=options.full_graph_epochs,
    )
    candidates = _candidates(g, shape, cluster, draws, constraints, allow_cache=options.caches)
    if told.own_loop:
        candidates = tuple(one for one in candidates if one.moves != "intervals")
    known = live_run(
        g,
        model,
        shape,
        DryRunConfig(
            cluster=cluster,
            draws=draws,
            schemes=schemes_of(candidates),
            caches=tuple(dict.fromkeys(one.cache_alpha for one in candidates if one.cache)),
            partitioned=not g.structure().is_whole and cluster.servers > 1,
            program_bytes=resident(),
            epoch=asked.epoch,
            assumptions=(*((NO_BATCHES,) if asked.is_deep else ()), *_of_model(shape)),
        ),
        tell,
    )
    return _agreed(choose(candidates, known, constraints), session), draws


def _check_alike(told: Training, options: AutoOptions, session: Session) -> None:
    """Raise ConfigError where ranks, told differently, would count different things; collective."""
    mine: dict[str, Any] = {**asdict(told), **asdict(options)}
    for rank, theirs in enumerate(gather_json(mine, session)):
        assert isinstance(theirs, dict)
        # As JSON has it: lists for tuples.
        for name, value in json.loads(json.dumps(mine)).items():
            if theirs[name] != value:
                raise ConfigError(
                    f"rank {session.topology.rank} has {name}={value} where rank {rank} has {theirs[name]}; "
                    "strategy 'auto' must be told the same on every rank"
                )


def _agreed(choice: Choice, session: Session) -> Choice:
    """Return ``choice`` with what rank 0 takes: figures are the same, but a rounding would part the ranks."""
    mine = "" if choice.taken is None else choice.taken.candidate.name
    name = broadcast_json(mine, session)
    names = [one.candidate.name for one in choice.predictions]
    return replace(choice, picked=names.index(str(name)) if name else -1)


def _candidates(
    g: DistGraph,
    shape: ModelShape,
    cluster: Cluster,
    draws: Draws | None,
    constraints: Constraints,
    *,
    allow_cache: bool,
) -> tuple[Candidate, ...]:
    """Return what may be chosen, and not more: each is counted."""
    marked = g.ndata[TRAIN_MASK]
    count = marked.kvstore.count_nonzero(marked.kvstore_key)
    check_train_nodes(count, str(g.dataset.folder))
    caches = CACHE_SIZES if allow_cache and g.structure().is_whole else ()
    frame = SearchSpace(
        ranks=cluster.ranks,
        servers=cluster.servers,
        num_layers=len(shape.layers),
        steps=steps_of(draws, count, cluster.ranks),
        caches=caches,
    )
    return tuple(
        one
        for one in enumerate_candidates(frame)
        if (one.exact or constraints.estimators) and constraints.unit in ("any", one.unit)
    )


def _shape(model: nn.Module, g: DistGraph, told: Training) -> ModelShape:
    # A loop of one's own may take its targets from elsewhere; the last layer is then of unknown width.
    features, classes = g.ndata[FEATURE].shape[1], g.dataset.manifest.num_classes.get(g.ntypes[0], 1)
    found = layers_in(model)
    layers = told.num_layers or (len(told.fanouts) if told.fanouts else found.count) or 2
    heads = found.heads if told.kind is None else told.heads
    return shape_of_module(
        model,
        told.kind or found.kind,
        features,
        told.hidden or found.hidden,
        classes,
        layers,
        heads,
        guessed=told.kind is None,
    )


def _of_model(shape: ModelShape) -> tuple[str, ...]:
    if not shape.guessed:
        return ()
    return (f"layers sum, multiply and exchange as those of a {shape.words}, as its convolutions suggest",)


def check_even(topology: Topology) -> None:
    """Raise ConfigError unless every server has as many ranks, which all that is counted here supposes."""
    found = sorted({len(topology.ranks_of_server(server)) for server in range(topology.num_servers)})
    if len(found) > 1:
        raise ConfigError(
            f"servers have {' or '.join(map(str, found))} ranks, and strategy 'auto' counts for as many on "
            "each; start as many on each, or name a strategy"
        )


def _cluster(session: Session, options: AutoOptions) -> Cluster:
    """Return the servers of the running job; collective."""
    topology = session.topology
    check_even(topology)
    links = probe(session)
    beside = session.hosts.count(session.hosts[topology.rank])
    cores = len(os.sched_getaffinity(0)) / beside
    memory = read_size(options.memory) if options.memory else psutil.virtual_memory().total // beside
    told: Sequence[Any] = gather_json([cores, memory], session)
    apart = 1e12
    return Cluster(
        servers=topology.num_servers,
        ranks_per_server=len(topology.ranks_of_server(0)),
        external_bytes_per_s=apart if links is None else links.external_bytes_per_s,
        internal_bytes_per_s=apart if links is None else links.internal_bytes_per_s,
        latency_s=0.0 if links is None else links.latency_s,
        cores=min(float(one[0]) for one in told),
        memory_bytes=min(int(one[1]) for one in told),
    )


def earlier_plan(folder: Path) -> dict[str, Any] | None:
    """Return what ``plan.json`` of a run that goes on says; None: it has none, for nothing was chosen.

    Raises:
        StorageError: the file is damaged.
    """
    value = read_plan(folder)
    if value is None:
        return None
    try:
        described(value)
    except (KeyError, IndexError, TypeError) as error:
        raise StorageError(
            f"{folder / PLAN} is damaged ({type(error).__name__}: {error}); delete it, and resume again"
        ) from error
    return value


def outcome_of(counted: int, epochs: Sequence[EpochRecord], facts: RunFacts) -> Outcome:
    """Return what came out: bytes of the epoch that was counted, else of the last; the rest of the whole run.

    Args:
        counted: Number of the epoch whose bytes were foretold.
        epochs: Of the run, at least one.
        facts: Of the run.
    """
    record = next((one for one in epochs if one.epoch == counted), epochs[-1])
    seconds = summarise(facts, epochs)["epoch_seconds"]
    return Outcome(
        epoch=record.epoch,
        epoch_seconds=float(str(seconds)),
        bytes_outside=record.bytes_outside,
        bytes_inside=record.bytes_inside,
        peak_memory_bytes=facts.peak_memory_bytes,
    )


def described(value: Mapping[str, Any]) -> dict[str, object]:
    """Return what a run's summary says of a plan: prediction beside outcome, where it has one.

    Args:
        value: ``Choice.to_json()``.
    """
    taken, outcome = value["predictions"][value["picked"]], value["outcome"]
    found: dict[str, object] = {
        "chosen": taken["name"],
        "why": "; ".join(value["why"]),
        "predicted_epoch_seconds": taken["epoch_seconds"],
        "predicted_bytes_outside": taken["bytes_outside"],
        "predicted_bytes_inside": taken["bytes_inside"],
        "predicted_peak_memory_bytes": taken["memory_bytes"],
        "bytes_are_counted": taken["bytes_exact"],
    }
    if outcome is None:
        return found
    for name in ("epoch_seconds", "bytes_outside", "bytes_inside", "peak_memory_bytes"):
        found[name] = outcome[name]
    found["of_epoch"] = outcome["epoch"]
    if outcome["epoch_seconds"] > 0:
        found["predicted_by_measured"] = taken["epoch_seconds"] / outcome["epoch_seconds"]
    return found


def facts_of(session: Session, result: FitResult) -> RunFacts:
    """Return strategy, ranks, accuracy and the largest memory of any rank; every rank must call it."""
    peaks = [int(str(one)) for one in gather_json(peak(), session)]
    return RunFacts(
        strategy=session.strategy,
        ranks=session.topology.world_size,
        servers=session.topology.num_servers,
        test_accuracy=result.test_accuracy,
        val_accuracy=result.val_accuracy,
        peak_memory_bytes=max(peaks),
    )
