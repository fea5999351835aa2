"""``DistGraph``: a partitioned graph that looks complete to every rank."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, cast, final

import numpy as np
import torch
from torch import Tensor

from dglx_dist.comm.collectives import barrier, broadcast_json, check_equal, gather_json, run_on_all_ranks
from dglx_dist.comm.session import Session, Shared, current_session
from dglx_dist.data.partition.hierarchical import TRAINERS_PER_PART
from dglx_dist.data.storage.columns import CACHE, IDS, MANIFEST
from dglx_dist.data.storage.dgl_format import import_dgl_format
from dglx_dist.data.storage.reader import StoredDataset, StoredPart, Verify, open_dataset, open_structure
from dglx_dist.errors import ConfigError, RemoteError, StorageError
from dglx_dist.graph.cache import CachePlan, CacheRequest, Fanouts, cache_rows
from dglx_dist.graph.dist_tensor import (
    GRAPH_REMEDY,
    OPENED,
    DataView,
    DistTensor,
    PartitionPolicy,
    TypedViews,
    make_unsupported,
)
from dglx_dist.graph.kvstore import KVStore
from dglx_dist.graph.partition_book import Ids, PartitionBook, Placement, as_ids, as_ids_or_all, resolve_etype
from dglx_dist.graph.row_kernels import read_from_disk
from dglx_dist.graph.sampling import DrawRule, build_sampled_graph, serve_uniform
from dglx_dist.graph.shared_memory import InitRows
from dglx_dist.graph.structure import PartitionedStructure, ReplicatedStructure, Structure
from dglx_dist.internals.message_passing import install, is_on_torch_path, place
from dglx_dist.memory import machine_memory
from dglx_dist.options import format_location
from dglx_dist.records import Array, ColumnInfo, EdgeType

if TYPE_CHECKING:
    import dgl


ORIGINAL_IDS, USER_IDS = "original ids", "user ids"
StructureMode: TypeAlias = Literal["auto", "replicated", "partitioned"]

log = logging.getLogger(__name__)


def open_together(folder: Path, session: Session, verify: Verify) -> StoredDataset:
    """Open a dataset on every rank. The first rank on each machine checks the files. All ranks call this.

    If the dataset is in an object store, each server fetches its parts.

    Raises StorageError on all ranks, if a rank cannot open the dataset or the ranks see different datasets.
    If an id is out of range, the rank that checks raises DatasetError instead.
    """

    def check_and_open() -> StoredDataset | None:
        return open_dataset(folder, verify=verify) if session.is_first_on_machine else None

    def open_checked() -> StoredDataset:
        return checked_dataset or open_dataset(folder, verify=verify, checked=True)

    checked_dataset = run_on_all_ranks(session, check_and_open)
    dataset = run_on_all_ranks(session, open_checked)
    checksum = dataset.manifest.checksum
    check_equal(session, f"the dataset in {format_location(folder)}", checksum, "copy it again", StorageError)

    # One rank per server fetches the parts that the server owns.
    own_parts = Placement(dataset.manifest.num_parts, session.topology).local_parts
    run_on_all_ranks(
        session, lambda: dataset.fetch_parts(own_parts if session.topology.local_rank == 0 else ())
    )
    return dataset


def import_if_changed(part_config: Path, session: Session) -> Path:
    """Import DGL's files into a dataset beside them, unless it is up to date. All ranks call this.

    Return the dataset's folder. Raise StorageError on all ranks if the import fails on one rank.
    """
    folder = part_config.absolute().with_suffix(".dglx")

    def check_config() -> None:
        if not part_config.exists():
            raise StorageError(f"{part_config} does not exist. Pass the JSON file of DGL's partition_graph.")

    # All ranks check. Otherwise a rank that does not see the file would wait for the others.
    run_on_all_ranks(session, check_config)
    # Rank 0 imports first, so that the other machines find the result on a shared file system.
    for is_importer in (session.topology.rank == 0, session.is_first_on_machine):
        run_on_all_ranks(session, partial(_import_files, part_config, folder, is_importer))
    return folder


_IMPORTED = f"{CACHE}/imported.json"
"""File that records names, sizes and times of the imported files. A changed record means a new import."""


def _import_files(part_config: Path, folder: Path, is_importer: bool) -> None:
    """Import DGL's files into ``folder``, if this rank is an importer and a file has changed."""
    if not is_importer:
        return
    stamps = _read_stamps(part_config)
    stamp_file = folder / _IMPORTED
    # Compare stamps for equality, not by age, because the machines' clocks differ.
    if (folder / MANIFEST).exists() and stamp_file.exists() and stamp_file.read_text() == stamps:
        return

    log.info("importing %s into %s", part_config, folder)
    import_dgl_format(part_config, folder, overwrite=folder.exists())
    stamp_file.parent.mkdir(exist_ok=True)
    stamp_file.write_text(stamps)


def _read_stamps(part_config: Path) -> str:
    # The parts count too, because scripts write columns into a part and leave the JSON file unchanged.
    part_files = sorted(part_config.parent.glob("part*/*.dgl"))
    stats = [(path.name, path.stat()) for path in (part_config, *part_files)]
    return json.dumps([[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats])


def open_structures(
    dataset: StoredDataset, session: Session, placement: Placement, label: str, mode: StructureMode
) -> dict[EdgeType, Structure]:
    """Open each edge type's structure, and let it serve uniform draws. Every rank must call this."""
    if mode not in ("auto", "replicated", "partitioned"):
        raise ConfigError(f"structure is {mode!r}. Use 'auto', 'replicated' or 'partitioned'.")
    manifest = dataset.manifest
    if mode == "auto":
        fits_here = run_on_all_ranks(session, lambda: _fits_in_memory(dataset))
        fits_everywhere = all(gather_json(fits_here, session))
        mode = "replicated" if fits_everywhere else "partitioned"
    if session.topology.rank == 0:
        log.info("%s: %d parts, structure %s", dataset.location, manifest.num_parts, mode)

    structures: dict[EdgeType, Structure] = {}
    for etype in manifest.edge_types:
        if mode == "partitioned":
            structures[etype] = PartitionedStructure(session, dataset, placement, label, etype)
        else:
            structures[etype] = _open_replicated(dataset, session, etype)
    for structure in structures.values():
        serve_uniform(structure)
    read_from_disk([shard.indices for structure in structures.values() for shard in structure.shards])
    return structures


def _fits_in_memory(dataset: StoredDataset) -> bool:
    """Return whether all parts are on this machine and their structure takes at most half the free memory."""
    manifest = dataset.manifest
    if not all(dataset.has_part(part) for part in range(manifest.num_parts)):
        return False

    num_bytes = 0
    for etype in manifest.edge_types:
        num_bytes += 8 * (manifest.num_nodes(etype[2]) + 1)
        num_bytes += dataset.part(0).indices(etype).itemsize * manifest.num_edges(etype)
    _, free_bytes = machine_memory()
    return num_bytes <= free_bytes // 2


def _open_replicated(dataset: StoredDataset, session: Session, etype: EdgeType) -> ReplicatedStructure:
    # The first rank on each machine creates a file, and the machine's other ranks map it.
    is_first = session.is_first_on_machine
    copied_structure = run_on_all_ranks(session, lambda: open_structure(dataset, etype) if is_first else None)
    csc = run_on_all_ranks(session, lambda: copied_structure or open_structure(dataset, etype))
    return ReplicatedStructure(etype, dataset.manifest.num_nodes(etype[0]), csc.indptr, csc.indices)


def add_columns(
    dataset: StoredDataset, placement: Placement, policies: Mapping[str | EdgeType, PartitionPolicy]
) -> None:
    """Add the dataset's node and edge columns to the store, memory-mapped.

    Ids from the source and the user's own ids get hidden names. Raises StorageError if a file in one of the
    local server's parts is missing or damaged.
    """
    manifest = dataset.manifest
    parts = {part: dataset.part(part) for part in placement.local_parts}
    offsets: dict[Any, Array] = {**manifest.node_offsets, **manifest.edge_offsets}
    columns: dict[Any, Mapping[str, ColumnInfo]] = {**manifest.node_columns, **manifest.edge_columns}
    readers: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
        "node": (StoredPart.node_data, StoredPart.original_node_ids),
        "edge": (StoredPart.edge_data, StoredPart.original_edge_ids),
    }
    # All columns together decide whether rows are read from disk.
    mapped_rows = []
    for key, policy in policies.items():
        read, _ = readers[policy.kind]
        mapped_rows += [read(part, key, name=name) for name in columns[key] for part in parts.values()]
    on_disk = read_from_disk(mapped_rows)

    for key, policy in policies.items():
        read, read_ids = readers[policy.kind]
        specs = [(policy.key(name), info, partial(read, name=name)) for name, info in columns[key].items()]
        specs.append((policy.hidden_key(ORIGINAL_IDS), IDS, partial(read_ids)))
        if manifest.user_ids.get(str(key)) == "int64":
            specs.append((policy.hidden_key(USER_IDS), IDS, partial(StoredPart.user_ids)))
        for store_key, info, read_rows in specs:
            rows = {number: read_rows(part, key) for number, part in parts.items()}
            policy.store.add(store_key, offsets[key], rows, info, on_disk=on_disk)


T = TypeVar("T", str, EdgeType)


def _get_only_type(types: Collection[T], what: str, remedy: str) -> T:
    """Return the only entry in ``types``, or raise ConfigError if there are several."""
    if len(types) == 1:
        return next(iter(types))
    names = [key if isinstance(key, str) else key[1] for key in types]
    raise ConfigError(f"the graph has the {what} types {', '.join(names)}. Use {remedy}.")


@final
class DistGraph(Shared):
    """A partitioned dataset. Opening and closing it is collective. Any rank may use it alone at any time.

    Nodes and edges have the dataset's ids, which are contiguous for each type and part. The graph is not a
    DGLGraph, but DGL's samplers accept it, because they call :meth:`sample_neighbors`.

    Args:
        folder: Folder that ``dglx partition`` wrote, or its address in an object store. Each server fetches
            the parts that it owns into a local cache.
        part_config: JSON file from DGL's ``partition_graph`` to use instead. It is imported once into
            ``<name>.dglx`` beside it.
        structure: ``replicated``: every server maps all in-edges in the graph. ``partitioned``: every server
            maps the in-edges in its own parts and requests the others. ``auto``: replicated if all parts are
            on every machine and the structure takes at most half the free memory.
        verify: Whether files are compared with their checksums; see ``open_dataset``.
        session: Session that the graph belongs to. The default is the current session.

    Raises:
        ConfigError: there is no session, both or none of ``folder`` and ``part_config`` are given, or there
            are fewer parts than servers.
        StorageError: on all ranks, if a rank cannot open the dataset.
        DatasetError: an id is out of range. The rank that checks the files raises this instead of
            StorageError.
    """

    def __init__(
        self,
        folder: str | Path | None = None,
        *,
        part_config: str | Path | None = None,
        structure: StructureMode = "auto",
        verify: Verify = "auto",
        session: Session | None = None,
    ) -> None:
        if (folder is None) == (part_config is None):
            raise ConfigError("pass DistGraph the folder of a dataset, or DGL's JSON file as part_config=")
        self.session = session or current_session()
        if is_on_torch_path(self.session.device):
            # If a script itself moves blocks to the device, they need the torch path.
            install()
        if folder is None:
            folder = import_if_changed(Path(str(part_config)), self.session)
        self.dataset: StoredDataset = open_together(Path(folder), self.session, verify)
        manifest = self.dataset.manifest
        self.placement = Placement(manifest.num_parts, self.session.topology)
        # The label is unique for each open graph, so that a session may have several.
        label = broadcast_json(secrets.token_hex(4), self.session)
        self.kvstore = KVStore(self.session, self.placement, label)
        merge = self.placement.server_offsets
        node_bounds = {ntype: merge(offsets) for ntype, offsets in manifest.node_offsets.items()}
        edge_bounds = {etype: merge(offsets) for etype, offsets in manifest.edge_offsets.items()}
        num_trainers = None
        trainers_per_part = manifest.parameters.get(TRAINERS_PER_PART)
        if isinstance(trainers_per_part, int):
            num_trainers = manifest.num_parts * trainers_per_part
        self._book = PartitionBook(node_bounds, edge_bounds, self.session.topology.server, num_trainers)

        make_policy = partial(
            PartitionPolicy, partition_book=self._book, store=self.kvstore, dataset=manifest.checksum
        )
        self._node_policies: dict[str, PartitionPolicy] = {}
        for ntype, bounds in node_bounds.items():
            self._node_policies[ntype] = make_policy(kind="node", type_name=ntype, bounds=bounds)
        self._edge_policies: dict[EdgeType, PartitionPolicy] = {}
        for etype, bounds in edge_bounds.items():
            self._edge_policies[etype] = make_policy(kind="edge", type_name=etype, bounds=bounds)
        policies: dict[Any, PartitionPolicy] = {**self._node_policies, **self._edge_policies}
        run_on_all_ranks(self.session, lambda: add_columns(self.dataset, self.placement, policies))
        self._node_views = {ntype: DataView(policy) for ntype, policy in self._node_policies.items()}
        self._edge_views = {etype: DataView(policy) for etype, policy in self._edge_policies.items()}

        self._structures = open_structures(self.dataset, self.session, self.placement, label, structure)
        self._draw_counter = count()
        self.on_close: list[Callable[[], None]] = []
        """Functions that :meth:`close` calls when no rank uses the graph any more."""
        self.user_columns: Any = None
        """Columns from the graph that a script passed to ``dx.distribute``, if nodes are renumbered."""
        OPENED.set(self.session, self)
        barrier(self.session, f"opening {self.name}")

    if not TYPE_CHECKING:
        __getattr__ = make_unsupported("a distributed graph", GRAPH_REMEDY)

    @property
    def name(self) -> str:
        return self.dataset.manifest.name

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def to(self, device: torch.device | str) -> DistGraph:
        """Return this graph if ``device`` is the CPU. Raise ConfigError for other devices."""
        if torch.device(device).type != "cpu":
            raise ConfigError(f"a distributed graph stays on the CPU. Leave out .to({device}): batches move.")
        return self

    @property
    def idtype(self) -> torch.dtype:
        return torch.int64

    @property
    def ntypes(self) -> list[str]:
        return list(self._node_policies)

    @property
    def etypes(self) -> list[str]:
        return [relation for _, relation, _ in self._edge_policies]

    @property
    def canonical_etypes(self) -> list[EdgeType]:
        return list(self._edge_policies)

    @property
    def is_homogeneous(self) -> bool:
        """Whether there is one node type and one edge type."""
        return len(self._node_policies) == len(self._edge_policies) == 1

    @property
    def ndata(self) -> DataView:
        """Node tensors by name. Raises ConfigError if there are several node types."""
        return self._node_views[_get_only_type(self._node_views, "node", "g.nodes[ntype].data")]

    @property
    def edata(self) -> DataView:
        """Edge tensors by name. Raises ConfigError if there are several edge types."""
        return self._edge_views[_get_only_type(self._edge_views, "edge", "g.edges[etype].data")]

    @property
    def nodes(self) -> TypedViews[str, DataView]:
        """Node tensors by type and name, as in ``g.nodes[ntype].data[name]``."""
        views = self._node_views
        return TypedViews(lambda ntype: views[self._check_ntype(ntype)], "arange(g.num_nodes())")

    @property
    def edges(self) -> TypedViews[str | EdgeType, DataView]:
        """Edge tensors by type and name, as in ``g.edges[etype].data[name]``."""
        views = self._edge_views
        return TypedViews(lambda etype: views[self.to_canonical_etype(etype)], "g.find_edges(ids)")

    def num_nodes(self, ntype: str | None = None) -> int:
        return self._book.num_nodes(ntype)

    def num_edges(self, etype: str | EdgeType | None = None) -> int:
        return self._book.num_edges(etype)

    number_of_nodes, number_of_edges = num_nodes, num_edges

    def num_classes(self, ntype: str | None = None) -> int:
        """Return how many classes a node type has. Raise ConfigError if the dataset has none."""
        key = self._resolve_ntype(ntype, "num_classes(ntype)")
        classes = self.dataset.manifest.num_classes
        if key not in classes:
            raise ConfigError(f"{self.dataset.location} has no classes of {key!r}. Partition it with labels.")
        return classes[key]

    def to_canonical_etype(self, etype: str | EdgeType | None) -> EdgeType:
        return resolve_etype(etype, self.canonical_etypes)

    def get_partition_book(self) -> PartitionBook:
        return self._book

    @property
    def edge_bounds(self) -> list[Array]:
        """(S + 1,) int64 bounds for each edge type. Server s has the edges ``bounds[s]:bounds[s + 1]``."""
        return [policy.bounds for policy in self._edge_policies.values()]

    def get_node_partition_policy(self, ntype: str) -> PartitionPolicy:
        return self._node_policies[self._check_ntype(ntype)]

    def get_edge_partition_policy(self, etype: str | EdgeType) -> PartitionPolicy:
        return self._edge_policies[self.to_canonical_etype(etype)]

    def new_policy(self, name: str, rows: int | Sequence[int]) -> PartitionPolicy:
        """Return a policy for rows that are neither nodes nor edges, such as relations. Not collective.

        Args:
            name: Name of the policy.
            rows: Row count to cut evenly over the S servers, or (S + 1,) bounds. With bounds, server s has
                the rows ``rows[s]:rows[s + 1]``.

        Raises:
            ConfigError: the name contains ``~``, the count is negative, or the bounds are invalid.
        """
        if "~" in name:
            raise ConfigError(f"the policy name {name!r} contains '~'. Choose another name.")

        num_servers = self.placement.topology.num_servers
        if isinstance(rows, int | np.integer):
            if rows < 0:
                raise ConfigError(f"the policy {name!r} has {rows} rows. Use 0 or more.")
            bounds = np.arange(num_servers + 1, dtype=np.int64) * int(rows) // num_servers
        else:
            bounds = np.array(rows, dtype=np.int64)
            if bounds.shape != (num_servers + 1,) or bounds[0] != 0 or (np.diff(bounds) < 0).any():
                raise ConfigError(
                    f"the policy {name!r} has the bounds {list(rows)} for {num_servers} server(s). Pass "
                    f"{num_servers + 1} ascending numbers from 0 on, or only the number of rows."
                )
        book, store = self._book, self.kvstore
        return PartitionPolicy(kind="own", type_name=name, bounds=bounds, partition_book=book, store=store)

    def find_policy_of_length(self, num_rows: int) -> PartitionPolicy:
        """Return the policy for the only node or edge type with ``num_rows`` rows, or raise ConfigError."""
        policies = [*self._node_policies.values(), *self._edge_policies.values()]
        candidates = [policy for policy in policies if policy.get_size() == num_rows]
        if len(candidates) == 1:
            return candidates[0]
        sizes = ", ".join(f"{policy.policy_str}: {policy.get_size()}" for policy in policies)
        finding = "several types have" if candidates else "no type has"
        raise ConfigError(
            f"{finding} {num_rows} rows ({sizes}). Choose one with part_policy=. For rows that are neither "
            f"nodes nor edges, use part_policy=g.new_policy(name, {num_rows})."
        )

    def new_tensor(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        name: str | None = None,
        init_func: InitRows | None = None,
        part_policy: PartitionPolicy | None = None,
    ) -> DistTensor:
        """Make a :class:`DistTensor` for nodes or edges of this graph. Every rank must call this."""
        return DistTensor(shape, dtype, name, init_func, part_policy, graph=self)

    def cache_rows(
        self,
        name: str,
        *,
        alpha: float,
        policy: str = "vip",
        ntype: str | None = None,
        seeds: Ids | Mapping[str, Ids] | None = None,
        fanouts: Fanouts | None = None,
        batch_size: int | None = None,
    ) -> CachePlan:
        """Cache rows from other servers. Results stay the same. Every rank must call this.

        A server's ranks share the cached rows. A second call replaces the rows from the first call, and
        ``alpha=0`` drops them. With one server there is nothing to cache.

        Args:
            name: Name of a node column in the dataset. Such columns are read-only.
            alpha: Maximum number of rows to keep, as a fraction of the local server's rows.
            policy: Rule that chooses the rows.

                - ``vip``: rows that a batch most probably needs (SALIENT++).
                - ``degree``: rows that are most often a source.
                - ``halo``: sources that have edges into local nodes. Those with the most such edges come
                  first.
                - ``lookahead``: each rank on the server gets an equal share of ``alpha``. Its loader keeps
                  the rows that its next batches use soonest (Belady's MIN). Only loaders with DGL's neighbor
                  samplers use these rows, one loader at a time. Such a loader fetches on one thread, whatever
                  its ``num_threads``. Apart from the rows, a rank holds 12 bytes for each kept row, 12 for
                  each row in the column (above 2**20 rows: 40 to 80 for each row that known batches use), 4
                  to 8 for each known use, and about 256 MiB plus depth + 5 batches for drawn batches.
            ntype: Node type. It may be None if there is one.
            seeds: This rank's training nodes, for ``vip``. The default is its share of ``train_mask``.
            fanouts, batch_size: The values that the loader uses, for ``vip``.

        Raises:
            ConfigError: on all ranks, if an argument is invalid or memory is short on one of them.
        """

        def resolve_ntype() -> str:
            return self._resolve_ntype(ntype, "cache_rows(ntype=)")

        key = run_on_all_ranks(self.session, resolve_ntype, ConfigError)
        return cache_rows(self, CacheRequest(name, key, alpha, policy, seeds, fanouts, batch_size))

    def structure(self, etype: str | EdgeType | None = None) -> Structure:
        return self._structures[self._resolve_etype(etype, "an edge type")]

    def in_degrees(self, v: Ids | None = None, etype: str | EdgeType | None = None) -> Tensor:
        """Return the (K,) int64 in-degrees for ``v``, or for all nodes."""
        structure = self.structure(etype)
        ids = as_ids_or_all(v, structure.num_destinations, f"the nodes of type {structure.etype[2]!r}")
        return torch.from_numpy(structure.in_degrees(ids))

    def out_degrees(self, u: Ids | None = None, etype: str | EdgeType | None = None) -> Tensor:
        """Return the (K,) int64 out-degrees for ``u``, or for all nodes. The first call reads every edge."""
        structure = self.structure(etype)
        ids = as_ids_or_all(u, structure.num_sources, f"the nodes of type {structure.etype[0]!r}")
        return torch.from_numpy(structure.out_degrees(ids))

    def find_edges(self, edges: Ids, etype: str | EdgeType | None = None) -> tuple[Tensor, Tensor]:
        """Return (sources, destinations), (K,) int64 each. Raise IndexError if an edge does not exist."""
        structure = self.structure(etype)
        ids = as_ids(edges, structure.num_edges, f"the edges of type {structure.etype}")
        sources, destinations = structure.submit_find_edges(ids)()
        return torch.from_numpy(sources), torch.from_numpy(destinations)

    def sample_neighbors(
        self,
        seed_nodes: Ids | Mapping[str, Ids],
        fanout: int | Mapping[str | EdgeType, int],
        edge_dir: str = "in",
        prob: str | None = None,
        exclude_edges: Ids | Mapping[str | EdgeType, Ids] | None = None,
        replace: bool = False,
        etype_sorted: bool = True,
        output_device: torch.device | str | None = None,
    ) -> dgl.DGLGraph:
        """Sample in-edges of ``seed_nodes``. Return a graph with all nodes and these edges, as DGL does.

        Args:
            seed_nodes: (K,) ids, or a dict from node type to ids.
            fanout: Maximum edges per node and edge type, -1 for all, or a dict by edge type.
            edge_dir: ``in``. Out-edges are stored with their destinations and cannot be drawn.
            prob: Name of an edge tensor with weights, or with a mask for the edges that may be drawn.
            exclude_edges: Edge ids that are never drawn, or a dict from edge type to ids.
            replace: Whether an edge may be drawn more than once.
            etype_sorted: Accepted for DGL, without effect.
            output_device: Device that receives the graph. The default is the CPU.
        """
        if edge_dir != "in":
            raise ConfigError(f"edge_dir is {edge_dir!r}, but only 'in' can be sampled. Reverse the graph.")
        # Each call on each rank gets its own seed. The shift makes the seed fit int64.
        seeds = np.random.SeedSequence([self.session.seed, self.rank(), next(self._draw_counter)])
        seed = int(seeds.generate_state(1, np.uint64)[0]) >> 1
        rule = DrawRule(replace=bool(replace), prob=prob, seed=seed)
        graph = build_sampled_graph(self, seed_nodes, fanout, exclude_edges, rule)
        return graph if output_device is None else place(graph, output_device)

    def local_nodes(self, ntype: str | None = None) -> Tensor:
        """Return the local server's node ids, ascending."""
        key = self._resolve_ntype(ntype, "local_nodes(ntype)")
        return self._book.partid2nids(self._book.partid, key)

    def orig_ids(self, ids: Ids, ntype: str | None = None) -> Tensor:
        """Return the (K,) int64 ids that the nodes have in the dataset's source."""
        policy = self._node_policies[self._resolve_ntype(ntype, "orig_ids(ids, ntype)")]
        return self._pull_hidden(policy, ORIGINAL_IDS, ids)

    def orig_edge_ids(self, ids: Ids, etype: str | EdgeType | None = None) -> Tensor:
        """Return the (K,) int64 positions that the edges have in the source's edge list."""
        policy = self._edge_policies[self._resolve_etype(etype, "orig_edge_ids(ids, etype)")]
        return self._pull_hidden(policy, ORIGINAL_IDS, ids)

    def new_ids(
        self, ids: Ids | Sequence[str], ntype: str | None = None, *, from_user_ids: bool = False
    ) -> Tensor:
        """Translate ids from the dataset's source into (K,) int64 node ids, the inverse of :meth:`orig_ids`.

        Each call reads all ids. Text ids are the user's own ids, as :meth:`user_ids` returns them. With
        ``from_user_ids``, integers are user ids, too. Raises IndexError with the first id that no node has.
        """
        key = self._resolve_ntype(ntype, "new_ids(ids, ntype)")
        is_text = isinstance(ids, Sequence | np.ndarray) and np.asarray(ids).dtype.kind in "UO"
        if is_text or (from_user_ids and self.dataset.manifest.user_ids.get(key)):
            names = ids.cpu().numpy() if isinstance(ids, Tensor) else np.asarray(ids)
            return self._find_user_ids(names, key)
        source_ids = as_ids(cast("Ids", ids), self.num_nodes(key), f"the nodes {key!r} of the source")
        # `original_ids` is a permutation, so sorting it gives the inverse.
        original_ids = self._pull_hidden(self._node_policies[key], ORIGINAL_IDS, slice(None))
        return original_ids.argsort()[source_ids]

    def user_ids(self, ids: Ids, ntype: str | None = None) -> Array:
        """Return the (K,) ids that the user gave the nodes, int64 or unicode text.

        If the user gave none, this is :meth:`orig_ids`. Raises IndexError if an id is out of range, and
        StorageError if the ids are text and not all parts are on this machine.
        """
        key = self._resolve_ntype(ntype, "user_ids(ids, ntype)")
        policy = self._node_policies[key]
        id_dtype = self.dataset.manifest.user_ids.get(key)
        if id_dtype == "string":
            # Text is not in the store, so each call reads the files.
            parts = [self.dataset.part(part) for part in range(self.dataset.manifest.num_parts)]
            text_ids = np.concatenate([np.asarray(part.user_ids(key)) for part in parts])
            return text_ids[as_ids(ids, policy.get_size(), policy.policy_str)]
        return self._pull_hidden(policy, USER_IDS if id_dtype else ORIGINAL_IDS, ids).numpy()

    def _find_user_ids(self, names: Array, ntype: str) -> Tensor:
        """Return the (K,) int64 ids for the user ids ``names``. Raise as :meth:`new_ids`."""
        user_ids = self.user_ids(slice(None), ntype)
        if user_ids.dtype.kind == "U" or names.dtype.kind in "UO":
            user_ids = user_ids.astype(str)
            names = names.astype(str)

        # A name beyond the last id is compared with the last id, and does not match.
        order = user_ids.argsort()
        indices = np.searchsorted(user_ids, names, sorter=order).clip(max=len(order) - 1)
        positions = order[indices]
        is_unknown = user_ids[positions] != names
        if is_unknown.any():
            raise IndexError(f"no node of type {ntype!r} has the id {names[is_unknown][0].item()!r}")
        return torch.from_numpy(positions)

    def rank(self) -> int:
        return self.session.topology.rank

    def barrier(self) -> None:
        """Wait for every rank. Afterwards all ranks see everything that any rank wrote before the barrier."""
        run_on_all_ranks(self.session, self.kvstore.fence, RemoteError)
        barrier(self.session, "g.barrier()")

    def close(self) -> None:
        """Stop serving this graph after all ranks have finished their pending writes. All ranks call this."""
        run_on_all_ranks(self.session, self.kvstore.fence, RemoteError)
        barrier(self.session, f"closing {self.name}")
        # Copy the list, because some actions remove themselves from it.
        for action in [*self.on_close]:
            action()

        self.kvstore.close()
        for structure in self._structures.values():
            structure.close()
        if OPENED.get(self.session) is self:
            OPENED.set(self.session, None)

    def _check_ntype(self, ntype: str) -> str:
        if ntype not in self._node_policies:
            raise ConfigError(f"there is no node type {ntype!r} (known: {', '.join(self.ntypes)})")
        return ntype

    def _resolve_ntype(self, ntype: str | None, remedy: str) -> str:
        return self._check_ntype(ntype or _get_only_type(self._node_policies, "node", remedy))

    def _resolve_etype(self, etype: str | EdgeType | None, remedy: str) -> EdgeType:
        return self.to_canonical_etype(etype or _get_only_type(self._edge_policies, "edge", remedy))

    def _pull_hidden(self, policy: PartitionPolicy, name: str, ids: Ids) -> Tensor:
        rows = as_ids(ids, policy.get_size(), policy.policy_str)
        return self.kvstore.pull(policy.hidden_key(name), rows, phase="ids")
