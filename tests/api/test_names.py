"""Arguments that are names of columns: one name, several, or what is none of them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dgl
import pytest
import torch

import dglx_dist as dx
from tests.api.test_global_mean import plain_graph
from tests.training.test_exact_mean import Layers


@pytest.fixture
def g() -> Iterator[Any]:
    graph = plain_graph()
    graph.ndata["other_mask"] = ~graph.ndata["train_mask"]
    with dx.init(strategy="data_parallel", seed=0):
        yield dx.distribute(graph)


def test_evaluate_takes_one_name_and_a_list(g: Any) -> None:
    model = Layers()
    expected = dx.evaluate(model, g, ["train_mask"])
    assert dx.evaluate(model, g, "train_mask") == expected
    result = dx.evaluate(model, g, "other_mask", metrics="f1_macro")
    assert result.keys() == {"other_mask", "other_f1_macro"}
    assert result == dx.evaluate(model, g, ("other_mask",), metrics=["f1_macro"])


@pytest.mark.parametrize(
    ("masks", "options", "message"),
    [
        (torch.ones(40, dtype=torch.bool), {}, r"masks is a tensor. Pass names"),
        ("label", {}, r"'label' is torch.int64 of shape .*a mask has a bool per node"),
        (["feat"], {}, r"'feat' is torch.float64 of shape \(40, 5\), but a mask has a bool per node"),
        ("val", {}, r"the nodes have no tensor 'val'"),
        (None, {"label": ["label"]}, r"the nodes have no tensor \['label'\]"),
        (None, {"feature": ["feat"]}, r"have no tensor \['feat'\]"),
        (None, {"metrics": "f1"}, r"metric f1 is not one of classification"),
        (None, {"edge_feats": "w"}, r"edge_feats is the string 'w'. Pass a list"),
    ],
)
def test_evaluate_refuses_what_is_no_name(g: Any, masks: Any, options: Any, message: str) -> None:
    with pytest.raises(dx.ConfigError, match=message):
        dx.evaluate(Layers(), g, masks, **options)


def test_evaluate_refuses_a_column_in_place_of_its_name(g: Any) -> None:
    with pytest.raises(dx.ConfigError, match=r"masks is a tensor. Pass names"):
        dx.evaluate(Layers(), g, g.ndata["train_mask"])


def test_inference_takes_one_node_type(g: Any) -> None:
    assert dx.layerwise_inference(Layers(), g, ntypes="_N").shape == (40, 3)


def test_fit_names_the_tuple_that_a_metric_belongs_in() -> None:
    with pytest.raises(
        dx.ConfigError, match=r"metric is the string 'f1_macro', not a tuple: \('f1_macro',\)"
    ):
        dx.FitConfig(metric="f1_macro")  # type: ignore[arg-type]


@pytest.mark.parametrize("option", ["prefetch_node_feats", "prefetch_labels", "prefetch_edge_feats"])
def test_loaders_name_the_list_that_a_column_belongs_in(g: Any, option: str) -> None:
    sampler = dgl.dataloading.NeighborSampler([2], **{option: "feat"})
    with pytest.raises(dx.ConfigError, match=rf"{option} is the string 'feat'. Pass a list: \['feat'\]"):
        dx.DataLoader(g, torch.arange(4), sampler)


def test_partitioning_takes_one_weight(tmp_path: Path) -> None:
    for balance in ("degree", ["degree"]):
        dx.partition_graph(plain_graph(), "graph", 2, tmp_path, balance=balance, overwrite=True)
    with pytest.raises(dx.ConfigError, match="cannot balance 'degrees'"):
        dx.partition_graph(plain_graph(), "graph", 2, tmp_path, balance="degrees", overwrite=True)


def test_local_graphs_take_one_column() -> None:
    with dx.init(strategy="full_graph", seed=0):
        local = dx.local_graph(dx.distribute(plain_graph()), columns="feat", targets=None)
        assert {"feat"} == set(local.ndata) - {dgl.NID}


def test_a_graph_and_what_belongs_to_it_refuse_to_be_pickled(g: Any, tmp_path: Path) -> None:
    sampler = dgl.dataloading.NeighborSampler([2])
    loader = dx.DataLoader(g, torch.arange(4), sampler)
    embedding = dx.DistEmbedding(g.num_nodes(), 4, name="rows")
    for value in (g, loader, g.ndata, g.ndata["feat"], embedding, g.session, {"graph": g}):
        with pytest.raises(dx.ConfigError, match=r"cannot be pickled or copied\. Save rows as g.ndata"):
            torch.save(value, tmp_path / "value.pt")
    torch.save({"position": loader.state_dict(), "rows": g.ndata["feat"][:3]}, tmp_path / "value.pt")
