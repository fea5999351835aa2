"""Sparse gradients: summed by row, encoded, exchanged between ranks to the byte."""

import os
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dglx_dist.comm.collectives import barrier
from dglx_dist.comm.session import Session, start_session
from dglx_dist.errors import ConfigError, PeerError
from dglx_dist.graph import optim
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.graph.embedding import DistEmbedding
from dglx_dist.graph.partition_book import RowOwners
from dglx_dist.graph.sparse_gradient import compute_weight
from dglx_dist.records import StepShare
from tests.graph.small import NUM_NODES, zeros
from tests.graph.sparse_cases import DIM
from tests.helpers import refusal, wide
from tests.helpers.ranks import run_ranks

QUARTER, NONE = StepShare(num_local=1, num_global=4), StepShare(num_local=0, num_global=4)
WHOLE = StepShare(num_local=1, num_global=1)
"""With it gradients are summed as they are."""


def test_a_mean_weighs_as_much_as_its_targets_and_a_sum_one() -> None:
    assert (compute_weight(QUARTER, "mean", 2), compute_weight(QUARTER, "sum", 2)) == (0.25, 1.0)
    assert (compute_weight(NONE, "mean", 2), compute_weight(NONE, "sum", 2)) == (0.0, 0.0)
    assert (compute_weight(None, "mean", 1), compute_weight(None, "sum", 2)) == (1.0, 1.0)


def test_another_number_of_embeddings_is_refused(graph: DistGraph) -> None:
    optimizer = optim.SparseSGD([DistEmbedding(NUM_NODES, 1, "a"), DistEmbedding(NUM_NODES, 1, "b")], lr=1.0)
    with pytest.raises(ConfigError, match=r"rank 1 sent gradients of 1 embeddings .* optimizer of 2"):
        optimizer._exchange._receive("1 1 1 ", [np.array([1]), np.ones((1, 2))])


def count_bytes(folder: Path) -> None:
    with start_session() as session:
        g = DistGraph(folder)
        embedding = DistEmbedding(NUM_NODES, DIM, "one", dtype=torch.float64)
        two = DistEmbedding(NUM_NODES, 5, "two", dtype=torch.bfloat16)
        optimizer = optim.SparseSGD([embedding, two], lr=0.1)
        rank, world = g.rank(), session.topology.world_size
        session.step_share = WHOLE
        before = session.ledger.snapshot()
        # Rows 4 to 35 with repeats in and between the calls; the second embedding on rank 0 only.
        ids = torch.tensor([4, 9, 9, 35, 20 + rank])
        (embedding(ids).sum() + embedding(ids + 1).sum()).backward()
        if rank == 0:
            two(ids).sum().backward()
        optimizer.step()
        sent = np.zeros(world, np.int64)
        for row in session.ledger.since(before):
            sent[row.destination] += row.num_bytes * (row.phase == "sparse_gradients")
        owners = RowOwners(embedding.part_policy.bounds, session.topology)
        distinct = np.unique(torch.cat([ids, ids + 1]).numpy())
        rows = np.bincount(owners.find_rank(distinct), minlength=world)
        short_rows = np.bincount(owners.find_rank(np.unique(ids.numpy())), minlength=world) * (rank == 0)
        expected = rows * (8 + DIM * 8) + short_rows * (8 + 5 * 4)
        expected[rank] = 0
        assert sent.tolist() == expected.tolist()
        assert sent.any()
        g.barrier()


@pytest.mark.parametrize(("ranks", "per_server"), [(2, 1), *wide((3, 3))])
def test_eight_bytes_and_one_row_for_each_distinct_row_of_another_rank(
    small_dataset: Path, ranks: int, per_server: int
) -> None:
    run_ranks(count_bytes, ranks, args=(small_dataset,), ranks_per_server=per_server)


def step_with_one_bad_rank(folder: Path) -> None:
    with start_session() as session:
        g = DistGraph(folder)
        embedding = DistEmbedding(NUM_NODES, 1, "e", init_func=zeros)
        optimizer = optim.SparseSGD([embedding], lr=1.0)
        if g.rank() == 0:
            session.step_share = StepShare(num_local=1, num_global=2)
        embedding([g.rank()]).sum().backward()
        message = "^rank 1 on .*set session.step_share" if g.rank() == 0 else "^an embedding was called"
        with pytest.raises(ConfigError, match=message):
            optimizer.step()
        session.step_share = StepShare(num_local=1, num_global=2)
        embedding([g.rank()]).sum().backward()
        optimizer.step()
        assert embedding.weight[[0, 1]].tolist() == [[-0.5], [-0.5]]
        with pytest.raises(ConfigError, match="use the same arguments on all ranks"):
            optim.SparseSGD([embedding], lr=1.0 + g.rank())
        g.barrier()


def test_an_error_on_one_rank_is_one_on_all_and_changes_nothing(small_dataset: Path) -> None:
    run_ranks(step_with_one_bad_rank, 2, args=(small_dataset,), ranks_per_server=1)


def only_rank_0_steps(folder: Path) -> str:
    # Rank 1 must still be where it is when rank 0 gives up and asks, so it waits for longer.
    with start_session(timeout_s=3.0 if os.environ["RANK"] == "0" else 30.0) as session:
        g = DistGraph(folder)
        optimizer = optim.SparseSGD([DistEmbedding(NUM_NODES, 1, "e")], lr=1.0)
        session.step_share = WHOLE
        return refusal(partial(barrier, session, "somewhere else") if g.rank() else optimizer.step, PeerError)


def test_error_names_the_rank_that_does_not_step(small_dataset: Path) -> None:
    text, second = run_ranks(only_rank_0_steps, 2, args=(small_dataset,))
    for part in ("rank 1 on", "every rank must call step()", "somewhere else"):
        assert part in text
    assert second


class SlowOwner:
    """Stands before an optimiser's handler and lets calls through when told to."""

    def __init__(self, session: Session, optimizer: Any) -> None:
        self.open = threading.Event()
        self.handler = optimizer._exchange._receive
        session.rpc.unregister(optimizer._exchange._op)
        session.rpc.register(optimizer._exchange._op, self.handle)

    def handle(self, name: str, arrays: Sequence[Any]) -> Sequence[Any]:
        assert self.open.wait(60)
        return self.handler(name, arrays)


def push_to_a_slow_owner(folder: Path) -> Any:
    with start_session() as session:
        g = DistGraph(folder)
        embedding = DistEmbedding(NUM_NODES, 1, "e", init_func=zeros)
        optimizer = optim.SparseSGD([embedding], lr=1.0, mode="async", staleness=2)
        session.step_share = WHOLE
        last = NUM_NODES - 1  # of rank 1
        if g.rank() == 1:
            slow = SlowOwner(session, optimizer)
            g.barrier()
            barrier(session, "pulled")
            barrier(session, "two steps done")
            seen = float(embedding.weight.local_rows()[-1])
            # Only when the pushing rank says that it waits.
            while "pushes of" not in str(session.rpc.get_peer_status([0], 5.0)[0]):
                pass
            slow.open.set()
        else:
            g.barrier()
            # Pulled now: the owner's threads will all stand still.
            losses = [embedding([last]).sum() for _ in range(3)]
            barrier(session, "pulled")
            for loss in losses[:2]:
                loss.backward()
                optimizer.step()
            early = optimizer.staleness_report()
            barrier(session, "two steps done")
            losses[2].backward()
            optimizer.step()
            seen = (early.largest_lag, early.mean_lag, early.waits)
        optimizer.flush()
        report = optimizer.staleness_report()
        rows = embedding.weight[[last]].tolist()
        g.barrier()
        return seen, (report.steps, report.largest_lag, report.waits), rows


def test_late_updates_are_bounded_and_reported(small_dataset: Path) -> None:
    pusher, owner = run_ranks(push_to_a_slow_owner, 2, args=(small_dataset,), ranks_per_server=1)
    assert pusher == ((2, 1.5, 0), (3, 2, 1), [[-3.0]])
    assert owner == (0.0, (0, 0, 0), [[-3.0]])
