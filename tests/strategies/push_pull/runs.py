"""One run of push-pull in a rank: several batches an epoch, uneven shares, and notes of all that matters."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import dgl
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.strategies.base import STRATEGIES
from dglx_dist.strategies.push_pull.pipeline import Side, Version
from tests.strategies import equality

EPOCHS, BATCH, STEPS = 2, 20, 4
SHARES = {"even": (1.0, 1.0, 1.0, 1.0), "uneven": (1.0, 4.0, 2.0, 3.0), "empty": (3.0, 0.0, 2.0, 1.0)}
PART_NAMES = {
    "sage": ("convs.0.fc_neigh.weight", "convs.0.fc_self.weight"),
    "gcn": ("convs.0.weight",),
    "gat": ("convs.0.fc.weight", "convs.0.attn_l", "convs.0.attn_r"),
}
"""Parameters that are used before the sum over the parts."""

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=equality.RATE),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, weight_decay=0.01),
}


@dataclass(frozen=True)
class Run:
    kind: str
    options: Mapping[str, Any]
    optimizer: str = "sgd"
    share: str = "uneven"
    drains: tuple[int, ...] = ()
    """After which batches somebody looks at the weights: at the state and the uncut model in turn."""
    peeks: tuple[int, ...] = ()
    """Batches in which the weights are read between backward and step."""
    calls: int = 1
    """How often the model is called for a batch; the loss is the mean."""
    set_to_none: bool = True
    """Argument of the user's ``zero_grad``."""
    strategy: str = "push_pull"

    @property
    def depth(self) -> int:
        return int(self.options.get("depth", 1))


@dataclass
class Notes:
    weights: list[Any] = field(default_factory=list)
    log: Sequence[Version] = ()
    targets: list[list[int]] = field(default_factory=list)
    """Original ids, by batch."""
    moved: Counter[str] = field(default_factory=Counter)
    left: dict[str, int] = field(default_factory=dict)
    """Counts of objects that an epoch left behind."""


SIDES: tuple[Side, Side] = ("M", "D")
SIZES = ("L0", "D1", "E1")


def size_of(block: Any) -> tuple[int, int, int]:
    return block.num_src_nodes(), block.num_dst_nodes(), block.num_edges()


def sampler() -> Any:
    return dgl.dataloading.MultiLayerFullNeighborSampler(
        2, prefetch_node_feats=["feat"], prefetch_labels=["label"]
    )


def first_model(kind: str) -> nn.Module:
    torch.manual_seed(11)
    return equality.PlainModel(kind).double()


def train(g: DistGraph, run: Run) -> Notes:
    session, notes = g.session, Notes()
    rank, world_size = session.topology.rank, session.topology.world_size
    ids = equality.new_ids_of_training(g)[: BATCH * STEPS]
    own_ids = equality.cut(ids, SHARES[run.share], rank, world_size)
    strategy = STRATEGIES.get(run.strategy)(session, run.options).open(g)
    # The largest share is STEPS batches, so that all ranks have at most that many.
    largest = max(len(equality.cut(ids, SHARES[run.share], r, world_size)) for r in range(world_size))
    loader = strategy.loader(own_ids, sampler(), batch_size=-(-largest // STEPS), shuffle=True, seed=5)
    model: Any = strategy.wrap(first_model(run.kind))
    optimizer = OPTIMIZERS[run.optimizer](model.parameters())
    before = session.ledger.snapshot()
    for _ in range(EPOCHS):
        for _, targets, blocks in loader:
            optimizer.zero_grad(set_to_none=run.set_to_none)
            losses = [choose_loss(model, blocks) for _ in range(run.calls)]
            torch.stack(losses).mean().backward()  # type: ignore[no-untyped-call]  # torch leaves it bare
            if len(notes.targets) in run.peeks:
                _ = model.state_dict()
            optimizer.step()
            if len(notes.targets) in run.drains:
                _ = model.state_dict() if len(notes.targets) % 2 else model.whole()
            notes.targets.append(g.orig_ids(targets, "_N").tolist())
            for name, count in zip(SIZES, size_of(blocks[0]), strict=True):
                notes.moved[name] += count
    notes.moved += equality.moved_since(session, before)
    state = model.state_dict()
    notes.weights = [state[name].numpy().copy() for name, _ in first_model(run.kind).named_parameters()]
    if run.strategy == "push_pull":
        notes.log, notes.left = model.versions, left_over(model)
    return notes


def left_over(model: Any) -> dict[str, int]:
    pipeline = model._pipeline
    return {
        "begun": int(pipeline._begun is not None),
        "pushed": len(pipeline._pushed),
        "computed": len(pipeline._ready),
        "delayed": len(pipeline.exchange._pending),
        "placed": int(pipeline._owner._live is not None),
        "unread": sum(
            len(exchange._inbox) for exchange in (pipeline._activations._pulls, pipeline._activations._pushes)
        ),
        "waiting": len(pipeline.log.waiting),
    }


def choose_loss(model: nn.Module, blocks: Any) -> Tensor:
    return F.cross_entropy(model(blocks, blocks[0].srcdata["feat"]), blocks[-1].dstdata["label"])


def plain_loss(targets: Sequence[Sequence[int]]) -> Callable[[nn.Module, int], Tensor]:
    graph = equality.plain_graph()

    def compute_loss(model: nn.Module, batch: int) -> Tensor:
        scores = model([graph, graph], graph.ndata["feat"])[targets[batch]]
        return F.cross_entropy(scores, graph.ndata["label"][targets[batch]])

    return compute_loss


def simulate(
    run: Run, log: Sequence[Version], model: nn.Module, choose_loss: Callable[[nn.Module, int], Tensor]
) -> list[Any]:
    simulated = delayed_sgd(model, PART_NAMES[run.kind], log, choose_loss, OPTIMIZERS[run.optimizer])
    return [simulated[name].numpy() for name, _ in first_model(run.kind).named_parameters()]


def of_all_ranks(notes: Sequence[Notes]) -> list[list[int]]:
    by_batch = zip(*(note.targets for note in notes), strict=True)
    return [[target for of_rank in batch for target in of_rank] for batch in by_batch]


LossOf = Callable[[nn.Module, int], Tensor]
"""A model and the number of a batch to the mean loss over all targets of all ranks."""

MakeOptimizer = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]


def delayed_sgd(
    model: nn.Module,
    part_names: Sequence[str],
    log: Sequence[Version],
    choose_loss: LossOf,
    make: MakeOptimizer,
) -> dict[str, Tensor]:
    """Train ``model`` as ``log`` tells and return its weights.

    The weights of a side after n of its steps are its version n. The gradient of a batch is taken where M has
    the version that M read and D the one that D read; it is applied to make version ``written`` + 1.

    Args:
        model: With the first weights; both sides' gradients come from one backward through it.
        part_names: Parameters of the side M; all others are D's.
        log: Every batch once on each side, in the order of the steps.
        choose_loss: The loss.
        make: Each side gets an optimizer of its own.
    """
    named = dict(model.named_parameters())
    names = {"M": [n for n in named if n in part_names], "D": [n for n in named if n not in part_names]}
    history: dict[str, list[dict[str, Tensor]]] = {
        side: [{n: named[n].detach().clone() for n in names[side]}] for side in SIDES
    }
    live = {side: {n: nn.Parameter(named[n].detach().clone()) for n in names[side]} for side in SIDES}
    optimizers = {side: make(list(live[side].values())) for side in SIDES}
    reads = {side: {entry.batch: entry.read for entry in log if entry.side == side} for side in SIDES}
    assert all(sorted(reads[side]) == list(range(len(log) // 2)) for side in SIDES)

    @cache
    def gradients_of(batch: int) -> Mapping[str, Tensor | None]:
        for side in SIDES:
            for name, value in history[side][reads[side][batch]].items():
                named[name].data = value.clone()
        model.zero_grad()
        choose_loss(model, batch).backward()  # type: ignore[no-untyped-call]  # torch leaves it bare
        return {n: None if p.grad is None else p.grad.clone() for n, p in named.items()}

    steps: dict[tuple[Side, int], list[int]] = {}
    for entry in log:
        steps.setdefault((entry.side, entry.written), []).append(entry.batch)
    for (side, written), batches in steps.items():
        assert written == len(history[side]) - 1
        for name, parameter in live[side].items():
            gradients = [grad for batch in batches if (grad := gradients_of(batch)[name]) is not None]
            parameter.grad = torch.stack(gradients).sum(0) if gradients else None
        optimizers[side].step()
        history[side].append({n: p.detach().clone() for n, p in live[side].items()})
    return {n: value for side in SIDES for n, value in history[side][-1].items()}
