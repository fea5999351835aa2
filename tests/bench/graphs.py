"""A small clustered graph for the bench's tests, and the context of a rank without a pool."""

from pathlib import Path

from dglx_dist.comm.topology import read_topology
from dglx_dist.data.synthetic import SyntheticConfig
from dglx_dist.prepare import PartitionPlan
from scripts.bench.worker import JobContext, Place

SMALL = SyntheticConfig(nodes=600, degree=8, classes=4, features=12, communities=8, train_rate=0.2, seed=3)
HALVES = PartitionPlan(num_parts=2, method="random")


def params_of(folder: Path, **changed: object) -> dict[str, object]:
    """Parameters of a short training job."""
    return {"data": str(folder), "hidden": 8, "fanouts": [3, 2], "batch_size": 16, **changed}


def context() -> JobContext:
    """The context of this rank; every rank is a server of its own, on plain loopback."""
    topology = read_topology()
    return JobContext(
        rank=topology.rank,
        world_size=topology.world_size,
        ranks_per_server=1,
        places=(Place(address="127.0.0.1", device=None),) * topology.world_size,
        folder=Path("unused"),
        number=0,
        timeout_s=100.0,
    )
