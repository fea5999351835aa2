"""Batches of push-pull: every rank has every block and its own columns of it; failures of one rank."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any
from weakref import ref

import dgl
import numpy as np
import pytest
import torch
from dgl.dataloading import NeighborSampler, as_edge_prediction_sampler

from dglx_dist.comm.session import start_session
from dglx_dist.data.storage.writer import write_dataset
from dglx_dist.dataloading import negative
from dglx_dist.dataloading.edge_loader import DistEdgeDataLoader
from dglx_dist.dataloading.loader import DataLoader
from dglx_dist.errors import ConfigError
from dglx_dist.graph.analysis import reverse_edge_ids
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.layers.dropout import deal_out_columns
from dglx_dist.records import EDGE_TYPE, NODE_TYPE, Assignment, RawGraph
from dglx_dist.strategies.push_pull.exchange import Group, GroupBatch, PartInput, make_group
from dglx_dist.strategies.push_pull.feature_columns import ColumnStore, open_columns
from dglx_dist.strategies.push_pull.loader import (
    OwnerBlock,
    PushPullLoader,
    _check_block,
    open_loader,
    pack_block,
    unpack_block,
)
from dglx_dist.strategies.push_pull.options import PushPullOptions
from dglx_dist.strategies.push_pull.pipeline import PIPELINES
from tests.helpers.ranks import run_ranks, start_ranks

NUM_NODES, HALF, WIDTH = 80, 320, 5
FANOUTS = [3, 2]


def ring() -> RawGraph:
    """Node n and the next four around a ring; the source's edge i + HALF is the reverse of edge i."""
    pairs = [(n, (n + step) % NUM_NODES) for step in (1, 2, 3, 4) for n in range(NUM_NODES)]
    sources, destinations = np.random.default_rng(1).permutation(np.array(pairs)).T
    ids = np.arange(NUM_NODES)
    return RawGraph(
        name="ring",
        num_nodes={NODE_TYPE: NUM_NODES},
        edges={EDGE_TYPE: (np.concatenate([sources, destinations]), np.concatenate([destinations, sources]))},
        node_data={
            NODE_TYPE: {
                "feat": (ids[:, None] * 10 + np.arange(WIDTH)).astype(np.float32),
                "small": (ids[:, None] % 3 + np.zeros((1, 2))).astype(np.float16),
                "label": ids % 7,
                "depth": ids.astype(np.float32),
            }
        },
        edge_data={EDGE_TYPE: {"weight": np.arange(2 * HALF, dtype=np.float32)}},
        num_classes={NODE_TYPE: 7},
    )


def write_ring(folder: Path, num_parts: int) -> Path:
    part_of = np.random.default_rng(3).integers(num_parts, size=NUM_NODES).astype(np.int32)
    assignment = Assignment(num_parts=num_parts, part_of={NODE_TYPE: part_of}, method="test", seed=0)
    write_dataset(ring(), assignment, folder)
    return folder


def share_of(g: DistGraph, count: int) -> torch.Tensor:
    """Uneven shares: rank 1 has none, rank 0 the most."""
    rank, world_size = g.session.topology.rank, g.session.topology.world_size
    owners = torch.arange(count) * 7919 % 10
    bounds = [0, 6, 6, 9, 10][: world_size + 1]
    bounds[-1] = 10
    return ((owners >= bounds[rank]) & (owners < bounds[rank + 1])).nonzero()[:, 0]


def sampler_of(**prefetch: Any) -> NeighborSampler:
    return NeighborSampler(
        FANOUTS, **({"prefetch_node_feats": ["feat"], "prefetch_labels": ["label"]} | prefetch)
    )


def nodes_of(g: DistGraph, sampler: Any = None, group: Group | None = None, **given: Any) -> PushPullLoader:
    """A loader of nodes; what is no option of the strategy is one of the loader."""
    return _loader_of(DataLoader, g, share_of(g, NUM_NODES), sampler, group, given)


def edges_of(g: DistGraph, **given: Any) -> PushPullLoader:
    return _loader_of(DistEdgeDataLoader, g, share_of(g, 2 * HALF)[::4], None, None, given)


def _loader_of(
    inner: Any, g: DistGraph, seeds: Any, sampler: Any, group: Group | None, given: Mapping[str, Any]
) -> PushPullLoader:
    loader_options: dict[str, Any] = {"batch_size": 8, **given}
    structure, depth = (loader_options.pop(name, None) for name in ("structure", "depth_of_pipeline"))
    options = PushPullOptions(structure=structure or "push", depth=depth or 1)
    ours = group or make_group(g.session, g.session.topology.world_size)
    store = open_columns(g, ["feat"], ours)
    return open_loader(inner, g, seeds, sampler or sampler_of(), store, ours, options, loader_options)


def in_edges(block: Any, nodes: torch.Tensor) -> list[tuple[int, int]]:
    """(source, destination) as global ids, in the order of the columns."""
    indptr, indices, _ = block.adj_tensors("csc")
    destinations = nodes[: block.num_dst_nodes()].repeat_interleave(indptr.diff().long())
    return list(zip(nodes[indices.long()].tolist(), destinations.tolist(), strict=True))


def seen(one: PartInput) -> dict[str, Any]:
    """What a part has of one owner's batch, and what must be equal on all parts."""
    return {
        "number": one.number,
        "nodes": one.nodes.tolist(),
        "destinations": one.block.num_dst_nodes(),
        "edges": in_edges(one.block, one.nodes),
        "idtype": str(one.block.idtype),
        "columns": {name: rows.numpy() for name, rows in one.columns.items()},
    }


def group_batch_of(batch: Any) -> GroupBatch:
    group_batch: GroupBatch = batch[-1][0].push_pull
    return group_batch


def epoch_of(loader: PushPullLoader) -> list[list[dict[str, Any]]]:
    """By step, by owner: what this part has."""
    found = []
    for batch in loader:
        group_batch, block = group_batch_of(batch), batch[-1][0]
        own = loader_part(loader)
        assert group_batch.inputs[own].block.edata.keys() == block.edata.keys()
        for name, values in group_batch.inputs[own].block.edata.items():
            assert values.data_ptr() == block.edata[name].data_ptr()
        assert torch.equal(block.srcdata[dgl.NID], group_batch.inputs[own].nodes)
        for name, rows in group_batch.inputs[own].columns.items():
            assert block.srcdata[name].data_ptr() == rows.data_ptr()
        found.append([seen(one) for one in group_batch.inputs])
    return found


def loader_part(loader: PushPullLoader) -> int:
    return loader._group.part


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_ring(tmp_path_factory.mktemp("ring") / "parts", 4)


class OwnCode(NeighborSampler):
    """A sampler whose code is the user's."""

    def sample_blocks(self, g: Any, seed_nodes: Any, exclude_eids: Any = None) -> Any:
        return super().sample_blocks(g, seed_nodes, exclude_eids)


class Pipeline:
    """Counts how often it is drained, and what the session said then."""

    def __init__(self) -> None:
        self.drained = 0

    def drain(self) -> None:
        self.drained += 1


def refused(make: Any) -> str:
    try:
        make()
    except ConfigError as error:
        return str(error)
    return ""


def moved(g: DistGraph, work: Any) -> tuple[Any, Counter[str]]:
    """What ``work`` returns, and the bytes this rank sent and asked for meanwhile, by phase."""
    before, total = g.session.ledger.snapshot(), Counter[str]()
    result = work()
    for row in g.session.ledger.since(before):
        total[row.phase] += row.num_bytes
    return result, total


def on_three(folder: str) -> dict[str, Any]:
    """Whole structure everywhere: each way of knowing it, for nodes and for edges."""
    with start_session(timeout_s=200, seed=5) as session:
        g = DistGraph(folder, structure="replicated")
        found: dict[str, Any] = {}
        reverse = reverse_edge_ids(g)
        for structure in ("push", "resample"):
            kinds = {
                "nodes": nodes_of(g, structure=structure, shuffle=True, depth=2, num_threads=2),
                "here": nodes_of(g, structure=structure, num_threads=0, depth_of_pipeline=3),
                "edges": edges_of(
                    g,
                    structure=structure,
                    shuffle=True,
                    exclude="reverse_id",
                    reverse_eids=reverse,
                    negative_sampler=negative.DegreeWeighted(2, corrupt="both"),
                    num_threads=2,
                ),
            }
            for kind, loader in kinds.items():
                found[f"{kind}/{structure}"] = moved(g, lambda it=loader: [epoch_of(it), epoch_of(it)])
        found["chosen"] = chosen(g)
        own = nodes_of(g, OwnCode(FANOUTS, prefetch_labels=["label"]))
        found["own code"] = [epoch_of(own)], Counter()
        found["refused"] = {
            "own code": refused(lambda: nodes_of(g, OwnCode(FANOUTS), structure="resample")),
            "function": refused(lambda: edges_of(g, structure="resample", exclude=lambda eids: eids[:0])),
            "seeds": refused(lambda: nodes_of(g, structure="resample", seed=session.topology.rank)),
            "depths": refused(lambda: nodes_of(g, depth=1 + session.topology.rank)),
        }
        g.barrier()
        return found


def chosen(g: DistGraph) -> dict[str, Any]:
    """What "auto" does where one of both costs next to nothing on the slowest rank."""
    found: dict[str, Any] = {}
    for cheap in ("push", "resample"):
        loader = nodes_of(g, structure="auto", shuffle=True)
        first, pushed = moved(g, lambda it=loader: epoch_of(it))
        costs = (1.0, 1e-9) if cheap == "push" else (1e-9, 1.0)
        loader._costs.extend([costs] * 1000)
        second, after = moved(g, lambda it=loader: epoch_of(it))
        found[cheap] = [first, second], (pushed, after), loader.decision
    return found


@pytest.fixture(scope="module")
def three(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(on_three, 3, args=(str(folder),), timeout_s=250)


WAYS = [f"{kind}/{way}" for kind in ("nodes", "here", "edges") for way in ("push", "resample")]


@pytest.mark.parametrize("kind", [*WAYS, "own code"])
def test_every_part_has_what_the_owner_has(three: list[dict[str, Any]], kind: str) -> None:
    for epochs in zip(*(found[kind][0] for found in three), strict=True):
        assert len(epochs[0]) > 3
        for step, parts in enumerate(zip(*epochs, strict=True)):
            for owner in range(3):
                of_owner = parts[owner][owner]
                assert of_owner["number"] >= step
                for part in range(3):
                    on_part = parts[part][owner]
                    for name in ("number", "nodes", "destinations", "edges", "idtype"):
                        assert on_part[name] == of_owner[name], (name, step, owner, part)
                    check_columns(on_part, part)


def check_columns(on_part: dict[str, Any], part: int) -> None:
    columns = deal_out_columns(WIDTH, 3)[part]
    rows = on_part["columns"]["feat"]
    assert rows.shape == (len(on_part["nodes"]), len(columns))
    # Features are ten times the original id, plus the column.
    firsts = rows[:, :1] - columns.first
    assert np.array_equal(rows, firsts + np.arange(columns.first, columns.last))


def test_epochs_of_an_empty_rank_and_of_others(three: list[dict[str, Any]]) -> None:
    first, second = three[0]["nodes/push"][0]
    assert [step[0]["nodes"] for step in first] != [step[0]["nodes"] for step in second]
    assert [step[0]["number"] for step in (*first, *second)] == list(range(len(first) + len(second)))
    # Rank 1 has no seeds: blocks of no destination, on all parts.
    assert {step[1]["destinations"] for step in first} == {0}


@pytest.mark.parametrize("kind", ["nodes", "here", "edges"])
def test_bytes(three: list[dict[str, Any]], kind: str) -> None:
    """int32 CSC to each of two peers; nothing when structure is drawn again."""
    for rank, found in enumerate(three):
        epochs, pushed = found[f"{kind}/push"]
        own = [step[rank] for epoch in epochs for step in epoch]
        values = sum(len(one["nodes"]) + len(one["edges"]) + one["destinations"] + 1 for one in own)
        assert pushed["structure"] == 2 * 4 * values
        drawn = found[f"{kind}/resample"][1]
        assert drawn["structure"] == drawn["features"] == pushed["features"] == 0
        assert drawn["columns"] == pushed["columns"] == drawn["seeds"] == 0


def test_the_cheaper_way_is_taken_after_the_first_epoch(three: list[dict[str, Any]]) -> None:
    for found in three:
        for cheap, (epochs, (before, after), choice) in found["chosen"].items():
            assert choice.mode == cheap
            assert choice.resample_s == (2.0 if cheap == "push" else 2e-9)
            assert choice.push_s == (1e-9 if cheap == "push" else 1.0)
            assert before["structure"] > 0
            assert (after["structure"] > 0) == (cheap == "push")
            for mine, pushed in zip(epochs, found["nodes/push"][0], strict=True):
                assert [[one["edges"] for one in step] for step in mine] == [
                    [one["edges"] for one in step] for step in pushed
                ]
    # 8 bytes per seed of the two others; ranks 0 and 2 have 6 and 4 tenths of the nodes, rank 1 none.
    seeds = [found["chosen"]["resample"][1][1]["seeds"] for found in three]
    assert seeds == [8 * 32, 8 * 80, 8 * 48]
    assert [found["chosen"]["push"][1][1]["seeds"] for found in three] == [0, 0, 0]


def test_what_nobody_can_draw_again_is_refused(three: list[dict[str, Any]]) -> None:
    for found in three:
        told = found["refused"]
        assert "own code" in told["own code"]
        assert "exclude=" in told["function"]
        assert "disagree on the sampler" in told["seeds"]
        assert "depth=1" in told["depths"]


def on_four(folder: str) -> dict[str, Any]:
    """Structure in parts, groups of two, batches that are left early, positions, drains."""
    with start_session(timeout_s=200) as session:
        g = DistGraph(folder, structure="partitioned")
        group = make_group(session, 2)
        found: dict[str, Any] = {"partitioned": refused(lambda: nodes_of(g, structure="resample"))}
        pushed = nodes_of(g, group=group, depth_of_pipeline=2, depth=2, num_threads=2)
        plain = DataLoader(g, share_of(g, NUM_NODES), sampler_of(), batch_size=8)
        pipeline = Pipeline()
        PIPELINES.set(session, [ref(pipeline), ref(Pipeline())])
        found["batches"] = compare(session, pushed, plain)
        found["drained"] = [pipeline.drained]
        found["left"] = leave_early(pushed)
        found["drained"].append(pipeline.drained)
        found["waiting"] = len(pushed._pushes.mailbox._arrived)
        found["share"] = session.step_share
        automatic = nodes_of(g, group=group, structure="auto")
        ways = [automatic.decision]
        for _ in range(2):
            epoch_of(automatic)
            ways.append(automatic.decision)
        found["choices"] = [(one.mode, one.reason, one.push_s) for one in ways]
        g.barrier()
        return found


def compare(session: Any, pushed: Any, plain: Any) -> dict[str, Any]:
    """Go through two loaders side by side."""
    result: dict[str, Any] = {"steps": len(pushed), "linked": [], "states": []}
    kept: list[Any] = []
    expected = []
    for batch in plain:
        expected.append((batch, session.step_share, plain.state_dict(), plain.epoch))
    for batch, (other, share, state, epoch) in zip(pushed, expected, strict=True):
        (nodes, seeds, blocks), (other_nodes, other_seeds, other_blocks) = batch, other
        assert torch.equal(nodes, other_nodes)
        assert torch.equal(seeds, other_seeds)
        assert torch.equal(blocks[-1].dstdata["label"], other_blocks[-1].dstdata["label"])
        assert torch.equal(blocks[0].edata[dgl.EID], other_blocks[0].edata[dgl.EID])
        assert session.step_share == share == blocks[-1].step_share
        assert pushed.state_dict() == state
        assert pushed.epoch == epoch
        group_batch = group_batch_of(batch)
        kept.append((group_batch, group_batch.following))
        result["group"] = len(group_batch.inputs)
    result["linked"] = all(a[1] is b[0] for a, b in pairwise(kept)) and kept[-1][1] is None
    result["forgotten"] = all(group_batch.following is None for group_batch, _ in kept)
    assert pushed.state_dict() == plain.state_dict()
    return result


def leave_early(loader: Any) -> dict[str, Any]:
    """Leave after two batches, go on in another place, begin anew."""
    loader.set_epoch(7)
    first = []
    for batch in loader:
        first.append(batch[0].tolist())
        if len(first) == 2:
            break
    state = loader.state_dict()
    loader.set_epoch(7)
    whole = [batch[0].tolist() for batch in loader]
    loader.load_state_dict(state)
    rest = [batch[0].tolist() for batch in loader]
    return {"first": first, "state": state, "whole": whole, "rest": rest}


def test_groups_positions_and_drains(folder: Path) -> None:
    for found in run_ranks(on_four, 4, args=(str(folder),), ranks_per_server=2, timeout_s=250):
        assert "structure='replicated'" in found["partitioned"]
        batches, left = found["batches"], found["left"]
        assert batches["steps"] > 3
        assert batches["group"] == 2
        assert batches["linked"]
        assert batches["forgotten"]
        # Once at the end of each epoch that came to its end; one was left early.
        assert found["drained"] == [1, 3]
        assert left["state"] == {"epoch": 7, "step": 2, "seed": 0}
        assert left["whole"][:2] == left["first"]
        assert left["rest"] == left["whole"][2:]
        assert found["waiting"] == 0
        assert found["share"] is None
        assert [choice[0] for choice in found["choices"]] == ["push"] * 3
        assert "structure='replicated'" in found["choices"][2][1] or found["choices"][2][1] == "costs less"
        assert found["choices"][2][2] > 0


@pytest.fixture
def graph(folder: Path) -> Any:
    with start_session():
        yield DistGraph(folder)


def test_one_rank_has_all_columns_and_sends_nothing(graph: DistGraph) -> None:
    loader = nodes_of(graph, structure="auto")
    for step in epoch_of(loader):
        (own,) = step
        assert own["columns"]["feat"].shape == (len(own["nodes"]), WIDTH)
    assert loader.decision.mode == "none"
    assert not graph.session.ledger.total(phase="structure")


def test_prefetched_matrices_come_as_columns_and_vectors_as_rows(graph: DistGraph) -> None:
    sampler = sampler_of(prefetch_node_feats=["small", "depth"])
    loader = nodes_of(graph, sampler, feature_dtype=torch.float64)
    for nodes, _, blocks in loader:
        assert set(group_batch_of([blocks]).inputs[0].columns) == {"feat", "small"}
        for name in ("feat", "small", "depth"):
            expected = graph.ndata[name][nodes].to(torch.float64)
            assert torch.equal(blocks[0].srcdata[name], expected), name
    assert sampler.prefetch_node_feats == ["small", "depth"]


def test_edge_prediction_samplers_bring_columns_too(graph: DistGraph) -> None:
    sampler = as_edge_prediction_sampler(sampler_of(), negative_sampler=negative.Uniform(1))
    group = make_group(graph.session, 1)
    options = PushPullOptions()
    loader = open_loader(
        DistEdgeDataLoader,
        graph,
        torch.arange(20),
        sampler,
        ColumnStore([], group, graph.session),
        group,
        options,
        {"batch_size": 5},
    )
    batches = list(loader)
    assert len(batches) == 4
    for nodes, positive, negatives, blocks in batches:
        assert positive.num_edges() == negatives.num_edges() == 5
        assert torch.equal(blocks[0].srcdata["feat"], graph.ndata["feat"][nodes])


@pytest.fixture(scope="module")
def faulty_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_ring(tmp_path_factory.mktemp("ring") / "parts", 2)


class Failing(NeighborSampler):
    """Fails at its third batch."""

    def __init__(self, how: str) -> None:
        super().__init__(FANOUTS)
        self.how, self.batches = how, 0

    def sample_blocks(self, g: Any, seed_nodes: Any, exclude_eids: Any = None) -> Any:
        self.batches += 1
        if self.batches == 3 and self.how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.batches == 3 and self.how == "raises":
            raise ValueError("no third batch")
        return super().sample_blocks(g, seed_nodes, exclude_eids)


def on_rank(faulty_folder: str, how: str) -> int:
    # Longer than the test may take: nobody is to wait for it.
    with start_session(timeout_s=600) as session:
        g = DistGraph(faulty_folder)
        last = session.topology.rank == 1
        loader = nodes_of(g, Failing(how if last else ""), num_threads=2)
        return len(list(loader))


@pytest.mark.parametrize("how", ["raises", "killed"])
def test_the_rank_is_named_long_before_the_time_is_out(faulty_folder: Path, how: str) -> None:
    waiting, failing = start_ranks(on_rank, 2, args=(str(faulty_folder), how))
    assert waiting.exitcode == 1
    assert "PeerError" in waiting.error
    assert "rank 1" in waiting.error
    if how == "raises":
        # Its own error, not that of a thread that was waiting for rank 0.
        assert failing.error.startswith("ValueError: no third batch")
    else:
        assert failing.exitcode == -signal.SIGKILL


# 0 <- 2, 1 <- 0, 1 <- 3; listed out of order, so that edge ids are not those of the columns.
SOURCES, DESTINATIONS, SOURCE_IDS = [3, 2, 0], [1, 0, 1], torch.tensor([70, 10, 40, 20])


def block_of(idtype: torch.dtype) -> OwnerBlock:
    ends = torch.tensor(SOURCES, dtype=idtype), torch.tensor(DESTINATIONS, dtype=idtype)
    return OwnerBlock(block=dgl.create_block(ends, num_src_nodes=4, num_dst_nodes=2), nodes=SOURCE_IDS)


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("wide", [False, True])
def test_round_trip(idtype: torch.dtype, wide: bool) -> None:
    arrays = [array.copy() for array in pack_block(block_of(idtype), wide=wide)]
    assert [array.dtype.name for array in arrays] == ["int64" if wide else "int32", "int32", "int32"]
    # 4 [(D1 + 1) + E1 + L0] bytes
    assert sum(array.nbytes for array in arrays) == 4 * (3 + 3 + (8 if wide else 4))
    found = unpack_block(arrays, EDGE_TYPE, idtype)
    arrays[2][:] = 1  # it shares nothing with what came
    assert found.nodes.tolist() == SOURCE_IDS.tolist()
    assert found.nodes.dtype == torch.int64
    assert found.block.idtype == idtype
    assert (found.block.num_src_nodes(), found.block.num_dst_nodes()) == (4, 2)
    indptr, indices, edge_ids = found.block.adj_tensors("csc")
    assert indptr.tolist() == [0, 1, 3]
    assert indices.tolist()[0] == 2
    assert sorted(indices.tolist()[1:]) == [0, 3]
    assert edge_ids.tolist() == [0, 1, 2]
    assert not dict(found.block.srcdata)
    assert not dict(found.block.edata)


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
def test_arrays_that_are_no_block_are_refused(
    nodes: list[Any], indptr: list[Any], indices: list[Any]
) -> None:
    arrays = [np.array(one, None if one else np.int32) for one in (nodes, indptr, indices)]
    with pytest.raises(ValueError, match="are no block"):
        _check_block(arrays)
    _check_block(pack_block(block_of(torch.int32), wide=False))
