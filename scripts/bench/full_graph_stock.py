"""Stock DistDGL beside full-graph training: the same graph and cut, in mini-batches."""

from __future__ import annotations

from scripts.bench.full_graph import (
    BASE,
    EVERY,
    RANKS_PER_SERVER,
    SERVERS,
    Setting,
    Size,
    cut_of,
    graph_of,
)
from scripts.bench.peers.launch import KIND
from scripts.bench.records import BenchPlan, Job, MatchedPhi, Shape, Variant
from scripts.bench.stock_launch import stock_launch

STOCK = "stock DistDGL, mini-batches"
_BATCH_SIZE, _FANOUTS = 128, (15, 10)


def stock(plan: BenchPlan, size: Size, setting: Setting) -> Variant:
    """Return GraphSAGE of the setting's width under stock DistDGL, with a curve of its accuracy.

    Raises:
        StorageError: the datasets cannot be written.
    """
    launch = stock_launch(
        graph_of(plan, size, setting),
        cut_of(setting),
        setting.cut,
        work=plan.work,
        epochs=size.epochs,
        hidden=setting.hidden,
        fanouts=_FANOUTS,
        batch_size=_BATCH_SIZE,
        lr=0.01,
    )
    # An epoch has many steps, so fewer of them reach an accuracy.
    drawn = {"warmup": 0, "epochs": max(size.curve_epochs // EVERY, 1), "options": {"accuracy_every": 1}}
    return Variant(
        name=setting.named(STOCK),
        shape=Shape(servers=SERVERS, ranks_per_server=RANKS_PER_SERVER),
        job=Job(kind=KIND, params=launch.params(), warm={"epochs": 1, "warmup": 0}),
        rate=MatchedPhi(phi=setting.phi, baseline=setting.named(BASE)),
        curve=Job(kind=KIND, params={**launch.params(), **drawn}),
    )
