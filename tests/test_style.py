"""The house rules that a program can check in every file: one rule per test, which lists its offenders."""

import ast
from collections import Counter
from collections.abc import Callable, Iterable

from tests.helpers.sources import scripts, sources

MAX_LINES, MAX_STATEMENTS = 900, 40


def offenders(rule: Callable[[Iterable[ast.AST]], list[int]], *, but: tuple[str, ...] = ()) -> list[str]:
    """Return ``file:line`` of all that ``rule`` finds in files but those whose names start with ``but``."""
    return [
        f"{source.name}:{line}"
        for source in [*sources(), *scripts()]
        if not source.name.startswith(but)
        for line in rule(source.nodes)
    ]


def uses(nodes: Iterable[ast.AST], module: str, attributes: set[str]) -> list[int]:
    return [
        node.lineno
        for node in nodes
        if isinstance(node, ast.Attribute)
        and node.attr in attributes
        and isinstance(node.value, ast.Name)
        and node.value.id == module
    ]


def calls(nodes: Iterable[ast.AST], names: set[str]) -> list[int]:
    return [
        node.lineno
        for node in nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names
    ]


def unsafe_loads(nodes: Iterable[ast.AST]) -> list[int]:
    """Lines that pass anything but allow_pickle=False or weights_only=True."""
    safe = {"allow_pickle": False, "weights_only": True}
    return [
        node.value.lineno
        for node in nodes
        if isinstance(node, ast.keyword)
        and node.arg in safe
        and not (isinstance(node.value, ast.Constant) and node.value.value is safe[node.arg])
    ]


def long_functions(nodes: Iterable[ast.AST]) -> list[int]:
    """Lines of functions with more statements than allowed, docstrings left out."""
    return [
        node.lineno
        for node in nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and sum(isinstance(inner, ast.stmt) for inner in ast.walk(node)) - 1 - bool(ast.get_docstring(node))
        > MAX_STATEMENTS
    ]


def rebound(nodes: Iterable[ast.AST]) -> list[int]:
    return [node.lineno for node in nodes if isinstance(node, ast.Global)]


def test_only_topology_reads_the_environment() -> None:
    readers, allowed = {"environ", "getenv", "putenv"}, ("comm/topology.py", "internals", "scripts")
    assert offenders(lambda nodes: uses(nodes, "os", readers), but=allowed) == []


def test_only_the_command_line_prints() -> None:
    assert offenders(lambda nodes: calls(nodes, {"print", "input"}), but=("cli", "scripts")) == []


def test_nothing_is_evaluated_or_unpickled() -> None:
    assert offenders(lambda nodes: calls(nodes, {"eval", "exec", "compile", "globals"})) == []
    # Files that the user names: those of --model-file, and scripts.
    assert (
        offenders(lambda nodes: uses(nodes, "runpy", {"run_path"}), but=("cli/train_job.py", "run.py")) == []
    )
    assert offenders(unsafe_loads) == []


def test_files_stay_short() -> None:
    assert [source.name for source in sources() if len(source.text.splitlines()) >= MAX_LINES] == []


def test_functions_stay_short() -> None:
    assert offenders(long_functions) == []


def test_nothing_global_is_rebound() -> None:
    assert offenders(rebound) == []


def test_no_two_classes_share_a_name() -> None:
    """Outside of compat, whose classes have the names of the classes that they stand in for."""
    counts = Counter(
        node.name
        for source in sources()
        if not source.name.startswith("compat")
        for node in source.nodes
        if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in counts.items() if count > 1] == []


def list_nodes(text: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(text)))


def test_the_checks_see_what_they_look_for() -> None:
    nodes = list_nodes("def f():\n    'doc'\n    x = os.environ['A']\n    print(eval(x))\n")
    assert uses(nodes, "os", {"environ"}) == [3]
    assert calls(nodes, {"print", "eval"}) == [4, 4]
    most = "    'doc'\n" + "    x = 1\n" * MAX_STATEMENTS
    assert long_functions(list_nodes(f"def f():\n{most}def g():\n{most}    x = 1\n")) == [MAX_STATEMENTS + 3]
    assert rebound(list_nodes("def f():\n    global x\n")) == [2]
    loads = list_nodes("f(allow_pickle=False, weights_only=True)\nf(allow_pickle=x)\nf(weights_only=False)\n")
    assert unsafe_loads(loads) == [2, 3]


def test_every_file_is_looked_at() -> None:
    names = {source.name for source in sources()}
    assert {"__init__.py", "comm/topology.py", "cli/app.py"} <= names
    assert offenders(lambda nodes: uses(nodes, "os", {"environ"})), "comm/topology.py reads it"
