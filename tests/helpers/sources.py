"""The source files of the package and of its scripts, each read and parsed once for all tests."""

import ast
import functools
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "dglx_dist"


@dataclass(frozen=True)
class Source:
    name: str
    """Path inside the package, e.g. ``comm/topology.py``; of a script its path from the root."""
    text: str
    nodes: tuple[ast.AST, ...]
    """All nodes of its syntax tree."""


@functools.cache
def sources() -> list[Source]:
    texts = {str(path.relative_to(PACKAGE)): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
    return [source_of(name, text) for name, text in texts.items()]


@functools.cache
def scripts() -> list[Source]:
    paths = sorted((ROOT / "scripts").rglob("*.py"))
    return [source_of(str(path.relative_to(ROOT)), path.read_text()) for path in paths]


def source_of(name: str, text: str) -> Source:
    return Source(name, text, tuple(ast.walk(ast.parse(text, name))))
