"""Training with a cache of remote rows: the same to the last bit, and as many hits as predicted."""

from pathlib import Path
from typing import Any

import dgl
import pytest

from dglx_dist.cli.train_job import train_dataset
from dglx_dist.comm.session import start_session
from dglx_dist.data.partition.base import PARTITIONERS, PartitionOptions
from dglx_dist.data.storage.writer import write_dataset
from dglx_dist.data.synthetic import SyntheticConfig, generate
from dglx_dist.dataloading.loader import DataLoader
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.graph.split import node_split
from dglx_dist.training.config import TrainConfig
from tests.helpers import wide
from tests.helpers.ranks import run_ranks

FANOUTS, BATCH, EPOCHS = [4, 3], 20, 10


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cached") / "graph"
    graph = generate(SyntheticConfig(nodes=3000, degree=10, features=8, classes=4, seed=1))
    # At random, so that half of all input rows are remote.
    assignment = PARTITIONERS.get("random")(PartitionOptions()).assign(graph, 2, 0)
    write_dataset(graph, assignment, folder)
    return folder


def train_with_caches(
    folder: Path, scratch: Path
) -> dict[str | None, tuple[list[float], list[int], float | None]]:
    results = {}
    options: dict[str, Any] = {"fanouts": (4, 3), "batch_size": 20, "epochs": 2, "hidden": 8}
    for cache in (None, "halo", "degree", "vip", "lookahead"):
        plan = TrainConfig(data=str(folder), out=str(scratch / str(cache)), cache=cache, **options)
        result = train_dataset(plan)
        losses, moved = zip(*((epoch.loss, epoch.bytes_outside) for epoch in result.epochs), strict=True)
        results[cache] = losses, moved, result.summary.get("cache_hit_rate")
    return results


def test_training_is_the_same_to_the_last_bit(dataset: Path, tmp_path: Path) -> None:
    for rank in run_ranks(train_with_caches, 2, args=(dataset, tmp_path), ranks_per_server=1):
        losses, moved, rates = zip(*rank.values(), strict=True)
        assert all(loss == losses[0] for loss in losses)
        assert all(max(cached) < plain for plain, *cached in zip(*moved, strict=True))
        # The others were filled before the first epoch.
        *static, ahead = (of_epochs[-1] for of_epochs in moved)
        assert ahead < min(static)
        assert rates[0] is None
        assert 0 < rates[1] < rates[3] < rates[4] < 1


def hit_rates(folder: Path) -> None:
    with start_session():
        g = DistGraph(folder, structure="replicated")
        key, nodes = g.ndata["feat"].kvstore_key, node_split(g.ndata["train_mask"])
        sampler = dgl.dataloading.NeighborSampler(FANOUTS, prefetch_node_feats=["feat"])
        loader = DataLoader(g, nodes, sampler, batch_size=BATCH, shuffle=True, num_threads=0)
        rates: list[Any] = []
        for alpha in (0.05, 0.2, 0.5):
            plan = g.cache_rows("feat", alpha=alpha, fanouts=FANOUTS, batch_size=BATCH)
            before = g.kvstore.cache_counts(key)
            for _ in range(EPOCHS):
                for _ in loader:
                    pass
            counts = g.kvstore.cache_counts(key) - before
            rates.append(counts.hits / (counts.hits + counts.misses))
            assert rates[-1] == pytest.approx(plan.expected_hit_rate, rel=0.05)
        assert rates[0] < rates[1] < rates[2]
        g.close()


@pytest.mark.parametrize(("ranks", "per_server"), [(2, 1), *wide((3, 2))])
def test_as_many_hits_as_the_probabilities_foretell(dataset: Path, ranks: int, per_server: int) -> None:
    run_ranks(hit_rates, ranks, args=(dataset,), ranks_per_server=per_server)
