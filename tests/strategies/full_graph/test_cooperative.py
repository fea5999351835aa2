"""Cooperative batching on real ranks: float64, plain SGD."""

import contextlib
import gc
import threading
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dglx_dist.comm.session import start_session
from dglx_dist.errors import ConfigError
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.strategies.base import STRATEGIES
from dglx_dist.strategies.full_graph.expansion import EasOptions
from tests.helpers.ranks import run_ranks
from tests.strategies import equality
from tests.strategies.full_graph import runs
from tests.strategies.test_equality import TOLERANCE, difference


def two_epochs(g: DistGraph, options: dict[str, Any]) -> dict[str, Any]:
    """Gradients of each step at the first weights, and who trained on what."""
    session = g.session
    before = session.ledger.snapshot()
    strategy, loader = runs.open_loader(g, "cooperative", options)
    wrapped = strategy.wrap(runs.first_model("sage"))
    seeds, gradients, rows, counts = [], [], [], []
    moved: list[Counter[str]] = []
    for _ in range(2):
        of_epoch: list[list[int]] = []
        for _, output_nodes, blocks in loader:
            scores = wrapped(blocks, blocks[0].srcdata["feat"])
            labels = blocks[-1].dstdata["label"]
            wrapped.zero_grad()
            F.cross_entropy(scores, labels).backward()
            share = blocks[-1].step_share
            assert share.num_local == len(output_nodes)
            counts.append(share.num_global)
            gradients.append([p.grad.clone().numpy() for p in wrapped.parameters()])
            of_epoch.append(output_nodes.tolist())
            rows.append(blocks[0].own_rows)
        seeds.append(of_epoch)
        moved.append(Counter())
        for row in session.ledger.since(before):
            moved[-1][row.phase] += row.num_bytes
        before = session.ledger.snapshot()
    return {"seeds": seeds, "gradients": gradients, "rows": rows, "counts": counts, "moved": moved}


def epochs_of(folder: str, cases: list[dict[str, Any]]) -> dict[str, Any]:
    start_session(timeout_s=60)
    g = DistGraph(folder, structure="partitioned")
    results = {"epochs": [two_epochs(g, case) for case in cases]}
    results["train"] = g.ndata["train_mask"][:].nonzero()[:, 0].tolist()
    bounds = g.get_node_partition_policy("_N").bounds
    results["own"] = bounds[g.session.topology.server : g.session.topology.server + 2].tolist()
    g.close()
    return results


CASES: list[dict[str, Any]] = [
    {"batches": 3},
    {"batches": 3, "composition": "ordered"},
    {"batches": 4, "external_hops": 1, "external_fanout": 2, "external_inner": "batch"},
    {"batches": 2, "external_hops": 1, "external_fanout": 2},
]


@pytest.fixture(scope="module")
def everything(folder: Path) -> dict[int, list[dict[str, Any]]]:
    return {
        ranks: run_ranks(epochs_of, ranks, args=(str(folder), CASES), ranks_per_server=ranks // 2)
        for ranks in (2, 4)
    }


@pytest.fixture(params=[2, 4])
def epochs(
    everything: dict[int, list[dict[str, Any]]], request: pytest.FixtureRequest
) -> list[dict[str, Any]]:
    return everything[request.param]


def test_every_seed_is_in_one_batch_of_its_server_and_weighs_there(epochs: list[dict[str, Any]]) -> None:
    train = epochs[0]["train"]
    for number, case in enumerate(CASES):
        ranks = [(result["own"], result["epochs"][number]) for result in epochs]
        for epoch in range(2):
            assert all(len(rank_results["seeds"][epoch]) == case["batches"] for _, rank_results in ranks)
            assert (
                sorted(
                    node
                    for _, rank_results in ranks
                    for seeds in rank_results["seeds"][epoch]
                    for node in seeds
                )
                == train
            )
        for (first, last), rank_results in ranks:
            assert all(
                first <= node < last
                for of_epoch in rank_results["seeds"]
                for seeds in of_epoch
                for node in seeds
            )
            assert rank_results["counts"] == ranks[0][1]["counts"]
            assert sum(rank_results["counts"][: case["batches"]]) == len(train)


def test_gradients_of_an_epoch_add_up_to_the_whole_graphs(epochs: list[dict[str, Any]]) -> None:
    graph = equality.plain_graph()
    model = runs.first_model("sage")
    targets = graph.ndata["train_mask"].nonzero()[:, 0]
    F.cross_entropy(
        model([graph, graph], graph.ndata["feat"])[targets], graph.ndata["label"][targets]
    ).backward()
    expected_gradients = [p.grad.numpy() for p in model.parameters()]
    for number in range(2):
        for result in epochs:
            both_epochs = result["epochs"][number]
            for epoch in range(2):
                steps = slice(3 * epoch, 3 * epoch + 3)
                total = [
                    sum(g * n for g, n in zip(of_parameter, both_epochs["counts"][steps], strict=True))
                    / len(targets)
                    for of_parameter in zip(*both_epochs["gradients"][steps], strict=True)
                ]
                assert difference(total, expected_gradients) <= TOLERANCE


def test_ranks_of_a_server_share_the_batches_of_one(everything: dict[int, list[dict[str, Any]]]) -> None:
    """Seeds, external nodes and gradients of a step are the same on any number of ranks per server."""
    for number in range(len(CASES)):
        for server, alone in enumerate(everything[2]):
            pair = everything[4][2 * server : 2 * server + 2]
            for epoch in range(2):
                shared = zip(
                    *(rank_results["epochs"][number]["seeds"][epoch] for rank_results in pair), strict=True
                )
                assert [sorted(first + second) for first, second in shared] == [
                    sorted(seeds) for seeds in alone["epochs"][number]["seeds"][epoch]
                ]
            rows = zip(*(rank_results["epochs"][number]["rows"] for rank_results in pair), strict=True)
            assert [sum(step) for step in rows] == alone["epochs"][number]["rows"]
            for rank_results in pair:
                for gradient, expected_gradient in zip(
                    rank_results["epochs"][number]["gradients"],
                    alone["epochs"][number]["gradients"],
                    strict=True,
                ):
                    assert difference(gradient, expected_gradient) <= TOLERANCE


def test_compositions_are_what_they_say(epochs: list[dict[str, Any]]) -> None:
    for result in epochs:
        random, ordered = [result["epochs"][n]["seeds"] for n in range(2)]
        assert [sorted(batch) for batch in random[0]] == [sorted(batch) for batch in random[1]]
        assert [sorted(batch) for batch in ordered[0]] == [sorted(batch) for batch in ordered[1]]


def test_what_is_kept_moves_in_the_first_epoch_alone(epochs: list[dict[str, Any]]) -> None:
    """3.8 (7): 0 bytes of features from the second epoch on."""
    for number in range(len(CASES)):
        for phase in ("preload_structure", "preload"):
            first, second = (
                sum(result["epochs"][number]["moved"][epoch][phase] for result in epochs) for epoch in (0, 1)
            )
            assert first > 0
            assert second == 0


def second_run(folder: str) -> dict[str, Any]:
    start_session(timeout_s=60)
    g = DistGraph(folder, structure="partitioned")
    result = two_epochs(g, CASES[0])
    g.close()
    return result


@pytest.mark.wide
def test_a_later_run_reads_the_plans(folder: Path) -> None:
    first = run_ranks(second_run, 3, args=(str(folder),), ranks_per_server=2)
    again = run_ranks(second_run, 3, args=(str(folder),), ranks_per_server=2)
    assert sum(first_run["moved"][0]["preload_structure"] for first_run in first) > 0
    for phase in ("preload_structure", "preload"):
        assert sum(sum(moved[phase] for moved in first_run["moved"]) for first_run in again) == 0
    for first_run, later_run in zip(first, again, strict=True):
        assert first_run["seeds"] == later_run["seeds"]
        for gradient, expected_gradient in zip(first_run["gradients"], later_run["gradients"], strict=True):
            assert difference(gradient, expected_gradient) == 0


@pytest.mark.wide
def test_plans_of_another_seed_are_not_found_and_a_closed_graph_is_let_go(folder: Path) -> None:
    kept = []
    for seed in (0, 0, 1):
        with start_session(seed=seed):
            g = DistGraph(folder)
            loader = runs.open_loader(g, "cooperative", {"batches": 3}, seed=5)[1]
            kept.append(loader._source._cache.folder.path)
            g.close()
            graph = weakref.ref(g)
            del g, loader
            gc.collect()
            assert graph() is None
    assert kept[0] == kept[1] != kept[2]


def test_the_next_batch_is_loaded_meanwhile_and_too_many_are_refused(folder: Path) -> None:
    with start_session() as session, contextlib.closing(DistGraph(folder)) as g:
        _, loader = runs.open_loader(g, "cooperative", {"batches": 4})
        read, original = threading.Semaphore(0), loader._reader.targets

        def read_and_release(*args: Any) -> Any:
            columns = original(*args)
            read.release()
            return columns

        loader._reader.targets = read_and_release
        num_batches, waits = 0, []
        for step, _ in enumerate(loader):
            # The loop's own thread stands still here, so somebody else must read the next one.
            while num_batches < min(step + 2, 4) and read.acquire(timeout=30):
                num_batches += 1
            waits.append(num_batches)
        assert waits == [2, 3, 4, 4]
        for options, seeds, words in (
            (
                {"batches": 1000},
                6,
                "batches=1000 cooperative batches, but the servers have 6 seeds; give 1 to 6",
            ),
            ({}, 0, "no rank was given a node"),
        ):
            strategy: Any = STRATEGIES.get("cooperative")(session, options).open(g)
            with pytest.raises(ConfigError, match=words):
                strategy.loader(torch.arange(seeds), runs.sampler())


def test_options_of_expansion_aware_sampling_are_read() -> None:
    read = STRATEGIES.get("cooperative").read_options
    assert (read({}).batches, read({}).eas) == (1, None)
    for options, eas in (
        ({"external_fanout": 3, "external_inner": "batch"}, EasOptions(hops=1, fanout=3, inner="batch")),
        ({"external_hops": 0}, EasOptions(hops=0)),
        ({"external_policy": "degree"}, EasOptions(hops=1, fanout=15, policy="degree")),
    ):
        assert read(options).eas == eas
