"""The planner and ``auto`` ask strategies: they name none of them, and none of their options."""

import ast
import re
from dataclasses import fields
from typing import get_args

from dglx_dist.planner.auto import AutoOptions
from dglx_dist.planner.choose import list_choosable
from dglx_dist.planner.config import PlanConfig
from dglx_dist.strategies.base import STRATEGIES
from dglx_dist.strategies.candidate import Unit
from dglx_dist.strategies.full_graph.options import COOPERATIVE, PRELOADING
from dglx_dist.strategies.push_pull.options import PushPullOptions
from dglx_dist.strategies.serverless.options import LambdaOptions
from tests.helpers.sources import Source, source_of, sources


def option_names() -> set[str]:
    """Names of strategies' options, but those that ``auto`` or ``dglx plan`` have too."""
    results = {*COOPERATIVE, *PRELOADING, *(name for names in list_choosable().values() for name in names)}
    results |= {field.name for options in (PushPullOptions, LambdaOptions) for field in fields(options)}
    return results - {field.name for options in (AutoOptions, PlanConfig) for field in fields(options)}


def find_strategy_names(source: Source) -> list[str]:
    """Return ``file:line`` of strings that have a strategy's name or are an option's, docstrings aside."""
    # "full_graph" is what a step trains on, too.
    strategies = re.compile("|".join(rf"\b{name}\b" for name in {*STRATEGIES.names()} - {*get_args(Unit)}))
    docstrings = {id(node.value) for node in source.nodes if isinstance(node, ast.Expr)}
    return [
        f"{source.name}:{node.lineno}"
        for node in source.nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings
        if strategies.search(node.value) or node.value in option_names()
    ]


def test_no_strategy_and_no_option_is_named() -> None:
    asking = [
        source for source in sources() if source.name.startswith("planner/") and "/costs/" not in source.name
    ]
    assert len(asking) > 5
    assert [place for source in asking for place in find_strategy_names(source)] == []


def test_a_name_would_be_seen() -> None:
    seen = source_of(
        "planner/x.py", '"""push_pull"""\nx = f"use push_pull, {y}"\nz = options["group_size"]\n'
    )
    assert find_strategy_names(seen) == ["planner/x.py:2", "planner/x.py:3"]
