"""What the house rules ask of every file and a machine can read."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "dglx_dist"
FILES = sorted(PACKAGE.rglob("*.py"))
MAX_LINES, MAX_STATEMENTS = 400, 40

every_file = pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))


def uses(tree: ast.AST, module: str, attributes: set[str]) -> list[int]:
    """Lines that read ``module.attribute``."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr in attributes
        and isinstance(node.value, ast.Name)
        and node.value.id == module
    ]


def calls(tree: ast.AST, names: set[str]) -> list[int]:
    """Lines that call one of the built-in functions ``names``."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names
    ]


def statements(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Statements in the body of ``function``, docstring left out."""
    return (
        sum(isinstance(node, ast.stmt) for node in ast.walk(function)) - 1 - bool(ast.get_docstring(function))
    )


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


@every_file
def test_only_topology_reads_the_environment(path: Path) -> None:
    if name_of(path) != "cluster/topology.py":
        assert not uses(ast.parse(path.read_text()), "os", {"environ", "getenv", "putenv"})


@every_file
def test_only_the_command_line_prints(path: Path) -> None:
    if not name_of(path).startswith("cli"):
        assert not calls(ast.parse(path.read_text()), {"print", "input"})


@every_file
def test_nothing_is_evaluated_or_unpickled(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert not calls(tree, {"eval", "exec", "compile", "globals"})
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg in {"allow_pickle", "weights_only"}:
            safe = node.arg == "weights_only"
            assert isinstance(node.value, ast.Constant), f"{path}:{node.value.lineno}"
            assert node.value.value is safe, f"{path}:{node.value.lineno}"


@every_file
def test_files_stay_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) < MAX_LINES


@every_file
def test_functions_stay_short(path: Path) -> None:
    for function in functions(ast.parse(path.read_text())):
        count = statements(function)
        assert count <= MAX_STATEMENTS, f"{path}:{function.lineno} {function.name} has {count} statements"


@every_file
def test_nothing_global_is_rebound(path: Path) -> None:
    assert not [node.lineno for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Global)]


def test_the_checks_see_what_they_look_for() -> None:
    tree = ast.parse("def f():\n    'doc'\n    x = os.environ['A']\n    print(eval(x))\n")
    assert uses(tree, "os", {"environ"}) == [3]
    assert calls(tree, {"print", "eval"}) == [4, 4]
    assert [statements(function) for function in functions(tree)] == [2]
