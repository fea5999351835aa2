"""Plugins: built in, announced by another package, or made known by a decorator."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from dglx_dist.data.partition.base import PARTITIONERS, PartitionOptions
from dglx_dist.errors import ConfigError, UnknownNameError
from dglx_dist.registry import Registry

PLUGIN = """
import numpy as np
from dglx_dist.data.partition.base import Partitioner
from dglx_dist.records import Assignment

class AllInTheLast(Partitioner):
    honours = frozenset()
    def assign(self, graph, num_parts, seed):
        owners = {t: np.full(n, num_parts - 1, np.int32) for t, n in graph.num_nodes.items()}
        return Assignment(num_parts=num_parts, part_of=owners, method="last", seed=seed)
"""


class Shape:
    """Base class of the plugins of these tests."""


class Circle(Shape):
    """Built in."""


def make(builtin: str = f"{__name__}:Circle") -> Registry[Shape]:
    return Registry(
        "shape", Shape, builtin={"circle": builtin}, aliases={"disc": "circle"}, group="tests.none"
    )


def test_a_name_and_its_alias_are_one_class_imported_when_it_is_asked_for() -> None:
    assert make().get("circle") is make().get("disc") is Circle
    assert make().names() == ("circle",)
    registry = make("no_such_module_anywhere:Circle")
    assert registry.resolve("disc") == "circle"
    with pytest.raises(ModuleNotFoundError):
        registry.get("circle")
    with pytest.raises(
        UnknownNameError, match=r"no shape 'circel'; did you mean 'circle'\? \(known: circle; aliases: disc\)"
    ):
        registry.get("circel")


def test_a_decorated_class_is_known_and_a_taken_name_is_refused() -> None:
    registry = make()

    @registry.register("square")
    class Box(Shape):
        pass

    assert registry.get("square") is Box
    assert (registry.name_of(Box), registry.name_of(Circle)) == ("square", "circle")
    for name in ("square", "circle", "disc"):
        with pytest.raises(ConfigError, match=f"{name}' is taken"):
            registry.register(name)(Box)


def test_an_entry_point_frees_no_name_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = make()

    class Round(Shape):
        pass

    point = SimpleNamespace(name="circle", value=f"{Round.__module__}:{Round.__qualname__}")
    monkeypatch.setattr("dglx_dist.registry._entry_points", lambda group: [point])
    with pytest.raises(ConfigError, match="circle' is taken"):
        registry.register("circle")(Round)
    assert registry.get("circle") is Circle


def test_a_plugin_of_another_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"not a subclass of .*Shape"):
        make("pathlib:Path").get("circle")
    with pytest.raises(ConfigError, match="not a subclass"):
        make().register("path")(Path)  # type: ignore[type-var]


@pytest.mark.parametrize("is_decorated", [False, True])
def test_an_installed_package_adds_a_partitioner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_decorated: bool
) -> None:
    from tests.data.partition.graphs import communities

    decorated = "import dglx_dist as dx\n" + PLUGIN.replace(
        "class", '@dx.register_partitioner("last")\nclass', 1
    )
    (tmp_path / "last_part.py").write_text(decorated if is_decorated else PLUGIN)
    monkeypatch.setattr(PARTITIONERS, "_added", {})
    monkeypatch.delitem(sys.modules, "last_part", raising=False)
    info = tmp_path / "last_part-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: last-part\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[dglx_dist.partitioners]\nlast = last_part:AllInTheLast\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert "last" in PARTITIONERS.names()
    graph = communities(num_nodes=320)
    assignment = PARTITIONERS.get("last")(PartitionOptions()).assign(graph, 3, 0)
    assert {int(part) for part in assignment.part_of["_N"]} == {2}
