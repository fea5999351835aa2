"""Rooms import upwards only: the order is the list in docs/design/contracts.md."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "dglx_dist"
FILES = sorted(PACKAGE.rglob("*.py"))
FORBIDDEN = ("dgl.distributed", "dgl.graphbolt", "dgl.sparse", "pickle", "marshal", "shelve")


def order() -> list[str]:
    page = (ROOT / "docs" / "design" / "contracts.md").read_text()
    (listed,) = re.findall(r"upwards in this list only: (.*?)\.\n", page, flags=re.DOTALL)
    return [name.strip() for name in listed.split(",")]


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports_of(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of every import at any depth, `from a import b` as a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}; write the whole name"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def lazy_imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the names that registries hold as "module:Class"; a registry must name its own room's."""
    for node in ast.walk(ast.parse(path.read_text())):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and re.fullmatch(r"dglx_dist(\.\w+)+:\w+", node.value)
        ):
            yield node.lineno, node.value


def ranks(first: str, second: str, rooms: list[str]) -> bool:
    """Whether ``first`` may import ``second``."""
    return rooms.index(second) <= rooms.index(first)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_upwards(path: Path) -> None:
    rooms = order()
    room = room_of(path)
    if room == "__init__":
        return
    assert room in rooms, f"{room} is a room that docs/design/contracts.md does not list"
    found = [*imports_of(ast.parse(path.read_text())), *lazy_imports_of(path)]
    for line, name in found:
        parts = re.split(r"[.:]", name)
        if parts[0] == "dglx_dist" and len(parts) > 1:
            assert parts[1] in rooms, f"{path}:{line} imports {name}, which is in no listed room"
            assert ranks(room, parts[1], rooms), (
                f"{path}:{line}: {room} is above {parts[1]} and may not import it"
            )


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_forbidden_is_imported(path: Path) -> None:
    for line, name in imports_of(ast.parse(path.read_text())):
        guilty = [bad for bad in FORBIDDEN if name == bad or name.startswith(bad + ".")]
        if path.is_relative_to(PACKAGE / "bench/peers/programs"):
            # Stock DGL, run by path in processes of its own to be measured beside.
            guilty = [bad for bad in guilty if bad != "dgl.distributed"]
        assert not guilty, f"{path}:{line} imports {name}"


def test_the_order_is_read_from_the_page() -> None:
    rooms = order()
    assert rooms[:3] == ["errors", "records", "registry"]
    assert rooms[-2:] == ["bench", "cli"]


def test_a_downward_import_would_be_seen() -> None:
    rooms = order()
    found = {
        name: line for line, name in imports_of(ast.parse("def f():\n    from dglx_dist.run import init"))
    }
    assert found == {"dglx_dist.run.init": 2}
    assert not ranks("storage", "run", rooms)
    assert ranks("run", "storage", rooms)
