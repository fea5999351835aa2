"""One rank of ``dglx train``: open the dataset, train, evaluate, write the run folder."""

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
from dglx_dist.options import select_common_fields
from dglx_dist.planner.auto import Training, default_batch_size, default_fanouts, resolve
from dglx_dist.planner.workload import check_choosable
from dglx_dist.progress import say
from dglx_dist.records import FEATURE, LABEL, SPLITS, EdgeType, EpochRecord
from dglx_dist.registry import AUTO
from dglx_dist.report import run_folder
from dglx_dist.report.outcome import build_outcome, collect_facts, read_run_plan, summarize_plan
from dglx_dist.report.run_folder import PICTURE, SUMMARY, append_epoch, read_epochs, start_run, write_run
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
"""Folder of checkpoints inside a run folder."""
# Column names of written results.
PREDICTION = "prediction"
EMBEDDING = "embedding"
SCORES = "scores"


def _resolve_auto(
    plan: TrainConfig, g: DistGraph, target: Target, module: nn.Module, inputs: EntityInputs | None
) -> tuple[TrainConfig, Any]:
    """Choose a strategy for ``auto``, or resume with that of the checkpoint. Every rank must call this.

    Return the plan with the session's strategy, and ``Choice.to_json()`` if there was a choice.
    """
    if plan.strategy != AUTO:
        return plan, None
    assert isinstance(target, str), "auto compares batches of nodes"
    folder = Path(plan.out)
    own_loop = needs_own_loop(plan) is not None
    kind = None if plan.model_file else plan.model
    common = select_common_fields(plan, Training)
    training = Training(num_layers=plan.layers, kind=kind, ntype=target, own_loop=own_loop, **common)
    checkpoints = folder / CHECKPOINTS if plan.resume else None
    candidate, choice = resolve(module, g, training, checkpoints, inputs)
    choice_json = read_run_plan(folder, g.session) if choice is None else choice.to_json()
    plan = replace(plan, strategy=candidate.strategy, strategy_options=dict(candidate.options))
    if candidate.cache is not None:
        plan = replace(plan, cache=candidate.cache, cache_alpha=candidate.cache_alpha)
    if default_batch_size(candidate.strategy) is None:
        # Steps take the whole graph. These options were for the mini-batches in the comparison.
        plan = replace(plan, fanouts=None, batch_size=None)
    return plan, choice_json


Built: TypeAlias = tuple[nn.Module, EntityInputs | None, SparseOptimizer | None]
"""Model, its inputs (None: the features of the only node type), and the optimizer of its trainable rows."""


def build(plan: TrainConfig, g: DistGraph, ntype: str | None, width: int) -> Built:
    """Build a model with results of ``width`` for ``ntype``, or for all types if it is None. Collective.

    Nodes without features get trainable rows.
    """
    sizes = (plan.hidden, width, plan.layers, plan.dropout)
    inputs, sparse = _build_inputs(plan, g)
    if plan.model not in RELATIONAL_KINDS:
        columns = plan.embeddings if inputs else g.nodes[g.ntypes[0]].data[FEATURE].shape[1]
        assert columns is not None, "the configuration checks it"
        if plan.model_file is not None:
            arguments = dict(zip(OWN_ARGUMENTS, (columns, *sizes, plan.heads, g), strict=True))
            module = run_on_all_ranks(g.session, partial(_load_own_model, plan, arguments), ConfigError)
            check_equal(g.session, f"the content of --model-file {plan.model_file}", plan.model_sha256)
            return module, inputs, sparse

        own: dict[str, Any] = {"teleport": plan.teleport, "recompute": plan.recompute, **plan.between}
        model: Any = build_model(plan.model, columns, *sizes, plan.heads, g, **own)
        model.edge_weight = plan.edge_weight
        return model, inputs, sparse

    assert inputs is not None
    widths = inputs.feature_widths
    if plan.embeddings not in (None, plan.hidden):
        widths |= {name: plan.embeddings for name in g.ntypes if name not in widths}
    out_types = None if ntype is None else [ntype]
    relational = build_relational(plan, g, widths, width, out_types, dropout=plan.dropout)
    return relational, inputs, sparse


def _load_own_model(plan: TrainConfig, arguments: Mapping[str, Any]) -> nn.Module:
    """Return the model of ``--model-file`` after a test on small blocks. Its errors become ConfigError."""
    path, _, name = str(plan.model_file).rpartition(":")
    if hashlib.sha256(Path(path).read_bytes()).hexdigest() != plan.model_sha256:
        raise ConfigError(f"{path} differs from the file at the start of the run. Start it again.")
    try:
        make = runpy.run_path(path, run_name="model_file").get(name)
        if make is None:
            raise ConfigError(f"there is no {name!r} in it")
        parameters = inspect.signature(make).parameters
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        model = make(**{key: arguments[key] for key in arguments if takes_all or key in parameters})
        if not isinstance(model, nn.Module):
            raise ConfigError(f"{name} returns {type(model).__name__}, not an nn.Module")
        sizes = range(2 * plan.layers + 2, 0, -2)
        blocks = [random_block(b, a, 3 * b, torch.Generator()) for a, b in pairwise(sizes)]
        for block in blocks if plan.edge_weight else ():
            column = arguments["graph"].edges[arguments["graph"].canonical_etypes[0]].data[plan.edge_weight]
            block.edata[plan.edge_weight] = torch.ones(
                block.num_edges(), *column.shape[1:], dtype=column.dtype
            )

        with preserve_state(model, training=False), torch.random.fork_rng(devices=[]), torch.no_grad():
            out = model(
                blocks, torch.zeros(sizes[0], arguments["in_dim"], dtype=find_float_parameter(model).dtype)
            )

        shape = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        if shape != (2, arguments["classes"]):
            raise ConfigError(f"for 2 targets of {arguments['classes']} classes it returns {shape}")
    except (Exception, SystemExit) as error:
        reason = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == path]
        reason = f"line {lines[-1]}: {reason}" if lines else reason
        raise ConfigError(
            f"--model-file {plan.model_file}: {reason}. It is called with those of {', '.join(arguments)} "
            f"that it names, and its forward with {plan.layers} blocks and h (docs/guides/own_model.md)."
        ) from error

    needs_layers = plan.predictions or plan.save_embeddings or plan.task == LINK
    if needs_layers and not hasattr(model, "inference_layers"):
        raise ConfigError(
            f"{plan.model} has no inference_layers() (dglx_dist.training.models), but --predictions, "
            "--save-embeddings and --task link need it. Add it, or leave these options out."
        )

    return model


def _build_inputs(
    plan: TrainConfig, g: DistGraph, scale: float = 1.0
) -> tuple[EntityInputs | None, SparseOptimizer | None]:
    """Return the inputs (None: the features of the only type) and the optimizer of trainable rows."""
    embeddings = {}
    for name in g.ntypes:
        if plan.model == NO_ENCODER or FEATURE not in g.nodes[name].data:
            policy = g.get_node_partition_policy(name)
            count = g.num_nodes(name)
            width = plan.embeddings or plan.hidden
            options: dict[str, Any] = {"part_policy": policy, "graph": g, "scale": scale}
            embeddings[name] = DistEmbedding(count, width, f"{name}-rows", **options)

    is_relational = plan.model in RELATIONAL_KINDS or plan.model == NO_ENCODER
    if not is_relational and not embeddings:
        return None, None
    inputs = EntityInputs(g, embeddings=embeddings, as_tensor=not is_relational)
    return inputs, SparseAdam([*embeddings.values()], lr=plan.lr) if embeddings else None


def _choose_decoder(plan: TrainConfig, targets: Sequence[EdgeType]) -> str:
    return plan.decoder or ("distmult" if len(targets) > 1 else "dot")


def _build_link(plan: TrainConfig, g: DistGraph, targets: Sequence[EdgeType]) -> Built:
    decoder = _choose_decoder(plan, targets)
    etypes = g.canonical_etypes
    if plan.model == NO_ENCODER:
        assert plan.embeddings is not None, "the configuration checks it"
        module = LinkModel(None, DECODERS[decoder](len(etypes), plan.embeddings), etypes)
        return module, *_build_inputs(plan, g, module.decoder.row_scale)
    encoder, inputs, sparse = build(plan, g, None, plan.hidden)
    return LinkModel(encoder, DECODERS[decoder](len(etypes), plan.hidden), etypes), inputs, sparse


def _check_outputs(plan: TrainConfig, session: Session) -> None:
    def check() -> None:
        for name in (plan.predictions, plan.save_embeddings):
            if name is not None and session.topology.rank == 0:
                check_target(Path(name).absolute(), overwrite=True)

    run_on_all_ranks(session, check)
    if plan.trace is not None:
        check_trace(Path(plan.trace).absolute(), session)


def _write_outputs(
    plan: TrainConfig, wrapped: WrappedModel, inputs: EntityInputs | None, g: DistGraph, target: Target
) -> None:
    outputs = [(EMBEDDING, plan.save_embeddings), (PREDICTION, plan.predictions)]
    if not any(folder for _, folder in outputs):
        return
    if isinstance(target, LinkEvaluation):
        with compute_rows(wrapped, g, inputs) as rows:
            if plan.save_embeddings is not None:
                tables = rows if len(rows) > 1 else rows[g.ntypes[0]]
                write_embeddings(tables, g, plan.save_embeddings, name=EMBEDDING, overwrite=True)
                write_relations(wrapped.whole().decoder, g, plan.save_embeddings)  # type: ignore[arg-type]  # models of links have a decoder
            if plan.predictions is not None:
                edges = target.test_edges(wrapped, rows)
                write_edges(edges, g, plan.predictions, scores=plan.scores, overwrite=True)
        return

    assert isinstance(target, str), "links over time have no outputs"
    module = wrapped.whole()
    *hidden, last = module.inference_layers()  # type: ignore[operator]  # all models of build() have this method

    def interpret(scores: Tensor) -> tuple[Tensor, ...]:
        predictions = to_predictions(plan.task, scores)
        return (predictions, to_probabilities(plan.task, scores)) if plan.scores else (predictions,)

    def predict(block: Any, h: Any) -> Any:
        scores = last(block, h)
        # Relational models return a dictionary even for one node type.
        if isinstance(scores, dict):
            return {name: interpret(rows) for name, rows in scores.items()}
        return interpret(scores)

    for name, folder in outputs:
        if folder is None:
            continue
        rows = layerwise_inference(
            module,
            g,
            inputs=None if inputs is None else inputs.tensors,
            layers=hidden if name == EMBEDDING else [*hidden, predict],
            ntypes=None if name == EMBEDDING else [target],
            edge_feats=_edge_columns(plan),
        )
        tensors = list(flatten(rows).values())
        several = name == EMBEDDING and len(g.ntypes) > 1
        columns: dict[str, Any] = {"more": {SCORES: tensors[1]}} if name == PREDICTION and tensors[1:] else {}
        if name == PREDICTION and plan.task == CLASSIFICATION:
            columns["classes"] = g.dataset.manifest.class_names.get(target, ())

        # If a layer passes on a tuple of rows, the last ones are its own.
        own = tensors[-1 if name == EMBEDDING else 0]
        write_embeddings(rows if several else own, g, folder, name=name, overwrite=True, **columns)
        for tensor in tensors:
            tensor.delete()


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Results of a run, equal on every rank except for ``rank``."""

    rank: int
    epochs: tuple[EpochRecord, ...]
    """Records of all epochs, including those before a resume."""
    summary: Mapping[str, object]


def train_dataset(plan: TrainConfig) -> Trained:
    """Train, evaluate and write the run folder. Every rank that torchrun started must call it."""
    folder = Path(plan.out)
    options: dict[str, Any] = dict(plan.strategy_options)
    joining: dict[str, Any] = {"timeout": plan.timeout_s, "seed": plan.seed, "device": plan.device}
    with init(plan.strategy, **joining, **options) as session:
        plan = resolve_resume(plan, folder / CHECKPOINTS, session)
        g = DistGraph(plan.data, structure=plan.structure, verify=plan.verify, session=session)
        plan, target, built, notes = _prepare(plan, g)
        module, inputs, _ = built
        module.to(session.device)
        plan, choice = _resolve_auto(plan, g, target, module, inputs)
        plan = fill_defaults(plan)
        _check_cache(plan, session)
        check_loop(plan, get_strategy(session).traits, session.strategy)
        _check_outputs(plan, session)
        writes = session.topology.rank == 0
        config = build_run_config(plan, g, session)
        facts = _configuration(plan, g, folder)
        before = read_epochs(folder) if plan.resume else None

        def start() -> None:
            # This runs after the checkpoint is loaded, so that a damaged one does not cost earlier results.
            if writes:
                start_run(folder, config, before, plan=choice)
                say(f"learning {describe_target(plan, g, target)}")
                if plan.task == REGRESSION and g.dataset.manifest.num_classes.get(str(target)) == 2:
                    say("warning: all labels are 0 or 1. Leave --task out to classify.", style="yellow")

        append = partial(append_epoch, folder) if writes else lambda _record: None
        wrapped, result = _fit(plan, g, target, built, facts, start, append)
        epochs = (*(e for e in before or () if e.epoch < result.first_epoch), *result.epochs)

        # Without patience the figures belong to the last epoch.
        costs = collect_facts(wrapped, session, result if plan.patience else replace(result, best_epoch=None))
        summary = summarise(costs, epochs) | {"traffic": result.traffic} | notes
        if choice is not None:
            choice["outcome"] = asdict(build_outcome(choice["epoch"], epochs, costs))
            summary[AUTO] = summarize_plan(choice)

        if result.account:
            account = {name: value for name, value in result.account.items() if name != "text"}
            # A resumed run has no account of its earlier epochs.
            summary["account"] = {"epochs": len(result.epochs), **account}

        if writes and (result.epochs or not (folder / SUMMARY).is_file()):
            write_run(folder, config, epochs, summary, plan=choice)
            _draw(epochs, folder, format_run_title(summary, config))
        _write_outputs(plan, wrapped, inputs, g, target)
        return Trained(rank=session.topology.rank, epochs=epochs, summary=summary)


Target: TypeAlias = str | LinkEvaluation | TemporalLinks
"""Node type to predict, or the evaluation of the edge types to predict."""


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
        raise ConfigError(f"{g.dataset.folder} has no edges of {targets[0]}. Name others with --target.")
    if plan.time is not None:
        return _prepare_temporal(plan, g, targets)
    is_new_split = split_edges(g, targets)

    if plan.predictions and not count_marked(g, targets, SPLITS[2]):
        raise ConfigError(
            f"--predictions {plan.predictions} ranks test edges, but {g.dataset.folder} has none of "
            f"{', '.join(relation for _, relation, _ in targets[:3])}. Mark some with test_mask, name others "
            "with --target, or leave --predictions out."
        )

    notes: dict[str, object] = {
        "task": LINK,
        "target": ",".join(relation for _, relation, _ in targets),
        "edge_split": "80 / 10 / 10, keyed by the ends" if is_new_split else "masks of the dataset",
    }
    plan, built = replace(plan, metric=list_metrics(LINK, plan.metric)), _build_link(plan, g, targets)
    return plan, LinkEvaluation(g=g, targets=targets, inputs=built[1], metrics=plan.metric), built, notes


def _prepare_temporal(
    plan: TrainConfig, g: DistGraph, targets: Sequence[EdgeType]
) -> tuple[TrainConfig, Target, Built, dict[str, object]]:
    """Return what :func:`_prepare` returns, for links over time. Every rank must call this."""
    time, split_time = plan.time, plan.split_time
    assert time is not None and split_time is not None, "the configuration checks it"  # noqa: PT018
    plan = replace(plan, metric=list_metrics(LINK, plan.metric))
    built = _build_link(plan, g, targets)
    fanouts = fill_defaults(plan).fanouts or ()
    target = TemporalLinks(
        g=g,
        targets=targets,
        time=time,
        split_times=split_time,
        fanouts=fanouts,
        inputs=built[1],
        metrics=plan.metric,
    )
    names = ",".join(relation for _, relation, _ in targets)
    split = f"up to {split_time[0]}, up to {split_time[1]}, later, by {time}"
    return plan, target, built, {"task": LINK, "target": names, "edge_split": split}


def describe_target(plan: TrainConfig, g: DistGraph, target: Target) -> str:
    """Return the task with its size, like ``classification, 7 classes``."""
    if not isinstance(target, str):
        names = ", ".join(relation for _, relation, _ in target.targets[:3])
        names = names if len(target.targets) <= 3 else f"{len(target.targets)} edge types"
        return f"link prediction on {names}, decoder {_choose_decoder(plan, target.targets)}"

    if plan.task == CLASSIFICATION:
        return f"{plan.task}, {plural(g.num_classes(target), 'class')}"
    width = math.prod(g.nodes[target].data[LABEL].shape[1:])
    if plan.task == MULTILABEL:
        return f"{plan.task}, {width} labels"
    return plan.task if width == 1 else f"{plan.task}, {width} numbers (0 and 1 only would be multilabel)"


def train_seeds(plan: TrainConfig) -> Trained:
    """Train once with each of the seeds, and write ``summary.json`` for all. Every rank must call it."""
    folder = Path(plan.out)
    runs = []
    for seed in plan.seeds:
        name = f"seed-{seed}"
        paths = {"out": plan.out, "predictions": plan.predictions, "save_embeddings": plan.save_embeddings}
        seed_paths: dict[str, Any] = {key: str(Path(path) / name) for key, path in paths.items() if path}
        runs.append(train_dataset(replace(plan, seed=seed, seeds=(), **seed_paths)))

    last = runs[-1]
    summary = spread({f"seed-{seed}": run.summary for seed, run in zip(plan.seeds, runs, strict=True)})
    if last.rank == 0:
        run_folder.write_json(folder / SUMMARY, summary)
    return replace(last, summary=summary)


def _configuration(plan: TrainConfig, g: DistGraph, folder: Path) -> dict[str, object]:
    """Return the facts that a resumed run must share. Raise ConfigError if they differ. Collective."""
    facts = collect_configuration(plan, g.dataset.manifest.checksum)
    facts["strategy_options"] = hide_credentials(plan.strategy_options)
    saved = read_extra(folder / CHECKPOINTS) if plan.goes_on else None
    if saved is not None:
        check_same(saved, facts, folder)
    return facts


def fill_defaults(plan: TrainConfig) -> TrainConfig:
    """Return ``plan`` with the defaults of its strategy for batches and loader."""
    fanouts = default_fanouts(plan.strategy, plan.layers) if plan.fanouts is None else plan.fanouts
    batch_size = default_batch_size(plan.strategy)
    ahead = None if batch_size is None else 1
    return replace(
        plan,
        fanouts=fanouts,
        batch_size=batch_size if plan.batch_size is None else plan.batch_size,
        depth=ahead if plan.depth is None else plan.depth,
        loader_threads=ahead if plan.loader_threads is None else plan.loader_threads,
    )


def _check_trainable(plan: TrainConfig, g: DistGraph) -> str:
    """Check that ``g`` has the types and data that the model needs. Return the node type to classify."""
    if plan.strategy == AUTO:
        check_choosable(g.dataset.manifest, plan.data)
    ntype = find_labelled_type(g)
    columns = {name: g.nodes[name].data for name in g.ntypes}
    data = columns[ntype]
    missing = f"{g.dataset.folder} has no node data {{!r}} (known: {', '.join(data) or 'none'}). "
    if LABEL not in data:
        remedy = "Partition a graph that has it (docs/guides/your_data.md names the columns)"
        if names := list_possible_labels(columns):
            remedy = f"Rename one of {names} to {LABEL!r} in nodes.csv or the .npz, and partition again"
        if plan.task == AUTO_TASK:
            command = suggest_training_command(plan.data, columns, g.canonical_etypes)
            remedy += f", or predict edges: {command}"
        raise ConfigError(missing.format(LABEL) + remedy)

    if SPLITS[0] not in data:
        raise ConfigError(
            missing.format(SPLITS[0])
            + "Add a column 'split' (train, val, test) to nodes.csv, or train_mask, "
            "val_mask and test_mask to the .npz, and partition again."
        )

    # This comes before `auto` compares strategies, and refuses a mask without nodes.
    training_nodes(g, ntype)
    _check_inputs(plan, g)
    return ntype


def _check_inputs(plan: TrainConfig, g: DistGraph) -> None:
    """Raise ConfigError unless the model supports the types of ``g`` and has rows for all nodes."""
    where = g.dataset.folder
    relational = plan.model in RELATIONAL_KINDS
    if not relational and not g.is_homogeneous:
        link = ", or --model none --embeddings 64, which scores trainable rows" if plan.task == LINK else ""
        raise ConfigError(
            f"{where} has {len(g.ntypes)} node and {len(g.canonical_etypes)} edge types, but --model "
            f"{plan.model} supports one of each. Use --model {' or '.join(RELATIONAL_KINDS)}{link}, or write "
            "a loop like examples/07_rgcn.py."
        )

    # A relational model has trainable rows for nodes without features.
    if not relational and plan.embeddings is None and FEATURE not in g.nodes[g.ntypes[0]].data:
        columns = ", ".join(g.nodes[g.ntypes[0]].data) or "none"
        raise ConfigError(
            f"{where} has no node data {FEATURE!r} (known: {columns}). Add trainable rows with --embeddings "
            "64, or partition a graph that has it (docs/guides/your_data.md names the columns)."
        )

    for name in g.ntypes:
        shape = g.nodes[name].data[FEATURE].shape if FEATURE in g.nodes[name].data else (0, 0)
        if len(shape) != 2:
            raise ConfigError(f"{FEATURE!r} of {where} has shape {shape}, but must be (N, F)")


def _edge_columns(plan: TrainConfig) -> tuple[str, ...]:
    return () if plan.edge_weight is None else (plan.edge_weight,)


def _check_edge_weight(plan: TrainConfig, g: DistGraph) -> None:
    """Raise ConfigError unless the edges have the column. Report an unused column with a usual name."""
    where = g.dataset.folder
    name = plan.edge_weight
    etype = g.canonical_etypes[0]
    shapes = {key: tuple(column.shape[1:]) for key, column in g.edges[etype].data.items()}
    fitting = [key for key, shape in shapes.items() if shape in ((), (1,))]
    if name is None:
        unused = next((key for key in _USUAL_WEIGHTS if key in fitting), None)
        if unused is not None and plan.model_file is None and g.session.topology.rank == 0:
            models = list_kinds(WEIGHTED)
            say(f"edge column {unused!r} is not used. --edge-weight {unused} multiplies messages ({models}).")
        return

    if name not in fitting:
        raise ConfigError(
            f"--edge-weight {name}: {where} has no edge column of that name with one number per edge (known: "
            f"{', '.join(fitting) or 'none'}). Use one of these, or partition a graph that has it."
        )

    if not get_strategy(g.session).traits.own_loop:
        raise ConfigError(
            f"--edge-weight {name}: the workers of strategy {g.session.strategy!r} do not read edge columns. "
            "Leave it out, or use --strategy data_parallel."
        )


_USUAL_WEIGHTS = ("weight", "weights", "edge_weight", "edge_weights", "w")


def _check_cache(plan: TrainConfig, session: Session) -> None:
    traits = get_strategy(session).traits
    has_rows = traits.features == "rows" and traits.unit != "full_graph"
    if plan.cache and not has_rows and (plan.cache, traits.features) != (LOOK_AHEAD, "columns"):
        raise ConfigError(
            f"--cache {plan.cache} keeps feature rows of other servers, but strategy {session.strategy!r} "
            "moves none in training. Leave --cache out, or use strategy data_parallel."
        )


def build_run_config(plan: TrainConfig, g: DistGraph, session: Session) -> dict[str, object]:
    """Return the content of ``config.json``: effective options without secrets, ranks, graph and versions."""
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
) -> tuple[WrappedModel, FitResult]:
    module, inputs, sparse = built
    # A cache that auto chose has been filled already.
    if plan.cache is not None and not g.kvstore.has_cache:
        _cache_features(plan, g, target, plan.cache)
    folder = Path(plan.out) / CHECKPOINTS
    options = select_common_fields(plan, FitConfig)
    options |= {"inputs": inputs, "configuration": facts, "on_begin": begin}
    loading: dict[str, Any] = {"depth": plan.depth, "num_threads": plan.loader_threads}
    loading = {name: value for name, value in loading.items() if value is not None}
    if isinstance(target, str):
        options |= {"ntype": target, "edge_feats": _edge_columns(plan)}
        loading |= {"fanouts": plan.fanouts, "batch_size": plan.batch_size}
        options["num_layers"] = None if hasattr(module, "inference_layers") else plan.layers
    else:
        options["task"] = LinkPrediction(inputs=inputs, pair_loss=PAIR_LOSSES[plan.loss])
        options["evaluate"] = target
        loading |= {"batch_size": plan.batch_size or 512, "negatives": plan.negatives}
        make_loader: Callable[..., Any] = link_loader
        if isinstance(target, TemporalLinks):
            make_loader = target.train_loader
        else:
            loading |= {"fanouts": None if plan.model == NO_ENCODER else plan.fanouts, "inputs": inputs}

        loading = {"loader": make_loader(g, target.targets, **loading)}

    settings: dict[str, Any] = {"lr": plan.lr, "weight_decay": plan.weight_decay}
    settings |= {"momentum": plan.momentum} if plan.momentum else {}

    # The option is the name of a loss for --task link, but the field is a function.
    del options["loss"]
    return fit(
        module,
        g,
        config=FitConfig(**options, checkpoint_folder=folder, weights_folder=plan.out),
        make_optimizer=partial(_OPTIMIZERS[plan.optimizer], **settings),
        callbacks=[after_epoch],
        sparse=sparse,
        **loading,
    )


_OPTIMIZERS = {
    kind.__name__.lower(): kind
    for kind in (
        *(torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop),
    )
}


def _cache_features(plan: TrainConfig, g: DistGraph, target: Target, policy: str) -> None:
    sampling: dict[str, Any] = {}
    if policy == "vip":
        if not isinstance(target, str):
            raise ConfigError("--cache vip counts batches of nodes. Use lookahead with --task link.")
        sampling = {"fanouts": list(plan.fanouts or ()), "batch_size": plan.batch_size}
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
            f"the run is in {folder}, but its picture cannot be written: {error}. `dglx report {folder}` "
            "shows the run and draws it again."
        ) from error
