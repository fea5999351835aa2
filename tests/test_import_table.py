"""A room imports only rooms named before it in the list of docs/design/contracts.md."""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from tests.helpers.sources import Source, scripts, source_of, sources

ROOT = Path(__file__).parent.parent
FORBIDDEN = ("dgl.distributed", "dgl.graphbolt", "dgl.sparse", "pickle", "marshal", "shelve")


def order() -> list[str]:
    page = (ROOT / "docs" / "design" / "contracts.md").read_text()
    (listed,) = re.findall(r"rooms named before it in this list: (.*?)\.\n", page, flags=re.DOTALL)
    return [name.strip() for name in listed.split(",")]


def room_of(source: Source) -> str:
    return source.name.split("/")[0].removesuffix(".py")


def imports_of(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of every import at any depth, `from a import b` as a.b."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}; write the whole name"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def lazy_imports_of(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield the names that registries hold as "module:Class"; a registry must name its own room's."""
    for node in nodes:
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and re.fullmatch(r"(dglx_dist|scripts)(\.\w+)+:\w+", node.value)
        ):
            yield node.lineno, node.value


def ranks(first: str, second: str, rooms: list[str]) -> bool:
    """Whether ``first`` may import ``second``."""
    return rooms.index(second) <= rooms.index(first)


def wrongly_imported(source: Source, rooms: list[str]) -> Iterator[str]:
    """Yield what ``source`` may not import, with its line: rooms below its own, and what is in no room."""
    room = room_of(source)
    for line, name in [*imports_of(source.nodes), *lazy_imports_of(source.nodes)]:
        parts = re.split(r"[.:]", name)
        if parts[0] != "dglx_dist" or len(parts) == 1:
            continue
        if parts[1] not in rooms:
            yield f"{source.name}:{line} imports {name}, which is in no listed room"
        elif not ranks(room, parts[1], rooms):
            yield f"{source.name}:{line}: {room} is above {parts[1]} and may not import it"


def forbidden(source: Source) -> Iterator[str]:
    """Yield what nobody may import, with its line."""
    # Programs of peers are stock DGL, run by path in processes of their own to be measured beside.
    allowed = {"dgl.distributed"} if source.name.startswith("scripts/bench/peers/programs/") else set()
    for line, name in imports_of(source.nodes):
        if any(name == bad or name.startswith(f"{bad}.") for bad in FORBIDDEN if bad not in allowed):
            yield f"{source.name}:{line} imports {name}"


def test_imports_point_upwards() -> None:
    rooms = order()
    inside = [source for source in sources() if source.name != "__init__.py"]
    assert sorted({room_of(source) for source in inside} - set(rooms)) == [], (
        "not in docs/design/contracts.md"
    )
    assert [wrong for source in inside for wrong in wrongly_imported(source, rooms)] == []


def test_nothing_forbidden_is_imported() -> None:
    assert [wrong for source in [*sources(), *scripts()] for wrong in forbidden(source)] == []


def of_scripts(source: Source) -> list[str]:
    """Return what ``source`` imports of the scripts, by whatever path, with its line."""
    found = [*imports_of(source.nodes), *lazy_imports_of(source.nodes)]
    return [
        f"{source.name}:{line} imports {name}"
        for line, name in found
        if re.split(r"[.:]", name)[0] in ("scripts", "bench", "netlab")
    ]


def test_the_package_knows_nothing_of_the_scripts() -> None:
    assert [wrong for source in sources() for wrong in of_scripts(source)] == []
    seen = source_of(
        "x.py", "def f():\n    from scripts.netlab import labs\nname = 'scripts.bench.a:b'\nimport bench"
    )
    assert sorted(of_scripts(seen)) == [
        "x.py:2 imports scripts.netlab.labs",
        "x.py:3 imports scripts.bench.a:b",
        "x.py:4 imports bench",
    ]


def test_the_order_is_read_from_the_page() -> None:
    rooms = order()
    assert rooms[:3] == ["errors", "records", "registry"]
    assert rooms[-1] == "cli"


def test_a_downward_import_would_be_seen() -> None:
    rooms = order()
    assert (
        list(wrongly_imported(source_of("api.py", "from dglx_dist.data.storage import reader"), rooms)) == []
    )
    for text in ("def f():\n    from dglx_dist.api import init", '\nname = "dglx_dist.api:init"'):
        (said,) = wrongly_imported(source_of("data/x.py", text), rooms)
        assert said == "data/x.py:2: data is above api and may not import it"
    (said,) = wrongly_imported(source_of("cli/x.py", "import dglx_dist.nowhere"), rooms)
    assert "in no listed room" in said


def test_a_forbidden_import_would_be_seen() -> None:
    assert list(forbidden(source_of("graph/x.py", "import dgl.distributed.rpc\nimport pickle"))) == [
        "graph/x.py:1 imports dgl.distributed.rpc",
        "graph/x.py:2 imports pickle",
    ]
    peer = source_of("scripts/bench/peers/programs/x.py", "import dgl.distributed\nfrom pickle import load")
    assert list(forbidden(peer)) == ["scripts/bench/peers/programs/x.py:2 imports pickle.load"]


def cycle_of(modules: Mapping[str, set[str]]) -> list[str]:
    """Return modules that import each other in a circle, in that order; [] where there are none."""
    finished: set[str] = set()

    def follow(module: str, path: tuple[str, ...]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in finished:
            return []
        for wanted in sorted(modules[module]):
            found = follow(wanted, (*path, module))
            if found:
                return found
        finished.add(module)
        return []

    return next((found for module in sorted(modules) if (found := follow(module, ()))), [])


def imported_modules() -> dict[str, set[str]]:
    """Return the modules that each module of the package imports, also late or for types."""
    inside = {f"dglx_dist/{source.name}": source for source in sources()}
    names = {path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in inside}
    found: dict[str, set[str]] = {}
    for name, path in names.items():
        wanted = {imported for _, imported in imports_of(inside[path].nodes)}
        own = {one if one in names else one.rpartition(".")[0] for one in wanted}
        found[name] = (own & names.keys()) - {name, "dglx_dist"}
    del found["dglx_dist"]  # imports the public names when they are asked for
    return found


def test_no_module_imports_itself_by_way_of_others() -> None:
    assert cycle_of(imported_modules()) == []


def test_a_cycle_would_be_seen() -> None:
    assert cycle_of({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert cycle_of({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
