"""Embeddings and the state of their optimizers, saved and loaded with a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dglx_dist.comm.session import start_session
from dglx_dist.comm.topology import Topology
from dglx_dist.errors import CheckpointError
from dglx_dist.graph import optim
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.graph.embedding import DistEmbedding
from dglx_dist.records import StepShare
from dglx_dist.strategies.data_parallel import DataParallelModel
from dglx_dist.training import checkpoint
from tests.graph.small import NUM_NODES, build, write
from tests.helpers import wide
from tests.helpers.ranks import run_ranks
from tests.training.test_checkpoint import Position

STEPS, STOP = 6, 3


class Run:
    """A linear model over trainable rows, on this rank's ids."""

    def __init__(self, folder: Path, session: Any) -> None:
        torch.manual_seed(0)
        self.session = session
        self.g = DistGraph(folder)
        self.rows = DistEmbedding(NUM_NODES, 4, "rows")
        self.sparse = optim.SparseAdam([self.rows], lr=0.05)
        net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
        self.model = DataParallelModel(net, session, reduction="mean", bucket_bytes=1 << 20)
        self.dense = torch.optim.Adam(self.model.parameters(), lr=0.05)
        torch.manual_seed(session.topology.rank)

    def train(self, steps: range) -> None:
        for step in steps:
            ids = (torch.arange(5 + self.g.rank()) * 3 + step) % NUM_NODES
            world = self.session.topology.world_size
            self.session.step_share = StepShare(
                num_local=len(ids), num_global=5 * world + world * (world - 1) // 2
            )
            loss = self.model(self.rows(ids)).pow(2).mean()
            for optimizer in (self.dense, self.sparse):
                optimizer.zero_grad()
            loss.backward()
            for optimizer in (self.dense, self.sparse):
                optimizer.step()

    def parts(self, step: int = 0) -> dict[str, Any]:
        self.loader = Position(step)
        return {"model": self.model, "optimizer": self.dense, "loader": self.loader}

    def everything(self) -> list[Any]:
        tensors = [self.rows.weight.to_local(), *(state.to_local() for state in self.sparse.tables[0].states)]
        return [tensor.tolist() for tensor in [*tensors, *self.model.state_dict().values()]]


def train_to_the_end(folder: Path, saved: Path) -> list[Any]:
    with start_session(seed=1) as session:
        run = Run(folder, session)
        run.train(range(STOP))
        extra: dict[str, Any] = {"extra": {"note": [1, 2.5]}, "dataset": {"nodes": 5, "edges": 7}}
        checkpoint.save(saved, **run.parts(STOP), sparse=run.sparse, step=STOP, **extra)
        run.train(range(STOP, STEPS))
        return run.everything()


def resume(folder: Path, saved: Path) -> tuple[list[Any], str, str]:
    with start_session(seed=9) as session:
        run = Run(folder, session)
        with pytest.raises(CheckpointError) as without:
            checkpoint.load(saved, **run.parts())
        other = optim.SparseAdagrad([run.rows], lr=0.05)
        with pytest.raises(CheckpointError) as wrong:
            checkpoint.load(saved, **run.parts(), sparse=other)
        resumed = checkpoint.load(saved, **run.parts(), sparse=run.sparse, dataset={"nodes": 5})
        assert (run.loader.at, resumed.extra) == ({"epoch": 0, "step": STOP}, {"note": [1, 2.5]})
        run.train(range(resumed.step, STEPS))
        return run.everything(), str(without.value), str(wrong.value)


@pytest.mark.parametrize("per_server", [1, *wide(2)])
def test_a_resumed_run_is_equal_to_the_last_bit(tmp_path: Path, per_server: int) -> None:
    write(build(), tmp_path / "small")
    arguments = (tmp_path / "small", tmp_path / "saved")
    whole = run_ranks(train_to_the_end, 2, args=arguments, ranks_per_server=per_server)
    again = run_ranks(resume, 2, args=arguments, ranks_per_server=3 - per_server)
    for mine, (resumed, without, wrong) in zip(whole, again, strict=True):
        assert resumed == mine
        assert "pass sparse=" in without
        assert "'SparseAdam', this run has 'SparseAdagrad'" in wrong


def test_several_optimisers_are_saved_in_their_order(tmp_path: Path) -> None:
    write(build(), tmp_path / "small")
    model = torch.nn.Linear(1, 1)
    with start_session(topology=Topology(0, 1, (0,)), seed=1):
        g = DistGraph(tmp_path / "small")
        rows = [DistEmbedding(NUM_NODES, width, f"rows-{width}", graph=g) for width in (1, 2)]
        both = [optim.SparseAdam(rows[:1], lr=0.1), optim.SparseSGD(rows[1:], lr=0.2, mode="async")]
        (rows[0]([3]).sum() + rows[1]([4]).sum()).backward()
        for optimizer in both:
            optimizer.step()
        saved = [embedding.weight.to_local() for embedding in rows]
        path = checkpoint.save(tmp_path / "saved", model=model, sparse=both)
        for embedding, optimizer in zip(rows, both, strict=True):
            embedding.weight[[3, 4]] = torch.zeros(2, embedding.embedding_dim)
            optimizer.lr = 9.0
        for wrong, message in (
            (both[:1], "has 2 optimisers of embeddings, but sparse= has 1"),
            (both[::-1], "'SparseAdam', this run has 'SparseSGD'"),
            ([], "pass sparse="),
        ):
            with pytest.raises(CheckpointError, match=message):
                checkpoint.load(path, model=model, sparse=wrong)
        checkpoint.load(path, model=model, sparse=both)
        assert [optimizer.lr for optimizer in both] == [0.1, 0.2]
        assert all(torch.equal(e.weight.to_local(), then) for e, then in zip(rows, saved, strict=True))
