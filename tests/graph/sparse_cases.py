"""Training of embeddings on some ranks, and the same in one process with torch, for tests of this room."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dglx_dist.graph import optim
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.graph.embedding import DistEmbedding
from dglx_dist.records import StepShare
from tests.graph.small import NUM_NODES

STEPS = 6
DIM = 3
KINDS = ("sgd", "adagrad", "adam")


def batch(step: int, rank: int, world: int) -> Tensor:
    """Ids of one rank: uneven, with repeats within and across ranks; the last rank has none at first.

    Rows 30 and above are in nobody's batch.
    """
    if step < 2 and rank == world - 1 and world > 1:
        return torch.empty(0, dtype=torch.int64)
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, 30, (3 + 4 * rank + step,), generator=generator)


def targets(ids: Tensor, step: int) -> Tensor:
    """(K, DIM) float64 that depend on the ids and the step alone."""
    return torch.sin(ids.double()[:, None] * torch.arange(1, DIM + 1, device=ids.device) + step)


def predict(embed: Sequence[Callable[[Tensor], Tensor]], ids: Tensor) -> Tensor:
    """Two embeddings, of which one is called twice and the other of the neighbouring row."""
    first, second = embed
    return first(ids) * second((ids + 1) % 30) + 0.5 * first((ids * 7) % 30)


def choose_loss(embed: Sequence[Callable[[Tensor], Tensor]], ids: Tensor, step: int) -> Tensor:
    """Mean over the ids; of none it is nan, as a user's would be."""
    return ((predict(embed, ids) - targets(ids, step)) ** 2).sum(1).mean()


def make_optimizer(kind: str, params: Sequence[DistEmbedding], **options: Any) -> Any:
    if kind == "sgd":
        return optim.SparseSGD(params, lr=0.5, **options)
    if kind == "adagrad":
        return optim.SparseAdagrad(params, lr=0.1, **options)
    return optim.SparseAdam(params, lr=0.05, **options)


def torch_optimizer(kind: str, params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(params, lr=0.5)
    if kind == "adagrad":
        return torch.optim.Adagrad(params, lr=0.1)
    return torch.optim.SparseAdam(list(params), lr=0.05)


def embeddings(
    g: DistGraph, kind: str, dtype: torch.dtype = torch.float64
) -> tuple[DistEmbedding, DistEmbedding]:
    return (
        DistEmbedding(NUM_NODES, DIM, f"{kind}-one", dtype=dtype, graph=g),
        DistEmbedding(NUM_NODES, DIM, f"{kind}-two", dtype=dtype, graph=g),
    )


def train(g: DistGraph, embed: Sequence[DistEmbedding], optimizer: Any, steps: range) -> None:
    topology = g.session.topology
    for step in steps:
        sizes = [len(batch(step, rank, topology.world_size)) for rank in range(topology.world_size)]
        ids = batch(step, topology.rank, topology.world_size)
        g.session.step_share = StepShare(num_local=len(ids), num_global=sum(sizes))
        loss = choose_loss(embed, ids, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def train_in_torch(kind: str, first_values: Sequence[Tensor], world: int, steps: int = STEPS) -> list[Tensor]:
    embed = [nn.Embedding.from_pretrained(rows.clone(), freeze=False, sparse=True) for rows in first_values]
    optimizer = torch_optimizer(kind, [module.weight for module in embed])
    for step in range(steps):
        ids = torch.cat([batch(step, rank, world) for rank in range(world)])
        optimizer.zero_grad()
        choose_loss(embed, ids, step).backward()
        optimizer.step()
    return [module.weight.detach() for module in embed]
