"""``partition_graph`` and ``distribute``: how a graph in memory becomes one that many ranks share."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeAlias, cast, final

import dgl
import numpy as np
import torch
from torch import Tensor, nn

from dglx_dist.auto import adopt_earlier, default_batch_size, default_fanouts, facts_of, outcome_of
from dglx_dist.auto_options import Training, check_session_options
from dglx_dist.comm.collectives import broadcast_json, sum_over_ranks
from dglx_dist.comm.session import Session, current_session, session_or
from dglx_dist.compat.dist_graph import DistGraph as ScriptGraph
from dglx_dist.compat.namespace import ScriptModel
from dglx_dist.data.partition.base import PARTITIONERS, Partitioner, PartitionOptions
from dglx_dist.data.sources import load_dataset
from dglx_dist.data.storage.columns import MANIFEST
from dglx_dist.data.storage.files import named_failures, partial_folder, remove_abandoned
from dglx_dist.data.storage.reader import open_dataset
from dglx_dist.data.storage.writer import FeatureDtype
from dglx_dist.dataloading.edge_loader import samples_edges
from dglx_dist.dataloading.step_loader import whole_number
from dglx_dist.errors import ConfigError, DatasetError, PeerError, StorageError
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.graph.opening import together
from dglx_dist.graph.split import node_split
from dglx_dist.prepare import PartitionPlan, content_key, partition_to_disk
from dglx_dist.records import FEATURE, Array, RawGraph
from dglx_dist.strategies.base import (
    AUTO,
    STRATEGIES,
    WRAPPED,
    Reduction,
    Strategy,
    WrappedModel,
    begin,
    resolve_strategy,
    strategy_of,
)
from dglx_dist.training.checkpoint import Sparse
from dglx_dist.training.fit import Callback, FitConfig, FitResult, TrainingLoader, train
from dglx_dist.training.inference import labelled_type
from dglx_dist.training.relational import EntityInputs

if TYPE_CHECKING:
    from dglx_dist.planner.records import Choice


log = logging.getLogger(__name__)


def cut_once(graph: RawGraph, plan: PartitionPlan, cache: Path) -> Path:
    """Return the folder in ``cache`` of ``graph`` cut as ``plan`` says, cut now unless it is there and whole.

    One process calls it. Another run may cut the same graph into the same cache meanwhile: the first to
    finish counts. What runs that were killed have left half written is removed.

    Raises:
        ConfigError: plan and graph do not fit.
        StorageError: the cache cannot be written; told before the work of cutting.
    """
    folder = (cache / f"{Path(graph.name).name}-{content_key(graph, plan)}").absolute()
    if (folder / MANIFEST).is_file() and _is_whole(folder):
        return folder
    with named_failures(cache), partial_folder(folder):
        remove_abandoned(folder.parent, below=False)
    try:
        partition_to_disk(graph, folder, plan)
    except StorageError:
        if not (folder / MANIFEST).is_file():
            raise
    return folder


def _is_whole(folder: Path) -> bool:
    """Whether a cut is what was written; a damaged one is removed."""
    try:
        # All of it: naming it has read every byte of the graph too.
        open_dataset(folder, verify="full")
    except (DatasetError, StorageError) as problem:
        log.warning("%s is cut again: %s", folder, problem)
        with named_failures(folder), partial_folder(folder) as aside:
            folder.rename(aside)
        return False
    return True


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
    target_weights: Sequence[float] | None = None,
    fast: bool = False,
    seed: int = 0,
    format: Literal["dglx", "dgl"] = "dglx",
    overwrite: bool = False,
    feature_dtype: torch.dtype | str | Mapping[str, torch.dtype | str] | None = None,
) -> tuple[OriginalIds, OriginalIds] | None:
    """Cut ``g`` and write it to ``out_path/graph_name``, with the arguments of DGL's function and ours.

    One process calls it, without :func:`init`. Open the result with ``DistGraph(out_path/graph_name)``.

    Args:
        g: Homogeneous or heterogeneous; nodes and edges with their data.
        graph_name: Name of the graph and of its folder.
        num_parts: P; independent of how many ranks and servers train later.
        out_path: Folder in which the folder of the graph appears.
        num_hops: 1: in-edges of owned nodes are stored, and nothing beyond is needed.
        part_method: Name of any partitioner.
        balance_ntypes: (N,) integers; each value is balanced by itself. Homogeneous graphs only.
        balance_edges: Balance the in-edges too: of each edge type where there are several, as
            ``balance=["etype"]`` does, else as ``balance=["degree"]``.
        return_mapping: Whether to return the original ids.
        num_trainers_per_machine: t above 1: each part is cut once more by the same method, and node data
            ``trainer_id`` in [0, P x t) says by which trainer's nodes a node lies, edge data of that name
            the same of an edge's destination; :func:`node_split` takes it as ``node_trainer_ids``.
        objtype: Minimise cut edges (``cut``) or communicated nodes (``vol``).
        graph_formats: None or ``csc``, the only one that is stored.
        use_graphbolt: False.
        balance: Weights to balance: nodes, degree, train, val, test, ntype, etype or a node column.
        tolerance: How much the heaviest part may exceed its share; one for all, or by constraint.
        target_weights: (P,) shares for unequal machines.
        fast: The cheap variant of kaminpar (less time) or metis (less memory, as DistDGL), for a worse cut.
        seed: The same seed gives the same parts.
        format: ``dgl`` writes files that DGL's own ``load_partition`` reads, into ``out_path`` itself.
        overwrite: Replace what is there.
        feature_dtype: float16, bfloat16 or float32: how features are stored, all of them or by the name of
            the column. Blocks get what is stored in half precision as float32.

    Returns:
        With ``return_mapping``: original node and edge ids in the new order, int64 tensors, by type for
        a heterogeneous graph.

    Raises:
        ConfigError: a combination that cannot be honoured; nothing is ignored silently.
        DatasetError: ``g`` is not sound.
        StorageError: the folder exists and ``overwrite`` is not set.
    """
    _refuse(num_hops, graph_formats, use_graphbolt, return_mapping and format == "dgl")
    edges = (("etype",) if len(g.canonical_etypes) > 1 else ("degree",)) if balance_edges else ()
    weights = _type_weights(balance_ntypes)
    options = PartitionOptions(
        balance=tuple(dict.fromkeys((*balance, *weights, *edges))),
        tolerance={} if tolerance is None else tolerance,
        target_weights=None if target_weights is None else tuple(target_weights),
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
        feature_dtype=_by_name(feature_dtype),
    )
    folder = Path(out_path) if format == "dgl" else Path(out_path) / graph_name
    partition_to_disk(load_dataset(g, name=graph_name), folder, plan, weights=weights)
    return original_ids(folder) if return_mapping else None


def original_ids(folder: str | Path) -> tuple[OriginalIds, OriginalIds]:
    """Return the original id of every node and edge of a dataset, in the order of the new ids.

    Any process may call it alone. Returns (nodes, edges): int64 tensors (N,) and (E,), or dicts of them
    by type for a heterogeneous graph.

    Raises:
        StorageError: the dataset is missing or damaged, or a part is on another machine.
    """
    dataset = open_dataset(folder)
    parts = [dataset.part(part) for part in range(dataset.manifest.num_parts)]
    nodes = {t: _joined([p.original_node_ids(t) for p in parts]) for t in dataset.manifest.node_types}
    edges = {t: _joined([p.original_edge_ids(t) for p in parts]) for t in dataset.manifest.edge_types}
    if len(nodes) == 1 and len(edges) == 1:
        return next(iter(nodes.values())), next(iter(edges.values()))
    return dict(nodes), dict(edges)


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
    """Return ``graph`` as one that all ranks share; every rank must call it.

    Where no session is open it joins the ranks first, as :func:`init` would without arguments, but leaves
    torch's generator as the script seeded it.

    Rank 0 cuts it once: the result lies in ``cache``, named by the content of the graph and by how it was
    cut, and later runs find it there. The others wait as long as the session's time-out; raise that, or
    partition beforehand, for graphs that take longer. Several machines need ``cache`` on a shared disk.

    Args:
        graph: A DGLGraph (rank 0's counts), anything ``load_dataset`` knows, the folder of a partitioned
            dataset, or the JSON file of a partition in DGL's format. The columns of a DGLGraph keep their
            names, dtypes and shapes, but for masks of splits (bool), whole numbers in ``label`` (int64, (N,))
            and bfloat16 (float32); others are brought into ours (``feat``, ``label``), see ``load_dataset``.
        strategy: Name or alias of a strategy; None: that of the session, or what :func:`init` takes.
        parts: P; None: one for each server. Like the next three refused for what is partitioned already.
        method: Name of a partitioner; None: the default one.
        balance: Weights to balance, see :func:`partition_graph`.
        seed: Of the partitioner; None: 0.
        cache: Folder for what is cut. What runs that were killed have left half written there is removed.
        structure: Whether each server maps the whole structure, see :class:`DistGraph`.

    Raises:
        DatasetError: the graph is not sound; ConfigError on the ranks other than 0.
        UnknownNameError: there is no such strategy.
        ConfigError: an argument cannot be honoured, or the session is open for another strategy.
        PeerError: ranks are missing after the time-out.
        StorageError: a dataset is damaged, or the cache cannot be written (ConfigError on the others).
    """
    session = _session_for(strategy)

    def located() -> dict[str, str] | None:
        if session.topology.rank != 0:
            return None
        if isinstance(graph, (str, PathLike)) and (found := _cut_already(Path(graph).expanduser())):
            _refuse_to_cut(graph, parts=parts, method=method, balance=tuple(balance), seed=seed)
            return {found: str(graph)}
        plan = PartitionPlan(
            num_parts=session.topology.num_servers if parts is None else parts,
            method=method,
            seed=seed or 0,
            options=PartitionOptions(balance=tuple(balance)),
        )
        # What a script gave a name it asks for by that name.
        raw = load_dataset(graph) if isinstance(graph, (str, PathLike)) else load_dataset(graph, rename=False)
        return {"folder": str(cut_once(raw, plan, Path(cache).expanduser()))}

    # Rank 0 alone looks: what it finds on its disk another machine may not see yet.
    with _configured(session):
        told: Any = broadcast_json(together(session, located, ConfigError), session)
    where: dict[str, Any] = {kind: Path(path).expanduser() for kind, path in told.items()}
    return DistGraph(**where, structure=structure, session=session)


@contextmanager
def _configured(session: Session) -> Iterator[None]:
    """Say to ranks that waited in vain for rank 0 why it may take so long."""
    try:
        yield
    except PeerError as error:
        if session.topology.rank == 0:
            raise
        raise PeerError(
            f"waiting for rank 0, which cuts the graph: {error}. If that takes longer than the time-out, cut "
            "it beforehand, with `dglx partition` or dx.partition_graph, or give dx.init(timeout=) more"
        ) from error


def _session_for(strategy: str | None) -> Session:
    """Return the session that is open, or one that is opened for ``strategy``."""
    session = session_or(
        lambda: begin(resolve_strategy(strategy, auto=True), {}, check=check_session_options)
    )
    if strategy is not None and session.strategy != resolve_strategy(strategy, auto=True):
        raise ConfigError(
            f"strategy={strategy!r} but the session is open for {session.strategy!r}; name one, once: in "
            "dx.init, or where the graph is distributed"
        )
    return session


def _cut_already(path: Path) -> Literal["folder", "part_config"] | None:
    """Return which of DistGraph's arguments ``path`` is, None where it is no partitioned dataset."""
    if (path / MANIFEST).is_file():
        return "folder"
    return "part_config" if _is_part_config(path) else None


def _refuse_to_cut(path: str | PathLike[str], **how: object) -> None:
    told = [name for name, value in how.items() if value not in (None, ())]
    if told:
        raise ConfigError(
            f"{path} is cut already, so {', '.join(told)} would have no effect; leave that out, or give the "
            "graph that it was cut from"
        )


def _is_part_config(path: Path) -> bool:
    if path.suffix != ".json" or not path.is_file():
        return False
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return False
    return isinstance(value, dict) and "part-0" in value


def _refuse(
    num_hops: int,
    graph_formats: str | Sequence[str] | None,
    use_graphbolt: bool,
    mapping_of_dgl_format: bool,
) -> None:
    formats = [graph_formats] if isinstance(graph_formats, str) else list(graph_formats or ["csc"])
    for wrong, message in (
        (
            num_hops != 1,
            f"num_hops is {num_hops}; leave it at 1, farther neighbours are fetched when asked for",
        ),
        (formats != ["csc"], f"graph_formats is {graph_formats!r}; leave it out, only csc is stored"),
        (use_graphbolt, "use_graphbolt is True; leave it out, there is one format for all strategies"),
        (mapping_of_dgl_format, "return_mapping goes with format='dglx' only; DGL's files hold orig_id"),
    ):
        if wrong:
            raise ConfigError(message)


def _type_weights(balance_ntypes: Tensor | None) -> dict[str, Array]:
    if balance_ntypes is None:
        return {}
    types = torch.as_tensor(balance_ntypes).numpy()
    return {f"balance_ntypes={value}": (types == value).astype(np.int64) for value in np.unique(types)}


def _by_name(dtype: torch.dtype | str | Mapping[str, torch.dtype | str] | None) -> FeatureDtype | None:
    if isinstance(dtype, Mapping):
        return {name: str(value).removeprefix("torch.") for name, value in dtype.items()}
    return None if dtype is None else str(dtype).removeprefix("torch.")


def _joined(arrays: Sequence[Array]) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays))


@final
class DistDataset:
    """The one graph of a dataset of DGL, distributed, and this rank's share of each of its splits.

    Args:
        g: The graph; a split is the mask of that name in the data of its nodes.
        num_classes: As the dataset tells; None: it does not.
    """

    def __init__(self, g: DistGraph, num_classes: int | None) -> None:
        self._g = g
        self._num_classes = num_classes

    def __getitem__(self, index: int) -> DistGraph:
        """Return the graph.

        Raises:
            IndexError: ``index`` is not 0.
        """
        if index not in (0, -1):
            raise IndexError(f"the dataset has one graph, and {index} is asked for")
        return self._g

    def __len__(self) -> int:
        """1: it has one graph."""
        return 1

    @property
    def num_classes(self) -> int:
        """Classes of the labels.

        Raises:
            ConfigError: neither the dataset nor its labels tell.
        """
        return self._g.num_classes() if self._num_classes is None else self._num_classes

    @property
    def train_idx(self) -> Tensor:
        """(n,) int64 ids of the nodes of ``train_mask`` that this rank works on, see :func:`node_split`."""
        return self._share("train_mask")

    @property
    def val_idx(self) -> Tensor:
        """(n,) int64, of ``val_mask``, as :attr:`train_idx`."""
        return self._share("val_mask")

    @property
    def test_idx(self) -> Tensor:
        """(n,) int64, of ``test_mask``, as :attr:`train_idx`."""
        return self._share("test_mask")

    def __getattr__(self, name: str) -> NoReturn:
        """Refuse what is not carried over.

        Raises:
            AttributeError: always.
        """
        raise AttributeError(
            f"a distributed dataset has no {name!r}, only [0], num_classes, train_idx, val_idx and test_idx: "
            "nodes have new ids; ask the dataset that you distributed, and g.orig_ids(ids) for its ids"
        )

    def _share(self, mask: str) -> Tensor:
        having = [ntype for ntype in self._g.ntypes if mask in self._g.nodes[ntype].data]
        if len(having) != 1:
            raise ConfigError(
                f"the node types with {mask!r} are {', '.join(having) or 'none'}, where one is needed; use "
                "dx.node_split(g.nodes[ntype].data[mask], ntype=ntype)"
            )
        return node_split(self._g.nodes[having[0]].data[mask], ntype=having[0])


def distribute_dataset(dataset: dgl.data.DGLDataset, **how: Any) -> DistDataset:
    """Return a dataset of DGL, its graph distributed as :func:`distribute` does; every rank must call it.

    Args:
        dataset: Of one graph, like ``AsNodePredDataset(...)`` or ``CoraGraphDataset()``; rank 0's counts.
        how: As for :func:`distribute`: ``strategy``, ``parts``, ``cache`` and others.

    Raises:
        ConfigError: ``dataset`` is none, or has several graphs, or an argument cannot be honoured.
        DatasetError: the graph is not sound.
        StorageError: the cache cannot be written.
    """
    count = len(dataset) if isinstance(dataset, Sized) else None
    if count is None:
        raise ConfigError(
            f"distribute_dataset takes a dataset of DGL, not a {type(dataset).__name__}; give a graph to "
            "dx.distribute"
        )
    if count != 1:
        raise ConfigError(
            f"{type(dataset).__name__} has {count} graphs, and one is distributed; choose it: "
            "dx.distribute(dataset[i])"
        )
    graph = dataset[0]
    if isinstance(graph, tuple):
        raise ConfigError(
            f"{type(dataset).__name__}[0] is a graph and something beside it; make that columns of the "
            "graph, as dgl.data.AsNodePredDataset(dataset) does"
        )
    told = getattr(dataset, "num_classes", None)
    g = distribute(graph, **how)
    classes = broadcast_json(int(told) if isinstance(told, (int, np.integer)) else None, g.session)
    return DistDataset(g, cast("int | None", classes))


def init(
    strategy: str | None = None,
    *,
    timeout: float = 300.0,
    seed: int = 0,
    backend: str | None = None,
    **options: object,
) -> Session:
    """Join the other ranks that torchrun started; every rank calls it first. One process without torchrun.

    Args:
        strategy: Name or alias of a strategy, or ``auto``; None: DGLX_STRATEGY, else ``data_parallel``.
        timeout: Seconds that a rank may be silent before the others give up, naming it.
        seed: Of everything random; the same draws on any number of ranks.
        backend: Of ``torch.distributed``; None: gloo, and nccl beside it where there is CUDA.
        options: The strategy's own options; those in DGLX_OPTIONS, which is JSON, count too.

    Returns:
        The session; closes by itself at the end of the process, or by :func:`shutdown`, or as a context.

    Raises:
        UnknownNameError: there is no such strategy; the message has the nearest name.
        ConfigError: the strategy does not know an option, ``seed`` is no seed, ranks disagree, or a session
            is open already.
        PeerError: ranks are missing after ``timeout``; the message lists them.
    """
    # Before anything is opened: a wrong name must not cost a rendezvous.
    seed = whole_number("seed", seed, least=0)
    name = resolve_strategy(strategy, auto=True)
    session = begin(name, options, timeout_s=timeout, seed=seed, backend=backend, check=check_session_options)
    torch.manual_seed(seed)
    return session


def shutdown() -> None:
    """Close the current session, once the other ranks close theirs; every rank calls it, or none."""
    current_session().close()


def DataLoader(g: DistGraph, indices: Any, graph_sampler: Any, **options: Any) -> Any:
    """Return what yields ``(input_nodes, output_nodes, blocks)`` for the current strategy.

    With ``dgl.dataloading.as_edge_prediction_sampler(...)`` it is a :func:`DistEdgeDataLoader`.

    Every rank must call it, and all get the same number of steps; a rank that is out of seeds gets
    blocks without destinations.

    Args:
        g: The distributed graph.
        indices: (K,) this rank's seeds, as :func:`node_split` gives them; may be empty.
        graph_sampler: A sampler of ``dgl.dataloading``.
        options: ``batch_size``, ``shuffle``, ``drop_last``, ``seed``, ``depth`` and others; see
            :class:`dglx_dist.dataloading.loader.DataLoader`.

    Raises:
        ConfigError: an option or sampler that cannot be honoured, or ``g`` is in this process only.
    """
    inner = _distributed(g)
    strategy = strategy_of(inner.session)
    make = strategy.edge_loader if samples_edges(graph_sampler) else strategy.loader
    return make(inner, indices, graph_sampler, **options)


def DistEdgeDataLoader(g: DistGraph, eids: Any, graph_sampler: Any, **options: Any) -> Any:
    """Return what yields batches of edges: ``(input_nodes, pair_graph, [negative_pair_graph,] blocks)``.

    Every rank must call it, and all get the same number of steps; a rank that is out of edges gets pair
    graphs without edges.

    Args:
        g: The distributed graph.
        eids: This rank's edges, as :func:`edge_split` gives them, or a dict of them by edge type.
        graph_sampler: A sampler of ``dgl.dataloading``.
        options: ``exclude``, ``reverse_eids``, ``reverse_etypes``, ``negative_sampler`` and those of
            :func:`DataLoader`; see :class:`dglx_dist.dataloading.edge_loader.DistEdgeDataLoader`.

    Raises:
        ConfigError: an option or sampler that cannot be honoured, also by the strategy, or ``g`` is in this
            process only.
    """
    inner = _distributed(g)
    return strategy_of(inner.session).edge_loader(inner, eids, graph_sampler, **options)


DistNodeDataLoader = DataLoader
"""DGL's name for :func:`DataLoader`."""


def wrap(model: nn.Module, g: DistGraph | ScriptGraph, reduction: Reduction = "mean") -> WrappedModel:
    """Return ``model`` made to train with the other ranks, as DistributedDataParallel would; collective.

    Build the optimizer afterwards, from the parameters of what comes back.

    Args:
        model: The same on all ranks; rank 0's weights win.
        g: The distributed graph that it will see. For a script's ``dgl.distributed.DistGraph``, ``.module``
            of what comes back is always uncut, for inference with code of the script's own.
        reduction: What the loss of the loop is over its own targets: their mean, or their sum.

    Raises:
        ConfigError: the strategy cannot train this model exactly, the ranks built different ones, or ``g``
            is in this process only.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"wrap takes a torch.nn.Module, not a {type(model).__name__}")
    if isinstance(model, WrappedModel):
        raise ConfigError("the model is wrapped already; give wrap the module that you built, once")
    inner = _distributed(g)
    wrapped = strategy_of(inner.session).wrap(model, inner, reduction)
    WRAPPED.set(inner.session, True)
    # Scripts of DistDGL evaluate with code of their own on model.module.
    return ScriptModel(wrapped) if g is not inner and wrapped.parts.local else wrapped


def local_device() -> torch.device:
    """Return the device of this rank: its GPU where there is one, else the CPU."""
    return current_session().device


def reduce_mean(value: float | Tensor, count: int) -> float:
    """Return the mean over all ranks of means over ``count`` things each; every rank must call it.

    Args:
        value: This rank's mean; ignored where ``count`` is 0.
        count: Over how many it was taken, at least 0.

    Returns:
        The mean over all things of all ranks; NaN when there is none.
    """
    weighted = float(value) * count if count else 0.0
    sums = torch.tensor([weighted, float(count)], dtype=torch.float64)
    total, number = sum_over_ranks(sums, current_session(), phase="metrics").tolist()
    return total / number if number else float("nan")


def strategy_names() -> tuple[str, ...]:
    """Return the names that :func:`init` takes, aliases left out; ``auto`` chooses among them."""
    return STRATEGIES.names()


def _distributed(g: object) -> DistGraph:
    if isinstance(g, ScriptGraph):
        return g.inner
    if not isinstance(g, DistGraph):
        raise ConfigError(
            f"the graph is a {type(g).__name__} of this process, not one that all ranks share; "
            "pass g = dx.distribute(graph), or dx.DistGraph(folder)"
        )
    return g


def register_strategy(name: str) -> Callable[[type[Strategy]], type[Strategy]]:
    """Return a decorator that makes a subclass of Strategy known as ``name`` in this process.

    Raises:
        ConfigError: the name is taken.
    """
    return STRATEGIES.register(name)


def register_partitioner(name: str) -> Callable[[type[Partitioner]], type[Partitioner]]:
    """Return a decorator that makes a subclass of Partitioner known as ``name`` in this process.

    Raises:
        ConfigError: the name is taken.
    """
    return PARTITIONERS.register(name)


def choose_strategy(
    model: nn.Module,
    g: DistGraph,
    *,
    fanouts: Sequence[int] | None = None,
    batch_size: int | None = None,
    epochs: int = 20,
) -> Choice:
    """Choose the strategy that trains ``model`` on ``g`` fastest, where the session has ``auto``; collective.

    Before the first loader is made, and before :func:`wrap`; :func:`fit` does it by itself. Some batches and
    plans are counted, the model is timed on them, and the links for two seconds.

    Args:
        model: As it will be wrapped; not changed.
        g: The distributed graph, of one node and edge type.
        fanouts: Of the loader to come, input-most first. None: 25, then 10, as ``fit`` has them.
        batch_size: Of the loader to come. None: 512.
        epochs: That will be trained.

    Returns:
        Every way to train with what an epoch of it is expected to take, which one was taken and why; the same
        on every rank.

    Raises:
        ConfigError: the session has a strategy already, a value cannot be honoured or differs between ranks,
            the graph has several types, the model fails on a batch, or nothing fits.
        PeerError: a rank is dead or silent.
    """
    return choose_for(model, g, fanouts, batch_size, epochs, own_loop=True)


def choose_for(
    model: nn.Module,
    g: DistGraph,
    fanouts: Sequence[int] | None,
    batch_size: int | None,
    epochs: int,
    *,
    own_loop: bool,
) -> Choice:
    """See :func:`choose_strategy`; ``own_loop``: whether what can be trained by ``fit`` alone is left out."""
    # Only here: choosing brings all that it chooses among.
    from dglx_dist.auto import choose_in_job

    if not isinstance(model, nn.Module):
        raise ConfigError(f"choose_strategy takes a torch.nn.Module, not a {type(model).__name__}")
    inner = _distributed(g)

    def read() -> Training:
        told = Training(fanouts=fanouts, batch_size=batch_size, epochs=epochs)
        # NumPy's numbers are no JSON.
        return replace(
            told,
            fanouts=None if fanouts is None else [int(one) for one in fanouts],
            batch_size=None if batch_size is None else int(batch_size),
            num_layers=2 if fanouts is None else len(fanouts),
            own_loop=own_loop,
        )

    return choose_in_job(model, inner, together(inner.session, read, ConfigError))


MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def fit(  # noqa: PLR0913 - what a first call needs none of
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
    **loader_options: Any,
) -> tuple[WrappedModel, FitResult]:
    """Train ``model`` with the current strategy, which ``auto`` chooses here; every rank must call it.

    A run that goes on is not chosen for anew: it keeps what its checkpoint was trained with.

    On the nodes of ``train_mask``, of any graph: with several node types, of the one that has labels. Or on
    what a ``loader`` of your own yields, edges for instance, with ``config.task``.

    Args:
        model: Called as ``model(blocks, features)``; one block for each fan-out. With several node types, or
            ``config.inputs``, features and results are ``{node type: rows}``.
        g: With the node data that ``config`` names (``feat`` and ``label``), and ``train_mask``. Types
            without features need ``config.inputs``.
        config: How long, how often to evaluate, where checkpoints lie; defaults when not given.
        fanouts: Neighbours drawn per node and layer, input-most layer first; -1: all. None: two layers, 25
            and 10; all where the strategy takes the whole graph.
        batch_size: Targets per rank and step. None: 512, where the strategy has mini-batches.
        lr: Of Adam.
        make_optimizer: Makes another optimizer from the parameters; ``lr`` is then unused.
        callbacks: Called after each epoch with its record.
        sparse: Optimiser of the embeddings in ``config.inputs``; or several.
        loader: Of :func:`DistEdgeDataLoader` or :func:`DataLoader`, in place of one made by ``fanouts``,
            ``batch_size`` and ``loader_options``.
        trace: File for a trace of all ranks, as ``config.trace``, whose first ``config.trace_steps`` steps it
            holds; open it in Perfetto, or draw it with `dglx report FILE`.
        loader_options: More for :func:`DataLoader`.

    Returns:
        The wrapped model (``.module`` is yours) and what training did, equal on all ranks; under ``auto``
        with what was chosen, and prediction beside outcome.

    Raises:
        ConfigError: node data is missing, or an option cannot be honoured, as those of a loader beside
            ``loader``; or ``auto`` cannot choose for what is trained.
        CheckpointError: the checkpoint to resume from does not match.
        StorageError: the trace cannot be written.
    """
    config = config or FitConfig()
    if trace is not None:
        config = replace(config, trace=trace)
    if loader is not None and loader_options:
        raise ConfigError(
            f"{', '.join(loader_options)} cannot be changed in a given loader; make it with them"
        )
    choice = None
    if g.session.strategy == AUTO:
        choice = _settle_strategy(model, g, config, fanouts, batch_size)
        if default_batch_size(g.session.strategy) is None:
            # They say which mini-batches were weighed against what is trained now.
            fanouts, batch_size = None if fanouts is None else [-1] * len(fanouts), None
    if config.inputs is None and config.task is None and len(g.ntypes) > 1:
        config = replace(config, inputs=EntityInputs(g, feature=config.feature))
    _check_inputs(g, config.inputs)
    if loader is None:
        fanouts = default_fanouts(g.session.strategy, 2) if fanouts is None else fanouts
        usual = default_batch_size(g.session.strategy)
        batch_size = usual if batch_size is None else batch_size
        # Where a step takes everybody, an order means nothing, and a loader says so.
        options = {"shuffle": True, **loader_options} if usual is not None else loader_options
        if batch_size is not None:
            options["batch_size"] = batch_size
        loader = _node_loader(g, config, fanouts, options)
    wrapped = wrap(model, g)
    if make_optimizer is None:
        optimizer: torch.optim.Optimizer = torch.optim.Adam(wrapped.parameters(), lr=lr)
    else:
        optimizer = make_optimizer(wrapped.parameters())
    result = train(wrapped, loader, optimizer, g, config, callbacks=callbacks, sparse=sparse)
    if choice is not None and result.epochs:
        facts = facts_of(g.session, result)
        choice = replace(choice, outcome=outcome_of(choice.epoch, result.epochs, facts))
    return wrapped, replace(result, choice=choice)


def _settle_strategy(
    model: nn.Module, g: DistGraph, config: FitConfig, fanouts: Sequence[int] | None, batch_size: int | None
) -> Choice | None:
    """Go on with what the checkpoint was trained with, else choose; collective."""
    for name, is_usual in (
        ("config.task", config.task is None),
        ("config.inputs", config.inputs is None),
        ("config.feature", config.feature == FEATURE),
    ):
        if not is_usual:
            raise ConfigError(
                f"strategy 'auto' chooses for the classes of nodes by their {FEATURE!r}, and {name} asks for "
                "something else; name a strategy in dx.init"
            )
    folder = config.checkpoint_folder
    if config.resume and folder is not None and adopt_earlier(g, folder, fanouts, batch_size) is not None:
        return None
    return choose_for(model, g, fanouts, batch_size, config.epochs, own_loop=False)


def _check_inputs(g: DistGraph, inputs: EntityInputs | None) -> None:
    """Raise ConfigError for rows of embeddings where the strategy does not move rows."""
    if inputs is None or strategy_of(g.session).traits.features == "rows":
        return
    embedded = [ntype for ntype in g.ntypes if ntype not in inputs.feature_widths]
    if embedded:
        raise ConfigError(
            f"config.inputs has a DistEmbedding of the nodes {embedded[0]!r}, whose rows strategy "
            f"{g.session.strategy!r} does not move; put nn.Embedding(g.num_nodes(), width, sparse=True) "
            "into the model, which is cut by column, or use strategy='data_parallel'"
        )


def training_nodes(g: DistGraph, ntype: str) -> Tensor:
    """Return this rank's share of the ``train_mask`` of one type."""
    nodes = node_split(g.nodes[ntype].data["train_mask"], g.get_partition_book(), ntype)
    assert isinstance(nodes, Tensor)
    return nodes


def _node_loader(
    g: DistGraph, config: FitConfig, fanouts: Sequence[int], options: Mapping[str, Any]
) -> TrainingLoader:
    ntype = labelled_type(g, config.label) if config.ntype is None else config.ntype
    feats = {ntype: [config.feature]}
    if config.inputs is not None:
        feats = {name: [config.inputs.feature] for name in config.inputs.feature_widths}
    seeds, labels = {ntype: training_nodes(g, ntype)}, {ntype: [config.label]}
    sampler = dgl.dataloading.NeighborSampler(
        list(fanouts), prefetch_node_feats=feats, prefetch_labels=labels
    )
    loader: TrainingLoader = DataLoader(g, seeds, sampler, **options)
    return loader
