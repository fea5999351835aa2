"""Trained embeddings and their optimizers against dense torch."""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dglx_dist.comm.session import start_session
from dglx_dist.errors import ConfigError
from dglx_dist.graph import embedding as row_init
from dglx_dist.graph import optim
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.graph.embedding import DistEmbedding, fill_uniform
from dglx_dist.records import StepShare
from tests.graph.small import NUM_NODES, zeros
from tests.graph.sparse_cases import KINDS, STEPS, embeddings, make_optimizer, train, train_in_torch
from tests.helpers import wide
from tests.helpers.ranks import run_ranks


def test_rows_come_in_the_order_of_the_ids_and_repeats_are_summed(graph: DistGraph) -> None:
    embedding = DistEmbedding(NUM_NODES, 2, "e", dtype=torch.float64)
    ids = torch.tensor([7, 3, 7, 39])
    rows = embedding(ids)
    assert torch.equal(rows, embedding.weight[ids])
    assert rows.requires_grad
    (rows * torch.tensor([[1.0], [2.0], [4.0], [8.0]])).sum().backward()
    (gradient,) = embedding.take_gradients()
    assert gradient.ids.tolist() == [7, 3, 39]
    assert gradient.rows.tolist() == [[5.0, 5.0], [2.0, 2.0], [8.0, 8.0]]


def test_gradients_without_a_step_leave_nothing_behind(graph: DistGraph) -> None:
    embedding = DistEmbedding(NUM_NODES, 2, "e")
    with torch.no_grad():
        assert not embedding([1]).requires_grad
    rows = embedding([1, 2])
    alive = weakref.ref(rows)
    del rows
    gc.collect()
    assert alive() is None
    assert embedding.take_gradients() == []
    for _ in range(100):
        embedding(range(NUM_NODES)).sum().backward()
    kept = embedding.take_gradients()
    assert sum(len(gradient.ids) for gradient in kept) <= 2 * NUM_NODES
    total = torch.zeros(NUM_NODES, 2)
    for gradient in kept:
        total[gradient.ids] += torch.from_numpy(gradient.rows)
    assert bool((total == 100.0).all())


def test_zero_grad_before_backward_is_harmless_and_after_it_drops(graph: DistGraph) -> None:
    embedding = DistEmbedding(NUM_NODES, 2, "e", init_func=zeros)
    optimizer = optim.SparseSGD([embedding], lr=1.0)
    loss = embedding([5]).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    assert embedding.weight[[5]].tolist() == [[-1.0, -1.0]]
    embedding([5]).sum().backward()
    optimizer.zero_grad()
    optimizer.step()
    optimizer.step()
    assert embedding.weight[[5]].tolist() == [[-1.0, -1.0]]


def test_backward_twice_adds_up_as_in_torch(graph: DistGraph) -> None:
    embedding = DistEmbedding(NUM_NODES, 2, "e", init_func=zeros)
    optimizer = optim.SparseSGD([embedding], lr=1.0)
    loss = (embedding([5, 5]) * 0.5).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()
    assert embedding.weight[[5]].tolist() == [[-2.0, -2.0]]
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_rows_are_computed_in_float32_and_rounded_once(graph: DistGraph, dtype: torch.dtype) -> None:
    short = DistEmbedding(NUM_NODES, 2, "short", dtype=dtype)
    before = short.weight.to_local()
    optimizer = optim.SparseAdagrad([short], lr=0.1)
    rows = short([4, 9])
    assert rows.dtype == torch.float32
    (rows * 3.0).sum().backward()
    optimizer.step()
    assert short.optm_state[0].dtype == torch.float32
    expected = before.clone()
    expected[[4, 9]] = (before[[4, 9]].float() - 0.1 * 3.0 / (3.0 + 1e-10)).to(dtype)
    after = short.weight.to_local()
    assert torch.equal(after.view(torch.int16), expected.view(torch.int16))


def test_embeddings_of_one_name_are_one(graph: DistGraph) -> None:
    first = DistEmbedding(NUM_NODES, 2, "e")
    first.weight[[3]] = torch.tensor([[5.0, 6.0]])
    second = DistEmbedding(NUM_NODES, 2, "e")
    assert second([3]).tolist() == [[5.0, 6.0]]
    assert graph.ndata["e"].shape == (NUM_NODES, 2)
    assert (second.name, second.num_embeddings, second.embedding_dim) == ("e", NUM_NODES, 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda _: DistEmbedding(NUM_NODES, 2, dtype=torch.int64),
            r"cannot train torch\.int64 rows\. Use one of",
        ),
        (lambda _: DistEmbedding(39, 2), "no type has 39 rows"),
        (lambda _: DistEmbedding(NUM_NODES, 0), "embedding_dim is 0"),
        (
            lambda _: DistEmbedding(NUM_NODES, 10**12, "large"),
            r"160000\.000 GB for 40 rows .* free; use a smaller",
        ),
        (lambda e: e([1, 40]), "id 40 at position 1"),
        (lambda e: e([0.5]), "float64 values"),
        (lambda e: optim.SparseSGD(e, lr=0.1), r"params is a DistEmbedding\. Pass a list"),
        (lambda e: optim.SparseSGD([e, torch.ones(2)], lr=0.1), r"params\[1\] is a Tensor\. Pass DistEmbed"),
        (lambda e: optim.SparseSGD([e, DistEmbedding(NUM_NODES, 2, "e")], lr=0.1), "an embedding twice"),
        (lambda _: optim.SparseSGD([], lr=0.1), "params has 0 embeddings"),
        (lambda e: optim.SparseSGD([e], lr=-1.0), "lr"),
        (lambda e: optim.SparseSGD([e], lr=float("nan")), "lr"),
        (lambda e: optim.SparseSGD([e], lr=0.1, mode="hogwild"), "mode"),
        (lambda e: optim.SparseSGD([e], lr=0.1, staleness=-1), "staleness"),
        (lambda e: optim.SparseSGD([e], lr=0.1, reduction="max"), "reduction"),
        (
            lambda e: optim.SparseAdam([e], lr=0.1, betas=(0.9, 1.0)),
            r"betas=.0\.9, 1\.0. must be two numbers",
        ),
        (lambda e: optim.SparseAdagrad([e], lr=0.1, eps=-1.0), r"eps=-1\.0 must be"),
        (lambda e: setattr(optim.SparseSGD([e], lr=0.1), "lr", float("inf")), "must be a number, at least 0"),
    ],
)
def test_names_wrong_values(graph: DistGraph, make: Callable[[DistEmbedding], object], message: str) -> None:
    embedding = DistEmbedding(NUM_NODES, 2, "e")
    with pytest.raises((ConfigError, IndexError), match=message):
        make(embedding)
    assert "large" not in graph.ndata


def test_the_gradient_counts_as_much_as_the_rank_has_targets(graph: DistGraph) -> None:
    embedding = DistEmbedding(NUM_NODES, 1, "e", init_func=zeros)
    optimizer = optim.SparseSGD([embedding], lr=1.0)
    for share in (StepShare(num_local=1, num_global=4), StepShare(num_local=0, num_global=4)):
        graph.session.step_share = share
        # A mean over no targets is nan, and must not reach the rows.
        (embedding([3]).sum() * (1.0 if share.num_local else float("nan"))).backward()
    optimizer.step()
    assert embedding.weight[[3]].tolist() == [[-0.25]]
    summed = optim.SparseSGD([embedding], lr=1.0, reduction="sum")
    graph.session.step_share = StepShare(num_local=1, num_global=4)
    embedding([3]).sum().backward()
    summed.step()
    assert embedding.weight[[3]].tolist() == [[-1.25]]


def test_embeddings_whose_gradients_lie_in_one_memory_are_weighed_once(graph: DistGraph) -> None:
    # Of a sum of views, autograd gives both leaves the same memory.
    item, second = (DistEmbedding(NUM_NODES, 2, name, init_func=zeros) for name in ("one", "other"))
    optimizer = optim.SparseSGD([item, second], lr=1.0)
    graph.session.step_share = StepShare(num_local=1, num_global=4)
    (item([3]).view(-1) + second([5]).view(-1) - 0.5).pow(2).sum().backward()
    optimizer.step()
    assert item.weight[[3]].tolist() == second.weight[[5]].tolist() == [[0.25, 0.25]]


def first_values(folder: Path) -> list[Any]:
    with start_session(seed=5):
        g = DistGraph(folder)
        embeddings = [
            DistEmbedding(NUM_NODES, 3, "wide", dtype=torch.float64),
            DistEmbedding(NUM_NODES, 3, "wide32"),
            DistEmbedding(NUM_NODES, 3, "short", dtype=torch.bfloat16),
        ]
        values = [embedding.weight.to_local().double().tolist() for embedding in embeddings]
        g.barrier()
        return values


def test_first_values_depend_on_the_seed_the_name_and_the_row_alone(small_dataset: Path) -> None:
    alone = run_ranks(first_values, 1, args=(small_dataset,))[0]
    for ranks, per_server in ((3, 3), (4, 2)):
        for result in run_ranks(first_values, ranks, args=(small_dataset,), ranks_per_server=per_server):
            assert result == alone
    wide, second, _ = (torch.tensor(values) for values in alone)
    assert not torch.equal(wide.float(), second.float())
    assert len(wide.unique()) == NUM_NODES * 3
    assert bool((wide >= -1).all())
    assert bool((wide < 1).all())
    assert abs(float(wide.mean())) < 3 / 120**0.5


def train_all_kinds(folder: Path) -> dict[str, Any]:
    results: dict[str, Any] = {}
    with start_session(seed=3) as session:
        g = DistGraph(folder)
        alone = session.topology.world_size == 1
        for kind in (*KINDS, *(["async"] if alone else [])):
            embed = embeddings(g, kind)
            before = [e.weight.to_local() for e in embed]
            late = {"mode": "async", "staleness": 0} if kind == "async" else {}
            optimizer = make_optimizer("sgd" if late else kind, embed, **late)
            g.barrier()
            snapshot = session.ledger.snapshot()
            train(g, embed, optimizer, range(STEPS))
            sent = [row for row in session.ledger.since(snapshot) if row.phase == "sparse_gradients"]
            untouched = [state[30:] for e in embed for state in e.optm_state]
            results[kind] = {
                "before": [rows.tolist() for rows in before],
                "after": [e.weight.to_local().tolist() for e in embed],
                "untouched_state": sum(float(rows.abs().sum()) for rows in untouched),
                "sent": sum(row.num_bytes for row in sent),
            }
            g.barrier()
    return results


@pytest.mark.parametrize(("ranks", "per_server"), [(1, 1), (2, 1), (4, 2), *wide((2, 2), (3, 3))])
def test_equal_to_torch_on_one_process(small_dataset: Path, ranks: int, per_server: int) -> None:
    results = run_ranks(train_all_kinds, ranks, args=(small_dataset,), ranks_per_server=per_server)
    for kind in results[0]:
        before = [torch.tensor(rows, dtype=torch.float64) for rows in results[0][kind]["before"]]
        reference = train_in_torch("sgd" if kind == "async" else kind, before, ranks)
        for result in results:
            for first, target, rows in zip(before, reference, result[kind]["after"], strict=True):
                after = torch.tensor(rows, dtype=torch.float64)
                torch.testing.assert_close(after, target, rtol=0, atol=1e-10)
                assert torch.equal(after[30:], first[30:])
                assert not torch.equal(after[:30], first[:30])
            assert result[kind]["untouched_state"] == 0.0
        assert ranks == 1 or sum(result[kind]["sent"] for result in results) > 0


def fill(first: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    rows = torch.empty(count, 3, dtype=dtype)
    fill_uniform(rows, first, 5, "e")
    return rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_row_is_the_same_whoever_makes_it(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    full = fill(0, 50, dtype)
    assert torch.equal(torch.cat([fill(0, 7, dtype), fill(7, 0, dtype), fill(7, 43, dtype)]), full)
    assert torch.equal(full, fill(0, 50).to(dtype))
    # Four rows at a time: short rows are made through a buffer.
    monkeypatch.setattr(row_init, "_CHUNK_BYTES", 4 * 4 * 3)
    assert torch.equal(fill(0, 50, dtype), full)
