"""Halo rows in fewer bits on real ranks: bytes of the formula, bounded errors, the same bits again."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dgl
import numpy as np
import pytest
import torch
from torch import Tensor

import dglx_dist as dx
from dglx_dist.comm.codec import WireDtype, wire_bytes
from dglx_dist.comm.exchange import row_exchanges
from dglx_dist.comm.session import Session, start_session
from dglx_dist.errors import ConfigError, PeerError
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.records import NODE_TYPE, Array
from dglx_dist.strategies.full_graph.halo_exchange import HaloExchange
from dglx_dist.strategies.full_graph.strategies import FullGraph
from dglx_dist.training import fit as training
from dglx_dist.training.fit_config import FitConfig
from dglx_dist.training.models import build_model
from tests.helpers import wide
from tests.helpers.ranks import run_ranks
from tests.strategies import equality
from tests.strategies.full_graph import plan_cases, runs, test_cover
from tests.strategies.full_graph.test_bytes import SIZE, WIDTHS, halo_pairs
from tests.strategies.full_graph.test_halo_exchange import layer_of, random_needs, rows_of
from tests.strategies.test_equality import difference

WIRES: list[WireDtype] = ["bfloat16", "int8", "int4"]
STEPS = {"bfloat16": 2**-7, "int8": 1 / 127, "int4": 1 / 7}
"""Errors of a number, in units of the row's largest one, are below this."""
SIZES, WIDTH = [3_000, 2_000, 0], 65
"""Rows by rank: several pieces, and a rank without any."""


def swap(session: Session, wire: WireDtype, step: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(received, exact, gradient, exact gradient) of one exchange."""
    rank = session.topology.rank
    needs = random_needs(SIZES, 0.7, seed=3)
    rows = rows_of(rank, SIZES, needs)
    all_rows = torch.randn(sum(SIZES), WIDTH, generator=torch.Generator().manual_seed(1))
    first = sum(SIZES[:rank])
    h = all_rows[first : first + SIZES[rank]].clone().requires_grad_()
    row_exchanges(session).step = step
    out = HaloExchange(session, layer_of(rank, SIZES, needs), 2, wire).exchange(h)
    out.backward(all_rows[rows] * (rank + 1))
    gradient = all_rows * (rank + 1)
    for (to, peer), some in needs.items():
        if peer == rank:
            places = first + torch.tensor(some, dtype=torch.int64)
            gradient.index_add_(0, places, all_rows[places] * (to + 1))
    assert h.grad is not None
    return out.detach(), all_rows[rows], h.grad, gradient[first : first + SIZES[rank]]


def of_two_types() -> str:
    """Rows of 16 bits on rank 0 take as many bytes as codes of 16 bits on rank 1."""
    session = start_session(timeout_s=30)
    rank = session.topology.rank
    exchange = HaloExchange(session, layer_of(rank, [2, 2], {(0, 1): [0], (1, 0): [0]}), 1, "bfloat16")
    h = torch.ones(2, 8, dtype=torch.float32 if rank else torch.float16)
    with pytest.raises(PeerError) as caught:
        exchange.exchange(h)
    session.close(failed=True)
    return str(caught.value)


def test_ranks_of_other_types_do_not_read_codes_as_rows() -> None:
    assert any("16 bits x 8" in error for error in run_ranks(of_two_types, 2))


def largest(rows: Tensor) -> Tensor:
    return rows.abs().amax(1, keepdim=True)


def exchange_on_rank() -> None:
    with start_session(timeout_s=60) as session:
        rank = session.topology.rank
        for wire in WIRES:
            before = session.ledger.snapshot()
            out, exact, gradient, exact_gradient = swap(session, wire)
            moved = runs.moved_since(session, before)
            sent = sum(len(some) for (_, peer), some in random_needs(SIZES, 0.7, 3).items() if peer == rank)
            row_bytes = wire_bytes(wire, WIDTH, 4)
            by_phase = Counter[str]()
            for (phase, _), num_bytes in moved.items():
                by_phase[phase] += num_bytes
            assert by_phase["halo"] == sent * row_bytes
            assert by_phase["halo_gradients"] == (len(out) - SIZES[rank]) * row_bytes
            assert torch.equal(out[: SIZES[rank]], exact[: SIZES[rank]])
            assert ((out - exact).abs() <= STEPS[wire] * largest(exact)).all()
            # Up to 3 ranks add their own rounding to each row.
            assert ((gradient - exact_gradient).abs() <= STEPS[wire] * 6 * largest(exact_gradient)).all()
            again = swap(session, wire)
            assert torch.equal(again[0], out)
            assert torch.equal(again[2], gradient)
            if SIZES[rank] and wire != "bfloat16":
                next_step = swap(session, wire, step=1)
                assert not torch.equal(next_step[0], out)
                assert not torch.equal(next_step[2], gradient)
            else:
                swap(session, wire, step=1)
        out, exact, _, _ = swap(session, "same")
        assert torch.equal(out, exact)
        integers = torch.arange(SIZES[rank] * 9).view(-1, 9)
        needs = random_needs(SIZES, 0.5, seed=4)
        halo = HaloExchange(session, layer_of(rank, SIZES, needs), 2, "int8")
        assert halo.exchange(integers).dtype == torch.int64


@pytest.mark.wide
def test_rows_and_gradients_are_within_a_step() -> None:
    run_ranks(exchange_on_rank, 3, ranks_per_server=1)


EPOCHS = 3
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("full_graph", {}),
    **{wire: ("full_graph", {"wire_dtype": wire}) for wire in ("same", *WIRES)},
    "int4 again": ("full_graph", {"wire_dtype": "int4"}),
    "features anew": ("full_graph", {"wire_dtype": "int8", "use_pp": False}),
    "hops": ("shared_preload", {"hops": 1, "wire_dtype": "int8"}),
    "cooperative": ("cooperative", {"batches": 2, "wire_dtype": "int8"}),
    "cooperative, same": ("cooperative", {"batches": 2}),
}


@dataclass
class Notes:
    weights: list[Any]
    moved: list[Counter[tuple[str, bool]]]
    """Bytes of each epoch."""
    rows: list[Array]
    """Rows of each level, or nothing if there are several batches."""


def train(g: DistGraph, name: str, options: dict[str, Any]) -> Notes:
    module, moved = runs.first_model("sage"), []
    strategy, loader = runs.open_loader(g, name, options)
    model = strategy.wrap(module)
    for _ in range(EPOCHS):
        before = g.session.ledger.snapshot()
        weights = runs.train(module, model, runs.batches_of(loader), epochs=1)
        moved.append(runs.moved_since(g.session, before))
    return Notes(weights, moved, [*map(loader._kept.plan.rows, range(3))] if loader._kept else [])


def fit_model(g: DistGraph, epochs: int, **config: Any) -> list[Any]:
    module = build_model("sage", equality.WIDTH, equality.HIDDEN, equality.CLASSES, 2, 0.5).double()
    torch.manual_seed(11)
    for parameter in module.parameters():
        torch.nn.init.uniform_(parameter, -1, 1)
    strategy, loader = runs.open_loader(g, "full_graph", {"wire_dtype": "int4"})
    model = strategy.wrap(module)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    training.train(model, loader, optimizer, g, FitConfig(epochs=epochs, eval_every=0, **config))
    return [p.detach().numpy().copy() for p in module.parameters()]


def resume_on_rank(folder: str, saved: str) -> None:
    with start_session(timeout_s=60):
        g = DistGraph(folder)
        uninterrupted = fit_model(g, 3)
        fit_model(g, 1, checkpoint_folder=saved)
        resumed = fit_model(g, 3, checkpoint_folder=saved, resume=True)
        assert all(map(np.array_equal, uninterrupted, resumed))
        g.barrier()


@pytest.mark.wide
def test_a_resumed_run_has_the_bits_of_the_whole_one(folder: Path, tmp_path: Path) -> None:
    run_ranks(resume_on_rank, 2, args=(str(folder), str(tmp_path)), ranks_per_server=1)


def train_on_rank(folder: str) -> tuple[dict[str, Notes], Any, Any]:
    with start_session(timeout_s=60) as session:
        g = DistGraph(folder)
        results = {name: train(g, *run) for name, run in RUNS.items()}
        original = g.orig_ids(np.arange(equality.NUM_NODES), NODE_TYPE).numpy()
        g.barrier()
        return results, original, session.topology.server_of_rank


@pytest.mark.parametrize(("ranks", "ranks_per_server"), [(4, 2), *wide((2, 1), (3, 1))])
def test_training_sends_the_bytes_of_the_formula(folder: Path, ranks: int, ranks_per_server: int) -> None:
    results = run_ranks(train_on_rank, ranks, args=(str(folder),), ranks_per_server=ranks_per_server)
    result, original, servers = results[0]
    exact = result["none"].weights
    for first_name, second_name in (("same", "none"), ("int4 again", "int4")):
        assert all(map(np.array_equal, result[first_name].weights, result[second_name].weights))
    for name, most in {"bfloat16": 0.005, "int8": 0.01, "int4": 0.2, "features anew": 0.05}.items():
        assert 0 < difference(result[name].weights, exact) < most, name
    for name in ("same", *WIRES, "features anew", "hops"):
        options, notes = RUNS[name][1], [result[name] for result, *_ in results]
        pairs = halo_pairs(notes, original, servers)
        for outside in (False, True):
            first, second = (
                pairs[layer, outside] * wire_bytes(options["wire_dtype"], width, SIZE)
                for layer, width in WIDTHS.items()
            )
            for epoch in range(EPOCHS):
                moved = sum((note.moved[epoch] for note in notes), Counter())
                assert moved["halo", outside] == second + (0 if options.get("use_pp", True) else first)
                assert moved["halo_gradients", outside] == second
    if ranks_per_server > 1:
        narrow, plain = (
            sum(result[name].moved[0]["halo", False] for result, *_ in results)
            for name in ("cooperative", "cooperative, same")
        )
        assert 0 < narrow < plain / 3


def cover_on_rank(folder: str) -> tuple[int, dict[str, int]]:
    options = {"aggregate": "cover", "wire_dtype": "int8"}
    with start_session(strategy="full_graph", timeout_s=60, options=options) as session:
        g = DistGraph(folder)
        lg = dx.local_graph(g, columns=[], edge_columns=[], targets=None)
        layer, width = dgl.nn.GINConv(None, "sum"), 9
        torch.manual_seed(session.topology.rank)
        x = torch.randn(lg.num_nodes(), width, requires_grad=True)
        moved = test_cover.count_bytes(session, lambda: layer(lg, x).sum().backward())
        cover = lg._block._exchange.cover
        assert cover is not None
        g.barrier()
        return cover._rows.num_halo * wire_bytes("int8", width, 4), moved


def test_partial_sums_are_narrower_too(tmp_path: Path) -> None:
    results = run_ranks(cover_on_rank, 3, args=(str(plan_cases.write_chains(tmp_path)),), ranks_per_server=1)
    expected = sum(num_bytes for num_bytes, _ in results)
    for phase in ("halo", "halo_gradients"):
        assert sum(moved[phase] for _, moved in results) == expected > 0


def test_an_unknown_form_is_refused() -> None:
    with pytest.raises(ConfigError, match="wire_dtype='int2' must be same, bfloat16, int8 or int4"):
        FullGraph.read_options({"wire_dtype": "int2"})
