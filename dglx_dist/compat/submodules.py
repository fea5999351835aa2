"""What DGL's submodules have beyond the package: asked for this run, or refused, never DGL's own state.

Up to DGL 2.3 ``import dgl`` loads them, and scripts ask ``dgl.distributed.role`` or ``.kvstore`` for facts
about clients and servers that DGL never started here.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from types import MappingProxyType, ModuleType
from typing import Any

from torch import Tensor

from dglx_dist.cluster.session import session_if_open
from dglx_dist.compat import session
from dglx_dist.compat.graph import inner_graph
from dglx_dist.compat.kvstore import KVClient
from dglx_dist.graph.dist_tensor import GRAPH, opened_graph
from dglx_dist.graph.ids import Ids

TRAINER = "default"
"""The role of every rank, as DGL calls trainers."""

_REASON = "there are no server and no sampler processes; docs/compat.md has what stands for them"
_OF_PROCESSES = ("role", "rpc", "rpc_client", "rpc_server", "dist_context", "graph_services")


def get_kvstore() -> KVClient | None:
    """Return the store of the graph opened last; None before there is one, as DGL does."""
    opened = session_if_open()
    return None if opened is None or GRAPH not in opened.attached else KVClient.over(opened_graph().kvstore)


def in_degrees(g: object, v: Ids) -> Tensor:
    """Return the numbers of in-edges of nodes of a graph of one type."""
    return inner_graph(g).in_degrees(v)


def out_degrees(g: object, u: Ids) -> Tensor:
    """Return the numbers of out-edges of nodes of a graph of one type."""
    return inner_graph(g).out_degrees(u)


def _rank_of_role(role: str) -> int:
    return session.get_rank()


SUPPORTED: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "role": {
            "get_rank": _rank_of_role,
            "get_global_rank": session.get_rank,
            "get_trainer_rank": session.get_rank,
            "get_num_trainers": session.get_num_client,
            "get_role": lambda: TRAINER,
        },
        "rpc": {
            "get_num_server": session.get_num_machines,
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
    known = dict(SUPPORTED.get(name, {}))
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
    return {name: session.refused(f"{submodule}.{name}", _REASON) for name in names}
