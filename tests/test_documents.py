"""Names, options and formulas that the documents give are those of the code."""

import ast
import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from dglx_dist.comm.codec import wire_bytes
from dglx_dist.planner.costs.base import Survey
from dglx_dist.planner.costs.push_pull import FirstLayer, column_bytes
from dglx_dist.planner.costs.serverless import PartSizes, serverless_bytes
from dglx_dist.strategies.full_graph.options import COOPERATIVE, EXCHANGING, PRELOADING, FullGraphOptions
from dglx_dist.strategies.push_pull.options import PushPullOptions
from dglx_dist.strategies.serverless.options import LambdaOptions
from dglx_dist.strategies.serverless.program import Program
from tests.helpers.sources import ROOT, sources
from tests.strategies.serverless.programs import gcn

STRATEGIES = ROOT / "docs" / "strategies"
EXAMPLES = ("script.py", "my_model.py", "x1.py")
"""Files that stand for the reader's own."""
OF_DGL = ("compat.md", "migrating.md", "migrating_distdgl.md")
"""Pages that name files of DGL."""


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def list_quotes() -> list[tuple[str, str]]:
    """Return (page, text) of all that stands between backticks in a line."""
    return [(page.name, text) for page in pages() for text in re.findall(r"`([^`\n]+)`", page.read_text())]


def members() -> dict[str, set[str] | None]:
    """Return the names inside of each class of the package and of its bases; None: a base is foreign."""
    classes = {n.name: n for s in sources() for n in s.nodes if isinstance(n, ast.ClassDef)}

    def inside(node: ast.ClassDef) -> set[str] | None:
        names = {item.name for item in ast.walk(node) if isinstance(item, ast.FunctionDef)}
        for item in ast.walk(node):
            if isinstance(item, ast.Name | ast.Attribute) and isinstance(item.ctx, ast.Store):
                names.add(item.id if isinstance(item, ast.Name) else item.attr)
        for base in node.bases:
            name = base.value if isinstance(base, ast.Subscript) else base
            known = classes.get(name.id) if isinstance(name, ast.Name) else None
            if isinstance(name, ast.Name) and name.id in ("ABC", "Protocol", "Generic", "NamedTuple"):
                continue
            more = inside(known) if known is not None and known is not node else None
            if more is None:
                return None
            names |= more
        return names

    return {name: inside(node) for name, node in classes.items()}


def test_every_named_member_of_a_class_is_there() -> None:
    known = members()
    pattern = re.compile(r"(?<![\w.])([A-Z]\w+)\.([a-z_]\w*)")
    named = {(page, *pair) for page, text in list_quotes() for pair in pattern.findall(text)}
    ours = {(page, name, member) for page, name, member in named if known.get(name) is not None}
    assert len(ours) > 15
    assert [value for value in sorted(ours) if value[2] not in (known[value[1]] or ())] == []


def test_every_named_file_is_there() -> None:
    folders = ("dglx_dist", "scripts", "tests", "examples", "docs")
    files = [str(path) for folder in folders for path in (ROOT / folder).rglob("*.py")]
    named = {
        (page, name)
        for page, text in list_quotes()
        if page not in OF_DGL
        for name in re.findall(r"(?<![\w./<])[\w./]+\.py\b", text)
        if name not in EXAMPLES and not name.startswith("/")
    }
    assert len(named) > 50
    assert [item for item in sorted(named) if not any(path.endswith(f"/{item[1]}") for path in files)] == []


def test_every_phase_of_the_ledger_is_there() -> None:
    page = (ROOT / "docs" / "development" / "contracts.md").read_text()
    table = page[page.index("| phase | bytes |") :].split("\n\n")[0]
    phases = [
        name for line in table.splitlines()[2:] for name in re.findall(r"`([\w.]+)`", line.split("|")[1])
    ]
    constants = {n.value for s in sources() for n in s.nodes if isinstance(n, ast.Constant)}
    assert len(phases) > 25
    assert [name for name in phases if name not in constants and f"lambda.{name}" not in constants] == []


def option_rows(page: str) -> dict[str, str]:
    """Return the default by option, as the page's tables have it."""
    rows: dict[str, str] = {}
    for table in re.findall(r"\| option \| meaning \| default \|\n\|[-|]+\n((?:\|.*\n)+)", page):
        for line in table.splitlines():
            first, *_, default = (cell.strip() for cell in line.strip("|").split("|"))
            names = re.findall(r"`(\w+)`", first)
            shown = default.split(", ") if len(names) > 1 else [default]
            rows |= dict(zip(names, shown * (len(names) // len(shown)), strict=True))
    return rows


def is_shown(value: Any, shown: str) -> bool:
    """Return whether a cell shows the default; words stand for none, or for 0."""
    known: Mapping[str, object] = {"on": True, "off": False, "4 MiB": 4 << 20}
    if quotes := re.match(r"`([^`]+)`", shown):
        return value == quotes[1]
    if shown in known or shown.isdecimal():
        return bool(value == known.get(shown, shown) or value == (shown.isdecimal() and int(shown)))
    return not value


@pytest.mark.parametrize(
    ("name", "record", "taken"),
    [
        ("push_pull.md", PushPullOptions, ()),
        ("lambda.md", LambdaOptions, ()),
        ("full_graph.md", FullGraphOptions, EXCHANGING),
        ("shared_preload.md", FullGraphOptions, (*PRELOADING, *COOPERATIVE)),
    ],
)
def test_tables_of_options_are_those_of_the_record(name: str, record: Any, taken: tuple[str, ...]) -> None:
    page = (STRATEGIES / name).read_text()
    defaults = {field.name: field.default for field in fields(record) if field.name != "executor_options"}
    rows = option_rows(page)
    assert len(rows) >= 5
    assert {item for item in taken or defaults if f"`{item}`" not in page} == set()
    assert {item: shown for item, shown in rows.items() if not is_shown(defaults.get(item, ...), shown)} == {}


def evaluate(formula: str, **values: float) -> float:
    """Return the value of a formula in which a blank between two factors multiplies them."""
    text = formula.replace("[", "(").replace("]", ")").replace("|", "").replace("'", "_")
    text = re.sub(r"(?<=[\w)]) +(?=[\w(])", " * ", text)
    tree = ast.parse(text.strip(), mode="eval").body

    def value(node: ast.expr) -> float:
        if isinstance(node, ast.BinOp):
            left, right = value(node.left), value(node.right)
            kinds = {ast.Add: left + right, ast.Sub: left - right, ast.Mult: left * right}
            return kinds.get(type(node.op)) or left / right
        return values[node.id] if isinstance(node, ast.Name) else float(ast.literal_eval(node))

    return value(tree)


def line_of(page: Path, start: str) -> str:
    return next(line for line in page.read_text().splitlines() if line.startswith(start))


def test_bytes_of_push_pull_are_those_of_its_page() -> None:
    page = STRATEGIES / "push_pull.md"
    survey = Survey(
        steps=1, input_rows=188, remote_rows=0, edges=0, seeds_per_rank=[5, 0, 0], feature_bytes=0,
        sampling_bytes=0, label_bytes=0, gradient_bytes=0, first_targets=24, first_edges=240,
    )  # fmt: skip
    sizes = {"N": 3, "s": 4, "L0": 188, "E1": 240}

    def count_moved(width: int, logits: int) -> int:
        first = FirstLayer(
            sum_width=width, logit_width=logits, itemsize=4, cut_bytes=0, replicated_bytes=0, known=True
        )
        counts = column_bytes(survey, first, group_size=0, pushed=True)
        return sum(counts[name] for name in ("activations", "activation_gradients"))

    rows = re.split(r"\s{2,}", line_of(page, "push_pull  "))[1]
    assert count_moved(16, 0) == evaluate(rows, D1=24, H=16, **sizes)
    (attention,) = re.findall(r"`(.*)`", line_of(page, "Attention with K heads"))
    assert count_moved(8 * 16, 8) == evaluate(attention, D1=24, K=8, H_=16, **sizes)
    structure = re.findall(r"\+ (\(N-1\) \[.*\])", line_of(page, "push_pull  "))[0]
    first = FirstLayer(sum_width=1, logit_width=0, itemsize=4, cut_bytes=0, replicated_bytes=0, known=True)
    # There is a batch for each of three owners, of which the surveyed rows are the sum.
    batches = column_bytes(survey, first, group_size=0, pushed=True)["structure"]
    assert batches == evaluate(structure, D1=24 + 2, **sizes)


def test_bytes_of_lambda_are_those_of_its_page() -> None:
    page = STRATEGIES / "lambda.md"
    nodes, halo, intervals, widths = 100, 30, 4, (16, 8, 6, 5)
    program = Program.from_json(gcn(widths).to_json().replace(b"float64", b"float32"))
    sizes = PartSizes(nodes=nodes, edges=500, pairs=halo, intervals=intervals)
    counts = serverless_bytes(program, sizes)

    def cells(start: str) -> list[str]:
        return [re.split(r" down| up", cell)[0] for cell in re.split(r"\s{2,}", line_of(page, start))[1:]]

    def sum_formula(formula: str, *, layers: range) -> float:
        values = {"n": nodes, "s": 4, "G": halo}
        return sum(evaluate(formula, i=widths[layer - 1], d_l=widths[layer], **values) for layer in layers)

    down, up = cells("AV l ")
    back_down, back_up = cells("gradAV l ")
    last_down, last_up = cells("last AV, fused ")
    first, last = range(1, 3), range(3, 4)
    assert counts["ghosts"] == sum_formula(cells("ghosts ")[0], layers=first)
    expected_down = sum_formula(down, layers=first) + sum_formula(back_down, layers=first)
    assert counts["lambda_down"] == expected_down + sum_formula(last_down, layers=last)
    expected_up = sum_formula(up, layers=first) + sum_formula(back_up, layers=range(2, 3))
    assert counts["lambda_up"] == expected_up + sum_formula(last_up, layers=last) + 32 * intervals


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "int4"])
def test_bytes_of_narrow_rows_are_those_of_the_page(dtype: Any) -> None:
    formula = re.split(r"\s{2,}", line_of(STRATEGIES / "full_graph.md", f"{dtype}  "))[1]
    assert wire_bytes(dtype, 64, 4) == evaluate(formula, d=64)


def test_the_checks_see_what_they_look_for() -> None:
    known = members()
    assert "exact" not in (known["Traits"] or ())
    assert "unit" in (known["Traits"] or ())
    assert option_rows("| option | meaning | default |\n|---|---|---|\n| `a`, `b` | x | 1, `c` |\n") == {
        "a": "1",
        "b": "`c`",
    }
    assert [is_shown(*item) for item in ((2, "1"), ("a", "`b`"), (True, "off"), (3, "never"))] == [False] * 4
    assert evaluate("2 (N-1) D1 [a + 4 b] / 2", N=3, D1=5, a=1, b=2) == 90
