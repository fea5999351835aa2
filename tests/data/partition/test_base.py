import numpy as np
import pytest

from dglx_dist.data.partition.base import PARTITIONERS, Partitioner, PartitionOptions
from dglx_dist.errors import ConfigError
from dglx_dist.records import Assignment, RawGraph

SAID = {
    "balance": PartitionOptions(balance=("degree",)),
    "tolerance": PartitionOptions(tolerance=0.1),
    "target_weights": PartitionOptions(target_weights=(1, 2)),
    "objective": PartitionOptions(objective="vol"),
    "fast": PartitionOptions(fast=True),
    "servers": PartitionOptions(servers=2),
    "workers": PartitionOptions(workers=2),
    "inner": PartitionOptions(inner="metis"),
    "file": PartitionOptions(file="parts.txt"),
    "vector": PartitionOptions(vector=np.zeros(6, dtype=int)),
    "threads": PartitionOptions(threads=2),
}


@pytest.mark.parametrize("name", PARTITIONERS.names())
@pytest.mark.parametrize("option", SAID)
def test_an_option_is_honoured_or_refused_at_start(name: str, option: str) -> None:
    plugin = PARTITIONERS.get(name)
    if option in plugin.honours:
        assert plugin(SAID[option]).options is SAID[option]
    else:
        with pytest.raises(ConfigError, match=f"{plugin.__name__} does not support {option}="):
            plugin(SAID[option])


def test_every_option_is_tried_above() -> None:
    assert set(SAID) == set(PartitionOptions.__dataclass_fields__)


def test_what_a_plugin_does_not_name_is_refused() -> None:
    class Mine(Partitioner):
        def assign(self, graph: RawGraph, num_parts: int, seed: int) -> Assignment:
            raise NotImplementedError

    assert Mine(PartitionOptions(balance=("nodes",))).options.balance == ("nodes",)
    with pytest.raises(ConfigError, match="Mine does not support fast=True"):
        Mine(PartitionOptions(fast=True))
