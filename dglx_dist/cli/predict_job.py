"""Do what ``dglx predict`` promises."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from dglx_dist.api import init
from dglx_dist.cli.train_job import PREDICTION, SCORES, build, list_edge_columns
from dglx_dist.data.storage.files import name_write_failures
from dglx_dist.data.storage.object_store import find_store
from dglx_dist.data.storage.remote import fetch_objects, open_output
from dglx_dist.errors import ConfigError, StorageError
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.options import find_address, format_location
from dglx_dist.records import FEATURE, LABEL, Array
from dglx_dist.report.run_folder import CONFIG, read_run, read_spread
from dglx_dist.report.run_store import fetch_run
from dglx_dist.training.best_epoch import BEST_WEIGHTS, FINAL_WEIGHTS
from dglx_dist.training.config import (
    CLASSIFICATION,
    LINK,
    MULTILABEL,
    REGRESSION,
    ModelConfig,
    PredictConfig,
    TrainConfig,
)
from dglx_dist.training.export import CLASS, ID, to_column
from dglx_dist.training.inference import find_labelled_type, flatten, layerwise_inference
from dglx_dist.training.predictor import Predictor
from dglx_dist.training.tasks import read_task, to_predictions, to_probabilities

_MODEL_OPTIONS = (
    "task",
    "dropout",
    "recompute",
    "model_file",
    "model_sha256",
    "edge_weight",
    "embeddings",
    "seed",
)
"""Options that a run's model depends on, in addition to ``ModelConfig``."""
_TRAINABLE_ROWS = (
    "{} have trainable rows, which are only in checkpoints. Predict all nodes with `dglx train --predictions "
    "DIR`."
)
_MAX_NODES_ONE_BY_ONE = 20_000
"""Maximum number of nodes to compute by their neighbourhoods. For more, all nodes are computed."""


def predict_nodes(config: PredictConfig) -> int:
    """Predict the nodes and write the table. Return how many there are.

    Raises ConfigError if the run, the dataset and the nodes do not belong together, and StorageError if a
    file cannot be read or written.
    """
    config = replace(config, run=fetch_run(config.run))
    folder = Path(config.run)
    if read_spread(folder) is not None:
        raise ConfigError(
            f"{folder} has runs of several seeds. Predict with one of them, like {folder}/seed-0."
        )
    run = read_run(folder)
    plan = _read_plan(run.config, config)
    names = None if config.nodes is None else _read_ids(Path(fetch_objects(format_location(config.nodes))))
    store = find_store(config.out)
    if store is None:
        with name_write_failures(config.out):
            config.out.parent.mkdir(parents=True, exist_ok=True)
    elif not config.overwrite and "" in store.list():
        raise ConfigError(f"--out {store.address} exists. Choose another file, or add --overwrite.")

    with init("data_parallel", seed=plan.seed, device=config.device) as session:
        g = DistGraph(plan.data, structure="replicated", session=session)
        _check_dataset(g, run.config, config)
        ntype = find_labelled_type(g)
        task, width = read_task(g, ntype, LABEL, plan.task)
        plan = replace(plan, task=task)
        if config.out.suffix == ".csv" and (task == MULTILABEL or width > 1):
            raise ConfigError(
                f"predictions of {width} values are lists, which --out {format_location(config.out)} cannot "
                "hold. Use .parquet."
            )
        ids = torch.arange(g.num_nodes(ntype)) if names is None else _find_nodes(g, ntype, names, config)
        module = _load_model(plan, g, ntype, width, config)
        scores = _compute_scores(module, plan, g, ntype, ids)
        table = _make_table(g, ntype, plan, ids, scores, with_scores=config.scores)
        g.close()

    with open_output(config.out) as partial:
        if config.out.suffix == ".csv":
            pa.csv.write_csv(table, partial)
        else:
            pq.write_table(table, partial)
    return len(table)


def _read_plan(run_config: Mapping[str, Any], config: PredictConfig) -> TrainConfig:
    """Read the run options that its model depends on."""
    lacking = [name for name in ("data", "model", "task") if name not in run_config]
    if lacking:
        raise StorageError(
            f"{Path(config.run) / CONFIG} lacks {', '.join(lacking)}, so it is damaged or of another "
            "version. Train again."
        )
    # The training device may be missing here.
    names = {field.name for field in fields(ModelConfig)} - {"device"} | {*_MODEL_OPTIONS}
    values: dict[str, Any] = {}
    for name in names & run_config.keys():
        value = run_config[name]
        values[name] = tuple(value) if isinstance(value, list) else value
    plan = TrainConfig(data=config.data or run_config["data"], **values)
    if find_address(plan.data) is None and not Path(plan.data).is_dir():
        raise ConfigError(
            f"there is no folder {plan.data}, where {config.run} had its dataset. Name the folder with "
            "--data DIR, or run the command where the training ran."
        )
    if plan.task == LINK:
        raise ConfigError(
            f"{config.run} predicts links, but dglx predict predicts nodes. Rank links with `dglx train "
            "--task link --predictions DIR`."
        )
    if plan.embeddings is not None:
        raise ConfigError(_TRAINABLE_ROWS.format(f"the nodes of {config.run}"))
    return plan


def _check_dataset(g: DistGraph, run_config: Mapping[str, Any], config: PredictConfig) -> None:
    """Raise ConfigError if ``g`` is not the graph that the run trained on."""
    facts = {"graph": g.name, "nodes": g.num_nodes(), "edges": g.num_edges()}
    facts["dataset_checksum"] = g.dataset.manifest.checksum
    for name, value in facts.items():
        if run_config.get(name) != value:
            raise ConfigError(
                f"{config.run} trained on a dataset with {name} {run_config.get(name)!r}, but "
                f"{g.dataset.location} has {value!r}. Name the dataset of the run with --data DIR."
            )
    missing = [ntype for ntype in g.ntypes if FEATURE not in g.nodes[ntype].data]
    if missing:
        raise ConfigError(_TRAINABLE_ROWS.format(f"nodes of type {missing[0]!r}"))


def _read_ids(path: Path) -> Array:
    """Read node ids, as texts or integers. Raise StorageError if the file has none."""
    try:
        if path.suffix == ".txt":
            lines = path.read_text(encoding="utf-8-sig").splitlines()
            table = pa.table({ID: [line.strip() for line in lines if line.strip()]})
        elif path.suffix == ".parquet":
            table = pq.read_table(path)
        else:
            # As in node tables, an id like 007 is a text.
            options = pa.csv.ConvertOptions(column_types={ID: pa.string()})
            table = pa.csv.read_csv(path, convert_options=options)
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        raise StorageError(f"--nodes {path} cannot be read: {error}") from error

    if table.column_names.count(ID) != 1:
        raise StorageError(
            f"--nodes {path} has {table.column_names.count(ID) or 'no'} column {ID!r} (columns: "
            f"{', '.join(table.column_names)}). Rename the column of the ids."
        )
    column = table[ID]
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    is_text = pa.types.is_string(column.type) or pa.types.is_large_string(column.type)
    if len(column) == 0 or column.null_count or not (is_text or pa.types.is_integer(column.type)):
        raise StorageError(
            f"--nodes {path} has {len(column)} ids of type {column.type}, of which {column.null_count} are "
            "missing. Write a text or a whole number for each node."
        )
    return column.combine_chunks().to_numpy(zero_copy_only=False)


def _find_nodes(g: DistGraph, ntype: str, names: Array, config: PredictConfig) -> Tensor:
    """Find the nodes that the user names, and return their ids in ``g``."""
    if g.dataset.manifest.user_ids.get(ntype) != "string" and names.dtype.kind in "UO":
        try:
            names = names.astype(np.int64)
        except (OverflowError, ValueError) as error:
            raise ConfigError(
                f"--nodes {config.nodes}: {error}, but the ids of the dataset are integers."
            ) from error
    try:
        return g.new_ids(names, ntype, from_user_ids=True)
    except IndexError as error:
        raise ConfigError(f"--nodes {config.nodes}: {error}") from error


def _load_model(plan: TrainConfig, g: DistGraph, ntype: str, width: int, config: PredictConfig) -> nn.Module:
    """Build the run's model, and load its weights."""
    path = Path(config.run) / (BEST_WEIGHTS if config.weights == "best" else FINAL_WEIGHTS)
    if not path.is_file():
        raise StorageError(f"there are no weights in {path}. The run did not finish, or they were moved.")
    module, _, _ = build(plan, g, ntype, width or g.num_classes(ntype))
    if plan.task == REGRESSION:
        # The file replaces these values.
        module.standardise(torch.zeros(width), torch.ones(width))  # type: ignore[operator]  # all models have it
    try:
        module.load_state_dict(load_file(path))
    except (OSError, RuntimeError, SafetensorError) as error:
        raise StorageError(
            f"the weights in {path} are damaged, or belong to another model than {config.run}: {error}"
        ) from error
    return module.to(g.session.device)


def _compute_scores(module: nn.Module, plan: TrainConfig, g: DistGraph, ntype: str, ids: Tensor) -> Tensor:
    """Compute the scores for the nodes ``ids``. Return (n, C) rows on the host, with C classes or numbers.

    For a few nodes, only their neighbourhoods are computed. For many, it is cheaper to compute all nodes.
    """
    edge_columns = list_edge_columns(plan)
    if g.is_homogeneous and len(ids) <= _MAX_NODES_ONE_BY_ONE:
        scores: Tensor = Predictor(module, g, edge_feats=edge_columns)(ids)
        return scores.cpu()

    results = layerwise_inference(module, g, ntypes=[ntype], edge_feats=edge_columns)
    (table,) = flatten(results).values()
    return cast("Tensor", table[ids])


def _make_table(
    g: DistGraph, ntype: str, plan: TrainConfig, ids: Tensor, scores: Tensor, *, with_scores: bool
) -> pa.Table:
    """Build the table with the answers and the user's ids."""
    columns = {ID: pa.array(g.user_ids(ids, ntype))}
    columns[PREDICTION] = to_column(to_predictions(plan.task, scores))
    names = g.dataset.manifest.class_names.get(ntype, ())
    if plan.task == CLASSIFICATION and len(names):
        columns[CLASS] = pa.array(names, pa.string()).take(columns[PREDICTION])
    if with_scores:
        columns[SCORES] = to_column(to_probabilities(plan.task, scores))
    return pa.table(columns)
