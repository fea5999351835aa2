"""Serverless training as in Dorylus: graph servers, stateless workers, parameter servers, one pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, final

from torch import Tensor, nn

from dglx_dist.comm.session import Session
from dglx_dist.errors import ConfigError
from dglx_dist.graph.shared_memory import warn_of_edges
from dglx_dist.strategies.base import Reduction, Strategy, Traits, WrappedModel
from dglx_dist.strategies.serverless import cost as costs
from dglx_dist.strategies.serverless.options import read_lambda_options

if TYPE_CHECKING:
    from dglx_dist.graph.dist_graph import DistGraph


_EDGE_BYTES = 80
"""Memory of a machine for each edge of its servers, measured with two layers; without that of workers."""


@final
class Lambda(Strategy):
    """Graph servers on all ranks; an executor runs the tensor work on stateless workers.

    Options: those of ``LambdaOptions``, and the executor's own. See docs/strategies/lambda.md.
    """

    traits = Traits(
        unit="full_graph",
        features="rows",
        summary="features of ghosts once; boundary rows and their gradients; rows and weights to workers",
        own_loop=False,
        on_gpus=False,
        complexity=50,
    )

    read_options = staticmethod(read_lambda_options)
    candidates = staticmethod(costs.candidates)
    cost = staticmethod(costs.cost)

    def __init__(self, session: Session, options: Mapping[str, object]) -> None:
        self._options = self.read_options(options)
        wanted, ranks = self._options.parameter_servers, session.topology.world_size
        if wanted > ranks:
            raise ConfigError(
                f"option parameter_servers={wanted}, but there are {ranks} ranks; give at most as many, or "
                "start more ranks"
            )

    def loader(self, g: DistGraph, indices: Tensor, sampler: Any, **loader_options: Any) -> Any:
        from dglx_dist.strategies.serverless.trainer import IntervalLoader

        warn_of_edges(g.session, g.edge_bounds, _EDGE_BYTES)
        return IntervalLoader(g, indices, sampler, loader_options)

    def wrap(self, model: nn.Module, g: DistGraph, reduction: Reduction = "mean") -> WrappedModel:
        from dglx_dist.strategies.serverless.trainer import LambdaModel

        if reduction != "mean":
            raise ConfigError(
                f"reduction={reduction!r}: strategy 'lambda' trains the mean loss over all training nodes; "
                "leave it out, and divide the learning rate instead"
            )
        return LambdaModel(model, g, self._options)

    @staticmethod
    def inspect(model: nn.Module, features: int) -> None:
        from dglx_dist.strategies.serverless.model_to_program import chain_of

        chain_of(model)
