"""``strategy="auto"``: its options, the measurement in the running job, and the choice."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dglx_dist.comm.collectives import broadcast_json, check_equal, gather_json, run_on_all_ranks
from dglx_dist.comm.devices import device_memory
from dglx_dist.comm.session import Session
from dglx_dist.comm.topology import Topology
from dglx_dist.errors import ConfigError, StorageError
from dglx_dist.graph.cache import check_budget
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.memory import machine_memory, peak, read_size, resident
from dglx_dist.options import check_integer, check_ranges, read_options
from dglx_dist.planner.choose import choosable, choose
from dglx_dist.planner.measure import MeasureConfig, measure
from dglx_dist.planner.model_shape import shape_of_module
from dglx_dist.planner.profile import probe
from dglx_dist.planner.records import Choice, ChoiceOptions, Outcome
from dglx_dist.planner.workload import check_plannable
from dglx_dist.progress import progress
from dglx_dist.records import FEATURE, EpochRecord
from dglx_dist.report.run_folder import PLAN, read_plan
from dglx_dist.report.tables import plan_lines, summarise
from dglx_dist.strategies.base import (
    AUTO,
    CACHE_CHOICE,
    DEFAULT_STRATEGY,
    STRATEGIES,
    float_of,
    strategy_of,
)
from dglx_dist.strategies.cost import Candidate, Cluster, Draws
from dglx_dist.strategies.replicated import check_same_model
from dglx_dist.training import checkpoint
from dglx_dist.training.fit_config import FitResult
from dglx_dist.training.resume import TRAINED_WITH

_DEEP = 4
"""Layers from which on mini-batches are not considered without explicit fan-outs."""
_TRACED = "layers sum, multiply and exchange as in a call of the model on a few rows"
_NO_BATCHES = (
    f"mini-batches of {_DEEP} layers and more are not considered unless fan-outs are given, so ways to train "
    "on whole graphs are compared (--fanout, --unit)"
)


@dataclass(frozen=True, kw_only=True)
class AutoOptions(ChoiceOptions):
    """Options of ``auto``; ConfigError if a value cannot be honoured."""

    memory: str = ""
    """Limit of a rank, as "4GB"; empty: its share of the machine's."""
    caches: bool = True
    """Whether caches of remote rows may be chosen."""

    def __post_init__(self) -> None:
        check_ranges(self, "option {name}={value!r}")
        if self.memory:
            try:
                read_size(self.memory)
            except ConfigError as error:
                raise ConfigError(f"option memory: {error}") from None


@dataclass(frozen=True, kw_only=True)
class Training:
    """Model and batches of the training to plan for; ConfigError if a value cannot be honoured."""

    fanouts: Sequence[int] | None = None
    """Input-most first; None: the defaults."""
    batch_size: int | None = None
    epochs: int = 20
    num_layers: int = 0
    """0: the number of fan-outs, or 2."""
    kind: str | None = None
    """Of a ready-made model; None: derived from its convolutions."""
    hidden: int | None = None
    own_loop: bool = False
    """Whether the user's loop or torch's autocast takes the steps, which not every strategy supports."""

    def __post_init__(self) -> None:
        if self.fanouts is not None:
            if isinstance(self.fanouts, str) or not isinstance(self.fanouts, Sequence) or not self.fanouts:
                raise ConfigError(
                    f"fanouts={self.fanouts!r} must be a list of one whole number for each layer, input-most "
                    "first; -1: all"
                )
            # As int: JSON does not take NumPy's.
            read = [check_integer(f"fanouts[{at}]", one, least=-1) for at, one in enumerate(self.fanouts)]
            object.__setattr__(self, "fanouts", read)
        if self.batch_size is not None:
            object.__setattr__(self, "batch_size", check_integer("batch_size", self.batch_size, least=1))
        check_integer("epochs", self.epochs, least=1)
        if self.num_layers == 0:
            object.__setattr__(self, "num_layers", 2 if self.fanouts is None else len(self.fanouts))


def read_auto_options(options: Mapping[str, object]) -> AutoOptions:
    """Return the options of ``auto``; ConfigError if one is unknown, of another type, or out of range."""
    return read_options(f"strategy {AUTO!r}", AutoOptions, options)


def check_session_options(session: Session) -> None:
    """Raise ConfigError for an option that the strategy, or ``auto``, does not know."""
    if session.strategy == AUTO:
        read_auto_options(session.options)
    else:
        strategy_of(session)


def _is_deep(unit: str, num_layers: int, fanouts: Sequence[int] | None) -> bool:
    return unit != "full_graph" and fanouts is None and num_layers >= _DEEP


def batch_assumptions(unit: str, num_layers: int, fanouts: Sequence[int] | None) -> tuple[str, ...]:
    """Return a line if the depth alone excludes mini-batches."""
    return (_NO_BATCHES,) if _is_deep(unit, num_layers, fanouts) else ()


def draws_of(
    choice: ChoiceOptions,
    num_layers: int,
    fanouts: Sequence[int] | None,
    batch_size: int | None,
    *,
    epoch: int,
) -> Draws | None:
    """Return the mini-batches of ``epoch`` to count, or None; fan-outs and batch size have defaults."""
    if choice.unit == "full_graph" or _is_deep(choice.unit, num_layers, fanouts):
        return None
    if fanouts is None:
        fanouts = default_fanouts(DEFAULT_STRATEGY, num_layers)
    size = batch_size or default_batch_size(DEFAULT_STRATEGY)
    assert size is not None
    return Draws(
        fanouts=tuple(fanouts), batch_size=size, epoch=epoch, most_batches=choice.dry_batches or None
    )


def default_fanouts(strategy: str, num_layers: int) -> tuple[int, ...]:
    """Return the default fan-out of each layer: 25, then 10s; all where steps take whole graphs."""
    if STRATEGIES.get(strategy).traits.unit == "full_graph":
        return (-1,) * num_layers
    return (25, *[10] * (num_layers - 1))


def default_batch_size(strategy: str) -> int | None:
    """Return the default targets per rank and step: 512; None where steps take whole graphs."""
    return None if STRATEGIES.get(strategy).traits.unit == "full_graph" else 512


def resolve(
    model: nn.Module, g: DistGraph, training: Training, checkpoints: str | Path | None
) -> tuple[Candidate, Choice | None]:
    """Give the session the strategy of the newest checkpoint in ``checkpoints``, else choose one; collective.

    A resumed run is not planned again: another strategy may be another estimator with other steps.
    ConfigError: the checkpoint names no strategy, or none that ``auto`` chooses, or these ranks cannot run
    it. CheckpointError: it is damaged.
    """
    extra = None if checkpoints is None else checkpoint.read_extra(checkpoints)
    if extra is None:
        choice = choose_in_job(model, g, training)
        return choice.predictions[choice.picked].candidate, choice
    found = _read_checkpointed(extra.get(TRAINED_WITH), checkpoints)
    g.session.adopt(found.strategy, found.options)
    strategy_of(g.session)
    if found.cache is not None:
        fanouts = training.fanouts or default_fanouts(DEFAULT_STRATEGY, training.num_layers)
        batch_size = training.batch_size or default_batch_size(DEFAULT_STRATEGY)
        _fill_cache(g, found.cache, found.cache_alpha, fanouts, batch_size)
    with progress("choosing a strategy", 1, enabled=g.session.topology.rank == 0) as advance:
        advance(1)
        advance.say(f"resuming with {found.name}, the strategy of the checkpoint")
    return found, None


def _fill_cache(
    g: DistGraph, policy: str, alpha: float, fanouts: Sequence[int], batch_size: int | None
) -> None:
    how: dict[str, Any] = {"fanouts": list(fanouts), "batch_size": batch_size} if policy == "vip" else {}
    g.cache_rows(FEATURE, alpha=alpha, policy=policy, **how)
    CACHE_CHOICE.set(g.session, {"policy": policy, "alpha": alpha})


def _read_checkpointed(value: object, folder: str | Path | None) -> Candidate:
    """Return the strategy that a checkpoint names, if ``auto`` could have chosen it.

    Checkpoints are untrusted files: options that lead to files or addresses are not taken from them.
    """
    values: Mapping[str, Any] = value if isinstance(value, dict) else {}
    name, options, cache = values.get("name"), values.get("options"), values.get("cache")
    known = choosable().get(str(name))
    if known is None or not isinstance(options, dict) or not options.keys() <= known:
        raise ConfigError(
            f"the checkpoint in {folder} was not trained with a strategy and options that 'auto' chooses "
            f"(found: {name!r}); name the strategy that it was trained with, and its options"
        )
    found = Candidate(unit=STRATEGIES.get(str(name)).traits.unit, strategy=str(name), options=options)
    if not isinstance(cache, dict):
        return found
    policy, alpha = cache.get("policy"), cache.get("alpha")
    check_budget(policy, alpha)  # type: ignore[arg-type]  # checked there
    return replace(found, cache=policy, cache_alpha=alpha or 0.0)


def choose_in_job(model: nn.Module, g: DistGraph, training: Training) -> Choice:
    """Choose as :func:`dglx_dist.choose_strategy` does, and give the strategy to the session; collective.

    Rank 0 prints the choice and its reason.
    """
    session = g.session
    if session.strategy != AUTO:
        raise ConfigError(
            f"the session was opened with strategy {session.strategy!r}, so there is nothing to choose; "
            f"open it with strategy={AUTO!r}"
        )
    options = read_auto_options(session.options)
    remedy = "strategy 'auto' needs the same options on every rank"
    check_equal(session, "an option", {**asdict(training), **asdict(options)}, remedy)
    check_same_model(model, session)
    check_plannable(g.dataset.manifest, str(g.dataset.folder))
    with progress("choosing a strategy", 1, enabled=session.topology.rank == 0) as advance:
        # Training must draw the same random numbers as if the strategy had been named.
        device = float_of(model).device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            choice, draws = _choose(model, g, training, options, advance.show)
        advance(1)
        for line in plan_lines(choice):
            advance.say(line)
    taken = choice.taken
    if taken is None:
        raise ConfigError(f"{choice.why[0]}, under auto the option memory=")
    candidate = taken.candidate
    session.adopt(candidate.strategy, candidate.options)
    if candidate.cache is not None and draws is not None:
        _fill_cache(g, candidate.cache, candidate.cache_alpha, draws.fanouts, draws.batch_size)
    return choice


def _choose(
    model: nn.Module, g: DistGraph, training: Training, options: AutoOptions, notify: Callable[[str], None]
) -> tuple[Choice, Draws | None]:
    # A user's loop may have targets that are no labels; the width of the last layer is then unknown.
    features, classes = g.ndata[FEATURE].shape[1], g.dataset.manifest.num_classes.get(g.ntypes[0], 1)
    given: dict[str, Any] = {"kind": training.kind or "", "hidden": training.hidden or 0}
    given["guessed"] = training.kind is None
    shape = shape_of_module(model, features, classes, training.num_layers, **given)
    notify("probing the links")
    cluster = _cluster(g.session, options, float_of(model).device)
    layers, epoch = len(shape.layers), min(1, training.epochs - 1)
    draws = draws_of(options, layers, training.fanouts, training.batch_size, epoch=epoch)
    wanted = options if draws is not None else replace(options, unit="full_graph")

    def is_offered(one: Candidate) -> bool:
        own_loop = not training.own_loop or STRATEGIES.get(one.strategy).traits.own_loop
        return own_loop and (one.exact or wanted.allow_estimators) and wanted.unit in ("any", one.unit)

    requested = MeasureConfig(
        cluster=cluster,
        draws=draws,
        is_offered=is_offered,
        caches=options.caches,
        partitioned=not g.structure().is_whole and cluster.servers > 1,
        in_job=True,
        program_bytes=resident(),
        epoch=epoch,
        assumptions=(
            *batch_assumptions(options.unit, layers, training.fanouts),
            *([f"{_TRACED}: {shape.words}"] if shape.guessed else []),
        ),
    )
    known, candidates = measure(g, model, shape, requested, lambda text: notify(f"counting: {text}"))
    choice = choose(candidates, known, wanted)
    # Rounding could make ranks pick differently: the pick of rank 0 counts.
    name = broadcast_json("" if choice.taken is None else choice.taken.candidate.name, g.session)
    names = [one.candidate.name for one in choice.predictions]
    return replace(choice, picked=names.index(str(name)) if name else -1), draws


def check_equal_servers(topology: Topology) -> None:
    """Raise ConfigError unless every server has the same number of ranks."""
    found = sorted({len(topology.ranks_of_server(server)) for server in range(topology.num_servers)})
    if len(found) > 1:
        raise ConfigError(
            f"servers have {' or '.join(map(str, found))} ranks, but strategy 'auto' needs the same number "
            "on each; start as many on each, or name a strategy"
        )


def _cluster(session: Session, options: AutoOptions, device: torch.device) -> Cluster:
    topology = session.topology
    check_equal_servers(topology)
    links = probe(session)
    ranks_of_host = session.hosts.count(session.hosts[topology.rank])
    cores = len(os.sched_getaffinity(0)) / ranks_of_host
    memory = read_size(options.memory) if options.memory else machine_memory()[0] // ranks_of_host
    on_device = device_memory(device) // session.ranks_of_device
    resources = gather_json([cores, memory, on_device], session)
    return Cluster(
        servers=topology.num_servers,
        ranks_per_server=len(topology.ranks_of_server(0)),
        external_bytes_per_s=links.external_bytes_per_s,
        internal_bytes_per_s=links.internal_bytes_per_s,
        latency_s=links.latency_s,
        link_spread=links.spread,
        cores=min(of_rank[0] for of_rank in resources),
        memory_bytes=min(of_rank[1] for of_rank in resources),
        device_memory_bytes=min(of_rank[2] for of_rank in resources),
    )


def plan_of_run(folder: Path, session: Session) -> dict[str, Any] | None:
    """Return ``plan.json`` of the run in ``folder`` on rank 0; None: its strategy was named. Collective."""

    def read() -> dict[str, Any] | None:
        value = read_plan(folder) if session.topology.rank == 0 else None
        try:
            if value is not None:
                plan_summary(value)
        except (KeyError, IndexError, TypeError) as error:
            raise StorageError(
                f"{folder / PLAN} is damaged ({type(error).__name__}: {error}); delete it, and resume again"
            ) from error
        return value

    return broadcast_json(run_on_all_ranks(session, read, StorageError), session)


def outcome_of(counted: int, epochs: Sequence[EpochRecord], facts: Mapping[str, Any]) -> Outcome:
    """Return the measured cost: bytes of epoch ``counted``, else of the last; the rest of the whole run."""
    record = next((one for one in epochs if one.epoch == counted), epochs[-1])
    seconds = summarise(facts, epochs)["epoch_seconds"]
    return Outcome(
        epoch=record.epoch,
        epoch_seconds=float(str(seconds)),
        bytes_outside=record.bytes_outside,
        bytes_inside=record.bytes_inside,
        peak_memory_bytes=facts["peak_memory_bytes"],
    )


def plan_summary(value: Mapping[str, Any]) -> dict[str, object]:
    """Return the entry of ``summary.json`` for ``Choice.to_json()``: prediction, and outcome if any."""
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


def facts_of(model: nn.Module, session: Session, result: FitResult) -> dict[str, Any]:
    """Return strategy, ranks, exact accuracies, the model's device, most memory of any rank; collective."""
    device = float_of(model).device
    on_gpu = device.type == "cuda"
    held = torch.cuda.max_memory_reserved(device) if on_gpu else None
    peaks = gather_json([peak(), held], session)
    on_device = [of_rank for _, of_rank in peaks if of_rank is not None]
    accuracies = {"val_accuracy": result.val_accuracy, "test_accuracy": result.test_accuracy}
    return {
        "strategy": session.strategy,
        "precision": result.precision,
        "ranks": session.topology.world_size,
        "servers": session.topology.num_servers,
        "task": result.task,
        **(accuracies if result.accuracy else {}),
        **result.metrics,
        **({} if result.best_epoch is None else {"best_epoch": result.best_epoch}),
        **({"stopped_early": True} if result.stopped_early else {}),
        "peak_memory_bytes": max(in_all for in_all, _ in peaks),
        "rank_memory_bytes": [in_all for in_all, _ in peaks],
        "device": f"cuda ({torch.cuda.get_device_name(device)})" if on_gpu else str(device),
        "peak_device_memory_bytes": max(on_device, default=None),
    }
