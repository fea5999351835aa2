"""Estimates from a sample of the targets, their standard errors, and passes over the needed nodes only."""

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import dgl
import numpy as np
import pytest
import torch

import dglx_dist as dx
from dglx_dist.comm.session import start_session
from dglx_dist.errors import ConfigError
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.graph.dist_tensor import DistTensor
from dglx_dist.records import SPLITS
from dglx_dist.report.tables import build_epoch_table
from dglx_dist.training import needed_nodes
from dglx_dist.training.eval_sample import _choose_group, _is_sampled, _jackknife
from dglx_dist.training.fit_config import FitConfig
from dglx_dist.training.inference import evaluate, layerwise_inference
from dglx_dist.training.link import LinkEvaluation
from dglx_dist.training.models import build_model
from dglx_dist.training.tracing import format_epoch
from tests.helpers import wide
from tests.helpers.ranks import run_ranks
from tests.strategies import equality
from tests.training import hetero

FRACTION = 0.4


def make_model() -> Any:
    torch.manual_seed(5)
    return build_model("sage", equality.WIDTH, equality.HIDDEN, equality.CLASSES, 2).double()


def estimate_on_ranks(folder: str) -> None:
    with start_session(timeout_s=60):
        g = DistGraph(folder)
        tensors = len(g.kvstore.names())
        values = evaluate(make_model(), g, metrics=["accuracy", "f1_macro"], sample=FRACTION)
        by_blocks = evaluate(make_model(), g, metrics=["accuracy", "f1_macro"], sample=FRACTION, num_layers=2)
        assert len(g.kvstore.names()) == tensors
        scores = layerwise_inference(make_model(), g)[:]
        ids = torch.arange(g.num_nodes())
        labels = g.ndata["label"][:]
        for mask in SPLITS:
            prefix = mask.removesuffix("_mask")
            is_counted = g.ndata[mask][:].bool() & (labels >= 0) & _is_sampled(ids, FRACTION)
            is_correct = (scores.argmax(1) == labels)[is_counted].double()
            groups = _choose_group(ids[is_counted])
            left_out = [float(is_correct[groups != group].mean()) for group in range(20)]
            error = np.std(left_out) * math.sqrt(19 * (1 - FRACTION))
            assert 5 < len(is_correct) < 0.6 * int(g.ndata[mask][:].sum())
            assert values[mask] == by_blocks[mask] == pytest.approx(float(is_correct.mean()), abs=1e-12)
            assert values[f"{prefix}_accuracy_se"] == pytest.approx(error, abs=1e-12)
            assert ("train_f1_macro" in values, "val_f1_macro" in values) == (False, True)
        assert values["val_accuracy"] == values["val_mask"]
        assert values["val_f1_macro_se"] > 0


@pytest.mark.parametrize(("ranks", "ranks_per_server"), [(1, 1), (3, 2), *wide((2, 1))])
def test_estimate_is_that_of_the_sampled_targets(folder: Path, ranks: int, ranks_per_server: int) -> None:
    run_ranks(estimate_on_ranks, ranks, args=(str(folder),), ranks_per_server=ranks_per_server)


def test_standard_error_is_the_deviation_of_estimates() -> None:
    """The mean of zeros and ones in random tenths of 4000 nodes."""
    ids = torch.arange(4000)
    is_correct = (torch.rand(4000, generator=torch.Generator().manual_seed(0)) < 0.7).double()
    groups = _choose_group(ids)
    estimates, errors = [], []
    for seed in range(300):
        is_drawn = torch.rand(4000, generator=torch.Generator().manual_seed(seed + 1)) < 0.1
        estimates.append(float(is_correct[is_drawn].mean()))
        left_out = [float(is_correct[is_drawn & (groups != group)].mean()) for group in range(20)]
        errors.append(_jackknife(left_out, 0.1))
    deviation = np.std(estimates)
    assert np.mean(errors) == pytest.approx(deviation, rel=0.12)
    # Of a sample of nine tenths, the error is a third of that of an endless population.
    assert _jackknife(left_out, 0.91) == pytest.approx(errors[-1] * math.sqrt(0.09 / 0.9))
    assert math.isnan(_jackknife([math.nan, *left_out[1:]], 0.1))


def test_half_of_the_units_below_a_half_are_sampled() -> None:
    ids = torch.arange(100_000)
    small, large = _is_sampled(ids, 0.1), _is_sampled(ids, 0.5)
    assert 9_700 < int(small.sum()) < 10_300
    # A larger sample contains a smaller one, and groups do not depend on the sample.
    assert bool(large[small].all())
    counts = _choose_group(ids[small]).bincount(minlength=20)
    assert 400 < int(counts.min()) <= int(counts.max()) < 600


def infer_needed(folder: str, max_edges: float) -> Any:
    needed_nodes._MAX_EDGES_PER_NODE = max_edges  # type: ignore[assignment]
    computed: list[set[int]] = [set(), set()]

    def record(depth: int, layer: Any, block: Any, rows: Any) -> Any:
        computed[depth].update(block.dstdata[dgl.NID].tolist())
        return layer(block, rows)

    with start_session(timeout_s=60):
        g = DistGraph(folder)
        layers = [
            lambda block, rows, depth=depth, layer=layer: record(depth, layer, block, rows)
            for depth, layer in enumerate(make_model().eval().inference_layers())
        ]
        marks = g.new_tensor((g.num_nodes(),), torch.bool, "marks")
        if g.rank() == 0:
            marks[torch.tensor([3, g.num_nodes() - 1])] = True
        g.barrier()
        tensors = len(g.kvstore.names())
        rows = layerwise_inference(make_model(), g, layers=layers, nodes={"_N": marks})[:]
        assert len(g.kvstore.names()) == tensors + 1
        expected = layerwise_inference(make_model(), g)[:]
        is_marked = marks[:]
        torch.testing.assert_close(rows[is_marked], expected[is_marked], rtol=0, atol=1e-12)
        assert not rows[~is_marked].any()
        sources = g.sample_neighbors(is_marked.nonzero()[:, 0], -1).edges()[0]
        needed = {*sources.tolist(), *is_marked.nonzero()[:, 0].tolist()}
        return computed, needed, g.num_nodes()


@pytest.mark.parametrize(("ranks", "ranks_per_server"), [(1, 1), (3, 2)])
@pytest.mark.parametrize("max_edges", [2, 0])
def test_only_needed_nodes_are_computed(
    folder: Path, ranks: int, ranks_per_server: int, max_edges: float
) -> None:
    results = run_ranks(infer_needed, ranks, args=(str(folder), max_edges), ranks_per_server=ranks_per_server)
    _, needed, num_nodes = results[0]
    first, second = (set().union(*(result[0][depth] for result in results)) for depth in (0, 1))
    assert second == {3, num_nodes - 1}
    # With many in-edges, the first layer is computed for all nodes.
    assert first == (needed if max_edges else set(range(num_nodes)))
    assert len(needed) < num_nodes


def fail_in_second_layer(folder: str) -> None:
    num_batches_left = 0

    def fail(block: Any, rows: Any) -> Any:
        nonlocal num_batches_left
        if not num_batches_left:
            raise ConfigError("the second layer fails")
        num_batches_left -= 1
        return rows[: block.num_dst_nodes()]

    needed_nodes._MAX_EDGES_PER_NODE = 9
    with start_session(timeout_s=60):
        g = DistGraph(folder)
        model = make_model()
        first, *_ = model.eval().inference_layers()
        model.inference_layers = lambda: [first, fail]
        # The rows of the second layer are allocated after its first batch.
        for names, num_batches_left in itertools.product((["val_mask"], []), (0, 1)):  # noqa: B007
            tensors = g.kvstore.names()
            with pytest.raises(ConfigError, match="the second layer fails"):
                evaluate(model, g, names, batch_size=10)
            assert g.kvstore.names() == tensors

        model.inference_layers = lambda: [first]
        for nodes in ({}, {"x": g.ndata["val_mask"]}):
            with pytest.raises(ConfigError, match="Pass marks for each of these types"):
                layerwise_inference(model, g, nodes=nodes)


@pytest.mark.parametrize(("ranks", "ranks_per_server"), [(1, 1), (2, 1)])
def test_tensors_of_an_inference_are_freed_after_an_error(
    folder: Path, ranks: int, ranks_per_server: int
) -> None:
    run_ranks(fail_in_second_layer, ranks, args=(str(folder),), ranks_per_server=ranks_per_server)


def evaluate_typed(folder: str) -> None:
    with start_session(timeout_s=60):
        g = DistGraph(folder)
        layers = [lambda block, rows: {t: h[: block.num_dst_nodes(t)] for t, h in rows.items()}] * 2
        inputs = {}
        for ntype in g.ntypes:
            policy = g.get_node_partition_policy(ntype)
            inputs[ntype] = g.new_tensor((g.num_nodes(ntype), 2), torch.float64, "x", part_policy=policy)
            own = g.local_nodes(ntype)
            inputs[ntype][own] = own.double()[:, None].expand(-1, 2)
        policy = g.get_node_partition_policy("paper")
        marks = g.new_tensor((g.num_nodes("paper"),), torch.bool, "marks", part_policy=policy)
        if g.rank() == 0:
            marks[torch.tensor([1])] = True
        g.barrier()
        model = torch.nn.Linear(1, 1).double()
        rows = layerwise_inference(
            model, g, inputs=inputs, layers=layers, ntypes=["paper"], nodes={"paper": marks}
        )
        expected = torch.zeros(g.num_nodes("paper"), 2, dtype=torch.float64)
        expected[1] = 1
        assert torch.equal(rows["paper"][:], expected)


def test_types_without_needed_nodes_are_computed_for_none(tmp_path: Path) -> None:
    """Venues have no in-edges to a paper, for instance, and the layers still get rows of every type."""
    run_ranks(evaluate_typed, 2, args=(str(hetero.write_parts(tmp_path)),), ranks_per_server=1)


def fit_with_sample(folder: str, **changes: Any) -> Any:
    with dx.init(seed=0):
        g = dx.DistGraph(folder)
        config = FitConfig(epochs=3, eval_sample=0.5, show_progress=False, **changes)
        model, result = dx.fit(make_model(), g, fanouts=[4, 4], batch_size=40, config=config)
        return result, evaluate(model, g, metrics=["accuracy"])


@pytest.mark.parametrize("patience", [None, 1])
def test_final_scores_of_a_run_are_exact(folder: Path, patience: int | None) -> None:
    # With a huge threshold the first epoch is the best, and the second one ends the run.
    result, exact = fit_with_sample(str(folder), patience=patience, min_delta=9.0 if patience else 0.0)
    assert result.accuracy | result.metrics == exact
    *estimated, last = result.epochs if patience is None else [*result.epochs, None]
    assert all(record.metrics["val_accuracy_se"] > 0 for record in estimated)
    if last is None:
        assert (result.best_epoch, len(estimated)) == (0, 2)
        assert result.best_val_accuracy == exact["val_accuracy"]
        return
    assert not any(name.endswith("_se") for name in last.metrics)
    table = build_epoch_table(result.epochs)
    cells = [*next(column for column in table.columns if str(column.header) == "val").cells]
    assert [" ± " in str(cell) for cell in cells] == [True, True, False]
    assert " ± " in format_epoch(estimated[0])
    assert " ± " not in format_epoch(last)


def evaluate_small_samples(folder: str) -> None:
    with start_session(timeout_s=60):
        g = DistGraph(folder)
        model = make_model()
        with pytest.raises(ConfigError, match="takes 0 of the targets in 'train_mask'") as refusal:
            evaluate(model, g, sample=1e-9)
        least = float(str(refusal.value).split("Use at least ")[1].rstrip("."))
        with pytest.raises(ConfigError, match="takes 19 of the targets in 'train_mask'"):
            evaluate(model, g, ["train_mask"], sample=least - 2e-6)
        assert evaluate(model, g, ["train_mask"], sample=least)["train_accuracy_se"] > 0
        with pytest.raises(ConfigError, match="there are no masks to take targets from"):
            evaluate(model, g, masks=[], sample=0.5)
        assert evaluate(model, g, masks=[]) == {}
        policy = g.get_node_partition_policy("_N")
        g.ndata["few"] = DistTensor((g.num_nodes(),), torch.bool, "few", part_policy=policy)
        if g.rank() == 0:
            g.ndata["few"][torch.arange(19)] = True
        g.barrier()
        with pytest.raises(ConfigError, match=r"of the targets in 'few'.* needs 20\. Leave it out"):
            evaluate(model, g, "few", sample=0.99)


@pytest.mark.parametrize(("ranks", "ranks_per_server"), [(1, 1), (3, 2)])
def test_too_small_sample_is_refused_on_all_ranks(folder: Path, ranks: int, ranks_per_server: int) -> None:
    run_ranks(evaluate_small_samples, ranks, args=(str(folder),), ranks_per_server=ranks_per_server)


def test_too_small_sample_is_refused_before_training(folder: Path) -> None:
    steps = []

    class Model(type(make_model())):  # type: ignore[misc]
        def forward(self, blocks: Any, rows: Any) -> Any:
            steps.append(rows)
            return super().forward(blocks, rows)

    model = make_model()
    model.__class__ = Model
    with dx.init(seed=0):
        config = FitConfig(epochs=3, eval_sample=1e-9, patience=2, show_progress=False)
        with pytest.raises(ConfigError, match="takes 0 of the targets"):
            dx.fit(model, dx.DistGraph(str(folder)), fanouts=[4, 4], batch_size=40, config=config)
    assert not steps


def test_own_evaluation_is_not_replaced_by_the_exact_one(folder: Path) -> None:
    """Its standard error looks like that of an estimate."""
    with dx.init(seed=0):
        g = dx.DistGraph(str(folder))
        scores = {"val_mask": 0.5, "val_accuracy_se": 0.1}
        config = FitConfig(epochs=3, patience=1, evaluate=lambda _: scores, show_progress=False)
        _, result = dx.fit(make_model(), g, fanouts=[4, 4], batch_size=40, config=config)
        assert result.accuracy | result.metrics == scores


def test_sample_is_refused_where_it_cannot_hold(folder: Path) -> None:
    with dx.init():
        g = dx.DistGraph(folder)
        for fraction in (0, 1, -0.5):
            with pytest.raises(ConfigError, match="must be above 0 and below 1"):
                evaluate(make_model(), g, sample=fraction)
    config = FitConfig(epochs=1)
    with pytest.raises(ConfigError, match="eval_sample=1 must be above 0 and below 1"):
        replace(config, eval_sample=1)
    with pytest.raises(ConfigError, match=r"--eval-sample 0.1 .*, but --eval-every is 0"):
        replace(config, eval_sample=0.1, eval_every=0)
    with pytest.raises(ConfigError, match=r"--eval-sample 0.1 is for .* a function of its own"):
        replace(config, eval_sample=0.1, evaluate=LinkEvaluation)
