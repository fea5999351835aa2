"""From a graph and a plan to what makes the batches: which source, which columns, which kernel."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numba import njit

from dglx_dist.cluster.collectives import broadcast_json
from dglx_dist.errors import ConfigError
from dglx_dist.graph.dtypes import torch_dtype
from dglx_dist.graph.ids import as_ids
from dglx_dist.graph.structure import Structure
from dglx_dist.records import Array
from dglx_dist.sampling.attach import Columns
from dglx_dist.sampling.maker import (
    BatchMaker,
    Draws,
    Excluded,
    KernelMaker,
    LocalColumn,
    LocalSlicer,
    NodeIds,
    SamplerMaker,
)
from dglx_dist.sampling.neighbor import SamplePlan
from dglx_dist.sampling.options import LoaderOptions
from dglx_dist.sampling.pick import Rule
from dglx_dist.sampling.precision import Precision
from dglx_dist.sampling.remote import RemoteSource, csc_of, keyed_draw
from dglx_dist.sampling.source import WholeSource

if TYPE_CHECKING:
    from dglx_dist.graph import DistGraph

_SPARE_BUFFERS = 2
"""Beside the batches made ahead: the one the training loop holds, and the one its backward pass holds."""


def open_maker(g: DistGraph, sampler: Any, plan: SamplePlan, options: LoaderOptions, seed: int) -> BatchMaker:
    """Return what makes the batches. Every rank must call it.

    Raises:
        ConfigError: ``g``, the plan and the options do not go together.
    """
    if len(g.canonical_etypes) != 1:
        raise ConfigError(
            f"the graph has {len(g.canonical_etypes)} edge types, and only graphs with one are sampled so "
            "far; convert it with dgl.to_homogeneous before partitioning"
        )
    columns = _columns(g, plan, options)
    if plan.fanouts is None:
        if options.exclude is not None:
            raise ConfigError(
                f"exclude= cannot be passed into {type(sampler).__qualname__}'s own code; use "
                "NeighborSampler, or leave the edges out in the sampler"
            )
        return SamplerMaker(lambda seeds, out: _own_code(sampler, g, seeds, out), g.kvstore, columns)
    structure = g.structure(g.canonical_etypes[0])
    draws = Draws(
        fanouts=plan.fanouts,
        replace=plan.replace,
        exclude=_excluded(options.exclude, structure),
        seed=seed,
        idtype=np.dtype(np.int32 if g.idtype == torch.int32 else np.int64),
    )
    if structure.is_whole:
        return _whole_maker(g, plan, draws, structure, options)
    op = _serve(g, plan, draws, structure)
    return KernelMaker(
        RemoteSource(structure, op),
        draws,
        g.kvstore,
        columns,
        num_nodes=structure.num_sources,
        etype=structure.etype,
    )


def _whole_maker(
    g: DistGraph, plan: SamplePlan, draws: Draws, structure: Structure, options: LoaderOptions
) -> KernelMaker:
    """The maker for a replicated structure: features that are all local are copied by the sampling call."""
    weights = None if plan.weights is None else _all_weights(g, plan.weights)
    source = WholeSource(csc_of(structure.shards[0], weights))
    columns, slicer = _columns(g, plan, options), None
    for name, key in columns.inputs.items():
        local = _local_column(g, name, key)
        if local is not None:
            slicer = LocalSlicer(source, local, options.depth + _SPARE_BUFFERS)
            rest = {other: value for other, value in columns.inputs.items() if other != name}
            columns = replace(columns, inputs=rest)
            break
    return KernelMaker(
        source,
        draws,
        g.kvstore,
        columns,
        num_nodes=structure.num_sources,
        etype=structure.etype,
        slicer=slicer,
    )


def _serve(g: DistGraph, plan: SamplePlan, draws: Draws, structure: Structure) -> str:
    """Let the servers draw for each other by this loader's rule; return the operation's name. Collective."""
    weights = {}
    if plan.weights is not None:
        shards = g.kvstore.shards(_key(g.edata, plan.weights, "prob", "edata"))
        by_edge = {first: _checked(rows, plan.weights, first) for first, rows in shards}
        weights = {
            shard.first_node: by_edge[shard.first_edge] for shard in structure.shards if len(shard.indices)
        }
    op = f"sample.{broadcast_json(secrets.token_hex(8), g.session)}"
    structure.serve(op, keyed_draw(Rule(draws.replace, draws.exclude), weights))
    return op


def _columns(g: DistGraph, plan: SamplePlan, options: LoaderOptions) -> Columns:
    """Find the asked columns in the graph.

    Raises:
        ConfigError: there is no column of that name; the message lists those that exist.
    """
    return Columns(
        inputs={name: _key(g.ndata, name, "prefetch_node_feats", "ndata") for name in plan.node_feats},
        targets={name: _key(g.ndata, name, "prefetch_labels", "ndata") for name in plan.labels},
        edges={name: _key(g.edata, name, "prefetch_edge_feats", "edata") for name in plan.edge_feats},
        precision=Precision(options.feature_dtype, options.depth + _SPARE_BUFFERS),
    )


def _key(data: Any, name: str, option: str, where: str) -> str:
    if name not in data:
        raise ConfigError(f"{option} names {name!r}, and g.{where} has {sorted(data)}")
    return str(data[name].kvstore_key)


def _local_column(g: DistGraph, name: str, key: str) -> LocalColumn | None:
    """Return the column if all of its rows lie in this server's memory in one piece."""
    shards = g.kvstore.shards(key)
    if len(shards) != 1 or len(shards[0][1]) != g.num_nodes() or shards[0][1].size == 0:
        return None
    return LocalColumn(name=name, rows=shards[0][1], dtype=torch_dtype(g.kvstore.column(key).info.dtype))


def _all_weights(g: DistGraph, name: str) -> Array:
    """Return the (E,) float32 weights of all edges, in this rank's memory."""
    key = _key(g.edata, name, "prob", "edata")
    pieces: Sequence[tuple[int, Array]] = g.kvstore.shards(key)
    if len(pieces) == 1 and len(pieces[0][1]) == g.num_edges():
        return _checked(pieces[0][1], name, 0)
    rows = g.kvstore.pull(key, np.arange(g.num_edges()), phase="structure")
    return _checked(rows.numpy(), name, 0)


def _checked(rows: Array, name: str, first_edge: int) -> Array:
    """Return weights as float32.

    Raises:
        ConfigError: they are not one number per edge, or one is negative or NaN.
    """
    if rows.ndim != 1 or rows.dtype.kind not in "bfiu":
        raise ConfigError(
            f"edata[{name!r}] has rows of shape {rows.shape[1:]} and dtype {rows.dtype}; a probability or "
            "mask is one number per edge"
        )
    weights = rows.astype(np.float32)
    bad = _first_bad(weights)
    if bad >= 0:
        raise ConfigError(
            f"edata[{name!r}] is {rows[bad]} at edge {first_edge + bad}; give finite weights of at least 0"
        )
    return weights


@njit(cache=True, nogil=True)
def _first_bad(weights: Array) -> int:
    for i in range(len(weights)):
        if not (weights[i] >= 0 and weights[i] < np.inf):
            return i
    return -1


def _excluded(exclude: Any, structure: Structure) -> Array:
    if exclude is None:
        return np.empty(0, np.int64)
    return np.unique(as_ids(exclude, structure.num_edges, "the graph's edges"))


def _own_code(sampler: Any, g: DistGraph, seeds: NodeIds, exclude: Excluded) -> Any:
    edges = {etype: torch.from_numpy(ids) for etype, ids in exclude.items() if len(ids)}
    if not edges:
        return sampler.sample(g, seeds)
    # DGL's samplers take plain ids where there is one edge type.
    excluded = edges if len(g.canonical_etypes) > 1 else next(iter(edges.values()))
    return sampler.sample(g, seeds, exclude_eids=excluded)
