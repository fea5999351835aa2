"""Unsupported inputs of full-graph training: every rank raises at once, and the message names the remedy."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import dgl
import pytest
import torch
from dgl.dataloading import NeighborSampler, as_edge_prediction_sampler
from torch import Tensor, nn

from dglx_dist.comm.session import start_session
from dglx_dist.data.storage.writer import write_dataset
from dglx_dist.errors import ConfigError
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.strategies.base import STRATEGIES
from dglx_dist.strategies.full_graph.local_graphs import local_graph
from tests.helpers.ranks import run_ranks
from tests.strategies import equality
from tests.strategies.full_graph import runs
from tests.strategies.push_pull.test_refusals import two_types

STRATEGY_NAMES = ("full_graph", "shared_preload")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("full_graph_refusals")
    write_dataset(*two_types(), folder / "two")
    return str(equality.write_parts(folder)), str(folder / "two")


class OwnCode(NeighborSampler):
    """A sampler whose code is the user's."""

    def sample_blocks(self, g: Any, seed_nodes: Any, exclude_eids: Any = None) -> Any:
        return super().sample_blocks(g, seed_nodes, exclude_eids)


class Normed(nn.Module):
    """A batch norm between the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = runs.first_model("sage")
        self.norm = nn.BatchNorm1d(equality.CLASSES).double()

    def forward(self, blocks: Any, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.inner(blocks, x))
        return out


class Pooled(nn.Module):
    """Scores and the mean of all nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = runs.first_model("sage")
        self.pool = dgl.nn.AvgPooling()

    def forward(self, blocks: Any, x: Tensor) -> Tensor:
        scores = self.inner(blocks, x)
        out: Tensor = scores + self.pool(blocks[-1], scores)
        return out


class Shallow(nn.Module):
    """One layer, whatever it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = dgl.nn.SAGEConv(equality.WIDTH, equality.CLASSES, "mean").double()

    def forward(self, blocks: Any, x: Tensor) -> Tensor:
        out: Tensor = self.conv(blocks[0], x)
        return out


def weighted() -> Any:
    return NeighborSampler([-1, -1], prob="weight")


def no_feature() -> Any:
    return NeighborSampler([-1, -1], prefetch_node_feats=["fat"])


LOADERS: Mapping[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "own code": (lambda: OwnCode([-1]), {}, "OwnCode makes blocks by its own code.*MultiLayerFullNeighborS"),
    "weights": (weighted, {}, "draws edges by 'weight'.*data_parallel"),
    "no such feature": (no_feature, {}, r"prefetch_node_feats names 'fat', but g\.ndata has \['feat', 'lab"),
    "exclude": (runs.sampler, {"exclude": torch.arange(3)}, "exclude=.*partition a graph without"),
    "unknown option": (runs.sampler, {"dept": 2}, "no option 'dept'; did you mean 'depth'"),
    "edges": (lambda: as_edge_prediction_sampler(runs.sampler()), {}, "is for edge loaders"),
    "a seed twice": (runs.sampler, {"seeds": torch.tensor([3, 3])}, "node 3 more than once"),
    "no seed anywhere": (runs.sampler, {"seeds": torch.empty(0, dtype=torch.int64)}, "at least one"),
}
WORDS: Mapping[str, str] = {
    "layers": "disagree on a loader: rank 0 has 2 layers.*rank 1 has 3 layers",
    "on one rank": "node 3 more than once",
    "edge loader": "trains on nodes, not on batches of edges",
    "batch norm": "'norm' is a BatchNorm1d.*twice; use torch.nn.LayerNorm",
    "pooling": "'pool' is a AvgPooling, which reads all nodes.*layerwise_in",
    "shallow": "rows for .* seeds, as if it had fewer layers than the 2 bl",
    "reduction": "reduction='max' must be 'mean' or 'sum'",
    "other blocks": r"neither blocks of the strategy's loader.*model\.whole\(\)",
    "cut rows": "source rows of shape .* for a block of",
}
OPTIONS: Mapping[str, tuple[str, dict[str, Any], str]] = {
    "unknown": (
        "full_graph",
        {"hops": 1},
        "'full_graph' has no option 'hops'.*its options: bucket_",
    ),
    "kind": ("full_graph", {"use_pp": 1}, "use_pp=1.*must be of type bool"),
    "bucket": ("full_graph", {"bucket_bytes": 0}, "bucket_bytes=0 must be at least 1"),
    "negative hops": ("shared_preload", {"hops": -1}, "hops=-1 must be at least 0"),
    "hops without fan-out": ("shared_preload", {"external_hops": 2}, "external_hops=2 without external_fa"),
    "both hops": ("shared_preload", {"hops": 1, "external_fanout": 15}, "hops=1.*leave one of them out"),
    "split": ("shared_preload", {"split": "mitis"}, "no partitioner 'mitis'; did you mean 'metis'"),
}


def refusal(work: Callable[[], Any]) -> str:
    try:
        work()
    except ConfigError as error:
        return str(error)
    return ""


def on_rank(folder: str) -> dict[str, str]:
    with start_session(timeout_s=30) as session:
        g = DistGraph(folder)
        topology = session.topology
        found: dict[str, str] = {}
        for name in STRATEGY_NAMES:
            strategy: Any = STRATEGIES.get(name)(session, {})
            for case, (make, more, _) in LOADERS.items():
                options = dict(more)
                seeds = options.pop("seeds", runs.my_share(g))
                found[f"{name}/{case}"] = refusal(lambda: strategy.loader(g, seeds, make(), **options))  # noqa: B023
            others: dict[str, Callable[[], Any]] = {
                "layers": lambda: strategy.loader(g, runs.my_share(g), runs.sampler(2 + topology.rank)),  # noqa: B023
                "on one rank": lambda: strategy.loader(  # noqa: B023
                    g, torch.tensor([3, 3][topology.rank :]), runs.sampler()
                ),
                "edge loader": lambda: strategy.edge_loader(  # noqa: B023
                    g, torch.arange(3), as_edge_prediction_sampler(runs.sampler())
                ),
                "batch norm": lambda: strategy.wrap(Normed(), g),  # noqa: B023
                "pooling": lambda: strategy.wrap(Pooled(), g),  # noqa: B023
                "reduction": lambda: strategy.wrap(runs.first_model("sage"), g, "max"),  # noqa: B023
            }
            found |= {f"{name}/{case}": refusal(work) for case, work in others.items()}
            found |= {f"{name}/{case}": text for case, text in in_training(g, strategy).items()}
        too_many: Any = STRATEGIES.get("shared_preload")(session, {"hops": 3})
        found["hops"] = refusal(lambda: too_many.loader(g, runs.my_share(g), runs.sampler()))
        differing: Any = STRATEGIES.get("full_graph")(session, {"use_pp": bool(topology.rank)})
        found["differing"] = refusal(lambda: differing.loader(g, runs.my_share(g), runs.sampler()))
        g.barrier()
        return found


def in_training(g: DistGraph, strategy: Any) -> dict[str, str]:
    """Return the errors of wrong loops; a correct one still runs afterwards."""
    model = strategy.wrap(runs.first_model("sage"), g)
    loader = strategy.loader(g, runs.my_share(g), runs.sampler())
    graph = dgl.rand_graph(6, 12)
    plain = [dgl.to_block(graph, torch.arange(6))] * 2
    x = torch.ones(6, equality.WIDTH, dtype=torch.float64)
    found = {"other blocks": refusal(lambda: model(plain, x))}
    with torch.no_grad():
        assert model(plain, x).shape == (6, equality.CLASSES)
    ((_, _, blocks),) = loader
    shallow = strategy.wrap(Shallow(), g)
    found["shallow"] = refusal(lambda: shallow(blocks, blocks[0].srcdata["feat"]))
    cut = blocks[0].srcdata["feat"][: blocks[0].own_rows // 2]
    found["cut rows"] = refusal(lambda: model(blocks, cut))
    model(blocks, blocks[0].srcdata["feat"]).sum().backward()
    return found


def test_every_rank_is_told_what_to_do(folders: tuple[str, str]) -> None:
    for rank, found in enumerate(run_ranks(on_rank, 2, args=(folders[0],), ranks_per_server=1)):
        for name in STRATEGY_NAMES:
            for case, (_, _, words) in LOADERS.items():
                match(found[f"{name}/{case}"], words, f"{name}/{case}")
            for case, words in WORDS.items():
                match(found[f"{name}/{case}"], words, f"{name}/{case}, rank {rank}")
        match(found["hops"], "hops=3, but the sampler has 2 layers: give at most 2", "hops")
        match(found["differing"], "disagree on an option of full_graph: rank 0 has use_pp=False", "differing")


@pytest.mark.parametrize("case", OPTIONS)
def test_options_are_checked_at_start(case: str) -> None:
    strategy, options, words = OPTIONS[case]
    with pytest.raises(ConfigError, match=words):
        STRATEGIES.get(strategy)(None, options)  # type: ignore[arg-type]  # nothing is asked of it


def match(message: str, words: str, name: str) -> None:
    assert re.search(words, message), f"{name}: {message!r}"


def two_on_rank(folder: str) -> list[str]:
    with start_session(strategy="full_graph", timeout_s=30) as session:
        g = DistGraph(folder)
        messages = []
        for name in STRATEGY_NAMES:
            strategy: Any = STRATEGIES.get(name)(session, {})
            messages.append(refusal(lambda: strategy.wrap(runs.first_model("sage"), g)))  # noqa: B023
            seeds = {"user": torch.arange(2)}
            messages.append(refusal(lambda: strategy.loader(g, seeds, runs.sampler())))  # noqa: B023
        return [*messages, refusal(lambda: local_graph(g))]


def test_graphs_of_several_types_are_refused(folders: tuple[str, str]) -> None:
    (messages,) = run_ranks(two_on_rank, 1, args=(folders[1],))
    for message in messages:
        match(message, "graphs of one node and one edge type.*user, item.*strategy='data_parallel'", "two")


def warned_on_rank(folder: str) -> list[str]:
    with start_session(timeout_s=30) as session:
        g = DistGraph(folder)
        strategy: Any = STRATEGIES.get("full_graph")(session, {})
        texts = []
        for sampler, more in (
            (NeighborSampler([25, 10], prefetch_node_feats=["feat"]), {"batch_size": 5, "shuffle": True}),
            (runs.sampler(), {"batch_size": 5}),
            (runs.sampler(), {"shuffle": True, "drop_last": True}),
        ):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                strategy.loader(g, runs.my_share(g), sampler, **more)
            texts.append("; ".join(str(one.message) for one in caught if "full_graph" in str(one.message)))
        return texts


def test_what_has_no_effect_is_told_once(folders: tuple[str, str]) -> None:
    first, second = run_ranks(warned_on_rank, 2, args=(folders[0],))
    match(
        first[0],
        r"^full_graph takes all neighbours.*no effect of the fan-outs \[25, 10\].* and batch_size=5 ",
        "both",
    )
    assert first[0].count("no effect") == 1
    match(first[1], r"no effect of batch_size=5 \(leave it out\); strategy='data_parallel'", "batch size")
    assert [first[2], *second] == ["", "", "", ""]
