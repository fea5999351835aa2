"""Built-in models and decoders, on a graph worked out by hand."""

import re
from types import SimpleNamespace
from typing import Any

import dgl
import numpy as np
import pytest
import torch

import dglx_dist as dx
from dglx_dist.comm.session import start_session
from dglx_dist.errors import ConfigError, UnknownNameError
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.layers.base import StageInput
from dglx_dist.layers.dropout import deal_out_columns
from dglx_dist.training.config import TrainConfig
from dglx_dist.training.inference import layerwise_inference
from dglx_dist.training.link import Decoder, DistMult, DotProduct, edge_scores
from dglx_dist.training.models import ResGCN, SymmetricConv, build_model
from tests.layers.test_convolutions import part_of
from tests.strategies import equality

TWO_INTO_ONE = ([0, 1], [2, 2])
CYCLE = ([0, 1, 2], [1, 2, 0])


def blocks(count: int, edges: tuple[list[int], list[int]] = TWO_INTO_ONE) -> list[Any]:
    graph = dgl.graph((torch.tensor(edges[0]), torch.tensor(edges[1])), num_nodes=3)
    return [dgl.to_block(graph, torch.arange(3), include_dst_in_src=True) for _ in range(count)]


def test_sgc_is_linear_and_takes_means_only() -> None:
    """Node 2 hears of 0 and 1, which hear of nobody: after one hop it has the mean of their rows."""
    model = build_model("sgc", 2, 64, 2, 1, dropout=0.0)
    with torch.no_grad():
        model.layers[0].weight.copy_(torch.eye(2))
        model.layers[0].bias.zero_()
    h = torch.tensor([[-4.0, 1.0], [2.0, 3.0], [9.0, 9.0]])
    assert torch.equal(model(blocks(1), h)[2], torch.tensor([-1.0, 2.0]))
    deep = build_model("sgc", 2, 64, 2, 2, dropout=0.0)
    x, y = torch.randn(2, 3, 2)
    summed = deep(blocks(2, CYCLE), x) + deep(blocks(2, CYCLE), y) - deep(blocks(2, CYCLE), x * 0)
    assert torch.allclose(deep(blocks(2, CYCLE), x + y), summed, atol=1e-6)
    assert {name for name, _ in deep.named_parameters()} == {"layers.0.weight", "layers.0.bias"}


@pytest.mark.parametrize("width", [2, 7])
def test_symmetric_norm_splits_by_columns(width: int) -> None:
    """Alone it is GraphConv with those weights of edges; parts given them by the owner add up to it."""
    graph: Any = SimpleNamespace(
        in_degrees=lambda ids: torch.tensor([3, 0, 2])[ids],
        out_degrees=lambda ids: torch.tensor([4, 9, 1])[ids],
    )
    conv = SymmetricConv(width, 4, graph).double()
    assert list(conv.state_dict()) == ["conv.weight", "conv.bias"]
    torch.nn.init.uniform_(conv.conv.bias)
    block, h = blocks(1, ([0, 1, 0, 2], [2, 2, 0, 0]))[0], torch.randn(3, width).double()
    weight = torch.tensor([2 / 16, 2 / 36, 3 / 16, 3 / 4], dtype=torch.float64).sqrt()
    expected = conv.conv(block, h, edge_weight=weight)
    torch.testing.assert_close(conv(block, h), expected, rtol=1e-12, atol=1e-12)
    inputs = conv.own_edges(block)
    total = 0
    for columns in deal_out_columns(width, 3):
        part = part_of(conv, [columns])
        (share,) = part.sync(StageInput(block=block, x=h[:, columns.cut], edges=inputs))
        total = total + share
    torch.testing.assert_close(conv.apply_nodes(block, (total,)), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (("gatv3", 1, 1, 1), UnknownNameError, "known: sage, gcn, sgc, gat, mlp"),
        (("rgcn", 1, 1, 1), UnknownNameError, "known: sage, gcn, sgc, gat, mlp"),
        (("sag", 1, 1, 1), UnknownNameError, "no model 'sag'; did you mean 'sage'"),
        (("gat", 1, 8, 2, 2, 0.5, 3), ConfigError, "heads=3 must divide hidden=8"),
        (("sage", 1, 8, 2, 0), ConfigError, "layers=0"),
        (("resgcn", 1, 8, 2, 0), ConfigError, "layers=0"),
        (("resgnc", 1, 1, 1), UnknownNameError, "did you mean 'resgcn'"),
        (("sage", 1, 8, 2, 2, 1.0), ConfigError, r"dropout=1\.0"),
        (("gatv2", 1, 8, 2, 2, 0.5, 3), ConfigError, "heads=3 must divide hidden=8"),
        (("appnp", 1, 8, 2, 0), ConfigError, "layers=0"),
    ],
)
def test_refusals(arguments: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        build_model(*arguments)


def test_words_between_layers_are_refused() -> None:
    for inputs in {"norm": "batch"}, {"jk": "last"}:
        with pytest.raises(ConfigError, match=r"norm='.*' and jk='.*' must be none or layer"):
            build_model("sage", 3, 8, 2, **inputs)
    for kind in ("sgc", "appnp", "resgcn"):
        with pytest.raises(ConfigError, match="only sage, gcn"):
            build_model(kind, 3, 8, 2, residual=True)
    for wrong, message in (
        (
            {"norm": "batch"},
            "--norm batch must be none or layer; means of batch norm would depend on",
        ),
        ({"jk": "last"}, "--jk last must be none, cat or max"),
        ({"teleport": 1.5}, "--teleport 1.5 must be from 0 to 1"),
        ({"teleport": 0.3}, "--teleport 0.3 must be left out with --model sage: only appnp has it"),
        (
            {"model": "hgt", "residual": True},
            "--model hgt has no --norm and --residual and --jk",
        ),
        ({"model": "rgcn", "jk": "max"}, "--model rgcn has no --jk"),
        ({"model": "rgcn", "residual": True}, "--residual must be with --layers 3 or more"),
        ({"layers": 1, "residual": True}, "--residual must be with --layers 2 or more"),
        ({"model": "gatv2", "heads": 3}, "--heads 3 must be a divisor of --hidden 64"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            TrainConfig(data="d", **wrong)
    assert TrainConfig(data="d", model="appnp", teleport=0.3).teleport == 0.3
    assert TrainConfig(data="d", model="rgcn", layers=3, norm="layer", residual=True).residual


@pytest.mark.parametrize("kind", ["appnp", *equality.STACKS])
def test_layers_one_by_one_are_the_whole_model(dataset: str, kind: str) -> None:
    """Exact inference and a batch of two hops, against plain DGL on the whole graph."""
    graph, plain = equality.plain_graph(), equality.plain_model(kind)
    with start_session() as session, torch.no_grad():
        g = DistGraph(dataset, session=session)
        model = equality.model_of(kind, g)
        for left, right in zip(model.parameters(), plain.parameters(), strict=True):
            left.copy_(right)
        expected = plain([graph, graph], graph.ndata["feat"])
        result = equality.in_original_order(layerwise_inference(model, g, batch_size=37), g)
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-12)
        sampler = dgl.dataloading.NeighborSampler([-1, -1], prefetch_node_feats=["feat"])
        for _, seeds, made in dx.DataLoader(g, torch.arange(60), sampler, batch_size=20):
            rows = expected[g.orig_ids(seeds)]
            torch.testing.assert_close(model(made, made[0].srcdata["feat"]), rows, rtol=0, atol=1e-12)
        model.train()
        assert model([graph, graph], graph.ndata["feat"]).shape == expected.shape


def bytes_saved(recompute: str) -> int:
    """Count the bytes that 28 layers of ResGCN+ on 300 rows of 8 float64 keep for backward, less weights."""
    model, total = ResGCN(5, 8, 3, 28, recompute=recompute).double(), 0
    weights = {parameter.data_ptr() for parameter in model.parameters()}

    def count(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal total
        total += tensor.numel() * tensor.element_size() * (tensor.data_ptr() not in weights)
        return tensor

    many = dgl.batch([dgl.graph(CYCLE, num_nodes=3)] * 100)
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        model(many, torch.randn(300, 5).double())
    return total


def test_recomputing_keeps_the_inputs_of_layers_only() -> None:
    """One tensor of 19,200 bytes for each layer, where there were several."""
    assert bytes_saved("exchange") < bytes_saved("none") / 4
    with pytest.raises(ConfigError, match="recompute='all' must be one of none, exchange, keep"):
        ResGCN(5, 8, 3, 2, recompute="all")


RELATIONS, WIDTH = 3, 4


def decoder_of(kind: str) -> Decoder:
    torch.manual_seed(1)
    made = {"dot": DotProduct, "distmult": lambda: DistMult(RELATIONS, WIDTH)}[kind]()
    return made.double()


def test_scores_by_hand() -> None:
    subject, relation, objects = torch.tensor([[1.0, 2.0]]), torch.tensor([1]), torch.tensor([[3.0, 5.0]])
    assert DotProduct()(subject, relation, objects).tolist() == [13.0]
    distmult = DistMult(2, 2)
    with torch.no_grad():
        distmult.relations.copy_(torch.tensor([[9.0, 9.0], [2.0, -1.0]]))
    assert distmult(subject, relation, objects).tolist() == [1 * 2 * 3 - 2 * 5]


@pytest.mark.parametrize("kind", ["dot", "distmult"])
def test_all_candidates_are_scored_as_one_by_one(kind: str) -> None:
    decoder = decoder_of(kind)
    rows, candidates = torch.randn(5, WIDTH).double(), torch.randn(7, WIDTH).double()
    relation = torch.tensor([0, 2, 2, 1, 0])
    with torch.no_grad():
        objects = decoder.all_objects(rows, relation, candidates)
        for b in range(5):
            for c in range(7):
                item, second, number = rows[b : b + 1], candidates[c : c + 1], relation[b : b + 1]
                assert float(objects[b, c]) == pytest.approx(float(decoder(item, number, second)), abs=1e-12)


def test_pair_graphs_of_several_types() -> None:
    etypes = [("a", "no", "b"), ("a", "to", "b"), ("b", "in", "b")]
    pairs = dgl.heterograph(
        {etypes[0]: ([], []), etypes[1]: ([0, 2], [1, 0]), etypes[2]: ([1], [1])},
        num_nodes_dict={"a": 3, "b": 2},
    )
    h = {"a": torch.randn(3, WIDTH).double(), "b": torch.randn(2, WIDTH).double()}
    decoder, calls = decoder_of("distmult"), []
    decoder.register_forward_hook(lambda *_: calls.append(1))
    scores = edge_scores(decoder, pairs, h, etypes)
    assert len(calls) == 1  # all types in one product
    assert [len(scores[etype]) for etype in etypes] == [0, 2, 1]
    expected = (h["a"][[0, 2]] * decoder.relations[1] * h["b"][[1, 0]]).sum(1)
    np.testing.assert_allclose(scores[etypes[1]].detach(), expected.detach(), atol=1e-12)
    scores[etypes[0]].sum().backward()
