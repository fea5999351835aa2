"""Exact inference and evaluation of every node, equal to plain DGL on the whole graph."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import dgl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dglx_dist.comm.session import start_session
from dglx_dist.errors import ConfigError
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.graph.dist_tensor import DistTensor
from dglx_dist.records import SPLITS
from dglx_dist.training import tasks
from dglx_dist.training.inference import (
    evaluate,
    flatten,
    layerwise_inference,
    list_layers,
    minibatch_inference,
    nest,
    read_first_rows,
)
from dglx_dist.training.relational import HGT, RGCN
from tests.helpers import wide
from tests.helpers.ranks import run_ranks
from tests.strategies import equality
from tests.training import hetero

HIDDEN = 8


def author_rows() -> Tensor:
    return torch.randn(
        hetero.NUM_NODES["author"], HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )


class BothNorm(nn.Module):
    """DGL's own hetero convolution with degrees of the sources, two results, one a pair."""

    def __init__(self) -> None:
        super().__init__()
        widths = {"paper": hetero.WIDTHS["paper"], "venue": hetero.WIDTHS["venue"], "author": HIDDEN}
        self.conv = dgl.nn.HeteroGraphConv(
            {etype: dgl.nn.GraphConv(widths[etype[0]], 5, norm="both") for etype in hetero.ETYPES}
        )
        self.head = nn.Linear(5, hetero.CLASSES)

    def forward(self, blocks: list[Any], x: dict[str, Tensor]) -> Any:
        (block,) = blocks
        h = self.conv(block, x)
        return {"hidden": h, "scores": ({ntype: self.head(rows) for ntype, rows in h.items()}, h)}

    def inference_layers(self) -> list[Any]:
        return [lambda block, x: self([block], x)]


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(3)
    graph = hetero.plain_graph()
    if kind == "both":
        return BothNorm().double()
    if kind == "hgt":
        return HGT(graph, hetero.WIDTHS, HIDDEN, hetero.CLASSES, heads=2).double()
    return RGCN(graph, hetero.WIDTHS, HIDDEN, hetero.CLASSES, layers=3, num_bases=2).double()


def plain_scores(kind: str) -> Any:
    graph, block = hetero.plain_graph(), hetero.whole_block()
    x = {"author": author_rows()} | {ntype: graph.nodes[ntype].data["feat"] for ntype in hetero.WIDTHS}
    with torch.no_grad():
        return model_of(kind)([block] * {"rgcn": 3, "hgt": 2, "both": 1}[kind], x)


def _same(g: DistGraph, found: Mapping[str, DistTensor], expected: Any, ntypes: Iterable[str]) -> None:
    assert set(found) == set(ntypes)
    for ntype, rows in found.items():
        ordered = equality.in_original_order(rows, g, ntype)
        np.testing.assert_allclose(ordered, expected[ntype], rtol=0, atol=1e-12, err_msg=ntype)


def accuracy_of(scores: Tensor, data: Any, names: Iterable[str] = SPLITS) -> Any:
    correct = scores.argmax(1) == data["label"]
    accuracy = {name: float(correct[data[name]].double().mean()) for name in names}
    return pytest.approx(accuracy, abs=1e-15)


def of_several_types(folder: str) -> None:
    session = start_session(timeout_s=60)
    g = DistGraph(folder)
    policy = g.get_node_partition_policy("author")
    authors = g.new_tensor((40, HIDDEN), torch.float64, "rows", part_policy=policy)
    own = g.local_nodes("author")
    authors[own] = author_rows()[g.orig_ids(own, "author")]
    g.barrier()
    inputs = {"author": authors} | {ntype: g.nodes[ntype].data["feat"] for ntype in hetero.WIDTHS}
    plain = {kind: plain_scores(kind) for kind in ("rgcn", "hgt", "both")}
    tensors = len(g.kvstore.names())
    for kind in ("rgcn", "hgt"):
        rows = layerwise_inference(model_of(kind), g, inputs=inputs, batch_size=7)
        _same(g, rows, plain[kind], hetero.NUM_NODES)
        for tensor in rows.values():
            tensor.delete()
    rows = minibatch_inference(model_of("rgcn"), g, 3, inputs=inputs, batch_size=7)
    _same(g, rows, plain["rgcn"], hetero.NUM_NODES)
    rows = layerwise_inference(model_of("both"), g, inputs=inputs, batch_size=7, ntypes=["author", "paper"])
    assert set(rows) == {"hidden", "scores"}
    result = rows["hidden"], *rows["scores"]
    for item, expected in zip(result, (plain["both"]["hidden"], *plain["both"]["scores"]), strict=True):
        _same(g, item, expected, ("author", "paper"))
    labels = hetero.plain_graph().nodes["paper"].data
    assert evaluate(model_of("rgcn"), g, inputs=inputs) == accuracy_of(plain["rgcn"]["paper"], labels)
    kept = len(g.kvstore.names())
    assert kept == tensors + 3 + 6  # minibatch's three types, and three results of two types
    with pytest.raises(ConfigError, match=r"returns \['hidden'\]\['paper'\].*Choose the scores with output="):
        evaluate(model_of("both"), g, inputs=inputs, batch_size=7)
    accuracy = evaluate(model_of("both"), g, inputs=inputs, output=0, batch_size=7)
    assert accuracy == accuracy_of(plain["both"]["scores"][0]["paper"], labels)
    assert len(g.kvstore.names()) == kept
    with pytest.raises(ConfigError, match=r"'author' have no tensor 'feat'.*inputs="):
        evaluate(model_of("rgcn"), g)
    _wrong_layers(g, inputs)
    session.close()


def _wrong_layers(g: DistGraph, inputs: dict[str, DistTensor]) -> None:
    def refuse(layer: Any, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            layerwise_inference(nn.Linear(1, 1), g, inputs=inputs, layers=[layer], batch_size=7)

    def some(block: Any, h: dict[str, Tensor]) -> dict[str, Tensor]:
        ids = block.dstnodes["paper"].data[dgl.NID]
        return {} if 59 in ids else {"paper": torch.zeros(len(ids), 2)}

    def degrees_of_no_type(block: Any, h: dict[str, Tensor]) -> Any:
        with pytest.raises(dgl.DGLError, match="must be specified"):
            block.out_degrees()
        return {ntype: h[ntype][: block.num_dst_nodes(ntype)] for ntype in h}

    layerwise_inference(nn.Linear(1, 1), g, inputs=inputs, layers=[degrees_of_no_type], batch_size=99)
    refuse(some, "returned rows for some nodes of type 'paper' but not for|rank . on")
    refuse(lambda block, h: {"paper": torch.zeros(99, 2)}, r"\['paper'\] is \(99, 2\)|rank . on")
    refuse(lambda block, h: torch.zeros(7, 2), "a tensor belong to no node type")
    refuse(lambda block, h: {}, "no rows for any node")


@pytest.mark.parametrize(("ranks", "ranks_per_server"), [(3, 2), *wide((1, 1), (2, 1))])
def test_results_are_those_of_plain_dgl(tmp_path: Path, ranks: int, ranks_per_server: int) -> None:
    folder = str(hetero.write_parts(tmp_path))
    run_ranks(of_several_types, ranks, args=(folder,), ranks_per_server=ranks_per_server)


def test_layers_are_named_and_what_stands_between_them_is_told(folder: Path) -> None:
    convs = nn.ModuleList([dgl.nn.SAGEConv(equality.WIDTH, 5, "mean"), dgl.nn.SAGEConv(5, 3, "mean")])
    model = nn.Module()
    model.layers = convs.double()
    graph = equality.plain_graph()
    expected = convs[1](graph, convs[0](graph, graph.ndata["feat"]).relu()).detach()
    with start_session():
        g = DistGraph(folder)
        result = layerwise_inference(model, g, layers="layers", between=torch.relu, batch_size=90)
        np.testing.assert_allclose(equality.in_original_order(result, g), expected, rtol=0, atol=1e-12)


def test_one_type_and_a_pair_of_results(folder: Path) -> None:
    """A homogeneous model whose layers hand a pair on, and whose first input is not the features."""
    conv = dgl.nn.SAGEConv(equality.WIDTH, 3, "mean").double()

    def first(block: Any, h: Tensor) -> tuple[Tensor, Tensor]:
        return conv(block, h), h[: block.num_dst_nodes()]

    def second(block: Any, pair: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        return {"sum": pair[0].sum(1)[: block.num_dst_nodes()], "input": pair[1][: block.num_dst_nodes()]}

    with start_session():
        g = DistGraph(folder)
        out = layerwise_inference(conv, g, layers=[first, second], batch_size=90)
        graph = equality.plain_graph()
        expected = conv(graph, graph.ndata["feat"]).sum(1).detach()
        np.testing.assert_allclose(equality.in_original_order(out["sum"], g), expected, rtol=0, atol=1e-12)
        assert torch.equal(equality.in_original_order(out["input"], g), graph.ndata["feat"])
        second_one = layerwise_inference(
            conv, g, inputs=out["input"], layers=[lambda block, h: 2 * h[: block.num_dst_nodes()]]
        )
        assert torch.equal(equality.in_original_order(second_one, g), 2 * graph.ndata["feat"])
        with pytest.raises(ConfigError, match="unknown node type 'user'"):
            read_first_rows(g, "feat", {"user": second_one})


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ("layers", "layers='layers', but Module has no list of layers of that name"),
        ("training", "no list of layers of that name"),
        ("forward", "no list of layers of that name"),
        ("norms", "no layers to compute"),
        ([], "no layers to compute"),
        (None, r"Add a method inference_layers\(\)"),
    ],
)
def test_who_tells_no_layers_is_asked_for_them(layers: Any, message: str) -> None:
    model = nn.Module()
    model.norms = nn.ModuleList()
    with pytest.raises(ConfigError, match=message):
        list_layers(model, layers, None)


def test_what_cannot_be_nested_again_is_refused() -> None:
    with pytest.raises(ConfigError, match="the key 3"):
        flatten({3: 1})
    with pytest.raises(ConfigError, match=r"only the positions \[1\] of a tuple of outputs belong"):
        nest({(1, "author"): 1})


class OwnModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = dgl.nn.GraphConv(equality.WIDTH, 6, norm="both", allow_zero_in_degree=True)
        self.second = dgl.nn.GraphConv(6, equality.CLASSES, norm="left", allow_zero_in_degree=True)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, blocks: list[Any], h: Tensor) -> Tensor:
        return self.second(blocks[1], self._between(self.first(blocks[0], h)))

    def _between(self, h: Tensor) -> Tensor:
        return F.dropout(torch.relu(self.norm(h)), 0.5, self.training)

    def inference_layers(self) -> list[Any]:
        return [lambda block, h: self._between(self.first(block, h)), self.second]


class Untold(nn.Sequential):
    def forward(self, blocks: list[Any], h: Tensor) -> Tensor:
        return self[0](blocks, h)


def own_model() -> OwnModel:
    torch.manual_seed(2)
    return OwnModel().double()


def of_one_type(folder: str) -> None:
    session = start_session(timeout_s=60)
    g, graph = DistGraph(folder), equality.plain_graph()
    features = graph.ndata["feat"]

    def check(rows: DistTensor, plain: nn.Module) -> None:
        with torch.no_grad():
            expected = plain.eval()([graph, graph], features)
        np.testing.assert_allclose(equality.in_original_order(rows, g), expected, rtol=0, atol=1e-12)

    tensors = len(g.kvstore.names())
    for kind in equality.MODELS:
        scores = layerwise_inference(equality.model_of(kind, g), g, batch_size=37)
        torch.manual_seed(11)
        check(scores, equality.PlainModel(kind).double())
        scores.delete()
    model = own_model()
    model.norm.eval()
    check(layerwise_inference(model, g), own_model())
    assert model.training
    assert not model.norm.training
    check(minibatch_inference(Untold(own_model()), g, 2, batch_size=90), own_model())
    assert len(g.kvstore.names()) == tensors + 2  # the two that were not deleted, and no layer in between
    with torch.no_grad():
        scores, message = own_model().eval()([graph, graph], features), ["val_mask"]
    assert evaluate(own_model(), g) == accuracy_of(scores, graph.ndata)
    assert evaluate(Untold(own_model()), g, message, num_layers=2) == accuracy_of(
        scores, graph.ndata, message
    )
    with pytest.raises(ConfigError, match=r"inference_layers\(\).*num_layers="):
        evaluate(Untold(own_model()), g)
    with pytest.raises(ConfigError, match=r"no tensor 'tset_mask'.*known: 'feat', 'label', 'train_mask'"):
        evaluate(own_model(), g, ["tset_mask"])
    session.close()


@pytest.mark.parametrize(("ranks", "ranks_per_server"), [(1, 1), (3, 2), *wide((2, 1), (4, 4))])
def test_scores_and_accuracy(folder: Path, ranks: int, ranks_per_server: int) -> None:
    run_ranks(of_one_type, ranks, args=(str(folder),), ranks_per_server=ranks_per_server)


def test_scores_of_all_nodes_are_never_in_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, chosen = DistTensor.__getitem__, []

    def note_rows(tensor: DistTensor, rows: Any) -> Tensor:
        result: Tensor = read(tensor, rows)
        chosen.append(len(result))
        return result

    with start_session():
        g = DistGraph(str(folder))
        expected = evaluate(own_model(), g, batch_size=40)
        monkeypatch.setattr(tasks, "_ROWS_AT_ONCE", 50)
        monkeypatch.setattr(DistTensor, "__getitem__", note_rows)
        assert evaluate(own_model(), g, batch_size=40) == expected
    assert max(chosen) < g.num_nodes()
