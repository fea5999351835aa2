"""One rank in ``dglx train``: open the dataset, train, evaluate, write the run folder."""

from __future__ import annotations

import hashlib
import inspect
import math
import os
import platform
import runpy
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import dgl
import torch
from torch import Tensor, nn

import dglx_dist
from dglx_dist.api import fit, init
from dglx_dist.cli.common import list_possible_labels, suggest_training_command
from dglx_dist.comm.collectives import check_equal, run_on_all_ranks
from dglx_dist.comm.session import Session
from dglx_dist.errors import ConfigError, StorageError
from dglx_dist.graph.cache import LOOK_AHEAD
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.graph.embedding import DistEmbedding
from dglx_dist.graph.optim import SparseAdam, SparseOptimizer
from dglx_dist.layers.tracer import preserve_state, random_block
from dglx_dist.memory import machine_memory
from dglx_dist.options import format_location, select_common_fields
from dglx_dist.planner.auto import Training, default_batch_size, default_fanouts, resolve
from dglx_dist.planner.trials import LinkTrial
from dglx_dist.planner.workload import check_choosable
from dglx_dist.progress import say
from dglx_dist.records import FEATURE, LABEL, SPLITS, EdgeType, EpochRecord
from dglx_dist.registry import AUTO
from dglx_dist.report import run_folder
from dglx_dist.report.outcome import build_outcome, collect_facts, read_run_plan, summarize_plan
from dglx_dist.report.run_folder import PICTURE, SUMMARY, append_epoch, read_epochs, start_run, write_run
from dglx_dist.report.run_store import RunStore
from dglx_dist.report.tables import format_run_title, plural, spread, summarise
from dglx_dist.strategies.base import WrappedModel, find_float_parameter, get_strategy
from dglx_dist.training.checkpoint import read_extra
from dglx_dist.training.config import (
    AUTO_TASK,
    CLASSIFICATION,
    LINK,
    MULTILABEL,
    NO_ENCODER,
    OWN_ARGUMENTS,
    REGRESSION,
    TrainConfig,
    collect_configuration,
    list_metrics,
)
from dglx_dist.training.export import check_target, write_edges, write_embeddings, write_relations
from dglx_dist.training.fit_config import Callback, FitConfig, FitResult, check_loop, needs_own_loop
from dglx_dist.training.inference import find_labelled_type, flatten, layerwise_inference
from dglx_dist.training.link import (
    DECODERS,
    PAIR_LOSSES,
    LinkEvaluation,
    LinkModel,
    compute_rows,
    count_marked,
    link_loader,
    link_targets,
    split_edges,
)
from dglx_dist.training.model_kinds import RELATIONAL_KINDS, WEIGHTED, list_kinds
from dglx_dist.training.models import build_model
from dglx_dist.training.relational import EntityInputs, build_relational
from dglx_dist.training.resume import check_same, resolve_resume
from dglx_dist.training.tasks import (
    LinkPrediction,
    read_task,
    to_predictions,
    to_probabilities,
    training_nodes,
)
from dglx_dist.training.temporal import TemporalLinks
from dglx_dist.training.tracing import check_trace, hide_credentials

CHECKPOINTS = "checkpoints"
"""Checkpoint folder inside a run folder."""
# Column names in written results.
PREDICTION = "prediction"
EMBEDDING = "embedding"
SCORES = "scores"


def _resolve_auto(
    plan: TrainConfig, g: DistGraph, target: Target, module: nn.Module, inputs: EntityInputs | None
) -> tuple[TrainConfig, Any]:
    """Choose a strategy for ``auto``, or resume with the checkpoint's. Every rank must call this.

    Return the plan with the session's strategy, and ``Choice.to_json()`` if there was a choice.
    """
    if plan.strategy != AUTO:
        return plan, None

    assert not isinstance(target, TemporalLinks), "the configuration refuses auto for links over time"
    ntype = None
    links = None
    if isinstance(target, str):
        ntype = target
    else:
        links = LinkTrial(
            targets=target.targets,
            task=_make_link_task(plan, inputs),
            negatives=plan.negatives,
            has_encoder=plan.model != NO_ENCODER,
            num_edges=count_marked(g, target.targets, SPLITS[0]),
        )
    training = Training(
        num_layers=plan.layers,
        kind=None if plan.model_file else plan.model,
        ntype=ntype,
        own_loop=needs_own_loop(plan) is not None,
        **select_common_fields(plan, Training),
    )
    checkpoints = _locate_checkpoints(plan) if plan.resume else None
    candidate, choice = resolve(module, g, training, checkpoints, inputs, links)
    # A resumed run keeps the choice that it has written before.
    choice_json = read_run_plan(RunStore(plan.out).folder, g.session) if choice is None else choice.to_json()

    plan = replace(plan, strategy=candidate.strategy, strategy_options=dict(candidate.options))
    if candidate.cache is not None:
        plan = replace(plan, cache=candidate.cache, cache_alpha=candidate.cache_alpha)
    if default_batch_size(candidate.strategy) is None:
        # Steps take the whole graph. These options were for the mini-batches in the comparison. Batches with
        # edges exist under every strategy.
        plan = replace(plan, fanouts=None, batch_size=None if links is None else plan.batch_size)
    return plan, choice_json


Built: TypeAlias = tuple[nn.Module, EntityInputs | None, SparseOptimizer | None]
"""Model, its inputs (None: the only node type's features), and the optimizer for its trainable rows."""


def build(plan: TrainConfig, g: DistGraph, ntype: str | None, width: int) -> Built:
    """Build a model with ``width`` result columns for ``ntype``, or for all types if it is None. Collective.

    Nodes without features get trainable rows.
    """
    inputs, sparse = _build_inputs(plan, g)
    if plan.model in RELATIONAL_KINDS:
        assert inputs is not None
        widths = inputs.feature_widths
        if plan.embeddings not in (None, plan.hidden):
            widths |= {name: plan.embeddings for name in g.ntypes if name not in widths}
        out_types = None if ntype is None else [ntype]
        relational = build_relational(plan, g, widths, width, out_types, dropout=plan.dropout)
        return relational, inputs, sparse

    in_dim = plan.embeddings if inputs else g.nodes[g.ntypes[0]].data[FEATURE].shape[1]
    assert in_dim is not None, "the configuration checks it"
    sizes = (in_dim, plan.hidden, width, plan.layers, plan.dropout, plan.heads)
    if plan.model_file is not None:
        arguments = dict(zip(OWN_ARGUMENTS, (*sizes, g), strict=True))
        module = run_on_all_ranks(g.session, partial(_load_own_model, plan, arguments), ConfigError)
        check_equal(g.session, f"the content of --model-file {plan.model_file}", plan.model_sha256)
        return module, inputs, sparse

    options: dict[str, Any] = {"teleport": plan.teleport, "recompute": plan.recompute, **plan.between}
    model: Any = build_model(plan.model, *sizes, g, **options)
    model.edge_weight = plan.edge_weight
    return model, inputs, sparse


def _load_own_model(plan: TrainConfig, arguments: Mapping[str, Any]) -> nn.Module:
    """Load the model from ``--model-file`` and test it on small blocks. Its errors become ConfigError."""
    path, _, name = str(plan.model_file).rpartition(":")
    if hashlib.sha256(Path(path).read_bytes()).hexdigest() != plan.model_sha256:
        raise ConfigError(f"{path} differs from the file at the start of the run. Start it again.")

    try:
        model = _call_own_model(path, name, arguments)
        _try_own_model(model, plan, arguments)
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, ConfigError):
            reason = str(error)
        # The user looks for the last line in the file that ran, not for a line in torch.
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == path]
        if lines:
            reason = f"line {lines[-1]}: {reason}"
        raise ConfigError(
            f"--model-file {plan.model_file}: {reason}. It is called with those of "
            f"{', '.join(arguments)} that it names, and its forward with {plan.layers} blocks "
            "and h (docs/guides/own_model.md)."
        ) from error

    needs_layers = plan.predictions or plan.save_embeddings or plan.task == LINK
    if needs_layers and not hasattr(model, "inference_layers"):
        raise ConfigError(
            f"{plan.model} has no inference_layers() (dglx_dist.training.models), but "
            "--predictions, --save-embeddings and --task link need it. Add it, or leave these "
            "options out."
        )
    return model


def _call_own_model(path: str, name: str, arguments: Mapping[str, Any]) -> nn.Module:
    """Call ``name`` in the file ``path``, a function or class, with the ``arguments`` that it names."""
    make = runpy.run_path(path, run_name="model_file").get(name)
    if make is None:
        raise ConfigError(f"there is no {name!r} in it")

    parameters = inspect.signature(make).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    model = make(**{key: arguments[key] for key in arguments if takes_all or key in parameters})
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{name} returns {type(model).__name__}, not an nn.Module")
    return model


def _try_own_model(model: nn.Module, plan: TrainConfig, arguments: Mapping[str, Any]) -> None:
    """Raise ConfigError unless ``model`` returns a row of scores for each target.

    It is tried on random blocks with 2 targets.
    """
    # The last block has 2 targets. Each block before it has 2 nodes more.
    num_nodes = range(2 * plan.layers + 2, 0, -2)
    blocks = []
    for num_inputs, num_outputs in pairwise(num_nodes):
        block = random_block(num_outputs, num_inputs, 3 * num_outputs, torch.Generator())
        if plan.edge_weight:
            g = arguments["graph"]
            column = g.edges[g.canonical_etypes[0]].data[plan.edge_weight]
            weights_shape = (block.num_edges(), *column.shape[1:])
            block.edata[plan.edge_weight] = torch.ones(weights_shape, dtype=column.dtype)
        blocks.append(block)

    dtype = find_float_parameter(model).dtype
    features = torch.zeros(num_nodes[0], arguments["in_dim"], dtype=dtype)
    with preserve_state(model, training=False), torch.random.fork_rng(devices=[]), torch.no_grad():
        scores = model(blocks, features)
    shape = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
    if shape != (2, arguments["classes"]):
        raise ConfigError(f"for 2 targets of {arguments['classes']} classes it returns {shape}")


def _build_inputs(
    plan: TrainConfig, g: DistGraph, scale: float = 1.0
) -> tuple[EntityInputs | None, SparseOptimizer | None]:
    """Build the inputs (None: the only type's features) and the optimizer for trainable rows."""
    embeddings = {}
    for name in g.ntypes:
        if plan.model != NO_ENCODER and FEATURE in g.nodes[name].data:
            continue
        width = plan.embeddings or plan.hidden
        policy = g.get_node_partition_policy(name)
        options: dict[str, Any] = {"part_policy": policy, "graph": g, "scale": scale}
        embeddings[name] = DistEmbedding(g.num_nodes(name), width, f"{name}-rows", **options)

    is_relational = plan.model in RELATIONAL_KINDS or plan.model == NO_ENCODER
    if not is_relational and not embeddings:
        return None, None
    inputs = EntityInputs(g, embeddings=embeddings, as_tensor=not is_relational)
    optimizer = SparseAdam([*embeddings.values()], lr=plan.lr) if embeddings else None
    return inputs, optimizer


def _choose_decoder(plan: TrainConfig, targets: Sequence[EdgeType]) -> str:
    if plan.decoder:
        return plan.decoder
    # A dot product gives the same score for each edge type.
    return "distmult" if len(targets) > 1 else "dot"


def _build_link(plan: TrainConfig, g: DistGraph, targets: Sequence[EdgeType]) -> Built:
    """Build an encoder, unless ``plan`` has none, with a decoder that scores edges. Collective."""
    decoder_type = DECODERS[_choose_decoder(plan, targets)]
    etypes = g.canonical_etypes
    if plan.model != NO_ENCODER:
        encoder, inputs, sparse = build(plan, g, None, plan.hidden)
        return LinkModel(encoder, decoder_type(len(etypes), plan.hidden), etypes), inputs, sparse

    assert plan.embeddings is not None, "the configuration checks it"
    module = LinkModel(None, decoder_type(len(etypes), plan.embeddings), etypes)
    inputs, sparse = _build_inputs(plan, g, module.decoder.row_scale)
    return module, inputs, sparse


def _check_outputs(plan: TrainConfig, session: Session) -> None:
    """Raise an error on all ranks if a result folder or file cannot be written."""

    def check() -> None:
        for name in (plan.predictions, plan.save_embeddings):
            if name is not None and session.topology.rank == 0:
                check_target(Path(name), overwrite=True)

    run_on_all_ranks(session, check)
    if plan.trace is not None:
        check_trace(Path(plan.trace).absolute(), session)


def _write_outputs(
    plan: TrainConfig, wrapped: WrappedModel, inputs: EntityInputs | None, g: DistGraph, target: Target
) -> None:
    """Write predictions and embeddings to the folders in ``plan``, if any. Every rank must call this."""
    if plan.predictions is None and plan.save_embeddings is None:
        return
    if isinstance(target, LinkEvaluation):
        _write_link_outputs(plan, wrapped, inputs, g, target)
        return

    assert isinstance(target, str), "links over time have no outputs"
    module = wrapped.whole()
    *hidden, last = module.inference_layers()  # type: ignore[operator]  # all models of build() have this method
    options: dict[str, Any] = {"edge_feats": list_edge_columns(plan)}
    if inputs is not None:
        options["inputs"] = inputs.tensors

    if plan.save_embeddings is not None:
        embeddings = layerwise_inference(module, g, layers=hidden, **options)
        tensors = list(flatten(embeddings).values())
        # If a layer passes on a tuple with rows, the last ones are its own.
        rows = embeddings if len(g.ntypes) > 1 else tensors[-1]
        write_embeddings(rows, g, plan.save_embeddings, name=EMBEDDING, overwrite=True)
        for tensor in tensors:
            tensor.delete()

    if plan.predictions is not None:
        predict = _make_predictor(plan, last)
        results = layerwise_inference(module, g, layers=[*hidden, predict], ntypes=[target], **options)
        tensors = list(flatten(results).values())
        columns: dict[str, Any] = {}
        if plan.scores:
            columns["more"] = {SCORES: tensors[1]}
        if plan.task == CLASSIFICATION:
            columns["classes"] = g.dataset.manifest.class_names.get(target, ())
        write_embeddings(tensors[0], g, plan.predictions, name=PREDICTION, overwrite=True, **columns)
        for tensor in tensors:
            tensor.delete()


def _make_predictor(plan: TrainConfig, last: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return the layer ``last`` with predictions, and with ``--scores`` probabilities, as its results."""

    def interpret(scores: Tensor) -> tuple[Tensor, ...]:
        predictions = to_predictions(plan.task, scores)
        if not plan.scores:
            return (predictions,)
        return predictions, to_probabilities(plan.task, scores)

    def predict(block: Any, h: Any) -> Any:
        scores = last(block, h)
        # Relational models return a dictionary even for one node type.
        if isinstance(scores, dict):
            return {name: interpret(rows) for name, rows in scores.items()}
        return interpret(scores)

    return predict


def _write_link_outputs(
    plan: TrainConfig,
    wrapped: WrappedModel,
    inputs: EntityInputs | None,
    g: DistGraph,
    target: LinkEvaluation,
) -> None:
    with compute_rows(wrapped, g, inputs) as rows:
        if plan.save_embeddings is not None:
            tables = rows if len(rows) > 1 else rows[g.ntypes[0]]
            write_embeddings(tables, g, plan.save_embeddings, name=EMBEDDING, overwrite=True)
            write_relations(wrapped.whole().decoder, g, plan.save_embeddings)  # type: ignore[arg-type]  # models of links have a decoder
        if plan.predictions is not None:
            edges = target.test_edges(wrapped, rows)
            write_edges(edges, g, plan.predictions, scores=plan.scores, overwrite=True)


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A run's results, equal on every rank except for ``rank``."""

    rank: int
    epochs: tuple[EpochRecord, ...]
    """All epochs' records, including those before a resume."""
    summary: Mapping[str, object]


def train_dataset(plan: TrainConfig) -> Trained:
    """Train, evaluate and write the run folder. Every rank that torchrun started must call it."""
    run = RunStore(plan.out)
    folder = run.folder
    options: dict[str, Any] = dict(plan.strategy_options)
    joining: dict[str, Any] = {"timeout": plan.timeout_s, "seed": plan.seed, "device": plan.device}
    with init(plan.strategy, **joining, **options) as session:
        plan = resolve_resume(plan, _locate_checkpoints(plan), session)
        run_on_all_ranks(session, lambda: run.pull() if session.is_first_on_machine else None)
        g = DistGraph(plan.data, structure=plan.structure, verify=plan.verify, session=session)
        plan, target, built, notes = _prepare(plan, g)
        module, inputs, _ = built
        module.to(session.device)
        plan, choice = _resolve_auto(plan, g, target, module, inputs)
        plan = fill_defaults(plan)

        # Training may take days, so these checks come before it.
        _check_cache(plan, session)
        check_loop(plan, get_strategy(session).traits, session.strategy)
        _check_outputs(plan, session)
        is_writer = session.topology.rank == 0
        config = build_run_config(plan, g, session)
        facts = _configuration(plan, g)
        earlier_epochs = read_epochs(folder) if plan.resume else None

        def start() -> None:
            # This runs after the checkpoint is loaded, so that a damaged one does not cost earlier results.
            if is_writer:
                start_run(folder, config, earlier_epochs, plan=choice)
                run.push()
                _announce(plan, g, target)

        def append(record: EpochRecord) -> None:
            if is_writer:
                append_epoch(folder, record)
                _push_or_warn(run)

        wrapped, result = _fit(plan, g, target, built, facts, start, append, folder)

        # A resumed run repeats the epochs after its checkpoint.
        kept = [record for record in earlier_epochs or () if record.epoch < result.first_epoch]
        epochs = (*kept, *result.epochs)
        summary = _summarize(plan, session, wrapped, result, epochs, choice) | notes
        if is_writer and (result.epochs or not (folder / SUMMARY).is_file()):
            write_run(folder, config, epochs, summary, plan=choice)
            _draw(epochs, folder, format_run_title(summary, config))
        run_on_all_ranks(session, lambda: run.push() if is_writer else None)
        _write_outputs(plan, wrapped, inputs, g, target)
        return Trained(rank=session.topology.rank, epochs=epochs, summary=summary)


def _push_or_warn(run: RunStore) -> None:
    """Upload changed files. After an error, the next call uploads them, because training is worth more."""
    try:
        run.push()
    except StorageError as error:
        say(f"warning: {error} Training continues, and the next epoch uploads again.", style="yellow")


def _announce(plan: TrainConfig, g: DistGraph, target: Target) -> None:
    """Say what is learned. Warn if the labels look like classes, but the task is a regression."""
    say(f"learning {describe_target(plan, g, target)}")
    if plan.task == REGRESSION and g.dataset.manifest.num_classes.get(str(target)) == 2:
        say("warning: all labels are 0 or 1. Leave --task out to classify.", style="yellow")


def _summarize(
    plan: TrainConfig,
    session: Session,
    wrapped: WrappedModel,
    result: FitResult,
    epochs: Sequence[EpochRecord],
    choice: Any,
) -> dict[str, object]:
    """Collect what ``summary.json`` says, and add the outcome to ``choice``. Collective."""
    # Without early stopping the figures belong to the last epoch.
    reported = result if plan.patience else replace(result, best_epoch=None)
    costs = collect_facts(wrapped, session, reported)
    summary = summarise(costs, epochs) | {"traffic": result.traffic}
    if choice is not None:
        choice["outcome"] = asdict(build_outcome(choice["epoch"], epochs, costs))
        summary[AUTO] = summarize_plan(choice)

    if result.account:
        account = {name: value for name, value in result.account.items() if name != "text"}
        # A resumed run has no account of its earlier epochs.
        summary["account"] = {"epochs": len(result.epochs), **account}
    return summary


Target: TypeAlias = str | LinkEvaluation | TemporalLinks
"""Node type to predict, or the evaluation for the edge types to predict."""


def _prepare(plan: TrainConfig, g: DistGraph) -> tuple[TrainConfig, Target, Built, dict[str, object]]:
    """Return the plan with task and metrics, its target, the model, and notes for the summary. Collective."""
    if plan.task != LINK:
        ntype = _check_trainable(plan, g)
        _check_edge_weight(plan, g)
        task, width = read_task(g, ntype, LABEL, plan.task)
        plan = replace(plan, task=task, metric=list_metrics(task, plan.metric))
        return plan, ntype, build(plan, g, ntype, width or g.num_classes(ntype)), {}

    if plan.model != NO_ENCODER:
        _check_inputs(plan, g)
    targets = run_on_all_ranks(g.session, lambda: link_targets(g, plan.target), ConfigError)
    if not sum(map(g.num_edges, targets)):
        raise ConfigError(f"{g.dataset.location} has no edges of {targets[0]}. Name others with --target.")

    plan = replace(plan, metric=list_metrics(LINK, plan.metric))
    names = ",".join(relation for _, relation, _ in targets)
    notes: dict[str, object] = {"task": LINK, "target": names}
    if plan.time is not None:
        assert plan.split_time is not None, "the configuration checks it"
        built = _build_link(plan, g, targets)
        links = TemporalLinks(
            g=g,
            targets=targets,
            time=plan.time,
            split_times=plan.split_time,
            fanouts=fill_defaults(plan).fanouts or (),
            inputs=built[1],
            metrics=plan.metric,
        )
        train_end, validation_end = plan.split_time
        notes["edge_split"] = f"up to {train_end}, up to {validation_end}, later, by {plan.time}"
        return plan, links, built, notes

    is_new_split = split_edges(g, targets)
    notes["edge_split"] = "80 / 10 / 10, keyed by the ends" if is_new_split else "masks of the dataset"
    if plan.predictions and not count_marked(g, targets, SPLITS[2]):
        shown_names = ", ".join(relation for _, relation, _ in targets[:3])
        raise ConfigError(
            f"--predictions {plan.predictions} ranks test edges, but {g.dataset.location} has "
            f"none of {shown_names}. Mark some with test_mask, name others with --target, or "
            "leave --predictions out."
        )
    built = _build_link(plan, g, targets)
    evaluation = LinkEvaluation(g=g, targets=targets, inputs=built[1], metrics=plan.metric)
    return plan, evaluation, built, notes


def describe_target(plan: TrainConfig, g: DistGraph, target: Target) -> str:
    """Return the task with its size, like ``classification, 7 classes``."""
    if not isinstance(target, str):
        names = f"{len(target.targets)} edge types"
        if len(target.targets) <= 3:
            names = ", ".join(relation for _, relation, _ in target.targets)
        return f"link prediction on {names}, decoder {_choose_decoder(plan, target.targets)}"

    if plan.task == CLASSIFICATION:
        return f"{plan.task}, {plural(g.num_classes(target), 'class')}"
    width = math.prod(g.nodes[target].data[LABEL].shape[1:])
    if plan.task == MULTILABEL:
        return f"{plan.task}, {width} labels"
    if width == 1:
        return plan.task
    return f"{plan.task}, {width} numbers (0 and 1 only would be multilabel)"


def train_seeds(plan: TrainConfig) -> Trained:
    """Train once with each seed, and write ``summary.json`` for all. Every rank must call it."""
    runs = {}
    for seed in plan.seeds:
        name = f"seed-{seed}"
        paths: dict[str, Any] = {"out": format_location(Path(plan.out, name))}
        if plan.predictions:
            paths["predictions"] = format_location(Path(plan.predictions, name))
        if plan.save_embeddings:
            paths["save_embeddings"] = format_location(Path(plan.save_embeddings, name))
        trained = train_dataset(replace(plan, seed=seed, seeds=(), **paths))
        runs[name] = trained.summary

    summary = spread(runs)
    if trained.rank == 0:
        run = RunStore(plan.out)
        run.pull()  # Local files of an earlier run must not replace those of the store.
        run.folder.mkdir(parents=True, exist_ok=True)
        run_folder.write_json(run.folder / SUMMARY, summary)
        run.push()
    return replace(trained, summary=summary)


def _locate_checkpoints(plan: TrainConfig) -> str:
    return format_location(Path(plan.out, CHECKPOINTS))


def _configuration(plan: TrainConfig, g: DistGraph) -> dict[str, object]:
    """Return the facts that a resumed run must share. Raise ConfigError if they differ. Collective."""
    facts = collect_configuration(plan, g.dataset.manifest.checksum)
    facts["strategy_options"] = hide_credentials(plan.strategy_options)
    saved = read_extra(_locate_checkpoints(plan)) if plan.goes_on else None
    if saved is not None:
        check_same(saved, facts, plan.out)
    return facts


def fill_defaults(plan: TrainConfig) -> TrainConfig:
    """Fill in the strategy's defaults for batches and loader."""
    batch_size = default_batch_size(plan.strategy)
    # Without batches, no loader prepares them ahead of training.
    num_ahead = None if batch_size is None else 1
    defaults = {
        "fanouts": default_fanouts(plan.strategy, plan.layers),
        "batch_size": batch_size,
        "depth": num_ahead,
        "loader_threads": num_ahead,
    }
    missing: dict[str, Any] = {name: value for name, value in defaults.items() if getattr(plan, name) is None}
    return replace(plan, **missing)


def _check_trainable(plan: TrainConfig, g: DistGraph) -> str:
    """Check that ``g`` has the types and data that the model needs. Return the node type to classify."""
    if plan.strategy == AUTO:
        check_choosable(g.dataset.manifest, plan.data)
    ntype = find_labelled_type(g)
    columns = {name: g.nodes[name].data for name in g.ntypes}
    known = ", ".join(columns[ntype]) or "none"
    if LABEL not in columns[ntype]:
        remedy = "Partition a graph that has it (docs/guides/your_data.md names the columns)"
        candidates = list_possible_labels(columns)
        if candidates:
            remedy = f"Rename one of {candidates} to {LABEL!r} in nodes.csv or the .npz, and partition again"
        if plan.task == AUTO_TASK:
            command = suggest_training_command(plan.data, columns, g.canonical_etypes)
            remedy += f", or predict edges: {command}"
        raise ConfigError(f"{g.dataset.location} has no node data {LABEL!r} (known: {known}). {remedy}")

    if SPLITS[0] not in columns[ntype]:
        raise ConfigError(
            f"{g.dataset.location} has no node data {SPLITS[0]!r} (known: {known}). "
            "Add a column 'split' (train, val, test) to nodes.csv, or train_mask, "
            "val_mask and test_mask to the .npz, and partition again."
        )

    # This comes before `auto` compares strategies, and refuses a mask without nodes.
    training_nodes(g, ntype)
    _check_inputs(plan, g)
    return ntype


def _check_inputs(plan: TrainConfig, g: DistGraph) -> None:
    """Raise ConfigError unless the model supports the types in ``g`` and has rows for all nodes."""
    folder = g.dataset.location
    columns = {name: g.nodes[name].data for name in g.ntypes}
    is_relational = plan.model in RELATIONAL_KINDS
    if not is_relational and not g.is_homogeneous:
        remedy = f"Use --model {' or '.join(RELATIONAL_KINDS)}"
        if plan.task == LINK:
            remedy += ", or --model none --embeddings 64, which scores trainable rows"
        raise ConfigError(
            f"{folder} has {len(g.ntypes)} node and {len(g.canonical_etypes)} edge types, but "
            f"--model {plan.model} supports one of each. {remedy}, or write a loop like "
            "examples/07_rgcn.py."
        )

    # A relational model has trainable rows for nodes without features.
    if not is_relational and plan.embeddings is None and FEATURE not in columns[g.ntypes[0]]:
        known = ", ".join(columns[g.ntypes[0]]) or "none"
        raise ConfigError(
            f"{folder} has no node data {FEATURE!r} (known: {known}). Add trainable rows with "
            "--embeddings 64, or partition a graph that has it (docs/guides/your_data.md "
            "names the columns)."
        )

    for data in columns.values():
        if FEATURE in data and len(data[FEATURE].shape) != 2:
            raise ConfigError(f"{FEATURE!r} of {folder} has shape {data[FEATURE].shape}, but must be (N, F)")


def list_edge_columns(plan: TrainConfig) -> tuple[str, ...]:
    return () if plan.edge_weight is None else (plan.edge_weight,)


def _check_edge_weight(plan: TrainConfig, g: DistGraph) -> None:
    """Raise ConfigError unless the edges have the column. Report an unused column with a usual name."""
    name = plan.edge_weight
    columns = g.edges[g.canonical_etypes[0]].data
    # A weight is one number per edge.
    candidates = [key for key, column in columns.items() if tuple(column.shape[1:]) in ((), (1,))]
    if name is None:
        unused = [key for key in _USUAL_WEIGHTS if key in candidates]
        if unused and plan.model_file is None and g.session.topology.rank == 0:
            say(
                f"edge column {unused[0]!r} is not used. --edge-weight {unused[0]} multiplies "
                f"messages ({list_kinds(WEIGHTED)})."
            )
        return

    if name not in candidates:
        known = ", ".join(candidates) or "none"
        raise ConfigError(
            f"--edge-weight {name}: {g.dataset.location} has no edge column of that name with "
            f"one number per edge (known: {known}). Use one of these, or partition a graph "
            "that has it."
        )
    if not get_strategy(g.session).traits.own_loop:
        raise ConfigError(
            f"--edge-weight {name}: the workers of strategy {g.session.strategy!r} do not "
            "read edge columns. Leave it out, or use --strategy data_parallel."
        )


_USUAL_WEIGHTS = ("weight", "weights", "edge_weight", "edge_weights", "w")


def _check_cache(plan: TrainConfig, session: Session) -> None:
    """Raise ConfigError if ``--cache`` keeps feature rows, but the strategy fetches none in training."""
    if not plan.cache:
        return
    traits = get_strategy(session).traits
    if traits.features == "rows" and traits.unit != "full_graph":
        return
    # Feature columns can be fetched ahead, but not chosen by how often they are needed.
    if traits.features == "columns" and plan.cache == LOOK_AHEAD:
        return
    raise ConfigError(
        f"--cache {plan.cache} keeps feature rows of other servers, but strategy "
        f"{session.strategy!r} moves none in training. Leave --cache out, or use strategy "
        "data_parallel."
    )


def build_run_config(plan: TrainConfig, g: DistGraph, session: Session) -> dict[str, object]:
    """Collect what ``config.json`` says: effective options without secrets, ranks, graph and versions."""
    return {
        **asdict(plan),
        "strategy": session.strategy,
        "strategy_options": hide_credentials(plan.strategy_options),
        "timeout_s": session.timeout_s,
        "ranks": session.topology.world_size,
        "servers": session.topology.num_servers,
        "graph": g.name,
        "nodes": g.num_nodes(),
        "edges": g.num_edges(),
        "parts": g.dataset.manifest.num_parts,
        "dataset_checksum": g.dataset.manifest.checksum,
        "partitioned_by": g.dataset.manifest.method,
        "versions": {module.__name__: module.__version__ for module in (dglx_dist, torch, dgl)},
        "environment": {
            "python": platform.python_version(),
            "system": platform.platform(),
            "hosts": ", ".join(dict.fromkeys(session.hosts)),
            "cores": os.cpu_count(),
            "memory_bytes": machine_memory()[0],
        },
    }


def _fit(
    plan: TrainConfig,
    g: DistGraph,
    target: Target,
    built: Built,
    facts: Mapping[str, object],
    begin: Callable[[], None],
    after_epoch: Callback,
    folder: Path,
) -> tuple[WrappedModel, FitResult]:
    """Train the built model, and write its weights to ``folder``. Every rank must call this.

    ``begin`` is called before the first epoch.
    """
    module, inputs, sparse = built
    # A cache that auto chose has been filled already.
    if plan.cache is not None and not g.kvstore.has_cache:
        _cache_features(plan, g, target, plan.cache)

    options = select_common_fields(plan, FitConfig)
    # The option names a loss for --task link, but the field is a function.
    del options["loss"]
    options |= {"inputs": inputs, "configuration": facts, "on_begin": begin}
    options["checkpoint_folder"] = _locate_checkpoints(plan)
    options["weights_folder"] = folder
    loading: dict[str, Any] = {}
    if isinstance(target, str):
        loading = _list_loader_options(plan, fanouts=plan.fanouts, batch_size=plan.batch_size)
        options |= {"ntype": target, "edge_feats": list_edge_columns(plan)}
        # Models without layers for inference are evaluated on neighbourhoods with this depth.
        options["num_layers"] = None if hasattr(module, "inference_layers") else plan.layers
    else:
        loading["loader"] = _make_link_loader(plan, g, target, inputs)
        options["task"] = _make_link_task(plan, inputs)
        options["evaluate"] = target

    settings: dict[str, Any] = {"lr": plan.lr, "weight_decay": plan.weight_decay}
    if plan.momentum:
        settings["momentum"] = plan.momentum
    return fit(
        module,
        g,
        config=FitConfig(**options),
        make_optimizer=partial(_OPTIMIZERS[plan.optimizer], **settings),
        callbacks=[after_epoch],
        sparse=sparse,
        **loading,
    )


def _list_loader_options(plan: TrainConfig, **options: Any) -> dict[str, Any]:
    """Add the thread options to a loader's ``options``. A loader has defaults for missing ones."""
    if plan.depth is not None:
        options["depth"] = plan.depth
    if plan.loader_threads is not None:
        options["num_threads"] = plan.loader_threads
    return options


def _make_link_task(plan: TrainConfig, inputs: EntityInputs | None) -> LinkPrediction:
    return LinkPrediction(inputs=inputs, pair_loss=PAIR_LOSSES[plan.loss])


def _make_link_loader(
    plan: TrainConfig, g: DistGraph, target: LinkEvaluation | TemporalLinks, inputs: EntityInputs | None
) -> Any:
    """Return a loader over training edges. Every rank must call this."""
    batch_size = plan.batch_size or 512
    options = _list_loader_options(plan, batch_size=batch_size, negatives=plan.negatives)
    if isinstance(target, TemporalLinks):
        return target.train_loader(g, target.targets, **options)
    fanouts = None if plan.model == NO_ENCODER else plan.fanouts
    return link_loader(g, target.targets, fanouts=fanouts, inputs=inputs, **options)


_OPTIMIZERS = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
}


def _cache_features(plan: TrainConfig, g: DistGraph, target: Target, policy: str) -> None:
    """Keep feature rows from other servers, as ``--cache`` says. Every rank must call this."""
    sampling: dict[str, Any] = {}
    if policy == "vip":
        # This policy counts how often an epoch's batches need each row.
        if not isinstance(target, str):
            raise ConfigError("--cache vip counts batches of nodes. Use lookahead with --task link.")
        sampling["fanouts"] = list(plan.fanouts or ())
        sampling["batch_size"] = plan.batch_size
        sampling["seeds"] = {target: training_nodes(g, target)}

    for name in g.ntypes:
        if FEATURE in g.nodes[name].data:
            g.cache_rows(FEATURE, alpha=plan.cache_alpha, policy=policy, ntype=name, **sampling)


def _draw(epochs: Sequence[EpochRecord], folder: Path, title: str) -> None:
    # Importing Matplotlib would cost every other rank half a second.
    from dglx_dist.report.pictures import draw

    try:
        draw(epochs, folder / PICTURE, title=title)
    except OSError as error:
        raise StorageError(
            f"the run is in {folder}, but its picture cannot be written: {error}. `dglx "
            f"report {folder}` shows the run and draws it again."
        ) from error
