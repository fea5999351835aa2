"""What ``dglx train`` does in each rank: open, train, evaluate, write the run folder."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import dgl
import torch

import dglx_dist
from dglx_dist.cluster.collectives import broadcast_json
from dglx_dist.cluster.session import Session
from dglx_dist.cluster.topology import read_launch
from dglx_dist.errors import ConfigError, StorageError
from dglx_dist.graph import DistGraph
from dglx_dist.graph.opening import together
from dglx_dist.planner.graph_stats import check_plannable
from dglx_dist.records import FEATURE, LABEL, EpochRecord
from dglx_dist.report.picture import draw
from dglx_dist.report.rundir import PICTURE, append_epoch, launch_of, read_epochs, start_run, write_run
from dglx_dist.report.summary import run_title, summarise
from dglx_dist.run.auto_outcome import described, outcome_of
from dglx_dist.run.auto_plan import CHECKPOINTS, settle_strategy
from dglx_dist.run.facts import facts_of
from dglx_dist.run.fit import fit, training_nodes
from dglx_dist.run.models import Built, build
from dglx_dist.run.plan import TrainPlan
from dglx_dist.run.predict import check_outputs, write_outputs
from dglx_dist.run.session import default_batch_size, default_fanouts, init
from dglx_dist.strategies.base import WrappedModel
from dglx_dist.strategies.opening import strategy_of
from dglx_dist.strategies.registry import AUTO
from dglx_dist.training.evaluate import labelled_type
from dglx_dist.training.fit import Callback, FitConfig, FitResult
from dglx_dist.training.kinds import RELATIONAL_KINDS
from dglx_dist.training.tracing import check_trace, without_keys

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a run came to, on every rank."""

    rank: int
    folder: Path
    epochs: tuple[EpochRecord, ...]
    """Those before a resume included."""
    summary: Mapping[str, object]


def train_dataset(plan: TrainPlan) -> Trained:
    """Train as ``plan`` says and write the run folder; every rank that torchrun started must call it.

    Raises:
        ConfigError: the dataset lacks what training needs, or an option cannot be honoured.
        StorageError: the dataset is damaged, or the run folder cannot be written.
        CheckpointError: the checkpoint to resume from does not match.
        PeerError: another rank died or fell silent.
    """
    folder = Path(plan.out)
    options: dict[str, Any] = dict(plan.strategy_options)
    with init(plan.strategy, timeout=plan.timeout_s, seed=plan.seed, **options) as session:
        plan = _going_on_after_restart(plan, session)
        g = DistGraph(plan.data, structure=plan.structure, verify=plan.verify, session=session)
        plan, choice = _settled_strategy(plan, g)
        plan = settled(plan)
        ntype = check_trainable(plan, g)
        check_outputs(plan, g)
        if plan.trace is not None:
            check_trace(Path(plan.trace).absolute(), session)
        writes = session.topology.rank == 0
        config = resolved(plan, g, session)
        before = read_epochs(folder) if plan.resume else ()
        if writes:
            if not plan.resume:
                # A later --resume, or a restart, would go on from those of the run that is replaced.
                shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
            start_run(folder, config, keep_metrics=plan.resume, plan=choice)
        built = build(plan, g, ntype, g.num_classes(ntype))
        wrapped, result = _fit(
            plan, g, ntype, built, lambda record: append_epoch(folder, record) if writes else None
        )
        epochs = (*(e for e in before if e.epoch < result.first_epoch), *result.epochs)
        facts = facts_of(session, result)
        summary = summarise(facts, epochs)
        if choice is not None:
            choice["outcome"] = asdict(outcome_of(choice["epoch"], epochs, facts))
            summary[AUTO] = described(choice)
        if result.account:
            shown = {name: value for name, value in result.account.items() if name != "text"}
            # A resumed run has no account of the epochs before.
            summary["account"] = {"epochs": len(result.epochs), **shown}
        if writes:
            write_run(folder, config, epochs, summary, plan=choice)
            _draw(epochs, folder, run_title(summary, config))
        write_outputs(plan, wrapped, built, g, ntype)
        return Trained(rank=session.topology.rank, folder=folder, epochs=epochs, summary=summary)


def _going_on_after_restart(plan: TrainPlan, session: Session) -> TrainPlan:
    """Return ``plan`` with ``resume`` where the launcher has restarted this run; collective."""
    (launch, restarts), folder, leads = read_launch(), Path(plan.out), session.topology.rank == 0
    if restarts == 0 or plan.resume or plan.checkpoint_every == 0:
        return plan
    # An attempt may have ended before it replaced an earlier run, whose checkpoints lie there then.
    mine = together(session, lambda: launch_of(folder) if leads else "", StorageError)
    if broadcast_json(mine == launch, session) is not True:
        return plan
    if leads:
        log.warning(
            "restart %d by the launcher: the run goes on from the newest checkpoint in %s, if there is one",
            restarts,
            folder / CHECKPOINTS,
        )
    return replace(plan, resume=True)


def _settled_strategy(plan: TrainPlan, g: DistGraph) -> tuple[TrainPlan, dict[str, Any] | None]:
    """Return ``plan`` with the strategy that suits it, where it asks for ``auto``; collective."""
    if plan.strategy != AUTO:
        return plan, None
    check_plannable(g.dataset.manifest, plan.data)
    # What is trained draws its weights anew, as if the strategy had been named.
    with torch.random.fork_rng(devices=[]):
        module = build(plan, g, g.ntypes[0], g.num_classes(g.ntypes[0])).module
    return settle_strategy(plan, g, module)


def settled(plan: TrainPlan) -> TrainPlan:
    """Return ``plan`` with what its strategy takes where the plan says nothing.

    Raises:
        UnknownNameError: there is no such strategy.
    """
    fanouts = default_fanouts(plan.strategy, plan.layers) if plan.fanouts is None else plan.fanouts
    usual = default_batch_size(plan.strategy)
    ahead = None if usual is None else 1
    return replace(
        plan,
        fanouts=fanouts,
        batch_size=usual if plan.batch_size is None else plan.batch_size,
        depth=ahead if plan.depth is None else plan.depth,
        loader_threads=ahead if plan.loader_threads is None else plan.loader_threads,
    )


def check_trainable(plan: TrainPlan, g: DistGraph) -> str:
    """Return the type of the nodes to classify.

    Raises:
        ConfigError: ``plan.model`` does not fit the types of ``g``, or features, labels or training nodes are
            missing.
    """
    where, relational = g.dataset.folder, plan.model in RELATIONAL_KINDS
    if not relational and (len(g.ntypes) != 1 or len(g.canonical_etypes) != 1):
        raise ConfigError(
            f"{where} has {len(g.ntypes)} node and {len(g.canonical_etypes)} edge types, and --model "
            f"{plan.model} is for one of each; take --model {' or '.join(RELATIONAL_KINDS)}, or write a loop "
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
                "(docs/quickstart.md, Cut a graph, says how columns are called)"
            )
    traits = strategy_of(g.session).traits
    if plan.cache is not None and (traits.features != "rows" or traits.unit == "full_graph"):
        raise ConfigError(
            f"--cache {plan.cache} keeps feature rows of other servers, and strategy {g.session.strategy!r} "
            "moves none in training; leave --cache out"
        )
    for name in g.ntypes:
        shape = g.nodes[name].data[FEATURE].shape if FEATURE in g.nodes[name].data else (0, 0)
        if len(shape) != 2:
            raise ConfigError(f"{FEATURE!r} of {where} has shape {shape}; it must be (N, F)")
    return ntype


def resolved(plan: TrainPlan, g: DistGraph, session: Session) -> dict[str, object]:
    """Return what ``config.json`` holds: every option as it was in force, keys left out, and what it met."""
    return {
        **asdict(plan),
        "strategy": session.strategy,
        "strategy_options": without_keys(plan.strategy_options),
        "timeout_s": session.timeout_s,
        "ranks": session.topology.world_size,
        "servers": session.topology.num_servers,
        "launch": read_launch()[0],
        "graph": g.name,
        "nodes": g.num_nodes(),
        "edges": g.num_edges(),
        "parts": g.dataset.manifest.num_parts,
        "partitioned_by": g.dataset.manifest.method,
        "versions": {
            "dglx_dist": dglx_dist.__version__,
            "torch": torch.__version__,
            "dgl": dgl.__version__,
        },
    }


def _fit(
    plan: TrainPlan, g: DistGraph, ntype: str, built: Built, after_epoch: Callback
) -> tuple[WrappedModel, FitResult]:
    # Where the cache was chosen, it is filled.
    if plan.cache is not None and not g.kvstore.has_cache:
        _cache_features(plan, g, ntype, plan.cache)
    keeps = plan.checkpoint_every > 0 or plan.resume
    config = FitConfig(
        epochs=plan.epochs,
        eval_every=plan.eval_every,
        patience=plan.patience,
        checkpoint_folder=Path(plan.out) / CHECKPOINTS if keeps else None,
        checkpoint_every=max(plan.checkpoint_every, 1),
        resume=plan.resume,
        ntype=ntype,
        inputs=built.inputs,
        trace=plan.trace,
        trace_steps=plan.trace_steps,
    )
    of_loader: dict[str, Any] = {"depth": plan.depth, "num_threads": plan.loader_threads}
    return fit(
        built.module,
        g,
        config=config,
        fanouts=plan.fanouts,
        batch_size=plan.batch_size,
        make_optimizer=lambda parameters: torch.optim.Adam(
            parameters, lr=plan.lr, weight_decay=plan.weight_decay
        ),
        callbacks=[after_epoch],
        sparse=built.sparse,
        **{name: value for name, value in of_loader.items() if value is not None},
    )


def _cache_features(plan: TrainPlan, g: DistGraph, ntype: str, policy: str) -> None:
    of_batches: dict[str, Any] = {}
    if policy == "vip":
        of_batches = {"fanouts": list(plan.fanouts or ()), "batch_size": plan.batch_size}
        of_batches["seeds"] = {ntype: training_nodes(g, ntype)}
    for name in g.ntypes:
        if FEATURE in g.nodes[name].data:
            g.cache_rows(FEATURE, alpha=plan.cache_alpha, policy=policy, ntype=name, **of_batches)


def _draw(epochs: Sequence[EpochRecord], folder: Path, title: str) -> None:
    try:
        draw(epochs, folder / PICTURE, title=title)
    except OSError as error:
        raise StorageError(
            f"the run is in {folder}, but its picture cannot be written: {error}; `dglx report {folder}` "
            "shows the run and draws it again"
        ) from error
