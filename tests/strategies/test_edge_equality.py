"""Edge tasks: ranks leave the weights of one plain DGL process that trains on the same pairs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dglx_dist.records import EDGE_TYPE
from tests.helpers import wide
from tests.helpers.ranks import run_ranks
from tests.strategies import edge_equality
from tests.strategies.edge_equality import EPOCHS, HALF, NEGATIVES, TASKS, Step, one_process, raw_graph
from tests.strategies.test_equality import difference

# (ranks, ranks per server, structure)
PLACEMENTS = [(1, 1, "replicated"), (2, 1, "partitioned"), *wide((2, 2, "replicated"), (3, 1, "replicated"))]
TOLERANCE = 1e-10


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return edge_equality.write_parts(tmp_path_factory.mktemp("bonds"))


def steps_of(results: list[Any], task: str) -> list[list[Step]]:
    return [result[task]["steps"] for result in results]


@pytest.mark.parametrize(("ranks", "ranks_per_server", "structure"), PLACEMENTS)
def test_ranks_are_one_process(folder: Path, ranks: int, ranks_per_server: int, structure: str) -> None:
    results = run_ranks(
        edge_equality.on_ranks, ranks, args=(str(folder), structure, list(TASKS)),
        ranks_per_server=ranks_per_server,
    )  # fmt: skip
    for task, exclude in TASKS.items():
        steps = steps_of(results, task)
        check_steps(steps, task)
        weights, losses = one_process(task, steps, exclude=exclude)
        for rank, result in enumerate(results):
            assert difference(result[task]["weights"], weights) <= TOLERANCE, task
            if ranks == 1:
                assert np.allclose(
                    result[task]["losses"], [loss[0] for loss in losses], atol=TOLERANCE, rtol=0
                )
            assert np.isnan(result[task]["losses"]).tolist() == [len(s.edges) == 0 for s in steps[rank]]
    check_wrong_rules(results)


def check_steps(steps: list[list[Step]], task: str) -> None:
    """Every training edge once an epoch over all ranks, with its own ends; negatives keep the source."""
    sources, destinations = raw_graph().edges[EDGE_TYPE]
    counts, drawn = np.zeros(2 * HALF, np.int64), set()
    for step in (step for of_rank in steps for step in of_rank):
        np.add.at(counts, step.edges, 1)
        assert (step.positive == [sources[step.edges], destinations[step.edges]]).all()
        if task.startswith("links"):
            assert (step.negative[0] == np.repeat(step.positive[0], NEGATIVES)).all()
            rows = step.negative[1].reshape(-1, NEGATIVES).tolist()
            drawn |= {(edge, *row) for edge, row in zip(step.edges.tolist(), rows, strict=True)}
    # Others in each epoch; on any number of ranks the same, as tests of the loader show.
    assert len(drawn) == (counts.sum() if task.startswith("links") else 0)
    assert counts.tolist() == [EPOCHS if edge % 12 == 0 else 0 for edge in range(2 * HALF)]
    assert all(len(of_rank) >= 10 for of_rank in steps)


def check_wrong_rules(results: list[Any]) -> None:
    """Without exclusion, and with a mean of means, other weights come out: the comparison can fail."""
    steps, right = steps_of(results, "links reverse_id"), results[0]["links reverse_id"]["weights"]
    rules: list[dict[str, Any]] = [{"exclude": None}, {"exclude": "self"}]
    if len(results) > 1:
        rules.append({"exclude": "reverse_id", "mean_of_means": True})
    for rule in rules:
        assert difference(one_process("links", steps, **rule)[0], right) > 1e-6, rule
