"""List the names in ``dgl.distributed``, and replace them with :func:`install`."""

import inspect
import sys
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from types import ModuleType, SimpleNamespace
from typing import Any, final

import dgl
import dgl.dataloading
from torch import nn

from dglx_dist.comm.collectives import barrier
from dglx_dist.comm.session import current_session, get_open_session, start_later
from dglx_dist.comm.topology import Topology, read_settings, read_topology
from dglx_dist.compat import dataloading, partition, partition_book
from dglx_dist.compat.dist_graph import DistGraph, find_edges, inner_graph
from dglx_dist.compat.dist_tensor import DistEmbedding, DistTensor, KVClient, SparseAdagrad, SparseAdam
from dglx_dist.compat.wrappers import InnerAttribute
from dglx_dist.errors import ConfigError, PeerError
from dglx_dist.graph.dist_tensor import OPENED, get_opened_graph
from dglx_dist.options import check_integer
from dglx_dist.records import EDGE_TYPE, NODE_TYPE
from dglx_dist.strategies.base import WrappedModel, begin, resolve_strategy

MAX_QUEUE_SIZE = 20 * 2**30
# Arguments in older DGL versions for processes that do not exist here.
_SERVER_OPTIONS = ("num_servers", "num_workers", "num_samplers")


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
    """Set the training options. The ranks connect when the first graph is opened.

    It creates no process group, so the script may call ``init_process_group`` next. Otherwise one is created
    when the graph is opened.

    The arguments before ``strategy`` are ignored. One warning on rank 0 names those that differ from DGL's
    defaults, and the variables that DGL's launcher has set.

    Args:
        strategy: Name of the strategy. None: the one that ``python -m dglx_dist.run`` has set, otherwise
            ``data_parallel``.
        timeout: Seconds that a rank may be silent before the others raise an error that names it.
        options: The strategy's options.
    """
    if get_open_session() is not None:
        raise ConfigError("initialize was called before. Call dgl.distributed.exit_client() between the two.")
    name = resolve_strategy(strategy)
    seed = check_integer("seed", seed, least=0)
    launcher = read_settings().dgl_processes
    if launcher.get("DGL_ROLE", "client") != "client":
        raise ConfigError(
            f"DGL_ROLE is {launcher['DGL_ROLE']!r}, but there are no such processes here, "
            "because every rank serves its share. Start the script with torchrun, not with "
            "DGL's launcher."
        )

    # Each argument that is not used, with its default value in DGL.
    arguments: dict[str, tuple[object, object]] = {
        "ip_config": (ip_config, None),
        "max_queue_size": (max_queue_size, MAX_QUEUE_SIZE),
        # Newer versions have None as the default.
        "net_type": ("socket" if net_type is None else net_type, "socket"),
        "num_worker_threads": (num_worker_threads, 1),
        "use_graphbolt": (use_graphbolt, False),
    }
    for key in _SERVER_OPTIONS:
        arguments[key] = (options.pop(key, None), None)
    ignored = {key: value for key, (value, default) in arguments.items() if value != default}
    ignored.update(launcher)
    if ignored and read_topology().rank == 0:
        names = ", ".join(f"{key}={value!r}" for key, value in ignored.items())
        reason = "torchrun starts the ranks, and there are no servers, no sampler processes and no GraphBolt"
        warnings.warn(f"{names}: not used, because {reason}", stacklevel=2)
    start_later(lambda: begin(name, options, timeout_s=timeout, seed=seed))


def exit_client() -> None:
    """Close the session, on all ranks or none. ``initialize`` may then be called again."""
    start_later(None)
    session = get_open_session()
    if session is not None:
        session.close()


def client_barrier() -> None:
    """Wait for all ranks."""
    barrier(current_session(), "client_barrier()")


def get_rank() -> int:
    return _topology().rank


def get_num_client() -> int:
    return _topology().world_size


def get_num_machines() -> int:
    return _topology().num_servers


def get_machine_id() -> int:
    return _topology().server


def get_group_id() -> int:
    return 0


def make_refusal(name: str, reason: str) -> type[Any]:
    """Return a class for an unsupported name. Calling it or deriving from it raises ConfigError."""

    def refuse(*_: object, **__: object) -> Any:
        raise ConfigError(f"dgl.distributed.{name} is not available: {reason}")

    return type(name, (), {"__new__": refuse, "__init_subclass__": refuse, "__doc__": reason})


def _topology() -> Topology:
    session = get_open_session()
    return read_topology() if session is None else session.topology


_REASONS: Mapping[str, str] = {
    "there are no server processes: every rank serves its share; start the script with torchrun": (
        "DistGraphServer KVServer ServerState start_server connect_to_server shutdown_servers read_ip_config"
    ),
    "torchrun assigns ranks and servers": "set_rank set_num_machines set_machine_id set_num_client",
    "no code and no pickles travel between ranks; register a handler of arrays with "
    "dglx_dist.comm.session.current_session().rpc.register": (
        "Request Response register_service create_sender create_receiver finalize_sender "
        "finalize_receiver wait_for_senders connect_receiver send_request recv_request "
        "send_response recv_response remote_call send_request_to_machine "
        "remote_call_to_machine fast_pull"
    ),
    "the ranks of a server share their rows already": "copy_data_to_shared_memory",
    "there is one format for all strategies, and no GraphBolt; leave it out": (
        "dgl_partition_to_graphbolt gb_convert_single_dgl_partition"
    ),
    "the distributed loaders build their batches themselves; use them": "NodeCollator EdgeCollator",
}

REFUSED: Mapping[str, str] = {name: why for why, names in _REASONS.items() for name in names.split()}
"""Unsupported name to the reason in its ConfigError."""

_REPLACEMENTS: tuple[Any, ...] = (
    *(initialize, exit_client, client_barrier),
    *(get_rank, get_num_client, get_num_machines, get_machine_id, get_group_id),
    *(DistGraph, DistTensor, DistEmbedding, KVClient),
    *(dataloading.DistDataLoader, dataloading.DistNodeDataLoader, dataloading.DistEdgeDataLoader),
    *(dataloading.sample_neighbors, dataloading.sample_etype_neighbors),
    *(dataloading.in_subgraph, find_edges),
    *(partition.node_split, partition.edge_split, partition.partition_graph),
    *(partition.load_partition, partition.load_partition_book, partition.load_partition_feats),
    *(partition_book.GraphPartitionBook, partition_book.RangePartitionBook, partition_book.PartitionPolicy),
    *(partition_book.NodePartitionPolicy, partition_book.EdgePartitionPolicy),
)
_OPTIMIZERS = {optimizer.__name__: optimizer for optimizer in (SparseAdagrad, SparseAdam)}
SUPPORTED: Mapping[str, Any] = {
    **{replacement.__name__: replacement for replacement in _REPLACEMENTS},
    "DistConnectError": PeerError,
    "optim": SimpleNamespace(**_OPTIMIZERS),
}
"""Supported name to its replacement."""

CONSTANTS: Mapping[str, Any] = {
    "DEFAULT_NTYPE": NODE_TYPE,
    "DEFAULT_ETYPE": EDGE_TYPE,
    "MAX_QUEUE_SIZE": MAX_QUEUE_SIZE,
    "SERVER_EXIT": "server_exit",
}
"""Names in ``dgl.distributed.constants``. From DGL 2.0 on they are also in the package."""

# Names that modules in ``dgl.dataloading`` have too.
_LOADER_NAMES = ("DistGraph", "DistDataLoader", "DistNodeDataLoader", "DistEdgeDataLoader")


def build_replacements() -> dict[str, Any]:
    """Build a replacement for every name in the package. Unsupported ones raise when they are used."""
    refused = {name: make_refusal(name, reason) for name, reason in REFUSED.items()}
    return {**SUPPORTED, **CONSTANTS, **refused}


_NO_SERVERS_MESSAGE = (
    "there are no server and no sampler processes; see their replacements in docs/reference/compat.md"
)
_PROCESS_MODULES = ("role", "rpc", "rpc_client", "rpc_server", "dist_context", "graph_services")


def get_kvstore() -> KVClient | None:
    """Return the store for the graph opened last, or None if there is none, as in DGL."""
    session = get_open_session()
    if session is None or OPENED.get(session) is None:
        return None
    return KVClient.over(get_opened_graph().kvstore)


SUPPORTED_SUBMODULES: Mapping[str, Mapping[str, Any]] = {
    "role": {
        "get_rank": lambda role: get_rank(),
        **dict.fromkeys(("get_global_rank", "get_trainer_rank"), get_rank),
        "get_num_trainers": get_num_client,
        "get_role": lambda: "default",
    },
    "rpc": {"get_num_server": get_num_machines, "get_num_server_per_machine": lambda: 1},
    "dist_context": {
        "is_initialized": lambda: get_open_session() is not None,
        "get_sampler_pool": lambda: (None, 0),
    },
    "kvstore": {"get_kvstore": get_kvstore},
    "graph_services": {
        "in_degrees": lambda g, v: inner_graph(g).in_degrees(v),
        "out_degrees": lambda g, u: inner_graph(g).out_degrees(u),
    },
}
"""Submodule to name to replacement, for names that the package lacks."""

_KEPT_NAMES = ("merge_graphs",)
"""Functions in the process modules that only compute."""
_KVSTORE_PROCESS_NAMES = ("init_kvstore", "close_kvstore")
"""Functions in ``kvstore`` about processes."""


def _find_replacements(submodule: ModuleType) -> dict[str, Any]:
    """Find replacements for the functions of a ``submodule`` that ``dgl.distributed`` itself does not have.

    Functions that start or stop server processes are replaced by functions that raise an error, because this
    package has no such processes.
    """
    module_name = submodule.__name__.rpartition(".")[2]
    replacements: dict[str, Any] = {}
    for name, value in vars(submodule).items():
        # Skip functions that the submodule only imports.
        is_defined_here = inspect.isfunction(value) and value.__module__ == submodule.__name__
        if not is_defined_here or name.startswith("_"):
            continue
        if module_name == "kvstore":
            starts_processes = name in _KVSTORE_PROCESS_NAMES
        else:
            starts_processes = module_name in _PROCESS_MODULES and name not in _KEPT_NAMES
        if starts_processes:
            replacements[name] = make_refusal(f"{module_name}.{name}", _NO_SERVERS_MESSAGE)

    return replacements | dict(SUPPORTED_SUBMODULES.get(module_name, {}))


NAME = "dgl.distributed"
_MARK_ATTRIBUTE = "__dglx_dist__"


@final
class Installed(ExitStack):
    """Handle from :func:`install`. :meth:`undo`, or leaving its ``with`` block, reverts the installation."""

    undo = ExitStack.close


def install() -> Installed:
    """Replace ``dgl.distributed`` and DGL's distributed loaders by those in this package.

    Call it before the script imports names from there. If ``import dgl`` has already loaded DGL's own module
    (up to DGL 2.3), its names are rebound, also in its submodules. Otherwise a module takes its place before
    its first import, and DGL's own is never loaded. A second call does nothing.
    """
    installed = Installed()
    loaded = sys.modules.get(NAME)
    if loaded is not None and _MARK_ATTRIBUTE in vars(loaded):
        return installed

    if loaded is None:
        _register_modules(installed)
    else:
        _rebind(loaded, installed)

    # If DGL has loaded its own package, its single-machine loaders also have the name DistGraph.
    for name in _LOADER_NAMES if loaded else _LOADER_NAMES[1:]:
        _set(dgl.dataloading, name, SUPPORTED[name], installed)
    return installed


def _rebind(package: ModuleType, undo: ExitStack) -> None:
    """Replace the names in DGL's own package, which is loaded, and in its loaded submodules."""
    stock = dict(vars(package))
    names = build_replacements()
    for name, value in names.items():
        _set(package, name, value, undo)

    submodule_names = names | _OPTIMIZERS
    loader_names = {name: SUPPORTED[name] for name in _LOADER_NAMES}
    for path, module in list(sys.modules.items()):
        if path.startswith(f"{NAME}."):
            replacements = submodule_names
            changes = _find_replacements(module)
        elif path.startswith("dgl.dataloading."):
            replacements = loader_names
            changes = {}
        else:
            continue

        for name in replacements.keys() & vars(module).keys():
            # A submodule may use the name for something else.
            if name not in stock or vars(module)[name] is stock[name]:
                changes[name] = replacements[name]
        for name, value in changes.items():
            _set(module, name, value, undo)

    _set(package, _MARK_ATTRIBUTE, True, undo)


def _register_modules(undo: ExitStack) -> None:
    """Put modules with our names into the place of DGL's package, which is not loaded."""
    names = build_replacements() | {_MARK_ATTRIBUTE: True}
    package = _module(NAME, "dgl.distributed of dglx_dist.", names)
    # A path makes it a package, so that the ImportError names a missing submodule.
    package.__path__ = []
    optimizers = _module(f"{NAME}.optim", "Optimizers of embeddings.", _OPTIMIZERS)
    nn = _module(f"{NAME}.nn", "Embeddings.", {"DistEmbedding": SUPPORTED["DistEmbedding"]})
    constants = _module(f"{NAME}.constants", "Names of types, and the like.", dict(CONSTANTS))
    vars(package).update(optim=optimizers, nn=nn, constants=constants)

    for module in (package, optimizers, nn, constants):
        sys.modules[module.__name__] = module
        undo.callback(sys.modules.pop, module.__name__, None)
    _set(dgl, "distributed", package, undo)


def _module(name: str, doc: str, names: dict[str, Any]) -> ModuleType:
    module = ModuleType(name, doc)
    vars(module).update(names)
    return module


def _set(owner: ModuleType, name: str, value: object, undo: ExitStack) -> None:
    if hasattr(owner, name):
        undo.callback(setattr, owner, name, getattr(owner, name))
    else:
        undo.callback(delattr, owner, name)
    setattr(owner, name, value)


@final
class ScriptModel(WrappedModel):
    """Wrapper around a strategy's model. Its ``.module`` is a copy of the user's module with uncut weights.

    DistDGL scripts evaluate with ``model.module``. If a strategy cuts weights, that must be another module
    than the one that trains. Every rank must read it.
    """

    def __init__(self, inner: WrappedModel) -> None:
        super().__init__()
        self.inner = inner

    @property
    def module(self) -> nn.Module:  # type: ignore[override]  # an attribute if nothing is cut
        return self.inner.whole()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)

    def exchange_seconds(self, *, reset: bool = False) -> float:
        return self.inner.exchange_seconds(reset=reset)


_FORWARDED_NAMES = "parts whole join_state cut_state clip_grad_norm_ no_sync state_dict load_state_dict"
for _name in _FORWARDED_NAMES.split():
    setattr(ScriptModel, _name, InnerAttribute(WrappedModel, _name))
