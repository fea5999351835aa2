"""Scripts of DistDGL, unedited under data_parallel, and with one line changed under other strategies."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.compat.graphs import SCRIPTS, play, read_report, run_under_torchrun
from tests.helpers.ranks import run_ranks

DDP, WRAP = "model = DistributedDataParallel(model)", "model = dglx_dist.wrap(model, g)"


def scripts_and_more(runs: list[list[str]], config: Path) -> Any:
    play(runs, ours=True)
    return uneven(config)


def uneven(config: Path) -> Any:
    """Five seeds on one rank, one on the other, without a wrapped model and with; a tensor that one keeps."""
    import dgl
    import torch

    import dglx_dist

    dist = dgl.distributed
    dist.initialize()
    g = dist.DistGraph("two", part_config=config)
    seeds = torch.arange(5) if g.rank() == 0 else torch.tensor([40])

    def steps() -> list[Any]:
        nodes = dist.DistNodeDataLoader(g, seeds, dgl.dataloading.NeighborSampler([2]), batch_size=2)
        plain = dist.DistDataLoader(seeds, 2)
        return [len(nodes), len(list(nodes)), len(plain), list(plain)]

    alone = steps()
    if g.rank() == 0:
        # Making a plain loader and iterating is one rank's affair.
        alone[2] += len(list(dist.DistDataLoader(seeds, 5))) - 1
    kept = [dist.DistTensor((60,), torch.int64, "kept")]
    if g.rank() == 1:
        kept.clear()
    dist.DistTensor((60,), torch.int64, "next")
    seen = ["kept" in g.ndata]
    # Rank 1 has deleted it, but attaches to it, as rank 0 has not; then both have, at other times.
    kept.append(dist.DistTensor((60,), torch.int64, "kept"))
    try:
        dist.DistTensor((60, 2), torch.int64, "kept")
    except dglx_dist.ConfigError as error:
        seen.append(str(error)[-16:])
    if g.rank() == 0:
        time.sleep(0.3)
    kept.clear()
    seen.append(dist.DistTensor((60, 2), torch.float32, "kept").shape)
    dist.DistTensor((60,), torch.int64, "last")
    seen.append("kept" in g.ndata)
    dglx_dist.wrap(torch.nn.Linear(2, 2), g)
    book = g.get_partition_book()
    places = [dist.get_num_client(), dist.get_num_machines(), dist.get_machine_id(), book.partid]
    return alone, steps(), seen, places, dgl.distributed.node_split(g.ndata["train_mask"]).tolist()


def commands(parts: Mapping[str, Path], folder: Path, scripts: Path) -> list[list[str]]:
    plain, wrapped = SCRIPTS, scripts / "node_classification.py"
    made = []
    for name, script, graph, strategy in (
        ("nodes", plain / "node_classification.py", "two", []),
        ("edges", plain / "link_prediction.py", "two", []),
        ("embeddings", plain / "embeddings.py", "two", []),
        ("rgcn", plain / "rgcn.py", "typed_two", []),
        ("dp", wrapped, "two", ["--strategy", "dp"]),
        ("push_pull", wrapped, "two", ["--strategy", "p3", "--option", "features=features"]),
        ("full_graph", wrapped, "two", ["--strategy", "full_graph"]),
    ):
        words = ["--graph_name", graph, "--part_config", str(parts[graph]), "--out", str(folder / name)]
        made.append([*strategy, "--", str(script), "--ip_config", "none", "--local_rank", "0", *words])
    return made


def losses(files: list[Path]) -> list[float]:
    ranks = [read_report(file)["losses"] for file in files]
    return [
        sum(loss * count for loss, count in step) / sum(count for _, count in step)
        for step in zip(*ranks, strict=True)
    ]


@pytest.fixture(scope="module")
def launch(stock_parts: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder, scripts = tmp_path_factory.mktemp("ranks"), tmp_path_factory.mktemp("scripts")
    text = (SCRIPTS / "node_classification.py").read_text()
    assert text.count(DDP) == 1
    (scripts / "node_classification.py").write_text("import dglx_dist\n" + text.replace(DDP, WRAP))
    runs = commands(stock_parts, folder, scripts)
    args = [runs, stock_parts["two"]]
    returned = run_ranks(scripts_and_more, 2, args=args, ranks_per_server=1, timeout_s=250)
    return folder, returned


@pytest.mark.parametrize(
    ("name", "like"),
    [
        ("embeddings", "embeddings"),
        ("rgcn", "rgcn"),
        *((name, "node_classification") for name in ("nodes", "dp", "push_pull", "full_graph")),
    ],
)
def test_two_ranks_train_as_stock_dgl_does_alone(launch: Any, stock: Path, name: str, like: str) -> None:
    result = losses([launch[0] / f"{name}-{rank}.json" for rank in range(2)])
    expected = losses([stock / f"{like}-0.json"])
    assert result == pytest.approx(expected, rel=2e-5)
    assert expected[-1] < expected[0]


@pytest.mark.parametrize("name", ["nodes", "dp", "push_pull", "full_graph"])
def test_inference_of_the_script_is_right_under_every_strategy(launch: Any, stock: Path, name: str) -> None:
    alone = read_report(stock / "node_classification-0.json")
    answers = [read_report(launch[0] / f"{name}-{rank}.json") for rank in range(2)]
    for count in ("tested", "right"):
        assert sum(answer[count] for answer in answers) == alone[count]


def test_no_batch_of_edges_sees_its_own_edges(launch: Any) -> None:
    answers = [read_report(launch[0] / f"edges-{rank}.json") for rank in range(2)]
    assert all(answer["overlaps"] == 0 and len(answer["losses"]) == 3 for answer in answers)


def test_ranks_without_seeds_tensors_that_one_rank_keeps_and_shares(launch: Any) -> None:
    """A rank without seeds stops unless a model is wrapped; servers are the machines and partitions."""
    alone, wrapped, seen, places, shares = zip(*launch[1], strict=True)
    assert alone == ([3, 3, 3, [[0, 1], [2, 3], [4]]], [1, 1, 1, [[40]]])
    assert wrapped == ([3, 3, 3, [[0, 1], [2, 3], [4]]], [3, 3, 3, [[40], [], []]])
    assert seen == 2 * ([True, "the ranks [0, 1]", (60, 2), False],)
    assert places == ([2, 2, 0, 0], [2, 2, 1, 1])
    assert [len(share) for share in shares] == [18, 18]
    assert not set(shares[0]) & set(shares[1])


@pytest.mark.wide
def test_under_torchrun_one_process_says_once_what_it_does_not_use(
    stock_parts: Mapping[str, Path], stock: Path, tmp_path: Path
) -> None:
    words = [
        "--graph_name",
        "one",
        "--part_config",
        str(stock_parts["one"]),
        "--out",
        str(tmp_path / "alone"),
    ]
    noise = run_under_torchrun("node_classification.py", [*words, "--ip_config", "hosts.txt"])
    assert noise.count("UserWarning") == 1
    assert "'hosts.txt', DGL_ROLE='client', DGL_DIST_MODE='distributed', DGL_NUM_SERVER='1'" in noise
    files = tmp_path / "alone-0.json", stock / "node_classification-0.json"
    assert losses([files[0]]) == pytest.approx(losses([files[1]]), rel=1e-4)
    answer, expected = map(read_report, files)
    assert answer["first"] == pytest.approx(expected["first"], rel=1e-3, abs=1e-4)
