"""Training when edges do not fit the memory: nothing that a rank allocates grows with their number."""

import ctypes
import gc
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dgl
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import dglx_dist as dx
from dglx_dist.cli.app import app
from dglx_dist.comm.session import start_session
from dglx_dist.data.storage.writer import write_dataset
from dglx_dist.graph import column, row_kernels, shared_memory
from dglx_dist.graph.dist_graph import DistGraph, StructureMode
from dglx_dist.graph.row_kernels import request_rows
from dglx_dist.records import EDGE_TYPE, NODE_TYPE, Assignment, RawGraph
from dglx_dist.strategies.push_pull import feature_columns
from dglx_dist.training import node_batches
from dglx_dist.training.fit_config import FitConfig
from dglx_dist.training.inference import layerwise_inference
from dglx_dist.training.models import build_model
from dglx_dist.training.node_batches import BatchLimits, ServerNodes
from tests.helpers import wide
from tests.helpers.ranks import run_ranks

NODES, DEGREE, MB = 20_000, 800, 2**20
_ARENA_MAX = -8
"""M_ARENA_MAX of glibc's mallopt."""


def regular(folder: Path, degree: int) -> str:
    """A graph of NODES x ``degree`` edges in 2 parts; node v has the sources 1, 2, ... after it."""
    sources = (np.arange(NODES, dtype=np.int32)[:, None] + np.arange(1, degree + 1, dtype=np.int32)) % NODES
    destinations = np.repeat(np.arange(NODES, dtype=np.int32), degree)
    rng, number = np.random.default_rng(0), np.arange(NODES)
    data = {f"{name}_mask": number % 10 == at for at, name in enumerate(("train", "val", "test"))}
    data |= {"feat": rng.random((NODES, 4), np.float32), "label": number % 3}
    write_dataset(
        RawGraph(
            name="regular",
            num_nodes={NODE_TYPE: NODES},
            edges={EDGE_TYPE: (sources.reshape(-1), destinations)},
            node_data={NODE_TYPE: data},
            num_classes={NODE_TYPE: 3},
        ),
        Assignment(num_parts=2, part_of={NODE_TYPE: (number % 2).astype(np.int32)}, method="hash", seed=0),
        folder,
    )
    return str(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("large")
    return [regular(folder / str(degree), degree) for degree in (10, DEGREE)]


def _fit(folder: str, structure: StructureMode) -> float:
    g = DistGraph(folder, structure=structure)
    model = build_model("sage", 4, 8, 3, 2)
    config = FitConfig(epochs=1, eval_every=1, eval_batch_size=40, show_progress=False)
    _, result = dx.fit(model, g, fanouts=[5, 5], batch_size=200, config=config)
    g.close()
    return result.epochs[0].loss


@contextmanager
def less_memory() -> Iterator[None]:
    """Limit this process to 24 MB beyond what it has now; the sources of one part take 32 MB."""
    gc.collect()
    lines = Path("/proc/self/status").read_text().splitlines()
    held = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData:"))
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (held + 24 * MB, limits[1]))
    yield
    # The limit bites.
    with pytest.raises(MemoryError):
        np.ones(NODES * DEGREE // 2, np.int32)
    resource.setrlimit(resource.RLIMIT_DATA, limits)


def measure_peak(folders: list[str], strategy: str, structure: StructureMode) -> float:
    # A heap for each thread reserves memory of its own.
    assert ctypes.CDLL(None).mallopt(_ARENA_MAX, 1) == 1
    with start_session(strategy=strategy, timeout_s=100):
        # Everything that is loaded and compiled once, and the stacks of threads.
        _fit(folders[0], structure)
        with less_memory():
            loss = _fit(folders[1], structure)
    return loss


@pytest.mark.wide
@pytest.mark.parametrize(
    ("strategy", "structure"),
    [("data_parallel", "partitioned"), *wide(("data_parallel", "replicated"), ("push_pull", "auto"))],
)
def test_no_rank_allocates_edges(folders: list[str], strategy: str, structure: StructureMode) -> None:
    """16 M edges: 64 MB of sources, 32 MB in a part; each rank has 24 MB beyond what 200,000 edges take."""
    servers = 1 if structure == "partitioned" else 2
    losses = run_ranks(measure_peak, 2, args=(folders, strategy, structure), ranks_per_server=servers)
    assert all(np.isfinite(losses))


def looked_at(folders: list[str]) -> str:
    del os.environ["RANK"]  # these commands are one process
    assert ctypes.CDLL(None).mallopt(_ARENA_MAX, 1) == 1
    commands = [
        ["inspect", "--verify", "full"],
        ["inspect", "--closure"],
        ["plan", "--servers", "2", "--unit", "any", "--layers", "1"],
    ]

    def run(folder: str) -> str:
        shown = [CliRunner().invoke(app, [*command, folder], catch_exceptions=False) for command in commands]
        return "".join(result.output for result in shown)

    run(folders[0])
    with less_memory():
        return run(folders[1])


@pytest.mark.wide
def test_inspect_and_plan_hold_no_edges(folders: list[str]) -> None:
    (shown,) = run_ranks(looked_at, 1, args=(folders,))
    assert f"{NODES * DEGREE}: no tensors" in shown
    assert "its plans are too large" in shown


def test_evaluation_takes_fewer_nodes_at_once_where_they_have_many_edges(
    folders: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_batches, "_MAX_DEGREE", 4)
    with start_session():
        g = DistGraph(folders[0])
        # 8 nodes have 80 in-edges, of which 32 are a batch: the 4th node has edges 30 to 39.
        nodes, limits = ServerNodes(g, NODE_TYPE), BatchLimits.from_batch_size(8)
        results = [ids.tolist() for ids in nodes.split((0, 8), limits)]
        assert results == [[0, 1, 2], [3, 4, 5], [6, 7]]
        assert [*nodes.split((5, 5), limits)] == []
        # A batch of exactly as many edges is not cut, and a node with more edges is a batch.
        assert [len(ids) for ids in nodes.split((0, 8), BatchLimits(nodes=8, edges=40))] == [4, 4]
        assert [len(ids) for ids in nodes.split((0, 3), BatchLimits(nodes=8, edges=9))] == [1, 1, 1]
        assert [len(ids) for ids in nodes.split((0, 8), BatchLimits(nodes=3, edges=999))] == [3, 3, 2]
        edges: list[int] = []

        def degree(block: Any, _: Any) -> Any:
            edges.append(block.num_edges())
            return block.in_degrees().float()

        computed = layerwise_inference(torch.nn.Identity(), g, batch_size=64, layers=[degree])
        assert computed[:].tolist() == [10.0] * NODES
        # 256 edges are allowed at a time, so a batch has 25 nodes.
        assert (sum(edges), max(edges)) == (10 * NODES, 250)


@pytest.mark.parametrize("strategy", ["full_graph", "shared_preload", "lambda"])
def test_strategies_that_hold_edges_say_so_before_they_read_any(
    folders: list[str], strategy: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with start_session(strategy=strategy):
        g = DistGraph(folders[0])
        nodes = torch.arange(10)
        sampler = dgl.dataloading.NeighborSampler(
            [-1, -1], prefetch_node_feats=["feat"], prefetch_labels=["label"]
        )
        for free, message in ((10**9, 0), (10**6, 1)):
            monkeypatch.setattr(shared_memory, "machine_memory", lambda free=free: (free, free))
            dx.DataLoader(g, nodes, sampler)
            warned = [
                record.getMessage() for record in caplog.records if "edges in memory" in record.getMessage()
            ]
            assert len(warned) == message
        assert f"strategy '{strategy}'" in warned[0]
        assert "for 200000 edges, but 0.001 GB are free" in warned[0]


@pytest.mark.parametrize("strategy", ["push_pull", *wide("data_parallel")])
def test_features_that_memory_cannot_hold_train_to_the_same_weights(
    folders: list[str], strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses, requested = [], []

    def note_request(source: Any, first: int, ids: Any) -> None:
        requested.append(len(ids))
        request_rows(source, first, ids)

    monkeypatch.setattr(column, "request_rows", note_request)
    monkeypatch.setattr(feature_columns, "request_rows", note_request)
    for free in (10**9, 10**5):
        monkeypatch.setattr(row_kernels, "machine_memory", lambda free=free: (free, free))
        with start_session(strategy=strategy):
            torch.manual_seed(0)
            losses.append(_fit(folders[0], "auto"))
        assert bool(requested) == (free == 10**5)
    assert losses[0] == losses[1]
