"""Public functions: init, partition_graph, distribute, DataLoader, wrap and fit."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeAlias, final

import dgl
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from dglx_dist.comm.collectives import broadcast_json, run_on_all_ranks
from dglx_dist.comm.session import Session, current_session, get_session_or_start, show_briefly
from dglx_dist.compat.dist_graph import DistGraph as ScriptGraph
from dglx_dist.compat.namespace import ScriptModel
from dglx_dist.data.partition.base import PARTITIONERS, PartitionOptions, PartitionPlan
from dglx_dist.data.partition.prepare import content_key, partition_to_disk
from dglx_dist.data.sources import load_dataset
from dglx_dist.data.storage.files import (
    name_write_failures,
    partial_folder,
    publish,
    remove_abandoned,
    replace_folder,
)
from dglx_dist.data.storage.manifest import check_target, is_dgl_config, read_manifest
from dglx_dist.data.storage.reader import open_dataset, verify_files
from dglx_dist.data.storage.remote import is_dataset, stage_dataset
from dglx_dist.data.storage.writer import FeatureDtype
from dglx_dist.dataloading.clusters import ClusterGCNSampler
from dglx_dist.dataloading.own_order import UserColumns, check_order
from dglx_dist.dataloading.pyg import open_converter
from dglx_dist.errors import ConfigError, DatasetError, PeerError, StorageError
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.graph.split import node_split
from dglx_dist.options import check_integer, list_names
from dglx_dist.planner.auto import (
    Training,
    check_session_options,
    choose_in_job,
    default_batch_size,
    default_fanouts,
    resolve,
)
from dglx_dist.records import FEATURE, Array, RawGraph
from dglx_dist.registry import AUTO
from dglx_dist.report.outcome import build_outcome, collect_facts
from dglx_dist.strategies.base import (
    STRATEGIES,
    Reduction,
    WrappedModel,
    begin,
    open_strategy,
    resolve_strategy,
)
from dglx_dist.strategies.push_pull.feature_columns import write_slices
from dglx_dist.training.checkpoint import Sparse
from dglx_dist.training.config import BF16
from dglx_dist.training.fit import train
from dglx_dist.training.fit_config import Callback, FitConfig, FitResult, Scheduler, needs_own_loop
from dglx_dist.training.inference import find_labelled_type
from dglx_dist.training.loop import TrainingLoader
from dglx_dist.training.object_state import Stateful
from dglx_dist.training.relational import EntityInputs
from dglx_dist.training.resume import resolve_resume
from dglx_dist.training.tasks import check_inputs, read_task, training_nodes

if TYPE_CHECKING:
    from dglx_dist.planner.records import Choice


log = logging.getLogger(__name__)


def partition_cached(graph: RawGraph, plan: PartitionPlan, cache: Path) -> Path:
    """Partition ``graph`` into a folder in ``cache`` unless an intact one exists. Return the folder.

    One process calls this function. If several runs partition the same graph into the same cache at once,
    they all use the first result. Incomplete folders that killed runs left behind are removed. Raises
    StorageError if the cache cannot be written, which is checked before partitioning starts.
    """
    folder = (cache / f"{Path(graph.name).name}-{content_key(graph, plan)}").absolute()
    if is_dataset(folder):
        damage = _find_damage(folder)
        if not damage:
            return folder
        log.warning("%s is partitioned again: %s", folder, damage)
    else:
        check_target(folder, overwrite=None)

    with ExitStack() as stack:
        with name_write_failures(cache):
            partitioned = stack.enter_context(partial_folder(folder)) / "dataset"
            remove_abandoned(folder.parent, below=False)

        partition_to_disk(graph, partitioned, plan, write_columns=write_slices)
        with name_write_failures(cache):
            # Another run may have published an intact folder in the meantime, and may train on it.
            if not publish(partitioned, folder) and _find_damage(folder):
                replace_folder(partitioned, folder)
    return folder


def _find_damage(folder: Path) -> str:
    """Return why the dataset in ``folder`` cannot be used, or an empty text if all its files are intact."""
    try:
        # Verifying all bytes costs little: the caller has just read as many to compute the checksum in the
        # folder's name. The dataset is not opened here, because opening it would clean the cache.
        verify_files(folder, read_manifest(folder), "full")
    except (DatasetError, StorageError) as problem:
        return str(problem)
    return ""


OriginalIds: TypeAlias = Tensor | dict[Any, Tensor]


def partition_graph(  # noqa: PLR0913  # the signature is DGL's
    g: dgl.DGLGraph,
    graph_name: str,
    num_parts: int,
    out_path: str | PathLike[str],
    num_hops: int = 1,
    part_method: str = "metis",
    balance_ntypes: Tensor | None = None,
    balance_edges: bool = False,
    return_mapping: bool = False,
    num_trainers_per_machine: int = 1,
    objtype: Literal["cut", "vol"] = "cut",
    graph_formats: str | Sequence[str] | None = None,
    use_graphbolt: bool = False,
    *,
    balance: Sequence[str] = (),
    tolerance: float | Mapping[str, float] | None = None,
    fast: bool = False,
    seed: int = 0,
    format: Literal["dglx", "dgl"] = "dglx",
    overwrite: bool = False,
    feature_dtype: torch.dtype | str | Mapping[str, torch.dtype | str] | None = None,
) -> tuple[OriginalIds, OriginalIds] | None:
    """Partition ``g`` into ``out_path/graph_name``, which ``DistGraph`` opens. Call this in one process.

    Args:
        g: Homogeneous or heterogeneous graph with its node and edge data.
        graph_name: Name for the graph and its folder.
        num_parts: Number of parts P. Any number of ranks and servers can train on them later.
        out_path: Parent of the graph's folder, or an address in an object store.
        num_hops: Must be 1. Each part stores the in-edges of its own nodes, and training needs no more.
        part_method: Name of any partitioner.
        balance_ntypes: (N,) integers. Each value is balanced separately. For homogeneous graphs only.
        balance_edges: Balance the in-edges too. With several edge types, this is ``balance=["etype"]``,
            otherwise ``balance=["degree"]``.
        return_mapping: Whether to return the original ids.
        num_trainers_per_machine: Trainers per part, t. If t > 1, each part is split once more by the same
            method. The node data ``trainer_id`` is then the nearest trainer in [0, P x t), and the edge data
            ``trainer_id`` that of the destination. Pass it to :func:`node_split` as ``node_trainer_ids``.
        objtype: ``cut`` minimises cut edges, ``vol`` minimises communicated nodes.
        graph_formats: None or ``csc``, the only stored format.
        use_graphbolt: Must be False.
        balance: Weights to balance: nodes, degree, train, val, test, ntype, etype or a node column.
        tolerance: How much the heaviest part may exceed its share: one number, or numbers by constraint.
        fast: Use the cheap variant of kaminpar (less time) or metis (less memory, as in DistDGL). More edges
            are cut.
        seed: Random seed. The same seed gives the same parts.
        format: ``dgl`` writes files that DGL's own ``load_partition`` reads, into ``out_path`` itself.
        overwrite: Replace an existing dataset.
        feature_dtype: Dtype in which features are stored, for all columns or by column name: float16,
            bfloat16 or float32. Blocks get half-precision features as float32.

    Returns:
        With ``return_mapping``, the original node ids and the original edge ids in the new order. Both are
        int64 tensors, or dicts that map types to int64 tensors for a heterogeneous graph.

    Raises:
        ConfigError: an argument or a combination is not supported. No argument is ignored silently.
        DatasetError: ``g`` is not sound.
        StorageError: the folder exists and ``overwrite`` is not set.
    """
    _check_dgl_arguments(num_hops, graph_formats, use_graphbolt, return_mapping and format == "dgl")
    type_weights = _type_weights(balance_ntypes)
    balanced = [*list_names(balance), *type_weights]
    if balance_edges:
        balanced.append("etype" if len(g.canonical_etypes) > 1 else "degree")

    options = PartitionOptions(
        # A name may be given twice.
        balance=tuple(dict.fromkeys(balanced)),
        tolerance={} if tolerance is None else tolerance,
        objective=objtype,
        fast=fast,
    )
    plan = PartitionPlan(
        num_parts=num_parts,
        method=part_method,
        seed=seed,
        options=options,
        format=format,
        overwrite=overwrite,
        trainers_per_part=num_trainers_per_machine,
        feature_dtype=_format_dtypes(feature_dtype),
    )

    folder = Path(out_path) if format == "dgl" else Path(out_path) / graph_name
    graph = load_dataset(g, name=graph_name)
    with stage_dataset(folder, overwrite, format=format) as target:
        partition_to_disk(graph, target, plan, weights=type_weights, write_columns=write_slices)
    return original_ids(folder) if return_mapping else None


def original_ids(folder: str | Path) -> tuple[OriginalIds, OriginalIds]:
    """Return the original ids that a dataset's nodes and edges had before partitioning, by new id.

    Any process may call this alone.

    Returns:
        (nodes, edges): int64 (N,) and (E,) tensors, or dicts by type for a heterogeneous graph.

    Raises:
        StorageError: the dataset is missing or damaged, or a part is on another machine.
    """
    dataset = open_dataset(folder)
    manifest = dataset.manifest
    parts = [dataset.part(number) for number in range(manifest.num_parts)]
    nodes: Any = {t: _concatenate([part.original_node_ids(t) for part in parts]) for t in manifest.node_types}
    edges: Any = {t: _concatenate([part.original_edge_ids(t) for part in parts]) for t in manifest.edge_types}
    if manifest.is_homogeneous:
        return nodes[manifest.node_types[0]], edges[manifest.edge_types[0]]
    return nodes, edges


def distribute(
    graph: dgl.DGLGraph | str | PathLike[str],
    *,
    strategy: str | None = None,
    parts: int | None = None,
    method: str | None = None,
    balance: Sequence[str] = (),
    seed: int | None = None,
    cache: str | PathLike[str] = "data",
    structure: Literal["auto", "replicated", "partitioned"] = "auto",
) -> DistGraph:
    """Return ``graph`` as a graph that all ranks share. Every rank must call this.

    If no session is open, one is opened first, as by :func:`init` without arguments. Torch's generator then
    keeps the script's seed.

    Rank 0 partitions the graph once, into a folder in ``cache``. The folder's name depends on the options and
    the graph's content, so later runs reuse it. Meanwhile, the other ranks wait for at most the session's
    time-out. If partitioning takes longer, raise the time-out or partition the graph beforehand. Several
    machines need ``cache`` on a shared disk.

    Args:
        graph: A DGLGraph (only rank 0's is used), anything that ``load_dataset`` accepts, the folder or
            address of a partitioned dataset, or the JSON file that describes a partition in DGL's format.
            A DGLGraph's columns keep their names, dtypes and shapes, except that split masks become bool,
            integer ``label`` columns become int64 (N,), and bfloat16 becomes float32. Columns from other
            sources get our names (``feat``, ``label``), see ``load_dataset``.
        strategy: Name or alias of a strategy. None: the session's, or the default that :func:`init` uses.
        parts: Number of parts P. None: one per server. For a graph that is partitioned already, leave out
            ``parts``, ``method``, ``balance`` and ``seed``.
        method: Name of a partitioner. None: the default one.
        balance: Weights to balance, see :func:`partition_graph`.
        seed: Seed for the partitioner. None: 0.
        cache: Folder for partitions. Incomplete folders that killed runs left in it are removed.
        structure: Whether each server maps the whole structure, see :class:`DistGraph`.

    Raises:
        DatasetError: the graph is not sound.
        UnknownNameError: there is no such strategy.
        ConfigError: an argument is not supported, or the session is open for another strategy.
        PeerError: ranks are missing after the time-out.
        StorageError: a dataset is damaged, or rank 0 cannot write the cache. Other ranks raise ConfigError.
    """
    session = _session_for(strategy)

    def locate() -> dict[str, str] | None:
        """Return {DistGraph argument: dataset path} on rank 0, and None on other ranks."""
        if session.topology.rank != 0:
            return None

        if isinstance(graph, (str, PathLike)):
            argument = _find_dataset_argument(graph)
            if argument is not None:
                balanced = list_names(balance)
                _refuse_partitioning(graph, parts=parts, method=method, balance=balanced, seed=seed)
                return {argument: str(graph)}

        plan = PartitionPlan(
            num_parts=session.topology.num_servers if parts is None else parts,
            method=method,
            seed=seed or 0,
            options=PartitionOptions(balance=list_names(balance)),
        )
        # A script reads the columns of its DGLGraph by their own names.
        raw = load_dataset(graph) if isinstance(graph, (str, PathLike)) else load_dataset(graph, rename=False)
        return {"folder": str(partition_cached(raw, plan, Path(cache).expanduser()))}

    # Rank 0 decides, because another machine may not see the new files on a shared disk yet.
    with _explain_timeout(session):
        location = broadcast_json(run_on_all_ranks(session, locate, ConfigError), session)

    paths: dict[str, Any] = {argument: Path(path).expanduser() for argument, path in location.items()}
    g = DistGraph(**paths, structure=structure, session=session)
    if isinstance(graph, dgl.DGLGraph) and g.dataset.manifest.num_parts > 1:
        g.user_columns = UserColumns(graph)
    return g


@contextmanager
def _explain_timeout(session: Session) -> Iterator[None]:
    """Add a hint to the time-out error on other ranks: rank 0 may still be partitioning the graph."""
    try:
        yield
    except PeerError as error:
        if session.topology.rank == 0:
            raise
        raise PeerError(
            f"waiting for rank 0 to partition the graph failed: {error}. If this takes longer than the "
            "time-out, run `dglx partition` or dx.partition_graph beforehand, or raise dx.init(timeout=)."
        ) from error


def _session_for(strategy: str | None) -> Session:
    def start() -> Session:
        return begin(resolve_strategy(strategy, auto=True), {}, check=check_session_options)

    session = get_session_or_start(start)
    if strategy is not None and session.strategy != resolve_strategy(strategy, auto=True):
        raise ConfigError(
            f"strategy={strategy!r} differs from {session.strategy!r}, the strategy of the open session. "
            "Name the strategy once, either in dx.init or in dx.distribute."
        )
    return session


def _find_dataset_argument(location: str | PathLike[str]) -> Literal["folder", "part_config"] | None:
    path = Path(location).expanduser()
    if is_dataset(location):
        return "folder"
    return "part_config" if path.suffix == ".json" and is_dgl_config(path) else None


def _refuse_partitioning(path: str | PathLike[str], **options: object) -> None:
    names = [name for name, value in options.items() if value not in (None, ())]
    if names:
        raise ConfigError(
            f"{path} is partitioned already, so {', '.join(names)} would have no effect. Leave that out, or "
            "pass the original graph."
        )


def _check_dgl_arguments(
    num_hops: int, graph_formats: str | Sequence[str] | None, use_graphbolt: bool, mapping_of_dgl_format: bool
) -> None:
    formats = [graph_formats] if isinstance(graph_formats, str) else list(graph_formats or ["csc"])
    if num_hops != 1:
        raise ConfigError(f"num_hops is {num_hops}, but farther neighbours are fetched on demand. Use 1.")
    if formats != ["csc"]:
        raise ConfigError(f"graph_formats is {graph_formats!r}, but only csc is stored. Leave it out.")
    if use_graphbolt:
        raise ConfigError("use_graphbolt is True, but all strategies share one format. Leave it out.")
    if mapping_of_dgl_format:
        raise ConfigError("return_mapping needs format='dglx'. The files of DGL's format hold orig_id.")


def _type_weights(balance_ntypes: Tensor | None) -> dict[str, Array]:
    if balance_ntypes is None:
        return {}
    types = torch.as_tensor(balance_ntypes).numpy()
    return {f"balance_ntypes={value}": (types == value).astype(np.int64) for value in np.unique(types)}


def _format_dtypes(dtype: torch.dtype | str | Mapping[str, torch.dtype | str] | None) -> FeatureDtype | None:
    if isinstance(dtype, Mapping):
        return {name: str(value).removeprefix("torch.") for name, value in dtype.items()}
    return None if dtype is None else str(dtype).removeprefix("torch.")


def _concatenate(arrays: Sequence[Array]) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays))


@final
class DistDataset:
    """A DGL dataset with a distributed graph, and this rank's share of each split.

    Args:
        g: The graph, with the masks ``train_mask``, ``val_mask`` and ``test_mask`` in its node data.
        num_classes: Number of classes that the dataset reports. None: it has no such attribute.
    """

    def __init__(self, g: DistGraph, num_classes: int | None) -> None:
        self._g = g
        self._num_classes = num_classes

    def __getitem__(self, index: int) -> DistGraph:
        """Return the graph. Raise IndexError if ``index`` is not 0."""
        if index not in (0, -1):
            raise IndexError(f"the dataset has one graph, but index {index} was requested")
        return self._g

    def __len__(self) -> int:
        return 1

    @property
    def num_classes(self) -> int:
        """Number of label classes. ConfigError if neither the dataset nor its labels tell it."""
        return self._g.num_classes() if self._num_classes is None else self._num_classes

    @property
    def train_idx(self) -> Tensor:
        """(n,) int64 ids of this rank's nodes in ``train_mask``, see :func:`node_split`."""
        return self._share("train_mask")

    @property
    def val_idx(self) -> Tensor:
        """(n,) int64 ids of this rank's nodes in ``val_mask``."""
        return self._share("val_mask")

    @property
    def test_idx(self) -> Tensor:
        """(n,) int64 ids of this rank's nodes in ``test_mask``."""
        return self._share("test_mask")

    def __getattr__(self, name: str) -> NoReturn:
        # The original dataset's attributes are not copied, because they refer to the old ids.
        raise AttributeError(
            f"a distributed dataset has no {name!r}, only [0], num_classes, train_idx, val_idx and test_idx, "
            "because its nodes have new ids. Use the original dataset, and g.orig_ids(ids) for its ids."
        )

    def _share(self, mask: str) -> Tensor:
        ntypes = [ntype for ntype in self._g.ntypes if mask in self._g.nodes[ntype].data]
        if len(ntypes) != 1:
            raise ConfigError(
                f"the node types with {mask!r} are {', '.join(ntypes) or 'none'}, but there must be one. Use "
                "dx.node_split(g.nodes[ntype].data[mask], ntype=ntype)."
            )
        return node_split(self._g.nodes[ntypes[0]].data[mask], ntype=ntypes[0])


def distribute_dataset(dataset: dgl.data.DGLDataset, **options: Any) -> DistDataset:
    """Distribute the graph in a DGL dataset with :func:`distribute`. Every rank must call this.

    Args:
        dataset: Dataset with one graph, like ``AsNodePredDataset(...)`` or ``CoraGraphDataset()``. Only the
            dataset on rank 0 is used.
        options: Options for :func:`distribute`.

    Raises:
        ConfigError: ``dataset`` is no dataset or has several graphs, or an argument is not supported.
        DatasetError: the graph is not sound.
        StorageError: the cache cannot be written.
    """
    count = len(dataset) if isinstance(dataset, Sized) else None
    if count is None:
        raise ConfigError(f"{type(dataset).__name__} is not a DGL dataset. Use dx.distribute for a graph.")
    if count != 1:
        raise ConfigError(
            f"{type(dataset).__name__} has {count} graphs, but only one can be distributed. Choose one with "
            "dx.distribute(dataset[i])."
        )
    graph = dataset[0]
    if isinstance(graph, tuple):
        raise ConfigError(
            f"{type(dataset).__name__}[0] is a tuple of a graph and more data. Store the data in columns of "
            "the graph, as dgl.data.AsNodePredDataset(dataset) does."
        )
    num_classes = getattr(dataset, "num_classes", None)
    g = distribute(graph, **options)
    class_count = int(num_classes) if isinstance(num_classes, (int, np.integer)) else None
    return DistDataset(g, broadcast_json(class_count, g.session))


def init(
    strategy: str | None = None,
    *,
    timeout: float = 300.0,
    seed: int = 0,
    backend: str | None = None,
    device: torch.device | str = "auto",
    **options: object,
) -> Session:
    """Open the session that connects the ranks torchrun started. Call this first, on every rank.

    Without torchrun, the session has one process.

    Args:
        strategy: Name or alias of a strategy, or ``auto``. None: DGLX_STRATEGY, otherwise ``data_parallel``.
        timeout: Seconds that a rank may be silent before the other ranks raise an error that names it.
        seed: Seed for all random numbers. They are the same on any number of ranks.
        backend: Backend for ``torch.distributed``. None: nccl if every rank has its own GPU, otherwise gloo.
        device: This rank's device: ``cpu``, ``cuda`` or ``cuda:N``. ``cuda`` chooses a GPU by ``LOCAL_RANK``,
            and ranks share GPUs if there are more ranks. ``auto``: DGLX_DEVICE, otherwise a GPU if one can be
            used. Rank 0 logs the choice.
        options: Options for the strategy. They override the JSON options in DGLX_OPTIONS.

    Returns:
        The session. It closes on :func:`shutdown`, at the end of a ``with`` block, or when the process ends.

    Raises:
        UnknownNameError: there is no such strategy. The message suggests the nearest name.
        ConfigError: the strategy does not know an option, ``seed`` is no seed, the ranks differ in arguments
            or kinds of devices, a rank lacks ``device``, or a session is open already.
        PeerError: ranks are missing after ``timeout``. The message lists them.
    """
    show_briefly()
    # This is checked first, so that a wrong name does not cost a rendezvous.
    seed = check_integer("seed", seed, least=0)
    name = resolve_strategy(strategy, auto=True)
    joining: dict[str, Any] = {"timeout_s": timeout, "seed": seed, "backend": backend, "device": device}
    session = begin(name, options, **joining, check=check_session_options)
    torch.manual_seed(seed)
    return session


def shutdown() -> None:
    """Close the current session on all ranks. Either every rank calls it, or none."""
    current_session().close()


def DataLoader(g: DistGraph, indices: Any, graph_sampler: Any, **options: Any) -> Any:
    """Create a loader that yields ``(input_nodes, output_nodes, blocks)`` for the current strategy.

    For ``dgl.dataloading.as_edge_prediction_sampler(...)`` the result is a :func:`DistEdgeDataLoader`. With
    ``ShaDowKHopSampler`` it yields a graph in place of the blocks, with :class:`ClusterGCNSampler` only that.

    Every rank must call this. All ranks get as many steps. A rank without seeds gets empty blocks.

    Args:
        g: The distributed graph.
        indices: (K,) seeds for this rank, as :func:`node_split` returns them. May be empty.
        graph_sampler: A sampler from ``dgl.dataloading``, such as ``NeighborSampler([10, 25])``.
        options: ``batch_size``, ``shuffle``, ``drop_last``, ``seed``, ``depth`` and others, see
            :class:`dglx_dist.dataloading.loader.DataLoader`. ``output="pyg"`` yields PyG's ``Data``.

    Raises:
        ConfigError: an option or sampler is not supported, or ``g`` exists in this process only.
    """
    inner = _check_distributed(g)
    opened = open_strategy(inner)
    convert = open_converter(opened, indices, graph_sampler, options)
    predicts_edges = isinstance(graph_sampler, dgl.dataloading.EdgePredictionSampler)
    make_loader = opened.edge_loader if predicts_edges else opened.loader
    loader = make_loader(indices, graph_sampler, **options)
    _number_steps(loader, inner.session)
    if not isinstance(graph_sampler, ClusterGCNSampler):
        check_order(inner, loader, indices, "edge" if predicts_edges else "node")
    # fit() reads it. DGL's own loader has the same attribute.
    loader.graph_sampler, loader.convert = graph_sampler, convert
    return loader


def DistEdgeDataLoader(g: DistGraph, eids: Any, graph_sampler: Any, **options: Any) -> Any:
    """Create a loader that yields edge batches ``(input_nodes, pair_graph, [negative_pair_graph,] blocks)``.

    Every rank must call this. All ranks get as many steps. A rank without edges gets empty pair graphs.

    Args:
        g: The distributed graph.
        eids: Edge ids for this rank, as :func:`edge_split` returns them, or a dict by edge type.
        graph_sampler: Sampler, see :func:`DataLoader`.
        options: ``exclude``, ``reverse_eids``, ``reverse_etypes``, ``negative_sampler`` and the options for
            :func:`DataLoader`, see :class:`dglx_dist.dataloading.edge_loader.DistEdgeDataLoader`.

    Raises:
        ConfigError: we or the strategy do not support an option or the sampler, or ``g`` exists in this
            process only.
    """
    inner = _check_distributed(g)
    loader = open_strategy(inner).edge_loader(eids, graph_sampler, **options)
    _number_steps(loader, inner.session)
    check_order(inner, loader, eids, "edge")
    return loader


def _number_steps(loader: Any, session: Session) -> None:
    """Number the steps of ``loader`` so that no earlier loader in the script has the same numbers."""
    loader.first_number = session.next_number("loader") << 32


DistNodeDataLoader = DataLoader
"""DGL's name for :func:`DataLoader`."""


def wrap(model: nn.Module, g: DistGraph | ScriptGraph, reduction: Reduction = "mean") -> WrappedModel:
    """Wrap ``model`` for training with the other ranks, like DistributedDataParallel. All ranks call this.

    Build the optimizer afterwards, from the wrapped model's parameters.

    Args:
        model: The same module on all ranks. Rank 0's weights are used.
        g: The distributed graph that the model trains on. For a script's ``dgl.distributed.DistGraph``, the
            result's ``.module`` is always uncut, so that the script's own inference works.
        reduction: Whether the loop's loss is the mean or the sum over this rank's targets.

    Raises:
        ConfigError: the strategy cannot train this model exactly, the ranks built different models, or ``g``
            exists in this process only.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"wrap takes a torch.nn.Module, not a {type(model).__name__}")
    if isinstance(model, WrappedModel):
        raise ConfigError("the model is wrapped already. Call wrap once, with the module that you built.")

    if _is_distributed_by_torch(model):
        raise ConfigError(
            f"wrap takes the module itself, but torch already distributes this one ({type(model).__name__}). "
            "Call dx.wrap without DistributedDataParallel and FSDP."
        )

    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ConfigError(
                f"parameter {name!r} belongs to a lazy module and has no shape yet. Run one forward pass of "
                "the model on a batch (under torch.no_grad()) before dx.wrap, or give the layer its input "
                "size."
            )

    inner = _check_distributed(g)
    wrapped = open_strategy(inner).wrap(model, reduction)
    inner.session.has_wrapped_model = True
    # DistDGL scripts evaluate model.module with their own code, which needs uncut weights.
    return ScriptModel(wrapped) if g is not inner and wrapped.parts.local else wrapped


def _is_distributed_by_torch(model: nn.Module) -> bool:
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return True
    # FSDP is recognised by class names, because importing its classes takes a second.
    has_sharded_parameters = any(type(parameter).__name__ == "DTensor" for parameter in model.parameters())
    is_sharded = any(kind.__module__.startswith("torch.distributed.fsdp") for kind in type(model).__mro__)
    return has_sharded_parameters or is_sharded


def local_device() -> torch.device:
    """Return this rank's device: its GPU, or the CPU if it has none."""
    return current_session().device


def _check_distributed(g: object) -> DistGraph:
    if isinstance(g, ScriptGraph):
        return g.inner
    if not isinstance(g, DistGraph):
        raise ConfigError(
            f"the graph is a {type(g).__name__} that only this process has. Pass g = dx.distribute(graph) or "
            "dx.DistGraph(folder)."
        )
    return g


strategy_names = STRATEGIES.names
"""Return the strategy names that :func:`init` accepts. ``auto`` chooses among them."""
register_strategy = STRATEGIES.register
"""Decorator that registers a subclass of Strategy under a name in this process."""
register_partitioner = PARTITIONERS.register
"""Decorator that registers a subclass of Partitioner under a name in this process."""


def choose_strategy(
    model: nn.Module,
    g: DistGraph,
    *,
    fanouts: Sequence[int] | None = None,
    batch_size: int | None = None,
    epochs: int = 20,
    inputs: EntityInputs | None = None,
    ntype: str | None = None,
) -> Choice:
    """Choose the fastest strategy for ``model`` on ``g`` in a session with ``auto``. All ranks call this.

    Call this before :func:`wrap` and before you create the first loader. :func:`fit` calls it for you. It
    counts the bytes that every candidate sends and lets them take real steps in turns, for about 15 seconds
    or 2 % of the training. Afterwards the job's state is as it was before.

    Args:
        model: The model as it will be wrapped. It is not changed.
        g: The distributed graph.
        fanouts: Fan-outs for the later loader, input-most first. None: 25, then 10, as in ``fit``.
        batch_size: Batch size for the later loader. None: 512.
        epochs: Number of epochs to train.
        inputs: Input rows for a graph with several types. None: the features of every type.
        ntype: Node type to train on. None: the one that has labels.

    Returns:
        Seconds, bytes and memory measured for every candidate, the choice and its reason. They are equal on
        every rank.

    Raises:
        ConfigError: the session has a strategy already, a value is not supported or differs between ranks,
            a type has no input rows, the model fails on a batch, or no candidate fits.
        PeerError: a rank is dead or silent.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"choose_strategy takes a torch.nn.Module, not a {type(model).__name__}")
    inner = _check_distributed(g)

    def make_training() -> Training:
        batches: dict[str, Any] = {"fanouts": fanouts, "batch_size": batch_size, "epochs": epochs}
        # own_loop=True excludes strategies that only fit() supports.
        return Training(own_loop=True, ntype=ntype or find_labelled_type(inner), **batches)

    training = run_on_all_ranks(inner.session, make_training, ConfigError)
    if inputs is None and len(inner.ntypes) > 1:
        inputs = EntityInputs(inner)
    return choose_in_job(model, inner, training, inputs)


MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def fit(  # noqa: PLR0913 - all but two have defaults
    model: nn.Module,
    g: DistGraph,
    *,
    config: FitConfig | None = None,
    fanouts: Sequence[int] | None = None,
    batch_size: int | None = None,
    lr: float = 0.01,
    make_optimizer: MakeOptimizer | None = None,
    callbacks: Sequence[Callback] = (),
    sparse: Sparse = None,
    loader: TrainingLoader | None = None,
    trace: str | Path | None = None,
    precision: str | None = None,
    make_scheduler: Callable[[Any], Scheduler] | None = None,
    state: Mapping[str, Stateful] | None = None,
    **loader_options: Any,
) -> tuple[WrappedModel, FitResult]:
    """Train ``model`` with the current strategy. Every rank must call this.

    ``auto`` chooses a strategy here, but a resumed run keeps its checkpoint's strategy. By default, training
    targets are the nodes in ``train_mask``. With several node types, these are nodes of the type that has
    labels. To train on your own batches, for instance edges, pass ``loader`` and ``config.task``.

    Args:
        model: Called as ``model(blocks, features)`` with one block per fan-out. With several node types, or
            ``config.inputs``, features and results are ``{node type: rows}``.
        g: The distributed graph, with ``train_mask`` and the node data that ``config`` names (``feat`` and
            ``label``). Types without features need ``config.inputs``.
        config: Epochs, evaluation and checkpoints. None: the defaults.
        fanouts: Neighbours to sample per node in each layer, input-most layer first. -1 means all. None: two
            layers with 25 and 10, or with all neighbours if steps take the whole graph.
        batch_size: Targets per rank and step. None: 512, if the strategy has mini-batches.
        lr: Learning rate for Adam.
        make_optimizer: Builds another optimizer from the parameters. ``lr`` is then unused.
        callbacks: Called after each epoch with its record.
        sparse: Optimizer for the embeddings in ``config.inputs``, or several.
        loader: A :func:`DistEdgeDataLoader` or :func:`DataLoader`, instead of ``fanouts``, ``batch_size`` and
            ``loader_options``.
        trace: File to record the first ``config.trace_steps`` steps on all ranks, like ``config.trace``. Open
            it in Perfetto, or draw it with `dglx report FILE`.
        precision: Like ``config.precision``. ``bf16`` trains under torch's autocast in bfloat16.
        make_scheduler: Builds a scheduler from ``torch.optim.lr_scheduler`` for the optimizer. It steps after
            each epoch (a ``ReduceLROnPlateau`` with the validation metric), and checkpoints save it.
        state: More objects that checkpoints save, by name, see :func:`save`.
        loader_options: More options for :func:`DataLoader`.

    Returns:
        The wrapped model (``.module`` is yours) and the results, which are equal on all ranks. Under ``auto``
        the results include the choice, the planner's prediction and the measured outcome.

    Raises:
        ConfigError: node data is missing, an option is not supported, such as ``loader_options`` beside
            ``loader``, or ``auto`` does not support this training.
        CheckpointError: the checkpoint to resume from does not match.
        StorageError: the trace cannot be written.
        Stopped: a rank received a signal to stop, and all ranks have saved a checkpoint.
    """
    config = _complete_config(config or FitConfig(), g, trace, precision)
    if loader is not None and loader_options:
        raise ConfigError(
            f"{', '.join(loader_options)} cannot be changed in an existing loader; pass them when you make it"
        )

    choice = None
    if g.session.strategy == AUTO:
        choice = _resolve_auto(model, g, config, fanouts, batch_size)
        if default_batch_size(g.session.strategy) is None:
            # Steps take the whole graph. The options were for candidates that use mini-batches.
            fanouts = None if fanouts is None else [-1] * len(fanouts)
            batch_size = None
    check_inputs(g, config.inputs, g.session.strategy)

    if loader is None:
        if fanouts is None:
            fanouts = default_fanouts(g.session.strategy, 2)
        if batch_size is None:
            batch_size = default_batch_size(g.session.strategy)
        loader = _open_node_loader(g, config, fanouts, batch_size, loader_options)
        batches = {"fanouts": list(fanouts), "batch_size": batch_size}
        config = replace(config, configuration={**batches, **config.configuration})

    # Evaluation needs the edge columns that the user's sampler fetches in training.
    sampler = getattr(loader, "graph_sampler", None)
    if sampler is not None and not config.edge_feats and config.own_task is None:
        config = replace(config, edge_feats=getattr(sampler, "prefetch_edge_feats", ()) or ())

    wrapped = wrap(model, g)
    if make_optimizer is None:
        make_optimizer = partial(torch.optim.Adam, lr=lr)
    optimizer = make_optimizer(wrapped.parameters())
    objects: dict[str, Any] = {"sparse": sparse, "state": state}
    if make_scheduler is not None:
        objects["scheduler"] = make_scheduler(optimizer)
    result = train(wrapped, loader, optimizer, g, config, callbacks=callbacks, **objects)

    if choice is not None and result.epochs:
        facts = collect_facts(wrapped, g.session, result)
        choice = replace(choice, outcome=build_outcome(choice.epoch, result.epochs, facts))
    return wrapped, replace(result, choice=choice)


def _complete_config(
    config: FitConfig, g: DistGraph, trace: str | Path | None, precision: str | None
) -> FitConfig:
    """Return ``config`` with ``trace``, ``precision``, and input rows if there are several node types."""
    if trace is not None:
        config = replace(config, trace=trace)
    if precision is not None:
        config = replace(config, precision=precision)
    config = resolve_resume(config, config.checkpoint_folder, g.session)
    if config.inputs is None and config.own_task is None and len(g.ntypes) > 1:
        config = replace(config, inputs=EntityInputs(g, feature=config.feature))
    return config


def _resolve_auto(
    model: nn.Module,
    g: DistGraph,
    config: FitConfig,
    fanouts: Sequence[int] | None,
    batch_size: int | None,
) -> Choice | None:
    """Set the session's strategy and return the choice, or None for a resumed run. Every rank calls this."""
    _check_auto(config, g)
    ntype = find_labelled_type(g, config.label) if config.ntype is None else config.ntype
    # Strategies that only fit() supports train nothing but plain classification.
    task = read_task(g, ntype, config.label, str(config.task))[0]
    own_loop = needs_own_loop(replace(config, task=task)) is not None
    batches: dict[str, Any] = {"fanouts": fanouts, "batch_size": batch_size, "epochs": config.epochs}
    make_training = partial(Training, ntype=ntype, own_loop=own_loop, **batches)
    training = run_on_all_ranks(g.session, make_training, ConfigError)

    checkpoints = config.checkpoint_folder if config.resume else None
    _, choice = resolve(model, g, training, checkpoints, config.inputs)
    return choice


def _check_auto(config: FitConfig, g: DistGraph) -> None:
    has_task = config.own_task is not None
    has_inputs = config.inputs is not None and g.is_homogeneous
    has_feature = config.feature != FEATURE
    for name, is_set in {"task": has_task, "inputs": has_inputs, "feature": has_feature}.items():
        if is_set:
            raise ConfigError(
                f"strategy 'auto' supports node classification by {FEATURE!r}, but not config.{name}. Name a "
                "strategy in dx.init."
            )


def _open_node_loader(
    g: DistGraph,
    config: FitConfig,
    fanouts: Sequence[int],
    batch_size: int | None,
    loader_options: Mapping[str, Any],
) -> TrainingLoader:
    """Create a loader for the training nodes that prefetches all columns named in ``config``."""
    options = dict(loader_options)
    if batch_size is not None:
        options["batch_size"] = batch_size
    # If steps take the whole graph, the loader would warn that shuffle has no effect.
    if default_batch_size(g.session.strategy) is not None:
        options.setdefault("shuffle", True)

    ntype = find_labelled_type(g, config.label) if config.ntype is None else config.ntype
    feats = {ntype: [config.feature]}
    if config.inputs is not None:
        feats = {name: [config.inputs.feature] for name in config.inputs.feature_widths}

    sampler = dgl.dataloading.NeighborSampler(
        list(fanouts),
        prefetch_node_feats=feats,
        prefetch_labels={ntype: [config.label]},
        prefetch_edge_feats=config.edge_feats or None,
    )
    stored = {g.nodes[name].data[column].dtype for name, (column,) in feats.items()}
    if config.precision == BF16 and stored == {torch.bfloat16}:
        options.setdefault("feature_dtype", torch.bfloat16)
    return DataLoader(g, {ntype: training_nodes(g, ntype)}, sampler, **options)
