"""`import dgl` after `import dglx_dist`, where GraphBolt works, fails or is absent; with a dgl of our own."""

import subprocess
import sys
from pathlib import Path

import pytest

FAILS = 'raise FileNotFoundError("Cannot find DGL C++ graphbolt library")'
ASK = """
try:
    {}
except Exception as error:
    print(type(error).__name__, error)
"""


def run_python(
    folder: Path, init: str, graphbolt: str | None, *asked: str, first: str = "import dglx_dist"
) -> str:
    """Return the output of Python that runs ``first``, `import dgl`, then each of ``asked``."""
    package = folder / "dgl" / "graphbolt"
    package.mkdir(parents=True)
    (folder / "dgl" / "__init__.py").write_text(init)
    (package / "base.py").write_text("number = 1")
    if graphbolt is not None:
        (package / "__init__.py").write_text(f"from .base import *\nfrom . import base\n{graphbolt}\n")
    else:
        (package / "base.py").unlink()
        package.rmdir()
    code = f"{first}\nimport dgl\n" + "".join(ASK.format(query) for query in asked)
    command = [sys.executable, "-W", "always::ImportWarning", "-c", code]
    done = subprocess.run(
        command,
        cwd=folder,
        env={"PYTHONPATH": str(folder)},
        text=True,
        timeout=60,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    return done.stdout


IMPORTS = "from . import graphbolt"


def test_where_graphbolt_fails_it_is_empty_and_says_why(tmp_path: Path) -> None:
    lines = run_python(
        tmp_path,
        IMPORTS,
        FAILS,
        "print('loaded', dgl.graphbolt.__name__, hasattr(dgl.graphbolt, 'number'))",
        "dgl.graphbolt.ItemSampler",
        "import dgl.graphbolt.base",
    )
    reason = "dgl.graphbolt is empty, because it cannot be imported (FileNotFoundError: Cannot find DGL C++"
    assert f"ImportWarning: {reason}" in lines
    assert "loaded dgl.graphbolt False\n" in lines
    assert f"AttributeError there is no 'ItemSampler': {reason}" in lines
    assert "ModuleNotFoundError No module named 'dgl.graphbolt.base'" in lines


def test_where_graphbolt_works_it_is_left_alone(tmp_path: Path) -> None:
    ask = "print(dgl.graphbolt.number, dgl.graphbolt.base.number, '__getattr__' in vars(dgl.graphbolt))"
    assert run_python(tmp_path, IMPORTS, "", ask) == "1 1 False\n"


@pytest.mark.parametrize(
    ("init", "graphbolt", "first", "error"),
    [
        ("", None, "import dglx_dist", "ModuleNotFoundError No module named 'dgl.graphbolt'"),
        (IMPORTS, "1 +", "import dglx_dist", "SyntaxError: "),
        ("from . import absent", FAILS, "import dglx_dist", "ImportError: cannot import name 'absent'"),
        (IMPORTS, FAILS, "", "FileNotFoundError: Cannot find"),
    ],
    ids=["a DGL without it", "a mistake in it", "another part of DGL", "DGL imported first"],
)
def test_other_errors_stay(tmp_path: Path, init: str, graphbolt: str | None, first: str, error: str) -> None:
    lines = run_python(tmp_path, init, graphbolt, "import dgl.graphbolt", first=first)
    assert error in lines
    assert "is empty" not in lines
