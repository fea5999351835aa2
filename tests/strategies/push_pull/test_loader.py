"""Batches of push-pull: every rank has every block and its own columns of it; failures of one rank."""

import os
import signal
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock
from weakref import ref

import dgl
import numpy as np
import pytest
import torch
from dgl.dataloading import LaborSampler, NeighborSampler, as_edge_prediction_sampler

from dglx_dist.comm.session import Session, start_session
from dglx_dist.data.storage.writer import write_dataset
from dglx_dist.dataloading import minibatch, negative
from dglx_dist.dataloading.loader import DataLoader
from dglx_dist.errors import ConfigError
from dglx_dist.graph.analysis import reverse_edge_ids
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.layers.dropout import deal_out_columns
from dglx_dist.records import EDGE_TYPE, NODE_TYPE, Assignment
from dglx_dist.strategies.base import STRATEGIES, OpenedStrategy
from dglx_dist.strategies.push_pull import loader as push_pull_loader
from dglx_dist.strategies.push_pull.exchange import Group, GroupBatch, PartInput, make_group
from dglx_dist.strategies.push_pull.loader import BlockSchema, OwnerBlock, PushPullLoader
from tests.helpers.ranks import run_ranks, start_ranks
from tests.strategies import edge_equality, equality

NUM_NODES, NUM_EDGES, WIDTH = edge_equality.NUM_NODES, 2 * edge_equality.HALF, 5
FANOUTS = [3, 2]
SHARES = (6.0, 0.0, 3.0, 1.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The graph of edge tasks in four parts; features are ten times the original id, plus the column."""
    ids = np.arange(NUM_NODES)
    data = {
        "feat": (ids[:, None] * 10 + np.arange(WIDTH)).astype(np.float32),
        "small": (ids[:, None] % 3 + np.zeros((1, 2))).astype(np.float16),
        "label": ids % 7,
        "depth": ids.astype(np.float32),
    }
    part_of = {NODE_TYPE: np.random.default_rng(3).integers(4, size=NUM_NODES).astype(np.int32)}
    raw = replace(edge_equality.raw_graph(), node_data={NODE_TYPE: data}, num_classes={NODE_TYPE: 7})
    parts = tmp_path_factory.mktemp("loader") / "parts"
    write_dataset(raw, Assignment(num_parts=4, part_of=part_of, method="test", seed=0), parts)
    return parts


def share_of(g: DistGraph, count: int) -> torch.Tensor:
    topology = g.session.topology
    return equality.cut(torch.arange(count), SHARES, topology.rank, topology.world_size)


def sampler_of(**prefetch: Any) -> NeighborSampler:
    return NeighborSampler(
        FANOUTS, **({"prefetch_node_feats": ["feat"], "prefetch_labels": ["label"]} | prefetch)
    )


def nodes_of(g: DistGraph, sampler: Any = None, group: Group | None = None, **given: Any) -> PushPullLoader:
    """A loader of nodes; what is no option of the strategy is one of the loader."""
    opened, loader_options = opened_for(g, group, given)
    loader: PushPullLoader = opened.loader(share_of(g, NUM_NODES), sampler or sampler_of(), **loader_options)
    return loader


def edges_of(g: DistGraph, **given: Any) -> PushPullLoader:
    opened, loader_options = opened_for(g, None, given)
    loader: PushPullLoader = opened.edge_loader(share_of(g, NUM_EDGES)[::4], sampler_of(), **loader_options)
    return loader


def opened_for(
    g: DistGraph, group: Group | None, given: Mapping[str, Any]
) -> tuple[OpenedStrategy, dict[str, Any]]:
    loader_options: dict[str, Any] = {"batch_size": 32, **given}
    structure, depth = (loader_options.pop(name, None) for name in ("structure", "depth_of_pipeline"))
    options = {"structure": structure or "push", "depth": depth or 1}
    options["group_size"] = g.session.topology.world_size if group is None else group.size
    return STRATEGIES.get("push_pull")(g.session, options).open(g), loader_options


Seen = tuple[int, list[int], list[int], list[int], str]
"""Number, nodes, indptr, indices and index type of one owner's batch, which must be equal on all parts."""
Epoch = list[list[Seen]]
"""By step, by owner."""


def epoch_of(g: DistGraph, loader: PushPullLoader) -> tuple[Epoch, Counter[str]]:
    """Return this part's batches with its own columns, and the bytes that it sent and requested by phase."""
    results, before, group = [], g.session.ledger.snapshot(), loader._group
    columns = deal_out_columns(WIDTH, group.size)[group.part]
    for *_, blocks in loader:
        block, inputs = blocks[0], blocks[0].push_pull.inputs
        own = inputs[group.part]
        assert own.block.edata.keys() == block.edata.keys()
        for name, values in own.block.edata.items():
            assert values.data_ptr() == block.edata[name].data_ptr()
        assert torch.equal(block.srcdata[dgl.NID], own.nodes[NODE_TYPE])
        own_columns = own.columns[NODE_TYPE]["feat"]
        assert block.srcdata["feat"].data_ptr() == own_columns.data_ptr()
        for part_input in inputs:
            ids = g.orig_ids(part_input.nodes[NODE_TYPE])[:, None]
            assert torch.equal(
                part_input.columns[NODE_TYPE]["feat"],
                (ids * 10 + torch.arange(WIDTH)).float()[:, columns.cut],
            )
        results.append([describe(part_input) for part_input in inputs])
    return results, equality.moved_since(g.session, before)


def describe(one: PartInput) -> Seen:
    indptr, indices, _ = one.block.adj_tensors("csc")
    return one.number, one.nodes[NODE_TYPE].tolist(), indptr.tolist(), indices.tolist(), str(one.block.idtype)


LABOR = LaborSampler(FANOUTS, batch_dependency=2, prefetch_node_feats=["feat"], prefetch_labels=["label"])


class OwnCode(NeighborSampler):
    def __init__(self, how: str = "", **prefetch: Any) -> None:
        super().__init__(FANOUTS, **prefetch)
        self.how, self.batches = how, 0

    def sample_blocks(self, g: Any, seed_nodes: Any, exclude_eids: Any = None) -> Any:
        self.batches += 1
        if self.batches == 3 and self.how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.batches == 3 and self.how == "raises":
            raise ValueError("no third batch")
        return super().sample_blocks(g, seed_nodes, exclude_eids)


def on_three(folder: str) -> dict[str, Any]:
    """Whole structure everywhere: each way of knowing it, for nodes and for edges."""
    with start_session(timeout_s=200, seed=5) as session:
        g, results = DistGraph(folder, structure="replicated"), {}
        excluded = {"exclude": "reverse_id", "reverse_eids": reverse_edge_ids(g)}
        drawn = negative.PerSourceUniform(2, corrupt="both")
        for structure in ("push", "resample"):
            kinds = {
                "nodes": nodes_of(g, structure=structure, shuffle=True, depth=2, num_threads=2),
                "here": nodes_of(g, structure=structure, num_threads=0, depth_of_pipeline=3),
                "sources": nodes_of(g, LABOR, structure=structure, shuffle=True),
                "edges": edges_of(
                    g, structure=structure, shuffle=True, num_threads=2, negative_sampler=drawn, **excluded
                ),
            }
            for kind, loader in kinds.items():
                results[f"{kind}/{structure}"] = [epoch_of(g, loader) for _ in range(2)]
        before = session.ledger.snapshot()
        nodes_of(g, structure="resample")
        # 8 bytes for each seed of the others.
        num_seeds = NUM_NODES - len(share_of(g, NUM_NODES))
        assert equality.moved_since(session, before)["seeds"] == 8 * num_seeds
        results["own code"] = [epoch_of(g, nodes_of(g, OwnCode(prefetch_labels=["label"])))]
        for words, make in {
            "own code": lambda: nodes_of(g, OwnCode(), structure="resample"),
            "sets edge_weights on blocks": lambda: nodes_of(g, LaborSampler(FANOUTS, importance_sampling=1)),
            "exclude=": lambda: edges_of(g, structure="resample", exclude=lambda eids: eids[:0]),
            "disagree on the sampler": lambda: nodes_of(g, structure="resample", seed=session.topology.rank),
            "depth=1": lambda: nodes_of(g, depth=1 + session.topology.rank),
        }.items():
            with pytest.raises(ConfigError, match=words):
                make()
        g.barrier()
        return results


@pytest.fixture(scope="module")
def three(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(on_three, 3, args=(str(folder),), timeout_s=250)


KINDS = ("nodes", "here", "sources", "edges")


@pytest.mark.parametrize(
    "kind", [*(f"{kind}/{way}" for kind in KINDS for way in ("push", "resample")), "own code"]
)
def test_every_part_has_what_the_owner_has(three: list[dict[str, Any]], kind: str) -> None:
    first, *later = ([epoch for epoch, _ in rank_results[kind]] for rank_results in three)
    assert min(map(len, first)) > 3
    assert later == [first, first]


def test_epochs_differ_and_an_empty_rank_has_blocks_without_destinations(three: list[dict[str, Any]]) -> None:
    (first, _), (second, _) = three[0]["nodes/push"]
    assert [step[0][1] for step in first] != [step[0][1] for step in second]
    assert [step[0][0] for step in (*first, *second)] == list(range(len(first) + len(second)))
    # Rank 1 has no seeds: blocks of no destination, on all parts.
    assert all(indptr == [0] for step in first for _, _, indptr, _, _ in step[1:2])


@pytest.mark.parametrize("kind", KINDS)
def test_structure_bytes_are_those_of_the_formula(three: list[dict[str, Any]], kind: str) -> None:
    """int32 CSC to each of two peers; nothing when structure is drawn again."""
    for rank, result in enumerate(three):
        for (epoch, pushed), (_, drawn) in zip(
            result[f"{kind}/push"], result[f"{kind}/resample"], strict=True
        ):
            assert pushed["structure"] == 2 * 4 * sum(
                len(array) for step in epoch for array in step[rank][1:4]
            )
            assert drawn["structure"] == drawn["features"] == pushed["features"] == 0
            assert drawn["columns"] == pushed["columns"] == drawn["seeds"] == 0


class Pipeline:
    drained = 0

    def drain(self) -> None:
        self.drained += 1


def on_four(folder: str) -> None:
    """Structure in parts, groups of two, batches that are left early, positions, drains."""
    with start_session(timeout_s=200) as session:
        g = DistGraph(folder, structure="partitioned")
        group = make_group(session, 2)
        with pytest.raises(ConfigError, match="structure='replicated'"):
            nodes_of(g, structure="resample")
        pushed = nodes_of(g, group=group, depth_of_pipeline=2, depth=2, num_threads=2)
        pipeline = Pipeline()
        pushed._pipelines[:] = [ref(pipeline), ref(Pipeline())]  # type: ignore[index]
        check_batches(session, pushed, DataLoader(g, share_of(g, NUM_NODES), sampler_of(), batch_size=32))
        assert pipeline.drained == 1
        check_positions(pushed)
        # Once at the end of each epoch that came to its end; one was left early.
        assert pipeline.drained == 3
        assert not pushed._pushes.mailbox._arrived
        assert session.step_share is None
        g.barrier()


def ahead_on_four(folder: str) -> list[int]:
    """Draws of several batches at a time: the same bits, and each destination is asked for once."""
    with start_session(timeout_s=200, seed=5) as session, pytest.MonkeyPatch.context() as patch:
        g = DistGraph(folder, structure="partitioned")
        group = make_group(session, 2)
        labor = LaborSampler(FANOUTS, batch_dependency=2, prefetch_labels=["label"])
        paces: list[dict[str, Any]] = [{}, {"num_threads": 0}, {"num_threads": 3, "depth": 4}]
        saved: list[int] = []
        for sampler, sizes in ((None, (1, 4, 16, 64, 256)), (labor, (1, 1, *[2] * 40))):
            for pace in paces[: 3 if sampler is None else 1]:
                loader = nodes_of(g, sampler, group, batch_size=4, shuffle=True, **pace)
                g.cache_rows("feat", alpha=0, policy="lookahead")
                plain, alone = draw_blocks(loader)
                assert len(plain) > 6
                assert alone == asked_for(g, plain, [1] * len(plain))
                g.cache_rows("feat", alpha=0.9, policy="lookahead")
                for window in (256 << 20, 0):
                    patch.setattr(minibatch, "WINDOW_BYTES", window)
                    loader.set_epoch(0)
                    blocks, sent = draw_blocks(loader)
                    assert [bits(thread) for thread in blocks] == [bits(thread) for thread in plain]
                    assert sent == (asked_for(g, plain, sizes) if window else alone)
                    g.barrier()
                    saved += [alone - sent] if window else []
        loader.set_epoch(0)
        steps = iter(loader)
        next(steps)
        steps.close()
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("dglx-loader")]
        for structure, policy, tells in (
            ("partitioned", "lookahead", False),
            ("partitioned", "halo", True),
            ("replicated", "lookahead", True),
        ):
            g = DistGraph(folder, structure=structure)
            g.cache_rows("feat", alpha=0.9, policy=policy)
            with mock.patch.object(push_pull_loader.log, "warning") as warning:
                nodes_of(g, group=group)
            assert (warning.call_count > 0) == tells
        g.barrier()
    return saved


def draw_blocks(loader: PushPullLoader) -> tuple[list[Any], int]:
    before = loader._session.ledger.total(phase="sampling")
    blocks = [batch[-1] for batch in loader]
    return blocks, loader._session.ledger.total(phase="sampling") - before


def bits(blocks: Any) -> list[list[int]]:
    arrays = [(block.edata[dgl.EID], *block.adj_tensors("csc"), block.srcdata[dgl.NID]) for block in blocks]
    return [array.tolist() for of_block in arrays for array in of_block]


def asked_for(g: DistGraph, batches: list[Any], sizes: Sequence[int]) -> int:
    """8 bytes for each distinct remote destination in a hop of a group of batches, 24 for each edge."""
    bounds, server = g.get_node_partition_policy(NODE_TYPE).bounds, g.session.topology.server
    first, sent = 0, 0
    for size in sizes:
        for hop in range(len(FANOUTS)):
            degrees: dict[int, int] = {}
            for blocks in batches[first : first + size]:
                block = blocks[-1 - hop]
                degrees |= dict(
                    zip(block.dstdata[dgl.NID].tolist(), block.in_degrees().tolist(), strict=True)
                )
            remote = [node for node in degrees if not bounds[server] <= node < bounds[server + 1]]
            sent += sum(8 + 24 * degrees[node] for node in remote)
        first += size
    assert first >= len(batches)
    return sent


@pytest.mark.wide
def test_what_batches_share_is_drawn_once(folder: Path) -> None:
    saved = run_ranks(ahead_on_four, 4, args=(str(folder),), ranks_per_server=2, timeout_s=250)
    # Batches of a single rank may happen to share nothing.
    assert min(map(sum, zip(*saved, strict=True))) > 0


def check_batches(session: Session, pushed: Any, plain: Any) -> None:
    kept: list[tuple[GroupBatch, GroupBatch | None]] = []
    expected = [(batch, session.step_share, plain.state_dict(), plain.epoch) for batch in plain]
    for batch, (plain_batch, share, *state) in zip(pushed, expected, strict=True):
        (nodes, seeds, blocks), (other_nodes, other_seeds, other_blocks) = batch, plain_batch
        assert torch.equal(nodes, other_nodes)
        assert torch.equal(seeds, other_seeds)
        assert torch.equal(blocks[-1].dstdata["label"], other_blocks[-1].dstdata["label"])
        assert torch.equal(blocks[0].edata[dgl.EID], other_blocks[0].edata[dgl.EID])
        assert session.step_share == share == blocks[-1].step_share
        assert [pushed.state_dict(), pushed.epoch] == state
        group_batch = blocks[0].push_pull
        assert len(group_batch.inputs) == 2
        kept.append((group_batch, group_batch.following))
    assert len(kept) == len(pushed) > 3
    assert all(item[1] is after[0] for item, after in pairwise(kept))
    assert kept[-1][1] is None
    assert all(group_batch.following is None for group_batch, _ in kept)
    assert pushed.state_dict() == plain.state_dict()


def check_positions(loader: Any) -> None:
    loader.set_epoch(7)
    first = []
    for batch in loader:
        first.append(batch[0].tolist())
        if len(first) == 2:
            break
    state = loader.state_dict()
    assert state == {"epoch": 7, "step": 2, "seed": 0}
    loader.set_epoch(7)
    batches = [batch[0].tolist() for batch in loader]
    loader.load_state_dict(state)
    assert [*first, *(batch[0].tolist() for batch in loader)] == batches


def test_groups_keep_positions_and_drain(folder: Path) -> None:
    run_ranks(on_four, 4, args=(str(folder),), ranks_per_server=2, timeout_s=250)


@pytest.fixture
def graph(folder: Path) -> Any:
    with start_session():
        yield DistGraph(folder)


def test_one_rank_has_all_columns_and_sends_nothing(graph: DistGraph) -> None:
    loader = nodes_of(graph)
    _, moved = epoch_of(graph, loader)
    assert not moved["structure"]


def test_steps_are_numbered_through_all_epochs(graph: DistGraph) -> None:
    loader = nodes_of(graph)
    loader.first_number = 5
    numbers = [graph.session.step_share.step_number for _ in range(2) for _ in loader]
    assert numbers == list(range(5, 5 + 2 * len(loader)))


def test_prefetched_matrices_come_as_columns_and_vectors_as_rows(graph: DistGraph) -> None:
    sampler = sampler_of(prefetch_node_feats=["small", "depth"])
    loader = nodes_of(graph, sampler, feature_dtype=torch.float64)
    for nodes, _, blocks in loader:
        assert set(blocks[0].push_pull.inputs[0].columns[NODE_TYPE]) == {"feat", "small"}
        for name in ("feat", "small", "depth"):
            expected = graph.ndata[name][nodes].to(torch.float64)
            assert torch.equal(blocks[0].srcdata[name], expected), name
    assert sampler.prefetch_node_feats == ["small", "depth"]


def test_edge_prediction_samplers_bring_columns_too(graph: DistGraph) -> None:
    sampler = as_edge_prediction_sampler(sampler_of(), negative_sampler=negative.Uniform(1))
    opened = STRATEGIES.get("push_pull")(graph.session, {"features": "small"}).open(graph)
    batches = list(opened.edge_loader(torch.arange(20), sampler, batch_size=5))
    assert len(batches) == 4
    for nodes, positive, negatives, blocks in batches:
        assert positive.num_edges() == negatives.num_edges() == 5
        assert torch.equal(blocks[0].srcdata["feat"], graph.ndata["feat"][nodes])


def with_a_failure(folder: str, how: str) -> int:
    # Longer than the test may take: nobody is to wait for it.
    with start_session(timeout_s=600) as session:
        g = DistGraph(folder)
        return len(list(nodes_of(g, OwnCode(how if session.topology.rank == 2 else ""), num_threads=2)))


@pytest.mark.parametrize("how", ["raises", "killed"])
def test_the_rank_is_named_long_before_the_time_is_out(folder: Path, how: str) -> None:
    waiting, between, failing = start_ranks(with_a_failure, 3, args=(str(folder), how))
    assert waiting.exitcode == 1
    assert "PeerError" in waiting.error
    # The rank between them may have asked it first, and have ended for that reason.
    assert "rank 2" in waiting.error or ("rank 1" in waiting.error and "rank 2" in between.error)
    if how == "raises":
        # Its own error, not that of a thread that was waiting for rank 0.
        assert failing.error.startswith("ValueError: no third batch")
    else:
        assert failing.exitcode == -signal.SIGKILL


# 0 <- 2, 1 <- 0, 1 <- 3; listed out of order, so that edge ids are not those of the columns.
SCHEMA = BlockSchema([NODE_TYPE], [EDGE_TYPE])
SOURCES, DESTINATIONS, SOURCE_IDS = [3, 2, 0], [1, 0, 1], torch.tensor([70, 10, 40, 20])


def block_of(idtype: torch.dtype) -> OwnerBlock:
    ends = torch.tensor(SOURCES, dtype=idtype), torch.tensor(DESTINATIONS, dtype=idtype)
    block = dgl.create_block(ends, num_src_nodes=4, num_dst_nodes=2)
    return OwnerBlock(block=block, nodes={NODE_TYPE: SOURCE_IDS})


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("wide", [False, True])
def test_unpacked_block_equals_the_packed_one(idtype: torch.dtype, wide: bool) -> None:
    arrays = [array.copy() for array in SCHEMA.pack(block_of(idtype), wide=wide)]
    # 4 [(D1 + 1) + E1 + L0] bytes
    assert [array.nbytes for array in arrays] == [4 * (8 if wide else 4), 4 * 3, 4 * 3]
    block = SCHEMA.unpack(arrays, idtype)
    arrays[2][:] = 1  # it shares nothing with what came
    assert torch.equal(block.nodes[NODE_TYPE], SOURCE_IDS)
    assert block.block.idtype == idtype
    assert (block.block.num_src_nodes(), block.block.num_dst_nodes()) == (4, 2)
    indptr, indices, edge_ids = block.block.adj_tensors("csc")
    assert indptr.tolist() == [0, 1, 3]
    assert [indices.tolist()[0], *sorted(indices.tolist()[1:])] == [2, 0, 3]
    assert edge_ids.tolist() == [0, 1, 2]
    assert not {**block.block.srcdata, **block.block.edata}


@pytest.mark.parametrize(
    ("nodes", "indptr", "indices"),
    [
        ([7, 8], [0, 1], [2]),
        ([7, 8], [0, 1], [-1]),
        ([7, 8], [0, 2, 1], [0]),
        ([7, 8], [-1, 1], [0]),
        ([7, 8], [0, 2], [0]),
        ([7, 8], [], []),
        ([7], [0, 0, 1], [0]),
        ([], [0, 1], [0]),
        ([7, 8], [0, 1], [0.0]),
        ([7, 8], [0, 1], [[0]]),
    ],
)
def test_arrays_that_are_no_block_are_refused(nodes: Any, indptr: Any, indices: Any) -> None:
    arrays = [np.array(values, None if values else np.int32) for values in (nodes, indptr, indices)]
    with pytest.raises(ValueError, match="are no block"):
        SCHEMA.check(arrays)
    SCHEMA.check(SCHEMA.pack(block_of(torch.int32), wide=False))
