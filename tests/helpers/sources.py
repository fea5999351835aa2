"""The package's source files, each read and parsed once for all tests that look at them."""

from __future__ import annotations

import ast
import functools
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "dglx_dist"


@dataclass(frozen=True)
class Source:
    """One file of the package."""

    name: str
    """Path inside the package, e.g. ``cluster/topology.py``."""
    text: str
    nodes: tuple[ast.AST, ...]
    """Of its syntax tree, all of them."""


@functools.cache
def sources() -> list[Source]:
    """Return every source file, by name."""
    texts = {str(path.relative_to(PACKAGE)): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
    return [source_of(name, text) for name, text in texts.items()]


def source_of(name: str, text: str) -> Source:
    """Return what a file of that name and text is."""
    return Source(name, text, tuple(ast.walk(ast.parse(text, name))))
