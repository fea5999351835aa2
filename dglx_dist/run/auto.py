"""``strategy="auto"``: measure in the running job, choose, and give the session what was chosen."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import psutil
import torch
from torch import nn

from dglx_dist.cluster.collectives import broadcast_json, gather_json
from dglx_dist.cluster.session import Session
from dglx_dist.cluster.topology import Topology
from dglx_dist.errors import ConfigError
from dglx_dist.graph import DistGraph
from dglx_dist.planner.candidates import CACHE_SIZES, Frame, enumerate_candidates, ways_of
from dglx_dist.planner.choose import Wishes, choose
from dglx_dist.planner.dry_run import DryRun
from dglx_dist.planner.graph_stats import TRAIN_MASK, check_plannable, check_train_nodes
from dglx_dist.planner.links import probe
from dglx_dist.planner.live_run import live_run
from dglx_dist.planner.model_shape import ModelShape, layers_in, shape_of_module
from dglx_dist.planner.records import Candidate, Choice, Cluster
from dglx_dist.planner.survey import Draws
from dglx_dist.progress import progress
from dglx_dist.records import FEATURE
from dglx_dist.report.plan_table import plan_lines
from dglx_dist.run.auto_options import AutoOptions, Training, read_auto_options
from dglx_dist.run.going_on import fill_cache
from dglx_dist.run.usual_draws import NO_BATCHES, Asked, draws_of, steps_of
from dglx_dist.storage.process_memory import resident
from dglx_dist.storage.sizes import read_size
from dglx_dist.strategies.data_parallel import check_same_model
from dglx_dist.strategies.registry import AUTO


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
    wishes = Wishes(
        unit=unit,  # type: ignore[arg-type]  # checked by AutoOptions
        estimators=options.allow_estimators,
        full_graph_epochs=options.full_graph_epochs,
    )
    candidates = _candidates(g, shape, cluster, draws, wishes, allow_cache=options.caches)
    if told.own_loop:
        candidates = tuple(one for one in candidates if one.moves != "intervals")
    known = live_run(
        g,
        model,
        shape,
        DryRun(
            cluster=cluster,
            draws=draws,
            ways=ways_of(candidates),
            caches=tuple(dict.fromkeys(one.cache_alpha for one in candidates if one.cache)),
            partitioned=not g.structure().is_whole and cluster.servers > 1,
            program_bytes=resident(),
            epoch=asked.epoch,
            assumptions=(*((NO_BATCHES,) if asked.is_deep else ()), *_of_model(shape)),
        ),
        tell,
    )
    return _agreed(choose(candidates, known, wishes), session), draws


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
    wishes: Wishes,
    *,
    allow_cache: bool,
) -> tuple[Candidate, ...]:
    """Return what may be chosen, and not more: each is counted."""
    marked = g.ndata[TRAIN_MASK]
    count = marked.kvstore.count_nonzero(marked.kvstore_key)
    check_train_nodes(count, str(g.dataset.folder))
    caches = CACHE_SIZES if allow_cache and g.structure().is_whole else ()
    frame = Frame(
        ranks=cluster.ranks,
        servers=cluster.servers,
        num_layers=len(shape.layers),
        steps=steps_of(draws, count, cluster.ranks),
        caches=caches,
    )
    return tuple(
        one
        for one in enumerate_candidates(frame)
        if (one.exact or wishes.estimators) and wishes.unit in ("any", one.unit)
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
