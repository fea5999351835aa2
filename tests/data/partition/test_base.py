"""Assignments, options and the registry of partitioners."""

import subprocess
import sys

import pytest

from dglx_dist.data.partition.base import PARTITIONERS, PartitionOptions, default_partitioner
from dglx_dist.errors import ConfigError

SAID = {
    "balance": PartitionOptions(balance=("degree",)),
    "tolerance": PartitionOptions(tolerance=0.1),
    "target_weights": PartitionOptions(target_weights=(1, 2)),
    "objective": PartitionOptions(objective="vol"),
    "fast": PartitionOptions(fast=True),
    "servers": PartitionOptions(servers=2),
    "workers": PartitionOptions(workers=2),
    "inner": PartitionOptions(inner="metis"),
    "file": PartitionOptions(file="parts.npy"),
    "threads": PartitionOptions(threads=2),
    "passes": PartitionOptions(passes=2),
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


@pytest.mark.parametrize(
    ("balance", "constraints"),
    [
        ((), ("nodes",)),
        (["nodes"], ("nodes",)),
        (("nodes",), ("nodes",)),
        (("degree",), ("degree",)),
        (("train", "val"), ("nodes", "train", "val")),
        (("train", "degree"), ("train", "degree")),
        (("ntype",), ("ntype",)),
    ],
)
def test_balances_nodes_where_nothing_else_does(
    balance: tuple[str, ...], constraints: tuple[str, ...]
) -> None:
    assert PartitionOptions(balance=balance).constraints == constraints


def test_a_tolerance_is_one_for_all_or_by_name() -> None:
    assert PartitionOptions(tolerance=0.1).tolerance_of("train") == 0.1
    by_name = PartitionOptions(balance=("train",), tolerance={"train": 0.2})
    assert (by_name.tolerance_of("train"), by_name.tolerance_of("nodes")) == (0.2, 0.05)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"balance": "train"}, "must be a tuple"),
        ({"balance": ("train", "train")}, "'train' twice"),
        ({"tolerance": 0.0}, "tolerance of every constraint is 0.0"),
        ({"tolerance": float("nan")}, "nan"),
        ({"tolerance": {"trian": 0.1}}, "'trian', which is not balanced"),
        ({"objective": "volume"}, "objective is volume; it must be cut or vol"),
        ({"target_weights": (1.0, 0.0)}, r"target_weights\[1\] is 0.0"),
        ({"servers": 0}, "servers is 0"),
        ({"workers": -1}, "workers is -1"),
        ({"threads": 0}, "threads is 0"),
        ({"passes": 0}, "passes is 0"),
    ],
)
def test_a_wrong_value_is_named(fields: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        PartitionOptions(**fields)


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
