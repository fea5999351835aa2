"""A room imports only rooms named before it in the list of docs/development/contracts.md."""

import ast
import graphlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.sources import Source, scripts, source_of, sources

ROOT = Path(__file__).parent.parent
FORBIDDEN = ("dgl.distributed", "dgl.graphbolt", "dgl.sparse", "pickle", "marshal", "shelve")
NAMED = r"(dglx_dist|scripts)(\.\w+)+:\w+"


def order() -> list[str]:
    page = (ROOT / "docs" / "development" / "contracts.md").read_text()
    (listed,) = re.findall(r"rooms named before it in this list: (.*?)\.\n", page, flags=re.DOTALL)
    return [name.strip() for name in listed.split(",")]


def room_of(source: Source) -> str:
    return source.name.split("/")[0].removesuffix(".py")


def imports_of(source: Source, *, lazy: bool = False) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of every import at any depth, `from a import b` as a.b.

    With ``lazy`` also what registries hold as "module:Class": a registry must name its own room's.
    """
    for node in source.nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}; write the whole name"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif lazy and isinstance(node, ast.Constant) and re.fullmatch(NAMED, str(node.value)):
            yield node.lineno, str(node.value)


def wrongly_imported(source: Source, rooms: list[str]) -> Iterator[str]:
    """Yield what ``source`` may not import, with its line: scripts, rooms below its own or none."""
    room = room_of(source)
    for line, name in imports_of(source, lazy=True):
        first, *inner = re.split(r"[.:]", name)
        if first in ("scripts", "bench", "netlab"):
            yield f"{source.name}:{line} imports {name}, which the package knows nothing of"
        elif first == "dglx_dist" and inner and inner[0] not in rooms:
            yield f"{source.name}:{line} imports {name}, which is in no listed room"
        elif first == "dglx_dist" and inner and rooms.index(inner[0]) > rooms.index(room):
            yield f"{source.name}:{line}: {room} is above {inner[0]} and may not import it"


def forbidden(source: Source) -> list[str]:
    # Programs of peers are stock DGL, run by path in processes of their own to be measured beside.
    allowed = {"dgl.distributed"} if source.name.startswith("scripts/bench/peers/programs/") else set()
    return [
        f"{source.name}:{line} imports {name}"
        for line, name in imports_of(source)
        if any(name == bad or name.startswith(f"{bad}.") for bad in FORBIDDEN if bad not in allowed)
    ]


def test_imports_point_upwards() -> None:
    rooms = order()
    inside = [source for source in sources() if source.name != "__init__.py"]
    unlisted = sorted({room_of(source) for source in inside} - set(rooms))
    assert unlisted == [], "not in docs/development/contracts.md"
    assert [wrong for source in sources() for wrong in wrongly_imported(source, [*rooms, "__init__"])] == []


def test_nothing_forbidden_is_imported() -> None:
    assert [wrong for source in [*sources(), *scripts()] for wrong in forbidden(source)] == []


def test_only_pictures_load_matplotlib() -> None:
    # It would cost every rank half a second at start.
    drawing = ("matplotlib", "dglx_dist.report.pictures")
    results = {
        source.name
        for source in sources()
        for node in source.nodes
        if isinstance(node, ast.ImportFrom) and node.col_offset == 0 and str(node.module).startswith(drawing)
    }
    assert results == {"report/pictures.py"}


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("api.py", "from dglx_dist.data.storage import reader", []),
        ("data/x.py", "def f():\n    from dglx_dist.api import init", ["2: data is above api and may"]),
        ("data/x.py", '\nname = "dglx_dist.api:init"', ["2: data is above api and may"]),
        ("cli/x.py", "import dglx_dist.nowhere", ["1 imports dglx_dist.nowhere, which is in no listed room"]),
        (
            "cli/x.py",
            "import bench\nname = 'scripts.b:c'",
            ["1 imports bench", "2 imports scripts.b:c, which"],
        ),
    ],
)
def test_a_wrong_import_would_be_seen(name: str, text: str, said: list[str]) -> None:
    results = sorted(wrongly_imported(source_of(name, text), order()))
    assert all(result.startswith(f"{name}:{start}") for result, start in zip(results, said, strict=True)), (
        results
    )


def test_a_forbidden_import_would_be_seen() -> None:
    both = "import dgl.distributed.rpc\nfrom pickle import load"
    assert forbidden(source_of("graph/x.py", both)) == [
        "graph/x.py:1 imports dgl.distributed.rpc",
        "graph/x.py:2 imports pickle.load",
    ]
    peer = "scripts/bench/peers/programs/x.py"
    assert forbidden(source_of(peer, both)) == [f"{peer}:2 imports pickle.load"]


def imported_modules(inside: list[Source]) -> dict[str, set[str]]:
    names = {
        "dglx_dist." + item.name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): item
        for item in inside
        if item.name != "__init__.py"  # imports the public names when they are asked for
    }
    results = {}
    for name, source in names.items():
        expected = {imported for _, imported in imports_of(source)}
        results[name] = (
            {item if item in names else item.rpartition(".")[0] for item in expected} & {*names}
        ) - {name}
    return results


def test_no_module_imports_itself_by_way_of_others() -> None:
    graphlib.TopologicalSorter(imported_modules(sources())).prepare()
    circle = [("a", "from dglx_dist.b import c"), ("b", "def f():\n    import dglx_dist.a")]
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(
            imported_modules([source_of(f"{name}.py", text) for name, text in circle])
        ).prepare()
