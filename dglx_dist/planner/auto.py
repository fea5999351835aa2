"""``strategy="auto"``: its options, the trials in the running job, and the choice."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dglx_dist.comm.collectives import broadcast_json, check_equal, gather_json, run_on_all_ranks
from dglx_dist.comm.devices import get_device_memory
from dglx_dist.comm.session import Session
from dglx_dist.comm.topology import Topology
from dglx_dist.errors import ConfigError
from dglx_dist.graph.cache import TRAIN_MASK, check_budget
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.graph.embedding import DistEmbedding
from dglx_dist.graph.split import read_marked_ids
from dglx_dist.layers.base import LayerWidths
from dglx_dist.memory import machine_memory, read_size, resident_bytes
from dglx_dist.options import check_integer, check_ranges, read_options
from dglx_dist.planner.choose import choose, find_bar, list_choosable, predict
from dglx_dist.planner.costs.base import TypedFeatures
from dglx_dist.planner.measure import CountConfig, count, probe, sample_blocks, time_step
from dglx_dist.planner.model_shape import describe_relational, infer_shape, measure_parameters
from dglx_dist.planner.records import Choice, ChoiceOptions, Cluster, Draws, ModelShape
from dglx_dist.planner.trials import LinkTrial, TrialConfig, fill_cache, leave_unchanged, run_trials
from dglx_dist.planner.workload import check_choosable
from dglx_dist.progress import progress
from dglx_dist.records import FEATURE
from dglx_dist.registry import AUTO
from dglx_dist.strategies.base import (
    CACHE_CHOICE,
    DEFAULT_STRATEGY,
    STRATEGIES,
    find_float_parameter,
    get_strategy,
)
from dglx_dist.strategies.candidate import Candidate
from dglx_dist.strategies.replicated import check_same_model
from dglx_dist.training import checkpoint
from dglx_dist.training.relational import EntityInputs, RelationalModel
from dglx_dist.training.resume import TRAINED_WITH

_MIN_DEEP_LAYERS = 4
"""Models with at least this many layers only consider mini-batches with explicit fan-outs."""
_CHECKED_SEEDS = 64
_NO_BATCHES = (
    f"models of {_MIN_DEEP_LAYERS} or more layers use mini-batches only with explicit fan-outs, so only "
    "training on whole graphs is compared (--fanout, --unit)"
)

_NOT_COUNTED = (
    "bytes and memory are not counted for a model of your own on several types, so candidates are compared "
    "by trials only, and no formula keeps them within the memory"
)
_EDGES_NOT_COUNTED = (
    "bytes and memory are not counted for training on edges, so candidates are compared by trials only, and "
    "no formula keeps them within the memory"
)


@dataclass(frozen=True, kw_only=True)
class AutoOptions(ChoiceOptions):
    """Options of ``auto``. ConfigError if a value is invalid."""

    memory: str = ""
    """Memory limit of a rank, like "4GB". Empty: its share of the machine's memory."""
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
    """Model and batches to plan for. Invalid values raise ConfigError."""

    fanouts: Sequence[int] | None = None
    """Fan-outs, input-most first. None: the defaults."""
    batch_size: int | None = None
    epochs: int = 20
    num_layers: int = 0
    """Number of layers. 0: one per fan-out, or 2 without fan-outs."""
    kind: str | None = None
    """Name of a ready-made model. None: derived from the model's convolutions."""
    hidden: int | None = None
    ntype: str | None = None
    """Node type to train on. None: the only one."""
    own_loop: bool = False
    """Whether steps need the user's loop or torch's autocast. Not every strategy supports that."""

    def __post_init__(self) -> None:
        # The dataclass is frozen, so fields cannot be assigned.
        if self.fanouts is not None:
            object.__setattr__(self, "fanouts", _read_fanouts(self.fanouts))
        if self.batch_size is not None:
            object.__setattr__(self, "batch_size", check_integer("batch_size", self.batch_size, least=1))
        check_integer("epochs", self.epochs, least=1)

        if self.num_layers == 0:
            num_layers = 2 if self.fanouts is None else len(self.fanouts)
            object.__setattr__(self, "num_layers", num_layers)

    @property
    def counted_epoch(self) -> int:
        """Epoch to count: epoch 1, because epoch 0 begins with empty caches. Epoch 0 if there is no other."""
        return min(1, self.epochs - 1)


def _read_fanouts(fanouts: object) -> list[int]:
    """Check ``fanouts`` and convert them to Python integers, because JSON does not accept NumPy's."""
    if isinstance(fanouts, str) or not isinstance(fanouts, Sequence) or not fanouts:
        raise ConfigError(
            f"fanouts={fanouts!r} must be a list of one whole number for each layer, input-most "
            "first, where -1 means all"
        )
    return [check_integer(f"fanouts[{index}]", size, least=-1) for index, size in enumerate(fanouts)]


def read_auto_options(options: Mapping[str, object]) -> AutoOptions:
    """Read the options for ``auto``. Unknown or invalid options raise ConfigError."""
    return read_options(f"strategy {AUTO!r}", AutoOptions, options)


def check_session_options(session: Session) -> None:
    """Raise ConfigError if the session's strategy, which may be ``auto``, does not know an option."""
    if session.strategy == AUTO:
        read_auto_options(session.options)
    else:
        get_strategy(session)


def _is_deep(unit: str, num_layers: int, fanouts: Sequence[int] | None) -> bool:
    """Return whether mini-batches are left out, because default fan-outs make them large in deep models."""
    return unit != "full_graph" and fanouts is None and num_layers >= _MIN_DEEP_LAYERS


def batch_assumptions(unit: str, num_layers: int, fanouts: Sequence[int] | None) -> tuple[str, ...]:
    """Say that mini-batches are left out, if a deep model has no given ``fanouts``. Otherwise return ()."""
    if _is_deep(unit, num_layers, fanouts):
        return (_NO_BATCHES,)
    return ()


def plan_draws(
    choice: ChoiceOptions,
    layers: int,
    fanouts: Sequence[int] | None,
    batch_size: int | None,
    *,
    epoch: int,
) -> Draws | None:
    """Return the mini-batches in ``epoch`` to count, or None if the choice has none.

    If ``fanouts`` or ``batch_size`` is None, data parallel training's default is used.
    """
    if choice.unit == "full_graph" or _is_deep(choice.unit, layers, fanouts):
        return None
    if fanouts is None:
        fanouts = default_fanouts(DEFAULT_STRATEGY, layers)
    if batch_size is None:
        batch_size = default_batch_size(DEFAULT_STRATEGY)
    assert batch_size is not None, "data parallel training has mini-batches"

    # The option 0 means all batches.
    most_batches = choice.dry_batches or None
    return Draws(fanouts=tuple(fanouts), batch_size=batch_size, epoch=epoch, most_batches=most_batches)


def default_fanouts(strategy: str, num_layers: int) -> tuple[int, ...]:
    """Return the default fan-outs: 25, then 10 for each further layer, or all if steps take whole graphs."""
    if STRATEGIES.get(strategy).traits.unit == "full_graph":
        return (-1,) * num_layers
    return (25, *[10] * (num_layers - 1))


def default_batch_size(strategy: str) -> int | None:
    """Return the default targets per rank and step: 512, or None if steps take whole graphs."""
    if STRATEGIES.get(strategy).traits.unit == "full_graph":
        return None
    return 512


def resolve(
    model: nn.Module,
    g: DistGraph,
    training: Training,
    checkpoints: str | Path | None,
    inputs: EntityInputs | None = None,
    links: LinkTrial | None = None,
) -> tuple[Candidate, Choice | None]:
    """Adopt the newest checkpoint's strategy, or choose one. Every rank must call this.

    A resumed run is not planned again, because another strategy may be another estimator with other steps.
    The result then has no choice.

    Raises:
        ConfigError: If the checkpoint names no strategy, or none that ``auto`` chooses, or these ranks cannot
            run it.
        CheckpointError: If the checkpoint is damaged.
    """
    extra = None
    if checkpoints is not None:
        extra = checkpoint.read_extra(checkpoints)
    if extra is None:
        choice = choose_in_job(model, g, training, inputs, links)
        return choice.predictions[choice.picked].candidate, choice

    candidate = _read_checkpointed(extra.get(TRAINED_WITH), checkpoints)
    g.session.adopt(candidate.strategy, candidate.options)
    get_strategy(g.session)
    if candidate.cache is not None:
        fanouts = training.fanouts or default_fanouts(DEFAULT_STRATEGY, training.num_layers)
        batch_size = training.batch_size or default_batch_size(DEFAULT_STRATEGY)
        _use_cache(g, candidate, fanouts, batch_size)

    with progress("choosing a strategy", 1, enabled=g.session.topology.rank == 0) as advance:
        advance(1)
        advance.say(f"resuming with {candidate.name}, the strategy of the checkpoint")
    return candidate, None


def _use_cache(g: DistGraph, candidate: Candidate, fanouts: Sequence[int], batch_size: int | None) -> None:
    fill_cache(g, candidate, fanouts, batch_size)
    CACHE_CHOICE.set(g.session, {"policy": candidate.cache, "alpha": candidate.cache_alpha})


def _read_checkpointed(value: object, folder: str | Path | None) -> Candidate:
    """Return the strategy that a checkpoint in ``folder`` names, if ``auto`` could have chosen it.

    Checkpoints are untrusted files, so options that lead to files or addresses are not read from them.

    Args:
        value: The checkpoint's entry for the strategy.
        folder: Where the checkpoint is, for the error message.

    Raises:
        ConfigError: If the strategy is unknown or has such options.
    """
    values: Mapping[str, Any] = value if isinstance(value, dict) else {}
    name = values.get("name")
    options = values.get("options")
    option_names = list_choosable().get(str(name))
    if option_names is None or not isinstance(options, dict) or not options.keys() <= option_names:
        raise ConfigError(
            f"the checkpoint in {folder} was not trained with a strategy and options that 'auto' chooses "
            f"(found: {name!r}). Name the strategy that it was trained with, and its options."
        )

    unit = STRATEGIES.get(str(name)).traits.unit
    candidate = Candidate(unit=unit, strategy=str(name), options=options)
    cache = values.get("cache")
    if not isinstance(cache, dict):
        return candidate
    policy = cache.get("policy")
    alpha = cache.get("alpha")
    check_budget(policy, alpha)  # type: ignore[arg-type]  # checked there
    return replace(candidate, cache=policy, cache_alpha=alpha or 0.0)


def choose_in_job(
    model: nn.Module,
    g: DistGraph,
    training: Training,
    inputs: EntityInputs | None = None,
    links: LinkTrial | None = None,
) -> Choice:
    """Choose a strategy and set it as the session's strategy. Every rank must call this.

    Rank 0 prints the choice and why it was made.

    Args:
        model: The model to train.
        g: The graph to train on.
        training: Batches and epochs.
        inputs: Input rows, for a graph with several types or for training on edges.
        links: Training on edges. None: the training is on nodes.

    Raises:
        ConfigError: If no strategy can be chosen, or the ranks have different options or models.
    """
    session = g.session
    if session.strategy != AUTO:
        raise ConfigError(
            f"the session was opened with strategy {session.strategy!r}, so there is nothing to choose. "
            f"Open it with strategy={AUTO!r}."
        )

    options = read_auto_options(session.options)
    remedy = "strategy 'auto' needs the same options on every rank"
    check_equal(session, "an option", {**asdict(training), **asdict(options)}, remedy)
    check_same_model(model, session)
    if links is None:
        check_choosable(g.dataset.manifest, str(g.dataset.folder), training.ntype)
    if g.is_homogeneous and links is None:
        inputs = None
    _check_inputs(model, g, inputs)

    with progress("choosing a strategy", 1, enabled=session.topology.rank == 0) as advance:
        with leave_unchanged(g, find_float_parameter(model).device):
            choice, draws = _choose(model, g, training, options, inputs, links, advance.show)
        advance(1)
        for line in choice.lines():
            advance.say(line)

    prediction = choice.chosen_prediction
    if prediction is None:
        raise ConfigError(f"{choice.why[0]} With auto, use the option memory=.")
    candidate = prediction.candidate
    session.adopt(candidate.strategy, candidate.options)
    if candidate.cache is not None and draws is not None:
        _use_cache(g, candidate, draws.fanouts, draws.batch_size)
    return choice


def _choose(
    model: nn.Module,
    g: DistGraph,
    training: Training,
    options: AutoOptions,
    inputs: EntityInputs | None,
    links: LinkTrial | None,
    notify: Callable[[str], None],
) -> tuple[Choice, Draws | None]:
    """Count, try and choose. Return the choice, and the mini-batches that it is for, if there are any."""
    begin = time.perf_counter()
    if links is None:
        shape = _describe_model(model, g, training, inputs)
    else:
        shape = _describe_uncounted(model, training)
    notify("probing the links")
    cluster = _probe_cluster(g.session, options, find_float_parameter(model).device)

    num_layers = len(shape.layers)
    epoch = training.counted_epoch
    draws = plan_draws(options, num_layers, training.fanouts, training.batch_size, epoch=epoch)
    constraints = _get_constraints(options, draws)

    requested = _make_count_config(g, shape, cluster, draws, training, options, links)
    counts, candidates = count(g, shape, requested, lambda text: notify(f"counting: {text}"))

    base_bytes = 0
    if shape.has_widths:
        base_bytes = counts.fixed_bytes + counts.structure_bytes + counts.own_feature_bytes
    trials = TrialConfig(
        g=g,
        model=model,
        num_layers=num_layers,
        draws=draws,
        batch_size=training.batch_size or default_batch_size(DEFAULT_STRATEGY) or 1,
        epochs=training.epochs,
        constraints=constraints,
        memory_bytes=cluster.memory_bytes,
        inputs=inputs,
        links=links,
        ntype=training.ntype or g.ntypes[0],
        base_bytes=base_bytes,
    )
    if links is None:
        _check_model(trials)
    predictions = [predict(candidate, counts) for candidate in candidates]
    predictions, finalists = run_trials(predictions, trials, notify)
    choice = choose(predictions, counts, constraints, finalists=finalists)

    # Clocks differ, but the choice must be the same on every rank.
    took_s = broadcast_json(time.perf_counter() - begin, g.session)
    return replace(choice, took_s=float(took_s)), draws


def _get_constraints(options: AutoOptions, draws: Draws | None) -> ChoiceOptions:
    # Without mini-batches, only candidates on whole graphs are left.
    return options if draws is not None else replace(options, unit="full_graph")


def _make_count_config(
    g: DistGraph,
    shape: ModelShape,
    cluster: Cluster,
    draws: Draws | None,
    training: Training,
    options: AutoOptions,
    links: LinkTrial | None,
) -> CountConfig:
    """Describe what the ranks in this job count together."""
    constraints = _get_constraints(options, draws)

    def is_offered(candidate: Candidate) -> bool:
        traits = STRATEGIES.get(candidate.strategy).traits
        if training.own_loop and not traits.own_loop:
            return False
        if links is not None and not traits.on_edges:
            return False
        return not find_bar(candidate, constraints)

    assumptions = batch_assumptions(options.unit, len(shape.layers), training.fanouts)
    if not shape.has_widths:
        assumptions = (*assumptions, _NOT_COUNTED if links is None else _EDGES_NOT_COUNTED)
    is_replicated = g.structure(g.canonical_etypes[0]).is_replicated
    return CountConfig(
        cluster=cluster,
        draws=draws,
        is_offered=is_offered,
        caches=options.caches and g.is_homogeneous and links is None,
        partitioned=not is_replicated and cluster.servers > 1,
        in_job=True,
        program_bytes=resident_bytes(),
        epoch=training.counted_epoch,
        assumptions=assumptions,
        ntype=training.ntype,
        num_edges=None if links is None else links.num_edges,
    )


def _describe_model(
    model: nn.Module, g: DistGraph, training: Training, inputs: EntityInputs | None
) -> ModelShape:
    """Describe the layers of ``model``. The widths of user models on several types are unknown."""
    # A user's loop may have targets that are no labels. The last layer's width is then unknown.
    classes = g.dataset.manifest.num_classes.get(training.ntype or g.ntypes[0], 1)
    hidden = training.hidden or 0
    if g.is_homogeneous:
        return infer_shape(
            model,
            g.ndata[FEATURE].shape[1],
            classes,
            training.num_layers,
            kind=training.kind or "",
            hidden=hidden,
            is_guessed=training.kind is None,
        )

    kind = training.kind or type(model).__name__
    if isinstance(model, RelationalModel) and inputs is not None:
        # Types without features have trainable rows.
        trained_row_bytes = 0
        for ntype, tensor in inputs.tensors.items():
            if ntype not in inputs.feature_widths:
                trained_row_bytes = max(trained_row_bytes, tensor.shape[1] * tensor.dtype.itemsize)
        features = TypedFeatures(etypes=tuple(g.canonical_etypes), widths=inputs.feature_widths)
        return describe_relational(model, features, classes, kind=kind, trained_row_bytes=trained_row_bytes)

    return _describe_uncounted(model, training)


def _describe_uncounted(model: nn.Module, training: Training) -> ModelShape:
    """Describe a ``model`` that is not counted. Its layers have no known widths."""
    return ModelShape(
        kind=training.kind or type(model).__name__,
        layers=(LayerWidths(inputs=0, outputs=0, summed=0),) * training.num_layers,
        features=0,
        hidden=training.hidden or 0,
        classes=1,
        has_widths=False,
        **measure_parameters(model),
    )


def _check_inputs(model: nn.Module, g: DistGraph, inputs: EntityInputs | None) -> None:
    """Raise ConfigError if the trials cannot pass the features to ``model``, or would train its rows."""
    if inputs is None:
        row_shape = g.ndata[FEATURE].shape[1:]
        if len(row_shape) != 1:
            raise ConfigError(
                f"node data {FEATURE!r} has rows of shape {tuple(row_shape)}, but strategy {AUTO!r} supports "
                "only one row of columns per node. Name a strategy."
            )

    for module in model.modules():
        if any(isinstance(attribute, DistEmbedding) for attribute in vars(module).values()):
            raise ConfigError(
                f"the trials of {AUTO!r} would train the model's DistEmbedding. Name a strategy."
            )


def _check_model(config: TrialConfig) -> None:
    """Train a copy of the model on a few nodes. Raise ConfigError on all ranks if a rank fails."""
    g = config.g
    ntype = config.ntype
    topology = g.session.topology
    fanouts = (2,) * config.num_layers
    if config.draws is not None:
        fanouts = config.draws.fanouts
    seeds = read_marked_ids(g.nodes[ntype].data[TRAIN_MASK], g.num_nodes(ntype))
    rank_seeds = seeds[topology.rank :: topology.world_size]
    if not len(rank_seeds):
        rank_seeds = seeds[:1]
    blocks = sample_blocks(g, rank_seeds, _CHECKED_SEEDS, fanouts, ntype)

    tensors = g.ndata[FEATURE] if config.inputs is None else config.inputs.tensors
    widths: int | dict[str, int]
    if isinstance(tensors, dict):
        widths = {name: tensor.shape[1] for name, tensor in tensors.items()}
    else:
        widths = tensors.shape[1]
    run_on_all_ranks(g.session, partial(time_step, config.model, blocks, widths, ntype), ConfigError)


def check_equal_servers(topology: Topology) -> None:
    """Raise ConfigError if servers have different numbers of ranks."""
    num_ranks = sorted({len(topology.ranks_of_server(server)) for server in range(topology.num_servers)})
    if len(num_ranks) > 1:
        raise ConfigError(
            f"servers have {' or '.join(map(str, num_ranks))} ranks, but strategy 'auto' needs the same "
            "number on each server. Start equally many, or name a strategy."
        )


def _probe_cluster(session: Session, options: AutoOptions, device: torch.device) -> Cluster:
    """Measure the links, and return the smallest resources that any rank has. Every rank must call this."""
    topology = session.topology
    check_equal_servers(topology)
    links = probe(session)

    # All ranks on a machine share its cores and its memory.
    ranks_of_host = session.hosts.count(session.hosts[topology.rank])
    cores = len(os.sched_getaffinity(0)) / ranks_of_host
    memory_bytes = machine_memory()[0] // ranks_of_host
    if options.memory:
        memory_bytes = read_size(options.memory)
    device_bytes = get_device_memory(device) // session.ranks_of_device
    resources = gather_json([cores, memory_bytes, device_bytes], session)
    all_cores, all_memory_bytes, all_device_bytes = zip(*resources, strict=True)
    return Cluster(
        servers=topology.num_servers,
        ranks_per_server=len(topology.ranks_of_server(0)),
        external_bytes_per_s=links.external_bytes_per_s,
        internal_bytes_per_s=links.internal_bytes_per_s,
        cores=min(all_cores),
        memory_bytes=min(all_memory_bytes),
        device_memory_bytes=min(all_device_bytes),
    )
