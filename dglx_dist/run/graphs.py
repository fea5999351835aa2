"""``partition_graph`` and ``distribute``: how a graph in memory becomes one that many ranks share."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from dglx_dist.cluster.collectives import broadcast_json
from dglx_dist.cluster.session import Session, session_or
from dglx_dist.datasets.load import load_dataset
from dglx_dist.errors import ConfigError, PeerError
from dglx_dist.graph import DistGraph
from dglx_dist.graph.opening import together
from dglx_dist.partition import PartitionOptions
from dglx_dist.records import Array
from dglx_dist.run.auto_options import check_session_options
from dglx_dist.run.cut_cache import cut_once
from dglx_dist.run.prepare import PartitionPlan, partition_to_disk
from dglx_dist.storage.layout import MANIFEST
from dglx_dist.storage.precision import FeatureDtype
from dglx_dist.storage.reader import open_dataset
from dglx_dist.strategies.opening import begin, resolve_strategy

if TYPE_CHECKING:
    import dgl

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
    with _told_what_to_do(session):
        told: Any = broadcast_json(together(session, located, ConfigError), session)
    where: dict[str, Any] = {kind: Path(path).expanduser() for kind, path in told.items()}
    return DistGraph(**where, structure=structure, session=session)


@contextmanager
def _told_what_to_do(session: Session) -> Iterator[None]:
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
