"""Putting this package in the place of ``dgl.distributed``, whichever way DGL loads it."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType, ModuleType
from typing import Any, final

import dgl
import dgl.dataloading
from torch import Tensor, nn

from dglx_dist.comm.collectives import barrier
from dglx_dist.comm.session import current_session, session_if_open, start_later
from dglx_dist.comm.topology import Topology, read_settings, read_topology
from dglx_dist.compat import dataloading as data_loader
from dglx_dist.compat import dataloading as loaders
from dglx_dist.compat import dataloading as sampling
from dglx_dist.compat import dist_graph as graph
from dglx_dist.compat import dist_tensor as embedding
from dglx_dist.compat import dist_tensor as kvstore
from dglx_dist.compat import dist_tensor as tensor
from dglx_dist.compat import optim, partition
from dglx_dist.compat import partition as split
from dglx_dist.compat import partition_book as book
from dglx_dist.compat import partition_book as policy
from dglx_dist.compat.dist_graph import inner_graph
from dglx_dist.compat.dist_tensor import KVClient
from dglx_dist.dataloading.step_loader import whole_number
from dglx_dist.errors import ConfigError, PeerError
from dglx_dist.graph.dist_tensor import OPENED, opened_graph
from dglx_dist.graph.ids import Ids
from dglx_dist.records import EDGE_TYPE, NODE_TYPE
from dglx_dist.strategies.base import Parts, WrappedModel, begin, resolve_strategy

MAX_QUEUE_SIZE = 20 * 2**30

_OF_SERVERS = ("num_servers", "num_workers", "num_samplers")
"""Arguments of older versions of DGL, about processes that do not exist here."""


def initialize(
    ip_config: object = None,
    max_queue_size: int = MAX_QUEUE_SIZE,
    net_type: str | None = None,
    num_worker_threads: int = 1,
    use_graphbolt: bool = False,
    *,
    strategy: str | None = None,
    timeout: float = 300.0,
    seed: int = 0,
    **options: object,
) -> None:
    """Say how to train; the ranks join each other when the first graph is opened.

    Creates no process group, so that the script may do so next with ``init_process_group``. Where it has not
    done so when the graph is opened, one is created then.

    Args:
        ip_config: Not read: torchrun tells where the ranks are. One warning, on rank 0, for this argument and
            those that follow, where they are not what DGL has by default, and for the variables of DGL's
            launcher.
        max_queue_size: Likewise; there are no queues.
        net_type: Likewise.
        num_worker_threads: Likewise; there are no sampler processes.
        use_graphbolt: False.
        strategy: Name of a strategy; None: that of ``python -m dglx_dist.run``, else ``data_parallel``.
        timeout: Seconds that a rank may be silent before the others give up, naming it.
        seed: Of everything that is drawn.
        options: Of the strategy.

    Raises:
        ConfigError: ``use_graphbolt``, a strategy that is unknown or ``auto``, a session is open already, or
            DGL's launcher started this process as one of its servers.
    """
    if use_graphbolt:
        raise ConfigError("use_graphbolt=True cannot be honoured: there is one format; leave it out")
    if session_if_open() is not None:
        raise ConfigError("initialize was called before; call dgl.distributed.exit_client() between the two")
    name, seed = resolve_strategy(strategy), whole_number("seed", seed, least=0)
    launcher = read_settings().dgl_processes
    if launcher.get("DGL_ROLE", "client") != "client":
        raise ConfigError(
            f"DGL_ROLE is {launcher['DGL_ROLE']!r}, and there are no such processes here: every rank serves "
            "its share; start the script with torchrun, not with DGL's launcher"
        )
    given = {
        "ip_config": (ip_config, None),
        "max_queue_size": (max_queue_size, MAX_QUEUE_SIZE),
        # None is what newer versions have.
        "net_type": ("socket" if net_type is None else net_type, "socket"),
        "num_worker_threads": (num_worker_threads, 1),
        **{key: (options.pop(key), None) for key in _OF_SERVERS if key in options},
    }
    ignored = [f"{key}={value!r}" for key, (value, usual) in given.items() if value != usual]
    ignored += [f"{key}={value!r}" for key, value in launcher.items()]
    if ignored and read_topology().rank == 0:
        warnings.warn(
            f"{', '.join(ignored)}: not used, because torchrun says where the ranks are, and there are no "
            "servers and no sampler processes",
            stacklevel=2,
        )
    start_later(lambda: begin(name, options, timeout_s=timeout, seed=seed))


def exit_client() -> None:
    """End the session once the other ranks end theirs; ``initialize`` may then be called again.

    Every rank calls it, or none: the end of the process does it too.
    """
    start_later(None)
    session = session_if_open()
    if session is not None:
        session.close()


def client_barrier() -> None:
    """Wait until every rank is here."""
    barrier(current_session(), "client_barrier()")


def get_rank() -> int:
    """Return the rank of this process."""
    return _topology().rank


def get_num_client() -> int:
    """Return the number of ranks."""
    return _topology().world_size


def get_num_machines() -> int:
    """Return the number of servers, which is that of the partitions that the book knows."""
    return _topology().num_servers


def get_machine_id() -> int:
    """Return the server of this rank."""
    return _topology().server


def get_group_id() -> int:
    """Return 0: there are no groups of clients."""
    return 0


def refused(name: str, reason: str) -> type[Any]:
    """Return what takes the place of a name that cannot be honoured: calling or deriving it raises.

    Args:
        name: As in ``dgl.distributed``.
        reason: What to say, and what to do instead.
    """

    def raise_it(*_: object, **__: object) -> Any:
        raise ConfigError(f"dgl.distributed.{name} is not available: {reason}")

    kept = {"__new__": raise_it, "__init_subclass__": raise_it, "__doc__": f"Not available: {reason}"}
    return type(name, (), kept)


def _topology() -> Topology:
    session = session_if_open()
    return read_topology() if session is None else session.topology


_SERVERS = "there are no server processes: every rank serves its share; start the script with torchrun"
_RPC = (
    "no code and no pickles travel between ranks; register a handler of arrays with "
    "dglx_dist.comm.session.current_session().rpc.register"
)
_GRAPHBOLT = "there is one format for all strategies, and no GraphBolt; leave it out"

REFUSED: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(
            ("DistGraphServer", "KVServer", "ServerState", "start_server", "connect_to_server"), _SERVERS
        ),
        **dict.fromkeys(("shutdown_servers", "read_ip_config"), _SERVERS),
        **dict.fromkeys(
            ("set_rank", "set_num_machines", "set_machine_id", "set_num_client"),
            "torchrun tells each rank who it is",
        ),
        **dict.fromkeys(
            (
                *("Request", "Response", "register_service", "create_sender", "create_receiver"),
                *("finalize_sender", "finalize_receiver", "wait_for_senders", "connect_receiver"),
                *("send_request", "recv_request", "send_response", "recv_response", "remote_call"),
                *("send_request_to_machine", "remote_call_to_machine", "fast_pull"),
            ),
            _RPC,
        ),
        "copy_data_to_shared_memory": "the ranks of a server share their rows already",
        **dict.fromkeys(("dgl_partition_to_graphbolt", "gb_convert_single_dgl_partition"), _GRAPHBOLT),
        **dict.fromkeys(
            ("NodeCollator", "EdgeCollator"),
            "the distributed loaders make their batches themselves; use these",
        ),
    }
)
"""Name to the reason, which calling the name or deriving from it raises as a ConfigError."""

SUPPORTED: Mapping[str, Any] = MappingProxyType(
    {
        "initialize": initialize,
        "exit_client": exit_client,
        "get_rank": get_rank,
        "get_num_client": get_num_client,
        "get_num_machines": get_num_machines,
        "get_machine_id": get_machine_id,
        "get_group_id": get_group_id,
        "client_barrier": client_barrier,
        "DistConnectError": PeerError,
        "DistGraph": graph.DistGraph,
        "DistTensor": tensor.DistTensor,
        "DistEmbedding": embedding.DistEmbedding,
        "optim": optim,
        "node_split": split.node_split,
        "edge_split": split.edge_split,
        "DistDataLoader": data_loader.DistDataLoader,
        "DistNodeDataLoader": loaders.DistNodeDataLoader,
        "DistEdgeDataLoader": loaders.DistEdgeDataLoader,
        "partition_graph": partition.partition_graph,
        "load_partition": partition.load_partition,
        "load_partition_book": partition.load_partition_book,
        "load_partition_feats": partition.load_partition_feats,
        "GraphPartitionBook": book.GraphPartitionBook,
        "RangePartitionBook": book.RangePartitionBook,
        "PartitionPolicy": policy.PartitionPolicy,
        "NodePartitionPolicy": policy.NodePartitionPolicy,
        "EdgePartitionPolicy": policy.EdgePartitionPolicy,
        "KVClient": kvstore.KVClient,
        "sample_neighbors": sampling.sample_neighbors,
        "sample_etype_neighbors": sampling.sample_etype_neighbors,
        "in_subgraph": sampling.in_subgraph,
        "find_edges": sampling.find_edges,
    }
)
"""Name to what stands for it."""

CONSTANTS: Mapping[str, Any] = MappingProxyType(
    {"DEFAULT_NTYPE": NODE_TYPE, "DEFAULT_ETYPE": EDGE_TYPE, "MAX_QUEUE_SIZE": MAX_QUEUE_SIZE}
)
"""What scripts import from ``dgl.distributed.constants``; from DGL 2.4 on the package has them as well."""

OF_LOADERS = ("DistGraph", "DistDataLoader", "DistNodeDataLoader", "DistEdgeDataLoader")
"""Names that modules of ``dgl.dataloading`` have as well."""


def offered() -> dict[str, Any]:
    """Return every name to what stands for it; a refused one raises when it is used."""
    gone = {name: refused(name, reason) for name, reason in REFUSED.items()}
    return {**SUPPORTED, **CONSTANTS, **gone}


TRAINER = "default"
"""The role of every rank, as DGL calls trainers."""

_REASON = "there are no server and no sampler processes; docs/compat.md has what stands for them"
_OF_PROCESSES = ("role", "rpc", "rpc_client", "rpc_server", "dist_context", "graph_services")


def get_kvstore() -> KVClient | None:
    """Return the store of the graph opened last; None before there is one, as DGL does."""
    opened = session_if_open()
    return None if opened is None or OPENED.of(opened) is None else KVClient.over(opened_graph().kvstore)


def in_degrees(g: object, v: Ids) -> Tensor:
    """Return the numbers of in-edges of nodes of a graph of one type."""
    return inner_graph(g).in_degrees(v)


def out_degrees(g: object, u: Ids) -> Tensor:
    """Return the numbers of out-edges of nodes of a graph of one type."""
    return inner_graph(g).out_degrees(u)


def _rank_of_role(role: str) -> int:
    return get_rank()


SUPPORTED_SUBMODULES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "role": {
            "get_rank": _rank_of_role,
            "get_global_rank": get_rank,
            "get_trainer_rank": get_rank,
            "get_num_trainers": get_num_client,
            "get_role": lambda: TRAINER,
        },
        "rpc": {
            "get_num_server": get_num_machines,
            "get_num_server_per_machine": lambda: 1,
        },
        "dist_context": {
            "is_initialized": lambda: session_if_open() is not None,
            "get_sampler_pool": lambda: (None, 0),
        },
        "kvstore": {"get_kvstore": get_kvstore},
        "graph_services": {"in_degrees": in_degrees, "out_degrees": out_degrees},
    }
)
"""Submodule and name to what stands for it, beside the names that the package has too."""

_KEPT: Mapping[str, tuple[str, ...]] = MappingProxyType({"graph_services": ("merge_graphs",)})
"""Functions that compute what they are given."""


def replaced(submodule: ModuleType) -> dict[str, Any]:
    """Return what takes the place of names that only this submodule has: its functions about processes.

    Args:
        submodule: ``dgl.distributed.<name>``, as DGL loaded it.
    """
    _, _, name = submodule.__name__.rpartition(".")
    known = dict(SUPPORTED_SUBMODULES.get(name, {}))
    if name == "kvstore":
        return {**known, **_refused(name, ("init_kvstore", "close_kvstore"))}
    if name not in _OF_PROCESSES:
        return known
    own = [one for one, value in vars(submodule).items() if _is_own_function(one, value, submodule)]
    return {**_refused(name, [one for one in own if one not in _KEPT.get(name, ())]), **known}


def _is_own_function(name: str, value: object, submodule: ModuleType) -> bool:
    """Whether ``submodule`` defines the function ``name`` for others to call."""
    return not name.startswith("_") and inspect.isfunction(value) and value.__module__ == submodule.__name__


def _refused(submodule: str, names: Iterable[str]) -> dict[str, Any]:
    return {name: refused(f"{submodule}.{name}", _REASON) for name in names}


NAME = "dgl.distributed"
_MARK = "__dglx_dist__"
_MISSING = object()


@final
class Installed:
    """What :func:`install` did; leaving its ``with`` block, or :meth:`undo`, takes it back."""

    def __init__(self, undo: list[Callable[[], None]]) -> None:
        self._undo = undo

    def undo(self) -> None:
        """Put back what was there before."""
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> Installed:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()


def install() -> Installed:
    """Make ``dgl.distributed`` and the distributed loaders of ``dgl.dataloading`` those of this package.

    Call it before the script imports names from there. Where ``import dgl`` has loaded DGL's own module
    already (up to DGL 2.3), its names are rebound, also where its submodules have them; else a module takes
    its place before anybody imports it, and DGL's own is never loaded. A second call does nothing.

    Returns:
        What takes it back.
    """
    undo: list[Callable[[], None]] = []
    loaded = sys.modules.get(NAME)
    if loaded is not None and _MARK in vars(loaded):
        return Installed(undo)
    if loaded is None:
        _take_place(undo)
    else:
        _rebind(loaded, undo)
    # Where DGL has loaded its own package, its loaders of one machine show DistGraph too.
    for name in OF_LOADERS if loaded else OF_LOADERS[1:]:
        _set(dgl.dataloading, name, SUPPORTED[name], undo)
    return Installed(undo)


def _rebind(package: ModuleType, undo: list[Callable[[], None]]) -> None:
    """Put our names into DGL's own package, and where its submodules and the loaders have what it had."""
    stock = dict(vars(package))
    names = {name: value for name, value in offered().items() if not isinstance(value, ModuleType)}
    for name, value in names.items():
        _set(package, name, value, undo)
    inside, outside = {**names, **_public(optim)}, {name: SUPPORTED[name] for name in OF_LOADERS}
    for path, module in list(sys.modules.items()):
        if path.startswith((f"{NAME}.", "dgl.dataloading.")):
            known = inside if path.startswith(f"{NAME}.") else outside
            # A submodule may have something else of that name.
            alike = {
                name: known[name]
                for name in known.keys() & vars(module).keys()
                if name not in stock or vars(module)[name] is stock[name]
            }
            own = replaced(module) if path.startswith(f"{NAME}.") else {}
            for name, value in {**own, **alike}.items():
                _set(module, name, value, undo)
    _set(package, _MARK, True, undo)


def _take_place(undo: list[Callable[[], None]]) -> None:
    """Put a module with its ``optim``, ``nn``, ``constants`` where ``import dgl.distributed`` looks first."""
    package = _module(NAME, "dgl.distributed as dglx_dist has it.", {**offered(), _MARK: True})
    # A package, so that importing what it does not have says so by name.
    package.__path__ = []
    optimizers = _module(f"{NAME}.optim", "Optimizers of embeddings.", _public(optim))
    nn = _module(f"{NAME}.nn", "Embeddings.", {"DistEmbedding": SUPPORTED["DistEmbedding"]})
    constants = _module(f"{NAME}.constants", "Names of types, and the like.", dict(CONSTANTS))
    vars(package).update(optim=optimizers, nn=nn, constants=constants)
    for module in (package, optimizers, nn, constants):
        _put(module, undo)
    _set(dgl, "distributed", package, undo)


def _module(name: str, doc: str, names: dict[str, Any]) -> ModuleType:
    module = ModuleType(name, doc)
    vars(module).update(names)
    return module


def _public(module: ModuleType) -> dict[str, Any]:
    return {name: getattr(module, name) for name in module.__all__}


def _put(module: ModuleType, undo: list[Callable[[], None]]) -> None:
    sys.modules[module.__name__] = module
    undo.append(lambda: _drop(module))


def _drop(module: ModuleType) -> None:
    if sys.modules.get(module.__name__) is module:
        del sys.modules[module.__name__]


def _set(owner: ModuleType, name: str, value: object, undo: list[Callable[[], None]]) -> None:
    before = getattr(owner, name, _MISSING)
    setattr(owner, name, value)
    undo.append(
        (lambda: delattr(owner, name)) if before is _MISSING else (lambda: setattr(owner, name, before))
    )


@final
class ScriptModel(WrappedModel):
    """Trains as ``inner`` does; ``.module`` is a copy of the user's module with uncut weights.

    DistDGL scripts compute with ``model.module`` what they evaluate. With a strategy that cuts weights, that
    must be another module than the one that trains. Asking for it is collective.

    Args:
        inner: What the strategy made of the script's model.
    """

    def __init__(self, inner: WrappedModel) -> None:
        super().__init__()
        self.inner = inner

    @property
    def module(self) -> nn.Module:  # type: ignore[override]  # an attribute where nothing is cut
        """The user's module with uncut weights as they are now; every rank must ask."""
        return self.inner.whole()

    @property
    def parts(self) -> Parts:
        """See :class:`WrappedModel`."""
        return self.inner.parts

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """See :class:`WrappedModel`."""
        return self.inner(*args, **kwargs)

    def exchange_seconds(self, *, reset: bool = False) -> float:
        """See :class:`WrappedModel`."""
        return self.inner.exchange_seconds(reset=reset)

    def whole(self) -> nn.Module:
        """See :class:`WrappedModel`."""
        return self.inner.whole()

    def join_state(self, name: str, mine: Tensor) -> Tensor:
        """See :class:`WrappedModel`."""
        return self.inner.join_state(name, mine)

    def cut_state(self, name: str, uncut: Tensor) -> Tensor:
        """See :class:`WrappedModel`."""
        return self.inner.cut_state(name, uncut)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """See :class:`WrappedModel`."""
        return self.inner.clip_grad_norm_(max_norm, norm_type)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """See :class:`WrappedModel`."""
        return self.inner.state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """See :class:`WrappedModel`."""
        return self.inner.load_state_dict(state_dict, strict=strict, assign=assign)
