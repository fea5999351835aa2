"""One rank of ``dglx train``: open, train, evaluate, write the run folder."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import dgl
import torch
from torch import Tensor, nn

import dglx_dist
from dglx_dist.api import fit, init, training_nodes
from dglx_dist.auto import (
    Training,
    default_batch_size,
    default_fanouts,
    facts_of,
    outcome_of,
    plan_of_run,
    plan_summary,
    resolve,
)
from dglx_dist.comm.collectives import run_on_all_ranks
from dglx_dist.comm.session import Session
from dglx_dist.data.storage.files import machine_memory
from dglx_dist.errors import ConfigError, StorageError
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.graph.embedding import DistEmbedding
from dglx_dist.graph.optim import SparseAdam, SparseOptimizer
from dglx_dist.options import common_fields
from dglx_dist.planner.workload import check_plannable
from dglx_dist.records import FEATURE, LABEL, EpochRecord
from dglx_dist.report import run_folder
from dglx_dist.report.run_folder import PICTURE, SUMMARY, append_epoch, read_epochs, start_run, write_run
from dglx_dist.report.tables import run_title, spread, summarise
from dglx_dist.strategies.base import AUTO, WrappedModel, strategy_of
from dglx_dist.training.checkpoint import read_extra
from dglx_dist.training.config import BF16, CLASSIFICATION, TrainConfig, configuration_of, metrics_of
from dglx_dist.training.export import check_target, write_embeddings
from dglx_dist.training.fit import (
    Callback,
    FitConfig,
    FitResult,
    check_loop,
    check_same,
    settled,
)
from dglx_dist.training.inference import flatten, labelled_type, layerwise_inference
from dglx_dist.training.models import RELATIONAL_KINDS, ResGCN, build_model
from dglx_dist.training.relational import HGT, RGCN, EntityInputs
from dglx_dist.training.tasks import as_probabilities, predicted, read_task
from dglx_dist.training.tracing import check_trace, without_keys

CHECKPOINTS = "checkpoints"
"""Folder inside a run folder."""
PREDICTION, EMBEDDING, SCORES = "prediction", "embedding", "scores"
"""Names of the columns of written results."""


def _resolve_auto(
    plan: TrainConfig, g: DistGraph, module: nn.Module
) -> tuple[TrainConfig, dict[str, Any] | None]:
    """Choose a strategy in place of ``auto``, or resume with that of the checkpoint; collective.

    Returns the plan with the session's strategy, and ``Choice.to_json()`` if there was a choice.
    """
    if plan.strategy != AUTO:
        return plan, None
    folder = Path(plan.out)
    own_loop = plan.precision == BF16 or plan.task != CLASSIFICATION or plan.class_weight != "none"
    training = Training(
        num_layers=plan.layers, kind=plan.model, own_loop=own_loop, **common_fields(plan, Training)
    )
    taken, chosen = resolve(module, g, training, folder / CHECKPOINTS if plan.resume else None)
    choice = plan_of_run(folder, g.session) if chosen is None else chosen.to_json()
    plan = replace(plan, strategy=taken.strategy, strategy_options=dict(taken.options))
    if taken.cache is not None:
        plan = replace(plan, cache=taken.cache, cache_alpha=taken.cache_alpha)
    if default_batch_size(taken.strategy) is None:
        # Steps on the whole graph: these options were for the mini-batches in the comparison.
        plan = replace(plan, fanouts=None, batch_size=None)
    return plan, choice


Built: TypeAlias = tuple[nn.Module, EntityInputs | None, SparseOptimizer | None]
"""A model, its inputs (None: the features of the only node type), and the optimizer of its trainable rows."""


def build(plan: TrainConfig, g: DistGraph, ntype: str, classes: int) -> Built:
    """Build the model for ``classes`` of ``ntype``, with trainable rows without features; collective."""
    sizes = (plan.hidden, classes, plan.layers, plan.dropout)
    if plan.model not in RELATIONAL_KINDS:
        width = g.nodes[ntype].data[FEATURE].shape[1]
        if plan.model == "resgcn":
            return ResGCN(width, *sizes, recompute=plan.recompute), None, None
        return build_model(plan.model, width, *sizes, plan.heads, graph=g), None, None
    embeddings = {}
    for name in g.ntypes:
        if FEATURE not in g.nodes[name].data:
            policy, count = g.get_node_partition_policy(name), g.num_nodes(name)
            embeddings[name] = DistEmbedding(count, plan.hidden, f"{name}-rows", part_policy=policy, graph=g)
    inputs = EntityInputs(g, embeddings=embeddings)
    options: dict[str, Any] = {"layers": plan.layers, "dropout": plan.dropout, "out_types": [ntype]}
    if plan.model == "hgt":
        options["heads"] = plan.heads
    relational: Any = HGT if plan.model == "hgt" else RGCN
    module = relational(g, inputs.feature_widths, plan.hidden, classes, **options)
    sparse = SparseAdam(list(embeddings.values()), lr=plan.lr) if embeddings else None
    return module, inputs, sparse


def _check_outputs(plan: TrainConfig, session: Session) -> None:
    def check() -> None:
        for name in (plan.predictions, plan.save_embeddings):
            if name is not None and session.topology.rank == 0:
                check_target(Path(name).absolute(), overwrite=True)

    run_on_all_ranks(session, check)
    if plan.trace is not None:
        check_trace(Path(plan.trace).absolute(), session)


def _write_outputs(
    plan: TrainConfig, wrapped: WrappedModel, inputs: EntityInputs | None, g: DistGraph, ntype: str
) -> None:
    outputs = [(EMBEDDING, plan.save_embeddings), (PREDICTION, plan.predictions)]
    if not any(folder for _, folder in outputs):
        return
    module = wrapped.whole()
    *hidden, last = module.inference_layers()  # type: ignore[operator]  # all models of build() have it

    def of_scores(scores: Tensor) -> tuple[Tensor, ...]:
        answers = predicted(plan.task, scores)
        return (answers, as_probabilities(plan.task, scores)) if plan.scores else (answers,)

    def answers(block: Any, h: Any) -> Any:
        scores = last(block, h)
        # Relational models give a dictionary, also of one node type.
        several = isinstance(scores, dict)
        return {name: of_scores(rows) for name, rows in scores.items()} if several else of_scores(scores)

    for name, folder in outputs:
        if folder is None:
            continue
        rows = layerwise_inference(
            module,
            g,
            inputs=None if inputs is None else inputs.tensors,
            layers=hidden if name == EMBEDDING else [*hidden, answers],
            ntypes=None if name == EMBEDDING else [ntype],
        )
        tensors = list(flatten(rows).values())
        several = name == EMBEDDING and len(g.ntypes) > 1
        beside: dict[str, Any] = {} if several or len(tensors) == 1 else {"more": {SCORES: tensors[1]}}
        if name == PREDICTION and plan.task == CLASSIFICATION:
            beside["classes"] = g.dataset.manifest.class_names.get(ntype, ())
        write_embeddings(rows if several else tensors[0], g, folder, name=name, overwrite=True, **beside)
        for tensor in tensors:
            tensor.delete()


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Results of a run, equal on every rank but for ``rank``."""

    rank: int
    epochs: tuple[EpochRecord, ...]
    """Includes those before a resume."""
    summary: Mapping[str, object]


def train_dataset(plan: TrainConfig) -> Trained:
    """Train, evaluate and write the run folder; every rank that torchrun started must call it."""
    folder = Path(plan.out)
    options: dict[str, Any] = dict(plan.strategy_options)
    joining: dict[str, Any] = {"timeout": plan.timeout_s, "seed": plan.seed, "device": plan.device}
    with init(plan.strategy, **joining, **options) as session:
        plan = settled(plan, folder / CHECKPOINTS, session)
        g = DistGraph(plan.data, structure=plan.structure, verify=plan.verify, session=session)
        ntype = _check_trainable(plan, g)
        plan, width = _with_task(plan, g, ntype)
        module, inputs, _ = built = build(plan, g, ntype, width)
        module.to(session.device)
        plan, choice = _resolve_auto(plan, g, module)
        plan = with_defaults(plan)
        _check_cache(plan, session)
        check_loop(plan, strategy_of(session).traits, session.strategy)
        _check_outputs(plan, session)
        writes = session.topology.rank == 0
        config = run_config(plan, g, session)
        facts = _configuration(plan, g, folder)
        before = read_epochs(folder) if plan.resume else ()

        def start() -> None:
            # Once the checkpoint is loaded: one that is damaged must not cost the results of the run.
            if writes:
                start_run(folder, config, keep_metrics=plan.resume, plan=choice)

        append = partial(append_epoch, folder) if writes else lambda _record: None
        wrapped, result = _fit(plan, g, ntype, built, facts, start, append)
        epochs = (*(e for e in before if e.epoch < result.first_epoch), *result.epochs)
        costs = facts_of(wrapped, session, result)
        summary = summarise(costs, epochs) | {"traffic": result.traffic}
        if choice is not None:
            choice["outcome"] = asdict(outcome_of(choice["epoch"], epochs, costs))
            summary[AUTO] = plan_summary(choice)
        if result.account:
            shown = {name: value for name, value in result.account.items() if name != "text"}
            # A resumed run has no account of its earlier epochs.
            summary["account"] = {"epochs": len(result.epochs), **shown}
        if writes and (result.epochs or not (folder / SUMMARY).is_file()):
            write_run(folder, config, epochs, summary, plan=choice)
            _draw(epochs, folder, run_title(summary, config))
        _write_outputs(plan, wrapped, inputs, g, ntype)
        return Trained(rank=session.topology.rank, epochs=epochs, summary=summary)


def train_seeds(plan: TrainConfig) -> Trained:
    """Train once with each of the seeds, and write ``summary.json`` of all; every rank must call it."""
    folder, found = Path(plan.out), []
    for seed in plan.seeds:
        name = f"seed-{seed}"
        paths = {"out": plan.out, "predictions": plan.predictions, "save_embeddings": plan.save_embeddings}
        of_seed: dict[str, Any] = {key: str(Path(path) / name) for key, path in paths.items() if path}
        found.append(train_dataset(replace(plan, seed=seed, seeds=(), **of_seed)))
    last = found[-1]
    summary = spread({f"seed-{seed}": one.summary for seed, one in zip(plan.seeds, found, strict=True)})
    if last.rank == 0:
        run_folder.write_json(folder / SUMMARY, summary)
    return replace(last, summary=summary)


def _with_task(plan: TrainConfig, g: DistGraph, ntype: str) -> tuple[TrainConfig, int]:
    """Return ``plan`` with its task and metrics, and the width of the scores, by the labels. Collective."""
    task, width = read_task(g, ntype, LABEL, plan.task)
    plan = replace(plan, task=task, metric=metrics_of(task, plan.metric))
    return plan, width or g.num_classes(ntype)


def _configuration(plan: TrainConfig, g: DistGraph, folder: Path) -> dict[str, object]:
    """Return what a run that goes on must have in common; ConfigError if it differs. Collective."""
    facts = configuration_of(plan, g.dataset.manifest.checksum)
    facts["strategy_options"] = without_keys(plan.strategy_options)
    saved = read_extra(folder / CHECKPOINTS) if plan.goes_on else None
    if saved is not None:
        check_same(saved, facts, folder)
    return facts


def with_defaults(plan: TrainConfig) -> TrainConfig:
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
    """Check that ``g`` has the types and data that the model needs; return the node type to classify."""
    if plan.strategy == AUTO:
        check_plannable(g.dataset.manifest, plan.data)
    where, relational = g.dataset.folder, plan.model in RELATIONAL_KINDS
    if not relational and (len(g.ntypes) != 1 or len(g.canonical_etypes) != 1):
        raise ConfigError(
            f"{where} has {len(g.ntypes)} node and {len(g.canonical_etypes)} edge types, and --model "
            f"{plan.model} is for one of each; use --model {' or '.join(RELATIONAL_KINDS)}, or write a loop "
            "as in examples/07_rgcn.py"
        )
    ntype = labelled_type(g)
    data = g.nodes[ntype].data
    # A relational model has trainable rows where there are no features.
    for name in (LABEL, "train_mask") if relational else (FEATURE, LABEL, "train_mask"):
        if name not in data:
            known = ", ".join(data) or "none"
            raise ConfigError(
                f"{where} has no node data {name!r} (known: {known}); partition a graph that has it "
                "(docs/quickstart.md, Partition a graph, lists the names of columns)"
            )
    for name in g.ntypes:
        shape = g.nodes[name].data[FEATURE].shape if FEATURE in g.nodes[name].data else (0, 0)
        if len(shape) != 2:
            raise ConfigError(f"{FEATURE!r} of {where} has shape {shape}; it must be (N, F)")
    return ntype


def _check_cache(plan: TrainConfig, session: Session) -> None:
    traits = strategy_of(session).traits
    if plan.cache is not None and (traits.features != "rows" or traits.unit == "full_graph"):
        raise ConfigError(
            f"--cache {plan.cache} keeps feature rows of other servers, and strategy {session.strategy!r} "
            "moves none in training; leave --cache out, or use strategy data_parallel"
        )


def run_config(plan: TrainConfig, g: DistGraph, session: Session) -> dict[str, object]:
    """Return the content of ``config.json``: effective options without secrets, ranks, graph, versions."""
    return {
        **asdict(plan),
        "strategy": session.strategy,
        "strategy_options": without_keys(plan.strategy_options),
        "timeout_s": session.timeout_s,
        "ranks": session.topology.world_size,
        "servers": session.topology.num_servers,
        "graph": g.name,
        "nodes": g.num_nodes(),
        "edges": g.num_edges(),
        "parts": g.dataset.manifest.num_parts,
        "partitioned_by": g.dataset.manifest.method,
        "versions": {one.__name__: one.__version__ for one in (dglx_dist, torch, dgl)},
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
    ntype: str,
    built: Built,
    facts: Mapping[str, object],
    begin: Callable[[], None],
    after_epoch: Callback,
) -> tuple[WrappedModel, FitResult]:
    module, inputs, sparse = built
    # A cache that auto chose is filled already.
    if plan.cache is not None and not g.kvstore.has_cache:
        _cache_features(plan, g, ntype, plan.cache)
    folder, options = Path(plan.out) / CHECKPOINTS, common_fields(plan, FitConfig)
    options |= {"ntype": ntype, "inputs": inputs, "configuration": facts, "on_begin": begin}
    config = FitConfig(**options, checkpoint_folder=folder)
    loader_options: dict[str, Any] = {"depth": plan.depth, "num_threads": plan.loader_threads}
    return fit(
        module,
        g,
        config=config,
        fanouts=plan.fanouts,
        batch_size=plan.batch_size,
        make_optimizer=lambda parameters: torch.optim.Adam(
            parameters, lr=plan.lr, weight_decay=plan.weight_decay
        ),
        callbacks=[after_epoch],
        sparse=sparse,
        **{name: value for name, value in loader_options.items() if value is not None},
    )


def _cache_features(plan: TrainConfig, g: DistGraph, ntype: str, policy: str) -> None:
    sampling: dict[str, Any] = {}
    if policy == "vip":
        sampling = {"fanouts": list(plan.fanouts or ()), "batch_size": plan.batch_size}
        sampling["seeds"] = {ntype: training_nodes(g, ntype)}
    for name in g.ntypes:
        if FEATURE in g.nodes[name].data:
            g.cache_rows(FEATURE, alpha=plan.cache_alpha, policy=policy, ntype=name, **sampling)


def _draw(epochs: Sequence[EpochRecord], folder: Path, title: str) -> None:
    # Imported here: Matplotlib costs every other rank half a second.
    from dglx_dist.report.pictures import draw

    try:
        draw(epochs, folder / PICTURE, title=title)
    except OSError as error:
        raise StorageError(
            f"the run is in {folder}, but its picture cannot be written: {error}; `dglx report {folder}` "
            "shows the run and draws it again"
        ) from error
