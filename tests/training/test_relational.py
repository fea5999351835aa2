"""R-GCN is its formula, HGT is DGL's on the homogeneous graph; smaller blocks: test_inference.py."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dgl
import numpy as np
import pytest
import torch
from torch import Tensor

import dglx_dist as dx
from dglx_dist.comm.session import start_session
from dglx_dist.data.partition.base import PartitionPlan
from dglx_dist.data.partition.prepare import partition_to_disk
from dglx_dist.errors import ConfigError
from dglx_dist.records import NODE_TYPE
from dglx_dist.strategies.base import STRATEGIES
from dglx_dist.training.relational import HGT, RGCN, EntityInputs, RelationalModel
from tests.helpers.ranks import run_ranks
from tests.strategies import equality
from tests.training import hetero

HIDDEN = 8


def inputs(width_of_authors: int = HIDDEN) -> dict[str, Tensor]:
    graph = hetero.plain_graph()
    random = torch.Generator().manual_seed(1)
    authors = torch.randn(hetero.NUM_NODES["author"], width_of_authors, dtype=torch.float64, generator=random)
    return {"author": authors} | {ntype: graph.nodes[ntype].data["feat"] for ntype in hetero.WIDTHS}


def model_of(kind: str, **options: Any) -> RelationalModel:
    torch.manual_seed(3)
    graph = hetero.plain_graph()
    if kind == "hgt":
        return HGT(graph, hetero.WIDTHS, HIDDEN, 3, heads=2, **options).double()
    bases = 2 if kind == "rgcn_bases" else None
    return RGCN(graph, hetero.WIDTHS, HIDDEN, 3, num_bases=bases, **options).double()


def rgcn_by_formula(model: RGCN, x: dict[str, Tensor], *, residual: bool = False) -> dict[str, Tensor]:
    """With adjacency matrices and loops over relations."""
    graph = hetero.plain_graph()
    h = {nt: model.project[nt](rows) if nt in model.project else rows for nt, rows in x.items()}
    for depth in range(model.num_layers):
        out = {nt: model.own[depth][nt](rows) for nt, rows in h.items()}  # type: ignore[index]
        for number, etype in enumerate(model.etypes):
            source, _, destination = etype
            adjacency = torch.zeros(
                graph.num_nodes(destination), graph.num_nodes(source), dtype=torch.float64
            )
            u, v = graph.edges(etype=etype)
            adjacency.index_put_((v, u), torch.ones(len(u), dtype=torch.float64), accumulate=True)
            adjacency /= adjacency.sum(1, keepdim=True).clamp(min=1)
            if len(model.bases):
                basis: Any = model.bases[depth]
                weight = torch.einsum("b,bio->io", basis.w_comp[number], basis.weight)
            else:
                weight = model.weights[depth][number]
            out[destination] = out[destination] + adjacency @ h[source] @ weight
        if depth < model.num_layers - 1:
            out = {nt: rows + h[nt] if residual and depth else rows for nt, rows in out.items()}
            for nt, norm in model.norms[depth].items() if model.norms else ():  # type: ignore[operator]
                out[nt] = torch.nn.functional.layer_norm(out[nt], (HIDDEN,), norm.weight, norm.bias)
            out = {nt: torch.relu(rows) for nt, rows in out.items()}
        h = out
    return h


@pytest.mark.parametrize("kind", ["rgcn", "rgcn_bases"])
@pytest.mark.parametrize(
    "more", [{}, {"norm": "layer"}, {"residual": True}, {"norm": "layer", "residual": True}]
)
def test_rgcn_is_its_formula(kind: str, more: dict[str, Any]) -> None:
    model = model_of(kind, layers=3 if more else 2, **more)
    assert isinstance(model, RGCN)
    block = hetero.whole_block()
    with torch.no_grad():
        for norm in model.norms.parameters():
            norm.uniform_(-1, 1, generator=torch.Generator().manual_seed(4))
        result = model([block] * model.num_layers, inputs())
        expected = rgcn_by_formula(model, inputs(), residual="residual" in more)
    assert set(result) == set(hetero.NUM_NODES)
    for ntype, rows in expected.items():
        np.testing.assert_allclose(result[ntype], rows, rtol=0, atol=1e-12, err_msg=ntype)


def test_hgt_is_that_of_dgl_on_the_homogeneous_graph() -> None:
    model = model_of("hgt")
    assert isinstance(model, HGT)
    graph, block = hetero.plain_graph(), hetero.whole_block()
    merged = dgl.to_homogeneous(graph)
    with torch.no_grad():
        result = model([block, block], inputs())
        projected = {nt: model.project[nt](x) if nt in model.project else x for nt, x in inputs().items()}
        rows = torch.nn.functional.gelu(torch.cat([projected[ntype] for ntype in graph.ntypes]))
        for conv in model.convs:
            rows = conv(merged, rows, merged.ndata[dgl.NTYPE], merged.edata[dgl.ETYPE])
        expected = model.head(rows).split([graph.num_nodes(ntype) for ntype in graph.ntypes])
    for ntype, of_type in zip(graph.ntypes, expected, strict=True):
        np.testing.assert_allclose(result[ntype], of_type, rtol=0, atol=1e-12, err_msg=ntype)


@pytest.mark.parametrize("kind", ["rgcn", "rgcn_bases", "hgt"])
def test_no_destination_at_all_still_leads_back_to_the_weights(kind: str) -> None:
    sampler = dgl.dataloading.MultiLayerFullNeighborSampler(2)
    nobody = {"paper": torch.zeros(0, dtype=torch.int64)}
    input_nodes, _, blocks = sampler.sample_blocks(hetero.plain_graph(), nobody)
    x = {ntype: rows[input_nodes[ntype]] for ntype, rows in inputs().items()}
    (out,) = model_of(kind, out_types=["paper"])(blocks, x).values()
    assert out.shape == (0, 3)
    out.sum().backward()


def test_one_node_type_takes_and_gives_tensors() -> None:
    graph = dgl.heterograph({("_N", "a", "_N"): ([0, 1], [1, 2]), ("_N", "b", "_N"): ([2], [0])})
    torch.manual_seed(0)
    model = RGCN(graph, {}, 4, 2)
    block = dgl.to_block(graph, graph.nodes())
    x = torch.randn(3, 4)
    out = model([block, block], x)
    assert isinstance(out, Tensor)
    assert torch.equal(out, model([block, block], {"_N": x})["_N"])


def make_rgcn_of_one_type(graph: Any) -> RGCN:
    torch.manual_seed(11)
    return RGCN(graph, {NODE_TYPE: equality.WIDTH}, equality.HIDDEN, equality.CLASSES).double()


def train_on_halo_blocks(folder: str) -> dict[str, Any]:
    with start_session(timeout_s=60) as session:
        g, rank, ranks = dx.DistGraph(folder), session.topology.rank, session.topology.world_size
        ids = equality.new_ids_of_training(g)
        own_ids = equality.cut(ids, equality.SHARES["uneven"], rank, ranks)
        strategy = STRATEGIES.get("full_graph")(session, {}).open(g)
        model = strategy.wrap(make_rgcn_of_one_type(g))
        equality.train(model, equality._loader(strategy, g, own_ids, len(ids)), equality.STEPS)
        return hetero.weights_of(model.module)


def test_rgcn_of_one_type_reads_the_halo(tmp_path: Path) -> None:
    graph = equality.plain_graph()
    model = make_rgcn_of_one_type(graph)
    targets = graph.ndata["train_mask"].nonzero()[:, 0]
    nodes, _, blocks = dgl.dataloading.MultiLayerFullNeighborSampler(2).sample_blocks(graph, targets)
    blocks[0].srcdata["feat"] = graph.ndata["feat"][nodes]
    blocks[1].dstdata["label"] = graph.ndata["label"][targets]
    optimizer = torch.optim.SGD(model.parameters(), lr=equality.RATE)
    equality.loop(model, [(nodes, targets, blocks)], optimizer, equality.STEPS)
    for weights in run_ranks(train_on_halo_blocks, 2, args=(str(equality.write_parts(tmp_path)),)):
        for name, values in hetero.weights_of(model).items():
            np.testing.assert_allclose(weights[name], values, rtol=0, atol=1e-10, err_msg=name)


def test_the_order_in_which_types_are_listed_does_not_matter() -> None:
    graph = hetero.plain_graph()

    class Reversed:
        ntypes = graph.ntypes[::-1]
        canonical_etypes = graph.canonical_etypes[::-1]

    for kind in (RGCN, HGT):
        states = []
        for types in (graph, Reversed):
            torch.manual_seed(0)
            states.append(kind(types, hetero.WIDTHS, HIDDEN, 3).state_dict())
        first, second = states
        assert all(torch.equal(first[name], second[name]) for name in [*first, *second])


@pytest.mark.parametrize("kind", ["rgcn", "hgt"])
def test_types_may_be_called_as_no_module_may(kind: str) -> None:
    """RDF has such types: with dots, and with names that a ModuleDict already has."""
    edges = ([0, 1], [1, 0])
    graph = dgl.heterograph({("a.b", "http://r.x", "a.b"): edges, ("a.b", "keys", "type"): edges})
    options = {"heads": 2} if kind == "hgt" else {"num_bases": 2}
    for bases in (options, {}):
        model = (HGT if kind == "hgt" else RGCN)(graph, {"a.b": 3, "type": 5}, 4, 2, **bases)  # type: ignore[arg-type]
        out = model([dgl.to_block(graph)] * 2, {"a.b": torch.ones(2, 3), "type": torch.ones(2, 5)})
        assert {ntype: tuple(rows.shape) for ntype, rows in out.items()} == {"a.b": (2, 2), "type": (2, 2)}
        assert model.load_state_dict(model.state_dict()).missing_keys == []


def call_without(kind: str, ntype: str) -> Any:
    x = inputs()
    del x[ntype]
    return model_of(kind)([hetero.whole_block()] * 2, x)


TWINS = dgl.heterograph({("a", "to", "a"): ([0], [0]), ("a", "to", "b"): ([0], [0])})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda graph: RGCN(graph, {"papers": 3}, 4, 2), "no node type 'papers'"),
        (lambda graph: RGCN(graph, {}, 4, 2, out_types=["papers"]), "no node type 'papers'"),
        (lambda graph: RGCN(graph, {}, 4, 2, layers=0), "layers=0"),
        (lambda graph: HGT(graph, {}, 8, 2, heads=3), "heads=3 must divide hidden=8"),
        (lambda graph: RGCN(graph, {}, 8, 2, num_bases=0), "num_bases=0"),
        (lambda graph: RGCN(graph, {}, 8, 2, norm="batch"), "norm='batch' must be none or layer"),
        (lambda _: RGCN(TWINS, {}, 8, 2, num_bases=2), "2 types of 1 names"),
        (
            lambda _: model_of("rgcn")([hetero.whole_block()] * 2, inputs(7)),
            r"rows of 'author' have width 7 .*width 8",
        ),
        (lambda _: model_of("rgcn")([hetero.whole_block()], inputs()), "2 layers need 2 blocks, not 1"),
        (
            lambda _: call_without("rgcn", "venue"),
            r"not given the rows of node type 'venue'.*author, paper, venue",
        ),
        (
            lambda _: model_of("rgcn")(
                [hetero.whole_block()] * 2, inputs() | {"venue": torch.ones(4, 3).double()}
            ),
            "4 rows of node type 'venue' for 5 sources of its block. Pass the rows of the block's sources",
        ),
        (lambda _: call_without("hgt", "author"), "layer 0 was not given the rows of node type 'author'"),
    ],
)
def test_bad_arguments(call: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call(hetero.plain_graph())


def test_input_rows_are_the_same_whether_the_loader_attached_them_or_not(tmp_path: Path) -> None:
    raw = hetero.raw_graph()
    paper, venue = raw.node_data["paper"], raw.node_data["venue"]
    data = {
        "paper": {**paper, "feat": np.asarray(paper["feat"]).astype(np.float16), "flat": paper["label"]},
        "venue": {**venue, "flat": np.zeros(hetero.NUM_NODES["venue"])},
    }
    plan = PartitionPlan(num_parts=1, method="hash")
    partition_to_disk(replace(raw, node_data=data), tmp_path / "parts", plan)
    with dx.init(seed=0):
        g = dx.DistGraph(tmp_path / "parts")
        authors = dx.DistEmbedding(40, 4, part_policy=g.get_node_partition_policy("author"), graph=g)
        inputs, made = EntityInputs(g, embeddings={"author": authors}), []
        assert inputs.feature_widths == hetero.WIDTHS
        for prefetched in ({"paper": ["feat"], "venue": ["feat"]}, {}):
            sampler = dgl.dataloading.NeighborSampler([2], prefetch_node_feats=prefetched)
            ((_, _, blocks),) = dx.DataLoader(g, {"paper": torch.arange(9)}, sampler, batch_size=9)
            made.append(inputs(blocks[0]))
        attached, fetched = made
        for ntype, rows in attached.items():
            # float16 on disk, but few models compute in it.
            assert (
                rows.dtype == fetched[ntype].dtype == (torch.float64 if ntype == "venue" else torch.float32)
            )
            assert torch.equal(rows, fetched[ntype])
        wrong: Any = SimpleNamespace(weight=g.nodes["paper"].data["feat"])
        for arguments, message in (
            ({}, r"type 'author' have no tensor 'feat'. Add a DistEmb"),
            ({"embeddings": {"author": wrong}}, "has 60 rows for 40 nodes"),
            (
                {"feature": "flat", "embeddings": {"author": authors}},
                r"'flat' .* 'paper' must be \(N, F\), not \(60,\)",
            ),
        ):
            with pytest.raises(ConfigError, match=message):
                EntityInputs(g, **arguments)
