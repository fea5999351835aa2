"""How a layer of the user's own says which stage workers run in its place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, runtime_checkable

from dglx_dist.offload.stages.base import Config

Around: TypeAlias = Literal["sum", "mean", "left", "both"]
"""How rows of in-neighbours are summed: plainly, divided by the node's in-degree, by the sources'
out-degrees, or by the square roots of both, as ``norm`` of ``dgl.nn.GraphConv``. Degrees of 0 count as 1."""


@dataclass(frozen=True, kw_only=True)
class DeclaredStage:
    """One layer as a sum over in-edges, done by graph servers, and a stage, done by workers."""

    stage: str
    """Name in the registry of stages: see ``dglx_dist.offload.stages.registry.register_stage``."""
    config: Config
    """What the stage is made from; JSON values."""
    weights: tuple[str, ...]
    """Names of the module's parameters, in the order in which the stage declares its weights."""
    around: Around | None = "sum"
    """The stage's first input is this sum; None: the layer looks at no neighbour."""
    own: bool = False
    """Whether the node's own row is the stage's next input; without ``around`` it is the only one."""
    depends_on_the_graph: bool = False
    """Whether the module looks into the distributed graph, so that it cannot be compared with its stage on a
    few random rows."""
    takes_activation: bool = False
    """Whether a function of the model's behind the layer may be put into ``config`` as ``activation``."""


@runtime_checkable
class Declares(Protocol):
    """A module, called as ``layer(block, h)``, whose work is that of a stage."""

    def vertex_stage(self) -> DeclaredStage:
        """Return the stage; (num_dst, width) must come out of both, with the same gradients."""
        ...
