"""The small benches of single parts are run by hand only, so what they import must not move unseen."""

import ast
import importlib
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts" / "bench"


def imported(path: Path) -> list[tuple[str, str]]:
    """Return (module, name) of all that a script imports from the package or from its own folder."""
    return [
        (node.module, alias.name)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module is not None
        for alias in node.names
        if node.module.startswith("dglx_dist") or (SCRIPTS / f"{node.module}.py").is_file()
    ]


@pytest.mark.parametrize("path", sorted(SCRIPTS.glob("*.py")), ids=lambda path: path.stem)
def test_every_script_finds_what_it_imports(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    for module, name in imported(path):
        assert name in vars(importlib.import_module(module)) or importlib.import_module(f"{module}.{name}")


def test_the_scripts_are_seen() -> None:
    assert ("starter", "on_ranks") in imported(SCRIPTS / "push.py")
