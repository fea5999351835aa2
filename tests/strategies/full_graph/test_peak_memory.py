"""Peak memory of a process, for sizes that are large enough for stable results."""

import ctypes
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from dglx_dist.comm.session import start_session
from dglx_dist.data.partition.base import PartitionPlan
from dglx_dist.data.partition.prepare import partition_to_disk
from dglx_dist.data.synthetic import SyntheticConfig, generate
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.strategies.base import STRATEGIES
from dglx_dist.training.models import build_model
from tests.helpers.ranks import run_ranks
from tests.strategies import equality
from tests.strategies.full_graph import runs

_ARENA_MAX = -8
"""M_ARENA_MAX of <malloc.h>."""
LAYERS, FEATURES, HIDDEN = 3, 64, 128
BATCHES = 8


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A small graph, to have everything compiled and loaded, and one that fills 200 MB."""
    return [str(_nearby(tmp_path_factory.mktemp("peak"), nodes)) for nodes in (2000, 40000)]


def _nearby(folder: Path, nodes: int) -> Path:
    """Write a graph whose nodes read eight of their own community: neighbours need few other nodes."""
    near = {"homophily": 1.0, "locality": 1.0, "train_rate": 1.0, "val_rate": 0.0, "test_rate": 0.0}
    graph = generate(SyntheticConfig(nodes=nodes, degree=8, features=FEATURES, classes=10, **near))
    partition_to_disk(graph, folder / "parts", PartitionPlan(num_parts=2, method="metis"))
    return folder / "parts"


def _status() -> dict[str, int]:
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {
        words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[0].startswith(("Rss", "Vm"))
    }


def _my_share(g: DistGraph) -> torch.Tensor:
    ids = g.ndata["train_mask"][:].nonzero()[:, 0]
    return ids[g.session.topology.rank :: g.session.topology.world_size]


def _model(kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return build_model(kind, FEATURES, HIDDEN, 10, LAYERS, dropout=0.5, heads=2)


def _train(g: DistGraph, name: str, options: dict[str, Any], kind: str, epochs: int) -> Any:
    strategy: Any = STRATEGIES.get(name)(g.session, options).open(g)
    model = strategy.wrap(_model(kind))
    loader = strategy.loader(_my_share(g), runs.sampler(LAYERS))
    optimizer = torch.optim.Adam(model.parameters())
    equality.loop(model, loader, optimizer, epochs)
    return loader


def _steps_within(folder: str, strategy_name: str, options: dict[str, Any], limit: int) -> int:
    session = start_session(timeout_s=100)
    g = DistGraph(folder)
    before = resource.getrlimit(resource.RLIMIT_AS)
    if limit:
        resource.setrlimit(resource.RLIMIT_AS, (_status()["VmSize"] + limit, before[1]))
    try:
        steps = len(_train(g, strategy_name, options, "sage", 1))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    g.close()
    session.close()
    return steps


def train_within_limit(folders: list[str], strategy_name: str, options: dict[str, Any]) -> tuple[str, int]:
    # A heap for each thread reserves 64 MB of addresses that are never used.
    assert ctypes.CDLL(None).mallopt(_ARENA_MAX, 1) == 1
    # Everything that is loaded and compiled once.
    _steps_within(folders[0], strategy_name, options, 0)
    try:
        return "", _steps_within(folders[1], strategy_name, options, 160 * 2**20)
    except (RuntimeError, MemoryError) as error:
        return f"{type(error).__name__}: {error}", 0


@pytest.mark.wide
def test_what_full_graph_cannot_hold_trains_in_batches(folders: list[str]) -> None:
    """RLIMIT_AS holds both to 160 MiB more than they begin with; full_graph needs over 200."""
    ((failure, _),) = run_ranks(train_within_limit, 1, args=(folders, "full_graph", {}))
    assert "allocate memory" in failure or "MemoryError" in failure
    in_batches = {"batches": BATCHES, "composition": "ordered"}
    assert run_ranks(train_within_limit, 1, args=(folders, "cooperative", in_batches)) == [("", BATCHES)]
