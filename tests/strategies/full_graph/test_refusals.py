"""Unsupported inputs of full-graph training: every rank raises at once, and the message names the remedy."""

import functools
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import dgl
import numpy as np
import pytest
import torch
from dgl import function as fn
from dgl.dataloading import (
    LaborSampler,
    MultiLayerFullNeighborSampler,
    NeighborSampler,
    as_edge_prediction_sampler,
)
from torch import Tensor, nn

from dglx_dist.comm.session import start_session
from dglx_dist.data.storage.writer import write_dataset
from dglx_dist.dataloading.edge_loader import gather_pair_rows
from dglx_dist.errors import ConfigError
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.graph.dist_tensor import DistTensor
from dglx_dist.layers import nn as dx_nn
from dglx_dist.records import Assignment, RawGraph
from dglx_dist.strategies.base import STRATEGIES
from dglx_dist.strategies.full_graph.local_graphs import local_graph
from tests.helpers import refusal
from tests.helpers.ranks import run_ranks
from tests.strategies import equality
from tests.strategies.full_graph import runs
from tests.strategies.full_graph.layers_of_dgl import Called

STRATEGY_NAMES = ("full_graph", "shared_preload")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("full_graph_refusals")
    write_dataset(*two_types(), folder / "two")
    return str(equality.write_parts(folder)), str(folder / "two")


def two_types() -> tuple[RawGraph, Assignment]:
    counts, ends = {"user": 6, "item": 6}, np.arange(6)
    raw = RawGraph(
        name="two",
        num_nodes=counts,
        edges={("user", "buys", "item"): (ends, ends), ("item", "bought by", "user"): (ends, ends)},
        node_data={name: {"feat": np.ones((6, equality.WIDTH)), "label": ends % 2} for name in counts},
        edge_data={("user", "buys", "item"): {"paid": ends > 1}},
        num_classes=dict.fromkeys(counts, 2),
    )
    part_of = {name: np.zeros(6, np.int32) for name in counts}
    return raw, Assignment(num_parts=1, part_of=part_of, method="test", seed=0)


class OwnCode(NeighborSampler):
    def sample_blocks(self, g: Any, seed_nodes: Any, exclude_eids: Any = None) -> Any:
        return super().sample_blocks(g, seed_nodes, exclude_eids)


Case = Callable[[Any, DistGraph], Any]
refused = partial(refusal, kind=ConfigError)


def loads(make: Callable[[], Any] = runs.sampler, seeds: Tensor | None = None, **options: Any) -> Case:
    return lambda strategy, g: strategy.loader(
        runs.my_share(g) if seeds is None else seeds, make(), **options
    )


def beside(**module: nn.Module) -> Case:
    return lambda strategy, g: strategy.wrap(nn.ModuleDict({"inner": runs.first_model("sage"), **module}))


def blocks_of(strategy: Any, g: DistGraph) -> Any:
    ((_, _, blocks),) = strategy.loader(runs.my_share(g), runs.sampler())
    return blocks


def on_plain_blocks(strategy: Any, g: DistGraph) -> None:
    """Without gradients they are allowed."""
    model = strategy.wrap(runs.first_model("sage"))
    plain = [dgl.to_block(dgl.rand_graph(6, 12), torch.arange(6))] * 2
    x = torch.ones(6, equality.WIDTH, dtype=torch.float64)
    with torch.no_grad():
        assert model(plain, x).shape == (6, equality.CLASSES)
    model(plain, x)


def too_few_layers(strategy: Any, g: DistGraph) -> None:
    blocks = blocks_of(strategy, g)
    conv = dgl.nn.SAGEConv(equality.WIDTH, equality.CLASSES, "mean").double()
    shallow = Called(conv, lambda conv, blocks, x: conv(blocks[0], x))
    strategy.wrap(shallow)(blocks, blocks[0].srcdata["feat"])


def on_cut_rows(strategy: Any, g: DistGraph) -> None:
    """A correct loop still runs before."""
    blocks, model = blocks_of(strategy, g), strategy.wrap(runs.first_model("sage"))
    x = blocks[0].srcdata["feat"]
    model(blocks, x).sum().backward()
    model(blocks, x[: blocks[0].own_rows // 2])


def edge_batch(strategy: Any, g: DistGraph, mask: str | None = None) -> Any:
    sampler = NeighborSampler([-1, -1], mask=mask, prefetch_node_feats=["feat"])
    return next(iter(strategy.edge_loader(torch.arange(3), sampler, batch_size=3)))


def on_own_rows_of_pairs(strategy: Any, g: DistGraph) -> None:
    _, pairs, blocks = edge_batch(strategy, g)
    h = strategy.wrap(runs.first_model("sage"))(blocks, blocks[0].srcdata["feat"])
    h[pairs.edges()[0].clamp(max=len(h) - 1)].sum().backward()


def evaluate_own_rows_of_pairs(strategy: Any, g: DistGraph, batch_size: int = 1) -> None:
    sampler = NeighborSampler([-1, -1], prefetch_node_feats=["feat"])
    model = strategy.wrap(runs.first_model("sage")).eval()
    with torch.no_grad():
        for _, _, blocks in strategy.edge_loader(torch.arange(3), sampler, batch_size=batch_size):
            model(blocks, blocks[0].srcdata["feat"])


def on_other_rows_of_pairs(strategy: Any, g: DistGraph) -> None:
    _, pairs, blocks = edge_batch(strategy, g)
    gather_pair_rows(pairs, strategy.wrap(runs.first_model("sage"))(blocks, blocks[0].srcdata["feat"])[:1])


def on_masked_degrees(strategy: Any, g: DistGraph) -> None:
    policy = g.get_edge_partition_policy(g.canonical_etypes[0])
    mask = DistTensor((g.num_edges(),), torch.bool, "marked", None, policy, graph=g)
    _, _, blocks = edge_batch(strategy, g, "marked")
    try:
        conv = dgl.nn.GraphConv(equality.WIDTH, 2, norm="both", allow_zero_in_degree=True).double()
        conv(blocks[0], blocks[0].srcdata["feat"])
    finally:
        mask.delete()


CASES: Mapping[str, tuple[Case, str]] = {
    "own code": (
        loads(lambda: OwnCode([-1])),
        "OwnCode makes blocks by its own code.*MultiLayerFullNeighborS",
    ),
    "weights": (
        loads(lambda: NeighborSampler([-1, -1], prob="weight")),
        "draws edges by 'weight'.*data_parallel",
    ),
    "importance": (
        loads(lambda: LaborSampler([-1, -1], importance_sampling=1)),
        "draws edges by 'importance_sampling'.*data_parallel",
    ),
    "no such feature": (
        loads(lambda: NeighborSampler([-1, -1], prefetch_node_feats=["fat"])),
        r"prefetch_node_feats names 'fat', but g\.ndata has \['feat', 'lab",
    ),
    "exclude": (loads(exclude=torch.arange(3)), "exclude=.*partition a graph without"),
    "unknown option": (loads(dept=2), "no option 'dept'; did you mean 'depth'"),
    "edges": (loads(lambda: as_edge_prediction_sampler(runs.sampler())), "is for edge loaders"),
    "a seed twice": (loads(seeds=torch.tensor([3, 3])), "node 3 more than once"),
    "no seed anywhere": (loads(seeds=torch.empty(0, dtype=torch.int64)), "at least one"),
    "layers": (
        lambda strategy, g: strategy.loader(runs.my_share(g), runs.sampler(2 + g.rank())),
        "disagree on a loader: rank 0 has 2 layers.*rank 1 has 3 layers",
    ),
    "on one rank": (
        lambda strategy, g: strategy.loader(torch.tensor([3, 3][g.rank() :]), runs.sampler()),
        "node 3 more than once",
    ),
    "edge loader": (
        lambda strategy, g: strategy.edge_loader(torch.arange(3), runs.sampler(), exclude="self"),
        "exclude='self' removes other edges in each batch.*mask=.*data_parallel",
    ),
    "edges without gathered rows": (on_own_rows_of_pairs, r"call h = dx\.gather_pair_rows\(pair_graph, h\)"),
    "evaluation without gathered rows": (evaluate_own_rows_of_pairs, r"call h = dx\.gather_pair_rows\("),
    "a single evaluation batch without gathered rows": (
        functools.partial(evaluate_own_rows_of_pairs, batch_size=3),
        r"call h = dx\.gather_pair_rows\(",
    ),
    "no pair graph": (
        lambda strategy, g: gather_pair_rows(edge_batch(strategy, g)[2][0], torch.ones(3)),
        "a pair graph of the loader's batch",
    ),
    "other rows of pairs": (
        on_other_rows_of_pairs,
        r"gather_pair_rows got \(1, .*what the last layer returned",
    ),
    "out-degrees of a mask": (on_masked_degrees, "divides by out-degrees.*mask='marked'.*norm='right'"),
    "batch norm": (
        beside(norm=nn.BatchNorm1d(equality.CLASSES).double()),
        "'norm' is a BatchNorm1d.*dx.nn.BatchNorm.convert.*torch.nn.LayerNorm",
    ),
    "pooling": (
        beside(pool=dgl.nn.AvgPooling()),
        "'pool' is a AvgPooling, which reads all nodes.*layerwise_in",
    ),
    "reduction": (
        lambda strategy, g: strategy.wrap(runs.first_model("sage"), "max"),
        "reduction='max' must be 'mean' or 'sum'",
    ),
    "shallow": (too_few_layers, "rows for .* seeds.* fewer layers than the 2 blocks"),
    "other blocks": (on_plain_blocks, r"without blocks of the strategy's loader.*model\.whole\(\)"),
    "cut rows": (on_cut_rows, "source rows of shape .* for a block of"),
}
"""Cases of every strategy."""
OPTIONS: Sequence[tuple[str, dict[str, Any], str]] = (
    ("full_graph", {"hops": 1}, "'full_graph' has no option 'hops'.*its options: aggregate .*bucket_"),
    ("full_graph", {"use_pp": 1}, "use_pp=1.*must be of type bool"),
    ("full_graph", {"bucket_bytes": 0}, "bucket_bytes=0 must be at least 1"),
    ("shared_preload", {"hops": -1}, "hops=-1 must be at least 0"),
    ("shared_preload", {"external_hops": 2}, "external_hops=2 needs external_fanout"),
    ("shared_preload", {"hops": 1, "external_fanout": 15}, "hops=1.*leave one of them out"),
    ("cooperative", {"batches": 0}, "batches=0"),
    ("cooperative", {"composition": "any"}, "composition='any' must be random or ordered"),
    ("cooperative", {"external_hops": 1, "external_policy": "degree"}, "external_hops=1 needs external_f"),
    ("cooperative", {"external_hops": -1}, "external_hops=-1"),
    ("cooperative", {"external_fanout": 0}, "external_fanout=0"),
    ("cooperative", {"external_fanout": -2}, "external_fanout=-2"),
    ("cooperative", {"external_policy": "best"}, "external_policy='best'"),
    ("cooperative", {"external_inner": "graph"}, "external_inner='graph'"),
    ("cooperative", {"external_inner": "batch"}, "external_inner='batch' needs"),
    ("cooperative", {"hops": 1}, "no option 'hops'"),
)


def on_rank(folder: str) -> dict[str, str]:
    with start_session(strategy="dp", timeout_s=30) as session:
        g = DistGraph(folder)
        results: dict[str, str] = {}
        for name in STRATEGY_NAMES:
            strategy: Any = STRATEGIES.get(name)(session, {}).open(g)
            for case, (work, _) in CASES.items():
                results[f"{name}/{case}"] = refused(lambda: work(strategy, g))  # noqa: B023
        results["local graph"] = refused(lambda: local_graph(g))
        too_many: Any = STRATEGIES.get("shared_preload")(session, {"hops": 3}).open(g)
        results["hops"] = refused(lambda: loads()(too_many, g))
        for name, options in (("cooperative", {"batches": 2}), ("full_graph", {"staleness": 1})):
            unfit: Any = STRATEGIES.get(name)(session, options).open(g)
            results[f"edges {name}"] = refused(lambda: edge_batch(unfit, g))  # noqa: B023
        differing: Any = STRATEGIES.get("full_graph")(session, {"use_pp": bool(g.rank())}).open(g)
        results["differing"] = refused(lambda: loads()(differing, g))
        g.barrier()
        return results


def test_every_rank_is_told_what_to_do(folders: tuple[str, str]) -> None:
    for result in run_ranks(on_rank, 2, args=(folders[0],), ranks_per_server=1):
        for name in STRATEGY_NAMES:
            for case, (_, words) in CASES.items():
                match(result[f"{name}/{case}"], words, f"{name}/{case}")
        # Mini-batches would train on gradients that count rows of other ranks with a weight of their own.
        words = r"strategy 'dp' would weigh.*dx.distribute\(graph, strategy='full_graph'\)"
        match(result["local graph"], words, "local graph")
        match(result["hops"], "hops=3 is more than the 2 layers of the sampler; give at most 2", "hops")
        match(result["edges cooperative"], "batches=2.*edges and their negatives.*leave batches out", "edges")
        match(result["edges full_graph"], "staleness=1.*use staleness=0", "edges")
        match(
            result["differing"], "disagree on an option of full_graph: rank 0 has use_pp=False", "differing"
        )


@pytest.mark.parametrize(("strategy", "options", "words"), OPTIONS)
def test_options_are_checked_at_start(strategy: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        STRATEGIES.get(strategy)(None, options)  # type: ignore[arg-type]  # nothing is asked of it


def match(message: str, words: str, name: str) -> None:
    assert re.search(words, message), f"{name}: {message!r}"


def gather_rows_of_pairs(strategy: Any, choose: Callable[[dict[str, Tensor]], Any]) -> None:
    (batch,) = strategy.edge_loader({"buys": torch.arange(2)}, NeighborSampler([-1]), batch_size=2)
    gather_pair_rows(batch[1], choose({ntype: torch.ones(6, 2) for ntype in ("user", "item")}))


def two_on_rank(folder: str) -> list[str]:
    with start_session(strategy="full_graph", timeout_s=30) as session:
        g = DistGraph(folder)
        strategy: Any = STRATEGIES.get("full_graph")(session, {}).open(g)
        ((_, _, blocks),) = strategy.loader({"user": torch.arange(2)}, MultiLayerFullNeighborSampler(1))
        norm = nn.ModuleDict({"norm": dx_nn.BatchNorm(2)})
        return [
            refused(lambda: local_graph(g)),
            refused(lambda: strategy.wrap(norm)),
            refused(lambda: gather_rows_of_pairs(strategy, lambda rows: rows["user"])),
            refused(lambda: gather_rows_of_pairs(strategy, lambda rows: {"author": rows["user"]})),
            refused(lambda: gather_rows_of_pairs(strategy, lambda rows: {"user": rows["user"][:2]})),
            refused(lambda: strategy.loader({"user": torch.arange(2)}, NeighborSampler([-1], mask="paid"))),
            refused(lambda: blocks[0][:, :, :]),
            refused(lambda: blocks[0].update_all(fn.copy_u("feat", "m"), fn.sum("m", "h"))),
        ]


def test_names_remedies_on_graphs_of_several_types(folders: tuple[str, str]) -> None:
    (messages,) = run_ranks(two_on_rank, 1, args=(folders[1],))
    expected = (
        "dx.local_graph trains on graphs of one node and one edge type.*user, item.*data_parallel",
        "'norm' is a dx.nn.BatchNorm.*several types.*LayerNorm",
        r"got \(6, 2\), but the graph has the node types user, item; pass a dictionary of rows by node type",
        "got rows of 'author', but the node types are user, item",
        r"got \(2, 2\) for nodes of type 'user'.* 6 rows of them; pass what the last layer returned",
        r"'paid' was given as prob or mask, but 1 of 2 edge types do not have it: .*'bought by'.* of ones",
        r"selects 2 of the edge types.*use block\[source, relation, destination\]",
        r"None selects 0 of the edge types.*use block\[source, relation, destination\]",
    )
    for message, words in zip(messages, expected, strict=True):
        match(message, words, "two")


def warned_on_rank(folder: str) -> list[str]:
    with start_session(timeout_s=30) as session:
        g = DistGraph(folder)
        strategy: Any = STRATEGIES.get("full_graph")(session, {}).open(g)
        texts = []
        for sampler, more in (
            (NeighborSampler([25, 10], prefetch_node_feats=["feat"]), {"batch_size": 5, "shuffle": True}),
            (runs.sampler(), {"batch_size": 5}),
            (runs.sampler(), {"shuffle": True, "drop_last": True}),
        ):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                strategy.loader(runs.my_share(g), sampler, **more)
            texts.append(
                "; ".join(str(warning.message) for warning in caught if "full_graph" in str(warning.message))
            )
        return texts


def test_what_has_no_effect_is_told_once(folders: tuple[str, str]) -> None:
    first, second = run_ranks(warned_on_rank, 2, args=(folders[0],))
    match(
        first[0],
        r"^full_graph takes all neighbours.*ignores the fan-outs \[25, 10\].* and batch_size=5 ",
        "both",
    )
    assert first[0].count("ignores") == 1
    match(first[1], r"ignores batch_size=5 \(leave it out\); strategy='data_parallel'", "batch size")
    assert [first[2], *second] == ["", "", "", ""]
