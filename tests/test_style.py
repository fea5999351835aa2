"""Checks the house rules that a program can check. Each test lists the places that break its rule."""

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterable

from tests.helpers.sources import scripts, sources

MAX_LINES, MAX_STATEMENTS, MAX_VAGUE_NAMES = 900, 40, 12


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# The words of the language rules. A function is named by a verb, so a bare past participle such as
# "gathered" is no name for it. Regular participles end in "ed"; this set has the irregular ones.
IRREGULAR_PARTICIPLES = words(
    "begun bought brought built cast chosen done drawn found given gone grown held hidden kept known laid "
    "led left lost made meant met paid proven said seen sent shown sold spent spoken taken taught thought "
    "told understood won worn written"
)
# Names that end in "ed" and are no participles, or are adjectives that name a property well.
NOT_PARTICIPLES = words("embed feed need seed speed shed fixed shared signed sorted used unused weighted")
# Words that say nothing about the value of a variable.
VAGUE_NAMES = words(
    "asked found given mine one other others rest said taken theirs these thing things those told wanted "
    "what whole"
)
# A docstring that begins with one of these words is a clause and not a sentence.
FRAGMENT = re.compile(
    r"(As|By which|From so|In which|Not|Of|So that|Than|That|To be|Until|What|Where|Which|Who|Whom|Whose|"
    r"With which)\b"
)


MAX_PACKED_ASSIGNMENTS = 40
"""Assignments of three or more values on one line, or of two of which both are computed, that are left."""


def is_packed(node: ast.AST) -> bool:
    """Whether ``node`` is ``a, b = x(), y()``, whose parts a reader has to take apart."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    targets, values = node.targets[0], node.value.elts
    if not isinstance(targets, ast.Tuple) or len(targets.elts) != len(values):
        return False
    assigned = {part.id for part in ast.walk(targets) if isinstance(part, ast.Name)}
    if assigned & {part.id for part in ast.walk(node.value) if isinstance(part, ast.Name)}:
        return False  # A swap, or a step of a loop.
    return len(values) > 2 or all(isinstance(value, ast.Call) for value in values)


def offenders(rule: Callable[[Iterable[ast.AST]], list[int]], *, but: tuple[str, ...] = ()) -> list[str]:
    """Return ``file:line`` of what ``rule`` reports, except in files whose names start with ``but``."""
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
    """Return the lines that pass anything but allow_pickle=False or weights_only=True."""
    safe = {"allow_pickle": False, "weights_only": True}
    return [
        node.value.lineno
        for node in nodes
        if isinstance(node, ast.keyword)
        and node.arg in safe
        and not (isinstance(node.value, ast.Constant) and node.value.value is safe[node.arg])
    ]


def long_functions(nodes: Iterable[ast.AST]) -> list[int]:
    """Return the lines of functions with too many statements. Docstrings do not count."""
    return [
        node.lineno
        for node in nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and sum(isinstance(inner, ast.stmt) for inner in ast.walk(node)) - 1 - bool(ast.get_docstring(node))
        > MAX_STATEMENTS
    ]


def find_globals(nodes: Iterable[ast.AST]) -> list[int]:
    return [node.lineno for node in nodes if isinstance(node, ast.Global)]


def find_participles(nodes: Iterable[ast.AST]) -> list[int]:
    """Return the lines of functions that are named by a bare past participle."""
    return [
        node.lineno
        for node in nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and is_participle(node.name.strip("_"))
    ]


def is_participle(word: str) -> bool:
    if "_" in word or word in NOT_PARTICIPLES:
        return False
    return word in IRREGULAR_PARTICIPLES or (word.endswith("ed") and len(word) > 4)


def find_vague_names(nodes: Iterable[ast.AST]) -> list[int]:
    """Return the lines of assignments to variables with vague names."""
    return [
        node.lineno
        for node in nodes
        if isinstance(node, ast.Name)
        and isinstance(node.ctx, ast.Store)
        and node.id.strip("_") in VAGUE_NAMES
    ]


def find_fragments(nodes: Iterable[ast.AST]) -> list[int]:
    """Return the lines of docstrings, of fields too, that begin in the middle of a sentence."""
    return [
        statement.lineno
        for node in nodes
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        for statement in node.body
        if isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
        and FRAGMENT.match(statement.value.value.strip())
    ]


def test_only_topology_reads_the_environment() -> None:
    readers, allowed = {"environ", "getenv", "putenv"}, ("comm/topology.py", "internals", "scripts")
    assert offenders(lambda nodes: uses(nodes, "os", readers), but=allowed) == []


def test_only_the_command_line_prints() -> None:
    assert offenders(lambda nodes: calls(nodes, {"print", "input"}), but=("cli", "scripts")) == []


def test_nothing_is_evaluated_or_unpickled() -> None:
    assert offenders(lambda nodes: calls(nodes, {"eval", "exec", "compile", "globals"})) == []
    # These two run files that the user names: --model-file, and scripts.
    assert (
        offenders(lambda nodes: uses(nodes, "runpy", {"run_path"}), but=("cli/train_job.py", "run.py")) == []
    )
    assert offenders(unsafe_loads) == []


def test_files_stay_short() -> None:
    assert [source.name for source in sources() if len(source.text.splitlines()) >= MAX_LINES] == []


def test_functions_stay_short() -> None:
    assert offenders(long_functions) == []


def test_no_global_is_reassigned() -> None:
    assert offenders(find_globals) == []


def test_functions_are_not_named_by_participles() -> None:
    assert offenders(find_participles) == []


def test_variables_have_names_that_say_what_they_hold() -> None:
    # Fields of records that are stored as JSON keep their keys.
    assert len(offenders(find_vague_names)) <= MAX_VAGUE_NAMES


def test_docstrings_are_sentences_or_noun_phrases() -> None:
    assert offenders(find_fragments) == []


def test_no_two_classes_share_a_name() -> None:
    """Classes of compat are left out, because they carry the names of the classes that they replace."""
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


def test_checks_find_offenders() -> None:
    nodes = list_nodes("def f():\n    'doc'\n    x = os.environ['A']\n    print(eval(x))\n")
    assert uses(nodes, "os", {"environ"}) == [3]
    assert calls(nodes, {"print", "eval"}) == [4, 4]
    most = "    'doc'\n" + "    x = 1\n" * MAX_STATEMENTS
    assert long_functions(list_nodes(f"def f():\n{most}def g():\n{most}    x = 1\n")) == [MAX_STATEMENTS + 3]
    assert find_globals(list_nodes("def f():\n    global x\n")) == [2]
    loads = list_nodes("f(allow_pickle=False, weights_only=True)\nf(allow_pickle=x)\nf(weights_only=False)\n")
    assert unsafe_loads(loads) == [2, 3]
    assert find_participles(list_nodes("def gathered(): ...\ndef _kept(): ...\ndef seed(): ...\n")) == [1, 2]
    assert find_vague_names(list_nodes("found = 1\nfor _one in x: ...\ncount = 2\n")) == [1, 2]
    fragments = list_nodes("class A:\n    x: int\n    'Of the run.'\n    y: int\n    'Number of runs.'\n")
    assert find_fragments(fragments) == [3]


def test_all_files_are_checked() -> None:
    names = {source.name for source in sources()}
    assert {"__init__.py", "comm/topology.py", "cli/app.py"} <= names
    assert offenders(lambda nodes: uses(nodes, "os", {"environ"})), "comm/topology.py reads os.environ"


def test_assignments_do_not_pack_computations() -> None:
    packed = offenders(lambda nodes: [node.lineno for node in nodes if is_packed(node)], but=("scripts",))
    assert len(packed) <= MAX_PACKED_ASSIGNMENTS, packed
