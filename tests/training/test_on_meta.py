"""Steps, inference and timing of models on ``meta``: what reads a value or mixes devices fails there."""

from contextlib import nullcontext
from typing import Any

import dgl
import numpy as np
import pytest
import torch
from dgl.dataloading import NeighborSampler, as_edge_prediction_sampler
from torch import nn

import dglx_dist as dx
from dglx_dist.comm.session import start_session
from dglx_dist.dataloading.loader import open_neighborhood_maker
from dglx_dist.errors import ConfigError
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.internals.message_passing import TorchIndex, place
from dglx_dist.internals.pytorch import ids_on_host, ids_to_device
from dglx_dist.planner import measure
from dglx_dist.planner.choose import choose
from dglx_dist.planner.model_shape import infer_shape
from dglx_dist.planner.records import ChoiceOptions, Draws
from dglx_dist.records import NODE_TYPE
from dglx_dist.strategies.base import STRATEGIES
from dglx_dist.training import relational
from dglx_dist.training.inference import PassStages, make_pass, read_first_rows
from dglx_dist.training.loop import Accumulation, Step, _train_step
from dglx_dist.training.models import SymmetricConv, build_model
from dglx_dist.training.relational import HGT, RGCN
from dglx_dist.training.tasks import LinkPrediction, NodeClassification
from tests.planner.hand_made import CLUSTER
from tests.strategies import equality
from tests.training import hetero

META = torch.device("meta")
SIZES = (equality.WIDTH, equality.HIDDEN, equality.CLASSES, 2)


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = build_model("sage", *SIZES)

    def forward(self, blocks: list[Any], x: Any, pairs: Any, negatives: Any) -> Any:
        h = self.rows(blocks, x)
        return tuple((h[u] * h[v]).sum(1) for u, v in (pairs.edges(), negatives.edges()))


@pytest.mark.parametrize("of_edges", [False, True])
def test_a_step_reads_no_value(dataset: str, of_edges: bool) -> None:
    with start_session() as session:
        session.device = META
        g = DistGraph(dataset)
        sampler: Any = NeighborSampler([3, 3], prefetch_node_feats=["feat"], prefetch_labels=["label"])
        task: Any = LinkPrediction() if of_edges else NodeClassification()
        # Not wrapped: the sums of gradients have their own test.
        model: Any = (Pairs() if of_edges else build_model("sage", *SIZES)).to(META)
        if of_edges:
            sampler = as_edge_prediction_sampler(sampler, negative_sampler=dx.negative.PerSourceUniform(2))
        loader = dx.DataLoader(g, torch.arange(40), sampler, batch_size=20)
        step = Step(
            model=model,
            optimizer=torch.optim.Adam(model.parameters()),
            task=task,
            accumulation=Accumulation(1, g.session),
        )
        results = [_train_step(step, batch, (1, 1), lambda _: nullcontext()) for batch in loader]
        assert [result.num_targets for result in results] == [20, 20]
        for result in results:
            assert result.loss.is_meta
            assert isinstance(result.num_correct, torch.Tensor)
            assert result.num_correct.is_meta
        assert all(p.grad is not None and p.grad.is_meta for p in model.parameters())


@pytest.mark.parametrize("kind", ["sage", "gat", "degrees"])
def test_layers_of_an_evaluation_stay_on_the_device_of_the_model(dataset: str, kind: str) -> None:
    with start_session():
        g = DistGraph(dataset)
        conv = dgl.nn.GraphConv(equality.WIDTH, 5, norm="both", allow_zero_in_degree=True).to(META)

        def with_degrees(block: Any, h: torch.Tensor) -> Any:
            assert block.out_degrees().is_meta  # of the whole graph, read on the CPU
            return conv(block, h)

        layer: Any = with_degrees
        if kind != "degrees":
            layer = equality.model_of(kind, g).float().to(META).inference_layers()[0]  # type: ignore[operator]
        stages = PassStages(
            g=g,
            maker=open_neighborhood_maker(g, 1),
            run_pass=make_pass(layer),
            rows=read_first_rows(g, "feat", None),
            device=META,
            dtypes={(): torch.float32},
        )
        (out,) = stages.run(stages.load(NODE_TYPE, np.arange(9))).values()
        assert out.is_meta
        assert len(out) == 9


def test_ids_of_a_batch_are_known_without_reading_them(dataset: str) -> None:
    with start_session() as session:
        session.device = META
        g = DistGraph(dataset)
        rows, conv = dx.DistEmbedding(g.num_nodes(), 3), SymmetricConv(3, 2, g).to(META)
        for nodes, _, blocks in dx.DataLoader(g, torch.arange(40), NeighborSampler([3, 3]), batch_size=20):
            assert rows(nodes).is_meta
            assert all(norm.is_meta for norm in conv.own_edges(blocks[0]).values())
            sources, _ = g.find_edges(blocks[0].edata[dgl.EID])
            assert len(sources) == blocks[0].num_edges()
            nodes += 1
            with pytest.raises(NotImplementedError, match="meta"):
                rows(nodes)  # not the ids that came
        host = torch.arange(3)
        there = ids_to_device(host, META)
        host += 1
        with pytest.raises(NotImplementedError, match="meta"):
            ids_on_host(there)


@pytest.mark.parametrize("strategy", STRATEGIES.names())
def test_a_model_without_values_is_refused(dataset: str, strategy: str) -> None:
    with start_session(strategy=strategy):
        g, model = DistGraph(dataset), build_model("sage", *SIZES).to(META)
        with pytest.raises(ConfigError, match="on the meta device"):
            STRATEGIES.get(strategy)(g.session, {}).open(g).wrap(model)


def test_the_structure_of_a_local_graph_is_copied_once(dataset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    copied, from_index = [], TorchIndex.from_index
    monkeypatch.setattr(TorchIndex, "from_index", lambda *args: copied.append(args) or from_index(*args))
    with start_session(strategy="full_graph") as session:
        session.device = META
        lg = dx.local_graph(DistGraph(dataset))
    assert len(copied) == 1
    assert lg._graph is lg._block._graph
    assert {lg.device, lg.ndata["feat"].device, lg.edata[dgl.EID].device, lg.in_degrees().device} == {META}


@pytest.mark.parametrize("kind", [RGCN, HGT])
def test_relations_are_merged_without_reading_them(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, options = hetero.plain_graph(), {"heads": 2} if kind is HGT else {}
    widths = {**hetero.WIDTHS, "author": 3}
    model = kind(graph, widths, 8, hetero.CLASSES, layers=1, **options)
    block = hetero.whole_block()
    x = {ntype: torch.randn(block.num_src_nodes(ntype), width) for ntype, width in widths.items()}
    plain = model([block], x)
    # Off the CPU, R-GCN has a row of each relation for every destination: zeros where it has no edges.
    monkeypatch.setattr(relational, "_find_destinations", lambda degree: torch.arange(len(degree)))
    assert all(torch.allclose(rows, plain[ntype], atol=1e-6) for ntype, rows in model([block], x).items())
    monkeypatch.undo()
    on_meta = model.to(META)([place(block, META)], {ntype: rows.to(META) for ntype, rows in x.items()})
    assert {ntype: (rows.is_meta, rows.shape) for ntype, rows in on_meta.items()} == {
        ntype: (True, rows.shape) for ntype, rows in plain.items()
    }


@pytest.mark.wide
def test_the_planner_measures_where_the_model_is(dataset: str) -> None:
    """Batches are counted on the CPU; steps on them and on plans of whole graphs are timed on the device."""
    draws = Draws(fanouts=(3, 3), batch_size=20, epoch=1, most_batches=2)
    with start_session() as session:
        session.device = META
        g = DistGraph(dataset, structure="replicated")
        model = build_model("sage", *SIZES).to(META)
        shape = infer_shape(model, equality.WIDTH, equality.CLASSES, 2, kind="sage")
        config = measure.CountConfig(cluster=CLUSTER, draws=draws)
        counts, candidates = measure.count(g, shape, config)
        predictions = measure.predict_and_time(g, model, counts, candidates)
    feasible = [prediction for prediction in predictions if prediction.feasible]
    assert {prediction.candidate.unit for prediction in feasible} == {"mini_batch", "full_graph"}
    assert all(prediction.compute_s > 0 for prediction in feasible)
    assert choose(predictions, counts, ChoiceOptions(unit="any")).chosen_prediction is not None
