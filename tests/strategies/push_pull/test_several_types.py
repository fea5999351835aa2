"""push_pull on several node and edge types: weights of one process on any ranks, and bytes of the formula."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from dglx_dist.comm.session import start_session
from dglx_dist.errors import ConfigError
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.layers.convolutions import SageStages
from dglx_dist.layers.several_types import HeteroStages
from dglx_dist.planner.costs.base import TypedCounts
from dglx_dist.planner.costs.push_pull import inspect_types, typed_bytes
from dglx_dist.strategies.push_pull.pipeline import InFlightBatch
from dglx_dist.training.relational import HGT, RgcnStages
from tests.helpers import wide
from tests.helpers.ranks import run_ranks
from tests.strategies.push_pull import runs, several_types
from tests.strategies.push_pull.several_types import CASES, RELATIONAL, WIDTHS, Run, make_model

NAMES = (*CASES, *RELATIONAL)
# (ranks, ranks per server, models): in the default tier, two and four ranks share the models.
PLACEMENTS = [
    *((2, 1, NAMES[::2]), (4, 2, NAMES[1::2])),
    *wide(*((*ranks, NAMES) for ranks in ((1, 1), (2, 1), (4, 2), (3, 3), (4, 4)))),
]
TOLERANCE = 1e-10
EMPTY = ("sage mean", "mixed", "rgcn")
"""Models that are also trained with ranks that have no seeds."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return several_types.write_parts(tmp_path_factory.mktemp("types"))


def list_runs(ranks: int, names: Sequence[str]) -> list[Run]:
    runs = [Run(name) for name in names]
    if ranks > 1:
        runs += [Run(name, share="empty") for name in EMPTY]
        # Each epoch has one batch and ends with its step, so several in flight change nothing.
        runs += [Run("gat", options={"depth": 3}), Run("gcn", options={"depth": 2})]
        runs += [Run(name, options={"structure": "resample"}) for name in ("mixed", "rgcn")]
        runs += [
            Run(name, options={"group_size": ranks // 2})
            for name in ("mixed", "gat", "rgcn")
            if ranks % 2 == 0
        ]
    return runs


def train_on_rank(folder: str, runs: list[Run]) -> list[several_types.Notes]:
    with start_session(timeout_s=60):
        g = DistGraph(folder)
        results = [several_types.train(g, run) for run in runs]
        g.barrier()
        return results


def find_differences(weights: Mapping[str, Any], expected: Mapping[str, Any]) -> dict[str, float]:
    assert weights.keys() == expected.keys()
    return {name: float(np.abs(weights[name] - expected[name]).max()) for name in expected}


@pytest.mark.parametrize(("ranks", "ranks_per_server", "names"), PLACEMENTS)
def test_weights_and_bytes_are_exact(
    folder: Path, ranks: int, ranks_per_server: int, names: Sequence[str]
) -> None:
    all_runs = list_runs(ranks, names)
    arguments = str(folder), all_runs
    by_rank = run_ranks(train_on_rank, ranks, args=arguments, ranks_per_server=ranks_per_server)
    for run, notes in zip(all_runs, zip(*by_rank, strict=True), strict=True):
        expected = several_types.train_in_one_process(run, ranks)
        for result in notes:
            differences = find_differences(result.weights, expected)
            assert not {name: value for name, value in differences.items() if not value <= TOLERANCE}, run
        counted = sum((result.counts for result in notes[1:]), notes[0].counts)
        moved = sum((result.moved for result in notes[1:]), notes[0].moved)
        first = inspect_types(several_types.make_model(run), list(several_types.NUM_EDGES), WIDTHS)
        counts = TypedCounts(
            batches=ranks * several_types.STEPS,
            sources={ntype: counted["L0", ntype] for ntype in several_types.NUM_NODES},
            targets={ntype: counted["D1", ntype] for ntype in several_types.NUM_NODES},
            edges={etype: counted["E1", etype] for etype in several_types.NUM_EDGES},
        )
        size, pushed = run.options.get("group_size", 0), "structure" not in run.options
        predicted = typed_bytes(counts, first, ranks=ranks, group_size=size, pushed=pushed)
        names = ("structure", "activations", "activation_gradients", "gradients")
        assert {name: moved[name] for name in names if moved[name]} == predicted, run


@pytest.mark.parametrize("name", [*CASES, *RELATIONAL])
def test_steps_move_the_weights_of_the_first_layer(name: str) -> None:
    """Otherwise equality would say nothing."""
    run = Run(name)
    start = several_types.weights_of(several_types.make_model(run))
    end = several_types.train_in_one_process(run, 2)
    kept = {name for name, value in start.items() if value.size and np.abs(value - end[name]).max() < 1e-7}
    # A relation has no edges, and RGCN of one layer returns papers only. Second layers return unused types.
    unused = ("retracts", "second", "own.1") if run.num_layers > 1 else ("own.0",)
    assert not {name for name in kept if not any(words in name for words in unused) and "own.2" not in name}


@pytest.mark.parametrize("name", ["sage", "sage mean", "mixed"])
def test_one_exchange_carries_all_relations_of_a_destination_type(name: str) -> None:
    run = Run(name)
    stages = HeteroStages(several_types.make_model(run).first, list(several_types.NUM_EDGES), WIDTHS)
    # GINConv with a trained eps sends two sums.
    apart = 4 if name == "mixed" else 0
    assert stages.sum_widths == {
        "paper": (1 + apart) * several_types.HIDDEN,
        "venue": several_types.HIDDEN,
        "author": several_types.HIDDEN,
    }


Gather = HeteroStages.gather


def change_sums(change: Any) -> Any:
    """Return a ``gather`` with other sums by destination type."""

    def gather(self: Any, *arguments: Any) -> Any:
        sums = dict(zip(self._sum_types, Gather(self, *arguments), strict=True))
        return tuple(change(sums).values())

    return gather


def swap_types(sums: dict[str, Any]) -> dict[str, Any]:
    paper, venue = sums["paper"], sums["venue"]
    rows = min(len(paper), len(venue))
    moved = torch.cat([paper[:rows] + venue[:rows], paper[rows:]])
    return {**sums, "paper": moved, "venue": 0 * venue}


def shift_twice(self: Any, rows: Any) -> Any:
    return rows + 2 * self.fc_self.bias


def shift_each_share(self: Any, block: Any, rows: Any) -> Any:
    return rows + self.fc_self.bias


rgcn_gather = RgcnStages.gather


def add_bias_in_every_part(self: Any, inputs: Any, *stages: Any) -> Any:
    by_type = {
        ntype: replace(end, is_own=end.is_own or ntype != "author") for ntype, end in inputs.by_type.items()
    }
    return rgcn_gather(self, replace(inputs, by_type=by_type), *stages)


def weigh_rows_twice(self: Any) -> Any:
    return self.row_gradients


WRONG: Mapping[str, tuple[str, Any, str, Any]] = {
    "a sum at another destination type": ("sage", HeteroStages, "gather", change_sums(swap_types)),
    "a type is dropped": (
        "sage",
        HeteroStages,
        "gather",
        change_sums(lambda sums: {**sums, "venue": 0 * sums["venue"]}),
    ),
    "a destination counts twice": (
        "sage",
        HeteroStages,
        "gather",
        change_sums(lambda sums: {**sums, "paper": 2 * sums["paper"]}),
    ),
    "a bias counts twice": ("sage", SageStages, "shift", shift_twice),
    "a bias in every share": ("sage", SageStages, "scale", shift_each_share),
    "a projection's bias in every part": ("rgcn", RgcnStages, "gather", add_bias_in_every_part),
    "gradients of rows are weighed twice": ("rgcn", InFlightBatch, "unweigh_row_gradients", weigh_rows_twice),
}
"""Mistake to its model, the object and name that are replaced, and the replacement."""


def make_mistakes_on_rank(folder: str) -> dict[str, Any]:
    results = {}
    with start_session(timeout_s=60):
        g = DistGraph(folder)
        for name, (model, *mistake) in WRONG.items():
            with mock.patch.object(*mistake):
                results[name] = several_types.train(g, Run(model)).weights
        g.barrier()
    return results


def test_every_mistake_leaves_other_weights_than_one_process(folder: Path) -> None:
    results = run_ranks(make_mistakes_on_rank, 3, args=(str(folder),))
    for name, (model, *_) in WRONG.items():
        expected = several_types.train_in_one_process(Run(model), 3)
        for result in results:
            assert max(find_differences(result[name], expected).values()) > 1e-4, name


@pytest.mark.parametrize("names", [("mixed mean", "rgcn"), *wide((("sage", "gcn mean", "rgcn deep"),))])
def test_small_batches_train_as_under_data_parallel(folder: Path, names: Sequence[str]) -> None:
    """Batches may lack all nodes of a type."""
    strategies = "data_parallel", "push_pull"
    runs_of = [Run(name, batch_size=2, fanout=2) for name in names]
    both = [replace(run, strategy=strategy) for run in runs_of for strategy in strategies]
    for result in run_ranks(train_on_rank, 3, args=(str(folder), both)):
        assert min(notes.counts["batches"] for notes in result) > several_types.STEPS
        for expected, notes in zip(result[::2], result[1::2], strict=True):
            assert max(find_differences(notes.weights, expected.weights).values()) < TOLERANCE


AUTOCAST = [
    Run(name, strategy=strategy, dtype=torch.float32, autocast=autocast)
    for name in ("rgcn", "rgcn bases", "sage")
    for strategy, autocast in (("data_parallel", False), ("data_parallel", True), ("push_pull", True))
]


def test_bfloat16_is_data_parallel_but_for_rounding(folder: Path) -> None:
    """Parts do not have the authors' rows of other owners, but must send sums of the same dtype."""
    for result in run_ranks(train_on_rank, 2, args=(str(folder), AUTOCAST)):
        for single, rounded, notes in zip(*(result[start::3] for start in range(3)), strict=True):
            rounding = max(find_differences(rounded.weights, single.weights).values())
            error = max(find_differences(notes.weights, rounded.weights).values())
            assert 0 < error <= 2 * rounding < 0.1


def test_fit_trains_and_evaluates_as_one_process(folder: Path) -> None:
    run = Run("rgcn bases", by_fit=True)
    expected = several_types.train_in_one_process(run, 2)
    for (notes,) in run_ranks(train_on_rank, 2, args=(str(folder), [run])):
        assert max(find_differences(notes.weights, expected).values()) < TOLERANCE


LATE = [
    Run("gat", options={"depth": 3, "weights": "split"}, batch_size=2),
    Run("gat mean", options={"depth": 2}, batch_size=2),
]


@pytest.mark.parametrize("late", [LATE[:1], *wide(LATE[1:])])
def test_batches_in_flight_lag_as_in_a_simulation(folder: Path, late: list[Run]) -> None:
    results = run_ranks(train_on_rank, 3, args=(str(folder), late))
    graph = several_types.plain_graph()
    blocks = [several_types.dgl.to_block(graph, {ntype: graph.nodes(ntype) for ntype in graph.ntypes})] * 2
    x = {ntype: graph.nodes[ntype].data["feat"] for ntype in WIDTHS}
    for run, notes in zip(late, zip(*results, strict=True), strict=True):
        targets = runs.of_all_ranks(notes)

        def choose_loss(model: Any, batch: int, targets: list[list[int]] = targets) -> Any:
            labels = graph.nodes["paper"].data["label"][targets[batch]]
            return several_types.F.cross_entropy(model(blocks, x)["paper"][targets[batch]], labels)

        model = several_types.make_model(run)
        part_names = [
            name for name in several_types.weights_of(model) if "first" in name and "bias" not in name
        ]
        log = notes[0].log
        assert max(entry.written - entry.read for entry in log) == run.options["depth"] - 1
        simulated = runs.delayed_sgd(
            model, part_names, log, choose_loss, lambda p: torch.optim.SGD(p, lr=several_types.RATE)
        )
        for result in notes:
            expected = {name: value.numpy() for name, value in simulated.items()}
            weights = {name: result.weights[name] for name in expected}
            assert max(find_differences(weights, expected).values()) < TOLERANCE


KEYED = [Run("sage", dropout=0.5), Run("gat", dropout=0.5), Run("rgcn deep", dropout=0.5)]


def test_dropout_is_that_of_one_rank(folder: Path) -> None:
    (alone,) = run_ranks(train_on_rank, 1, args=(str(folder), KEYED))
    results = run_ranks(train_on_rank, 3, args=(str(folder), KEYED))
    for result in results:
        for run, notes, expected in zip(KEYED, result, alone, strict=True):
            assert max(find_differences(notes.weights, expected.weights).values()) < TOLERANCE, run
    without = several_types.train_in_one_process(Run("sage"), 1)
    assert max(find_differences(alone[0].weights, without).values()) > 1e-3


class Changed(several_types.Net):
    """Changes the rows of a type before the first layer."""

    def __init__(self, change: Any) -> None:
        super().__init__(CASES["sage"])
        self.change = change

    def forward(self, blocks: Any, x: Any) -> Any:
        return super().forward(blocks, self.change(self, dict(x)))


def make_net(make: Any, **options: Any) -> several_types.Net:
    return several_types.Net(several_types.Case(make, **options))


def pass_weights(net: Any, x: Any) -> Any:
    net.first.forward = partial(net.first.forward, mod_kwargs={"cites": {"edge_weight": torch.ones(1)}})
    return x


class Skipping(several_types.Net):
    """Adds a projection of the papers' features to the result."""

    def __init__(self) -> None:
        super().__init__(CASES["sage"])
        self.skip = torch.nn.Linear(WIDTHS["paper"], several_types.CLASSES)

    def forward(self, blocks: Any, x: Any) -> Any:
        scores = super().forward(blocks, x)["paper"]
        return {"paper": scores + self.skip(x["paper"][: len(scores)])}


def share_module(net: several_types.Net) -> several_types.Net:
    for etype in (("paper", "cites", "paper"), ("paper", "retracts", "paper")):
        net.first.mod_dict[etype] = net.first.mods[str(("paper", "cites", "paper"))]
    return net


class WithoutAuthors(torch.nn.Module):
    """Calls RGCN without the rows of authors."""

    def __init__(self) -> None:
        super().__init__()
        self.rgcn = make_model(Run("rgcn"))

    def forward(self, blocks: Any, x: Any) -> Any:
        return self.rgcn(blocks, leave_out("author")(self, x))


def make_hgt() -> HGT:
    types: Any = SimpleNamespace(
        ntypes=list(several_types.NUM_NODES), canonical_etypes=list(several_types.NUM_EDGES)
    )
    return HGT(types, WIDTHS, several_types.HIDDEN, several_types.CLASSES, out_types=["paper"])


def wide_gcn(etype: Any) -> Any:
    return several_types.GraphConv(9, several_types.HIDDEN)


def gat_everywhere(etype: Any) -> Any:
    widths = several_types.ALL_WIDTHS
    return several_types.GATConv((widths[etype[0]], widths[etype[2]]), several_types.HIDDEN, 1)


def gcn_aggregator(etype: Any) -> Any:
    return several_types.SAGEConv(several_types.ALL_WIDTHS[etype[0]], several_types.HIDDEN, "gcn")


def scale_venues(net: Any, x: Any) -> Any:
    return {**x, "venue": 2 * x["venue"]}


def leave_out(ntype: str) -> Any:
    return lambda net, x: {name: rows for name, rows in x.items() if name != ntype}


def swap_rows(net: Any, x: Any) -> Any:
    return {**x, "venue": x["field"]}


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (make_hgt, {}, r"several types.*HeteroGraphConv.*RGCN.*paper: 6.*HGTConv is a product.*data_parallel"),
    (
        lambda: make_net(gat_everywhere),
        {},
        r"GATConv of \('author', 'writes', 'paper'\) combines the rows.*SAGEConv",
    ),
    (lambda: make_net(gcn_aggregator), {}, r"SAGEConv with one width cannot be split on edges between two"),
    (lambda: make_net(wide_gcn), {}, r"weight. has 9 columns, but the features of '\w+' have \d"),
    (lambda: share_module(make_net(several_types.gcn)), {}, "one module for .* and another edge type"),
    (lambda: Changed(scale_venues), {}, "not the loader's unchanged features"),
    (lambda: Changed(swap_rows), {}, "not the loader's unchanged features"),
    (lambda: Changed(leave_out("venue")), {}, "not given the rows of node type 'venue'"),
    (
        lambda: Changed(leave_out("author")),
        {},
        "not given the rows of node type 'author'.*leave its edge types",
    ),
    (
        WithoutAuthors,
        {},
        "layer 0 was not given the rows of node type 'author'.*Pass the rows of all node types",
    ),
    (Skipping, {}, r"'skip' \(Linear\) was given 3 columns.*no skip connection.*data_parallel"),
    (lambda: Changed(pass_weights), {}, "mod_kwargs.*data_parallel"),
    (
        lambda: make_net(several_types.sage),
        {"depth": 2},
        "reads rows of author, which are not features.*depth=1",
    ),
    (lambda: make_net(several_types.sage), {"features": "nothing"}, "the nodes have no 'nothing'"),
    (lambda: make_net(several_types.sage), {}, "^$"),
]
"""The model, the options, and words of the message."""


def refuse_on_rank(folder: str) -> list[str]:
    messages = []
    with start_session(timeout_s=60):
        g = DistGraph(folder)
        for make, options, _ in REFUSED:
            with mock.patch.object(several_types, "make_model", lambda _, make=make: make().double()):
                try:
                    several_types.train(g, Run("sage", options=options))
                    messages.append("")
                except ConfigError as error:
                    messages.append(str(error))
        g.barrier()
    return messages


def test_every_rank_refuses_with_a_remedy(folder: Path) -> None:
    for messages in run_ranks(refuse_on_rank, 2, args=(str(folder),)):
        pairs = zip(messages, REFUSED, strict=True)
        assert not {words: message for message, (*_, words) in pairs if not re.search(words, message)}
