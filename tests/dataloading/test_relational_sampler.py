"""Sampling over several edge types, in one process and over servers: equal draws, exact bytes."""

from pathlib import Path

import dgl
import numpy as np
import pytest
import torch
from numba import types

from dglx_dist.dataloading.kernels import NodeTable, Schema, ThreadTable, sample_batch
from dglx_dist.dataloading.minibatch import BatchBlockBuilder
from dglx_dist.dataloading.sampler import LocalSource, RemoteSource, load_kernels
from dglx_dist.errors import ConfigError
from dglx_dist.graph.sampling import make_keyed_draw
from dglx_dist.graph.structure import NO_EDGES, CSCShard
from dglx_dist.keyed_random import Rule
from tests.dataloading.graphs import HASHED, plan_draws, random_csc
from tests.dataloading.shop import (
    LIKE,
    SETTINGS,
    SOLD,
    dgl_shop,
    edges_in,
    shop_in_rank,
    typed_shop,
    write_shop,
)
from tests.helpers.ranks import run_ranks

SEEDS = {"user": np.array([29, 3, 8]), "item": np.array([40, 4])}


def blocks_of(schema, cscs, fanouts, seeds=SEEDS, size=1000):
    request = plan_draws(schema, fanouts).request(seeds, 0, {})
    workspace = ThreadTable(size)
    if size == HASHED:
        # So small that it grows within the batch.
        workspace.keep(NodeTable(np.zeros(16, np.uint32), np.empty(16, np.int64), 1))
    batch = LocalSource(schema, cscs).sample(request, {}, workspace)
    return BatchBlockBuilder(schema).blocks(batch)


@pytest.mark.parametrize("size", [80, HASHED])
@pytest.mark.parametrize("wide", [[], [SOLD, LIKE]])
def test_full_fanout_equals_dgls_samples(size: int, wide: list) -> None:
    schema, cscs = typed_shop(wide)
    dgl_graph = dgl_shop(schema, cscs)
    _, blocks = blocks_of(schema, cscs, [-1, -1], size=size)
    frontier = {ntype: torch.from_numpy(ids) for ntype, ids in SEEDS.items()}
    for block in reversed(blocks):
        sampled = dgl.sampling.sample_neighbors(dgl_graph, frontier, -1)
        reference = dgl.to_block(sampled, frontier)
        for etype in schema.etypes:
            ids = sampled.edges[etype].data[dgl.EID]
            reference.edges[etype].data[dgl.EID] = ids[reference.edges[etype].data[dgl.EID]]
            assert edges_in(block, etype) == edges_in(reference, etype)
        for ntype in schema.ntypes:
            nodes, reference_nodes = (
                block.srcnodes[ntype].data[dgl.NID],
                reference.srcnodes[ntype].data[dgl.NID],
            )
            targets = block.dstnodes[ntype].data[dgl.NID].tolist()
            assert sorted(nodes.tolist()) == sorted(reference_nodes.tolist())
            assert targets == reference.dstnodes[ntype].data[dgl.NID].tolist()
            assert nodes[: len(targets)].tolist() == targets
        frontier = {ntype: block.srcnodes[ntype].data[dgl.NID] for ntype in schema.ntypes}


def test_edge_types_draw_independently() -> None:
    # Two edge types with the same edges: equal draws would show in all 100 nodes.
    csc = random_csc(100, 20)
    etypes = (("n", "one", "n"), ("n", "two", "n"))
    schema = Schema(ntypes=("n",), num_nodes=(100,), etypes=etypes)
    _, (block,) = blocks_of(schema, [csc, csc], [3], seeds={"n": np.arange(100)})
    first, second = ({edge for _, _, edge in edges_in(block, etype)} for etype in etypes)
    assert len(first & second) < len(first) // 2


def test_batches_call_the_kernel_that_the_launcher_compiles() -> None:
    load_kernels(print)
    blocks_of(*typed_shop([SOLD]), [-1, 2])
    # With the draws of LABOR it is another kernel.
    plain = [signature for signature in sample_batch.signatures if signature[-1] == types.none]
    assert len(plain) == 1


SHARES = {
    "0": {"user": [0, 2, 4, 9, 17, 29], "item": [3, 44]},
    "1": {"item": [0, 1, 7], "user": [8]},
    "2": {"user": [3, 5]},
    "3": {},
}
ALL = {
    ntype: [node for share in SHARES.values() for node in share.get(ntype, [])] for ntype in ("user", "item")
}


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shop(tmp_path_factory.mktemp("shop") / "two", 2)


def run(shop: Path, structure: str, shares: dict, exclude: bool = False) -> list[dict]:
    args, each = (str(shop), structure, shares, exclude), 2 if len(shares) > 1 else 1
    return run_ranks(shop_in_rank, len(shares), args=args, ranks_per_server=each)


def test_on_any_ranks_and_servers_the_same_is_drawn(shop: Path) -> None:
    """By one rank, and by four on two servers, one of them without seeds; bytes are those of the formula."""
    (offline,) = run(shop, "replicated", {"0": ALL})
    results_of_one = run(shop, "replicated", SHARES)
    cut = run(shop, "partitioned", SHARES, exclude=True)
    for single, split in zip(results_of_one, cut, strict=True):
        for name in SETTINGS:
            assert single[name].pop("bytes")[0] == 0
            moved, expected = split[name].pop("bytes")
            assert moved == expected
            assert bool(moved) == bool(split[name]["drawn"])
            assert single[name] == split[name]
            common = {key: edges for key, edges in single[name]["drawn"].items() if key.startswith("0 ")}
            assert common.items() <= offline[name]["drawn"].items()
        assert single["own bytes"][0] == 0
        assert split["own bytes"][0] == split["own bytes"][1] > 0
        assert (single["parity"], split["parity"]) == ([0, 1], [1])
    assert [ranks["uniform"]["shares"] for ranks in results_of_one] == [
        [[5, 11], [3, 3]], [[4, 11], [0, 3]], [[2, 11], [0, 3]], [[0, 11], [0, 3]],
    ]  # fmt: skip
    assert not results_of_one[3]["uniform"]["drawn"]
    assert all(cut[0][name]["drawn"] for name in SETTINGS)


class Recording:
    """Stands in for the structure of one edge type: notes who asks and who draws."""

    def __init__(self, name, csc, events) -> None:
        self._name, self._events = name, events
        self._whole = CSCShard(indptr=csc.indptr, indices=csc.indices, first_node=0, first_edge=0)

    def submit(self, op, nodes, parameters, *, exclude, layer):
        self._events.append(("ask", layer, self._name))

        def finish():
            self._events.append(("draw", layer, self._name))
            return make_keyed_draw(Rule(False, NO_EDGES), {})(self._whole, nodes, parameters, exclude)

        return finish


@pytest.mark.parametrize("size", [80, HASHED])
def test_in_every_hop_all_requests_leave_before_anything_is_drawn(size: int) -> None:
    schema, cscs = typed_shop()
    events: list[tuple[str, int, tuple[str, str, str]]] = []
    structures = [Recording(etype, csc, events) for etype, csc in zip(schema.etypes, cscs, strict=True)]
    source, workspace = RemoteSource(schema, structures, "draw"), ThreadTable(size)
    draws = plan_draws(schema, [3, 2])
    # Numbers of a batch that is refused are not those of the next.
    with pytest.raises(ConfigError, match="node 3 more than once"):
        source.sample(draws.request({"item": np.array([4, 3, 3])}, 0, {}), {}, workspace)
    request = draws.request(SEEDS, 0, {})
    batch = source.sample(request, {}, workspace)
    for layer in (2, 1):
        kinds = [kind for kind, at, _ in events if at == layer]
        assert kinds == ["ask"] * 6 + ["draw"] * 6
    assert [layer for _, layer, _ in events] == sorted((layer for _, layer, _ in events), reverse=True)
    again, expected = (
        edge_source.sample(request, {}, workspace) for edge_source in (source, LocalSource(schema, cscs))
    )
    for array, repeated, reference in zip(batch, again, expected, strict=True):
        assert array.tolist() == repeated.tolist() == reference.tolist()
