"""Halo rows and gradients of the epoch before: values of a plain simulation, bytes, resume, a dead peer."""

import itertools
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import dgl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dglx_dist as dx
from dglx_dist.comm.session import start_session
from dglx_dist.errors import ConfigError, PeerError
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.strategies.base import STRATEGIES
from dglx_dist.strategies.full_graph import halo_exchange
from dglx_dist.strategies.full_graph.halo_exchange import BACKWARD, FORWARD, HaloExchange, StaleHalos
from dglx_dist.strategies.full_graph.plan_builder import _cover_layers
from dglx_dist.training.models import ResGCN
from tests.helpers import wide
from tests.helpers.ranks import run_ranks, start_ranks
from tests.strategies import equality
from tests.strategies.full_graph import runs
from tests.strategies.full_graph.test_halo_exchange import layer_of

EPOCHS, TOLERANCE = 4, 1e-10
STALE = {"staleness": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return equality.write_parts(tmp_path_factory.mktemp("staleness"))


class Deep(nn.Module):
    """Three layers, so that rows that are late depend on rows that are late."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(5)
        # GraphConv sends what it has projected where that is narrower and rows are summed by covers.
        self.kind, widths = kind, (equality.WIDTH, 8, 8, 8 if kind == "gcn" else equality.CLASSES)
        more: dict[str, Any] = {} if kind == "sage" else {"allow_zero_in_degree": True}
        make = {"sage": dgl.nn.SAGEConv, "gcn": dgl.nn.GraphConv, "gat": dgl.nn.GATConv}[kind]
        more |= {"sage": {"aggregator_type": "mean"}, "gcn": {"norm": "right"}, "gat": {"num_heads": 1}}[kind]
        self.layers = nn.ModuleList(
            make(before, after, **more) for before, after in itertools.pairwise(widths)
        )
        self.double()

    def of(self, depth: int, graph: Any, h: Any) -> Tensor:
        out: Tensor = self.layers[depth](graph, h)
        out = out.flatten(1) if self.kind == "gat" else out
        return torch.tanh(out) if depth < 2 else out

    def forward(self, blocks: Any, h: Tensor) -> Tensor:
        for depth in range(3):
            h = self.of(depth, blocks[depth] if isinstance(blocks, list) else blocks, h)
        return h


Epoch = tuple[Any, list[Any]]
"""Scores of the (n,) nodes of the rank that are trained, and gradients."""


def simulate(kind: str, owner: Tensor, epochs: int = EPOCHS) -> list[Epoch]:
    """One process: each rank's edges read own rows of now and others' rows of the epoch before."""
    graph, model = equality.plain_graph(), Deep(kind)
    source, target = graph.edges()
    num, ranks = equality.NUM_NODES, int(owner.max()) + 1
    is_own = owner[source] == owner[target]
    block = dgl.create_block((torch.where(is_own, source, source + num), target), 2 * num, num)
    targets = graph.ndata["train_mask"].nonzero()[:, 0]
    optimizer = torch.optim.SGD(model.parameters(), lr=equality.RATE)
    late: dict[int, Tensor] = {}
    late_gradients: dict[int, Tensor] = {}
    results = []

    for epoch in range(epochs):
        h, halos, rows = graph.ndata["feat"], {}, {}
        for depth in range(3):
            halo = h * 1.0
            if depth:
                if epoch:
                    halo = late[depth].clone().requires_grad_()
                    h.register_hook(lambda g, more=late_gradients[depth]: g + more)
                halo.retain_grad()
                halos[depth], rows[depth] = halo, h.detach()
            h = model.of(depth, block, (torch.cat([h, halo]), h))
        optimizer.zero_grad()
        F.cross_entropy(h[targets], graph.ndata["label"][targets]).backward()  # type: ignore[no-untyped-call]
        results.append((h.detach().numpy(), [p.grad.numpy().copy() for p in model.parameters()]))
        for depth, halo in halos.items():
            assert halo.grad is not None
            late[depth], late_gradients[depth] = rows[depth], halo.grad
        optimizer.step()
    assert ranks > 1
    return results


def begin(folder: str, options: dict[str, Any], kind: str) -> tuple[Any, ...]:
    session = start_session(strategy="full_graph", options=options, timeout_s=60)
    g = DistGraph(folder)
    strategy, loader = runs.open_loader(g, "full_graph", options, num_layers=3)
    model = strategy.wrap(Deep(kind))
    return session, g, loader, model, torch.optim.SGD(model.parameters(), lr=equality.RATE)


def an_epoch(batch: Any, model: Any, optimizer: Any) -> Epoch:
    blocks, x, labels = batch
    optimizer.zero_grad()
    scores = model(blocks, x)
    F.cross_entropy(scores, labels).backward()  # type: ignore[no-untyped-call]
    result = scores.detach().numpy(), [p.grad.numpy().copy() for p in model.parameters()]
    optimizer.step()
    return result


def on_rank(folder: str, options: dict[str, Any], kind: str) -> dict[str, Any]:
    session, g, loader, model, optimizer = begin(folder, options, kind)
    bounds = g.get_node_partition_policy("_N").bounds
    first, last = int(bounds[g.rank()]), int(bounds[g.rank() + 1])
    results: dict[str, Any] = {
        "owned": g.orig_ids(torch.arange(first, last)).numpy(),
        "epochs": [],
        "moved": [],
    }
    for _ in range(EPOCHS):
        before = session.ledger.snapshot()
        for _, seeds, blocks in loader:
            results["seeds"] = g.orig_ids(seeds).numpy()
            batch = blocks, blocks[0].srcdata["feat"], blocks[-1].dstdata["label"]
            results["epochs"].append(an_epoch(batch, model, optimizer))
        results["moved"].append(dict(runs.moved_since(session, before)))
        with torch.no_grad():
            results["evaluated"] = (
                model.eval()(blocks, batch[1]).numpy(),
                model.train()(blocks, batch[1]).numpy(),
            )
    results["weights"] = [p.detach().numpy().copy() for p in model.parameters()]
    g.barrier()
    session.close()
    return results


def check_simulated(results: list[Any], kind: str) -> list[Epoch]:
    owner = torch.empty(equality.NUM_NODES, dtype=torch.int64)
    for rank, result in enumerate(results):
        owner[result["owned"]] = rank
    expected = simulate(kind, owner)
    for result in results:
        for (scores, gradients), (all_scores, all_gradients) in zip(result["epochs"], expected, strict=True):
            np.testing.assert_allclose(scores, all_scores[result["seeds"]], rtol=0, atol=TOLERANCE)
            for gradient, expected_gradient in zip(gradients, all_gradients, strict=True):
                np.testing.assert_allclose(gradient, expected_gradient, rtol=0, atol=TOLERANCE)
    return expected


@pytest.mark.parametrize(
    ("ranks", "kind", "options"),
    [
        (2, "sage", {}),
        (3, "gcn", {"aggregate": "cover"}),
        *wide((3, "gat", {"use_pp": False})),
    ],
)
def test_values_and_bytes_are_those_of_a_simulation(
    folder: Path, ranks: int, kind: str, options: dict[str, Any]
) -> None:
    results = run_ranks(on_rank, ranks, args=(str(folder), options | STALE, kind), ranks_per_server=1)
    check_simulated(results, kind)
    exact = run_ranks(on_rank, ranks, args=(str(folder), options, kind), ranks_per_server=1)
    for result, exact_result in zip(results, exact, strict=True):
        np.testing.assert_array_equal(result["epochs"][0][0], exact_result["epochs"][0][0])
        assert np.abs(result["epochs"][-1][0] - exact_result["epochs"][-1][0]).max() > 1e-6
        for moved in (FORWARD, BACKWARD):
            assert result["moved"][0][moved, True] > 0
        assert result["moved"] == exact_result["moved"]
    # An evaluation has the rows of its own weights.
    model, graph = Deep(kind), equality.plain_graph()
    with torch.no_grad():
        for own, weights in zip(model.parameters(), results[0]["weights"], strict=True):
            own.copy_(torch.from_numpy(weights))
        all_scores = model(graph, graph.ndata["feat"]).numpy()
    for result in results:
        for scores in result["evaluated"]:
            np.testing.assert_allclose(scores, all_scores[result["seeds"]], rtol=0, atol=TOLERANCE)


def resume_training(folder: str, saved: str, options: dict[str, Any], epochs: int) -> list[Epoch]:
    session, _, loader, model, optimizer = begin(folder, options, "sage")
    position = dx.checkpoints(saved, model, optimizer, loader, every=2, keep=1)
    results = []
    for _ in range(position.epoch, epochs):
        for batch in runs.batches_of(loader)():
            results.append(an_epoch(batch, model, optimizer))
            position.step()
    session.close()
    return results


def test_a_resumed_run_has_the_bits_of_one_without_an_end(folder: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    uninterrupted = run_ranks(
        resume_training, 3, args=(str(folder), str(first), STALE, 6), ranks_per_server=1
    )
    for epochs in (4, 6):
        resumed = run_ranks(
            resume_training, 3, args=(str(folder), str(second), STALE, epochs), ranks_per_server=1
        )
    for last_epochs, all_epochs in zip(resumed, uninterrupted, strict=True):
        assert len(last_epochs) == 2
        for (scores, gradients), (all_scores, all_gradients) in zip(last_epochs, all_epochs[4:], strict=True):
            np.testing.assert_array_equal(scores, all_scores)
            for gradient, expected in zip(gradients, all_gradients, strict=True):
                np.testing.assert_array_equal(gradient, expected)


@pytest.mark.wide
@pytest.mark.parametrize(("ranks", "more"), [(2, {}), (3, {"aggregate": "cover"})])
def test_with_another_exchange_a_resumed_run_begins_with_an_exact_epoch(
    folder: Path, tmp_path: Path, ranks: int, more: dict[str, Any]
) -> None:
    saved = str(tmp_path / "saved")
    run_ranks(resume_training, 3, args=(str(folder), saved, STALE, 2), ranks_per_server=1)
    gradients = []
    for options in (STALE | more, more):
        kept = tmp_path / f"copy-{len(gradients)}"
        shutil.copytree(saved, kept)
        resumed = run_ranks(
            resume_training, ranks, args=(str(folder), str(kept), options, 4), ranks_per_server=1
        )
        gradients.append(resumed[0])
    for gradient, expected in zip(gradients[0][0][1], gradients[1][0][1], strict=True):
        np.testing.assert_allclose(gradient, expected, rtol=0, atol=TOLERANCE)
    assert np.abs(gradients[0][1][1][0] - gradients[1][1][1][0]).max() > 1e-6


def with_a_death(folder: str) -> str:
    session, _, loader, model, optimizer = begin(folder, STALE, "sage")

    def train() -> None:
        for epoch in range(9):
            for batch in runs.batches_of(loader)():
                if session.topology.rank == 1 and epoch == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
                an_epoch(batch, model, optimizer)

    with pytest.raises(PeerError) as caught:
        train()
    session.fail(caught.value)
    session.close(failed=True)
    return str(caught.value)


def test_a_dead_rank_is_named(folder: Path) -> None:
    outcomes = start_ranks(with_a_death, 3, args=(str(folder),), ranks_per_server=1)
    assert outcomes[1].exitcode == -signal.SIGKILL
    for rank in (0, 2):
        assert "rank 1" in str(outcomes[rank].result), outcomes[rank]


def end_epoch(model: nn.Module) -> None:
    """Change the weights in place as an optimizer with learning rate 0 does."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.0)


def train_by_data(model: Any, batches: Any) -> None:
    """Change weights so that torch does not count it."""
    for blocks, x, labels in itertools.chain(*(batches() for _ in range(4))):
        F.cross_entropy(model(blocks, x), labels).backward()  # type: ignore[no-untyped-call]
        for parameter in model.parameters():
            parameter.data.add_(0.01)


def odd_passes(folder: str) -> dict[str, Any]:
    session, g, loader, model, _ = begin(folder, STALE, "sage")
    results: dict[str, Any] = {"sums": []}
    for _ in range(3):
        # Two forward passes of a step have rows of their own.
        for blocks, x, labels in runs.batches_of(loader)():
            for parameter in model.parameters():
                parameter.grad = None
            (
                F.cross_entropy(model(blocks, x), labels) + F.cross_entropy(model(blocks, -x), labels)
            ).backward()
            results["sums"].append([p.grad.numpy().copy() for p in model.parameters()])
            end_epoch(model)
    for blocks, x, labels in runs.batches_of(loader)():
        loss = F.cross_entropy(model(blocks, x), labels)
        loss.backward(retain_graph=True)
        with pytest.raises(ConfigError, match="call backward once"):
            loss.backward()
    for blocks, x, labels in runs.batches_of(loader)():

        def again(h: Tensor, blocks: Any = blocks) -> Tensor:
            return model.module.of(1, blocks[1], h)

        forward, model.module.forward = (
            model.module.forward,
            lambda blocks, h: model.module.of(
                2, blocks[2], checkpoint(again, model.module.of(0, blocks[0], h), use_reentrant=False)
            ),
        )
        with pytest.raises(ConfigError, match="recompute='keep'"):
            F.cross_entropy(model(blocks, x), labels).backward()
        model.module.forward = forward
    for recompute in ("none", "keep"):
        torch.manual_seed(0)
        deep = (
            STRATEGIES.get("full_graph")(session, STALE)
            .open(g)
            .wrap(ResGCN(equality.WIDTH, 6, equality.CLASSES, 3, dropout=0, recompute=recompute).double())
        )
        results[recompute] = runs.train(deep, deep, runs.batches_of(loader), epochs=3)
    late = STRATEGIES.get("full_graph")(session, STALE).open(g).wrap(Deep("sage"))
    for factor in (1.0, np.inf, *[1.0] * 8):
        for blocks, x, labels in runs.batches_of(loader)():
            late.zero_grad()
            loss = F.cross_entropy(late(blocks, x * factor), labels)
            loss.backward()
            end_epoch(late)
    results["after an overflow"] = [loss.item(), *(p.grad.sum().item() for p in late.parameters())]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(halo_exchange, "_MAX_PASSES", 3)
        with pytest.raises(ConfigError, match="3 forward passes ran without a change of the weights"):
            train_by_data(late, runs.batches_of(loader))
    g.barrier()
    session.close()
    return results


def test_passes_of_a_step_do_not_share_rows(folder: Path) -> None:
    results = run_ranks(odd_passes, 2, args=(str(folder),), ranks_per_server=1)
    for sums in zip(*results[0]["sums"], strict=True):
        # Weights do not change, so rows of the epoch before are those of now.
        np.testing.assert_allclose(sums[1], sums[0], rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(sums[2], sums[0], rtol=0, atol=TOLERANCE)
    assert np.isfinite(results[0]["after an overflow"]).all()
    for first, second in zip(results[0]["keep"], results[0]["none"], strict=True):
        np.testing.assert_allclose(first, second, rtol=0, atol=TOLERANCE)


def on_a_local_graph(folder: str, options: dict[str, Any]) -> list[Any]:
    with start_session(strategy="full_graph", options=options, timeout_s=60) as session:
        g = DistGraph(folder)
        lg = dx.local_graph(g)
        model = STRATEGIES.get("full_graph")(session, options).open(g).wrap(Deep("gcn"))
        optimizer = torch.optim.SGD(model.parameters(), lr=equality.RATE)
        mask = lg.ndata["train_mask"].bool()
        for _ in range(EPOCHS):
            optimizer.zero_grad()
            losses = list[Any]()
            # In two forward passes, each of which has rows of its own.
            for _ in range(2):
                losses.append(F.cross_entropy(model(lg, lg.ndata["feat"])[mask], lg.ndata["label"][mask]) / 2)
            sum(losses).backward()
            optimizer.step()
        g.barrier()
        return [p.detach().numpy() for p in model.parameters()]


def test_a_local_graph_trains_what_blocks_train(folder: Path) -> None:
    blocks = run_ranks(on_rank, 2, args=(str(folder), STALE, "gcn"), ranks_per_server=1)
    local = run_ranks(on_a_local_graph, 2, args=(str(folder), STALE), ranks_per_server=1)
    for first, second in zip(local[0], blocks[0]["weights"], strict=True):
        np.testing.assert_allclose(first, second, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("strategy", "options", "message"),
    [
        ("full_graph", {"staleness": 2}, "staleness=2.*from 0 to 1"),
        ("full_graph", {"staleness": 1, "wire_dtype": "int8"}, "sent in their own type"),
        ("shared_preload", {"staleness": 1}, "has no option 'staleness'"),
    ],
)
def test_what_has_no_meaning_is_refused(strategy: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        STRATEGIES.get(strategy).read_options(options)


def on_another_plan() -> dict[int, float]:
    session = start_session(timeout_s=60)
    rank = session.topology.rank
    needs = {(0, 1): [0], (1, 0): [1]}
    halo, stale = HaloExchange(session, layer_of(rank, [2, 2], needs), 2), StaleHalos(session)

    def epoch(number: int, value: float) -> float:
        h = torch.full((2, 1), value, dtype=torch.bfloat16, requires_grad=True)
        with stale.active(number):
            rows = halo.exchange(h)
        rows.sum().backward()  # type: ignore[no-untyped-call]  # torch leaves it bare
        assert rows.dtype == torch.bfloat16
        return rows[-1].item()

    assert [epoch(number, 1.0 + number) for number in range(3)] == [1.0, 1.0, 2.0]
    state = stale.state()
    again = {}
    for change in (0, 1):
        # Names end with the digest of the plan.
        stale.load({name + "0" * change: rows.clone() for name, rows in state.items()})
        again[change] = epoch(300 + change, 8.0)
    session.close()
    return again


def test_rows_of_another_plan_are_not_used() -> None:
    assert run_ranks(on_another_plan, 2, ranks_per_server=1) == [{0: 3.0, 1: 8.0}] * 2


def test_a_rank_of_other_layers_is_named() -> None:
    steps = _cover_layers(2, [layer_of(0, [2, 2], {})] * 2)
    next(steps)
    none = np.empty(0, np.int64)
    with pytest.raises(PeerError, match="rank 1 sends partial sums of 1 layers, but this rank has 2"):
        steps.send({0: [none, none], 1: [none]})
