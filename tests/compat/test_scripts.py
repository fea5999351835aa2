"""Scripts of DistDGL, unedited under data_parallel, and with one line changed under other strategies."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.compat.graphs import SCRIPTS, run_script, told
from tests.helpers.ranks import run_ranks

DDP, WRAP = "model = DistributedDataParallel(model)", "model = dglx_dist.wrap(model, g)"


def play(runs: list[tuple[str, list[str]]]) -> None:
    """Run several scripts one after the other in this rank."""
    import dgl
    import torch

    from dglx_dist.run.__main__ import main

    for name, words in runs:
        main(words)
        dgl.distributed.exit_client()
        # The group of the first script serves the others: a second one would meet the keys of the first.
        torch.distributed.init_process_group = lambda *_, **__: None
        assert name


def commands(parts: Mapping[str, Path], folder: Path, scripts: Path) -> list[tuple[str, list[str]]]:
    """Name and command line of each run on two ranks."""
    made = []
    for name, script, graph, strategy in (
        ("nodes", SCRIPTS / "node_classification.py", "two", []),
        ("edges", SCRIPTS / "link_prediction.py", "two", []),
        ("embeddings", SCRIPTS / "embeddings.py", "two", []),
        ("rgcn", SCRIPTS / "rgcn.py", "typed_two", []),
        ("dp", scripts / "node_classification.py", "two", ["--strategy", "dp"]),
        (
            "push_pull",
            scripts / "node_classification.py",
            "two",
            ["--strategy", "p3", "--option", "features=features"],
        ),
        ("full_graph", scripts / "node_classification.py", "two", ["--strategy", "full_graph"]),
    ):
        words = ["--graph_name", graph, "--part_config", str(parts[graph]), "--out", str(folder / name)]
        made.append(
            (name, [*strategy, "--", str(script), "--ip_config", "none", "--local_rank", "0", *words])
        )
    return made


def losses(files: list[Path]) -> list[float]:
    """The mean loss of each step over the targets of all ranks."""
    ranks = [told(file)["losses"] for file in files]
    return [
        sum(loss * count for loss, count in step) / sum(count for _, count in step)
        for step in zip(*ranks, strict=True)
    ]


@pytest.fixture(scope="module")
def stock(stock_parts: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """What stock DGL comes to in one process, and we in one."""
    folder, found = tmp_path_factory.mktemp("alone"), {}
    for name, script, graph in (
        ("nodes", "node_classification.py", "one"),
        ("embeddings", "embeddings.py", "one"),
        ("rgcn", "rgcn.py", "typed"),
    ):
        words = ["--graph_name", graph, "--part_config", str(stock_parts[graph])]
        run_script(script, [*words, "--out", str(folder / name)], ours=False)
        found[name] = told(folder / f"{name}-0.json")
    return found


@pytest.fixture(scope="module")
def two_ranks(stock_parts: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of what two ranks on two servers came to."""
    folder, scripts = tmp_path_factory.mktemp("ranks"), tmp_path_factory.mktemp("scripts")
    text = (SCRIPTS / "node_classification.py").read_text()
    assert text.count(DDP) == 1
    (scripts / "node_classification.py").write_text("import dglx_dist\n" + text.replace(DDP, WRAP))
    run_ranks(play, 2, args=[commands(stock_parts, folder, scripts)], ranks_per_server=1, timeout_s=200)
    return folder


@pytest.mark.parametrize(
    ("name", "like"),
    [
        ("nodes", "nodes"),
        ("embeddings", "embeddings"),
        ("rgcn", "rgcn"),
        *((strategy, "nodes") for strategy in ("dp", "push_pull", "full_graph")),
    ],
)
def test_two_ranks_train_as_stock_dgl_does_alone(
    two_ranks: Path, stock: Mapping[str, Any], name: str, like: str
) -> None:
    found = losses([two_ranks / f"{name}-{rank}.json" for rank in range(2)])
    expected = [loss for loss, _ in stock[like]["losses"]]
    assert found == pytest.approx(expected, rel=2e-3)
    assert expected[-1] < expected[0]


@pytest.mark.parametrize("name", ["nodes", "dp", "push_pull", "full_graph"])
def test_inference_of_the_script_is_right_under_every_strategy(
    two_ranks: Path, stock: Mapping[str, Any], name: str
) -> None:
    answers = [told(two_ranks / f"{name}-{rank}.json") for rank in range(2)]
    assert sum(one["tested"] for one in answers) == stock["nodes"]["tested"]
    assert sum(one["right"] for one in answers) == stock["nodes"]["right"]


def test_no_batch_of_edges_sees_its_own_edges(two_ranks: Path) -> None:
    answers = [told(two_ranks / f"edges-{rank}.json") for rank in range(2)]
    assert all(one["overlaps"] == 0 and len(one["losses"]) == 3 for one in answers)


def test_one_process_says_once_what_it_does_not_use(
    stock_parts: Mapping[str, Path], stock: Mapping[str, Any], tmp_path: Path
) -> None:
    words = [
        "--graph_name",
        "one",
        "--part_config",
        str(stock_parts["one"]),
        "--out",
        str(tmp_path / "alone"),
    ]
    noise = run_script("node_classification.py", [*words, "--ip_config", "hosts.txt"], ours=True)
    assert noise.count("UserWarning") == 1
    assert "ip_config='hosts.txt'" in noise
    answer = told(tmp_path / "alone-0.json")
    assert losses([tmp_path / "alone-0.json"]) == pytest.approx(
        [one for one, _ in stock["nodes"]["losses"]], rel=1e-4
    )
    assert answer["first"] == pytest.approx(stock["nodes"]["first"], rel=1e-3, abs=1e-4)
