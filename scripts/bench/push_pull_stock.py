"""Stock DistDGL in the setting of the experiments with push-pull: the same graph, the same hash cut."""

from __future__ import annotations

from dglx_dist.planner.records import Rate
from scripts.bench.peers.launch import KIND
from scripts.bench.push_pull import SERVERS, Case, Size, cut_of, graph_of
from scripts.bench.records import BenchPlan, Job, MatchedPhi, Shape, Variant
from scripts.bench.stock_launch import stock_launch

STOCK = "stock DistDGL, hash, 16"


def stock(plan: BenchPlan, size: Size, *, rate: Rate | MatchedPhi) -> Variant:
    """Return GraphSAGE of width 16 under stock DistDGL, launched anew for every repetition.

    Raises:
        StorageError: the datasets cannot be written.
    """
    case = Case(name=STOCK, rate=rate)
    launch = stock_launch(
        graph_of(size, case.features, plan.seed),
        cut_of(case.cut, SERVERS),
        case.cut,
        work=plan.work,
        epochs=size.epochs,
        hidden=case.hidden,
        fanouts=case.fanouts,
        batch_size=size.batch_size,
    )
    job = Job(kind=KIND, params=launch.params(), warm={"epochs": 1, "warmup": 0})
    return Variant(name=STOCK, shape=Shape(servers=SERVERS), job=job, rate=rate)
