import subprocess
import sys

import numpy as np
import pytest

from dglx_dist.data.partition.base import PARTITIONERS, Partitioner, PartitionOptions, default_partitioner
from dglx_dist.data.partition.base import PARTITIONERS as SAME
from dglx_dist.errors import ConfigError, UnknownNameError
from dglx_dist.records import Assignment, RawGraph
from dglx_dist.registry import Registry

NAMES = [
    "contiguous",
    "feature",
    "fennel",
    "file",
    "hash",
    "hierarchical",
    "kaminpar",
    "ldg",
    "metis",
    "random",
]


def test_the_built_in_names_are_there() -> None:
    assert set(NAMES) <= set(PARTITIONERS.names())
    assert all(issubclass(PARTITIONERS.get(name), Partitioner) for name in NAMES)


def test_a_misspelt_name_gets_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'metis'"):
        PARTITIONERS.get("mettis")


def test_ones_own_partitioner_is_known_by_its_decorator() -> None:
    # A registry of its own: what a test adds to the shared one would stay for the others.
    registry: Registry[Partitioner] = Registry("partitioner", Partitioner, builtin={}, group="none")

    @registry.register("even_odd")
    class EvenOdd(Partitioner):
        def assign(self, graph: RawGraph, num_parts: int, seed: int) -> Assignment:
            parts = {t: (np.arange(n) % 2).astype(np.int32) for t, n in graph.num_nodes.items()}
            return Assignment(num_parts=num_parts, part_of=parts, method="even_odd", seed=seed)

    assert registry.get("even_odd") is EvenOdd
    with pytest.raises(ConfigError, match="name 'even_odd' is taken"):
        registry.register("even_odd")(EvenOdd)


def test_the_decorator_writes_into_the_registry() -> None:
    with pytest.raises(ConfigError, match="is taken"):
        SAME.register("metis")(PARTITIONERS.get("metis"))


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (PartitionOptions(), "kaminpar"),
        (PartitionOptions(balance=("degree",)), "kaminpar"),
        (PartitionOptions(target_weights=(1, 2)), "kaminpar"),
        (PartitionOptions(balance=("train",)), "metis"),
        (PartitionOptions(balance=("nodes", "degree")), "metis"),
        (PartitionOptions(balance=("ntype",)), "metis"),
        (PartitionOptions(objective="vol"), "metis"),
    ],
)
def test_the_default_is_the_fastest_that_can_do_it(options: PartitionOptions, name: str) -> None:
    assert default_partitioner(options) == name
    PARTITIONERS.get(name)(options)


def test_importing_the_room_imports_no_library_of_a_plugin() -> None:
    heavy = {"dgl", "torch", "pymetis", "kaminpar"}
    code = f"import sys, dglx_dist.data.partition.base; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
