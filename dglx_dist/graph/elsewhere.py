"""What a graph or tensor of one process has and a distributed one lacks: the error that says what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

GRAPH_REMEDY = (
    "its nodes and edges lie on the servers. What changes a graph goes before dx.distribute; batches come "
    "from a loader of dglx_dist.dataloading, and messages pass along their blocks, or on dx.local_graph(g)"
)
TENSOR_REMEDY = (
    "its rows lie on the servers. t[:] is all of them as one torch tensor and t[ids] are some; "
    "dx.node_split(mask) is this rank's share of a mask"
)


def lacking(what: str, remedy: str) -> Callable[[Any, str], NoReturn]:
    """Return a ``__getattr__`` that refuses every name: ``what`` has it not, and here is the ``remedy``."""

    def refuse(_: Any, name: str) -> NoReturn:
        # Python's own protocols ask for such names, and show no one the text.
        raise AttributeError(name if name.startswith("__") else f"{what} has no {name!r}: {remedy}")

    return refuse
