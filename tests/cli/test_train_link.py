"""``dglx train --task link``: the same figures on any number of ranks, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow.parquet as pq
import pytest
from pyarrow.dataset import dataset

from dglx_dist.cli.train import check_before_launch
from dglx_dist.cli.train_job import train_dataset
from dglx_dist.data.storage.writer import write_dataset
from dglx_dist.errors import ConfigError
from dglx_dist.graph.partition_book import resolve_etype
from dglx_dist.records import EDGE_TYPE, Assignment, RawGraph
from dglx_dist.report.run_folder import read_epochs
from dglx_dist.training import link
from dglx_dist.training.config import LINK, TrainConfig, list_metrics
from tests.helpers import wide
from tests.helpers.ranks import run_each, run_ranks

USERS, ITEMS = 24, 12
BUYS = ("user", "buys", "item")
NO_ENCODER: dict[str, Any] = {"task": "link", "model": "none", "embeddings": 4, "target": ("buys",)}


def partition_randomly(folder: Path, raw: RawGraph) -> Path:
    part_of = {
        ntype: np.random.default_rng(0).integers(2, size=count).astype(np.int32)
        for ntype, count in raw.num_nodes.items()
    }
    write_dataset(raw, Assignment(num_parts=2, part_of=part_of, method="test", seed=0), folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A ring with features; the same without; users that buy items of their half, with reverse edges."""
    root, nodes = tmp_path_factory.mktemp("graphs"), np.arange(40)
    u, v = np.concatenate([nodes, nodes]), np.concatenate([nodes + 1, nodes + 2]) % 40
    both = (np.concatenate([u, v]), np.concatenate([v, u]))
    ring = RawGraph(name="ring", num_nodes={"_N": 40}, edges={EDGE_TYPE: both})
    feat = np.random.default_rng(0).normal(size=(40, 5)).astype(np.float32)
    buyer, item = (ends.reshape(-1) for ends in np.meshgrid(np.arange(USERS), np.arange(ITEMS)))
    bought = buyer % 2 == item % 2
    untested = {"train_mask": np.ones(bought.sum(), dtype=np.bool_)}
    unmarked = {"train_mask": np.zeros(bought.sum(), dtype=np.bool_)}
    shop = RawGraph(
        name="shop",
        num_nodes={"user": USERS, "item": ITEMS},
        edges={
            BUYS: (buyer[bought], item[bought]),
            ("item", "buys-rev", "user"): (item[bought], buyer[bought]),
        },
    )
    return {
        "ring": partition_randomly(root / "ring", replace(ring, node_data={"_N": {"feat": feat}})),
        "plain": partition_randomly(root / "plain", ring),
        "priced": partition_randomly(
            root / "priced", replace(ring, node_data={"_N": {"feat": feat, "price": nodes}})
        ),
        "unsplit": partition_randomly(
            root / "unsplit", replace(ring, node_data={"_N": {"feat": feat, "label": nodes}})
        ),
        "named": partition_randomly(
            root / "named",
            replace(
                ring,
                node_data={"_N": {"feat": feat, "label": nodes % 2, "train_mask": nodes > 9}},
                num_classes={"_N": 2},
                class_names={"_N": ["a", "b"]},
            ),
        ),
        "shop": partition_randomly(root / "shop", shop),
        "unmarked": partition_randomly(root / "unmarked", replace(shop, edge_data={BUYS: unmarked})),
        "untested": partition_randomly(root / "untested", replace(shop, edge_data={BUYS: untested})),
        "ids": partition_randomly(root / "ids", with_ids(shop)),
    }


def with_ids(shop: RawGraph) -> RawGraph:
    """Users with names, items with numbers, and two test edges: of three ranks, one has none."""
    user, item = shop.edges[BUYS]
    test, val = (user == item) & (user < 2), (user == item) & (user > 8)
    masks = {"train_mask": ~test & ~val, "val_mask": val, "test_mask": test}
    ids = {"user": np.array([f"user {index}" for index in range(USERS)]), "item": 1000 + np.arange(ITEMS)}
    return replace(shop, edge_data={BUYS: masks}, user_ids=ids)


def run(folder: str, out: str, options: dict[str, Any]) -> dict[str, Any]:
    plan = TrainConfig(data=folder, out=out, task="link", dropout=0.0, batch_size=1000, **options)
    return dict(train_dataset(plan).summary)


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "sage": ("ring", {"fanouts": (5, 5), "hidden": 8}),
    "push_pull": ("ring", {"fanouts": (5, 5), "hidden": 8, "strategy": "push_pull"}),
    "sgc": ("plain", {"model": "sgc", "fanouts": (5, 5), "hidden": 8, "embeddings": 6}),
    "rgcn": ("shop", {"model": "rgcn", "fanouts": (4, 4), "hidden": 8, "loss": "softmax"}),
}


AUTO_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "batches": ("ring", {"fanouts": (5, 5), "hidden": 8, "batch_size": 8}),
    "whole graphs": ("ring", {"hidden": 8, "strategy_options": {"unit": "full_graph"}}),
    "several types": ("shop", {"model": "rgcn", "fanouts": (4, 4), "hidden": 8, "loss": "softmax"}),
    "trainable rows": ("plain", {"model": "sgc", "fanouts": (5, 5), "hidden": 8, "embeddings": 6}),
    "no encoder": ("shop", {**NO_ENCODER}),
}


def train_with_auto_and_by_name(folder: str, out: str, options: dict[str, Any]) -> list[dict[str, Any]]:
    """Train with the strategy that ``auto`` chooses, and then with this strategy by its name."""
    common = {"data": folder, "task": "link", "dropout": 0.0, "epochs": 2, **options}
    chosen = dict(train_dataset(TrainConfig(out=f"{out}/auto", **{**common, "strategy": "auto"})).summary)
    plan = json.loads(Path(out, "auto", "config.json").read_text())
    by_name = {**common, "strategy": plan["strategy"], "strategy_options": plan["strategy_options"]}
    named = dict(train_dataset(TrainConfig(out=f"{out}/named", **by_name)).summary)
    return [chosen, named]


@pytest.mark.parametrize(
    "case", ["batches", "whole graphs", *wide("several types", "trainable rows", "no encoder")]
)
def test_auto_trains_links_as_its_choice_by_name(case: str, folders: dict[str, Path], tmp_path: Path) -> None:
    name, options = AUTO_CASES[case]
    args = str(folders[name]), str(tmp_path), options
    reports = run_ranks(train_with_auto_and_by_name, 2, args=args, ranks_per_server=1)
    for chosen, named in reports:
        assert {key: chosen[key] for key in METRICS} == {key: named[key] for key in METRICS}
        assert chosen["traffic"] == named["traffic"]
    folders_of_runs = (tmp_path / "auto", tmp_path / "named")
    losses, weights = zip(*((read_losses(path), read_weights(path)) for path in folders_of_runs), strict=True)
    assert losses[0] == losses[1]
    assert weights[0] == weights[1]
    plan = json.loads((tmp_path / "auto" / "plan.json").read_text())
    num_tried = sum(prediction["trial"] is not None for prediction in plan["predictions"])
    # Nodes of the other graphs have no features, and only data_parallel trains their rows.
    assert num_tried >= (2 if name == "ring" else 1)


def read_losses(folder: Path) -> list[float]:
    return [record.loss for record in read_epochs(folder)]


def read_weights(folder: Path) -> bytes:
    return (folder / "final.safetensors").read_bytes()


def test_rows_of_links_learn_in_few_epochs(
    folders: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Ten steps; at almost no rate there is no learning, and that is said."""
    options: dict[str, Any] = {"model": "none", "embeddings": 32, "target": ("buys",)}
    record = run(str(folders["shop"]), str(tmp_path / "a"), {**options, "epochs": 10, "lr": 0.01})
    assert record["test_mrr"] > 0.9
    caplog.clear()
    record = run(str(folders["shop"]), str(tmp_path / "b"), {**options, "epochs": 1, "lr": 1e-9})
    assert record["test_auc"] < 0.55
    (warning,) = (message for message in caplog.messages if "test auc" in message)
    how = "hardly" if record["test_auc"] > 0.5 else "not"
    assert f"is {how} better than 0.5, that of guesses. Train longer, or with another --lr or" in warning


METRICS = [f"{split}_{metric}" for split in ("val", "test") for metric in list_metrics(LINK, ())]


@pytest.mark.parametrize("case", ["rgcn", *wide("sage", "push_pull", "sgc")])
def test_metrics_of_encoders_equal_one_rank(case: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """Almost without learning: a rank leaves out the edges of its own batch only, so steps differ."""
    name, options = CASES[case]
    options = {**options, "epochs": 1, "lr": 1e-9}
    (alone,) = run_ranks(run, 1, args=(str(folders[name]), str(tmp_path / "one"), options))
    for rank in run_ranks(
        run, 2, args=(str(folders[name]), str(tmp_path / "two"), options), ranks_per_server=1
    ):
        assert [rank[key] for key in METRICS] == pytest.approx([alone[key] for key in METRICS], abs=1e-4)


BOTH_WAYS = ("buys", "buys-rev")


@pytest.mark.parametrize(
    ("strategy", "name", "options"),
    [
        ("full_graph", "shop", {"model": "rgcn", "loss": "bce"}),
        ("shared_preload", "shop", {"model": "hgt", "heads": 2, "target": BOTH_WAYS, "loss": "bce"}),
        ("cooperative", "shop", {"model": "rgcn", "target": BOTH_WAYS, "loss": "bce"}),
        *wide(
            ("full_graph", "ring", {}),
            ("shared_preload", "ring", {}),
            ("cooperative", "ring", {}),
            ("full_graph", "plain", {"embeddings": 6, "loss": "bce"}),
            ("full_graph", "ids", {"model": "rgcn", "loss": "bce"}),
        ),
    ],
)
def test_full_graph_strategies_learn_links_as_one_rank(
    strategy: str, name: str, options: dict[str, Any], folders: dict[str, Path], tmp_path: Path
) -> None:
    """A batch has all edges, and no rank leaves out edges, so steps are equal on any number of ranks."""
    options = {"strategy": strategy, "epochs": 6, "lr": 0.05, "hidden": 8, "negatives": 2, **options}
    (alone,) = run_ranks(run, 1, args=(str(folders[name]), str(tmp_path / "one"), options))
    args = str(folders[name]), str(tmp_path / "two"), options
    for rank in run_ranks(run, 2, args=args, ranks_per_server=1):
        assert [rank[key] for key in METRICS] == pytest.approx([alone[key] for key in METRICS], abs=1e-4)
    losses = [[record.loss for record in read_epochs(tmp_path / out)] for out in ("one", "two")]
    assert losses[1] == pytest.approx(losses[0], abs=1e-4)
    assert losses[0][-1] < losses[0][0] - 0.05


def test_logs_that_batches_keep_their_edges(
    folders: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(str(folders["ring"]), str(tmp_path / "out"), {"strategy": "full_graph", "epochs": 1, "hidden": 4})
    assert sum("along all training edges, even those of the batch" in text for text in caplog.messages) == 1


def refuse_rows_only(folder: str, out: str) -> str:
    with pytest.raises(ConfigError) as refusal:
        run(folder, out, {"model": "none", "embeddings": 4, "strategy": "full_graph"})
    return str(refusal.value)


def test_full_graph_strategies_refuse_a_model_without_encoder(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    (message,) = run_ranks(refuse_rows_only, 1, args=(str(folders["plain"]), str(tmp_path / "out")))
    assert "compute rows of all nodes in each step. Use --strategy data_parallel" in message


def test_training_of_rows_is_that_of_one_rank(folders: dict[str, Path], tmp_path: Path) -> None:
    options = {"model": "none", "embeddings": 8, "epochs": 60, "loss": "bpr", "lr": 0.1}
    (alone,) = run_ranks(run, 1, args=(str(folders["shop"]), str(tmp_path / "one"), options))
    assert alone["test_mrr"] > 0.9
    for rank in run_ranks(
        run, 2, args=(str(folders["shop"]), str(tmp_path / "two"), options), ranks_per_server=1
    ):
        assert [rank[key] for key in METRICS] == pytest.approx([alone[key] for key in METRICS], abs=1e-4)
    losses = [[record.loss for record in read_epochs(tmp_path / out)] for out in ("one", "two")]
    assert losses[1] == pytest.approx(losses[0], abs=1e-4)
    out = str(tmp_path / "again")
    run_ranks(run, 1, args=(str(folders["shop"]), out, {**options, "epochs": 20, "checkpoint_every": 20}))
    run_ranks(run, 1, args=(str(folders["shop"]), out, {**options, "resume": True}))
    assert [record.loss for record in read_epochs(Path(out))] == losses[0]
    stored = json.loads((tmp_path / "two" / "summary.json").read_text())
    assert stored["edge_split"] == "80 / 10 / 10, keyed by the ends"
    assert read_epochs(tmp_path / "two")[-1].metrics["val_mrr"] == stored["val_mrr"]


def predict(folders: dict[str, Path], tmp: Path, name: str, ranks: int, **options: Any) -> tuple[Any, Any]:
    """Return the written rows as columns, and the summary, whose metrics follow from them."""
    options = {"epochs": 2, "predictions": str(tmp / f"said-{ranks}"), "scores": True, **options}
    args = (str(folders[name]), str(tmp / f"run-{ranks}"), options)
    summary = run_ranks(run, ranks, args=args, ranks_per_server=ranks)[0]
    assert len(list((tmp / f"said-{ranks}").rglob("*.parquet"))) % ranks == 0
    rows = dataset(tmp / f"said-{ranks}").to_table().to_pydict()
    result = np.array([*rows["rank"], *rows.get("source_rank", [])])
    assert summary["test_mrr"] == pytest.approx((1 / result).mean(), abs=1e-12)
    for k in (1, 3, 10):
        assert summary[f"test_hits@{k}"] == pytest.approx((result <= k).mean(), abs=1e-12)
    for at, scores in enumerate(rows["best_scores"]):
        assert scores == sorted(scores, reverse=True)
        above = sum(score > rows["score"][at] for score in scores)
        better = rows["rank"][at] - 1  # the source may be among them, and is no proposal
        assert min(better - ("source_rank" in rows), 10) <= above <= min(better, 10)
    return rows, summary


@pytest.mark.wide
@pytest.mark.parametrize(
    "encoder", [{"model": "none", "embeddings": 8}, *wide({"model": "rgcn", "hidden": 8})]
)
def test_predictions_have_the_users_ids_and_give_the_metrics(
    encoder: dict[str, Any], folders: dict[str, Path], tmp_path: Path
) -> None:
    """The six items of the other half are no known edges of a user."""
    options = {"target": ("buys",), "loss": "bpr", **encoder}
    alone = None
    for ranks in (1, 2, 3):
        rows, _ = predict(folders, tmp_path, "ids", ranks, **options)
        assert [*rows] == ["source", "relation", "destination", "score", "rank", "best", "best_scores"]
        order = np.argsort(rows["source"])
        rows = {column: [values[at] for at in order] for column, values in rows.items()}
        assert rows["source"] == ["user 0", "user 1"]
        assert rows["relation"] == ["buys", "buys"]
        assert rows["destination"] == [1000, 1001]
        assert [set(best) for best in rows["best"]] == [
            {1001 + 2 * item for item in range(6)},
            {1000 + 2 * item for item in range(6)},
        ]
        alone = alone or rows
        if encoder["model"] == "none":
            assert rows["score"] == pytest.approx(alone["score"], abs=1e-4)
            assert rows["rank"] == alone["rank"]
    index = json.loads((tmp_path / "said-3" / "_index.json").read_text())
    assert sorted(record["num_rows"] for record in index["files"])[0] == 0


@pytest.mark.parametrize("name", ["ring", "plain"])
def test_predictions_of_one_type_have_both_ranks(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """Ten of the nodes that are not next to the source."""
    encoder: dict[str, Any] = {"ring": {"fanouts": (5, 5), "hidden": 8}}.get(
        name, {"model": "none", "embeddings": 8}
    )
    rows, _ = predict(folders, tmp_path, name, 2, **encoder)
    assert len(rows["source_rank"]) == len(rows["rank"]) > 0
    for source, best in zip(rows["source"], rows["best"], strict=True):
        assert len(set(best)) == 10
        assert not {(item - source) % 40 for item in best} & {0, 1, 2, 38, 39}


def test_targets_between_other_types_have_own_folders(folders: dict[str, Path], tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "model": "none",
        "embeddings": 4,
        "epochs": 1,
        "predictions": str(tmp_path / "said"),
    }
    run(str(folders["shop"]), str(tmp_path / "run"), {**options, "target": ("buys", "item:buys-rev:user")})
    results = {name: dataset(tmp_path / "said" / name).to_table() for name in ("user.item", "item.user")}
    assert set(results["user.item"]["relation"].to_pylist()) == {"buys"}
    assert set(results["item.user"]["relation"].to_pylist()) == {"buys-rev"}
    assert "best_scores" not in results["item.user"].column_names


def test_a_run_evaluates_and_makes_rows_for_files_once(folders: dict[str, Path], tmp_path: Path) -> None:
    outputs = {"predictions": str(tmp_path / "said"), "save_embeddings": str(tmp_path / "rows")}
    options = {"target": ("buys",), "model": "rgcn", "hidden": 8, "epochs": 1, **outputs}
    with (
        patch.object(link, "layerwise_inference", wraps=link.layerwise_inference) as rows,
        patch.object(link, "KnownEdges", wraps=link.KnownEdges) as known,
    ):
        run(str(folders["ids"]), str(tmp_path / "run"), options)
    # Rows for the epoch, and for both folders.
    assert (rows.call_count, known.call_count) == (2, 1)


def read_refusal(folder: str, out: str, options: dict[str, Any]) -> str:
    try:
        train_dataset(TrainConfig(data=folder, out=out, **options))
    except ConfigError as error:
        return str(error)
    return ""


UNUSABLE: list[tuple[str, dict[str, Any], str]] = [
    ("plain", {}, "or predict edges: dglx train "),
    ("plain", {}, "plain --task link --model none --embeddings 64"),
    ("shop", {}, "shop --task link --model none --embeddings 64 --target user:buys:item"),
    ("plain", {"task": "link"}, "Add trainable rows with --embeddings 64"),
    ("ring", {}, "has no node data 'label' (known: 'feat'). Partition a graph that has it"),
    (
        "priced",
        {},
        "Rename one of price to 'label' in nodes.csv or the .npz, and partition again, or predict",
    ),
    ("unsplit", {}, "Add a column 'split' (train, val, test) to nodes.csv, or train_mask, val_mask and"),
    ("named", {"task": "regression"}, "are classes with names, which do not fit --task regression"),
    ("ring", {"task": "link", "model": "gcn"}, "Use --model sage, sgc or gat"),
    ("shop", {"task": "link"}, "or --model none --embeddings 64, which scores trainable rows"),
    ("shop", {"task": "link", "model": "rgcn", "target": ("likes",)}, "likes"),
    ("unmarked", NO_ENCODER, "no edge of buys in"),
    ("untested", {**NO_ENCODER, "predictions": "p"}, "--predictions p ranks test edges, but"),
    ("priced", {"task": "regression"}, "or the .npz, and partition again"),
]


def test_a_graph_that_a_task_cannot_use_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    cases = [(str(folders[name]), str(tmp_path), options) for name, options, _ in UNUSABLE]
    messages = [message for (message,) in run_each(read_refusal, cases, 1)]
    for message, (*_, words) in zip(messages, UNUSABLE, strict=True):
        assert words.replace("'", "") in message.replace("'", "")
    # Links are proposed to those alone who gave no task.
    assert messages[-1].endswith(UNUSABLE[-1][2])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"target": ("buys",)}, "--target .* must be left out without --task link"),
        ({"decoder": "dot"}, "--decoder dot must be left out without --task link"),
        ({"model": "none"}, "--model none must be another model without --task link"),
        ({"task": "link", "model": "none"}, "--model none must be combined with --embeddings"),
        (
            {"task": "link", "decoder": "best"},
            "--decoder best must be dot, distmult, transe, complex or rotate",
        ),
        ({"predictions": "a", "save_embeddings": "a/b"}, "--save-embeddings .* must be another folder"),
        ({"task": "link", "loss": "mse"}, "--loss mse must be bce, bpr or softmax"),
        ({"task": "link", "negatives": 0}, "--negatives 0 must be at least 1"),
        ({"task": "link", "metric": ("accuracy",)}, "metric accuracy is not one of link.*Choose some of mrr"),
        ({"task": "link", "scores": True}, "--scores must be combined with --predictions DIR"),
        ({"task": "link", "metric": ("roc_auc", "f1_micro")}, "metric f1_micro is not one of link"),
        ({"metric": ("acuracy",)}, "--metric acuracy must be some of .*did you mean 'accuracy'"),
        (
            {"task": "link", "decoder": "complex", "hidden": 101},
            "--hidden 101 must be even with --decoder complex",
        ),
        ({**NO_ENCODER, "decoder": "rotate", "embeddings": 7}, "--embeddings 7 must be even with --decoder"),
        ({"metric": ("f1",)}, "--metric f1 must be some of .*did you mean 'f1_micro'"),
        ({"model": "GCN"}, "there is no model 'GCN'; did you mean 'gcn'"),
        ({"patience": 5, "eval_every": 0}, "--early-stop 5 counts evaluations, but --eval-every is 0"),
        ({"seeds": (0, 0)}, "--seeds 0,0 must be different"),
        (
            {"task": "link", "strategy": "auto", "time": "t", "split_time": (1.0, 2.0)},
            "--time t must be combined with --strategy data_parallel",
        ),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        TrainConfig(data="data", out="run", **options)


def test_relations_of_a_decoder_are_written_beside_the_rows(folders: dict[str, Path], tmp_path: Path) -> None:
    options = {"model": "none", "embeddings": 6, "target": ("buys",), "decoder": "rotate", "epochs": 1}
    rows = tmp_path / "rows"
    run(str(folders["shop"]), str(tmp_path / "run"), {**options, "save_embeddings": str(rows)})
    record = pq.read_table(rows / "_relations.parquet").to_pydict()
    assert record["etype"] == ["user:buys:item", "item:buys-rev:user"]
    assert np.shape(record["angles"]) == (2, 3)
    assert np.abs(record["angles"]).max() > 0.1
    item = dataset(rows / "item").to_table().to_pydict()
    # Those that are scored: RotatE's start within 2 (12 + 2) / 6.
    assert 1.5 < np.abs(item["embedding"]).max() < 2 * 14 / 6 + 0.1


def test_a_target_is_known_before_ranks_start(folders: dict[str, Path]) -> None:
    options: dict[str, Any] = {**NO_ENCODER, "data": str(folders["shop"]), "ranks": 2}
    check_before_launch(TrainConfig(**options))
    check_before_launch(TrainConfig(**{**options, "target": ("user:buys:item", "buys-rev")}))
    for name in ("likes", "item:buys:user"):
        with pytest.raises(
            ConfigError, match=r"no edge type .*Use one of user:buys:item, item:buys-rev:user"
        ):
            check_before_launch(TrainConfig(**{**options, "target": (name,)}))


def test_a_relation_may_have_colons() -> None:
    known = [("_N", "a:b", "_N"), ("_N", "a", "_N"), ("_N", "http://x/p", "_N")]
    for text, result in (("a:b", 0), ("_N:a:b:_N", 0), ("a", 1), ("_N:http://x/p:_N", 2), ("http://x/p", 2)):
        assert resolve_etype(text, known) == known[result]


def test_strategies_without_batches_of_edges_are_refused_before_ranks_start() -> None:
    plan = TrainConfig(data="nowhere", ranks=2, task="link", strategy="lambda")
    with pytest.raises(
        ConfigError, match=r"has none\. Use --strategy cooperative or data_parallel or full_g"
    ):
        check_before_launch(plan)
    with pytest.raises(ConfigError, match="--embeddings are rows on the servers"):
        check_before_launch(TrainConfig(data="nowhere", ranks=2, embeddings=8, strategy="push_pull"))
