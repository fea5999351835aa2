"""The node loader: batches of every rank, resuming, and sessions that are opened and closed."""

import re
import warnings
from itertools import chain
from pathlib import Path

import dgl
import numpy as np
import pytest
import torch
from dgl.dataloading import LaborSampler, NeighborSampler

from dglx_dist.comm.session import start_session
from dglx_dist.dataloading.loader import DataLoader, open_maker
from dglx_dist.dataloading.sampler_spec import read_sampler
from dglx_dist.dataloading.step_loader import LoaderOptions
from dglx_dist.errors import CheckpointError, ConfigError
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.graph.structure import PartitionedStructure
from tests.dataloading.rings import NUM_NODES
from tests.helpers.ranks import run_ranks

IDS = torch.arange(NUM_NODES)
SAMPLER = NeighborSampler([3, 4], prefetch_node_feats=["feat"], prefetch_labels=["label"])


def loader_of(graph: DistGraph, **options) -> DataLoader:
    options = {"batch_size": 7, "shuffle": True, "seed": 3} | options
    return DataLoader(graph, options.pop("indices", IDS), options.pop("sampler", SAMPLER), **options)


def seeds_of(loader) -> list[list[int]]:
    return [seeds.tolist() for _, seeds, _ in loader]


def edges_of(loader) -> list[list[list[int]]]:
    return [[block.edata[dgl.EID].tolist() for block in blocks] for _, _, blocks in loader]


@pytest.mark.parametrize("num_threads", [0, 1, 3])
def test_every_seed_once_an_epoch_in_another_order_each(graph: DistGraph, num_threads: int) -> None:
    loader, offline = loader_of(graph, num_threads=num_threads, depth=4), loader_of(graph, num_threads=0)
    first, second = seeds_of(loader), seeds_of(loader)
    offline.set_epoch(2)
    assert offline.depth == 1
    assert loader_of(graph, num_threads=num_threads).depth == max(num_threads, 1)
    assert edges_of(loader) == edges_of(offline)
    assert len(first) == len(loader) == 9
    assert [len(seeds) for seeds in first] == [7] * 8 + [4]
    assert sorted(chain(*first)) == sorted(chain(*second)) == IDS.tolist()
    assert first != second


def test_fetches_a_column_that_is_not_prefetched_on_first_access(graph: DistGraph) -> None:
    loader = loader_of(graph, sampler=NeighborSampler([3, 4]))
    with warnings.catch_warnings(record=True) as caught:
        for (nodes, seeds, blocks), (*_, expected) in zip(loader, loader_of(graph), strict=True):
            assert torch.equal(blocks[0].srcdata["feat"], graph.ndata["feat"][nodes])
            assert blocks[0].srcdata["feat"].dtype == expected[0].srcdata["feat"].dtype
            assert torch.equal(blocks[-1].dstdata["label"], graph.ndata["label"][seeds])
    # Once for each column, at the line that reads it.
    messages = [str(warning.message) for warning in caught]
    assert [re.search(r"prefetch_node_feats=\['(\w+)'\]", message)[1] for message in messages] == [
        "feat",
        "label",
    ]
    assert {warning.filename for warning in caught} == {__file__}
    with pytest.raises(KeyError, match="nope"):
        blocks[0].srcdata["nope"]


def test_kept_batches_stay_as_they_were(graph: DistGraph) -> None:
    kept = [(nodes, blocks[0].srcdata["feat"]) for nodes, _, blocks in loader_of(graph, batch_size=3)]
    for nodes, features in kept:
        assert torch.equal(features, graph.ndata["feat"][nodes])


def test_only_masked_edges_are_drawn(graph: DistGraph) -> None:
    original = graph.orig_ids(IDS)
    for _, _, (block,) in loader_of(graph, sampler=NeighborSampler([2], mask="odd")):
        assert (original[block.srcdata[dgl.NID][block.edges()[0]]] % 2 == 1).all()
        nodes = block.dstdata[dgl.NID]
        odd_in_degree = (nodes % 17 + (nodes + 1) % 2) // 2
        assert torch.equal(block.in_degrees(), odd_in_degree.clamp(max=2))


def test_leaving_early_moves_on_to_the_next_epoch(graph: DistGraph) -> None:
    epochs = loader_of(graph)
    seeds_of(epochs)
    second = seeds_of(epochs)
    loader = loader_of(graph)
    next(iter(loader))
    assert seeds_of(loader) == second


@pytest.mark.parametrize("stop", [1, 4, 9])
def test_resuming_gives_the_steps_that_were_left(graph: DistGraph, stop: int) -> None:
    uninterrupted = loader_of(graph)
    expected = edges_of(uninterrupted) + edges_of(uninterrupted)
    loader, seen, state = loader_of(graph), [], {}
    for _, _, blocks in loader:
        seen.append([block.edata[dgl.EID].tolist() for block in blocks])
        state = loader.state_dict()
        if len(seen) == stop:
            break
    resumed = loader_of(graph)
    resumed.load_state_dict(state)
    resumed.set_epoch(state["epoch"])
    assert seen + edges_of(resumed) + edges_of(resumed) == expected


class Own(NeighborSampler):
    def sample_blocks(self, g, seed_nodes, exclude_eids=None):
        raise NotImplementedError


# One for each place where ranks tell each other of mistakes, and what is read of an option nowhere else.
WRONG = [
    ({"indices": [3, 5, 3]}, ConfigError, "node 3 more than once"),
    ({"indices": [3, 60]}, IndexError, "60"),
    ({"indices": {"user": [1]}}, ConfigError, "'user'"),
    ({"indices": type("ItemSampler", (), {"__module__": "dgl.graphbolt"})()}, ConfigError, "Pass the ids"),
    ({"batch_size": 0}, ConfigError, "batch_size=0"),
    ({"depth": 1.5}, ConfigError, "depth=1.5"),
    ({"num_threads": -1}, ConfigError, "num_threads=-1"),
    ({"seed": -1}, ConfigError, "seed=-1"),
    ({"seed": 1 << 64}, ConfigError, "seed"),
    ({"exclude": [10**6]}, IndexError, "1000000"),
    ({"sampler": NeighborSampler([2], prefetch_node_feats=["fest"])}, ConfigError, "'fest'.*'feat'"),
    ({"sampler": NeighborSampler([2], prefetch_labels=["labels"])}, ConfigError, "prefetch_labels"),
    ({"sampler": NeighborSampler([2], prob="no")}, ConfigError, "'no' was given as prob or mask.*'odd'"),
    ({"sampler": "all"}, ConfigError, "str makes no blocks"),
    ({"sampler": NeighborSampler([{"likes": 2}])}, ConfigError, "fanouts"),
    (
        {"sampler": Own([2]), "exclude": torch.tensor([1])}, ConfigError,
        r"own code of Own does not support exclude=. Use NeighborSampler",
    ),
    ({"num_thread": 2}, ConfigError, "did you mean 'num_threads'"),
    ({"device": "gpu"}, ConfigError, "device='gpu' is not a device"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("weights", "message"), [("negative", "Use 0 or more"), ("pair", "one number per edge")]
)
def test_wrong_weights_are_refused(graph: DistGraph, weights: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        loader_of(graph, sampler=NeighborSampler([2], prob=weights))


def wrong_in_rank(folder: str) -> None:
    """Rank 1 makes each mistake while rank 0 does well; nobody waits for the other."""
    with start_session(timeout_s=60) as session:
        graph = DistGraph(folder)
        for options, error, message in WRONG:
            if session.topology.rank == 1:
                with pytest.raises(error, match=message):
                    loader_of(graph, **{"indices": IDS[1::2]} | options)
            else:
                with pytest.raises(ConfigError, match=r"rank 1 on .*: "):
                    loader_of(graph, indices=IDS[::2])
        local_sampler = NeighborSampler([3, 4], prob=[None, "odd"][session.topology.rank])
        with pytest.raises(
            ConfigError, match=r"rank 0 .*prob=None, rank 1 .*prob='odd'; pass the same value on all ranks"
        ):
            loader_of(graph, sampler=local_sampler)
        assert len(loader_of(graph, indices=IDS[session.topology.rank :: 2])) == 5


def test_a_mistake_on_one_rank_is_an_error_on_all(rings: dict[int, Path]) -> None:
    run_ranks(wrong_in_rank, 2, args=(str(rings[2]),))


@pytest.mark.parametrize(
    ("state", "message"),
    [
        *(
            (state, "not a position")
            for state in (None, {}, {"seed": 3}, {"seed": 3, "step": -1, "epoch": 0})
        ),
        ({"seed": 3, "step": "a", "epoch": 0}, "not a position"),
        ({"epoch": 0, "step": 0, "seed": 8}, "Pass seed=8"),
        ({"epoch": 0, "step": 10, "seed": 3}, "has 9 steps"),
    ],
)
def test_position_of_another_loader_is_refused(graph: DistGraph, state, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        loader_of(graph).load_state_dict(state)


def open_batches(g: DistGraph, sampler: NeighborSampler, **options):
    return open_maker(g, sampler, read_sampler(sampler), LoaderOptions(**options), seed=0)


def make_batch(maker, seeds):
    return maker.complete(maker.sample_items(seeds, 0, step=0))


def test_a_batch_without_seeds_has_columns_without_rows(graph: DistGraph) -> None:
    sampler = NeighborSampler([2, 2], prefetch_node_feats=["feat"], prefetch_labels=["label"])
    batch = make_batch(open_batches(graph, sampler), {})
    assert batch.blocks[0].srcdata["feat"].shape == (0, 3)
    assert batch.blocks[-1].dstdata["label"].shape == (0,)
    assert len(batch.input_nodes) == len(batch.output_nodes) == 0


def open_again_and_again(folder: Path) -> tuple[list[int], list[bool]]:
    """How many rules were served so far after each loader, and whether weighed draws are of the weights."""
    with start_session(timeout_s=120), pytest.MonkeyPatch.context() as patch:
        g = DistGraph(folder, structure="partitioned")
        rank, all_nodes = g.rank(), {"_N": np.arange(g.num_nodes())}
        served, counts, right = [], [], []
        serve = PartitionedStructure.serve

        def note_and_serve(self, op, draw):
            served.append(op)
            serve(self, op, draw)

        patch.setattr(PartitionedStructure, "serve", note_and_serve)
        likely = g.new_tensor(
            (g.num_edges(),), torch.float32, "likely", part_policy=g.get_edge_partition_policy("_E")
        )
        edges = torch.arange(g.num_edges())
        plain = [
            (NeighborSampler([2]), {}),
            (NeighborSampler([3, 1]), {}),
            (NeighborSampler([2], replace=True), {}),
            (NeighborSampler([2]), {"exclude": [5, 9]}),
            (NeighborSampler([2]), {"exclude": [9, 5]}),
            # On one rank alone: its server draws by another rule.
            (NeighborSampler([2]), {"exclude": [5, 9 + rank]}),
            (NeighborSampler([2]), {}),
            (LaborSampler([2]), {}),
            (LaborSampler([3], batch_dependency=2), {}),
        ]
        for sampler, options in plain:
            open_batches(g, sampler, **options)
            counts.append(len(served))
        for kept in (0, 0, 1):
            likely[edges[edges % 2 == rank]] = 0.0
            g.barrier()
            if rank == 0:
                likely[edges[edges % 2 == kept]] = 1.0
            g.barrier()
            batch = make_batch(open_batches(g, NeighborSampler([2], prob="likely")), all_nodes)
            right.append(bool((batch.blocks[0].edata[dgl.EID] % 2 == kept).all()))
            counts.append(len(served))
            g.barrier()
        return counts, right


def test_loaders_of_one_rule_are_served_once(rings) -> None:
    expected = [1, 1, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7], [True] * 3
    assert run_ranks(open_again_and_again, 2, args=(rings[2],), ranks_per_server=1) == [expected] * 2
