"""Puts the steps of a program together, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from torch import Tensor

from dglx_dist.errors import ConfigError
from dglx_dist.offload.fields import Json
from dglx_dist.offload.stages.registry import vertex_stage
from dglx_dist.offload.steps import FEATURES, FIXED, Edge, Gather, Scatter, Slot, Step, Vertex
from dglx_dist.strategies.bounded.edge_factors import EdgeFactor


@dataclass(frozen=True, kw_only=True)
class OpenHeads:
    """What an attention layer leaves for the next Vertex step to finish: see stage ``attention_finish``."""

    inputs: tuple[str, ...]
    """Slots of the sums, and of the residual where there is one."""
    config: Mapping[str, Json]
    bias: tuple[Tensor, ...]


@final
class StepsBuilder:
    """Steps so far, and where the rows of the layer before are.

    Args:
        names: id() of each parameter of the model to its name.
        features: Columns of x.
    """

    def __init__(self, names: Mapping[int, str], features: int) -> None:
        self.steps: list[Step] = []
        self.factors: dict[str, EdgeFactor] = {}
        self.open_heads: OpenHeads | None = None
        self._names, self._taken = names, set[str]()
        self._here = Slot(FEATURES, features)
        self._with_ghosts = {FEATURES}
        self._counts: dict[str, int] = {}

    def rows(self) -> Slot:
        """Return the slot that the layer before left; finishes attention first."""
        heads = self.open_heads
        if heads is not None:
            self.open_heads = None
            (width,) = vertex_stage("attention_finish", heads.config).output_widths
            self.vertex("attention_finish", heads.config, heads.inputs, width, heads.bias)
        return self._here

    def gather(self, factor: EdgeFactor) -> Slot:
        """Add the sum over in-edges of the rows of the layer before; return the slot of the sums."""
        source = self.rows()
        self.scatter(source.name)
        name = self._name("GA")
        output = Slot("a" + name[2:], source.width)
        self.steps.append(Gather(name=name, source=source.name, output=output, edges=self._edges(factor)))
        return output

    def vertex(
        self,
        stage: str,
        config: Mapping[str, Json],
        inputs: Sequence[str],
        width: int,
        weights: Sequence[Tensor],
    ) -> Slot:
        """Add a stage with one output, which the next layer reads."""
        name = self._name("AV")
        self._here = Slot("h" + name[2:], width)
        self._add_vertex(name, stage, config, inputs, (self._here,), weights)
        return self._here

    def attention(
        self,
        config: Mapping[str, Json],
        inputs: Sequence[str],
        slope: float,
        widths: Mapping[str, int],
        weights: Sequence[Tensor],
    ) -> str:
        """Add projection, attention and weighted sum; return the slot of the sums.

        Args:
            config: Of the stage ``attention_project``.
            inputs: Its inputs.
            slope: Of the leaky ReLU.
            widths: Of its outputs, in order: ``z``, ``el``, ``er``, and ``r`` where there is a residual.
            weights: Its weights.
        """
        name = self._name("AV")
        number = name[2:]
        slots = tuple(Slot(kind + number, width) for kind, width in widths.items())
        self._add_vertex(name, "attention_project", config, inputs, slots, weights)
        self.scatter(f"z{number}", f"el{number}")
        attention = Slot(f"att{number}", widths["el"])
        self.steps.append(
            Edge(
                name=self._name("AE"),
                stage="attention_edges",
                config={"heads": widths["el"], "slope": slope},
                sources=f"el{number}",
                targets=f"er{number}",
                output=attention,
            )
        )
        sums = Slot(f"s{number}", widths["z"])
        self.steps.append(
            Gather(name=self._name("GA"), source=f"z{number}", output=sums, edges=attention.name)
        )
        return sums.name

    def leave_open(self, inputs: Sequence[str], config: Mapping[str, Json], bias: Sequence[Tensor]) -> None:
        """Let the next Vertex step finish attention: see :class:`OpenHeads`."""
        self.open_heads = OpenHeads(inputs=tuple(inputs), config=config, bias=tuple(bias))

    def scatter(self, *slots: str) -> None:
        """Send boundary rows of those slots that have no ghosts yet."""
        new = tuple(slot for slot in slots if slot not in self._with_ghosts)
        if new:
            self._with_ghosts.update(new)
            self.steps.append(Scatter(name=self._name("SC"), slots=new))

    def _add_vertex(
        self,
        name: str,
        stage: str,
        config: Mapping[str, Json],
        inputs: Sequence[str],
        outputs: tuple[Slot, ...],
        weights: Sequence[Tensor],
    ) -> None:
        self.steps.append(
            Vertex(
                name=name,
                stage=stage,
                config=dict(config),
                inputs=tuple(inputs),
                outputs=outputs,
                weights=tuple(self._weight(weight) for weight in weights),
            )
        )

    def _weight(self, parameter: Tensor) -> str:
        name = self._names[id(parameter)]
        if name in self._taken:
            raise ConfigError(
                f"the parameter {name!r} belongs to two layers; workers hand in its gradient with one step "
                "only, so give each layer its own, or use strategy='data_parallel'"
            )
        self._taken.add(name)
        return name

    def _edges(self, factor: EdgeFactor) -> str | None:
        if factor.is_one:
            return None
        for name, known in self.factors.items():
            if known == factor:
                return name
        name = f"{FIXED}{len(self.factors)}"
        self.factors[name] = factor
        return name

    def _name(self, kind: str) -> str:
        self._counts[kind] = self._counts.get(kind, 0) + 1
        return f"{kind}{self._counts[kind]}"
