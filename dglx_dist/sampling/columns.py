"""From the column names of a sampler to the columns of a graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from dglx_dist.errors import ConfigError
from dglx_dist.records import EdgeType
from dglx_dist.sampling.attach import Columns
from dglx_dist.sampling.neighbor import Names, SamplePlan
from dglx_dist.sampling.precision import Precision

if TYPE_CHECKING:
    from dglx_dist.graph import DistGraph

K = TypeVar("K")


def find_columns(g: DistGraph, plan: SamplePlan, precision: Precision) -> Columns:
    """Return the columns of ``g`` that ``plan`` attaches.

    Raises:
        ConfigError: a type or column does not exist, or a list of names does not say of which of several
            types; the message lists what there is.
    """
    feats = _by_type(plan.node_feats, g.ntypes, lambda name: _node_type(g, name), "prefetch_node_feats")
    labels = _by_type(plan.labels, g.ntypes, lambda name: _node_type(g, name), "prefetch_labels")
    edges = _by_type(plan.edge_feats, g.canonical_etypes, g.to_canonical_etype, "prefetch_edge_feats")
    return Columns(
        inputs={ntype: _node_keys(g, ntype, names, "prefetch_node_feats") for ntype, names in feats.items()},
        targets={ntype: _node_keys(g, ntype, names, "prefetch_labels") for ntype, names in labels.items()},
        edges={etype: edge_keys(g, etype, names, "prefetch_edge_feats") for etype, names in edges.items()},
        precision=precision,
    )


def edge_keys(g: DistGraph, etype: EdgeType, names: Sequence[str], option: str) -> dict[str, str]:
    """Return the names under which the store knows the edge columns ``names``.

    Raises:
        ConfigError: there is no such column; the message lists those that exist.
    """
    where = "g.edata" if len(g.canonical_etypes) == 1 else f"g.edges[{etype}].data"
    return _keys(g.edges[etype].data, names, option, where)


def _node_keys(g: DistGraph, ntype: str, names: Sequence[str], option: str) -> dict[str, str]:
    where = "g.ndata" if len(g.ntypes) == 1 else f"g.nodes[{ntype!r}].data"
    return _keys(g.nodes[ntype].data, names, option, where)


def _keys(data: Any, names: Sequence[str], option: str, where: str) -> dict[str, str]:
    for name in names:
        if name not in data:
            raise ConfigError(f"{option} names {name!r}, and {where} has {sorted(data)}")
    return {name: str(data[name].kvstore_key) for name in names}


def _by_type(
    names: Names, types: Sequence[K], known: Callable[[Any], K], option: str
) -> dict[K, tuple[str, ...]]:
    """Return the names per type; a plain list is for the only type, as with DGL."""
    if isinstance(names, Mapping):
        found: dict[K, tuple[str, ...]] = {}
        for given, columns in names.items():
            found[known(given)] = (*found.get(known(given), ()), *columns)
        return found
    if not names:
        return {}
    if len(types) > 1:
        listed_types = ", ".join(map(str, types))
        raise ConfigError(
            f"{option} is the list {list(names)}, and the graph has the types {listed_types}; give "
            "{type: list of names}"
        )
    return {types[0]: names}


def _node_type(g: DistGraph, name: object) -> str:
    if not isinstance(name, str) or name not in g.ntypes:
        raise ConfigError(f"there is no node type {name!r} (known: {', '.join(g.ntypes)})")
    return name
